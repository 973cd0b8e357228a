"""What a producer does with its records, against a broker that follows a script."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from braid.client.client import Client, connect
from braid.client.producing.open_batch import GROUP, RECORD_BYTES
from braid.client.producing.producer import Producer
from braid.client.producing.records import slice_records
from braid.client.producing.segment_writer import ANSWER_WAIT_S, EARLY_BYTES, MAX_BATCHES_IN_FLIGHT, SegmentWriter
from braid.model.batch.columns import Message, decode_messages
from braid.model.batch.header import BatchHeader, parse_header
from braid.model.errors import (
    BatchTooLarge,
    BraidError,
    ClientClosed,
    InvalidArgument,
    LogBusy,
    LogFailed,
    NotAvailable,
    PermissionDenied,
    ProducerFull,
    TimedOut,
    TopicNotFound,
)
from braid.model.hashing import key_hash
from braid.model.message import MessageId
from braid.storage.log.producers import REMEMBERED_BATCHES
from braid.testing.scripted_broker import Refuse, ScriptedBroker, Step
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.link import Link
from braid.wire.operations import Route

PATH = "public/default/orders"


class World:
    """A client and one scripted broker, in virtual time."""

    def __init__(self, simulation: Simulation) -> None:
        self.loop = simulation.loop
        self.network = SimulatedNetwork(Random(simulation.seed))
        self.broker = ScriptedBroker(self.network.host("broker"))
        self.clock = simulation.clock

    async def start(self, segments: int = 1) -> None:
        await self.broker.start("broker", 6660)
        self.broker.add_topic(PATH, segments)

    def client(self, **options: Any) -> Client:
        return connect(
            "braid://broker:6660", network=self.network.host("client"), clock=self.clock, random=Random(1), **options
        )

    def batches(self, segment: int = 0) -> list[BatchHeader]:
        return [parse_header(batch) for batch in self.broker.logs[PATH, segment].batches]

    def messages(self, segment: int = 0) -> list[Message]:
        return [message for batch in self.broker.logs[PATH, segment].batches for message in decode_messages(batch)]

    def values(self, segment: int = 0) -> list[bytes]:
        return [message.value for message in self.messages(segment)]


@contextlib.asynccontextmanager
async def producing(
    simulation: Simulation, *, segments: int = 1, timeout: float = 30.0, **options: Any
) -> AsyncIterator[tuple[World, Producer]]:
    world = World(simulation)
    await world.start(segments)
    async with world.client(timeout=timeout) as client, client.producer("orders", **options) as producer:
        yield world, producer
    await world.broker.stop()


def script_of(*steps: Step | Refuse) -> Callable[[Route, BatchHeader], Step | Refuse]:
    """These for the first publishes, then confirm."""
    left = list(steps)
    return lambda route, header: left.pop(0) if left else Step.CONFIRM


async def test_what_is_given_in_one_turn_of_the_loop_is_one_batch(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        ids = await asyncio.gather(*(producer.send(f"value-{number}") for number in range(100)))
        assert ids == [MessageId(0, number) for number in range(100)]
        assert [batch.count for batch in world.batches()] == [100]


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


async def test_many_senders_share_a_batch_and_a_cancelled_one_harms_no_other(simulation: Simulation) -> None:
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
        assert not producer.writers[0].unsettled()[1:], "it waits"
        await asyncio.sleep(ANSWER_WAIT_S)
        assert producer.writers[0].unsettled()[1:], "it has left"
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
        assert producer.writers[0].open is None
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
        assert len(producer.writers[0].unsettled()) == 2, "both have left"
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
            producer.send("größe", key="ключ", headers={"trace": "a1", "raw": b"\x00"}, timestamp=123),
            producer.send(b"plain"),
            producer.send(bytearray(b"mutable"), key=b"k"),  # type: ignore[arg-type]
        )
        first, second, third = world.messages()
        assert (first.value, first.key, first.timestamp_us) == ("größe".encode(), "ключ".encode(), 123)
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
        assert len(await producer.send_many([])) == 0
        assert len(await producer.send_many(f"{number}" for number in range(10))) == 10


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
async def test_compression_is_applied_per_batch(compression: str, simulation: Simulation) -> None:
    async with producing(simulation, compression=compression) as (world, producer):
        await producer.send_many([b"the same again and again"] * 1_000)
        assert all(batch.codec and batch.body_length < batch.raw_length // 4 for batch in world.batches())
        assert world.values() == [b"the same again and again"] * 1_000


async def test_a_lost_reply_is_answered_with_the_offset_of_the_first_try(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.script = script_of(Step.CUT_AFTER)
        assert await producer.send(b"once") == MessageId(0, 0)
        assert world.values() == [b"once"]


async def test_batches_behind_one_that_is_busy_go_again_in_order(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.answer_delay_s = lambda: 0.05
        world.broker.script = script_of(Refuse(LogBusy("later")))
        receipts = []
        for number in range(5):
            receipts.append(producer.submit(f"{number}"))
            await asyncio.sleep(0.01)
        assert [(await receipt).offset for receipt in receipts] == [0, 1, 2, 3, 4]
        assert len({batch.producer_id for batch in world.batches()}) == 1


async def test_a_refused_batch_fails_alone_and_those_behind_it_go_on_under_a_new_id(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.answer_delay_s = lambda: 0.05
        await producer.send(b"before")
        world.broker.script = script_of(Refuse(PermissionDenied("no")))
        receipts = []
        for number in range(4):
            receipts.append(producer.submit(f"{number}"))
            await asyncio.sleep(0.01)
        with pytest.raises(PermissionDenied):
            await receipts[0]
        assert [(await receipt).offset for receipt in receipts[1:]] == [1, 2, 3]
        assert world.values() == [b"before", b"1", b"2", b"3"]
        assert [batch.first_sequence for batch in world.batches()] == [0, 0, 1, 2]
        assert len({batch.producer_id for batch in world.batches()}) == 2


async def test_a_forgotten_producer_goes_on_under_a_new_id_unseen(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"before")
        log = world.broker.logs[PATH, 0]
        log.producers = type(log.producers)()
        assert (await producer.send(b"after")).offset == 1


@pytest.mark.parametrize(
    "doubt",
    [Step.CUT_AFTER, Refuse(LogFailed("the broker lost its lease before the confirm"), stored=True)],
    ids=["lost reply", "failed log"],
)
async def test_a_doubtful_batch_of_a_forgotten_producer_is_not_sent_under_another_number(
    doubt: Step | Refuse, simulation: Simulation
) -> None:
    async with producing(simulation) as (world, producer):
        await producer.send(b"before")

        def forget(route: Route, header: BatchHeader) -> Step | Refuse:
            world.broker.script = forget_now
            return doubt

        def forget_now(route: Route, header: BatchHeader) -> Step:
            log = world.broker.logs[PATH, 0]
            log.producers = type(log.producers)()
            world.broker.script = script_of()
            return Step.CONFIRM

        world.broker.script = forget
        with pytest.raises(TimedOut, match="not known"):
            await producer.send(b"doubtful")
        assert (await producer.send(b"after")).offset == 2
        assert world.values() == [b"before", b"doubtful", b"after"]


async def test_a_broker_that_never_answers_ends_in_timed_out_and_the_producer_lives_on(simulation: Simulation) -> None:
    async with producing(simulation, timeout=2.0) as (world, producer):
        world.broker.script = script_of(Step.IGNORE)
        started = world.loop.time()
        with pytest.raises(TimedOut, match="not known"):
            await producer.send(b"lost")
        assert 1.99 < world.loop.time() - started <= 2.2
        assert (await producer.send(b"next")).offset == 0


async def test_a_batch_that_timed_out_still_goes_in_front_of_those_that_hope(simulation: Simulation) -> None:
    async with producing(simulation, timeout=2.0) as (world, producer):
        world.broker.script = lambda route, header: Step.CUT_BEFORE
        first = producer.submit(b"first")
        await asyncio.sleep(1)
        second = producer.submit(b"second")
        with pytest.raises(TimedOut):
            await first
        world.broker.script = script_of()
        assert (await second).offset == 1
        assert world.values() == [b"first", b"second"]


async def test_what_could_not_be_sent_says_so_and_why(simulation: Simulation) -> None:
    async with producing(simulation, timeout=2.0) as (world, producer):
        await world.broker.stop()
        await asyncio.sleep(0.1)
        with pytest.raises(TimedOut, match=r"not sent; the last error: .*broker:6660"):
            await producer.send(b"lost")


async def test_a_late_reply_of_a_link_that_was_left_is_not_looked_at(simulation: Simulation) -> None:
    async with producing(simulation, timeout=2.0) as (world, producer):
        delays = iter([3.0])
        world.broker.answer_delay_s = lambda: next(delays, 0.0)
        with pytest.raises(TimedOut):
            await producer.send(b"slow")
        second = producer.submit(b"second")  # its answer comes behind the late one of the first
        assert (await second).offset == 1
        await asyncio.sleep(5)
        assert (await producer.send(b"third")).offset == 2


async def test_a_topic_that_is_absent_deleted_or_created_anew_is_said_so(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        with pytest.raises(TopicNotFound):
            async with producer.client.producer("absent"):
                pass
        del world.broker.topics[PATH]
        with pytest.raises(TopicNotFound):
            await producer.send(b"x")
        world.broker.add_topic(PATH, topic_id=8)
        with pytest.raises(TopicNotFound, match="another of the same name"):
            await producer.send(b"x")
        world.broker.add_topic(PATH, topic_id=7, layout_epoch=1)
        with pytest.raises(NotAvailable, match="new layout"):
            await producer.send(b"x")


async def test_flush_raises_what_nobody_looked_at_once(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.script = script_of(Refuse(PermissionDenied("no")))
        producer.submit(b"x")
        with pytest.raises(PermissionDenied):
            await producer.flush()
        await producer.flush()
        world.broker.script = script_of(Refuse(PermissionDenied("no")))
        receipt = producer.submit(b"x")
        with pytest.raises(PermissionDenied):
            await receipt
        assert receipt.done()
        assert isinstance(receipt.exception(), PermissionDenied)
        world.broker.script = script_of(Refuse(PermissionDenied("no")))
        with pytest.raises(PermissionDenied):
            await producer.send(b"x")
        await producer.flush()


async def test_a_receipt_tells_when_it_is_known_and_not_before(simulation: Simulation) -> None:
    async with producing(simulation) as (_world, producer):
        receipt = producer.submit(b"x")
        assert not receipt.done()
        with pytest.raises(asyncio.InvalidStateError):
            receipt.result()
        with pytest.raises(asyncio.InvalidStateError):
            receipt.exception()
        await producer.flush()
        assert receipt.done()
        assert receipt.result() == MessageId(0, 0)
        assert receipt.exception() is None
        assert await receipt == await receipt


async def test_cancelling_one_sender_wakes_only_him(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.answer_delay_s = lambda: 1.0
        senders = [asyncio.create_task(producer.send(f"{number}")) for number in range(5)]
        await asyncio.sleep(0.5)
        senders[1].cancel()
        senders[3].cancel()
        done = await asyncio.gather(*senders, return_exceptions=True)
        assert [type(each) for each in done] == [
            MessageId, asyncio.CancelledError, MessageId, asyncio.CancelledError, MessageId,
        ]  # fmt: skip
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await producer.send(b"x")
        assert len(world.values()) == 6


async def test_each_sender_goes_on_in_its_own_context(simulation: Simulation) -> None:
    from contextvars import ContextVar

    variable: ContextVar[int] = ContextVar("variable")
    async with producing(simulation) as (_world, producer):

        async def send(number: int) -> None:
            variable.set(number)
            await producer.send(b"x")
            assert variable.get() == number
            task = asyncio.current_task()
            assert task is not None
            assert task.get_name() == f"sender {number}"
            await asyncio.sleep(0)
            await producer.send(b"y")

        await asyncio.gather(*(asyncio.create_task(send(each), name=f"sender {each}") for each in range(10)))


async def test_send_waits_while_too_much_is_unconfirmed_and_keeps_its_turn(simulation: Simulation) -> None:
    async with producing(simulation, max_in_flight_bytes=10000, max_batch_bytes=2000) as (world, producer):
        world.broker.answer_delay_s = lambda: 0.1
        highest = 0

        async def watch() -> None:
            nonlocal highest
            while True:
                highest = max(highest, producer.unconfirmed_bytes)
                await asyncio.sleep(0.01)

        watcher = asyncio.create_task(watch())
        tasks = [asyncio.create_task(producer.send(b"%01000d" % number)) for number in range(100)]
        tasks[50].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        watcher.cancel()
        assert highest < 16_000
        assert world.values() == [b"%01000d" % number for number in range(100) if number != 50]


async def test_submit_beyond_the_hard_limit_says_to_flush(simulation: Simulation) -> None:
    async with producing(simulation, max_in_flight_bytes=10000, max_batch_bytes=2000) as (_world, producer):

        def submit_without_end() -> None:
            while True:
                producer.submit(bytes(1_000))

        with pytest.raises(ProducerFull, match="flush"):
            submit_without_end()
        assert producer.unconfirmed_bytes < 100_000
        await producer.flush()
        producer.submit(b"x")


async def test_close_waits_for_what_was_given_and_takes_no_more(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.answer_delay_s = lambda: 1.0
        receipt = producer.submit(b"x")
        await producer.close()
        assert receipt.result() == MessageId(0, 0)
        with pytest.raises(ClientClosed):
            producer.submit(b"y")
        with pytest.raises(ClientClosed):
            await producer.send(b"y")
        await producer.close()


async def test_leaving_by_an_error_does_not_wait_for_a_dead_broker(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.script = lambda route, header: Step.IGNORE
        started = world.loop.time()
        receipts = []

        async def fail() -> None:
            async with producer.client.producer("orders") as other:
                receipts.append(other.submit(b"x"))
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            await fail()
        assert world.loop.time() - started < 3
        assert isinstance(receipts[0].exception(), ClientClosed)


async def test_closing_the_client_closes_its_producers(simulation: Simulation) -> None:
    world = World(simulation)
    await world.start()
    async with world.client() as client:
        producer = await client.producer("orders").open()
        receipt = producer.submit(b"x")
    assert receipt.result() == MessageId(0, 0)
    with pytest.raises(ClientClosed):
        client.producer("orders")
    await world.broker.stop()


async def test_a_failure_in_one_producer_keeps_the_client_from_closing_none_of_the_others(
    simulation: Simulation,
) -> None:
    world = World(simulation)
    await world.start()
    client = world.client()
    await client.open()
    first, second = await client.producer("orders").open(), await client.producer("orders").open()
    world.broker.script = script_of(Refuse(PermissionDenied("no")))
    first.submit(b"refused")
    await asyncio.sleep(0.001)
    receipt = second.submit(b"stored")
    with pytest.raises(PermissionDenied):
        await client.close()
    assert receipt.result() == MessageId(0, 0)
    assert client.pool.connected() is None
    await world.broker.stop()


async def test_submit_needs_an_open_producer_and_send_opens_it(simulation: Simulation) -> None:
    async with producing(simulation) as (_world, producer):
        other = producer.client.producer("orders")
        with pytest.raises(InvalidArgument, match="async with"):
            other.submit(b"x")
        assert (await other.send(b"x")).offset == 0
        assert (await other.submit(b"y")).offset == 1


@pytest.mark.parametrize(
    "options",
    [
        {"linger": -1},
        {"max_batch_bytes": 0},
        {"max_batch_bytes": 1 << 30},
        {"max_batch_records": 0},
        {"compression": "gzip"},
        {"max_in_flight_bytes": 0},
        {"timeout": 0},
    ],
)
async def test_options_that_cannot_work_are_refused(options: dict[str, Any], simulation: Simulation) -> None:
    async with producing(simulation) as (_world, producer):
        with pytest.raises(InvalidArgument):
            producer.client.producer("orders", **options)


async def test_the_owner_moves_and_the_records_follow(simulation: Simulation) -> None:
    world = World(simulation)
    await world.start()
    other = ScriptedBroker(world.network.host("other"))
    await other.start("other", 6660)
    async with world.client() as client, client.producer("orders") as producer:
        await producer.send(b"here")
        other.add_topic(PATH)
        other.generation = 99
        other.logs = world.broker.logs
        world.broker.set_owner(PATH, "other:6660")
        assert (await producer.send(b"there")).offset == 1
        assert other.hellos
    await world.broker.stop()
    await other.stop()


async def test_a_final_refusal_at_reconnect_fails_what_waits(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        world.broker.refuse_hello = PermissionDenied("your token is not known")
        world.broker.cut_all()
        await asyncio.sleep(0.1)
        with pytest.raises(BraidError, match="token"):
            await producer.send(b"x")
        world.broker.refuse_hello = None
        assert (await producer.send(b"x")).offset == 0
