"""Dead letters: messages of a queue that were delivered as often as is allowed.

A consumer that is handed such a message publishes it to the dead-letter topic, and settles it when that is confirmed. A
crash in between repeats the publish. So it has an identity that is derived from the place of the message
(`publish_once`), and is stored once. A redrive publishes dead letters again by the same means (client/redrive.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from braid.client.consuming.delivery import ReceivedBatch
from braid.model.errors import BraidError, RepeatDiffers
from braid.model.message import QueueMessage
from braid.model.queue.events import MAX_REASON_CHARS
from braid.ports.tasks import cancel
from braid.wire.operations import QueueRun

if TYPE_CHECKING:
    from braid.client.client import Client

PREFIX: Final = "braid-dead-letter-"
"""Headers of dead letters begin with it."""
UNREADABLE: Final = "a batch that cannot be decoded: "
"""The reason of a dead letter that holds the bytes of a batch begins with it."""

_log: Final = logging.getLogger(__name__)

OnBuried = Callable[[range, bool], None]
"""Called with offsets, and whether they are in the dead-letter topic now. Otherwise they are to be tried again."""


class DeadLetters:
    """Owns the dead letters of one consumer that are being published."""

    def __init__(self, client: Client, topic: str, subscription: str) -> None:
        self._client = client
        self._topic = topic
        self._subscription = subscription
        self._tasks: dict[tuple[int, int], asyncio.Task[None]] = {}
        """By segment and first offset."""
        self._answers: dict[tuple[int, int], tuple[range, OnBuried]] = {}
        """By the same: what is answered when the dead letter is published. A publish may take longer than the lease.
        The message comes again then, and its last lease is the one that counts."""

    def __bool__(self) -> bool:
        """Whether any is being published."""
        return bool(self._tasks)

    def bury(self, message: QueueMessage, to: str, on_buried: OnBuried) -> None:
        """Publish a message to the topic `to`."""
        origin = self._origin(message.segment, message.offset, message.redelivery_count, message.failure)
        row = one_row(message.key, message.value, [*message.headers.items(), *origin], message.timestamp_us)
        offsets = range(message.offset, message.offset + 1)
        self._begin(message.segment, message.placement, offsets, to, row, on_buried)

    def bury_bytes(
        self, batch: ReceivedBatch, run: QueueRun, placement: int, reason: str, to: str, on_buried: OnBuried
    ) -> None:
        """Publish messages of a batch that cannot be decoded: the whole batch, as the bytes that it is."""
        origin = self._origin(batch.segment, run.start, run.deliveries, f"{UNREADABLE}{reason}"[:MAX_REASON_CHARS])
        stored = b"".join(bytes(data) for _, data in batch.batches())
        row = one_row(None, stored, origin, self._client.clock.now_us())
        self._begin(batch.segment, placement, range(run.start, run.end), to, row, on_buried)

    async def end(self) -> None:
        """Give up what is under way; another consumer gets these messages."""
        await cancel([*self._tasks.values()])

    def _origin(self, segment: int, offset: int, deliveries: int, reason: str) -> list[tuple[str, bytes]]:
        origin = {
            "topic": self._topic,
            "subscription": self._subscription,
            "segment": str(segment),
            "offset": str(offset),
            "deliveries": str(deliveries),
            "reason": reason,
        }
        return [(f"{PREFIX}{name}", value.encode()) for name, value in origin.items()]

    def _begin(self, segment: int, placement: int, offsets: range, to: str, row: pa.Table, on_buried: OnBuried) -> None:
        key = (segment, offsets.start)
        self._answers[key] = (offsets, on_buried)
        if key not in self._tasks:
            work = self._publish(key, placement, to, row)
            self._tasks[key] = asyncio.get_running_loop().create_task(work, name=f"dead letter {key}")

    async def _publish(self, key: tuple[int, int], placement: int, to: str, row: pa.Table) -> None:
        (segment, offset), buried = key, True
        app = f"dead letter {self._topic} {self._subscription} {segment} {placement} {offset}"
        try:
            await publish_once(self._client, to, app, row)
        except RepeatDiffers:
            pass  # It is stored under this identity: another consumer knew of fewer deliveries, or of another reason.
        except BraidError as error:
            _log.warning(
                "message %d of segment %d of %s could not be moved to %s: %s",
                offset, segment, self._topic, to, error,
            )  # fmt: skip
            buried = False
        finally:
            self._tasks.pop(key, None)
            offsets, on_buried = self._answers.pop(key)
        on_buried(offsets, buried)


async def publish_once(client: Client, topic: str, app: str, row: pa.Table) -> None:
    """Publish a row under an identity that is derived from `app`: however often this is repeated, it is stored once,
    as long as the log remembers the identity."""
    writer = client.repeatable_producer(topic, app=app, part=0, era=0)
    try:
        async with writer:
            await writer.add(row)
            await writer.finish()
    finally:
        await writer.producer.end()  # Also if this was cancelled while the writer was being opened.


def one_row(
    key: bytes | None, value: bytes, headers: Iterable[tuple[str, bytes]], timestamp_us: int | None = None
) -> pa.Table:
    """Return a message as a table. Without a time of its own, it gets that of its publish."""
    columns: dict[str, Any] = {
        "key": pa.array([key], pa.binary()),
        "value": pa.array([value], pa.binary()),
        "headers": pa.array([list(dict(headers).items())], pa.map_(pa.string(), pa.binary())),
    }
    if timestamp_us is not None:
        columns["timestamp"] = pa.array([timestamp_us], pa.timestamp("us", tz="UTC"))
    return pa.table(columns)


def without_origin(headers: Iterable[tuple[str, bytes]], left_out: Collection[str]) -> list[tuple[str, bytes]]:
    """Return the headers that a dead letter had as a message, but for those that are left out."""
    return [(name, value) for name, value in headers if not name.startswith(PREFIX) and name not in left_out]
