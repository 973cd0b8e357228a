"""Work as a DataFrame: whose tasks are whose."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from braid.spark.jobs.task_rows import task_rows


def one_row(number: int) -> Iterator[Any]:
    yield pa.record_batch([pa.array([number], pa.int32())], names=["number"])


def test_jobs_of_one_session_that_run_at_the_same_time_do_their_own_work(spark: SparkSession) -> None:
    def work(number: int) -> list[int]:
        return [row["number"] for row in task_rows(spark, "test", "number int", [number, -number], one_row).collect()]

    numbers = range(1, 17)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(work, numbers)) == [[number, -number] for number in numbers]
