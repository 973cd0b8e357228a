"""A shared storage belongs to one cluster: brokers of another one refuse it, and change nothing in it."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.cluster.cluster_id import cluster_id
from braid.metadata.memory import Fault, MemoryStore
from braid.model.errors import InvalidConfig, ObjectMissing, ObjectStoreUnavailable
from braid.ports.os_disk import OsDisk
from braid.storage.objects.marked import MARK, MarkedObjects
from braid.storage.objects.urls import open_objects, outer_objects
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects
from tests.kits.storage import World


async def test_the_first_cluster_marks_a_storage_and_the_others_change_nothing_in_it(world: World) -> None:
    ours, theirs = MarkedObjects(world.objects, "ours"), MarkedObjects(world.objects, "theirs")
    await ours.create("folder/object", [b"data"])
    for change in (theirs.create("other", [b""]), theirs.delete("folder/object"), theirs.delete_below("folder")):
        with pytest.raises(
            InvalidConfig, match=r"belongs to cluster ours, and the metadata store to cluster theirs"
        ) as no:
            await change
        assert "If the metadata was lost, restore a backup into an empty store" in str(no.value)
    assert [stat.name for stat in await theirs.list("")] == [MARK, "folder/object"]
    again = MarkedObjects(world.objects, "ours")
    await again.verify()
    await again.delete("folder/object")
    with pytest.raises(ObjectMissing):
        await again.stat("folder/object")


async def test_a_storage_that_does_not_answer_is_compared_before_it_is_changed(world: World) -> None:
    await MarkedObjects(world.objects, "ours").verify()
    faulty = FaultyObjects(world.objects, world.simulation.random, Faults(fails_before=1))
    theirs = MarkedObjects(faulty, "theirs")
    with pytest.raises(ObjectStoreUnavailable):
        await theirs.verify()
    with pytest.raises(ObjectStoreUnavailable):
        await theirs.delete_below("")
    faulty.faults = Faults()
    with pytest.raises(InvalidConfig):
        await theirs.delete_below("")


async def test_a_mark_that_cannot_be_read_is_refused(world: World) -> None:
    await world.objects.create(MARK, [b"something else"])
    with pytest.raises(InvalidConfig, match="cannot be read"):
        await MarkedObjects(world.objects, "ours").verify()


async def test_a_cluster_keeps_the_id_that_its_first_broker_made(world: World) -> None:
    world.a.store.fault = lambda request: Fault.UNCERTAIN if request == "txn" else Fault.NONE
    made = await cluster_id(world.a.store)
    assert len(made) == 32
    assert await cluster_id(world.b.store) == made


async def test_a_broker_of_another_cluster_does_not_start_on_a_storage(simulation: Simulation) -> None:
    objects = MemoryObjects(simulation.clock)
    network = SimulatedNetwork(simulation.random)

    async def start(name: str, store: MemoryStore) -> Broker:
        return await Broker.open(
            BrokerConfig(id=name, data=f"/{name}", listen=f"{name}:6660"),
            network=network.host(name),
            store=store,
            disk=SimulatedDisk(simulation.random).mount(),
            clock=simulation.clock,
            random=simulation.random,
            objects=objects,
        )

    store = MemoryStore(simulation.clock)
    first, second = await start("a", store.client("a")), await start("b", store.client("b"))
    with pytest.raises(InvalidConfig, match=r"--storage .*belongs to cluster [0-9a-f]{32}"):
        await start("c", MemoryStore(simulation.clock))
    await second.close()
    await first.close()


@pytest.mark.real_loop
async def test_a_storage_inside_or_around_that_of_another_cluster_is_refused(tmp_path: Path) -> None:
    disk = OsDisk()

    async def use(folder: str) -> None:
        url = (tmp_path / folder).as_uri()
        objects = MarkedObjects(open_objects(url, disk=disk), folder, outer_objects(url, disk=disk))
        try:
            await objects.verify()
        finally:
            await objects.close()

    try:
        await use("store/ours")
        for stranger in ("store", "store/ours/tenant", "store/ours/tenant/a/b"):
            with pytest.raises(InvalidConfig, match=r"lies inside.* beside that of the other"):
                await use(stranger)
            assert not (tmp_path / stranger / MARK).exists()
        for beside in ("store/ours", "store/beside", "store/ours-too"):
            await use(beside)
    finally:
        await disk.close()


@pytest.mark.parametrize(
    ("url", "outer"),
    [
        ("file:///a/b/c", ["/a", "/a/b"]),
        ("file:///a", []),
        ("s3://bucket/a/b?region=x", ["", "a/"]),
        ("s3://bucket?region=x", []),
    ],
)
def test_the_prefixes_around_a_storage(url: str, outer: list[str]) -> None:
    found = outer_objects(url, disk=SimulatedDisk(Random(1)).mount())
    assert [vars(each).get("_root", vars(each).get("_prefix")) for each in found] == outer
