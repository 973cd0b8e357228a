"""The work of one task of a write, in the executor's Python: it stores rows as records and counts them.

Rows come from a blocking iterator in the task's own thread. The client has an event loop in another thread, so that it
takes confirms and keeps connections alive while Spark computes. The next block is cut while the last one is on its way.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc

from braid.client.blocking.loop_thread import LoopThread
from braid.client.client import Client, connect
from braid.client.producing.repeatable_producer import RepeatableProducer
from braid.model.errors import RepeatDiffers
from braid.model.names import TopicName
from braid.spark.sink.options import CONTENT, SinkOptions
from braid.spark.sink.rows import by_content, checked, cut_blocks

CURE: Final = (
    "A task that is repeated must have the same rows in the same order. If its rows are always the same, but not their "
    "order, write with option ordering=content, or sort them: df.sortWithinPartitions(…). If they are not, because "
    "some values are random or taken from a clock, or rows are spread over partitions at random, store them first "
    "(df.checkpoint(), a table), and write what is stored."
)


class Writing(msgspec.Struct, frozen=True):
    """The identity of a write. All attempts of all its tasks have the same."""

    app: str
    era: int
    what: str
    """For messages."""
    skips: bool = False
    """Whether a write that comes after a later one counts as done, as txnVersion requires."""


class TaskCount(msgspec.Struct, frozen=True):
    records: int
    duplicates: int
    """How many of these records another attempt had stored."""


class TaskWriter:
    """One attempt of one task. Belongs to the client's event loop."""

    def __init__(self, client: Client, options: SinkOptions, writing: Writing, partition: int) -> None:
        self._client = client
        self._options = options
        self._writing = writing
        self._partition = partition
        self._producers: dict[str, RepeatableProducer] = {}

    async def add(self, block: Any) -> None:
        for topic, rows in _by_topic(block, self._options.topic):
            try:
                await self._producer(topic).add(rows)
            except RepeatDiffers as error:
                raise self._differs(str(error)) from error

    async def finish(self) -> TaskCount:
        records = duplicates = 0
        for topic, producer in self._producers.items():
            try:
                written = await producer.finish()
            except RepeatDiffers as error:
                raise self._differs(str(error)) from error
            records += written.records
            duplicates += written.duplicates
            if written.past and not self._writing.skips:
                raise self._differs(
                    f"a later write of the same query to topic {topic} exists already: its checkpoint was set back, or "
                    f"copied"
                )
        return TaskCount(records, duplicates)

    def _producer(self, topic: str) -> RepeatableProducer:
        producer = self._producers.get(topic)
        if producer is None:
            producer = self._producers[topic] = self._client.repeatable_producer(
                topic,
                app=self._writing.app,
                part=self._partition,
                era=self._writing.era,
                compression=self._options.compression,
            )
        return producer

    def _differs(self, how: str) -> RepeatDiffers:
        return RepeatDiffers(f"partition {self._partition} of {self._writing.what} was written before: {how}. {CURE}")


def _by_topic(block: Any, default: str) -> Iterator[tuple[str, Any]]:
    """Yield the rows of each topic in their order, whatever spelling of its name each row has."""
    if "topic" not in block.column_names:
        yield default, block
        return
    names = block.column("topic")
    rows = block.drop_columns("topic")
    spellings: dict[str, list[str | None]] = {}
    for name in pc.unique(names).to_pylist():
        spellings.setdefault(TopicName.parse(name).path if name is not None else default, []).append(name)
    for topic, spelled in spellings.items():
        own = pc.is_in(names, value_set=pa.array(spelled, pa.string()))
        yield topic, rows if len(spellings) == 1 else rows.filter(own)


def blocks_of(batches: Iterable[Any], options: SinkOptions) -> Iterator[Any]:
    """Turn Spark's slices of a task's rows into the blocks to write."""
    tables = _checked(batches, options)
    yield from cut_blocks(by_content(tables) if options.ordering == CONTENT else tables)


def _checked(batches: Iterable[Any], options: SinkOptions) -> Iterator[Any]:
    first_row = 0
    for batch in batches:
        yield checked(batch, first_row, default_topic=bool(options.topic))
        first_row += batch.num_rows


def write_task(batches: Iterable[Any], options: SinkOptions, writing: Writing, partition: int) -> TaskCount:
    """Store all rows. Blocks until then. After a failure, stored rows stay, and another attempt finds them."""
    thread = LoopThread()
    try:
        client = thread.call(_connected(options, f"spark {writing.what} partition {partition}"))
        try:
            writer = TaskWriter(client, options, writing, partition)
            adding: concurrent.futures.Future[None] | None = None
            for block in blocks_of(batches, options):
                if adding is not None:
                    adding.result()
                adding = thread.begin(writer.add(block))
            if adding is not None:
                adding.result()
            return thread.call(writer.finish())
        finally:
            thread.call(client.abandon())
    finally:
        thread.stop()


async def _connected(options: SinkOptions, name: str = "") -> Client:
    client = connect(options.url, token=options.token, tls=options.tls, timeout=options.timeout_s, name=name)
    try:
        await client.open()
    except BaseException:
        await client.abandon()
        raise
    return client


def check_topic(options: SinkOptions) -> None:
    """Raise `TopicNotFound`, or another error of the topic, before any task begins."""

    async def look() -> None:
        client = await _connected(options)
        try:
            await client.repeatable_producer(options.topic, app="", part=0, era=0).producer.open()
        finally:
            await client.abandon()

    thread = LoopThread()
    try:
        thread.call(look())
    finally:
        thread.stop()
