"""`spark.readStream.format("braid")`: the reader that Spark's driver keeps for one query.

    latestOffset ──► offset journal ──► partitions ──► tasks read ──► commit journal ──► commit
    where does the next           which task reads                      processed:
    micro-batch end?              which offsets?                        move the subscription

One process on the driver holds the reader as long as the query runs, and keeps one connection. `batch_limits.py`
decides where a micro-batch ends, `offsets.py` which part of that survives a crash, and `planning.py` which task reads
which offsets. This module feeds them with the answers of brokers and storage.

**Exactly once.** Spark journals the end of a micro-batch before it runs it. After a crash it asks for the partitions of
the same two offsets again, in a new process. The answer depends on these offsets alone: the same rows, in the same
order, in partitions of the same numbers. So the end offset has the number of partitions, the starting time and, if the
start offset does not have it, the beginning of the micro-batch.

**Available now.** The contents of the topic when the query starts are the target; the query ends when it has read them.
The target includes the children of all segments that were sealed by then. They are read after their parents as always,
so the query may need as many micro-batches as there are generations.

**Loss.** If records are gone that the query has not read (retention, a deleted topic), or if the topic has lost records
that the query had read and has given their offsets to others, the query ends with an error that names them. If
`failOnDataLoss` is false, the log names them, and the query goes on with the first record that exists, or with the
first of the new records.

**Commit.** Spark reports a micro-batch as processed only after it has journalled the next one. So a query that waits
for records would seem to lag by its last micro-batch for ever. But Spark asks for the next end only when everything
before the start is processed; so if nothing is new, the subscription moves up to the start.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from braid.model.errors import DataLoss, InvalidArgument
from braid.scan.connection import ScanConnection
from braid.scan.planning import Partition, Prune, plan_micro_batch
from braid.scan.reading import record_batches
from braid.scan.snapshot import TopicSnapshot
from braid.spark.source.options import SourceOptions
from braid.spark.source.schema import arrow_schema
from braid.spark.stream.batch_limits import (
    BatchLimits,
    admit,
    beginning,
    bounded,
    epochs_at,
    gone,
    latest,
    partitions,
    ranges,
    stream_position,
)
from braid.spark.stream.offsets import StreamOffset, begins, is_other_topic
from braid.spark.stream.subscription import QuerySubscription
from braid.spark.stream.topic_watch import TopicWatch

_log: Final = logging.getLogger(__name__)

Json = dict[str, Any]


class BraidStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The result of `BraidDataSource.streamReader`. Spark pickles it to executors, where it calls only `read`."""

    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._driver: _Driver | None = None

    def __getstate__(self) -> Json:
        return {**self.__dict__, "_driver": None}

    @property
    def _on_driver(self) -> _Driver:
        """Return the driver's part, made when it is first needed."""
        if self._driver is None:
            self._driver = _Driver(self._options)
        return self._driver

    # On the driver. The names are Spark's.

    def initialOffset(self) -> Json:  # noqa: N802
        return self._on_driver.begin().to_json()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return one limit, as Spark allows. If there are two, `latestOffset` adds the other."""
        if self._options.max_records_per_trigger is not None:
            return ReadMaxRows(self._options.max_records_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._on_driver.freeze()

    def latestOffset(self, start: Json, limit: ReadLimit) -> Json:  # noqa: N802
        return self._on_driver.next_end(start, self._limits(limit))

    def reportLatestOffset(self) -> Json | None:  # noqa: N802
        return self._on_driver.latest().to_json()

    def partitions(self, start: Json, end: Json) -> Sequence[InputPartition]:
        return [InputPartition(each) for each in self._on_driver.planned(start, end)]

    def commit(self, end: Json) -> None:
        self._on_driver.processed(end)

    def stop(self) -> None:
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _limits(self, limit: ReadLimit) -> BatchLimits:
        options = self._options
        match limit:
            case ReadAllAvailable():
                return BatchLimits()
            case ReadMaxRows(max_rows=records):
                return BatchLimits(records, options.max_bytes_per_trigger)
            case ReadMaxBytes(max_bytes=size):
                return BatchLimits(options.max_records_per_trigger, size)
        raise InvalidArgument(f"Spark asks for a limit that a topic does not know: {limit}; limit records or bytes")

    # On executors.

    def read(self, partition: InputPartition) -> Iterator[Any]:
        planned: Partition = partition.value
        options = msgspec.structs.replace(self._options, starting_timestamp=planned.not_before)
        return record_batches(planned, options, self._schema, prune=Prune(since_us=planned.not_before))


class _Driver:
    """The driver's part of a query. Belongs to the one process that Spark keeps for the query."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._connection = ScanConnection(options)
        self._view = TopicWatch(self._connection)
        self._target: TopicSnapshot | None = None
        """Where an available-now query ends; None for every other query."""
        self._subscription: QuerySubscription | None = None
        if options.subscription and not self._connection.has_brokers:
            raise InvalidArgument(
                "options subscription and manifest were both given: a subscription is kept by brokers, and manifest "
                "reads without any; give url instead of manifest, or leave subscription out"
            )
        if options.subscription:
            self._subscription = QuerySubscription(self._connection, options.subscription)

    def begin(self) -> StreamOffset:
        snapshot = self._view.refresh()
        since = self._options.starting_timestamp
        at_time = None if since is None else self._view.offsets_at(since)
        positions = beginning(self._options, snapshot, at_time)
        if self._subscription is not None:
            self._subscription.begin(positions, snapshot)
        epochs = epochs_at(positions, snapshot)
        return StreamOffset.beginning(snapshot.topic, snapshot.topic_id, positions, since, epochs)

    def freeze(self) -> None:
        self._target = self._view.refresh()

    def latest(self) -> StreamOffset:
        snapshot = self._target or self._view.snapshot()
        return StreamOffset(topic=snapshot.topic, topic_id=snapshot.topic_id, positions=latest(snapshot))

    def next_end(self, start: Json, limits: BatchLimits) -> Json:
        offset = StreamOffset.from_json(start, self._options.topic)
        self._view.reached(offset)
        snapshot = self._view.snapshot()
        end = self._end_after(offset, snapshot, limits)
        if end is None:
            self._show(offset, snapshot)
            if self._target is None:
                end = self._end_after(offset, self._view.wait_and_refresh(), limits)
        return start if end is None else end.to_json()

    def _end_after(self, start: StreamOffset, snapshot: TopicSnapshot, limits: BatchLimits) -> StreamOffset | None:
        """Return the end of the next micro-batch; None if nothing is new."""
        position = stream_position(start, snapshot)
        if position.losses:
            self._lost(position.losses)
        seen = snapshot if self._target is None else bounded(snapshot, self._target)
        ends = admit(seen, position.positions, limits)
        if ends == position.positions and not position.losses:
            return None
        admitted = ranges(position.positions, ends, snapshot)
        return StreamOffset(
            topic=snapshot.topic,
            topic_id=snapshot.topic_id or start.topic_id,
            positions=ends,
            partitions=partitions(admitted, snapshot.segments, self._options.min_partitions or 0),
            epochs=epochs_at(ends, snapshot),
            since=position.positions if start.is_beginning or position.losses else None,
            not_before=start.not_before,
        )

    def planned(self, start: Json, end: Json) -> list[Partition]:
        topic = self._options.topic
        last = StreamOffset.from_json(end, topic)
        begin = begins(StreamOffset.from_json(start, topic), last)
        self._view.reached(last)
        snapshot = self._view.with_chunks_for(ranges(begin, last.positions, self._view.snapshot()))
        if is_other_topic(last, snapshot.topic_id):
            self._lost((f"topic {topic} was deleted and created again: the records of this micro-batch are gone",))
            return []
        losses = gone(begin, last.positions, snapshot, last.epochs)
        if losses:
            self._lost(losses)
        wanted = ranges(begin, last.positions, snapshot, last.epochs)
        return plan_micro_batch(snapshot, wanted, partitions=last.partitions, not_before=last.not_before)

    def processed(self, end: Json) -> None:
        if self._subscription is not None:
            self._show(StreamOffset.from_json(end, self._options.topic), self._view.snapshot())

    def close(self) -> None:
        self._connection.close()

    def _show(self, offset: StreamOffset, snapshot: TopicSnapshot) -> None:
        if self._subscription is not None and not is_other_topic(offset, snapshot.topic_id):
            self._subscription.move(offset.positions, snapshot, offset.epochs)

    def _lost(self, losses: tuple[str, ...]) -> None:
        what = "; ".join(losses)
        if self._options.fail_on_data_loss:
            raise DataLoss(
                f"{what}. To go on with what is there, set option failOnDataLoss to false, or begin anew with another "
                "checkpointLocation. To prevent it, let the topic keep its records longer than the query may pause, or "
                "name a subscription for the query: retention waits for subscriptions"
            )
        _log.warning("%s; the query goes on with what is there, because failOnDataLoss is false", what)
