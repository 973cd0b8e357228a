"""What names an object and what does not: the same rules for every store, so that objects can move between them."""

from __future__ import annotations

import re

from braid.model.errors import InvalidArgument, InvalidName

MAX_NAME_BYTES = 800
"""S3 takes keys of 1,024 bytes; the rest is for the prefix in the URL of the store."""
MAX_PART_BYTES = 255
"""What Linux filesystems take between two slashes."""

_PART = re.compile(rf"[A-Za-z0-9._\-=%]{{1,{MAX_PART_BYTES}}}")


def is_name(text: str) -> bool:
    return len(text) <= MAX_NAME_BYTES and all(
        _PART.fullmatch(part) is not None and part not in (".", "..") for part in text.split("/")
    )


def checked_name(name: str) -> str:
    if not is_name(name):
        raise InvalidName(
            f"{name[:MAX_NAME_BYTES]!r} cannot name an object: use parts of A-Z a-z 0-9 . _ - = % between single "
            f"slashes, not '.' or '..', each of at most {MAX_PART_BYTES} characters, together {MAX_NAME_BYTES}"
        )
    return name


def checked_folder(folder: str) -> str:
    """Check a folder's name. The empty folder is the whole store."""
    return checked_name(folder) if folder else folder


def checked_range(name: str, start: int, length: int) -> None:
    if start < 0 or length < 0:
        raise InvalidArgument(f"cannot read {length} bytes of object {name!r} at {start}: neither may be negative")
