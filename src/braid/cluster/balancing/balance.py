"""Decides which segments should move so that brokers have about the same load. Pure functions; the leader acts.

A broker's load is its bytes per second in and out (placement.py says how they are counted). The *spread* is the load of
the busiest available broker, divided by the mean of all. While the spread exceeds `threshold`, the best single move is
proposed, then the best one after it, and so on. Moving a segment of rate x from a broker with S to one with T gains

    min(x, S − T − x) − history / payback_s          bytes per second

which is what the busier of the two loses, less what the copy costs. A segment of half the difference gains most. The
gain is positive only if T + x < S, so no move raises the maximum, and a move that would make its target the busiest
broker of all is no candidate. So one segment hotter than everything else stays where it is: any other broker would
become the busiest. The plan names it instead (`unbalanceable`): only a split would help. Of a replicated segment, x is
what it sends out: its replicas write what comes in, whichever of them owns it.

**Idle segments** have next to no load, so they say nothing about the spread; but they may get load later, and a broker
without segments is of no use. With `even_numbers`, while the spread is small or the cluster is quiet, idle segments
move from the broker with most segments to the broker with fewest, until these two differ by at most one. Such a move
changes no load, so it never leads to the moves above, and it makes the numbers only more even: nothing swings. An
operator may ask for it at any time. The leader waits until the cluster was calm for a while: rates of a cluster that
has just started say nothing yet.

Balancing stays calm. Nothing happens below the threshold, or for a gain below `min_gain`. A segment that moved rests
for a while, so that it cannot swing back and forth. A broker that took part rests until its reports show the move. Caps
bound the moves at the same time and per hour, and old reports decide nothing.

Rejected: minimising the variance, which prefers the same moves, but in units that mean nothing to an operator; and
swaps of two segments, which reach a little further with twice the moves and plans that are hard to read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, NamedTuple

from braid.cluster.balancing.plan import BalancePlan, Note, PlanDraft, Remark
from braid.cluster.balancing.policy import BalancePolicy
from braid.cluster.placement import Tally
from braid.model.cluster import ClusterLoad, RecentMove, SegmentRef

HOUR_S: Final = 3_600
IDLE_BYTES_PER_S: Final = 16 << 10
"""A segment with less load than this counts as idle: some records a second."""
_US: Final = 1_000_000


def remembered(history: Iterable[RecentMove], policy: BalancePolicy, now: int) -> tuple[RecentMove, ...]:
    """Return the moves that still matter to `plan`; the leader may forget all others (I12)."""
    keep_us = max(HOUR_S, policy.segment_cooldown_s, policy.broker_cooldown_s) * _US
    return tuple(move for move in history if now - move.at < keep_us)


def plan(
    view: ClusterLoad,
    policy: BalancePolicy,
    history: Sequence[RecentMove],
    now: int,
    *,
    even_numbers: bool = False,
) -> BalancePlan:
    """Plan what to move now; `now` is in µs since 1970. `history` has all moves that were begun lately."""
    draft = PlanDraft(view)
    obstacle = _obstacle(view, policy, draft.tally, now)
    if obstacle is not None:
        return draft.finish([obstacle])
    cooling_down = _cooling_down(view, policy, history, now)
    begun = sum(move.automatic and now - move.at < HOUR_S * _US for move in history)
    limits = _Limits(sum(segment.moving for segment in view.owned), begun)
    calm = _calm(policy, draft.tally)
    if calm is not None:
        notes = _even_numbers(policy, draft, cooling_down, limits) if even_numbers else []
        return draft.finish(notes or ([] if draft.moves else [calm]))
    notes = []
    while draft.tally.spread() > policy.threshold:
        reached = limits.reached(policy, draft)
        if reached is not None:
            notes.append(reached)
            break
        found = _best(view, policy, draft, cooling_down)
        if found is None:
            notes += _why_none(view, policy, draft)
            break
        draft.move(found.segment, found.source, found.target, _too_much(draft.tally, found.source))
    return draft.finish([*notes, *_too_hot(policy, draft)])


class _Limits(NamedTuple):
    """How many moves are in flight, and how many were begun within an hour, before this plan."""

    in_flight: int
    begun: int

    def reached(self, policy: BalancePolicy, draft: PlanDraft) -> Note | None:
        """Tell which limit allows no further move."""
        if self.in_flight + len(draft.moves) >= policy.moves_at_once:
            limit = policy.moves_at_once
            text = f"at most {limit} moves run at the same time; more follow when these end"
            return Note(remark=Remark.IN_FLIGHT, text=text)
        if self.begun + len(draft.moves) >= policy.moves_per_hour:
            text = f"{policy.moves_per_hour} moves have begun within an hour, the most that may"
            return Note(remark=Remark.CAPPED, text=text)
        return None


# Evening out the numbers.


def _even_numbers(policy: BalancePolicy, draft: PlanDraft, cooling_down: _CoolingDown, limits: _Limits) -> list[Note]:
    """Move idle segments to brokers that have fewer."""
    while (found := _most_to_fewest(policy, draft, cooling_down)) is not None:
        reached = limits.reached(policy, draft)
        if reached is not None:
            return [reached]
        segment, source, target = found
        most, fewest = len(draft.tally.segments[source]), len(draft.tally.segments[target])
        draft.move(segment, source, target, f"{source} has {most} segments and {target} {fewest}; this one is idle")
    rested = _most_to_fewest(policy, draft, _CoolingDown((), ()))
    if rested is None or draft.moves:
        return []
    segment, source, target = rested
    text = f"{segment} would move from {source} to {target}, but the last move is too recent"
    return [Note(remark=Remark.COOLING, text=text, segment=segment, broker=source)]


def _most_to_fewest(
    policy: BalancePolicy, draft: PlanDraft, cooling_down: _CoolingDown
) -> tuple[SegmentRef, str, str] | None:
    """Find the idle segment whose move makes the numbers of segments most even."""
    tally = draft.tally
    counts = {broker: len(tally.segments[broker]) for broker in tally.available}
    target = _coolest(policy, draft, cooling_down, lambda broker: (counts[broker], tally.bytes_per_s[broker], broker))
    if target is None:
        return None
    for source in sorted(tally.available, key=lambda broker: (-counts[broker], broker)):
        if counts[source] - counts[target] < 2:
            return None
        if source in cooling_down.brokers or source in draft.targets:
            continue
        idle = [
            segment
            for segment in tally.segments[source]
            if tally.rate(segment) < IDLE_BYTES_PER_S and segment not in cooling_down.segments
        ]
        if idle:  # The one with the least to copy.
            return min(idle, key=lambda segment: (_history_bytes(tally, segment), segment)), source, target
    return None


def _history_bytes(tally: Tally, segment: SegmentRef) -> int:
    load = tally.reported.get(segment)
    return 0 if load is None else load.history_bytes


# What may move.


class _CoolingDown(NamedTuple):
    segments: Collection[SegmentRef]
    brokers: Collection[str]


class _Candidate(NamedTuple):
    gain: float
    segment: SegmentRef
    source: str
    target: str


def _obstacle(view: ClusterLoad, policy: BalancePolicy, tally: Tally, now: int) -> Note | None:
    """Tell why nothing at all is to be decided now."""
    if len(tally.available) < 2:
        return Note(remark=Remark.ALONE, text="fewer than two brokers are active and live: there is nowhere to move to")
    limit_s = policy.interval_s * policy.stale_intervals
    for broker in sorted(each.id for each in view.brokers if each.live):
        report = view.loads.get(broker)
        if report is None:
            text = f"{broker} is live and has not reported its load; nothing moves until it does"
            return Note(remark=Remark.STALE, text=text, broker=broker)
        age_s = (now - report.at) / _US
        if abs(age_s) > limit_s:
            when = f"{age_s:.0f} s old" if age_s > 0 else f"from {-age_s:.0f} s in the future: clocks differ"
            text = f"the load report of {broker} is {when}; nothing moves unless it is within {limit_s:g} s"
            return Note(remark=Remark.STALE, text=text, broker=broker)
    return None


def _calm(policy: BalancePolicy, tally: Tally) -> Note | None:
    """Tell why no load is to be moved."""
    spread = tally.spread()
    if spread <= policy.threshold:
        text = f"the busiest broker has {spread:.2f} times the mean load, at most {policy.threshold:g} is even enough"
        return Note(remark=Remark.BALANCED, text=text)
    most = max(tally.bytes_per_s[broker] for broker in tally.available)
    if most < policy.quiet_bytes_per_s:
        text = f"the busiest broker has {most:,} bytes/s; below {policy.quiet_bytes_per_s:,} nothing is worth a move"
        return Note(remark=Remark.QUIET, text=text)
    return None


def _cooling_down(view: ClusterLoad, policy: BalancePolicy, history: Sequence[RecentMove], now: int) -> _CoolingDown:
    """Return what rests. A move that has not ended keeps its brokers at rest: its load is yet to arrive."""
    moving = {segment.ref for segment in view.owned if segment.moving}
    segments, brokers = set(moving), set[str]()
    for move in history:
        if now - move.at < policy.segment_cooldown_s * _US:
            segments.add(move.segment)
        if now - move.at < policy.broker_cooldown_s * _US or move.segment in moving:
            brokers |= {move.source, move.target}
    return _CoolingDown(segments, brokers)


def _best(view: ClusterLoad, policy: BalancePolicy, draft: PlanDraft, cooling_down: _CoolingDown) -> _Candidate | None:
    """Find the move that gains most, as if the moves that were planned already were done."""
    tally, loads = draft.tally, draft.tally.bytes_per_s
    mean = tally.mean_bytes_per_s()
    best: _Candidate | None = None
    for source in tally.available:
        if loads[source] <= policy.threshold * mean or source in cooling_down.brokers or source in draft.targets:
            continue
        # The same target is best for every segment: the less it has, the higher the gain and the lower its new load.
        target = _coolest(policy, draft, cooling_down, lambda broker: (loads[broker], broker), but=source)
        if target is None:
            continue
        others = _most_of_others(tally, source, target)
        for segment in tally.segments[source]:
            rate = tally.owner_rate(segment)
            if not rate or segment in cooling_down.segments or loads[target] + rate > max(loads[source] - rate, others):
                continue
            gain = min(rate, loads[source] - loads[target] - rate) - _cost(view, policy, tally, segment)
            if gain < policy.min_gain * mean:
                continue
            if best is None or (-gain, segment, source) < (-best.gain, best.segment, best.source):
                best = _Candidate(gain, segment, source, target)
    return best


def _coolest(
    policy: BalancePolicy,
    draft: PlanDraft,
    cooling_down: _CoolingDown,
    order: Callable[[str], tuple[Any, ...]],
    *,
    but: str | None = None,
) -> str | None:
    """Return the broker that may get a segment and comes first in this order."""
    tally = draft.tally
    return min(
        (
            broker
            for broker in tally.available
            if broker != but
            and broker not in cooling_down.brokers
            and broker not in draft.sources
            and tally.cpu[broker] <= policy.max_target_cpu
        ),
        key=order,
        default=None,
    )


def _most_of_others(tally: Tally, source: str, target: str) -> int:
    return max((tally.bytes_per_s[each] for each in tally.available if each not in (source, target)), default=0)


def _cost(view: ClusterLoad, policy: BalancePolicy, tally: Tally, segment: SegmentRef) -> float:
    """Return the cost of copying the history, in bytes per second over the time in which the move must pay."""
    return tally.reported[segment].history_bytes / policy.payback_s if view.copies_history else 0.0


# Why not.


def _too_much(tally: Tally, broker: str) -> str:
    return f"{broker} has {tally.bytes_per_s[broker] / tally.mean_bytes_per_s():.2f} times the mean load"


def _why_none(view: ClusterLoad, policy: BalancePolicy, draft: PlanDraft) -> list[Note]:
    moving = [segment.ref for segment in view.owned if segment.moving]
    rested = _best(view, policy, draft, _CoolingDown(moving, ()))
    if rested is not None:
        text = f"{rested.segment} would move from {rested.source} to {rested.target}, but the last move is too recent"
        return [Note(remark=Remark.COOLING, text=text, segment=rested.segment, broker=rested.source)]
    if _too_hot(policy, draft):
        return []  # `plan` adds those notes, which say it better.
    tally = draft.tally
    source = max(tally.available, key=lambda broker: tally.bytes_per_s[broker])
    text = (
        f"{_too_much(tally, source)}, and no move of one segment, to a broker with processor time left, "
        "narrows this by as much as it costs"
    )
    return [Note(remark=Remark.STUCK, text=text, broker=source)]


def _too_hot(policy: BalancePolicy, draft: PlanDraft) -> list[Note]:
    """Note the segments that alone are too much for any broker."""
    tally, loads = draft.tally, draft.tally.bytes_per_s
    limit = policy.threshold * tally.mean_bytes_per_s()
    notes: list[Note] = []
    for broker in tally.available:
        hottest = max(tally.segments[broker], key=lambda segment: (tally.owner_rate(segment), segment), default=None)
        if hottest is None or tally.owner_rate(hottest) <= limit:
            continue
        coolest = min((each for each in tally.available if each != broker), key=lambda each: (loads[each], each))
        rate = tally.owner_rate(hottest)
        if loads[coolest] + rate <= max(loads[broker] - rate, _most_of_others(tally, broker, coolest)):
            continue  # it can still go where it is alone
        text = (
            f"{hottest} alone carries {rate:,} bytes/s, {rate / tally.mean_bytes_per_s():.2f} times the mean of a "
            "broker; no move evens this, a split would"
        )
        notes.append(Note(remark=Remark.UNBALANCEABLE, text=text, segment=hottest, broker=broker))
    return notes
