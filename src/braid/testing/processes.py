"""A `braid serve` process: start it, stop it, kill it, freeze it, and start it again at the same address.

with BrokerProcess(folder / "data") as broker:
    async with braid.connect(broker.url) as client: …
    broker.kill()
    broker.start()
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Final, Protocol, Self

from braid.ports.network import Address
from braid.wire.address import parse_url

STOP_TIMEOUT_S: Final = 60.0
BRAID: Final = (sys.executable, "-m", "braid.cli.main")


class RunningCommand(Protocol):
    """What a broker's process has, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    @property
    def stdout(self) -> IO[bytes] | None: ...
    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...


class BrokerProcess:
    def __init__(self, data: Path, *options: str, braid: Sequence[str] = BRAID) -> None:
        """Describe a broker with this data folder and these options of `braid serve`; `start` runs it.

        `braid` is the command itself, for an installation or an interpreter of the caller's choice.
        """
        self.data: Final = data
        self.url = ""
        """The broker's address. The first start chooses a free port, and later starts use it again."""
        self.ready: dict[str, Any] = {}
        """The line that the broker printed when it was ready."""
        self._options = options
        self._braid = braid
        self._process: RunningCommand | None = None

    @property
    def address(self) -> Address:
        (address,) = parse_url(self.url)
        return address

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
        """Start the process and wait until the broker is ready. Returns how many seconds that took."""
        listen = str(self.address) if self.url else "127.0.0.1:0"
        arguments = ["serve", "--json", "--data", str(self.data)]
        arguments += ["--listen", listen, "--admin", "127.0.0.1:0", *self._options]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
        began = time.monotonic()
        with self.log_path.open("ab") as log:
            self._process = self._run(arguments, environment, log)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._wait()
            raise RuntimeError(f"the broker did not start: {self.log_path.read_text()[-2000:]}")
        self.ready = json.loads(line)
        self.url = self.ready["url"]
        return time.monotonic() - began

    def _run(self, arguments: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> RunningCommand:
        return subprocess.Popen([*self._braid, *arguments], stdout=subprocess.PIPE, stderr=log, env=environment)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL and wait until the process has ended."""
        self.signal(signal.SIGKILL)
        self._wait()

    def stop(self) -> int:
        """Send SIGTERM and wait until the process has ended. Returns its exit code."""
        self.signal(signal.SIGTERM)
        return self._wait()

    def _wait(self) -> int:
        assert self._process is not None
        code = self._process.wait(STOP_TIMEOUT_S)
        self._close_pipe()
        return code

    def _close_pipe(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.running:
            self.kill()
        self._close_pipe()
