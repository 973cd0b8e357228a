"""`braid serve` processes that are forked as other commands are (commands.py): they need not import what they run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import IO

from braid.testing.processes import BrokerProcess, RunningCommand
from tests.kits.commands import FORKS, be_command


class ForkedBroker(BrokerProcess):
    """A broker that starts for a third of the processor time. Tests of the start itself, of memory and of signals give
    a broker its own interpreter: they take `BrokerProcess`."""

    def _run(self, arguments: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> RunningCommand:
        return ForkedCommand(arguments, environment, log)


class ForkedCommand:
    def __init__(self, arguments: Sequence[str], environment: dict[str, str], log: IO[bytes]) -> None:
        output, stdout = FORKS.Pipe(duplex=False)
        with (
            Connection(os.open(os.devnull, os.O_RDONLY), writable=False) as stdin,
            stdout,
            Connection(os.dup(log.fileno()), readable=False) as stderr,
        ):
            self._process = FORKS.Process(target=be_command, args=(arguments, environment, (stdin, stdout, stderr)))
            self._process.start()
        with output:
            self.stdout = open(os.dup(output.fileno()), "rb")  # noqa: SIM115 (the broker closes it)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("braid serve", timeout or 0)
        return code
