"""The end of a transition: its mark goes when nobody needs the parents any more (decision 34).

    finalize = drained && (adopted || timed out)

*Drained*: every subscription has consumed all of the parents. *Adopted*: every client that told which routing it has,
has one that shows the children. The mark's own revision is that routing's generation, because the transaction that
commits the layout writes the mark. Each broker reports the lowest generation of its clients with its load; only live
brokers have reports. Nothing that is correct depends on adoption, so the leader waits for it only ADOPTION_S after the
parents were drained. A new leader begins to count anew.

A subscription that nobody consumes keeps the mark, and with it the parents: that is visible, and `skip` lets go of
them. It holds up no write and no other transition.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from braid.broker.topics import Topics
from braid.cluster.drained import DrainedSegments
from braid.cluster.leader import Leader
from braid.cluster.members import Members
from braid.metadata import paths
from braid.metadata.store import Delete
from braid.metadata.view import Known
from braid.model.errors import BraidError
from braid.model.ids import SegmentId
from braid.model.transition import CommittedTransition
from braid.ports.clock import Clock
from braid.ports.tasks import TaskScope, cancel

ADOPTION_S: Final = 30.0

_log: Final = logging.getLogger(__name__)


class Finalizing:
    def __init__(
        self,
        topics: Topics,
        members: Members,
        leader: Leader,
        drained: DrainedSegments,
        subscriptions: Callable[[str], Iterable[str]],
        clock: Clock,
    ) -> None:
        """`subscriptions` returns the names of a topic's subscriptions."""
        self._topics = topics
        self._members = members
        self._leader = leader
        self._drained = drained
        self._subscriptions = subscriptions
        self._clock = clock
        self._drained_since: dict[int, float] = {}
        """By a transition's id: when this broker, as leader, first saw that its parents are drained."""
        self._ending = TaskScope[str]()
        """By a topic's path."""

    def look(self) -> None:
        """Finalize what can be finalized. Called while this broker leads, at each look."""
        marks = self._topics.committed
        now = self._clock.monotonic()
        waiting: dict[int, float] = {}
        for path in marks.all():
            mark = marks.known(path)
            if mark is None or path in self._ending or self.undrained(path, mark.value):
                continue
            since = waiting[mark.value.id] = self._drained_since.get(mark.value.id, now)
            if self.is_adopted(mark) or now - since >= ADOPTION_S:
                self._ending.start(path, self._end(path, mark), name=f"finalize {path}")
        self._drained_since = waiting

    async def stop(self) -> None:
        await cancel([*self._ending])

    def undrained(self, path: str, mark: CommittedTransition) -> dict[str, list[SegmentId]]:
        """Return, by subscription, the parents that it has not consumed, as far as the layout still has them."""
        topic = self._topics.find(path)
        kept = set(mark.parents) & topic.layout.segments.keys() if topic is not None else set()
        left = {name: sorted(kept - self._drained.of(path, name)) for name in self._subscriptions(path)}
        return {name: parents for name, parents in left.items() if parents}

    def is_adopted(self, mark: Known[CommittedTransition]) -> bool:
        reports = self._members.loads.all().values()
        acked = [report.adopted_generation for report in reports if report.adopted_generation is not None]
        return bool(acked) and min(acked) >= mark.revision

    async def _end(self, path: str, mark: Known[CommittedTransition]) -> None:
        fence = self._leader.fence
        unchanged = self._topics.committed.unchanged(path)
        if fence is None or unchanged.revision != mark.revision:
            return
        try:
            result = await self._topics.view.store.txn([unchanged, fence], [Delete(paths.transition(path))])
            if result.succeeded:
                await self._topics.view.caught_up(result.revision)
                _log.info("topic %s has left segments %s", path, ", ".join(map(str, mark.value.parents)))
        except BraidError as error:
            _log.warning("the last transition of topic %s is not finalized yet: %s", path, error)
