"""`format("braid")`: the classes that Spark calls, and the batch reader.

The driver asks for a reader, gives it the filters of the query, asks for partitions, and pickles the reader to the
executors, where `read` runs. `planning.py` plans the read from one snapshot, taken when Spark asks for the partitions:
topics may move, export and grow afterwards, and the table stays the same.

**Filters.** Spark (4.3) keeps one plan for each `load()`, and every filter that is pushed down replaces it. If a source
reads less because of a filter, every other query on the same DataFrame reads less, too: after `df.where(a)`, `df` lacks
rows, and so does `df.where(a).union(df.where(b))`, without any error. So pruning is correct only if each query has its
own `load()`. Users who ensure that set `pruneByFilters`; otherwise filters are not used. Bounds in options (offsets,
times) belong to one `load()` and always prune.

Spark offers filters only if `spark.sql.python.filterPushdown.enabled` is on, and refuses a reader that takes filters if
it is off. `reader` recognises the setting by Spark's module for push-down, which the planning process then runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import StructType

from braid.scan.planning import Partition, plan_batch
from braid.scan.ranges import wanted_ranges
from braid.scan.reading import record_batches
from braid.scan.snapshot import take_snapshot
from braid.spark.source.options import SourceOptions
from braid.spark.source.pruning import no_filters, understood
from braid.spark.source.schema import arrow_schema, checked_projection, source_schema

_PUSH_DOWN_WORKER: Final = "pyspark.sql.worker.data_source_pushdown_filters"


class BraidDataSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "braid"

    def schema(self) -> StructType:
        return source_schema(include_headers=SourceOptions.parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        options = SourceOptions.parse(self.options).for_batch()
        kind = PruningReader if options.prune_by_filters and _filters_are_offered() else BatchReader
        return kind(options, checked_projection(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 (Spark's name)
        from braid.spark.stream.stream import BraidStreamReader

        return BraidStreamReader(SourceOptions.parse(self.options).for_stream(), checked_projection(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from braid.spark.sink.sink import batch_writer

        return batch_writer(dict(self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 (Spark's name)
        from braid.spark.sink.sink import stream_writer

        return stream_writer(dict(self.options), schema, overwrite=overwrite)


def _filters_are_offered() -> bool:
    """Whether this process plans with push-down: it runs, or has imported, Spark's module for that."""
    running = getattr(sys.modules["__main__"], "__spec__", None)
    return _PUSH_DOWN_WORKER in sys.modules or (running is not None and running.name == _PUSH_DOWN_WORKER)


class BatchReader(DataSourceReader):
    def __init__(self, options: SourceOptions, schema: StructType) -> None:
        self._options = options
        self._schema = arrow_schema(schema)
        self._filters = no_filters(options)

    def partitions(self) -> list[InputPartition]:
        snapshot = take_snapshot(self._options)
        ranges = self._filters.narrowed(wanted_ranges(snapshot, self._options))
        planned = plan_batch(
            snapshot, ranges, min_partitions=self._options.min_partitions or 1, prune=self._filters.prune
        )
        return [InputPartition(each) for each in planned or [Partition(())]]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        planned: Partition = partition.value
        return record_batches(planned, self._options, self._schema, prune=self._filters.prune)


class PruningReader(BatchReader):
    """Takes filters, to read less. Spark checks all of them again: a read may return too many rows, never too few."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 (Spark's name)
        self._filters = understood(filters, self._options)
        return filters
