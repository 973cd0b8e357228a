"""What happens to a simulated cluster: brokers crash, stop, freeze and are cut off; disks, storage, network and the
metadata store misbehave; clients come and go; the operator works.

Whoever takes a broker down also brings it up again, beside everything else and after a while; until then the machine is
`busy`, and nobody else touches it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from braid.model.errors import BraidError, TimedOut
from braid.testing.checkers.history import PromiseBroken
from braid.testing.scenarios.cluster_machine import ClusterMachine

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster_simulation import Cluster

Action = Callable[[], Coroutine[Any, Any, None]]

OPEN_TIMEOUT_S = 30.0
CLOSE_TIMEOUT_S = 90.0
"""An orderly stop hands segments over, waits for the disk, and a second for clients that do not read."""


class ClusterFaults:
    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._random = cluster.random

    def actions(self, favoured: str = "") -> list[tuple[Action, int]]:
        """Each with how often it is chosen; one that is favoured, by name, half of the time."""
        chosen = self._actions()
        if self._cluster.zombies:
            favoured = "freeze"
        total = sum(weight for _, weight in chosen)
        return [(action, total if action.__name__.strip("_") == favoured else weight) for action, weight in chosen]

    def _actions(self) -> list[tuple[Action, int]]:
        operator = self._cluster.operator
        gentle: list[tuple[Action, int]] = [
            (self._rest, 4),
            (operator.move, 8),
            (operator.drain, 3),
            (self._restart, 3),
            (operator.use_side_topic, 2),
            (self._let_client_leave, 2),
            (self._jump_clock, 1),
            (self._let_views_lag, 2),
        ]
        if self._cluster.gentle:
            return gentle
        hard: list[tuple[Action, int]] = [
            (self._crash, 4),
            (self._crash_at_write, 4),
            (self._freeze, 2),
            (self._cut_from_metadata, 2),
            (self._lose_metadata, 1),
            (self._slow_metadata, 1),
            (self._misbehave, 4),
            (self._cut_brokers, 2),
            (self._cut_clients, 2),
            (self._reset, 2),
            (self._change_network, 1),
            (self._crash_client, 2),
            (operator.seek, 2),
            (operator.race, 2),
            (operator.use_brief_subscription, 1),
        ]
        return gentle + hard + ([(operator.recover, 6)] if self._cluster.lossy else [])

    # ── brokers that come and go ─────────────────────────────────────────────────────────────────────────────────────

    async def start(self, machine: ClusterMachine) -> None:
        """Open the broker, with as many tries, and as many crashes in the middle, as it takes."""
        cluster = self._cluster
        while True:
            opening = machine.open()
            if self._random.random() < 0.1 and not cluster.settling:
                await asyncio.wait([opening], timeout=self._random.uniform(0, 0.5))
                if not opening.done():
                    self.stop(machine)
            await asyncio.wait([opening], timeout=OPEN_TIMEOUT_S)
            try:
                if not opening.done():
                    raise TimedOut("the broker did not open")
                machine.broker = opening.result()
            except (BraidError, asyncio.CancelledError) as error:
                cluster.note(f"{machine.id} could not be opened: {error!r}")
                self.stop(machine, power_loss=False)
                await asyncio.sleep(self._random.uniform(0, 0.5))
                continue
            cluster.note(f"{machine.id} is open")
            cluster.inspector.follow(machine)
            return

    def stop(self, machine: ClusterMachine, power_loss: bool | None = None) -> None:
        """The machine loses power, or the process is killed."""
        if machine.process is None:
            return
        cluster = self._cluster
        if power_loss is None:
            power_loss = self._random.random() < 0.5
        if machine.up:
            cluster.inspector.look(machine)
        if power_loss:
            cluster.counts.power_losses += 1
            cluster.history.lost_power(cluster.inspector.ends_on(machine))
        else:
            cluster.counts.kills += 1
        cluster.note(f"{machine.id} {'loses power' if power_loss else 'is killed'}")
        cluster.history.stopped()
        machine.stop(power_loss=power_loss)

    async def close(self, machine: ClusterMachine) -> None:
        """An orderly stop."""
        cluster = self._cluster
        faultless = cluster.settling
        cluster.inspector.look(machine)
        cluster.note(f"{machine.id} stops in order")
        process = machine.process
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
        cluster.history.stopped()
        machine.stop(power_loss=False)

    async def restart_in_order(self, machine: ClusterMachine) -> None:
        await self.close(machine)
        await asyncio.sleep(self._random.choice([0.0, 1.0]))
        await self.start(machine)

    def _idle(self) -> list[ClusterMachine]:
        return [machine for machine in self._cluster.machines.values() if machine.up and not machine.busy]

    def _with_machine(self, work: Callable[[ClusterMachine], Awaitable[None]]) -> None:
        """Do something to a broker that runs, and that nobody does anything to."""
        idle = self._idle()
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

        self._cluster.operator.in_background(do())

    async def _rest(self) -> None:
        await asyncio.sleep(self._random.uniform(0, 2.0))

    async def _crash(self) -> None:
        async def crash(machine: ClusterMachine) -> None:
            again = True
            while again:
                self.stop(machine)
                await asyncio.sleep(self._random.choice([0.0, 0.5, 3.0, 12.0]))
                await self.start(machine)
                again = self._random.random() < 0.2

        self._with_machine(crash)

    async def _crash_at_write(self) -> None:
        """Most steps of moves, openings and the leader's work are writes to the metadata store."""

        async def crash(machine: ClusterMachine) -> None:
            crashed = asyncio.Event()

            def now() -> None:
                self.stop(machine)
                crashed.set()

            machine.crash_at_write(self._random.choice([1, 1, 2, 3, 5, 8]), now)
            try:
                async with asyncio.timeout(5.0):
                    await crashed.wait()
            except TimeoutError:
                machine.forget_crash()
            if crashed.is_set():
                self._cluster.counts.crashes_at_writes += 1
                await asyncio.sleep(self._random.choice([0.0, 0.5, 3.0, 12.0]))
                await self.start(machine)

        self._with_machine(crash)
        if self._random.random() < 0.7:
            await self._cluster.operator.move()

    async def _restart(self) -> None:
        """Stop in order and start again, unless something happens in the middle."""

        async def restart(machine: ClusterMachine) -> None:
            if self._random.random() < 0.7 or self._cluster.gentle:
                return await self.restart_in_order(machine)
            closing = machine.close()
            await asyncio.wait([closing], timeout=self._random.uniform(0, 1.0))
            self.stop(machine)
            return await self.start(machine)

        self._with_machine(restart)

    async def _freeze(self) -> None:
        """Often for longer than the lease lives, and in the middle of a write, which then comes to its end unseen."""

        async def freeze(machine: ClusterMachine) -> None:
            self._cluster.counts.freezes += 1
            for _ in range(self._random.choice([0, 1_000])):
                broker = machine.broker
                if broker is not None and any(each.storage.log.pending_bytes for each in broker.segments.all()):
                    break
                await asyncio.sleep(0.0005)
            self._cluster.inspector.look(machine)
            self._cluster.note(f"{machine.id} freezes")
            machine.freeze()
            await asyncio.sleep(self._random.uniform(0.5, 15.0))
            self._cluster.note(f"{machine.id} goes on")
            machine.thaw()

        self._with_machine(freeze)

    # ── the metadata store, disks and storage ────────────────────────────────────────────────────────────────────────

    async def _cut_from_metadata(self) -> None:
        async def cut(machine: ClusterMachine) -> None:
            assert machine.client is not None
            self._cluster.note(f"{machine.id} is cut from the metadata store")
            machine.client.disconnect()
            await asyncio.sleep(self._random.uniform(0.5, 12.0))
            machine.client.reconnect()

        self._with_machine(cut)

    async def _lose_metadata(self) -> None:
        self._cluster.counts.metadata_outages += 1
        self._cluster.note("the metadata store does not answer")
        clients = [machine.client for machine in self._cluster.machines.values() if machine.client is not None]
        for client in clients:
            client.disconnect()
        await asyncio.sleep(self._random.uniform(0.5, 8.0))
        for client in clients:
            client.reconnect()

    async def _slow_metadata(self) -> None:
        for machine in self._cluster.machines.values():
            machine.delay_s = self._random.choice([(0.0, 0.0), (0.0, 0.05), (0.0, 0.5)])

    async def _let_views_lag(self) -> None:
        """A broker that does not know what others have written."""

        async def lag(machine: ClusterMachine) -> None:
            assert machine.client is not None
            client = machine.client
            client.lag()
            await asyncio.sleep(self._random.uniform(0.05, 3.0))
            client.catch_up()

        self._with_machine(lag)

    async def _misbehave(self) -> None:
        machine = self._random.choice(list(self._cluster.machines.values()))
        # What a failed sync left in the page cache of a topic that had not synced it, a later loss of power takes away
        # from the middle of the log: recovery cannot know. See docs/simulation.md.
        machine.misbehave(syncs_fail=self._cluster.history.survives_power_loss)
        if self._random.random() < 0.5:
            for each in self._cluster.machines.values():
                each.disturb_objects()

    async def _jump_clock(self) -> None:
        machine = self._random.choice(list(self._cluster.machines.values()))
        machine.clock.jump(self._random.choice([-3_600, -5, 5, 3_600]) * 1_000_000)

    # ── the network and the clients ──────────────────────────────────────────────────────────────────────────────────

    async def _cut(self, one: str, others: list[str]) -> None:
        """For a while in which other things happen."""
        network, one_way = self._cluster.network, self._random.random() < 0.5
        self._cluster.counts.connections_cut += 1
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
                if other != broker and self._random.random() < 0.3:
                    cluster.network.reset(broker, other)

    async def _change_network(self) -> None:
        network = self._cluster.network
        network.latency_s = self._random.choice([(100e-6, 5e-3), (100e-6, 5e-3), (1e-6, 1e-5), (0.01, 0.3)])
        network.loss = self._random.choice([0.0, 0.0, 0.02])

    async def _crash_client(self) -> None:
        cluster = self._cluster
        if cluster.clients:
            machine = self._random.choice(list(cluster.clients.values()))
            del cluster.clients[machine.name]
            machine.crash()
            cluster.add_client(machine.name if self._random.random() < 0.5 else "")

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
