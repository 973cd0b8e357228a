"""Publishing to one segment: a batch is checked, gets its place in the log, and is confirmed when the log says so.

The queue holds batches that have a place and wait for the `confirmed` watermark. It is in the order of offsets, so a
rise of the watermark confirms a prefix of the queue: the confirms of one commit leave together, with one write for each
connection. When the log fails, every waiting batch is refused with the log's error: it may be stored or not, and a
retry finds out (I10).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import Final, Protocol

from braid.broker.error_mapping import to_client, to_publisher
from braid.broker.metrics import BrokerMetrics, TopicMetrics
from braid.cluster.key_hash_samples import KeyHashSamples
from braid.model.batch.header import MAX_BATCH_BYTES, BatchHeader, check_published, verify
from braid.model.batch.identity import DERIVED
from braid.model.errors import BatchTooLarge, BraidError, Fenced, LogClosed, StaleRoute
from braid.model.layout import HashRange
from braid.model.topic import TopicPolicies
from braid.storage.log.log import Log
from braid.storage.log.producers import MAX_DERIVED
from braid.wire.frame import REPLY, encode_frame
from braid.wire.operations import FORGOTTEN, PAST_ERA, Kind, Published, encode

_PUBLISH: Final = int(Kind.PUBLISH)
_logger: Final = logging.getLogger(__name__)


class Publisher(Protocol):
    """A connection that publishes. `size` is what the batch counts against its limit of bytes in flight."""

    def confirm(self, frame: bytes, size: int) -> None:
        """Queue a confirm; `frame` is the whole reply."""

    def refuse(self, request: int, size: int, error: BraidError) -> None: ...

    def flush(self) -> None:
        """Write what was confirmed or refused."""


_Waiting = tuple[int, Publisher, int, int, bytes, float]
"""Next offset, publisher, request, size, the confirm as a frame, time of arrival. Each batch has one: a plain tuple."""


class PublishQueue:
    def __init__(
        self,
        log: Log,
        hashes: HashRange,
        broker_metrics: BrokerMetrics,
        topic_metrics: TopicMetrics,
        time: Callable[[], float],
        policies: TopicPolicies,
    ) -> None:
        self._log = log
        self._hashes = hashes
        self.policies = policies
        """Those that the topic has now: the owned segment follows the topic."""
        self._broker_metrics = broker_metrics
        self._topic_metrics = topic_metrics
        self._time = time
        self.taken_bytes = 0
        """The size of all batches that got a place here."""
        self.taken_records = 0
        self.samples: KeyHashSamples | None = None
        """Counts the key hashes of what is taken, if somebody asked for that."""
        self._counted_forgotten = 0
        """How many of the log's producers are counted as forgotten."""
        self._waiting: deque[_Waiting] = deque()
        log.confirmed.follow(self._on_confirmed)

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, batch: memoryview, publisher: Publisher, request: int, received_at: float) -> None:
        """Give a batch its place in the log, or raise. A batch that has a place is confirmed or refused exactly once.

        `received_at` is the loop's time when the batch came: the caller knows it for all batches of a read. The caller
        must call `commit` after its last batch, before the iteration of the loop ends.
        """
        size = len(batch)
        if size > MAX_BATCH_BYTES:
            raise BatchTooLarge(f"a batch of {size} bytes is above the limit of {MAX_BATCH_BYTES}")
        header = verify(batch)
        check_published(header)
        policies = self.policies
        if header.raw_length > policies.max_decoded_bytes or header.count > policies.max_batch_records:
            raise _above_limits(header, policies)
        hashes = self._hashes
        if header.min_key_hash <= header.max_key_hash and not (
            hashes.start <= header.min_key_hash and header.max_key_hash <= hashes.end
        ):
            raise StaleRoute(
                f"the batch has key hashes {header.min_key_hash:04x} to {header.max_key_hash:04x}, "
                f"this segment takes {hashes}: route it by the topic's present layout"
            )
        try:
            base, next_offset, duplicate = self._log.append(batch, header, commit=False)
        except (Fenced, LogClosed) as error:
            raise to_client(error) from error
        published = encode(Published(self._forgotten(header) if base is None else base, duplicate))
        confirm = encode_frame(_PUBLISH, published, request=request, flags=REPLY)
        metrics = self._topic_metrics
        if duplicate:
            metrics.duplicate_batches += 1
        else:
            metrics.published_batches += 1
            metrics.published_records += header.count
            metrics.published_bytes += size
            self.taken_bytes += size
            self.taken_records += header.count
            if self.samples is not None:
                self.samples.take(header, batch)
            if header.producer_id >= DERIVED:
                self._count_forgotten()
        self._broker_metrics.batch_bytes.observe(size)
        self._waiting.append((next_offset, publisher, request, size, confirm, received_at))
        if duplicate:
            self._on_confirmed()  # The first copy may be confirmed already, so that no rise of the watermark follows.

    def _forgotten(self, header: BatchHeader) -> int:
        """The code that replaces the offset of a retried batch whose place the log no longer knows."""
        return PAST_ERA if self._log.has_later_era(header) else FORGOTTEN

    def _count_forgotten(self) -> None:
        """Count the repeatable producers that the log has forgotten, and warn of the first one."""
        forgotten = self._log.forgotten_producers
        if forgotten > self._counted_forgotten:
            if not self._counted_forgotten:
                _logger.warning(
                    "the log under %s has had more than %s repeatable producers and forgets the one that wrote longest "
                    "ago: what that one repeats from its beginning is stored again",
                    self._log.folder,
                    f"{MAX_DERIVED:,}",
                )
            self._topic_metrics.forgotten_producers += forgotten - self._counted_forgotten
            self._counted_forgotten = forgotten

    def commit(self) -> None:
        """Begin to write the batches that were taken."""
        self._log.commit()

    def _on_confirmed(self) -> None:
        waiting = self._waiting
        if not waiting:
            return
        confirmed = self._log.confirmed
        value = confirmed.value
        now = self._time()
        observe = self._broker_metrics.publish_latency_s.observe
        publishers: dict[Publisher, None] = {}
        while waiting and waiting[0][0] <= value:
            _, publisher, _, size, confirm, received_at = waiting.popleft()
            publisher.confirm(confirm, size)
            publishers[publisher] = None
            observe(now - received_at)
        if confirmed.error is not None:
            error = to_publisher(confirmed.error)
            while waiting:
                _, publisher, request, size, _, _ = waiting.popleft()
                publisher.refuse(request, size, error)
                publishers[publisher] = None
        for publisher in publishers:
            publisher.flush()


def _above_limits(header: BatchHeader, policies: TopicPolicies) -> BatchTooLarge:
    """Return the error for a batch that would take its readers more memory than the topic allows."""
    if header.raw_length > policies.max_decoded_bytes:
        return BatchTooLarge(
            f"the batch has {header.raw_length} bytes when it is decompressed, and the topic takes "
            f"{policies.max_decoded_bytes} (max_decoded_bytes): send smaller batches"
        )
    return BatchTooLarge(
        f"the batch has {header.count} records, and the topic takes {policies.max_batch_records} "
        "(max_batch_records): send smaller batches"
    )
