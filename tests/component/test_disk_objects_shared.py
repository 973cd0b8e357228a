"""Two brokers that delete the same objects of a shared folder at the same time, as the owner and the leader may."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from braid.ports.os_disk import OsDisk
from braid.storage.objects.disk import DiskObjects

ROUNDS = 30


@pytest.mark.real_loop
async def test_what_two_brokers_delete_at_once_is_deleted_without_an_error(tmp_path: Path) -> None:
    disks = [OsDisk(), OsDisk()]
    stores = [DiskObjects(disk, str(tmp_path)) for disk in disks]
    for _ in range(ROUNDS):
        for number in range(6):
            await stores[0].create(f"a/topic/{number}/chunk", [b"x"])
            await stores[0].create(f"a/topic/{number}/manifests/one", [b"x"])
        await asyncio.gather(*(store.delete_below("a/topic") for store in stores))
        assert await stores[0].list("a") == []
    for store, disk in zip(stores, disks, strict=True):
        await store.close()
        await disk.close()
