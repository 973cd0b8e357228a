"""The object stores that `test_objects.py` runs over. A `Place` is one empty store and a loop to use it in."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Protocol
from uuid import uuid4

import pytest

from braid.ports.os_disk import OsDisk
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import RemoteLimits, open_objects
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import Faults, FaultyObjects, MemoryObjects
from tests.kits.s3_server import CREDENTIALS, S3Server, running_s3_server

Story = Callable[[Objects], Awaitable[None]]
Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

PATIENCE_S = 60.0
"""A story that takes longer hangs."""

BRISK = RemoteLimits(
    connect_timeout_s=1, request_timeout_s=20, retries=2, first_pause_s=0.01, longest_pause_s=0.05, retry_window_s=20
)


class Place(Protocol):
    def run(self, story: Story) -> None: ...


class OnDisk:
    def __init__(self, folder: str) -> None:
        self._folder = folder

    def run(self, story: Story) -> None:
        async def main() -> None:
            disk = OsDisk()
            try:
                await told(story, DiskObjects(disk, f"{self._folder}/objects"))
            finally:
                await disk.close()

        asyncio.run(main())


class OnSimulatedDisk:
    def run(self, story: Story) -> None:
        async def main(simulation: Simulation) -> None:
            await story(DiskObjects(SimulatedDisk(simulation.random), "/objects", random=simulation.random))

        run_simulation(1, main)


class InMemory:
    def run(self, story: Story) -> None:
        asyncio.run(told(story, MemoryObjects()))


class BehindFaults:
    """The wrapper with no fault switched on must be as good as what it wraps."""

    def run(self, story: Story) -> None:
        asyncio.run(told(story, FaultyObjects(MemoryObjects(), random.Random(1), Faults())))


class OnS3:
    def __init__(self, server: S3Server) -> None:
        self._server = server

    def run(self, story: Story) -> None:
        async def main() -> None:
            await told(story, open_s3(self._server.url(f"tests/{uuid4().hex}")))

        asyncio.run(main())


async def told(story: Callable[[Objects], Awaitable[object]], objects: Objects, patience_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(patience_s):
        try:
            await story(objects)
        finally:
            await objects.close()


def open_s3(url: str, limits: RemoteLimits = BRISK) -> Objects:
    return open_objects(url, disk=OsDisk(), limits=limits)


@contextlib.asynccontextmanager
async def serving(handle: Handler) -> AsyncIterator[str]:
    """The URL of a store whose server is `handle`; its connections end with the block."""
    connections: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections[task] = writer
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await handle(reader, writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"s3://braid/{uuid4().hex}?region=us-east-1&endpoint=http://127.0.0.1:{port}"
    finally:
        server.close()
        for task, writer in connections.items():
            task.cancel()
            await task
            with contextlib.suppress(OSError):
                await writer.wait_closed()


@contextlib.contextmanager
def s3_for_tests() -> Iterator[S3Server]:
    """A server, and its credentials where the library looks for them."""
    with pytest.MonkeyPatch.context() as patch, running_s3_server() as server:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in CREDENTIALS.items():
            patch.setenv(name, value)
        yield server


PLACES = ("disk", "simulated-disk", "memory", "no-faults", "s3")


def place_of(request: pytest.FixtureRequest) -> Place:
    """The place that the fixture's parameter names."""
    match request.param:
        case "disk":
            return OnDisk(str(request.getfixturevalue("tmp_path")))
        case "simulated-disk":
            return OnSimulatedDisk()
        case "memory":
            return InMemory()
        case "no-faults":
            return BehindFaults()
        case _:
            return OnS3(request.getfixturevalue("s3_server"))
