"""The checker of one topic: what clients were told and saw, against what the log holds in the end.

`TopicHistory` is told everything that happens to one topic's records, when it happens: which producer gave which value,
in which order, and where it was confirmed; which consumer got what; what was acked for good; where an operator set a
subscription. It complains as soon as two of these contradict each other, and `check_log` compares all of it with the
log itself.

Order is judged by key: the records of one producer and one key stand in the order in which they were sent, along the
line of segments that had the key's hash, and every subscription and every reader gets them in this order (I4). What
came before comes again only where a seek or a redelivery explains it.

Every value is unique, so it names its record. A topic whose confirms survive the loss of a machine (`fsync`) forgives
nothing. One that only survives the loss of a process (`memory`) may lose a tail when the machine loses power:
`lost_power` and `recovered` tell of that, and what the tail held is given up, no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from braid.model.errors import OffsetOutOfRange, PositionDiverged, SegmentNotFound, quote
from braid.model.hashing import key_hash
from braid.model.ids import SegmentId
from braid.model.layout import SegmentInfo
from braid.testing.checkers.history import PromiseBroken

Place = tuple[int, int]
"""Segment and offset."""
Record = tuple[bytes, bytes | None]
"""Value and key."""
Log = Mapping[int, Sequence[Record | None]]
"""By segment, all records from offset 0 on; None for those that retention has deleted."""


class Given(msgspec.Struct):
    """A record that a producer was given."""

    producer: int
    number: int
    """In the order of submission; those that were given side by side share one."""
    key: bytes | None
    boot: int
    """How often the broker had stopped before."""
    failed: bool = False


class Sighting(msgspec.Struct):
    value: bytes
    boot: int
    """How often the broker had stopped before it was seen or confirmed."""


class Seek(msgspec.Struct, frozen=True):
    offset: int
    at: float


class KeyOrder:
    """The order in which the records of each producer and key were handed out for the first time."""

    def __init__(self) -> None:
        self._handed: set[bytes] = set()
        self._last: dict[tuple[int, bytes], int] = {}
        self._uncounted: set[bytes] = set()
        """Records that somebody had in order before, although that does not count. They may come again in any order."""

    def begin_anew(self, had: Iterable[bytes]) -> None:
        """Count from now on. `had` are records that were handed out before, and that may be redelivered."""
        self._handed.clear()
        self._last.clear()
        self._uncounted = set(had)

    def note_uncounted(self, value: bytes, given: Given) -> None:
        """Note that a consumer got a record which may be the rest of what it read before a seek. Others may go on after
        this record, once it is acked."""
        if given.key is not None and self._last.get((given.producer, given.key), 0) < given.number:
            self._uncounted.add(value)

    def overtaken_by(self, value: bytes, given: Given) -> int:
        """Note that a record was handed out. Return the number of a record that was sent after it and came before it, 0
        if there is none. A record that was handed out before comes again in any order."""
        if given.key is None or value in self._handed:
            return 0
        self._handed.add(value)
        last = self._last.get((given.producer, given.key), 0)
        self._last[given.producer, given.key] = max(last, given.number)
        return last if last > given.number and value not in self._uncounted else 0


class SubscriptionHistory:
    def __init__(self, name: str) -> None:
        self.name = name
        self.brief = False
        """It comes and goes: what its consumers get is compared with the log, no more."""
        self.handed: dict[int, dict[int, dict[bytes, float]]] = defaultdict(dict)
        """By segment and offset, what was handed out, and when it was last. There are several values where records
        were lost: a consumer that was away may hand out late what it got before the loss."""
        self.seeks: dict[int, Seek] = {}
        """By segment, where it was set last. Until then it begins at its start."""
        self.unknown: dict[int, None] = {}
        """Segments of which it is not known where a seek set them: its answer was lost, or it is under way."""
        self.sought_at = -1.0
        """When an operator last began or ended to set it to another place."""
        self.stored: dict[int, Seek] = {}
        """By segment, up to where acks were stored, and since when that is known."""
        self.ever = 0
        """How many consumers it has had."""
        self.order = KeyOrder()
        """Since it was set to another place."""

    def set_to(self, offsets: Mapping[int, int], began: float) -> None:
        """An operator has set these segments to these offsets, by a call that began then. Of the other segments, what
        was handed out may be redelivered as before."""
        self.order.begin_anew(
            value
            for segment, handed in self.handed.items()
            if segment not in offsets
            for offset, values in handed.items()
            for value in values
            if self.had(segment, offset, value)
        )
        for segment, offset in offsets.items():
            self.seeks[segment] = Seek(offset, began)

    def due(self, segment: int, offset: int) -> bool:
        """Whether the record there is still to be handed out: nobody had it since the subscription was set there."""
        seek, handed = self.seeks.get(segment), self.handed[segment].get(offset, {})
        if seek is None:
            return not handed
        return offset >= seek.offset and max(handed.values(), default=-1.0) < seek.at

    def had(self, segment: int, offset: int, value: bytes) -> bool:
        """Whether somebody had this very record since the subscription was set to another place."""
        at = self.handed[segment].get(offset, {}).get(value)
        seek = self.seeks.get(segment)
        return at is not None and (seek is None or at >= seek.at)


class ConsumerHistory:
    """What one consumer object has handed out."""

    def __init__(self, topic: TopicHistory, subscription: SubscriptionHistory | None, name: str, born: float) -> None:
        self.name = name
        self.born = born
        self.subscription = subscription
        self.next: dict[int, int] = {}
        self.last_at: dict[int, float] = {}
        self.followed: dict[int, Seek] = {}
        """Seeks that it has followed."""
        self._from: dict[int, Seek] = {}
        """Seeks to whose places it has gone."""
        self._order = KeyOrder()
        self._topic = topic
        if subscription is not None:
            subscription.ever += 1

    def handed(self, segment: int, offset: int, value: bytes, now: float) -> None:
        topic, subscription = self._topic, self.subscription
        topic.saw(segment, offset, value, self.born)
        if subscription is not None and subscription.brief:
            return
        expected = self.next.get(segment)
        if offset != expected:
            topic.note(f"{self.name} goes to offset {offset} of segment {segment}, {expected} was due")
            if subscription is not None:
                self._check_jump(subscription, segment, expected, offset)
            elif expected is not None and not topic.lost_tails:
                raise PromiseBroken("I1", f"{self.name} was due offset {expected} of segment {segment}: {offset}")
        if subscription is not None:
            stored = subscription.stored.get(segment)
            if (
                stored is not None
                and stored.at < self.born
                and offset < stored.offset
                and subscription.sought_at < stored.at
                and segment not in subscription.unknown
            ):
                raise PromiseBroken(
                    "acks",
                    f"{self.name} got offset {offset} of segment {segment}, stored as acked below {stored.offset}",
                )
            subscription.handed[segment].setdefault(offset, {})[value] = now
        self._check_order(segment, offset, value)
        self.next[segment] = offset + 1
        self.last_at[segment] = now

    def _check_order(self, segment: int, offset: int, value: bytes) -> None:
        """I4: what was sent before comes before."""
        subscription, order = self.subscription, self._order
        given = self._topic.given[value]
        if subscription is not None:
            order = subscription.order
            if subscription.unknown or not self._reads_anew(subscription, segment):
                order.note_uncounted(value, given)
                return
        if later := order.overtaken_by(value, given):
            raise PromiseBroken(
                "I4",
                f"{self.name} got {value[:20]!r} of key {given.key!r} at offset {offset} of segment {segment} after "
                f"number {later} of the same producer",
            )

    def _reads_anew(self, subscription: SubscriptionHistory, segment: int) -> bool:
        """Whether what this consumer gets cannot be the rest of what it read before the last seek."""
        if subscription.sought_at < 0 or self.born > subscription.sought_at:
            return True
        seek = subscription.seeks.get(segment)
        return seek is not None and self._from.get(segment) is seek

    def _check_jump(self, subscription: SubscriptionHistory, segment: int, expected: int | None, offset: int) -> None:
        seek = subscription.seeks.get(segment)
        if seek is not None and offset == seek.offset:
            self._from[segment] = seek
        if segment in subscription.unknown or subscription.sought_at > self.last_at.get(segment, -1.0):
            return
        # News of a seek reaches a consumer a little later than the operator.
        follows = seek is not None and self.followed.get(segment) is not seek and offset == seek.offset
        if follows and seek is not None:
            self.followed[segment] = seek
            return
        # Consumers of a topic that may lose records go back whenever that may have happened.
        again = expected is not None and offset < expected and subscription.ever == 1
        if again and self._topic.survives_power_loss and not self._topic.lost_tails:
            raise PromiseBroken(
                "consumers", f"{self.name}, always alone, got offset {offset} of segment {segment} again ({expected})"
            )
        for skipped in range(expected or 0, offset):
            if subscription.due(segment, skipped) and skipped >= self._topic.earliest.get(segment, 0):
                raise PromiseBroken(
                    "I5", f"{self.name} was given offset {offset} of segment {segment}; nobody has had {skipped} yet"
                )


class TopicHistory:
    def __init__(
        self,
        *,
        survives_power_loss: bool,
        segments: Mapping[SegmentId, SegmentInfo] | None = None,
        note: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`segments` are those that the topic has, or had, with their first parents; `note` is told what helps to
        understand a failure."""
        self.survives_power_loss = survives_power_loss
        self.segments: Mapping[SegmentId, SegmentInfo] = segments if segments is not None else {}
        self.note = note
        self.given: dict[bytes, Given] = {}
        self.confirmed: dict[Place, Sighting] = {}
        self.unplaced: dict[bytes, None] = {}
        """Confirmed, at an offset that the broker had forgotten."""
        self.seen: dict[Place, Sighting] = {}
        self.subscriptions: dict[str, SubscriptionHistory] = {}
        self.earliest: dict[int, int] = {}
        """By segment, the first offset that retention has left."""
        self.ends_of_pruned: dict[int, int] = {}
        """By segment that the layout has dropped, where its log ended."""
        self.boot = 0
        self.lost_tails = False
        """Whether power was lost on a topic that does not survive it."""
        self.lost_at_boot = 0
        self.ends_at_loss: dict[int, int] = {}
        """By segment, where it ended when power was lost, until it is open again."""
        self.cuts: dict[int, list[Seek]] = defaultdict(list)
        """By segment, where it ended, and when, each time that it was open again without its tail."""

    # Producers.

    def give(self, producer: int, number: int, key: bytes | None, value: bytes) -> None:
        assert value not in self.given, "values are unique"
        self.given[value] = Given(producer, number, key, self.boot)

    def confirm(self, value: bytes, segment: int, offset: int) -> None:
        if offset < 0:
            self.unplaced[value] = None
            return
        if self.given[value].boot < self.lost_at_boot:
            return  # It may have been confirmed, and lost, before the producer came to look.
        before = self.confirmed.get((segment, offset))
        if before is not None and before.value != value and not self._may_be_lost(segment, before):
            raise PromiseBroken(
                "I1", f"offset {offset} of segment {segment} was confirmed to {before.value[:20]!r} and {value[:20]!r}"
            )
        self.confirmed[segment, offset] = Sighting(value, self.boot)
        self._check_same(segment, offset, self.seen.get((segment, offset)), value)

    def fail(self, value: bytes) -> None:
        self.given[value].failed = True

    # Consumers.

    def subscription(self, name: str) -> SubscriptionHistory:
        if name not in self.subscriptions:
            self.subscriptions[name] = SubscriptionHistory(name)
        return self.subscriptions[name]

    def consumer(self, subscription: str | None, name: str, now: float) -> ConsumerHistory:
        known = None if subscription is None else self.subscription(subscription)
        return ConsumerHistory(self, known, name, now)

    def saw(self, segment: int, offset: int, value: bytes, born: float) -> None:
        """A consumer that was born then has handed it out."""
        if value not in self.given:
            raise PromiseBroken("I1", f"offset {offset} of segment {segment} holds {value[:40]!r}: nobody sent that")
        if segment in self.ends_at_loss or (self.cuts[segment] and born <= self.cuts[segment][-1].at):
            return  # It may have waited in the consumer since before the loss.
        self._check_same(segment, offset, self.seen.get((segment, offset)), value)
        self._check_same(segment, offset, self.confirmed.get((segment, offset)), value)
        self.seen[segment, offset] = Sighting(value, self.boot)

    def _check_same(self, segment: int, offset: int, before: Sighting | None, value: bytes) -> None:
        if before is not None and before.value != value and not self._may_be_lost(segment, before):
            raise PromiseBroken(
                "I7",
                f"offset {offset} of segment {segment} held {before.value[:20]!r}, and now {value[:20]!r}",
            )

    def _may_be_lost(self, segment: int, before: Sighting) -> bool:
        """Between the loss of power and the news of what was recovered, clients may be ahead of us."""
        return segment in self.ends_at_loss and before.boot < self.boot

    # The machine.

    def stopped(self) -> None:
        self.boot += 1

    def lost_power(self, ends: Mapping[int, int]) -> None:
        """`ends`: of each segment that was open, where it ended for consumers."""
        if not self.survives_power_loss:
            self.lost(ends)

    def lost(self, ends: Mapping[int, int]) -> None:
        """Tails of these segments may be lost, of what was confirmed up to now."""
        self.lost_tails = True
        self.lost_at_boot = self.boot + 1
        for segment, end in ends.items():
            self.ends_at_loss[segment] = max(end, self.ends_at_loss.get(segment, 0))

    def recovered(self, segment: int, end: int, now: float) -> None:
        """A segment is open again and ends here: after a loss of power, the rest of it is given up."""
        before = self.ends_at_loss.pop(segment, None)
        self.note(f"segment {segment} is open and ends at {end}, before it was lost at {before}")
        if before is None or before <= end:
            return
        self.cuts[segment].append(Seek(end, now))
        for subscription in self.subscriptions.values():
            stored = subscription.stored.get(segment)
            if stored is not None and stored.offset > end:
                subscription.stored[segment] = Seek(end, stored.at)
        for sightings in (self.confirmed, self.seen):
            lost = [
                place
                for place, sighting in sightings.items()
                if place[0] == segment and place[1] >= end and sighting.boot < self.boot
            ]
            for place in lost:
                del sightings[place]

    def begins(self, segment: int, earliest: int) -> None:
        """The owner has opened a segment that begins here. What retention has deleted does not come back."""
        if earliest < (before := self.earliest.get(segment, 0)):
            raise PromiseBroken("retention", f"segment {segment} begins at {earliest} again, after {before}")

    def deleted(self, segment: int, earliest: int) -> None:
        """Retention has left the records from this offset on. It takes none that a subscription still has to get."""
        for offset in range(self.earliest.get(segment, 0), earliest):
            for each in self.subscriptions.values():
                if not each.brief and segment not in each.unknown and each.due(segment, offset):
                    raise PromiseBroken(
                        "I5", f"offset {offset} of segment {segment} is deleted before {each.name} had it"
                    )
        self.earliest[segment] = max(earliest, self.earliest.get(segment, 0))

    def pruned(self, segment: int, end: int) -> None:
        """The layout has dropped a segment. It does that only when nothing of the segment is needed any more."""
        self.deleted(segment, end)
        self.ends_of_pruned[segment] = end

    # The end.

    def whole(self, log: Log) -> Log:
        """Return the log with the segments that the layout has dropped: all of their records are deleted."""
        gone: dict[int, list[Record | None]] = {each: [None] * end for each, end in self.ends_of_pruned.items()}
        return {**gone, **log}

    def check_log(self, log: Log) -> None:
        self._check_once(log)
        for sightings, promise in ((self.confirmed, "I2"), (self.seen, "I7")):
            for (segment, offset), sighting in sightings.items():
                record = log[segment][offset] if offset < len(log[segment]) else None
                stored = record[0] if record is not None else None
                if stored != sighting.value and offset >= self.earliest.get(segment, 0):
                    told = "confirmed to" if promise == "I2" else "seen with"
                    raise PromiseBroken(
                        promise,
                        f"offset {offset} of segment {segment} was {told} {sighting.value[:20]!r}, "
                        f"the log holds {stored[:20] if stored is not None else None!r}",
                    )
        self._check_order(log)
        for subscription in self.subscriptions.values():
            if not subscription.brief:
                self._check_handed(subscription, log)

    def check_checkpoint(
        self,
        name: str,
        positions: Mapping[int, int],
        read: Mapping[int, Mapping[int, bytes]],
        log: Log,
        earliest: Mapping[int, int],
        refusal: OffsetOutOfRange | SegmentNotFound | None,
        ended: Mapping[int, float] | None = None,
    ) -> None:
        """I1: a program that goes on at these positions, and has `read` this, has read what the log holds before them,
        and its next records are there. Otherwise, and only then, it is refused. `earliest` is what retention had left
        when the program came; it may have left less since.

        `ended` has the segments that it has read to their ends, and when the process began that did so. What such a
        segment lost after that is not looked for: no record takes the place of a lost one there, so the program skips
        nothing, and the layout may have dropped the segment."""
        began = ended or {}
        has_parted = {
            segment: self._has_parted(log, segment, values, began.get(segment)) for segment, values in read.items()
        }
        parted = set(has_parted.values())
        expired = any(
            position < self.earliest.get(segment, 0) or segment in self.ends_of_pruned
            for segment, position in positions.items()
        )
        if refusal is None:
            wrong = True in parted or any(position < earliest.get(each, 0) for each, position in positions.items())
        elif isinstance(refusal, PositionDiverged):
            wrong = parted <= {False}
        else:
            wrong = parted <= {False} and not expired
        if wrong:
            raise PromiseBroken(
                "I1",
                f"{name} goes on at {positions}, retention left {earliest}: {refusal!r}; by segment, whether it has "
                f"read another log: {has_parted}; it has read {quote(read)}",
            )

    def _has_parted(self, log: Log, segment: int, read: Mapping[int, bytes], began: float | None) -> bool | None:
        """Whether a program that has read this has read another log; None if nobody has seen what is deleted. `began`:
        when the process began that read the segment to its end."""
        records, unknown = log[segment], False
        for offset, value in read.items():
            if offset >= len(records):
                if began is not None and any(cut.offset <= offset and cut.at >= began for cut in self.cuts[segment]):
                    continue
                return True
            stored = self._value_at(log, segment, offset)
            if stored is None:
                unknown = True
            elif stored != value:
                return True
        return None if unknown else False

    def _check_handed(self, subscription: SubscriptionHistory, log: Log) -> None:
        """I5: what stands in the log is what the subscription had there, not something that was lost from there."""
        for segment, records in log.items():
            seek, handed = subscription.seeks.get(segment), subscription.handed[segment]
            for offset in range(seek.offset if seek is not None else 0, len(records)):
                record = records[offset]
                if record is None:
                    continue
                value = record[0]
                if not subscription.had(segment, offset, value):
                    others = [(each[:20], at) for each, at in handed.get(offset, {}).items()]
                    raise PromiseBroken(
                        "I5",
                        f"subscription {subscription.name} was never given {value[:20]!r} at offset {offset} of "
                        f"segment {segment} since {seek}, but {others}",
                    )

    def _check_once(self, log: Log) -> None:
        places: dict[bytes, Place] = {}
        for segment, records in log.items():
            for offset, record in enumerate(records):
                if record is None:
                    continue
                value, key = record
                given = self.given.get(value)
                if given is None or given.key != key:
                    raise PromiseBroken("I1", f"{value[:40]!r} with key {key!r} is stored, {given} was sent")
                if value in places:
                    raise PromiseBroken("I10", f"{value[:20]!r} is stored at {places[value]} and {(segment, offset)}")
                places[value] = (segment, offset)
        for value in self.unplaced:
            if value not in places and not self.lost_tails and not any(self.earliest.values()):
                raise PromiseBroken("I2", f"{value[:20]!r} was confirmed, at a forgotten place, and is not stored")

    def _check_order(self, log: Log) -> None:
        """Parents have lower ids than their children, so the segments that had a key's hash follow each other by id."""
        of_key: dict[tuple[int, bytes], int] = {}
        for segment in sorted(log):
            of_producer: dict[int, int] = {}
            joined = self._is_joined(segment)
            for offset in range(len(log[segment])):
                value = self._value_at(log, segment, offset)
                if value is None:
                    continue
                given = self.given[value]
                self._check_range(segment, offset, given)
                last = 0 if joined else of_producer.get(given.producer, 0)
                if given.key is not None:
                    last = max(last, of_key.get((given.producer, given.key), 0))
                    of_key[given.producer, given.key] = given.number
                if given.number < last:
                    raise PromiseBroken(
                        "I4",
                        f"segment {segment}: producer {given.producer} sent {given.number} of key {given.key!r} before "
                        f"{last}, which stands before it at offset {offset}",
                    )
                of_producer[given.producer] = given.number

    def _is_joined(self, segment: int) -> bool:
        """Whether the segment, or one before it, continues several. Two parents have no key in common, so a producer's
        records of different keys may change their order there."""
        info = self.segments.get(SegmentId(segment))
        parents = info.parent_ids if info is not None else ()
        return len(parents) > 1 or any(map(self._is_joined, parents))

    def _check_range(self, segment: int, offset: int, given: Given) -> None:
        info = self.segments.get(SegmentId(segment))
        if info is not None and given.key is not None and key_hash(given.key) not in info.hash_range:
            raise PromiseBroken(
                "I6", f"key {given.key!r} stands at offset {offset} of segment {segment}, which has {info.hash_range}"
            )

    def _value_at(self, log: Log, segment: int, offset: int) -> bytes | None:
        """Return what stands there, or what was seen there before retention deleted it."""
        record = log[segment][offset]
        if record is not None:
            return record[0]
        sighting = self.confirmed.get((segment, offset)) or self.seen.get((segment, offset))
        return sighting.value if sighting is not None else None

    def missing(self, subscription: str, ends: Mapping[int, int]) -> list[Place]:
        """Return what the subscription's consumers have not got yet, from its start, or its last place, on."""
        history = self.subscription(subscription)
        return [
            (segment, offset)
            for segment, end in ends.items()
            for offset in range(self.earliest.get(segment, 0), end)
            if history.due(segment, offset)
        ]
