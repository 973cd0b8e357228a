"""The image: built by its Dockerfile, and used as the head of that file says."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.image.base import base_name, network_options
from tests.image.podman import CommandFailed, Podman
from tests.kits.commands import lines, run
from tests.kits.etcd_server import free_ports
from tests.kits.waiting import wait_until

ROOT: Final = Path(__file__).parents[2]
DOCKERFILE: Final = ROOT / "deploy" / "docker" / "Dockerfile"
IMAGE: Final = "braidmq"
BROKER: Final = "broker"
RECORDS: Final = 100_000
STOP_S: Final = 60
USER: Final = 10_001
OUTSIDE: Final = ("/", "/tmp", "/etc", "/opt/braid", "/opt/braid/bin")

Seen = Iterator[tuple[str, str]]
"""What was checked, and what was seen."""


def build_image(podman: Podman, python: str, folder: Path) -> Seen:
    began = time.monotonic()
    podman.build(DOCKERFILE, IMAGE, ROOT, f"--build-arg=PYTHON={python}", *network_options(folder))
    yield "build", f"{time.monotonic() - began:.0f} s"
    base, image = (podman.inspect("image", name)["Size"] for name in (base_name(python), IMAGE))
    yield "size", f"{image / 1e6:,.0f} MB, of which Braid and its packages {(image - base) / 1e6:,.0f} MB"


def use_image(podman: Podman) -> Seen:
    """Publish and consume through the container; stop, start and kill it."""
    port, admin_port = free_ports(2)
    options = ("--read-only", "--read-only-tmpfs=false", "--cap-drop=all", "--security-opt=no-new-privileges")
    ports = (f"--publish=127.0.0.1:{port}:6660", f"--publish=127.0.0.1:{admin_port}:8660")
    podman.start(
        IMAGE, BROKER, *options, *ports, "--volume=braid:/var/lib/braid", f"--env=BRAID_ADVERTISE=localhost:{port}"
    )
    url = f"braid://localhost:{port}"
    wait_until(lambda: _healthy(podman), "the health check succeeds")
    yield "health check", "succeeds"
    yield from _rights(podman.pid(BROKER))

    run(url, "topic", "create", "orders")
    values = [b"%d" % number for number in range(RECORDS)]
    run(url, "produce", "orders", given=b"\n".join(values) + b"\n")
    assert lines(url, "consume", "orders") == values
    yield "publish and consume", f"{RECORDS:,} records, from outside"

    for folder in OUTSIDE:
        assert not _can_write(podman, folder), f"{folder} can be written"
    yield "files outside of the volume", "cannot be written"

    began = time.monotonic()
    podman("stop", "--time", STOP_S, BROKER)
    took_s, state = time.monotonic() - began, podman.inspect("container", BROKER)["State"]
    assert state["ExitCode"] == 0, state
    assert took_s < STOP_S
    assert not _healthy(podman)
    yield "podman stop", f"exit code 0 after {took_s:.1f} s"
    for how in ("stop", "SIGKILL"):
        podman("start", BROKER)
        assert lines(url, "consume", "orders") == values
        yield f"start after the {how}", f"{RECORDS:,} records"
        if how == "stop":
            podman("kill", BROKER)
            podman("wait", BROKER)
    yield "a volume of another user", _refusal(podman)


def _healthy(podman: Podman) -> bool:
    try:
        podman("healthcheck", "run", BROKER)
    except CommandFailed:
        return False
    return True


def _rights(pid: int) -> Seen:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    values = {name: value.split() for name, value in fields.items()}
    assert values["Uid"] == values["Gid"] == [str(USER)] * 4
    assert {int(values[name][0], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert values["NoNewPrivs"] == ["1"]
    assert values["Seccomp"] == ["2"]
    yield "process", f"user {USER}, no capability, a filter of system calls"


def _can_write(podman: Podman, folder: str) -> bool:
    try:
        podman("exec", BROKER, "python", "-c", f"open('{folder}/written', 'w')")
    except CommandFailed:
        return False
    return True


def _refusal(podman: Podman) -> str:
    """Return what the broker says of a volume that belongs to root."""
    podman.start(IMAGE, "refused", "--read-only", "--tmpfs=/var/lib/braid:mode=0700")
    assert podman("wait", "refused") == "1"
    said = podman.log("refused").splitlines()[-1]
    assert said.startswith("braid: "), said
    return said
