"""Drives the stream reader as Spark's driver does, without Java: what a query does is then a matter of milliseconds.

The offsets go through JSON, as in Spark's journals; the reader and its partitions through pickle, as to executors.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadLimit

from braid.spark.data_source import BraidDataSource
from braid.spark.source.schema import SOURCE_SCHEMA
from braid.spark.stream.stream import BraidStreamReader

EARLIEST: Final[dict[str, Any]] = {"startingOffsets": "earliest"}


class Row(NamedTuple):
    segment: int
    offset: int
    key: bytes | None
    value: bytes


class MicroBatch(NamedTuple):
    start: dict[str, Any]
    end: dict[str, Any]
    partitions: list[list[Row]]

    @property
    def rows(self) -> list[Row]:
        return [row for partition in self.partitions for row in partition]


class Query:
    """One run of a query. `journal` is what survives it: the ends of the micro-batches, as text."""

    def __init__(self, url: str, topic: str, journal: list[str] | None = None, **options: object) -> None:
        given = {"url": url, "topic": topic, **{name: str(value) for name, value in options.items()}}
        if "manifest" in given:
            del given["url"]
        reader = BraidDataSource(given).streamReader(SOURCE_SCHEMA)
        assert isinstance(reader, BraidStreamReader)
        self.reader = reader
        self.journal = journal if journal is not None else []
        self.limit: ReadLimit = reader.getDefaultReadLimit()
        self._initial: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.reader.stop()

    def start(self, back: int = 0) -> dict[str, Any]:
        """Where the next micro-batch begins, or one that lies `back`."""
        if len(self.journal) > back:
            found: dict[str, Any] = json.loads(self.journal[-1 - back])
            return found
        if self._initial is None:
            self._initial = _through_json(self.reader.initialOffset())
        return self._initial

    def next(self, limit: ReadLimit | None = None) -> MicroBatch | None:
        """The next micro-batch, journalled; None if nothing is new."""
        start = self.start()
        end = _through_json(self.reader.latestOffset(start, limit or self.limit))
        if json.dumps(end) == json.dumps(start):
            return None
        self.journal.append(json.dumps(end))
        return self.run(start, end)

    def some(self) -> MicroBatch:
        """The next micro-batch, which there must be: whatever was written before is seen."""
        found = self.next()
        assert found is not None
        return found

    def again(self) -> MicroBatch:
        """The last micro-batch of the journal, as after a crash that came before its commit."""
        return self.run(self.start(back=1), json.loads(self.journal[-1]))

    def run(self, start: dict[str, Any], end: dict[str, Any]) -> MicroBatch:
        partitions = self.reader.partitions(start, end)
        return MicroBatch(start, end, [self.rows(partition) for partition in partitions])

    def rows(self, partition: InputPartition) -> list[Row]:
        reader: BraidStreamReader = pickle.loads(pickle.dumps(self.reader))
        there: InputPartition = pickle.loads(pickle.dumps(partition))
        return [
            Row(row["segment"], row["offset"], row["key"], row["value"])
            for batch in reader.read(there)
            for row in batch.to_pylist()
        ]

    def all(self) -> Iterator[MicroBatch]:
        """Until nothing is new, committing each when the next one is there."""
        while (batch := self.next()) is not None:
            yield batch
            self.reader.commit(batch.start)


def _through_json(offset: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(offset))
    return found
