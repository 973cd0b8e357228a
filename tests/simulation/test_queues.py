"""Queues with one broker and several consumers, in virtual time: deliveries, answers, time-outs, limits, dead letters
(crashes and moves: test_queue_moves.py; replicas: test_replicated_queues.py)."""

from __future__ import annotations

import asyncio
import datetime
import functools
import math
from typing import Any, cast

import msgspec
import pytest

from braid.broker.queues import segment_queue
from braid.model.errors import AckStale, InvalidArgument, SubscriptionKindConflict, SubscriptionNotFound
from braid.model.message import DELIVER_AT, EXPIRES_AT, QueueMessage
from braid.model.queue.state import QueueLimits, QueueState
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from braid.wire.operations import QueueAnswer
from tests.kits.brokers import PATH
from tests.kits.queues import (
    kill_program,
    numbers,
    program,
    queue_at,
    queue_of,
    remaining,
    send,
    take,
    take_all,
)
from tests.kits.waiting import until

BURIED = "public/default/buried"


async def test_an_acked_message_never_comes_again(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=20, ack_timeout_ms=1_000) as (_, client):
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 20)
            assert [int(each.value) for each in messages] == list(range(20))
            assert {each.redelivery_count for each in messages} == {0}
            for message in messages:
                await consumer.ack(message)
            assert await consumer.receive(timeout=10) is None
        assert await remaining(client) == []


async def test_a_message_that_is_not_settled_in_time_comes_again_and_says_how_often(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=2_000) as (_, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        message: QueueMessage | None = None
        for delivered in range(3):
            began = simulation.clock.monotonic()
            (message,) = await take(consumer, 1)
            assert message.redelivery_count == delivered
            assert delivered == 0 or 1.5 < simulation.clock.monotonic() - began < 2.5
        assert message is not None
        await consumer.ack(message)
        assert await consumer.receive(timeout=10) is None


async def test_a_returned_message_comes_after_its_delay_with_the_reason(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=2) as (_, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        first, second = await take(consumer, 2)
        await consumer.ack(second)
        began = simulation.clock.monotonic()
        await consumer.nack(first, delay=10, reason="the database is away")
        (again,) = await take(consumer, 1)
        assert 10 <= simulation.clock.monotonic() - began < 10.1
        assert (again.offset, again.redelivery_count, again.failure) == (0, 1, "the database is away")
        await consumer.nack(again)
        (once_more,) = await take(consumer, 1)
        assert (once_more.redelivery_count, once_more.failure) == (2, "the database is away")


async def test_an_extended_message_stays_with_its_consumer(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=2_000) as (_, client),
        client.queue_consumer("orders", "work", name="slow") as slow,
        client.queue_consumer("orders", "work", name="other") as other,
    ):
        holder, bystander = slow, other
        message = await slow.receive(timeout=1)
        if message is None:
            holder, bystander = other, slow
            (message,) = await take(other, 1)
        for _ in range(5):
            await holder.extend(message, 3)
            assert await bystander.receive(timeout=1.5) is None
        await holder.ack(message)
        assert await bystander.receive(timeout=5) is None


async def test_an_ack_after_the_time_out_counts_while_nobody_else_has_the_message(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=2, ack_timeout_ms=1_000) as (brokers, client),
        client.queue_consumer("orders", "work", prefetch=1) as consumer,
    ):
        (message,) = await take(consumer, 1)
        await until(lambda: queue_at(brokers).counts().leased == 1)
        await consumer.nack(message, delay=60)
        (other,) = await take(consumer, 1)
        await consumer.ack(other)
        await asyncio.sleep(30)
        await consumer.ack(message)  # It waits for its time, and nobody has it.
        assert queue_at(brokers).counts().ready == queue_at(brokers).counts().delayed == 0
        assert await consumer.receive(timeout=60) is None


async def test_an_ack_is_stale_when_another_consumer_has_got_the_message(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=1_000) as (brokers, client),
        program(brokers, "slow") as slow_client,
    ):
        slow = slow_client.queue_consumer("orders", "work", name="slow")
        (message,) = await take(slow, 1)
        kill_program(brokers, "slow")
        async with client.queue_consumer("orders", "work", name="fast") as fast:
            (again,) = await take(fast, 1)
            assert again.redelivery_count == 1
            await fast.extend(again, 60)
            brokers.network.heal("slow")
            with pytest.raises(AckStale):
                await slow.ack(message)
            with pytest.raises(AckStale):
                await slow.nack(message)
            with pytest.raises(AckStale):
                await slow.extend(message, 5)
            await fast.ack(again)
            for answer in (slow.ack(message), slow.nack(message), slow.extend(message, 5)):
                with pytest.raises(AckStale):
                    await answer  # It is settled now, by another consumer.
            await fast.ack(again)  # A repeat is no error.
        assert await slow.receive(timeout=5) is None


async def test_a_stale_ack_that_nobody_waits_for_is_reported_by_flush(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=1_000) as (brokers, client),
        program(brokers, "slow") as slow_client,
    ):
        slow = slow_client.queue_consumer("orders", "work", name="slow")
        (message,) = await take(slow, 1)
        kill_program(brokers, "slow")
        async with client.queue_consumer("orders", "work", name="fast") as fast:
            await take(fast, 1)
            brokers.network.heal("slow")
            slow.submit_ack(message)
            with pytest.raises(AckStale):
                await slow.flush()
            await slow.flush()


# Several consumers.


async def test_two_consumers_share_the_messages_and_none_comes_twice(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, segments=2) as (_, client),
        client.queue_consumer("orders", "work", name="one", prefetch=20) as one,
        client.queue_consumer("orders", "work", name="two", prefetch=20) as two,
    ):
        taking = [asyncio.ensure_future(take_all(each, ack=True)) for each in (one, two)]
        await send(client, range(200))
        shares = [numbers(await each) for each in taking]
        assert sorted(shares[0] + shares[1]) == list(range(200))
        assert min(map(len, shares)) >= 50


async def test_a_slow_consumer_holds_no_more_than_its_prefetch(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=100, ack_timeout_ms=600_000) as (brokers, client),
        client.queue_consumer("orders", "work", name="slow", prefetch=7) as slow,
    ):
        await take(slow, 1)
        await until(lambda: queue_at(brokers).counts().leased == 7)
        async with client.queue_consumer("orders", "work", name="fast", prefetch=10) as fast:
            began = simulation.clock.monotonic()
            await take(fast, 1)
            assert simulation.clock.monotonic() - began < 0.1, "a new consumer gets work immediately"
            found = numbers(await take_all(fast, ack=True))
        assert len(found) + 1 == 93
        assert queue_at(brokers).counts().leased == 7


async def test_credit_returns_before_the_disk_has_the_ack(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=10) as (brokers, client),
        client.queue_consumer("orders", "work", prefetch=1) as consumer,
    ):
        (first,) = await take(consumer, 1)
        brokers.disks["a"].faults = DiskFaults(sync_s=(5.0, 5.0))
        acking = asyncio.ensure_future(consumer.ack(first))
        began = simulation.clock.monotonic()
        (second,) = await take(consumer, 1)
        assert simulation.clock.monotonic() - began < 1
        assert not acking.done()
        await acking
        assert simulation.clock.monotonic() - began >= 5
        assert second.offset == 1


async def test_the_messages_of_a_dead_consumer_return_after_the_time_out(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=10, ack_timeout_ms=20_000) as (brokers, client),
        program(brokers, "dying") as dying,
    ):
        lost = await take(dying.queue_consumer("orders", "work", name="dying"), 4)
        kill_program(brokers, "dying")
        async with client.queue_consumer("orders", "work") as consumer:
            assert await consumer.receive(timeout=15) is None
            found = await take(consumer, 10)
            assert numbers(found) == list(range(10))
            assert {each.redelivery_count for each in found} == {1}
            assert numbers(lost) == [0, 1, 2, 3]


async def test_a_consumer_that_closes_returns_its_messages_now_and_unseen_ones_do_not_count(
    simulation: Simulation,
) -> None:
    async with queue_of(simulation, messages=10, ack_timeout_ms=600_000) as (brokers, client):
        async with client.queue_consumer("orders", "work", name="first") as first:
            messages = await take(first, 4)
            await first.ack(messages[0])
        counts = queue_at(brokers).counts()
        assert (counts.ready, counts.leased, counts.consumers) == (9, 0, ())
        async with client.queue_consumer("orders", "work", name="second") as second:
            began = simulation.clock.monotonic()
            found = await take(second, 9)
            assert simulation.clock.monotonic() - began < 1
        assert {int(each.value): each.redelivery_count for each in found} == {
            **dict.fromkeys((1, 2, 3), 1),
            **dict.fromkeys(range(4, 10), 0),
        }


# Places and kinds.


async def test_a_seek_back_delivers_settled_messages_again(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=10) as (_, client),
        client.queue_consumer("orders", "work", prefetch=5) as consumer,
    ):
        messages = await take(consumer, 5)
        for message in messages[:4]:
            await consumer.ack(message)
        await client.admin.seek("orders", "work", "earliest")
        with pytest.raises(AckStale):
            await consumer.ack(messages[4])
        found = await take_all(consumer, ack=True)
        assert numbers(found) == list(range(10))
        assert {each.redelivery_count for each in found} == {0}


async def test_a_skip_settles_what_waits(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=10) as (_, client),
        client.queue_consumer("orders", "work", prefetch=2) as consumer,
    ):
        held = await take(consumer, 2)
        await client.admin.skip("orders", "work", segment=0, count=4)
        with pytest.raises(AckStale):
            await consumer.ack(held[0])
        assert numbers(await take_all(consumer, ack=True)) == [4, 5, 6, 7, 8, 9]
        await send(client, range(10, 15))
        await client.admin.seek("orders", "work", "latest")
        assert await consumer.receive(timeout=10) is None


@pytest.mark.parametrize("crash", [False, True], ids=["", "crash"])
async def test_a_skip_counts_messages_that_are_not_settled_and_takes_nothing_back(
    simulation: Simulation, crash: bool
) -> None:
    async with queue_of(simulation, messages=10) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 10)
            for offset in (3, 5):
                await consumer.ack(messages[offset])
            await consumer.nack(messages[6], reason="not yet")
            assert await client.admin.skip("orders", "work", segment=0, count=4) == {"offsets": {"0": 6}}
        if crash:
            brokers.kill("a")
            await brokers.start("a")
        async with client.queue_consumer("orders", "work") as consumer:
            found = await take_all(consumer, ack=True)
        assert numbers(found) == [6, 7, 8, 9]
        assert found[0].failure == "not yet"


async def test_a_queue_that_is_deleted_and_created_again_begins_anew(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=6) as (brokers, client):
        consumer = client.queue_consumer("orders", "work")
        for message in await take(consumer, 4):
            await consumer.ack(message)
        await client.admin.delete_subscription("orders", "work", force=True)
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive(timeout=30)
        await client.admin.create_subscription("orders", "work", kind="queue")
        assert await remaining(client) == list(range(6))
        await client.admin.seek("orders", "work", "earliest")
        brokers.kill("a")
        await brokers.start("a")
        assert await remaining(client) == list(range(6))


async def test_a_queue_that_is_deleted_with_acks_under_way_disturbs_nobody_else(simulation: Simulation) -> None:
    """The journal has the acks when the cursor is gone already."""
    async with queue_of(simulation, messages=10) as (brokers, client):
        segment = brokers.running["a"].segments.get(PATH, 0)
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 10)
            brokers.disks["a"].faults = DiskFaults(sync_s=(0.2, 0.2))
            for message in messages[:9]:
                consumer.submit_ack(message)
                await asyncio.sleep(0.01)
            waiting = asyncio.get_running_loop().create_task(consumer.ack(messages[9]))
            await asyncio.sleep(0)
            await client.admin.delete_subscription("orders", "work", force=True)
            async with asyncio.timeout(5):
                for answer in (consumer.flush(), waiting):
                    with pytest.raises(SubscriptionNotFound):
                        await answer
        assert brokers.running["a"].segments.get(PATH, 0) is segment, "it was not opened again"
        await send(client, [10])


async def test_a_stream_and_two_queues_of_one_topic_get_everything_each(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=30, segments=2) as (_, client):
        await client.admin.create_subscription("orders", "more-work", kind="queue")
        async with (
            client.queue_consumer("orders", "work") as one,
            client.queue_consumer("orders", "more-work") as two,
            client.stream_consumer("orders", "reader") as reader,
        ):
            found = await asyncio.gather(take_all(one, ack=True), take_all(two, ack=True))
            assert [numbers(each) for each in found] == [list(range(30)), list(range(30))]
            read: list[int] = []
            while len(read) < 30:
                message = await reader.receive(timeout=60)
                assert message is not None
                read.append(int(message.value))
            assert sorted(read) == list(range(30))


async def test_a_queue_is_no_stream_and_a_stream_is_no_queue(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=1) as (_, client):
        await client.admin.create_subscription("orders", "reader")
        with pytest.raises(SubscriptionKindConflict):
            await client.queue_consumer("orders", "reader").receive(timeout=10)
        with pytest.raises(SubscriptionKindConflict):
            await client.stream_consumer("orders", "work").receive(timeout=10)
        with pytest.raises(SubscriptionNotFound):
            await client.queue_consumer("orders", "nobody").receive(timeout=10)
        assert await remaining(client) == [0]


async def test_a_consumer_cannot_answer_messages_that_it_did_not_get(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, messages=1) as (_, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        (message,) = await take(consumer, 1)
        for wrong in (msgspec.structs.replace(message, offset=5), msgspec.structs.replace(message, segment=7)):
            with pytest.raises(InvalidArgument):
                await consumer.ack(wrong)
        with pytest.raises(InvalidArgument, match="no message to answer: receive returns None if"):
            await consumer.ack(cast("Any", None))
        with pytest.raises(AckStale):
            await consumer.ack(msgspec.structs.replace(message, lease=message.lease + 1))
        await consumer.ack(message)


@pytest.mark.parametrize("wrong", [-1, "5", None, math.nan, 1e12, datetime.timedelta(seconds=5)], ids=repr)
async def test_a_delay_that_is_no_number_of_seconds_is_refused(simulation: Simulation, wrong: Any) -> None:
    async with (
        queue_of(simulation, messages=1) as (_, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        (message,) = await take(consumer, 1)
        with pytest.raises(
            InvalidArgument, match=r"delay is .*; give a number of seconds, 0 or more, and a year at most"
        ):
            await consumer.nack(message, delay=wrong)
        with pytest.raises(
            InvalidArgument, match=r"seconds is .*; give a number of seconds, more than 0, and a year at"
        ):
            await consumer.extend(message, wrong)
        with pytest.raises(InvalidArgument, match="more than 0"):
            await consumer.extend(message, 0)
        await consumer.ack(message)


async def test_a_lone_consumer_is_told_that_its_message_was_delivered_again(simulation: Simulation) -> None:
    """No other consumer is there: the message comes to the same one once more."""
    async with (
        queue_of(simulation, messages=1, ack_timeout_ms=1_000) as (_, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        (message,) = await take(consumer, 1)
        again = await consumer.receive(timeout=60)
        assert again is not None
        with pytest.raises(AckStale, match="message 0 of segment 0 was delivered again since"):
            await consumer.ack(message)
        await consumer.ack(again)


# Delays, times to live, dead letters, limits.


async def test_a_message_with_a_time_is_not_delivered_before_it_and_not_counted(simulation: Simulation) -> None:
    async with (
        queue_of(simulation) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        due_ms = simulation.clock.now_us() // 1000 + 60_000
        await send(client, [0], headers={DELIVER_AT: b"%d" % due_ms})
        await send(client, [1])
        (now,) = await take(consumer, 1)
        assert int(now.value) == 1
        await consumer.ack(now)
        await until(lambda: queue_at(brokers).counts().delayed == 1)
        brokers.kill("a")
        await brokers.start("a")
        assert await consumer.receive(timeout=40) is None
        (later,) = await take(consumer, 1)
        assert (int(later.value), later.redelivery_count) == (0, 0)
        assert due_ms <= simulation.clock.now_us() // 1000 < due_ms + 5_000


async def test_a_message_that_has_expired_is_settled_and_not_delivered(simulation: Simulation) -> None:
    async with queue_of(simulation) as (brokers, client):
        now_ms = simulation.clock.now_us() // 1000
        await send(client, [0], headers={EXPIRES_AT: b"%d" % (now_ms + 5_000)})
        await send(client, [1])
        await asyncio.sleep(6)
        assert await remaining(client) == [1]
        assert queue_at(brokers).counts().ready == 0


async def test_a_message_that_fails_too_often_becomes_one_dead_letter(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client):
        await client.admin.create_topic("buried")
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", max_deliveries=3, dead_letter_topic="buried"
        )
        await client.admin.create_subscription("buried", "graves", kind="queue")
        await send(client, range(3))
        async with client.queue_consumer("orders", "careful") as consumer:
            seen = []
            while (message := await consumer.receive(timeout=10)) is not None:
                seen.append(int(message.value))
                if int(message.value) == 1:
                    await consumer.nack(message, reason="it is poisoned")
                else:
                    await consumer.ack(message)
            assert sorted(seen) == [0, 1, 1, 1, 2]
        async with client.queue_consumer("buried", "graves") as graves:
            (letter,) = await take_all(graves)
        assert (letter.value, letter.key) == (b"1", b"1")
        assert letter.headers["braid-dead-letter-topic"] == b"public/default/orders"
        assert letter.headers["braid-dead-letter-subscription"] == b"careful"
        assert letter.headers["braid-dead-letter-offset"] == b"1"
        assert letter.headers["braid-dead-letter-deliveries"] == b"3"
        assert letter.headers["braid-dead-letter-reason"] == b"it is poisoned"


async def test_a_repeated_ack_of_a_dead_letter_is_counted_once(simulation: Simulation) -> None:
    async with queue_of(simulation) as (brokers, client):
        await client.admin.create_topic("buried")
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", max_deliveries=1, dead_letter_topic="buried"
        )
        await send(client, [0])
        queue = queue_at(brokers, subscription="careful")
        async with client.queue_consumer("orders", "careful") as consumer:
            (message,) = await take(consumer, 1)
            await consumer.nack(message)
            await until(lambda: queue.counts().dead_lettered == 1)
        _, stale = queue.answer(QueueAnswer(1, ((0, 1, message.lease + 1),)))  # The lease of the dead letter.
        assert (stale, queue.counts().dead_lettered) == ([], 1)


async def test_one_dead_letter_is_stored_though_its_consumer_dies_before_the_ack(simulation: Simulation) -> None:
    async with queue_of(simulation) as (brokers, client):
        await client.admin.create_topic("buried")
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", max_deliveries=1, dead_letter_topic="buried", ack_timeout_ms=1_000
        )
        await client.admin.create_subscription("buried", "graves", kind="queue")
        await send(client, [0])
        for host in ("dying-1", "dying-2"):
            async with program(brokers, host) as dying:
                consumer = dying.queue_consumer("orders", "careful")
                await consumer.start()
                if host == "dying-1":
                    await take(consumer, 1)
                # The letter is stored, and the ack never leaves.
                (feed,) = consumer._feeds.values()
                feed._answers.flush = lambda: None  # type: ignore[method-assign]
                await until(lambda: brokers.running["a"].segments.get(BURIED, 0).end == 1)
                kill_program(brokers, host)
                await consumer.end()
        async with client.queue_consumer("orders", "careful") as consumer:
            assert await consumer.receive(timeout=10) is None
        assert queue_at(brokers, subscription="careful").counts().ready == 0
        async with client.queue_consumer("buried", "graves") as graves:
            assert len(await take_all(graves)) == 1


async def test_dead_letters_wait_for_their_topic(simulation: Simulation) -> None:
    async with queue_of(simulation) as (_, client):
        await client.admin.create_topic("buried")
        await client.admin.create_subscription(
            "orders", "careful", kind="queue", max_deliveries=1, dead_letter_topic="buried"
        )
        await client.admin.delete_topic("buried")
        await send(client, [0, 1])
        async with client.queue_consumer("orders", "careful") as consumer:
            for message in await take(consumer, 2):
                await consumer.nack(message)
            assert await consumer.receive(timeout=30) is None
            await client.admin.create_topic("buried")
            await client.admin.create_subscription("buried", "graves", kind="queue")
            assert await consumer.receive(timeout=30) is None
        async with client.queue_consumer("buried", "graves") as graves:
            assert numbers(await take_all(graves)) == [0, 1]


async def test_no_new_messages_are_handed_out_at_the_limit_of_ranges_and_answers_make_room(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = QueueLimits(settled_ranges=5, waiting=1_000)
    monkeypatch.setattr(segment_queue, "QueueState", functools.partial(QueueState, limits=limits))
    async with (
        queue_of(simulation, messages=40) as (brokers, client),
        client.queue_consumer("orders", "work", prefetch=4) as consumer,
    ):
        held: list[QueueMessage] = []
        delayed = set[int]()
        count = 0
        while (message := await consumer.receive(timeout=2)) is not None and len(held) < 40:
            count += 1
            if message.offset % 2:
                await consumer.ack(message)
            else:
                await consumer.extend(message, 3_600)
                held.append(message)
                if len(held) % 3 == 0:
                    delayed.add(held[0].offset)
                    await consumer.nack(held.pop(0), delay=3_600)
        counts = queue_at(brokers).counts()
        assert counts.blocked.startswith("5 ranges are settled out of order")
        assert count < 40
        await client.admin.skip("orders", "work", segment=0, count=1)
        assert not queue_at(brokers).counts().blocked
        acked = {offset for offset in range(count) if offset % 2}
        assert set(numbers(await take_all(consumer, ack=True))) == set(range(1, 40)) - acked - delayed


async def test_no_new_messages_are_handed_out_while_too_many_wait(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = QueueLimits(settled_ranges=1_000, waiting=5)
    monkeypatch.setattr(segment_queue, "QueueState", functools.partial(QueueState, limits=limits))
    async with (
        queue_of(simulation, messages=20) as (brokers, client),
        client.queue_consumer("orders", "work", prefetch=1) as consumer,
    ):
        for _ in range(5):
            (message,) = await take(consumer, 1)
            await consumer.nack(message, delay=60)
        assert await consumer.receive(timeout=30) is None
        assert queue_at(brokers).counts().blocked == "5 messages wait to be delivered again"
        found = await take_all(consumer, 40, ack=True)
        assert numbers(found) == list(range(20))
        assert not queue_at(brokers).counts().blocked
