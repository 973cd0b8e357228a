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
    from braid import errors as errors
    from braid import sync as sync
    from braid.client.admin import Admin as Admin
    from braid.client.client import Client as Client
    from braid.client.client import connect as connect
    from braid.client.consuming.checkpoint import CheckpointConsumer as CheckpointConsumer
    from braid.client.consuming.consumer import Consumer as Consumer
    from braid.client.consuming.delivery import ReceivedBatch as ReceivedBatch
    from braid.client.consuming.queue import QueueConsumer as QueueConsumer
    from braid.client.consuming.stream import StreamConsumer as StreamConsumer
    from braid.client.producing.open_batch import MessageIds as MessageIds
    from braid.client.producing.open_batch import Receipt as Receipt
    from braid.client.producing.options import ProducerOptions as ProducerOptions
    from braid.client.producing.producer import Producer as Producer
    from braid.client.producing.repeatable_producer import RepeatableProducer as RepeatableProducer
    from braid.client.producing.repeatable_producer import Written as Written
    from braid.model.message import Message as Message
    from braid.model.message import MessageId as MessageId
    from braid.model.message import QueueMessage as QueueMessage
    from braid.ports.allocator import keep_freed_memory as keep_freed_memory
    from braid.scan.history import history as history

__version__ = "0.2.0"

__all__ = [
    "Admin",
    "BraidError",
    "CheckpointConsumer",
    "Client",
    "Consumer",
    "Message",
    "MessageId",
    "MessageIds",
    "Producer",
    "ProducerOptions",
    "QueueConsumer",
    "QueueMessage",
    "Receipt",
    "ReceivedBatch",
    "RepeatableProducer",
    "StreamConsumer",
    "Written",
    "__version__",
    "connect",
    "errors",
    "history",
    "keep_freed_memory",
    "sync",
]

_HOMES = {
    "Admin": "braid.client.admin",
    "CheckpointConsumer": "braid.client.consuming.checkpoint",
    "Client": "braid.client.client",
    "connect": "braid.client.client",
    "Consumer": "braid.client.consuming.consumer",
    "Message": "braid.model.message",
    "MessageId": "braid.model.message",
    "MessageIds": "braid.client.producing.open_batch",
    "Producer": "braid.client.producing.producer",
    "ProducerOptions": "braid.client.producing.options",
    "Receipt": "braid.client.producing.open_batch",
    "ReceivedBatch": "braid.client.consuming.delivery",
    "RepeatableProducer": "braid.client.producing.repeatable_producer",
    "QueueConsumer": "braid.client.consuming.queue",
    "QueueMessage": "braid.model.message",
    "StreamConsumer": "braid.client.consuming.stream",
    "Written": "braid.client.producing.repeatable_producer",
    "history": "braid.scan.history",
    "keep_freed_memory": "braid.ports.allocator",
}
_MODULES = ("errors", "sync")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = import_module(f"braid.{name}")
    elif name in _HOMES:
        found = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'braid' has no attribute {name!r}")
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
