"""Brokers that stop while others, or their own disks, take their time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from braid.metadata.memory import Fault
from braid.model.errors import DiskError, ShuttingDown, TransitionRefused
from braid.model.ownership import OwnershipState
from braid.ports.disk import Buffer
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import MemoryObjects
from tests.kits.brokers import PATH, running_brokers
from tests.kits.waiting import until


async def test_a_broker_that_stops_waits_neither_for_others_to_delete_their_part_nor_for_ever_for_its_own_disk(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=3)
        await until(lambda: {brokers.owner(each) for each in range(3)} == {"a", "b", "c"})

        async def failing(_: str) -> None:
            raise DiskError("the disk does not answer today")

        for name in ("a", "b"):
            brokers.running[name].resources.storage.disk.sync_folder = failing  # type: ignore[assignment, method-assign]
        for asked in ("c", "a"):  # One whose own part is done, and one whose own part never is.
            deleting = asyncio.create_task(brokers.call(asked, "delete_topic", topic="orders", force=True))
            await asyncio.sleep(5)
            async with asyncio.timeout(15):
                await brokers.stop(asked)
            with pytest.raises((ShuttingDown, asyncio.CancelledError)):
                await deleting


async def test_a_broker_without_a_lease_stops_while_a_child_that_was_taken_back_is_to_be_removed(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders")
        await until(lambda: bool(brokers.owner(0)))
        brokers.kill(brokers.owner(0))  # The split waits for the parent, and can be taken back.
        splitting = asyncio.create_task(client.admin.split("orders", 0))
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        leader = next(name for name, each in brokers.running.items() if each.cluster.leader.leading)
        stopping = next(name for name in (brokers.owner(1), brokers.owner(2)) if name != leader)
        broker = brokers.running[stopping]
        brokers.store_of(leader).lag()  # It does not give the child to another broker.
        brokers.store_of(stopping).fault = lambda _request: Fault.UNAVAILABLE  # Its view goes on.
        await until(lambda: not broker.cluster.registration.may_act())
        aborting = asyncio.create_task(brokers.call(leader, "abort_transition", topic="orders"))
        await until(lambda: bool([*broker.group_host.removal._removing]))
        await brokers.stop(stopping)
        brokers.store_of(leader).catch_up()
        await aborting
        with pytest.raises(TransitionRefused, match="aborted"):
            await splitting


class SlowObjects(MemoryObjects):
    """Chunks take long, from a moment on."""

    chunk_s = 0.0

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if name.endswith(".chunk"):
            await asyncio.sleep(self.chunk_s)
        await super().create(name, parts)


async def test_a_broker_that_stops_in_the_middle_of_a_hand_over_ends_it_first(simulation: Simulation) -> None:
    """Cut short, the segment would wait for the return of a broker that left in order."""
    async with running_brokers(simulation, ()) as brokers:
        brokers.objects = objects = SlowObjects(brokers.simulation.clock)
        await brokers.start("a", "b")
        async with brokers.client(timeout=60) as client:
            await client.admin.create_topic("orders")
            await until(lambda: brokers.owner(0))
            if brokers.owner(0) != "a":
                await brokers.move(0, "a")
            async with client.producer("orders") as producer:
                await producer.send(b"0")
                owners = brokers.running["a"].cluster.owners
                draining = asyncio.Event()

                def on_change(_: object) -> None:
                    (record,) = owners.of_topic(PATH).values()
                    if record.state is OwnershipState.DRAINING:
                        objects.chunk_s = 3.0
                        draining.set()
                    elif record.move is not None:
                        sending.append(asyncio.create_task(producer.send(b"1")))

                owners.table.on_change.append(on_change)
                sending: list[asyncio.Task[object]] = []
                moving = asyncio.create_task(brokers.move(0, "b"))
                await draining.wait()
                await brokers.stop("a")
                await moving
                await asyncio.gather(*sending)
                assert (await producer.send(b"2")).offset == 1 + len(sending)
