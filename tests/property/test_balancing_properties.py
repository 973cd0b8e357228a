"""Whatever the cluster looks like: limits hold, targets are available, and no plan makes the busiest broker busier."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from braid.cluster.balancing.balance import HOUR_S, plan
from braid.cluster.balancing.plan import BalancePlan, Remark
from braid.cluster.balancing.policy import BalancePolicy
from braid.cluster.placement import Tally, place_all
from braid.model.cluster import BrokerState, ClusterLoad, RecentMove, SegmentRef
from tests.kits.balancing import MB, NOON_US, SECOND_US, after, cluster, ref

RARELY = st.sampled_from([False] * 7 + [True])
TOPICS = ("public/default/a", "public/default/b", "t/n/c")


class Case(NamedTuple):
    rates: dict[str, dict[SegmentRef, int]]
    view: ClusterLoad
    policy: BalancePolicy
    history: list[RecentMove]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Mostly clusters in which something can be moved; now and then anything stands in the way of it."""
    ids = [f"b{number}" for number in range(draw(st.integers(1, 6) | st.integers(3, 6)))]
    rates: dict[str, dict[SegmentRef, int]] = {broker: {} for broker in ids}
    hot = draw(st.sampled_from(ids))
    most = draw(st.integers(1, 40))
    for number in range(draw(st.integers(0, 30) | st.integers(12, 30))):
        rate = draw(st.integers(1, most)) * MB // draw(st.sampled_from([1, 1, 1, 7, MB]))
        rates[draw(st.sampled_from([hot, *ids]))][ref(number, TOPICS[number % 3])] = rate
    segments = [segment for owned in rates.values() for segment in owned]
    few = (
        st.lists(st.sampled_from(segments), max_size=draw(st.integers(0, 3)))
        if segments
        else st.just(list[SegmentRef]())
    )
    view = cluster(
        rates,
        at=NOON_US - (91 if draw(RARELY) else draw(st.sampled_from([0, 30, 90]))) * SECOND_US,
        states={broker: draw(st.sampled_from(BrokerState)) if draw(RARELY) else BrokerState.ACTIVE for broker in ids},
        dead=[broker for broker in ids if draw(RARELY)],
        moving=draw(few),
        cpu={broker: 0.9 if draw(RARELY) else 0.5 for broker in ids},
        history={segment: draw(st.sampled_from([0, 0, 10**9, 10**12])) for segment in segments},
        copies_history=draw(st.booleans()),
    )
    policy = BalancePolicy(
        threshold=draw(st.sampled_from([1.05, 1.25, 2.0])),
        min_gain=draw(st.sampled_from([0.001, 0.1])),
        quiet_bytes_per_s=draw(st.sampled_from([0, MB])),
        moves_at_once=draw(st.integers(1, 6)),
        moves_per_hour=draw(st.integers(1, 6)),
        drain_moves_at_once=draw(st.integers(1, 6)),
    )
    history = [
        RecentMove(
            segment=segment,
            source=draw(st.sampled_from(ids)),
            target=draw(st.sampled_from(ids)),
            at=NOON_US - draw(st.integers(0, 4_000)) * SECOND_US,
            automatic=draw(st.booleans()),
        )
        for segment in draw(few)
    ]
    return Case(rates, view, policy, history)


def available(view: ClusterLoad) -> set[str]:
    return {broker.id for broker in view.brokers if broker.live and broker.state is BrokerState.ACTIVE}


def check_moves(found: BalancePlan, view: ClusterLoad) -> None:
    owners = {segment.ref: segment for segment in view.owned}
    for move in found.moves:
        assert move.target in available(view)
        assert move.source == owners[move.segment].owner != move.target
        assert not owners[move.segment].moving
    assert len({move.segment for move in found.moves}) == len(found.moves)


@given(cases())
def test_a_plan_keeps_its_limits_and_goes_only_to_brokers_that_are_available(case: Case) -> None:
    found = plan(case.view, case.policy, case.history, NOON_US)
    check_moves(found, case.view)
    in_flight = sum(segment.moving for segment in case.view.owned)
    begun = sum(move.automatic and NOON_US - move.at < HOUR_S * SECOND_US for move in case.history)
    assert len(found.moves) <= max(case.policy.moves_at_once - in_flight, 0)
    assert len(found.moves) <= max(case.policy.moves_per_hour - begun, 0)
    for past in case.history:
        age_s = (NOON_US - past.at) / SECOND_US
        for move in found.moves:
            assert move.segment != past.segment or age_s >= case.policy.segment_cooldown_s
            assert age_s >= case.policy.broker_cooldown_s or {past.source, past.target}.isdisjoint(
                (move.source, move.target)
            )


@given(cases())
def test_no_move_of_a_plan_raises_the_maximum_or_makes_its_target_the_busiest(case: Case) -> None:
    found = plan(case.view, case.policy, case.history, NOON_US)
    members = available(case.view)
    for done in range(len(found.moves)):
        before = {
            broker: sum(owned.values())
            for broker, owned in after(case.rates, found.moves[:done]).items()
            if broker in members
        }
        loads = {
            broker: sum(owned.values())
            for broker, owned in after(case.rates, found.moves[: done + 1]).items()
            if broker in members
        }
        move = found.moves[done]
        assert max(loads.values()) <= max(before.values())
        assert loads[move.target] < before[move.source]
        assert loads[move.target] <= max(load for broker, load in loads.items() if broker != move.target)


@given(cases())
def test_no_broker_gets_busier_than_the_busiest_was_in_whatever_order_moves_end(case: Case) -> None:
    found = plan(case.view, case.policy, case.history, NOON_US)
    loads = {broker: sum(owned.values()) for broker, owned in case.rates.items() if broker in available(case.view)}
    for move in found.moves:
        arriving = sum(each.bytes_in_per_s + each.bytes_out_per_s for each in found.moves if each.target == move.target)
        assert loads[move.target] + arriving <= max(loads.values())


@given(cases())
def test_a_plan_says_what_it_leads_to_and_why_it_ends(case: Case) -> None:
    found = plan(case.view, case.policy, case.history, NOON_US)
    assert found == plan(case.view, case.policy, case.history, NOON_US)
    members = available(case.view)
    expected = {
        broker: sum(owned.values()) for broker, owned in after(case.rates, found.moves).items() if broker in members
    }
    assert {load.broker: load.bytes_per_s_after for load in found.brokers if load.broker in members} == expected
    assert round(found.spread_after, 3) <= round(found.spread_before, 3)
    evened = found.spread_after <= case.policy.threshold and found.moves
    assert evened or found.notes, "neither even nor a word about it"
    for note in found.notes:
        if note.remark is Remark.UNBALANCEABLE:
            assert note.segment is not None
            rate = next(owned[note.segment] for owned in case.rates.values() if note.segment in owned)
            assert rate > case.policy.threshold * sum(expected.values()) / len(members)


@given(cases())
def test_nothing_moves_on_old_reports(case: Case) -> None:
    if any(NOON_US - load.at > 90 * SECOND_US for load in case.view.loads.values()):
        assert plan(case.view, case.policy, case.history, NOON_US).moves == ()


@given(cases(), st.integers(0, 30))
def test_places_are_available_and_allowed_and_even(case: Case, count: int) -> None:
    members = available(case.view)
    segments = [ref(1_000 + number, TOPICS[0]) for number in range(count)]
    placed = place_all(segments, Tally(case.view.brokers, case.view.loads, case.view.owned))
    assert set(placed) == (set(segments) if members else set())
    assert set(placed.values()) <= members
    shares = Counter(placed.values())
    if placed:
        assert max(shares.values()) - min(shares[broker] for broker in members) <= 1
    tally = Tally(case.view.brokers, case.view.loads, case.view.owned)
    where = tally.least_loaded(ref(1_000), allowed={"b0", "b1"}, avoid="b0")
    assert where in members & {"b0", "b1"} or (where is None and not members & {"b0", "b1"})
    assert where != "b0" or "b1" not in members
