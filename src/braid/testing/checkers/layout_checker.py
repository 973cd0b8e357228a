"""The checker of layouts: every record that a topic ever has, against the record before it and those of its segments.

The fence checker shows it each write before the store applies it, so it misses none:

- the active ranges tile the ring (I6); ids rise and are never given out twice; a segment that has ended stays so;
- the layout changes by a commit, which adds the children of the transition and seals its parents, or by pruning, which
  drops one sealed segment that has no parents left, and whose own transition has ended; each raises the layout's epoch
  by one;
- a child inherits when the logs of all its parents have ended (I10);
- at a commit the log of every parent has ended (I4), every child has inherited from its parents (I10), and every
  subscription has its cursor on every child (I5); a transition whose logs end is not taken back;
- a subscription that is created meanwhile may get such a cursor later: at the child's first record (I5).

It remembers every segment of a topic, with its first parents, also when the layout has dropped the segment.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Operation, Put
from braid.model.ids import NO_REQUEST, Offset, Revision, SegmentId
from braid.model.layout import FULL_RANGE, SegmentInfo, tiles
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.model.topic import Topic
from braid.model.transition import CommittedTransition, Transition, TransitionStep
from braid.testing.checkers.history import PromiseBroken


class LayoutChecker:
    def __init__(self, store: MemoryStore) -> None:
        self.committed = 0
        self.aborted = 0
        self.pruned = 0
        self.on_pruned: Callable[[str, SegmentId, Offset], None] = lambda *_: None
        """Called with the topic, the segment that its layout drops, and where the log of the segment ended."""
        self._server = store._server
        self._segments: dict[str, dict[SegmentId, SegmentInfo]] = defaultdict(dict)
        self._inherited: dict[tuple[str, str], int] = {}
        """By topic and descriptor, the last transition that a segment's record named."""
        self._before: dict[str, dict[str, Revision]] = {}
        """By topic that changes, and name: the subscriptions that were there before."""
        self._owed: set[str] = set()
        """The keys of cursors that subscriptions do not have yet on children."""

    def segments(self, path: str) -> dict[SegmentId, SegmentInfo]:
        """Return every segment that the topic has had, as it was at first."""
        return self._segments[path]

    def on_record(self, path: str, descriptor: str, record: Ownership) -> None:
        """A segment's record is to be written."""
        if record.inherited in (0, self._inherited.get((path, descriptor))):
            return
        self._inherited[path, descriptor] = record.inherited
        known = self._segments[path]
        for parent in known[SegmentName.at(path, descriptor).id].parent_ids:
            ended = self._record(path, known[parent])
            if ended is not None and ended.ended_at is None:
                raise PromiseBroken(
                    "I10", f"{descriptor} of {path} inherits, and the log of its parent {parent} goes on: {ended}"
                )

    def on_topic(self, path: str, old: Topic | None, new: Topic) -> None:
        """A topic's record is to be written."""
        if old is None or old.id != new.id:
            self._segments[path].clear()
            old = None
        active = sorted(each.hash_range for each in new.layout.segments.values() if each.is_active)
        if not tiles(active, FULL_RANGE):
            raise PromiseBroken("I6", f"the active ranges of {path} are {', '.join(map(str, active))}")
        if old is not None:
            self._check_change(path, old, new)
        for segment, info in new.segments.items():
            self._segments[path].setdefault(segment, info)

    def on_transaction(self, operations: Sequence[Operation]) -> None:
        """A transaction is to be applied."""
        for operation in operations:
            if operation.key not in self._owed:
                continue
            self._owed.remove(operation.key)
            cursor = decode(Cursor, operation.value) if isinstance(operation, Put) else None
            if cursor is not None and cursor.offset > 0 and cursor.placed_by == NO_REQUEST:
                raise PromiseBroken("I5", f"{operation.key} is owed since its segment came, and is put at {cursor}")

    def _check_change(self, path: str, old: Topic, new: Topic) -> None:
        before, now = old.layout, new.layout
        if old.transition is None and new.transition is not None:
            self._check_begun(path, old, new.transition)
            self._before[path] = self._subscriptions(path)
        added, dropped = now.segments.keys() - before.segments.keys(), before.segments.keys() - now.segments.keys()
        if now.next_segment_id < before.next_segment_id or now.epoch != before.epoch + bool(added or dropped):
            raise PromiseBroken("I6", f"the layout of {path} went from {before} to {now}")
        if added:
            self._check_commit(path, old, new, added)
        elif dropped:
            self._check_dropped(path, old, new, dropped)
        elif [each.segment_id for each in now.active] != [each.segment_id for each in before.active]:
            raise PromiseBroken("I6", f"the layout of {path} went from {before} to {now} without a transition")
        elif old.transition is not None and new.transition is None:
            self.aborted += 1
            if old.transition.step is not TransitionStep.CREATING:
                raise PromiseBroken("I4", f"{path}: {old.transition} was taken back while logs end")

    def _check_begun(self, path: str, old: Topic, begun: Transition) -> None:
        again = [child for child in begun.child_ids if child in self._segments[path]]
        if again or min(begun.child_ids) < old.layout.next_segment_id:
            raise PromiseBroken("I6", f"{path}: {begun} gives ids out again")

    def _check_commit(self, path: str, old: Topic, new: Topic, added: set[SegmentId]) -> None:
        transition = old.transition
        if transition is None or new.transition is not None or added != set(transition.child_ids):
            raise PromiseBroken("I6", f"{path}: {sorted(added)} came into the layout, the transition was {transition}")
        sealed = {each.segment_id for each in old.layout.active} - {each.segment_id for each in new.layout.active}
        if sealed != set(transition.parents):
            raise PromiseBroken("I6", f"{path}: {sorted(sealed)} were replaced, the transition was {transition}")
        self.committed += 1
        for parent in transition.parents:
            record = self._record(path, old.segments[parent])
            if record is None or record.ended_at is None:
                raise PromiseBroken("I4", f"segment {parent} of {path} is replaced, and its log goes on: {record}")
        subscriptions = self._subscriptions(path)
        for child in transition.child_ids:
            descriptor = self._descriptor(path, old.segments[child])
            if self._inherited.get((path, descriptor)) != transition.id:
                raise PromiseBroken("I10", f"{descriptor} of {path} is in the layout, and has not inherited")
            for name, revision in subscriptions.items():
                key = paths.cursor(path, descriptor, name)
                if self._server.get(key) is not None:
                    continue
                if self._before[path].get(name) == revision:
                    raise PromiseBroken("I5", f"{name} has no cursor on {descriptor} of {path}, which is in the layout")
                self._owed.add(key)

    def _check_dropped(self, path: str, old: Topic, new: Topic, dropped: set[SegmentId]) -> None:
        infos = [old.layout.segments[segment] for segment in dropped]
        if new.transition != old.transition or any(info.is_active or info.parent_ids for info in infos):
            raise PromiseBroken("I6", f"the layout of {path} went from {old.layout} to {new.layout}")
        mark = self._server.get(paths.transition(path))
        replaced = decode(CommittedTransition, mark.value).parents if mark is not None else ()
        for info in infos:
            record = self._record(path, info)
            if info.segment_id in replaced:
                raise PromiseBroken("I6", f"segment {info.segment_id} of {path} is dropped before its transition ends")
            if record is None or record.ended_at is None:
                raise PromiseBroken("I2", f"segment {info.segment_id} of {path} is dropped, its record is {record}")
            self.pruned += 1
            self.on_pruned(path, info.segment_id, record.ended_at)

    def _descriptor(self, path: str, info: SegmentInfo) -> str:
        return SegmentName.of(TopicName.parse(path), info).descriptor

    def _record(self, path: str, info: SegmentInfo) -> Ownership | None:
        entry = self._server.get(paths.ownership(path, self._descriptor(path, info)))
        return Ownership.from_json(entry.value) if entry is not None else None

    def _subscriptions(self, path: str) -> dict[str, Revision]:
        entries = self._server.list(paths.subscriptions_prefix(path)).entries
        return {name: entry.revision for entry in entries if (name := paths.subscription_of(entry.key)) is not None}
