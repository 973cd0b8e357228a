"""Compression of batch bodies, with the codecs that Arrow brings.

A compressed body is the crc32c of the raw body (u32, little-endian), then the compressed bytes: an LZ4 block or a
Zstandard frame. The checksum is there because an LZ4 block does not say how long it is, and Arrow does not tell how
much of the output it filled: without it, a block that ends early would show what was in that memory before.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import pyarrow as pa
from crc32c import crc32c

from braid.model.batch.header import CHECKSUM_BYTES, MAX_RAW_BYTES, Codec
from braid.model.errors import BatchCorrupt, BatchTooLarge, InvalidArgument

_ZSTD_LEVEL: Final = 1
"""Measured on JSON: level 3 is slower and no smaller."""


def compress(codec: Codec, raw: bytes | bytearray | memoryview) -> tuple[bytes, Any] | None:
    """Return the two parts of the compressed body, or None when it would not save an eighth of `raw`.

    Below that it is not worth what it costs: a reader must unpack it into memory of its own.
    """
    packed = _codec(codec).compress(raw)
    if CHECKSUM_BYTES + packed.size > len(raw) - len(raw) // 8:
        return None
    return crc32c(raw).to_bytes(CHECKSUM_BYTES, "little"), packed


def decompress(codec: Codec, stored: memoryview, raw_length: int) -> memoryview:
    """Return the raw body, exactly `raw_length` bytes, or `BatchCorrupt`. Never allocates more than that."""
    if raw_length > MAX_RAW_BYTES:
        raise BatchTooLarge(f"a decompressed body of {raw_length} bytes is above the limit of {MAX_RAW_BYTES}")
    if len(stored) <= CHECKSUM_BYTES:
        raise BatchCorrupt(f"a compressed body has more than {CHECKSUM_BYTES} bytes, this one has {len(stored)}")
    try:
        raw = memoryview(_codec(codec).decompress(stored[CHECKSUM_BYTES:], decompressed_size=raw_length))
    except (OSError, ValueError) as error:
        raise BatchCorrupt(f"the {codec.name} body does not decompress to {raw_length} bytes: {error}") from error
    found, said = crc32c(raw), int.from_bytes(stored[:CHECKSUM_BYTES], "little")
    if found != said:
        raise BatchCorrupt(f"checksum of the decompressed body is {found:08x}, it says {said:08x}")
    return raw


@cache
def _codec(codec: Codec) -> Any:
    if codec is Codec.LZ4:
        return pa.Codec("lz4_raw")
    if codec is not Codec.ZSTD:
        raise InvalidArgument(f"{codec!r} is no codec: choose one of {', '.join(map(str, Codec))}")
    return pa.Codec("zstd", compression_level=_ZSTD_LEVEL)
