"""The checker of what brokers do and tell about a change of layout, inside each broker:

- a child knows the producers of its parents (I10);
- while logs end, a broker names every segment for which the change waits;
- no change begins, and no log ends for it, on a broker that knows of a broker of an earlier version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from braid.broker.broker import Broker
from braid.broker.segments.owned_segment import OwnedSegment
from braid.model.batch.identity import CANNOT_TELL, is_derived
from braid.model.cluster import TRANSITIONS
from braid.model.ids import SegmentId
from braid.model.layout import SegmentInfo
from braid.model.names import TopicName
from braid.model.ownership import Ownership
from braid.model.topic import Topic
from braid.model.transition import CommittedTransition, Transition, TransitionStep
from braid.storage.log.producers import ProducerTable
from braid.testing.checkers.history import PromiseBroken


class TransitionChecker:
    def __init__(
        self,
        path: str,
        segments: Callable[[], Mapping[SegmentId, SegmentInfo]],
        present: Callable[[], Collection[int]],
        failed: Callable[[BaseException], None],
    ) -> None:
        """`segments` returns every segment that the topic has had, `present` the ids of those that it has now."""
        self._path = path
        self._segments = segments
        self._present = present
        self._failed = failed
        self._ended: dict[int, dict[int, int]] = {}
        """By segment whose log has ended, and producer: how far the log has what the producer sent."""

        self._given_up: set[int] = set()
        """The segments of which a part was given up."""

    def follow(self, broker: Broker) -> None:
        """Look at what a broker writes for a change: it knows of no broker that does not know changes."""
        topics, begin, advance = broker.topics, broker.topics.begin_transition, broker.topics.advance

        async def begin_transition(name: TopicName, *arguments: Any) -> Transition | CommittedTransition:
            self._check_versions(broker, f"a change of {name} begins")
            return await begin(name, *arguments)

        async def advance_transition(
            name: TopicName, transition_id: int, change: Callable[[Topic], Topic], *arguments: Any
        ) -> bool:
            if change is Topic.sealing:
                self._check_versions(broker, f"logs of {name} are to end")
            return await advance(name, transition_id, change, *arguments)

        topics.begin_transition = begin_transition  # type: ignore[method-assign,assignment]
        topics.advance = advance_transition  # type: ignore[method-assign,assignment]

    def _check_versions(self, broker: Broker, what: str) -> None:
        known = broker.cluster.members.brokers.all()
        if earlier := sorted(name for name, each in known.items() if TRANSITIONS not in each.features):
            self._failed(PromiseBroken("versions", f"{what} on {broker.id}, beside {', '.join(earlier)}"))

    # ── producers (I10) ──────────────────────────────────────────────────────────────────────────────────────────────

    def note_end(self, segment: OwnedSegment) -> bool:
        """Note what a log knows when it ends. Return False if that is known."""
        if segment.name.id in self._ended:
            return False
        producers = segment.storage.log._producers
        self._ended[segment.name.id] = {each: producers.next_sequence(each) for each in producers}
        return True

    def forget_end(self, segment: int) -> None:
        """A part of the log is given up: what is left knows less. A child may inherit again, from parents that are
        left."""
        self._ended.pop(segment, None)
        self._given_up.add(segment)

    def meet(self, segment: OwnedSegment, record: Ownership | None) -> None:
        """A segment was opened. It may be inheriting already: the record says so before the log has the producers. Such
        a call of the storage goes on, so the log is followed, too."""
        if record is not None and record.inherited and segment.inherited:
            self._check_inherited(segment)
        inherit, begin = segment.storage.inherit, segment.storage.log.inherit

        async def inherited(producers: ProducerTable, *change: Any) -> None:
            await inherit(producers, *change)
            self._look_at_inherited(segment)

        def begun(producers: ProducerTable) -> None:
            begin(producers)
            self._look_at_inherited(segment)

        segment.storage.inherit = inherited  # type: ignore[method-assign,assignment]
        segment.storage.log.inherit = begun  # type: ignore[method-assign]

    def _look_at_inherited(self, segment: OwnedSegment) -> None:
        try:
            self._check_inherited(segment)
        except PromiseBroken as error:
            self._failed(error)

    def _check_inherited(self, segment: OwnedSegment) -> None:
        """A child knows the producers of its parents. A drawn producer wrote in one log alone: however many parents
        tell of it, the child tells the same. After a loss, a child that inherited before it knows more than its
        parent, and parents may contradict each other. The child then refuses what it cannot tell."""
        parents = self._segments()[segment.name.id].parent_ids
        producers = segment.storage.log._producers
        if segment.name.id in self._given_up:
            parents = tuple(each for each in parents if each in self._present())
        for parent in parents:
            ended = self._ended.get(parent, {})
            if missing := ended.keys() - set(producers):
                raise PromiseBroken("I10", f"{segment.name} does not know producers of {parent}: {sorted(missing)}")
            for producer, there in ended.items():
                here = producers.next_sequence(producer)
                after_loss = self._given_up and (here == CANNOT_TELL or here > there)
                if here != there and not after_loss and not is_derived(producer):
                    what = f"{segment.name} has producer {producer:#x} up to {here}"
                    raise PromiseBroken("I10", f"{what}, its parent {parent} up to {there}")

    # ── a change that waits ──────────────────────────────────────────────────────────────────────────────────────────

    async def look(self, broker: Broker) -> None:
        """As far as a broker knows, it names every segment for which a change waits while logs end."""
        topic, transitions = broker.cluster.topics.find(self._path), broker.group_host.transitions
        if topic is None or topic.transition is None or topic.transition.step is not TransitionStep.SEALING:
            return
        records = transitions._records(self._path, topic)
        told = await transitions.waits_for(self._path)  # It needs nobody's answer while logs end.
        for segment in _awaited(topic.transition, records):
            if not any(re.search(rf"\bsegment {segment}\b", sentence) for sentence in told):
                raise PromiseBroken(
                    "visible", f"{_change(topic)} waits for segment {segment}, and {broker.id} tells: {told}"
                )


def _awaited(transition: Transition, records: Mapping[SegmentId, Ownership]) -> list[SegmentId]:
    """Return the parents whose logs have not ended; when all have, the children that have not inherited."""
    found = {each: records.get(each) for each in (*transition.parents, *transition.child_ids)}
    ending = [each for each in transition.parents if (record := found[each]) is None or record.ended_at is None]
    return ending or [
        each for each in transition.child_ids if (record := found[each]) is None or record.inherited != transition.id
    ]


def _change(topic: Topic) -> str:
    assert topic.transition is not None
    return f"the change of {[*topic.transition.parents]} to {[*topic.transition.child_ids]}"
