"""What a lake needs of a table: that new files and the offsets behind them become visible in one step, or not at all.

    folder  = table.stage(step)              where Spark writes; no reader looks there
    landing = table.prepare(folder, rows)    the files are there, complete and durable; still nobody sees them
    table.commit(landing, landed)            now everybody does. `TableConflict` if another writer came first

The commit carries a `Landed`: the topic and the positions up to which the table now holds it. It is the only memory of
the pipeline. A process that dies before the commit leaves files that nobody counts; one that dies behind it has done
its work. So the next run has nothing to find out: it goes on where the last commit says.

`step` counts the commits. Two writers that begin at the same step write different files, and only one commit of that
step can exist. How that is made sure is each table's own matter (parquet.py, delta.py).

Spark does not sync what it writes, and next to the data it leaves marks and checksums. `prepare` syncs the one and
removes the other. It also counts rows in the files' footers: executors that wrote to disks of their own, which the
driver does not see, must not end in a commit that skips their records.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final, Protocol

import msgspec
import pyarrow.parquet as pq

from braid.client.consuming.checkpoint import Position
from braid.model.errors import InvalidArgument, JobFailed, TableMismatch

LANDED_VERSION: Final = 1
LEFTOVER_S: Final = 24 * 3_600.0
"""Files of a step that was not committed are removed when they are so old. No step takes so long."""


class Landed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a table holds of a topic, as its last commit says."""

    version: int = LANDED_VERSION
    topic: str
    topic_id: int
    """0 if it is not known: it has landed only from manifests that do not tell."""
    step: int
    """Counts commits from 1 on; 0: none yet."""
    positions: dict[int, Position]
    """The next offset of each segment, or END. None at all before the first step."""
    columns: tuple[str, ...]

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Landed:
        try:
            landed = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise TableMismatch(
                f"the commit {where} cannot be read: {error}; it is damaged or of a newer build"
            ) from None
        if landed.version > LANDED_VERSION:
            raise TableMismatch(f"the commit {where} has version {landed.version}; this build reads {LANDED_VERSION}")
        return landed


class DataFile(msgspec.Struct, frozen=True):
    path: str
    bytes: int
    footer: Any
    """Arrow's FileMetaData."""

    @property
    def rows(self) -> int:
        return int(self.footer.num_rows)


class Landing(msgspec.Struct, frozen=True):
    """Files that are complete and durable and wait for their commit."""

    folder: str
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class LakeTable(Protocol):
    """A folder that a topic lands in. Everything here runs on the driver."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str:
        """The format, as users name it."""

    def landed(self) -> Landed | None:
        """What the last commit says; None if there is no table yet. What a later `commit` builds on."""

    def create(self, first: Landed, schema: Any) -> None:
        """Begin a table with these columns (an Arrow schema), if there is none."""

    def stage(self, step: int) -> str:
        """The path of a folder that is not there yet, of this step and of nobody else."""

    def prepare(self, folder: str, rows: int) -> Landing:
        """Make what Spark wrote durable, if that is so many rows."""

    def commit(self, landing: Landing, landed: Landed) -> None:
        """All or nothing, and at most once for each step."""

    def discard(self, folder: str) -> None:
        """Remove what was staged, prepared or not."""

    def remove_leftovers(self, older_than_s: float = LEFTOVER_S) -> int:
        """Remove what earlier writers staged and never committed. Returns how many folders."""


def folder_path(where: str) -> str:
    """A folder's absolute path, from a path or a file URL."""
    path = where.removeprefix("file://") if where.startswith("file:///") else where
    if "://" in path or not path:
        raise InvalidArgument(
            f"a table is a folder that the driver and all executors see under one path; {where!r} is none. Spark as it "
            "is installed here has no file system for object stores"
        )
    path = os.path.realpath(path)
    if os.path.exists(path) and not os.path.isdir(path):
        raise TableMismatch(f"{path} is a file; a table is a folder")
    return path


def prepared(folder: str, rows: int) -> Landing:
    """What all tables do in `prepare`."""
    files = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else ():
        path = os.path.join(folder, name)
        if name.endswith(".parquet") and not name.startswith((".", "_")):
            file = DataFile(path, os.path.getsize(path), pq.read_metadata(path))
            if file.rows:
                files.append(file)
                continue
        remove(path)
    landing = Landing(folder, tuple(files))
    if landing.rows != rows:
        raise JobFailed(
            f"the executors were to write {rows:,} records into {folder}, and the driver finds {landing.rows:,} there: "
            "nothing was committed. All of them must see the folder under this path: use a shared file system, or "
            "--master local[*]"
        )
    for file in files:
        sync(file.path)
    return landing


def old_folders(folders: Iterable[str], older_than_s: float) -> Iterator[str]:
    """Those in which nothing was made or removed for so long."""
    for folder in folders:
        try:
            newest = max(os.stat(here).st_mtime for here, _, _ in os.walk(folder))
        except (FileNotFoundError, ValueError):  # Gone meanwhile: another run removes leftovers, too.
            continue
        if time.time() - newest > older_than_s:
            yield folder


def remove(path: str) -> None:
    """A file or a folder with all that is in it, if it is there."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def sync(path: str) -> None:
    """A file's bytes, or the names in a folder, are durable when this returns."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
