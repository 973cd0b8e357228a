"""`braid bench` with real processes: its own broker, a given one, and none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from braid.cli import main, target
from braid.cli.target import Target, ask
from braid.testing.processes import BrokerProcess

pytestmark = pytest.mark.processes


def run_bench(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Whatever the command makes, it makes in `folder`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
    return subprocess.run(
        [sys.executable, "-m", "braid.cli.main", "bench", *arguments],
        env={**environment, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def results_of(*arguments: str, folder: Path) -> list[dict[str, Any]]:
    done = run_bench(*arguments, "--json", folder=folder)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["machine"]["cores"] >= 1
    results: list[dict[str, Any]] = answer["results"]
    return results


def test_publishing_is_measured_in_every_mode_with_a_broker_of_its_own_that_leaves_nothing(tmp_path: Path) -> None:
    modes = ("send_many", "send_table", "send", "submit", "single")
    choice = [option for mode in modes for option in ("--mode", mode)]

    results = results_of("publish", *choice, "--tasks", "3", "--records", "1000", "--size", "100", folder=tmp_path)

    assert [result["case"] for result in results] == [f"{mode}, 3 tasks" for mode in modes]
    for result in results:
        assert result["records"] == 1000
        assert result["recordsPerS"] > 0
        assert result["durability"] == "fsync"
        assert 0 < result["latencyMs"]["p50"] <= result["latencyMs"]["p99.9"]
        assert result["brokerCpu"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_consuming_is_measured_in_every_form(tmp_path: Path) -> None:
    forms = ("arrow", "values", "messages", "each")
    choice = [option for form in forms for option in ("--as", form)]

    results = results_of("consume", *choice, "--records", "3000", "--size", "100", "--batch", "4KiB", folder=tmp_path)

    assert [result["case"] for result in results] == [f"as {form}" for form in forms]
    assert [result["records"] for result in results] == [3000] * 4


def test_latency_is_measured_at_every_rate(tmp_path: Path) -> None:
    results = results_of(
        "latency", "--rate", "200", "--rate", "400", "--duration", "0.5", "--size", "64", folder=tmp_path
    )

    assert [result["case"] for result in results] == ["at 200 records/s", "at 400 records/s"]
    for result in results:
        assert 0 < result["latencyMs"]["p50"] <= result["latencyMs"]["worst"]


def test_a_broker_that_was_named_is_measured_and_keeps_no_topic(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        done = run_bench("publish", "--url", broker.url, "--records", "500", "--size", "100", folder=tmp_path)
        topics = ask(Target(url=broker.url), lambda client: client.admin.list_topics())

    assert done.returncode == 0, done.stderr
    assert "send_many, 2 tasks" in done.stdout
    assert broker.url in done.stdout
    assert not topics


def test_a_broker_that_is_not_there_is_one_line_of_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "CONNECT_S", 0.5)

    assert main.run(["bench", "publish", "--url", "braid://127.0.0.1:1"]) == 1

    printed = capfd.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert "127.0.0.1:1" in printed.err


@pytest.mark.parametrize("wrong", [("--mode", "shout"), ("--size", "0"), ("--durability", "replicated")])
def test_wrong_usage_is_refused_before_anything_starts(tmp_path: Path, wrong: tuple[str, str]) -> None:
    done = run_bench("publish", *wrong, folder=tmp_path)

    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_moves_are_measured_under_load_and_nothing_is_lost(tmp_path: Path) -> None:
    choice = ("--history", "1MiB", "--history", "2MiB", "--moves", "2", "--rate", "500")

    results = results_of("move", *choice, folder=tmp_path)

    assert [result["historyBytes"] for result in results] == [1 << 20, 2 << 20]
    for result in results:
        assert len(result["moveMs"]) == len(result["producerMs"]) == len(result["consumerMs"]) == 2
        assert min(result["moveMs"]) > 0
        assert min(result["producerMs"]) > 0
        assert min(result["consumerMs"]) > 0
        assert result["records"] > 500
        assert (result["lost"], result["twice"], result["errors"]) == (0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_moves_in_a_row_of_copied_history_are_measured(tmp_path: Path) -> None:
    done = run_bench(
        "move", "--history", "1MiB", "--count", "5", "--storage", "local", "--rate", "500", folder=tmp_path
    )

    assert done.returncode == 0, done.stderr
    row = done.stdout.splitlines()[1].split()
    assert row[2:5] == ["local", "5", row[4]]
    assert row[-3:] == ["0", "0", "0"]


def test_many_segments_are_measured(tmp_path: Path) -> None:
    (result,) = results_of("segments", "--segments", "12", "--idle", "0.2", folder=tmp_path)

    assert result["segments"] == 12
    assert min(result[name] for name in ("createS", "publishS", "startS", "drainS", "rssBytes")) > 0
    assert list(tmp_path.iterdir()) == []
