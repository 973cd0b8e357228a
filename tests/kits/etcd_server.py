"""Real etcd servers for tests: started on free ports with their data in a temporary folder, killed at the end.

They are spoken to through etcd's own JSON gateway, so that a test's set-up does not lean on the client under test.
"""

from __future__ import annotations

import asyncio
import atexit
import base64
import functools
import json
import shutil
import signal
import socket
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from tests.kits.waiting import wait_until

PATIENCE_S = 30.0
FAST_ELECTION = ("--heartbeat-interval", "50", "--election-timeout", "500")
"""A lost leader is replaced within about a second, and the shortest lease is one second."""


class EtcdMissingError(AssertionError):
    def __init__(self) -> None:
        super().__init__("these tests need a real etcd server; install it: apt-get install etcd-server")


def free_ports(count: int) -> list[int]:
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


class EtcdServer:
    """One server process. It keeps its ports and data when it is stopped and started again."""

    def __init__(
        self,
        folder: Path,
        name: str,
        client_port: int,
        peer_port: int,
        members: str,
        options: Sequence[str],
        scheme: str,
    ) -> None:
        executable = shutil.which("etcd")
        if executable is None:
            raise EtcdMissingError
        self.name = name
        self.address = f"127.0.0.1:{client_port}"
        self._log = folder / f"{name}.log"
        client, peer = f"{scheme}://{self.address}", f"http://127.0.0.1:{peer_port}"
        self._command = [
            *(executable, "--name", name, "--data-dir", str(folder / name), "--unsafe-no-fsync", "--logger", "zap"),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", members or f"{name}={peer}", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        assert self._process is None
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def wait_until_port_is_open(self) -> None:
        host, _, port = self.address.partition(":")

        def is_open() -> bool:
            assert self._process is None or self._process.poll() is None, f"etcd ended: {self.log()[-2_000:]}"
            with socket.socket() as probe:
                return probe.connect_ex((host, int(port))) == 0

        wait_until(is_open, f"etcd {self.name} listens")

    def wait_until_healthy(self) -> None:
        """Until it has a leader and answers. Without TLS only."""

        def is_healthy() -> bool:
            assert self._process is None or self._process.poll() is None, f"etcd ended: {self.log()[-2_000:]}"
            try:
                with urllib.request.urlopen(f"http://{self.address}/health", timeout=5) as answer:
                    return bool(json.load(answer)["health"] == "true")
            except (OSError, urllib.error.URLError):
                return False

        wait_until(is_healthy, f"etcd {self.name} is healthy")

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def kill(self) -> None:
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def pause(self) -> None:
        """Return when every thread stands still; until then a request may still be answered."""
        assert self._process is not None, f"etcd {self.name} does not run"
        self._process.send_signal(signal.SIGSTOP)
        threads = Path(f"/proc/{self._process.pid}/task")
        wait_until(
            lambda: all((thread / "stat").read_text().rpartition(") ")[2][0] == "T" for thread in threads.iterdir()),
            f"etcd {self.name} stops",
        )

    def resume(self) -> None:
        assert self._process is not None, f"etcd {self.name} does not run"
        self._process.send_signal(signal.SIGCONT)

    def destroy(self) -> None:
        if self._process is not None:
            self.kill()

    # Through the gateway.

    def ask(self, path: str, body: dict[str, Any], token: str | None = None) -> dict[str, Any]:
        request = urllib.request.Request(f"http://{self.address}/v3/{path}", json.dumps(body).encode())
        if token is not None:
            request.add_header("Authorization", token)
        with urllib.request.urlopen(request, timeout=5) as answer:
            result: dict[str, Any] = json.load(answer)
            return result

    def is_leader(self) -> bool:
        status = self.ask("maintenance/status", {})
        return bool(status["header"]["member_id"] == status.get("leader"))

    def has_leader(self) -> bool:
        return "leader" in self.ask("maintenance/status", {})

    def compact(self) -> int:
        """Forget everything before a new revision, which writes a key outside of every Braid's prefix.

        etcd ends a watch that is still catching up with what it forgets (for its first 100 ms every watch is), so this
        waits until none is.
        """
        wait_until(lambda: self._metric("etcd_debugging_mvcc_slow_watcher_total") == 0, "all watches caught up")
        key = base64.b64encode(b"compacted").decode()
        revision = int(self.ask("kv/put", {"key": key})["header"]["revision"])
        self.ask("kv/compaction", {"revision": str(revision), "physical": True})
        return revision

    def _metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=5) as answer:
            lines = answer.read().decode().splitlines()
        return next(float(line.split()[1]) for line in lines if line.startswith(name + " "))

    def _end(self, number: signal.Signals) -> None:
        assert self._process is not None, f"etcd {self.name} does not run"
        self._process.send_signal(number)
        self._process.wait(PATIENCE_S)
        self._process = None


async def grpc_settled() -> None:
    """Let gRPC finish with cancelled calls, in tasks of its own. Otherwise the next test's loop is handed their ends,
    and logs that the loop which they were meant for is closed."""
    if others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others, timeout=1.0)


def run_test(test: Coroutine[None, None, object]) -> None:
    async def run() -> None:
        try:
            await test
        finally:
            await grpc_settled()

    asyncio.run(run())


@contextmanager
def etcd_server(*options: str, scheme: str = "http") -> Iterator[EtcdServer]:
    """One server, its own cluster."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="braid-etcd-")))
        client_port, peer_port = free_ports(2)
        server = EtcdServer(folder, "one", client_port, peer_port, "", options, scheme)
        cleanup.callback(server.destroy)
        server.start()
        server.wait_until_healthy() if scheme == "http" else server.wait_until_port_is_open()
        yield server


@contextmanager
def etcd_cluster(*options: str) -> Iterator[list[EtcdServer]]:
    """Three servers."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="braid-etcd-")))
        ports = free_ports(6)
        members = ",".join(f"node{i}=http://127.0.0.1:{ports[i + 3]}" for i in range(3))
        servers = [EtcdServer(folder, f"node{i}", ports[i], ports[i + 3], members, options, "http") for i in range(3)]
        for server in servers:
            cleanup.callback(server.destroy)
            server.start()
        for server in servers:
            server.wait_until_healthy()
        yield servers


@functools.cache
def shared_etcd_server() -> EtcdServer:
    """One server for all tests of this process that need no more than keys of their own. It lives until the end."""
    stack = ExitStack()
    server = stack.enter_context(etcd_server(*FAST_ELECTION))
    atexit.register(stack.close)
    return server
