"""The broker's end of a queue consumer's channel: one consumer, one segment, one subscription.

Credit counts messages: at most `prefetch` are handed out and not answered. An answer makes room as soon as the broker
has it, before a disk does.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from braid.broker.metrics import TopicMetrics
from braid.model.errors import BraidError
from braid.model.queue.state import Handed
from braid.storage.reader import StoredBatch
from braid.wire.connection import Connection
from braid.wire.operations import Closed, Kind, QueueDelivery, QueueRun, encode

RUNS_TOGETHER: Final = 4_000
"""Of one delivery: so many fit into its frame, also if each has the longest reason."""

_keys: Final = itertools.count(1)


class QueueSettings(NamedTuple):
    """What the subscription says."""

    ack_timeout_us: int
    max_deliveries: int
    """A message that was delivered so often is a dead letter. 0: it is delivered for ever."""


class QueueChannel:
    def __init__(
        self,
        number: int,
        connection: Connection,
        subscription: str,
        consumer: str,
        prefetch: int,
        *,
        metrics: TopicMetrics,
        on_end: Callable[[QueueChannel], None],
    ) -> None:
        self.number: Final = number
        self.key: Final = next(_keys)
        """Names the consumer where leases are kept."""
        self.subscription: Final = subscription
        self.consumer: Final = consumer
        self.prefetch = prefetch
        self.ended = False
        self.leaving = False
        """Whether the consumer is about to close the channel, and gives back what it has."""
        self._connection = connection
        self._metrics = metrics
        self._on_end = on_end
        self._sent_base = -1
        """Where the batch begins that the consumer got last, and still has."""

    def takes(self, held: int) -> bool:
        """Tell whether the consumer, which holds so many messages, may be sent more."""
        return not self.ended and not self.leaving and held < self.prefetch and not self._connection.congested

    def send(self, batch: StoredBatch, handed: Sequence[Handed], max_deliveries: int, end: int) -> None:
        runs = tuple(
            QueueRun(
                each.start, each.end, each.lease, each.deliveries, 0 < max_deliveries <= each.deliveries, each.reason
            )
            for each in handed
        )
        for first in range(0, len(runs), RUNS_TOGETHER):
            self._send(batch, runs[first : first + RUNS_TOGETHER], end)

    def _send(self, batch: StoredBatch, runs: tuple[QueueRun, ...], end: int) -> None:
        body = encode(QueueDelivery(self.number, batch.header.base_offset, end, runs))
        has_it = batch.header.base_offset == self._sent_base
        self._connection.send(Kind.QUEUE_DELIVER, body, [] if has_it else [batch.data])
        self._sent_base = batch.header.base_offset
        if not has_it:
            self._metrics.delivered_batches += 1
            self._metrics.delivered_bytes += len(batch.data)

    def close(self, code: str, message: str, *, retriable: bool) -> None:
        """End the channel and tell the consumer why."""
        if not self.ended:
            self._connection.send(Kind.CLOSED, encode(Closed(self.number, code, message, retriable)))
            self.drop()

    def fail(self, error: BraidError) -> None:
        self.close(error.code, str(error), retriable=error.retriable)

    def drop(self) -> None:
        """End the channel without a word: the consumer closed it, or is gone."""
        if not self.ended:
            self.ended = True
            self._on_end(self)
