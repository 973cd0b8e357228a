"""Podman with a storage of its own: what it builds and runs, nothing else on this machine sees."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

WORK_S: Final = 900
"""A build on a slow machine."""
OPEN_FILES: Final = 65_536
PROCESSES: Final = 4_096


class CommandFailed(Exception):
    pass


def succeed(*words: object) -> str:
    """Run a command, and return what it prints. Raises `CommandFailed`."""
    command = [str(each) for each in words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WORK_S, check=False)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


class Podman:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        # Health checks run when the program asks for one: Podman's own timer needs systemd on this machine.
        os.environ["DISABLE_HC_SYSTEMD"] = "true"
        self._command = (
            *("podman", "--root", folder / "storage", "--runroot", folder / "run", "--tmpdir", folder / "tmp"),
            # runc also runs where both versions of control groups are mounted. Nothing here needs systemd.
            *("--runtime", "runc", "--cgroup-manager", "cgroupfs", "--events-backend", "file"),
        )

    def __call__(self, *words: object) -> str:
        return succeed(*self._command, *words)

    def build(self, file: Path, tag: str, context: Path, *options: object) -> None:
        """Build an image with a health check, from images that are here."""
        self("build", "--format", "docker", "--pull=never", "--file", file, "--tag", tag, *options, context)

    def start(self, image: str, name: str, *options: object) -> None:
        limits = (("nofile", resource.RLIMIT_NOFILE, OPEN_FILES), ("nproc", resource.RLIMIT_NPROC, PROCESSES))
        words = [f"--ulimit={name}={_allowed(limit, wanted)}" for name, limit, wanted in limits]
        self("run", "--detach", "--name", name, *words, *options, image)

    def inspect(self, kind: str, name: str) -> dict[str, Any]:
        found: list[dict[str, Any]] = json.loads(self(kind, "inspect", name))
        return found[0]

    def log(self, name: str) -> str:
        """Return what a container has written, to both outputs."""
        done = subprocess.run(
            [*map(str, self._command), "logs", name],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    def pid(self, name: str) -> int:
        pid: int = self.inspect("container", name)["State"]["Pid"]
        return pid

    def close(self) -> None:
        """End all containers, and delete everything."""
        self("rm", "--all", "--force", "--time", "0")
        self("unmount", "--all", "--force")
        shutil.rmtree(self._folder)


def _allowed(limit: int, wanted: int) -> str:
    """Return a limit that a process without rights over resources may set."""
    _, hard = resource.getrlimit(limit)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    return f"{most}:{most}"
