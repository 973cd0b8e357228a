"""Real brokers and real clients under every fault, in virtual time.

One to four brokers run on one metadata store. As the seed decides, they share an object store or nothing. Each has a
machine with a disk and a clock of its own (`machine.py`). Clients that know all brokers publish and consume
(`clients.py`). An operator moves segments, drains brokers, changes the layout, seeks, and makes and deletes
subscriptions and topics (`operator.py`). Meanwhile brokers crash, also around any of their writes to the metadata
store, stop in order, stand still past their lease, and are cut off from each other, from clients and from the metadata
(`faults.py`).

One broker alone is a cluster of one: `simulate_broker` and `simulate_cluster` differ in numbers (`ClusterShape`, and
the table of faults). Moves, drains and accepted losses need a second broker.

Some seeds of several brokers are *gentle*: segments move and brokers stop in order, and nothing breaks. Then no client
may meet any error. Some are *lossy*: by its policy or by the operator, another broker continues a segment whose broker
is gone, or is back with an empty disk. What only that broker's disk held is lost, and no more.

Checked all along: the metadata, change by change (`ownership_checker.py`, `layout_checker.py`), and that each write
carries its comparisons (`fence_checker.py`); that each confirm comes from the one owner, under a lease that lives, in
epochs that rise (I3); that no broker believes in its lease for longer than the store; that no segment goes to two
consumers of a subscription (I4); that no cursor is ahead of synced records; that no consumer sees a record before it is
confirmed (I7); that connections keep their limits (I12); what clients are told and see (`topic_history.py`: I1, I2, I4,
I5, I7, I10). In the end the faults stop, and everything has to come to rest (`settling.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from itertools import count
from random import Random
from typing import Any, Final

import msgspec

from braid.broker.config import BrokerConfig, CursorConfig, GroupConfig, Limits
from braid.client.client import Client, connect
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Operation
from braid.model.errors import BraidError, ClientClosed, ProducerFull
from braid.model.ownership import Ownership
from braid.model.topic import Topic
from braid.model.transition import Transition, TransitionStep
from braid.testing.checkers.auto_scale_checker import AutoScaleChecker, Times
from braid.testing.checkers.cursor_checker import CursorChecker
from braid.testing.checkers.fence_checker import FenceChecker
from braid.testing.checkers.finalize_checker import FinalizeChecker
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.layout_checker import LayoutChecker
from braid.testing.checkers.ownership_checker import OwnershipChecker
from braid.testing.checkers.topic_history import TopicHistory
from braid.testing.scenarios.clients import RACED, TOPIC, ClientMachine, Saved, Sink, on_a_bad_day
from braid.testing.scenarios.faults import ClusterFaults
from braid.testing.scenarios.inspector import PATH, Inspector
from braid.testing.scenarios.machine import BrokerMachine
from braid.testing.scenarios.operator import Operator
from braid.testing.scenarios.queues.queues import QUEUES, SimulatedQueues
from braid.testing.scenarios.replicas import REPLICAS, SimulatedReplicas
from braid.testing.scenarios.settling import Settling
from braid.testing.scenarios.shared_reading import SharedResults
from braid.testing.sim.captured_log import LogCapture, run_with_log
from braid.testing.sim.loop import OUTSIDE, Process, Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import Faults, MemoryObjects

PORT: Final = 6_660
ZOMBIES: Final = "zombies"
"""May be favoured, like a fault or an operator's work: brokers that come back when others have continued their
segments."""
TRANSITIONS: Final = "change_layout"
"""A seed that favours this has transitions."""
LOSSES: Final = frozenset({ZOMBIES, "replace_disk", "recover"})
"""A seed that favours one of these is lossy."""
RETENTION: Final[tuple[dict[str, int], ...]] = (
    {"retention_bytes": 1},
    {"retention_bytes": 10_000},
    {"retention_ms": 1},
    {"retention_ms": 5_000},
)
JUMP_S: Final = 10.0
"""A decision that a leader made before its clock jumped is carried out within this time."""
ALONE_WITH_QUEUES: Final = 0.15
"""The share of seeds with queues that have one broker."""
STEP_LIMIT: Final = 3_000_000
"""Of the loop: some twenty times what a seed takes. One that goes round in circles ends here, in seconds."""


class ClusterShape(msgspec.Struct, frozen=True):
    """The numbers that tell a simulation of one broker from one of several."""

    brokers: tuple[int, int]
    """The least and the most."""
    most_clients: int
    steps: int
    """How many faults and operator's calls a seed has."""
    memory: float
    """The share of seeds whose topic survives the death of a process, and no loss of power."""
    shared: float
    """The share of seeds whose brokers have an object store."""
    retention: float
    """The share of seeds whose topic deletes old records."""
    transitions: float = 0.0
    """The share of seeds in which the operator changes the topic's layout."""
    scales: float = 0.0
    """Of those: the share in which the layout follows the load, too."""
    shares: float = 0.0
    """Of those: the share in which the clients are a group of checkpoint consumers, too."""
    gentle: float = 0.0
    lossy: float = 0.0
    """Of those that have an object store."""
    replicated: float = 0.0
    """The share of seeds whose topic has replicas."""


ONE_BROKER: Final = ClusterShape(brokers=(1, 1), most_clients=4, steps=37, memory=0.33, shared=0.1, retention=0.3)
SEVERAL_BROKERS: Final = ClusterShape(
    brokers=(2, 4),
    most_clients=3,
    steps=20,
    memory=0.2,
    shared=0.6,
    retention=0.3,
    transitions=0.35,
    scales=0.5,
    shares=0.2,
    gentle=0.2,
    lossy=0.3,
    replicated=0.3,
)


class Counts(msgspec.Struct):
    """What a simulation did; adds up over seeds."""

    seeds: int = 0
    gentle: int = 0
    lossy: int = 0
    local: int = 0
    """Seeds whose brokers share no storage."""
    records: int = 0
    """In the logs, in the end."""
    confirmed: int = 0
    failed: int = 0
    """Sends that the client reported as failed or doubtful."""
    handed_out: int = 0
    """Each record once for each subscription."""
    moves: int = 0
    """Segments that another broker serves than before."""
    moves_asked: int = 0
    """Calls that succeeded."""
    drains: int = 0
    accepted_losses: int = 0
    recoveries: int = 0
    replaced_disks: int = 0
    power_losses: int = 0
    kills: int = 0
    crashes_at_writes: int = 0
    orderly_stops: int = 0
    freezes: int = 0
    segments_reopened: int = 0
    """By the process that had them open: after a failed log, or a lost lease."""
    metadata_outages: int = 0
    connections_cut: int = 0
    client_crashes: int = 0
    client_freezes: int = 0
    seeks: int = 0
    deleted: int = 0
    """Records that retention has deleted."""
    repeated_writes: int = 0
    """Micro-batches that a sink wrote again when all of it was stored."""
    shared_results: int = 0
    """Records that a group of checkpoint consumers has got, and stored with a checkpoint."""
    races: int = 0
    """Of seeks and skips at the same time."""
    side_topics: int = 0
    subscriptions_deleted: int = 0
    layouts: int = 0
    """Splits, merges, repartitions and terminated segments that were committed."""
    layouts_by_load: int = 0
    """Changes that auto-scaling began."""
    layouts_taken_back: int = 0
    layouts_timed_out: int = 0
    """Changes that were finalized although a client had not told that it knows the children."""
    layouts_refused: int = 0
    """Calls that were refused because of a broker of an earlier version."""
    deletions_of_changing_topics: int = 0
    downgrades: int = 0
    """Brokers of an earlier version that were there for a while."""
    two_leaders: int = 0
    """How often two brokers believed at the same time that they lead the cluster."""
    frozen_reports: int = 0
    """Brokers that died with an old report of what their clients know."""
    segments_deleted: int = 0
    """By a call, before retention did."""
    segments_pruned: int = 0
    replicated: int = 0
    """Seeds whose topic has replicas."""
    replica_changes: int = 0
    """Segments whose owner has changed their replicas."""
    votes: int = 0
    lost_disks: int = 0
    """Of replicated topics that could spare them."""
    late_answers: int = 0
    """About copies."""
    pauses: int = 0
    """In which files became too old to stay open."""
    confirms_on_disks: int = 0
    """Confirms that were compared with the disks of the replicas."""

    def add(self, other: Counts) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class QueueCounts(Counts):
    """What a simulation of queues did."""

    queue_messages: int = 0
    """That programs got; one that comes again counts again."""
    queue_acks: int = 0
    """That programs were told of."""
    acks_on_disks: int = 0
    """Confirmed acks that were compared with the disks of the replicas."""
    stale_answers: int = 0
    time_outs: int = 0
    """Leases that ran out."""
    nacks: int = 0
    queue_seeks: int = 0
    queues_opened: int = 0
    """By an owner that was not the first one, with acks that an earlier one has confirmed."""
    states_handed_over: int = 0
    """Of those: with a state that the last owner has stored in the metadata."""
    dead_letters: int = 0
    lags: int = 0
    """Followers that were behind in messages or events, while other replicas confirmed both."""
    owners_lost_meanwhile: int = 0


class SimulatedCluster:
    """What all parts of one simulation share, and its course."""

    def __init__(self, simulation: Simulation, captured: LogCapture, shape: ClusterShape, favoured: str) -> None:
        self.simulation = simulation
        self.random: Random = simulation.random
        self.shape = shape
        self.favoured = favoured
        self.captured = captured
        self.note = captured.note
        random = self.random
        self.zombies = favoured == ZOMBIES
        loses = favoured in LOSSES
        self.gentle = random.random() < shape.gentle and favoured in ("", REPLICAS, QUEUES)
        self.durability = "memory" if random.random() < shape.memory else "fsync"
        self.segments = random.randint(1, 4)
        """How many the topic begins with."""
        draws = shape.transitions > 0 and random.random() < shape.transitions
        self.transitions = draws or favoured == TRANSITIONS
        self.scales = self.transitions and random.random() < shape.scales
        """Whether the topic's layout follows its load."""
        self.shares = self.transitions and random.random() < shape.shares
        """Whether a program of several processes shares the topic's segments among them."""
        if self.scales:
            self.segments = min(self.segments, 2)  # There is room for more.
        self.retention = random.choice(RETENTION) if random.random() < shape.retention else {}
        self.shared = MemoryObjects(simulation.clock) if random.random() < shape.shared or loses else None
        self.replicas = SimulatedReplicas(self, shape.replicated)
        if self.replicas.there:
            self.durability = "fsync"
        self.queues = SimulatedQueues(self)
        # Without shared storage, a loss is all that a broker has: there is nothing left to compare.
        spares = self.gentle or self.shared is None or self.replicas.there
        self.lossy = not spares and (random.random() < shape.lossy or loses)
        self.counts = (QueueCounts if self.queues.there else Counts)(
            1,
            gentle=int(self.gentle),
            lossy=int(self.lossy),
            local=int(self.shared is None),
            replicated=int(self.replicas.there),
        )
        self.network = SimulatedNetwork(random)
        self.store = MemoryStore(simulation.clock)
        self.inspector = Inspector(self)
        self.ownership = OwnershipChecker(self.store, captured.note)
        self.ownership.on_accepted_loss = self.inspector.on_accepted_loss
        self.ownership.on_sealed = self.inspector.on_sealed
        self.ownership.on_moving = self._on_moving
        self.ownership.on_replicas = self.replicas.on_changed
        self.ownership.may_hold = lambda broker: self.machines[broker].disk_was_full
        self.layouts = LayoutChecker(self.store)
        self.layouts.on_pruned = self.inspector.on_pruned
        self.scaling = AutoScaleChecker(self._times)
        self.cursors = CursorChecker(self.store, self.layouts.segments)
        self.cursors.may_lack_records = lambda _path: bool(self.retention) or self.lossy
        self.ends = FinalizeChecker(self.store, simulation.clock.monotonic, self._steady_subscriptions)
        self.fences = FenceChecker(self.store, self.failed)
        self.fences.on_topic = self._on_topic
        self.fences.on_record = self._on_record
        self.fences.on_transaction = self._on_transaction
        self.fences.on_sealing = self.inspector.on_sealing
        self.history = TopicHistory(
            survives_power_loss=self.durability == "fsync",
            segments=self.layouts.segments(PATH),
            note=captured.note,
        )
        brokers = self.replicas.brokers if self.replicas.there else random.randint(*shape.brokers)
        names = [f"b{number}" for number in range(1, brokers + 1)]
        self.machines = {
            name: BrokerMachine(simulation, self.network, self.store, self._config(name), self.shared) for name in names
        }
        self.alone = len(names) == 1
        delay_s = (0.0, random.choice([0.0, 0.0, 0.03]))
        for machine in self.machines.values():
            machine.metadata_delay_s = delay_s
        if self.zombies:  # Then they often stop in the middle of an export.
            for machine in self.machines.values():
                machine.object_faults = Faults(slow=0.5, slowest_s=3.0)
        self.clients: dict[str, ClientMachine] = {}
        self.publishing = True
        """False: producers end."""
        self.settling = False
        """The faults are over: consumers take everything and ack it."""
        self.saved: dict[str, Saved] = {}
        self.shared_results = SharedResults(self.history)
        self.sinks = [Sink("sink-0"), Sink("sink-1")]
        self.producers = count(1)
        """Numbers for the producers of all clients."""
        self.patience_s = 90.0 if self.gentle else None
        """The timeout of all clients; None: each client chooses its own."""
        self.subscriptions = ["calm", "moved"]
        self.operator: Operator
        self.faults = ClusterFaults(self)
        self._failure: BaseException | None = None
        self._client_numbers = count(1)

    def _config(self, name: str) -> BrokerConfig:
        random = self.random
        return BrokerConfig(
            id=name,
            data="/data",
            listen=f"{name}:{PORT}",
            lease_ttl_s=random.choice([2.0, 5.0]),
            cache_bytes=random.choice([0, 3_000, 1 << 20]),
            file_bytes=random.choice([4_096, 20_000, 200_000]),
            spare_files=random.choice([0, 1]),
            limits=Limits(
                max_requests_in_flight=random.choice([3, 50, 2_048]),
                max_bytes_in_flight=random.choice([2_000, 100_000, 32 << 20]),
                heartbeat_s=random.choice([0.5, 2.0]),
                hello_timeout_s=2.0,
                read_bytes=random.choice([1, 5_000, 1 << 20]),
            ),
            cursors=CursorConfig(flush_s=random.choice([0.1, 1.0, 60.0]), flush_acks=random.choice([1, 20, 10_000])),
            groups=GroupConfig(
                session_grace_s=random.choice([0.3, 3.0]), release_timeout_s=random.choice([0.5, 2.0, 10.0])
            ),
            **self.replicas.settings(),
        )

    # ── the course of it ─────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> Counts:
        try:
            return await self._run()
        finally:
            for client in self.clients.values():
                client.crash()
            for machine in self.machines.values():
                machine.crash(power_loss=False)

    async def _run(self) -> Counts:
        watching = [asyncio.create_task(self.inspector.watch()), asyncio.create_task(self.ownership.watch(self.failed))]
        for machine in self.machines.values():
            await self.faults.start(machine)
        async with self.client("operator") as client:
            self.operator = Operator(self, client)
            await self._create_topic(client)
            for _ in range(self.random.randint(1, self.shape.most_clients)):
                self.add_client()
            await self._inject_faults()
            settling = Settling(self)
            await settling.settle()
            await settling.check_the_end()
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
        self.check_alive()
        return self.counts

    async def _create_topic(self, client: Client) -> None:
        policy: dict[str, Any] = {**self.retention, **self.replicas.policy()}
        if self.lossy and (self.random.random() < 0.5 or self.zombies):
            policy |= {"on_owner_loss": "continue", "owner_loss_after_ms": self.random.choice([0, 3_000])}
        await client.admin.create_topic(TOPIC, segments=self.segments, **policy)
        for name in self.subscriptions:
            await client.admin.create_subscription(TOPIC, name, start="earliest")
            self.history.subscription(name)
        if self.scales:
            await client.admin.set_auto_scale_policy(TOPIC, self.operator.layouts.policy())
        if not self.retention:  # It would keep everything: no consumer moves it.
            await client.admin.create_subscription(TOPIC, RACED, start="earliest")
        await self.queues.create(client)

    async def _inject_faults(self) -> None:
        actions = self.faults.actions(self.favoured)
        weights = [weight for _, weight in actions]
        for action in self.random.choices([action for action, _ in actions], weights, k=self.shape.steps):
            await action()
            # Rates are measured every few seconds.
            await asyncio.sleep(self.random.uniform(0, 4.0 if self.scales else 1.0))
            self.check_alive()

    # ── what went wrong ──────────────────────────────────────────────────────────────────────────────────────────────

    def explains(self, error: BraidError) -> bool:
        """Whether the faults of this simulation explain that a client meets this error."""
        return isinstance(error, ClientClosed | ProducerFull) if self.gentle else on_a_bad_day(error)

    def failed(self, error: BaseException) -> None:
        if self._failure is None:
            self.note(f"FAILED: {error!r}")
            self._failure = error

    def check_alive(self) -> None:
        if (failure := self._failure or self.captured.failure) is not None:
            raise failure

    def check_nothing_runs(self, process: Process) -> None:
        """A process that was closed in order has left nothing running."""
        if process.tasks:
            raise PromiseBroken("I12", f"{process.name} is closed, and tasks are left: {'; '.join(process.tasks)}")

    # ── what is written ──────────────────────────────────────────────────────────────────────────────────────────────

    def _on_topic(self, path: str, old: Topic | None, new: Topic) -> None:
        self.layouts.on_topic(path, old, new)
        self.scaling.on_topic(path, old, new)
        if old is not None and old.transition is not None and new.deleting and not old.deleting:
            self.counts.deletions_of_changing_topics += 1
        if path == PATH and old is not None and old.transition != new.transition is not None:
            # Not as a part of the broker that writes this: its end would end what follows.
            asyncio.get_running_loop().call_soon(self._on_transition, new.transition, context=OUTSIDE)

    def _steady_subscriptions(self, path: str) -> list[str]:
        names = [*self.subscriptions, *self.queues.names, *([] if self.retention else [RACED])]
        return names if path == PATH else []

    def _on_transaction(self, operations: Sequence[Operation]) -> None:
        self.cursors.on_transaction(operations)
        self.layouts.on_transaction(operations)
        self.ends.on_transaction(operations)
        self.queues.on_transaction(operations)

    def _on_record(self, path: str, descriptor: str, record: Ownership) -> None:
        self.layouts.on_record(path, descriptor, record)
        if self.inspector.on_record(path, descriptor, record):
            asyncio.get_running_loop().call_soon(self._on_log_ended, record.owner, context=OUTSIDE)

    def _times(self) -> Times:
        """Return the real time, and what the clock of the cluster leader says."""
        now_s = self.simulation.clock.monotonic()
        entry = self.store._server.get(paths.CLUSTER_LEADER)
        leader = self.machines.get(entry.value.decode()) if entry is not None else None
        if leader is None or now_s - leader.jumped_at < JUMP_S:
            return Times(now_s, None)
        return Times(now_s, leader.clock.now_us())

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_moving(self, record: Ownership) -> None:
        """The worst moment to lose confirms: their segment has moved on when its producer asks again (I10)."""
        if not self.gentle and not self.settling and self.random.random() >= 0.7:
            self._lose_answers(record.owner)

    def _on_transition(self, transition: Transition) -> None:
        """The worst moments of a change: its logs are about to end while their owners' answers do not arrive, or an
        owner dies (I4, I10); or a broker without a part in it goes on with the layout before it. Before that, a
        broker may join that does not know changes."""
        if self.gentle or self.settling:
            return
        if transition.step is not TransitionStep.SEALING:
            if self.random.random() < 0.05:
                self.faults.join_earlier_version(self.random.choice(list(self.machines.values())))
            return
        owners = self.inspector.owners()
        for parent in transition.parents:
            luck, owner = self.random.random(), owners.get(parent)
            if owner is not None and luck < 0.4:
                self._lose_answers(owner)
            if owner is not None and 0.3 < luck < 0.5:
                self.faults.strike(self.machines[owner])
        parts = {owners.get(segment) for segment in (*transition.parents, *transition.child_ids)}
        others = [machine for name, machine in self.machines.items() if name not in parts]
        if others and self.random.random() < 0.7:
            self.faults.let_view_lag(self.random.choice(others))

    def _on_log_ended(self, owner: str) -> None:
        """The worst moment to stand still: no client has heard that the log has ended, so they send more, and the owner
        finds that when its lease is over (I3)."""
        if not self.gentle and not self.settling and self.random.random() < 0.3:
            self.faults.stand_still(self.machines[owner])

    def _lose_answers(self, owner: str) -> None:
        clients = list(self.clients)
        for client in clients:
            self.network.cut(owner, client, one_way=True)

        async def reset() -> None:
            await asyncio.sleep(self.random.uniform(0.01, 1.0))
            for client in clients:
                self.network.reset(owner, client)
                self.network.heal(owner, client)

        self.operator.in_background(reset())

    def add_client(self, name: str = "") -> None:
        client = ClientMachine(self, name or f"client-{next(self._client_numbers)}")
        self.clients[client.name] = client
        self._introduce(client.name)

    def _introduce(self, host: str) -> None:
        for machine in self.machines.values():
            machine.meet(host)
            for other in self.machines:
                if other != machine.id:
                    machine.meet(other)

    def draw_key(self) -> bytes:
        """Draw a key. Where the layout follows the load, the load is uneven."""
        number = self.random.randrange(8)
        return b"key-%d" % (min(number, self.random.randrange(8)) if self.scales else number)

    def subscription_for(self, client: str) -> str:
        if client.startswith("last-"):
            return client.removeprefix("last-")
        return self.random.choice([*self.subscriptions, *self.subscriptions, *self.operator.brief])

    def url_of(self, brokers: Iterable[str]) -> str:
        return "braid://" + ",".join(f"{name}:{PORT}" for name in brokers)

    @property
    def most_lease_s(self) -> float:
        return max(machine.lease_ttl_s for machine in self.machines.values())

    def client(self, host: str, brokers: Iterable[str] | None = None) -> Client:
        """Make a client on a host of its own, which knows these brokers, or all."""
        self._introduce(host)
        return connect(
            self.url_of(brokers or self.machines),
            timeout=self.patience_s or 5.0,
            name=host,
            network=self.network.host(host),
            clock=self.simulation.clock,
            random=self.random,
        )


def simulate_broker(seed: int, favoured: str = "") -> Counts:
    """Run one seed with one broker; see `simulate_cluster`."""
    return _simulate(seed, ONE_BROKER, favoured)


def simulate_cluster(seed: int, favoured: str = "") -> Counts:
    """Run one seed with two to four brokers. An error has the seed and the last lines of the log in its notes.

    `favoured` is what happens as often as everything else together: `move`, `freeze`, or another name of a fault.
    A name that no fault has is an error.
    """
    return _simulate(seed, SEVERAL_BROKERS, favoured)


def simulate_replicas(seed: int) -> Counts:
    """Run one seed with three to five brokers and a topic with replicas; see `simulate_cluster`."""
    return _simulate(seed, SEVERAL_BROKERS, REPLICAS)


def simulate_queues(seed: int) -> Counts:
    """Run one seed whose topic has a queue subscription: with one broker or several, with and without replicas."""
    alone = Random(f"brokers of {seed}").random() < ALONE_WITH_QUEUES
    return _simulate(seed, ONE_BROKER if alone else SEVERAL_BROKERS, QUEUES)


def _simulate(seed: int, shape: ClusterShape, favoured: str) -> Counts:
    return run_with_log(
        seed,
        lambda simulation, captured: SimulatedCluster(simulation, captured, shape, favoured).run(),
        step_limit=STEP_LIMIT,
    )
