"""Several real brokers and real clients under every fault, in virtual time.

Two to four brokers share one metadata store and, as the seed decides, one object store or nothing; each has a machine
with a disk and a clock of its own. Clients that know all brokers publish and consume (`broker_clients.py`). An operator
moves segments, also several at once and to brokers that die, drains brokers, seeks, makes and deletes subscriptions and
topics (`cluster_operator.py`). Meanwhile brokers crash, between any two of their writes, stop in order, stand still
past their lease and are cut off from each other, from clients and from the metadata (`cluster_faults.py`).

Some seeds are *gentle*: segments move and brokers stop in order, nothing breaks. Then no client may meet any error.
Some are *lossy*: a segment whose broker is gone is continued by another one, by its policy or by the operator, and what
only the first one's disk held is lost, no more.

Checked all along: the metadata, change by change (`ownership_checker.py`); that what is confirmed is confirmed by the
one owner, under a lease that lives, in epochs that rise (I3); that no segment goes to two consumers of a subscription
(I4); what clients are told and see (`topic_history.py`: I1, I2, I4, I5, I7, I10). In the end the faults stop;
everything has to be served, read, acked and drained within a bounded time; the log is read back by a client and
straight from storage; and when its topic is deleted, nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final

import msgspec

from braid.broker.config import BrokerConfig, CursorConfig, GroupConfig, Limits
from braid.client.client import Client, connect
from braid.metadata.memory import MemoryStore
from braid.model.errors import BraidError, ClientClosed, ProducerFull
from braid.model.ownership import Ownership
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.ownership_checker import OwnershipChecker
from braid.testing.checkers.topic_history import TopicHistory
from braid.testing.scenarios.broker_clients import TOPIC, ClientMachine, Saved, on_a_bad_day
from braid.testing.scenarios.broker_simulation import LogCapture, run_with_log
from braid.testing.scenarios.cluster_faults import ClusterFaults
from braid.testing.scenarios.cluster_inspector import ClusterInspector
from braid.testing.scenarios.cluster_machine import ClusterMachine
from braid.testing.scenarios.cluster_operator import RACED, SIDE_TOPICS, Operator
from braid.testing.sim.loop import Process, Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import Faults, MemoryObjects

PORT: Final = 6_660
SETTLE_S: Final = 240.0
"""When the faults are over: leases, graces and pauses run out, dead connections are noticed, everything is read."""
STEPS: Final = 20
ZOMBIES: Final = "zombies"
"""What may be favoured, beside the names of faults and of an operator's work: brokers that come back when others have
continued their segments."""
STEP_LIMIT: Final = 3_000_000
"""Of the loop: some twenty times what a seed takes."""


class Counts(msgspec.Struct):
    """What a simulation did; adds up over seeds."""

    seeds: int = 0
    gentle: int = 0
    lossy: int = 0
    local: int = 0
    """Seeds whose brokers share no storage."""
    records: int = 0
    confirmed: int = 0
    failed: int = 0
    handed_out: int = 0
    moves: int = 0
    """Segments that another broker serves than before."""
    moves_asked: int = 0
    """Calls that succeeded."""
    drains: int = 0
    accepted_losses: int = 0
    recoveries: int = 0
    power_losses: int = 0
    kills: int = 0
    crashes_at_writes: int = 0
    orderly_stops: int = 0
    freezes: int = 0
    metadata_outages: int = 0
    connections_cut: int = 0
    seeks: int = 0
    races: int = 0
    """Of seeks and skips at the same time."""
    side_topics: int = 0

    def add(self, other: Counts) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class Cluster:
    """The world of one simulation. Implements `broker_clients.World`."""

    def __init__(self, simulation: Simulation, captured: LogCapture, steps: int, favoured: str) -> None:
        self.simulation = simulation
        self.random: Random = simulation.random
        self.steps = steps
        self.favoured = favoured
        self.captured = captured
        self.note = captured.note
        self.counts = Counts(seeds=1)
        random = self.random
        self.gentle = random.random() < 0.2 and not favoured
        self.durability = random.choice(["fsync", "fsync", "fsync", "fsync", "memory"])
        self.segments = random.randint(1, 4)
        self.zombies = favoured == ZOMBIES
        self.shared = MemoryObjects(simulation.clock) if random.random() < 0.6 or self.zombies else None
        # Without shared storage, a loss is all that a broker has: there is nothing left to compare.
        self.lossy = not self.gentle and self.shared is not None and (random.random() < 0.3 or self.zombies)
        self.counts.gentle, self.counts.lossy = int(self.gentle), int(self.lossy)
        self.counts.local = int(self.shared is None)
        self.network = SimulatedNetwork(random)
        self.store = MemoryStore(simulation.clock)
        self.inspector = ClusterInspector(self)
        self.ownership = OwnershipChecker(self.store, captured.note)
        self.ownership.on_accepted_loss = self.inspector.on_accepted_loss
        self.ownership.on_sealed = self.inspector.on_sealed
        self.ownership.on_moving = self._on_moving
        self.history = TopicHistory(survives_power_loss=self.durability == "fsync", note=captured.note)
        names = [f"b{number}" for number in range(1, random.randint(2, 4) + 1)]
        self.url = "braid://" + ",".join(f"{name}:{PORT}" for name in names)
        self.machines = {
            name: ClusterMachine(simulation, self.network, self.store, self._config(name), self.shared)
            for name in names
        }
        if self.zombies:  # Then they often stop in the middle of an export.
            for machine in self.machines.values():
                machine.object_faults = Faults(slow=0.5, slowest_s=3.0)
        self.clients: dict[str, ClientMachine] = {}
        self.publishing = True
        self.settling = False
        self.saved: dict[str, Saved] = {}
        self.producers = count(1)
        self.patience_s = 90.0 if self.gentle else None
        self.subscriptions = ["calm", "moved"]
        self.operator: Operator
        self.faults: ClusterFaults
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
                heartbeat_s=random.choice([0.5, 2.0]),
                hello_timeout_s=2.0,
                read_bytes=random.choice([1, 5_000, 1 << 20]),
            ),
            cursors=CursorConfig(flush_s=random.choice([0.1, 1.0, 60.0]), flush_acks=random.choice([1, 20, 10_000])),
            groups=GroupConfig(
                session_grace_s=random.choice([0.3, 3.0]), release_timeout_s=random.choice([0.5, 2.0, 10.0])
            ),
        )

    # ── the course of it ─────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> Counts:
        try:
            return await self._run()
        finally:
            for client in self.clients.values():
                client.crash()
            for machine in self.machines.values():
                machine.stop(power_loss=False)

    async def _run(self) -> Counts:
        watching = [asyncio.create_task(self.inspector.watch()), asyncio.create_task(self.ownership.watch(self.failed))]
        self.faults = ClusterFaults(self)
        for machine in self.machines.values():
            await self.faults.start(machine)
        client = self._operator_client()
        await client.open()
        self.operator = Operator(self, client)
        await self._create_topic(client)
        for _ in range(self.random.randint(1, 3)):
            self.add_client()
        await self._inject_faults()
        await self._settle()
        await self._end()
        await client.close()
        for task in watching:
            task.cancel()
        await asyncio.wait(watching)
        self._check_alive()
        return self.counts

    async def _create_topic(self, client: Client) -> None:
        policy: dict[str, Any] = {}
        if self.lossy and (self.random.random() < 0.5 or self.zombies):
            policy = {"on_owner_loss": "continue", "owner_loss_after_ms": self.random.choice([0, 3_000])}
        await client.admin.create_topic(TOPIC, segments=self.segments, durability=self.durability, **policy)
        for name in self.subscriptions:
            await client.admin.create_subscription(TOPIC, name, start="earliest")
            self.history.subscription(name)
        await client.admin.create_subscription(TOPIC, RACED, start="earliest")

    async def _inject_faults(self) -> None:
        actions = self.faults.actions(self.favoured)
        chosen = self.random.choices([action for action, _ in actions], [weight for _, weight in actions], k=self.steps)
        for action in chosen:
            await action()
            await asyncio.sleep(self.random.uniform(0, 1.0))
            self._check_alive()

    async def _settle(self) -> None:
        """The faults are over. Everything recovers by itself and comes to its end."""
        self.note("the faults are over")
        self.settling = True
        for machine in self.machines.values():
            machine.forget_crash()
            machine.thaw()
            machine.behave()
        self.network.heal()
        self.network.loss = 0.0
        self.network.latency_s = (100e-6, 5e-3)
        await self._ended(self.operator.background, "what was begun")
        self.publishing = False
        await self._until(self.inspector.all_registered, "every broker has a lease")
        for name in self.machines:
            await self.operator.surely(partial(self.operator.client.admin.activate, name))
        await self.operator.delete_brief_subscriptions()
        for name in SIDE_TOPICS:
            # A broker that was away keeps its files of a topic that was deleted meanwhile, until it sees one of that
            # name deleted: it must not take a topic that the metadata does not have for one that was deleted.
            await self.operator.delete_topic(name)
            await self.operator.create_topic(name)
            await self._delete_topic(name)
        for name in self.subscriptions:
            if self.history.subscription(name).unknown:
                await self.operator.seek_back(name)
            self.add_client(f"last-{name}")
        await self._until(self.inspector.all_served, "every segment is served, and none is about to move")
        await self._until(lambda: not any(client.producers for client in self.clients.values()), "producers have ended")
        await self._until(self.inspector.all_read, "every subscription is read to its end")
        await self._until(self.inspector.all_acked, "every ack has arrived")
        await self._drain_one()
        await self.faults.restart_in_order(self.random.choice(list(self.machines.values())))
        await self._until(self.inspector.all_served, "every segment is served after an orderly restart")
        await self._until(self.inspector.all_acked, "every ack has survived a move and an orderly stop")
        for client in self.clients.values():
            client.leaving.set()
        await self._ended([client.life for client in self.clients.values()], "clients")
        for client in self.clients.values():
            self.check_nothing_runs(client.process)
        await self._until(self.inspector.all_acked, "all is acked after all clients have left in order")

    async def _drain_one(self) -> None:
        drained = self.random.choice(list(self.machines))
        admin = self.operator.client.admin
        self.note(f"{drained} is to be drained")
        await self.operator.surely(lambda: admin.drain(drained))
        await self._until(lambda: drained not in self.inspector.owners().values(), f"{drained} is drained")
        await self._until(self.inspector.all_acked, "every ack has survived the moves")
        await self.operator.surely(lambda: admin.activate(drained))

    async def _end(self) -> None:
        for machine in self.machines.values():
            await self.faults.close(machine)
        for machine in self.machines.values():
            if self.history.survives_power_loss and self.random.random() < 0.5:
                machine.disk.crash()
        for machine in self.machines.values():
            await self.faults.start(machine)
        await self._until(self.inspector.all_served, "every segment is served after everybody was stopped")
        self.inspector.look_around()
        log = await self.inspector.read_storage()
        self.history.check_log(log)
        read = await self.inspector.read_as_client(log)
        if read != log:
            raise PromiseBroken("I1", "a client reads another log than storage holds")
        self.counts.records = sum(map(len, log.values()))
        self.counts.confirmed = len(self.history.confirmed)
        self.counts.failed = sum(given.failed for given in self.history.given.values())
        self.counts.handed_out = sum(
            len(handed) for each in self.history.subscriptions.values() for handed in each.handed.values()
        )
        self.counts.moves, self.counts.accepted_losses = self.ownership.moves, self.ownership.accepted_losses
        await self._delete_topic(TOPIC)
        for machine in self.machines.values():
            await self.faults.close(machine)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self.simulation.clock.monotonic() + SETTLE_S
        while not condition():
            self._check_alive()
            if self.simulation.clock.monotonic() > deadline:
                raise PromiseBroken("progress", f"not after {SETTLE_S:g} s: {what}; {self.inspector.whereabouts()}")
            await asyncio.sleep(0.2)

    async def _ended(self, tasks: Iterable[asyncio.Task[Any]], what: str) -> None:
        tasks = list(tasks)
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=SETTLE_S)
        self._check_alive()
        if pending:
            stuck = "; ".join(str(task.get_stack(limit=1)) for task in pending)
            raise PromiseBroken("progress", f"{what} did not come to an end within {SETTLE_S:g} s: {stuck}")

    def explains(self, error: BraidError) -> bool:
        return isinstance(error, ClientClosed | ProducerFull) if self.gentle else on_a_bad_day(error)

    def failed(self, error: BaseException) -> None:
        if self._failure is None:
            self.note(f"FAILED: {error!r}")
            self._failure = error

    def _check_alive(self) -> None:
        if (failure := self._failure or self.captured.failure) is not None:
            raise failure

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def _on_moving(self, record: Ownership) -> None:
        """The worst moment to lose confirms: what they are about has moved on when its producer asks again (I10)."""
        if self.gentle or self.settling or self.random.random() < 0.7:
            return
        owner, clients = record.owner, list(self.clients)
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

    def subscription_for(self, machine: str) -> str:
        if machine.startswith("last-"):
            return machine.removeprefix("last-")
        return self.random.choice([*self.subscriptions, *self.subscriptions, *self.operator.brief])

    def _operator_client(self) -> Client:
        self._introduce("operator")
        return connect(
            self.url,
            timeout=self.patience_s or 5.0,
            name="operator",
            network=self.network.host("operator"),
            clock=self.simulation.clock,
            random=self.random,
        )

    # ── the end ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def stored_cursor(self, subscription: str, segment: int) -> int:
        return self.inspector.stored_cursor(subscription, segment)

    def least_end(self, segment: int) -> int:
        return self.inspector.least_end(segment)

    async def _delete_topic(self, topic: str) -> None:
        """What a deleted topic leaves is nothing. Brokers that owned nothing of it remove their files by themselves."""
        await self.operator.delete_topic(topic)
        path = f"/public/default/{topic}/"
        objects = [name for name in (self.shared._contents if self.shared is not None else ()) if path in f"/{name}"]
        keys = [entry.key for entry in self.store._server.list("/").entries if path in f"{entry.key}/"]
        if objects or keys:
            raise PromiseBroken("deleting", f"topic {topic} is deleted and has left {objects} and {keys}")

        def files() -> list[str]:
            return [
                f"{each.id}:{file}" for each in self.machines.values() for file in each.disk.paths() if path in file
            ]

        for _ in range(100):
            if not files():
                return
            await asyncio.sleep(0.1)
        raise PromiseBroken("deleting", f"topic {topic} is deleted and has left {files()}")

    def check_nothing_runs(self, process: Process) -> None:
        """What was closed in order has left nothing behind."""
        if process.tasks:
            raise PromiseBroken("I12", f"{process.name} is closed, and tasks are left: {'; '.join(process.tasks)}")


def simulate_cluster(seed: int, steps: int = STEPS, favoured: str = "") -> Counts:
    """Run one seed; raises with the seed, and the last lines of the log, in notes. `favoured`: what is to happen more
    often than anything else (`move`, `freeze`, …), for whoever looks for something in particular."""
    return run_with_log(
        seed, lambda simulation, captured: Cluster(simulation, captured, steps, favoured).run(), step_limit=STEP_LIMIT
    )
