"""The catalog of one segment's chunks, in the metadata store, and the fence around it.

    …/chunks/{base:020d}   a ChunkDescriptor for each chunk
    …/chunks/cur           the Frontier: how far chunks reach, and which epoch may write here
    …/state                the SealedState, between the old owner's seal and the new owner's begin

**The fence.** Every write of an owner is one transaction that replaces the frontier and compares its revision. A new
owner's first act is to replace the frontier with its own, higher epoch; from then on every transaction of the old owner
fails (I3). So descriptor, pointer and fence are one transaction by construction.

**Lost answers.** When the store cannot say whether a transaction happened, the catalog reads the frontier back. Each
write of the frontier is unique (it counts, and it carries a digest of the transaction), so the frontier tells. If it is
unchanged, the transaction is tried again under the same comparison; at most one of the tries can succeed. If it cannot
be read back either, the catalog is in doubt: the next write first loads the catalog again.

Writes take turns, because each builds on the frontier that the one before it left.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, TypeVar

import msgspec
from msgspec import UNSET

from braid.metadata import paths
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Condition, Delete, Entry, Operation, Put, Store
from braid.model.errors import (
    BrokenInvariant,
    ConditionFailed,
    Fenced,
    InvalidArgument,
    MetadataUncertain,
    OffsetOutOfRange,
)
from braid.model.ids import Epoch, Offset, Revision
from braid.model.log.epochs import EpochStarts, begin_epoch
from braid.model.stored_record import StoredRecord, decode, encode

T = TypeVar("T")

MAX_UNCERTAIN_TRIES: Final = 5
MAX_REMOVED_CHUNKS: Final = MAX_TXN_OPERATIONS - 1
"""How many chunks one transaction removes, beside the frontier that it replaces."""
MAX_REPLACED_CHUNKS: Final = MAX_TXN_OPERATIONS - 1
"""How many chunks one transaction replaces by one: the first one's key is written, the others' are deleted."""


class ChunkDescriptor(StoredRecord, frozen=True, rename="camel"):
    base_offset: Offset
    next_offset: Offset
    epoch: Epoch
    """Of the owner that exported it."""
    object: str
    """The object's name, relative to the segment's folder."""
    size: int
    batch_bytes: int
    min_timestamp: int
    max_timestamp: int
    min_key_hash: int
    max_key_hash: int


class ProducerObject(StoredRecord, frozen=True, rename="camel"):
    """The log's producer table, as an object without batches (producer_objects.py)."""

    object: str
    """The object's name, relative to the segment's folder."""
    size: int
    next_offset: Offset
    """The table knows every batch below this offset."""


class Frontier(StoredRecord, frozen=True, rename="camel"):
    """How far durable history reaches, and which owner may extend it."""

    epoch: Epoch
    holder: str
    begun: bool
    """Whether this epoch's owner has made its first batch durable. Before that it confirms nothing."""
    continues: Epoch
    """The last epoch before this one whose owner had begun; 0 if there was none."""
    next_offset: Offset
    """Chunks hold every retained offset below this one."""
    writes: int = 0
    digest: str = ""
    """Of what else the transaction did. Together with the count it tells one write from every other, so that reading
    the frontier back shows which of them happened."""
    producers: ProducerObject | None = None
    """Where the producer table is that reaches `next_offset`. None: in the newest chunk's footer, or there is none."""
    inherited: bytes = b""
    """What the logs that this one continues know of their producers (`ProducerTable.rows`), if it is little; otherwise
    `producers` names an object. Of a log without chunks that retention has shortened: what is known of the producers of
    the deleted records. The first chunk's footer carries it on."""
    epochs: EpochStarts = ()
    """Which epoch has written which offsets; see epochs.py."""
    end: Offset | None = None
    """Where the log ends for ever: no owner appends at or after this offset. None: the log goes on."""
    ended_at: int = 0
    """When that was noted, in µs since 1970; 0 if it is not known. An empty log has no record that tells its age."""

    @property
    def last_writer(self) -> Epoch:
        """The last epoch in which anything can have been confirmed."""
        return self.epoch if self.begun else self.continues

    @property
    def complete(self) -> bool:
        """Tell whether the log has ended and chunks hold all that retention has left of it."""
        return self.end is not None and self.next_offset >= self.end


class SealedState(StoredRecord, frozen=True, rename="camel"):
    """Left by the old owner: all its records are in chunks, and this was the last one (-1: there were none)."""

    last_committed_offset: int
    epoch: Epoch
    broker_id: str
    timestamp: int
    sealed: bool = True
    ended: bool = False
    """Whether the log itself was sealed, for ever: the next owner may serve readers, but appends nothing."""


def _decode(entry: Entry, kind: type[T]) -> T:
    return decode(kind, entry.value, f"the {kind.__name__} at {entry.key}")


class Catalog:
    """One owner's view of a segment's catalog. Loaded once, then kept in step by being the only writer."""

    def __init__(self, store: Store, topic_path: str, descriptor: str) -> None:
        self._store = store
        self._keys = (topic_path, descriptor)
        self._frontier_key = paths.current_chunk(*self._keys)
        self._frontier_revision = Revision(0)
        self.frontier: Frontier | None = None
        self.sealed: SealedState | None = None
        self.chunks: list[ChunkDescriptor] = []
        self._turn = asyncio.Lock()
        self._in_doubt = False
        self._own_seal: SealedState | None = None

    async def load(self) -> None:
        """Read everything, from one revision of the store. An error is raised, never taken for an empty catalog."""
        listing = await self._store.list(paths.segment_storage_prefix(*self._keys))
        self.frontier, self.sealed, self.chunks = None, None, []
        self._frontier_revision = Revision(0)
        for entry in listing.entries:
            if entry.key == self._frontier_key:
                self.frontier = _decode(entry, Frontier)
                self._frontier_revision = entry.revision
            elif entry.key == paths.sealed_state(*self._keys):
                self.sealed = _decode(entry, SealedState)
            elif paths.chunk_base(entry.key) is not None:
                self.chunks.append(_decode(entry, ChunkDescriptor))
        self.chunks.sort(key=lambda chunk: chunk.base_offset)

    @property
    def earliest(self) -> Offset:
        """The first offset that retention has left. It only rises, whichever owner looks."""
        return self.chunks[0].base_offset if self.chunks else self.next_offset

    @property
    def next_offset(self) -> Offset:
        return self.frontier.next_offset if self.frontier is not None else Offset(0)

    @property
    def last_writer(self) -> Epoch:
        """The last epoch in which anything can have been confirmed; 0 if there was none."""
        return self.frontier.last_writer if self.frontier is not None else Epoch(0)

    @property
    def epochs(self) -> EpochStarts:
        """Which epoch has written which offsets."""
        return self.frontier.epochs if self.frontier is not None else ()

    @property
    def revision(self) -> Revision:
        """Return the revision of the last write: it names the manifest that describes this catalog."""
        return self._frontier_revision

    @property
    def end(self) -> Offset | None:
        """Where the log ends for ever; None while it goes on."""
        if self.sealed is not None and self.sealed.ended:
            return Offset(self.sealed.last_committed_offset + 1)
        return self.frontier.end if self.frontier is not None else None

    @property
    def producers(self) -> ProducerObject | None:
        return self.frontier.producers if self.frontier is not None else None

    @property
    def inherited(self) -> bytes:
        return self.frontier.inherited if self.frontier is not None else b""

    @property
    def objects(self) -> list[ChunkDescriptor | ProducerObject]:
        """Return every object that the catalog refers to."""
        return [*self.chunks, *([self.producers] if self.producers is not None else [])]

    def find(self, offset: int) -> ChunkDescriptor | None:
        """Return the chunk that holds `offset`."""
        at = bisect_right(self.chunks, offset, key=lambda chunk: chunk.base_offset) - 1
        return self.chunks[at] if at >= 0 and offset < self.chunks[at].next_offset else None

    async def claim(self, epoch: Epoch, holder: str) -> None:
        """Fence every earlier owner out. Nothing else has changed yet."""
        async with self._turn:
            old = self.frontier
            if old is not None and epoch <= old.epoch:
                raise Fenced(
                    f"epoch {epoch} cannot claim {'/'.join(self._keys)}: epoch {old.epoch} ({old.holder}) has it"
                )
            frontier = Frontier(
                epoch=epoch,
                holder=holder,
                begun=False,
                continues=self.last_writer,
                next_offset=self.next_offset,
                producers=self.producers,
                inherited=self.inherited,
                epochs=self.epochs,
                end=self.end,
                ended_at=old.ended_at if old is not None else 0,
                unknown=old.unknown if old is not None else UNSET,
            )
            await self._write(frontier, [])

    async def begin(
        self,
        conditions: Sequence[Condition] = (),
        operations: Sequence[Operation] = (),
        *,
        first: Offset | None = None,
        end: Offset | None = None,
        lost: bool = False,
    ) -> Revision:
        """Note that this owner's first batch is durable: its records count from now on, from offset `first`, and the
        seal before them goes. One transaction does this together with the caller's operations; returns its revision.

        No owner begins in a log that has an `end`: the owner that sealed it stays the last writer. If records of that
        owner are `lost`, this one begins all the same, so that those records count no more if they come back."""
        async with self._turn:
            if end is not None and not lost:
                await self._write(msgspec.structs.replace(self._own(), end=end), operations, conditions)
                return self._frontier_revision
            begun = msgspec.structs.replace(self._own(), begun=True, end=end)
            if first is not None:
                begun = msgspec.structs.replace(begun, epochs=begin_epoch(begun.epochs, begun.epoch, first))
            await self._write(begun, [Delete(paths.sealed_state(*self._keys)), *operations], conditions)
            self.sealed = None
            return self._frontier_revision

    async def hold(self, conditions: Sequence[Condition] = (), operations: Sequence[Operation] = ()) -> Revision:
        """Let this owner serve readers without having begun, in one transaction with the caller's operations; returns
        its revision. The last writer stays the last writer."""
        async with self._turn:
            await self._write(self._own(), operations, conditions)
            return self._frontier_revision

    async def commit(self, chunk: ChunkDescriptor) -> None:
        """Add a chunk at the end of history."""
        async with self._turn:
            await self._settle()
            if chunk in self.chunks[-1:]:
                return  # An earlier try, whose answer was lost.
            frontier = self._own()
            if chunk.base_offset != frontier.next_offset or chunk.next_offset <= chunk.base_offset:
                raise BrokenInvariant(
                    f"I1: a chunk of offsets {chunk.base_offset}–{chunk.next_offset} cannot follow history that ends "
                    f"at {frontier.next_offset}"
                )
            await self._write(
                msgspec.structs.replace(frontier, next_offset=chunk.next_offset, producers=None, inherited=b""),
                [Put(paths.chunk(*self._keys, chunk.base_offset), encode(chunk))],
            )
            self.chunks.append(chunk)

    async def seal(
        self, sealed: SealedState, conditions: Sequence[Condition], operations: Sequence[Operation]
    ) -> SealedState:
        """Write the sealed state, in one transaction with the caller's operations.

        Returns the state that was written: that of an earlier call, if that call already worked."""
        async with self._turn:
            await self._settle()
            if self.sealed is not None and self.sealed == self._own_seal:
                return self.sealed
            if sealed.last_committed_offset + 1 != self.next_offset:
                raise BrokenInvariant(
                    f"I2: sealing at {sealed.last_committed_offset}, but chunks end before {self.next_offset}"
                )
            self._own_seal = sealed
            put = Put(paths.sealed_state(*self._keys), encode(sealed))
            frontier = msgspec.structs.replace(self._own(), end=self.next_offset if sealed.ended else None)
            await self._write(frontier, [put, *operations], conditions)
            self.sealed = sealed
            return sealed

    async def note_end(
        self,
        end: Offset,
        conditions: Sequence[Condition] = (),
        operations: Sequence[Operation] = (),
        *,
        at_us: int = 0,
    ) -> None:
        """Note where the log ends for ever, and when, in one transaction with the caller's operations. Can be
        repeated."""
        async with self._turn:
            await self._settle()
            frontier = self._own()
            if end < frontier.next_offset or frontier.end not in (None, end):
                raise BrokenInvariant(f"I1: a log cannot end at {end}: {frontier}")
            if frontier.end is None or operations:
                ended = msgspec.structs.replace(frontier, end=end, ended_at=frontier.ended_at or at_us)
                await self._write(ended, operations, conditions)

    async def inherit(
        self, producers: ProducerObject | bytes, conditions: Sequence[Condition], operations: Sequence[Operation]
    ) -> None:
        """Note with which producer table this log begins, an object or the table itself, in one transaction with the
        caller's operations."""
        async with self._turn:
            await self._settle()
            frontier = self._own()
            if frontier.next_offset:
                raise BrokenInvariant(f"I10: a log with records cannot begin with the producers of others: {frontier}")
            rows, stored = (producers, None) if isinstance(producers, bytes) else (b"", producers)
            begun = msgspec.structs.replace(frontier, producers=stored, inherited=rows)
            await self._write(begun, operations, conditions)

    async def remove(self, chunks: Sequence[ChunkDescriptor], producers: ProducerObject | None = None) -> None:
        """Drop the oldest chunks, in as many transactions as it takes; their objects are deleted afterwards.

        If the newest chunk is among them, `producers` holds what its footer knows, and is named from now on."""
        async with self._turn:
            await self._settle()
            chunks = [chunk for chunk in chunks if chunk in self.chunks]  # An earlier try may have removed some.
            if chunks != self.chunks[: len(chunks)]:
                raise BrokenInvariant("I1: only the oldest chunks can be removed")
            for first in range(0, len(chunks), MAX_REMOVED_CHUNKS):
                some = chunks[first : first + MAX_REMOVED_CHUNKS]
                frontier = self._own()
                if producers is not None and producers.next_offset == frontier.next_offset:
                    frontier = msgspec.structs.replace(frontier, producers=producers)
                await self._write(frontier, [Delete(paths.chunk(*self._keys, chunk.base_offset)) for chunk in some])
                self.chunks = self.chunks[len(some) :]

    async def replace(self, old: Sequence[ChunkDescriptor], new: ChunkDescriptor) -> None:
        """Put one chunk in the place of neighbours that hold the same batches, in one transaction."""
        async with self._turn:
            await self._settle()
            if new in self.chunks:
                return  # An earlier try, whose answer was lost.
            at = self.chunks.index(old[0]) if old and old[0] in self.chunks else len(self.chunks)
            if not old or list(old) != self.chunks[at : at + len(old)]:
                raise ConditionFailed(
                    f"{len(old)} chunks of {'/'.join(self._keys)} were not replaced: they are not neighbours in the "
                    "catalog any more"
                )
            if len(old) > MAX_REPLACED_CHUNKS:
                raise InvalidArgument(f"{len(old)} chunks cannot be replaced together, at most {MAX_REPLACED_CHUNKS}")
            if (new.base_offset, new.next_offset) != (old[0].base_offset, old[-1].next_offset):
                raise BrokenInvariant(
                    f"I1: offsets {old[0].base_offset}–{old[-1].next_offset} cannot be replaced by a chunk of "
                    f"{new.base_offset}–{new.next_offset}"
                )
            put = Put(paths.chunk(*self._keys, new.base_offset), encode(new))
            deletes = [Delete(paths.chunk(*self._keys, chunk.base_offset)) for chunk in old[1:]]
            await self._write(self._own(), [put, *deletes])
            self.chunks = [*self.chunks[:at], new, *self.chunks[at + len(old) :]]

    async def forget_producers(self) -> None:
        """Go on without the producer table, which lies only on a disk that was given up."""
        async with self._turn:
            await self._settle()
            await self._write(msgspec.structs.replace(self._own(), producers=None), [])

    async def check_held(self) -> None:
        """Raise `Fenced` if another owner has the catalog now: this view is then too old to delete by."""
        async with self._turn:
            await self._settle()
            entry = await self._store.get(self._frontier_key)
            if entry is None or entry.revision != self._frontier_revision:
                raise self._lost(self._own().epoch, entry.value if entry is not None else None)

    async def skip_to(self, offset: Offset, producers: bytes) -> None:
        """Let history go on at `offset`: the records below it never were in a chunk and are about to be deleted.
        `producers` is the table of those records. A copy that begins at `offset` has no file that tells of them."""
        async with self._turn:
            await self._settle()
            if self.chunks or offset < self.next_offset:
                raise BrokenInvariant(f"I1: history at {self.next_offset} with chunks cannot skip to {offset}")
            skipped = msgspec.structs.replace(self._own(), next_offset=offset, producers=None, inherited=producers)
            await self._write(skipped, [])

    def out_of_range(self, offset: int, earliest: int, end: int) -> OffsetOutOfRange:
        return OffsetOutOfRange(
            f"offset {offset} of {'/'.join(self._keys)} is not there: it holds offsets {earliest} to {end - 1}",
            earliest,
            end,
        )

    def _own(self) -> Frontier:
        if self.frontier is None:
            raise BrokenInvariant("I3: a catalog that was never claimed cannot be written")
        return self.frontier

    async def _settle(self) -> None:
        """After a write of unknown outcome, load the catalog again, as long as this owner still has it."""
        if not self._in_doubt:
            return
        own = self._own()
        now = Catalog(self._store, *self._keys)
        await now.load()
        if now.frontier is None or (now.frontier.epoch, now.frontier.holder) != (own.epoch, own.holder):
            raise self._lost(own.epoch, msgspec.json.encode(now.frontier) if now.frontier is not None else None)
        self.frontier, self.sealed, self.chunks = now.frontier, now.sealed, now.chunks
        self._frontier_revision = now._frontier_revision
        self._in_doubt = False

    async def _write(
        self, frontier: Frontier, operations: Sequence[Operation], conditions: Sequence[Condition] = ()
    ) -> None:
        digest = blake2b(msgspec.json.encode((operations, conditions)), digest_size=8).hexdigest()
        frontier = msgspec.structs.replace(frontier, writes=frontier.writes + 1, digest=digest)
        value = encode(frontier)
        expected = self._frontier_revision
        self._in_doubt = True
        for _ in range(MAX_UNCERTAIN_TRIES):
            try:
                result = await self._store.txn(
                    [Compare(self._frontier_key, expected), *conditions],
                    [Put(self._frontier_key, value), *operations],
                )
            except MetadataUncertain:
                result = None
            if result is not None and result.succeeded:
                self.frontier, self._frontier_revision, self._in_doubt = frontier, result.revision, False
                return
            entry = await self._store.get(self._frontier_key)
            if entry is not None and entry.value == value:
                self.frontier, self._frontier_revision, self._in_doubt = frontier, entry.revision, False
                return
            if (entry.revision if entry is not None else 0) != expected:
                found = _decode(entry, Frontier) if entry is not None else None
                if found is not None and (found.epoch, found.holder) == (frontier.epoch, frontier.holder):
                    raise MetadataUncertain(
                        f"an earlier write to {'/'.join(self._keys)}, whose answer was lost, has arrived meanwhile; "
                        f"try again"
                    )
                self._in_doubt = False
                raise self._lost(frontier.epoch, entry.value if entry is not None else None)
            if result is not None:
                self._in_doubt = False
                raise ConditionFailed(f"{'/'.join(self._keys)} was not written: {list(conditions)} do not all hold")
        raise MetadataUncertain(f"the frontier of {'/'.join(self._keys)} could not be written and read back")

    def _lost(self, epoch: Epoch, found: bytes | None) -> Fenced:
        return Fenced(
            f"{'/'.join(self._keys)} was written by another owner: epoch {epoch} has lost it "
            f"({found.decode() if found is not None else 'the frontier is gone'})"
        )
