"""The client: one object for each cluster that a program talks to, with everything else made from it.

    async with braid.connect("braid://127.0.0.1:6660") as client:
        async with client.producer("orders") as producer: …

A client has one link for each broker that it talks to (pool.py), and knows the owner of each segment (routing.py). Its
producers, consumers and `admin` share both. A lost link is no error by itself: code that needs a link asks again, and
the pool connects to any broker that it knows.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import ssl
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from braid.client.forks import forked_error, tell_of_forks
from braid.client.pool import Pool
from braid.client.retry import Backoff, retrying
from braid.client.routing import Routing
from braid.model.errors import BraidError, ClientClosed, InvalidArgument
from braid.model.names import TopicName
from braid.model.subscription import DEFAULT_START
from braid.ports.clock import Clock, SystemClock
from braid.ports.network import Network, SocketNetwork
from braid.wire.address import DEFAULT_URL, parse_url

if TYPE_CHECKING:  # modules that need Arrow are imported with the first producer or consumer
    from braid.client.admin import Admin
    from braid.client.consuming.checkpoint import CheckpointConsumer, Start
    from braid.client.consuming.consumer import Consumer
    from braid.client.consuming.queue import QueueConsumer
    from braid.client.consuming.stream import StreamConsumer
    from braid.client.producing.producer import Producer
    from braid.client.producing.repeatable_producer import RepeatableProducer

DEFAULT_TIMEOUT_S: Final = 30.0
CONNECT_TIMEOUT_S: Final = 5.0
"""How long one broker may take to answer HELLO before the client tries the next."""


def connect(
    url: str = DEFAULT_URL,
    *,
    token: str | Callable[[], str] = "",
    tls: bool | str | ssl.SSLContext | None = None,
    timeout: float = DEFAULT_TIMEOUT_S,
    name: str = "",
    network: Network | None = None,
    clock: Clock | None = None,
    random: random.Random | None = None,
) -> Client:
    """Make a client for the cluster at `url`. Use it as `async with connect(…) as client`, or call `close`.

    `url` is `braid://host:port`, or several brokers separated by commas; the client finds the others. `token` is a
    bearer token, or a function that returns a token for each connection. `tls=True` trusts the system's certificate
    authorities; a string is the path of a file of trusted authorities; an `SSLContext` is used as it is. `timeout` is
    how many seconds a call retries before it fails. Brokers log the client by its `name`. `network`, `clock` and
    `random` exist for simulations.
    """
    if network is None:
        network = SocketNetwork(client_tls=_tls_context(tls))
    elif tls:
        raise InvalidArgument("tls and network were both given; a network brings its own TLS")
    return Client(url, token, timeout, name, network, clock or SystemClock(), random or _fresh_random())


class Client:
    """Talks to one cluster; `connect` makes it. It belongs to one event loop, and to the process that made it.

    On exit from `async with`, the client flushes producers, stores acks and disconnects. Without it, the client
    connects when it is first used, and `close` ends it.
    """

    def __init__(
        self,
        url: str,
        token: str | Callable[[], str],
        timeout_s: float,
        name: str,
        network: Network,
        clock: Clock,
        random: random.Random,
    ) -> None:
        if not timeout_s > 0:
            raise InvalidArgument(f"timeout is {timeout_s}; it must be a positive number of seconds")
        self.timeout_s: Final = timeout_s
        self.name: Final = name or f"{socket.gethostname()}-{os.getpid()}"
        self.clock: Final = clock
        self.random: Final = random
        self.routing: Final = Routing(timeout_s)
        self.pool: Final = Pool(
            network,
            parse_url(url),
            client=self.name,
            token=token if callable(token) else lambda: token,
            connect_timeout_s=min(CONNECT_TIMEOUT_S, timeout_s),
            on_topology=self.routing.on_topology,
            shuffle=random,
        )
        self.routing.pool = self.pool
        self.closed = False
        self._closed_error = ClientClosed("the client is closed; connect again")
        self._producers: dict[Producer, None] = {}
        self._consumers: dict[Consumer | QueueConsumer, None] = {}
        tell_of_forks(self)

    @property
    def admin(self) -> Admin:
        """Manages topics, subscriptions and brokers, with the calls of the REST interface."""
        from braid.client.admin import Admin

        return Admin(self)

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
    ) -> Producer:
        """Make a producer for `topic`. Use it with `async with`. `ProducerOptions` explains the options."""
        from braid.client.producing.options import ProducerOptions
        from braid.client.producing.producer import Producer

        given: dict[str, Any] = {
            "linger_s": linger,
            "max_batch_bytes": max_batch_bytes,
            "max_batch_records": max_batch_records,
            "compression": compression,
            "max_in_flight_bytes": max_in_flight_bytes,
            "timeout_s": self.timeout_s if timeout is None else timeout,
        }
        options = ProducerOptions(**{option: value for option, value in given.items() if value is not None})
        self.check_open()
        producer = Producer(self, TopicName.parse(topic), options)
        self._producers[producer] = None
        return producer

    def repeatable_producer(
        self,
        topic: str,
        *,
        app: str,
        part: int,
        era: int,
        compression: str | None = None,
        timeout: float | None = None,
    ) -> RepeatableProducer:
        """Make a producer that is part number `part` of `app`. Use it with `async with`.

        Several producers may have the same identity: the rows of one `era` are stored once, however often they are
        written. Complete an era before the next one begins.
        """
        from braid.client.producing.options import ProducerOptions
        from braid.client.producing.repeatable_producer import RepeatableProducer

        options = ProducerOptions(compression=compression, timeout_s=self.timeout_s if timeout is None else timeout)
        self.check_open()
        repeatable = RepeatableProducer(self, TopicName.parse(topic), options, app=app, part=part, era=era)
        self._producers[repeatable.producer] = None
        return repeatable

    def stream_consumer(
        self,
        topic: str,
        subscription: str,
        *,
        name: str = "",
        start: str = DEFAULT_START,
        window_bytes: int | None = None,
    ) -> StreamConsumer:
        """Make a consumer of an ordered subscription. A new subscription begins at `start` (`earliest` or `latest`).

        `name` is unique in the subscription. At most `window_bytes` of each segment wait in memory for the application.
        """
        from braid.client.consuming.stream import StreamConsumer

        self.check_open()
        return StreamConsumer(
            self, TopicName.parse(topic), subscription, name=name, start=start, window_bytes=window_bytes
        )

    def queue_consumer(
        self, topic: str, subscription: str, *, name: str = "", prefetch: int | None = None
    ) -> QueueConsumer:
        """Make a consumer of a queue subscription, which `admin.create_subscription(kind="queue")` has made.

        At most `prefetch` messages (100 by default) are here and not answered. Operators see the consumer by its
        `name`.
        """
        from braid.client.consuming.queue import QueueConsumer

        self.check_open()
        return QueueConsumer(self, TopicName.parse(topic), subscription, name=name, prefetch=prefetch)

    def checkpoint_consumer(
        self,
        topic: str,
        *,
        start: Start = DEFAULT_START,
        group: str = "",
        name: str = "",
        window_bytes: int | None = None,
    ) -> CheckpointConsumer:
        """Make a consumer whose positions the caller keeps.

        `start` is `earliest`, `latest`, a saved checkpoint, the checkpoints of all consumers of a group, a time with
        its zone, or the next offset of each segment that is to be read. At a time, the consumer begins with the batch
        that holds the first record of that time or later. The consumers of a `group` share the segments of the topic;
        `name` is unique in the group.
        """
        from braid.client.consuming.checkpoint import CheckpointConsumer
        from braid.client.consuming.checkpoint_group import GroupCheckpointConsumer

        self.check_open()
        parsed = TopicName.parse(topic)
        if group:
            return GroupCheckpointConsumer(self, parsed, group, name=name, start=start, window_bytes=window_bytes)
        if name:
            raise InvalidArgument(f"name is {name!r}, but a checkpoint consumer has a name only in a group")
        return CheckpointConsumer(self, parsed, start=start, window_bytes=window_bytes)

    async def open(self) -> None:
        """Connect to one of the brokers. `async with` calls this; without it, the first use connects."""
        self.check_open()
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        await retrying(self.pool.any, deadline, self.backoff())

    async def close(self) -> None:
        """Flush and close the producers, store the acks of the consumers and close them, then disconnect. Closing twice
        is fine."""
        await self._close(wait=True)

    async def abandon(self) -> None:
        """Close without waiting. Unconfirmed records may be stored or not."""
        await self._close(wait=False)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close(wait=error is None)

    def backoff(self) -> Backoff:
        return Backoff(self.random)

    def add_consumer(self, consumer: Consumer | QueueConsumer) -> None:
        """Remember a consumer that has begun to receive."""
        self.check_open()
        self._consumers[consumer] = None

    def forget_consumer(self, consumer: Consumer | QueueConsumer) -> None:
        """Forget a closed consumer."""
        self._consumers.pop(consumer, None)

    def forget_producer(self, producer: Producer) -> None:
        """Forget a closed producer."""
        self._producers.pop(producer, None)

    def on_fork(self) -> None:
        self.closed = True
        self._closed_error = forked_error()
        self.pool.on_fork(self._closed_error)
        for producer in self._producers:
            producer.on_fork()
        for consumer in self._consumers:
            consumer.on_fork(self._closed_error)

    def check_open(self) -> None:
        """Raise if the client is closed, or belongs to the parent of this process."""
        if self.closed:
            raise self._closed_error.again()

    async def _close(self, *, wait: bool) -> None:
        if self.closed:
            return
        self.closed = True
        failure: BraidError | None = None
        try:
            for each in self._everyone() if wait else ():
                try:
                    await each.close()
                except BraidError as error:  # The others are closed nevertheless.
                    failure = failure or error
        finally:
            for each in self._everyone():
                await each.end()
            await self.routing.close()
            await self.pool.close(ClientClosed("the client is closed"))
        if failure is not None:
            raise failure

    def _everyone(self) -> list[Producer | Consumer | QueueConsumer]:
        """Return the producers and consumers that are not closed."""
        return [*self._producers, *self._consumers]


def _tls_context(tls: bool | str | ssl.SSLContext | None) -> ssl.SSLContext | None:
    if isinstance(tls, ssl.SSLContext):
        return tls
    if isinstance(tls, str):
        try:
            return ssl.create_default_context(cafile=tls)
        except (OSError, ssl.SSLError) as error:
            raise InvalidArgument(
                f"tls={tls!r} must be the path of a PEM file of authorities to trust: {error}"
            ) from error
    return ssl.create_default_context() if tls else None


def _fresh_random() -> random.Random:
    return random.Random(int.from_bytes(os.urandom(16), "little"))
