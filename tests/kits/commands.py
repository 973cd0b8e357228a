"""`braid` commands as processes, as a shell runs them."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from braid.testing.processes import BRAID
from tests.kits.waiting import WAIT_S


def environment(url: str = "") -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
    return {**kept, **({"BRAID_URL": url} if url else {})}


def run_to_end(url: str, *arguments: str, given: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run the command with these bytes as its input."""
    command = [*BRAID, *arguments]
    return subprocess.run(command, input=given, capture_output=True, env=environment(url), timeout=WAIT_S, check=False)


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
