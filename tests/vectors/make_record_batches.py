"""Writes the test vectors of the record batch format: `python tests/vectors/make_record_batches.py`

`record_batches/` holds one file per batch and `vectors.json`, which says what is in each. They are for implementers in
other languages, and they hold this implementation to bytes that are already on someone's disk: a test compares what
this script would write with what is there. Compressed bodies are checked by content only, since another release of a
codec may pack the same bytes differently.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

from braid.model.batch.columns import decode_arrow, encode_batch
from braid.model.batch.header import Codec, Flag, control_batch, stamp, verify
from braid.model.hashing import key_hash
from braid.model.ids import Epoch, Offset

FOLDER = Path(__file__).parent / "record_batches"
NOW_US = 1_700_000_000_000_000
KEYS = ("alpha", "key-0", "key-1", "ключ", "", "a", "ab", "abc", "abcd", "abcde")


def batches() -> dict[str, tuple[str, bytearray]]:
    lines = [b'{"id": %d, "text": "the quick brown fox"}' % number for number in range(12)]
    found = {
        "one": ("one record without a key", encode_batch([b"hello"], now_us=NOW_US)),
        "one-keyed": (
            "one record with a key, from a producer, stamped by an owner",
            encode_batch([b"paid"], keys=[b"alpha"], now_us=NOW_US, producer_id=7, first_sequence=41),
        ),
        "empty": ("an empty value with an empty key", encode_batch([b""], keys=[b""], now_us=NOW_US)),
        "many": (
            "keys, some of them null; timestamps that differ, one before 1970",
            encode_batch(
                [b"a", b"", b"ccc", b"dddddddd", b"e"],
                keys=[b"key-0", None, b"key-1", b"", "ключ".encode()],
                timestamps=[NOW_US, NOW_US - 1, -5, NOW_US + 9, NOW_US],
                now_us=NOW_US,
            ),
        ),
        "headers": (
            "headers on some records",
            encode_batch(
                [b"x", b"y", b"z"],
                headers=[{"trace": b"a1", "имя": "значение"}, None, {"": b""}],
                now_us=NOW_US,
            ),
        ),
        "lz4": ("twelve records as an LZ4 block", encode_batch(lines, now_us=NOW_US, codec=Codec.LZ4)),
        "zstd": ("twelve records as a Zstandard frame", encode_batch(lines, now_us=NOW_US, codec=Codec.ZSTD)),
        "begin": ("the control batch with which an owner begins", control_batch(Flag.BEGIN)),
        "seal": ("the control batch that ends a log", control_batch(Flag.SEAL)),
    }
    for name, base_offset in (("one-keyed", 1_234), ("begin", 1_234), ("seal", 5_000)):
        batch = found[name][1]
        stamp(
            batch,
            verify(batch),
            Offset(base_offset),
            append_time=NOW_US + 1_000,
            epoch=Epoch(3),
            incarnation=0x1A2B3C4D,
            commit_lag=2,
        )
    return found


def description(name: str, about: str, batch: bytes | bytearray) -> dict[str, Any]:
    header = verify(batch)
    fields = {field: getattr(header, field) for field in header.__struct_fields__}
    fields["body_crc"] = f"{header.body_crc:08x}"
    return {"file": f"{name}.batch", "about": about, "header": fields, "records": list(map(plain, rows(batch)))}


def rows(batch: bytes | bytearray) -> list[dict[str, Any]]:
    records = decode_arrow(batch)
    timestamps = records.column("timestamp").cast("int64").to_pylist()
    columns = ("offset", "key", "value", "headers", "key_hash")
    return [
        {**row, "timestamp_us": timestamp} for row, timestamp in zip(records.select(columns).to_pylist(), timestamps)
    ]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Bytes as base64, hashes as hex."""
    return {
        "offset": row["offset"],
        "key": None if row["key"] is None else encoded(row["key"]),
        "value": encoded(row["value"]),
        "timestamp_us": row["timestamp_us"],
        "key_hash": f"{row['key_hash']:04x}",
        "headers": [[name, encoded(value)] for name, value in row["headers"]],
    }


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def vectors() -> dict[str, Any]:
    return {
        "about": "Bytes are base64, hashes and checksums hex. Written by tests/vectors/make_record_batches.py.",
        "key_hashes": {key: f"{key_hash(key.encode()):04x}" for key in KEYS},
        "batches": [description(name, about, batch) for name, (about, batch) in batches().items()],
    }


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, (_, batch) in batches().items():
        (FOLDER / f"{name}.batch").write_bytes(batch)
    (FOLDER / "vectors.json").write_text(json.dumps(vectors(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
