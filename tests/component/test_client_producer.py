"""What a producer does with its records, against a broker that follows a script."""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from braid.client.producing.departure import ANSWER_WAIT_S, EARLY_BYTES
from braid.client.producing.open_batch import GROUP, RECORD_BYTES
from braid.client.producing.producer import Producer
from braid.client.producing.records import slice_records
from braid.client.producing.segment_writer import MAX_BATCHES_IN_FLIGHT, SegmentWriter
from braid.model.errors import BatchTooLarge, InvalidArgument
from braid.model.hashing import key_hash
from braid.model.message import MessageId
from braid.storage.log.producers import REMEMBERED_BATCHES
from braid.testing.sim.loop import Simulation
from braid.wire import wakeup
from braid.wire.link import Link
from tests.kits.client_producer import PATH, World, producing

NOON_US = 1_794_744_000_000_000


async def test_what_is_given_in_one_turn_of_the_loop_is_one_batch(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        ids = await asyncio.gather(*(producer.send(f"value-{number}") for number in range(100)))
        assert ids == [MessageId(0, number) for number in range(100)]
        assert [batch.count for batch in world.batches()] == [100]


async def test_the_objects_that_each_record_touches_keep_their_attributes_in_place(simulation: Simulation) -> None:
    """CPython 3.11 keeps up to 29 attributes in the object itself. With one more, each access goes through a dict."""
    async with producing(simulation) as (_, producer):
        writer = producer.partitioner.only
        assert writer is not None
        assert max(len(vars(writer)), len(vars(producer))) <= 29


@pytest.mark.parametrize(
    ("options", "several"), [({}, True), ({"linger": 0.001}, False), ({"compression": "lz4"}, False)]
)
async def test_a_large_turn_begins_to_leave_before_it_ends(
    options: dict[str, Any], several: bool, simulation: Simulation
) -> None:
    async def body(world: World, producer: Producer) -> None:
        for _ in range(2):  # also when the first are confirmed and nothing is under way again
            for number in range(2_000):
                producer.submit(b"%0100d" % number)
            await producer.flush()
        counts = [batch.count for batch in world.batches()]
        if several:
            early = -(-EARLY_BYTES // (100 + RECORD_BYTES))
            assert counts == [early, 2_000 - early] * 2
        else:
            assert counts == [2_000] * 2
        assert world.values() == [b"%0100d" % number for number in range(2_000)] * 2

    async with producing(simulation, **options) as (world, producer):
        await producer.send(b"%0100d" % 0)  # connects
        world.broker.logs[PATH, 0].batches.clear()
        await body(world, producer)


async def test_who_sends_again_when_his_record_is_stored_does_so_in_the_turn_of_the_confirm(
    simulation: Simulation,
) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"connects")
        loop, planned = asyncio.get_running_loop(), []
        call_soon = loop.call_soon

        def watched(callback: Callable[..., object], *arguments: Any, **options: Any) -> asyncio.Handle:
            planned.append(callback)
            return call_soon(callback, *arguments, **options)

        loop.call_soon = watched  # type: ignore[method-assign, assignment]
        for number in range(20):
            await producer.send(b"%d" % number)
        del loop.call_soon
        whose = [type(getattr(each, "__self__", None)) for each in planned]
        assert whose
        assert not {SegmentWriter, Link}.intersection(whose)
        assert len(world.batches()) == 21


@pytest.mark.parametrize("stepping", [True, False], ids=["stepping", "plain"])
async def test_many_senders_share_a_batch_and_a_cancelled_one_harms_no_other(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, stepping: bool
) -> None:
    monkeypatch.setattr(wakeup, "stepping", stepping)
    async with producing(simulation) as (world, producer):
        world.broker.answer_delay_s = lambda: 1.0
        senders = [asyncio.create_task(producer.send(b"%d" % number)) for number in range(3 * GROUP)]
        await asyncio.sleep(0.5)
        cancelled = (0, 5, GROUP, 3 * GROUP - 1)
        for number in cancelled:
            senders[number].cancel()
        done = await asyncio.gather(*senders, return_exceptions=True)
        assert [batch.count for batch in world.batches()] == [3 * GROUP]
        for number, each in enumerate(done):
            if number in cancelled:
                assert isinstance(each, asyncio.CancelledError)
            else:
                assert each == MessageId(0, number)
        await asyncio.wait_for(asyncio.gather(*(producer.send(b"x") for _ in range(3 * GROUP))), 10)


async def test_records_gather_while_eight_batches_are_under_way(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.answer_delay_s = lambda: 1.0
        for number in range(100):
            producer.submit(f"{number}")
            await asyncio.sleep(2 * ANSWER_WAIT_S)  # None is answered so soon, so each leaves alone.
        await producer.flush()
        counts = [batch.count for batch in world.batches()]
        assert MAX_BATCHES_IN_FLIGHT == REMEMBERED_BATCHES
        assert counts[:MAX_BATCHES_IN_FLIGHT] == [1] * MAX_BATCHES_IN_FLIGHT
        assert len(counts) == MAX_BATCHES_IN_FLIGHT + 1
        assert world.values() == [b"%d" % number for number in range(100)]


async def test_a_small_batch_waits_for_the_answer_of_the_one_before_it(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.network.latency_s = (ANSWER_WAIT_S / 10, ANSWER_WAIT_S / 10)
        await producer.send(b"before")
        for number in range(100):
            producer.submit(f"{number}")
            await asyncio.sleep(ANSWER_WAIT_S / 40)
        await producer.flush()
        counts = [batch.count for batch in world.batches()]
        assert counts[:2] == [1, 1], "nothing was under way"
        assert 8 <= len(counts) <= 16, "one for each answer"
        assert world.values()[1:] == [b"%d" % number for number in range(100)]


async def test_a_small_batch_does_not_wait_long_for_a_broker_far_away(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.network.latency_s = (1.0, 1.0)
        producer.submit(b"first")
        await asyncio.sleep(ANSWER_WAIT_S)
        last = producer.submit(b"second")
        await asyncio.sleep(ANSWER_WAIT_S / 10)
        assert not producer.partitioner.writers[0].unsettled()[1:], "it waits"
        await asyncio.sleep(ANSWER_WAIT_S)
        assert producer.partitioner.writers[0].unsettled()[1:], "it has left"
        assert (await last).offset == 1
        assert [batch.count for batch in world.batches()] == [1, 1]


async def test_a_larger_batch_waits_for_no_answer(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.network.latency_s = (1.0, 1.0)
        producer.submit(b"first")
        await asyncio.sleep(ANSWER_WAIT_S)
        for _ in range(2):
            producer.submit(bytes(EARLY_BYTES // 2))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert producer.partitioner.writers[0].open is None
        await producer.flush()
        assert [batch.count for batch in world.batches()] == [1, 2]


async def test_a_batch_that_waits_and_grows_leaves_when_it_is_large(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.network.latency_s = (1.0, 1.0)
        producer.submit(b"first")
        await asyncio.sleep(ANSWER_WAIT_S)
        producer.submit(b"small")
        await asyncio.sleep(ANSWER_WAIT_S / 10)
        producer.submit(bytes(EARLY_BYTES))
        assert len(producer.partitioner.writers[0].unsettled()) == 2, "both have left"
        await producer.flush()
        assert [batch.count for batch in world.batches()] == [1, 2]


async def test_linger_is_kept_also_while_something_is_under_way(simulation: Simulation) -> None:
    async with producing(simulation, linger=0.2) as (world, producer):
        world.network.latency_s = (1.0, 1.0)
        producer.submit(b"first")
        await asyncio.sleep(0.25)
        for number in range(10):
            producer.submit(f"{number}")
            await asyncio.sleep(0.01)
        await producer.flush()
        assert [batch.count for batch in world.batches()] == [1, 10]


async def test_a_lane_without_a_link_has_no_timer_that_goes_round(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.network.latency_s = (1.0, 1.0)
        producer.submit(b"first")
        await asyncio.sleep(ANSWER_WAIT_S)
        world.broker.cut_all()
        producer.submit(b"second")
        await asyncio.sleep(0.1)
        world.network.cut("client", "broker")
        before = world.loop.steps
        await asyncio.sleep(1.0)
        assert world.loop.steps - before < 500
        world.network.heal()
        world.network.latency_s = (100e-6, 100e-6)


@pytest.mark.parametrize("more", [0, 1])
async def test_send_many_of_whole_slices_and_of_one_more(more: int, simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        count = 3 * slice_records(b"12345678", 1 << 20) + more
        ids = await producer.send_many([b"%08d" % number for number in range(count)])
        assert [each.offset for each in ids] == list(range(count))
        assert world.values() == [b"%08d" % number for number in range(count)]


async def test_linger_waits_for_more_but_not_for_a_full_batch_nor_for_flush(simulation: Simulation) -> None:
    async with producing(simulation, linger=0.5, max_batch_bytes=1000) as (world, producer):
        started = world.loop.time()
        first = producer.submit(b"1")
        await asyncio.sleep(0.2)
        second = producer.submit(b"2")
        await first
        assert 0.5 <= world.loop.time() - started < 0.6
        assert (await second).offset == 1
        assert [batch.count for batch in world.batches()] == [2]

        started = world.loop.time()
        await asyncio.gather(*(producer.send(b"x" * 100) for _ in range(20)))  # more than max_batch_bytes
        await producer.send_many([b"y"] * 3)
        assert [batch.count for batch in world.batches()][1] == 9
        producer.submit(b"z")
        started = world.loop.time()
        await producer.flush()
        assert world.loop.time() - started < 0.1


async def test_headers_keys_timestamps_and_text_arrive_as_they_were_given(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await asyncio.gather(
            producer.send("größe", key="ключ", headers={"trace": "a1", "raw": b"\x00"}, timestamp=NOON_US),
            producer.send(b"plain"),
            producer.send(bytearray(b"mutable"), key=b"k"),  # type: ignore[arg-type]
        )
        first, second, third = world.messages()
        assert (first.value, first.key, first.timestamp_us) == ("größe".encode(), "ключ".encode(), NOON_US)
        assert first.headers == {"trace": b"a1", "raw": b"\x00"}
        assert (second.value, second.key, second.headers) == (b"plain", None, {})
        assert second.timestamp_us > 1_000_000
        assert (third.value, third.key) == (b"mutable", b"k")


@pytest.mark.parametrize(
    "record",
    [
        {"value": 7},
        {"value": None},
        {"value": b"x", "key": 7},
        {"value": b"x", "headers": {"a": 1}},
        {"value": b"x", "headers": {1: b""}},
        {"value": b"x", "timestamp": "now"},
        {"value": b"x", "timestamp": 1 << 63},
        {"value": b"x", "timestamp": NOON_US // 1_000},
        {"value": b"x", "timestamp": datetime.datetime(2026, 11, 15, 12)},  # noqa: DTZ001 (it has no zone)
        {"value": "\ud800"},
    ],
)
async def test_a_bad_record_is_refused_at_once_and_harms_no_other(
    record: dict[str, Any], simulation: Simulation
) -> None:
    async with producing(simulation) as (world, producer):
        good = producer.submit(b"good")
        with pytest.raises(InvalidArgument):
            producer.submit(**record)
        assert (await good).offset == 0
        assert world.values() == [b"good"]


async def test_a_record_above_the_limit_is_refused_before_it_is_sent(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        with pytest.raises(BatchTooLarge):
            producer.submit(bytes(33 << 20))
        world.broker.max_frame_bytes = 10_000
        world.broker.cut_all()
        await asyncio.sleep(0.1)
        with pytest.raises(BatchTooLarge):
            await producer.send(bytes(20_000))
        await producer.send(bytes(5_000))


async def test_a_key_goes_to_the_segment_of_its_hash_whichever_way_it_is_given(simulation: Simulation) -> None:
    async with producing(simulation, segments=4) as (world, producer):
        keys = [f"key-{number}".encode() for number in range(50)]
        expected = [key_hash(key) // 0x4000 for key in keys]
        assert [(await producer.send(b"", key=key)).segment for key in keys] == expected
        pairs = await producer.send_many([(key, key) for key in keys])
        assert [where.segment for where in pairs] == expected
        table = await producer.send_table(pa.table({"key": keys, "value": keys}))
        assert [where.segment for where in table] == expected
        for ids in (pairs, table):
            assert [world.messages(segment)[offset].value for segment, offset in ids] == keys


async def test_records_without_a_key_go_round_the_segments_a_batch_at_a_time(simulation: Simulation) -> None:
    async with producing(simulation, segments=3) as (_world, producer):
        segments = []
        for _ in range(6):
            ids = await asyncio.gather(*(producer.send(b"x") for _ in range(10)))
            assert len({where.segment for where in ids}) == 1
            segments.append(ids[0].segment)
        assert segments == [0, 1, 2, 0, 1, 2]
        mixed = await producer.send_many([(None, b"n"), (b"key-0", b"k"), (None, b"n")])
        assert mixed[0].segment == mixed[2].segment
        assert mixed[1].segment == key_hash(b"key-0") // 0x5555


async def test_send_many_keeps_its_order_behind_what_was_submitted_and_cuts_batches_by_size(
    simulation: Simulation,
) -> None:
    async with producing(simulation, max_batch_bytes=4096) as (world, producer):
        producer.submit(b"first")
        ids = await producer.send_many([b"%0100d" % number for number in range(1_000)])
        await producer.send(b"last")
        assert world.values() == [b"first", *(b"%0100d" % number for number in range(1_000)), b"last"]
        assert list(ids) == [MessageId(0, number + 1) for number in range(1_000)]
        assert ids[-1] == MessageId(0, 1_000)
        assert ids[2:4] == [MessageId(0, 3), MessageId(0, 4)]
        assert all(batch.raw_length < 5_000 for batch in world.batches())


async def test_send_many_refuses_a_mixture_and_takes_generators_and_nothing(simulation: Simulation) -> None:
    async with producing(simulation) as (_world, producer):
        with pytest.raises(InvalidArgument):
            await producer.send_many([b"a", (b"k", b"v")])  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await producer.send_many(b"abc")  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument):
            await producer.send_table(pa.table({"other": [1]}))
        with pytest.raises(InvalidArgument, match="milliseconds"):
            await producer.send_table(pa.table({"value": ["a", "b"], "timestamp": [NOON_US, NOON_US // 1_000]}))
        assert len(await producer.send_many([])) == 0
        assert len(await producer.send_many(f"{number}" for number in range(10))) == 10


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
async def test_compression_is_applied_per_batch(compression: str, simulation: Simulation) -> None:
    async with producing(simulation, compression=compression) as (world, producer):
        await producer.send_many([b"the same again and again"] * 1_000)
        assert all(batch.codec and batch.body_length < batch.raw_length // 4 for batch in world.batches())
        assert world.values() == [b"the same again and again"] * 1_000
