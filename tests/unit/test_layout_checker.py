"""What the checker of the simulation demands of each record of a topic."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import msgspec
import pytest

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Put
from braid.model.ids import Epoch, Offset, SegmentId
from braid.model.layout import Layout
from braid.model.ownership import Ownership
from braid.model.stored_record import encode
from braid.model.subscription import Cursor
from braid.model.topic import Topic
from braid.model.transition import plan_merge, plan_split
from braid.ports.clock import SystemClock
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.layout_checker import LayoutChecker

TOPIC = "public/default/orders"
PARENT, CHILDREN = "0000-ffff-0", ("0000-7fff-1", "8000-ffff-2")
WHOLE = Topic(id=1, layout=Layout.initial(1))
SPLITTING = WHOLE.beginning(plan_split(WHOLE.layout, 0), transition_id=7, created_at=0)
SEALING = SPLITTING.sealing()
HALVES = SEALING.committed()
SERVING = Ownership.first("a").serving()


class Metadata:
    """A topic whose split may be committed."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.checker = LayoutChecker(self.store)
        self._now: Topic | None = None
        self.put(paths.subscription(TOPIC, "billing"), b"{}")
        self.put(paths.consumer(TOPIC, "billing", "worker"), b"{}")
        self.put(paths.ownership(TOPIC, PARENT), SERVING.ended(Offset(5)).to_json())
        for child in CHILDREN:
            self.put(paths.cursor(TOPIC, child, "billing"), b"{}")

    def inherit(self) -> None:
        for child in CHILDREN:
            self.checker.on_record(TOPIC, child, SERVING.inheriting(7))

    def put(self, key: str, value: bytes) -> None:
        self.store._server.txn([], [Put(key, value)])

    def delete(self, key: str) -> None:
        self.store._server.txn([], [Delete(key)])

    def write(self, *topics: Topic) -> None:
        for topic in topics:
            self.checker.on_topic(TOPIC, self._now, topic)
            self._now = topic


def test_every_segment_is_remembered_with_its_first_parents() -> None:
    metadata = Metadata()
    pruned: list[tuple[str, int, int]] = []
    metadata.checker.on_pruned = lambda *told: pruned.append(told)
    dropped = msgspec.structs.replace(HALVES, layout=HALVES.layout.pruned(SegmentId(0)))
    metadata.write(WHOLE, SPLITTING, SEALING)
    metadata.inherit()
    metadata.write(HALVES, dropped)
    assert {each: info.parent_ids for each, info in metadata.checker.segments(TOPIC).items()} == {
        0: (),
        1: (0,),
        2: (0,),
    }
    assert pruned == [(TOPIC, 0, 5)]
    assert (metadata.checker.committed, metadata.checker.pruned, metadata.checker.aborted) == (1, 1, 0)


def test_a_transition_may_be_taken_back_until_logs_end() -> None:
    metadata = Metadata()
    metadata.write(WHOLE, SPLITTING, SPLITTING.aborted())
    assert metadata.checker.aborted == 1
    with pytest.raises(PromiseBroken, match="was taken back while logs end"):
        Metadata().write(WHOLE, SPLITTING, SEALING, msgspec.structs.replace(SEALING, transition=None))


def without(key: str) -> Callable[[Metadata], None]:
    return lambda metadata: metadata.delete(key)


@pytest.mark.parametrize(
    ("breaks", "complaint"),
    [
        (lambda metadata: metadata.put(paths.ownership(TOPIC, PARENT), SERVING.to_json()), "I4 .* its log goes on"),
        (without(paths.ownership(TOPIC, PARENT)), "I4 .* its log goes on"),
        (lambda metadata: metadata.checker.on_record(TOPIC, CHILDREN[1], SERVING.inheriting(6)), "I10 .* inherited"),
        (without(paths.cursor(TOPIC, CHILDREN[0], "billing")), "I5 .* billing has no cursor on 0000-7fff-1"),
    ],
)
def test_a_layout_is_committed_when_all_parents_have_ended_and_all_children_are_ready(
    breaks: Callable[[Metadata], None], complaint: str
) -> None:
    metadata = Metadata()
    metadata.write(WHOLE, SPLITTING, SEALING)
    metadata.inherit()
    breaks(metadata)
    with pytest.raises(PromiseBroken, match=complaint):
        metadata.write(HALVES)


@pytest.mark.parametrize(("offset", "breaks"), [(0, False), (3, True)])
def test_a_subscription_that_comes_during_a_transition_gets_its_cursors_at_the_beginning_of_the_children(
    offset: int, breaks: bool
) -> None:
    metadata = Metadata()
    metadata.write(WHOLE, SPLITTING, SEALING)
    metadata.inherit()
    metadata.put(paths.subscription(TOPIC, "late"), b"{}")
    metadata.write(HALVES)
    cursor = Put(paths.cursor(TOPIC, CHILDREN[1], "late"), encode(Cursor(offset=Offset(offset), epoch=Epoch(1))))
    with pytest.raises(PromiseBroken, match=r"I5 .* is owed") if breaks else nullcontext():
        metadata.checker.on_transaction([cursor])
    metadata.checker.on_transaction([Put(cursor.key, encode(Cursor(offset=Offset(9), epoch=Epoch(1))))])


def test_a_child_inherits_when_all_parents_have_ended() -> None:
    metadata = Metadata()
    metadata.write(WHOLE, SPLITTING, SEALING)
    metadata.put(paths.ownership(TOPIC, PARENT), SERVING.to_json())
    with pytest.raises(PromiseBroken, match=r"I10 .* inherits, and the log of its parent 0 goes on"):
        metadata.inherit()


MERGED = HALVES.beginning(plan_merge(HALVES.layout, 1, 2), transition_id=8, created_at=0).sealing().committed()


@pytest.mark.parametrize(
    "written",
    [
        [WHOLE, SPLITTING, msgspec.structs.replace(HALVES, layout=msgspec.structs.replace(HALVES.layout, epoch=2))],
        [WHOLE, HALVES],
        [WHOLE, SPLITTING, SEALING, MERGED],
        [HALVES, WHOLE],
        [HALVES, SPLITTING],
    ],
    ids=["an epoch is left out", "without a transition", "two at the same time", "backwards", "ids again"],
)
def test_a_layout_changes_by_one_transition_after_the_other(written: list[Topic]) -> None:
    with pytest.raises(PromiseBroken):
        Metadata().write(*written)


def test_a_parent_is_dropped_only_when_its_transition_has_ended() -> None:
    metadata = Metadata()
    assert SEALING.transition is not None
    metadata.write(WHOLE, SPLITTING, SEALING)
    metadata.inherit()
    metadata.write(HALVES)
    metadata.put(paths.transition(TOPIC), encode(SEALING.transition.mark(1)))
    with pytest.raises(PromiseBroken, match="dropped before its transition ends"):
        metadata.write(HALVES.pruned(SegmentId(0)))
    metadata.delete(paths.transition(TOPIC))
    metadata.write(HALVES.pruned(SegmentId(0)))
