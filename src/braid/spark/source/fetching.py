"""How an executor gets the bytes of chunks: from files with plain reads, from a remote store ahead of time.

A file's bytes are in the page cache, or the kernel reads them ahead; so a plain read of 1 MiB is best: what was read is
still in the processor's cache when it is decoded, and its memory is used again for the next read. (1.1 M records of
100 B, processor time: 0.04 s; by an event loop and 4 MiB at once: 0.10 s.) A remote store takes tens of milliseconds to
answer, so there the next reads are under way while one is decoded, and they are larger.
"""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Final, Protocol

from braid.model.batch.header import BatchHeader
from braid.model.errors import ObjectMissing, ObjectStoreUnavailable
from braid.spark.connection import Connection
from braid.storage.history.ranges import DEFAULT_READ_BYTES, Span, batches_in, headers_in
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import folder_of

FILE_READ_BYTES: Final = 1 << 20
NO_BODY: Final = memoryview(b"")
READ_AHEAD: Final = 2
"""Reads of a remote store that are under way while one is decoded."""


class ChunkBytes(Protocol):
    read_bytes: int
    """How much should be read at once."""

    def batches(self, name: str, spans: Sequence[Span], *, bodies: bool) -> Iterator[tuple[BatchHeader, memoryview]]:
        """The checked batches of these spans of an object, in order. Without `bodies`, what they hold is not asked for
        and may be missing. `ObjectMissing`, `LogDamaged`."""


def chunk_bytes(connection: Connection, storage: str) -> ChunkBytes:
    folder = folder_of(storage)
    return FileBytes(folder) if folder is not None else RemoteBytes(connection, connection.objects(storage))


class FileBytes:
    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.read_bytes = FILE_READ_BYTES

    def batches(self, name: str, spans: Sequence[Span], *, bodies: bool) -> Iterator[tuple[BatchHeader, memoryview]]:
        """Without bodies, only headers are read: of a file they cost a call each, and the rest is not touched."""
        with self._open(name) as read:
            for span in spans:
                if bodies:
                    for header, batch in batches_in(read(span.position, span.length), span, name):
                        yield header, memoryview(batch)
                else:
                    yield from ((header, NO_BODY) for header in headers_in(read, span, name))

    @contextlib.contextmanager
    def _open(self, name: str) -> Iterator[Callable[[int, int], bytes]]:
        try:
            file = os.open(f"{self._folder}/{name}", os.O_RDONLY)
        except FileNotFoundError:
            raise ObjectMissing(f"cannot read object {name!r}: {self._folder} holds none of that name") from None
        except OSError as error:
            raise self._unavailable(name, error) from None
        try:
            yield lambda position, length: self._read(file, name, position, length)
        finally:
            os.close(file)

    def _read(self, file: int, name: str, position: int, length: int) -> bytes:
        try:
            data = os.pread(file, length, position)
            while len(data) < length:  # Linux reads at most 2 GiB at once, and a signal may end a read early.
                more = os.pread(file, length - len(data), position + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise self._unavailable(name, error) from None
        return data

    def _unavailable(self, name: str, error: OSError) -> ObjectStoreUnavailable:
        return ObjectStoreUnavailable(f"could not read object {name!r} in {self._folder}: {error.strerror or error}")


class RemoteBytes:
    def __init__(self, connection: Connection, objects: Objects) -> None:
        self._connection = connection
        self._objects = objects
        self.read_bytes = DEFAULT_READ_BYTES

    def batches(self, name: str, spans: Sequence[Span], *, bodies: bool) -> Iterator[tuple[BatchHeader, memoryview]]:
        """With bodies in any case: a request for each header would take longer than all of them together."""
        del bodies
        for span, data in self._read(name, spans):
            for header, batch in batches_in(data, span, name):
                yield header, memoryview(batch)

    def _read(self, name: str, spans: Sequence[Span]) -> Iterator[tuple[Span, bytes]]:
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
