"""Auto-scaling under a load that stays as it is: it settles, and it never leaves its limits."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from braid.cluster.key_hash_samples import KeyHashSamples
from braid.model.batch.header import NO_KEYS, BatchHeader
from braid.model.layout import FULL_RANGE, HashRange, Layout, tiles
from braid.model.load import halving_cell
from braid.model.topic import AutoScalePolicy, Topic
from braid.model.transition import plan_merge, plan_split
from braid.scaling.auto_scale import MeasuredSegment, SegmentRates, Split, decide, is_cold
from braid.testing.batches import opaque_header

STEP_S = 400
"""Longer than every cooldown and window of the policies here: nothing but the load and the limits holds them back."""
MOST_STEPS = 200

policies = st.builds(
    lambda least, more, split, part, depth: AutoScalePolicy(
        enabled=True,
        min_segments=least,
        max_segments=least + more,
        max_dag_depth=depth,
        split_msg_rate_in_threshold=split,
        merge_msg_rate_in_threshold=split // (2 * part),
    ),
    st.integers(1, 3),
    st.integers(0, 12),
    st.integers(10, 1_000),
    st.integers(1, 5),
    st.integers(0, 4),
)
key_loads = st.dictionaries(st.integers(0, 0xFFFF), st.integers(1, 2_000), max_size=40)


class Load:
    """Records per second by key hash, and of records without a key, which go to all segments in turn."""

    def __init__(self, keys: dict[int, int], unkeyed: int) -> None:
        self.keys, self.unkeyed = keys, unkeyed

    def of(self, hashes: HashRange, segments: int) -> SegmentRates:
        keyed = sum(rate for key_hash, rate in self.keys.items() if key_hash in hashes)
        return SegmentRates(keyed + self.unkeyed / segments, 0, 0)

    def measured(self, hashes: HashRange, segments: int, policy: AutoScalePolicy) -> MeasuredSegment:
        samples = KeyHashSamples(hashes, lambda: 0.0)
        samples.want()
        for key_hash, rate in self.keys.items():
            if key_hash in hashes:
                samples.take(_header(rate * 1_000, key_hash), memoryview(b""))
        if self.unkeyed:
            samples.take(_header(self.unkeyed * 1_000 // segments, None), memoryview(b""))
        rates = self.of(hashes, segments)
        return MeasuredSegment(rates, samples.summary(), STEP_S if is_cold(policy, rates) else 0)


def _header(count: int, key_hash: int | None) -> BatchHeader:
    return opaque_header(b"", max(count, 1), key_hashes=NO_KEYS if key_hash is None else (key_hash, key_hash))


@given(policies, key_loads, st.integers(0, 5_000), st.integers(1, 16), st.integers(0, 20))
def test_under_a_constant_load_it_settles_within_its_limits(
    policy: AutoScalePolicy, keys: dict[int, int], unkeyed: int, initial: int, consumers: int
) -> None:
    load, topic, now = Load(keys, unkeyed), Topic(id=1, layout=Layout.initial(initial)), STEP_S * 1_000_000
    counts, actions = [initial], []
    for _ in range(MOST_STEPS):
        active = topic.layout.active
        measured = {each.segment_id: load.measured(each.hash_range, len(active), policy) for each in active}
        found = decide(
            policy,
            topic.layout,
            measured,
            {"s": consumers},
            split_at=topic.split_at,
            merged_at=topic.merged_at,
            now=now,
        )
        actions.append(found)
        if found.action is None:
            break
        if isinstance(found.action, Split):
            plan = plan_split(topic.layout, found.action.segment, at=found.action.at)
        else:
            plan = plan_merge(topic.layout, *found.action)
        topic = topic.beginning(plan, transition_id=1, created_at=now).sealing().committed(now)
        now += STEP_S * 1_000_000
        counts.append(len(topic.layout.active))
    else:
        raise AssertionError(f"it goes on for ever: {actions[-6:]}")
    for before, after in pairwise(counts):
        assert after < before or after <= policy.max_segments
        assert after > before or after >= policy.min_segments
    depths = topic.layout.merge_depths.values()
    assert max(depths) <= policy.max_dag_depth


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=50))
def test_no_other_place_halves_a_load_better(loads: list[float]) -> None:
    def larger(cell: int) -> float:
        return max(sum(loads[:cell]), sum(loads[cell:]))

    best = halving_cell(loads)
    assert 1 <= best < len(loads)
    assert larger(best) <= min(map(larger, range(1, len(loads)))) * (1 + 1e-9) + 1e-6


@given(st.lists(st.integers(1, 0xFFFF), unique=True, max_size=30))
def test_the_cells_of_a_segment_tile_its_range(starts: list[int]) -> None:
    edges = [0, *sorted(starts), 0x10000]
    for start, end in pairwise(edges):
        samples = KeyHashSamples(HashRange(start, end - 1), lambda: 0.0)
        cells = [samples.cell(number) for number in range(samples.cells)]
        assert tiles(cells, HashRange(start, end - 1))
    assert tiles([HashRange(start, end - 1) for start, end in pairwise(edges)], FULL_RANGE)
