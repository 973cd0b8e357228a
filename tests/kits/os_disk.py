"""A real disk that is closed at the end, and failures of the system's calls."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Callable

from braid.ports.os_disk import OsDisk


@contextlib.asynccontextmanager
async def open_disk() -> AsyncIterator[OsDisk]:
    disk = OsDisk()
    try:
        yield disk
    finally:
        await disk.close()


def open_descriptors_of(path: str) -> list[str]:
    links = []
    for name in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if link.startswith(path):
            links.append(link)
    return links


def fail(number: int) -> Callable[..., None]:
    def raise_error(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    return raise_error
