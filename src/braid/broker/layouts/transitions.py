"""Changes of a topic's layout, from the intent to the commit (decision 34).

Any broker begins a transition: it writes the intent into the topic's record. The cluster leader drives every transition
that it sees, one task for each topic, until the topic's record has none. The driver remembers nothing that its
successor would need. It looks at the records whenever they change and takes the step that they allow
(scaling/transition_step.py); each of its writes compares the topic's record and the leadership. What the segments have
to do, their owners do by themselves (broker/segments/succession.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.segments.segment_access import CheckCanEnd, GetProgress, SegmentAccesses
from braid.broker.topics import Topics
from braid.cluster.leader import Leader
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.store import Condition, Put
from braid.model.errors import BraidError, ShuttingDown, TimedOut, TransitionRefused
from braid.model.ids import NO_REQUEST, RequestId, SegmentId
from braid.model.layout import Layout
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.model.stored_record import encode
from braid.model.topic import Topic
from braid.model.transition import (
    CommittedTransition,
    FinishedChange,
    LayoutPlan,
    Transition,
    TransitionKey,
    find_finished,
)
from braid.ports.clock import Clock
from braid.ports.tasks import TaskScope, all_of, cancel
from braid.scaling.transition_step import TransitionAction, being_ended, decide, outdated

FIRST_LOOK_S: Final = 0.02
LOOK_S: Final = 1.0
"""Look so often at a transition even without a change, at first and later: children get cursors, which the view does
not show, and an owner that could not answer may answer now."""
CALM_FACTOR: Final = 2
"""A driver rests so many times as long as its look at the records of all segments has kept the loop: each of a thousand
segments tells of its steps."""
ASK_S: Final = 5.0
"""How long an owner is looked for that has to be asked."""

_log: Final = logging.getLogger(__name__)


class Transitions:
    def __init__(
        self,
        topics: Topics,
        owners: Owners,
        members: Members,
        leader: Leader,
        subscriptions: Subscriptions,
        accesses: SegmentAccesses,
        clock: Clock,
    ) -> None:
        self._topics = topics
        self._owners = owners
        self._members = members
        self._leader = leader
        self._subscriptions = subscriptions
        self._accesses = accesses
        self._clock = clock
        self._view = owners.view
        self._driving = TaskScope[str]()
        """By a topic's path."""
        self._thought_s = 0.0
        """How long the last look at a transition's records has kept the loop."""
        self._missing: dict[str, tuple[str, ...]] = {}
        """By a topic's path: what the driver has logged last that its transition waits for."""

    # On any broker.

    async def begin(
        self,
        name: TopicName,
        plan: Callable[[Layout], LayoutPlan],
        request_id: RequestId = NO_REQUEST,
        conditions: Sequence[Condition] = (),
    ) -> Transition | CommittedTransition:
        """Begin to change a topic's layout. A request that is repeated gets what it has begun."""
        if found := outdated(self._members.brokers.all()):
            raise TransitionRefused(f"the layout of topic {name} cannot be changed: {found[0]} first")
        return await self._topics.begin_transition(name, plan, request_id, conditions)

    def find_begun(
        self, name: TopicName, plan: Callable[[Layout], LayoutPlan], parents: Collection[int]
    ) -> Transition | FinishedChange | None:
        """Return what a call with this plan has begun before, under way or finished; None if there is no such change.

        A request id is known only while its change is under way. A repeat that comes later, or has no id, is
        recognised by what it asks for."""
        topic = self._topics.get(name.path)
        if topic.transition is not None and topic.transition.is_planned_by(plan, topic.layout):
            return topic.transition
        return find_finished(topic.layout, plan, parents)

    async def abort(self, name: TopicName, asked: TransitionKey | None = None) -> None:
        """Take back a transition whose parents still take writes. Its children are removed."""
        await self._topics.abort_transition(name, asked)

    async def committed(self, name: TopicName, asked: Transition | CommittedTransition, timeout_s: float) -> Topic:
        """Return the topic when the layout has the children. `TransitionRefused` if the transition was aborted,
        `TimedOut` if it takes longer: then it is still under way."""

        def is_over() -> bool:
            topic = self._topics.find(name.path)
            return topic is None or topic.transition is None or topic.transition.id != asked.id

        if not await self._view.until(is_over, timeout_s):
            waits = "; ".join(await self.waits_for(name.path)) or "it is nearly done"
            raise TimedOut(
                f"the layout of topic {name} was not changed within {timeout_s:g} s, and the change goes on: {waits}"
            )
        topic = self._topics.get(name.path)
        if isinstance(asked, Transition) and topic.layout.segments.keys().isdisjoint(asked.child_ids):
            raise TransitionRefused(f"the change of the layout of topic {name} was aborted")
        return topic

    async def waits_for(self, path: str) -> tuple[str, ...]:
        """Return what the topic's transition waits for, in sentences. Every broker can tell: what the records do not
        show, it asks the owners, as the driver does."""
        topic = self._topics.find(path)
        if topic is None or topic.transition is None:
            return ()
        records, live = self._records(path, topic), self._members.brokers.all()
        found = decide(topic.transition, records, live)
        if found.action is not TransitionAction.SEAL:
            ending, name = being_ended(topic.transition, records, live), TopicName.parse(path)
            reasons = await all_of(self._why_not_ended(name, topic, parent) for parent in ending)
            return (*found.missing, *filter(None, reasons))
        try:
            return await self._asked(TopicName.parse(path), topic, topic.transition)
        except BraidError as error:
            return (str(error),)

    async def _why_not_ended(self, name: TopicName, topic: Topic, parent: SegmentId) -> str | None:
        try:
            await self._accesses.of(SegmentName.of(name, topic.segments[parent]), topic.id, ASK_S).ask(CheckCanEnd())
        except BraidError as error:
            return f"the log of segment {parent} cannot end now: {error}"
        return None

    # On the cluster leader.

    def drive_later(self, path: str) -> None:
        """Drive the transition of a topic in the background. Called while this broker leads, possibly many times."""
        if path not in self._driving:
            self._driving.start(path, self._drive(TopicName.parse(path)), name=f"transition of {path}")

    async def stop(self) -> None:
        await cancel([*self._driving])

    async def _drive(self, name: TopicName) -> None:
        path = name.path
        look_s = FIRST_LOOK_S
        try:
            while (topic := self._topics.find(path)) is not None and topic.transition is not None:
                if self._leader.fence is None:
                    return
                seen = self._view.changes
                try:
                    if await self._step(name, topic, topic.transition):
                        look_s = FIRST_LOOK_S
                        continue
                except BraidError as error:
                    self._note_missing(path, (str(error),))
                await self._view.changed_since(seen, look_s)
                look_s = min(2 * look_s, LOOK_S)
                if self._thought_s > 0:
                    await asyncio.sleep(CALM_FACTOR * self._thought_s)
        except ShuttingDown:
            pass  # The next leader drives it.
        finally:
            self._missing.pop(path, None)

    async def _step(self, name: TopicName, topic: Topic, transition: Transition) -> bool:
        """Take the step that the records allow. Return False if there is none, or if something was faster."""
        fence, began = self._leader.fence, self._clock.monotonic()
        found = decide(transition, self._records(name.path, topic), self._members.brokers.all())
        self._thought_s = self._clock.monotonic() - began
        if fence is None or found.action is TransitionAction.WAIT:
            return False
        if found.action is TransitionAction.SEAL:
            if missing := await self._asked(name, topic, transition):
                self._note_missing(name.path, missing)
                return False
            if joined := outdated(self._members.brokers.all()):  # While the owners were asked.
                self._note_missing(name.path, tuple(joined))
                return False
            return await self._topics.advance(name, transition.id, Topic.sealing, [fence])
        mark = transition.mark(self._clock.now_us())
        put = Put(paths.transition(name.path), encode(mark))

        def commit(topic: Topic) -> Topic:
            return topic.committed(mark.committed_at)

        committed = await self._topics.advance(name, transition.id, commit, [fence], [put])
        if committed:
            parents, children = (", ".join(map(str, each)) for each in (transition.parents, transition.ranges))
            _log.info("topic %s: segments %s are replaced by %s", name, parents, children)
        return committed

    async def _asked(self, name: TopicName, topic: Topic, transition: Transition) -> tuple[str, ...]:
        """Ask the owners whether all is ready: children have the cursors of all subscriptions, parents can end. Return
        what is missing.

        A subscription that is created from now on has cursors on the children, because the topic's record names them:
        it is written on the condition that the record has not changed."""
        subscriptions = (await self._subscriptions.list(name)).keys()
        segments = topic.segments

        def access(segment: SegmentId) -> SegmentName:
            return SegmentName.of(name, segments[segment])

        cursors = await all_of(
            self._accesses.of(access(child), topic.id, ASK_S).ask(GetProgress()) for child in transition.ranges
        )
        await all_of(
            self._accesses.of(access(parent), topic.id, ASK_S).ask(CheckCanEnd()) for parent in transition.parents
        )
        lacking = {child: subscriptions - found.keys() for child, found in zip(transition.ranges, cursors, strict=True)}
        return tuple(
            f"segment {child} has no cursor yet of {', '.join(sorted(names))}"
            for child, names in lacking.items()
            if names
        )

    def _note_missing(self, path: str, missing: tuple[str, ...]) -> None:
        if self._missing.get(path) != missing:
            _log.info("the transition of topic %s waits: %s", path, "; ".join(missing))
        self._missing[path] = missing

    def _records(self, path: str, topic: Topic) -> Mapping[SegmentId, Ownership]:
        assert topic.transition is not None
        name, segments = TopicName.parse(path), topic.segments
        found = {
            segment: self._owners.find(SegmentName.of(name, segments[segment]))
            for segment in (*topic.transition.parents, *topic.transition.ranges)
        }
        return {segment: record for segment, record in found.items() if record is not None}
