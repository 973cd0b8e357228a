"""What a log, its group commit and its writer share, and how a log is configured.

`SegmentStorage` makes one context for each opening of a log. Log, commit and writer copy what they need into their own
fields when they are made, so that no batch pays for a second attribute.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from braid.model.batch.header import MAX_EPOCH, MAX_INCARNATION
from braid.model.errors import InvalidArgument
from braid.model.ids import Epoch
from braid.model.topic import Durability
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.storage.cache import HotCache
from braid.storage.log.preallocated import PreallocatedFiles

MAX_FILE_BYTES: Final = 4 << 30
"""An export holds a whole file in memory, and a chunk's format ends at 16 GiB."""


class FileConfig(msgspec.Struct, frozen=True, kw_only=True):
    file_bytes: int = 64 << 20
    """Rotate at this size: also the size of a chunk, and of what recovery may have to walk."""
    file_age_s: float = 600.0
    """Rotate a file this long after its first batch, busy or idle, so that its records get exported."""
    first_reserve_bytes: int = 256 << 10
    """Room for a log's first batches; grows by doubling. Small, because a broker may hold thousands of quiet logs."""

    def __post_init__(self) -> None:
        if not 0 < self.file_bytes <= MAX_FILE_BYTES:
            raise InvalidArgument(f"file_bytes is {self.file_bytes}; a file has 1 to {MAX_FILE_BYTES} bytes")
        if not self.file_age_s > 0:
            raise InvalidArgument(f"file_age_s is {self.file_age_s}; it must be above 0")
        if self.first_reserve_bytes < 0:
            raise InvalidArgument(f"first_reserve_bytes is {self.first_reserve_bytes}; it must not be negative")


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    durability: Durability = Durability.FSYNC
    files: FileConfig = FileConfig()
    max_group_bytes: int = 8 << 20
    """The most that one commit writes: it bounds the time that a batch waits for the group before it."""
    max_pending_bytes: int = 64 << 20
    """The most that may wait for the disk; beyond this limit, `append` raises LogBusy (I12)."""
    memory_sync_bytes: int = 16 << 20
    memory_sync_s: float = 1.0
    """Durability `memory` syncs after this much or this long, so that a lost machine costs about a second."""
    on_sync: Callable[[float], None] | None = None
    """Called after each synced commit with the seconds that its write and sync took."""

    def __post_init__(self) -> None:
        if not isinstance(self.durability, Durability):
            raise InvalidArgument(
                f"{self.durability!r} is no durability: choose one of {', '.join(map(str, Durability))}"
            )
        for name in ("max_group_bytes", "max_pending_bytes", "memory_sync_bytes", "memory_sync_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be above 0")

    @property
    def sync_bytes(self) -> int:
        """Sync a group when this much is not synced yet, the group included: 0 syncs each group."""
        return self.memory_sync_bytes if self.durability is Durability.MEMORY else 0


def _always() -> bool:
    return True


class LogContext(msgspec.Struct, frozen=True, kw_only=True):
    disk: Disk
    folder: str
    epoch: Epoch
    """Written into every batch: the epoch of the ownership for which the log is opened."""
    incarnation: int
    """Written into every batch: a random number for each opening."""
    clock: Clock
    config: LogConfig
    cache: HotCache
    preallocated: PreallocatedFiles | None = None
    may_confirm: Callable[[], bool] = _always
    """Tells whether the owner's lease still holds; asked before anything is confirmed (I3)."""
    on_closed_file: Callable[[], None] | None = None
    """Called after each file that was closed and can be exported."""

    def __post_init__(self) -> None:
        if not 0 < self.epoch <= MAX_EPOCH:
            raise InvalidArgument(
                f"epoch {self.epoch} cannot open {self.folder}: epochs are numbers from 1 to {MAX_EPOCH}"
            )
        if not 0 < self.incarnation <= MAX_INCARNATION:
            raise InvalidArgument(
                f"the incarnation is {self.incarnation}; it must be drawn from 1 to {MAX_INCARNATION}"
            )
