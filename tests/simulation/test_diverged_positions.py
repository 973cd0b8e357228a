"""Readers that keep their positions themselves, on a topic that loses records which they have read: new records take
the offsets of the lost ones, and no reader may take them for what it has read."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from braid.client.client import Client
from braid.client.consuming.checkpoint import CheckpointConsumer, ConsumerCheckpoint
from braid.client.consuming.segment_range import read_segment_range
from braid.model.errors import OffsetOutOfRange, PositionDiverged
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

KEPT = 4
"""Records that survive the loss."""
READ = 10
"""Records that were read before it."""

Loss = Callable[[], Awaitable[None]]
Scene = Callable[[Brokers, Client], Awaitable[Loss]]
"""Writes and returns what loses the last records."""


async def topic_at(brokers: Brokers, client: Client, owner: str, **policies: Any) -> None:
    await client.admin.create_topic("orders", **policies)
    await until(lambda: brokers.owner(0))
    if brokers.owner(0) != owner:
        await brokers.move(0, owner)


async def send(client: Client, word: bytes, numbers: range) -> None:
    async with client.producer("orders") as producer:
        for number in numbers:
            assert (await producer.send(b"%s %d" % (word, number))).offset == number


async def read(consumer: CheckpointConsumer, count: int) -> list[bytes]:
    found = []
    for _ in range(count):
        message = await consumer.receive(timeout=60)
        assert message is not None
        found.append(message.value)
    return found


def words(word: bytes, numbers: range) -> list[bytes]:
    return [b"%s %d" % (word, number) for number in numbers]


async def chunks_alone(brokers: Brokers, client: Client, **policies: Any) -> None:
    """Chunks hold the first records; the others are only on the owner's disk."""
    await topic_at(brokers, client, "c", **policies)
    await send(client, b"old", range(KEPT))
    await brokers.move(0, "b")
    await brokers.move(0, "c")
    await send(client, b"old", range(KEPT, READ))


async def an_accepted_loss(brokers: Brokers, client: Client) -> Loss:
    await chunks_alone(brokers, client)

    async def lose() -> None:
        brokers.kill("c")
        await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
        await brokers.call("a", "recover_topic", topic="orders", to="a", acceptLoss=True)
        await until(lambda: brokers.owner(0) == "a")

    return lose


async def a_policy_that_goes_on(brokers: Brokers, client: Client) -> Loss:
    await chunks_alone(brokers, client, on_owner_loss="continue", owner_loss_after_ms=20_000)

    async def lose() -> None:
        brokers.kill("c")
        await until(lambda: brokers.owner(0))

    return lose


async def a_power_loss(brokers: Brokers, client: Client) -> Loss:
    """The topic confirms before it syncs, and its disk has got nothing since the last sync."""
    await topic_at(brokers, client, "c", durability="memory")
    await send(client, b"old", range(KEPT))
    await brokers.running["c"].segments.get(PATH, 0).storage.log.flush()
    disk = brokers.disks["c"]
    synced = {path: disk.content(path) for path in disk.paths() if path.endswith(".wal")}
    await send(client, b"old", range(KEPT, READ))

    async def lose() -> None:
        brokers.kill("c")
        for path, content in synced.items():
            assert len(disk.content(path)) == len(content)
            disk.corrupt(path, 0, content)
        await brokers.start("c")
        await until(lambda: brokers.owner(0) == "c")

    return lose


LOSSES = pytest.mark.parametrize("scene", [an_accepted_loss, a_policy_that_goes_on, a_power_loss])


@LOSSES
async def test_a_checkpoint_that_follows_lost_records_is_refused_and_names_where_the_histories_part(
    simulation: Simulation, scene: Scene
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        lose = await scene(brokers, client)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            assert await read(consumer, KEPT) == words(b"old", range(KEPT))
            early = consumer.checkpoint()
            assert await read(consumer, READ - KEPT) == words(b"old", range(KEPT, READ))
            late = consumer.checkpoint()
        await lose()
        await send(client, b"new", range(KEPT, 2 * READ))
        async with client.checkpoint_consumer("orders", start=late) as consumer:
            with pytest.raises(PositionDiverged, match=r"from offset 4 on the segment holds other records") as caught:
                await consumer.receive(timeout=60)
        error = caught.value
        assert (error.parted_at, error.end, error.retriable) == (KEPT, 2 * READ, False)
        assert isinstance(error, OffsetOutOfRange), "as for every other position that does not exist"
        async with client.checkpoint_consumer("orders", start=early) as consumer:
            assert await read(consumer, 2 * READ - KEPT) == words(b"new", range(KEPT, 2 * READ))


@LOSSES
async def test_a_consumer_that_lives_through_the_loss_is_ended_by_it(simulation: Simulation, scene: Scene) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        lose = await scene(brokers, client)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            assert await read(consumer, READ) == words(b"old", range(READ))
            await lose()
            await send(client, b"new", range(KEPT, 2 * READ))
            with pytest.raises(PositionDiverged):
                await consumer.receive(timeout=60)


@LOSSES
async def test_a_range_that_is_read_across_the_loss_is_not_patched_with_other_records(
    simulation: Simulation, scene: Scene
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        lose = await scene(brokers, client)
        topic = await client.routing.topic(PATH)
        reading = read_segment_range(client, PATH, topic.topic_id, 0, 0, 2 * READ)
        async with contextlib.aclosing(reading):
            while (await anext(reading)).next_offset < READ:
                pass
            await lose()
            await send(client, b"new", range(KEPT, 2 * READ))
            with pytest.raises(PositionDiverged):
                await anext(reading)


async def test_at_the_end_of_a_topic_a_position_has_its_epoch_before_anything_was_read(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        lose = await a_power_loss(brokers, client)
        async with client.checkpoint_consumer("orders", start="latest") as consumer:
            saved = consumer.checkpoint()
        assert ConsumerCheckpoint.from_bytes(saved).positions == {0: READ}
        await lose()
        await send(client, b"new", range(KEPT, 2 * READ))
        async with client.checkpoint_consumer("orders", start=saved) as consumer:
            with pytest.raises(PositionDiverged):
                await consumer.receive(timeout=60)


@LOSSES
async def test_a_seek_after_lost_records_is_refused(simulation: Simulation, scene: Scene) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        lose = await scene(brokers, client)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            await read(consumer, READ)
            epochs = ConsumerCheckpoint.from_bytes(consumer.checkpoint()).epochs
        await client.admin.create_subscription("orders", "billing", start="earliest")
        await lose()
        await send(client, b"new", range(KEPT, 2 * READ))
        with pytest.raises(PositionDiverged, match="from offset 4 on the segment holds other records") as caught:
            await client.admin.seek("orders", "billing", {0: READ}, epochs=epochs)
        assert caught.value.parted_at == KEPT
        found = await client.admin.subscription("orders", "billing")
        assert found["segments"]["0"]["offset"] == 0, "nothing was changed"
        await client.admin.seek("orders", "billing", {0: KEPT}, epochs=epochs)
        await client.admin.seek("orders", "billing", {0: READ})


async def test_moves_and_restarts_without_a_loss_disturb_no_reader(simulation: Simulation) -> None:
    """Every owner begins an epoch. Only a loss makes histories part."""
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", "c", timeout=120) as client:
        await topic_at(brokers, client, "a")
        saved: bytes | str = "earliest"
        epochs: set[int] = set()
        for first, owner in enumerate(("b", "c", "b", "b", "a", "c")):
            numbers = range(3 * first, 3 * first + 3)
            await send(client, b"old", numbers)
            async with client.checkpoint_consumer("orders", start=saved) as consumer:
                assert await read(consumer, 2) == words(b"old", numbers[:2])
                if brokers.owner(0) != owner:
                    await brokers.move(0, owner)
                else:
                    brokers.kill(owner)
                    await brokers.start(owner)
                assert await read(consumer, 1) == words(b"old", numbers[2:])
                saved = consumer.checkpoint()
            epochs |= set(ConsumerCheckpoint.from_bytes(saved).epochs.values())
        assert len(epochs) == 6
        await asyncio.sleep(30)
        async with client.checkpoint_consumer("orders", start=saved) as consumer:
            assert await consumer.receive(timeout=5) is None


async def test_a_checkpoint_of_an_older_build_goes_on_unchecked(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        lose = await a_power_loss(brokers, client)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            await read(consumer, READ)
            saved = json.loads(consumer.checkpoint())
        assert saved.pop("epochs").keys() == {"0"}
        await lose()
        await send(client, b"new", range(KEPT, 2 * READ))
        async with client.checkpoint_consumer("orders", start=json.dumps(saved).encode()) as consumer:
            assert await read(consumer, READ) == words(b"new", range(READ, 2 * READ))
