"""Any sequence of changes of a layout keeps what everybody relies on (I6)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from braid.model.errors import InvalidArgument, TransitionRefused
from braid.model.layout import FULL_RANGE, Layout, tiles
from braid.model.topic import Topic
from braid.model.transition import LayoutPlan, plan_merge, plan_repartition, plan_split

Change = tuple[str, int, int]
changes = st.lists(
    st.tuples(
        st.sampled_from(["split", "split at", "split into", "merge", "repartition", "prune", "abort"]),
        st.integers(0, 40),
        st.integers(0, 0xFFFF),
    ),
    max_size=12,
)


def planned(layout: Layout, kind: str, which: int, number: int) -> LayoutPlan | None:
    active = layout.active
    segment = active[which % len(active)]
    try:
        match kind:
            case "split at":
                return plan_split(layout, segment.segment_id, at=number)
            case "split into":
                return plan_split(layout, segment.segment_id, into=2 + number % 5)
            case "merge":
                return plan_merge(layout, segment.segment_id, active[(which + 1) % len(active)].segment_id)
            case "repartition":
                return plan_repartition(layout, 1 + number % 9)
            case _:
                return plan_split(layout, segment.segment_id)
    except (TransitionRefused, InvalidArgument):
        return None


@given(st.integers(1, 5), changes)
def test_every_sequence_of_changes_keeps_the_ring_tiled_and_every_key_in_one_line(
    segments: int, wanted: list[Change]
) -> None:
    topic = Topic(id=1, layout=Layout.initial(segments))
    seen = set(topic.layout.segments)
    for kind, which, number in wanted:
        layout = topic.layout
        if kind == "prune":
            roots = [each for each in layout.segments.values() if not each.is_active and not each.parent_ids]
            if roots:
                pruned = layout.pruned(roots[which % len(roots)].segment_id)
                topic = Topic(id=1, layout=pruned)
            continue
        plan = planned(layout, kind, which, number)
        if plan is None:
            continue
        begun = topic.beginning(plan, transition_id=1, created_at=0)
        new = begun.segments.keys() - layout.segments.keys()
        assert not new & seen, "an id came twice"
        seen |= new
        topic = begun.aborted() if kind == "abort" else begun.sealing().committed()
        assert tiles([each.hash_range for each in topic.layout.active], FULL_RANGE)
        assert topic.layout.epoch == layout.epoch + (kind != "abort")
        assert Layout.from_json(topic.layout.to_json()) == topic.layout
        if kind != "abort":
            check_lines(topic.layout, plan)


def check_lines(layout: Layout, plan: LayoutPlan) -> None:
    """A key of a parent's range finds the parent among the ancestors of its new segment."""
    for parent_id in plan.parents:
        hashes = layout.segment(parent_id).hash_range
        for key_hash in (hashes.start, hashes.end, (hashes.start + hashes.end) // 2):
            child = layout.find_active(key_hash)
            assert parent_id in child.parent_ids
            assert parent_id in layout.ancestors(child.segment_id)
            assert child.segment_id in layout.lineage(parent_id)
