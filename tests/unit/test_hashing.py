import random

import numpy as np
import pytest

from braid.model.hashing import RING, key_hash, key_hashes


def slow_murmur3(key: bytes) -> int:
    """Murmur3 x86 32 with seed 0, written from its description, as the oracle."""
    result = 0
    blocks, tail = key[: len(key) & ~3], key[len(key) & ~3 :]
    for at in range(0, len(blocks), 4):
        result ^= scrambled(int.from_bytes(blocks[at : at + 4], "little"))
        result = rotated(result, 13) * 5 + 0xE6546B64 & 0xFFFF_FFFF
    result ^= scrambled(int.from_bytes(tail, "little")) ^ len(key)
    result = (result ^ result >> 16) * 0x85EBCA6B & 0xFFFF_FFFF
    result = (result ^ result >> 13) * 0xC2B2AE35 & 0xFFFF_FFFF
    return result ^ result >> 16


def scrambled(block: int) -> int:
    return rotated(block * 0xCC9E2D51 & 0xFFFF_FFFF, 15) * 0x1B873593 & 0xFFFF_FFFF


def rotated(value: int, bits: int) -> int:
    return (value << bits | value >> 32 - bits) & 0xFFFF_FFFF


@pytest.mark.parametrize(
    ("key", "expected"), [("alpha", 0xA9C0), ("key-0", 0xE337), ("key-1", 0x98B1), ("ключ", 0x9A59), ("", 0)]
)
def test_published_vectors_hold(key: str, expected: int) -> None:
    assert key_hash(key.encode()) == expected


def test_both_ways_of_hashing_agree_with_the_slow_one() -> None:
    chance = random.Random(3)
    keys = [chance.randbytes(chance.randrange(40)) for _ in range(2_000)]
    expected = [slow_murmur3(key) >> 16 for key in keys]
    assert [key_hash(key) for key in keys] == expected
    hashes = key_hashes(keys)
    assert hashes.dtype == np.uint16
    assert hashes.tolist() == expected


def test_views_and_mutable_bytes_hash_like_bytes() -> None:
    assert key_hashes([bytearray(b"alpha"), memoryview(b"xalphax")[1:6]]).tolist() == [0xA9C0, 0xA9C0]


def test_keys_spread_over_the_whole_ring() -> None:
    quarters = np.bincount(key_hashes([b"customer-%d" % number for number in range(10_000)]) // (RING // 4))
    assert quarters.min() > 2_300
    assert quarters.max() < 2_700
