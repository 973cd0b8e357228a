"""`braid bench` with real processes: its own broker, a given one, and none."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from braid.cli import main, target
from braid.cli.bench import move, queue, replication, scale, segments
from braid.cli.target import Target, ask
from tests.kits.forked_broker import ForkedBroker
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


class Done(NamedTuple):
    code: int
    out: str
    err: str


class Bench:
    """Runs the command in the test's process. Its brokers and workers are processes of their own."""

    def __init__(self, capfd: pytest.CaptureFixture[str]) -> None:
        self._capfd = capfd

    def run(self, *arguments: str) -> Done:
        code = main.run(["bench", *arguments])
        return Done(code, *self._capfd.readouterr())

    def results_of(self, *arguments: str) -> list[dict[str, Any]]:
        done = self.run(*arguments, "--json")
        assert done.code == 0, done.err
        answer = json.loads(done.out)
        assert answer["machine"]["cores"] >= 1
        results: list[dict[str, Any]] = answer["results"]
        return results


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Bench:
    """Whatever the command makes, it makes in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in [name for name in os.environ if name.startswith("BRAID_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(move, "SETTLE_S", 0.4)
    monkeypatch.setattr(segments, "SETTLE_S", 0.2)
    monkeypatch.setattr(replication, "SETTLE_S", 0.4)
    return Bench(capfd)


def test_a_benchmark_that_is_killed_leaves_no_broker_and_no_folder(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "braid.cli.main", "bench", "consume", "--records", "100000000"]
    bench = subprocess.Popen(command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL)
    wait_until(lambda: list(tmp_path.glob("*/data.log")), "the benchmark has started a broker")
    bench.terminate()
    assert bench.wait(30) == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


def test_publishing_is_measured_in_every_mode_with_a_broker_of_its_own_that_leaves_nothing(
    bench: Bench, tmp_path: Path
) -> None:
    modes = ("send_many", "send_table", "send", "submit", "single")
    choice = [option for mode in modes for option in ("--mode", mode)]

    results = bench.results_of("publish", *choice, "--tasks", "3", "--records", "1000", "--size", "100")

    assert [result["case"] for result in results] == [f"{mode}, 3 tasks" for mode in modes]
    for result in results:
        assert result["records"] == 1000
        assert result["recordsPerS"] > 0
        assert result["durability"] == "fsync"
        assert 0 < result["latencyMs"]["p50"] <= result["latencyMs"]["p99.9"]
        assert result["brokerCpu"] >= 0
    assert list(tmp_path.iterdir()) == []


def test_consuming_is_measured_in_every_form(bench: Bench, tmp_path: Path) -> None:
    forms = ("arrow", "values", "messages", "each")
    choice = [option for form in forms for option in ("--as", form)]

    results = bench.results_of("consume", *choice, "--records", "3000", "--size", "100", "--batch", "4KiB")

    assert [result["case"] for result in results] == [f"as {form}" for form in forms]
    assert [result["records"] for result in results] == [3000] * 4


def test_latency_is_measured_at_every_rate(bench: Bench, tmp_path: Path) -> None:
    results = bench.results_of("latency", "--rate", "200", "--rate", "400", "--duration", "0.5", "--size", "64")

    assert [result["case"] for result in results] == ["at 200 records/s", "at 400 records/s"]
    for result in results:
        assert 0 < result["latencyMs"]["p50"] <= result["latencyMs"]["worst"]


def test_a_broker_that_was_named_is_measured_and_keeps_no_topic(bench: Bench, tmp_path: Path) -> None:
    with ForkedBroker(tmp_path / "data") as broker:
        done = bench.run("publish", "--url", broker.url, "--records", "500", "--size", "100")
        topics = ask(Target(url=broker.url), lambda client: client.admin.list_topics())

    assert done.code == 0, done.err
    assert "send_many, 2 tasks" in done.out
    assert broker.url in done.out
    assert not topics


def test_a_broker_that_is_not_there_is_one_line_of_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "CONNECT_S", 0.5)

    done = bench.run("publish", "--url", "braid://127.0.0.1:1")

    assert done.code == 1
    assert done.out == ""
    assert done.err.count("\n") == 1
    assert "127.0.0.1:1" in done.err


@pytest.mark.parametrize("wrong", [("--mode", "shout"), ("--size", "0"), ("--durability", "replicated")])
def test_wrong_usage_is_refused_before_anything_starts(bench: Bench, tmp_path: Path, wrong: tuple[str, str]) -> None:
    done = bench.run("publish", *wrong)

    assert done.code == 2
    assert list(tmp_path.iterdir()) == []


def test_moves_are_measured_under_load_and_nothing_is_lost(bench: Bench, tmp_path: Path) -> None:
    choice = ("--history", "1MiB", "--history", "2MiB", "--moves", "2", "--rate", "500")

    results = bench.results_of("move", *choice)

    assert [result["historyBytes"] for result in results] == [1 << 20, 2 << 20]
    for result in results:
        assert len(result["moveMs"]) == len(result["producerMs"]) == len(result["consumerMs"]) == 2
        assert min(result["moveMs"]) > 0
        assert min(result["producerMs"]) > 0
        assert min(result["consumerMs"]) > 0
        assert result["records"] > 500
        assert (result["lost"], result["twice"], result["errors"]) == (0, 0, 0)
    assert list(tmp_path.iterdir()) == []


def test_moves_in_a_row_of_copied_history_are_measured(bench: Bench, tmp_path: Path) -> None:
    done = bench.run("move", "--history", "1MiB", "--count", "5", "--storage", "local", "--rate", "500")

    assert done.code == 0, done.err
    row = done.out.splitlines()[1].split()
    assert row[2:5] == ["local", "5", row[4]]
    assert row[-3:] == ["0", "0", "0"]


def test_replicas_are_measured_and_a_fail_over_shows_no_error(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replication, "IDLE_S", 0.2)
    load = ("--rounds", "1", "--publish", "1MiB", "--seconds", "0.5", "--kills", "1", "--catch-up", "4MiB")
    done = bench.run("replication", *load, "--segments", "12", "--json")
    assert done.code == 0, done.err
    answer = json.loads(done.out)
    result = answer["result"]
    assert set(answer["ratios"]) == {"publish", "latencyP50", "latencyP99", "catchUp"}
    assert all(ratio > 0 for ratio in answer["ratios"].values())
    assert [len(result[name][topic]) for name in ("publish", "latencyP50Ms") for topic in ("plain", "replicated")] == [
        1
    ] * 4
    (fail_over,) = result["failOvers"]
    assert fail_over["detectedMs"] > 0
    assert fail_over["confirmedMs"] > 0
    assert result["errors"] == 0
    many = result["many"]
    assert (many["segments"], len(many["idleCpu"]), len(many["rssBytes"])) == (12, 3, 3)
    assert 0 < many["detectedS"] < many["servedS"]


def test_changes_of_the_layout_are_measured_beside_moves_and_then_made_many_times(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scale, "REST_S", 0.1)
    done = bench.run(
        "scale", "--history", "10KiB", "--history", "1MiB", "--rounds", "1", "--rate", "500", "--changes", "8", "--json"
    )

    assert done.code == 0, done.err
    answer = json.loads(done.out)
    for result in answer["results"]:
        assert [each["change"] for each in result["changes"]] == ["move", "split", "merge", "1 → 4", "4 → 7", "7 → 1"]
        assert (result["lost"], result["twice"], result["errors"]) == (0, 0, 0)
        assert result["records"] > 100
        assert all(min(each["producerMs"] + each["consumerMs"] + each["tookMs"]) > 0 for each in result["changes"])
    assert [each["changes"] for each in answer["afterChanges"]] == [2, 4, 6, 8]
    made = [each["segmentsMade"] for each in answer["afterChanges"]]
    assert made == [11, 14, 17, 20], "a split makes two, a merge one"
    for each in answer["afterChanges"]:
        assert 8 <= each["segments"] <= each["segmentsMade"]
        assert each["segments"] * 50 < each["topicBytes"] < each["metadataBytes"]
        assert min(each["pushBytes"], each["lookupNs"], each["changeMs"], each["rssBytes"]) > 0
    assert "memory of the brokers, 8 changes / 2" in answer["ratios"]
    assert sum(name.startswith("producer's pause, 4 → 7") for name in answer["ratios"]) == 2, "of a move, of sizes"
    assert list(tmp_path.iterdir()) == []


def test_the_histories_of_bench_scale_are_those_of_the_bar() -> None:
    (option,) = [each for each in scale.scale.params if each.name == "histories"]
    assert option.default == ("10MiB", "4GiB")


def test_queues_are_measured_beside_what_they_have_to_do(bench: Bench, tmp_path: Path) -> None:
    load = ("--messages", "4000", "--rounds", "1", "--duration", "0.2", "--settled", "2000", "--leased", "100")
    done = bench.run("queue", *load, "--json")

    assert done.code == 0, done.err
    answer = json.loads(done.out)
    (result,) = answer["results"]
    assert [(each["ack"], each["prefetch"], each["messages"]) for each in result["rates"]] == [
        ("submit_ack", 1000, 4000),
        ("submit_ack", 10, 1000),
        ("ack", 1000, 400),
        ("ack", 10, 100),
    ]
    assert all(min(each["perS"] + each["clientUs"]) > 0 for each in result["rates"])
    assert 0 < result["returnedMs"]["p50"] <= result["returnedMs"]["p99"]
    assert result["settled"] + result["leased"] == 2100
    assert 40 <= result["ranges"] <= 50
    assert min(result["startS"] + result["openS"] + result["heldBackS"]) > 0
    assert [each["bar"] for each in answer["verdicts"].values()] == [100_000, 30_000, 20, 1, 200]
    assert list(tmp_path.iterdir()) == []


def test_the_table_of_queues_has_a_verdict_for_each_bar(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [
        queue.QueueRate(prefetch, ack, 10, per_s, [1.0], [1.0])
        for prefetch, ack, per_s in (
            (1000, "submit_ack", [9e4, 2e5, 3e5]),
            (10, "submit_ack", [2e4]),
            (10, "ack", [1.0]),
        )
    ]
    times = {"p50": 1.0, "p99": 20.0, "worst": 30.0}
    result = queue.QueueResult(100, rates, 1000.0, times, 90, 5, 10, [1.0], [2.5], [4.0], 10, 201.0)

    queue.print_result(result, as_json=False)

    lines = capsys.readouterr().out.splitlines()
    assert "consume + ack, prefetch 1,000: 200,000 messages/s (within ≥ 100,000)." in lines
    assert "consume + ack, prefetch 10: 20,000 messages/s (not within ≥ 30,000)." in lines
    assert "nack to redelivery, p99: 20.00 ms (within ≤ 20)." in lines
    assert "opening, the queue's part: 1.50 s (not within ≤ 1)." in lines
    assert "memory of a leased message: 201 B (not within ≤ 200)." in lines


def test_many_segments_are_measured(bench: Bench, tmp_path: Path) -> None:
    (result,) = bench.results_of("segments", "--segments", "12", "--idle", "0.2")

    assert result["segments"] == 12
    assert min(result[name] for name in ("createS", "publishS", "startS", "drainS", "rssBytes")) > 0
    assert list(tmp_path.iterdir()) == []
