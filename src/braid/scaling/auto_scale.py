"""Decides whether a topic's layout should follow its load: split one segment, merge two, or nothing. It is a pure
function of the policy, the layout and what was measured. It gives its reason as a sentence, because people ask for it.

It looks for work in this order, and does at most one thing at a time:

1. *Split what is hot.* Of the segments above a split threshold, the one furthest above is split where half of its
   measured load is. A segment whose load sits on one key hash is left alone, and named: no split divides a key.
2. *Split for consumers.* While a subscription has more consumers than there are segments, the busiest segment is split.
3. *Merge what is cold.* Of the neighbours that were both below every merge threshold for the whole window, the two with
   the least load are merged, unless a subscription has consumers for all segments.

**It settles.** A split threshold is at least twice the merge threshold. So two cold segments are not hot when they are
merged. Of the parts of a hot segment, the larger has more than half of a split threshold, so it is not cold. Between
the two thresholds nothing happens. Cooldowns count from times that are stored with the layout, so a new leader keeps
them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final, NamedTuple

from braid.model.ids import SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo
from braid.model.load import KeyHashLoad
from braid.model.topic import AutoScalePolicy

WORTH: Final = 0.1
"""Of a segment's load: a split that takes less off it does not help."""
HOT_KEY: Final = 0.5
"""Of a segment's load: a hundredth of its hashes, or a single one, that has so much is named."""
MIN_RECORDS: Final = 100
"""Fewer records say nothing about where the next ones will be."""


class SegmentRates(NamedTuple):
    """Of one segment, in each second."""

    msg_rate_in: float
    bytes_rate_in: float
    bytes_rate_out: float


class MeasuredSegment(NamedTuple):
    rates: SegmentRates
    key_hashes: KeyHashLoad | None = None
    """None: its owner does not tell."""
    cold_for_s: float = 0.0
    """For how long it has been below every merge threshold."""


class Split(NamedTuple):
    segment: SegmentId
    at: int
    """The first hash of the upper part."""


class Merge(NamedTuple):
    lower: SegmentId
    upper: SegmentId


class AutoScaleDecision(NamedTuple):
    action: Split | Merge | None
    reason: str
    findings: tuple[str, ...] = ()
    """What no change of layout cures, or the policy does not allow."""


def is_cold(policy: AutoScalePolicy, rates: SegmentRates) -> bool:
    return all(rate < threshold for rate, threshold in zip(rates, _merge_thresholds(policy), strict=True))


def pressure(policy: AutoScalePolicy, rates: SegmentRates) -> float:
    """Return the highest of a segment's rates, in split thresholds."""
    return max(rate / threshold for rate, threshold in zip(rates, _split_thresholds(policy), strict=True))


def decide(
    policy: AutoScalePolicy,
    layout: Layout,
    measured: Mapping[SegmentId, MeasuredSegment],
    consumers: Mapping[str, int],
    *,
    split_at: int = 0,
    merged_at: int = 0,
    now: int,
) -> AutoScaleDecision:
    """Decide what to do with a topic now.

    `measured` has the segments whose owners answered, `consumers` the number of consumers of each subscription.
    `split_at` and `merged_at` are the times of the last split and merge, and `now` the time, in µs since 1970."""
    most = max(consumers.values(), default=0)
    return _Evaluation(policy, layout, measured, most, split_at, merged_at, now).decision()


class _Evaluation(NamedTuple):
    policy: AutoScalePolicy
    layout: Layout
    measured: Mapping[SegmentId, MeasuredSegment]
    consumers: int
    """Of the subscription that has most. Subscriptions share segments, so their consumers do not add up."""
    split_at: int
    merged_at: int
    now: int

    def decision(self) -> AutoScaleDecision:
        if not self.policy.enabled:
            return AutoScaleDecision(None, "Auto-scaling is off.")
        findings = [*self._hot_keys()]
        for wanted in (self._split_what_is_hot(findings), self._split_for_consumers(findings)):
            if wanted is not None:
                if (rest_s := self._rest_s(self.split_at, self.policy.split_cooldown_seconds)) > 0:
                    reason = f"{wanted.reason} It waits for {rest_s:.0f} s more, because of the last split."
                    wanted = AutoScaleDecision(None, reason)
                return wanted._replace(findings=tuple(findings))
        return self._merge_what_is_cold()._replace(findings=tuple(findings))

    # Splits.

    def _split_what_is_hot(self, findings: list[str]) -> AutoScaleDecision | None:
        hot = [each for each in self._busiest_first() if self._pressure(each) > 1]
        if hot and len(self.layout.active) >= self.policy.max_segments:
            findings.append(f"{self._why_hot(hot[0])}, but max_segments is {self.policy.max_segments}.")
            return None
        for segment in hot:
            why, keys = self._why_hot(segment), self._key_hashes(segment)
            if len(segment.hash_range) == 1:
                findings.append(f"{why}, but it has a single key hash.")
            elif keys is None:
                return AutoScaleDecision(None, f"{why}. It waits until the key hashes of its records are measured.")
            elif not is_worth_a_split(keys):
                findings.append(f"{why}, but no split takes as much as {WORTH:.0%} off it.")
            else:
                return self._split(segment, why)
        return None

    def _split_for_consumers(self, findings: list[str]) -> AutoScaleDecision | None:
        count = len(self.layout.active)
        if self.consumers <= count:
            return None
        why = f"A subscription has {self.consumers} consumers, and the topic {count} segments"
        if count >= self.policy.max_segments:
            findings.append(f"{why}, but max_segments is {self.policy.max_segments}.")
            return None
        for segment in self._busiest_first():
            keys = self._key_hashes(segment)
            if len(segment.hash_range) > 1 and (keys is None or is_worth_a_split(keys)):
                return self._split(segment, why)
        findings.append(f"{why}, but no segment can be split.")
        return None

    def _split(self, segment: SegmentInfo, why: str) -> AutoScaleDecision:
        keys = self._key_hashes(segment)
        if keys is not None and keys.split_at is not None:
            at, where = keys.split_at, f"{keys.lower_share:.0%} of its records are below, {keys.upper_share:.0%} above"
        else:
            at, where = segment.hash_range.parts(2)[1].start, "the middle of its range"
        action = Split(segment.segment_id, at)
        return AutoScaleDecision(action, f"{why}: split segment {segment.segment_id} at {at:04x} ({where}).")

    def _hot_keys(self) -> Iterator[str]:
        for segment in self.layout.active:
            keys = self._key_hashes(segment)
            if keys is not None and has_hot_key(keys, segment.hash_range):
                yield (
                    f"Key hashes {keys.hottest} have {keys.hottest_share:.0%} of the load of segment "
                    f"{segment.segment_id}: one key is in one segment, so splits hardly help."
                )

    # Merges.

    def _merge_what_is_cold(self) -> AutoScaleDecision:
        policy, count = self.policy, len(self.layout.active)
        pairs = [pair for pair in pairwise(self.layout.active) if all(map(self._is_cold, pair))]
        if not pairs:
            return AutoScaleDecision(None, "No segment is above a split threshold, and no two neighbours are cold.")
        if count <= max(policy.min_segments, self.consumers):
            why = f"min_segments is {policy.min_segments}"
            if self.consumers > policy.min_segments:
                why = f"a subscription has {self.consumers} consumers"
            return AutoScaleDecision(None, f"Neighbours are cold, but the topic has {count} segments, and {why}.")
        depths = self.layout.merge_depths
        pairs = [pair for pair in pairs if max(depths[each.segment_id] for each in pair) < policy.max_dag_depth]
        if not pairs:
            return AutoScaleDecision(
                None, f"Neighbours are cold, but {policy.max_dag_depth} merges made them (max_dag_depth)."
            )
        longest = max(map(self._cold_for_s, pairs))
        if longest < policy.merge_window_seconds:
            return AutoScaleDecision(
                None,
                f"Neighbours are cold since {longest:.0f} s; they are merged after {policy.merge_window_seconds} s.",
            )
        if (rest_s := self._rest_s(self.merged_at, policy.merge_cooldown_seconds)) > 0:
            return AutoScaleDecision(
                None, f"Neighbours are cold; they wait for {rest_s:.0f} s more, because of the last merge."
            )
        ready = [pair for pair in pairs if self._cold_for_s(pair) >= policy.merge_window_seconds]
        lower, upper = min(ready, key=lambda pair: sum(map(self._pressure, pair)))
        ids = lower.segment_id, upper.segment_id
        why = f"Segments {ids[0]} and {ids[1]} were cold for {policy.merge_window_seconds} s"
        return AutoScaleDecision(Merge(*ids), f"{why}: merge them.")

    def _cold_for_s(self, pair: tuple[SegmentInfo, SegmentInfo]) -> float:
        return min(self.measured[each.segment_id].cold_for_s for each in pair)

    # What was measured.

    def _busiest_first(self) -> list[SegmentInfo]:
        known = [each for each in self.layout.active if each.segment_id in self.measured]
        return sorted(known, key=lambda each: (-self._pressure(each), -len(each.hash_range), each.hash_range.start))

    def _pressure(self, segment: SegmentInfo) -> float:
        return pressure(self.policy, self.measured[segment.segment_id].rates)

    def _is_cold(self, segment: SegmentInfo) -> bool:
        found = self.measured.get(segment.segment_id)
        return found is not None and is_cold(self.policy, found.rates)

    def _key_hashes(self, segment: SegmentInfo) -> KeyHashLoad | None:
        """Return how its load spreads; None if too little is known of that."""
        found = self.measured.get(segment.segment_id)
        keys = found.key_hashes if found is not None else None
        return keys if keys is not None and keys.records >= MIN_RECORDS else None

    def _why_hot(self, segment: SegmentInfo) -> str:
        rates, thresholds = self.measured[segment.segment_id].rates, _split_thresholds(self.policy)
        worst = max(range(len(rates)), key=lambda number: rates[number] / thresholds[number])
        much = _RATES[worst].format(f"{rates[worst]:,.0f}")
        return f"Segment {segment.segment_id} {much} a second, above {thresholds[worst]:,}"

    def _rest_s(self, since: int, cooldown_s: int) -> float:
        return cooldown_s - max(self.now - since, 0) / 1_000_000 if since else 0.0


_RATES: Final = ("takes {} records", "takes {} bytes", "sends {} bytes")


def has_hot_key(keys: KeyHashLoad, hashes: HashRange) -> bool:
    """Tell whether one key, or a few whose hashes are next to each other, is most of the load of a segment."""
    narrow = keys.hottest is not None and (len(keys.hottest) == 1 or len(keys.hottest) * 100 <= len(hashes))
    return narrow and keys.records >= MIN_RECORDS and keys.hottest_share >= HOT_KEY


def is_worth_a_split(keys: KeyHashLoad) -> bool:
    """Tell whether a split takes enough of the load away. Records without a key go to all segments in turn, so they
    need no share of a split."""
    unkeyed = 1 - keys.lower_share - keys.upper_share
    return unkeyed + min(keys.lower_share, keys.upper_share) >= WORTH


def _split_thresholds(policy: AutoScalePolicy) -> tuple[int, int, int]:
    return (
        policy.split_msg_rate_in_threshold,
        policy.split_bytes_rate_in_threshold,
        policy.split_bytes_rate_out_threshold,
    )


def _merge_thresholds(policy: AutoScalePolicy) -> tuple[int, int, int]:
    return (
        policy.merge_msg_rate_in_threshold,
        policy.merge_bytes_rate_in_threshold,
        policy.merge_bytes_rate_out_threshold,
    )
