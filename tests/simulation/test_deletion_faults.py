"""Deletions on bad days, each by itself, with whole brokers in virtual time: a topic that is made again under the same
name has nothing to fear from those that are still busy with the old one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import crc32c
import pytest

from braid.client.client import Client
from braid.metadata import paths
from braid.metadata.store import Condition, Listing, Operation, Put, TxnResult
from braid.model.errors import DiskError, TopicNotFound
from braid.storage.objects.store import ObjectStat
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import MemoryObjects
from tests.kits.brokers import PATH, Brokers, read_all, running_brokers
from tests.kits.waiting import until


async def send(client: Client, first: int, count: int) -> None:
    async with client.producer("orders") as producer:
        for number in range(first, first + count):
            assert (await producer.send(b"%d" % number)).offset == number


class SlowFirstListing(MemoryObjects):
    """The first who lists the whole topic, to delete it, is held up before the answer reaches him."""

    def __init__(self, brokers: Brokers) -> None:
        super().__init__(brokers.simulation.clock)
        self.held = asyncio.Event()
        self.go_on = asyncio.Event()

    async def list(self, prefix: str) -> list[ObjectStat]:
        if prefix == PATH and not self.held.is_set():
            self.held.set()
            await self.go_on.wait()
        return await super().list(prefix)


@pytest.mark.parametrize("cut_off", [True, False], ids=["a leader of the past", "the leader"])
async def test_a_slow_finisher_of_a_deletion_does_not_harm_a_new_topic_of_the_same_name(
    cut_off: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, names=()) as brokers:
        objects = SlowFirstListing(brokers)
        brokers.objects = objects
        await brokers.start("a", "b", "c")
        leader = next(name for name, broker in brokers.running.items() if broker.cluster.leader.leading)
        asked = next(name for name in brokers.running if name != leader)
        async with brokers.client(asked, timeout=60) as client:
            await client.admin.create_topic("orders")
            await send(client, 0, 5)
            deleting = asyncio.create_task(brokers.call(asked, "delete_topic", topic="orders", force=True))
            await objects.held.wait()
            if cut_off:
                brokers.store_of(leader).disconnect()
            else:
                await asyncio.sleep(30)
                assert not deleting.done()
                objects.go_on.set()
            await deleting
            await client.admin.create_topic("orders")
            await send(client, 0, 3)
            brokers.store_of(leader).reconnect()
            objects.go_on.set()
            await asyncio.sleep(20)
            await send(client, 3, 3)
            assert await read_all(client, 6) == [b"%d" % number for number in range(6)]


async def test_a_broker_that_cannot_remove_its_files_yet_leaves_a_new_topic_of_the_same_name_alone(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        if brokers.owner(0) != "a":
            await brokers.move(0, "a")
        await send(client, 0, 5)
        context = brokers.running["b"].resources.storage
        sync_folder = context.disk.sync_folder
        failed = asyncio.Event()

        async def failing(folder: str) -> None:
            if not failed.is_set():
                failed.set()
                raise DiskError("the disk does not answer today")
            await sync_folder(folder)

        context.disk.sync_folder = failing  # type: ignore[method-assign]
        await brokers.call("a", "delete_topic", topic="orders", force=True)
        assert failed.is_set()
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        if brokers.owner(0) != "b":
            await brokers.move(0, "b")
        await send(client, 0, 3)
        await asyncio.sleep(10)  # The next try comes.
        await send(client, 3, 3)
        assert await read_all(client, 6) == [b"%d" % number for number in range(6)]


async def test_what_a_copy_leaves_that_a_deletion_overtook_is_not_taken_for_history_of_a_new_topic(
    simulation: Simulation,
) -> None:
    """Chunks are named by their offsets and epoch: those of the new topic have the same names."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=60) as client:
        left: dict[str, bytes] = {}
        for value in (b"old", b"new"):
            await client.admin.create_topic("orders")
            await until(lambda: brokers.owner(0))
            if brokers.owner(0) != "a":
                await brokers.move(0, "a")
            async with client.producer("orders") as producer:
                await producer.send(value)
            await brokers.move(0, "b")
            if value == b"old":
                objects = brokers.running["b"].resources.storage.objects
                for stat in await objects.list(PATH):
                    left[stat.name] = await objects.read(stat.name, 0, stat.size)
                await brokers.call("a", "delete_topic", topic="orders", force=True)
                for name, content in left.items():
                    await brokers.running["c"].resources.storage.objects.create(name, [content])
        await brokers.move(0, "c")
        assert await read_all(client, 1) == [b"new"]


async def test_a_sender_of_the_past_leaves_nothing_in_a_new_topic_of_the_same_name(simulation: Simulation) -> None:
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        broker = brokers.running[brokers.owner(0)]
        await send(client, 0, 3)
        (segment,) = broker.segments.all()
        about = {"segment": str(segment.name), "topic_id": segment.topic_id + 1, "revision": 1}
        with pytest.raises(TopicNotFound):
            await broker.segment_host.incoming.list_history(about)
        piece = {"object": "0.chunk", "start": 0, "size": 1, "checksum": crc32c.crc32c(b"x")}
        with pytest.raises(TopicNotFound):
            await broker.segment_host.incoming.put_history({**about, **piece}, b"x")
        await send(client, 3, 3)
        assert await read_all(client, 6) == [b"%d" % number for number in range(6)]


async def test_a_deletion_ends_although_a_segment_began_to_be_served_in_that_moment(simulation: Simulation) -> None:
    """Opening it was cancelled, but what it had asked of the metadata store happens all the same, a little later."""
    async with running_brokers(simulation, ("a",)) as brokers:
        store = brokers.store_of("a")
        txn, listing = store.txn, store.list
        asked, removing = asyncio.Event(), asyncio.Event()

        async def late(conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
            asked.set()
            await removing.wait()
            return await txn(conditions, operations)

        async def slow_txn(conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
            serves = any(isinstance(each, Put) and b'"SERVING"' in each.value for each in operations)
            return await (asyncio.shield(late(conditions, operations)) if serves else txn(conditions, operations))

        async def told_list(prefix: str) -> Listing:
            if asked.is_set() and prefix.startswith(paths.topic_storage_prefix(PATH)):
                removing.set()
            return await listing(prefix)

        store.txn, store.list = slow_txn, told_list  # type: ignore[method-assign]
        creating = asyncio.create_task(brokers.call("a", "create_topic", topic="orders"))
        await asked.wait()
        async with asyncio.timeout(60):
            await brokers.call("a", "delete_topic", topic="orders", force=True)
        await creating
        assert (await brokers.store.list(paths.topic_segments_prefix(PATH))).entries == ()
