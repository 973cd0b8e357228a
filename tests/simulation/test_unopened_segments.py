"""Segments whose owner is there and cannot open them: its disk is another one, files are damaged, holders are gone."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from braid.client.client import Client
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Put
from braid.model.cluster import Registration
from braid.model.errors import InvalidArgument, MoveRefused, NotServing
from braid.model.ownership import OwnershipState
from braid.storage.history.catalog import Frontier
from braid.testing.sim.disk import NO_FAULTS, DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, Brokers, read_all, record_of, running_brokers
from tests.kits.waiting import until


def failure_of(brokers: Brokers, broker: str) -> str:
    failure = record_of(brokers).failure_of(broker)
    return failure.reason if failure is not None else ""


async def topic_at(brokers: Brokers, client: Client, owner: str, **policies: object) -> None:
    """With ten records, all of them in files of the owner."""
    await client.admin.create_topic("orders", **policies)  # type: ignore[arg-type]
    await until(lambda: brokers.owner(0))
    if brokers.owner(0) != owner:
        await brokers.move(0, owner)
    async with client.producer("orders") as producer:
        for number in range(10):
            assert (await producer.send(b"%d" % number)).offset == number


async def lose_disk(brokers: Brokers, name: str) -> None:
    """The broker comes back under its id, with an empty disk."""
    brokers.kill(name)
    brokers.disks[name] = SimulatedDisk(brokers.simulation.random)
    await brokers.start(name)


@SHARED
async def test_an_owner_with_an_empty_disk_says_why_it_cannot_open_and_uses_up_no_epochs(
    shared: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=60) as client:
        await topic_at(brokers, client, "c")
        await lose_disk(brokers, "c")
        await until(lambda: failure_of(brokers, "c"))
        epoch = record_of(brokers).epoch
        await asyncio.sleep(600)
        assert (record_of(brokers).owner, record_of(brokers).epoch) == ("c", epoch)
        assert "its files are not here" in failure_of(brokers, "c")
        stats = await brokers.call("a", "topic_stats", topic="orders")
        assert stats["segments"]["0"]["owner"] == "c"
        assert "broker c cannot open it: the owner of epoch" in stats["segments"]["0"]["unavailable"]
        refused = brokers.running["a"].segments.not_here(PATH, 0)
        assert isinstance(refused, NotServing)
        assert "broker c cannot open it" in str(refused)
        (waits,) = brokers.running["a"].cluster.leader.waiting()
        assert (waits.brokers, waits.until) == (("c",), None)
        with pytest.raises(MoveRefused, match=r"its owner c cannot open it.*recover the segment"):
            await brokers.call("a", "move_topic", topic="orders", to="b")


@pytest.mark.parametrize("to", ["a", "c"], ids=["another broker", "the same broker"])
@SHARED
async def test_an_operator_recovers_the_segment_of_an_owner_with_an_empty_disk(
    shared: bool, to: str, simulation: Simulation
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=60) as client:
        await topic_at(brokers, client, "c")
        await lose_disk(brokers, "c")
        await until(lambda: failure_of(brokers, "c"))
        with pytest.raises(InvalidArgument, match="nothing was changed"):
            await brokers.call("a", "recover_topic", topic="orders")
        found = await brokers.call("a", "recover_topic", topic="orders", to=to, acceptLoss=True)
        assert found["segments"][0]["to"] == to
        assert found["segments"][0]["seconds"] < 5, "the owner does not wait for its next try"
        record = record_of(brokers)
        assert (record.state, record.owner, record.failures) == (OwnershipState.SERVING, to, ())
        async with client.producer("orders") as producer:
            await producer.send(b"after")
        assert (await read_all(client, 1))[-1] == b"after"


@SHARED
async def test_a_topic_that_accepts_losses_continues_although_its_broker_is_there(
    shared: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=120) as client:
        await topic_at(brokers, client, "c", on_owner_loss="continue", owner_loss_after_ms=30_000)
        await lose_disk(brokers, "c")
        await until(lambda: failure_of(brokers, "c"))
        began = simulation.clock.monotonic()
        await until(lambda: brokers.owner(0))
        assert 29 < simulation.clock.monotonic() - began < 40
        async with client.producer("orders") as producer:
            await producer.send(b"after")
        assert (await read_all(client, 1))[-1] == b"after"


async def test_damaged_files_are_put_aside_when_their_only_broker_is_told_to_go_on_without_them(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, names=("a",), shared=False) as brokers:
        async with brokers.client(timeout=60) as client:
            await topic_at(brokers, client, "a")
        disk = brokers.disks["a"]
        (segment,) = brokers.running["a"].segments.all()
        folder = segment.storage.log.folder
        await brokers.stop("a")
        mounted = disk.mount()
        (wal,) = [stat.name for stat in await mounted.list(folder) if stat.name.endswith(".wal")]
        await mounted.rename(f"{folder}/{wal}", f"{folder}/{5:020d}.wal")
        await brokers.start("a")
        await until(lambda: failure_of(brokers, "a"))
        assert "has been changed" in failure_of(brokers, "a")
        await brokers.call("a", "recover_topic", topic="orders", acceptLoss=True)
        assert brokers.owner(0) == "a"
        aside = [name for name in await mounted.list_folders(folder) if name.startswith("aside-")]
        assert len(aside) == 1
        assert [stat.name for stat in await mounted.list(f"{folder}/{aside[0]}")] == [f"{5:020d}.wal"]
        async with brokers.client(timeout=60) as client:
            async with client.producer("orders") as producer:
                assert (await producer.send(b"after")).offset == 0
            assert await read_all(client, 1) == [b"after"]


async def test_a_sealed_segment_whose_holders_are_all_gone_goes_on_at_its_next_offset_when_an_operator_says_so(
    simulation: Simulation,
) -> None:
    """Storage `local`: the old owner has handed over, and both brokers that hold the history die."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client("a", timeout=120) as client:
        await topic_at(brokers, client, "c")
        await _kill_at_seal(brokers, "c", "b")
        assert set(record_of(brokers).holders) == {"b", "c"}
        stats = await brokers.call("a", "topic_stats", topic="orders")
        assert "its history is only on" in stats["segments"]["0"]["unavailable"]
        found = await brokers.call("a", "recover_topic", topic="orders", acceptLoss=True)
        assert "all of its history lies on" in found["segments"][0]["loss"]
        async with client.producer("orders") as producer:
            assert (await producer.send(b"after")).offset == 10, "no offset of a lost record is given out again"
        assert await read_all(client, 1) == [b"after"]


async def _kill_at_seal(brokers: Brokers, owner: str, target: str) -> None:
    """Begin a move, and let both brokers die when it is sealed."""
    moving = asyncio.create_task(brokers.call("a", "move_topic", topic="orders", to=target, timeout=600))
    await until(lambda: record_of(brokers).holders and record_of(brokers).clean)
    moving.cancel()
    await asyncio.wait([moving])
    for name in (owner, target):
        brokers.kill(name)
    members = brokers.running["a"].cluster.members
    await until(lambda: not members.is_live(owner) and not members.is_live(target))


@SHARED
async def test_an_owner_that_is_back_with_everything_is_preferred_to_a_loss_that_was_accepted(
    shared: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", timeout=120) as client:
        await topic_at(brokers, client, "c")
        brokers.kill("c")
        members = brokers.running["a"].cluster.members
        await until(lambda: not members.is_live("c"))
        brokers.store_of("b").disconnect()  # It will never open what it is given.
        recovering = asyncio.create_task(
            brokers.call("a", "recover_topic", topic="orders", to="b", acceptLoss=True, timeout=600)
        )
        await until(lambda: record_of(brokers).owner == "b")
        await brokers.start("c")
        with pytest.raises(MoveRefused, match="c serves it"):
            await recovering
        assert record_of(brokers).given_up == ()
        assert await read_all(client, 10) == [b"%d" % number for number in range(10)], "nothing is lost"


async def test_a_loss_is_not_carried_out_if_the_lost_owner_is_back_when_it_would_be(simulation: Simulation) -> None:
    """The owner registers just before the transaction with which its successor would begin."""
    async with running_brokers(simulation) as brokers, brokers.client("a", timeout=120) as client:
        await topic_at(brokers, client, "c")
        (descriptor,) = brokers.any().cluster.owners.of_topic(PATH)
        brokers.kill("c")
        members = brokers.running["a"].cluster.members
        await until(lambda: not members.is_live("c"))
        server = brokers.store._server
        begins: list[str] = []

        def register(request: str) -> Fault:
            entry = server.get(paths.current_chunk(PATH, descriptor))
            assert entry is not None
            if request == "txn" and not begins and msgspec.json.decode(entry.value, type=Frontier).holder == "b":
                begins.append(request)
                server.txn([], [Put(paths.broker("c"), Registration(address="c:6660", admin="").to_json())])
            return Fault.NONE

        brokers.store_of("b").fault = register
        recovering = asyncio.create_task(
            brokers.call("a", "recover_topic", topic="orders", to="b", acceptLoss=True, timeout=600)
        )
        await until(lambda: begins)
        await until(lambda: record_of(brokers).owner == "c", 60)
        assert record_of(brokers).state is OwnershipState.ASSIGNED, "it is to open the segment with all of its records"
        assert not brokers.running["b"].segments.all()
        recovering.cancel()
        await asyncio.wait([recovering])


async def test_a_segment_that_did_not_close_in_order_is_opened_again_in_its_folder(simulation: Simulation) -> None:
    """Its topic confirms otherwise from now on, so its log is closed, and the disk fails just then."""
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client("a", timeout=120) as client:
        await topic_at(brokers, client, "a")
        epoch = record_of(brokers).epoch
        brokers.disks["a"].faults = DiskFaults(sync_failure=1.0)
        await client.admin.update_topic("orders", durability="memory")
        await until(lambda: not brokers.running["a"].segments.all())
        brokers.disks["a"].faults = NO_FAULTS
        await until(lambda: brokers.running["a"].segments.all(), 60)
        assert record_of(brokers).epoch > epoch
        assert await read_all(client, 10) == [b"%d" % number for number in range(10)]
