"""The vote of a segment's replicas, as the cluster leader holds it.

A record that is RECOVERING names an epoch. The leader asks all replicas to promise it. Each answers how far its disk
reaches. When enough members have answered, the highest position contains everything that was ever confirmed, and the
segment is assigned to that replica, in the same epoch (model/log/replication.py).

Promises are for ever, and asking twice gives the same answer. So the leader has nothing to remember: the next leader
asks again. Segments that one broker has lost are asked for together, some at a time, and are assigned together as soon
as enough replicas have answered for them. A replica that does not answer delays nobody but itself.

Where a loss is accepted, fewer answers suffice: of all replicas that are there, the one with the highest position gets
the segment. The metadata does not tell which replicas are members, so only the leader that holds the vote knows that
all replicas which are there have answered, and that too few of them are members. If the topic's policy is `continue`,
the leader accepts the loss when the vote has stood like this for the policy's time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, Final

import msgspec

from braid.broker.peers.calls import Arguments
from braid.broker.replicas.stream import Call
from braid.broker.topics import Topics
from braid.cluster.members import Members, still_gone
from braid.cluster.owners import Owners, Swap
from braid.metadata.store import Condition
from braid.metadata.view import Known
from braid.model.errors import BraidError, MetadataError, TopicNotFound
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import Promise, elected, is_heir
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import OwnerLoss
from braid.ports.clock import Clock
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
        clock: Clock,
        promise: Callable[[Arguments], Awaitable[Any]],
        call: Call,
        fence: Callable[[], Condition | None],
    ) -> None:
        """`promise` is what this broker answers itself (`ReplicaCopies.promise`). `fence` returns a condition that
        holds while this broker leads; None if it does not."""
        self._broker_id = broker_id
        self._topics = topics
        self._owners = owners
        self._members = members
        self._clock = clock
        self._promise = promise
        self._call = call
        self._fence = fence
        self._tasks = TaskScope[str]()
        self._stopped = False
        self._deciding = asyncio.Lock()
        self._promises: dict[tuple[SegmentName, int], dict[str, Promise]] = {}
        """By segment and epoch: what its replicas have promised."""
        self._owned: Counter[str] = Counter()
        """By broker: how many segments it owns, as far as this vote knows. So the segments of a lost broker go to its
        followers alike, and each of these opens its share at the same time."""
        self._stuck_since: dict[tuple[SegmentName, int], float] = {}
        """By segment and epoch: since when all replicas that are there have answered, and are too few members; on the
        clock's `monotonic()`."""

    def look(self) -> None:
        """Hold the votes that are due. Called while this broker leads, possibly many times."""
        if not self._stopped and "vote" not in self._tasks and self._wanted():
            self._tasks.start("vote", self._vote(), name="hold votes")

    async def stop(self) -> None:
        """Hold no votes any more. The broker leads a moment longer."""
        self._stopped = True
        await self._tasks.cancel()

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
            self._owned = Counter(record.owner for record in self._owners.table.all().values() if record.is_owned)
            seen = self._owners.view.changes
            await all_of(self._ask_broker(broker, wanted) for broker in self._asked(wanted))
            # Nobody else has answered: now a replica may win that has failed before, if it alone holds everything.
            await self._decide(list(wanted), all_asked=True)
            await self._continue(list(wanted))
            if self._wanted():
                await self._owners.view.changed_since(seen, AGAIN_S)
        self._promises.clear()
        self._stuck_since.clear()

    def _asked(self, wanted: Wanted) -> list[str]:
        """Return the brokers that have a vote, in one order in every process: simulated seeds repeat then."""
        voters = {broker for known in wanted.values() for broker in known.value.replicas}
        return sorted(filter(self._members.is_live, voters))

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
            await self._decide(some)

    async def _ask(self, broker: str, names: list[SegmentName], wanted: Wanted) -> None:
        asked = []
        for name in names:
            topic = self._topics.find(name.topic.path)
            asked.append((str(name), topic.id if topic is not None else 0, wanted[name].value.epoch))
        arguments = {"segments": asked, "revision": max(wanted[name].revision for name in names)}
        if broker == self._broker_id:
            answers = await self._promise(arguments)
        else:
            answers = await self._call(broker, "copy_promise", arguments, timeout_s=ANSWER_S)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, str):
                _log.info("broker %s does not vote for %s yet: %s", broker, name, answer)
                continue
            promise = msgspec.convert(answer, Promise)
            self._promises.setdefault((name, promise.epoch), {})[broker] = promise

    async def _decide(self, names: Sequence[SegmentName], *, all_asked: bool = False) -> None:
        """Assign the segments for which enough replicas have answered. Before `all_asked`, more of them may answer:
        then a replica that can hardly serve does not win yet."""
        async with self._deciding:  # When the last decisions are written, the view shows it.
            fence = self._fence()
            found = [self._decision(name, fence, all_asked=all_asked) for name in names if fence is not None]
            votes = [each for each in found if each is not None]
            try:
                revisions = await self._owners.swap_all([swap for swap, _ in votes])
            except MetadataError as error:
                _log.warning("the votes for %d segments could not be written: %s", len(votes), error)
                return
            for (swap, lossy), revision in zip(votes, revisions, strict=True):
                if revision is not None:
                    _tell(swap, lossy=lossy)
            if written := [each for each in revisions if each is not None]:
                await self._owners.view.caught_up(max(written))

    def _decision(self, name: SegmentName, fence: Condition, *, all_asked: bool) -> tuple[Swap, bool] | None:
        """Return the record that assigns the segment, and whether this loses records; None: too few replicas have
        answered."""
        known = self._owners.known(name)
        if known is None or known.value.state is not OwnershipState.RECOVERING:
            return None
        record = known.value
        promises = self._promises.get((name, record.epoch), {})
        unfit = self._unfit(record)
        winner = elected(promises.values(), record.replicas, record.write_quorum, record.epoch, unfit, self._owned)
        if winner is not None and winner.broker in unfit and not all_asked:
            return None
        if winner is None and is_heir(promises.get(record.owner), record.elected):
            winner = promises[record.owner]
        lossy = winner is None and record.accept_loss
        if lossy and self._all_answered(record, promises):
            winner = most_left(promises.values(), record)
        if winner is None:
            return None
        given_up = record.given_up if lossy else ()
        new = record.voted(winner.broker, winner.position, accept_loss=lossy, given_up=given_up)
        try:
            unchanged = self._topics.unchanged(name.topic.path)
        except TopicNotFound:
            return None
        self._owned[winner.broker] += 1
        return Swap(name, known.revision, new, (fence, unchanged, *still_gone(given_up))), lossy

    async def _continue(self, names: Sequence[SegmentName]) -> None:
        """Accept the loss of what only replicas hold that cannot vote, where the topic's policy says so."""
        fence, now = self._fence(), self._clock.monotonic()
        stuck = {(name, known.value.epoch): known for name in names if (known := self._stuck(name)) is not None}
        self._stuck_since = {key: self._stuck_since.get(key, now) for key in stuck}
        swaps = []
        for (name, epoch), known in stuck.items():
            topic = self._topics.find(name.topic.path)
            if fence is None or topic is None or topic.policies.on_owner_loss is not OwnerLoss.CONTINUE:
                continue
            if now - self._stuck_since[name, epoch] >= topic.policies.owner_loss_after_ms / 1000:
                gone = tuple(each for each in known.value.replicas if not self._members.is_live(each))
                conditions = (fence, self._topics.unchanged(name.topic.path), *still_gone(gone))
                swaps.append(Swap(name, known.revision, known.value.losing(gone), conditions))
        try:
            revisions = await self._owners.swap_all(swaps)
        except MetadataError as error:
            _log.warning("the losses of %d segments could not be accepted: %s", len(swaps), error)
            return
        for swap, revision in zip(swaps, revisions, strict=True):
            if revision is not None:
                _log.warning("%s goes on with the replicas that are there, as its topic's policy says", swap.name)
                await self._owners.view.caught_up(revision)

    def _stuck(self, name: SegmentName) -> Known[Ownership] | None:
        """Return the record of a segment whose vote does not end though all replicas that are there have answered."""
        known = self._owners.known(name)
        if known is None or known.value.state is not OwnershipState.RECOVERING or known.value.accept_loss:
            return None
        promises = self._promises.get((name, known.value.epoch), {})
        return known if promises and self._all_answered(known.value, promises) else None

    def _unfit(self, record: Ownership) -> list[str]:
        """Return the replicas that get the segment only if the others do not hold everything for certain."""
        return [each for each in record.replicas if record.failure_of(each) or not self._members.is_active(each)]

    def _all_answered(self, record: Ownership, promises: dict[str, Promise]) -> bool:
        return all(each in promises for each in record.replicas if self._members.is_live(each))


def most_left(promises: Iterable[Promise], record: Ownership) -> Promise | None:
    """Return the replica that holds the most, where a loss is accepted; None: none has answered. A replica that has
    failed to open the segment for good wins only if all have."""

    def value(promise: Promise) -> tuple[bool, tuple[Epoch, Offset, bool]]:
        failure = record.failure_of(promise.broker)
        return failure is None or not failure.lasting, promise.position.rank

    return max(promises, key=value, default=None)


def _tell(swap: Swap, *, lossy: bool) -> None:
    new = swap.record
    assert new.elected is not None
    loss = ", and what only others held is lost" if lossy else ""
    _log.info(
        "%s goes to %s in epoch %d: it holds the log up to offset %d%s",
        swap.name, new.owner, new.epoch, new.elected.end, loss,
    )  # fmt: skip
