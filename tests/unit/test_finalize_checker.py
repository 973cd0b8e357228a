"""What the checker of the simulation demands of the end of a transition."""

from __future__ import annotations

import pytest

from braid.broker.layouts.finalizing import ADOPTION_S
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Operation, Put
from braid.model.ids import SegmentId
from braid.model.layout import Layout
from braid.model.load import LoadReport
from braid.model.stored_record import encode
from braid.model.topic import Topic
from braid.model.transition import CommittedTransition, plan_split
from braid.ports.clock import SystemClock
from braid.testing.checkers.finalize_checker import FinalizeChecker
from braid.testing.checkers.history import PromiseBroken

TOPIC = "public/default/orders"
PARENT = "0000-ffff-0"
WHOLE = Topic(id=1, layout=Layout.initial(1))
HALVES = WHOLE.beginning(plan_split(WHOLE.layout, 0), transition_id=7, created_at=0).sealing().committed()
MARK = CommittedTransition(id=7, parents=(SegmentId(0),), child_ids=(SegmentId(1), SegmentId(2)), committed_at=0)


class Split:
    """A split that is committed; one subscription has yet to drain its parent."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.store = MemoryStore(SystemClock())
        self.checker = FinalizeChecker(self.store, lambda: self.now_s, lambda _path: ["billing"])
        self.write(Put(paths.layout(TOPIC), HALVES.to_json()), Put(paths.transition(TOPIC), encode(MARK)))

    def write(self, *operations: Operation) -> None:
        self.checker.on_transaction(operations)
        self.store._server.txn([], operations)

    def drain(self) -> None:
        self.write(Put(paths.drained(TOPIC, PARENT, "billing"), b"{}"))

    def report(self, broker: str, generation: int | None) -> None:
        self.write(Put(paths.load(broker), LoadReport(at=0, adopted_generation=generation).to_json()))

    @property
    def generation(self) -> int:
        mark = self.store._server.get(paths.transition(TOPIC))
        assert mark is not None
        return mark.revision

    def end(self) -> None:
        self.write(Delete(paths.transition(TOPIC)))


def test_a_transition_ends_when_it_is_drained_and_clients_know_the_children() -> None:
    split = Split()
    split.drain()
    split.report("a", split.generation)
    split.report("b", None)
    split.end()
    assert (split.checker.finalized, split.checker.timed_out) == (1, 0)


def test_a_transition_does_not_end_before_it_is_drained() -> None:
    split = Split()
    split.report("a", split.generation)
    split.now_s += 10 * ADOPTION_S
    with pytest.raises(PromiseBroken, match=r"I5 .* billing never drained 0"):
        split.end()


def behind() -> Split:
    """A split that is drained, beside a client that does not know the children."""
    split = Split()
    split.drain()
    split.report("b", split.generation - 1)
    split.report("a", split.generation)
    return split


def test_a_client_that_does_not_know_the_children_delays_the_end_for_a_while() -> None:
    split = behind()
    split.now_s += ADOPTION_S - 1
    with pytest.raises(PromiseBroken, match=r"adoption .* before clients know it"):
        split.end()
    split = behind()
    split.now_s += ADOPTION_S
    split.end()
    assert split.checker.timed_out == 1


def test_the_report_of_a_broker_that_is_gone_does_not_count() -> None:
    split = behind()
    split.store._server.txn([], [Delete(paths.load("b"))])  # As the end of its lease does.
    split.end()
    assert split.checker.timed_out == 0


def test_the_mark_of_a_topic_that_is_deleted_goes_with_it() -> None:
    split = Split()
    split.store._server.txn([], [Delete(paths.layout(TOPIC))])
    split.end()
    assert split.checker.finalized == 0
