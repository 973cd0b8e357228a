"""Damages batches in every way it knows, with checksums repaired, and reads them.

Run it for as long as you like: `python tests/property/fuzz_batches.py --seconds 300 --seed 7`. Whatever the bytes, a
reader may only return records or raise a `BatchError`. The test suite runs it in a process of its own, because what it
looks for would be a crash of the process.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import struct
import sys
import time
from collections.abc import Callable

import pyarrow as pa
from crc32c import crc32c

from braid.model.batch.codec import compress, decompress
from braid.model.batch.columns import decode_arrow, decode_messages, encode_batch
from braid.model.batch.header import HEADER_BYTES, Codec, parse_header, verify
from braid.model.errors import BatchError

INTERESTING = (0, 1, 2, 3, 4, 7, 8, 12, 16, 0x7F, 0xFF, 0xFFFF, 0x7FFF_FFFF, 0x8000_0000, 0xFFFF_FFF0, 0xFFFF_FFFF)


def corpus() -> list[bytearray]:
    batches = []
    for codec in Codec:
        for count in (1, 2, 9, 100):
            values = [b"value-%d" % number * (number % 5) for number in range(count)]
            keys = [b"key-%d" % (number % 7) for number in range(count)]
            some_keys = [key if number % 3 else None for number, key in enumerate(keys)]
            times = list(range(5, 5 + count))
            headers: list[dict[str, bytes | str] | None] = [
                {"trace": b"%d" % number, "имя": "x" * (number % 4)} for number in range(count)
            ]
            batches += [
                encode_batch(values, now_us=9, codec=codec),
                encode_batch(values, keys=keys, now_us=9, codec=codec),
                encode_batch(values, keys=some_keys, timestamps=times, headers=headers, now_us=9, codec=codec),
            ]
    return batches


def flip_bits(chance: random.Random, data: bytearray, start: int, end: int) -> None:
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        data[chance.randrange(start, end)] ^= 1 << chance.randrange(8)


def overwrite_number(chance: random.Random, data: bytearray, start: int, end: int) -> None:
    at = chance.randrange(start // 4, end // 4) * 4
    old = struct.unpack_from("<I", data, at)[0]
    new = chance.choice((chance.choice(INTERESTING), old + chance.randint(-9, 9), chance.getrandbits(32)))
    struct.pack_into("<I", data, at, new & 0xFFFF_FFFF)


def damage_raw_body(chance: random.Random, batch: bytearray) -> bytearray:
    """Damage the body as the producer would have built it, then store it as the producer would have."""
    header = verify(batch)
    codec = Codec(header.codec)
    raw = batch[HEADER_BYTES : HEADER_BYTES + header.body_length]
    if codec is not Codec.NONE:
        raw = bytearray(decompress(codec, memoryview(raw), header.raw_length))
    for _ in range(chance.choice((1, 1, 2, 3))):
        # The directory and the offsets behind it deserve most of the attention.
        end = chance.choice((48, min(len(raw), 128), len(raw)))
        chance.choice((flip_bits, overwrite_number))(chance, raw, 0, end)
    out = batch[:HEADER_BYTES]
    packed = compress(codec, raw) if codec is not Codec.NONE else None
    if packed is None:
        out[5] = Codec.NONE
        stored = bytes(raw)
    else:
        stored = b"".join(map(bytes, packed))
    struct.pack_into("<II", out, 12, len(stored), len(raw))
    return repaired(out + stored + bytes(-len(stored) % 8))


def damage_stored_body(chance: random.Random, batch: bytearray) -> bytearray:
    out = bytearray(batch)
    end = HEADER_BYTES + verify(batch).body_length
    chance.choice((flip_bits, overwrite_number))(chance, out, HEADER_BYTES, end - end % 4)
    return repaired(out)


def damage_header(chance: random.Random, batch: bytearray) -> bytearray:
    out = bytearray(batch)
    chance.choice((flip_bits, overwrite_number))(chance, out, 4, 92)
    return repaired(out, body=chance.random() < 0.7)


def damage_anything(chance: random.Random, batch: bytearray) -> bytearray:
    out = bytearray(batch)
    flip_bits(chance, out, 0, len(out))
    return out


def truncate(chance: random.Random, batch: bytearray) -> bytearray:
    return batch[: chance.randrange(len(batch))]


def repaired(batch: bytearray, *, body: bool = True) -> bytearray:
    """Make the checksums true again, as far as the lengths still allow it."""
    length = struct.unpack_from("<I", batch, 12)[0]
    if body:
        struct.pack_into("<I", batch, 20, crc32c(memoryview(batch)[HEADER_BYTES : HEADER_BYTES + length]))
    struct.pack_into("<I", batch, 92, crc32c(memoryview(batch)[:92]))
    return batch


KINDS: tuple[Callable[[random.Random, bytearray], bytearray], ...] = (
    damage_raw_body,
    damage_raw_body,
    damage_raw_body,
    damage_stored_body,
    damage_header,
    damage_anything,
    truncate,
)


def read_everything(batch: bytes | bytearray | memoryview) -> bool:
    """Whether the batch could be read. Touches every byte of every column, so that a wild offset would be felt."""
    read = 0
    for reader in (_read_messages, _read_arrow, _read_unverified):
        try:
            reader(batch)
            read += 1
        except BatchError:
            pass
    return read > 0


def _read_messages(batch: bytes | bytearray | memoryview) -> None:
    for message in decode_messages(batch):
        assert isinstance(message.value, bytes)
        _ = (message.key, dict(message.headers))


def _read_arrow(batch: bytes | bytearray | memoryview) -> None:
    _touch(decode_arrow(batch))


def _read_unverified(batch: bytes | bytearray | memoryview) -> None:
    _touch(decode_arrow(batch, parse_header(batch)))


def _touch(records: pa.RecordBatch) -> None:
    records.validate(full=True)
    for column, name in zip(records.columns, records.schema.names):
        (column.cast(pa.int64()) if name == "timestamp" else column).to_pylist()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=sys.maxsize)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    faulthandler.enable()
    batches = corpus()
    deadline = time.monotonic() + arguments.seconds
    refused = rounds = 0
    while rounds < arguments.rounds and time.monotonic() < deadline:
        # Each round has its own seed, so that one that fails can be run alone.
        chance = random.Random(arguments.seed + rounds)
        damaged = chance.choice(KINDS)(chance, chance.choice(batches))
        try:
            refused += not read_everything(damaged)
        except BaseException:
            print(f"seed {arguments.seed + rounds} escaped with {bytes(damaged).hex()}", flush=True)
            raise
        rounds += 1
    print(f"{rounds} damaged batches, {refused} refused, the others read, none escaped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
