"""A producer whose work may be repeated by any process, anywhere, at the same time, and is stored once.

The caller gives the producer its identity (`app`, `part`, `era`), from which its id is derived, and *blocks*: tables of
rows. A producer with the same identity and the same blocks sends the same batches under the same numbers, and the logs
recognise the batches that they have (batch/identity.py, log/producers.py). So nothing here may depend on time,
on the network or on chance:

    block ─┬─► the segment of each row: by its key's hash; rows without a key all to one, the next one for each block
           └─► one batch for each segment that gets rows, numbered from 0 in the era, in the order of the blocks

All attempts must find the same layout: after a split, the same rows would go to logs that do not know them.

**A repeat that is not the same.** By its number alone, a different row would pass for the old row, and be lost. So
the producer compares a batch that the log has already with the stored batch, if the log still knows its offset. It
compares the part of the header that producers write, which holds the checksum of the rows, and raises `RepeatDiffers`
if the two are not equal.

A later repeat fails before it stores anything in that segment after the difference. When attempts run at the same
time, a few more batches may be in flight by then. A segment is *fresh* when the last batch sent to it was new to its
log. Blocks for fresh segments follow each other without waiting. If a segment is not fresh, as at the start, the next
block waits until this block is confirmed and compared. These comparisons are enough. A log remembers the last 8 batches
of a producer. An attempt that stores a new batch has just sent the batch before it, which was then the last of this
producer in the log, so its offset was known. So between the batches of one attempt and the batches that another adds
after them, there is always a batch that both sent and that was compared.

The comparison covers the content, not the time: rows without a timestamp get the time of the batch, which is only in
the header, and the first time counts.

**A repeat that comes too late.** At the end of a repeat, the last batch of each segment is new, or the log remembers
its offset. Otherwise a later era has begun (`Written.past`), or the first attempt had more rows, so the two differ.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import pyarrow as pa

from braid.client.consuming.segment_range import read_segment_range
from braid.client.producing.open_batch import UNKNOWN_OFFSET, ProducerBatch
from braid.client.producing.options import ProducerOptions
from braid.client.producing.producer import Producer
from braid.client.producing.records import check_times
from braid.client.producing.segment_writer import SegmentWriter
from braid.model.batch.header import BatchHeader
from braid.model.batch.identity import ProducerIdentity, derived_id
from braid.model.errors import BrokenInvariant, OffsetOutOfRange, OutOfSequence, PermissionDenied, RepeatDiffers
from braid.model.hashing import key_hashes
from braid.model.names import TopicName

if TYPE_CHECKING:
    from braid.client.client import Client


class Written(msgspec.Struct, frozen=True):
    records: int
    duplicates: int
    """How many of them had been stored before."""
    past: bool
    """Whether a later era began so long ago that nothing could be compared: see the top of this module."""


class _Given(NamedTuple):
    batch: ProducerBatch
    timed: bool
    """Whether its rows have their own timestamps."""


class RepeatableProducer:
    """Writes blocks of rows once, however often they are given; `Client.repeatable_producer` makes it.

    One task at a time may give blocks.
    """

    def __init__(
        self, client: Client, topic: TopicName, options: ProducerOptions, *, app: str, part: int, era: int
    ) -> None:
        def identify(topic_id: int) -> ProducerIdentity:
            return ProducerIdentity(derived_id(app, topic_id, part), era)

        self.topic: Final = topic
        self.producer: Final = Producer(client, topic, options, identify)
        self._client = client
        self._era = era
        self._blocks = 0
        self._given: deque[_Given] = deque()
        self._fresh: set[int] = set()
        """Segments whose last batch was new to their log."""
        self._past: set[int] = set()
        """Segments in which a later era has begun."""
        self._outrun: set[int] = set()
        """Segments whose last batch is stored, far before the last batch of the era."""
        self._records = 0
        self._duplicates = 0

    async def add(self, block: Any) -> None:
        """Write an Arrow table of at least one row (columns value, and if wanted key, timestamp, headers).

        The rows become one batch in each segment that gets some. `add` waits for room, and for comparisons as the top
        of this module says.
        """
        check_times(block)
        await self.producer.open()
        timed = "timestamp" in block.column_names
        for writer, rows in self._routed(block):
            try:
                batch = writer.add_table(rows, rows.num_rows, rows.nbytes)
            except OutOfSequence as error:  # an earlier block failed
                raise self._out_of_sequence(error) from error
            self._given.append(_Given(batch, timed))
        self._blocks += 1
        await self.producer.pace()
        if any(given.batch.segment not in self._fresh for given in self._given):
            await self._review_all()
        while self._given and self._given[0].batch.done:
            await self._review(self._given.popleft())

    async def finish(self) -> Written:
        """Wait until all blocks are stored."""
        await self._review_all()
        if self._outrun:
            raise RepeatDiffers(
                f"all rows for segment {min(self._outrun)} of {self.topic} were written as era {self._era} before, and "
                f"many more after them: the first try had more rows"
            )
        return Written(self._records, self._duplicates, bool(self._past))

    async def __aenter__(self) -> Self:
        await self.producer.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.producer.end()

    def _routed(self, block: Any) -> Iterator[tuple[SegmentWriter, Any]]:
        writers = self.producer.partitioner.writers
        identity = self.producer.identity
        assert identity is not None
        turn = (identity.id + self._blocks) % len(writers)
        if "key" not in block.column_names or len(writers) == 1:
            yield writers[turn], block
            return
        keys = block.column("key").cast(pa.binary())
        places = self.producer.partitioner.writer_numbers(key_hashes(keys.fill_null(b"").to_pylist()))
        if keys.null_count:
            places[keys.is_null().to_numpy()] = turn
        order = np.argsort(places, kind="stable")
        ordered = block.take(pa.array(order))
        ends = np.searchsorted(places[order], np.arange(len(writers)), "right")
        start = 0
        for writer, end in zip(writers, ends.tolist()):
            if end > start:
                yield writer, ordered.slice(start, end - start)
            start = end

    async def _review_all(self) -> None:
        while self._given:
            await self._review(self._given.popleft())

    async def _review(self, given: _Given) -> None:
        """Wait for the outcome of a batch, and compare it if the log had it already."""
        batch = given.batch
        await batch.settled()
        try:
            batch.raise_error()
        except OutOfSequence as error:
            raise self._out_of_sequence(error) from error
        self._records += batch.count
        segment = batch.segment
        self._outrun.discard(segment)
        if not batch.duplicate:
            self._fresh.add(segment)
            return
        self._duplicates += batch.count
        self._fresh.discard(segment)
        if batch.base_offset == UNKNOWN_OFFSET:
            (self._past if batch.past_era else self._outrun).add(segment)
        else:
            await self._compare(given)

    def _out_of_sequence(self, error: OutOfSequence) -> RepeatDiffers:
        return RepeatDiffers(
            f"the rows for {self.topic.path} neither continue nor repeat what was written as era {self._era} before: "
            f"the first try had another number of rows, or of another size, or the writer was forgotten ({error})"
        )

    async def _compare(self, given: _Given) -> None:
        batch = given.batch
        sent = batch.sent_header
        assert sent is not None
        stored = await self._stored_header(batch)
        if stored is None or _content(stored, timed=given.timed) == _content(sent, timed=given.timed):
            return
        if (stored.producer_id, stored.first_sequence) != (sent.producer_id, sent.first_sequence):
            raise BrokenInvariant(
                f"I10: the log of segment {batch.segment} of {self.topic.path} says that a batch of producer "
                f"{sent.producer_id:#x} stands at offset {batch.base_offset}, but it is one of {stored.producer_id:#x}"
            )
        raise RepeatDiffers(
            f"{batch.count} rows for segment {batch.segment} of {self.topic.path} are not those that the first try of "
            f"era {self._era} has stored at offsets {batch.base_offset} to {batch.base_offset + batch.count - 1}, or "
            f"they come in another order"
        )

    async def _stored_header(self, batch: ProducerBatch) -> BatchHeader | None:
        """Read the header that is stored at the offset of this batch. None if the log no longer has it."""
        first = batch.base_offset
        reading = read_segment_range(
            self._client, self.topic.path, self.producer.topic_id, batch.segment, first, first + batch.count
        )
        try:
            async with contextlib.aclosing(reading):
                async for received in reading:
                    return received.batch_headers()[0]
        except OffsetOutOfRange:
            pass
        except PermissionDenied as error:
            raise PermissionDenied(
                f"{self.topic.path} has these rows already, and they cannot be compared with what is stored: {error}; "
                f"a program that repeats a write must be allowed to consume the topic, too"
            ) from error
        return None


def _content(header: BatchHeader, *, timed: bool) -> tuple[int, ...]:
    """Return the fields of the header that the producer set."""
    content = (
        header.producer_id,
        header.first_sequence,
        header.count,
        header.schema_id,
        header.codec,
        header.body_length,
        header.raw_length,
        header.body_crc,
        header.min_key_hash,
        header.max_key_hash,
    )
    return (*content, header.min_timestamp, header.max_timestamp) if timed else content
