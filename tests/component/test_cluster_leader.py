"""The cluster leader on a memory store, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import pytest

from braid.cluster.leader import DRAIN_AGAIN_S, LeaderConfig
from braid.cluster.ownership.leader_step import DRAINED_AT_ONCE, Reason, decide
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Condition, Delete, Operation, Put, TxnResult
from braid.model.cluster import Registration
from braid.model.ids import SegmentId
from braid.model.load import LoadReport, SegmentLoad
from braid.model.names import SegmentName
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.topic import OwnerLoss, TopicPolicies
from braid.testing.sim.loop import Process, Simulation
from tests.kits.control import counted
from tests.kits.leader import LEASE_TTL_S, ORDERS, Candidate, key_of, names_of, record
from tests.kits.waiting import until


class Cluster:
    """Candidates a, b, c on one store, each a process that can be killed."""

    def __init__(self, simulation: Simulation, config: LeaderConfig | None = None) -> None:
        self.simulation = simulation
        self.store = MemoryStore(simulation.clock)
        self.config = config
        self.candidates: dict[str, Candidate] = {}
        self.processes: dict[str, Process] = {}

    async def start(self, *ids: str) -> None:
        for id_ in ids:
            self.processes[id_] = self.simulation.process(id_)
            candidate = Candidate(self.simulation, self.store.client(), id_, self.config)
            self.candidates[id_] = candidate
            await self.processes[id_].start(candidate.start())

    def kill(self, id_: str) -> None:
        self.candidates.pop(id_).store.disconnect()
        self.processes[id_].kill()

    @property
    def one(self) -> Candidate:
        """Somebody who sees everything."""
        return next(iter(self.candidates.values()))

    @property
    def leaders(self) -> list[str]:
        return [id_ for id_, candidate in self.candidates.items() if candidate.leader.leading]

    async def create(self, segments: int, policies: TopicPolicies | None = None) -> list[SegmentName]:
        await self.one.topics.create(ORDERS, segments=segments, policies=policies or TopicPolicies(), properties={})
        return names_of(segments)

    def find(self, name: SegmentName) -> Ownership | None:
        return self.one.owners.find(name)

    async def owned(self, names: list[SegmentName]) -> list[str]:
        """Their owners, when all are assigned."""

        def all_assigned() -> bool:
            found = [self.find(name) for name in names]
            return all(each is not None and each.state is OwnershipState.ASSIGNED for each in found)

        await until(all_assigned)
        return [each.owner for name in names if (each := self.find(name)) is not None]


async def test_one_of_several_leads_and_everybody_knows_who(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    await until(lambda: cluster.leaders == ["a"])
    await until(lambda: [each.leader.leader for each in cluster.candidates.values()] == ["a"] * 3)


async def test_a_topic_without_records_gets_them(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    assert sorted(await cluster.owned(await cluster.create(6))) == ["a", "a", "b", "b", "c", "c"]
    assert cluster.candidates["a"].leader.decisions == {Reason.PLACED: 6}


async def test_what_is_sealed_is_assigned_at_once(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    (name,) = await cluster.create(1)
    await cluster.owned([name])
    began = cluster.simulation.clock.monotonic()
    await cluster.one.put(name, record("SEALED", "a", 7, to="b"))
    await until(lambda: cluster.find(name) == record("ASSIGNED", "b", 8, clean=True))
    assert cluster.simulation.clock.monotonic() - began < 0.1


async def test_a_leader_that_stops_resigns_so_that_the_next_need_not_wait_for_its_lease(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    await until(lambda: cluster.leaders == ["a"])
    began = cluster.simulation.clock.monotonic()
    await cluster.candidates.pop("a").leader.stop()
    await until(lambda: cluster.leaders == ["b"])
    assert cluster.simulation.clock.monotonic() - began < 0.1


async def test_a_candidate_that_stops_does_not_lead_afterwards(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    await until(lambda: cluster.leaders == ["a"])
    await cluster.candidates["b"].leader.stop()
    await cluster.candidates["a"].leader.stop()
    await until(lambda: cluster.leaders == ["c"])


async def test_a_new_leader_finds_what_the_dead_one_has_left(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    names = await cluster.create(3)
    await cluster.owned(names)
    cluster.kill("a")
    # Nobody leads now, and nobody sees this happen but by its result.
    await cluster.one.put(names[0], record("SEALED", "b", 5, to="c"))
    await until(lambda: cluster.find(names[0]) == record("ASSIGNED", "c", 6, clean=True), 2 * LEASE_TTL_S)
    assert len(cluster.leaders) == 1


async def test_clean_segments_of_a_dead_broker_go_to_the_others_and_served_ones_wait(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    names = await cluster.create(3)
    await cluster.owned(names)
    await cluster.one.put(names[0], record("SERVING", "c", 2))
    await cluster.one.put(names[1], record("ASSIGNED", "c", 2, clean=True))
    cluster.kill("c")
    await until(lambda: (found := cluster.find(names[1])) is not None and found.owner in ("a", "b"))
    await asyncio.sleep(1_000)
    assert cluster.find(names[0]) == record("SERVING", "c", 2)
    (waits,) = cluster.one.leader.waiting()
    assert (waits.segment, waits.brokers) == (names[0], ("c",))


async def test_a_topic_whose_policy_says_so_continues_when_its_owner_is_gone_for_long_enough(
    simulation: Simulation,
) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    policies = TopicPolicies(on_owner_loss=OwnerLoss.CONTINUE, owner_loss_after_ms=30_000)
    (name,) = await cluster.create(1, policies)
    await cluster.owned([name])
    await cluster.one.put(name, record("SERVING", "a", 2))
    began = cluster.simulation.clock.monotonic()
    cluster.kill("a")  # Which leads: its successor must have counted, too.
    await until(lambda: (found := cluster.find(name)) is not None and found.state is OwnershipState.ASSIGNED)
    assert cluster.find(name) == record("ASSIGNED", "b", 3, clean=True, accept_loss=True, given_up=("a",))
    assert LEASE_TTL_S + 30 <= cluster.simulation.clock.monotonic() - began + 5 < LEASE_TTL_S + 45


async def test_an_owner_that_is_back_in_time_keeps_its_segment(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    policies = TopicPolicies(on_owner_loss=OwnerLoss.CONTINUE, owner_loss_after_ms=30_000)
    (name,) = await cluster.create(1, policies)
    await cluster.owned([name])
    await cluster.one.put(name, record("SERVING", "c", 2))
    for _ in range(3):
        cluster.kill("c")
        await asyncio.sleep(LEASE_TTL_S + 25)
        await cluster.start("c")
        await asyncio.sleep(10)
    assert cluster.find(name) == record("SERVING", "c", 2)


async def test_a_loss_is_not_accepted_for_an_owner_that_is_back_before_the_leader_has_heard_of_it(
    simulation: Simulation,
) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    policies = TopicPolicies(on_owner_loss=OwnerLoss.CONTINUE, owner_loss_after_ms=30_000)
    (name,) = await cluster.create(1, policies)
    await cluster.owned([name])
    await cluster.one.put(name, record("SERVING", "c", 2))
    leader = cluster.candidates["a"].leader
    assert leader._leadership is not None
    (decision,) = decide(leader.snapshot(), cluster.simulation.clock.monotonic() + 31)
    assert decision.reason is Reason.CONTINUED
    registered = Put(paths.broker("c"), Registration(address="c:6660", admin="").to_json())
    await cluster.store.txn([], [registered])
    assert await leader._write([decision], leader._leadership) == 0
    assert cluster.find(name) == record("SERVING", "c", 2)


@pytest.mark.parametrize("writes", range(9))
async def test_a_leader_that_dies_between_any_two_writes_leaves_nothing_half_done(
    writes: int, simulation: Simulation
) -> None:
    """Placing, handing over and draining together take eight writes; the leader dies after each number of them."""
    cluster = Cluster(simulation)
    await cluster.start("b", "c", "d")
    names = await cluster.create(8)
    await cluster.owned(names)
    for candidate in cluster.candidates.values():
        await candidate.leader.stop()
    for index, name in enumerate(names):
        state = [
            record("SEALED", "b", 5, to="c"),
            record("SERVING", "d", 5),
            record("ASSIGNED", "gone", 5, clean=True),
        ]
        await cluster.one.put(name, state[index % 3])
    await cluster.one.drain("d")
    await cluster.start("a")
    dying = cluster.candidates["a"]
    dies_after(dying, writes, lambda: cluster.kill("a"))
    await asyncio.sleep(1)
    for candidate in cluster.candidates.values():
        if candidate is not dying:
            candidate.leader.start(candidate.lease)

    def done() -> bool:
        found = [cluster.find(name) for name in names]
        return all(
            each is not None
            and ((each.state is OwnershipState.ASSIGNED and each.epoch == 6) or each.move is not None)
            and each.state is not OwnershipState.SEALED
            for each in found
        )

    await until(done, 3 * LEASE_TTL_S)
    for index, name in enumerate(names):
        found = cluster.find(name)
        assert found is not None
        if index % 3 == 1:
            assert (found.state, found.owner, found.epoch) == (OwnershipState.SERVING, "d", 5)
        else:
            assert found.owner in ("a", "b", "c")


def dies_after(candidate: Candidate, writes: int, die: Callable[[], None]) -> None:
    left = [writes]

    def fault(request: str) -> Fault:
        if request == "txn":
            left[0] -= 1
            if left[0] < 0:
                die()
                return Fault.UNAVAILABLE
        return Fault.NONE

    candidate.store.fault = fault


def before_the_next_write(candidate: Candidate, happens: Callable[[], Awaitable[object]]) -> None:
    """Between a decision and its writing."""
    store, original = candidate.store, candidate.store.txn

    async def txn(conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        store.txn = original  # type: ignore[method-assign]
        await happens()
        return await original(conditions, operations)

    store.txn = txn  # type: ignore[method-assign]


async def test_a_leader_that_was_replaced_and_does_not_know_it_changes_nothing(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a")
    (name,) = await cluster.create(1)
    await cluster.owned([name])
    stale = cluster.candidates["a"].leader
    other = cluster.store.client()
    decisions = stale.decisions.copy()
    before_the_next_write(cluster.one, lambda: other.txn([], [Put(paths.CLUSTER_LEADER, b"b")]))
    await other.txn([], [Put(paths.ownership(*key_of(name)), record("SEALED", "a", 5).to_json())])
    await asyncio.sleep(LEASE_TTL_S)
    assert not stale.leading
    assert stale.decisions == decisions
    assert cluster.find(name) == record("SEALED", "a", 5)
    # When nobody leads any more, it leads again.
    await other.txn([], [Delete(paths.CLUSTER_LEADER)])
    await until(lambda: cluster.find(name) == record("ASSIGNED", "a", 6, clean=True))


async def test_nothing_is_assigned_of_a_topic_that_was_deleted_meanwhile(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a")
    (name,) = await cluster.create(1)
    await cluster.owned([name])
    other = await Candidate(cluster.simulation, cluster.store.client(), "b").start()
    before_the_next_write(cluster.one, lambda: other.topics.mark_deleting(ORDERS))
    await other.put(name, record("SEALED", "a", 5))
    await asyncio.sleep(LEASE_TTL_S)
    assert cluster.find(name) == record("SEALED", "a", 5)


async def test_a_leader_whose_lease_has_passed_decides_nothing(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    names = await cluster.create(1)
    await cluster.owned(names)
    process = cluster.processes["a"]
    process.freeze()
    await asyncio.sleep(LEASE_TTL_S + 1)
    await until(lambda: cluster.candidates["b"].leader.leading)
    decisions = cluster.candidates["a"].leader.decisions.copy()
    await cluster.candidates["b"].put(names[0], record("SEALED", "b", 5, to="b"))
    process.thaw()
    await asyncio.sleep(30)
    assert not cluster.candidates["a"].leader.leading
    assert cluster.candidates["a"].leader.decisions == decisions
    assert cluster.candidates["b"].owners.find(names[0]) == record("ASSIGNED", "b", 6, clean=True)


async def test_a_broker_leads_again_under_a_new_lease(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a")
    candidate = cluster.candidates["a"]
    await until(lambda: candidate.leader.leading)
    await candidate.keeper.stop()
    await candidate.lease.revoke()
    await until(lambda: not candidate.leader.leading)
    await candidate.leader.stop()
    lease = await candidate.store.grant_lease(LEASE_TTL_S)
    candidate.leader.start(lease)
    await until(lambda: candidate.leader.leading)


@pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])
async def test_a_store_that_does_not_answer_costs_time_and_nothing_else(fault: Fault, simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a")
    await until(lambda: cluster.leaders == ["a"])
    store, left = cluster.one.store, [7]

    def failing(request: str) -> Fault:
        if request == "txn" and left[0]:
            left[0] -= 1
            return fault
        return Fault.NONE

    maker = cluster.store.client()
    names = names_of(2)
    store.fault = failing
    other = await Candidate(cluster.simulation, maker, "b").start()
    await other.topics.create(ORDERS, segments=2, policies=TopicPolicies(), properties={})
    await cluster.owned(names)
    assert left[0] < 7
    assert [each.epoch for name in names if (each := cluster.find(name)) is not None] == [1, 1]


async def test_a_drained_broker_is_emptied_in_portions_and_what_was_refused_rests(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    count = DRAINED_AT_ONCE + 4
    names = await cluster.create(count)
    await cluster.owned(names)
    for name in names:
        await cluster.one.put(name, record("SERVING", "b", 2))
    await cluster.one.drain("b")

    def moving() -> list[SegmentName]:
        return [name for name in names if (found := cluster.find(name)) is not None and found.move is not None]

    await until(lambda: len(moving()) == DRAINED_AT_ONCE)
    refused = moving()
    for name in refused:
        found = cluster.find(name)
        assert found is not None
        assert found.move == Move(to="a", id="drain")
        await cluster.one.put(name, found.kept("no room"))
    await until(lambda: len(moving()) == 4)
    assert not set(moving()) & set(refused)
    await asyncio.sleep(DRAIN_AGAIN_S + 6)
    assert len(moving()) == DRAINED_AT_ONCE


async def test_a_broker_that_stops_is_given_nothing_and_hands_over_by_itself(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b", "c")
    names = await cluster.create(3)
    await cluster.owned(names)
    b = cluster.candidates["b"]
    stopping = Registration(address="b:6660", admin="", state="stopping")
    await b.store.txn([], [Put(paths.broker("b"), stopping.to_json(), b.lease.id)])
    await cluster.one.put(names[0], record("SERVING", "b", 5))
    await cluster.one.put(names[1], record("SEALED", "a", 5, to="b"))
    await until(lambda: cluster.find(names[1]) == record("ASSIGNED", "c", 6, clean=True))
    await asyncio.sleep(20)
    assert cluster.find(names[0]) == record("SERVING", "b", 5)


async def test_deletions_that_have_not_ended_are_shown_to_the_leader(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    await until(lambda: cluster.leaders == ["a"])
    told: dict[str, list[str]] = {"a": [], "b": []}
    for id_, candidate in cluster.candidates.items():
        candidate.leader.on_deleting.append(told[id_].append)
    names = await cluster.create(1)
    await cluster.owned(names)
    await cluster.one.put(names[0], record("SEALED", "a"))
    await cluster.owned(names)
    await cluster.one.topics.mark_deleting(ORDERS)
    await cluster.one.put(names[0], record("SEALED", "a", 20))
    await asyncio.sleep(20)
    assert set(told["a"]) == {ORDERS.path}
    assert len(told["a"]) > 2
    assert told["b"] == []
    assert cluster.find(names[0]) == record("SEALED", "a", 20)


async def unbalanced(cluster: Cluster) -> list[SegmentName]:
    """All load on a."""
    await cluster.start("a", "b")
    names = await cluster.create(4)
    await cluster.owned(names)
    for name in names:
        await cluster.one.put(name, record("SERVING", "a", 2))
    busiest = tuple(
        SegmentLoad(topic_path=ORDERS.path, segment_id=SegmentId(name.id), bytes_in_per_s=5 << 20) for name in names
    )
    now = cluster.simulation.clock.now_us()
    reports = {
        "a": LoadReport(at=now, bytes_in_per_s=20 << 20, segments=4, busiest=busiest),
        "b": LoadReport(at=now),
    }
    for id_, report in reports.items():
        await cluster.store.txn([], [Put(paths.load(id_), report.to_json())])
    return names


def moves(cluster: Cluster, names: list[SegmentName]) -> list[Move]:
    return [found.move for name in names if (found := cluster.find(name)) is not None and found.move is not None]


async def test_an_uneven_load_is_balanced_if_that_is_wanted(simulation: Simulation) -> None:
    cluster = Cluster(simulation, LeaderConfig(balance=True))
    names = await unbalanced(cluster)
    await until(lambda: moves(cluster, names) == [Move(to="b", id="balance")] * 2)
    assert cluster.candidates["a"].leader.decisions[Reason.BALANCED] == 2


async def test_nothing_moves_by_itself_unless_somebody_wants_it(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    names = await unbalanced(cluster)
    await asyncio.sleep(60)
    assert moves(cluster, names) == []


async def test_every_broker_can_tell_what_balancing_would_do(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await unbalanced(cluster)
    for candidate in cluster.candidates.values():
        await candidate.view.caught_up((await candidate.store.list("/")).revision)
        assert [(move.source, move.target) for move in candidate.leader.balance_plan().moves] == [("a", "b")] * 2


async def test_nothing_is_decided_about_a_segment_whose_record_cannot_be_read(simulation: Simulation) -> None:
    cluster = Cluster(simulation)
    await cluster.start("a", "b")
    names = await cluster.create(2)
    await cluster.owned(names)
    key = paths.ownership(names[0].topic.path, names[0].descriptor)
    await cluster.store.txn([], [Put(key, b'{"state":"RECOVERING"}')])
    await cluster.start("c")
    requests = counted(cluster.candidates["c"].store)
    cluster.kill("a")
    cluster.kill("b")
    await until(lambda: cluster.leaders == ["c"])
    assert cluster.one.owners.unreadable(names[0]) is not None
    await asyncio.sleep(60)
    entry = await cluster.store.get(key)
    assert entry is not None
    assert entry.value == b'{"state":"RECOVERING"}'
    assert requests.count("txn") < 5, "it is not tried again and again"
