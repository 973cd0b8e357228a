"""Decides which chunks and files may be deleted: pure functions. The segment deletes them (segment.py)."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from braid.model.ids import Offset
from braid.storage.log.wal import WalFile

FIRST_OFFSET: Final = Offset(0)


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """None keeps for ever."""

    max_age_s: float | None = None
    max_bytes: int | None = None
    delete_unconsumed: bool = False
    """Whether age and size also delete what a subscription has not consumed yet."""

    @property
    def keeps_all(self) -> bool:
        return self.max_age_s is None and self.max_bytes is None


class Aged(NamedTuple):
    """A chunk, or a local file where files are the history."""

    next_offset: Offset
    size: int
    max_timestamp: int


def expired(
    pieces: Sequence[Aged],
    policy: RetentionPolicy,
    *,
    total_bytes: int,
    now_us: int,
    needed_from: Offset | None,
    keep_newest: bool = False,
) -> int:
    """Return how many of the oldest pieces have outlived the policy.

    `total_bytes` is the size of the whole log, of which `pieces` may be only the old part; `needed_from` is the lowest
    cursor of all subscriptions, None when there is none. With `keep_newest`, size alone never takes the newest piece:
    a limit that is smaller than one chunk would delete each chunk as soon as it is exported.
    """
    count = 0
    for piece in pieces:
        too_old = policy.max_age_s is not None and now_us - piece.max_timestamp > policy.max_age_s * 1e6
        too_much = policy.max_bytes is not None and total_bytes > policy.max_bytes
        if keep_newest and piece is pieces[-1]:
            too_much = False
        needed = needed_from is not None and piece.next_offset > needed_from and not policy.delete_unconsumed
        if needed or not (too_old or too_much):
            break
        total_bytes -= piece.size
        count += 1
    return count


def held_back(old: Sequence[Aged], cursors: Mapping[str, Offset]) -> dict[str, int]:
    """Return the bytes of each subscription that has not consumed pieces which have outlived the policy."""
    held = {name: sum(piece.size for piece in old if piece.next_offset > offset) for name, offset in cursors.items()}
    return {name: size for name, size in held.items() if size}


def reclaimable(
    files: Sequence[WalFile], *, covered: Offset, keep_bytes: int, earliest: Offset = FIRST_OFFSET
) -> list[WalFile]:
    """Return local files that chunks cover, oldest first. The newest `keep_bytes` stay, for fast reading. But a file
    with no record from `earliest` on goes in any case: retention has deleted its records.

    A damaged file stays, and so does every file after it.
    """
    kept = sum(file.batch_bytes for file in files)
    found: list[WalFile] = []
    for file in removable(files):
        if file.next_offset > earliest and (file.next_offset > covered or kept <= keep_bytes):
            break
        kept -= file.batch_bytes
        found.append(file)
    return found


def removable(files: Sequence[WalFile]) -> list[WalFile]:
    """Return the oldest closed files, up to the first damaged one, without the newest closed one.

    The newest closed file stays because it proves which epoch wrote here last. The open file after it cannot: its first
    batch may not have reached the disk.
    """
    closed = list(itertools.takewhile(lambda file: file.closed and not file.damage, files))
    newest = next((file for file in reversed(files) if file.closed), None)
    return [file for file in closed if file is not newest]
