"""Which comparisons each write to the metadata needs, by the checker of the simulation."""

from __future__ import annotations

import msgspec
import pytest

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Compare, Delete, Operation, Put
from braid.model.ids import Offset, RequestId, Revision, SegmentId
from braid.model.layout import Layout
from braid.model.ownership import Move, Ownership
from braid.model.topic import Topic, TopicPolicies
from braid.model.transition import plan_split
from braid.ports.clock import SystemClock
from braid.testing.checkers.fence_checker import FenceChecker

TOPIC, DESCRIPTOR = "public/default/orders", "0000-ffff-0"
RECORD = paths.ownership(TOPIC, DESCRIPTOR)
FRONTIER = paths.current_chunk(TOPIC, DESCRIPTOR)
CURSOR = paths.cursor(TOPIC, DESCRIPTOR, "billing")
CONSUMER = paths.consumer(TOPIC, "billing", "worker")
CONTROLLER = paths.controller(TOPIC)
LEADER = paths.CLUSTER_LEADER
SERVING = Ownership.first("a").serving()
UNOPENED = Ownership.first("a").unopened("its disk is full", lasting=False)
UNABLE = SERVING.taken_again().unopened("its files are gone", lasting=True)
GIVEN_UP = SERVING.assigned("b", accept_loss=True, given_up=["a"])


def put(key: str, record: Ownership | None = None) -> Put:
    return Put(key, record.to_json() if record is not None else b"{}")


@pytest.mark.parametrize(
    ("before", "write", "needed"),
    [
        (None, put(LEADER), {LEADER}),
        (None, put(CONTROLLER), {CONTROLLER}),
        (None, put(FRONTIER), {FRONTIER}),
        (None, put(paths.chunk(TOPIC, DESCRIPTOR, Offset(0))), {FRONTIER}),
        (None, put(paths.sealed_state(TOPIC, DESCRIPTOR)), {FRONTIER}),
        (None, put(CURSOR), {CURSOR, RECORD}),
        (None, put(paths.drained(TOPIC, DESCRIPTOR, "billing")), {CURSOR, RECORD}),
        (None, put(CONSUMER), {CONSUMER, CONTROLLER}),
        (None, put(RECORD, Ownership.first("a")), {RECORD, LEADER}),
        (Ownership.first("a"), put(RECORD, SERVING), {RECORD}),
        (Ownership.first("a"), put(RECORD, Ownership.first("a").assigned("b")), {RECORD, LEADER}),
        (UNOPENED, put(RECORD, UNOPENED.assigned("b")), {RECORD}),
        (SERVING, put(RECORD, SERVING.taken_again()), {RECORD}),
        (SERVING, put(RECORD, SERVING.moving(Move(to="b", id="asked"))), {RECORD}),
        (SERVING, put(RECORD, SERVING.moving(Move(to="b", id="drain"))), {RECORD, LEADER}),
        (SERVING, put(RECORD, SERVING.moving(Move(to="b", id="balance"))), {RECORD, LEADER}),
        (SERVING, put(RECORD, SERVING.assigned("b", accept_loss=True)), {RECORD, paths.broker("a")}),
        (UNABLE, put(RECORD, UNABLE.assigned("b", accept_loss=True)), {RECORD}),
        (GIVEN_UP, put(RECORD, GIVEN_UP.serving()), {RECORD, paths.broker("a")}),
        (None, put(paths.subscription(TOPIC, "billing")), set[str]()),
    ],
)
def test_a_write_is_reported_unless_it_carries_each_of_its_comparisons(
    before: Ownership | None, write: Put, needed: set[str]
) -> None:
    assert not reported(before, write, needed)
    for left_out in needed:
        (failure,) = reported(before, write, needed - {left_out})
        assert f"without a comparison of {left_out}" in str(failure)


def reported(before: Ownership | None, write: Put, compared: set[str]) -> list[BaseException]:
    store = MemoryStore(SystemClock())
    server = store._server
    revision = server.txn([], [put(RECORD, before)]).revision if before is not None else Revision(0)
    failures: list[BaseException] = []
    FenceChecker(store, failures.append)
    conditions = [Compare(key, revision if key == RECORD else Revision(0)) for key in sorted(compared)]
    assert server.txn(conditions, [write]).succeeded
    return failures


RECORD_OF_TOPIC, MARK = paths.layout(TOPIC), paths.transition(TOPIC)
WHOLE = Topic(id=1, layout=Layout.initial(1))
PLAN = plan_split(WHOLE.layout, 0)
SPLITTING = WHOLE.beginning(PLAN, transition_id=7, created_at=0, created_by=RequestId(9))
SCALING = WHOLE.beginning(PLAN, transition_id=7, created_at=0)
HALVES = SPLITTING.sealing().committed()
PRUNED = msgspec.structs.replace(HALVES, layout=HALVES.layout.pruned(SegmentId(0)))


def put_topic(topic: Topic) -> Put:
    return Put(RECORD_OF_TOPIC, topic.to_json())


@pytest.mark.parametrize(
    ("before", "write", "needed"),
    [
        (None, put_topic(WHOLE), {RECORD_OF_TOPIC}),
        (WHOLE, put_topic(SPLITTING), {RECORD_OF_TOPIC}),
        (WHOLE, put_topic(SCALING), {RECORD_OF_TOPIC, LEADER}),
        (SPLITTING, put_topic(SPLITTING.aborted()), {RECORD_OF_TOPIC}),
        (SPLITTING, put_topic(SPLITTING.sealing()), {RECORD_OF_TOPIC, LEADER}),
        (SPLITTING.sealing(), put_topic(HALVES), {RECORD_OF_TOPIC, LEADER}),
        (HALVES, put_topic(PRUNED), {RECORD_OF_TOPIC, RECORD}),
        (HALVES, Put(MARK, b"{}"), {LEADER}),
        (HALVES, Delete(MARK), {MARK, LEADER}),
        (msgspec.structs.replace(HALVES, deleting=True), Delete(MARK), set[str]()),
    ],
)
def test_a_change_of_a_layout_is_reported_unless_it_carries_each_of_its_comparisons(
    before: Topic | None, write: Operation, needed: set[str]
) -> None:
    def reported(compared: set[str]) -> list[BaseException]:
        store = MemoryStore(SystemClock())
        revision = store._server.txn([], [put_topic(before)]).revision if before is not None else Revision(0)
        failures: list[BaseException] = []
        FenceChecker(store, failures.append)
        conditions = [Compare(key, revision if key == RECORD_OF_TOPIC else Revision(0)) for key in sorted(compared)]
        assert store._server.txn(conditions, [write]).succeeded
        return failures

    assert not reported(needed)
    for left_out in needed:
        (failure,) = reported(needed - {left_out})
        assert f"without a comparison of {left_out}" in str(failure)


@pytest.mark.parametrize(("retention_ms", "compared"), [(None, True), (1, False)])
def test_a_call_that_drops_a_segment_compares_the_drained_marks(retention_ms: int | None, compared: bool) -> None:
    store = MemoryStore(SystemClock())
    policies = TopicPolicies(retention_ms=retention_ms)
    marks = [paths.drained(TOPIC, DESCRIPTOR, name) for name in ("billing", "deleted")]
    there = [paths.subscription(TOPIC, "billing"), paths.subscription(TOPIC, "late"), *marks]
    before = msgspec.structs.replace(HALVES, policies=policies)
    server = store._server
    revision = server.txn([], [put_topic(before), *(Put(key, b"{}") for key in there)]).revision
    failures: list[BaseException] = []
    FenceChecker(store, failures.append)
    conditions = [Compare(RECORD_OF_TOPIC, revision), Compare(RECORD, Revision(0))]
    assert server.txn(conditions, [put_topic(before.pruned(SegmentId(0)))]).succeeded
    expected = f"I3 is broken: {RECORD_OF_TOPIC} was written without a comparison of {marks[0]}"
    assert [str(failure) for failure in failures] == ([expected] if compared else [])
