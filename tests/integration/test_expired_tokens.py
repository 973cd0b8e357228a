"""A connection ends with the token that it began with; programs whose token is renewed in time notice nothing."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import jwt
import pytest

import braid
from braid.broker.auth import LEEWAY_S
from braid.broker.broker import Broker
from braid.broker.config import AuthConfig, BrokerConfig
from braid.model.errors import Unauthenticated
from braid.ports.clock import SystemClock

pytestmark = pytest.mark.real_loop


SECRET = "not very secret, but 32 bytes long"
TIMEOUT_S = 30.0


class ShiftedClock(SystemClock):
    """The wall clock, ahead by as much as a test says."""

    ahead_s = 0.0

    def now_us(self) -> int:
        return super().now_us() + round(self.ahead_s * 1e6)


def token(expires_in_s: float) -> str:
    return jwt.encode({"sub": "ops", "exp": int(time.time() + expires_in_s)}, SECRET, "HS256")


@asynccontextmanager
async def a_broker(folder: Path, clock: ShiftedClock) -> AsyncIterator[Broker]:
    (folder / "secret").write_text(SECRET)
    auth = AuthConfig(secret_file=str(folder / "secret"), superusers=("ops",))
    broker = await Broker.open(BrokerConfig(data=str(folder / "data"), listen="127.0.0.1:0", auth=auth), clock=clock)
    try:
        yield broker
    finally:
        await broker.close()


def url(broker: Broker) -> str:
    return f"braid://127.0.0.1:{broker.address.port}"


async def refused(broker: Broker, times: int) -> None:
    while broker.metrics.connections_refused[Unauthenticated.code] < times:  # noqa: ASYNC110 — nothing tells
        await asyncio.sleep(0.01)


async def test_producers_consumers_and_admin_go_on_with_the_next_token(tmp_path: Path) -> None:
    clock = ShiftedClock()
    lifetimes_s = iter((60.0, 1_000.0))
    async with (
        asyncio.timeout(TIMEOUT_S),
        a_broker(tmp_path, clock) as broker,
        braid.connect(url(broker), token=lambda: token(next(lifetimes_s))) as client,
    ):
        await client.admin.create_topic("orders")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", start="earliest") as stream,
            client.checkpoint_consumer("orders", start="earliest") as reader,
        ):
            for value in (b"before", b"after"):
                await producer.send(value)
                for consumer in (stream, reader):
                    message = await consumer.receive()
                    assert message is not None
                    assert message.value == value
                if value == b"before":
                    clock.ahead_s = 60 + LEEWAY_S + 1
                    await refused(broker, 1)
            assert await client.admin.list_topics() == ["topic://public/default/orders"]


async def test_a_token_that_is_not_renewed_ends_its_consumer(tmp_path: Path) -> None:
    clock = ShiftedClock()
    expires = time.time() + 5
    old = jwt.encode({"sub": "ops", "exp": int(expires)}, SECRET, "HS256")
    answers = itertools.chain([old], itertools.repeat("no token at all"))
    async with (
        asyncio.timeout(TIMEOUT_S),
        a_broker(tmp_path, clock) as broker,
        braid.connect(url(broker), token=lambda: next(answers)) as client,
    ):
        await client.admin.create_topic("orders")
        consumer = client.stream_consumer("orders", "billing")
        await consumer.start()
        clock.ahead_s = 5 + LEEWAY_S + 1
        with pytest.raises(Unauthenticated, match="the token was refused"):
            await consumer.receive()
        await consumer.close()


async def test_a_token_is_good_for_a_connection_as_long_as_for_a_hello(tmp_path: Path) -> None:
    """Clocks may differ by the leeway: who is let in is not thrown out in the next moment."""
    clock = ShiftedClock()
    async with (
        asyncio.timeout(TIMEOUT_S),
        a_broker(tmp_path, clock) as broker,
        braid.connect(url(broker), token=token(60)) as client,
        braid.connect(url(broker), token=token(5)),
    ):
        clock.ahead_s = 60 + LEEWAY_S / 2
        await refused(broker, 1)  # the second one, so the first was looked at too
        assert broker.metrics.connections_refused[Unauthenticated.code] == 1
        assert await client.admin.list_topics() == []
