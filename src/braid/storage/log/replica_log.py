"""A follower's copy of a log: it takes batches as the owner has stamped them, and only those that continue it.

The owner sends its files piece by piece. A piece is some whole batches of one file, and names the offset at which that
file begins: the copy begins its files at the same offsets. A batch continues the copy if it stands at the copy's end
and its epoch is not lower than that of the batch before it. Everything else is refused, and nothing of that piece is
taken: the owner then asks where the copy ends, and goes on from there.
"""

from __future__ import annotations

from braid.model.batch.header import BatchHeader, verify
from braid.model.errors import InvalidArgument, LogBusy, OutOfSequence
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.storage.log.context import LogContext
from braid.storage.log.recovery import RecoveredLog
from braid.storage.log.store import LogStore


class ReplicaLog(LogStore):
    def __init__(self, context: LogContext, recovered: RecoveredLog) -> None:
        super().__init__(context, recovered)
        # What is queued counts here, and not in `position`.
        self._next_offset = recovered.next_offset
        self._last_epoch = recovered.last_epoch
        self._file_base: Offset | None = None

    async def open(self) -> None:
        await self._writer.open()
        newest = self.files[-1] if self.files else None
        self._file_base = newest.base_offset if newest is not None and not newest.closed and not newest.damage else None

    def apply(self, file_base: Offset, piece: bytearray | memoryview) -> int:
        """Take a piece of the owner's log. Returns the number of its last batch, for `held`. `OutOfSequence` if the
        piece does not continue this copy; a `BatchError` if a batch in it is not whole."""
        if self._failure is not None or self._closed:
            raise self._refusal()
        if self._commit.pending_bytes + len(piece) > self.config.max_pending_bytes:
            raise LogBusy(f"{self._commit.pending_bytes} bytes wait for the disk under {self.folder}")
        headers = self._check(file_base, piece) if piece else []
        begins_file = file_base != self._file_base
        at, view = 0, memoryview(piece)
        for header in headers:
            self._commit.enqueue_stamped(view[at : at + header.size], header, begins_file=begins_file)
            begins_file = False
            at += header.size
        if headers:
            self._file_base = file_base
            self._next_offset, self._last_epoch = headers[-1].next_offset, headers[-1].epoch
            self._commit.begin()  # The owner has put together what belongs together.
        return self._commit.last_number

    async def held(self, number: int) -> LogPosition:
        """Return how far the disk has come, when it has all batches up to this number."""
        await self._flushed.reached(number)
        return self.position

    def _check(self, file_base: Offset, piece: bytearray | memoryview) -> list[BatchHeader]:
        if file_base not in (self._file_base, self._next_offset):
            raise OutOfSequence(
                f"the owner's file begins at offset {file_base}; the copy under {self.folder} has one that begins at "
                f"{self._file_base} and ends at {self._next_offset}"
            )
        headers: list[BatchHeader] = []
        at, expected, epoch = 0, self._next_offset, self._last_epoch
        while at < len(piece):
            header = verify(piece, at)
            if header.base_offset != expected or header.epoch < max(epoch, Epoch(1)):
                raise OutOfSequence(
                    f"a batch of epoch {header.epoch} at offset {header.base_offset} does not continue the copy under "
                    f"{self.folder}: it ends at offset {expected} in epoch {epoch}"
                )
            headers.append(header)
            expected, epoch = header.next_offset, header.epoch
            at += header.size
        if at != len(piece):
            raise InvalidArgument(f"a piece of {len(piece)} bytes ends in the middle of a batch")
        return headers
