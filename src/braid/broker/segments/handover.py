"""Handing a segment over to another broker, as its owner does it.

    prepare   the owner still serves the segment. It exports the log as chunks and, in mode `local`, copies the chunks
              to the target, so that the rest is short. It ends with the record DRAINING.
    finish    the owner takes nothing new. It confirms what it took, ends the channels, stores the cursors, and exports
              (and copies) the tail. One transaction writes the sealed state and the record SEALED. Only then does the
              owner remove its local files.

After a crash anywhere, the record tells how far the hand-over came. Before SEALED, the owner takes the segment again;
the record still has the move, and the owner begins anew. After SEALED, the leader assigns the segment, whatever becomes
of this broker. In mode `local` the chunks stay here until the new owner serves the segment: until then both disks hold
the history, and either broker may go on.

With replicas, brokers that share no storage need no chunks: the target gets a copy of the log as a follower does. When
it holds everything that the owner took, the record names it as the next owner (`_hand_to_copy`).

A segment whose disk is full takes no publishes, so nothing comes after what `prepare` exports. The hand-over needs next
to no room then, and makes some (storage/history/exporter.py).

A move that cannot be done is given up, and the record says why: the target is gone, or storage does not take the tail.
The seal waits for a metadata store that does not answer, as long as the lease lasts.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from braid.broker.segments.history_copy import OutgoingHistory
from braid.broker.segments.leftover_chunks import Copies
from braid.broker.segments.owned_segment import OwnedSegment
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.store import Compare, Put
from braid.metadata.view import Known
from braid.model.errors import (
    BraidError,
    ConditionFailed,
    Fenced,
    MetadataUnavailable,
    MetadataUncertain,
    Moved,
)
from braid.model.log.replication import LogPosition
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.ports.clock import Clock
from braid.storage.context import StorageContext, StorageMode

PREPARE_ROUNDS: Final = 8
SHORT_TAIL_BYTES: Final = 4 << 20
"""`prepare` is done when no more than this is left to export: some 10 ms of work."""
RETRY_S: Final = 0.05
COPY_PATIENCE_S: Final = 600.0
"""How long the target may take to get its copy, while the segment is served."""
EXPORT_PATIENCE_S: Final = 10.0
"""How long a tail that cannot be exported holds up its producers before the segment is taken back."""

_log: Final = logging.getLogger(__name__)


class MoveGivenUp(Exception):
    """Not an error of the broker: the segment stays where it is."""


class HandOver:
    def __init__(
        self,
        context: StorageContext,
        owners: Owners,
        members: Members,
        history: OutgoingHistory,
        copies: Copies,
        clock: Clock,
    ) -> None:
        self._context = context
        self._copies = copies
        self._owners = owners
        self._members = members
        self._history = history
        self._clock = clock

    async def ask(self, segment: OwnedSegment) -> None:
        """Request a move because this broker is leaving; the leader chooses the target. The record goes straight to
        DRAINING."""
        await self._change(segment, lambda record: record.moving(Move()))
        await self._change(segment, Ownership.draining)

    async def prepare(self, segment: OwnedSegment) -> None:
        move = self._record(segment).value.move
        if move is None:
            raise MoveGivenUp("the move was cancelled")
        self._check_target(move.to)
        if self._by_copy(segment):
            await self._brought(segment, move.to, COPY_PATIENCE_S, lag_bytes=SHORT_TAIL_BYTES)
        else:
            await self._export(segment, move.to)
        self._check_target(move.to)
        await self._change(segment, Ownership.draining)

    async def _export(self, segment: OwnedSegment, to: str) -> None:
        """Bring history to where the target can read it, until little of the log is left."""
        try:
            for _ in range(PREPARE_ROUNDS):
                self._check_target(to)
                await segment.storage.export_now()
                await self._copy(segment, to)
                if segment.storage.unexported_bytes <= SHORT_TAIL_BYTES:
                    break
        except BraidError as error:
            raise MoveGivenUp(f"its history does not reach broker {to}: {error}") from error

    async def finish(self, segment: OwnedSegment) -> None:
        """Drain the segment and hand it over. When this returns, its storage is closed. Its record is SEALED, or names
        the next owner."""
        if not segment.storage.log.is_full:
            await self._retry(segment, segment.storage.log.flush)
        if segment.storage.log.is_replicated:
            await self._followed(segment)
        if self._by_copy(segment):
            await self._hand_to_copy(segment)
        else:
            await self._seal(segment)

    async def _seal(self, segment: OwnedSegment) -> None:
        known = self._record(segment)
        record = known.value
        assert record.state is OwnershipState.DRAINING, record
        assert record.move is not None, record
        segment.fail_channels(Moved(f"{segment.name} is moving to another broker", "", segment.epoch))
        await self._retry(segment, lambda: segment.store_cursors(handing_over=True))
        await self._retry(segment, segment.storage.finish)
        to = record.move.to
        await self._retry(segment, lambda: self._copy(segment, to))
        holders = (self._context.broker_id, to) if self._context.mode is StorageMode.LOCAL else ()
        key = paths.ownership(segment.name.topic.path, segment.name.descriptor)
        sealed = record.sealed(holders)

        async def seal() -> None:
            await segment.storage.seal([Compare(key, known.revision)], [Put(key, sealed.to_json())])

        try:
            await self._retry(segment, seal, for_ever=True)
        except ConditionFailed as error:
            raise Fenced(f"{segment.name} was given to another owner while it was handed over") from error
        try:
            await segment.storage.drop_files()
        except BraidError as error:
            _log.warning("%s is handed over, but its files here could not be removed: %s", segment.name, error)
            await segment.storage.abandon()  # The folder must be free when the segment comes back.
        self._copies.left(segment.name)
        _log.info("%s is handed over, sealed at offset %d", segment.name, segment.storage.log.end - 1)

    def _by_copy(self, segment: OwnedSegment) -> bool:
        """Tell whether the target gets the log as a follower does, and not as chunks."""
        return self._context.mode is StorageMode.LOCAL and bool(self._record(segment).value.replicas)

    async def _hand_to_copy(self, segment: OwnedSegment) -> None:
        """Make the target the owner: its disk holds all of the log."""
        known = self._record(segment)
        assert known.value.move is not None
        to = known.value.move.to
        position = await self._brought(segment, to, EXPORT_PATIENCE_S)
        segment.fail_channels(Moved(f"{segment.name} is moving to broker {to}", "", segment.epoch))
        await self._retry(segment, lambda: segment.store_cursors(handing_over=True))

        async def hand_over() -> None:
            handed = known.value.handed_to(to, position)
            if await self._owners.swap(segment.name, known.revision, handed) is None:
                raise Fenced(f"{segment.name} was given to another owner while it was handed over")

        await self._retry(segment, hand_over, for_ever=True)
        await segment.stop_replication()
        await segment.storage.close()
        _log.info("%s is handed over to %s at offset %d", segment.name, to, position.end)

    async def _brought(self, segment: OwnedSegment, to: str, patience_s: float, *, lag_bytes: int = 0) -> LogPosition:
        """Return when the target's disk holds all that the log took, but for so many bytes; and how far that is."""
        if segment.replication is None:
            raise MoveGivenUp("it is about to be replicated; ask again in a moment")
        try:
            async with asyncio.timeout(patience_s):
                return await segment.replication.brought_to(to, lag_bytes)
        except TimeoutError as error:
            raise MoveGivenUp(f"broker {to} does not hold all of it after {patience_s:g} s") from error

    async def _followed(self, segment: OwnedSegment) -> None:
        """Return when enough followers hold everything that the log took."""
        log = segment.storage.log
        try:
            async with asyncio.timeout(EXPORT_PATIENCE_S):
                await log.confirmed.reached(log.end)
        except TimeoutError as error:
            raise MoveGivenUp(f"its followers hold the log only up to offset {log.confirmed.value}") from error
        except BraidError as error:
            raise MoveGivenUp(f"its hand-over could not be finished: {error}") from error

    async def give_up(self, segment: OwnedSegment, reason: str) -> None:
        """Take the move out of the record, so that the segment stays here. A segment that was draining is opened again,
        in the next epoch."""
        while True:
            try:
                known = self._record(segment)
                revision = await self._owners.swap(segment.name, known.revision, known.value.kept(reason))
                if revision is not None:
                    return await self._owners.view.caught_up(revision)
            except (MetadataUnavailable, MetadataUncertain):
                pass
            except MoveGivenUp:
                return None  # The segment has another owner: the record is not this broker's to change.
            await asyncio.sleep(RETRY_S)

    def _record(self, segment: OwnedSegment) -> Known[Ownership]:
        known = self._owners.known(segment.name)
        if known is None or not known.value.is_held_by(self._context.broker_id, segment.epoch):
            raise MoveGivenUp("it has another owner")
        return known

    def _check_target(self, to: str) -> None:
        if not to:
            if self._context.mode is StorageMode.LOCAL:
                raise MoveGivenUp("its history lies on this broker's disk, and no broker was named to take it")
            return
        if to == self._context.broker_id:
            raise MoveGivenUp(f"broker {to} has it already")
        if not self._members.is_active(to):
            raise MoveGivenUp(f"broker {to} is down or draining")

    async def _copy(self, segment: OwnedSegment, to: str) -> None:
        if self._context.mode is StorageMode.LOCAL:
            objects = segment.storage.catalog.objects
            await self._history.copy(segment.name, segment.topic_id, to, objects, self._record(segment).revision)

    async def _change(self, segment: OwnedSegment, change: Callable[[Ownership], Ownership]) -> None:
        """Change the record; return when the view shows it."""
        known = self._record(segment)
        try:
            revision = await self._owners.swap(segment.name, known.revision, change(known.value))
        except (MetadataUnavailable, MetadataUncertain) as error:
            raise MoveGivenUp(f"the metadata store does not answer: {error}") from error
        if revision is None:
            raise MoveGivenUp("its record has changed meanwhile")
        await self._owners.view.caught_up(revision)

    async def _retry(
        self, segment: OwnedSegment, step: Callable[[], Awaitable[None]], *, for_ever: bool = False
    ) -> None:
        """Repeat a step until it works, or until producers have waited for EXPORT_PATIENCE_S."""
        give_up_at = self._clock.monotonic() + EXPORT_PATIENCE_S
        while True:
            try:
                return await step()
            except (Fenced, ConditionFailed):
                raise
            except BraidError as error:
                log = segment.storage.log
                failed = log.failure is not None and not log.is_full
                if failed or (not for_ever and self._clock.monotonic() >= give_up_at):
                    raise MoveGivenUp(f"its hand-over could not be finished: {error}") from error
                _log.info("%s is being handed over, trying again: %s", segment.name, error)
            await asyncio.sleep(RETRY_S)
