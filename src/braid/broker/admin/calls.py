"""Carrying out administrative calls, for the REST interface and for the wire's ADMIN.

What calls there are is declared in the modules beside this one, a struct each (`call.py`). A call is carried to its end
even if the one who asked is gone meanwhile (`shielded_tasks.py`).
"""

from __future__ import annotations

from typing import Any

from braid.broker.admin import cluster, layouts, moves, replicas, subscriptions, topics
from braid.broker.admin.call import CALLS, read_call
from braid.broker.admin.services import CallServices
from braid.broker.auth import Principal
from braid.broker.error_mapping import to_client
from braid.broker.shielded_tasks import ShieldedTasks
from braid.model.errors import Fenced, InvalidArgument, LogClosed, quote

SUBJECTS = (topics, replicas, layouts, subscriptions, moves, cluster)
"""Where the calls are: importing them makes them known."""


class Calls:
    def __init__(self, services: CallServices) -> None:
        self._services = services
        self._tasks = ShieldedTasks()

    async def call(self, name: str, arguments: dict[str, Any], principal: Principal) -> Any:
        kind = CALLS.get(name)
        if kind is None:
            raise InvalidArgument(f"there is no call {quote(name)}; the calls are {', '.join(sorted(CALLS))}")
        asked = read_call(name, kind, arguments)
        try:
            return await self._tasks.run(name, asked.carry_out(self._services, principal))
        except (Fenced, LogClosed) as error:
            raise to_client(error) from error

    async def close(self) -> None:
        """Wait for the calls that are under way. Those that only wait for other brokers end immediately: what they
        began goes on without them."""
        self._services.owners.view.end_waits()
        await self._tasks.close()
