"""What owners tell of queues, put together: pure values."""

from __future__ import annotations

from braid.broker.admin.reports import consumers_of_queues
from braid.broker.admin.results.subscriptions import QueueDescription
from braid.broker.admin.segment_stats import QueueStatistics
from braid.broker.groups.group import ConsumerStatus
from braid.broker.groups.subscriptions import Progress
from braid.model.ids import Offset, SegmentId
from braid.model.subscription import QueuePolicies


def queue(ready: int, *consumers: str, oldest_at: int | None = None, blocked: str = "") -> QueueStatistics:
    return QueueStatistics(
        ready=ready, leased=1, delayed=2, dead_lettered=3, oldest_at=oldest_at, consumers=consumers, blocked=blocked
    )


def test_a_queue_is_the_sum_of_its_segments() -> None:
    found = {SegmentId(0): queue(5, oldest_at=70), SegmentId(2): queue(0, oldest_at=40, blocked="too many")}
    policies = QueuePolicies(ack_timeout_ms=7)
    assert QueueDescription.of(policies, found) == QueueDescription(
        ready=5, leased=2, delayed=4, dead_lettered=6, oldest_at=40, blocked={SegmentId(2): "too many"},
        policies=policies,
    )  # fmt: skip
    assert QueueDescription.of(policies, {}).oldest_at is None


def test_a_consumer_of_a_queue_is_named_once_with_all_its_segments() -> None:
    found = {
        SegmentId(1): {"work": queue(0, "b", "a", "a"), "mail": queue(0)},
        SegmentId(0): {"work": queue(0, "a")},
    }
    assert consumers_of_queues(found) == {
        "work": {"a": ConsumerStatus((0, 1), connected=True), "b": ConsumerStatus((1,), connected=True)}
    }


def test_the_backlog_of_a_queue_is_what_it_has_not_settled_and_retention_has_not_deleted() -> None:
    assert Progress(Offset(10), Offset(0), Offset(100)).backlog == 90
    assert Progress(Offset(10), Offset(0), Offset(100), unsettled=7).backlog == 7
    assert Progress(Offset(10), Offset(95), Offset(100), unsettled=50).backlog == 5
    assert Progress(Offset(100), Offset(0), Offset(100), unsettled=0).backlog == 0
