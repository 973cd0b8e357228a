"""A broker as a process of its own: killed, frozen, stopped, started twice, while clients go on."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import braid
from braid.client.client import Client
from braid.client.producer import Producer
from tests.broker_process import WAIT_S, BrokerProcess, free_port

TOPIC = "orders"
VECTOR = Path(__file__).parents[1] / "vectors" / "data_folders"


class Load:
    """Producers that publish numbered records as fast as they can, and a subscription that follows them. Knows what was
    confirmed, what was sent, and what was consumed."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.confirmed: dict[tuple[int, int], bytes] = {}
        self.sent: list[bytes] = []
        self.consumed: dict[int, list[int]] = {}
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, producers: int) -> None:
        self._tasks = [asyncio.create_task(self._produce(number)) for number in range(producers)]
        self._tasks.append(asyncio.create_task(self._consume()))

    async def stop(self) -> None:
        """Waits until everything that was sent is confirmed and consumed."""
        self._stopping = True
        await asyncio.gather(*self._tasks[:-1])
        await until(lambda: sum(map(len, self.consumed.values())) >= len(self.confirmed))
        self._tasks[-1].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._tasks[-1]

    async def _produce(self, number: int) -> None:
        async with self._client.producer(TOPIC, timeout=WAIT_S) as producer:
            count = 0
            while not self._stopping:
                await self._burst(producer, number, count)
                count += 40

    async def _burst(self, producer: Producer, number: int, first: int) -> None:
        values = [b"%d-%d" % (number, count) for count in range(first, first + 40)]
        self.sent += values
        receipts = [producer.submit(value, key=value if number else None) for value in values]
        for value, receipt in zip(values, receipts):
            message_id = await receipt
            assert (message_id.segment, message_id.offset) not in self.confirmed, "I1: one offset, two records"
            self.confirmed[message_id.segment, message_id.offset] = value

    async def _consume(self) -> None:
        async with self._client.stream_consumer(TOPIC, subscription="follower", start="earliest") as consumer:
            while True:
                batch = await consumer.receive_batch()
                assert batch is not None
                seen = self.consumed.setdefault(batch.segment, [])
                seen += batch.table.column("offset").to_pylist()
                await consumer.ack(batch)


async def until(condition: object, timeout_s: float = WAIT_S) -> None:
    assert callable(condition)
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 (other processes act)
            await asyncio.sleep(0.01)


async def read_all(client: Client) -> dict[tuple[int, int], bytes]:
    """The whole topic, as a newcomer reads it."""
    found: dict[tuple[int, int], bytes] = {}
    positions = await client.admin.topic_stats(TOPIC)
    ends = {int(number): segment["endOffset"] for number, segment in positions["segments"].items()}
    async with client.checkpoint_consumer(TOPIC, start="earliest") as consumer:
        while len(found) < sum(ends.values()):
            batch = await consumer.receive_batch(timeout=WAIT_S)
            assert batch is not None
            offsets = batch.table.column("offset").to_pylist()
            for offset, value in zip(offsets, batch.values()):
                assert (batch.segment, offset) not in found, "I1: an offset came twice"
                found[batch.segment, offset] = value
    for number, end in ends.items():
        assert sorted(offset for segment, offset in found if segment == number) == list(range(end)), "I1: no gap"
    return found


def check(load: Load, stored: dict[tuple[int, int], bytes]) -> None:
    assert {place: stored.get(place) for place in load.confirmed} == load.confirmed, "I2: confirmed is kept"
    twice = [value for value, count in Counter(stored.values()).items() if count > 1]
    assert not twice, f"I10: stored twice: {twice[:5]}"
    assert set(stored.values()) == set(load.sent)
    for segment, offsets in load.consumed.items():
        assert offsets == list(range(len(offsets))), f"a gap or a repeat in segment {segment}"
    orders: dict[tuple[int, bytes], list[int]] = {}
    for (segment, _), value in sorted(stored.items()):
        producer, _, count = value.partition(b"-")
        orders.setdefault((segment, producer), []).append(int(count))
    assert all(counts == sorted(counts) for counts in orders.values()), "the order of a producer's records"


def test_kill_9_at_full_load_loses_nothing_confirmed_and_stores_nothing_twice(tmp_path: Path) -> None:
    async def main(broker: BrokerProcess) -> None:
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC, segments=2)
            load = Load(client)
            load.start(producers=3)
            for _ in range(4):
                before = len(load.confirmed)
                await until(lambda before=before: len(load.confirmed) > before + 2_000)
                broker.kill()
                await asyncio.to_thread(broker.start)
            await load.stop()
            check(load, await read_all(client))

    with BrokerProcess(tmp_path / "data") as broker:
        asyncio.run(main(broker))
        assert broker.stop() == 0


def test_sigterm_at_full_load_stops_in_order_and_keeps_every_ack(tmp_path: Path) -> None:
    async def main(broker: BrokerProcess) -> None:
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC, segments=2)
            load = Load(client)
            load.start(producers=2)
            await until(lambda: len(load.confirmed) > 2_000)
            assert await asyncio.to_thread(broker.stop) == 0
            broker.start()
            await load.stop()
            check(load, await read_all(client))
        # What was acked before an orderly stop of the broker is acked after it.
        assert await asyncio.to_thread(broker.stop) == 0
        broker.start()
        async with braid.connect(broker.url) as client:
            subscription = await client.admin.subscription(TOPIC, "follower")
            assert subscription["backlog"] == 0

    with BrokerProcess(tmp_path / "data") as broker:
        asyncio.run(main(broker))


def test_a_broker_that_was_frozen_past_its_lease_confirms_nothing_and_comes_back_by_itself(tmp_path: Path) -> None:
    config = tmp_path / "broker.toml"
    config.write_text("lease_ttl_s = 2\n")

    async def main(broker: BrokerProcess) -> None:
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC)
            load = Load(client)
            load.start(producers=2)
            await until(lambda: len(load.confirmed) > 500)
            epoch = (await client.admin.topic_stats(TOPIC))["segments"]["0"]["epoch"]
            broker.signal(signal.SIGSTOP)
            await asyncio.sleep(3)  # longer than the lease
            broker.signal(signal.SIGCONT)
            before = len(load.confirmed)
            await until(lambda: len(load.confirmed) > before + 500)
            await load.stop()
            check(load, await read_all(client))
            assert (await client.admin.topic_stats(TOPIC))["segments"]["0"]["epoch"] > epoch

    with BrokerProcess(tmp_path / "data", "--config", str(config)) as broker:
        asyncio.run(main(broker))
        assert broker.stop() == 0


def test_a_second_broker_on_the_same_folder_refuses_and_the_first_does_not_notice(tmp_path: Path) -> None:
    async def publish(url: str) -> None:
        async with braid.connect(url) as client, client.producer(TOPIC) as producer:
            await producer.send(b"still here")

    async def create(url: str) -> None:
        async with braid.connect(url) as client:
            await client.admin.create_topic(TOPIC)

    with BrokerProcess(tmp_path / "data") as broker:
        asyncio.run(create(broker.url))
        command = [sys.executable, "-m", "braid.cli.main", "serve", "--data", str(broker.data)]
        command += ["--listen", f"127.0.0.1:{free_port()}", "--admin", "127.0.0.1:0"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
        assert second.returncode == 1
        assert "used by another broker" in second.stderr
        assert second.stderr.count("\n") == 1, "one line"
        asyncio.run(publish(broker.url))
        assert broker.stop() == 0


@pytest.mark.parametrize("folder", sorted(VECTOR.iterdir()) if VECTOR.exists() else [], ids=lambda path: path.name)
def test_a_folder_that_an_older_version_wrote_opens_with_everything_in_it(folder: Path, tmp_path: Path) -> None:
    """The folders are made by tests/vectors/make_data_folder.py and never changed afterwards."""
    data = tmp_path / "data"
    shutil.copytree(folder, data)

    async def main(url: str) -> None:
        async with braid.connect(url) as client:
            async with client.checkpoint_consumer(TOPIC, start="earliest") as consumer:
                found: list[tuple[int, int, bytes | None, bytes]] = []
                while len(found) < 30:
                    message = await consumer.receive(timeout=WAIT_S)
                    assert message is not None
                    found.append((message.segment, message.offset, message.key, message.value))
            assert sorted(value for *_, value in found) == sorted(b"value-%d" % number for number in range(30))
            assert all(key == b"key-%d" % int(value[6:]) for _, _, key, value in found)
            subscription = await client.admin.subscription(TOPIC, "billing")
            assert subscription["backlog"] == 20
            async with client.producer(TOPIC) as producer:
                ends = {segment: max(each[1] for each in found if each[0] == segment) for segment in (0, 1)}
                message_id = await producer.send(b"new", key=b"key-0")
                assert message_id.offset == ends[message_id.segment] + 1

    with BrokerProcess(data) as broker:
        asyncio.run(main(broker.url))
        assert broker.stop() == 0
