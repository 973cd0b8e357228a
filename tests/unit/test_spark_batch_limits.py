"""Where micro-batches end: tables of topics, positions and limits."""

from __future__ import annotations

from typing import Any, cast

import pytest

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import NotServing
from braid.model.ids import Epoch
from braid.scan.planning import Range
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.stream.batch_limits import (
    PARTITION_BYTES,
    BatchLimits,
    admit,
    bounded,
    epochs_at,
    gone,
    latest,
    partitions,
    ranges,
    stream_position,
)
from braid.spark.stream.offsets import StreamOffset
from braid.spark.stream.topic_watch import BEHIND_S, FRESH_S, TopicWatch

TOPIC = "public/default/orders"
ALL = BatchLimits()


def segment(
    number: int,
    end: int,
    *,
    sealed: bool = False,
    parents: tuple[int, ...] = (),
    earliest: int = 0,
    record_bytes: float = 100.0,
    epochs: tuple[tuple[int, int], ...] = (),
) -> SegmentSnapshot:
    return SegmentSnapshot(
        number, f"0000-ffff-{number}", parents, 0, 0xFFFF, earliest, end, sealed, (), record_bytes, epochs
    )


def topic(*segments: SegmentSnapshot, topic_id: int = 7, live: bool = True) -> TopicSnapshot:
    return TopicSnapshot(TOPIC, topic_id, "", {each.id: each for each in segments}, live=live)


def offset(positions: dict[int, Position], **more: Any) -> StreamOffset:
    return StreamOffset(topic=TOPIC, topic_id=7, positions=positions, **more)


SPLIT = topic(segment(0, 10, sealed=True), segment(1, 4, parents=(0,)), segment(2, 6, parents=(0,)))


# ── order and progress ───────────────────────────────────────────────────────────────────────────────────────────────


def test_children_wait_until_a_micro_batch_before_has_finished_their_parent() -> None:
    first = admit(SPLIT, {0: 3}, ALL)
    assert first == {0: END}
    assert admit(SPLIT, first, ALL) == {0: END, 1: 4, 2: 6}


def test_a_parent_that_is_cut_by_the_limit_is_not_finished() -> None:
    assert admit(SPLIT, {0: 0}, BatchLimits(records=9)) == {0: 9}
    assert admit(SPLIT, {0: 9}, BatchLimits(records=9)) == {0: END}


def test_children_of_a_segment_that_is_sealed_where_the_query_stands_are_read_at_once() -> None:
    assert admit(SPLIT, {0: 10, 1: 0, 2: 0}, ALL) == {0: END, 1: 4, 2: 6}


def test_a_chain_of_empty_segments_costs_one_micro_batch() -> None:
    chain = topic(
        segment(0, 0, sealed=True), segment(1, 0, sealed=True, parents=(0,)), segment(2, 5, sealed=False, parents=(1,))
    )
    assert admit(chain, {0: 0, 1: 0, 2: 0}, ALL) == {0: END, 1: END, 2: 5}


def test_a_grandchild_waits_though_its_own_parent_is_empty() -> None:
    family = topic(
        segment(0, 5, sealed=True), segment(1, 0, sealed=True, parents=(0,)), segment(2, 5, sealed=False, parents=(1,))
    )
    first = admit(family, {0: 0, 1: 0, 2: 0}, ALL)
    assert first == {0: END, 1: END, 2: 0}
    assert admit(family, first, ALL) == {0: END, 1: END, 2: 5}


def test_a_merged_segment_waits_for_both_its_parents() -> None:
    merged = topic(segment(0, 5, sealed=True), segment(1, 100, sealed=True), segment(2, 5, parents=(0, 1)))
    first = admit(merged, {0: END, 1: 0, 2: 0}, BatchLimits(records=50))
    assert first == {0: END, 1: 50, 2: 0}
    assert admit(merged, first, ALL) == {0: END, 1: END, 2: 0}


def test_nothing_new_ends_where_it_began() -> None:
    read: dict[int, Position] = {0: END, 1: 4, 2: 6}
    assert admit(SPLIT, read, ALL) == read
    assert admit(SPLIT, read, BatchLimits(records=1, bytes=1)) == read


def test_a_seal_without_a_record_moves_the_end() -> None:
    """Or the segment would seem lost when the topic forgets it."""
    assert admit(topic(segment(0, 10, sealed=True)), {0: 10}, ALL) == {0: END}


def test_a_new_segment_is_read_from_its_first_record() -> None:
    """A checkpoint of an older layout names the parent only."""
    now = stream_position(offset({0: END}), SPLIT)
    assert now.positions == {0: END, 1: 0, 2: 0}
    assert now.losses == ()
    assert ranges({0: END}, admit(SPLIT, now.positions, ALL), SPLIT) == [Range(1, 0, 4), Range(2, 0, 6)]


def test_latest_is_behind_everything() -> None:
    assert latest(SPLIT) == {0: END, 1: 4, 2: 6}
    assert admit(SPLIT, latest(SPLIT), ALL) == latest(SPLIT)


# ── limits ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("waiting", "limit", "shares"),
    [
        ((100, 100), 50, (25, 25)),
        ((300, 100), 40, (30, 10)),
        ((1_000_000, 1), 10, (9, 1)),  # the small one does not starve
        ((5, 5), 10, (5, 5)),
        ((5, 5), 9, (5, 4)),
        ((0, 10), 4, (0, 4)),
        ((10**12, 10**12 - 1), 10**11 + 1, (50_000_000_001, 50_000_000_000)),
    ],
)
def test_records_are_shared_in_proportion_to_what_waits(
    waiting: tuple[int, int], limit: int, shares: tuple[int, int]
) -> None:
    snapshot = topic(segment(0, waiting[0]), segment(1, waiting[1]))
    assert admit(snapshot, {0: 0, 1: 0}, BatchLimits(records=limit)) == dict(enumerate(shares))


def test_segments_take_turns_when_there_are_more_of_them_than_records() -> None:
    snapshot = topic(*(segment(number, 3) for number in range(5)))
    positions: dict[int, Position] = dict.fromkeys(range(5), 0)
    seen = []
    for _ in range(5):
        after = admit(snapshot, positions, BatchLimits(records=2))
        seen.append([number for number in range(5) if after[number] != positions[number]])
        positions = after
    assert seen == [[0, 1], [2, 3], [0, 4], [1, 2], [3, 4]]


def test_bytes_are_shared_by_the_size_of_each_segments_records() -> None:
    snapshot = topic(segment(0, 1_000, record_bytes=10), segment(1, 1_000, record_bytes=1_000))
    ends = admit(snapshot, {0: 0, 1: 0}, BatchLimits(bytes=101_000))
    assert ends == {0: 100, 1: 100}  # a tenth of each


def test_a_record_above_the_limit_of_bytes_is_let_through_alone() -> None:
    snapshot = topic(segment(0, 10, record_bytes=5_000), segment(1, 10, record_bytes=5_000))
    assert admit(snapshot, {0: 0, 1: 0}, BatchLimits(bytes=100)) == {0: 1, 1: 0}
    assert admit(snapshot, {0: 1, 1: 0}, BatchLimits(bytes=100)) == {0: 1, 1: 1}


def test_the_narrower_of_two_limits_holds() -> None:
    snapshot = topic(segment(0, 1_000))
    assert admit(snapshot, {0: 0}, BatchLimits(records=10, bytes=100_000)) == {0: 10}
    assert admit(snapshot, {0: 0}, BatchLimits(records=900, bytes=1_000)) == {0: 10}


# ── available now ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_what_comes_after_the_target_is_not_read() -> None:
    target = topic(segment(0, 10))
    now = topic(segment(0, 20, sealed=True), segment(1, 5, parents=(0,)))
    ends = admit(bounded(now, target), {0: 0, 1: 0}, ALL)
    assert ends == {0: 10, 1: 0}
    assert admit(bounded(now, target), ends, ALL) == ends


def test_the_target_has_the_children_of_segments_that_are_sealed_by_then() -> None:
    grown = topic(segment(0, 10, sealed=True), segment(1, 9, parents=(0,)), segment(2, 9, parents=(0,)))
    ends = admit(bounded(grown, SPLIT), {0: 0}, ALL)
    assert admit(bounded(grown, SPLIT), ends, ALL) == {0: END, 1: 4, 2: 6}


def test_a_target_that_retention_has_deleted_meanwhile_is_reached() -> None:
    now = topic(segment(0, 30, earliest=20))
    stands = stream_position(offset({0: 5}), now)
    assert stands.positions == {0: 20}
    assert admit(bounded(now, topic(segment(0, 10))), stands.positions, ALL) == {0: 20}


def test_a_topic_that_has_lost_records_ends_where_it_ends_now_and_not_at_the_target() -> None:
    now = topic(segment(0, 8), segment(1, 3, sealed=True))
    target = topic(segment(0, 10, sealed=True), segment(1, 5, sealed=True))
    assert admit(bounded(now, target), {0: 0, 1: 0}, ALL) == {0: 8, 1: END}
    assert ranges({0: 0, 1: 0}, {0: 8, 1: END}, bounded(now, target)) == [Range(0, 0, 8), Range(1, 0, 3)]


# ── what is lost ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("start", "snapshot", "positions", "loss"),
    [
        (offset({0: 5}), topic(segment(0, 30, earliest=20)), {0: 20}, "offsets 5 to 19 of segment 0"),
        (offset({0: END}), topic(segment(1, 30, earliest=20, parents=(0,))), {1: 20}, "offsets 0 to 19 of segment 1"),
        (offset({0: 5, 1: 2}), topic(segment(1, 9)), {1: 2}, "segment 0 of public/default/orders is gone"),
        (offset({0: 50}), topic(segment(0, 30)), {0: 30}, "segment 0 of public/default/orders ends at offset 30"),
        (offset({0: 50}), topic(segment(0, 9, earliest=2), topic_id=8), {0: 2}, "deleted and created again"),
    ],
)
def test_what_the_query_can_never_read_is_named_and_left_behind(
    start: StreamOffset, snapshot: TopicSnapshot, positions: dict[int, Position], loss: str
) -> None:
    found = stream_position(start, snapshot)
    assert found.positions == positions
    assert len(found.losses) == 1
    assert loss in found.losses[0]


@pytest.mark.parametrize(
    ("start", "snapshot"),
    [
        (offset({0: 20}), topic(segment(0, 30, earliest=20))),  # next offsets are stored: none is skipped
        (offset({0: END, 1: 5}), topic(segment(1, 9))),  # a finished segment may go
        (offset({0: 50}), topic(segment(0, 30), live=False)),  # manifests are a little behind
    ],
)
def test_what_the_query_has_read_may_go(start: StreamOffset, snapshot: TopicSnapshot) -> None:
    found = stream_position(start, snapshot)
    assert found.losses == ()
    assert found.positions == {number: start.positions[number] for number in snapshot.segments}


def test_a_micro_batch_that_runs_again_misses_what_is_gone() -> None:
    now = topic(segment(1, 30, earliest=20), segment(3, 5))
    begin: dict[int, Position] = {0: 3, 1: 10, 2: END, 3: 0}
    end: dict[int, Position] = {0: END, 1: 25, 2: END, 3: 9}
    assert ranges(begin, end, now) == [Range(1, 10, 25), Range(3, 0, 9)]
    missing = gone(begin, end, now)
    assert len(missing) == 3
    assert "segment 0 of public/default/orders is gone, and with it its records from offset 3" in missing[0]
    assert "offsets 10 to 19 of segment 1" in missing[1]
    assert "segment 3 of public/default/orders ends at offset 5" in missing[2]
    assert gone({1: 20, 3: 0}, {1: 30, 3: 5}, now) == ()


# ── records that others have replaced ────────────────────────────────────────────────────────────────────────────────


REPLACED = topic(segment(0, 30, epochs=((1, 0), (4, 12))))
"""Of epoch 1, twelve records are left."""


def test_a_query_that_had_read_lost_records_goes_back_to_where_the_histories_part() -> None:
    found = stream_position(offset({0: 20}, epochs={0: Epoch(1)}), REPLACED)
    assert found.positions == {0: 12}
    (loss,) = found.losses
    assert "segment 0 of public/default/orders has lost records, and holds other records from offset 12 on" in loss
    assert "the query had read it up to offset 20" in loss


def test_where_retention_has_deleted_the_parting_too_the_query_goes_on_at_the_earliest_record() -> None:
    retained = topic(segment(0, 30, earliest=15, epochs=((1, 0), (4, 12))))
    assert stream_position(offset({0: 20}, epochs={0: Epoch(1)}), retained).positions == {0: 15}


@pytest.mark.parametrize(
    ("position", "epochs"),
    [
        (12, {0: Epoch(1)}),  # what it had read is there
        (20, {0: Epoch(4)}),
        (20, {}),  # a checkpoint of an older build
        (END, {0: Epoch(1)}),
    ],
)
def test_a_position_on_the_log_stays_where_it_is(position: Position, epochs: dict[int, Epoch]) -> None:
    found = stream_position(offset({0: position}, epochs=epochs), REPLACED)
    assert (found.positions, found.losses) == ({0: position}, ())


def test_positions_get_the_epochs_of_the_records_before_them() -> None:
    there = topic(segment(0, 30, epochs=((1, 0), (4, 12))), segment(1, 9), segment(2, 5, sealed=True, epochs=((1, 0),)))
    assert epochs_at({0: 12, 1: 9, 2: END}, there) == {0: 1}
    assert epochs_at({0: 13}, there) == {0: 4}
    assert epochs_at({0: 0}, there) == {}


def test_a_micro_batch_that_runs_again_has_no_records_of_a_later_history() -> None:
    begin: dict[int, Position] = {0: 10}
    end: dict[int, Position] = {0: 20}
    (missing,) = gone(begin, end, REPLACED, {0: Epoch(1)})
    assert "holds other records from offset 12 on: the micro-batch reaches up to offset 20" in missing
    assert ranges(begin, end, REPLACED, {0: Epoch(1)}) == [Range(0, 10, 12)]
    assert ranges({0: 15}, end, REPLACED, {0: Epoch(1)}) == []
    assert gone({0: 20}, end, REPLACED, {0: Epoch(1)}) == (), "it has no records"
    assert gone(begin, end, REPLACED, {0: Epoch(4)}) == ()


# ── partitions ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("megabytes", "minimum", "expected"),
    [
        ((0.001, 0.001, 0.001), 0, 1),
        ((100, 100, 100), 0, 3),  # one for each segment, however large
        ((6, 6, 6), 0, 3),
        ((6, 6), 0, 2),
        ((0.001,), 4, 4),
        ((100, 100, 100), 2, 3),
    ],
)
def test_partitions_are_few_and_divide_no_segment_unless_asked_to(
    megabytes: tuple[float, ...], minimum: int, expected: int
) -> None:
    assert PARTITION_BYTES == 8 << 20
    counts = [int(each * (1 << 20) / 100) for each in megabytes]
    snapshot = topic(*(segment(number, count) for number, count in enumerate(counts)))
    whole = [Range(number, 0, count) for number, count in enumerate(counts)]
    assert partitions(whole, snapshot.segments, minimum) == expected


def test_there_are_no_more_partitions_than_records() -> None:
    snapshot = topic(segment(0, 3))
    assert partitions([Range(0, 0, 3)], snapshot.segments, 16) == 3
    assert partitions([], snapshot.segments, 16) == 1


# ── snapshots of a broker that lags behind ───────────────────────────────────────────────────────────────────────────

NEWER = offset({0: END, 1: END, 2: 6, 3: END})
"""Segment 3, the child of 1, has ended, too."""


class Brokers:
    """What the brokers that are asked show, one after the other. The last one is asked again and again."""

    has_brokers = False

    def __init__(self, *shown: TopicSnapshot) -> None:
        self.shown = [*shown]

    def snapshot(self) -> TopicSnapshot:
        return self.shown.pop(0) if len(self.shown) > 1 else self.shown[0]


class Watched:
    """A watch in virtual time."""

    def __init__(self, *shown: TopicSnapshot) -> None:
        self.now = 0.0
        self.watch = TopicWatch(cast("Any", Brokers(*shown)), clock=lambda: self.now, sleep=self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now += seconds


def test_a_snapshot_that_is_older_than_the_query_tells_no_positions_and_no_loss() -> None:
    with pytest.raises(NotServing, match="segment 3 of public/default/orders was seen before"):
        stream_position(NEWER, SPLIT)
    assert stream_position(NEWER, topic(segment(0, 1), topic_id=8)).losses, "it is another topic"


def test_a_query_waits_for_the_layout_that_it_has_seen() -> None:
    current = topic(*SPLIT.segments.values(), segment(3, 0, sealed=True, parents=(1,)), segment(4, 1, parents=(3,)))
    watched = Watched(SPLIT, SPLIT, SPLIT, current)
    assert watched.watch.snapshot() is SPLIT
    watched.watch.reached(NEWER)
    assert watched.watch.snapshot() is current
    assert watched.now == pytest.approx(2 * FRESH_S)


def test_a_layout_that_never_comes_is_an_error_and_no_loss() -> None:
    watched = Watched(SPLIT)
    watched.watch.reached(NEWER)
    with pytest.raises(NotServing, match="try again later"):
        watched.watch.snapshot()
    assert watched.now == pytest.approx(BEHIND_S, abs=FRESH_S)
