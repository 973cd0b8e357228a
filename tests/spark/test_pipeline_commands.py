"""`braid pipeline` as people run it: in a process of its own, with a Java of its own."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import braid
from braid.console.reports import newest
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import StoredBroker

BRAID = (sys.executable, "-m", "braid.cli.main")


def environment(folder: Path) -> dict[str, str]:
    """In which everything temporary is in `folder`, and Spark may not be seen there afterwards."""
    known = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
    return {**known, "TMPDIR": str(folder)}


def left_in(folder: Path) -> list[str]:
    return [path.name for path in folder.glob("braid-spark-*")]


def test_advice_is_told_in_json_applied_and_published(broker: StoredBroker, tmp_path: Path) -> None:
    topic = broker.create("commanded", segments=2)
    broker.fill(topic, [(b"key-%d" % number, b"v" * 50) for number in range(2_000)])
    reports = broker.create("commanded-reports")
    options = ("--segments-target", "4", "--apply", "--json", "--master", "local[2]", "--url", broker.url)
    done = subprocess.run(
        [*BRAID, "pipeline", "advise", topic, *options],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "BRAID_REPORT_TOPIC": reports},
        cwd=tmp_path,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["records"], report["advice"]["target"]) == (2_000, 4)
    assert len(report["commands"]) >= 2
    assert all(re.fullmatch(r"braid topic split commanded \d+ --at [0-9a-f]{4}", line) for line in report["commands"])
    assert [(each["command"], each["error"]) for each in report["applied"]] == [
        (each, None) for each in report["commands"]
    ]
    with braid.sync.connect(broker.url) as client:
        segments = client.admin.layout(topic)["segments"].values()
        with client.stream_consumer(reports, "console", start="earliest") as consumer:
            published = next(iter(consumer))
    assert sum(segment["state"] == "ACTIVE" for segment in segments) == 2 + len(report["commands"])
    (run,) = newest([published])
    assert (published.key, run.job, run.ok) == (b"advise public/default/commanded", "advise", True)
    assert run.report == report
    assert [path.name for path in tmp_path.iterdir() if path.name == "spark-warehouse"] == left_in(tmp_path) == []


def test_a_topic_that_does_not_exist_is_one_line_and_needs_no_spark(broker: StoredBroker, tmp_path: Path) -> None:
    done = subprocess.run(
        [*BRAID, "pipeline", "advise", "nothing", "--url", broker.url],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "PATH": ""},
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "braid: there is no topic public/default/nothing; create it first\n"


def test_a_replay_into_a_topic_that_does_not_exist_says_how_to_create_it(broker: StoredBroker, tmp_path: Path) -> None:
    source = broker.create("replayed")
    done = subprocess.run(
        [*BRAID, "pipeline", "replay", source, "nothing", "--url", broker.url],
        capture_output=True,
        text=True,
        env={**environment(tmp_path), "PATH": ""},
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "braid: there is no topic public/default/nothing; create it first, or let --create do it\n"


def test_ctrl_c_ends_a_job_and_leaves_nothing_behind(broker: StoredBroker, tmp_path: Path) -> None:
    topic = broker.create("interrupted")
    with subprocess.Popen(
        [*BRAID, "pipeline", "advise", topic, "--master", "local[2]", "--url", broker.url],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(tmp_path),
    ) as process:
        wait_until(
            lambda: any(log.stat().st_size for log in tmp_path.glob("braid-spark-*/spark.log")), "Java prints something"
        )
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.strip()) == (130, b"", b"")
    assert left_in(tmp_path) == []
    wait_until(lambda: not processes_that_name(tmp_path), "Java has ended too")


def processes_that_name(folder: Path) -> list[str]:
    """Java is told its folders by its arguments."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # It has ended meanwhile.
            if str(folder).encode() in each.read_bytes():
                found.append(each.parent.name)
    return found
