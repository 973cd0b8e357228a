"""The contract of a lake table: new files and their offsets become visible in one commit, or not at all.

    folder  = table.stage(step)              where Spark writes; no reader looks there
    landing = table.prepare(folder, rows)    the files are complete and durable; no reader sees them yet
    table.commit(landing, landed)            every reader sees them. `TableConflict` if another writer came first

The commit carries a `Landed`: the topic, and the positions up to which the table holds it. The pipeline keeps no other
state. A process that dies before the commit leaves files that no reader counts; a process that dies after the commit
has done its work. The next run goes on where the last commit says.

`step` counts the commits. Two writers that begin at the same step write different files, and only one commit of that
step can exist. Each table ensures that in its own way (parquet.py, delta.py).

Spark does not sync its files, and leaves marks and checksums beside them. `prepare` syncs the files and removes the
rest. It also counts the rows in the files' footers: if executors wrote to disks that the driver does not see, a commit
would skip their records.
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
from braid.model.ids import Epoch

LANDED_VERSION: Final = 1
LEFTOVER_S: Final = 24 * 3_600.0
"""A run removes uncommitted files that are this old. No step takes so long."""


class Landed(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How much of a topic a table holds, as its last commit says."""

    version: int = LANDED_VERSION
    topic: str
    topic_id: int
    """0 if it is not known: the records came only from manifests that do not have it."""
    step: int
    """Counts commits from 1; 0: none yet."""
    positions: dict[int, Position]
    """The next offset of each segment, or END. None at all before the first step."""
    columns: tuple[str, ...]
    epochs: dict[int, Epoch] = {}
    """Of the last landed records, as far as they are known: by these the next step notices records that were lost."""

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_bytes(cls, data: bytes, where: str) -> Landed:
        try:
            landed = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
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
    """Files that are complete and durable, before their commit."""

    folder: str
    files: tuple[DataFile, ...]

    @property
    def rows(self) -> int:
        return sum(file.rows for file in self.files)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)


class LakeTable(Protocol):
    """A folder in which a topic lands. All of this runs on the driver."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str:
        """Name the format as users do."""

    def landed(self) -> Landed | None:
        """Read the last commit, on which a later `commit` builds; None if there is no table yet."""

    def create(self, first: Landed, schema: Any) -> None:
        """Begin a table with these columns (an Arrow schema), if there is none."""

    def stage(self, step: int) -> str:
        """Return the path of a new folder for this attempt at the step; the folder does not exist yet."""

    def prepare(self, folder: str, rows: int) -> Landing:
        """Make the files that Spark wrote durable. Raises `JobFailed` if they have another number of rows."""

    def commit(self, landing: Landing, landed: Landed) -> None:
        """Make files and positions visible: all or nothing, at most once for each step."""

    def discard(self, folder: str) -> None:
        """Remove a staged folder, prepared or not."""

    def remove_leftovers(self, older_than_s: float = LEFTOVER_S) -> int:
        """Remove folders that earlier writers staged and never committed. Returns how many."""


def folder_path(where: str) -> str:
    """Return a folder's absolute path, from a path or a file URL."""
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
    """Do what all tables do in `prepare`."""
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
    """Yield the folders in which nothing was made or removed for so long."""
    for folder in folders:
        try:
            newest = max(os.stat(here).st_mtime for here, _, _ in os.walk(folder))
        except (FileNotFoundError, ValueError):  # Another run has removed the folder meanwhile.
            continue
        if time.time() - newest > older_than_s:
            yield folder


def remove(path: str) -> None:
    """Remove a file, or a folder with its contents, if it exists."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        try:
            os.unlink(path)
        except FileNotFoundError:
            return


def sync(path: str) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
