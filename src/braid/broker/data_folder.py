"""The broker's folder: locked while a broker uses it, and marked with the version of its format.

    braid.json      {"format": 1, "brokerId": "broker-1"}
    metadata.db     the metadata store, unless the configuration names another
    wal/            the logs of the segments, by topic
    spare/          preallocated files
    chunks/         history, in mode `local`

Opening upgrades a folder of an older format step by step. The mark is written after each step, so every step must be
repeatable: a crash before the mark runs it again. A folder of a newer format is refused: this build could misread it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from typing import Final

import msgspec

from braid.model.errors import FileMissing, FileTaken, InvalidConfig
from braid.ports.disk import Disk, FolderLock, lock_folder

FORMAT: Final = 1
MARK: Final = "braid.json"
_MAX_MARK_BYTES: Final = 64 << 10

Step = Callable[[Disk, str], Awaitable[None]]

STEPS: Final[Mapping[int, Step]] = {}
"""The upgrade from each format to the next, by the format that it starts from."""


class Mark(msgspec.Struct, frozen=True, rename="camel"):
    format: int
    broker_id: str


class DataFolder:
    def __init__(self, path: str, lock: FolderLock, mark: Mark) -> None:
        self.path: Final = path
        self.mark: Final = mark
        self._lock = lock

    @property
    def metadata_file(self) -> str:
        return f"{self.path}/metadata.db"

    @property
    def logs(self) -> str:
        return f"{self.path}/wal"

    @property
    def preallocated(self) -> str:
        return f"{self.path}/spare"

    @property
    def chunks(self) -> str:
        return f"{self.path}/chunks"

    async def release(self) -> None:
        await self._lock.release()


async def open_data_folder(
    disk: Disk, path: str, broker_id: str, *, target: int = FORMAT, steps: Mapping[int, Step] = STEPS
) -> DataFolder:
    """Lock the folder, create it if it is new, and bring it to the present format."""
    await disk.make_folder(path)
    try:
        lock = await lock_folder(disk, path)
    except FileTaken as error:
        raise InvalidConfig(
            f"the data folder {path} is used by another broker that runs on this machine; "
            "give this one a folder of its own with --data"
        ) from error
    try:
        mark = await read_mark(disk, path)
        if mark is None:
            mark = Mark(target, broker_id)
            await _write_mark(disk, path, mark)
        if mark.format > target:
            raise InvalidConfig(
                f"the data folder {path} has format {mark.format}, written by a newer version of Braid; this one "
                f"reads up to format {target}: use the newer version"
            )
        if mark.broker_id != broker_id:
            raise InvalidConfig(
                f"the data folder {path} belongs to broker {mark.broker_id}, this broker is {broker_id}: "
                f"start it with --id {mark.broker_id}, or with another folder"
            )
        while mark.format < target:
            await steps[mark.format](disk, path)
            mark = Mark(mark.format + 1, broker_id)
            await _write_mark(disk, path, mark)
    except BaseException:
        await lock.release()
        raise
    return DataFolder(path, lock, mark)


async def read_mark(disk: Disk, path: str) -> Mark | None:
    """Read which broker a folder belongs to; None if it belongs to none."""
    try:
        file = await disk.open(f"{path}/{MARK}")
    except FileMissing:
        return None
    try:
        data = await file.read(0, _MAX_MARK_BYTES)
    finally:
        await file.close()
    try:
        return msgspec.json.decode(data, type=Mark)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(f"{path}/{MARK} cannot be read ({error}): is {path} really a data folder?") from error


async def _write_mark(disk: Disk, path: str, mark: Mark) -> None:
    new = f"{path}/{MARK}.new"
    with contextlib.suppress(FileMissing):
        await disk.remove(new)
    file = await disk.open(new, create=True)
    try:
        await file.write(0, [msgspec.json.encode(mark) + b"\n"], sync=True)
    finally:
        await file.close()
    await disk.rename(new, f"{path}/{MARK}")
