"""Braid in Spark: `spark.read`, `readStream`, `write` and `writeStream` of `format("braid")`.

Spark finds the format by itself if it can import the package `pyspark_braid`, which is installed with Braid.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Register `format("braid")` in this session, if Spark does not find it by itself. Raises `NotAvailable` if the
    session's workers cannot import Braid."""
    from braid.spark.data_source import BraidDataSource
    from braid.spark.worker_python import check_workers

    check_workers(spark)
    spark.dataSource.register(BraidDataSource)
