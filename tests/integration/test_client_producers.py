"""Producers against a real broker: what becomes of records when it is gone, and where they go when it is there."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import braid
from braid.broker.broker import Broker
from braid.model.errors import BatchTooLarge, TimedOut
from tests.kits.broker import config, running_broker, url_of

pytestmark = pytest.mark.real_loop


async def test_flush_reports_a_lost_record_also_after_many_failures_that_others_have_seen(tmp_path: Path) -> None:
    broker = await Broker.open(config(str(tmp_path)))
    async with braid.connect(url_of(broker)) as client:
        await client.admin.create_topic("orders")
        producer = await client.producer("orders", timeout=0.1).open()
        await producer.send(b"stored")
        await broker.close()
        for _ in range(20):
            with pytest.raises(TimedOut):
                await producer.send(b"lost, and seen")
        receipt = producer.submit(b"lost, and not seen")
        with pytest.raises(TimedOut):
            await producer.flush()
        assert isinstance(receipt.exception(), TimedOut)
        await producer.flush()  # said once
        producer.abandon()


async def test_send_many_gives_up_after_one_timeout_however_much_is_left(tmp_path: Path) -> None:
    broker = await Broker.open(config(str(tmp_path)))
    async with braid.connect(url_of(broker)) as client:
        await client.admin.create_topic("orders")
        producer = await client.producer("orders", timeout=1.0, max_in_flight_bytes=1 << 20).open()
        await producer.send(b"stored")
        await broker.close()
        begun = asyncio.get_running_loop().time()
        with pytest.raises(TimedOut):
            await producer.send_many([bytes(1_000)] * 100_000)  # 100 times what may be in flight
        assert asyncio.get_running_loop().time() - begun < 20, "a timeout for each wave of batches takes 100 s"
        producer.abandon()


async def test_receipts_can_be_gathered(tmp_path: Path) -> None:
    async with running_broker(str(tmp_path)) as broker, braid.connect(url_of(broker)) as client:
        await client.admin.create_topic("orders")
        async with client.producer("orders") as producer:
            ids = await asyncio.gather(*(producer.submit(b"%d" % number) for number in range(5)))
        assert [message_id.offset for message_id in ids] == list(range(5))


async def test_many_short_lived_producers_without_keys_spread_over_the_segments(tmp_path: Path) -> None:
    async with running_broker(str(tmp_path)) as broker, braid.connect(url_of(broker)) as client:
        await client.admin.create_topic("orders", segments=4)
        used = set()
        for _ in range(64):  # all in one segment: 4 ** -63
            async with client.producer("orders") as producer:
                used.add((await producer.send(b"x")).segment)
        assert len(used) > 1


async def test_new_limits_of_batches_hold_for_the_next_publish(tmp_path: Path) -> None:
    async with running_broker(str(tmp_path)) as broker, braid.connect(url_of(broker)) as client:
        await client.admin.create_topic("orders")
        async with client.producer("orders") as producer:
            await producer.send_many([b"x"] * 3)
            await client.admin.update_topic("orders", max_batch_records=2)
            with pytest.raises(BatchTooLarge, match="max_batch_records"):
                await producer.send_many([b"x"] * 3)
            await client.admin.update_topic("orders", max_batch_records=3, max_decoded_bytes=1_024)
            with pytest.raises(BatchTooLarge, match="max_decoded_bytes"):
                await producer.send(bytes(1_024))
            assert [each.offset for each in await producer.send_many([b"x"] * 3)] == [3, 4, 5]


async def test_a_broker_that_listens_everywhere_is_reached_at_the_address_that_the_client_used(tmp_path: Path) -> None:
    async with running_broker(str(tmp_path), "0.0.0.0:0") as broker:
        async with braid.connect(f"braid://127.0.0.1:{broker.address.port}") as client:
            await client.admin.create_topic("orders")
            topic = await client.routing.topic("public/default/orders")
            assert str(topic.owner(0)) == f"127.0.0.1:{broker.address.port}"
            async with client.producer("orders") as producer:
                assert (await producer.send(b"x")).offset == 0
        assert not broker.front_door.topology.own_address.startswith("0.0.0.0"), "what others are told"
