"""Which task reads what, as tables of inputs and outputs: no Spark, no broker, no storage."""

from __future__ import annotations

import datetime
import pickle
from collections.abc import Sequence

import msgspec
import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from braid.model.batch.header import NO_KEYS
from braid.model.errors import BrokenInvariant, DataLoss, InvalidArgument, OffsetOutOfRange
from braid.model.hashing import key_hash
from braid.model.ids import Epoch, Offset
from braid.scan.planning import (
    ChunkPiece,
    Partition,
    Prune,
    Range,
    micro_batch_shares,
    plan_batch,
    plan_micro_batch,
    topological,
)
from braid.scan.ranges import wanted_ranges
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot, _weights
from braid.spark.source.options import SourceOptions
from braid.spark.source.pruning import Filters, Interval, understood
from braid.storage.history.catalog import ChunkDescriptor

OPTIONS = SourceOptions(topic="public/default/orders", url="braid://a")
ALL_HASHES = (0, 0xFFFF)


def chunk(
    first: int, until: int, size: int = 1_000, times: tuple[int, int] = (0, 0), hashes: tuple[int, int] = ALL_HASHES
) -> ChunkDescriptor:
    return ChunkDescriptor(Offset(first), Offset(until), Epoch(1), f"{first}.chunk", size + 100, size, *times, *hashes)


def segment(
    number: int,
    end: int,
    *chunks: ChunkDescriptor,
    parents: tuple[int, ...] = (),
    earliest: int = 0,
    hashes: tuple[int, int] = ALL_HASHES,
) -> SegmentSnapshot:
    return SegmentSnapshot(
        id=number,
        descriptor=f"{hashes[0]:04x}-{hashes[1]:04x}-{number}",
        parents=parents,
        first_hash=hashes[0],
        last_hash=hashes[1],
        earliest=earliest,
        end=end,
        sealed=False,
        chunks=chunks,
        bytes_per_record=10.0,
    )


def topic(*segments: SegmentSnapshot) -> TopicSnapshot:
    return TopicSnapshot("public/default/orders", 7, "file:///history", {each.id: each for each in segments})


def shown(partitions: Sequence[Partition]) -> list[list[str]]:
    """`c0:5-9`: offsets 5 to 8 of segment 0 from a chunk; `o…`: from the owner."""
    return [
        [f"{'c' if isinstance(p, ChunkPiece) else 'o'}{p.segment}:{p.first}-{p.until}" for p in partition.pieces]
        for partition in partitions
    ]


# ── order ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("parents", "order"),
    [
        ({0: (), 1: (), 2: ()}, [0, 1, 2]),
        ({0: (), 1: (0,), 2: (0,)}, [0, 1, 2]),
        ({0: (), 1: (0,), 2: (0,), 3: (1, 2)}, [0, 1, 2, 3]),
        ({3: (5,), 5: (), 4: ()}, [4, 5, 3]),
        ({2: (0, 1), 3: (2,), 9: ()}, [2, 3, 9]),  # Parents that were pruned long ago hold nobody up.
    ],
)
def test_parents_come_before_children_and_equals_by_id(parents: dict[int, tuple[int, ...]], order: list[int]) -> None:
    assert topological(topic(*(segment(number, 1, parents=each) for number, each in parents.items()))) == order


def test_segments_that_are_their_own_ancestors_have_no_order() -> None:
    with pytest.raises(BrokenInvariant):
        topological(topic(segment(0, 1, parents=(1,)), segment(1, 1, parents=(0,))))


# ── batch reads ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_come_from_storage_and_the_rest_from_the_owner() -> None:
    found = plan_batch(topic(segment(0, 30, chunk(0, 10), chunk(10, 25))), [Range(0, 0, 30)])
    assert shown(found) == [["c0:0-10", "c0:10-25", "o0:25-30"]]
    assert found[0].ranges == [Range(0, 0, 30)]
    assert (found[0].topic_id, found[0].storage, found[0].descriptors) == (7, "file:///history", {0: "0000-ffff-0"})


def test_what_the_snapshot_shows_no_chunk_for_is_asked_from_the_owner_wherever_it_lies() -> None:
    found = plan_batch(topic(segment(0, 30, chunk(5, 10), chunk(15, 20))), [Range(0, 0, 30)])
    assert shown(found) == [["o0:0-5", "c0:5-10", "o0:10-15", "c0:15-20", "o0:20-30"]]


def test_overlapping_chunks_give_each_offset_once() -> None:
    found = plan_batch(topic(segment(0, 20, chunk(0, 12), chunk(8, 20))), [Range(0, 0, 20)])
    assert shown(found) == [["c0:0-12", "c0:12-20"]]


def test_a_range_cuts_the_chunks_at_its_ends() -> None:
    found = plan_batch(topic(segment(0, 30, chunk(0, 10), chunk(10, 20), chunk(20, 30))), [Range(0, 7, 23)])
    assert shown(found) == [["c0:7-10", "c0:10-20", "c0:20-23"]]


def test_small_chunks_share_a_task_and_big_ones_are_split() -> None:
    snapshot = topic(segment(0, 40, chunk(0, 10, 100), chunk(10, 20, 100), chunk(20, 40, 1_000)))
    assert shown(plan_batch(snapshot, [Range(0, 0, 40)], target_bytes=400)) == [
        ["c0:0-10", "c0:10-20"],
        ["c0:20-26"],
        ["c0:26-33"],
        ["c0:33-40"],
    ]


def test_a_long_hot_tail_is_split_too() -> None:
    found = plan_batch(topic(segment(0, 100)), [Range(0, 0, 100)], target_bytes=300)  # 10 bytes a record
    assert shown(found) == [["o0:0-25"], ["o0:25-50"], ["o0:50-75"], ["o0:75-100"]]


@pytest.mark.parametrize("wanted", [1, 2, 3, 7])
def test_at_least_as_many_partitions_as_asked_for(wanted: int) -> None:
    snapshot = topic(segment(0, 30, chunk(0, 10), chunk(10, 20), chunk(20, 30)))
    assert len(plan_batch(snapshot, [Range(0, 0, 30)], min_partitions=wanted)) >= wanted


def test_there_are_never_more_partitions_than_records() -> None:
    found = plan_batch(topic(segment(0, 3, chunk(0, 3))), [Range(0, 0, 3)], min_partitions=50)
    assert shown(found) == [["c0:0-1"], ["c0:1-2"], ["c0:2-3"]]


def test_parents_partitions_come_before_their_childrens_though_their_ids_are_higher() -> None:
    snapshot = topic(segment(1, 5, parents=(4,)), segment(2, 5, parents=(4,)), segment(4, 5))
    ranges = [Range(each, 0, 5) for each in (1, 2, 4)]
    assert shown(plan_batch(snapshot, ranges, target_bytes=50)) == [["o4:0-5"], ["o1:0-5"], ["o2:0-5"]]


def test_nothing_to_read_is_no_partition() -> None:
    assert plan_batch(topic(segment(0, 5)), []) == []


def test_partitions_travel_to_executors() -> None:
    (found,) = plan_batch(topic(segment(0, 30, chunk(0, 10))), [Range(0, 0, 30)])
    copy = pickle.loads(pickle.dumps(found))
    assert (copy.pieces, copy.topic, copy.storage) == (found.pieces, found.topic, found.storage)


# ── leaving out ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_chunks_outside_the_bounds_of_time_are_left_out_and_the_tail_is_not() -> None:
    snapshot = topic(
        segment(0, 40, chunk(0, 10, times=(0, 9)), chunk(10, 20, times=(5, 20)), chunk(20, 30, times=(21, 30)))
    )
    found = plan_batch(snapshot, [Range(0, 0, 40)], prune=Prune(since_us=10, before_us=21))
    assert shown(found) == [["c0:10-20", "o0:30-40"]]


def test_bounds_of_time_include_the_first_and_exclude_the_last() -> None:
    assert not Prune(since_us=10).leaves_out_times(0, 10)
    assert Prune(since_us=11).leaves_out_times(0, 10)
    assert not Prune(before_us=11).leaves_out_times(10, 20)
    assert Prune(before_us=10).leaves_out_times(10, 20)


def test_segments_and_chunks_that_cannot_hold_a_key_are_left_out() -> None:
    low, high = (0, 0x7FFF), (0x8000, 0xFFFF)
    snapshot = topic(
        segment(0, 20, chunk(0, 10, hashes=(0, 9)), chunk(10, 20, hashes=(5, 20)), hashes=low),
        segment(1, 20, chunk(0, 10, hashes=NO_KEYS), hashes=high),
    )
    ranges = [Range(0, 0, 20), Range(1, 0, 20)]
    assert shown(plan_batch(snapshot, ranges, prune=Prune(hashes=frozenset([15])))) == [["c0:10-20"]]
    assert shown(plan_batch(snapshot, ranges, prune=Prune(hashes=frozenset([15, 0x9000])))) == [
        ["c0:10-20", "o1:10-20"]
    ]
    assert plan_batch(snapshot, ranges, prune=Prune(hashes=frozenset())) == []


_NOON = datetime.datetime(1970, 1, 1, 12, tzinfo=datetime.UTC)
_NOON_US = 12 * 3_600_000_000


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([EqualTo(("segment",), 3)], Filters(segments=Interval(3, 3))),
        ([In(("segment",), (3, 5))], Filters(segments=Interval(3, 5))),
        ([GreaterThan(("offset",), 3), LessThanOrEqual(("offset",), 9)], Filters(offsets=Interval(4, 9))),
        ([GreaterThanOrEqual(("offset",), 3), LessThan(("offset",), 9)], Filters(offsets=Interval(3, 8))),
        ([EqualTo(("key",), b"alpha")], Filters(hashes=frozenset([0xA9C0]))),
        ([EqualNullSafe(("key",), b"alpha")], Filters(hashes=frozenset([0xA9C0]))),
        ([In(("key",), (b"alpha", b"key-0", None))], Filters(hashes=frozenset([0xA9C0, 0xE337]))),
        ([In(("key",), (b"alpha", b"x")), EqualTo(("key",), b"alpha")], Filters(hashes=frozenset([0xA9C0]))),
        ([EqualTo(("keyHash",), 17)], Filters(hashes=frozenset([17]))),
        ([GreaterThanOrEqual(("timestamp",), _NOON)], Filters(times=Interval(low=_NOON_US))),
        ([LessThan(("timestamp",), _NOON)], Filters(times=Interval(high=_NOON_US - 1))),
        # What is not understood is left to Spark.
        ([Not(EqualTo(("segment",), 3))], Filters()),
        ([IsNotNull(("key",))], Filters()),
        ([EqualNullSafe(("key",), None)], Filters()),
        ([StringStartsWith(("key",), "a")], Filters()),
        ([EqualTo(("headers", "a"), b"x")], Filters()),
        ([EqualTo(("value",), b"x")], Filters()),
        ([GreaterThan(("key",), b"a")], Filters()),
        ([EqualTo(("keyHash",), 0)], Filters()),  # Records without a key have it too, and no range of hashes.
        ([In(("keyHash",), (17, 0))], Filters()),
        ([LessThan(("timestamp",), datetime.datetime(2026, 1, 1))], Filters()),  # noqa: DTZ001 (that is the case)
    ],
)
def test_filters_become_bounds(filters: list[Filter], expected: Filters) -> None:
    assert understood(filters, OPTIONS) == expected


def test_filters_only_narrow_the_bounds_that_the_options_give() -> None:
    options = msgspec.structs.replace(OPTIONS, starting_timestamp=_NOON_US + 5, ending_timestamp=_NOON_US + 9)
    found = understood([GreaterThan(("timestamp",), _NOON)], options)
    assert found.prune == Prune(since_us=_NOON_US + 5, before_us=_NOON_US + 9)


def test_filters_narrow_the_ranges() -> None:
    filters = Filters(segments=Interval(1, 2), offsets=Interval(5, 9))
    ranges = [Range(0, 0, 100), Range(1, 0, 100), Range(2, 7, 8), Range(2, 20, 30)]
    assert filters.narrowed(ranges) == [Range(1, 5, 10), Range(2, 7, 8)]


# ── what the user wants ──────────────────────────────────────────────────────────────────────────────────────────────

TWO = topic(segment(0, 100, earliest=10), segment(1, 50))


@pytest.mark.parametrize(
    ("changes", "ranges"),
    [
        ({}, [Range(0, 10, 100), Range(1, 0, 50)]),
        ({"starting_offsets": "earliest", "ending_offsets": "latest"}, [Range(0, 10, 100), Range(1, 0, 50)]),
        ({"starting_offsets": {0: 17}}, [Range(0, 17, 100), Range(1, 0, 50)]),
        ({"ending_offsets": {1: 17}}, [Range(0, 10, 100), Range(1, 0, 17)]),
        ({"starting_offsets": {0: "END"}}, [Range(1, 0, 50)]),
        ({"starting_offsets": {0: -2}, "ending_offsets": {0: "END", 1: -1}}, [Range(0, 10, 100), Range(1, 0, 50)]),
        ({"starting_offsets": {1: 50}, "ending_offsets": {0: 10}}, []),
        ({"ending_offsets": {0: 7}}, [Range(1, 0, 50)]),  # Retention came between: it was earliest to 7 when asked.
        ({"starting_offsets": {0: 5}, "fail_on_data_loss": False}, [Range(0, 10, 100), Range(1, 0, 50)]),
        ({"starting_offsets": {0: 5}, "ending_offsets": {0: 7}, "fail_on_data_loss": False}, [Range(1, 0, 50)]),
    ],
)
def test_offsets_of_the_options_become_ranges(changes: dict[str, object], ranges: list[Range]) -> None:
    assert wanted_ranges(TWO, msgspec.structs.replace(OPTIONS, **changes)) == ranges


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"starting_offsets": {7: 1}}, InvalidArgument, "option startingOffsets names segment 7, which topic"),
        ({"ending_offsets": {7: 1}}, InvalidArgument, "it has 0, 1"),
        ({"starting_offsets": {1: 51}}, OffsetOutOfRange, "option startingOffsets names offset 51 of segment 1"),
        ({"ending_offsets": {0: 101}}, OffsetOutOfRange, "which holds 10 to 99: it does not exist"),
        (
            {"starting_offsets": {0: 9}},
            DataLoss,
            "retention has deleted earlier records. Begin at earliest, or set option failOnDataLoss",
        ),
        ({"starting_offsets": {1: 9}, "ending_offsets": {1: 8}}, InvalidArgument, "the end is before the start"),
    ],
)
def test_offsets_out_of_range_are_refused(changes: dict[str, object], error: type[Exception], says: str) -> None:
    with pytest.raises(error) as caught:
        wanted_ranges(TWO, msgspec.structs.replace(OPTIONS, **changes))
    assert says in str(caught.value)


# ── micro-batches ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("ranges", "partitions", "shares"),
    [
        ([], 4, []),
        ([Range(0, 5, 5)], 4, []),
        ([Range(0, 0, 10)], 1, [[Range(0, 0, 10)]]),
        ([Range(0, 0, 10)], 2, [[Range(0, 0, 5)], [Range(0, 5, 10)]]),
        ([Range(0, 0, 2)], 5, [[Range(0, 0, 1)], [Range(0, 1, 2)]]),
        ([Range(1, 0, 10), Range(0, 0, 4)], 2, [[Range(1, 0, 10)], [Range(0, 0, 4)]]),
        ([Range(1, 0, 10), Range(0, 0, 4)], 3, [[Range(0, 0, 4)], [Range(1, 0, 5)], [Range(1, 5, 10)]]),
        ([Range(0, 0, 9), Range(1, 0, 5), Range(2, 0, 5)], 2, [[Range(0, 0, 9)], [Range(1, 0, 5), Range(2, 0, 5)]]),
    ],
)
def test_a_micro_batch_is_cut_by_records_and_keeps_segments_whole_while_it_can(
    ranges: list[Range], partitions: int, shares: list[list[Range]]
) -> None:
    assert micro_batch_shares(ranges, partitions) == shares


def test_a_replayed_micro_batch_stands_in_the_same_partitions_after_an_export() -> None:
    ranges = [Range(0, 3, 20), Range(1, 0, 9)]
    before = plan_micro_batch(topic(segment(0, 30), segment(1, 9)), ranges, partitions=3)
    after = plan_micro_batch(
        topic(segment(0, 90, chunk(0, 7), chunk(7, 60)), segment(1, 9, chunk(0, 4), chunk(4, 9))), ranges, partitions=3
    )
    assert [each.ranges for each in before] == [each.ranges for each in after]
    assert shown(before) == [["o0:3-11"], ["o0:11-20"], ["o1:0-9"]]
    assert shown(after) == [["c0:3-7", "c0:7-11"], ["c0:11-20"], ["c1:0-4", "c1:4-9"]]


def test_the_hash_of_a_key_is_the_brokers() -> None:
    assert key_hash(b"alpha") == 0xA9C0


def test_weights_come_from_owners_that_answer() -> None:
    stats = {
        "segments": {
            "0": {"records": 10, "bytes": 500},
            "1": {"records": 0, "bytes": 0},
            "2": {"records": None, "bytes": None},  # Nobody serves it now.
        }
    }
    assert _weights(stats) == {0: 50.0}
