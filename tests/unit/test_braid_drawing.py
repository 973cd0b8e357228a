"""The drawing of a topic's layout."""

from __future__ import annotations

import json
from typing import Any

from braid.cli.terminal.braid_drawing import draw
from braid.model.layout import Layout
from braid.model.topic import Topic
from braid.model.transition import LayoutPlan, plan_merge, plan_repartition, plan_split


def changed(layout: Layout, plan: LayoutPlan) -> Layout:
    return Topic(id=1, layout=layout).beginning(plan, transition_id=1, created_at=0).sealing().committed().layout


def segments(layout: Layout) -> list[dict[str, Any]]:
    return list(json.loads(layout.to_json())["segments"].values())


def a_history() -> Layout:
    layout = Layout.initial(1)
    layout = changed(layout, plan_split(layout, 0))
    layout = changed(layout, plan_split(layout, 1))
    layout = changed(layout, plan_merge(layout, 4, 2))
    return changed(layout, plan_repartition(layout, 5))


OWNERS = {"6": "b1", "7": "b2", "8": None, "9": "broker-with-a-long-name", "10": "b1"}


def test_time_goes_down_and_the_ring_across() -> None:
    assert draw(segments(a_history()), width=56, rows=20, owners=OWNERS) == [
        "epoch   0000        4000        8000       c000     ffff",
        "    0   │0                                             │",
        "        ├───────────────────────┬──────────────────────┤",
        "    1   │1                      │2                     │",
        "        ├───────────┬───────────┤                      │",
        "    2   │3          │4          │                      │",
        "        │           ├───────────┴──────────────────────┤",
        "    3   │           │5                                 │",
        "        ├────────┬──┴──────┬────────┬─────────┬────────┤",
        "    4   │6 b1    │7 b2     │8       │9        │10 b1   │",
    ]


def test_only_the_latest_layouts_are_drawn() -> None:
    lines = draw(segments(a_history()), width=56, rows=2, owners={})
    assert [line[:10].strip() for line in lines] == ["epoch   00", "…   (3", "3   │", "├─", "4   │6"]


def test_what_was_pruned_leaves_a_blank_and_the_rest_is_drawn() -> None:
    pruned = a_history().pruned(0).pruned(1)
    assert draw(segments(pruned), width=56, rows=20, owners={})[:4] == [
        "epoch   0000        4000        8000       c000     ffff",
        "    1                           │2                     │",
        "        ┌───────────┬───────────┤                      │",
        "    2   │3          │4          │                      │",
    ]


def test_a_thousand_segments_fit_into_a_narrow_terminal() -> None:
    lines = draw(segments(Layout.initial(1_000)), width=40, rows=5, owners={})
    assert len(lines) == 2
    assert max(map(len, lines)) <= 40
