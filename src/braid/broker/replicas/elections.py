"""The vote of a segment's replicas, as the cluster leader holds it.

A record that is RECOVERING names an epoch. The leader asks all replicas to promise it. Each answers how far its disk
reaches. When enough members have answered, the highest position contains everything that was ever confirmed, and the
segment is assigned to that replica, in the same epoch (model/log/replication.py).

Promises are for ever, and asking twice gives the same answer. So the leader has nothing to remember: the next leader
asks again. Segments that one broker has lost are asked for together, some at a time, and each is assigned as soon as
enough replicas have answered for it. A replica that does not answer delays nobody but itself.

Where a loss is accepted, fewer answers suffice: of all replicas that are there, the one with the highest position gets
the segment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import msgspec

from braid.broker.replicas.copies import ReplicaCopies
from braid.broker.replicas.stream import Call
from braid.broker.topics import Topics
from braid.cluster.members import Members, still_gone
from braid.cluster.owners import Owners
from braid.metadata.store import Condition
from braid.metadata.view import Known
from braid.model.errors import BraidError, MetadataError, TopicNotFound
from braid.model.log.replication import Promise, elected, missing_votes
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.ports.tasks import TaskScope, all_of

SEGMENTS_AT_ONCE: Final = 64
"""In one request to one broker. It syncs a file for each of them."""
ANSWER_S: Final = 5.0
AGAIN_S: Final = 0.5

_log: Final = logging.getLogger(__name__)

Wanted = dict[SegmentName, Known[Ownership]]


class Elections:
    def __init__(
        self,
        broker_id: str,
        topics: Topics,
        owners: Owners,
        members: Members,
        copies: ReplicaCopies,
        call: Call,
        fence: Callable[[], Condition | None],
    ) -> None:
        """`fence` returns a condition that holds while this broker leads; None if it does not."""
        self._broker_id = broker_id
        self._topics = topics
        self._owners = owners
        self._members = members
        self._copies = copies
        self._call = call
        self._fence = fence
        self._tasks = TaskScope[str]()
        self._stopped = False
        self._promises: dict[tuple[SegmentName, int], dict[str, Promise]] = {}
        """By segment and epoch: what its replicas have promised."""

    def look(self) -> None:
        """Hold the votes that are due. Called while this broker leads, possibly many times."""
        if not self._stopped and "vote" not in self._tasks and self._wanted():
            self._tasks.start("vote", self._vote(), name="hold votes")

    async def stop(self) -> None:
        """Hold no votes any more. The broker leads a moment longer."""
        self._stopped = True
        await self._tasks.cancel()

    def missing(self, name: SegmentName, record: Ownership) -> tuple[int, tuple[str, ...]]:
        """Return how many answers are missing, and whose, as far as this broker has asked."""
        return missing_votes(self._promises.get((name, record.epoch), {}), record.replicas, record.write_quorum)

    def _wanted(self) -> Wanted:
        found: Wanted = {}
        for key, record in self._owners.table.all().items():
            if record.state is OwnershipState.RECOVERING:
                name = SegmentName.at(*key)
                if (known := self._owners.known(name)) is not None and self._topics.find(key[0]) is not None:
                    found[name] = known
        return found

    async def _vote(self) -> None:
        """Ask until no segment waits for a vote, or until this broker does not lead any more."""
        while (wanted := self._wanted()) and self._fence() is not None:
            current = {(name, known.value.epoch) for name, known in wanted.items()}
            self._promises = {key: found for key, found in self._promises.items() if key in current}
            seen = self._owners.view.changes
            await all_of(self._ask_broker(broker, wanted) for broker in self._asked(wanted))
            if self._wanted():
                await self._owners.view.changed_since(seen, AGAIN_S)
        self._promises.clear()

    def _asked(self, wanted: Wanted) -> set[str]:
        return {broker for known in wanted.values() for broker in known.value.replicas if self._members.is_live(broker)}

    async def _ask_broker(self, broker: str, wanted: Wanted) -> None:
        names = [
            name
            for name, known in wanted.items()
            if broker in known.value.replicas and broker not in self._promises.get((name, known.value.epoch), {})
        ]
        for start in range(0, len(names), SEGMENTS_AT_ONCE):
            some = names[start : start + SEGMENTS_AT_ONCE]
            try:
                await self._ask(broker, some, wanted)
            except BraidError as error:
                _log.info("broker %s does not vote yet: %s", broker, error)
                break
        # Also if nothing was to be asked: the last decision may not have been written.
        await all_of(self._decide(name) for name, known in wanted.items() if broker in known.value.replicas)

    async def _ask(self, broker: str, names: list[SegmentName], wanted: Wanted) -> None:
        asked = []
        for name in names:
            topic = self._topics.find(name.topic.path)
            asked.append((str(name), topic.id if topic is not None else 0, wanted[name].value.epoch))
        arguments = {"segments": asked, "revision": max(wanted[name].revision for name in names)}
        if broker == self._broker_id:
            answers = await self._copies.promise(arguments)
        else:
            answers = await self._call(broker, "copy_promise", arguments, timeout_s=ANSWER_S)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                _log.info("broker %s does not vote for %s yet: %s", broker, name, answer)
                continue
            promise = msgspec.convert(answer, Promise)
            self._promises.setdefault((name, promise.epoch), {})[broker] = promise

    async def _decide(self, name: SegmentName) -> None:
        """Assign the segment, if enough replicas have answered."""
        known, fence = self._owners.known(name), self._fence()
        if known is None or fence is None or known.value.state is not OwnershipState.RECOVERING:
            return
        record = known.value
        promises = self._promises.get((name, record.epoch), {})
        winner = elected(
            promises.values(), record.replicas, record.write_quorum, record.epoch, avoid=self._unfit(record)
        )
        lossy = winner is None and record.accept_loss
        if lossy and self._all_answered(record, promises):
            winner = max(promises.values(), key=lambda each: each.position.rank, default=None)
        if winner is None:
            return
        given_up = record.given_up if lossy else ()
        new = record.voted(winner.broker, winner.position, accept_loss=lossy, given_up=given_up)
        try:
            conditions = [fence, self._topics.unchanged(name.topic.path), *still_gone(given_up)]
            revision = await self._owners.swap(name, known.revision, new, conditions=conditions)
        except (MetadataError, TopicNotFound) as error:
            _log.warning("the vote for %s could not be written: %s", name, error)
            return
        if revision is not None:
            loss = ", and what only others held is lost" if lossy else ""
            _log.info(
                "%s goes to %s in epoch %d: it holds the log up to offset %d%s",
                name, winner.broker, record.epoch, winner.position.end, loss,
            )  # fmt: skip
            await self._owners.view.caught_up(revision)

    def _unfit(self, record: Ownership) -> list[str]:
        """Return the replicas that get the segment only if no other one holds as much."""
        return [each for each in record.replicas if record.failure_of(each) or not self._members.is_active(each)]

    def _all_answered(self, record: Ownership, promises: dict[str, Promise]) -> bool:
        return all(each in promises for each in record.replicas if self._members.is_live(each))
