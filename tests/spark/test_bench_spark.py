"""`braid bench spark`, very small: that it measures everything it names, and that what it measures is right."""

from __future__ import annotations

import msgspec
from pyspark.sql import SparkSession

from braid.cli.bench.spark import PARTS, Bench, own_spark_broker


def test_every_part_of_the_benchmark_measures_a_topic_of_its_own(spark: SparkSession) -> None:
    said: list[str] = []
    with own_spark_broker() as (broker, folder):
        bench = Bench(broker, folder, records=20_000, value_bytes=100, rounds=1, show=said.append)
        results = msgspec.to_builtins(bench.run(spark, PARTS, audit_bytes=1 << 20))
    assert results["read"]["parquet"]["records"] == 20_000
    assert results["read"]["memory"]["seconds"] > 0
    assert results["stream"]["records"] == 20_000
    assert results["stream"]["smallBatchMs"] > 0
    assert results["write"]["records"] == 10_000
    assert [row["times"] for row in results["audit"]] == [1, 2, 4]
    assert "auditing 4 times the size" in said
