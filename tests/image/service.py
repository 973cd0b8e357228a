"""The unit of deploy/systemd, under a systemd of its own: a container that boots."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.image.base import network_options
from tests.image.image import RECORDS, ROOT, Seen
from tests.image.podman import CommandFailed, Podman, succeed
from tests.kits.waiting import wait_until

IMAGE: Final = "braid-service"
NAMESPACES: Final = ("--mount", "--uts", "--ipc", "--net", "--pid")
BRAID: Final = "/opt/braid/bin/braid"
RELOADED: Final = "certificates are reloaded"
STOP_S: Final = 60


class Machine:
    """A container that boots."""

    def __init__(self, nspawn: int) -> None:
        self._children = Path(f"/proc/{nspawn}/task/{nspawn}/children")

    def __call__(self, *words: object) -> str:
        return succeed("nsenter", "--target", self.leader, *NAMESPACES, "--", *words)

    @property
    def leader(self) -> int:
        """The container's first process. While it starts, this may be one that ends soon."""
        found = self._children.read_text().split()
        if not found:
            raise CommandFailed("the container has no process")
        return int(found[0])

    def kill(self) -> None:
        with contextlib.suppress(CommandFailed, OSError):
            os.kill(self.leader, signal.SIGKILL)

    def braid(self, *words: object) -> str:
        return self(BRAID, *words)

    def show(self, name: str) -> str:
        """Return a property of the unit."""
        return self("systemctl", "show", "braid", "--value", "--property", name)

    def log(self) -> str:
        return self("journalctl", "--unit", "braid", "--no-pager", "--output", "cat")

    @property
    def broker(self) -> str:
        return self.show("MainPID")

    def is_active(self) -> bool:
        with contextlib.suppress(CommandFailed):
            return self("systemctl", "is-active", "braid") == "active" and self.broker != "0"
        return False


@contextlib.contextmanager
def booted(root: Path, log: Path) -> Iterator[Machine]:
    """Boot from this folder. The container has a loopback of its own, and no other network."""
    # No systemd of this machine is told.
    options = ("--boot", "--register=no", "--keep-unit", "--private-network", "--console=pipe")
    with log.open("w") as output:
        process = subprocess.Popen(
            ["systemd-nspawn", "--quiet", f"--directory={root}", *options, "--machine=braid-service"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    machine = Machine(process.pid)
    try:
        wait_until(lambda: process.poll() is not None or machine.is_active(), "the service runs")
        if process.poll() is not None:
            raise CommandFailed(f"systemd-nspawn ended with {process.returncode}:\n{log.read_text()}")
        yield machine
        machine("systemctl", "poweroff")
        process.wait(STOP_S)
    finally:
        machine.kill()  # After an orderly end it does nothing.
        process.wait(STOP_S)


def use_service(podman: Podman, python: str, folder: Path) -> Seen:
    """Install the service as the documentation says; use, reload, kill and stop it."""
    file = Path(__file__).parent / "Dockerfile.service"
    podman.build(file, IMAGE, ROOT, f"--build-arg=PYTHON={python}", *network_options(folder))
    podman("create", "--name", IMAGE, IMAGE)
    with booted(Path(podman("mount", IMAGE)), folder / "boot.log") as machine:
        yield "boot", "systemd " + machine("systemctl", "--version").split()[1]
        machine.braid("topic", "create", "orders")
        status = machine("cat", f"/proc/{machine.broker}/status")
        fields = {name: value.split()[0] for name, value in re.findall(r"^(\w+):\s+(\S.*)$", status, re.MULTILINE)}
        assert fields["Uid"] != "0"
        assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        exposure = re.findall(
            r"exposure level for braid.service: (\S+)", machine("systemd-analyze", "security", "braid")
        )
        yield "process", f"no capability, a filter of system calls; exposure {exposure[0]}"

        machine("sh", "-c", f"seq {RECORDS} | {BRAID} produce orders")
        _check_records(machine)
        yield "publish and consume", f"{RECORDS:,} records"
        machine("systemctl", "reload", "braid")
        wait_until(lambda: RELOADED in machine.log(), "the broker has read its files again")
        yield "systemctl reload", "the broker has read its files again"

        machine("systemctl", "kill", "--signal=KILL", "braid")
        restarted = "systemd has started the broker again"
        wait_until(lambda: machine.show("NRestarts") == "1" and machine.is_active(), restarted)
        _check_records(machine)
        yield "SIGKILL", f"systemd starts it again; {RECORDS:,} records"

        began = time.monotonic()
        machine("systemctl", "stop", "braid")
        took_s = time.monotonic() - began
        assert machine.show("Result") == "success"
        assert took_s < STOP_S
        yield "systemctl stop", f"in order, after {took_s:.1f} s"
        machine("systemctl", "start", "braid")
        _check_records(machine)
        yield "systemctl start", f"{RECORDS:,} records"
        assert "not permitted" not in machine.log()


def _check_records(machine: Machine) -> None:
    expected = succeed("sh", "-c", f"seq {RECORDS} | md5sum")
    assert machine("sh", "-c", f"{BRAID} consume orders | md5sum") == expected
