"""A producer whose work may be repeated by any process, anywhere, at the same time, and is stored once.

The caller gives the producer its identity (`app`, `part`, `era`), from which its id is derived, and *blocks*: tables of
rows. A producer with the same identity and the same blocks sends the same batches under the same numbers, and the logs
recognise the batches that they have (batch/identity.py, log/producers.py). So nothing here may depend on time,
on the network or on chance:

    block ─┬─► the segment of each row: by its key's hash; rows without a key all to one, the next one for each block
           └─► one batch for each segment that gets rows, numbered from 0 in the era, in the order of the blocks

**A layout that is not the same.** Earlier attempts may have stored rows in segments that have ended since. Before its
first row, an attempt asks how many (earlier_attempts.py). So many rows of an ended segment, the first ones, go there
again: an ended log recognises what it has. All others go to the segments that take writes now. So every attempt finds
the same segment for a row, under any layout (decision 40). When a segment ends during an attempt, the attempt waits for
all answers, follows the layout, asks again, and gives the rows anew that no segment has, in the order of the blocks.

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
from collections import defaultdict, deque
from functools import cached_property
from itertools import groupby
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from braid.client.consuming.segment_range import read_segment_range
from braid.client.producing.earlier_attempts import EarlierAttempts, Writer, earlier_attempts
from braid.client.producing.open_batch import UNKNOWN_OFFSET, ProducerBatch
from braid.client.producing.options import ProducerOptions
from braid.client.producing.producer import Producer
from braid.client.producing.records import check_times
from braid.client.producing.segment_writer import SegmentWriter
from braid.client.routing import TopicMap
from braid.model.batch.header import BatchHeader
from braid.model.batch.identity import ProducerIdentity
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    NotAvailable,
    OffsetOutOfRange,
    OutOfSequence,
    PermissionDenied,
    RepeatDiffers,
    RepeatTooLate,
    SegmentSealed,
)
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


class _Block(msgspec.Struct, frozen=True, eq=False, dict=True):
    table: Any
    keyless_hash: int
    """That rows without a key count as."""

    @property
    def timed(self) -> bool:
        """Whether the rows have their own timestamps."""
        return "timestamp" in self.table.column_names

    @cached_property
    def hashes(self) -> npt.NDArray[np.uint16]:
        if "key" not in self.table.column_names:
            return np.full(self.table.num_rows, self.keyless_hash, np.uint16)
        keys = self.table.column("key").cast(pa.binary())
        hashes = key_hashes(keys.fill_null(b"").to_pylist())
        if keys.null_count:
            hashes[keys.is_null().to_numpy()] = self.keyless_hash
        return hashes


class _Given(NamedTuple):
    block: _Block
    rows: npt.NDArray[np.intp]
    """The numbers of these rows in their block, in order."""
    batch: ProducerBatch
    number: int
    """Of its first row in era and segment."""


class RepeatableProducer:
    """Writes blocks of rows once, however often they are given; `Client.repeatable_producer` makes it.

    One task at a time may give blocks.
    """

    def __init__(
        self, client: Client, topic: TopicName, options: ProducerOptions, *, app: str, part: int, era: int
    ) -> None:
        self.topic: Final = topic
        self.producer: Final = Producer(client, topic, options, self._identify)
        self._client = client
        self._app = app
        self._part = part
        self._era = era
        self._earlier = EarlierAttempts({}, complete=False)
        self._has_asked = False
        self._counts: defaultdict[int, int] = defaultdict(int)
        """How many rows each segment was given."""
        self._ended: dict[int, SegmentWriter] = {}
        """Writers to segments that have ended, for rows that these have."""
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
        await self._open()
        if any(isinstance(writer.failure, SegmentSealed) for writer in self.producer.partitioner.writers):
            await self._follow()
        keyless_hash = self._writer(self.producer.layout).keyless_hash(self._blocks)
        self._give(_Block(block, keyless_hash), np.arange(block.num_rows))
        self._blocks += 1
        await self.producer.pace()
        if any(given.batch.segment not in self._fresh for given in self._given):
            await self._review_all()
        while self._given and self._given[0].batch.done:
            await self._review_next()

    async def finish(self) -> Written:
        """Wait until all blocks are stored."""
        await self._open()
        await self._review_all()
        fewer = {segment for segment, stored in self._earlier.rows.items() if self._counts[segment] < stored}
        if self._outrun or fewer:
            raise RepeatDiffers(
                f"all rows for segment {min(self._outrun | fewer)} of {self.topic} were written as era {self._era} "
                f"before, and more after them: the first try had more rows"
            )
        return Written(self._records, self._duplicates, bool(self._past) or self._earlier.complete)

    async def __aenter__(self) -> Self:
        await self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.producer.end()

    async def _open(self) -> None:
        await self.producer.open()
        if not self._has_asked:
            await self._ask()

    async def _ask(self) -> None:
        layout = self.producer.layout
        self._earlier = await earlier_attempts(self.producer, layout, self._writer(layout))
        self._has_asked = True

    def _writer(self, layout: TopicMap) -> Writer:
        first_segments = layout.route.first_segments
        if not first_segments:
            if layout.route.layout_epoch:
                raise NotAvailable(
                    f"the layout of {self.topic} has changed, and its brokers run a version that does not say with how "
                    f"many segments it began: upgrade them"
                )
            first_segments = len(layout.active)
        return Writer(self._app, layout.topic_id, self._part, self._era, first_segments)

    def _identify(self, layout: TopicMap, segment: int) -> ProducerIdentity:
        return ProducerIdentity(self._writer(layout).id_in(segment), self._era, self._counts[segment])

    # Giving.

    def _give(self, block: _Block, rows: npt.NDArray[np.intp]) -> None:
        """Give rows of a block to the writers of their segments."""
        if self._earlier.complete:
            self._records += len(rows)
            self._duplicates += len(rows)
            return
        layout = self.producer.layout
        for segment, stored in self._earlier.rows.items():
            route = layout.segment(segment)
            own = (block.hashes[rows] >= route.first_hash) & (block.hashes[rows] <= route.last_hash)
            if self._counts[segment] >= stored or not own.any():
                continue
            if segment not in self._ended:
                self._ended[segment] = self.producer.writer_of_ended(route)
            self._give_to(self._ended[segment], block, rows[own])
            rows = rows[~own]
        writers = self.producer.partitioner.writers
        if len(writers) == 1 and len(rows):
            self._give_to(writers[0], block, rows)
            return
        places = self.producer.partitioner.writer_numbers(block.hashes[rows])
        order = np.argsort(places, kind="stable")
        ends = np.searchsorted(places[order], np.arange(len(writers)), "right")
        for writer, chosen in zip(writers, np.split(rows[order], ends[:-1])):
            if len(chosen):
                self._give_to(writer, block, chosen)

    def _give_to(self, writer: SegmentWriter, block: _Block, rows: npt.NDArray[np.intp]) -> None:
        table = block.table if len(rows) == block.table.num_rows else block.table.take(pa.array(rows))
        try:
            batch = writer.add_table(table, len(rows), table.nbytes)
        except OutOfSequence as error:  # an earlier block failed
            raise self._out_of_sequence(error) from error
        self._given.append(_Given(block, rows, batch, self._counts[writer.segment]))
        self._counts[writer.segment] += len(rows)

    async def _follow(self) -> None:
        """Follow the layout: segments that were given rows have ended. See the top of this module."""
        for given in self._given:
            await given.batch.settled()
        refused: list[_Given] = []
        others: deque[_Given] = deque()
        for given in self._given:
            (refused if isinstance(given.batch.error, SegmentSealed) else others).append(given)
        for given in reversed(refused):
            if given.batch.segment in self._ended:  # It has as many rows, but not these.
                raise self._out_of_sequence(given.batch.error)
            self._counts[given.batch.segment] = given.number
        self._given = others
        await self.producer.follow_after({given.batch.segment for given in refused})
        await self._ask()
        self._check_counts()
        for block, parts in groupby(refused, key=lambda given: given.block):
            self._give(block, np.sort(np.concatenate([given.rows for given in parts])))

    def _check_counts(self) -> None:
        """Check that the logs that have ended know all rows that they have confirmed."""
        active = {segment.id for segment in self.producer.layout.active}
        self._fresh &= active
        for segment in self._counts.keys() - active:
            confirmed, stored = self._counts[segment], self._earlier.rows.get(segment, 0)
            if confirmed > stored and not self._earlier.complete:
                raise RepeatTooLate(
                    f"segment {segment} of {self.topic} has ended, and {confirmed} rows of era {self._era} were stored "
                    f"there, but its log knows only {stored} of them"
                )

    # Reviewing.

    async def _review_all(self) -> None:
        while self._given:
            await self._review_next()

    async def _review_next(self) -> None:
        given = self._given[0]
        await given.batch.settled()
        if isinstance(given.batch.error, SegmentSealed):
            await self._follow()
        else:
            self._given.popleft()
            await self._review(given)

    async def _review(self, given: _Given) -> None:
        """Count a batch, and compare it if the log had it already."""
        batch = given.batch
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

    def _out_of_sequence(self, error: BraidError | None) -> RepeatDiffers:
        return RepeatDiffers(
            f"the rows for {self.topic.path} neither continue nor repeat what was written as era {self._era} before: "
            f"the first try had another number of rows, or of another size, or the writer was forgotten ({error})"
        )

    async def _compare(self, given: _Given) -> None:
        batch = given.batch
        sent = batch.sent_header
        assert sent is not None
        stored = await self._stored_header(batch)
        if stored is None or _content(stored, timed=given.block.timed) == _content(sent, timed=given.block.timed):
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
