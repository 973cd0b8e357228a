"""What a broker tells others of itself, with a real client: what it counts for its load report, and its labels."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import braid
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from tests.kits.waiting import until


def test_each_segment_counts_what_went_in_and_out_also_for_consumers_that_have_gone(tmp_path: Path) -> None:
    async def main() -> None:
        broker = await Broker.open(BrokerConfig(data=str(tmp_path / "data"), listen="127.0.0.1:0", admin=""))
        try:
            await use(broker)
        finally:
            await broker.close()

    async def use(broker: Broker) -> None:
        async with braid.connect(f"braid://{broker.address}") as client:
            await client.admin.create_topic("orders", segments=2)
            async with client.producer("orders") as producer:
                await producer.send_many([(b"key-0", b"x" * 1000)] * 100)
            used, idle = sorted(broker.read_load().segments, key=lambda each: -each.bytes_in)
            assert 100_000 < used.bytes_in < 120_000
            assert used.history_bytes >= used.bytes_in
            assert (used.bytes_out, idle.bytes_in, idle.bytes_out, idle.history_bytes) == (0, 0, 0, 0)
            for name in ("first", "second"):
                async with client.stream_consumer("orders", subscription=name, start="earliest") as consumer:
                    for number in range(100):
                        message = await consumer.receive()
                        assert message is not None
                        if number == 49 and name == "first":
                            await consumer.ack(message)
        found = broker.read_load()
        assert found.records_in == 100
        assert sorted(each.bytes_out for each in found.segments) == [0, 2 * used.bytes_in]
        # One subscription has acked half of it, the other one nothing.
        assert sorted(each.backlog_bytes for each in found.segments) == [0, used.history_bytes * 3 // 2]

    asyncio.run(main())


@pytest.mark.real_loop
async def test_a_brokers_labels_are_shown_to_operators(tmp_path: Path) -> None:
    labels = {"team": "ops"}
    config = BrokerConfig(data=str(tmp_path / "data"), listen="127.0.0.1:0", admin="", labels=labels, rack="r1")
    broker = await Broker.open(config)
    try:
        async with braid.connect(f"braid://{broker.address}") as client:
            assert [each["labels"] for each in await client.admin.brokers()] == [labels | {"rack": "r1"}]
    finally:
        await broker.close()


@pytest.mark.parametrize("compression", [None, "lz4"])
def test_key_hashes_are_counted_while_somebody_asks(tmp_path: Path, compression: str | None) -> None:
    """Compressed batches are unpacked in a thread."""

    async def main() -> None:
        broker = await Broker.open(BrokerConfig(data=str(tmp_path / "data"), listen="127.0.0.1:0", admin=""))
        try:
            await use(broker)
        finally:
            await broker.close()

    async def use(broker: Broker) -> None:
        path = "public/default/orders"
        async with braid.connect(f"braid://{broker.address}") as client:
            await client.admin.create_topic("orders")
            broker.group_host.auto_scaling.measure(path)
            samples = broker.segments.get(path, 0).publishes.samples
            assert samples is not None
            async with client.producer("orders", compression=compression) as producer:
                await producer.send_many([(b"key-%d" % number, b"x" * 100) for number in range(1_000)])
            await until(lambda: samples.summary().records > 0)
            found = samples.summary()
            assert 0.4 < found.lower_share < 0.6
            assert found.split_at is not None
            assert 0x7000 < found.split_at < 0x9000

    asyncio.run(main())
