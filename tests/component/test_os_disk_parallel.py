"""Logs do not wait for each other's disk, and what an object store keeps is compared with what it was given."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from braid.metadata import paths
from braid.model.errors import ObjectStoreUnavailable
from braid.model.ids import Epoch
from braid.ports.clock import SystemClock
from braid.ports.disk import Buffer
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.log.context import LogContext
from braid.storage.log.log import Log
from braid.storage.log.recovery import recover
from braid.testing.sim.objects import MemoryObjects
from tests.kits.storage import DESCRIPTOR, SMALL, TOPIC, World, fill, make_batch, read_offsets

MEETING_S = 20.0
"""How long one sync waits for the other before it gives up; when both are in flight nobody waits."""


async def opened_log(disk: OsDisk, folder: str) -> Log:
    recovered = await recover(disk, folder)
    context = LogContext(
        disk=disk, folder=folder, epoch=Epoch(1), incarnation=1, clock=SystemClock(), config=SMALL, cache=HotCache()
    )
    log = Log(context, recovered)
    await log.open()
    return log


@pytest.mark.real_loop
async def test_two_logs_sync_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    meeting = threading.Barrier(2, timeout=MEETING_S)
    sync = os.fdatasync

    def sync_together(descriptor: int) -> None:
        """Pass only while another sync is in flight. A broken meeting is said as an error of the disk."""
        try:
            meeting.wait()
        except threading.BrokenBarrierError as error:
            raise OSError(5, "this sync was alone") from error
        sync(descriptor)

    disk = OsDisk(2)
    logs = [await opened_log(disk, str(tmp_path / name)) for name in ("one", "two")]
    try:
        with monkeypatch.context() as patch:
            patch.setattr("braid.ports.os_disk.os.fdatasync", sync_together)
            for _ in range(3):
                await asyncio.gather(*(log.confirm(log.append(make_batch())) for log in logs))
        assert [log.confirmed.value for log in logs] == [3, 3]
    finally:
        for log in logs:
            await log.close()
        await disk.close()


class ShorteningObjects(MemoryObjects):
    """Keeps all but the last byte of a chunk, and says that all is well."""

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        content = b"".join(parts)
        await super().create(name, [content[:-1] if name.endswith(".chunk") else content])


async def test_an_upload_that_is_stored_shorter_than_sent_is_noticed_and_not_cataloged(world: World) -> None:
    objects = ShorteningObjects()
    world.a.start(objects=objects)
    segment = await world.a.open()
    await segment.exporter.stop()
    await fill(segment, 5)
    await segment.log.rotate()
    before = await world.store.client("reader").list(paths.STORAGE_PREFIX)
    with pytest.raises(ObjectStoreUnavailable, match=r"stored with \d+ bytes, but has \d+"):
        await segment.exporter.export_closed()
    assert await world.store.client("reader").list(paths.STORAGE_PREFIX) == before
    assert segment.catalog.chunks == []
    assert await read_segment_manifest(objects, TOPIC, DESCRIPTOR) is None
    assert await read_offsets(segment) == [*range(5)]
    await segment.close()
