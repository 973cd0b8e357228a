"""Advice over random layouts and loads: it keeps what must be kept, and following it ends."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.model.layout import FULL_RANGE, LAST_HASH, HashRange, tiles
from braid.spark.jobs.advise.rules import (
    MIN_RECORDS,
    WORTH,
    ActiveSegment,
    Advice,
    KeyLoad,
    LoadHistogram,
    Merge,
    Policy,
    Split,
    advise,
)
from tests.kits.examples import share

HASHES = st.integers(1, LAST_HASH)


@st.composite
def layouts(draw: st.DrawFn) -> list[ActiveSegment]:
    starts = sorted({0, *draw(st.lists(HASHES, max_size=12))})
    ends = [*(start - 1 for start in starts[1:]), LAST_HASH]
    ids = draw(st.permutations(range(len(starts))))
    return [ActiveSegment(number, HashRange(start, end)) for number, start, end in zip(ids, starts, ends, strict=True)]


@st.composite
def histograms(draw: st.DrawFn, layout: list[ActiveSegment]) -> LoadHistogram:
    """Few cells and few buckets; loads from nothing to everything."""
    cuts = draw(st.lists(HASHES, max_size=30))
    starts = sorted({0, *(segment.range.start for segment in layout), *cuts})
    buckets = draw(st.integers(1, 4))
    load = st.one_of(st.just(0), st.integers(0, 100), st.integers(0, 1_000_000))
    cells = draw(st.lists(load, min_size=len(starts) * buckets, max_size=len(starts) * buckets))
    unkeyed = draw(st.one_of(st.just([0] * buckets), st.lists(load, min_size=buckets, max_size=buckets)))
    return LoadHistogram(
        bucket_s=3_600,
        times=tuple(3_600 * number for number in range(buckets)),
        starts=np.array(starts),
        loads=np.array(cells, np.int64).reshape(len(starts), buckets),
        unkeyed=np.array(unkeyed, np.int64),
        records=MIN_RECORDS,
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[ActiveSegment], LoadHistogram, Policy]:
    layout = draw(layouts())
    return layout, draw(histograms(layout)), Policy(draw(st.integers(1, 20)))


def followed(layout: list[ActiveSegment], advice: Advice) -> list[ActiveSegment]:
    """The layout after the actions, done one by one as a controller would."""
    segments = {segment.id: segment.range for segment in layout}
    for action in advice.actions:
        match action:
            case Split(segment_id, at, (lower, upper)):
                old = segments.pop(segment_id)
                segments |= {lower: HashRange(old.start, int(at, 16) - 1), upper: HashRange(int(at, 16), old.end)}
            case Merge((first, second), child):
                left, right = segments.pop(first), segments.pop(second)
                assert left.end + 1 == right.start
                segments[child] = HashRange(left.start, right.end)
    return sorted((ActiveSegment(number, each) for number, each in segments.items()), key=lambda each: each.range)


@given(cases())
def test_following_the_advice_keeps_the_tiling_and_gives_the_loads_that_were_promised(
    case: tuple[list[ActiveSegment], LoadHistogram, Policy],
) -> None:
    layout, histogram, policy = case
    advice = advise(layout, histogram, (), policy)
    after = followed(layout, advice)
    assert tiles([segment.range for segment in after], FULL_RANGE)
    assert [(each.segment_id, each.hash_range) for each in advice.after] == [(each.id, each.range) for each in after]
    assert advise(after, histogram, (), policy).before == advice.after


@given(cases())
def test_the_highest_load_never_rises_above_what_it_was_or_the_even_share(
    case: tuple[list[ActiveSegment], LoadHistogram, Policy],
) -> None:
    layout, histogram, policy = case
    advice = advise(layout, histogram, (), policy)
    before, after = (max(each.peak_load for each in loads) for loads in (advice.before, advice.after))
    assert after <= max(before, advice.even_share + 1)
    if policy.target >= len(layout):
        assert after <= before


@settings(max_examples=share(300))
@given(cases())
def test_advice_that_was_followed_leads_to_no_other_advice(
    case: tuple[list[ActiveSegment], LoadHistogram, Policy],
) -> None:
    layout, histogram, policy = case
    after = followed(layout, advise(layout, histogram, (), policy))
    assert advise(after, histogram, (), policy).actions == ()


@given(layouts(), HASHES, st.integers(16, 4_096), st.integers(0, 3))
def test_a_planted_hot_range_is_divided(layout: list[ActiveSegment], first: int, width: int, hour: int) -> None:
    """A range of the ring that carries most of the load, in one hour of four."""
    end = min(LAST_HASH + 1, first + width)
    edges = {0, first, *range(first, end, max(1, (end - first) // 8)), *(segment.range.start for segment in layout)}
    starts = np.array(sorted(edges))
    loads = np.full((len(starts), 4), 10, np.int64)
    inside = (starts >= first) & (starts < end)
    loads[inside, hour] = 1_000_000
    histogram = LoadHistogram(3_600, (0, 1, 2, 3), starts, loads, np.zeros(4, np.int64), MIN_RECORDS)
    advice = advise(layout, histogram, (), Policy(max(4, len(layout))))
    highest = max(each.peak_load for each in advice.after)
    assert highest <= max(advice.capacity, loads.max()) + 2 * WORTH * advice.capacity


@given(cases(), HASHES)
def test_a_planted_hot_key_is_named_and_no_split_is_advised_for_it_alone(
    case: tuple[list[ActiveSegment], LoadHistogram, Policy], key_hash: int
) -> None:
    layout, measured, policy = case
    starts = np.array(sorted({*map(int, measured.starts), key_hash, min(key_hash + 1, LAST_HASH)}))
    loads = np.zeros((len(starts), len(measured.times)), np.int64)
    loads[starts.searchsorted(key_hash), 0] = 10_000_000
    unkeyed = np.zeros(len(measured.times), np.int64)
    histogram = LoadHistogram(3_600, measured.times, starts, loads, unkeyed, MIN_RECORDS)
    key = KeyLoad("customer-7", key_hash, 1_000, 10_000_000, 10_000_000)
    advice = advise(layout, histogram, [key], policy)
    assert [each.key for each in advice.hot_keys] == ["customer-7"]
    assert not any(isinstance(action, Split) for action in advice.actions)
    assert advice.hot_keys[0].share == 1.0
