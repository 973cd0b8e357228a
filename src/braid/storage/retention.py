"""What may be deleted: two pure functions. Deleting itself is the segment's work (segment.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from braid.model.ids import Offset
from braid.storage.wal import WalFile


class RetentionPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """None keeps for ever."""

    max_age_s: float | None = None
    max_bytes: int | None = None
    delete_unconsumed: bool = False
    """Whether age and size also delete what a subscription has not consumed yet."""


class Aged(NamedTuple):
    """A chunk, or a local file where files are the history."""

    next_offset: Offset
    size: int
    max_timestamp: int


def expired(
    pieces: Sequence[Aged], policy: RetentionPolicy, *, total_bytes: int, now_us: int, needed_from: Offset | None
) -> int:
    """How many of the oldest pieces have outlived the policy.

    `total_bytes` is the size of the whole log, of which `pieces` may be only the old part; `needed_from` is the lowest
    cursor of all subscriptions, None when nobody needs anything.
    """
    count = 0
    for piece in pieces:
        too_old = policy.max_age_s is not None and now_us - piece.max_timestamp > policy.max_age_s * 1e6
        too_much = policy.max_bytes is not None and total_bytes > policy.max_bytes
        needed = needed_from is not None and piece.next_offset > needed_from and not policy.delete_unconsumed
        if needed or not (too_old or too_much):
            break
        total_bytes -= piece.size
        count += 1
    return count


def reclaimable(files: Sequence[WalFile], *, covered: Offset, keep_bytes: int) -> list[WalFile]:
    """Local files that chunks cover, oldest first, beyond the newest `keep_bytes` that are kept for fast reading.

    The newest file always stays: it says which epoch wrote here last. A damaged file stays, and all files behind it,
    so that nothing about the damage is lost.
    """
    kept = sum(file.batch_bytes for file in files)
    found: list[WalFile] = []
    for file in files[:-1]:
        if not file.closed or file.damage or file.next_offset > covered or kept <= keep_bytes:
            break
        kept -= file.batch_bytes
        found.append(file)
    return found
