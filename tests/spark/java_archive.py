"""Make the archive of Spark's classes that lets Java start quickly (tests/kits/java.py).

Java writes it at the end of a program that uses of Spark what the tests use: reads, streams, a sink and a job.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pyspark
from pyspark.sql import SparkSession

import braid.spark
from braid.spark.jobs.audit.job import audit_topic
from tests.kits.java import ARCHIVE, start_java_quickly
from tests.spark.spark_kit import StoredBroker, spark_session


def make_archive(archive: Path) -> None:
    unfinished = archive.with_suffix(".new")
    os.environ["SPARK_HOME"] = os.path.dirname(pyspark.__file__)  # Java notes its class path, which has to stay there.
    start_java_quickly(os.environ, f"-XX:ArchiveClassesAtExit={unfinished}")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        (path / "broker").mkdir()
        with StoredBroker(path / "broker") as broker, spark_session(path) as spark:
            use(spark, broker, path)
    unfinished.rename(archive)


def use(spark: SparkSession, broker: StoredBroker, folder: Path) -> None:
    braid.spark.register(spark)
    topic = broker.create("archive", segments=2)
    broker.fill(topic, [(b"k%d" % n, b"v" * 100) for n in range(2000)])
    broker.until_chunks(topic, 1)
    options = {"url": broker.url, "topic": topic}
    table = spark.read.format("braid").options(**options).load()
    table.groupBy("segment").count().toArrow()
    table.write.partitionBy("segment").parquet(str(folder / "table"))
    spark.read.parquet(str(folder / "table")).orderBy("offset").limit(3).collect()
    table.select("key", "value").write.format("braid").options(**options).mode("append").save()
    stream = spark.readStream.format("braid").options(**options).option("startingOffsets", "earliest").load()
    for sink, out in (("parquet", str(folder / "stream")), ("memory", None)):
        writer = (
            stream.writeStream.format(sink).queryName(sink).option("checkpointLocation", str(folder / f"{sink}-at"))
        )
        writer.trigger(availableNow=True).start(out).awaitTermination()
    audit_topic(spark, options)


if __name__ == "__main__" and not ARCHIVE.exists():
    make_archive(ARCHIVE)
