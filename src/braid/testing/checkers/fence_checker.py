"""The checker of fences: every transaction that the metadata store applies has *carried* the comparisons that it needs.

A write without its comparison does harm only when another writer is faster, and that is rare. So this checker does not
wait for the harm. It looks at the conditions of each transaction, and knows which keys a write must compare (I3):

    an ownership record             the record itself
      that names another owner      the leadership; a call may also move a segment that its owner cannot open, and an
                                    owner may hand it to a follower
      that accepts a loss           instead, that each broker is gone that is given up; any other one cannot open it
      that carries out a loss       that each of these brokers is still gone, unless it cannot open the segment
      with the leader's own move    the leadership: that of a drain or of balancing
    a frontier                      the frontier itself
    a chunk, a sealed state         the frontier
    a cursor                        the cursor itself, and the segment's ownership record
    a drained mark                  its cursor, and the segment's ownership record
    a consumer's session            the session itself, and the topic's controller
    a leader, a controller          the key itself
    a topic's record                the record itself
      whose parents are to end      the leadership, too
      with a new layout             the leadership, too
      with a change by load         the leadership, too: no call has asked for it
      that has dropped a segment    the segment's ownership record, too; the drained marks, unless retention drops it
    a commit's mark, and its end    the leadership
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Condition, Delete, Operation, Put
from braid.model.ids import NO_REQUEST
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.model.transition import TransitionStep
from braid.testing.checkers.history import PromiseBroken

LEADERS_MOVES: Final = ("drain", "balance")
"""The ids of moves that only a leader writes."""


class FenceChecker:
    def __init__(self, store: MemoryStore, failed: Callable[[BaseException], None]) -> None:
        self.on_sealing: Callable[[str, str, Ownership], None] = lambda _path, _descriptor, _record: None
        """Called before a record becomes SEALED, with the segment's topic and descriptor."""
        self.on_record: Callable[[str, str, Ownership], None] = lambda _path, _descriptor, _record: None
        """Called before an ownership record is written, with the segment's topic and descriptor."""
        self.on_topic: Callable[[str, Topic | None, Topic], None] = lambda _path, _old, _new: None
        """Called before a topic's record is written, with the record that it replaces."""
        self.on_transaction: Callable[[Sequence[Operation]], None] = lambda _operations: None
        """Called before a transaction is applied, when its parts were looked at."""
        self._server = store._server
        self._failed = failed
        store.observe(self._check)

    def _check(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> None:
        """Report what is wrong, and raise nothing: the writer must not get the error of its checker."""
        compared = {condition.key for condition in conditions}
        try:
            for operation in operations:
                for key in self._fences(operation) if isinstance(operation, Put) else self._fences_of_end(operation):
                    if key not in compared:
                        raise PromiseBroken("I3", f"{operation.key} was written without a comparison of {key}")
            self.on_transaction(operations)
        except Exception as error:
            self._failed(error)

    def _fences(self, put: Put) -> list[str]:
        match put.key.split("/"):
            case ["", "cluster", "leader"] | ["", "topics", _, _, _, "controller"]:
                return [put.key]
            case ["", "topics", _, _, _]:
                return [put.key, *self._fences_of_topic(put)]
            case ["", "topics", _, _, _, "transition"]:
                return [paths.CLUSTER_LEADER]
            case ["", "segments", *topic, descriptor, "ownership"]:
                return [put.key, *self._fences_of_record("/".join(topic), descriptor, put)]
            case ["", "segments", *topic, descriptor, "cursors", _]:
                return [put.key, paths.ownership("/".join(topic), descriptor)]
            case ["", "segments", *topic, descriptor, "drained", subscription]:
                cursor = f"{paths.cursors_prefix('/'.join(topic), descriptor)}{subscription}"
                return [cursor, paths.ownership("/".join(topic), descriptor)]
            case ["", "storage", *topic, descriptor, "chunks", _] | ["", "storage", *topic, descriptor, "state"]:
                return [paths.current_chunk("/".join(topic), descriptor)]
            case ["", "topics", *topic, "subscriptions", _, "consumers", _]:
                return [put.key, paths.controller("/".join(topic))]
        return []

    def _fences_of_record(self, path: str, descriptor: str, put: Put) -> list[str]:
        entry = self._server.get(put.key)
        old = Ownership.from_json(entry.value) if entry is not None else None
        new = Ownership.from_json(put.value)
        self.on_record(path, descriptor, new)
        if new.state is OwnershipState.SEALED:
            self.on_sealing(path, descriptor, new)
        if old is not None and new.accept_loss and not old.accept_loss:
            lost = new.given_up if old.replicas else old.keepers  # Replicas that are there vote.
            return [paths.broker(broker) for broker in lost if old.failure_of(broker) is None]
        if old is not None and old.accept_loss and new.state is OwnershipState.SERVING:
            unable = {new.owner, *(failure.broker for failure in old.failures)}
            return [paths.broker(broker) for broker in old.given_up if broker not in unable]
        if old is not None and old.state is OwnershipState.DRAINING and new.elected is not None:
            return []  # The owner gives the segment to its follower; the ownership checker compares with the move.
        given = old is None or (new.owner != old.owner and old.failure_of(old.owner) is None)
        moved = old is not None and new.move is not None and new.move != old.move and new.move.id in LEADERS_MOVES
        return [paths.CLUSTER_LEADER] if given or moved else []

    def _fences_of_topic(self, put: Put) -> list[str]:
        old, new = self._topic(put.key), Topic.from_json(put.value)
        path = put.key.removeprefix(paths.TOPICS_PREFIX)
        self.on_topic(path, old, new)
        if old is None or old.id != new.id:
            return []
        if new.layout.segments.keys() - old.layout.segments.keys():
            return [paths.CLUSTER_LEADER]
        ends = new.transition is not None and new.transition.step is TransitionStep.SEALING
        if ends and new.transition != old.transition:
            return [paths.CLUSTER_LEADER]
        if old.transition is None and new.transition is not None and new.transition.created_by == NO_REQUEST:
            return [paths.CLUSTER_LEADER]
        dropped = [info for segment, info in old.layout.segments.items() if segment not in new.layout.segments]
        names = [SegmentName.of(TopicName.parse(path), info) for info in dropped]
        return [key for name in names for key in self._fences_of_drop(name, new)]

    def _fences_of_drop(self, name: SegmentName, topic: Topic) -> list[str]:
        """The owner of a segment, which has the cursors, drops it when retention has deleted its records. Any other
        segment is dropped by a call: a seek may take a mark away meanwhile (I5)."""
        ownership = paths.ownership(name.topic.path, name.descriptor)
        policies = topic.policies
        if policies.retention_ms is not None or policies.retention_bytes is not None:
            return [ownership]
        path, descriptor = name.topic.path, name.descriptor
        entries = self._server.list(paths.subscriptions_prefix(path)).entries
        names = [found for entry in entries if (found := paths.subscription_of(entry.key)) is not None]
        marks = [paths.drained(path, descriptor, each) for each in names]
        return [ownership, *(mark for mark in marks if self._server.get(mark) is not None)]

    def _fences_of_end(self, delete: Delete) -> list[str]:
        """Of a topic that stays, only the leader takes the mark of a commit away."""
        path = paths.topic_of_transition(delete.key)
        topic = self._topic(paths.layout(path)) if path is not None else None
        return [delete.key, paths.CLUSTER_LEADER] if topic is not None and not topic.deleting else []

    def _topic(self, key: str) -> Topic | None:
        entry = self._server.get(key)
        return Topic.from_json(entry.value) if entry is not None else None
