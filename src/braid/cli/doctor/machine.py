"""Gathers the facts about this machine: limits, clock, the data folder and its disk."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import resource
import shutil
import sys
import time
from typing import Final

import braid
from braid.cli.doctor.facts import FolderFacts, MachineFacts
from braid.metadata.sqlite.filesystem import filesystem_of, is_network

SYNCS: Final = 40
"""Some hundred milliseconds on a good disk."""
SYNC_BYTES: Final = 4_096
SYNC_LIMIT_S: Final = 5.0
_TIME_ERROR: Final = 5
"""What adjtimex answers while nothing disciplines the clock."""


def look_at_machine(max_connections: int) -> MachineFacts:
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, processes = resource.getrlimit(resource.RLIMIT_NPROC)
    return MachineFacts(
        version=braid.__version__,
        python=platform.python_version(),
        open_files=files if files != resource.RLIM_INFINITY else sys.maxsize,
        processes=processes if processes != resource.RLIM_INFINITY else None,
        max_connections=max_connections,
        kernel_sync=importlib.util.find_spec("caio") is not None,
        clock_synchronised=_clock_synchronised(),
    )


def _clock_synchronised() -> bool | None:
    """Ask the kernel. A container may forbid the question."""
    try:
        answer = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.create_string_buffer(512))  # modes = 0: only read
    except (OSError, AttributeError):
        return None
    return None if answer < 0 else answer != _TIME_ERROR


def look_at_folder(path: str) -> FolderFacts:
    """Look at a data folder, or at the folder in which a broker would make it. Leaves nothing there."""
    path = _existing(os.path.realpath(path))
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            filesystem = filesystem_of(path, file.read())
        size, _, free = shutil.disk_usage(path)
        return FolderFacts(
            path=path,
            free_bytes=free,
            size_bytes=size,
            network_filesystem=filesystem if is_network(filesystem) else "",
            sync_ms=_time_syncs(path),
        )
    except OSError as error:
        return FolderFacts(path=path, error=error.strerror or str(error))


def _existing(path: str) -> str:
    while not os.path.isdir(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    return path


def _time_syncs(folder: str) -> tuple[float, ...]:
    """Write as a log does: append and fdatasync."""
    name = os.path.join(folder, f".braid-doctor-{os.getpid()}")
    took: list[float] = []
    file = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        os.posix_fallocate(file, 0, SYNCS * SYNC_BYTES)
        os.fsync(file)
        began = time.perf_counter()
        for number in range(SYNCS):
            before = time.perf_counter()
            os.pwrite(file, b"\xa5" * SYNC_BYTES, number * SYNC_BYTES)
            os.fdatasync(file)
            took.append((time.perf_counter() - before) * 1_000)
            if time.perf_counter() - began > SYNC_LIMIT_S:
                break
    finally:
        os.close(file)
        os.unlink(name)
    return tuple(sorted(took))
