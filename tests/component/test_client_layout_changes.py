"""A producer whose topic is split and merged under it, against brokers that follow a script: each record is stored
once, the records of a key in order, and every id names the place of its record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pyarrow as pa
import pytest

from braid.client.producing.open_batch import Receipt
from braid.client.producing.producer import Producer
from braid.client.producing.repeatable_producer import Written
from braid.model.batch.header import BatchHeader
from braid.model.errors import ClientClosed, NotServing, PermissionDenied, TimedOut, TopicNotFound
from braid.model.hashing import key_hash
from braid.model.layout import FULL_RANGE, HashRange
from braid.model.message import MessageId
from braid.storage.log.producers import ProducerTable
from braid.testing.scripted_broker import Refuse, ScriptedBroker, Step
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Route
from tests.kits.client_producer import PATH, World, producing

LOW, HIGH = HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF)
QUARTERS = [HashRange(start, start + 0x3FFF) for start in range(0, 0x10000, 0x4000)]
KEYS = [f"key-{number}".encode() for number in range(8)]
"""Their hashes begin with e, 9, f, 7, e, 1, 0, 7: all quarters."""
AWAKE_S = 0.02
"""What a producer may need, once the map is pushed, to go on: a few round trips of this network."""


def change(world: World, parents: list[int], *ranges: HashRange) -> list[int]:
    world.broker.seal(PATH, *parents)
    return show(world, parents, *ranges)


def show(world: World, parents: list[int], *ranges: HashRange) -> list[int]:
    children = world.broker.replace(PATH, parents, *ranges)
    world.broker.push()
    return children


def everything(world: World) -> list[tuple[bytes | None, bytes]]:
    """Key and value of all records, older segments first."""
    segments = sorted(segment for _, segment in world.broker.logs)
    return [(each.key, each.value) for segment in segments for each in world.messages(segment)]


def values_of(world: World, key: bytes | None) -> list[bytes]:
    return [value for found, value in everything(world) if found == key]


def check_ids(world: World, ids: dict[bytes, MessageId]) -> None:
    values = {segment: world.values(segment) for _, segment in world.broker.logs}
    for value, where in ids.items():
        if where.offset >= 0:
            assert values[where.segment][where.offset] == value
        else:
            assert value in values[where.segment]


async def settled(receipts: dict[bytes, Receipt]) -> dict[bytes, MessageId]:
    return {value: await receipt for value, receipt in receipts.items()}


def submit(producer: Producer, first: int, count: int) -> dict[bytes, Receipt]:
    """Numbered values, the keys in turn."""
    return {
        b"%d" % number: producer.submit(b"%d" % number, key=KEYS[number % len(KEYS)])
        for number in range(first, first + count)
    }


def is_fast(producer: Producer) -> bool:
    """Whether records take the short way to the writer of the only segment."""
    return producer._only is not None and producer._fast is producer._only


def check_order(world: World, count: int) -> None:
    for number, key in enumerate(KEYS):
        assert values_of(world, key) == [b"%d" % each for each in range(number, count, len(KEYS))]


@contextlib.asynccontextmanager
async def two_brokers(simulation: Simulation, **options: Any) -> AsyncIterator[tuple[World, ScriptedBroker, Producer]]:
    """The second broker has the same logs and routes; a test says which segments it serves."""
    world = World(simulation)
    await world.start(2)
    other = ScriptedBroker(world.network.host("other"))
    await other.start("other", 6660)
    other.topics, other.logs = world.broker.topics, world.broker.logs
    async with world.client() as client, client.producer("orders", **options) as producer:
        yield world, other, producer
    await world.broker.stop()
    await other.stop()


def test_the_keys_of_these_tests_lie_in_all_quarters() -> None:
    assert {key_hash(key) >> 14 for key in KEYS} == {0, 1, 2, 3}


async def test_a_split_sends_each_record_to_one_log_and_its_id_says_where(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        receipts = submit(producer, 0, 16)
        await producer.flush()
        change(world, [0], LOW, HIGH)
        receipts |= submit(producer, 16, 16)
        await asyncio.sleep(0.0001)
        receipts |= submit(producer, 32, 16)
        check_ids(world, await settled(receipts))
        check_order(world, 48)
        assert len(world.values(0)) == 16
        assert not is_fast(producer)
        assert not producer._retired


async def test_between_the_seal_and_the_new_layout_records_wait_and_then_go_on_quickly(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        receipts: dict[bytes, Receipt] = {}
        for number in range(50):
            receipts |= submit(producer, 8 * number, 8)
            await asyncio.sleep(0.01)
        assert not any(receipt.done() for receipt in receipts.values())
        started = world.loop.time()
        show(world, [0], LOW, HIGH)
        await producer.flush()
        assert world.loop.time() - started < AWAKE_S
        check_ids(world, await settled(receipts))
        check_order(world, 400)


async def test_segments_that_do_not_change_go_on_while_another_one_ends(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        receipts = submit(producer, 0, 16)
        await producer.flush()
        low, _high = change(world, [0], LOW, HIGH)
        receipts |= submit(producer, 16, 16)
        await producer.flush()
        world.broker.seal(PATH, low)
        receipts |= submit(producer, 32, 80)
        await asyncio.sleep(1)
        waiting = {int(value) for value, receipt in receipts.items() if not receipt.done()}
        assert waiting == {number for number in range(32, 112) if key_hash(KEYS[number % len(KEYS)]) in LOW}
        show(world, [low], *LOW.parts(2))
        check_ids(world, await settled(receipts))
        check_order(world, 112)


async def test_a_merge_brings_the_fast_path_back(simulation: Simulation) -> None:
    async with producing(simulation, segments=2) as (world, producer):
        receipts = submit(producer, 0, 16)
        assert not is_fast(producer)
        await producer.flush()
        (merged,) = change(world, [0, 1], FULL_RANGE)
        receipts |= submit(producer, 16, 16)
        check_ids(world, await settled(receipts))
        check_order(world, 32)
        assert is_fast(producer)
        assert (await producer.send(b"last")).segment == merged


async def test_a_client_that_slept_through_three_layouts_catches_up_in_one_step(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        receipts = submit(producer, 0, 16)
        await producer.flush()
        lookups = world.broker.lookups
        world.broker.seal(PATH, 0)
        low, high = world.broker.replace(PATH, [0], LOW, HIGH)
        world.broker.seal(PATH, low, high)
        (whole,) = world.broker.replace(PATH, [low, high], FULL_RANGE)
        world.broker.seal(PATH, whole)
        world.broker.replace(PATH, [whole], *QUARTERS)
        receipts |= submit(producer, 16, 16)
        check_ids(world, await settled(receipts))
        check_order(world, 32)
        assert not any(world.values(segment) for segment in (low, high, whole))
        assert world.broker.lookups - lookups <= 2


async def test_layouts_that_follow_each_other_while_records_wait_keep_the_order(simulation: Simulation) -> None:
    async with two_brokers(simulation) as (world, other, producer):
        receipts = submit(producer, 0, 16)
        await producer.flush()
        other.silent = True  # The second segment is served where nobody answers now.
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        world.broker.cut_all()
        receipts |= submit(producer, 16, 16)
        await asyncio.sleep(0.5)
        (merged,) = change(world, [0, 1], FULL_RANGE)
        receipts |= submit(producer, 32, 16)
        await asyncio.sleep(0.5)
        children = change(world, [merged], LOW, HIGH)
        receipts |= submit(producer, 48, 16)
        await asyncio.sleep(0.5)
        assert not any(world.values(segment) for segment in (merged, *children)), "the second parent has not answered"
        other.silent = False
        other.cut_all()
        check_ids(world, await settled(receipts))
        check_order(world, 64)
        assert not world.values(merged)


async def test_an_heir_waits_for_every_parent(simulation: Simulation) -> None:
    async with two_brokers(simulation) as (world, other, producer):
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        receipts = submit(producer, 0, 16)
        await producer.flush()
        other.answer_delay_s = lambda: 1.0
        receipts |= submit(producer, 16, 8)  # The second broker stores its part, and is slow to say so.
        await asyncio.sleep(0.1)
        (merged,) = change(world, [0, 1], FULL_RANGE)
        receipts |= submit(producer, 24, 16)
        await asyncio.sleep(0.5)
        assert is_fast(producer)
        assert not world.values(merged)
        check_ids(world, await settled(receipts))
        check_order(world, 40)


@pytest.mark.parametrize("stored", [True, False])
async def test_a_batch_in_doubt_at_the_seal_is_stored_once(stored: bool, simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        receipts = submit(producer, 0, 16)
        await producer.flush()

        def script(route: Route, header: BatchHeader) -> Step | Refuse:
            world.broker.script = lambda route, header: Step.CONFIRM
            asyncio.get_running_loop().call_soon(world.broker.seal, PATH, 0)
            return Step.CUT_AFTER if stored else Step.CUT_BEFORE

        world.broker.script = script
        receipts |= submit(producer, 16, 16)
        await asyncio.sleep(0.5)
        assert receipts[b"16"].done() is stored
        show(world, [0], LOW, HIGH)
        receipts |= submit(producer, 32, 16)
        check_ids(world, ids := await settled(receipts))
        check_order(world, 48)
        assert (ids[b"16"] == MessageId(0, 16)) is stored


@pytest.mark.parametrize("stored", [True, False])
async def test_a_child_answers_for_a_parent_whose_owner_is_gone(stored: bool, simulation: Simulation) -> None:
    async with two_brokers(simulation) as (world, other, producer):
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        receipts = submit(producer, 0, 16)
        await producer.flush()
        other.script = lambda route, header: Step.SILENCE if stored else Step.IGNORE
        receipts |= submit(producer, 16, 16)
        await asyncio.sleep(0.5)
        world.broker.seal(PATH, 1)
        await other.stop()
        world.broker.replace(PATH, [1], *QUARTERS[2:])
        started = world.loop.time()
        receipts |= submit(producer, 32, 16)
        check_ids(world, ids := await settled(receipts))
        assert world.loop.time() - started < 5
        check_order(world, 48)
        doubtful = {value for value in ids if 16 <= int(value) < 32 and key_hash(KEYS[int(value) % 8]) in HIGH}
        assert {ids[value].offset == -1 for value in doubtful} == {stored}
        assert {ids[value].segment == 1 for value in doubtful} == {stored}
        assert world.broker.stored


async def test_what_a_child_has_forgotten_stays_in_doubt(simulation: Simulation) -> None:
    async with two_brokers(simulation) as (world, other, producer):
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        high = next(key for key in KEYS if key_hash(key) in HIGH)
        await producer.send(b"before", key=high)
        other.script = lambda route, header: Step.SILENCE
        doubtful = producer.submit(b"doubtful", key=high)
        await asyncio.sleep(0.5)
        world.broker.logs[PATH, 1].producers = ProducerTable()
        world.broker.seal(PATH, 1)
        await other.stop()
        world.broker.replace(PATH, [1], HIGH)
        after = producer.submit(b"after", key=high)
        with pytest.raises(TimedOut, match="not known"):
            await doubtful
        assert (await after).segment == 2
        assert values_of(world, high) == [b"before", b"doubtful", b"after"]


async def test_a_grandchild_that_does_not_know_a_producer_leaves_its_first_batch_in_doubt(
    simulation: Simulation,
) -> None:
    """Logs hand on only some of the producers whose log has ended. A child has those of its parents, a grandchild may
    have forgotten one."""
    async with two_brokers(simulation) as (world, other, producer):
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        high = next(key for key in KEYS if key_hash(key) in HIGH)
        other.script = lambda route, header: Step.SILENCE
        doubtful = producer.submit(b"doubtful", key=high)
        await asyncio.sleep(0.5)
        world.broker.seal(PATH, 1)
        await other.stop()
        (child,) = world.broker.replace(PATH, [1], HIGH)
        world.broker.logs[PATH, child].producers = ProducerTable()
        world.broker.seal(PATH, child)
        (grandchild,) = world.broker.replace(PATH, [child], HIGH)
        with pytest.raises(TimedOut, match="not known"):
            await doubtful
        assert (await producer.send(b"after", key=high)).segment == grandchild
        assert values_of(world, high) == [b"doubtful", b"after"]


async def test_a_child_that_was_not_told_of_all_producers_leaves_a_first_batch_in_doubt(simulation: Simulation) -> None:
    async with two_brokers(simulation) as (world, other, producer):
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        high = next(key for key in KEYS if key_hash(key) in HIGH)
        other.script = lambda route, header: Step.SILENCE
        doubtful = producer.submit(b"doubtful", key=high)
        await asyncio.sleep(0.5)
        world.broker.seal(PATH, 1)
        await other.stop()
        (child,) = world.broker.replace(PATH, [1], HIGH)
        world.broker.logs[PATH, child].producers = ProducerTable()
        world.broker.logs[PATH, child].producers.incomplete = True
        with pytest.raises(TimedOut, match="not known"):
            await doubtful
        assert (await producer.send(b"after", key=high)).segment == child
        assert values_of(world, high) == [b"doubtful", b"after"]


async def test_the_parent_may_be_opened_again_after_the_seal(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        receipts = submit(producer, 0, 16)
        await producer.flush()
        world.broker.script = lambda route, header: (
            Refuse(NotServing("it is being opened")) if not route.segment else Step.CONFIRM
        )
        receipts |= submit(producer, 16, 16)
        await asyncio.sleep(1)
        change(world, [0], LOW, HIGH)
        check_ids(world, await settled(receipts))
        check_order(world, 32)


async def test_all_ways_to_give_records_work_across_a_change(simulation: Simulation) -> None:
    async with producing(simulation, max_batch_records=1_000, linger=0.001) as (world, producer):
        world.broker.answer_delay_s = lambda: 0.005
        pairs = [(KEYS[number % 8], b"m%d" % number) for number in range(20_000)]
        table = pa.table({"key": [key for key, _ in pairs], "value": [b"t%d" % number for number in range(20_000)]})
        changes = iter([([0], [LOW, HIGH]), ([1, 2], [FULL_RANGE]), ([3], QUARTERS)])

        async def keep_changing() -> None:
            for parents, ranges in changes:
                await asyncio.sleep(0.02)
                change(world, parents, *ranges)

        changing = asyncio.create_task(keep_changing())
        many = await producer.send_many(pairs)
        await changing
        check_ids(world, dict(zip((value for _, value in pairs), many, strict=True)))
        changes = iter([([4, 5, 6, 7], [FULL_RANGE]), ([8], [LOW, HIGH])])
        changing = asyncio.create_task(keep_changing())
        rows = await producer.send_table(table)
        await changing
        check_ids(world, dict(zip(table["value"].to_pylist(), rows, strict=True)))
        for number, key in enumerate(KEYS):
            expected = [b"%b%d" % (way, each) for way in (b"m", b"t") for each in range(number, 20_000, 8)]
            assert values_of(world, key) == expected
        sent = await asyncio.gather(producer.send("größe", key="key-0", headers={"a": b"1"}), producer.send(b"none"))
        assert [world.messages(segment)[offset].value for segment, offset in sent] == ["größe".encode(), b"none"]


async def test_headers_times_and_records_without_a_key_survive_the_cut(simulation: Simulation) -> None:
    async with producing(simulation, segments=1, compression="lz4") as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        times = [1_794_744_000_000_000 + number for number in range(40)]
        receipts = [
            producer.submit(
                b"%d" % number,
                key=KEYS[number % 8] if number % 3 else None,
                headers={"number": b"%d" % number} if number % 2 else None,
                timestamp=times[number],
            )
            for number in range(40)
        ]
        show(world, [0], LOW, HIGH)
        found = {}
        for number, receipt in enumerate(receipts):
            segment, offset = await receipt
            found[number] = world.messages(segment)[offset]
        for number, message in found.items():
            assert message.value == b"%d" % number
            assert message.key == (KEYS[number % 8] if number % 3 else None)
            assert message.headers == ({"number": b"%d" % number} if number % 2 else {})
            assert message.timestamp_us == times[number]
        assert values_of(world, None)[1:] == [b"%d" % number for number in range(0, 40, 3)]


async def test_what_waits_for_a_layout_that_does_not_come_times_out_as_not_stored(simulation: Simulation) -> None:
    async with producing(simulation, timeout=2.0) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        started = world.loop.time()
        with pytest.raises(TimedOut, match="they are not stored"):
            await producer.send(b"late", key=KEYS[0])
        assert 1.99 < world.loop.time() - started <= 2.2
        after = producer.submit(b"after", key=KEYS[0])
        await asyncio.sleep(0.5)
        show(world, [0], LOW, HIGH)
        assert (await after).segment in (1, 2)
        assert values_of(world, KEYS[0]) == [b"after"]


async def test_no_layout_is_asked_for_without_a_pause_while_no_broker_is_there(simulation: Simulation) -> None:
    async with producing(simulation, timeout=5.0) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        late = producer.submit(b"late", key=KEYS[0])
        await asyncio.sleep(0.1)
        await world.broker.stop()
        before = simulation.loop.steps
        with pytest.raises(TimedOut, match="they are not stored"):
            await late
        assert simulation.loop.steps - before < 1_000


async def test_records_of_one_batch_may_end_differently_in_two_pieces(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        low, high = (next(key for key in KEYS if key_hash(key) in hashes) for hashes in (LOW, HIGH))
        receipts = [producer.submit(b"low", key=low), producer.submit(b"high", key=high)]
        sending = asyncio.create_task(producer.send(b"sent", key=low))
        many = asyncio.create_task(producer.send_many([(high, b"many"), (high, b"more")]))
        await asyncio.sleep(0.05)
        world.broker.script = lambda route, header: (
            Refuse(PermissionDenied("no")) if route.segment == 1 else Step.CONFIRM
        )
        show(world, [0], LOW, HIGH)
        assert (await receipts[1]).segment == 2
        assert receipts[0].done()
        assert isinstance(receipts[0].exception(), PermissionDenied)
        assert receipts[1].exception() is None
        assert [where.segment for where in await many] == [2, 2]
        for failed in (sending, receipts[0]):
            with pytest.raises(PermissionDenied):
                await failed
        await producer.flush()  # The program has looked at the failure.
        producer.submit(b"low", key=low)
        with pytest.raises(PermissionDenied):
            await producer.flush()


async def test_unconfirmed_bytes_are_counted_through_a_cut(simulation: Simulation) -> None:
    async with producing(simulation, max_in_flight_bytes=10_000, max_batch_bytes=2_000) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        sends = [asyncio.create_task(producer.send(b"%0500d" % number, key=KEYS[number % 8])) for number in range(100)]
        await asyncio.sleep(0.2)
        assert producer.in_flight.crowded
        assert producer.in_flight.total < 13_000
        show(world, [0], LOW, HIGH)
        await asyncio.gather(*sends)
        assert (producer.in_flight.total, producer.in_flight.crowded) == (0, False)
        for number, key in enumerate(KEYS):
            assert values_of(world, key) == [b"%0500d" % each for each in range(number, 100, 8)]


async def test_closing_waits_for_records_that_wait_for_a_layout(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        receipts = submit(producer, 0, 16)
        asyncio.get_running_loop().call_later(0.5, show, world, [0], LOW, HIGH)
        await producer.close()
        check_ids(world, {value: receipt.result() for value, receipt in receipts.items()})
        check_order(world, 16)


@pytest.mark.parametrize("shown", [False, True])
async def test_abandoning_fails_what_waits_anywhere_and_leaves_no_task(shown: bool, simulation: Simulation) -> None:
    async with two_brokers(simulation) as (world, other, producer):
        world.broker.set_owner(PATH, "other:6660", epoch=2, segment=1)
        world.broker.push()
        await producer.flush()
        submit(producer, 0, 8)
        await producer.flush()
        other.silent = True
        receipts = submit(producer, 8, 16)
        await asyncio.sleep(0.1)
        world.broker.seal(PATH, 0, 1)
        if shown:
            show(world, [0, 1], FULL_RANGE)
        receipts |= submit(producer, 24, 16)
        await asyncio.sleep(0.5)
        await producer.end()
        assert all(receipt.done() for receipt in receipts.values())
        failed = [receipt.exception() for receipt in receipts.values()]
        assert any(failed)
        assert all(error is None or isinstance(error, ClientClosed) for error in failed)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("writer to")]


async def test_hundreds_of_changes_leave_no_writer_behind(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        segments = [0]
        count = 0
        for turn in range(200):
            ranges = [FULL_RANGE] if len(segments) > 1 else [LOW, HIGH]
            segments = change(world, segments, *ranges)
            submit(producer, count, 8)
            count += 8
            if turn % 3 == 0:
                await producer.flush()
        await producer.flush()
        check_order(world, count)
        assert not producer._retired
        assert len(producer.partitioner.writers) == len(segments)


async def test_a_producer_with_a_fixed_identity_goes_on_with_the_children(simulation: Simulation) -> None:
    block = pa.table({"value": [b"x"], "key": pa.array([b"key-0"], pa.binary())})
    async with (
        producing(simulation) as (world, producer),
        producer.client.repeatable_producer("orders", app="app", part=0, era=1) as repeatable,
    ):
        await repeatable.add(block)
        world.broker.seal(PATH, 0)
        await repeatable.add(block)
        finishing = asyncio.create_task(repeatable.finish())
        await asyncio.sleep(0.1)
        assert not finishing.done()
        show(world, [0], LOW, HIGH)
        assert await finishing == Written(2, 0, False)
        assert (world.values(0), world.values(2)) == ([b"x"], [b"x"])


async def test_a_producer_with_a_fixed_identity_does_not_wait_for_ever_for_a_layout(simulation: Simulation) -> None:
    async with (
        producing(simulation) as (world, producer),
        producer.client.repeatable_producer("orders", app="app", part=0, era=1) as repeatable,
    ):
        world.broker.seal(PATH, 0)
        with pytest.raises(TimedOut, match="no layout has shown its children"):
            await repeatable.add(pa.table({"value": [b"x"]}))


async def test_a_topic_that_is_deleted_while_records_wait_for_a_layout_fails_them(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"connects")
        world.broker.seal(PATH, 0)
        receipt = producer.submit(b"x")
        await asyncio.sleep(0.1)
        del world.broker.topics[PATH]
        world.broker.generation += 1
        with pytest.raises(TopicNotFound, match="does not exist"):
            await receipt
