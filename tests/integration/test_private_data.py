"""The data folder is closed to other users of the machine."""

from __future__ import annotations

import logging
import stat
from pathlib import Path

import pytest

from braid.metadata.store import Put
from braid.model.errors import InvalidConfig
from tests.kits.broker import running_broker

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
