"""The key hashes of some records of a batch, for an owner that measures how its load spreads. It reads this one column,
with the standard library alone (body.py has the format, and reads all of them).

A compressed body must be unpacked first. That needs Arrow, which a broker does not load otherwise, and takes
milliseconds: `is_plain` tells whether the caller has to do it in a thread.
"""

from __future__ import annotations

import struct
from typing import Final

from braid.model.batch.header import DIRECTORY_BYTES, BatchHeader, Codec, body_of, padded
from braid.model.errors import BatchCorrupt

_LENGTHS: Final = struct.Struct("<7I")
"""Of the first buffers in the directory, up to the key hashes."""
_VALIDITY, _HASHES = 0, 6
_HASH_BYTES: Final = 2


def is_plain(header: BatchHeader) -> bool:
    return header.codec == Codec.NONE


def sampled_key_hashes(batch: bytes | memoryview, header: BatchHeader, most: int) -> list[int | None]:
    """Return the hashes of at most so many records, evenly spaced; None for a record without a key. `BatchCorrupt` if
    the body does not hold what its directory says: a checksum proves only that a producer wrote it."""
    raw = body_of(batch, header)
    if not is_plain(header):
        from braid.model.batch.codec import decompress  # Arrow: half a second, and 60 MB

        raw = decompress(Codec(header.codec), raw, header.raw_length)
    step = -(-header.count // most)
    lengths = _LENGTHS.unpack_from(raw)
    if not lengths[_HASHES]:
        return [None] * -(-header.count // step)
    start = DIRECTORY_BYTES + sum(padded(length) for length in lengths[:_HASHES])
    column = raw[start : start + _HASH_BYTES * header.count]
    if not lengths[_HASHES] == len(column) == _HASH_BYTES * header.count:
        raise BatchCorrupt(f"the key hashes of {header.count} records are not where the directory says")
    found = column.cast("H")[::step].tolist()
    if lengths[_VALIDITY]:
        # Records without a key stand there as 0. A key whose hash is 0 is one of 65,536: it is not told from these.
        return [hash_ or None for hash_ in found]
    return [*found]
