"""Reports of jobs as records: `--report-topic` publishes what `--json` prints, and the console shows it."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

import braid.sync
from braid.cli.main import run
from braid.cli.pipeline import session
from braid.cli.pipeline.commands import JOBS
from braid.console.pages.pipeline import Jobs, reports_card
from braid.console.reports import JobRun, complaints, newest, summary
from tests.spark.spark_kit import WAIT_S, StoredBroker, numbered

RECORDS = 4_000
REPORTS = "job-reports"
FIGURES = {
    "audit": ["records", "batches", "chunks", "bytes", "seconds"],
    "lake": ["records", "files", "bytes", "lag", "skipped", "seconds"],
    "compact": ["chunksBefore", "chunksAfter", "joinedBytes", "seconds"],
    "advise": ["records"],
    "replay": ["records", "seconds"],
}
"""What the console shows of each job."""


def test_every_job_publishes_the_report_that_it_prints_and_the_console_shows_it(
    spark: SparkSession,
    broker: StoredBroker,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The jobs share the session of the tests: a session of its own costs each of them ten seconds.
    monkeypatch.setattr(session, "spark_session", lambda *_, **__: contextlib.nullcontext(spark))

    def report(job: str, *arguments: str, code: int = 0) -> dict[str, Any]:
        assert run(["pipeline", job, *arguments, *options]) == code
        printed: dict[str, Any] = json.loads(capsys.readouterr().out)
        return printed

    options = ("--json", "--report-topic", REPORTS, "--url", broker.url)
    for name in (REPORTS, "reported", "reported-copy"):
        broker.create(name)
    broker.fill("reported", numbered(RECORDS))
    broker.until_chunks("reported", 4)
    printed = {
        "audit": report("audit", "reported"),
        "lake": report("lake", "reported", "--to", str(tmp_path / "table")),
        "compact": report("compact", "reported"),
        "advise": report("advise", "reported"),
        "replay": report("replay", "reported", "reported-copy", "--checkpoint", str(tmp_path / "replay")),
    }
    assert printed.keys() == JOBS.keys()
    runs = published(broker)
    assert {each.job: each.report for each in runs} == printed
    assert all(each.ok for each in runs)
    for each in runs:
        assert [name for name, _ in summary(each)] == FIGURES[each.job]
    jobs = Jobs()
    jobs.runs = runs
    page = reports_card(jobs, REPORTS)
    for job in JOBS:
        assert f"{job} reported{' → reported-copy' if job == 'replay' else ''}<" in page
    assert page.count(f"{RECORDS:,}") == 4, "all but compaction count records"

    missing = broker.chunks("reported")[0]["object"]
    (path,) = broker.folder.glob(f"history/public/default/reported/**/{missing}")
    path.unlink()
    damaged = report("audit", "reported", code=1)
    (audit,) = [each for each in published(broker) if each.job == "audit"]
    assert (audit.ok, audit.report) == (False, damaged), "the last audit counts, though it failed"
    assert complaints(audit) == [each["text"] for each in damaged["defects"]] != []
    jobs.runs = [audit]
    assert f"{len(complaints(audit))} wrong" in reports_card(jobs, REPORTS)


def published(broker: StoredBroker) -> list[JobRun]:
    """As the console reads them."""
    with braid.sync.connect(broker.url, timeout=WAIT_S) as client:
        count = client.admin.topic_stats(REPORTS)["segments"]["0"]["records"]
        with client.stream_consumer(REPORTS, f"console-{count}", start="earliest") as consumer:
            return newest([next(iter(consumer)) for _ in range(count)])
