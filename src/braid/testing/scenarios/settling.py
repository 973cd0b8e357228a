"""The end of a simulated cluster: the faults stop, everything comes to rest by itself, and everything is compared.

Every segment is served, every subscription is read and acked to its end, brokers drain and stop in order, and clients
leave: each within a bounded time. Nothing is left running. Then the log is read straight from storage and by a client,
and compared with what clients were told and saw (`topic_history.py`). When the topic is deleted, nothing of it is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from braid.broker.layouts.finalizing import ADOPTION_S
from braid.model.errors import OffsetOutOfRange, SegmentNotFound
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.topic_history import Log
from braid.testing.scenarios.clients import TOPIC, next_offsets, silence
from braid.testing.scenarios.inspector import PATH
from braid.testing.scenarios.machine import BrokerMachine
from braid.testing.scenarios.operator import SIDE_TOPICS

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

SETTLE_S: Final = 180.0
"""When the faults are over: leases, graces and pauses run out, dead connections are noticed, everything is read."""
FINALIZE_S: Final = ADOPTION_S + 20.0
"""When nothing needs the parents of a change, it ends within this time, also beside clients that never tell what they
know."""
REPORT_S: Final = 10.0
"""Within this time, the reports of all brokers tell what clients know."""
DELETED_FILES_S: Final = 10.0
"""Brokers that owned nothing of a topic remove their files of it by themselves, soon after it is deleted."""


class Settling:
    def __init__(self, cluster: SimulatedCluster) -> None:
        self._cluster = cluster
        self._inspector = cluster.inspector
        self._operator = cluster.operator

    async def settle(self) -> None:
        """End the faults. Everything recovers by itself and comes to its end."""
        cluster, inspector = self._cluster, self._inspector
        cluster.note("the faults are over")
        cluster.settling = True
        for machine in cluster.machines.values():
            machine.forget_crash()
            machine.thaw()
            machine.behave()
        cluster.network.heal()
        cluster.network.loss = 0.0
        cluster.network.latency_s = (100e-6, 5e-3)
        await self._ended(self._operator.background, "what was begun")
        cluster.publishing = False
        await self._until(inspector.all_registered, "every broker has a lease")
        for name in cluster.machines:
            await self._operator.surely(partial(self._operator.client.admin.activate, name))
        if cluster.lossy:
            self._operator.in_background(self._operator.recover_all())
        if cluster.scales:
            await self._operator.layouts.stop_scaling()
        await cluster.replicas.settle()
        await self._operator.delete_brief_subscriptions()
        for name in SIDE_TOPICS:
            await self._delete_side_topic(name)
        for name in cluster.subscriptions:
            if cluster.history.subscription(name).unknown:
                await self._operator.seek_back(name)
            cluster.add_client(f"last-{name}")
        await self._until(inspector.layout_is_steady, "every change of the layout has come to its end")
        await self._until(inspector.all_served, "every segment is served, and none is about to move")
        await self._until(self._nobody_publishes, "every producer is done")
        # Records that too few replicas hold are confirmed as soon as enough of them do.
        await self._until(cluster.replicas.all_in_sync, "every replica holds everything")
        await self._until(inspector.all_read, "every subscription is read to its end")
        await self._until(inspector.all_acked, "every ack has arrived")
        await self._operator.let_go_of_parents()
        await self._until(inspector.is_finalized, "the last change of the layout is finalized", FINALIZE_S)
        if cluster.transitions and cluster.retention:
            await self._ended(cluster.faults.keep_house(), "keeping house")  # Nothing holds parents back any more.
        elif cluster.transitions and cluster.random.random() < 0.3:
            await self._operator.layouts.delete_sealed_segments()
            await self._until(inspector.layout_is_steady, "nothing is left of segments that were deleted")
        if not cluster.alone:
            await self._drain_one()
        await cluster.faults.restart_in_order(cluster.random.choice(list(cluster.machines.values())))
        await self._until(inspector.all_served, "every segment is served after an orderly restart")
        await self._until(inspector.all_acked, "every ack has survived an orderly stop")
        await asyncio.sleep(3.0)  # Nothing that was acked for good comes again.
        await self._let_clients_leave()

    async def check_the_end(self) -> None:
        """Compare the log with what everybody was told, and delete the topic."""
        cluster = self._cluster
        for machine in cluster.machines.values():
            await cluster.faults.close(machine)
        for machine in cluster.machines.values():
            if cluster.history.survives_power_loss and cluster.random.random() < 0.5:
                cluster.counts.power_losses += 1
                machine.disk.crash()
        for machine in cluster.machines.values():
            await cluster.faults.start(machine)
        await self._until(self._inspector.all_served, "every segment is served after all brokers were stopped")
        await self._until(cluster.replicas.all_in_sync, "every replica holds everything")
        await cluster.replicas.check_copies()
        self._inspector.look_around()
        stored = await self._inspector.read_storage()
        log = cluster.history.whole(stored)
        cluster.history.check_log(log)
        if await self._inspector.read_as_client(stored) != stored:
            raise PromiseBroken("I1", "a client reads another log than storage holds")
        await self._check_checkpoints(log)
        await cluster.queues.check_the_end(stored)
        cluster.counts.shared_results = cluster.shared_results.stored
        cluster.shared_results.check_whole(log)
        cluster.counts.records = sum(map(len, log.values()))
        cluster.counts.deleted = sum(each is None for records in log.values() for each in records)
        self._count()
        for name in (TOPIC, *cluster.queues.topics):
            await self._delete_topic(name)
        for machine in cluster.machines.values():
            await cluster.faults.close(machine)

    async def _check_checkpoints(self, log: Log) -> None:
        """Let each program go on once more."""
        history = self._cluster.history
        for name, saved in self._cluster.saved.items():
            offsets = next_offsets(saved.checkpoint)
            earliest = dict(history.earliest)
            refusal: OffsetOutOfRange | SegmentNotFound | None = None
            try:
                async with self._operator.client.checkpoint_consumer(TOPIC, start=saved.checkpoint) as consumer:
                    while await consumer.receive_batch(timeout=5.0) is not None:
                        pass
            except (OffsetOutOfRange, SegmentNotFound) as error:
                refusal = error
            self._inspector.look_around()
            history.check_checkpoint(name, offsets, saved.results, log, earliest, refusal, saved.ended)

    def _count(self) -> None:
        counts, history, ownership = self._cluster.counts, self._cluster.history, self._cluster.ownership
        counts.confirmed = len(history.confirmed)
        counts.failed = sum(given.failed for given in history.given.values())
        counts.handed_out = sum(
            len(handed) for each in history.subscriptions.values() for handed in each.handed.values()
        )
        counts.votes = ownership.votes
        counts.moves, counts.accepted_losses = ownership.moves, ownership.accepted_losses
        layouts = self._cluster.layouts
        counts.layouts, counts.layouts_taken_back = layouts.committed, layouts.aborted
        counts.segments_pruned = layouts.pruned
        counts.layouts_timed_out = self._cluster.ends.timed_out
        counts.layouts_by_load = self._cluster.scaling.begun

    # ── brokers and clients ──────────────────────────────────────────────────────────────────────────────────────────

    def _nobody_publishes(self) -> bool:
        """A batch that is still tried again, after a disk that was full, would be stored after the last look."""
        return not any(client.producers for client in self._cluster.clients.values())

    async def _drain_one(self) -> None:
        drained = self._cluster.random.choice(list(self._cluster.machines))
        admin = self._operator.client.admin
        self._cluster.note(f"{drained} is to be drained")
        await self._operator.surely(lambda: admin.drain(drained))
        await self._until(lambda: drained not in self._inspector.owners().values(), f"{drained} is drained")
        await self._until(self._inspector.all_acked, "every ack has survived the moves")
        if self._cluster.transitions and self._cluster.random.random() < 0.4 and not self._cluster.replicas.need_all:
            await self._lose_after_a_change(self._cluster.machines[drained])
        await self._operator.surely(lambda: admin.activate(drained))

    async def _lose_after_a_change(self, machine: BrokerMachine) -> None:
        """A broker without segments dies, and its last report tells of a client that does not know a change. The report
        goes with the lease of the broker, so it does not hold up the end of the change."""
        cluster = self._cluster
        cluster.counts.frozen_reports += 1
        async with cluster.client("silent", [machine.id]) as client:
            await client.routing.topic(PATH)
            silence(client)
            await asyncio.sleep(REPORT_S)
            await self._operator.layouts.terminate_any()
            await self._operator.let_go_of_parents()
            await asyncio.sleep(REPORT_S)
            await client.abandon()
        cluster.faults.crash(machine)
        others_tell = not any(each.silent for each in cluster.clients.values())
        within_s = REPORT_S + cluster.most_lease_s if others_tell else FINALIZE_S
        await self._until(self._inspector.is_finalized, "a change ends without a broker that is gone", within_s)
        await cluster.faults.start(machine)

    async def _let_clients_leave(self) -> None:
        clients = self._cluster.clients.values()
        for client in clients:
            client.leaving.set()
        await self._ended([client.life for client in clients], "clients")
        for client in clients:
            self._cluster.check_nothing_runs(client.process)
        await self._until(self._inspector.all_served, "every segment is served when all clients have left")
        if not self._inspector.all_acked():
            raise PromiseBroken(
                "acks", f"all clients have left in order, not everything is acked: {self._inspector.whereabouts()}"
            )

    # ── topics ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _delete_side_topic(self, name: str) -> None:
        if not self._cluster.alone:
            # A broker that was away keeps its files of a topic that was deleted meanwhile, until it sees one of that
            # name deleted: it must not take a topic that the metadata does not have for one that was deleted.
            await self._operator.delete_topic(name)
            await self._operator.create_topic(name)
        await self._delete_topic(name)

    async def _delete_topic(self, name: str) -> None:
        """A deleted topic leaves nothing."""
        cluster = self._cluster
        await self._operator.delete_topic(name)
        path = f"/public/default/{name}/"
        objects = [
            each for each in (cluster.shared._contents if cluster.shared is not None else ()) if path in f"/{each}"
        ]
        keys = [entry.key for entry in cluster.store._server.list("/").entries if path in f"{entry.key}/"]
        if objects or keys:
            raise PromiseBroken("deleting", f"topic {name} is deleted and has left {objects} and {keys}")
        deadline = cluster.simulation.clock.monotonic() + (0.0 if cluster.alone else DELETED_FILES_S)
        while files := self._files(path):
            if cluster.simulation.clock.monotonic() >= deadline:
                raise PromiseBroken("deleting", f"topic {name} is deleted and has left {files}")
            await asyncio.sleep(0.1)

    def _files(self, path: str) -> list[str]:
        machines = self._cluster.machines.values()
        return [f"{each.id}:{file}" for each in machines for file in each.disk.paths() if path in file]

    # ── waiting ──────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _until(self, condition: Callable[[], bool], what: str, within_s: float = SETTLE_S) -> None:
        clock = self._cluster.simulation.clock
        deadline = clock.monotonic() + within_s
        while not condition():
            self._cluster.check_alive()
            if clock.monotonic() > deadline:
                raise PromiseBroken("progress", f"not after {within_s:g} s: {what}; {self._inspector.whereabouts()}")
            await asyncio.sleep(0.2)

    async def _ended(self, tasks: Iterable[asyncio.Task[Any]], what: str) -> None:
        tasks = list(tasks)
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=SETTLE_S)
        self._cluster.check_alive()
        if pending:
            stuck = [str(task.get_stack(limit=1)) for task in pending]
            stuck += [each for client in self._cluster.clients.values() for each in client.process.tasks]
            raise PromiseBroken("progress", f"{what} did not come to an end within {SETTLE_S:g} s: {'; '.join(stuck)}")
