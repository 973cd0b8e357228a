"""`braid doctor` against real brokers, with planted problems."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from braid.cli.doctor.services import _ask, look_at_storage
from braid.metadata import paths
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Put
from braid.model.cluster import Registration
from braid.ports.disk import Buffer, Disk
from braid.ports.network import Address
from braid.storage.objects.disk import DiskObjects
from tests.kits.cluster_process import ClusterProcess
from tests.kits.commands import run_to_end
from tests.kits.etcd_server import shared_etcd_server


def _doctor(url: str, *options: str) -> tuple[int, dict[str, Any]]:
    done = run_to_end(url, "doctor", "--json", *options)
    assert not done.stderr, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["healthy"] is (done.returncode == 0)
    return done.returncode, found


def _texts(found: dict[str, Any], level: str) -> dict[str, str]:
    """By subject; several texts of one subject together."""
    texts: dict[str, str] = {}
    for each in found["findings"]:
        if each["level"] == level:
            texts[each["subject"]] = f"{texts.get(each['subject'], '')} {each['text']}".strip()
    return texts


@pytest.fixture(name="cluster", scope="module")
def _cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path_factory.mktemp("cluster"), shared=True, brokers=2) as cluster:
        yield cluster


def test_a_good_cluster_is_healthy(cluster: ClusterProcess, tmp_path: Path) -> None:
    folder = cluster["broker-0"].data.parent
    storage = tmp_path / "history"
    options = ["--data", str(folder), "--metadata", f"sqlite:{folder}/metadata.db", "--storage", f"file://{storage}"]
    code, found = _doctor(cluster.url, *options)
    assert code == 0
    assert {"data folder", "metadata store", "storage", "broker broker-0", "broker broker-1"} <= _texts(
        found, "ok"
    ).keys()
    assert found["facts"]["storage"]["steps"] == dict.fromkeys(("create", "read", "list", "refuse", "delete"), "")
    for broker in found["facts"]["cluster"]["brokers"]:
        assert abs(broker["clockAheadS"]) <= 1.5
        assert broker["roundTripMs"] > 0
        assert broker["ready"] is True
    assert not storage.exists(), "the doctor leaves nothing"
    assert not [name for name in os.listdir(folder) if "doctor" in name]


class _Yesterday(BaseHTTPRequestHandler):
    """An admin port whose clock is a day late, and that is not ready."""

    def do_GET(self) -> None:
        self.send_response_only(503)
        self.send_header("Date", formatdate(time.time() - 86_400, usegmt=True))
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        pass


class _AnotherProgram(_Yesterday):
    def do_GET(self) -> None:
        self.send_response_only(404)
        self.send_header("Date", "whenever")
        self.end_headers()


def test_another_program_at_the_address_of_an_admin_port_is_asked_for_no_clock() -> None:
    server = HTTPServer(("127.0.0.1", 0), _AnotherProgram)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        answer = _ask(Address("127.0.0.1", server.server_port), "/readyz", "")
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (answer.status, answer.ahead_s, answer.error) == (404, None, "")


def test_planted_problems_of_a_broker_are_found(cluster: ClusterProcess) -> None:
    """A registration names a broker of an older version, at an address where nothing listens, with a wrong clock."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"127.0.0.1:{taken.getsockname()[1]}"
    server = HTTPServer(("127.0.0.1", 0), _Yesterday)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    metadata = cluster["broker-0"].data.parent / "metadata.db"
    planted = Registration(address=dead, admin=f"127.0.0.1:{server.server_port}", version="0.0.1")

    async def find() -> tuple[int, dict[str, Any]]:
        store = await SqliteStore.open(str(metadata))
        try:
            lease = await store.grant_lease(60)
            await store.txn([], [Put(paths.broker("planted"), planted.to_json(), lease.id)])
            return await asyncio.to_thread(_doctor, cluster.url)
        finally:
            await lease.revoke()
            await store.close()

    try:
        code, found = asyncio.run(find())
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert code == 1
    problems = _texts(found, "problem")
    assert f"Clients cannot reach it at {dead}" in problems["broker planted"]
    assert "86,400 s behind" in problems["broker planted"]
    assert "not ready" in problems["broker planted"]
    assert "broker broker-0" not in problems
    assert "0.0.1" in _texts(found, "warning")["cluster"]


def test_planted_problems_of_a_machine_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    code, found = _doctor(
        "braid://127.0.0.1:1",
        *("--no-cluster", "--storage", f"file://{tmp_path}/file/history"),
        *("--metadata", f"sqlite:{tmp_path}/missing.db", "--data", "/proc/self"),
    )
    assert code == 1
    problems = _texts(found, "problem")
    assert "Objects cannot be created" in problems["storage"]
    assert "no such file" in problems["metadata store"]
    assert "cannot be written" in problems["data folder"]
    assert not (tmp_path / "missing.db").exists()


class _Overwriting(DiskObjects):
    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        await self.delete(name)
        await super().create(name, parts)


def test_a_storage_that_overwrites_objects_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(_: str, *, disk: Disk) -> DiskObjects:
        return _Overwriting(disk, str(tmp_path))

    monkeypatch.setattr("braid.storage.objects.urls.open_objects", opened)
    facts = asyncio.run(look_at_storage("s3://bucket"))
    assert [step for step, error in facts.steps.items() if error] == ["refuse"]
    assert not [*tmp_path.iterdir()]


def test_a_cluster_that_does_not_answer_is_a_problem_in_sentences() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        dead = f"braid://127.0.0.1:{taken.getsockname()[1]}"
    done = run_to_end(dead, "doctor")
    assert done.returncode == 1
    assert f"No broker answers at {dead}" in " ".join(done.stdout.decode().split())
    assert done.stdout.decode().splitlines()[-1].startswith("1 problem, ")


def test_the_clock_of_etcd_is_measured() -> None:
    etcd = shared_etcd_server()
    code, found = _doctor("braid://127.0.0.1:1", "--no-cluster", "--metadata", f"etcd://{etcd.address}")
    assert code == 0
    store = found["facts"]["metadata"]
    assert abs(store["clockAheadS"]) <= 1.5
    assert len(store["readMs"]) > 1
