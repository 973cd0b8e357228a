"""The consumers against a real broker over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from braid.broker.broker import Broker
from braid.client.client import Client, connect
from braid.client.consuming.checkpoint import ConsumerCheckpoint
from braid.client.consuming.consumer import Consumer
from braid.client.consuming.stream import StreamConsumer
from braid.model.errors import ClientClosed, ConsumerReplaced, SubscriptionNotFound, TopicNotFound
from braid.model.message import Message, MessageId
from tests.kits.broker import admin, publish, running_broker, url_of
from tests.kits.waiting import until

pytestmark = pytest.mark.real_loop


@contextlib.asynccontextmanager
async def cluster(data: Path, *, segments: int = 1) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(str(data)) as broker, connect(url_of(broker)) as client:
        await admin(client, "create_topic", topic="orders", segments=segments)
        yield broker, client


async def receive(consumer: Consumer, count: int) -> list[Message]:
    messages: list[Message] = []
    while len(messages) < count:
        message = await consumer.receive(timeout=20)
        assert message is not None, f"only {len(messages)} of {count} messages came"
        messages.append(message)
    return messages


def ids(messages: list[Message]) -> list[MessageId]:
    return [message.id for message in messages]


async def test_a_subscription_goes_on_where_it_was_acked(tmp_path: Path) -> None:
    async with cluster(tmp_path, segments=2) as (_, client):
        sent = await publish(client, "orders", 0, [b"%d" % each for each in range(50)])
        sent += await publish(client, "orders", 1, [b"%d" % each for each in range(50)])
        got: list[MessageId] = []
        for count in (30, 1, 69):
            async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
                for message in await receive(consumer, count):
                    got.append(message.id)
                    await consumer.ack(message)
        assert sorted(got) == sent


async def test_what_was_not_acked_comes_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, client):
        await publish(client, "orders", 0, [b"%d" % each for each in range(50)])
        async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
            messages = await receive(consumer, 20)
            await consumer.ack(messages[6])
        async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
            assert (await receive(consumer, 1))[0].offset == 7


async def test_the_live_tail_comes_without_asking(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, client), client.stream_consumer("orders", "billing") as consumer:
        for number in range(100):
            await publish(client, "orders", 0, [b"%d" % number])
            (message,) = await receive(consumer, 1)
            assert (message.offset, message.value) == (number, b"%d" % number)
            await consumer.ack(message)


async def test_consumers_share_the_segments_and_take_them_over(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path, segments=4) as (_, client),
        client.stream_consumer("orders", "billing", name="a", start="earliest") as first,
    ):
        await until(lambda: first.segments == (0, 1, 2, 3))
        async with client.stream_consumer("orders", "billing", name="b", start="earliest") as second:
            await until(lambda: len(first.segments) == len(second.segments) == 2)
            assert set(first.segments) | set(second.segments) == {0, 1, 2, 3}
            for segment in range(4):
                await publish(client, "orders", segment, [b"x"] * 10)
            mine, theirs = await receive(first, 20), await receive(second, 20)
            assert {message.segment for message in mine} == set(first.segments)
            assert {message.segment for message in theirs} == set(second.segments)
            for message in theirs[:15]:
                await second.ack(message)
            left = theirs[15:]
        # Its segments are the first one's again, and what it did not ack with them.
        again = await receive(first, len(left))
        assert sorted(ids(again)) == sorted(ids(left))


async def test_a_segment_moves_between_consumers_without_a_repeat_while_both_work(tmp_path: Path) -> None:
    async with cluster(tmp_path, segments=3) as (_, client):
        got: list[MessageId] = []

        async def work(consumer: StreamConsumer) -> None:
            with contextlib.suppress(ClientClosed):
                async for message in consumer:
                    got.append(message.id)
                    await consumer.ack(message)

        consumers: list[StreamConsumer] = []
        tasks: list[asyncio.Task[None]] = []
        sent: list[MessageId] = []
        for turn in range(8):
            for segment in range(3):
                sent += await publish(client, "orders", segment, [b"x"] * 20)
            if turn % 3 == 2:
                await consumers.pop(0).close()
            else:
                consumer = client.stream_consumer("orders", "billing", name=f"c{turn}", start="earliest")
                await consumer.start()
                consumers.append(consumer)
                tasks.append(asyncio.ensure_future(work(consumer)))
        await until(lambda: len(got) >= len(sent))
        for consumer in consumers:
            await consumer.close()
        await asyncio.gather(*tasks)
        assert sorted(got) == sorted(sent)
        for segment in range(3):
            offsets = [each.offset for each in got if each.segment == segment]
            assert offsets == sorted(offsets)


async def test_a_restart_of_the_broker_repeats_nothing_and_skips_nothing(tmp_path: Path) -> None:
    async with running_broker(str(tmp_path)) as broker:
        listen = f"127.0.0.1:{broker.address.port}"
        client = connect(url_of(broker))
        await client.open()
        await admin(client, "create_topic", topic="orders", segments=2)
        consumer = client.stream_consumer("orders", "billing", start="earliest")
        reader = client.checkpoint_consumer("orders", start="earliest")
        await consumer.start()
        await reader.start()
        sent = await publish(client, "orders", 0, [b"x"] * 30) + await publish(client, "orders", 1, [b"x"] * 30)
        got, read = await receive(consumer, 17), await receive(reader, 23)
        await consumer.ack(got[8])
    async with running_broker(str(tmp_path), listen):
        got, read = got + await receive(consumer, 43), read + await receive(reader, 37)
        assert sorted(ids(got)) == sorted(ids(read)) == sorted(sent)
        sent += await publish(client, "orders", 1, [b"y"] * 5)
        got, read = got + await receive(consumer, 5), read + await receive(reader, 5)
        assert sorted(ids(got)) == sorted(ids(read)) == sorted(sent)
        for message in got:
            await consumer.ack(message)
        await client.close()
        with pytest.raises(ClientClosed):
            await consumer.receive()


async def test_a_seek_moves_a_running_consumer(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (_, client),
        client.stream_consumer("orders", "billing", start="earliest") as consumer,
    ):
        await publish(client, "orders", 0, [b"x"] * 20)
        messages = await receive(consumer, 20)
        await consumer.ack(messages[-1])
        await consumer.flush_acks()
        await admin(client, "seek_subscription", topic="orders", subscription="billing", to="earliest")
        assert [message.offset for message in await receive(consumer, 20)] == list(range(20))


async def test_batches_larger_than_the_window_arrive(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, client):
        sizes = [10, 1 << 20, 10, 5 << 20, 30_000, 60_000, 60_000]
        for size in sizes:
            await publish(client, "orders", 0, [bytes(size)])
        async with client.stream_consumer("orders", "billing", start="earliest", window_bytes=64 << 10) as consumer:
            assert [len(message.value) for message in await receive(consumer, len(sizes))] == sizes


async def test_a_consumer_that_never_reads_costs_its_window_and_disturbs_nobody(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, client):
        window = 256 << 10
        async with (
            client.stream_consumer("orders", "idle", start="earliest", window_bytes=window) as idle,
            client.stream_consumer("orders", "busy", start="earliest") as busy,
        ):
            for _ in range(40):
                await publish(client, "orders", 0, [bytes(1_000)] * 100)
            assert len(await receive(busy, 4_000)) == 4_000
            (feed,) = idle._readers.values()
            assert feed.channel is not None
            assert 0 < feed.channel.waiting_bytes <= window
            assert len(await receive(idle, 4_000)) == 4_000


async def test_a_second_consumer_of_the_same_name_replaces_the_first(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (broker, client),
        connect(url_of(broker)) as other,
        client.stream_consumer("orders", "billing", name="twin") as first,
    ):
        await until(lambda: first.segments)
        async with other.stream_consumer("orders", "billing", name="twin") as second:
            with pytest.raises(ConsumerReplaced):
                await first.receive(timeout=20)
            await publish(client, "orders", 0, [b"for the second"])
            assert (await receive(second, 1))[0].value == b"for the second"


async def test_deleting_the_topic_ends_its_consumers(tmp_path: Path) -> None:
    async with (
        cluster(tmp_path) as (_, client),
        client.stream_consumer("orders", "billing") as consumer,
        client.checkpoint_consumer("orders", start="earliest") as reader,
    ):
        await until(lambda: consumer.segments)
        await admin(client, "delete_topic", topic="orders", force=True)
        for each in (consumer, reader):
            with pytest.raises(TopicNotFound):
                await each.receive(timeout=20)


async def test_deleting_the_subscription_ends_its_consumers(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, client), client.stream_consumer("orders", "billing") as consumer:
        await until(lambda: consumer.segments)
        await admin(client, "delete_subscription", topic="orders", subscription="billing", force=True)
        with pytest.raises(SubscriptionNotFound):
            await consumer.receive(timeout=20)


async def test_a_checkpoint_is_continued_and_a_time_is_found(tmp_path: Path) -> None:
    async with cluster(tmp_path, segments=2) as (_, client):
        sent = []
        for hour in range(3):
            for segment in range(2):
                sent += await publish(client, "orders", segment, [b"%d" % hour] * 10, now_us=hour * 3_600_000_000 + 1)
        got: list[MessageId] = []
        saved: bytes | str = "earliest"
        for count in (25, 25, 10):
            async with client.checkpoint_consumer("orders", start=saved) as consumer:
                got += ids(await receive(consumer, count))
                saved = consumer.checkpoint()
        assert sorted(got) == sorted(sent)
        assert isinstance(saved, bytes)
        assert ConsumerCheckpoint.from_bytes(saved).positions == {0: 30, 1: 30}
        second_hour = datetime.datetime(1970, 1, 1, 1, tzinfo=datetime.UTC)
        async with client.checkpoint_consumer("orders", start=second_hour) as consumer:
            assert {message.value for message in await receive(consumer, 40)} == {b"1", b"2"}
        async with client.checkpoint_consumer("orders", start="latest") as consumer:
            assert await consumer.receive(timeout=0.05) is None
            new = await publish(client, "orders", 1, [b"new"])
            assert ids(await receive(consumer, 1)) == new


async def test_a_delivery_is_a_table_a_list_of_values_and_messages(tmp_path: Path) -> None:
    async with cluster(tmp_path) as (_, client):
        for number in range(5):
            await publish(client, "orders", 0, [b"%d-%d" % (number, each) for each in range(100)], now_us=number)
        async with client.checkpoint_consumer("orders", start="earliest") as consumer:
            batch = await consumer.receive_batch(timeout=20)
            assert batch is not None
            assert len(batch) == 500, "several batches come in one delivery"
            table = batch.table
            assert table.column_names == ["offset", "key", "value", "timestamp", "headers", "key_hash"]
            assert table["offset"].to_pylist() == list(range(500))
            assert table["value"].to_pylist() == batch.values() == [each.value for each in batch.messages()]
            assert batch.messages()[123].timestamp_us == 1


async def test_what_channels_read_ahead_is_given_back_also_when_they_end_on_the_way(tmp_path: Path) -> None:
    """I12: the memory is counted for the whole broker, so a channel that kept its share would slow down all others."""
    async with running_broker(str(tmp_path)) as broker, connect(url_of(broker)) as client:
        await client.admin.create_topic("large")
        async with client.producer("large") as producer:
            await producer.send_many([bytes(1_000)] * 40_000)
        free = broker.front_door.read_ahead.left
        for batches in (1, 3, 100):
            async with client.checkpoint_consumer("large", start="earliest") as consumer:
                while batches and (await consumer.receive_batch(timeout=0.5)) is not None:
                    batches -= 1
        async with asyncio.timeout(20):
            while broker.front_door.read_ahead.left != free:  # noqa: ASYNC110 (the broker hears of the end by the network)
                await asyncio.sleep(0.01)
