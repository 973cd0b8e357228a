"""The checker of auto-scaling: every change of a layout that no call has asked for, against the topic's policy.

- only a topic whose policy is on, or was until a moment ago, changes by itself;
- such a change keeps the limits of the policy, and never merges what too many merges have made;
- it keeps the cooldowns, whichever broker leads: the last split or merge, of anybody, is so long ago, in real time or
  by the clock of the leader, which is all that a leader can know;
- a commit stores when it left more segments, or fewer, and nothing else changes these times: an aborted change costs
  no cooldown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from braid.model.ids import NO_REQUEST
from braid.model.topic import AutoScalePolicy, StoredOverride, Topic, auto_scale_policy
from braid.model.transition import Transition
from braid.testing.checkers.history import PromiseBroken


class Times(NamedTuple):
    """One moment, by two clocks."""

    real_s: float
    leader_us: int | None
    """None: the leader's clock has just jumped, or is not known."""


class AutoScaleChecker:
    def __init__(self, now: Callable[[], Times]) -> None:
        self.begun = 0
        """Changes that no call has asked for."""
        self._now = now
        self._policies: dict[str, StoredOverride] = {}
        """By topic, the last policy that it had."""
        self._split: dict[str, Times] = {}
        """By topic, when a change that left more segments was committed last."""
        self._merged: dict[str, Times] = {}

    def on_topic(self, path: str, old: Topic | None, new: Topic) -> None:
        """A topic's record is to be written."""
        if new.auto_scale is not None:
            self._policies[path] = new.auto_scale
        if old is None or old.id != new.id:
            return
        grown = len(new.layout.active) - len(old.layout.active)
        self._check_times(path, old, new, grown)
        if grown:
            (self._split if grown > 0 else self._merged)[path] = self._now()
        begun = new.transition
        if old.transition is None and begun is not None and begun.created_by == NO_REQUEST:
            self.begun += 1
            self._check_begun(path, old, begun)

    def _check_times(self, path: str, old: Topic, new: Topic, grown: int) -> None:
        noted = new.split_at != old.split_at, new.merged_at != old.merged_at
        if noted != (grown > 0, grown < 0):
            times = f"{old.split_at} and {old.merged_at} to {new.split_at} and {new.merged_at}"
            raise PromiseBroken("cooldown", f"{path} has {grown:+} segments; its times went from {times}")

    def _check_begun(self, path: str, old: Topic, begun: Transition) -> None:
        known = old.auto_scale if old.auto_scale is not None else self._policies.get(path)
        policy = auto_scale_policy(AutoScalePolicy(), known)
        grown = len(begun.children) - len(begun.parents)
        count = len(old.layout.active) + grown
        depths = [old.layout.merge_depths[parent] for parent in begun.parents]
        within = (
            count <= policy.max_segments
            if grown > 0
            else count >= policy.min_segments and max(depths) < policy.max_dag_depth
        )
        if not policy.enabled or not within:
            raise PromiseBroken("auto-scaling", f"{path} has {old.layout} and {policy}, and begins {begun}")
        since = (self._split if grown > 0 else self._merged).get(path)
        cooldown_s = policy.split_cooldown_seconds if grown > 0 else policy.merge_cooldown_seconds
        if since is not None and not self._has_passed(since, cooldown_s):
            raise PromiseBroken("cooldown", f"{path} begins {begun} at {self._now()}, after {since}: {policy}")

    def _has_passed(self, since: Times, cooldown_s: float) -> bool:
        now = self._now()
        if now.real_s - since.real_s >= cooldown_s or now.leader_us is None or since.leader_us is None:
            return True
        return now.leader_us - since.leader_us >= cooldown_s * 1_000_000
