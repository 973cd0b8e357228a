"""What the checker of the simulation demands of changes that no call has asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from braid.model.ids import RequestId, SegmentId
from braid.model.layout import Layout
from braid.model.topic import Topic
from braid.model.transition import LayoutPlan, plan_merge, plan_split
from braid.testing.checkers.auto_scale_checker import AutoScaleChecker, Times
from braid.testing.checkers.history import PromiseBroken

TOPIC = "public/default/orders"
ON: dict[str, Any] = {
    "enabled": True,
    "minSegments": 2,
    "maxSegments": 4,
    "maxDagDepth": 1,
    "splitCooldownSeconds": 10,
    "mergeCooldownSeconds": 10,
}
HOUR_US = 3_600_000_000


class Course:
    """A topic, and the times at which its record is written."""

    def __init__(self, segments: int = 2, policy: dict[str, Any] | None = ON) -> None:
        self.times = Times(100.0, HOUR_US)
        self.checker = AutoScaleChecker(lambda: self.times)
        self.topic = Topic(id=1, layout=Layout.initial(segments), auto_scale=policy)
        self.checker.on_topic(TOPIC, None, self.topic)

    def later(self, seconds: float, leader_s: float | None = None) -> None:
        assert self.times.leader_us is not None
        moved = round((seconds if leader_s is None else leader_s) * 1_000_000)
        self.times = Times(self.times.real_s + seconds, self.times.leader_us + moved)

    def write(self, topic: Topic) -> None:
        self.checker.on_topic(TOPIC, self.topic, topic)
        self.topic = topic

    def begin(self, plan: LayoutPlan, asked_by: int = 0) -> None:
        self.write(self.topic.beginning(plan, transition_id=7, created_at=0, created_by=RequestId(asked_by)))

    def commit(self) -> None:
        self.write(self.topic.sealing())
        self.write(self.topic.committed(self.times.leader_us or 1))

    def split(self, asked_by: int = 0) -> None:
        self.begin(plan_split(self.topic.layout, self.topic.layout.active[0].segment_id), asked_by)

    def merge(self, asked_by: int = 0) -> None:
        lower, upper = self.topic.layout.active[:2]
        self.begin(plan_merge(self.topic.layout, lower.segment_id, upper.segment_id), asked_by)


def test_changes_within_the_policy_are_counted() -> None:
    course = Course()
    course.split()
    course.commit()
    course.later(10)
    course.split()
    course.commit()
    course.merge()
    assert course.checker.begun == 3


def test_a_call_may_do_what_auto_scaling_may_not() -> None:
    course = Course(segments=4)
    for _ in range(3):
        course.split(asked_by=9)
        course.commit()
        course.later(1)
    assert course.checker.begun == 0


@pytest.mark.parametrize("policy", [None, {"enabled": False}])
def test_a_topic_without_a_policy_that_is_on_does_not_change(policy: dict[str, Any] | None) -> None:
    with pytest.raises(PromiseBroken, match="auto-scaling is broken"):
        Course(policy=policy).split()


def test_a_decision_may_be_carried_out_a_moment_after_the_policy_is_gone() -> None:
    course = Course()
    course.write(msgspec.structs.replace(course.topic, auto_scale=None))
    course.split()


def test_the_limits_are_kept() -> None:
    with pytest.raises(PromiseBroken, match="auto-scaling is broken"):
        Course(segments=4).split()
    with pytest.raises(PromiseBroken, match="auto-scaling is broken"):
        Course(segments=2).merge()


def test_segments_that_merges_have_made_are_not_merged_again() -> None:
    course = Course(segments=4)
    course.merge()
    course.commit()
    course.later(10)
    with pytest.raises(PromiseBroken, match="auto-scaling is broken"):
        course.merge()


@pytest.mark.parametrize(("leader_s", "kept"), [(9.0, False), (-3_600.0, False), (10.0, True), (3_600.0, True)])
def test_a_cooldown_counts_by_the_clock_of_the_next_leader(leader_s: float, kept: bool) -> None:
    course = Course()
    course.split(asked_by=9)
    course.commit()
    course.later(9, leader_s)
    if kept:
        course.split()
    else:
        with pytest.raises(PromiseBroken, match="cooldown is broken"):
            course.split()


def test_a_clock_that_has_just_jumped_says_nothing() -> None:
    course = Course()
    course.split()
    course.commit()
    course.times = Times(course.times.real_s + 1, None)
    course.split()


def test_a_cooldown_that_is_over_in_real_time_is_over_for_every_clock() -> None:
    course = Course()
    course.split()
    course.commit()
    course.later(10, -3_600)
    course.split()


def test_an_aborted_change_costs_no_cooldown() -> None:
    course = Course()
    course.split()
    course.write(course.topic.aborted())
    course.split()
    with pytest.raises(PromiseBroken, match="its times went from"):
        course.write(msgspec.structs.replace(course.topic.aborted(), split_at=5))


def test_a_commit_that_does_not_store_its_time_is_reported() -> None:
    course = Course()
    course.split()
    course.write(course.topic.sealing())
    with pytest.raises(PromiseBroken, match="cooldown is broken"):
        course.write(msgspec.structs.replace(course.topic.committed(5), split_at=0))


def test_dropping_a_segment_changes_no_times() -> None:
    course = Course()
    course.split()
    course.commit()
    course.write(course.topic.pruned(SegmentId(0)))
