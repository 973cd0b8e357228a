"""The queue consumer for blocking callers (braid.sync shows its use)."""

from __future__ import annotations

from functools import partial
from typing import Final, Self

from braid.client.blocking.consumer import BlockingLifecycle
from braid.client.consuming.queue import QueueConsumer
from braid.model.message import QueueMessage

MOST_AHEAD: Final = 1_000
"""How many messages the caller's thread takes from the loop together."""


class BlockingQueueConsumer(BlockingLifecycle[QueueConsumer]):
    """Consumes a queue subscription; `client.queue_consumer` makes it."""

    @property
    def subscription(self) -> str:
        return self._consumer.subscription

    @property
    def name(self) -> str:
        return self._consumer.name

    def receive(self, timeout: float | None = None) -> QueueMessage | None:
        """Return the next message, or None if none came within `timeout` seconds."""
        return self._thread.call(self._consumer.receive(timeout))

    def receive_many(self, max_messages: int = MOST_AHEAD, timeout: float | None = None) -> list[QueueMessage]:
        """Return the messages that are here, at most so many. If there are none, wait for one."""
        return self._thread.call(self._consumer.receive_many(max_messages, timeout))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> QueueMessage:
        """Return the next message. The iteration ends only by `break`, by an error, or when the consumer is closed."""
        message = self.receive()
        assert message is not None
        return message

    def ack(self, message: QueueMessage) -> None:
        """Settle a message: when this returns, it is never delivered again. Raises `AckStale` if its lease had run out
        and it was handed out again."""
        self._thread.call(self._consumer.ack(message))

    def submit_ack(self, message: QueueMessage) -> None:
        """Settle a message without waiting. `flush` waits, and reports the first failure."""
        self._thread.call_soon(partial(self._consumer.note_ack, message))

    def nack(self, message: QueueMessage, delay: float = 0.0, reason: str = "") -> None:
        """Return a message, to be delivered again after `delay` seconds. `reason` goes with it to the dead letters."""
        self._thread.call(self._consumer.nack(message, delay, reason))

    def extend(self, message: QueueMessage, seconds: float) -> None:
        """Keep a message for so many seconds from now. Raises `AckStale` if it was handed out again."""
        self._thread.call(self._consumer.extend(message, seconds))

    def flush(self) -> None:
        """Return when everything that was said is stored. Raises the first failure of a `submit_ack` since the last
        flush."""
        self._thread.call(self._consumer.flush())

    def close(self) -> None:
        """Store the acks, and give back all messages that are here. Closing twice is fine. In a forked child this does
        nothing: the parent has the consumer."""
        self._run_at_end(self._consumer.close())
