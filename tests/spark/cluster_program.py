"""A program as users submit one: it reads topics and writes one, and says what it saw as lines of JSON.

    cluster_program.py MASTER URL STEP…      MASTER may be `submitted`: what spark-submit says; `sc://HOST:PORT`; or
                                             `own sc://HOST:PORT`: in a session that PySpark makes, not Braid

Steps:

    where                where the executors have Braid from, and who they are
    read:TOPIC           how many records there are, and how many of them are different ones
    copy:TOPIC:TO        every record into another topic, with its key
    stream:TOPIC:TO      the same by a streaming query, which ends when it has copied everything
    audit:TOPIC          whether the audit finds the topic whole, and how many records it counts
    lake:TOPIC           lands it in the folder `TOPIC-lake`: the job's count, and what the table's files hold
    compact:TOPIC        how many chunks there were, and how many there are
    advise:TOPIC         how many records were measured, and which commands make four segments of them
    replay:TOPIC:TO      the whole topic into another one
    dying-read:TOPIC     read, but the first executor that comes to a record `dies here` is killed on the spot
    dying-copy:TOPIC:TO  copy in one task, likewise, but not before something of it is stored

Functions that run on executors are written here and not imported: they have Braid and no tests.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.functions import col, count, count_distinct, udf


def main(master: str, url: str, steps: list[str]) -> None:
    if master.startswith("own "):
        spark = of_its_own(master.removeprefix("own "))
    else:
        spark = connected(master) if master.startswith("sc://") else classic(master)
    for step in steps:
        what, *names = step.split(":")
        print(json.dumps({"step": step, **STEPS[what](spark, url, *names)}), flush=True)
    spark.stop()


def connected(master: str) -> SparkSession:
    from braid.spark.session import build_session

    return build_session(master, "cluster-program", {"spark.sql.shuffle.partitions": "2"})


def of_its_own(remote: str) -> SparkSession:
    """As docs/pipeline/clusters.md says for sessions that Braid does not make."""
    from braid.spark import register
    from braid.spark.session import zip_package

    spark: SparkSession = SparkSession.builder.remote(remote).getOrCreate()
    with tempfile.TemporaryDirectory() as folder:
        spark.addArtifacts(zip_package(folder), pyfile=True)
    register(spark)
    return spark


def classic(master: str) -> SparkSession:
    builder = SparkSession.builder.appName("cluster-program")
    if master != "submitted":
        builder = (
            builder.master(master).config("spark.ui.enabled", "false").config("spark.ui.showConsoleProgress", "false")
        )
        builder = builder.config("spark.executor.memory", "512m").config("spark.sql.shuffle.partitions", "2")
        builder = builder.config("spark.sql.execution.arrow.maxRecordsPerBatch", "1000")
        builder = builder.config("spark.sql.python.filterPushdown.enabled", "true")
    spark = builder.getOrCreate()
    if master == "submitted":  # Spark looks for formats in what is installed, before it has what was sent.
        from braid.spark import register

        register(spark)
    return spark


def where(spark: SparkSession, url: str) -> dict[str, Any]:
    def here(_: int) -> str:
        import braid

        return json.dumps([braid.__file__, java()])

    rows = spark.range(0, 8, numPartitions=8).select(udf(here, "string")(col("id"))).collect()
    found = [json.loads(row[0]) for row in rows]
    return {"braid": sorted({path for path, _ in found}), "executors": sorted({pid for _, pid in found})}


def read(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    return counts(records(spark, url, topic))


def copy(spark: SparkSession, url: str, topic: str, to: str) -> dict[str, Any]:
    write(records(spark, url, topic), url, to)
    return {}


def stream(spark: SparkSession, url: str, topic: str, to: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.readStream.format("braid").options(url=url, topic=topic, startingOffsets="earliest").load()
        writer = rows.select("key", "value").writeStream.format("braid").options(url=url, topic=to)
        query = writer.option("checkpointLocation", folder).trigger(availableNow=True).start()
        query.awaitTermination()
    return {}


def audit(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    from braid.spark.jobs.audit.job import audit_topic

    report = audit_topic(spark, {"url": url, "topic": topic})
    return {"ok": report.ok, "records": report.records}


def lake(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    from pyarrow import parquet

    from braid.spark.jobs.lake.job import Lake, open_table

    folder = Path(f"{topic}-lake").absolute()
    report = Lake(spark, {"url": url, "topic": topic}, open_table(str(folder), "parquet")).run()
    rows = [
        row for path in folder.rglob("*.parquet") for row in parquet.read_table(path, partitioning=None).to_pylist()
    ]
    places = {(row["segment"], row["offset"]) for row in rows}
    values = {row["value"] for row in rows}
    landed = {"ok": report.ok, "lag": report.lag, "landed": report.records}
    return {**landed, "records": len(rows), "places": len(places), "values": len(values)}


def compact(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    from braid.spark.jobs.compact import compact_topic

    report = compact_topic(spark, {"url": url, "topic": topic})
    return {"ok": report.ok, "before": report.chunks_before, "after": report.chunks_after}


def advise(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    from braid.spark.jobs.advise.job import advise_topic

    report = advise_topic(spark, {"url": url, "topic": topic}, target=4)
    return {"records": report.records, "commands": report.commands}


def replay(spark: SparkSession, url: str, topic: str, to: str) -> dict[str, Any]:
    from braid.spark.jobs.replay.job import ReplayRun
    from braid.spark.jobs.replay.journal import ReplayJournal

    journal = ReplayJournal(str(Path(f"{topic}-replay").absolute()))
    report = ReplayRun(spark, {"url": url, "topic": topic}, {"url": url, "topic": to}, journal).run()
    return {"ok": report.ok, "lag": report.lag, "records": report.records}


def dying_read(spark: SparkSession, url: str, topic: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        rows = records(spark, url, topic).where(dies_once(Path(folder) / "died")(col("value")))
        return {**counts(rows), "died": len(os.listdir(folder))}


def dying_copy(spark: SparkSession, url: str, topic: str, to: str) -> dict[str, Any]:
    def stored() -> int:
        import braid.sync

        with braid.sync.connect(url) as client:
            return sum(each["endOffset"] for each in client.admin.topic_stats(to)["segments"].values())

    with tempfile.TemporaryDirectory() as folder:
        rows = records(spark, url, topic).coalesce(1)
        write(rows.where(dies_once(Path(folder) / "died", after=stored)(col("value"))), url, to)
        return {"died": len(os.listdir(folder))}


STEPS: dict[str, Callable[..., dict[str, Any]]] = {
    "where": where,
    "read": read,
    "copy": copy,
    "stream": stream,
    "audit": audit,
    "lake": lake,
    "compact": compact,
    "advise": advise,
    "replay": replay,
    "dying-read": dying_read,
    "dying-copy": dying_copy,
}


def records(spark: SparkSession, url: str, topic: str) -> DataFrame:
    return spark.read.format("braid").option("url", url).option("topic", topic).load()


def counts(rows: DataFrame) -> dict[str, Any]:
    places = count_distinct(col("segment"), col("offset"))
    (row,) = rows.agg(count("*"), places, count_distinct(col("value"))).collect()
    return {"records": row[0], "places": row[1], "values": row[2]}


def write(rows: DataFrame, url: str, topic: str) -> None:
    writer = rows.select("key", "value").write.format("braid").option("url", url).option("topic", topic)
    writer.mode("append").save()


def dies_once(mark: Path, after: Callable[[], int] = lambda: 1) -> Any:
    """True for every record; the first time that it meets `dies here`, its executor is gone, as with kill -9."""

    def lives(value: bytearray) -> bool:
        if bytes(value) == b"dies here":
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                return True
            while not after():
                time.sleep(0.05)
            os.kill(java(), signal.SIGKILL)
            signal.pause()
        return True

    # With Arrow, the first batch of the UDF would have all rows up to the one that dies: nothing could be stored.
    return udf(lives, "boolean", useArrow=False)


def java() -> int:
    """The executor that this Python works for: the first process above it that is no Python."""
    pid = os.getpid()
    while "java" not in Path(f"/proc/{pid}/comm").read_text():
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
