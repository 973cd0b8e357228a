"""A folder on a real disk, and a list of the syncs."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from braid.ports.kernel_sync import KernelSyncs, OnSynced


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that were synced, in order."""
    paths: list[str] = []

    def record(real: Callable[[int], None]) -> Callable[[int], None]:
        def sync(descriptor: int) -> None:
            paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            real(descriptor)

        return sync

    start = KernelSyncs.start

    def kernel_sync(self: KernelSyncs, descriptor: int, on_synced: OnSynced) -> bool:
        paths.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        return start(self, descriptor, on_synced)

    monkeypatch.setattr(os, "fsync", record(os.fsync))
    monkeypatch.setattr(os, "fdatasync", record(os.fdatasync))
    monkeypatch.setattr(KernelSyncs, "start", kernel_sync)
    return paths
