"""What is advised for loads that a person can check in his head; one bucket of time, unless more matter."""

from __future__ import annotations

import numpy as np
import pytest

from braid.model.layout import LAST_HASH, HashRange, Layout
from braid.spark.jobs.advise.rules import (
    MIN_RECORDS,
    ActiveSegment,
    Advice,
    KeyLoad,
    LoadHistogram,
    Merge,
    Policy,
    Split,
    advise,
    followed,
)

QUARTER = (LAST_HASH + 1) // 4


def layout_of(segments: int) -> list[ActiveSegment]:
    return [ActiveSegment(each.segment_id, each.hash_range) for each in Layout.initial(segments).active]


def histogram_of(
    cells: dict[int, int | list[int]], *, unkeyed: int = 0, records: int = MIN_RECORDS, segments: int = 4
) -> LoadHistogram:
    """Loads by the first hash of a cell; borders of segments begin cells of their own."""
    borders = {each.range.start: 0 for each in layout_of(segments)}
    given = sorted({**borders, **cells}.items())
    rows = [load if isinstance(load, list) else [load] for _, load in given]
    buckets = max(map(len, rows))
    loads = np.array([row + [0] * (buckets - len(row)) for row in rows], np.int64)
    times = tuple(3_600 * number for number in range(buckets))
    starts = np.array([start for start, _ in given])
    return LoadHistogram(3_600, times, starts, loads, np.full(buckets, unkeyed, np.int64), records)


def loads_of(advice: Advice) -> list[int]:
    return [each.peak_load for each in advice.after]


def test_an_even_load_needs_nothing() -> None:
    histogram = histogram_of({0: 100, QUARTER: 90, 2 * QUARTER: 110, 3 * QUARTER: 100})
    advice = advise(layout_of(4), histogram, (), Policy(4))
    assert (advice.actions, advice.hot_keys) == ((), ())
    assert advice.statement == (
        "Nothing to do: the busiest segment carries 1.10 times its even share, and 1.5 times is fine."
    )
    assert advice.after == advice.before


def test_a_hot_segment_is_split_where_its_load_halves_not_in_its_middle() -> None:
    cells: dict[int, int | list[int]] = {0: 30, 0x0100: 30, 0x0200: 30, 0x0300: 30, 0x6000: 40, 0xC000: 40}
    advice = advise(layout_of(3), histogram_of(cells, segments=3), (), Policy(3))
    assert advice.actions[0] == Split(0, "0200", (3, 4))


def test_halves_are_as_even_as_they_can_be() -> None:
    """Two places leave nothing above the capacity of 100; one of them leaves 90 and 30, the other 100 and 20."""
    cells: dict[int, int | list[int]] = {0: 90, 0x0100: 10, 0x0200: 10, 0x0300: 10, 0x6000: 40, 0xC000: 40}
    advice = advise(layout_of(3), histogram_of(cells, segments=3), (), Policy(3))
    assert advice.actions[0] == Split(0, "0100", (3, 4))


def test_crumbs_around_a_hot_hash_are_not_worth_a_split() -> None:
    cells: dict[int, int | list[int]] = {0x0FFF: 20, 0x1000: 700, 0x1001: 20, QUARTER: 100, 0x8000: 100, 0xC000: 100}
    assert advise(layout_of(4), histogram_of(cells), (), Policy(4)).actions == ()


def test_a_very_hot_segment_is_split_again_and_cold_neighbours_make_room() -> None:
    cells: dict[int, int | list[int]] = dict.fromkeys(range(0, QUARTER, QUARTER // 8), 100)
    advice = advise(layout_of(4), histogram_of(cells), (), Policy(4))
    assert [type(action) for action in advice.actions] == [Split, Split, Split, Merge, Merge, Merge]
    assert loads_of(advice) == [200, 200, 200, 200]
    assert advice.statement == "3 splits and 3 merges bring the busiest segment from 4.00 times its even share to 1.00."


def test_later_actions_name_the_segments_that_earlier_ones_make() -> None:
    cells: dict[int, int | list[int]] = dict.fromkeys(range(0, QUARTER, QUARTER // 8), 100)
    advice = advise(layout_of(4), histogram_of(cells), (), Policy(4))
    active = followed(advice.before, advice.actions)
    assert active == {each.segment_id: each.hash_range for each in advice.after}
    assert set(active).isdisjoint({0, 1, 2, 3})


def test_more_segments_can_be_asked_for() -> None:
    cells: dict[int, int | list[int]] = dict.fromkeys(range(0, LAST_HASH + 1, 256), 1)
    advice = advise(layout_of(1), histogram_of(cells, segments=1), (), Policy(4))
    assert [action.at for action in advice.actions if isinstance(action, Split)] == ["8000", "4000", "c000"]


def test_fewer_segments_can_be_asked_for() -> None:
    cells: dict[int, int | list[int]] = {QUARTER * number: 100 for number in range(4)}
    advice = advise(layout_of(4), histogram_of(cells), (), Policy(2))
    assert advice.actions == (Merge((0, 1), 4), Merge((2, 3), 5))
    assert "4 segments down to 2" in advice.statement


def test_cold_neighbours_are_merged() -> None:
    histogram = histogram_of({0: 100, QUARTER: 10, 2 * QUARTER: 10, 3 * QUARTER: 100})
    assert advise(layout_of(4), histogram, (), Policy(4)).actions == (Merge((1, 2), 4),)


def test_neighbours_that_would_be_nearly_hot_together_stay_apart() -> None:
    """More segments than wanted are better than one that is split again: 510 of the 605 that a segment may carry."""
    cells: dict[int, int | list[int]] = {0: 350, 0x1000: 350, 0x6000: 255, 0xC000: 255}
    advice = advise(layout_of(3), histogram_of(cells, segments=3), (), Policy(3))
    assert advice.actions == (Split(0, "1000", (3, 4)),)


def test_fewer_segments_are_not_bought_with_more_than_the_even_share() -> None:
    """20 segments where 11 are wanted: two together would carry 1.1 even shares, and now each carries 0.55."""
    layout = layout_of(20)
    histogram = histogram_of({each.range.start: 55 for each in layout}, segments=20)
    assert advise(layout, histogram, (), Policy(11)).actions == ()


def test_the_busiest_hour_counts_and_not_the_mean() -> None:
    """Each quarter has the same in all hours together; the first has all of it in one."""
    even = [100, 100, 100, 100]
    histogram = histogram_of(
        {0: [400], 0x1000: [0], 0x0800: [400], QUARTER: even, 2 * QUARTER: even, 3 * QUARTER: even}
    )
    advice = advise(layout_of(4), histogram, (), Policy(4))
    assert advice.actions[0] == Split(0, "0800", (4, 5))


def test_a_hot_key_is_named_with_its_share_and_not_split() -> None:
    histogram = histogram_of({0x1000: 700, 0x1001: 0, QUARTER: 100, 2 * QUARTER: 100, 3 * QUARTER: 100})
    key = KeyLoad("customer-7", 0x1000, 50, 700, 700)
    small = KeyLoad("customer-9", 0x5000, 5, 50, 50)
    advice = advise(layout_of(4), histogram, [small, key], Policy(4))
    assert [(each.key, each.segment_id, each.share) for each in advice.hot_keys] == [("customer-7", 0, 0.7)]
    assert advice.actions == ()
    assert "sits on too few key hashes to be divided" in advice.statement


def test_load_around_a_hot_key_is_taken_from_its_segment() -> None:
    histogram = histogram_of({0x0000: 300, 0x1000: 700, 0x1001: 300, QUARTER: 100})
    advice = advise(layout_of(4), histogram, [KeyLoad("k", 0x1000, 50, 700, 700)], Policy(4))
    assert advice.hot_keys
    assert {action.at for action in advice.actions if isinstance(action, Split)} == {"1000", "1001"}


def test_two_hot_hours_at_different_hashes_of_a_segment_are_both_divided() -> None:
    """No single split lowers the highest hour, because the other one stays as high."""
    morning, evening = [400, 0], [0, 400]
    cells: dict[int, int | list[int]] = {0: morning, 0x0800: morning, 0x1000: evening, 0x1800: evening, QUARTER: [0, 0]}
    advice = advise(layout_of(4), histogram_of(cells), (), Policy(2))
    assert max(each.peak_load for each in advice.before) == 800
    assert max(each.peak_load for each in advice.after) == 400


def test_records_without_keys_weigh_on_all_segments_alike() -> None:
    """The same keys as above would be hot; beside this much that goes anywhere they are not."""
    histogram = histogram_of({0: 100, QUARTER: 10, 2 * QUARTER: 10, 3 * QUARTER: 10}, unkeyed=10_000)
    advice = advise(layout_of(4), histogram, (), Policy(4))
    assert advice.actions == ()
    assert [each.peak_load for each in advice.before] == [2_600, 2_510, 2_510, 2_510]


def test_few_records_are_no_ground_for_advice() -> None:
    advice = advise(layout_of(4), histogram_of({0: 1_000}, records=MIN_RECORDS - 1), (), Policy(4))
    assert advice.actions == ()
    assert advice.statement == "999 records are too few to advise anything; at least 1,000 are needed."


def test_a_topic_without_records_gets_advice_that_says_so() -> None:
    nothing = LoadHistogram(3_600, (), np.array([0]), np.zeros((1, 0), np.int64), np.zeros(0, np.int64), 0)
    advice = advise(layout_of(1), nothing, (), Policy(1))
    assert (advice.actions, advice.before[0].share) == ((), 0.0)


def test_a_hot_range_that_wanders_does_not_ask_for_segments_without_end() -> None:
    """Each of 64 hours has its whole load on another 64th of the ring."""
    width = (LAST_HASH + 1) // 64
    cells: dict[int, int | list[int]] = {}
    for hour in range(64):
        for part in range(8):
            cells[hour * width + part * width // 8] = [0] * hour + [100] + [0] * (63 - hour)
    advice = advise(layout_of(4), histogram_of(cells), (), Policy(4))
    assert len(advice.after) == 16
    assert "wanders over the ring" in advice.statement


def test_what_wanders_gets_no_room_from_merges_either() -> None:
    """Merging the idle half would allow more splits, and those more merges."""
    width = (LAST_HASH + 1) // 64
    cells: dict[int, int | list[int]] = {}
    for hour in range(32):
        for part in range(8):
            cells[hour * width + part * width // 8] = [0] * hour + [100] + [0] * (31 - hour)
    advice = advise(layout_of(8), histogram_of(cells, segments=8), (), Policy(2))
    assert advice.actions == ()
    assert "wanders over the ring" in advice.statement


def test_a_layout_with_a_hole_is_refused() -> None:
    with pytest.raises(AssertionError, match="I6"):
        advise([ActiveSegment(0, HashRange(0, 7))], histogram_of({0: 1}), (), Policy(1))
