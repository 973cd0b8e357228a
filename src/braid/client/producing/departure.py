"""When the open batch of a writer leaves.

Without linger, it leaves at the end of the loop's iteration, or before that if it is large and nothing is in flight.
While something is in flight, a small batch stays open for the reply. With linger, it stays open for that time. A full
batch is closed by its writer and does not wait for anything here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from braid.client.producing.open_batch import ProducerBatch
from braid.client.producing.options import ProducerOptions
from braid.model.batch.header import Codec
from braid.wire.link import Link

EARLY_BYTES: Final = 64 << 10
"""While nothing is in flight, a batch of this size leaves before the end of the loop's iteration, so the broker works
while the program still gives records. This holds only without linger and compression: programs that set them want
large batches."""

ANSWER_WAIT_S: Final = 0.002
"""While something is in flight, a batch of less than `EARLY_BYTES` stays open for its reply, but no longer than this.
Records that come meanwhile join the batch. So a broker nearby has less to do and replies sooner; the way to a distant
broker takes longer than this anyway."""

LINGER_SLACK_S: Final = 0.0005
"""A timer may fire this much early, so a batch this near to the end of its linger leaves."""


class Departure:
    def __init__(
        self, options: ProducerOptions, codec: Codec, dispatch: Callable[[], None], on_timer: Callable[[], None]
    ) -> None:
        """`dispatch` lets the writer send what may leave. `on_timer` tells it that the open batch has waited."""
        self.early_bytes: Final = (
            min(EARLY_BYTES, options.max_batch_bytes)
            if options.linger_s <= 0 and codec is Codec.NONE
            else options.max_batch_bytes
        )
        """The size at which a batch leaves early while nothing is in flight."""
        self._linger_s = options.linger_s
        self._dispatch = dispatch
        self._on_timer = on_timer
        self._loop = asyncio.get_running_loop()
        self._planned = False
        self._timer: asyncio.TimerHandle | None = None

    def plan(self, link: Link | None) -> None:
        """Dispatch at the end of this iteration of the loop."""
        if not self._planned:
            self._planned = True
            if link is not None:
                link.call_at_end(self._depart)
            else:
                self._loop.call_soon(self._depart)

    def stays_open(self, batch: ProducerBatch, *, in_flight: bool) -> bool:
        wait_s = self._wait_s(batch, in_flight)
        return wait_s > 0 and self._loop.time() < batch.opened_at + wait_s - LINGER_SLACK_S

    def arm_timer(self, batch: ProducerBatch, *, in_flight: bool) -> None:
        """Start the timer, unless it runs: a batch that has left leaves its timer to the next batch."""
        if self._timer is None:
            left_s = batch.opened_at + self._wait_s(batch, in_flight) - self._loop.time()
            self._timer = self._loop.call_later(max(left_s, LINGER_SLACK_S), self._fire)

    def cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _wait_s(self, batch: ProducerBatch, in_flight: bool) -> float:
        """Return how long the batch stays open for more records."""
        if self._linger_s > 0:
            return self._linger_s
        return ANSWER_WAIT_S if in_flight and batch.size < EARLY_BYTES else 0.0

    def _depart(self) -> None:
        self._planned = False
        self._dispatch()

    def _fire(self) -> None:
        self._timer = None
        self._on_timer()
