"""What the owners of a transition's segments do (decision 34).

A parent's owner ends its log: the last batch is a SEAL, and one transaction writes the end into the catalog and into
the ownership record. A child's owner then takes over what the parents' logs know of their producers, and says so in its
own record. Each owner acts because the records say so (cluster/ownership/owner_step.py), and can do it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Final

from braid.broker.segments.owned_segment import OwnedSegment
from braid.broker.segments.segment_access import GetProducers, SegmentAccesses
from braid.broker.topics import Topics
from braid.cluster.owners import Owners
from braid.cluster.ownership import owner_step
from braid.cluster.ownership.owner_step import TransitionRole
from braid.metadata import paths
from braid.metadata.store import Compare, Condition, Operation, Put
from braid.metadata.view import Known
from braid.model.errors import BraidError, Fenced
from braid.model.ids import Offset, SegmentId
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.topic import Topic
from braid.ports.tasks import all_of
from braid.storage.log.producers import ProducerTable, inherited

_log: Final = logging.getLogger(__name__)

COMMITTED: Final = 1
MAX_WRITING: Final = 16
"""How many segments write their part of transitions at the same time: a topic may have a thousand."""
RETRY_FIRST_S: Final = 0.1
RETRY_MAX_S: Final = 10.0


class Succession:
    def __init__(self, broker_id: str, topics: Topics, owners: Owners, accesses: SegmentAccesses) -> None:
        self._broker_id = broker_id
        self._topics = topics
        self._owners = owners
        self._accesses = accesses
        self._slots = asyncio.Semaphore(MAX_WRITING)
        self._last_inherited: tuple[list[bytes], ProducerTable] = ([], ProducerTable())
        """What the last child inherited. Often the next one inherits the same, and the two then share most of it."""

    def role(self, name: SegmentName, topic: Topic | None, segment: OwnedSegment | None) -> TransitionRole:
        """Return what a transition wants of this owner now. `segment` is None while it is not served here."""
        inherited = segment is None or segment.inherited
        if topic is None or (topic.transition is None and inherited):
            return TransitionRole.NONE

        def record_of(segment: SegmentId) -> Ownership | None:
            return self._owners.find(SegmentName.of(name.topic, topic.segments[segment]))

        return owner_step.transition_role(topic, name.id, record_of, inherited=inherited)

    async def go_on(self, segment: OwnedSegment, is_served: Callable[[], bool]) -> None:
        """End the log of a parent, or let a child inherit; until it is done, or is not this owner's to do."""
        path, pause_s = segment.name.topic.path, RETRY_FIRST_S
        while is_served() and segment.storage.log.failure is None:
            topic = self._topics.find(path)
            role = self.role(segment.name, topic, segment)
            if topic is None or role is TransitionRole.NONE:
                break
            try:
                if role is TransitionRole.PARENT:
                    await self.end_log(segment)
                else:
                    await self.inherit(segment, topic)
                    if segment.replication is not None:
                        segment.replication.on_inherited()
                    segment.follow_layout(self._topics.find(path))
            except Fenced as error:
                _log.warning("%s does not go on with its transition here: %s", segment.name, error)
                break
            except BraidError as error:
                _log.info("%s goes on with its transition in a moment: %s", segment.name, error)
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_MAX_S)

    async def end_log(self, segment: OwnedSegment) -> None:
        """End the log of a parent. When this returns, the view shows where it ends."""

        def also(end: Offset) -> tuple[Sequence[Condition], Sequence[Operation]]:
            return self._change(segment, known, known.value.ended(end))

        async with self._slots:
            known = self._record(segment)
            await segment.storage.end_log(also)
        await self._owners.view.caught_up(segment.storage.catalog.revision)

    async def inherit(self, segment: OwnedSegment, topic: Topic) -> None:
        """Begin a child with the producer tables of its parents. When this returns, the view shows it."""
        parents = (topic.segments[parent] for parent in topic.segments[segment.name.id].parent_ids)
        names = [SegmentName.of(segment.name.topic, parent) for parent in parents]
        rows = await all_of(self._accesses.of(name, topic.id).ask(GetProducers()) for name in names)
        async with self._slots:  # Tables are made here, too: few of them in one iteration of the loop.
            producers = self._inherited(rows)
            known = self._record(segment)
            change = self._change(segment, known, known.value.inheriting(_transition(topic)))
            await segment.storage.inherit(producers, *change)
        segment.inherited = True
        await self._owners.view.caught_up(segment.storage.catalog.revision)

    def _inherited(self, rows: list[bytes]) -> ProducerTable:
        if rows != self._last_inherited[0]:
            self._last_inherited = (rows, inherited(ProducerTable.from_rows(each) for each in rows))
        return self._last_inherited[1]

    def _record(self, segment: OwnedSegment) -> Known[Ownership]:
        known = self._owners.known(segment.name)
        if known is None or not known.value.is_held_by(self._broker_id, segment.epoch):
            raise Fenced(f"{segment.name} has another owner")
        return known

    def _change(
        self, segment: OwnedSegment, known: Known[Ownership], record: Ownership
    ) -> tuple[Sequence[Condition], Sequence[Operation]]:
        key = paths.ownership(segment.name.topic.path, segment.name.descriptor)
        return [Compare(key, known.revision)], [Put(key, record.to_json())]


def _transition(topic: Topic) -> int:
    """Return the transition that a child's record is to name. After the commit, nobody asks which one it was."""
    return topic.transition.id if topic.transition is not None else COMMITTED
