"""The file `replica` in a segment's folder: what this copy of the log has promised, and whether it is a witness.

A promise is kept for ever: the copy takes no batch of a lower epoch. So it is synced before it is answered. Whether the
copy is a *member* is in the same file. A folder that was lost, and made again, has no such file: the copy has promised
nothing, and nothing may be concluded from what it does not hold.
"""

from __future__ import annotations

import contextlib
from typing import Final

import msgspec

from braid.model.errors import FileMissing, RecoveryConflict
from braid.model.ids import Epoch
from braid.ports.disk import Disk

NAME: Final = "replica"
_MAX_BYTES: Final = 4096


class ReplicaMark(msgspec.Struct, frozen=True, kw_only=True):
    promised: Epoch = Epoch(0)
    member: bool = False
    """Whether this copy once held everything that had been confirmed then, and has lost nothing since."""


async def write(disk: Disk, folder: str, mark: ReplicaMark) -> None:
    """Replace the file. When this returns, the mark outlives a loss of power."""
    temporary = f"{folder}/{NAME}.tmp"
    with contextlib.suppress(FileMissing):
        await disk.remove(temporary)
    file = await disk.open(temporary, create=True)
    try:
        await file.write(0, [msgspec.json.encode(mark)], sync=True)
    finally:
        await file.close()
    await disk.rename(temporary, f"{folder}/{NAME}")


async def read(disk: Disk, folder: str) -> ReplicaMark:
    """Return the mark; that of a blank copy if there is none."""
    try:
        file = await disk.open(f"{folder}/{NAME}")
    except FileMissing:
        return ReplicaMark()
    try:
        return msgspec.json.decode(await file.read(0, _MAX_BYTES), type=ReplicaMark)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecoveryConflict(f"{folder}/{NAME} cannot be read: {error}") from error
    finally:
        await file.close()
