"""The checker of the end of transitions: the mark of a commit goes when nobody needs the parents, and not before.

    finalize = drained && (adopted || timed out)

It sees each transaction before the store applies it:

- every subscription that it was told of has once been drained on every parent that the layout still has (I5);
- the reports of all live brokers have once shown that their clients know the children, or the parents have been drained
  for as long as the leader waits for clients that do not tell.

"Once", because a leader decides by what it knows: a seek, or a client that has just come, may be news to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from braid.broker.layouts.finalizing import ADOPTION_S
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Operation, Put
from braid.model.load import LoadReport
from braid.model.names import SegmentName, TopicName
from braid.model.stored_record import decode
from braid.model.topic import Topic
from braid.model.transition import CommittedTransition
from braid.testing.checkers.history import PromiseBroken

ROUNDING_S: Final = 0.01


class FinalizeChecker:
    def __init__(self, store: MemoryStore, now: Callable[[], float], subscriptions: Callable[[str], list[str]]) -> None:
        """`subscriptions` returns those of a topic that exist before its first transition, and to its end."""
        self.finalized = 0
        self.timed_out = 0
        """Ends that came although a client had not told that it knows the children."""
        self._server = store._server
        self._now = now
        self._subscriptions = subscriptions
        self._committed_at: dict[str, float] = {}
        """By a mark's key."""
        self._drained_at: dict[str, float] = {}
        """By a drained mark's key: when it was first put."""
        self._adopted: set[int] = set()
        """The transitions whose children all clients have known once."""

    def on_transaction(self, operations: Sequence[Operation]) -> None:
        """A transaction is to be applied."""
        for operation in operations:
            path = paths.topic_of_transition(operation.key)
            if path is not None and isinstance(operation, Put):
                self._committed_at[operation.key] = self._now()
            elif path is not None and isinstance(operation, Delete):
                self._check_end(path, operation)
            elif isinstance(operation, Put) and paths.drained_of(operation.key) is not None:
                self._drained_at.setdefault(operation.key, self._now())
            elif operation.key.startswith(paths.LOADS_PREFIX):
                self._note_adopted()
                self._note_adopted(operation)

    def _note_adopted(self, change: Operation | None = None) -> None:
        reports = {entry.key: entry.value for entry in self._server.list(paths.LOADS_PREFIX).entries}
        if isinstance(change, Put):
            reports[change.key] = change.value
        elif change is not None:
            reports.pop(change.key, None)
        found = [decode(LoadReport, each).adopted_generation for each in reports.values()]
        lowest = min((generation for generation in found if generation is not None), default=0)
        for key in self._committed_at:
            mark = self._server.get(key)
            if mark is not None and lowest >= mark.revision:
                self._adopted.add(decode(CommittedTransition, mark.value).id)

    def _check_end(self, path: str, delete: Delete) -> None:
        mark, entry = self._server.get(delete.key), self._server.get(paths.layout(path))
        topic = Topic.from_json(entry.value) if entry is not None else None
        if mark is None or topic is None or topic.deleting:
            return
        self._note_adopted()
        transition = decode(CommittedTransition, mark.value)
        since = self._committed_at[delete.key]
        for parent in set(transition.parents) & topic.layout.segments.keys():
            descriptor = SegmentName.of(TopicName.parse(path), topic.layout.segments[parent]).descriptor
            for name in self._subscriptions(path):
                drained_at = self._drained_at.get(paths.drained(path, descriptor, name))
                if drained_at is None:
                    raise PromiseBroken("I5", f"{transition} of {path} has ended, and {name} never drained {parent}")
                since = max(since, drained_at)
        self.finalized += 1
        if transition.id in self._adopted:
            return
        self.timed_out += 1
        if self._now() - since < ADOPTION_S - ROUNDING_S:
            waited_s = self._now() - since
            raise PromiseBroken(
                "adoption", f"{transition} of {path} has ended {waited_s:g} s after {since:g}, before clients know it"
            )
