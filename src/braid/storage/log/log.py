"""An owner's log: one writer, group commit, three moments at which an append counts as done.

**Append** is a plain function call: it checks for a retry, assigns the offset and puts the batch in a queue. Nothing
else assigns offsets, and the queue is written in order, so the order of offsets is the order in the file (I1).

**Commit** takes the queue, writes and syncs it in one call to the disk, and calls back (commit.py). Batches that arrive
meanwhile gather for the next call, so the disk itself is the clock.

**Confirm** is waiting for a watermark: `written` (in the page cache) for durability `memory`, `synced` for `fsync`,
`replicated` for `replicated`, which replication moves. Consumers stop at the same watermark (I7).

Losing the lease ends the log in the same way as a failed write or sync does (store.py): nothing is confirmed any more
(I3). A full log can still be handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from braid.model.batch.header import (
    MAX_OFFSET,
    BatchHeader,
    Flag,
    control_batch,
    parse_header,
    verify,
)
from braid.model.errors import (
    BraidError,
    BrokenInvariant,
    DiskFull,
    Fenced,
    InvalidArgument,
    LogBusy,
    LogSealed,
    OutOfSequence,
    SegmentSealed,
)
from braid.model.ids import Offset
from braid.model.log.replication import LogPosition
from braid.model.topic import Durability
from braid.storage.log.commit import CommitGroup
from braid.storage.log.context import LogContext
from braid.storage.log.producers import ProducerTable
from braid.storage.log.recovery import RecoveredLog
from braid.storage.log.store import LogStore
from braid.storage.log.watermark import Watermark


class Appended(NamedTuple):
    base_offset: Offset | None
    """None only for a retry of a batch so old that its place is forgotten."""
    next_offset: Offset
    duplicate: bool


_NOTHING: Final = Offset(0)
SEAL_BYTES: Final = len(control_batch(Flag.SEAL))


class Log(LogStore):
    """The hot part of one segment, on one broker, in one epoch. Everything here runs on one event loop."""

    def __init__(self, context: LogContext, recovered: RecoveredLog, *, replicated: Offset = _NOTHING) -> None:
        """`replicated` is the offset below which enough replicas are known to hold every record."""
        if context.epoch <= recovered.last_epoch:
            raise Fenced(
                f"epoch {context.epoch} cannot open {context.folder}: epoch {recovered.last_epoch} has written there"
            )
        super().__init__(context, recovered)
        self.epoch: Final = context.epoch
        self.replicated: Final = Watermark(min(replicated, recovered.next_offset))
        by_level = {
            Durability.MEMORY: self.written,
            Durability.FSYNC: self.synced,
            Durability.REPLICATED: self.replicated,
        }
        self.confirmed: Final = by_level[self.config.durability]
        """The watermark that this log's durability waits for: confirms and consumers both stop here."""
        self._may_confirm = context.may_confirm
        self._producers = recovered.producers
        self._end = recovered.next_offset
        self._is_open = not recovered.sealed
        """Whether batches are taken: the log has not ended, was not closed, and has not failed."""
        self._sealed = recovered.sealed
        self._held: BraidError | None = None
        """Why an open log takes nothing for now."""
        self._seal_number = 0
        self._seal_replicated = Watermark(1 if recovered.sealed or not self.is_replicated else 0)
        """1 when enough replicas hold the seal."""
        self._handed_on: bytes | None = None

    async def open(self) -> None:
        """Return when this epoch's first batch, a BEGIN, is durable: from then on this owner has left a trace."""
        await self._writer.open()
        if self._sealed:
            self._end_watermarks()
        else:
            self._enqueue_control(Flag.BEGIN)
            await self.flush()

    def hold(self, reason: BraidError) -> None:
        """Refuse batches for this reason, until `resume`. What was taken goes on."""
        if self._is_open or self._held is not None:
            self._is_open, self._held = False, reason

    def resume(self) -> None:
        if self._held is not None:
            self._held = None
            self._is_open = not self._sealed and not self._closed and self._failure is None

    @property
    def end(self) -> Offset:
        """The offset that the next record gets."""
        return self._end

    @property
    def position(self) -> LogPosition:
        """How far the log reaches. Of a log that has ended, chunks may hold everything, and its files are gone."""
        if self._sealed and not self.files:
            return LogPosition(epoch=self.epoch, end=self._end, sealed=True)
        return super().position

    @property
    def sealed(self) -> bool:
        """Tell whether the log has ended for ever; stays true when the log is closed."""
        return self._sealed

    @property
    def _has_ended(self) -> bool:
        """Tell whether the log has ended for ever, and still answers."""
        return self._sealed and not self._closed and self._failure is None

    @property
    def seal_is_durable(self) -> bool:
        return self._sealed and self._flushed.value >= self._seal_number and self._seal_replicated.value == 1

    @property
    def is_replicated(self) -> bool:
        return self.config.durability is Durability.REPLICATED

    @property
    def durable(self) -> Offset:
        """The offset below which no record is lost with the faults that the durability level covers. Cursors stop
        here: durability `memory` confirms before it syncs."""
        return Offset(self.replicated.value if self.is_replicated else self.synced.value)

    @property
    def knows_producers(self) -> bool:
        """Tell whether a producer with an id has ever written to this log, as far as the log remembers."""
        return len(self._producers) > 0

    @property
    def forgotten_producers(self) -> int:
        """How many derived producers this log has forgotten since it was opened."""
        return self._producers.forgotten

    def producer_rows(self) -> bytes:
        """Return what this log, which has ended, hands on of its producers to the logs that continue it."""
        if not self.seal_is_durable:
            raise LogBusy(f"the log under {self.folder} has not ended yet; try again in a moment")
        self._check_lease()  # The log of a former owner may have ended otherwise since (I3).
        if self._handed_on is None:  # It is final, and there may be a thousand of those logs.
            self._handed_on = b"".join(self._producers.handed_on().rows())
        return self._handed_on

    def inherit(self, producers: ProducerTable) -> None:
        """Begin with what other logs know of their producers. Nothing was appended yet."""
        if self._end:
            raise BrokenInvariant(f"I10: the log under {self.folder} has records, and cannot begin with other tables")
        self._producers = producers.copy()
        self._writer.begin_with(producers.copy())

    def has_later_era(self, header: BatchHeader) -> bool:
        """Tell whether the batch's producer, a derived one, has begun a later era than that of the batch."""
        return self._producers.has_later_era(header)

    def append(
        self, batch: bytearray | memoryview, header: BatchHeader | None = None, *, commit: bool = True
    ) -> Appended:
        """Give a batch its place. It is stored when `confirmed` has reached `next_offset`.

        The log keeps the buffer and writes the owner's half of the header into it. `header` is what `verify` returned
        for this very buffer; without it, the batch is verified here. The commit begins at the end of this iteration of
        the loop. A caller with more to append passes `commit=False` and calls `commit` after the last batch.
        """
        if not self._is_open:
            return self._recognise(verify(batch) if header is None else header)
        if header is None:
            header = verify(batch)
        if header.count == 0:
            raise InvalidArgument("control batches are made by the log itself")
        if batch.readonly if isinstance(batch, memoryview) else not isinstance(batch, bytearray):
            raise InvalidArgument("the log writes into the buffer that it is given: pass a bytearray, not bytes")
        size = len(batch)
        if size != header.size:
            raise InvalidArgument(f"the buffer has {size} bytes, the batch in it {header.size}")
        pending_bytes = self._commit.pending_bytes
        if not pending_bytes:  # A batch that follows others needs no check: the commit of the first asks again.
            self._check_lease()
        elif pending_bytes + size > self.config.max_pending_bytes:
            raise LogBusy(f"{pending_bytes} bytes wait for the disk under {self.folder}; try again in a moment")
        try:
            duplicate = self._producers.check(header)
        except OutOfSequence:
            self._check_lease()  # A former owner does not know what its producers have stored since (I3).
            raise
        if duplicate is not None:
            self._check_lease()
            return Appended(duplicate.base_offset, duplicate.next_offset, duplicate=True)
        base = self._end
        if base + header.count > MAX_OFFSET:
            raise InvalidArgument(
                f"{header.count} records do not fit into {self.folder}: it ends at offset {base}, and the highest "
                f"offset is {MAX_OFFSET}"
            )
        self._end = Offset(base + header.count)
        self._producers.apply(header, base)
        self._commit.enqueue(batch, header, base)
        if commit:
            self._commit.begin_soon()
        return Appended(base, self._end, False)

    def _recognise(self, header: BatchHeader) -> Appended:
        """Answer a retry of a batch that an ended log has. It never takes any other batch."""
        if not self._has_ended:
            raise self._refusal()
        self._check_lease()  # A former owner does not know how the log has ended (I3).
        try:
            duplicate = self._producers.check(header)
        except OutOfSequence:
            duplicate = None
        if duplicate is None:
            raise SegmentSealed(
                f"the log under {self.folder} is sealed at offset {self._end}: it does not have the batch",
                self._end,
                self._producers.next_sequence(header.producer_id),
            )
        return Appended(duplicate.base_offset, duplicate.next_offset, duplicate=True)

    async def next_sequences(self, producers: Sequence[int]) -> list[int]:
        """Return how far the log has each of these producers (`ProducerTable.next_sequence`), when all that counts is
        stored at this log's durability level."""
        found = [self._producers.next_sequence(each) for each in producers]
        await self.confirmed.reached(self._end)
        if self.ended is not None:
            raise self.ended
        self._check_lease()
        return found

    def last_eras(self, producers: Sequence[int]) -> list[int]:
        """Return the era of the last batch of each of these producers (`ProducerTable.last_era`)."""
        return [self._producers.last_era(each) for each in producers]

    def commit(self) -> None:
        """Begin to store what was appended. While the disk is busy, the commit follows by itself."""
        self._commit.begin()

    async def confirm(self, appended: Appended) -> None:
        """Return when the append is stored at this log's durability level and this owner may still confirm it (I3). For
        programs that wait for one append; a broker follows `confirmed` for all of them (broker/segments/publish.py)."""
        await self.confirmed.reached(appended.next_offset)
        self._check_lease()

    async def seal(self) -> Offset:
        """End the log for ever: nothing is appended after the seal. Returns the offset at which the log ends."""
        if self._is_open:
            self._is_open = False
            self._sealed = True
            self._enqueue_control(Flag.SEAL)
            self._seal_number = self._commit.last_number
        elif not self._has_ended:
            raise self._refusal()
        await self.flush()
        await self._seal_replicated.reached(1)
        self._end_watermarks()
        return self._end

    def note_seal_replicated(self) -> None:
        """Note that enough replicas, this one included, hold the seal."""
        self._check_lease()
        self._seal_replicated.advance(1)

    def note_replicated(self, offset: Offset) -> None:
        """Note that enough replicas, this one included, hold every record below `offset`."""
        if offset > self.synced.value:
            raise BrokenInvariant(f"I2: offset {offset} cannot be replicated, only {self.synced.value} is synced here")
        self._check_lease()
        self.replicated.advance(offset)

    async def begin_file(self) -> None:
        """Begin a file, if the newest one is closed: its first batch is a BEGIN of this epoch once more."""
        if not self._sealed and self.files and self.files[-1].closed:
            self._enqueue_control(Flag.BEGIN)
            await self.flush()

    async def prepare_seal(self) -> None:
        """Return when the log could end now, and its newest file has room for the seal. Otherwise the error says why
        the log cannot end: a quiet log does not know that its disk is full before it writes."""
        while self._is_open and not self._writer.room(SEAL_BYTES, SEAL_BYTES):
            if self.files[-1].closed:
                await self.begin_file()
            elif not self._writer.takes(SEAL_BYTES):
                await self.rotate()
            else:
                await self._commit.make_room(SEAL_BYTES)
        if not self._is_open and not self._has_ended:
            raise self._refusal()

    def _enqueue_control(self, flag: Flag) -> None:
        batch = control_batch(flag)
        self._commit.enqueue(batch, parse_header(batch), self._end)

    async def close(self) -> None:
        self._is_open = False
        await super().close()

    # What the commit tells us.

    def on_written(self, group: CommitGroup) -> None:
        """Raise the watermarks over the group; confirms and readers follow them."""
        put, number = self._cache.put, self.number
        for header, batch in zip(group.headers, group.batches):
            put(number, header, batch)
        if self.config.durability is Durability.MEMORY:
            self._check_lease()
        super().on_written(group)

    def on_synced(self, number: int, next_offset: Offset) -> None:
        self._check_lease()
        super().on_synced(number, next_offset)

    def _check_lease(self) -> None:
        if not self._may_confirm():
            raise Fenced(f"the lease on {self.folder} has run out in epoch {self.epoch}: nothing more is confirmed")

    def _refusal(self) -> BraidError:
        if self._failure is None and not self._closed:
            if self._sealed:
                return LogSealed(f"the log under {self.folder} is sealed at offset {self._end}")
            if self._held is not None:
                return self._held.again()
        return super()._refusal()

    def _fail(self, cause: BraidError) -> None:
        self._is_open = False
        if self._failure is None and isinstance(cause, DiskFull):
            self._end = Offset(self.written.value)  # What found no room is not part of the log.
        super()._fail(cause)

    def _watermarks(self) -> tuple[Watermark, ...]:
        return self.written, self.synced, self.replicated

    def _fail_watermarks(self, error: BraidError) -> None:
        super()._fail_watermarks(error)
        self._seal_replicated.fail(error)

    def _end_watermarks(self) -> None:
        """Fail everything that waits for an offset after a durable seal: no watermark will ever reach it."""
        error = LogSealed(f"the log under {self.folder} ends at offset {self._end}")
        for watermark in self._watermarks():
            watermark.end_at(self._end, error)
