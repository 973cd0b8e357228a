"""A broker whose disk is full waits for room, and opens its segments again when there is some. Until then it serves
reads, and its segments can move away."""

from __future__ import annotations

import asyncio

import pytest

from braid.client.client import Client
from braid.client.producing.producer import Producer
from braid.model.errors import DiskFull, Fenced, MoveRefused, TimedOut
from braid.model.message import MessageId
from braid.testing.sim.disk import NO_FAULTS, DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, Brokers, read_all, running_brokers
from tests.kits.waiting import until

KEYS = [b"key-%d" % number for number in range(8)]
FULL = DiskFaults(capacity_bytes=0)


def failed(brokers: Brokers) -> int:
    """How many segments have a log that found no room."""
    return sum(isinstance(segment.storage.log.failure, DiskFull) for segment in brokers.any().segments.all())


async def fill(brokers: Brokers, producer: Producer, faults: DiskFaults) -> list[asyncio.Task[MessageId]]:
    """Send more than fits, to both segments, and wait until both have noticed."""
    brokers.disks["a"].faults = faults
    sending = [asyncio.ensure_future(producer.send(b"x" * 2_000_000, key=key)) for key in KEYS]
    await until(lambda: failed(brokers) == 2)
    return sending


async def test_two_segments_wait_for_room_at_the_same_time(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        async with client.producer("orders", timeout=60) as producer:
            sending = await fill(brokers, producer, FULL)
            await asyncio.sleep(5)
            assert failed(brokers) == 2
            brokers.disks["a"].faults = NO_FAULTS
            ids = await asyncio.gather(*sending)
        assert {segment for segment, _ in ids} == {0, 1}


async def test_segments_that_wait_for_room_are_served_again_although_syncs_fail_meanwhile(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        async with client.producer("orders", timeout=60) as producer:
            sending = await fill(brokers, producer, FULL)
            brokers.disks["a"].faults = DiskFaults(sync_failure=1.0)
            await asyncio.sleep(5)
            assert failed(brokers) == 2
            brokers.disks["a"].faults = NO_FAULTS
            await asyncio.gather(*sending)


async def test_a_segment_that_is_fenced_while_it_waits_for_room_is_ended_once(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=2)
        async with client.producer("orders", timeout=60) as producer:
            sending = await fill(brokers, producer, FULL)
            fenced, _ = brokers.any().segments.all()
            ended: list[str] = []
            abandon = fenced.storage.abandon

            async def counted() -> None:
                ended.append(str(fenced.name))
                await abandon()

            fenced.storage.abandon = counted  # type: ignore[method-assign]
            assert fenced.cursors._stored._on_fenced is not None
            fenced.cursors._stored._on_fenced(Fenced("another owner has the segment"))
            await asyncio.sleep(1)
            brokers.disks["a"].faults = NO_FAULTS
            await asyncio.gather(*sending)
            assert ended == [str(fenced.name)]


async def full_topic(brokers: Brokers, client: Client) -> Producer:
    """A topic of one segment at broker a, with five records, and no room for a sixth."""
    await client.admin.create_topic("orders")
    await until(lambda: brokers.owner(0))
    if brokers.owner(0) != "a":
        await brokers.move(0, "a")
    producer = client.producer("orders", timeout=120)
    for number in range(5):
        assert (await producer.send(b"%d" % number)).offset == number
    brokers.disks["a"].faults = FULL
    return producer


SIXTH = b"y" * 500_000
"""It fits into the newest file, but not into the room that this file has on the disk."""


async def send_more(brokers: Brokers, producer: Producer, value: bytes = SIXTH) -> asyncio.Task[MessageId]:
    """Send what finds no room, and wait until the log has noticed."""
    sending = asyncio.ensure_future(producer.send(value))
    await until(lambda: any(each.storage.log.is_full for each in brokers.running["a"].segments.all()))
    return sending


FIVE = [b"%d" % number for number in range(5)]


@pytest.mark.parametrize("size", [500_000, 2_000_000], ids=["open", "closed"])
async def test_a_segment_whose_disk_is_full_is_read_and_moves_away_with_all_of_its_records(
    size: int, simulation: Simulation
) -> None:
    """Its newest file with records is open, or closed because a batch of 2 MB needs the next file."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            sending = await send_more(brokers, producer, b"y" * size)
            (segment,) = brokers.running["a"].segments.all()
            assert segment.storage.log.files[0].closed is (size > 1 << 20)
            assert await read_all(client, 5) == FIVE
            (moved,) = (await brokers.call("c", "move_topic", topic="orders", to="b"))["segments"]
            assert (moved["from"], moved["to"]) == ("a", "b")
            assert moved["seconds"] < 5
            assert (await sending).offset == 5, "what found no room is stored by the next owner, once"
        assert await read_all(client, 6) == [*FIVE, b"y" * size]


async def test_a_split_waits_for_room_on_the_disk_of_its_parent_visibly_and_can_be_taken_back(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            sending = await send_more(brokers, producer)
            for asked in brokers.running:
                with pytest.raises(TimedOut, match="could not give"):
                    await brokers.call(asked, "split_segment", topic="orders", segment=0, timeout=2)
                change = (await brokers.call(asked, "get_layout", topic="orders"))["transition"]
                assert change["step"] == "CREATING"
                assert "could not give" in change["waitsFor"][0], "whichever broker is asked"
                await brokers.call(asked, "abort_transition", topic="orders")
            brokers.disks["a"].faults = NO_FAULTS
            assert (await sending).segment == 0, "the log has not ended"
            await client.admin.split("orders", 0)
            assert (await producer.send(b"7")).segment != 0
        assert await read_all(client, 7) == [*FIVE, SIXTH, b"7"]


async def test_a_merge_waits_for_room_on_the_disk_of_a_quiet_parent_before_any_parent_ends(
    simulation: Simulation,
) -> None:
    """The quiet log has closed its newest file by age: no write has failed yet, and the seal would need a new file."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=120) as client:
        await client.admin.create_topic("orders", segments=2)
        await until(lambda: brokers.owner(0) and brokers.owner(1))
        for segment, broker in enumerate("ab"):
            if brokers.owner(segment) != broker:
                await brokers.move(segment, broker)
        async with client.producer("orders", timeout=30) as producer:
            first = {(await producer.send(b"1", key=key)).segment: key for key in KEYS}
            quiet = brokers.running["a"].segments.get(PATH, 0).storage.log
            await until(lambda: quiet.files[-1].closed, within_s=7200)
            brokers.disks["a"].faults = FULL
            with pytest.raises(TimedOut, match="could not give"):
                await brokers.call("b", "merge_segments", topic="orders", segments=[0, 1], timeout=10)
            change = (await brokers.call("c", "get_layout", topic="orders"))["transition"]
            assert (change["step"], len(change["waitsFor"])) == ("CREATING", 1)
            assert "could not give" in change["waitsFor"][0]
            await brokers.call("b", "abort_transition", topic="orders")
            assert (await producer.send(b"2", key=first[1])).segment == 1
            brokers.disks["a"].faults = NO_FAULTS
            assert (await producer.send(b"2", key=first[0])).segment == 0
            await client.admin.merge("orders", 0, 1)
            assert (await producer.send(b"3", key=first[0])).segment not in (0, 1)


async def test_a_broker_whose_disk_is_full_is_drained(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            sending = await send_more(brokers, producer)
            await brokers.call("b", "drain_broker", broker="a")
            assert (await sending).offset == 5
            assert brokers.owner(0) in ("b", "c")
        assert await read_all(client, 6) == [*FIVE, SIXTH]


async def test_a_broker_whose_disk_is_full_hands_over_when_it_stops(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("b", "c", timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            sending = await send_more(brokers, producer)
            await brokers.stop("a")
            assert (await sending).offset == 5
        assert await read_all(client, 6) == [*FIVE, SIXTH]


async def test_a_full_segment_that_was_exported_and_not_handed_over_goes_on_when_there_is_room(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "c", timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            sending = await send_more(brokers, producer)
            (segment,) = brokers.running["a"].segments.all()
            await segment.storage.export_now()
            assert segment.storage.catalog.next_offset == 5, "a move that is given up leaves it so"
            brokers.disks["a"].faults = NO_FAULTS
            assert (await sending).offset == 5
            assert (await producer.send(b"6")).offset == 6
            await brokers.move(0, "c")
            assert (await producer.send(b"7")).offset == 7
        assert await read_all(client, 8) == [*FIVE, SIXTH, b"6", b"7"]


def used_bytes(brokers: Brokers, name: str) -> int:
    return brokers.disks[name]._device.names.total_bytes()


async def test_a_log_uses_the_last_room_of_its_disk(simulation: Simulation) -> None:
    """Files grow by doubling; where that does not fit, by what the next batch needs."""
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client(timeout=5) as client:
        producer = await full_topic(brokers, client)
        brokers.disks["a"].faults = NO_FAULTS
        assert (await producer.send(b"z" * 200_000)).offset == 5
        brokers.disks["a"].faults = DiskFaults(capacity_bytes=used_bytes(brokers, "a") + 150_000)
        assert (await producer.send(b"z" * 100_000)).offset == 6, "262,144 more bytes do not fit"
        (segment,) = brokers.running["a"].segments.all()
        assert segment.epoch == 1, "it was not opened again"
        await producer.close()


async def test_a_segment_moves_off_a_disk_that_has_no_room_for_a_copy(simulation: Simulation) -> None:
    """Storage `local`: its log is not full, and its history is longer than what is left of the disk."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            brokers.disks["a"].faults = NO_FAULTS
            assert (await producer.send(b"z" * 200_000)).offset == 5
            brokers.disks["a"].faults = DiskFaults(capacity_bytes=used_bytes(brokers, "a") + 100_000)
            (moved,) = (await brokers.call("c", "move_topic", topic="orders", to="b"))["segments"]
            assert moved["to"] == "b"
            assert (await producer.send(b"6")).offset == 6
        assert await read_all(client, 7) == [*FIVE, b"z" * 200_000, b"6"]


@pytest.mark.parametrize("size", [500_000, 2_000_000], ids=["open", "closed"])
async def test_a_segment_whose_history_is_on_the_full_disk_moves_without_a_copy_there(
    size: int, simulation: Simulation
) -> None:
    """Storage `local`: what is left of the disk has room for a footer and a manifest, and not for the records."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            brokers.disks["a"].faults = NO_FAULTS
            for number in range(5, 10):
                assert (await producer.send(b"z" * 50_000)).offset == number
            brokers.disks["a"].faults = DiskFaults(capacity_bytes=used_bytes(brokers, "a") + 20_000)
            sending = await send_more(brokers, producer, b"y" * size)
            await brokers.call("c", "move_topic", topic="orders", to="b")
            assert (await sending).offset == 10
            await until(lambda: used_bytes(brokers, "a") < 2 * 1_048_576 + 100_000)
        assert await read_all(client, 11) == [*FIVE, *[b"z" * 50_000] * 5, b"y" * size]


async def test_a_full_segment_that_cannot_move_says_why_and_goes_on_when_there_is_room(simulation: Simulation) -> None:
    """Storage `local`: the disk has not even room for a manifest."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=120) as client:
        async with await full_topic(brokers, client) as producer:
            sending = await send_more(brokers, producer)
            with pytest.raises(MoveRefused, match=r"its history does not reach broker b.*no room"):
                await brokers.call("c", "move_topic", topic="orders", to="b")
            assert await read_all(client, 5) == FIVE
            brokers.disks["a"].faults = NO_FAULTS
            assert (await sending).offset == 5
            await brokers.move(0, "b")
        assert await read_all(client, 6) == [*FIVE, SIXTH]


async def full_at_start(brokers: Brokers) -> None:
    """Broker a stops in order with five records, and starts again on a disk without any room."""
    async with brokers.client() as client:
        await (await full_topic(brokers, client)).close()
    await brokers.stop("a")
    await brokers.start("a")


@SHARED
async def test_a_broker_that_starts_on_a_full_disk_serves_reads_and_takes_publishes_when_there_is_room(
    shared: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, names=("a",), shared=shared) as brokers:
        await full_at_start(brokers)
        (segment,) = brokers.any().segments.all()
        async with brokers.client(timeout=120) as client, client.producer("orders", timeout=120) as producer:
            sending = asyncio.ensure_future(producer.send(b"5"))
            assert await read_all(client, 5) == FIVE
            async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
                message = await consumer.receive(timeout=5)
                assert message is not None
                await consumer.ack(message)
            await asyncio.sleep(30)
            assert segment.storage.log.is_full
            assert brokers.any().segments.all() == [segment], "it waits, and is not opened again and again"
            brokers.disks["a"].faults = NO_FAULTS
            assert (await sending).offset == 5
            assert await read_all(client, 6) == [*FIVE, b"5"]
        await brokers.stop("a")
        await brokers.start("a")
        async with brokers.client() as client:
            assert await read_all(client, 6) == [*FIVE, b"5"]


async def test_a_segment_that_was_opened_on_a_full_disk_moves_away(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers:
        await full_at_start(brokers)
        await brokers.start("b")
        async with brokers.client(timeout=120) as client, client.producer("orders", timeout=120) as producer:
            sending = asyncio.ensure_future(producer.send(b"5"))
            await brokers.call("b", "move_topic", topic="orders", to="b")
            assert (await sending).offset == 5
            assert await read_all(client, 6) == [*FIVE, b"5"]


async def test_a_segment_that_comes_to_a_full_disk_goes_back_to_a_broker_that_has_room(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a", "b")) as brokers, brokers.client(timeout=120) as client:
        producer = await full_topic(brokers, client)
        brokers.disks["a"].faults, brokers.disks["b"].faults = NO_FAULTS, FULL
        with pytest.raises(MoveRefused, match=r"did not get to b.*a serves it"):
            await brokers.call("a", "move_topic", topic="orders", to="b")
        assert (await producer.send(b"5")).offset == 5
        assert await read_all(client, 6) == [*FIVE, b"5"]
        await producer.close()
