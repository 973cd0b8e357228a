"""Administrative calls to a broker, as a client makes them."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

from braid.broker.auth import ANONYMOUS, Principal
from braid.broker.broker import Broker

Call = Callable[..., Awaitable[Any]]


def caller(broker: Broker, principal: Principal = ANONYMOUS) -> Call:
    async def call(name: str, **arguments: Any) -> Any:
        result = await broker.front_door.calls.call(name, arguments, principal)
        return json.loads(json.dumps(result))  # JSON-able, and as a client sees it

    return call
