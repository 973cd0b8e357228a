"""The data folder is closed to other users of the machine."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import msgspec
import pytest

import braid
from braid.broker.broker import Broker
from braid.metadata.store import Put
from braid.model.errors import InvalidConfig
from tests.kits.broker import config, running_broker, url_of

pytestmark = pytest.mark.real_loop

METADATA = ("metadata.db", "metadata.db-wal", "metadata.db-shm")


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_new_folder_and_the_metadata_in_it_are_for_their_owner_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "braid" / "data"
    async with running_broker(str(data)) as broker:
        await broker.resources.store.txn([], [Put("/test", b"1")])
        assert mode(data) == 0o700
        assert {name: mode(data / name) for name in METADATA} == dict.fromkeys(METADATA, 0o600)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_all_that_a_broker_makes_in_its_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    """In shared storage other programs read chunks."""
    data, storage = tmp_path / "data", tmp_path / "storage"
    broker = await Broker.open(msgspec.structs.replace(config(str(data)), storage=f"file://{storage}"))
    try:
        async with braid.connect(url_of(broker)) as client:
            await client.admin.create_topic("orders")
            async with client.producer("orders") as producer:
                await producer.send(b"paid")
            (segment,) = broker.segments.all()
            await segment.storage.export_now()
    finally:
        await broker.close()
    modes = {str(path): mode(path) for path in data.rglob("*")}
    assert modes == {str(path): 0o700 if path.is_dir() else 0o600 for path in data.rglob("*")}
    assert any(name.endswith(".wal") for name in modes)
    umask = os.umask(0)
    os.umask(umask)
    (chunk,) = storage.rglob("*.chunk")
    assert mode(chunk) == 0o644 & ~umask
    assert mode(chunk.parent) == 0o777 & ~umask


async def test_a_folder_that_was_open_to_others_is_closed_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data = tmp_path / "data"
    async with running_broker(str(data)):
        pass
    for name in METADATA:  # As a broker of an earlier version leaves them when it is killed.
        (data / name).touch()
        (data / name).chmod(0o644)
    data.chmod(0o755)
    caplog.clear()
    async with running_broker(str(data)) as broker:
        await broker.resources.store.txn([], [Put("/test", b"1")])
        assert mode(data) == 0o700
        assert {name: mode(data / name) for name in METADATA} == dict.fromkeys(METADATA, 0o600)
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [each for each in warnings if f"{data} (mode 755)" in each]
    for name in METADATA:
        assert [each for each in warnings if f"{data / name} (mode 644)" in each]


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidConfig, match=r"the data folder .*/file/data cannot be used: File exists"):
        async with running_broker(str(tmp_path / "file" / "data")):
            pass
