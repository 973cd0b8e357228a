"""What the console has seen of a topic, bounded: which segments there were, who owned them when, and their traffic.

Brokers tell the present. The console looks again and again, and keeps what it saw. A layout that changed before it
looked is known in its order and not in its times (`timed` is false): such strands get times that keep the order.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
from msgspec import Struct

from braid.console.drawing.strands import NOBODY, Change, Strand, Tenure, with_expected_rates

MAX_SAMPLES: Final = 256
"""Of a segment. When they are full, the older half loses every other one."""
MAX_TENURES: Final = 64
MAX_STRANDS: Final = 4_096
"""Of a topic. The first that were sealed are forgotten."""
SETTLE_S: Final = 2.0
"""After a split or a merge. Until then a new segment has the rate that it takes over from its parents."""
EARLIER_STEP_S: Final = 20.0
"""Between two layouts whose times are not known."""


class SegmentSeen(Struct, frozen=True, kw_only=True):
    """A segment as brokers describe it now."""

    id: int
    first_hash: int
    last_hash: int
    active: bool
    parents: tuple[int, ...] = ()
    children: tuple[int, ...] = ()
    owner: str = NOBODY
    epoch: int = 0


class Samples:
    """Measurements of one number over time. Recent ones are kept as they came, older ones more and more thinly."""

    def __init__(self) -> None:
        self.times: array[float] = array("d")
        self.values: array[float] = array("d")

    def add(self, time: float, value: float) -> None:
        if self.times and time <= self.times[-1]:
            return
        self.times.append(time)
        self.values.append(value)
        if len(self.times) > MAX_SAMPLES:
            half = MAX_SAMPLES // 2
            values = self.values
            means = [(values[index] + values[index + 1]) / 2 for index in range(0, half, 2)]
            self.times = array("d", self.times[0:half:2]) + self.times[half:]
            self.values = array("d", means) + self.values[half:]

    def drop_after(self, time: float) -> None:
        """Forget later measurements, but for the first one if there is no other."""
        keep = max(1, bisect_right(self.times, time))
        del self.times[keep:], self.values[keep:]

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None


class _Seen:
    def __init__(self, segment: SegmentSeen, born: float, *, timed: bool) -> None:
        self.segment = segment
        self.born = born
        self.timed = timed
        self.sealed: float | None = None
        self.active_at = born
        """When it was last seen to take writes."""
        self.tenures = [Tenure(segment.owner, born, Change.FIRST if segment.owner else Change.UNSERVED)]
        self.samples = Samples()


class TopicHistory:
    """One topic's. The poller that watches the cluster is its only writer."""

    def __init__(self, topic_id: int, now: float, created_at: float | None = None) -> None:
        """`created_at`: when the topic came to be, if the console watched the cluster then."""
        self.topic_id: Final = topic_id
        self.watched_since: Final = now if created_at is None else 0.0
        self.changes = 0
        """Counts what was seen to change: segments and owners."""
        self._created_at = created_at
        self._seen: dict[int, _Seen] = {}

    @property
    def size(self) -> int:
        return len(self._seen)

    def look(self, segments: Iterable[SegmentSeen], now: float, down: Iterable[str] = ()) -> None:
        """Note what brokers say now. `down` are brokers that do not answer: what they lose, fails over."""
        gone = frozenset(down)
        present = {each.id: each for each in segments}
        if not self._seen:
            self._first_look(present, now)
        for segment in present.values():
            known = self._seen.get(segment.id)
            if known is None:
                self._seen[segment.id] = known = _Seen(segment, now, timed=True)
                self.changes += 1
            elif segment.active:
                self._note_owner(known, segment, now, gone)
            if segment.active:
                known.active_at = now
            elif known.sealed is None:
                # It ended after the last look, so what was measured since is of a time in which it hardly took writes.
                known.samples.drop_after(known.active_at)
                known.sealed = now
                self.changes += 1
            known.segment = _with_lineage(segment, known.segment)
        for id_, known in self._seen.items():
            if id_ not in present and known.sealed is None:
                known.sealed = now
        self._forget()

    def _first_look(self, present: Mapping[int, SegmentSeen], now: float) -> None:
        """Give segments that were there before the console looked times that keep their order."""
        depth = {each: _depth(each, present) for each in present}
        deepest = max(depth.values(), default=0)
        watched = {id_: now - (deepest - depth[id_] + 1) * EARLIER_STEP_S for id_ in present}
        for id_, segment in present.items():
            first = not segment.parents and deepest == 0 and self._created_at is not None
            born = self._created_at if first and self._created_at is not None else watched[id_]
            self._seen[id_] = known = _Seen(segment, min(born, now), timed=first)
            if not segment.active:
                ends = [watched[child] for child in segment.children if child in watched]
                known.sealed = min(ends, default=now)
        # A child is born when its parents end, however deep the others are.
        for id_, segment in present.items():
            ends = [
                sealed
                for parent in segment.parents
                if parent in self._seen and (sealed := self._seen[parent].sealed) is not None
            ]
            if ends:
                self._seen[id_].born = max(ends)
                self._seen[id_].tenures = [Tenure(segment.owner, max(ends), self._seen[id_].tenures[0].how)]

    def _note_owner(self, known: _Seen, segment: SegmentSeen, now: float, gone: frozenset[str]) -> None:
        last = known.tenures[-1]
        served = [each.owner for each in known.tenures if each.owner != NOBODY]
        before = served[-1] if served else NOBODY
        if segment.owner == last.owner:
            if segment.owner == NOBODY or segment.epoch <= known.segment.epoch or known.segment.owner == NOBODY:
                return
            how = Change.REOPENED
        elif segment.owner == NOBODY:
            how = Change.UNSERVED
        elif before == NOBODY:
            how = Change.FIRST
        elif segment.owner == before:
            how = Change.REOPENED
        else:
            how = Change.FAILED_OVER if before in gone else Change.MOVED
        known.tenures.append(Tenure(segment.owner, now, how))
        self.changes += 1
        del known.tenures[1 : max(1, len(known.tenures) - MAX_TENURES)]

    def is_settled(self, segment: int, now: float) -> bool:
        """Tell whether a measurement of the segment that begins now says something. Just after a split, its writers are
        still on their way to it."""
        known = self._seen.get(segment)
        return known is not None and (not known.timed or now - known.born >= SETTLE_S)

    def measure(self, segment: int, time: float, per_s: float) -> None:
        known = self._seen.get(segment)
        if known is not None and known.sealed is None:
            known.samples.add(time, per_s)

    def rate(self, segment: int) -> float | None:
        """Return the last rate of a segment; that which it takes over from its parents, if it was not measured yet."""
        known = self._seen.get(segment)
        if known is None or known.samples.last is not None:
            return known.samples.last if known is not None else None
        family = [self._strand(each) for each in (*known.segment.parents, segment) if each in self._seen]
        if len(family) < 2 or not any(each.times for each in family):
            return None
        return with_expected_rates(family)[-1].rates[-1]

    def strands(self) -> list[Strand]:
        return [self._strand(id_) for id_ in sorted(self._seen, key=lambda id_: self._seen[id_].segment.first_hash)]

    def _strand(self, id_: int) -> Strand:
        known = self._seen[id_]
        return Strand(
            segment=id_,
            first_hash=known.segment.first_hash,
            last_hash=known.segment.last_hash,
            parents=known.segment.parents,
            children=known.segment.children,
            born=known.born,
            sealed=known.sealed,
            timed=known.timed,
            tenures=tuple(known.tenures),
            times=known.samples.times,
            rates=known.samples.values,
        )

    @property
    def first_birth(self) -> float:
        return min((known.born for known in self._seen.values()), default=self.watched_since)

    def _forget(self) -> None:
        excess = len(self._seen) - MAX_STRANDS
        if excess > 0:
            sealed = sorted((known.sealed, id_) for id_, known in self._seen.items() if known.sealed is not None)
            for _, id_ in sealed[:excess]:
                del self._seen[id_]


def _with_lineage(segment: SegmentSeen, before: SegmentSeen) -> SegmentSeen:
    """Return the segment with all parents and children that it ever had: retention takes them out of layouts."""
    return msgspec.structs.replace(
        segment,
        parents=tuple(dict.fromkeys([*before.parents, *segment.parents])),
        children=tuple(dict.fromkeys([*before.children, *segment.children])),
    )


def _depth(segment: int, present: Mapping[int, SegmentSeen]) -> int:
    """Count the layouts before this segment, as far as its parents are known."""
    depth, level = 0, {segment}
    while level := {parent for each in level for parent in present[each].parents if parent in present}:
        depth += 1
        if depth > len(present):  # Only a broken layout has a cycle.
            break
    return depth
