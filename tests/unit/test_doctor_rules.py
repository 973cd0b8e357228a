"""What `braid doctor` makes of facts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from braid.cli.doctor.facts import (
    BrokerFacts,
    ClusterFacts,
    Facts,
    FolderFacts,
    MachineFacts,
    StorageFacts,
    StoreFacts,
)
from braid.cli.doctor.rules import Finding, Level, is_healthy, judge, percentile

MACHINE = MachineFacts(
    version="1.0", python="3.11", open_files=1 << 20, max_connections=10_000, clock_synchronised=True
)
FOLDER = FolderFacts(path="/data", free_bytes=500 << 30, size_bytes=1000 << 30, sync_ms=(0.2, 0.3, 0.5))
STORE = StoreFacts(url="etcd://a:2379", read_ms=(1.0, 2.0), clock_ahead_s=0.4)
STORAGE = StorageFacts(url="s3://b/p", steps=dict.fromkeys(("create", "read", "list", "refuse", "delete"), ""))
BROKER = BrokerFacts(
    id="one",
    state="active",
    version="1.0",
    leader=True,
    address="a:6660",
    admin="a:8660",
    ready=True,
    round_trip_ms=1.0,
    clock_ahead_s=0.1,
)
SECOND = msgspec.structs.replace(BROKER, id="two", leader=False)


def _cluster(*brokers: BrokerFacts) -> ClusterFacts:
    return ClusterFacts(url="braid://a:6660", brokers=brokers)


def _facts(**changes: Any) -> Facts:
    good = {"machine": MACHINE, "folder": FOLDER, "metadata": STORE, "storage": STORAGE}
    return Facts(**{**good, "cluster": _cluster(BROKER, SECOND), **changes})


def _bad(facts: Facts) -> list[Finding]:
    return [finding for finding in judge(facts) if finding.level is not Level.OK]


def test_a_good_cluster_has_no_findings_but_good_ones() -> None:
    findings = judge(_facts())
    assert is_healthy(findings)
    assert {finding.level for finding in findings} == {Level.OK}
    assert {finding.subject for finding in findings} == {
        "machine",
        "data folder",
        "metadata store",
        "storage",
        "broker one",
        "broker two",
    }


def replaced(value: msgspec.Struct, **changes: Any) -> Any:
    return msgspec.structs.replace(value, **changes)


CASES = {
    "few files": ({"machine": replaced(MACHINE, open_files=1024)}, Level.WARNING, "machine", "512 connections"),
    "few processes": ({"machine": replaced(MACHINE, processes=100)}, Level.WARNING, "machine", "100 processes"),
    "no kernel sync": ({"machine": replaced(MACHINE, kernel_sync=False)}, Level.WARNING, "machine", "caio"),
    "a free-running clock": (
        {"machine": replaced(MACHINE, clock_synchronised=False)},
        Level.WARNING,
        "machine",
        "clock right",
    ),
    "a folder of others": (
        {"folder": FolderFacts(path="/data", error="Permission denied")},
        Level.PROBLEM,
        "data folder",
        "Permission denied",
    ),
    "a network filesystem": (
        {"folder": replaced(FOLDER, network_filesystem="nfs4")},
        Level.PROBLEM,
        "data folder",
        "nfs4",
    ),
    "a full disk": ({"folder": replaced(FOLDER, free_bytes=1 << 30)}, Level.PROBLEM, "data folder", "1.1 GB of"),
    "a disk that fills": ({"folder": replaced(FOLDER, free_bytes=50 << 30)}, Level.WARNING, "data folder", "free"),
    "a slow disk": ({"folder": replaced(FOLDER, sync_ms=(1.0, 40.0))}, Level.WARNING, "data folder", "40.0 ms"),
    "a very slow disk": ({"folder": replaced(FOLDER, sync_ms=(1.0, 400.0))}, Level.PROBLEM, "data folder", "400"),
    "a silent metadata store": (
        {"metadata": StoreFacts(url="etcd://a:2379", error="no answer in time")},
        Level.PROBLEM,
        "metadata store",
        "no answer in time",
    ),
    "a slow metadata store": (
        {"metadata": replaced(STORE, read_ms=(1.0, 300.0))},
        Level.WARNING,
        "metadata store",
        "300.0 ms",
    ),
    "a metadata store of yesterday": (
        {"metadata": replaced(STORE, clock_ahead_s=-86_400.0)},
        Level.PROBLEM,
        "metadata store",
        "86,400 s behind",
    ),
    "no right to create": (
        {"storage": StorageFacts(url="s3://b/p", steps={"create": "AccessDenied"})},
        Level.PROBLEM,
        "storage",
        "Objects cannot be created at s3://b/p: AccessDenied",
    ),
    "a storage that overwrites": (
        {"storage": StorageFacts(url="s3://b/p", steps={"create": "", "read": "", "list": "", "refuse": "x"})},
        Level.PROBLEM,
        "storage",
        "overwritten",
    ),
    "no right to delete": (
        {"storage": replaced(STORAGE, steps={**STORAGE.steps, "delete": "AccessDenied"})},
        Level.PROBLEM,
        "storage",
        "cannot be deleted",
    ),
    "a slow storage": ({"storage": replaced(STORAGE, create_ms=3_000.0)}, Level.WARNING, "storage", "3,000 ms"),
    "no cluster": (
        {"cluster": ClusterFacts(url="braid://a:6660", error="refused")},
        Level.PROBLEM,
        "cluster",
        "refused",
    ),
    "a cluster that asks for a token": (
        {"cluster": ClusterFacts(url="braid://a:6660", error="pass a token", answered=True)},
        Level.PROBLEM,
        "cluster",
        "braid://a:6660 answers, but cannot be used: pass a token.",
    ),
    "a broker that is down": (
        {"cluster": _cluster(BROKER, BrokerFacts(id="two", state="down", segments=7))},
        Level.PROBLEM,
        "broker two",
        "7 segments wait",
    ),
    "a wrong address": (
        {"cluster": _cluster(BROKER, replaced(SECOND, address_error="refused"))},
        Level.PROBLEM,
        "broker two",
        "Clients cannot reach it at a:6660",
    ),
    "a far broker": (
        {"cluster": _cluster(BROKER, replaced(SECOND, round_trip_ms=200.0))},
        Level.WARNING,
        "broker two",
        "200.0 ms",
    ),
    "a hidden admin port": (
        {"cluster": _cluster(BROKER, replaced(SECOND, admin_error="refused", ready=None))},
        Level.WARNING,
        "broker two",
        "admin port",
    ),
    "a broker that is not ready": (
        {"cluster": _cluster(BROKER, replaced(SECOND, ready=False))},
        Level.PROBLEM,
        "broker two",
        "not ready",
    ),
    "no leader": ({"cluster": _cluster(replaced(BROKER, leader=False))}, Level.PROBLEM, "cluster", "No broker leads"),
    "two versions": (
        {"cluster": _cluster(BROKER, replaced(SECOND, version="0.9"))},
        Level.WARNING,
        "cluster",
        "0.9, 1.0",
    ),
    "an old command": (
        {"cluster": _cluster(replaced(BROKER, version="2.0"))},
        Level.WARNING,
        "cluster",
        "this command of 1.0",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_said_with_what_to_do(case: str) -> None:
    changes, level, subject, text = CASES[case]
    (finding,) = _bad(_facts(**changes))
    assert (finding.level, finding.subject) == (level, subject)
    assert text in finding.text
    assert finding.advice.endswith(".")
    assert is_healthy([finding]) is (level is Level.WARNING)


def test_clocks_are_compared_with_this_machine_and_with_each_other() -> None:
    findings = _bad(
        _facts(cluster=_cluster(replaced(BROKER, clock_ahead_s=5.0), replaced(SECOND, clock_ahead_s=-70.0)))
    )
    assert [(each.level, each.subject) for each in findings] == [
        (Level.WARNING, "broker one"),
        (Level.PROBLEM, "broker two"),
        (Level.WARNING, "cluster"),
    ]
    assert "5 s ahead of" in findings[0].text
    assert "70 s behind" in findings[1].text
    assert "differ by 75 s" in findings[2].text


def test_what_was_not_looked_at_is_not_judged() -> None:
    assert {finding.subject for finding in judge(Facts(machine=MACHINE))} == {"machine"}


@pytest.mark.parametrize(
    ("values", "part", "expected"), [((), 0.5, 0.0), ((1.0,), 0.9, 1.0), ((1.0, 2.0, 3.0), 0.5, 2.0)]
)
def test_percentiles(values: tuple[float, ...], part: float, expected: float) -> None:
    assert percentile(values, part) == expected
