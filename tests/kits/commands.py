"""`braid` commands as processes, as a shell runs them.

A command starts for 0.2 to 0.5 s of processor time, nearly all of it imports. So `run` and those that use it fork from
one process that has imported them. The command is a process of its own all the same: its pipes, environment and exit
code are real. `started` gives a command its own interpreter, for tests of signals and half-closed pipes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from braid.cli.main import main
from braid.testing.processes import BRAID
from tests.kits.waiting import WAIT_S

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        __name__,
        *(
            f"braid.cli.commands.{each}"
            for each in ("broker", "consume", "produce", "readings", "serve", "subscription", "topic")
        ),
        *(
            f"braid.client.{each}"
            for each in ("client", "producing.producer", "consuming.stream", "consuming.checkpoint")
        ),
        *(
            f"braid.{each}"
            for each in ("admin.server", "broker.broker", "cli.config", "cli.reload", "storage.objects.urls")
        ),
        *("pyarrow.compute", "rich.console", "rich.table"),
    ]
)


def environment(url: str = "", **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
    return {**kept, **({"BRAID_URL": url} if url else {}), **more}


def run_to_end(
    url: str, *arguments: str, given: bytes = b"", more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run the command with these bytes as its input, and with `more` in its environment."""
    pipes = [FORKS.Pipe(duplex=False) for _ in range(3)]
    (stdin, feed), (output, stdout), (errors, stderr) = pipes
    process = FORKS.Process(
        target=be_command, args=(arguments, environment(url, **(more or {})), (stdin, stdout, stderr))
    )
    process.start()
    for end in (stdin, stdout, stderr):
        end.close()
    with ThreadPoolExecutor(3) as threads:
        threads.submit(_write, feed, given)
        printed, said = threads.submit(_read, output), threads.submit(_read, errors)
        process.join(WAIT_S)
        process.kill()  # after an orderly end it does nothing
    process.join()
    assert process.exitcode is not None
    return subprocess.CompletedProcess(arguments, process.exitcode, printed.result(), said.result())


def be_command(arguments: Sequence[str], environment: dict[str, str], ends: Sequence[Connection]) -> None:
    """Be the command, in the forked process, with these ends as its input, output and errors."""
    for number, end in enumerate(ends):
        os.dup2(end.fileno(), number)
        end.close()
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 (as the interpreter opens it)
    os.environ.clear()
    os.environ.update(environment)
    main(arguments)


def _write(pipe: Connection, data: bytes) -> None:
    with open(os.dup(pipe.fileno()), "wb") as file:
        pipe.close()
        file.write(data)


def _read(pipe: Connection) -> bytes:
    with open(os.dup(pipe.fileno()), "rb") as file:
        pipe.close()
        return file.read()


def run(url: str, *arguments: str, given: bytes = b"", code: int = 0) -> str:
    """What the command prints."""
    done = run_to_end(url, *arguments, given=given)
    assert done.returncode == code, done.stderr.decode()
    return done.stdout.decode() if not code else done.stderr.decode()


def ask(url: str, *arguments: str) -> Any:
    return json.loads(run(url, *arguments, "--json"))


def lines(url: str, *arguments: str) -> list[bytes]:
    done = run_to_end(url, *arguments)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.splitlines()


@contextmanager
def started(url: str, *arguments: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([*BRAID, *arguments], env=environment(url), **more) as process:
        try:
            yield process
        finally:
            process.kill()
