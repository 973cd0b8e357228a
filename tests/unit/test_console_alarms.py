"""What the console calls an alarm of a topic."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from braid.console.watch import alarms
from braid.console.watch.metrics_text import read_metrics

ORDERS = 'topic="public/default/orders"'
PATH = "public/default/orders"
RULES = Path(__file__).parents[2] / "deploy" / "prometheus" / "braid.rules.yml"


def found(*brokers: str) -> list[str]:
    """Return the alarms of orders, of what each broker shows."""
    of_topics = alarms.of_metrics([read_metrics(text, alarms.METRICS) for text in brokers])
    assert of_topics.keys() <= {PATH}
    return of_topics.get(PATH, [])


def in_sync(segment: int, follower: str, value: int) -> str:
    return f'braid_replica_in_sync{{{ORDERS},segment="{segment}",follower="{follower}"}} {value}\n'


def lag(subscription: str, age_s: float) -> str:
    return f'braid_subscription_lag_seconds{{{ORDERS},subscription="{subscription}",segment="0"}} {age_s}\n'


def consumers(subscription: str, count: int) -> str:
    return f'braid_subscription_consumers{{{ORDERS},subscription="{subscription}"}} {count}\n'


def test_a_healthy_topic_has_no_alarm() -> None:
    unexported = f'braid_segment_unexported_age_seconds{{{ORDERS},segment="0"}} 599\n'
    assert found(in_sync(0, "b", 1) + lag("billing", 30) + consumers("billing", 1) + unexported) == []
    assert alarms.of_metrics([]) == {}


def test_copies_that_do_not_count_are_counted_over_all_brokers() -> None:
    assert found(in_sync(0, "b", 0) + in_sync(0, "c", 1)) == ["1 copy behind"]
    assert found(in_sync(0, "b", 0), in_sync(1, "b", 0)) == ["2 copies behind"]


def test_a_subscription_that_is_behind_alarms_only_if_nobody_consumes_it() -> None:
    assert found(lag("billing", 7_200) + consumers("billing", 0)) == ["billing is 2 h behind, without a consumer"]
    assert found(lag("billing", 7_200)) == ["billing is 2 h behind, without a consumer"]
    assert found(lag("billing", 3_599)) == []
    assert found(lag("billing", 7_200), consumers("billing", 1)) == [], "its consumer is at another broker"
    queue = f'braid_queue_consumers{{{ORDERS},subscription="billing",segment="1"}} 1\n'
    assert found(lag("billing", 7_200) + consumers("billing", 0), queue) == []


def test_an_export_that_stands_still_and_a_hot_key_are_alarms() -> None:
    unexported = f'braid_segment_unexported_age_seconds{{{ORDERS},segment="0"}} 10800\n'
    hot = f'braid_segment_hot_key_ratio{{{ORDERS},segment="2"}} 0.61\n'
    assert found(unexported, hot) == ["nothing is exported for 3 h", "one key is 61% of segment 2"]


@pytest.mark.parametrize(
    ("step", "age_s", "expected"),
    [
        ("SEALING", 480, ["a change of its layout waits for 8 min"]),
        ("CREATING", 480, ["a change of its layout waits for 8 min"]),
        ("SEALING", 200, []),
        ("FINALIZING", 9_000, []),
    ],
)
def test_a_change_that_does_not_get_to_its_commit_is_an_alarm(step: str, age_s: float, expected: list[str]) -> None:
    now = 1_000_000.0
    change = {"kind": "layout", "topic": PATH, "step": step, "since": round((now - age_s) * 1e6)}
    others = [
        {**change, "topic": "public/default/others"},
        {**change, "kind": "move"},
        {**change, "since": 0},
    ]
    assert alarms.of_changes([*others, change], PATH, now) == expected


def test_limits_are_those_of_the_alerts() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    rules = {rule["alert"]: rule for group in groups for rule in group["rules"]}
    assert rules["BraidTransitionStuck"]["expr"].endswith(f"> {alarms.LONG_CHANGE_S:.0f}")
    assert rules["BraidExportStuck"]["expr"].endswith(f"> {alarms.LONG_UNEXPORTED_S:.0f}")
    assert rules["BraidSubscriptionAlone"]["for"] == f"{alarms.LONG_ALONE_S / 3_600:.0f}h"
    assert rules["BraidQueueAlone"]["for"] == f"{alarms.LONG_ALONE_S / 3_600:.0f}h"
