"""Whatever the layout becomes while a query reads, and whatever its limits: each record once, parents before children,
limits kept, no standstill before the end and none of Spark's empty micro-batches after it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.client.consuming.checkpoint import END, Position
from braid.scan.planning import Range
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.stream.batch_limits import (
    BatchLimits,
    admit,
    bounded,
    gone,
    latest,
    partitions,
    ranges,
    stream_position,
)
from braid.spark.stream.offsets import StreamOffset, begins

TOPIC = "public/default/orders"
MAX_SEGMENTS = 24
UNHURRIED = settings(deadline=None)
LIMITS = st.builds(
    BatchLimits,
    records=st.none() | st.integers(1, 5) | st.integers(1, 200),
    bytes=st.none() | st.integers(1, 50) | st.integers(1, 5_000),
)


class Topic:
    """A topic that grows, splits and merges. Hash ranges play no part here."""

    def __init__(self, chance: random.Random, segments: int) -> None:
        self._chance = chance
        self.segments: dict[int, SegmentSnapshot] = {}
        self.ancestors: dict[int, set[int]] = {}
        self._next = 0
        for _ in range(segments):
            self._add(())

    def _add(self, parents: tuple[int, ...]) -> None:
        number, self._next = self._next, self._next + 1
        end = self._chance.choice([0, 0, 1, 5, 40])
        size = self._chance.choice([1.0, 7.5, 100.0])
        self.segments[number] = SegmentSnapshot(
            number, f"0000-ffff-{number}", parents, 0, 0xFFFF, 0, end, False, (), size
        )
        self.ancestors[number] = set(parents).union(*(self.ancestors[parent] for parent in parents))

    @property
    def active(self) -> list[int]:
        return [number for number, segment in self.segments.items() if not segment.sealed]

    def change(self) -> None:
        what = self._chance.choice(["append", "append", "split", "merge"])
        if what == "append" or self._next >= MAX_SEGMENTS:
            number = self._chance.choice(self.active)
            self._replace(number, end=self.segments[number].end + self._chance.choice([1, 3, 60]))
        elif what == "split":
            self._hand_on(self._chance.sample(self.active, 1), self._chance.randint(1, 3))
        else:
            active = self.active
            self._hand_on(self._chance.sample(active, min(2, len(active))), 1)

    def forget(self, finished: Mapping[int, Position]) -> None:
        """Prune segments that the query has read, oldest first, as a topic does."""
        for number in sorted(self.segments):
            segment = self.segments[number]
            if finished.get(number) == END and not any(parent in self.segments for parent in segment.parents):
                del self.segments[number]
                return

    def snapshot(self) -> TopicSnapshot:
        return TopicSnapshot(TOPIC, 7, "", dict(self.segments))

    def _hand_on(self, parents: list[int], children: int) -> None:
        for parent in parents:
            self._replace(parent, sealed=True)
        for _ in range(children):
            self._add(tuple(parents))

    def _replace(self, number: int, **change: object) -> None:
        self.segments[number] = msgspec.structs.replace(self.segments[number], **change)


class Query:
    """Reads as Spark does: offsets go through the journal's JSON, and every micro-batch is checked."""

    def __init__(self, topic: Topic, limits: BatchLimits, positions: dict[int, Position]) -> None:
        self._topic = topic
        self._limits = limits
        self.offset = StreamOffset.beginning(TOPIC, 7, positions)
        self.consumed: dict[int, int] = {
            number: position if position != END else topic.segments[number].end
            for number, position in positions.items()
        }
        self.finished: set[int] = {number for number, position in positions.items() if position == END}

    def step(self, target: TopicSnapshot | None = None) -> bool:
        """One micro-batch; whether there was anything to do."""
        now = self._topic.snapshot()
        stands = stream_position(self.offset, now)
        assert stands.losses == ()
        seen = now if target is None else bounded(now, target)
        ends = admit(seen, stands.positions, self._limits)
        assert ends == admit(seen, dict(reversed(stands.positions.items())), self._limits), (
            "it must not depend on order"
        )
        if ends == stands.positions:
            return False
        admitted = ranges(stands.positions, ends, now)
        count = partitions(admitted, now.segments)
        since = self.offset.positions if self.offset.is_beginning else None
        end = StreamOffset(topic=TOPIC, topic_id=7, positions=ends, partitions=count, since=since)
        end = StreamOffset.from_json(json.loads(json.dumps(end.to_json())), TOPIC)
        planned = ranges(begins(self.offset, end), end.positions, now)
        assert planned == admitted
        assert gone(begins(self.offset, end), end.positions, now) == ()
        self._check(planned, now)
        for each in planned:
            assert each.first == self.consumed.get(each.segment, 0), "skipped or repeated"
            self.consumed[each.segment] = each.until
        self.finished = self.finished | {number for number, position in ends.items() if position == END}
        for number in self.finished & now.segments.keys():
            assert now.segments[number].sealed
            assert self.consumed.get(number, 0) == now.segments[number].end
        self.offset = end
        return True

    def _check(self, planned: list[Range], now: TopicSnapshot) -> None:
        for each in planned:
            for ancestor in self._topic.ancestors[each.segment]:
                if ancestor in now.segments:
                    there = now.segments[ancestor]
                    assert there.sealed, "an ancestor may still grow"
                    assert self.consumed.get(ancestor, 0) == there.end, "an ancestor was not read before"
        records = sum(each.records for each in planned)
        size = sum(each.records * now.segments[each.segment].bytes_per_record for each in planned)
        assert self._limits.records is None or records <= self._limits.records
        assert self._limits.bytes is None or size <= self._limits.bytes + 1e-6 or records == 1


@UNHURRIED
@given(seed=st.integers(0, 2**32), segments=st.integers(1, 6), changes=st.integers(0, 30), limits=LIMITS)
def test_each_record_is_read_once_and_parents_before_children(
    seed: int, segments: int, changes: int, limits: BatchLimits
) -> None:
    chance = random.Random(seed)
    topic = Topic(chance, segments)
    query = Query(topic, limits, dict.fromkeys(topic.segments, 0))
    for _ in range(changes):
        for _ in range(chance.randint(0, 2)):
            topic.change()
        query.step()
        if chance.random() < 0.3:
            topic.forget(query.offset.positions)
    steps = 0
    most = sum(segment.end for segment in topic.segments.values()) + len(topic.segments)
    while query.step():
        steps += 1
        assert steps <= most, "a micro-batch without progress"
    assert query.offset.positions == latest(topic.snapshot()) | {
        number: END for number in query.offset.positions if number not in topic.segments
    }
    assert {number: query.consumed.get(number, 0) for number in topic.segments} == {
        number: segment.end for number, segment in topic.segments.items()
    }


@UNHURRIED
@given(seed=st.integers(0, 2**32), segments=st.integers(1, 6), changes=st.integers(0, 30), limits=LIMITS)
def test_available_now_reads_exactly_what_was_there(
    seed: int, segments: int, changes: int, limits: BatchLimits
) -> None:
    chance = random.Random(seed)
    topic = Topic(chance, segments)
    for _ in range(changes):
        topic.change()
    query = Query(topic, limits, dict.fromkeys(chance.sample(sorted(topic.segments), chance.randint(1, segments)), 0))
    target = topic.snapshot()
    while query.step(target):
        topic.change()
    assert {number: query.consumed.get(number, 0) for number in target.segments} == {
        number: segment.end for number, segment in target.segments.items()
    }
    assert all(query.consumed.get(number, 0) == 0 for number in topic.segments if number not in target.segments)
    assert all(query.offset.positions[number] == END for number, each in target.segments.items() if each.sealed)


@UNHURRIED
@given(seed=st.integers(0, 2**32), changes=st.integers(0, 30), limits=LIMITS)
def test_a_query_from_latest_reads_what_comes_and_nothing_else(seed: int, changes: int, limits: BatchLimits) -> None:
    chance = random.Random(seed)
    topic = Topic(chance, 3)
    for _ in range(changes):
        topic.change()
    before = topic.snapshot()
    query = Query(topic, limits, latest(before))
    assert not query.step()
    for _ in range(10):
        topic.change()
    while query.step():
        pass
    assert {number: query.consumed.get(number, 0) for number in topic.segments} == {
        number: segment.end for number, segment in topic.segments.items()
    }
