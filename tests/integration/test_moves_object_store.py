"""Two brokers as processes whose history lies in a real object store: moves and an orderly stop under load."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import braid
from tests.conformance.objects_factories import s3_for_tests
from tests.kits.forked_broker import ForkedBroker
from tests.kits.live_load import TOPIC, Load, check, read_all
from tests.kits.waiting import WAIT_S

pytestmark = pytest.mark.processes


def test_segments_move_through_an_object_store_while_clients_go_on(tmp_path: Path) -> None:
    async def main(first: ForkedBroker, second: ForkedBroker) -> None:
        async with braid.connect(f"{first.url},{second.address}", timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC, segments=2)
            load = Load(client)
            load.start(producers=2, rest_s=0.01)
            await load.goes_on_in({0, 1}, 20)
            for to in ("b1", "b2", "b1"):
                moved = await client.admin.move(TOPIC, to=to)
                assert {each["to"] for each in moved["segments"]} == {to}
                await load.goes_on_in({0, 1}, 20)
            assert await asyncio.to_thread(first.stop) == 0
            await load.goes_on_in({0, 1}, 20)
            await load.stop()
            check(load, await read_all(client))

    with s3_for_tests() as server:
        options = ("--metadata", f"sqlite:{tmp_path}/metadata.db", "--storage", server.url("moves"))
        with (
            ForkedBroker(tmp_path / "b1", "--id", "b1", *options) as first,
            ForkedBroker(tmp_path / "b2", "--id", "b2", *options) as second,
        ):
            asyncio.run(main(first, second))
    for name in ("b1", "b2"):
        assert not list((tmp_path / name).glob("**/*.chunk")), "history lies in the object store alone"
