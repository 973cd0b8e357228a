"""Writing to topics from Spark, batch and streaming, exactly once.

Spark repeats work: tasks that failed, tasks that seemed slow (both attempts then run at the same time), whole
micro-batches after a restart. Brokers still store each row once, because every attempt at the same work sends the same
batches under the same numbers:

    writer       the query's id, or txnAppId, or an id drawn on the driver for this one write     } all attempts
    era          the micro-batch's id, or txnVersion, or 0                                         } agree on these
    partition    its number
    rows         cut into blocks by the rows alone (rows.py)
                        └─► client/producing/repeatable_producer.py ─► producer ids and sequences that brokers recognise

There are no transactions: a row can be read as soon as its block is stored, also if the job then fails. `commit` has
nothing left to do, and `abort` undoes nothing; the same write, repeated, completes it.

The driver refuses impossible writes before any task begins: unknown options, columns and types, a mode other than
append, and in a batch write a missing topic.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from braid.model.batch.identity import MAX_ERA
from braid.model.errors import InvalidArgument
from braid.spark.sink.input import whole
from braid.spark.sink.options import SinkOptions
from braid.spark.sink.task import TaskCount, Writing, check_topic, write_task

COLUMNS: Final = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "timestamp": ("timestamp",),
    "headers": ("map<string,binary>", "map<string,string>"),
    "topic": ("string",),
}
QUERY_PROPERTY: Final = "sql.streaming.queryId"
BATCH_PROPERTY: Final = "streaming.sql.batchId"
"""Spark's own sinks find both here. No public interface tells a Python sink which micro-batch it writes."""


def batch_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool = False) -> BatchSink:
    """Make the result of `DataSource.writer`."""
    parsed = SinkOptions.parse(options, streaming=False)
    if overwrite:
        raise InvalidArgument("mode overwrite was asked for: a topic can only be added to; use .mode('append')")
    check_columns(schema, parsed)
    if parsed.topic:
        check_topic(parsed)
    if parsed.txn_app:
        what = f"version {parsed.txn_version} of {parsed.txn_app}"
        return BatchSink(parsed, Writing(f"txn:{parsed.txn_app}", parsed.txn_version, what, skips=True))
    drawn = str(uuid.uuid4())
    return BatchSink(parsed, Writing(f"write:{drawn}", 0, f"write {drawn}"))


def stream_writer(options: Mapping[str, str], schema: StructType, *, overwrite: bool = False) -> StreamSink:
    """Make the result of `DataSource.streamWriter`. Spark asks for two in each micro-batch: to write and to commit."""
    parsed = SinkOptions.parse(options, streaming=True)
    if overwrite:
        raise InvalidArgument("output mode complete was asked for: a topic can only be added to; use append")
    check_columns(schema, parsed)
    return StreamSink(parsed)


def check_columns(schema: StructType, options: SinkOptions) -> None:
    wanted = "; ".join(f"{name} ({' or '.join(types)})" for name, types in COLUMNS.items())
    for field in schema:
        types = COLUMNS.get(field.name)
        kind = field.dataType.simpleString()
        if types is None:
            raise InvalidArgument(f"the column {field.name} ({kind}) is none of a record's; select from: {wanted}")
        if kind not in types:
            raise InvalidArgument(f"the column {field.name} is {kind}; it must be {' or '.join(types)}: cast it")
    names = schema.names
    if len(set(names)) != len(names):
        raise InvalidArgument(f"the columns are {', '.join(names)}: one is there twice")
    if "value" not in names:
        raise InvalidArgument(
            f"there is no column value; columns are {', '.join(names) or 'none'}, select from: {wanted}"
        )
    if "topic" not in names and not options.topic:
        raise InvalidArgument("option topic is missing, and so is a column topic: one of them says where to write")


@dataclass
class TaskCommit(WriterCommitMessage):
    partition: int
    records: int
    duplicates: int
    """How many of these records another attempt had stored."""


class BatchSink(DataSourceArrowWriter):
    def __init__(self, options: SinkOptions, writing: Writing) -> None:
        self._options = options
        self._writing = writing

    def write(self, iterator: Iterator[Any]) -> TaskCommit:
        partition = _task().partitionId()
        rows = whole(iterator, verify=self._options.verify_input)
        return _commit_message(partition, write_task(rows, self._options, self._writing, partition))

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        check_messages(messages)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Do nothing: stored rows stay."""


class StreamSink(DataSourceStreamArrowWriter):
    def __init__(self, options: SinkOptions) -> None:
        self._options = options

    def write(self, iterator: Iterator[Any]) -> TaskCommit:
        task = _task()
        partition = task.partitionId()
        writing = micro_batch(task.getLocalProperty(QUERY_PROPERTY), task.getLocalProperty(BATCH_PROPERTY))
        rows = whole(iterator, verify=self._options.verify_input)
        return _commit_message(partition, write_task(rows, self._options, writing, partition))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: ARG002, N803
        check_messages(messages)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Do nothing: stored rows stay. Spark also aborts committed micro-batches, and a restart repeats them."""


def micro_batch(query: str | None, batch: str | None) -> Writing:
    """Identify a micro-batch by the properties of a task."""
    if not query or not batch or not batch.isdigit() or int(batch) > MAX_ERA:
        raise InvalidArgument(
            f"Spark's task says that it belongs to query {query!r} and batch {batch!r}. Without both the sink cannot "
            f"write exactly once, so it writes nothing. This Braid was made for Spark 4.3; with another version, use "
            f"foreachBatch and a batch write with txnAppId and txnVersion"
        )
    return Writing(f"query:{query}", int(batch), f"batch {batch} of query {query}")


def check_messages(messages: list[WriterCommitMessage | None]) -> None:
    """Check that every task of a write has finished."""
    missing = sum(not isinstance(message, TaskCommit) for message in messages)
    if missing:
        raise InvalidArgument(f"Spark commits a write of {len(messages)} tasks, but {missing} of them did not finish")


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise InvalidArgument("the sink was called outside of a Spark task, where there is no partition to write")
    return task


def _commit_message(partition: int, count: TaskCount) -> TaskCommit:
    return TaskCommit(partition, count.records, count.duplicates)
