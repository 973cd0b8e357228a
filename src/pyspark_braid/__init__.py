"""The package in which Spark looks for `format("braid")`: `pyspark_<format>` with a class `DefaultSource`."""

from __future__ import annotations

from braid.spark.data_source import BraidDataSource as DefaultSource

__all__ = ["DefaultSource"]
