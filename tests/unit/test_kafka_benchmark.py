"""The benchmark beside Kafka: what it decides without a Kafka."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.kafka_cluster import (
    Ports,
    java_command,
    kafka_absent,
    node_settings,
    properties_text,
    topic_settings,
    version_among,
)
from benchmarks.kafka_replicas import Load, Rates, main, median_rates, parse
from benchmarks.kafka_worker import producer_settings

PORTS = {1: Ports(1001, 2001), 2: Ports(1002, 2002), 3: Ports(1003, 2003)}


def test_a_run_without_kafka_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("KAFKA_HOME", raising=False)
    main([])
    assert capsys.readouterr().out == "Kafka is not measured: KAFKA_HOME names no folder with a Kafka 4.\n"


@pytest.mark.parametrize(
    ("names", "version"),
    [
        (["kafka-clients-4.1.0.jar", "kafka_2.13-4.1.0.jar"], "4.1.0"),
        (["kafka_2.13-3.9.1.jar"], "3.9.1"),
        (["kafka-clients-4.1.0.jar", "kafka_2.13-4.1.0-sources.jar"], ""),
        ([], ""),
    ],
)
def test_the_version_is_that_of_the_server_jar(names: list[str], version: str) -> None:
    assert version_among(names) == version


@pytest.mark.parametrize("jar", ["kafka_2.13-3.9.1.jar", "kafka-clients-4.1.0.jar"])
def test_a_folder_without_a_kafka_4_server_counts_as_absent(tmp_path: Path, jar: str) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / jar).touch()
    assert str(tmp_path) in kafka_absent({"KAFKA_HOME": str(tmp_path), "PATH": os.environ["PATH"]})


def test_a_kafka_without_java_counts_as_absent(tmp_path: Path) -> None:
    (tmp_path / "libs").mkdir()
    (tmp_path / "libs" / "kafka_2.13-4.1.0.jar").touch()
    assert "java" in kafka_absent({"KAFKA_HOME": str(tmp_path), "PATH": str(tmp_path)})


def test_a_node_knows_all_voters_and_listens_on_its_own_loopback_ports(tmp_path: Path) -> None:
    settings = node_settings(2, PORTS, tmp_path, 9.0)
    assert settings["node.id"] == "2"
    assert settings["controller.quorum.voters"] == "1@127.0.0.1:2001,2@127.0.0.1:2002,3@127.0.0.1:2003"
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:1002,CONTROLLER://127.0.0.1:2002"
    assert settings["broker.session.timeout.ms"] == "9000"
    assert "node.id=2\n" in properties_text(settings)


def test_only_a_topic_with_fsync_syncs_every_batch() -> None:
    assert topic_settings(2, fsync=False) == {"min.insync.replicas": "2"}
    assert topic_settings(2, fsync=True) == {"min.insync.replicas": "2", "flush.messages": "1"}


def test_a_node_runs_from_the_jars_of_its_home_with_a_bounded_heap() -> None:
    command = java_command(Path("/kafka"), "kafka.Kafka", "server.properties")
    assert command[0] == "java"
    assert "-Xmx512m" in command
    assert command[-4:] == ["-cp", "/kafka/libs/*", "kafka.Kafka", "server.properties"]


def test_every_producer_waits_for_all_replicas_and_sends_each_record_once() -> None:
    for settings in (producer_settings("a:1", 0), producer_settings("a:1", 5, 262_144)):
        assert (settings["acks"], settings["enable.idempotence"]) == ("all", True)
    assert producer_settings("a:1", 5, 262_144)["batch.size"] == 262_144


def test_a_quick_run_is_small_whatever_else_was_asked() -> None:
    assert parse(["--rounds", "2", "--mib", "3"]) == Load(2, 3 << 20, 100, 5.0, 2)
    assert parse(["--quick", "--rounds", "9", "--mib", "999"]) == Load(1, 5 << 20, 100, 1.0, 1)


def test_rounds_are_reported_by_the_median_of_each_field() -> None:
    rounds = [Rates(1, 10, 3, 7, 9), Rates(3, 20, 2, 8, 9), Rates(2, 60, 1, 9, 0)]
    assert median_rates(rounds) == Rates(2, 20, 2, 8, 9)
