"""A broker as a process of its own: killed, frozen, stopped, started twice, while clients go on."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

import braid
from braid.testing.processes import BRAID, BrokerProcess
from tests.kits.live_load import TOPIC, Load, check, read_all
from tests.kits.waiting import WAIT_S, until

pytestmark = pytest.mark.processes


VECTOR = Path(__file__).parents[1] / "vectors" / "data_folders"


def test_kill_9_at_full_load_loses_nothing_confirmed_and_stores_nothing_twice(tmp_path: Path) -> None:
    async def main(broker: BrokerProcess) -> None:
        async with braid.connect(broker.url, timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC, segments=2)
            load = Load(client)
            load.start(producers=3)
            for _ in range(4):
                await load.goes_on(2_000)
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
        command = [*BRAID, "serve", "--data", str(broker.data), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"]
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
