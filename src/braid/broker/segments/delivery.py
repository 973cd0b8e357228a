"""A channel: one segment's batches on their way to one consumer.

The consumer grants credit in bytes, and the channel never sends beyond it. If the next batch alone is larger than all
credit, the channel says how much it needs (NEED) and waits. It also waits while the connection cannot take more. So a
consumer that stops reading costs no more than the credit that it granted, and nobody else notices (I12).

At the live tail no task is involved: when the log's watermark rises, the batches are taken from the hot cache and sent
in the same call. A channel that lags has one task, which reads files and chunks until the channel has caught up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from braid.broker.error_mapping import to_client, to_reader
from braid.broker.metrics import TopicMetrics
from braid.broker.unsent_bytes import UnsentBytes
from braid.model.errors import BraidError, BrokenInvariant, DiskError
from braid.model.ids import Offset
from braid.model.subscription import is_group
from braid.storage.reader import LogReader, StoredBatch
from braid.storage.segment import SegmentStorage
from braid.wire.connection import Connection
from braid.wire.operations import END_OF_SEGMENT, Closed, Delivery, Kind, Need, encode

MAX_CREDIT: Final = 1 << 31
"""No consumer needs more; a larger grant is a mistake."""

_log: Final = logging.getLogger(__name__)


class ReadAhead:
    """The memory that all channels of a broker may use for pieces that they read before they can send them."""

    def __init__(self, max_bytes: int) -> None:
        self.left = max_bytes

    def take(self, size: int) -> bool:
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        self.left += size


class DeliveryChannel:
    def __init__(
        self,
        number: int,
        connection: Connection,
        storage: SegmentStorage,
        offset: Offset,
        credit: int,
        *,
        subscription: str | None,
        read_bytes: int,
        read_ahead: ReadAhead,
        unsent_bytes: UnsentBytes,
        metrics: TopicMetrics,
        on_end: Callable[[DeliveryChannel], None],
    ) -> None:
        self.number: Final = number
        self.subscription: Final = subscription
        """Or the key of a group. None for a consumer that keeps its positions itself and belongs to no group."""
        self.takes_acks: Final = subscription is not None and not is_group(subscription)
        self.offset = offset
        """The next offset to send."""
        self.delivered_bytes = 0
        self.ended = False
        self.finished = False
        """All of a sealed segment is sent. A subscription's channel stays open for acks until it is ended."""
        self._connection = connection
        self._storage = storage
        self._credit = credit
        self._needed = 0
        """The size of a batch that needs more credit than there is."""
        self._held_back = 0
        """The size of a batch that is too large to be sent while clients leave much unread."""
        self._blocked_at = -1
        """A watermark above this channel's offset, with no whole batch between the two."""
        self._read_bytes = read_bytes
        self._read_ahead = read_ahead
        self._unsent_bytes = unsent_bytes
        self._metrics = metrics
        self._on_end = on_end
        self._reading: asyncio.Task[None] | None = None

    def grant(self, credit: int) -> None:
        self._credit = min(self._credit + credit, MAX_CREDIT)
        self.pump()

    def deliver(self) -> None:
        """Send what can be sent after a rise of the watermark, and write it to the connection immediately."""
        self._connection.cork()
        try:
            self.pump()
        finally:
            self._connection.flush()

    def pump(self) -> None:
        """Send what can be sent now. Called whenever a reason to wait may have gone."""
        if self._reading is not None or self.finished:
            return
        log = self._storage.log
        while not self.ended and self._may_send():
            end = log.confirmed.value
            if self.offset >= end:
                if log.seal_is_durable and self.offset >= log.end:
                    self._finish()
                elif (error := log.ended) is not None:
                    self.fail(error)
                return
            if end == self._blocked_at:
                return
            cached = self._storage.sources.cache.get(log.number, self.offset, self._allowed_bytes(), end)
            if not cached:
                self._reading = asyncio.get_running_loop().create_task(self._catch_up())
                return
            self._send([StoredBatch(header, data) for header, data in cached])

    def _finish(self) -> None:
        message = f"the segment ends at offset {self.offset}"
        if not self.takes_acks:
            self.close(END_OF_SEGMENT, message, retriable=False)
        else:
            self.finished = True
            self._connection.send(Kind.CLOSED, encode(Closed(self.number, END_OF_SEGMENT, message, retriable=False)))

    def close(self, code: str, message: str, *, retriable: bool) -> None:
        """End the channel and tell the consumer why."""
        if not self.ended:
            self._connection.send(Kind.CLOSED, encode(Closed(self.number, code, message, retriable)))
            self.drop()

    def fail(self, error: BraidError) -> None:
        error = to_client(error)
        self.close(error.code, str(error), retriable=error.retriable)

    def drop(self) -> None:
        """End the channel without a word: the consumer closed it, or is gone."""
        if not self.ended:
            self.ended = True
            if self._reading is not None:
                self._reading.cancel()
            self._on_end(self)

    def _may_send(self) -> bool:
        return (
            self._credit > 0
            and self._credit >= self._needed
            and not self._connection.congested
            and self._held_back <= self._unsent_bytes.share
        )

    def _allowed_bytes(self) -> int:
        return min(self._credit, self._read_bytes, self._unsent_bytes.share)

    def _send(self, batches: Sequence[StoredBatch]) -> None:
        """Send as many of these batches, which begin at this channel's offset, as credit and unsent bytes allow."""
        if self.ended:
            return
        allowed = min(self._credit, self._unsent_bytes.share)
        size = records = count = 0
        payload = []
        for header, data in batches:
            if size + len(data) > allowed:
                break
            size += len(data)
            payload.append(data)
            records += header.next_offset - max(header.base_offset, self.offset)
            count += 1
            self.offset = header.next_offset
        if not payload:
            self._wait_for(len(batches[0].data))
            return
        self._needed = self._held_back = 0
        self._credit -= size
        end = self._storage.log.confirmed.value
        self._connection.send(Kind.DELIVER, encode(Delivery(self.number, end)), payload)
        self._metrics.delivered_batches += count
        self._metrics.delivered_records += records
        self._metrics.delivered_bytes += size
        self.delivered_bytes += size

    def _wait_for(self, size: int) -> None:
        """Send nothing before a batch of this size may be sent."""
        if size > self._credit:
            self._needed = size
            self._connection.send(Kind.NEED, encode(Need(self.number, size)))
        else:
            self._held_back = size
            self._unsent_bytes.call_when_room(size, self.pump)

    async def _catch_up(self) -> None:
        """Read and send until this channel has caught up with the cache, or has to wait. While one piece is sent, the
        next one is read, if the broker has memory for it."""
        storage = self._storage
        reader = storage.reader(self.offset)
        ahead: asyncio.Task[list[StoredBatch]] | None = None
        try:
            while not self.ended and self._may_send():
                end = storage.log.confirmed.value
                if ahead is None:
                    reader.offset = self.offset
                    batches = await reader.read_available(self._allowed_bytes())
                else:
                    batches = await ahead
                    self._end_ahead(ahead)
                    ahead = None
                if not batches:
                    self._blocked_at = end
                    break
                ahead = self._begin_ahead(reader, sum(len(batch.data) for batch in batches))
                self._send(batches)
                if self.offset != batches[-1].header.next_offset:
                    break  # It may not send all of them: what is read ahead does not come next.
                self._connection.flush()
                if self._connection.congested:
                    await self._connection.drained()
        except BraidError as error:
            if isinstance(error, DiskError):
                _log.error("offset %d of %s could not be read: %s", self.offset, storage.log.folder, error)
            self.fail(to_reader(error))
        except Exception as error:
            _log.exception("a channel broke")
            self.fail(BrokenInvariant(f"reading at offset {self.offset} broke: {error!r}"))
        finally:
            if ahead is not None:
                self._end_ahead(ahead)
            self._reading = None
        self.pump()

    def _begin_ahead(self, reader: LogReader, sending: int) -> asyncio.Task[list[StoredBatch]] | None:
        """Begin to read what comes after the bytes that are being sent (`sending`)."""
        allowed = min(self._credit - sending, self._read_bytes)
        if allowed < self._read_bytes or not self._read_ahead.take(allowed):
            return None
        return asyncio.get_running_loop().create_task(reader.read_available(allowed))

    def _end_ahead(self, ahead: asyncio.Task[list[StoredBatch]]) -> None:
        self._read_ahead.give(self._read_bytes)
        if not ahead.done():
            ahead.cancel()
        elif not ahead.cancelled():
            ahead.exception()  # The next read at this place will meet the error again.
