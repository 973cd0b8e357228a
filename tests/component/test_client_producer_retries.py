"""A producer whose broker loses replies, refuses, moves or goes; and how a producer ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from braid.model.batch.header import BatchHeader
from braid.model.errors import (
    BraidError,
    ClientClosed,
    InvalidArgument,
    LogBusy,
    LogFailed,
    PermissionDenied,
    ProducerFull,
    TimedOut,
    TopicNotFound,
)
from braid.model.message import MessageId
from braid.testing.scripted_broker import Refuse, ScriptedBroker, Step
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Route
from tests.kits.client_producer import PATH, World, producing


def script_of(*steps: Step | Refuse) -> Callable[[Route, BatchHeader], Step | Refuse]:
    """These for the first publishes, then confirm."""
    left = list(steps)
    return lambda route, header: left.pop(0) if left else Step.CONFIRM


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
        assert await producer.send(b"x") == MessageId(0, 0)


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
                highest = max(highest, producer.in_flight.total)
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
        assert producer.in_flight.total < 100_000
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
