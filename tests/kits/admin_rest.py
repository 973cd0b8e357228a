"""Records and tokens for tests of the REST interface."""

from __future__ import annotations

from typing import Any

from braid.client.client import connect
from tests.kits.admin import ORDERS

BILLING = f"{ORDERS}/subscriptions/billing"


async def publish(address: Any, count: int) -> None:
    url = f"braid://{address.host}:{address.port}"
    async with connect(url) as client, client.producer("orders") as producer:
        await producer.send_many([(f"key-{number}".encode(), b"x" * 100) for number in range(count)])
