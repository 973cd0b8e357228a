"""Braid: a durable message broker whose topics move between brokers, and whose history is a Spark table.

    async with braid.connect("braid://127.0.0.1:6660") as client: …

`import braid` costs little: what it exports is imported when it is first used, and Arrow with the first producer or
consumer.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from braid.model.errors import BraidError

if TYPE_CHECKING:
    from braid import sync as sync
    from braid.client.client import Client as Client
    from braid.client.client import connect as connect
    from braid.model import errors as errors
    from braid.model.message import Message as Message
    from braid.model.message import MessageId as MessageId
    from braid.ports.allocator import keep_freed_memory as keep_freed_memory

__version__ = "0.2.0"

__all__ = [
    "BraidError",
    "Client",
    "Message",
    "MessageId",
    "__version__",
    "connect",
    "errors",
    "keep_freed_memory",
    "sync",
]

_HOMES = {
    "Client": "braid.client.client",
    "connect": "braid.client.client",
    "Message": "braid.model.message",
    "MessageId": "braid.model.message",
    "keep_freed_memory": "braid.ports.allocator",
}
_MODULES = {"errors": "braid.model.errors", "sync": "braid.sync"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = import_module(_MODULES[name])
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'braid' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
