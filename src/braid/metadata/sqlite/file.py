"""One open metadata file: the engine's version, the connection's settings, and the two kinds of transaction.

A write is: the write lock, BEGIN IMMEDIATE, the work, COMMIT with a sync. A transaction never starts as a reader and
then writes: SQLite refuses that immediately when another process has written in between. Readers hold no lock that a
writer waits for. Every error of the engine or the operating system becomes `MetadataUnavailable`, never an absence.

SQLite's journal, the WAL, gets its room on the disk when the file is opened. So a disk that is full later does not take
a broker's lease: a renewal rewrites a page, for which the WAL has room and the database a place.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import apsw

from braid.metadata.sqlite.sessions import WriteLock
from braid.model.errors import InvalidArgument, MetadataError, MetadataUnavailable, MetadataUncertain
from braid.ports.private_files import close_to_others, keep_file_private

OLDEST_ENGINE = (3, 51, 3)
"""SQLite 3.7.0 to 3.51.2 can damage a WAL database that several processes write and checkpoint (the WAL-reset bug)."""
APPLICATION_ID = 0x42524D44
SCHEMA_VERSION = 1
BUSY_TIMEOUT_MS = 5_000
"""Only foreign programs (a shell, a backup) make us wait for SQLite's own lock; ours wait for the write lock."""
WAL_KEPT_BYTES = 16 * 1024 * 1024
WAL_RESERVED_BYTES = 8 * 1024 * 1024
"""SQLite begins the WAL again from its start when it has 1,000 pages of 4 KiB. Twice that, because a reader may prevent
it for a while."""


def refuse_old_engine(version: str) -> None:
    if tuple(int(part) for part in version.split(".")) < OLDEST_ENGINE:
        needed = ".".join(str(part) for part in OLDEST_ENGINE)
        raise MetadataError(
            f"SQLite {version} damages files that several processes write; {needed} or later is needed: install a "
            "current apsw from a wheel, which brings its own SQLite"
        )


class MetadataFile:
    def __init__(self, path: str, schema: str) -> None:
        self.path = path
        self._own_commits = 0
        with self._translated("open"):
            self._lock = WriteLock(path + ".lock")
            try:
                keep_file_private(path)  # The cluster's secret is in it. SQLite creates the others in the same mode.
                for other in ("-wal", "-shm"):
                    close_to_others(path + other)
                self.connection = apsw.Connection(path)
                self._prepare(schema)
            except BaseException:
                self._lock.close()
                raise
            found = os.stat(path)
            self._identity = (found.st_dev, found.st_ino)

    @contextmanager
    def writing(self, request: str) -> Iterator[None]:
        """Run the body in a write transaction, which is rolled back when the body raises."""
        with self._translated(request):
            self._check_in_place()
            with self._lock.held():
                self.connection.execute("BEGIN IMMEDIATE")
                try:
                    yield
                except BaseException:
                    self._roll_back()
                    raise
                self._commit(request)

    @contextmanager
    def reading(self, request: str) -> Iterator[None]:
        """Let the body read one snapshot."""
        with self._translated(request):
            self._check_in_place()
            self.connection.execute("BEGIN")
            try:
                yield
            finally:
                self._roll_back()

    def version(self) -> tuple[int, int]:
        """Changes with every commit: SQLite counts those of others, we our own. Costs microseconds."""
        with self._translated("poll"):
            self._check_in_place()
            return self.connection.pragma("data_version"), self._own_commits

    def close(self) -> None:
        with self._translated("close"):
            self.connection.close()
        self._lock.close()

    @contextmanager
    def _translated(self, request: str) -> Iterator[None]:
        try:
            yield
        except (apsw.Error, OSError) as error:
            raise MetadataUnavailable(
                f"{request}: the metadata file {self.path} cannot be used: {type(error).__name__}: {error}"
            ) from error

    def _commit(self, request: str) -> None:
        try:
            self.connection.execute("COMMIT")
        except apsw.Error as error:
            self._roll_back()
            if isinstance(error, apsw.BusyError | apsw.FullError):
                raise
            # The commit may stand in the file although its sync failed: the next process to open it decides.
            raise MetadataUncertain(
                f"{request}: the metadata file {self.path} did not confirm a commit ({error}); read back and compare"
            ) from error
        self._own_commits += 1

    def _roll_back(self) -> None:
        # SQLite has already rolled back by itself after some errors: a full disk, a failed write.
        if self.connection.in_transaction:
            self.connection.execute("ROLLBACK")

    def _check_in_place(self) -> None:
        """Check that the file is in place: others would not see writes to a file that was deleted or replaced."""
        found = os.stat(self.path)
        if (found.st_dev, found.st_ino) != self._identity:
            raise FileNotFoundError("the file was replaced by another one while it was open; restart this process")

    def _prepare(self, schema: str) -> None:
        connection = self.connection
        connection.set_busy_timeout(BUSY_TIMEOUT_MS)
        with self._lock.held():
            mode = connection.pragma("journal_mode", "wal")
            if mode != "wal":
                raise InvalidArgument(
                    f"the metadata file {self.path} allows only journal mode {mode}; use a local disk"
                )
            connection.pragma("synchronous", "full")
            connection.pragma("journal_size_limit", WAL_KEPT_BYTES)
            if connection.execute("SELECT count(*) FROM sqlite_schema").get == 0:
                connection.execute("BEGIN IMMEDIATE")
                connection.execute(schema)
                connection.pragma("application_id", APPLICATION_ID)
                connection.pragma("user_version", SCHEMA_VERSION)
                connection.execute("COMMIT")
                _sync_folder(os.path.dirname(os.path.abspath(self.path)))
            _reserve(f"{self.path}-wal", WAL_RESERVED_BYTES)
        if connection.pragma("application_id") != APPLICATION_ID:
            raise InvalidArgument(f"{self.path} is a SQLite database of another program, not a metadata file of Braid")
        version = connection.pragma("user_version")
        if version != SCHEMA_VERSION:
            raise MetadataError(
                f"the metadata file {self.path} has schema version {version}, this version of Braid reads "
                f"{SCHEMA_VERSION}; run the version that wrote it"
            )


def _reserve(path: str, size: int) -> None:
    """Give a file room on the disk, as far as the disk has some and its filesystem can. Bytes after the last page of a
    WAL mean nothing to SQLite."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR)
        try:
            os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
