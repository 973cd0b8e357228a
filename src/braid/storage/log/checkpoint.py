"""`wal.ckpt`: a description of a log's files that saves recovery from reading them.

It is a hint. A missing, torn or old checkpoint costs time, never records: recovery then reads the batches themselves.
In one direction it is evidence: `synced` was true when it was written, so if the batches end below it, some have been
lost since.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec
from crc32c import crc32c

from braid.model.errors import FileMissing
from braid.model.ids import Epoch, Offset
from braid.ports.disk import Disk

NAME: Final = "wal.ckpt"
_MAGIC: Final = b"BRDK"
_MAX_BYTES: Final = 64 << 20


class ClosedFile(msgspec.Struct, frozen=True, array_like=True):
    name: str
    base_offset: Offset
    next_offset: Offset
    batch_bytes: int
    size: int
    epochs: tuple[Epoch, ...]
    """Every epoch of which it has a batch, in order. Which of their owners began is known elsewhere."""
    incarnation: int
    """That of its last batch."""
    max_timestamp: int
    sealed: bool
    record_epoch: Epoch = Epoch(0)
    """That of its last record; 0: it is not known."""


class LogCheckpoint(msgspec.Struct, frozen=True):
    synced: Offset
    """Every record below this offset was durable."""
    closed: tuple[ClosedFile, ...]
    """Closed, undamaged files with footers, in order."""


def encode(checkpoint: LogCheckpoint) -> bytes:
    body = msgspec.msgpack.encode(checkpoint)
    return _MAGIC + crc32c(body).to_bytes(4, "little") + body


def decode(data: bytes) -> LogCheckpoint | None:
    """Decode a checkpoint; None for anything that is not a whole checkpoint of ours."""
    if len(data) < 8 or data[:4] != _MAGIC or crc32c(data[8:]) != int.from_bytes(data[4:8], "little"):
        return None
    try:
        return msgspec.msgpack.decode(data[8:], type=LogCheckpoint)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def write(disk: Disk, folder: str, checkpoint: LogCheckpoint) -> None:
    """Replace the checkpoint: a reader finds the old one or the new one."""
    temporary = f"{folder}/{NAME}.tmp"
    with contextlib.suppress(FileMissing):
        await disk.remove(temporary)
    file = await disk.open(temporary, create=True)
    try:
        await file.write(0, [encode(checkpoint)], sync=True)
    finally:
        await file.close()
    await disk.rename(temporary, f"{folder}/{NAME}")


async def read(disk: Disk, folder: str) -> LogCheckpoint | None:
    try:
        file = await disk.open(f"{folder}/{NAME}")
    except FileMissing:
        return None
    try:
        return decode(await file.read(0, _MAX_BYTES))
    finally:
        await file.close()
