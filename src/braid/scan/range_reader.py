"""How a task reads ranges of an object: the one range reader of Spark's source, the audit and `braid.history`.

The bytes of a file are in the page cache, or the kernel reads them ahead. So a plain read of 1 MiB is best: its bytes
are still in the processor's cache when they are decoded, and the next read uses the same memory. (1.1 M records of
100 B, processor time: 0.04 s; by an event loop with reads of 4 MiB: 0.10 s.) A remote store takes tens of milliseconds
to answer. So reads from there are larger, and the next ones are under way while one is decoded.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Final, Protocol

from braid.model.batch.header import BatchHeader
from braid.model.errors import ObjectMissing, ObjectStoreUnavailable
from braid.scan.connection import ScanConnection
from braid.storage.history.ranges import DEFAULT_READ_BYTES, Span, batches_in, headers_in
from braid.storage.objects.names import checked_name
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import folder_of

FILE_READ_BYTES: Final = 1 << 20
NO_BODY: Final = memoryview(b"")
READ_AHEAD: Final = 2
"""Reads of a remote store that are under way while one is decoded."""


class OpenObject(Protocol):
    def size(self) -> int:
        """Return how many bytes the object has."""

    def read(self, position: int, length: int) -> bytes:
        """Return exactly these bytes; fewer only where the object ends."""


class RangeReader(Protocol):
    """Raises `ObjectMissing`, and `ObjectStoreUnavailable` for everything that is not an answer."""

    read_bytes: int
    """How many bytes one read should ask for."""

    def open(self, name: str) -> AbstractContextManager[OpenObject]:
        """Give access to the bytes of an object."""

    def batches(self, name: str, spans: Sequence[Span], *, bodies: bool) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Yield the checked batches of these spans, in order. Without `bodies`, bodies may be missing and unchecked.
        Raises `LogDamaged`."""


def range_reader(connection: ScanConnection, storage: str) -> RangeReader:
    folder = folder_of(storage)
    return FileRangeReader(folder) if folder is not None else RemoteRangeReader(connection, storage)


class FileRangeReader:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.read_bytes = FILE_READ_BYTES

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_OpenFile]:
        try:
            file = os.open(f"{self._folder}/{checked_name(name)}", os.O_RDONLY)
        except FileNotFoundError:
            raise ObjectMissing(f"cannot read object {name!r}: {self._folder} holds none of that name") from None
        except OSError as error:
            raise _unavailable(self._folder, name, error) from None
        try:
            yield _OpenFile(file, self._folder, name)
        finally:
            os.close(file)

    def batches(self, name: str, spans: Sequence[Span], *, bodies: bool) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Without bodies, only headers are read: each costs one call, and the bytes between them are not touched."""
        with self.open(name) as file:
            for span in spans:
                if bodies:
                    for header, batch in batches_in(file.read(span.position, span.length), span, name):
                        yield header, memoryview(batch)
                else:
                    yield from ((header, NO_BODY) for header in headers_in(file.read, span, name))


class _OpenFile:
    def __init__(self, file: int, folder: str, name: str) -> None:
        self._file = file
        self._folder = folder
        self._name = name

    def size(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, position: int, length: int) -> bytes:
        try:
            data = os.pread(self._file, length, position)
            while len(data) < length:  # Linux reads at most 2 GiB in one call, and a signal may end a read early.
                more = os.pread(self._file, length - len(data), position + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise _unavailable(self._folder, self._name, error) from None
        return data


def _unavailable(folder: str, name: str, error: OSError) -> ObjectStoreUnavailable:
    return ObjectStoreUnavailable(f"could not read object {name!r} in {folder}: {error.strerror or error}")


class RemoteRangeReader:
    def __init__(self, connection: ScanConnection, storage: str) -> None:
        self._connection = connection
        self._objects = connection.objects(storage)
        self.read_bytes = DEFAULT_READ_BYTES

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[_RemoteObject]:
        yield _RemoteObject(self._connection, self._objects, name)

    def batches(self, name: str, spans: Sequence[Span], *, bodies: bool) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Bodies are always read: one request for each header would take longer than all bodies together."""
        del bodies
        for span, data in self._read_ahead(name, spans):
            for header, batch in batches_in(data, span, name):
                yield header, memoryview(batch)

    def _read_ahead(self, name: str, spans: Sequence[Span]) -> Iterator[tuple[Span, bytes]]:
        reads: deque[tuple[Span, Future[bytes]]] = deque()
        left = iter(spans)
        try:
            while True:
                while len(reads) <= READ_AHEAD and (span := next(left, None)) is not None:
                    work = self._objects.read(name, span.position, span.length)
                    reads.append((span, self._connection.begin(work)))
                if not reads:
                    return
                span, read = reads.popleft()
                yield span, read.result()
        finally:
            for _, read in reads:
                read.cancel()


class _RemoteObject:
    def __init__(self, connection: ScanConnection, objects: Objects, name: str) -> None:
        self._connection = connection
        self._objects = objects
        self._name = name

    def size(self) -> int:
        return self._connection.call(self._objects.stat(self._name)).size

    def read(self, position: int, length: int) -> bytes:
        return self._connection.call(self._objects.read(self._name, position, length))
