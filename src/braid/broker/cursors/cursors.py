"""The cursors of one segment, on its owner: how far each subscription has consumed the segment.

An ack moves a cursor in memory; the store follows, by count, by time and at every orderly stop. So a crash sets a
subscription back by the acks of the last moments, and never forward. A stored cursor never lies beyond the acks, nor
beyond the synced end of the log: a cursor that outlives the records before it would skip the records that later take
their offsets. A cursor that is ahead of the synced end stays dirty until the log has caught up.

A seek and a new subscription (`place`) are stored before they count. When the store has answered, memory is updated and
the caller resumes without yielding to the loop, so no old ack can arrive before the caller has closed the channels.

A consumer that was away goes on after the last record that it took, not at the cursor, which lags a little. It may do
so only while acks alone have moved the cursor. So each cursor has a **placement**, a number that changes with each
seek, and when the log may have lost records that consumers have seen: their positions then mean other records, or none.
A consumer that meets another placement than the one it knew begins at the cursor. Placements are taken from above the
store's revision and each costs a write, so no placement ever comes back, not even for a subscription that was deleted
and created again.

When the log has ended and nothing of it is left for a subscription, a **drained** mark stands beside the cursor: the
controller reads the mark, and gives out the segment's children. The last ack of an ended log, and the end of a log that
a subscription has consumed, are stored immediately.

A seek may come twice, or late, after other seeks: a client repeats a call whose answer was lost, and a broker that
stood still goes on with a call that its client has given up. So a call names itself, and the placement that its client
knew when it began. A cursor that the call has placed is not placed again, and a cursor that another call has placed
since then stays where it is.

All writes take turns. How they are fenced and repeated stands in stored_cursors.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Final

from msgspec.structs import replace

from braid.broker.config import CursorConfig
from braid.broker.cursors.stored_cursors import CursorPlace, StoredCursors
from braid.metadata import paths
from braid.metadata.store import Compare, Store
from braid.model.errors import ConditionFailed, Fenced, InvalidArgument, MetadataError, SubscriptionNotFound
from braid.model.ids import NO_REQUEST, Epoch, Offset, RequestId, Revision
from braid.model.names import SegmentName
from braid.model.queue.events import QueueSnapshot, pack_state
from braid.model.subscription import Placing
from braid.ports.tasks import end

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""How long the background flush waits after the store did not answer."""


class Cursors:
    def __init__(
        self,
        store: Store,
        name: SegmentName,
        epoch: Epoch,
        ownership: Compare,
        durable_end: Callable[[], Offset],
        config: CursorConfig,
        *,
        now_us: Callable[[], int],
        end: Callable[[], Offset] | None = None,
        drained: Callable[[Offset], bool] = lambda _: False,
        on_fenced: Callable[[Fenced], None] | None = None,
    ) -> None:
        """`durable_end` returns the synced end of the log, `end` the end of what consumers may see; without `end` both
        are the same. `drained` tells whether the log has ended with no record at or after an offset. `now_us` returns
        the time, µs since 1970. `on_fenced` is called once, when the store shows that the segment has another owner, or
        none."""
        self.name = name
        self._now_us = now_us
        self._durable_end = durable_end
        self._end = end or durable_end
        self._drained = drained
        self._config = config
        self._stored = StoredCursors(store, name, epoch, ownership, self._end, on_fenced)
        self._offsets: dict[str, Offset] = {}
        self._placements: dict[str, int] = {}
        self._placed_by: dict[str, RequestId] = {}
        self._moved_at: dict[str, int] = {}
        self._queues: set[str] = set()
        """The subscriptions that are queues."""
        self._states: dict[str, bytes] = {}
        """By subscription: the state of a queue as the store has it, or is to have it."""
        self._dirty: dict[str, None] = {}
        """Subscriptions whose position in memory is not the one in the store."""
        self._unsure: dict[str, None] = {}
        """Dirty subscriptions for which the store may have another place: the answer to a seek was lost, and reading
        back failed."""
        self._acks = 0
        """Since the last flush."""
        self._lock = asyncio.Lock()
        self._work = asyncio.Event()
        """Set while anything is dirty."""
        self._urgent = asyncio.Event()
        """Set when the flush does not wait for its time: so many acks came, or a subscription has drained the log."""
        self._task: asyncio.Task[None] | None = None

    async def load(self, *, lossy: bool = False) -> None:
        """Read all cursors. A cursor beyond the end of the log is set to the end: the records that it calls consumed
        are lost, and it must not hide the records that come. `lossy` says that the log may have lost records that
        consumers have seen: every cursor gets a new placement where it stands. That is stored before new records can
        take the lost offsets. Drained marks are made right: the last owner may have ended the log and died."""
        async with self._lock:
            await self._stored.read_back()
            end = self._durable_end()
            placed: dict[str, CursorPlace] = {}
            for subscription, place in self._stored.places().items():
                if place.offset > end:
                    log.warning(
                        "the cursor of subscription %s stands at offset %d of %s, which ends at %d: records that were "
                        "consumed are lost; the cursor is set to the end",
                        subscription, place.offset, self.name, end,
                    )  # fmt: skip
                if lossy or place.offset > end:
                    offset, placement = min(place.offset, end), self._stored.last_placement + 1
                    placed[subscription] = place._replace(
                        offset=offset,
                        placement=placement,
                        placed_by=NO_REQUEST,
                        drained=self._drained(offset),
                        state=b"",
                    )
                elif place.drained != self._drained(place.offset):
                    placed[subscription] = place._replace(drained=not place.drained)
            if placed:
                await self._stored.write(placed)
                self._stored.last_placement += 1
            places = self._stored.places()
            self._offsets = {name: place.offset for name, place in places.items()}
            self._placements = {name: place.placement for name, place in places.items()}
            self._placed_by = {name: place.placed_by for name, place in places.items()}
            self._moved_at = {name: place.moved_at or self._now_us() for name, place in places.items()}
            self._queues = {name for name, place in places.items() if place.queue}
            self._states = {name: place.state for name, place in places.items() if place.state}
            self._settle([*places])  # A cursor of an earlier version is stored again, with the time.

    def offset(self, subscription: str) -> Offset | None:
        return self._offsets.get(subscription)

    def placement(self, subscription: str) -> int:
        """The placement of the subscription's cursor; 0 if it has no cursor."""
        return self._placements.get(subscription, 0)

    def stored_at(self, subscription: str) -> Revision:
        """The revision at which the store's cursor was written; 0 if it has none."""
        return self._stored.revision(subscription)

    def all(self) -> dict[str, Offset]:
        return dict(self._offsets)

    @property
    def queues(self) -> frozenset[str]:
        """The subscriptions that are queues."""
        return frozenset(self._queues)

    def handed_over(self, subscription: str) -> bytes:
        """The state of a queue that an earlier owner has stored when it handed the segment over; empty: there is
        none."""
        return self._states.get(subscription, b"")

    def is_stored_drained(self, subscription: str) -> bool:
        """Tell whether the store says that nothing of the segment is left for a subscription."""
        stored = self._stored.place(subscription)
        return stored is not None and stored.drained and stored.offset >= self._offsets.get(subscription, 0)

    def forget_state(self, subscription: str) -> None:
        """Keep the state of a queue in the store no longer: this owner's disk, and enough others, have it."""
        self._states.pop(subscription, None)

    def moved_at(self, subscription: str) -> int:
        """When the cursor last moved, or was noted at the end: µs since 1970; 0 if there is no cursor."""
        return self._moved_at.get(subscription, 0)

    def all_moved_at(self) -> dict[str, int]:
        return dict(self._moved_at)

    def lowest(self, moved_since: int | None = None) -> Offset | None:
        """The first offset that a subscription may need again, also after a crash: the lowest that is stored. With
        `moved_since`, only of the subscriptions that have moved since that time."""
        return min(
            (
                place.offset
                for name, place in self._stored.places().items()
                if moved_since is None or self.moved_at(name) >= moved_since
            ),
            default=None,
        )

    def note_consumed(self, stored_before: int) -> None:
        """Note that the subscriptions at the end of the segment have nothing to move for: their time counts from now.
        The times of those that were stored before `stored_before` are stored again."""
        for subscription, offset in self._offsets.items():
            if offset >= self._end():
                self._moved_at[subscription] = self._now_us()
                stored = self._stored.place(subscription)
                if stored is not None and stored.moved_at < stored_before:
                    self._note_dirty(subscription)

    def note_drained(self) -> None:
        """Store the marks that are missing now: the log has ended, or retention has deleted the rest of it."""
        for subscription, offset in self._offsets.items():
            stored = self._stored.place(subscription)
            if self._drained(offset) and (stored is None or not stored.drained):
                self._note_dirty(subscription)
                self._urgent.set()

    def advance(self, subscription: str, offset: Offset) -> bool:
        """Take an ack: everything below `offset` is consumed. Return False if it was consumed before."""
        self._stored.check_owner()
        known = self._offsets.get(subscription)
        if known is None:
            raise self._not_found(subscription)
        if offset <= known:
            return False
        self._check_place(subscription, offset)
        self._offsets[subscription] = offset
        self._moved_at[subscription] = self._now_us()
        self._acks += 1
        self._note_dirty(subscription)
        if self._acks >= self._config.flush_acks or self._drained(offset):
            self._urgent.set()
        return True

    async def place(self, placing: Placing, skipped: Callable[[], QueueSnapshot] | None = None) -> Offset:
        """Place the cursor of a seek, or the missing cursor of a new subscription. When this returns, the cursor is
        stored as far as the log is synced. Return where the cursor stands. `ConditionFailed` if another call has placed
        it since the caller looked. A queue says what is `skipped` when its messages are: that state goes along."""
        subscription, offset = placing.subscription, placing.offset
        self._check_place(subscription, offset)
        async with self._lock:
            known = self._offsets.get(subscription)
            if known is None and placing.skip:
                raise self._not_found(subscription)
            if known is not None and (placing.only_if_absent or self._is_placed_by(subscription, placing.request_id)):
                return known
            if placing.since is not None and placing.since not in await self._placements_now(subscription):
                raise ConditionFailed(
                    f"subscription {subscription} was set to another place of {self.name} meanwhile; try again"
                )
            state = skipped() if skipped is not None else None
            if state is not None:
                offset = Offset(state.base)
            elif placing.skip and known is not None:
                offset = Offset(min(max(offset, known) + placing.skip, self._end()))
            queue = placing.queue or subscription in self._queues
            await self._place(subscription, offset, placed_by=placing.request_id, queue=queue, state=state)
            return offset

    async def _placements_now(self, subscription: str) -> set[int]:
        """The placement that counts, and a placement that a seek with a lost answer has stored: a caller that has seen
        that one in the store has seen the latest."""
        known = {self.placement(subscription)}
        if subscription in self._unsure:
            await self._stored.read_back()
            if (stored := self._stored.place(subscription)) is not None:
                known.add(stored.placement)
        return known

    def _is_placed_by(self, subscription: str, request_id: RequestId) -> bool:
        return request_id != NO_REQUEST and self._placed_by[subscription] == request_id

    async def begin(self, subscription: str, offset: Offset, *, queue: bool = False) -> Offset | None:
        """Place the cursor of a subscription that is being created. It is stored only while the subscription's key does
        not exist; return None if the key exists. An existing cursor belongs to another creation, or was left by a
        deletion. It stays where it is, or goes down: whichever creation succeeds, nothing is skipped (I5). It gets a
        new placement in any case: calls and consumers of a deleted subscription know another placement."""
        self._check_place(subscription, offset)
        async with self._lock:
            offset = min(offset, self._offsets.get(subscription, offset))
            unless = self._subscription(subscription)
            return offset if await self._place(subscription, offset, unless=unless, queue=queue) else None

    async def _place(
        self,
        subscription: str,
        offset: Offset,
        *,
        queue: bool,
        placed_by: RequestId = NO_REQUEST,
        unless: str | None = None,
        state: QueueSnapshot | None = None,
    ) -> bool:
        placement, moved_at = self._stored.last_placement + 1, self._now_us()
        at = min(offset, self._durable_end())
        # Of no epoch: this owner goes on, so a vote must not take the state for the last one.
        packed = pack_state(replace(state, placement=placement), 0) if state is not None else b""
        place = CursorPlace(at, placement, placed_by, moved_at, self._drained(at), queue, packed)
        try:
            written = await self._stored.write({subscription: place}, unless=unless)
        except MetadataError:
            if subscription in self._offsets:  # The new place may be stored: store the old one, which counts, again.
                self._unsure[subscription] = None
                self._note_dirty(subscription)
            raise
        if not written:
            return False
        # From here to the caller nothing yields to the loop: no old ack comes before the caller closes the channels.
        self._stored.last_placement = placement
        self._offsets[subscription] = offset
        self._placements[subscription] = placement
        self._placed_by[subscription] = placed_by
        self._moved_at[subscription] = moved_at
        self._states.pop(subscription, None)
        if packed:
            self._states[subscription] = packed
        (self._queues.add if queue else self._queues.discard)(subscription)
        self._settle([subscription])
        return True

    async def remove(self, subscription: str) -> bool:
        """Remove the cursor of a subscription that was deleted, or never created. Removing a missing cursor is fine.
        Return False while the subscription exists: it keeps its cursor."""
        async with self._lock:
            if subscription in self._stored and not await self._stored.write(
                {subscription: None}, unless=self._subscription(subscription)
            ):
                return False
            self._offsets.pop(subscription, None)
            self._placements.pop(subscription, None)
            self._placed_by.pop(subscription, None)
            self._moved_at.pop(subscription, None)
            self._queues.discard(subscription)
            self._states.pop(subscription, None)
            self._dirty.pop(subscription, None)
            self._unsure.pop(subscription, None)
            self._settle([])
            return True

    async def flush(self, subscription: str | None = None) -> None:
        """Store all cursors, or the one that is named, as far as the log is synced. Cursors beyond the synced end stay
        dirty."""
        async with self._lock:
            self._stored.check_owner()
            names = [*self._dirty] if subscription is None else [name for name in self._dirty if name == subscription]
            if subscription is None:
                self._acks = 0
                self._urgent.clear()
            if not self._unsure.keys().isdisjoint(names):
                await self._stored.read_back()
            durable_end = self._durable_end()
            places = {name: self._place_up_to(durable_end, name) for name in names}
            # A cursor that only waits for the log to sync is stored already, as far as it can be.
            await self._stored.write(
                {name: place for name, place in places.items() if self._stored.place(name) != place}
            )
            self._settle(names)

    def start(self) -> None:
        """Flush in the background from now on."""
        assert self._task is None, "cursors are started once"
        self._task = asyncio.create_task(self._flush_when_due(), name=f"flush cursors of {self.name}")

    async def stop(self, states: Mapping[str, bytes] | None = None) -> None:
        """End the background flush and store what is left, unless another owner has the segment; with the cursors of
        queues also their states, for the next owner."""
        task, self._task = self._task, None
        await end(task)
        for subscription, state in (states or {}).items():
            if subscription in self._queues:
                self._states[subscription] = state
                self._note_dirty(subscription)
        if not self._stored.fenced:
            await self.flush()

    async def _flush_when_due(self) -> None:
        while True:
            await self._work.wait()
            await _wait_at_most(self._urgent, self._config.flush_s)
            try:
                await self.flush()
            except Fenced:
                return
            except MetadataError as error:
                log.warning("cursors of %s cannot be stored, trying again: %s", self.name, error)
                await asyncio.sleep(RETRY_S)

    def _place_up_to(self, end: Offset, subscription: str) -> CursorPlace:
        """The place of the cursor in memory, but not beyond `end`."""
        offset = min(self._offsets[subscription], end)
        return CursorPlace(
            offset,
            self._placements[subscription],
            self._placed_by[subscription],
            self._moved_at[subscription],
            self._drained(offset),
            subscription in self._queues,
            self._states.get(subscription, b""),
        )

    def _note_dirty(self, subscription: str) -> None:
        self._dirty[subscription] = None
        self._work.set()

    def _settle(self, subscriptions: list[str]) -> None:
        """Note that these were written. They stay dirty only if they have moved since, or if the log is not synced so
        far."""
        for subscription in subscriptions:
            if self._stored.place(subscription) == self._place_up_to(self._offsets[subscription], subscription):
                self._dirty.pop(subscription, None)
                self._unsure.pop(subscription, None)
            else:
                self._dirty[subscription] = None
        if self._dirty:
            self._work.set()
        else:
            self._work.clear()

    def _check_place(self, subscription: str, offset: Offset) -> None:
        if not 0 <= offset <= self._end():
            raise InvalidArgument(
                f"subscription {subscription} cannot stand at offset {offset} of {self.name}: "
                f"the segment ends at {self._end()}"
            )

    def _not_found(self, subscription: str) -> SubscriptionNotFound:
        return SubscriptionNotFound(f"{self.name} has no subscription {subscription}; it may have been deleted")

    def _subscription(self, subscription: str) -> str:
        return paths.subscription(self.name.topic.path, subscription)


async def _wait_at_most(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
