"""The calls that brokers of a cluster make to each other, by name: the answering side. `links.py` is the asking side.

A call has arguments and a result, both of them MessagePack values; the bytes of objects travel beside the arguments.
The parts of a broker register the calls that they answer when the broker is put together. Only brokers get here: the
session has checked the cluster's secret.

A call runs to its end even if the broker that asked is gone meanwhile (`shielded_tasks.py`). That broker may ask again,
so every call can be repeated. A call of which nothing can be half done needs no such shield (`shielded=False`): it ends
with its connection.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Final

from braid.broker.shielded_tasks import ShieldedTasks
from braid.model.errors import UnknownOperation
from braid.ports.disk import Buffer
from braid.wire.operations import PeerRequest

Arguments = dict[str, Any]

COPY_STATE: Final = "copy_state"
"""Asks a broker how far its copy of a log reaches."""


class PeerCalls:
    def __init__(self) -> None:
        self._handlers: dict[str, tuple[Callable[[Arguments, Buffer], Coroutine[Any, Any, Any]], bool]] = {}
        self._tasks = ShieldedTasks()

    def register(self, call: str, handler: Callable[[Arguments], Coroutine[Any, Any, Any]]) -> None:
        self.register_with_payload(call, lambda arguments, _: handler(arguments))

    def register_with_payload(
        self, call: str, handler: Callable[[Arguments, Buffer], Coroutine[Any, Any, Any]], *, shielded: bool = True
    ) -> None:
        assert call not in self._handlers, f"two handlers for {call}"
        self._handlers[call] = handler, shielded

    async def answer(self, request: PeerRequest, payload: Buffer) -> Any:
        """Run the call and return its result."""
        found = self._handlers.get(request.call)
        if found is None:
            raise UnknownOperation(f"this broker does not know the call {request.call}; is it of an older version?")
        handler, shielded = found
        if not shielded:
            return await handler(request.arguments, payload)
        return await self._tasks.run(request.call, handler(request.arguments, payload))

    async def close(self) -> None:
        """Wait for the calls that are under way."""
        await self._tasks.close()
