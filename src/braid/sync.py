"""The blocking client: the same as `braid.connect`, without `await`.

    with braid.sync.connect("braid://127.0.0.1:6660") as client:
        with client.stream_consumer("orders", subscription="billing", start="earliest") as consumer:
            for message in consumer:
                consumer.ack(message)

The asyncio client runs on its own event loop in a background thread. So the blocking client works everywhere, also in a
notebook, where a loop already runs in the main thread. Ctrl-C ends any call that waits. Results and errors are the
asyncio client's own objects.

A change of threads costs tens of microseconds, so it happens per delivery and per group of records, not per record. A
consumer fetches whole deliveries and hands out their messages in the caller's thread. Acks leave marks that the loop
collects. Submitted records gather until the loop takes all of them.

A client may be used by several threads. A consumer belongs to one thread at a time.

Without `with`, everything opens when it is first used, and the client's `close` ends all of it. A client that is still
open when the program ends is cut off: it does not wait for unconfirmed records and reports no error.

A client belongs to the process that opened it. In a forked child it raises `ClientClosed`: connect again in the child.
"""

from __future__ import annotations

import functools
import ssl
import threading
import weakref
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from braid.client import client as asynchronous
from braid.client.blocking.loop_thread import LoopThread
from braid.client.client import DEFAULT_TIMEOUT_S
from braid.model.errors import ClientClosed
from braid.model.subscription import DEFAULT_START
from braid.wire.address import DEFAULT_URL

if TYPE_CHECKING:  # modules that need Arrow are imported with the first producer or consumer
    from braid.client.blocking.consumer import BlockingCheckpointConsumer as BlockingCheckpointConsumer
    from braid.client.blocking.consumer import BlockingStreamConsumer as BlockingStreamConsumer
    from braid.client.blocking.producer import BlockingProducer as BlockingProducer
    from braid.client.blocking.producer import BlockingReceipt as BlockingReceipt
    from braid.client.blocking.queue import BlockingQueueConsumer as BlockingQueueConsumer
    from braid.client.consuming.checkpoint import Start

__all__ = [
    "Admin",
    "BlockingCheckpointConsumer",
    "BlockingProducer",
    "BlockingQueueConsumer",
    "BlockingReceipt",
    "BlockingStreamConsumer",
    "Client",
    "connect",
]

_HOMES = {
    "BlockingCheckpointConsumer": "braid.client.blocking.consumer",
    "BlockingProducer": "braid.client.blocking.producer",
    "BlockingReceipt": "braid.client.blocking.producer",
    "BlockingQueueConsumer": "braid.client.blocking.queue",
    "BlockingStreamConsumer": "braid.client.blocking.consumer",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'braid.sync' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def connect(
    url: str = DEFAULT_URL,
    *,
    token: str | Callable[[], str] = "",
    tls: bool | str | ssl.SSLContext | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    name: str = "",
) -> Client:
    """Make a blocking client for the cluster at `url`. Use it as `with connect(…) as client`, or call `close`. The
    arguments are those of `braid.connect`."""
    return Client(lambda: asynchronous.connect(url, token=token, tls=tls, timeout=timeout, name=name))


class Client:
    """The blocking client of one cluster; `connect` makes it."""

    def __init__(self, make: Callable[[], asynchronous.Client]) -> None:
        self._make = make
        self._opening = threading.Lock()
        self._closed = False
        self._thread: LoopThread | None = None
        self._client: asynchronous.Client | None = None
        self._producers: weakref.WeakSet[BlockingProducer] = weakref.WeakSet()
        self._stream_consumers: weakref.WeakSet[BlockingStreamConsumer] = weakref.WeakSet()

    @property
    def admin(self) -> Admin:
        """Manages topics, subscriptions and brokers: the methods of the asyncio client's `admin`, blocking."""
        thread, client = self._open()
        return Admin(thread, client)

    def producer(
        self,
        topic: str,
        *,
        linger: float = 0.0,
        max_batch_bytes: int | None = None,
        max_batch_records: int | None = None,
        compression: str | None = None,
        max_in_flight_bytes: int | None = None,
        timeout: float | None = None,
    ) -> BlockingProducer:
        from braid.client.blocking.producer import BlockingProducer

        thread, client = self._open()
        producer = client.producer(
            topic,
            linger=linger,
            max_batch_bytes=max_batch_bytes,
            max_batch_records=max_batch_records,
            compression=compression,
            max_in_flight_bytes=max_in_flight_bytes,
            timeout=timeout,
        )
        blocking = BlockingProducer(thread, producer)
        self._producers.add(blocking)
        return blocking

    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str = "",
        start: str = DEFAULT_START,
        window_bytes: int | None = None,
    ) -> BlockingStreamConsumer:
        from braid.client.blocking.consumer import BlockingStreamConsumer

        thread, client = self._open()
        consumer = BlockingStreamConsumer(
            thread, client.stream_consumer(topic, subscription, name=name, start=start, window_bytes=window_bytes)
        )
        self._stream_consumers.add(consumer)
        return consumer

    def queue_consumer(
        self, topic: str, subscription: str, *, name: str = "", prefetch: int | None = None
    ) -> BlockingQueueConsumer:
        from braid.client.blocking.queue import BlockingQueueConsumer

        thread, client = self._open()
        return BlockingQueueConsumer(thread, client.queue_consumer(topic, subscription, name=name, prefetch=prefetch))

    def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Start = DEFAULT_START,
        group: str = "",
        name: str = "",
        window_bytes: int | None = None,
    ) -> BlockingCheckpointConsumer:
        from braid.client.blocking.consumer import BlockingCheckpointConsumer

        thread, client = self._open()
        return BlockingCheckpointConsumer(
            thread, client.checkpoint_consumer(topic, start=start, group=group, name=name, window_bytes=window_bytes)
        )

    def open(self) -> None:
        """Connect to one of the brokers; `with` and the first use call this."""
        if self._thread is not None:
            self._thread.check_running()  # Before the lock: in a forked child, nobody may be left to release it.
        with self._opening:
            if self._closed:
                raise ClientClosed("the client is closed; connect again")
            if self._thread is not None:
                return
            thread = LoopThread()
            try:

                async def connected() -> asynchronous.Client:
                    client = self._make()
                    await client.open()
                    return client

                self._client = thread.call(connected())
                self._thread = thread
            finally:
                if self._thread is None:
                    thread.stop()

    def close(self) -> None:
        """Flush producers, store acks and disconnect. Closing twice is fine."""
        self._close(None, None, None)

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(kind, error, trace)

    def _close(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        client, thread = self._client, self._thread
        if client is None or thread is None or thread.forked:
            return

        async def close() -> None:
            if error is None:
                for producer in list(self._producers):
                    await producer.hand_over()
            for consumer in list(self._stream_consumers):
                consumer.collect_marks()
            await client.__aexit__(kind, error, trace)

        try:
            if not client.closed:
                thread.call(close())
        finally:
            thread.stop()

    def _open(self) -> tuple[LoopThread, asynchronous.Client]:
        self.open()
        assert self._thread is not None
        assert self._client is not None
        return self._thread, self._client


class Admin:
    """Each method of the asyncio client's `admin`, blocking, under the same name."""

    def __init__(self, thread: LoopThread, client: asynchronous.Client) -> None:
        self._thread = thread
        self._admin = client.admin

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._admin, name)

        @functools.wraps(method)
        def blocking(*arguments: Any, **named: Any) -> Any:
            return self._thread.call(method(*arguments, **named))

        return blocking

    def __dir__(self) -> list[str]:
        return [name for name in dir(self._admin) if not name.startswith("_")]
