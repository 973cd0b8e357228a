"""Links and other things in Braid's folders that Braid has not made."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.model.errors import ForeignFile, TopicNotFound
from tests.kits.broker import running_broker
from tests.kits.waiting import until

pytestmark = pytest.mark.real_loop


async def call(broker: Broker, name: str, **arguments: object) -> None:
    await broker.front_door.calls.call(name, {"topic": "orders", **arguments}, ANONYMOUS)


@pytest.mark.parametrize("where", ["wal", "chunks"])
async def test_a_foreign_link_is_named_stays_untouched_and_holds_up_nothing_for_ever(
    tmp_path: Path, where: str
) -> None:
    target = tmp_path / "precious"
    target.mkdir()
    (target / "file").write_bytes(b"precious")
    data = tmp_path / "data"
    async with running_broker(str(data)) as broker:
        await call(broker, "create_topic")
        topic = data / where / "public" / "default" / "orders"
        topic.mkdir(parents=True, exist_ok=True)
        link = topic / "elsewhere"
        link.symlink_to(target)
        async with asyncio.timeout(30):
            for _ in range(2):
                with pytest.raises(ForeignFile, match=r"orders/elsewhere is neither .* remove it"):
                    await call(broker, "delete_topic")
            with pytest.raises(TopicNotFound):
                await call(broker, "get_topic")
            assert link.is_symlink()
            link.unlink()
            await until(lambda: broker.topics.mark("public/default/orders") is None)
            await call(broker, "create_topic")
            await call(broker, "delete_topic")
    assert (target / "file").read_bytes() == b"precious"
