"""The faults of a simulated cluster, and how often each happens.

Brokers crash, stop, freeze and are cut off. Disks, shared storage, the network and the metadata store misbehave.
Clients come and go, and the operator works. A fault that takes a broker down also starts it again after a while. Until
then its machine is `busy`: no other fault crashes, stops or freezes that broker. Disks, clocks, the network, shared
storage and the metadata store may misbehave meanwhile.

With several brokers, such a fault goes on while other things happen. One broker alone leaves nothing else to go on, so
the next fault waits until that broker is back.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any, Final

from braid.broker.broker import Broker
from braid.broker.groups.controllers import Controller
from braid.metadata import paths
from braid.metadata.store import Delete
from braid.model.errors import BraidError, TimedOut
from braid.testing.checkers.history import PromiseBroken
from braid.testing.scenarios.inspector import PATH
from braid.testing.scenarios.machine import SLOW_DISK, BrokerMachine
from braid.testing.scenarios.queues.queues import QUEUES
from braid.testing.scenarios.replicas import REPLICAS
from braid.testing.sim.disk import NO_FAULTS

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

Action = Callable[[], Coroutine[Any, Any, None]]

OPEN_TIMEOUT_S: Final = 30.0
OPEN_TRIES: Final = 100
PATIENT_TRIES: Final = 20
"""After so many, the machine behaves: its broker has to open."""
CLOSE_TIMEOUT_S: Final = 60.0
"""An orderly stop hands segments over, waits for the disk, and a second for clients that do not read."""
DOWN_S: Final = (0.0, 0.0, 0.5, 3.0, 12.0)
"""How long a broker that crashed may be away."""
NEW_DISK_S: Final = (0.0, 3.0, 12.0)
"""How long it takes to replace the disk of a broker."""


class ClusterFaults:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._random = cluster.random

    def actions(self, favoured: str = "") -> list[tuple[Action, int]]:
        """Each with how often it is chosen; one that is favoured, by name, half of the time."""
        table = self._gentle() if self._cluster.gentle else self._gentle() + self._hard()
        chosen = [(action, alone if self._cluster.alone else several) for action, alone, several in table]
        if self._cluster.zombies:
            favoured = "freeze"
        elif favoured in (REPLICAS, QUEUES):
            favoured = ""  # They are there, and everything happens as often as otherwise.
        names = [action.__name__.strip("_") for action, _ in chosen]
        if favoured and favoured not in names:
            raise ValueError(f"there is no fault {favoured!r} to favour; the faults are {', '.join(sorted(names))}")
        total = sum(weight for _, weight in chosen)
        return [
            (action, total if name == favoured else weight)
            for name, (action, weight) in zip(names, chosen, strict=True)
        ]

    def _gentle(self) -> list[tuple[Action, int, int]]:
        """What no client notices. The numbers say how often: with one broker, and with several."""
        operator, deletes = self._cluster.operator, 5 if self._cluster.retention else 0
        transitions = 6 if self._cluster.transitions else 0
        replicas, jumps = self._cluster.replicas, 0 if self._cluster.queues.delays else 1
        return [
            (self._rest, 8, 4),
            (operator.move, 0, 8),
            (operator.drain, 0, 3),
            (operator.layouts.change_layout, transitions, transitions),
            (operator.layouts.delete_segment, transitions // 2, transitions // 2),
            (operator.layouts.change_policy, 0, 1 if self._cluster.scales else 0),
            (self._restart, 3, 3),
            (operator.use_side_topic, 2, 2),
            (self._delete_old_records, deletes, deletes),
            (self._let_client_leave, 2, 2),
            (self._jump_clock, jumps, jumps),
            (self._let_views_lag, 1, 2 + transitions // 3),
            (self._downgrade, 0, 1 if transitions and not replicas.there else 0),  # It could hold no replica.
            (replicas.change_replicas, 0, 8 if replicas.change else 0),
        ]

    def _hard(self) -> list[tuple[Action, int, int]]:
        operator = self._cluster.operator
        seeks, sleeps = (5, 2) if self._cluster.transitions else (2, 0)
        replicas, copies = self._cluster.replicas, 1 if self._cluster.replicas.there else 0
        queues = 1 if self._cluster.queues.there else 0
        lags = 12 if queues and copies else 0
        return [
            (self._crash_broker, 5, 4),
            (self._crash_at_write, 2, 4),
            (self._freeze, 2, 2),
            (self._cut_from_metadata, 1, 2),
            (self._lose_metadata, 0, 1),
            (self._slow_metadata, 1, 1),
            (self._misbehave, 6, 4),
            (self._cut_brokers, 0, 2),
            (self._cut_clients, 4, 2),
            (self._reset, 4, 2),
            (self._change_network, 2, 1),
            (self._crash_client, 4, 2),
            (self._freeze_client, 0, sleeps),
            (self._depose_leaders, 0, sleeps),
            (operator.seek, 5, seeks),
            (operator.race, 2, 3),
            (self._cluster.queues.seek, queues, queues),
            (operator.use_brief_subscription, 2, 1),
            (operator.recover, 0, 6 if self._cluster.lossy else 0),
            (self._replace_disk, 0, 3 if self._cluster.lossy else 0),
            (replicas.lose_disk, 0, 5 * copies),
            (replicas.pause, 0, copies),
            (self._cluster.queues.copies.lag, 0, lags),
        ]

    # ── brokers that come and go ─────────────────────────────────────────────────────────────────────────────────────

    async def start(self, machine: BrokerMachine) -> None:
        """Open the broker, with as many tries, and as many crashes in the middle, as it takes."""
        cluster = self._cluster
        for attempt in range(OPEN_TRIES):
            if attempt > PATIENT_TRIES:
                machine.behave()
            opening = machine.open()
            if self._random.random() < 0.15 and not cluster.settling:
                await asyncio.wait([opening], timeout=self._random.uniform(0, 0.5))
                if not opening.done():
                    self.crash(machine)
            await asyncio.wait([opening], timeout=OPEN_TIMEOUT_S)
            try:
                if not opening.done():
                    raise TimedOut("the broker did not open")
                machine.broker = opening.result()
            except (BraidError, asyncio.CancelledError) as error:
                cluster.note(f"{machine.id} could not be opened: {error!r}")
                self.crash(machine, power_loss=False)
                await asyncio.sleep(self._random.uniform(0, 0.5))
                continue
            cluster.note(f"{machine.id} is open")
            cluster.inspector.follow(machine)
            return
        raise PromiseBroken("progress", f"{machine.id} could not be opened in {OPEN_TRIES} tries")

    def crash(self, machine: BrokerMachine, power_loss: bool | None = None) -> None:
        """The machine loses power, or the process is killed."""
        if machine.process is None:
            return
        cluster = self._cluster
        if power_loss is None:
            power_loss = self._random.random() < 0.6
        cluster.inspector.look(machine)
        if power_loss:
            cluster.counts.power_losses += 1
            cluster.history.lost_power(cluster.inspector.ends_on(machine))
        else:
            cluster.counts.kills += 1
        cluster.note(f"{machine.id} {'loses power' if power_loss else 'is killed'}")
        cluster.history.stopped()
        machine.crash(power_loss=power_loss)

    async def close(self, machine: BrokerMachine) -> None:
        """Stop in order. Without faults that succeeds, leaves nothing running, and stores all acks that arrived."""
        cluster = self._cluster
        faultless = cluster.settling
        cluster.inspector.look(machine)
        cluster.note(f"{machine.id} stops in order")
        process, acked = machine.process, cluster.inspector.acked_on(machine)
        closing = machine.close()
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
        if not closing.done():
            raise PromiseBroken("progress", f"{machine.id} did not stop in order within {CLOSE_TIMEOUT_S:g} s")
        try:
            closing.result()
        except BraidError as error:
            if faultless:
                raise PromiseBroken("progress", f"an orderly stop failed without a fault: {error!r}") from error
        cluster.counts.orderly_stops += 1
        if faultless:
            assert process is not None
            await asyncio.sleep(0)
            cluster.check_nothing_runs(process)
            cluster.inspector.check_stored(acked)
        cluster.history.stopped()
        machine.crash(power_loss=False)

    async def restart_in_order(self, machine: BrokerMachine) -> None:
        await self.close(machine)
        await asyncio.sleep(self._random.choice([0.0, 1.0]))
        await self.start(machine)

    async def _with_machine(self, work: Callable[[BrokerMachine], Awaitable[None]]) -> None:
        """Do something to a broker that runs, and that is not busy."""
        idle = [machine for machine in self._cluster.machines.values() if machine.up and not machine.busy]
        if not idle:
            return
        machine = self._random.choice(idle)
        leader = next((each for each in idle if each.broker is not None and each.broker.cluster.leader.leading), None)
        if leader is not None and self._random.random() < 0.3:
            machine = leader
        machine.busy = True

        async def do() -> None:
            try:
                await work(machine)
            finally:
                machine.busy = False

        if self._cluster.alone:
            await do()
        else:
            self._cluster.operator.in_background(do())

    async def _rest(self) -> None:
        await asyncio.sleep(self._random.uniform(0, 2.0))

    async def _crash_broker(self) -> None:
        """Again soon after, now and then."""

        async def crash(machine: BrokerMachine) -> None:
            again = True
            while again:
                self.crash(machine)
                await asyncio.sleep(self._random.choice(DOWN_S))
                await self.start(machine)
                again = self._random.random() < 0.25
                await asyncio.sleep(self._random.uniform(0, 0.1) if again else 0)

        await self._with_machine(crash)

    def strike(self, machine: BrokerMachine) -> None:
        """Crash or freeze a broker that has just done something that others count on, before they have heard of it."""
        if not machine.up or machine.busy:
            return
        machine.busy = True
        freezes = self._random.random() < 0.4

        async def strike() -> None:
            try:
                await asyncio.sleep(self._random.uniform(0, 0.2))
                if freezes:
                    await self.freeze_for(machine, machine.lease_ttl_s * self._random.uniform(0.8, 1.5))
                    return
                self.crash(machine)
                await asyncio.sleep(self._random.choice(DOWN_S))
                await self.start(machine)
            finally:
                machine.busy = False

        self._cluster.operator.in_background(strike())

    def stand_still(self, machine: BrokerMachine) -> None:
        """Freeze a broker for about as long as its lease lives: clients may still wait for it then."""
        if not machine.up or machine.busy:
            return
        machine.busy = True

        async def stand_still() -> None:
            try:
                await self.freeze_for(machine, machine.lease_ttl_s * self._random.uniform(0.6, 1.3))
            finally:
                machine.busy = False

        self._cluster.operator.in_background(stand_still())

    async def _replace_disk(self) -> None:
        """A broker comes back under its id, and its disk does not. An operator hears of it, or nobody."""

        async def replace(machine: BrokerMachine) -> None:
            self._cluster.counts.replaced_disks += 1
            self._lose(machine)
            await self._replace(machine)

        await self._with_machine(replace)
        if self._random.random() < 0.5:
            await self._cluster.operator.recover()

    def lose_disk(self, machine: BrokerMachine) -> None:
        """A broker of a replicated topic loses its disk, and comes back without it."""
        machine.busy = True

        async def replace() -> None:
            try:
                await self._replace(machine)
            finally:
                machine.busy = False

        self._cluster.counts.lost_disks += 1
        self._lose(machine)
        self._cluster.operator.in_background(replace())

    def _lose(self, machine: BrokerMachine) -> None:
        self._cluster.note(f"{machine.id} loses its disk")
        self.crash(machine, power_loss=True)
        machine.replace_disk()

    async def _replace(self, machine: BrokerMachine) -> None:
        await asyncio.sleep(self._random.choice(NEW_DISK_S))
        await self.start(machine)

    async def _crash_at_write(self) -> None:
        """Most steps of moves, openings and the leader's work are writes to the metadata store."""

        async def crash(machine: BrokerMachine) -> None:
            crashed = asyncio.Event()

            def now() -> None:
                self.crash(machine)
                crashed.set()

            machine.crash_at_write(self._random.choice([1, 1, 2, 3, 5, 8]), now)
            try:
                async with asyncio.timeout(5.0):
                    await crashed.wait()
            except TimeoutError:
                machine.forget_crash()
            if crashed.is_set():
                self._cluster.counts.crashes_at_writes += 1
                await asyncio.sleep(self._random.choice(DOWN_S))
                await self.start(machine)

        await self._with_machine(crash)
        if not self._cluster.alone and self._random.random() < 0.7:
            await self._cluster.operator.move()

    async def _restart(self) -> None:
        """Stop in order and start again, unless the machine crashes in the middle."""

        async def restart(machine: BrokerMachine) -> None:
            if self._random.random() < 0.7 or self._cluster.gentle:
                return await self.restart_in_order(machine)
            closing = machine.close()
            await asyncio.wait([closing], timeout=self._random.uniform(0, 1.0))
            self.crash(machine)
            # The process is gone. A close that was handing segments over to other brokers may never end.
            await asyncio.wait([closing], timeout=None if self._cluster.alone else 1.0)
            return await self.start(machine)

        await self._with_machine(restart)

    async def _downgrade(self) -> None:
        """A broker is replaced by one of an earlier version, and later upgraded again."""
        await self._with_machine(self._run_earlier_version)

    def join_earlier_version(self, machine: BrokerMachine) -> None:
        """Let a broker of an earlier version join in the middle of whatever happens."""
        if not machine.up or machine.busy:
            return
        machine.busy = True

        async def join() -> None:
            try:
                await self._run_earlier_version(machine)
            finally:
                machine.busy = False

        self._cluster.operator.in_background(join())

    async def _run_earlier_version(self, machine: BrokerMachine) -> None:
        self._cluster.counts.downgrades += 1
        self._cluster.note(f"{machine.id} is to run an earlier version")
        machine.earlier, machine.upgraded_at = True, math.inf
        try:
            await self._replace_process(machine)
            await asyncio.sleep(self._random.choice([2.0, 5.0, 15.0]))
        finally:
            machine.earlier = False
        await self._replace_process(machine)
        machine.upgraded_at = self._cluster.simulation.clock.monotonic()

    async def _replace_process(self, machine: BrokerMachine) -> None:
        if self._cluster.gentle or self._random.random() < 0.5:
            return await self.restart_in_order(machine)
        self.crash(machine)
        return await self.start(machine)

    async def _freeze(self) -> None:
        """Often for longer than the lease lives, and in the middle of a write, which then comes to its end unseen."""

        async def freeze(machine: BrokerMachine) -> None:
            self._cluster.counts.freezes += 1
            for _ in range(self._random.choice([0, 1_000])):
                broker = machine.broker
                if broker is not None and any(each.storage.log.pending_bytes for each in broker.segments.all()):
                    break
                await asyncio.sleep(0.0005)
            # Clients hold on to a broker that is only just too late.
            just_past_s = machine.lease_ttl_s * self._random.uniform(0.6, 1.2)
            await self.freeze_for(machine, self._random.choice([just_past_s, self._random.uniform(0.5, 15.0)]))

        await self._with_machine(freeze)

    async def freeze_for(self, machine: BrokerMachine, seconds: float) -> None:
        self._cluster.inspector.look(machine)
        self._cluster.note(f"{machine.id} freezes")
        machine.freeze()
        await asyncio.sleep(seconds)
        self._cluster.note(f"{machine.id} goes on")
        machine.thaw(asleep=not self._cluster.transitions or self._random.random() < 0.5)

    # ── the metadata store, disks and storage ────────────────────────────────────────────────────────────────────────

    async def _cut_from_metadata(self) -> None:
        """Often its disk is behind the same broken switch: then the lease ends while batches wait for a sync."""

        async def cut(machine: BrokerMachine) -> None:
            assert machine.metadata is not None
            connection, disk = machine.metadata, machine.disk
            self._cluster.counts.metadata_outages += 1
            self._cluster.note(f"{machine.id} is cut from the metadata store")
            connection.disconnect()
            if self._random.random() < 0.5:
                disk.faults = SLOW_DISK
            await asyncio.sleep(self._random.uniform(0.5, 12.0))
            connection.reconnect()
            if disk.faults is SLOW_DISK:
                disk.faults = NO_FAULTS

        await self._with_machine(cut)

    async def _lose_metadata(self) -> None:
        self._cluster.counts.metadata_outages += 1
        self._cluster.note("the metadata store does not answer")
        machines = self._cluster.machines.values()
        connections = [machine.metadata for machine in machines if machine.metadata is not None]
        for connection in connections:
            connection.disconnect()
        await asyncio.sleep(self._random.uniform(0.5, 8.0))
        for connection in connections:
            connection.reconnect()

    async def _slow_metadata(self) -> None:
        for machine in self._cluster.machines.values():
            machine.metadata_delay_s = self._random.choice([(0.0, 0.0), (0.0, 0.05), (0.0, 0.5)])

    async def _let_views_lag(self) -> None:
        """A broker that does not know what others have written."""
        await self._with_machine(lambda machine: self._lag(machine, self._random.uniform(0.05, 3.0)))

    def let_view_lag(self, machine: BrokerMachine) -> None:
        """For so long that consumers and programs that ask this broker meet what it does not know."""
        if machine.up and not machine.busy:
            self._cluster.operator.in_background(self._lag(machine, self._random.uniform(1.0, 8.0)))

    async def _lag(self, machine: BrokerMachine, seconds: float) -> None:
        connection = machine.metadata
        if connection is None:
            return
        machine.lagging = True
        connection.lag()
        await asyncio.sleep(seconds)
        connection.catch_up()
        machine.lagging = False

    async def _depose_leaders(self) -> None:
        """Another broker becomes the cluster leader, or the topic's controller, and the former one does not hear of it:
        for a while, two believe that they lead."""
        key = self._random.choice([paths.CLUSTER_LEADER, paths.controller(PATH)])
        entry = self._cluster.store._server.get(key)
        if entry is None:
            return
        leads = key == paths.CLUSTER_LEADER
        machine = self._cluster.machines[entry.value.decode() if leads else Controller.from_json(entry.value).broker]
        if not machine.up or machine.busy:
            return
        self._cluster.note(f"{machine.id} is deposed: {key}")
        self.let_view_lag(machine)
        await asyncio.sleep(0)  # From now on it hears nothing.
        await self._cluster.store.txn([], [Delete(key)])

    async def _delete_old_records(self) -> None:
        self.keep_house()

    def keep_house(self) -> list[asyncio.Task[None]]:
        """Let each broker delete old records and drop old segments, which it does once a minute by itself."""

        async def keep(broker: Broker) -> None:
            await broker.segment_host.housekeeper.go_round()
            await broker.group_host.pruning.go_round()

        return [
            machine.process.start(keep(machine.broker), name="keep house")
            for machine in self._cluster.machines.values()
            if machine.broker is not None and machine.process is not None and machine.up
        ]

    async def _misbehave(self) -> None:
        machine = self._random.choice(list(self._cluster.machines.values()))
        # After a failed sync, the page cache of a topic that does not sync each record holds bytes that the disk does
        # not have. A later loss of power takes them from the middle of the log, and recovery cannot know. See
        # docs/simulation.md.
        machine.misbehave(syncs_fail=self._cluster.history.survives_power_loss)
        if self._random.random() < 0.5:
            for each in self._cluster.machines.values():
                each.disturb_objects()

    async def _jump_clock(self) -> None:
        machine = self._random.choice(list(self._cluster.machines.values()))
        machine.jump_clock(self._random.choice([-3_600, -5, 5, 3_600]))

    # ── the network and the clients ──────────────────────────────────────────────────────────────────────────────────

    async def _cut(self, one: str, others: list[str]) -> None:
        """For a while in which other things happen."""
        network, one_way = self._cluster.network, self._random.random() < 0.5
        self._cluster.counts.connections_cut += len(others)
        for other in others:
            pair = (one, other) if self._random.random() < 0.5 else (other, one)
            network.cut(*pair, one_way=one_way)

        async def heal() -> None:
            await asyncio.sleep(self._random.uniform(0.1, 10.0))
            for other in others:
                network.heal(one, other)

        self._cluster.operator.in_background(heal())

    async def _cut_brokers(self) -> None:
        brokers = list(self._cluster.machines)
        one = self._random.choice(brokers)
        others = [each for each in brokers if each != one and self._random.random() < 0.7]
        await self._cut(one, others)

    async def _cut_clients(self) -> None:
        one = self._random.choice(list(self._cluster.machines))
        await self._cut(one, [each for each in self._cluster.clients if self._random.random() < 0.5])

    async def _reset(self) -> None:
        cluster = self._cluster
        hosts = [*cluster.machines, *cluster.clients, cluster.operator.client.name]
        for broker in cluster.machines:
            for other in hosts:
                if other != broker and self._random.random() < 0.5:
                    cluster.network.reset(broker, other)

    async def _change_network(self) -> None:
        network = self._cluster.network
        network.latency_s = self._random.choice([(100e-6, 5e-3), (100e-6, 5e-3), (1e-6, 1e-5), (0.01, 0.5)])
        network.loss = self._random.choice([0.0, 0.0, 0.02])

    async def _crash_client(self) -> None:
        cluster = self._cluster
        if cluster.clients:
            machine = self._random.choice(list(cluster.clients.values()))
            cluster.counts.client_crashes += 1
            del cluster.clients[machine.name]
            machine.crash()
            cluster.add_client(machine.name if self._random.random() < 0.5 else "")

    async def _freeze_client(self) -> None:
        """A machine of a client sleeps through whatever happens to its topic, and goes on with all that it had sent."""
        cluster = self._cluster
        if not cluster.clients:
            return
        machine = self._random.choice(list(cluster.clients.values()))
        cluster.counts.client_freezes += 1
        cluster.note(f"{machine.name} sleeps")
        machine.freeze()

        async def thaw() -> None:
            await asyncio.sleep(self._random.choice([1.0, 5.0, 15.0]))
            cluster.note(f"{machine.name} wakes up")
            machine.thaw()

        cluster.operator.in_background(thaw())

    async def _let_client_leave(self) -> None:
        cluster = self._cluster
        if not cluster.clients:
            return
        machine = self._random.choice(list(cluster.clients.values()))
        machine.leaving.set()

        async def replace() -> None:
            while not machine.life.done() and cluster.clients.get(machine.name) is machine:
                await asyncio.wait([machine.life], timeout=1.0)
            if cluster.clients.get(machine.name) is machine:
                del cluster.clients[machine.name]
                cluster.add_client()

        cluster.operator.in_background(replace())
