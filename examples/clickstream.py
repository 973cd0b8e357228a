"""A pipeline on Spark: clicks become sessions, in a topic and in a table, and each click counts once.

    python examples/clickstream.py

    topic clicks ─► Spark: sessions of each visitor ─► topic sessions ─► a Parquet table ─► SQL
       3 segments   (a stateful streaming query)          2 segments     (braid pipeline lake)

Two `braid serve` processes share a folder for history. The query runs twice, as a job that a timetable starts: once at
noon, once at night. It keeps the visits that were under way at noon in its checkpoint, although the topic has moved to
the other broker meanwhile. In the end the history of both topics is audited. What is shown is checked.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as f

import braid.sync
from braid.spark.jobs.audit import audit_topic
from braid.spark.jobs.lake import Lake, open_table
from braid.spark.session import build_session, end_session

VISITORS = 2_000
PAGES = ("/", "/search", "/shoes", "/hats", "/cart", "/paid")
PAUSE = datetime.timedelta(minutes=30)
"""Somebody who does nothing for so long has left: the next click begins another session."""
MORNING = datetime.datetime(2026, 11, 14, 6, tzinfo=datetime.UTC)
NOON = datetime.datetime(2026, 11, 14, 12, tzinfo=datetime.UTC)
NEXT_DAY = datetime.datetime(2026, 11, 15, 6, tzinfo=datetime.UTC)
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


class Click(NamedTuple):
    visitor: str
    at: datetime.datetime
    page: str


class Session(NamedTuple):
    visitor: str
    first: datetime.datetime
    last: datetime.datetime
    clicks: int


def main(folder: Path) -> None:
    clicks = day_of_clicks()
    with brokers(folder) as url, spark_on_two_cores(folder) as spark, braid.sync.connect(url) as client:
        title("Topics: clicks, with 3 segments, and sessions. The clicks of the morning come in.")
        client.admin.create_topic("clicks", segments=3)
        client.admin.create_topic("sessions", segments=2)
        morning = [click for click in clicks if click.at < NOON]
        publish(client, morning)
        detail("published and synced", f"{len(morning):,} clicks, keyed by visitor")
        progress = run_query(spark, url, folder)
        detail("sessions that have ended by noon", f"{count(spark, url, 'sessions'):,}, in {progress} micro-batches")

        title("The topic moves to the other broker. The clicks of the afternoon come in.")
        moved = [each for each in client.admin.move("clicks", to="broker-1")["segments"] if each["from"] != "broker-1"]
        detail(
            "segments that broker-0 had", f"{len(moved)}; what they held is in chunks now, which Spark reads by itself"
        )
        afternoon = [click for click in clicks if click.at >= NOON]
        publish(client, [*afternoon, Click("early bird", NEXT_DAY, "/")])  # The next day ends the one before.
        progress = run_query(spark, url, folder)
        detail("sessions in the end", f"{count(spark, url, 'sessions'):,}, in {progress} micro-batches")

        title("The topic sessions lands in a table; landing it again changes nothing.")
        table = str(folder / "sessions.parquet")
        for _ in range(2):
            landed = Lake(spark, {"url": url, "topic": "sessions"}, open_table(table, "parquet")).run()
            detail("landed", f"{landed.records:,} records in {landed.files} files")
        title("SQL over the table, and over a topic as it is.")
        sessions_of(spark.read.parquet(table)).createOrReplaceTempView("sessions")
        clicks_of(records(spark, url, "clicks")).createOrReplaceTempView("clicks")
        spark.sql(SESSIONS_BY_HOUR).show()
        spark.sql(PAGES_BY_CLICKS).show()
        check(spark, clicks)

        title("Every checksum, offset and chunk of both topics, audited by Spark. One click is of the next day.")
        for topic in ("clicks", "sessions"):
            report = audit_topic(spark, {"url": url, "topic": topic})
            detail(topic, f"{report.records:,} records, {report.chunks} chunks, {len(report.defects)} defects")
            assert report.ok, report


# The pipeline.


def run_query(spark: SparkSession, url: str, folder: Path) -> int:
    """Everything that is new, then stop; the checkpoint knows what is not, and who is still there. How many batches."""
    query = (
        as_records(sessions(clicks_of(new_records(spark, url, "clicks"))))
        .writeStream.format("braid")
        .options(url=url, topic="sessions", ordering="content", checkpointLocation=str(folder / "checkpoint"))
        .outputMode("append")
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return len(query.recentProgress)


def new_records(spark: SparkSession, url: str, topic: str) -> DataFrame:
    options = {"url": url, "topic": topic, "startingOffsets": "earliest", "subscription": "sessions-job"}
    return spark.readStream.format("braid").options(maxRecordsPerTrigger=10_000, **options).load()


def records(spark: SparkSession, url: str, topic: str) -> DataFrame:
    return spark.read.format("braid").options(url=url, topic=topic).load()


def clicks_of(rows: DataFrame) -> DataFrame:
    click = f.from_json(f.col("value").cast("string"), "at timestamp, page string")
    return rows.select(f.col("key").cast("string").alias("visitor"), click.at.alias("at"), click.page.alias("page"))


def sessions(clicks: DataFrame) -> DataFrame:
    window = f.session_window("at", f"{PAUSE.total_seconds():.0f} seconds")
    visits = clicks.withWatermark("at", "1 hour").groupBy("visitor", window)
    found = visits.agg(f.min("at").alias("first"), f.max("at").alias("last"), f.count("*").alias("clicks"))
    return found.select("visitor", "first", "last", "clicks")


def as_records(found: DataFrame) -> DataFrame:
    return found.select(f.col("visitor").alias("key"), f.to_json(f.struct("first", "last", "clicks")).alias("value"))


def sessions_of(rows: DataFrame) -> DataFrame:
    session = f.from_json(f.col("value").cast("string"), "first timestamp, last timestamp, clicks long")
    return rows.select(f.col("key").cast("string").alias("visitor"), session.alias("session")).select(
        "visitor", "session.*"
    )


SESSIONS_BY_HOUR = """
    select hour(first) as hour, count(*) as sessions, sum(clicks) as clicks,
           round(avg(unix_timestamp(last) - unix_timestamp(first)) / 60, 1) as minutes
    from sessions group by 1 order by 2 desc, 1 limit 5
"""
PAGES_BY_CLICKS = "select page, count(*) as clicks from clicks group by page order by 2 desc, 1 limit 3"


def count(spark: SparkSession, url: str, topic: str) -> int:
    return records(spark, url, topic).count()


def check(spark: SparkSession, clicks: list[Click]) -> None:
    """The same sessions, made of the same clicks by ten lines of Python."""
    found = [Session(*row) for row in spark.table("sessions").collect()]
    utc = [
        row._replace(first=row.first.astimezone(datetime.UTC), last=row.last.astimezone(datetime.UTC)) for row in found
    ]
    assert sorted(utc) == sorted(expected_sessions(clicks))
    detail("clicks that were published", f"{len(clicks):,}")
    detail("clicks that are counted in sessions", f"{sum(row.clicks for row in found):,}")


# What happens in the shop.


def day_of_clicks() -> list[Click]:
    """In the order of their times. The same every time."""
    chosen = random.Random(7)
    clicks = []
    for number in range(VISITORS):
        at = MORNING + datetime.timedelta(seconds=chosen.randrange(10 * 3600))
        for _ in range(chosen.randint(1, 3)):
            for _ in range(chosen.randint(1, 12)):
                clicks.append(Click(f"visitor-{number}", at, chosen.choice(PAGES)))
                at += datetime.timedelta(seconds=chosen.randint(5, 300))
            at += PAUSE + datetime.timedelta(seconds=chosen.randint(600, 6000))
    return sorted(clicks, key=lambda click: click.at)


def expected_sessions(clicks: list[Click]) -> list[Session]:
    ended: list[Session] = []
    under_way: dict[str, Session] = {}
    for visitor, at, _ in clicks:
        session = under_way.get(visitor)
        if session is not None and at < session.last + PAUSE:
            under_way[visitor] = session._replace(last=at, clicks=session.clicks + 1)
        else:
            ended += [session] if session is not None else []
            under_way[visitor] = Session(visitor, at, at, 1)
    return [*ended, *under_way.values()]


def publish(client: braid.sync.Client, clicks: list[Click]) -> None:
    with client.producer("clicks") as producer:
        for click in clicks:
            value = json.dumps({"at": click.at.isoformat(), "page": click.page})
            producer.submit(value, key=click.visitor)
        producer.flush()


# Brokers and Spark.


@contextlib.contextmanager
def brokers(folder: Path) -> Iterator[str]:
    """Two, with one metadata store and one folder for history."""
    command = [sys.executable, "-m", "braid.cli.main", "up", "--json", "--brokers", "2", "--port", "0"]
    command += ["--admin-port", "0", "--data", str(folder / "data"), "--storage", f"file://{folder}/history"]
    with (folder / "brokers.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    assert process.stdout is not None
    try:
        ready: list[dict[str, Any]] = []
        text = ""
        while not ready:
            line = process.stdout.readline()
            assert line, (folder / "brokers.log").read_text()[-2000:]
            text += line
            with contextlib.suppress(ValueError):  # not all of it yet
                ready = json.loads(text)
        yield "braid://" + ",".join(each["url"].removeprefix("braid://") for each in ready)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()
        process.stdout.close()


@contextlib.contextmanager
def spark_on_two_cores(folder: Path) -> Iterator[SparkSession]:
    settings = {"spark.sql.shuffle.partitions": "2", "spark.sql.warehouse.dir": str(folder / "warehouse")}
    with (folder / "spark.log").open("wb") as log:
        spark = build_session("local[2]", "clickstream", settings, log=log)
        try:
            yield spark
        finally:
            end_session(spark)


def title(text: str) -> None:
    say(f"\n\x1b[1m{text}\x1b[0m" if COLOURS else f"\n{text}")


def detail(what: str, value: str) -> None:
    say(f"    {what:<46} {value}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    logging.getLogger("braid").setLevel(logging.ERROR)  # The client warns of what it rides over: here that is wanted.
    with tempfile.TemporaryDirectory(prefix="braid-clickstream-") as temporary:
        main(Path(temporary))
