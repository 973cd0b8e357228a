"""A `braid serve` process that tests start, kill, freeze and start again on the same port."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

WAIT_S = 60.0
BRAID = (sys.executable, "-m", "braid.cli.main")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class BrokerProcess:
    def __init__(self, data: Path, *options: str, braid: Sequence[str] = BRAID) -> None:
        """`braid` is the command that the process runs, for tests with an installation of their own."""
        self.data = data
        self.port = free_port()
        self.url = f"braid://127.0.0.1:{self.port}"
        self.ready: dict[str, Any] = {}
        self._options = options
        self._braid = braid
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None

    @property
    def log_path(self) -> Path:
        return self.data.parent / f"{self.data.name}.log"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> float:
        """Returns when the broker is ready: after how many seconds."""
        self._log = open(self.log_path, "ab")  # noqa: SIM115 (closed with the process)
        begun = time.monotonic()
        command = [*self._braid, "serve", "--json", "--data", str(self.data)]
        command += ["--listen", f"127.0.0.1:{self.port}", "--admin", "127.0.0.1:0", *self._options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._log, env=environment)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the broker did not start: {self.log_path.read_text()[-2000:]}"
        self.ready = json.loads(line)
        return time.monotonic() - begun

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """kill -9, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> int:
        """SIGTERM; the exit code."""
        self.signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        assert self._process is not None
        code = self._process.wait(WAIT_S)
        self._close_pipes()
        return code

    def _close_pipes(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()
        self._close_pipes()
