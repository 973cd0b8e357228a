"""The cluster leader: gives segments to brokers, drains and balances them.

Every broker is a candidate, under its own lease. The leader looks at the whole cluster whenever something changed, and
every few seconds even if nothing did. It decides (leader_step.py, balance.py) and writes its decisions, many records in
one transaction. Each write compares the records that it was decided on, and the leadership (`fence`): a leader that was
replaced changes nothing (I3). The leader remembers nothing that a successor would need: everything that it has begun is
in the records.

The leader acts on a change immediately. Changes that follow within `CALM_S` are gathered, so that a thousand changes do
not cost a thousand passes; one pass ends before the next begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from braid.cluster.balancing.balance import plan
from braid.cluster.balancing.plan import BalancePlan, Remark
from braid.cluster.balancing.policy import BalancePolicy
from braid.cluster.balancing.recent_moves import RecentMoves
from braid.cluster.downtime import Downtime
from braid.cluster.members import Members, still_gone
from braid.cluster.owners import SWAPS_TOGETHER, Owners, Swap
from braid.cluster.ownership.leader_step import Decision, Reason, Waiting, balancing_decisions, decide, waiting
from braid.cluster.ownership.replica_sets import REPLACE_AFTER_S, Patience
from braid.cluster.snapshot import KnownTopics, Snapshot, taken
from braid.metadata import paths
from braid.metadata.election import Election, Leadership
from braid.metadata.store import Condition, Lease
from braid.metadata.view import Table, View
from braid.model.cluster import SegmentRef
from braid.model.errors import LeaseLost, MetadataError, NotServing, ShuttingDown, TopicNotFound
from braid.model.ownership import OwnershipState
from braid.ports.clock import Clock
from braid.ports.tasks import cancel

LOOK_S: Final = 5.0
"""Look so often even without a change: policies wait for times."""
CALM_S: Final = 0.02
CALM_FACTOR: Final = 4
"""Where there are many segments, a pass takes long. A pause of so many times its length follows, because the broker has
other things to do."""
AGAIN_S: Final = 0.5
"""The pause after a store that did not answer."""
WRITES_AT_ONCE: Final = 4 * SWAPS_TOGETHER
"""After so many records the leader looks whether it still leads, and waits until its view shows them."""
CALM_INTERVALS: Final = 10
"""For so many intervals no load was to be moved before the leader moves idle segments: rates have settled by then."""
DRAIN_AGAIN_S: Final = 10.0
"""How long a segment rests after its owner gave a move up, before the leader asks again: the cause may last."""
RESIGN_S: Final = 2.0
"""How long a leader that stops tries to resign; its lease ends anyway."""

_log: Final = logging.getLogger(__name__)


class LeaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    balance: bool = False
    """Whether segments move by themselves to even the load."""
    policy: BalancePolicy = BalancePolicy()
    copies_history: bool = False
    """Whether a move copies history: brokers that share no storage."""
    replace_after_s: float = REPLACE_AFTER_S
    """How long a broker is gone before others copy the segments of which it held replicas."""


class Leader:
    """Made before its view is loaded. `start` and `stop` may be called again and again, once for each lease."""

    def __init__(
        self,
        view: View,
        topics: KnownTopics,
        owners: Owners,
        members: Members,
        clock: Clock,
        broker_id: str,
        config: LeaderConfig | None = None,
    ) -> None:
        self.config: Final = config or LeaderConfig()
        self.decisions: Final[Counter[Reason]] = Counter()
        """How many decisions were written since this broker started."""
        self.on_deleting: list[Callable[[str], None]] = []
        """Called, while this broker leads, with the path of each topic whose deletion has not ended: at each look."""
        self.on_transition: list[Callable[[str], None]] = []
        """Called, while this broker leads, with the path of each topic whose layout is being changed: at each look."""
        self.on_look: list[Callable[[], None]] = []
        """Called, while this broker leads, at each look."""
        self.on_failure: Callable[[BaseException], None] | None = None
        """Called when leading has failed by a bug of ours."""
        self._view = view
        self._topics = topics
        self._owners = owners
        self._members = members
        self._clock = clock
        self._id = broker_id
        self._downtime = Downtime(members, owners, clock)
        self._past = RecentMoves(owners, clock)
        self._leaders: Table[str, str] = view.add(
            Table(paths.CLUSTER_LEADER, _is_leader, lambda value: value.decode("utf-8", "replace"), lambda key: key)
        )
        self._election = Election(view.store, paths.CLUSTER_LEADER, clock)
        self._leadership: Leadership | None = None
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None
        self._balanced_at: float | None = None
        self._calm_since: float | None = None
        """Since when no load was to be moved, as far as this leader has looked."""
        self._thought_s = 0.0
        """How long the last pass has kept the loop."""
        self._drained_at: dict[SegmentRef, float] = {}
        """When this leader last gave each segment a move because its owner drains."""

    @property
    def leading(self) -> bool:
        return self._leadership is not None and self._holds(self._leadership)

    @property
    def leader(self) -> str | None:
        """Return the id of the leader, as far as this broker knows."""
        return self._leaders.get(paths.CLUSTER_LEADER)

    @property
    def fence(self) -> Condition | None:
        """A condition that holds while this broker leads; None if it does not, as far as it can know."""
        return self._leadership.fence if self._leadership is not None and self.leading else None

    def snapshot(self) -> Snapshot:
        return taken(self._topics, self._owners, self._members, self._downtime)

    def patience(self) -> Patience:
        """Return what decisions that wait for a time are made with now."""
        return Patience(self._clock.monotonic(), self.config.replace_after_s)

    def waiting(self) -> list[Waiting]:
        """Return the segments that wait for a broker. Every broker can tell."""
        return waiting(self.snapshot())

    def balance_plan(self, *, even_numbers: bool = True) -> BalancePlan:
        """Return what balancing would do now, whether or not it is enabled. Every broker can tell. `even_numbers` tells
        whether idle segments are to be distributed too."""
        view, policy = self.snapshot().cluster_load(copies_history=self.config.copies_history), self.config.policy
        past = self._past.remembered(policy)
        return plan(view, policy, past, self._clock.now_us(), even_numbers=even_numbers)

    async def balance(self) -> tuple[BalancePlan, int]:
        """Begin the moves that even the load best, whether or not balancing is enabled; return the plan, and how many
        of its moves have begun. `NotServing` unless this broker leads."""
        leadership = self._leadership
        if leadership is None or not self._holds(leadership):
            raise NotServing(f"broker {self._id} does not lead the cluster, or not yet; try again in a moment")
        snapshot, found = self.snapshot(), self.balance_plan()
        return found, await self._write(balancing_decisions(snapshot, found), leadership)

    def start(self, lease: Lease) -> None:
        """Become a candidate. The lease is renewed by its owner; when it is lost, the candidacy ends by itself."""
        assert self._task is None or self._task.done(), "the last candidacy has not been stopped"
        self._lease = lease
        self._task = asyncio.create_task(self._run(lease), name="cluster leader")
        self._task.add_done_callback(self._on_end)

    async def stop(self) -> None:
        """Stop leading, and resign."""
        task, self._task = self._task, None
        if task is None:
            return
        await cancel([task])
        lease, self._lease = self._lease, None
        if lease is not None and self._clock.monotonic() < lease.deadline:
            with contextlib.suppress(MetadataError, TimeoutError):
                async with asyncio.timeout(RESIGN_S):
                    await self._resign(lease)
        if not task.cancelled():
            task.result()

    async def _resign(self, lease: Lease) -> None:
        # By the lease, not by `_leadership`: a campaign that is cancelled may have won just then.
        entry = await self._election.leader()
        if entry is not None and entry.lease == lease.id:
            await self._election.resign(Leadership(entry.key, entry.revision, lease.id))

    def _on_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None and self.on_failure is not None:
            self.on_failure(error)

    # Leading.

    async def _run(self, lease: Lease) -> None:
        with contextlib.suppress(LeaseLost, ShuttingDown):
            while True:
                leadership = await self._election.campaign(self._id.encode(), lease)
                # Earlier leaders wrote at lower revisions: from here on, the view shows everything that they wrote.
                await self._view.caught_up(leadership.revision)
                _log.info("broker %s leads the cluster", self._id)
                self._leadership = leadership
                try:
                    await self._lead(leadership)
                finally:
                    self._leadership = None
                    _log.info("broker %s does not lead the cluster any more", self._id)

    def _holds(self, leadership: Leadership) -> bool:
        """Tell whether this broker still leads, as far as it can know."""
        known = self._leaders.known(paths.CLUSTER_LEADER)
        return (
            known is not None
            and known.revision == leadership.revision
            and self._lease is not None
            and self._clock.monotonic() < self._lease.deadline
        )

    async def _lead(self, leadership: Leadership) -> None:
        """Lead until the leadership is over."""
        while self._holds(leadership):
            began, seen = self._clock.monotonic(), self._view.changes
            try:
                await self._reconcile(leadership)
            except MetadataError as error:
                _log.warning("the cluster leader could not write what it decided, and looks again: %s", error)
                await asyncio.sleep(AGAIN_S)
                continue
            await self._view.changed_since(seen, LOOK_S)
            calm_s = max(CALM_S, self._thought_s * CALM_FACTOR)
            await asyncio.sleep(max(began + calm_s - self._clock.monotonic(), 0))

    async def _reconcile(self, leadership: Leadership) -> None:
        began = self._clock.monotonic()
        snapshot = self.snapshot()
        decisions = decide(
            snapshot,
            self._clock.monotonic(),
            self._cooling_down(snapshot),
            drained_at_once=self.config.policy.drain_moves_at_once,
            replace_after_s=self.config.replace_after_s,
        )
        if not decisions and self.config.balance:
            decisions = self._balance(snapshot)
        self._thought_s = self._clock.monotonic() - began
        for path, topic in sorted(snapshot.topics.items()):
            for callback in self.on_deleting if topic.deleting else self.on_transition if topic.transition else ():
                callback(path)
        for look in self.on_look:
            look()
        for start in range(0, len(decisions), WRITES_AT_ONCE):
            await self._write(decisions[start : start + WRITES_AT_ONCE], leadership)

    async def _write(self, decisions: Sequence[Decision], leadership: Leadership) -> int:
        """Write decisions, and return when the view shows them: how many. The others came too late: another writer was
        faster, or another broker leads."""
        if not self._holds(leadership):
            return 0
        swaps = [(decision, swap) for decision in decisions if (swap := self._swap(decision, leadership)) is not None]
        revisions = await self._owners.swap_all([swap for _, swap in swaps])
        written = [decision for (decision, _), revision in zip(swaps, revisions, strict=True) if revision is not None]
        for decision in written:
            self.decisions[decision.reason] += 1
            if decision.reason is Reason.DRAINED:
                ref = SegmentRef(decision.segment.topic.path, decision.segment.id)
                self._drained_at[ref] = self._clock.monotonic()
            _log.info("%s", described(decision))
        if written:
            await self._view.caught_up(max(each for each in revisions if each is not None))
        return len(written)

    def _swap(self, decision: Decision, leadership: Leadership) -> Swap | None:
        """Return what a decision writes; None: its topic is being deleted."""
        try:
            # No segment is given away of a topic that is being deleted, or was replaced by another of its name.
            unchanged = self._topics.unchanged(decision.segment.topic.path)
        except TopicNotFound:
            return None
        conditions = (leadership.fence, unchanged, *still_gone(decision.gone))
        return Swap(decision.segment, decision.revision, decision.record, conditions)

    def _cooling_down(self, snapshot: Snapshot) -> set[SegmentRef]:
        oldest = self._clock.monotonic() - DRAIN_AGAIN_S
        self._drained_at = {ref: at for ref, at in self._drained_at.items() if at > oldest}
        if not self._drained_at:
            return set()
        return {
            each.ref
            for each in snapshot.segments()
            if each.ref in self._drained_at and each.known is not None and each.known.value.refusal
        }

    def _balance(self, snapshot: Snapshot) -> list[Decision]:
        now = self._clock.monotonic()
        if self._balanced_at is not None and now - self._balanced_at < self.config.policy.interval_s:
            return []
        self._balanced_at = now
        found = self.balance_plan(even_numbers=False)
        if not any(note.remark in (Remark.BALANCED, Remark.QUIET) for note in found.notes):
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        elif now - self._calm_since >= CALM_INTERVALS * self.config.policy.interval_s:
            found = self.balance_plan()
        return balancing_decisions(snapshot, found)


def described(decision: Decision) -> str:
    """Describe a decision for the log."""
    record = decision.record
    if record.move is not None:
        return f"{decision.segment} is to move from {record.owner} to {record.move.to} ({decision.reason.value})"
    if decision.reason is Reason.REPLICAS:
        present, change = ", ".join(record.replicas) or record.owner, record.change
        if change is None:
            return f"{decision.segment} keeps its replicas {present}"
        wanted = ", ".join(change.replicas) or record.owner
        return f"{decision.segment}, now on {present}, is to be on {wanted}; {change.write_quorum} confirm"
    if record.state is OwnershipState.RECOVERING:
        fewer = f"; the loss of {' and '.join(record.given_up) or 'others'} is accepted" if record.accept_loss else ""
        return f"the replicas {', '.join(record.replicas)} of {decision.segment} vote in epoch {record.epoch}{fewer}"
    loss = ", with what only its last owner had lost" if record.accept_loss else ""
    return f"{decision.segment} goes to {record.owner} in epoch {record.epoch} ({decision.reason.value}{loss})"


def _is_leader(key: str) -> str | None:
    return key if key == paths.CLUSTER_LEADER else None
