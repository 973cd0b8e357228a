"""What lands next: a pure function of the table's last commit and the topic."""

from __future__ import annotations

import random

import msgspec
import pytest

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import DataLoss, InvalidArgument, TableMismatch
from braid.scan.planning import Range
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.jobs.bounded_read import columns_schema
from braid.spark.jobs.lake.job import LakeStep, begin, next_step
from braid.spark.jobs.lake.table import Landed
from braid.spark.stream.batch_limits import BatchLimits

TOPIC = "public/default/orders"


def segment(number: int, end: int, *parents: int, earliest: int = 0, sealed: bool = False) -> SegmentSnapshot:
    return SegmentSnapshot(
        id=number,
        descriptor=f"0000-ffff-{number}",
        parents=parents,
        first_hash=0,
        last_hash=0xFFFF,
        earliest=earliest,
        end=end,
        sealed=sealed,
        chunks=(),
        bytes_per_record=100.0,
    )


def topic(*segments: SegmentSnapshot, topic_id: int = 7) -> TopicSnapshot:
    return TopicSnapshot(TOPIC, topic_id, "", {each.id: each for each in segments})


def landed(step: int, positions: dict[int, Position], topic_id: int = 7) -> Landed:
    return Landed(topic=TOPIC, topic_id=topic_id, step=step, positions=positions, columns=("segment", "offset"))


NO_LIMITS = BatchLimits()


def test_the_first_step_begins_at_what_is_retained() -> None:
    step = next_step(topic(segment(0, 9, earliest=4), segment(1, 3)), landed(0, {}), NO_LIMITS)
    assert step is not None
    assert step.ranges == (Range(0, 4, 9), Range(1, 0, 3))
    assert step.landed == landed(1, {0: 9, 1: 3})
    assert (step.records, step.losses) == (8, ())


def test_nothing_new_is_no_step() -> None:
    assert next_step(topic(segment(0, 9)), landed(3, {0: 9}), NO_LIMITS) is None
    assert next_step(topic(segment(0, 0)), landed(0, {}), NO_LIMITS) is None
    assert next_step(topic(segment(0, 9, sealed=True), segment(1, 0, 0)), landed(3, {0: END}), NO_LIMITS) is None


def test_a_segment_that_ended_where_the_table_stands_is_a_step_without_records() -> None:
    step = next_step(topic(segment(0, 9, sealed=True)), landed(3, {0: 9}), NO_LIMITS)
    assert step is not None
    assert (step.ranges, step.landed.positions, step.landed.step) == ((), {0: END}, 4)


def test_segments_of_which_nothing_lands_are_named() -> None:
    step = next_step(topic(segment(0, 9), segment(1, 5), segment(2, 7)), landed(1, {0: 9, 1: 2, 2: 7}), NO_LIMITS)
    assert step is not None
    assert (step.ranges, step.others, step.estimated_bytes) == ((Range(1, 2, 5),), (0, 2), 300.0)


def test_a_loss_of_records_that_have_landed_stops_the_run_or_goes_on_with_those_that_took_their_offsets() -> None:
    before = topic(msgspec.structs.replace(segment(0, 9), epochs=((1, 0),)))
    first = next_step(before, landed(0, {}), NO_LIMITS)
    assert first is not None
    assert first.landed.epochs == {0: 1}
    after = topic(msgspec.structs.replace(segment(0, 20), epochs=((1, 0), (2, 4))))
    with pytest.raises(DataLoss, match=r"holds other records from offset 4 on.*--skip-lost"):
        next_step(after, first.landed, NO_LIMITS)
    second = next_step(after, first.landed, NO_LIMITS, skip_lost=True)
    assert second is not None
    assert second.ranges == (Range(0, 4, 20),)
    assert second.landed.epochs == {0: 2}
    assert next_step(after, second.landed, NO_LIMITS) is None


def test_what_retention_took_stops_the_run_or_is_skipped_by_name() -> None:
    there = topic(segment(0, 9, earliest=6))
    with pytest.raises(DataLoss, match=r"offsets 2 to 5 of segment 0 .*--skip-lost"):
        next_step(there, landed(1, {0: 2}), NO_LIMITS)
    step = next_step(there, landed(1, {0: 2}), NO_LIMITS, skip_lost=True)
    assert step is not None
    assert step.ranges == (Range(0, 6, 9),)
    assert "offsets 2 to 5 of segment 0" in step.losses[0]


def test_a_loss_with_nothing_behind_it_is_a_step_too_so_that_it_is_told_once() -> None:
    there = topic(segment(0, 9, earliest=9))
    step = next_step(there, landed(1, {0: 2}), NO_LIMITS, skip_lost=True)
    assert step is not None
    assert (step.ranges, step.landed) == ((), landed(2, {0: 9}))
    assert "offsets 2 to 8 of segment 0" in step.losses[0]
    assert next_step(there, step.landed, NO_LIMITS) is None


def test_a_target_bounds_what_lands() -> None:
    then, now = topic(segment(0, 5)), topic(segment(0, 9, sealed=True), segment(1, 4, 0))
    step = next_step(now, landed(0, {}), NO_LIMITS, target=then)
    assert step is not None
    assert (step.ranges, step.others) == ((Range(0, 0, 5),), (1,))
    assert next_step(now, step.landed, NO_LIMITS, target=then) is None


@pytest.mark.parametrize("skip_lost", [False, True])
def test_what_another_run_has_landed_behind_the_target_is_not_lost_and_stays_landed(skip_lost: bool) -> None:
    then, now = topic(segment(0, 5), segment(1, 8)), topic(segment(0, 9), segment(1, 8), segment(2, 4))
    before = landed(6, {0: 9, 1: 3, 2: 4})
    step = next_step(now, before, NO_LIMITS, target=then, skip_lost=skip_lost)
    assert step is not None
    assert (step.ranges, step.losses) == ((Range(1, 3, 8),), ())
    assert step.landed.positions == {0: 9, 1: 8, 2: 4}


def test_a_segment_that_the_topic_has_forgotten_stays_at_its_end() -> None:
    step = next_step(topic(segment(1, 5, 0)), landed(4, {0: END, 1: 2}), NO_LIMITS)
    assert step is not None
    assert step.landed.positions == {0: END, 1: 5}
    lost = next_step(topic(segment(1, 5, 0)), landed(4, {0: 3, 1: 2}), NO_LIMITS, skip_lost=True)
    assert lost is not None
    assert lost.losses
    assert lost.landed.positions == {0: END, 1: 5}
    assert next_step(topic(segment(1, 5, 0)), lost.landed, NO_LIMITS) is None


def test_parents_land_before_children_and_every_offset_once_in_any_dag() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        segments: list[SegmentSnapshot] = []
        for number in range(draw.randint(1, 9)):
            parents = [each.id for each in draw.sample(segments, min(len(segments), draw.randint(0, 2)))]
            segments = [msgspec.structs.replace(each, sealed=each.sealed or each.id in parents) for each in segments]
            segments.append(segment(number, draw.randint(0, 12), *parents))
        there = topic(*segments)
        state, order, steps = landed(0, {}), list[tuple[int, int]](), list[LakeStep]()
        most = draw.randint(1, 8)
        while (step := next_step(there, state, BatchLimits(records=most))) is not None:
            assert step.records <= most
            complete = {each for each, position in state.positions.items() if position == END}
            complete |= {each.id for each in segments if each.sealed and state.positions.get(each.id, 0) == each.end}
            for each in step.ranges:
                assert set(there.segments[each.segment].parents) <= complete, (seed, step)
                order += ((each.segment, offset) for offset in range(each.first, each.until))
            steps.append(step)
            state = step.landed
        assert len(order) == len(set(order)), seed
        assert sorted(order) == [(each.id, offset) for each in segments for offset in range(each.end)], seed
        assert state.step == len(steps)


def test_a_table_takes_one_topic_with_one_choice_of_columns() -> None:
    there = topic(segment(0, 9))
    assert begin(None, there, ("offset",), "t").columns == ("offset",)
    assert begin(None, there, None, "t").columns == (
        "segment", "offset", "key", "value", "timestamp", "headers", "keyHash", "epoch",
    )  # fmt: skip
    known = landed(3, {0: 2})
    assert begin(known, there, None, "t") == known
    assert begin(known, topic(segment(0, 9), topic_id=0), ("segment", "offset"), "t") == known
    assert begin(landed(3, {0: 2}, topic_id=0), there, None, "t") == known, "once known, the id counts"
    with pytest.raises(TableMismatch, match="deleted and created again with id 8"):
        begin(known, topic(segment(0, 9), topic_id=8), None, "t")
    with pytest.raises(TableMismatch, match="t is a table of topic public/default/orders; land public/default/other"):
        begin(known, msgspec.structs.replace(there, topic="public/default/other"), None, "t")
    with pytest.raises(TableMismatch, match="has the columns segment, offset, and value were asked for"):
        begin(known, there, ("value",), "t")


def test_columns_that_a_topic_does_not_have_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="column 'price' is unknown"):
        columns_schema(("offset", "price"))
    with pytest.raises(InvalidArgument, match="named twice"):
        columns_schema(("offset", "offset"))
