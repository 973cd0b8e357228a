"""Work that is not a query, as a DataFrame: Spark runs so many tasks, and goes on with the rows that they make.

A Python data source sends Arrow batches from Python to Java and nothing in the other direction. (`mapInArrow` would
need input rows, another pass between Java and Python, and pandas.) The source is registered under a name that no
program reads from, and its work is fixed when it is loaded. A session has one registry for all its threads, so threads
take turns from registering to loading: otherwise one would do the work of another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

T = TypeVar("T")

_registering: Final = threading.Lock()


def task_rows(
    spark: SparkSession, name: str, schema: str, tasks: Sequence[T], work: Callable[[T], Iterator[Any]]
) -> DataFrame:
    """Return the rows that `work` makes of each task, as Arrow batches of exactly this schema. Spark pickles tasks and
    work to executors."""

    class Task(InputPartition):
        def __init__(self, what: T) -> None:
            super().__init__(None)
            self.what = what

    class TaskReader(DataSourceReader):
        def partitions(self) -> Sequence[InputPartition]:
            return [Task(each) for each in tasks]

        def read(self, partition: InputPartition) -> Iterator[Any]:
            assert isinstance(partition, Task)
            return work(partition.what)

    class TaskSource(DataSource):
        @classmethod
        def name(cls) -> str:
            return f"braid-{name}"

        def schema(self) -> str:
            return schema

        def reader(self, schema: Any) -> DataSourceReader:  # noqa: ARG002 (it is the schema above)
            return TaskReader()

    if not tasks:
        return spark.createDataFrame([], schema)
    with _registering:
        spark.dataSource.register(TaskSource)
        return spark.read.format(TaskSource.name()).load()
