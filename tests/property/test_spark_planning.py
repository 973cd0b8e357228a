"""Planning over random topics: every wanted offset once, in order, parents before children, whatever the layout."""

from __future__ import annotations

from itertools import pairwise

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from braid.model.ids import Epoch, Offset
from braid.scan.planning import ChunkPiece, Prune, Range, plan_batch, plan_micro_batch, topological
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.storage.history.catalog import ChunkDescriptor


@st.composite
def segments(draw: st.DrawFn, number: int, parents: tuple[int, ...]) -> SegmentSnapshot:
    earliest = draw(st.integers(0, 50))
    cuts = sorted(draw(st.sets(st.integers(earliest, earliest + 60), min_size=1, max_size=8)))
    chunks = []
    for first, until in pairwise(cuts):
        if draw(st.booleans()):  # Else there is a hole: what was not exported yet, or is not known here.
            low = draw(st.integers(0, 20))
            size = (until - first) * draw(st.integers(0, 50))
            times, hashes = (low, low + draw(st.integers(0, 20))), (low, low + draw(st.integers(0, 20)))
            name = f"{number}-{first}.chunk"
            chunks.append(ChunkDescriptor(Offset(first), Offset(until), Epoch(1), name, size, size, *times, *hashes))
    first_hash = draw(st.integers(0, 20))
    return SegmentSnapshot(
        id=number,
        descriptor=f"d-{number}",
        parents=parents,
        first_hash=first_hash,
        last_hash=first_hash + draw(st.integers(0, 20)),
        earliest=earliest,
        end=cuts[-1] + draw(st.integers(0, 20)),
        sealed=False,
        chunks=tuple(chunks),
        bytes_per_record=draw(st.floats(1, 50)),
    )


@st.composite
def topics(draw: st.DrawFn) -> TopicSnapshot:
    """Any DAG, ids in any order: only that there is no circle counts."""
    ids = draw(st.lists(st.integers(0, 99), min_size=1, max_size=8, unique=True))
    found = {}
    for place, number in enumerate(ids):
        parents = draw(st.sets(st.sampled_from([*ids[:place], 1_000]), max_size=3))  # 1000 was pruned.
        found[number] = draw(segments(number, tuple(sorted(parents))))
    return TopicSnapshot("public/default/orders", 1, "file:///history", found)


@st.composite
def topics_and_ranges(draw: st.DrawFn) -> tuple[TopicSnapshot, list[Range]]:
    topic = draw(topics())
    ranges = []
    for segment in topic.segments.values():
        if draw(st.booleans()):
            first = draw(st.integers(segment.earliest, segment.end))
            ranges.append(Range(segment.id, first, draw(st.integers(first, segment.end))))
    return topic, draw(st.permutations(ranges))


def ancestors(topic: TopicSnapshot, segment: int) -> set[int]:
    found: set[int] = set()
    to_visit = [segment]
    while to_visit:
        for parent in topic.segments[to_visit.pop()].parents:
            if parent in topic.segments and parent not in found:
                found.add(parent)
                to_visit.append(parent)
    return found


def offsets(ranges: list[Range]) -> list[tuple[int, int]]:
    return [(each.segment, offset) for each in ranges for offset in range(each.first, each.until)]


@given(topics())
def test_the_order_of_segments_holds_all_of_them_after_their_ancestors(topic: TopicSnapshot) -> None:
    order = topological(topic)
    assert sorted(order) == sorted(topic.segments)
    for place, segment in enumerate(order):
        assert ancestors(topic, segment) <= set(order[:place])


@given(topics_and_ranges(), st.integers(1, 12), st.integers(1, 3_000))
def test_each_wanted_offset_is_in_exactly_one_partition_in_order_and_after_its_ancestors(
    given_topic: tuple[TopicSnapshot, list[Range]], min_partitions: int, target_bytes: int
) -> None:
    topic, ranges = given_topic
    found = plan_batch(topic, ranges, min_partitions=min_partitions, target_bytes=target_bytes)
    pieces = [piece for partition in found for piece in partition.pieces]
    line = offsets([Range(piece.segment, piece.first, piece.until) for piece in pieces])
    assert sorted(line) == sorted(offsets(ranges))  # Each once.
    order = [segment for place, (segment, _) in enumerate(line) if place == 0 or line[place - 1][0] != segment]
    assert len(order) == len(set(order))  # No segment comes back after another one.
    for place, segment in enumerate(order):
        assert not ancestors(topic, segment) & set(order[place:])
    for (segment, offset), (next_segment, next_offset) in pairwise(line):
        assert segment != next_segment or next_offset > offset
    for piece in pieces:
        assert piece.first < piece.until
        if isinstance(piece, ChunkPiece):
            assert piece.chunk.base_offset <= piece.first < piece.until <= piece.chunk.next_offset
    assert all(partition.pieces for partition in found)
    assert len(found) >= min(min_partitions, len(line))


@given(topics_and_ranges(), st.integers(0, 40), st.integers(0, 40), st.none() | st.frozensets(st.integers(0, 40)))
def test_pruning_leaves_out_only_what_has_no_wanted_row(
    given_topic: tuple[TopicSnapshot, list[Range]], since: int, before: int, hashes: frozenset[int] | None
) -> None:
    topic, ranges = given_topic
    found = plan_batch(topic, ranges, prune=Prune(since, before, hashes))
    kept = {each for partition in found for each in offsets(partition.ranges)}
    assert kept <= set(offsets(ranges))
    for number, offset in set(offsets(ranges)) - kept:
        segment = topic.segments[number]
        holding = [chunk for chunk in segment.chunks if chunk.base_offset <= offset < chunk.next_offset]
        outside_segment = hashes is not None and not any(
            segment.first_hash <= each <= segment.last_hash for each in hashes
        )
        assert outside_segment or (
            holding
            and (
                holding[0].max_timestamp < since
                or holding[0].min_timestamp >= before
                or (
                    hashes is not None
                    and not any(holding[0].min_key_hash <= h <= holding[0].max_key_hash for h in hashes)
                )
            )
        )


@given(topics_and_ranges(), st.integers(1, 12), st.data())
def test_a_micro_batch_holds_each_offset_once_and_does_not_depend_on_chunks(
    given_topic: tuple[TopicSnapshot, list[Range]], partitions: int, data: st.DataObject
) -> None:
    topic, ranges = given_topic
    found = plan_micro_batch(topic, ranges, partitions=partitions)
    assert sorted(each for partition in found for each in offsets(partition.ranges)) == sorted(offsets(ranges))
    assert len(found) <= partitions
    assert all(partition.records for partition in found)
    nonempty = [each for each in ranges if each.records]
    if len(nonempty) >= partitions:  # Segments stay whole.
        assert sorted(each for partition in found for each in partition.ranges) == sorted(nonempty)
    changed = {
        number: msgspec.structs.replace(
            data.draw(segments(number, ())), earliest=each.earliest, end=each.end, parents=each.parents
        )
        for number, each in topic.segments.items()
    }
    later = msgspec.structs.replace(topic, segments=changed)
    again = plan_micro_batch(later, data.draw(st.permutations(ranges)), partitions=partitions)
    assert [partition.ranges for partition in again] == [partition.ranges for partition in found]
