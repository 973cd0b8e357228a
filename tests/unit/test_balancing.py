"""Balancing proposes the move that helps most, seldom and within its limits, and says why when it proposes none."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from braid.cluster.balancing.balance import plan, remembered
from braid.cluster.balancing.plan import BalancePlan, Remark
from braid.cluster.balancing.policy import BalancePolicy
from braid.model.cluster import BrokerState, RecentMove, SegmentRef
from braid.model.errors import InvalidConfig
from tests.kits.balancing import MB, NOON_US, SECOND_US, cluster, moved, ref, remarks, replicated

ONE = BalancePolicy(moves_at_once=1)
MANY = BalancePolicy(moves_at_once=64)

UNEVEN = {"a": {ref(0): 5 * MB, ref(1): 3 * MB, ref(2): 2 * MB}, "b": {ref(3): 4 * MB}, "c": {ref(4): MB}}


def past(segment: SegmentRef, source: str, target: str, seconds_ago: float, *, automatic: bool = True) -> RecentMove:
    at = NOON_US - round(seconds_ago * SECOND_US)
    return RecentMove(segment=segment, source=source, target=target, at=at, automatic=automatic)


# ── the best move ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_segment_of_half_the_difference_moves_from_the_busiest_to_the_idlest() -> None:
    found = plan(cluster(UNEVEN), ONE, (), NOON_US)
    # 10 and 1: moving 5 would make c the busiest; 3 gains 3, 2 gains 2.
    assert moved(found) == [(ref(1), "a", "c")]
    assert found.moves[0].reason == "a has 2.00 times the mean load"
    assert (found.spread_before, found.spread_after) == (2.0, 1.4)
    assert remarks(found) == ["in-flight"]


def test_a_plan_goes_on_until_the_spread_is_small_enough() -> None:
    found = plan(cluster(UNEVEN), MANY, (), NOON_US)
    assert moved(found) == [(ref(1), "a", "c")]
    assert remarks(found) == ["stuck"]  # 7, 4, 4: moving the 2 of a makes its target the busiest
    found = plan(cluster(UNEVEN), BalancePolicy(moves_at_once=9, threshold=1.4), (), NOON_US)
    assert remarks(found) == []


def test_later_moves_of_a_plan_know_the_earlier_ones() -> None:
    rates = {"a": {ref(number): MB for number in range(9)}, "b": {}, "c": {}}
    found = plan(cluster(rates), MANY, (), NOON_US)
    assert [move.target for move in found.moves] == ["b", "c", "b", "c", "b", "c"]
    assert found.spread_after == 1.0
    spreads = [found.spread_before, *(move.spread_after for move in found.moves)]
    assert spreads == sorted(spreads, reverse=True)
    assert [move.spread_before for move in found.moves] == spreads[:-1]


def test_within_a_plan_a_broker_either_gives_or_gets() -> None:
    rates = {"a": {ref(1): 2 * MB, ref(2): 18 * MB}, "b": {}, "c": {ref(0): 13 * MB, ref(3): 12 * MB}}
    found = plan(cluster(rates), MANY, (), NOON_US)
    assert moved(found) == [(ref(0), "c", "b"), (ref(1), "a", "b")]  # not to c, which has 12 left and b 13
    rates = {"a": {ref(0): 11 * MB, ref(3): 15 * MB}, "b": {ref(2): MB}, "c": {ref(1): MB}}
    assert moved(plan(cluster(rates), MANY, (), NOON_US)) == [(ref(0), "a", "b")]  # b, now above c, does not pass on


def test_a_broker_within_the_threshold_gives_nothing() -> None:
    rates = {"a": {ref(0): 90 * MB}, "b": {ref(1): 10 * MB, ref(2): 10 * MB}, "c": dict[SegmentRef, int]()}
    found = plan(cluster(rates), MANY, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["unbalanceable"])


def test_an_even_cluster_is_left_alone() -> None:
    rates = {"a": {ref(0): 5 * MB}, "b": {ref(1): 4 * MB}, "c": {ref(2): 4 * MB}}
    found = plan(cluster(rates), MANY, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["balanced"])


def test_nothing_moves_at_the_threshold_and_something_does_above_it() -> None:
    def rates(more: int) -> dict[str, dict[SegmentRef, int]]:
        return {"a": {ref(0): 9 * MB, ref(1): MB + more}, "b": {ref(2): 6 * MB}}

    assert remarks(plan(cluster(rates(0)), ONE, (), NOON_US)) == ["balanced"]
    assert moved(plan(cluster(rates(9)), ONE, (), NOON_US)) == [(ref(1), "a", "b")]


def test_nothing_moves_where_little_happens() -> None:
    rates = {"a": {ref(0): 500_000, ref(1): 500_000}, "b": dict[SegmentRef, int]()}
    assert remarks(plan(cluster(rates), ONE, (), NOON_US)) == ["quiet"]
    assert moved(plan(cluster(rates), BalancePolicy(quiet_bytes_per_s=10_000), (), NOON_US)) == [(ref(0), "a", "b")]


def test_a_gain_below_the_minimum_is_no_reason_to_move() -> None:
    rates = {"a": {ref(0): 8 * MB, ref(1): 90_000}, "b": {ref(2): 4 * MB}}
    found = plan(cluster(rates), BalancePolicy(min_gain=0.05), (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["unbalanceable"])
    assert moved(plan(cluster(rates), BalancePolicy(min_gain=0.01), (), NOON_US)) == [(ref(1), "a", "b")]


def test_a_broker_of_a_thousand_small_segments_is_still_relieved() -> None:
    rates = {"a": {ref(number): 20_000 for number in range(1_000)}, "b": dict[SegmentRef, int]()}
    assert len(plan(cluster(rates), MANY, (), NOON_US).moves) == 60
    assert remarks(plan(cluster(rates), MANY, (), NOON_US)) == ["capped"]


def test_a_move_that_would_make_its_target_the_busiest_is_not_made() -> None:
    rates = {"a": {ref(0): 6 * MB, ref(1): 5 * MB}, "b": {ref(2): 4 * MB}}
    found = plan(cluster(rates), ONE, (), NOON_US)  # 11 and 4: both moves leave 9 or 10 with b, and less with a
    assert (found.moves, remarks(found)) == ((), ["stuck"])
    busier_elsewhere = {**rates, "c": {ref(3): 10 * MB, ref(4): 90_000}}
    found = plan(cluster(busier_elsewhere), ONE, (), NOON_US)
    assert moved(found) == [(ref(1), "a", "b")]


def test_nothing_goes_to_a_broker_whose_processor_is_busy() -> None:
    found = plan(cluster(UNEVEN, cpu={"c": 0.95}), ONE, (), NOON_US)
    assert moved(found) == [(ref(1), "a", "b")]
    found = plan(cluster(UNEVEN, cpu={"b": 0.95, "c": 0.95}), ONE, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["stuck"])


@pytest.mark.parametrize("state", [BrokerState.DRAINING, BrokerState.DRAINED])
def test_a_broker_out_of_service_neither_gives_nor_gets(state: BrokerState) -> None:
    assert moved(plan(cluster(UNEVEN, states={"c": state}), ONE, (), NOON_US)) == [(ref(1), "a", "b")]
    hot = {**UNEVEN, "d": {ref(9): 90 * MB, ref(10): 30 * MB}}
    assert moved(plan(cluster(hot, states={"d": state}), ONE, (), NOON_US)) == [(ref(1), "a", "c")]


def test_a_dead_broker_neither_gives_nor_gets_and_need_not_report() -> None:
    assert moved(plan(cluster(UNEVEN, dead=["c"]), ONE, (), NOON_US)) == [(ref(1), "a", "b")]


def test_one_broker_alone_has_nowhere_to_move_to() -> None:
    assert remarks(plan(cluster({"a": UNEVEN["a"]}), ONE, (), NOON_US)) == ["alone"]
    assert remarks(plan(cluster(UNEVEN, dead=["b", "c"]), ONE, (), NOON_US)) == ["alone"]
    assert remarks(plan(cluster({}), ONE, (), NOON_US)) == ["alone"]


# ── idle segments ────────────────────────────────────────────────────────────────────────────────────────────────────


def idle(**numbers: int) -> dict[str, dict[SegmentRef, int]]:
    """Brokers with so many segments that have no load."""
    number = itertools.count()
    return {broker: {ref(next(number)): 0 for _ in range(count)} for broker, count in numbers.items()}


def counted(found: BalancePlan) -> dict[str, int]:
    return {each.broker: each.segments_after for each in found.brokers}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({"a": 3, "b": 0, "c": 3}, {"a": 2, "b": 2, "c": 2}),
        ({"a": 9, "b": 0, "c": 0}, {"a": 3, "b": 3, "c": 3}),
        ({"a": 2, "b": 0}, {"a": 1, "b": 1}),
        ({"a": 3, "b": 1, "c": 4}, {"a": 3, "b": 2, "c": 3}),
    ],
)
def test_the_numbers_of_idle_segments_become_even(before: dict[str, int], after: dict[str, int]) -> None:
    found = plan(cluster(idle(**before)), MANY, (), NOON_US, even_numbers=True)
    assert counted(found) == after
    assert remarks(found) == []


@pytest.mark.parametrize("numbers", [{"a": 2, "b": 1, "c": 2}, {"a": 1, "b": 0}, {"a": 0, "b": 0}])
def test_numbers_that_differ_by_one_are_even(numbers: dict[str, int]) -> None:
    found = plan(cluster(idle(**numbers)), MANY, (), NOON_US, even_numbers=True)
    assert (found.moves, remarks(found)) == ((), ["balanced"])


def test_idle_segments_move_a_few_at_a_time_and_say_why() -> None:
    found = plan(cluster(idle(a=9, b=0, c=0)), BalancePolicy(), (), NOON_US, even_numbers=True)
    assert moved(found) == [(ref(0), "a", "b"), (ref(1), "a", "c")]
    assert found.moves[0].reason == "a has 9 segments and b 0; this one is idle"
    assert remarks(found) == ["in-flight"]


def test_only_idle_segments_move_to_make_the_numbers_even() -> None:
    rates = {"a": {ref(0): 3 * MB, ref(1): 3 * MB, ref(2): 10}, "b": {ref(3): 6 * MB}}
    assert moved(plan(cluster(rates), MANY, (), NOON_US, even_numbers=True)) == [(ref(2), "a", "b")]
    busy = {"a": {ref(0): 2 * MB, ref(1): 2 * MB, ref(2): 2 * MB}, "b": {ref(3): 6 * MB}}
    assert remarks(plan(cluster(busy), MANY, (), NOON_US, even_numbers=True)) == ["balanced"]


def test_the_idle_segment_with_the_least_to_copy_moves() -> None:
    found = plan(
        cluster(idle(a=2, b=0), history={ref(0): 5 * MB, ref(1): MB}, copies_history=True),
        ONE,
        (),
        NOON_US,
        even_numbers=True,
    )
    assert moved(found) == [(ref(1), "a", "b")]


def test_idle_segments_and_their_brokers_rest_like_others() -> None:
    rests = past(ref(0), "a", "b", 60)
    found = plan(cluster(idle(a=2, b=0)), MANY, [rests], NOON_US, even_numbers=True)
    assert (found.moves, remarks(found)) == ((), ["cooling"])
    later = past(ref(0), "a", "b", 600)
    assert moved(plan(cluster(idle(a=2, b=0)), MANY, [later], NOON_US, even_numbers=True)) == [(ref(1), "a", "b")]


def test_numbers_stay_uneven_unless_they_are_asked_to_be_even() -> None:
    found = plan(cluster(idle(a=3, b=0, c=3)), MANY, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["balanced"])


# ── one segment too hot for any broker ───────────────────────────────────────────────────────────────────────────────


def test_a_segment_hotter_than_all_else_is_left_alone_and_named() -> None:
    rates = {"a": {ref(0): 90 * MB}, "b": {ref(1): MB}, "c": dict[SegmentRef, int]()}
    found = plan(cluster(rates), MANY, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["unbalanceable"])
    assert found.notes[0].segment == ref(0)
    assert found.notes[0].broker == "a"
    assert "segment 0 of public/default/orders alone carries 90,000,000 bytes/s, 2.97 times" in found.notes[0].text


def test_what_lies_beside_the_hottest_segment_moves_away_from_it() -> None:
    rates = {"a": {ref(0): 90 * MB, ref(1): 4 * MB, ref(2): 3 * MB}, "b": {ref(3): MB}, "c": {ref(4): 2 * MB}}
    found = plan(cluster(rates), MANY, (), NOON_US)
    assert moved(found) == [(ref(1), "a", "b"), (ref(2), "a", "c")]
    assert remarks(found) == ["unbalanceable"]
    assert found.notes[0].segment == ref(0)


def test_two_hot_segments_on_one_broker_are_parted_before_they_are_called_unbalanceable() -> None:
    rates = {"a": {ref(0): 50 * MB, ref(1): 50 * MB}, "b": dict[SegmentRef, int](), "c": dict[SegmentRef, int]()}
    found = plan(cluster(rates), ONE, (), NOON_US)
    assert moved(found) == [(ref(0), "a", "b")]
    waiting = plan(cluster(rates, moving=[ref(0)]), ONE, (), NOON_US)
    assert (waiting.moves, remarks(waiting)) == ((), ["in-flight"])


# ── rest and limits ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_segment_rests_after_a_move() -> None:
    rest_s = ONE.segment_cooldown_s
    recent = [past(ref(1), "x", "y", rest_s - 1)]
    assert moved(plan(cluster(UNEVEN), ONE, recent, NOON_US)) == [(ref(2), "a", "c")]
    old = [past(ref(1), "x", "y", rest_s)]
    assert moved(plan(cluster(UNEVEN), ONE, old, NOON_US)) == [(ref(1), "a", "c")]


@pytest.mark.parametrize(("source", "target"), [("a", "x"), ("x", "a")])
def test_a_broker_rests_after_it_gave_or_got(source: str, target: str) -> None:
    recent = [past(ref(77), source, target, ONE.broker_cooldown_s - 1)]
    found = plan(cluster(UNEVEN), ONE, recent, NOON_US)
    assert (found.moves, remarks(found)) == ((), ["cooling"])
    assert found.notes[0].segment == ref(1)
    old = [past(ref(77), source, target, ONE.broker_cooldown_s)]
    assert moved(plan(cluster(UNEVEN), ONE, old, NOON_US)) == [(ref(1), "a", "c")]


def test_a_resting_broker_is_no_target_and_the_next_one_is() -> None:
    assert moved(plan(cluster(UNEVEN), ONE, [past(ref(77), "x", "c", 5)], NOON_US)) == [(ref(1), "a", "b")]


def test_moves_by_hand_let_rest_too_but_do_not_count_for_the_hour() -> None:
    by_hand = [past(ref(100 + number), "x", "y", 600, automatic=False) for number in range(99)]
    assert moved(plan(cluster(UNEVEN), ONE, by_hand, NOON_US)) == [(ref(1), "a", "c")]
    assert moved(plan(cluster(UNEVEN), ONE, [past(ref(1), "x", "y", 600, automatic=False)], NOON_US)) == [
        (ref(2), "a", "c")
    ]


def test_a_segment_that_is_moving_is_not_moved_and_its_brokers_rest_until_it_has_ended() -> None:
    two = BalancePolicy(moves_at_once=2)
    found = plan(cluster(UNEVEN, moving=[ref(1)]), two, (), NOON_US)
    assert moved(found) == [(ref(2), "a", "c")]
    long_ago = [past(ref(1), "a", "c", 3_000)]
    assert remarks(plan(cluster(UNEVEN, moving=[ref(1)]), two, long_ago, NOON_US)) == ["cooling"]


def test_moves_in_flight_count_whoever_began_them() -> None:
    found = plan(cluster(UNEVEN, moving=[ref(3)]), ONE, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["in-flight"])


def test_no_more_moves_begin_in_an_hour_than_may() -> None:
    policy = BalancePolicy(moves_at_once=9, moves_per_hour=5)
    rates = {"a": {ref(number): MB for number in range(20)}, "b": dict[SegmentRef, int]()}
    begun = [past(ref(100 + number), "x", "y", 3_599) for number in range(3)]
    found = plan(cluster(rates), policy, begun, NOON_US)
    assert len(found.moves) == 2
    assert remarks(found) == ["capped"]
    ended = [past(ref(100 + number), "x", "y", 3_600) for number in range(3)]
    assert len(plan(cluster(rates), policy, ended, NOON_US).moves) == 5


def test_history_is_kept_as_long_as_it_matters_and_no_longer() -> None:
    history = [past(ref(1), "a", "b", 3_599), past(ref(2), "a", "b", 3_600), past(ref(3), "a", "b", 5)]
    assert [move.segment for move in remembered(history, ONE, NOON_US)] == [ref(1), ref(3)]
    slow = BalancePolicy(segment_cooldown_s=7_200)
    assert len(remembered(history, slow, NOON_US)) == 3


# ── old reports ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("age_s", [91, -91])
def test_a_report_that_is_too_old_or_from_the_future_stops_everything(age_s: int) -> None:
    view = cluster(UNEVEN)
    late = msgspec.structs.replace(view.loads["b"], at=NOON_US - age_s * SECOND_US)
    found = plan(msgspec.structs.replace(view, loads={**view.loads, "b": late}), ONE, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["stale"])
    assert found.notes[0].broker == "b"
    assert "91 s" in found.notes[0].text


def test_a_report_that_is_just_young_enough_is_good() -> None:
    assert plan(cluster(UNEVEN, at=NOON_US - 90 * SECOND_US), ONE, (), NOON_US).moves != ()


def test_a_live_broker_without_a_report_stops_everything() -> None:
    view = cluster(UNEVEN)
    without = msgspec.structs.replace(view, loads={"a": view.loads["a"], "c": view.loads["c"]})
    assert remarks(plan(without, ONE, (), NOON_US)) == ["stale"]


# ── what a copy costs ────────────────────────────────────────────────────────────────────────────────────────────────


def test_where_moves_copy_history_the_segment_with_less_of_it_goes() -> None:
    large = {ref(1): 8 * 10**9}  # in an hour 2.2 MB/s: more than the 1 MB/s that segment 1 gains above segment 2
    assert moved(plan(cluster(UNEVEN, history=large, copies_history=True), ONE, (), NOON_US)) == [(ref(2), "a", "c")]
    assert moved(plan(cluster(UNEVEN, history=large), ONE, (), NOON_US)) == [(ref(1), "a", "c")]


def test_nothing_moves_that_does_not_pay_for_its_copy() -> None:
    large = {ref(number): 10**12 for number in range(5)}
    found = plan(cluster(UNEVEN, history=large, copies_history=True), ONE, (), NOON_US)
    assert (found.moves, remarks(found)) == ((), ["stuck"])
    patient = BalancePolicy(payback_s=604_800, moves_at_once=1)
    assert moved(plan(cluster(UNEVEN, history=large, copies_history=True), patient, (), NOON_US)) == [
        (ref(1), "a", "c")
    ]


# ── the policy ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "setting",
    [
        {"interval_s": 0.5},
        {"stale_intervals": 0},
        {"threshold": 1.0},
        {"min_gain": 0},
        {"quiet_bytes_per_s": -1},
        {"moves_at_once": 0},
        {"moves_per_hour": 0},
        {"segment_cooldown_s": -1},
        {"broker_cooldown_s": -1},
        {"payback_s": 0},
        {"max_target_cpu": 1.5},
        {"drain_moves_at_once": 65},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_a_setting_beyond_its_limit_is_refused_by_name(setting: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig, match=next(iter(setting))):
        BalancePolicy(**setting)


def test_a_rest_of_brokers_too_short_for_a_report_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="at least two intervals"):
        BalancePolicy(interval_s=61)
    BalancePolicy(interval_s=60)


def test_every_setting_of_the_policy_has_a_limit() -> None:
    from braid.cluster.balancing.policy import _POLICY_LIMITS

    assert [name for name, _, _ in _POLICY_LIMITS] == [field.name for field in msgspec.structs.fields(BalancePolicy)]


def test_the_page_about_balancing_has_every_setting_with_its_default_and_every_note() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating" / "balancing.md").read_text(encoding="utf-8")
    documented = dict(re.findall(r"`(\w+)` \| ([\d.,]+)(?: s)? \|", page))
    documented |= dict(re.findall(r"`(drain_moves_at_once)` \((\d+);", page))
    defaults = {field.name: field.default for field in msgspec.structs.fields(BalancePolicy)}
    assert {name: float(text.replace(",", "")) for name, text in documented.items()} == defaults
    notes = re.findall(r"^\| `([a-z-]+)` \|", page, flags=re.MULTILINE)
    assert notes == [remark.value for remark in Remark]


def test_the_replicas_of_a_segment_write_what_comes_in_whichever_of_them_owns_it() -> None:
    """Each has 9 MB/s, of which 3 come in: b carries 6 as a follower of both, and 6 more as the owner of one."""
    rates = {"a": {ref(0): 9 * MB, ref(1): 9 * MB}, "b": {}}
    view = msgspec.structs.replace(cluster(rates), owned=(replicated(ref(0), "a", "b"), replicated(ref(1), "a", "b")))
    found = plan(view, BalancePolicy(), (), NOON_US)
    assert moved(found) == [(ref(0), "a", "b")]
    assert (found.spread_before, found.spread_after) == (1.5, 1.0)
