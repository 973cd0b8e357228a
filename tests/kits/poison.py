"""Poison: batches with right checksums and wrong contents, as a careless or hostile producer makes them."""

from __future__ import annotations

import struct
from typing import Any

import msgspec
from crc32c import crc32c

from braid.model.batch.body import (
    DIRECTORY,
    HEADER_KEY_BYTES,
    HEADER_KEY_OFFSETS,
    HEADER_LISTS,
    HEADER_VALUE_OFFSETS,
    KEY_OFFSETS,
    KEY_VALIDITY,
    VALUE_OFFSETS,
    Body,
)
from braid.model.batch.codec import compress
from braid.model.batch.columns import encode_batch
from braid.model.batch.header import Codec, assemble, body_of, padded, parse_header

NOW_US = 1_700_000_000_000_000
COUNT = 3
"""Records of each batch here."""


def good(codec: Codec = Codec.NONE, **options: Any) -> bytearray:
    values = [b"a" * 200, b"b" * 200, b"c" * 200]
    return encode_batch(values, now_us=NOW_US, codec=codec, **options)


def forged(batch: bytearray, body: bytes | bytearray | None = None, **fields: Any) -> bytearray:
    """The batch with another body or other fields, under checksums that are right."""
    header = parse_header(batch)
    stored = bytes(body_of(batch, header) if body is None else body)
    changes: dict[str, Any] = {"body_length": len(stored), "body_crc": crc32c(stored)}
    if header.codec == Codec.NONE:
        changes["raw_length"] = len(stored)
    return assemble(msgspec.structs.replace(header, **(changes | fields)), stored)


def _patched(batch: bytearray, slot: int, kind: str, value: int, at: int = 0) -> bytearray:
    """The batch with another number in one of its buffers."""
    header = parse_header(batch)
    body = bytearray(body_of(batch, header))
    struct.pack_into(kind, body, Body(batch, header).starts[slot] + at, value)
    return forged(batch, body)


def _with_length(batch: bytearray, slot: int, more: int) -> bytearray:
    """The batch with another length in its directory."""
    header = parse_header(batch)
    body = bytearray(body_of(batch, header))
    lengths = list(DIRECTORY.unpack_from(body))
    lengths[slot] += more
    DIRECTORY.pack_into(body, 0, *lengths)
    return forged(batch, body)


def _keyed() -> bytearray:
    return good(keys=[b"k", b"l", b"m"])


def _with_headers() -> bytearray:
    return good(headers=[{"trace": b"1"}, None, {"trace": b"2"}])


def shown_by_the_header() -> dict[str, bytearray]:
    """Poison that a broker recognises without the body, by what is wrong with it."""
    return {
        "an unknown schema": forged(good(), schema_id=7),
        "another raw length than its plain body": forged(good(), raw_length=parse_header(good()).raw_length + 8),
        "a compressed body without content": forged(good(Codec.ZSTD), b"abcd"),
        "more records than the body has room for": forged(good(), count=1_000),
        "keys that the body has no room for": forged(_one(), min_key_hash=1, max_key_hash=1),
        "timestamps that the body has no room for": forged(_one(), min_timestamp=1, max_timestamp=2),
        "a raw length that is no multiple of 8": forged(good(), bytes(700)),
        "timestamps that run backwards": forged(good(timestamps=[1, 2, 3]), min_timestamp=3, max_timestamp=1),
        "key hashes that run backwards": forged(_keyed(), min_key_hash=9, max_key_hash=8),
    }


def _one() -> bytearray:
    return encode_batch([b""], now_us=NOW_US)


def shown_by_the_body() -> dict[str, bytearray]:
    """Poison that only a reader recognises: its header is that of a good batch."""
    return {
        "a directory of other lengths": _with_length(good(), VALUE_OFFSETS, 4),
        "value offsets that fall": _patched(good(), VALUE_OFFSETS, "<i", 500, at=4),
        "value offsets that end elsewhere": _patched(good(), VALUE_OFFSETS, "<i", 10, at=4 * COUNT),
        "key offsets that do not begin with 0": _patched(_keyed(), KEY_OFFSETS, "<i", 1),
        "a validity without keys": _with_length(good(), KEY_VALIDITY, 1),
        "header names that are no text": _patched(_with_headers(), HEADER_KEY_BYTES, "<B", 0xFF),
        "header lists that fall": _patched(_with_headers(), HEADER_LISTS, "<i", 9, at=4),
        "header values that end elsewhere": _patched(_with_headers(), HEADER_VALUE_OFFSETS, "<i", 7, at=8),
        "a frame that does not decompress": forged(good(Codec.ZSTD), bytes(range(40))),
        "another raw body than its checksum says": forged(good(Codec.ZSTD), bytes(4) + _packed()[4:]),
        "fewer raw bytes than the header says": forged(
            good(Codec.ZSTD), raw_length=parse_header(good(Codec.ZSTD)).raw_length + 8
        ),
        "timestamps that are missing": forged(good(), min_timestamp=1, max_timestamp=2),
    }


def _packed() -> bytes:
    batch = good(Codec.ZSTD)
    return bytes(body_of(batch, parse_header(batch)))


def bomb(raw_bytes: int) -> bytearray:
    """A few bytes that become one value of about this size."""
    return encode_batch([bytes(raw_bytes)], now_us=NOW_US, codec=Codec.ZSTD)


def crowd(records: int) -> bytearray:
    """A few bytes that become so many empty records."""
    return encode_batch([b""] * records, now_us=NOW_US, codec=Codec.ZSTD)


def header_crowd(headers: int) -> bytearray:
    """A few bytes that become one empty record with so many headers, all of the same name."""
    batch = encode_batch([b""], now_us=NOW_US, headers=[{"": b""}])
    header = parse_header(batch)
    lengths = list(DIRECTORY.unpack_from(body_of(batch, header)))
    lengths[HEADER_KEY_OFFSETS] = lengths[HEADER_VALUE_OFFSETS] = 4 * (headers + 1)
    values, lists, offsets = struct.pack("<2i", 0, 0), struct.pack("<2i", 0, headers), bytes(padded(4 * (headers + 1)))
    raw = DIRECTORY.pack(*lengths) + values + lists + offsets + offsets
    packed = compress(Codec.ZSTD, raw)
    assert packed is not None
    return forged(batch, b"".join(map(bytes, packed)), codec=int(Codec.ZSTD), raw_length=len(raw))
