"""What the benchmarks beside other brokers share: their servers, as processes that end with the block of their user."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

START_TIMEOUT_S: Final = 60.0
RABBITMQ: Final = "/usr/lib/rabbitmq/bin/rabbitmq-server"
"""Not the one in the path, which changes to the user of the installed service."""


# What is there.


def nothing_absent() -> str:
    return ""


def needs(command: str, package: str) -> Callable[[], str]:
    def absent() -> str:
        if shutil.which(command) is None:
            return f"there is no {command} in the path"
        return package_absent(package)

    return absent


def package_absent(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return f"the Python package {package} is not installed"
    return ""


def rabbitmq_needs(package: str) -> Callable[[], str]:
    def absent() -> str:
        return package_absent(package) if Path(RABBITMQ).exists() else f"there is no {RABBITMQ}"

    return absent


# Which versions.


def version_said(command: list[str]) -> str:
    """Return the first version number that a command prints."""
    found = re.search(r"\d+\.\d+(\.\d+)*", said(command))
    return found[0] if found else "?"


def said(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def redis_version() -> str:
    found = re.search(r"v=([\d.]+)", said(["redis-server", "--version"]))
    return found[1] if found else "?"


def rabbitmq_version() -> str:
    return version_said(["dpkg-query", "--show", "--showformat=${Version}", "rabbitmq-server"])


def package_version(package: str) -> str:
    return importlib.metadata.version(package)


# Servers.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(command: list[str], port: int, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server, and all processes that it starts, during the block. The caller owns its folder."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def redis(folder: str, appendfsync: str) -> Iterator[int]:
    """Run Redis with its append-only file. Yields its port."""
    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", appendfsync, "--daemonize", "no"]
    with server(command, port):
        yield port


@contextmanager
def rabbitmq(folder: str) -> Iterator[int]:
    """Run a node with its own name, ports, folder and port mapper, so that it meets no other node of the machine."""
    port, mapper_port, peers_port = free_port(), free_port(), free_port()
    environment = {
        "HOME": folder,
        "ERL_EPMD_PORT": f"{mapper_port}",
        "RABBITMQ_NODENAME": f"bench{port}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": f"{port}",
        "RABBITMQ_DIST_PORT": f"{peers_port}",
        "RABBITMQ_MNESIA_BASE": f"{folder}/data",
        "RABBITMQ_LOG_BASE": f"{folder}/log",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/plugins",
        "RABBITMQ_CONF_ENV_FILE": f"{folder}/none",
        "RABBITMQ_CONFIG_FILE": f"{folder}/none",
    }
    mapper = shutil.which("epmd") or "/usr/bin/epmd"
    with server([mapper, "-port", f"{mapper_port}"], mapper_port), server([RABBITMQ], port, environment):
        yield port


def value_of(size: int) -> bytes:
    return random.Random(7).randbytes(size)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
