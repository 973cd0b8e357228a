"""The checker of a cluster's metadata: every change of a segment's records, as it is made, against the rules.

It sees what the store has applied, one transaction after the other, so it misses nothing and needs to trust nobody:

- an ownership record goes only where `model/ownership.py` lets it go; owner and epoch change only by an assignment, by
  one epoch; another broker gets a segment only if its record was clean, or a loss was accepted (I2, I3); an owner that
  cannot open the segment changes nothing but the reason;
- replicas change only where nothing can be lost: a record that is clean, or whose loss was accepted, is assigned; or
  the owner that serves does what the leader's `change` asks (I2). A vote keeps its epoch when a loss is accepted;
- a segment that begins to be served is not clean;
- SEALED comes in one transaction with the sealed state, and the last record that it names is where chunks end; SERVING
  comes in one with the storage's begin, which takes the sealed state away, unless the owner's disk is full, or the
  log has ended: no owner begins in such a log; where a log ends is written once, with the catalog's word for it;
- the frontier of the chunks never goes back to an earlier epoch, nor back in offsets, and an epoch has one holder;
- a cursor is written only by the epoch that has the segment (I3);
- a record is deleted only with its topic, or when the topic's record does not name the segment any more.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Changes
from braid.model.ids import Revision
from braid.model.names import SegmentName
from braid.model.ownership import TRANSITIONS, Ownership, OwnershipState
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.model.topic import Topic
from braid.storage.history.catalog import Frontier, SealedState
from braid.testing.checkers.history import PromiseBroken

Segment = tuple[str, str]
"""A topic's path and a segment's descriptor."""


class _Kept(NamedTuple):
    """What the checker remembers of a segment."""

    record: Ownership | None = None
    frontier: Frontier | None = None
    sealed: SealedState | None = None


class OwnershipChecker:
    def __init__(self, store: MemoryStore, note: Callable[[str], None]) -> None:
        self.moves = 0
        """Segments that were given to another broker than the last one that served them."""
        self.accepted_losses = 0
        self.on_accepted_loss: Callable[[Segment, Ownership, Frontier | None], None] = lambda *_: None
        """Called with the record that is given up."""
        self.may_hold: Callable[[str], bool] = lambda _broker: False
        """Tells whether a broker may serve what it has not begun: readers only, because its disk is full."""
        self.on_moving: Callable[[Ownership], None] = lambda _record: None
        """Called when somebody has wished that a segment that is served move."""
        self.on_sealed: Callable[[Segment, Ownership], None] = lambda _segment, _record: None
        self.on_replicas: Callable[[Segment, Ownership], None] = lambda _segment, _record: None
        """Called when an owner that serves a segment has changed its replicas."""
        self.votes = 0
        """How often replicas were asked to vote."""
        self._watch = store.client("checker").watch("/", Revision(0))
        self._note = note
        self._segments: dict[Segment, _Kept] = {}
        self._topics: dict[str, Topic] = {}
        self._servers: dict[Segment, str] = {}

    def record(self, segment: Segment) -> Ownership | None:
        return self._segments.get(segment, _Kept()).record

    async def watch(self, failed: Callable[[BaseException], None]) -> None:
        try:
            async for changes in self._watch:
                self._check(changes)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            failed(error)

    def _check(self, changes: Changes) -> None:
        now: dict[Segment, _Kept] = {}
        for event in changes.events:
            if (path := paths.topic_of_layout(event.key)) is not None:
                if event.value is None:
                    del self._topics[path]
                else:
                    self._topics[path] = Topic.from_json(event.value)
            elif (segment := paths.segment_of_ownership(event.key)) is not None:
                record = Ownership.from_json(event.value) if event.value is not None else None
                now[segment] = self._kept(now, segment)._replace(record=record)
            elif (place := _storage_of(event.key)) is not None:
                segment, kind = place
                kept = self._kept(now, segment)
                if kind == "cur":
                    frontier = msgspec.json.decode(event.value, type=Frontier) if event.value is not None else None
                    now[segment] = kept._replace(frontier=frontier)
                elif kind == "state":
                    sealed = msgspec.json.decode(event.value, type=SealedState) if event.value is not None else None
                    now[segment] = kept._replace(sealed=sealed)
        for segment, kept in now.items():
            before = self._segments.get(segment, _Kept())
            self._segments[segment] = kept
            self._check_frontier(segment, before.frontier, kept.frontier)
            if kept.record != before.record:
                self._check_record(segment, before, kept)
        for event in changes.events:
            if event.value is not None and (cursor := _cursor_of(event.key)) is not None:
                self._check_cursor(cursor, event.key, decode(Cursor, event.value))

    def _kept(self, now: dict[Segment, _Kept], segment: Segment) -> _Kept:
        return now[segment] if segment in now else self._segments.get(segment, _Kept())

    def _check_record(self, segment: Segment, before: _Kept, now: _Kept) -> None:
        old, new = before.record, now.record
        self._note(f"{segment[1]} of {segment[0]}: {_described(old)} → {_described(new)}")
        if new is None:
            topic = self._topics.get(segment[0])
            number = SegmentName.at(*segment).id
            if topic is not None and not topic.deleting and (number in topic.segments or _to_come(topic, number)):
                raise PromiseBroken("I3", f"the record of {segment} was deleted, and its topic was not")
            self._servers.pop(segment, None)
            return
        if old is None:
            if new != Ownership.first(new.owner, new.replicas, new.write_quorum):
                raise PromiseBroken("I3", f"{segment} begins as {new}")
            return
        _check_transition(segment, old, new)
        if new.state is OwnershipState.SERVING:
            _check_end(segment, old, now)
        if new.state is OwnershipState.SERVING and new.move is not None and old.move is None:
            self.on_moving(new)
        if new.state is OwnershipState.RECOVERING and old.state is not OwnershipState.RECOVERING:
            self.votes += 1
        if new.state is OwnershipState.SERVING and new.replicas != old.replicas:
            self.on_replicas(segment, new)
        if new.state is OwnershipState.SEALED:
            _check_seal(segment, before, now)
            self.on_sealed(segment, new)
        if new.state is OwnershipState.SERVING and old.state is OwnershipState.ASSIGNED:
            _check_begin(segment, before, now, held=self.may_hold(new.owner))
            if self._servers.get(segment, new.owner) != new.owner:
                self.moves += 1
            self._servers[segment] = new.owner
        if new.accept_loss and not old.accept_loss:
            self.accepted_losses += 1
            self.on_accepted_loss(segment, old, now.frontier)

    def _check_frontier(self, segment: Segment, old: Frontier | None, new: Frontier | None) -> None:
        if old is None or new is None or old == new:
            return
        if (new.epoch, new.next_offset) < (old.epoch, old.next_offset) or new.next_offset < old.next_offset:
            raise PromiseBroken("I3", f"the chunks of {segment} went back from {old} to {new}")
        if new.epoch == old.epoch and new.holder != old.holder:
            raise PromiseBroken("I3", f"two brokers write chunks of {segment} in epoch {new.epoch}: {old}, {new}")

    def _check_cursor(self, segment: Segment, key: str, cursor: Cursor) -> None:
        record = self.record(segment)
        if record is None or record.epoch != cursor.epoch or not record.is_owned:
            raise PromiseBroken("I3", f"{key} was written in epoch {cursor.epoch}; the record is {_described(record)}")


def _check_transition(segment: Segment, old: Ownership, new: Ownership) -> None:
    if new.state not in TRANSITIONS[old.state]:
        raise PromiseBroken("I3", f"{segment} went from {old.state.value} to {new.state.value}")
    if new.failures != old.failures and new == msgspec.structs.replace(old, failures=new.failures):
        if new.state is not OwnershipState.ASSIGNED:
            raise PromiseBroken("I3", f"{segment} is {new.state.value}, and its owner cannot open it: {new.failures}")
    elif new.state is old.state is OwnershipState.RECOVERING and new.epoch == old.epoch:
        if new != old.losing(new.given_up):
            raise PromiseBroken("I3", f"the replicas of {segment} vote in epoch {old.epoch}, and {old} became {new}")
    elif old.before is not None and not (new.accept_loss or new.state is OwnershipState.SERVING):
        if new != old.restored(new.owner):
            raise PromiseBroken("I2", f"the brokers of {segment} that were given up do not go on as before: {new}")
        return
    elif new.state is OwnershipState.RECOVERING:
        if (new.owner, new.epoch) != (old.owner, old.epoch + 1) or old.clean or not old.replicas:
            raise PromiseBroken("I3", f"{segment} went from {_described(old)} to {_described(new)}")
    elif old.state is OwnershipState.RECOVERING and new.state is OwnershipState.ASSIGNED and new.elected is not None:
        if new.epoch != old.epoch or new.owner not in old.replicas or new.replicas != old.replicas:
            raise PromiseBroken("I3", f"{new.owner} was elected for {segment} in epoch {new.epoch}, not of {old}")
    elif old.state is OwnershipState.DRAINING and new.elected is not None:
        if old.move is None or new != old.handed_to(old.move.to, new.elected):
            raise PromiseBroken("I2", f"{segment} was handed over otherwise than its move says: {old} became {new}")
        return
    elif new.state is OwnershipState.ASSIGNED:
        if new.epoch != old.epoch + 1:
            raise PromiseBroken("I3", f"{segment} was assigned in epoch {new.epoch}, after {old.epoch}")
        if new.owner != old.owner and not old.clean and not new.accept_loss:
            raise PromiseBroken("I2", f"{segment} was given to {new.owner} before {old.owner} had sealed it")
        if new.owner != old.owner and old.holders and new.owner not in old.holders and not new.accept_loss:
            raise PromiseBroken("I2", f"{segment} was given to {new.owner}; its history is on {old.holders}")
    elif (new.owner, new.epoch) != (old.owner, old.epoch):
        raise PromiseBroken("I3", f"{segment} went from {_described(old)} to {_described(new)}")
    _check_replicas(segment, old, new)
    _check_given_up(segment, new)


def _check_given_up(segment: Segment, new: Ownership) -> None:
    """Brokers that may go on with what they have get no other copies: these would count for the old ones."""
    if new.before is not None and not {new.owner, *new.replicas}.isdisjoint(new.before.keepers):
        raise PromiseBroken("I2", f"{segment} goes to brokers that may go on with what they had: {new}")


def _check_replicas(segment: Segment, old: Ownership, new: Ownership) -> None:
    """Replicas change by an assignment that loses nothing, or by the owner that does what the leader asks."""
    if new.change is not None and (new.state is not OwnershipState.SERVING or new.move is not None):
        raise PromiseBroken("I3", f"the replicas of {segment} are to change while it is {_described(new)}")
    if (new.replicas, new.write_quorum) == (old.replicas, old.write_quorum):
        return
    if new.state is OwnershipState.ASSIGNED:
        replaced = old.elected is not None and old.all_confirm and new.all_confirm and new.elected == old.elected
        allowed = old.clean or new.accept_loss or replaced
    else:
        change = old.change
        asked = change is not None and (new.replicas, new.write_quorum) == (change.replicas, change.write_quorum)
        allowed = asked and new.change is None and old.state is new.state is OwnershipState.SERVING
    if not allowed:
        raise PromiseBroken("I2", f"the replicas of {segment} changed from {old} to {new}")


def _check_seal(segment: Segment, before: _Kept, now: _Kept) -> None:
    sealed, frontier = now.sealed, now.frontier
    assert now.record is not None
    if before.sealed is not None and not before.sealed.ended:
        raise PromiseBroken("I1", f"the storage of {segment} was sealed before its record: {before}")
    if sealed is None or frontier is None:
        raise PromiseBroken("I1", f"the record of {segment} is sealed, and its storage is not")
    if sealed.broker_id != now.record.owner or sealed.last_committed_offset + 1 != frontier.next_offset:
        raise PromiseBroken("I1", f"{segment} is sealed as {sealed}, chunks are at {frontier}")


def _check_begin(segment: Segment, before: _Kept, now: _Kept, *, held: bool) -> None:
    assert now.record is not None
    if now.record.clean:
        raise PromiseBroken("I2", f"{segment} is served, and its record says that nothing is lost with its owner")
    ended = now.frontier is not None and now.frontier.end is not None
    if now.sealed is not None and not (ended and now.sealed.ended):
        raise PromiseBroken("I1", f"{segment} is served, and its storage is sealed: {now}")
    if now.frontier is None or not (now.frontier.begun or held or ended):
        raise PromiseBroken("I1", f"{segment} is served, and its storage has not begun: {now}")
    if (now.frontier.epoch, now.frontier.holder) != (now.record.epoch, now.record.owner):
        raise PromiseBroken("I3", f"{segment} is served by {_described(now.record)}, its chunks are {now.frontier}")
    if before.frontier is not None and before.frontier.begun and before.frontier.epoch == now.record.epoch:
        raise PromiseBroken("I1", f"the storage of {segment} had begun before it was served: {before}")


def _check_end(segment: Segment, old: Ownership, now: _Kept) -> None:
    """Where a log ends is said once, but for an accepted loss, and record and catalog say the same."""
    assert now.record is not None
    end = now.record.ended_at
    again = old.ended_at not in (None, end) and not old.accept_loss
    if again or (end is not None and (now.frontier is None or now.frontier.end != end)):
        ends = f"{old.ended_at} → {end}"
        raise PromiseBroken("I1", f"the end of {segment} in its record, {ends}, and in its catalog: {now.frontier}")


def _to_come(topic: Topic, segment: int) -> bool:
    return segment >= topic.layout.next_segment_id


def _storage_of(key: str) -> tuple[Segment, str] | None:
    match key.split("/"):
        case ["", "storage", tenant, namespace, name, descriptor, "chunks", "cur"]:
            return (f"{tenant}/{namespace}/{name}", descriptor), "cur"
        case ["", "storage", tenant, namespace, name, descriptor, "state"]:
            return (f"{tenant}/{namespace}/{name}", descriptor), "state"
    return None


def _cursor_of(key: str) -> Segment | None:
    match key.split("/"):
        case ["", "segments", tenant, namespace, name, descriptor, "cursors", _]:
            return f"{tenant}/{namespace}/{name}", descriptor
    return None


def _described(record: Ownership | None) -> str:
    if record is None:
        return "none"
    move = f", to move to {record.move.to or 'anyone'}" if record.move is not None else ""
    loss = ", loss accepted" if record.accept_loss else ""
    copies = f", {record.write_quorum} of {' '.join(record.replicas)}" if record.replicas else ""
    change = f", to become {record.change.write_quorum} of {record.change.replicas}" if record.change else ""
    return f"{record.state.value} {record.owner} epoch {record.epoch}{copies}{change}{move}{loss}"
