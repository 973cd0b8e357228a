"""The hot cache: bounded in bytes, first in, first out, never with a gap."""

from __future__ import annotations

import time

import pytest

from braid.model.batch.header import Flag, control_batch, parse_header
from braid.storage.cache import MOST_BATCHES, HotCache
from tests.kits.storage import make_header, stamped_batch


def put(cache: HotCache, base: int, *, log: int = 1, body: bytes = b"x" * 104, count: int = 1) -> None:
    """A batch of 200 bytes."""
    cache.put(log, make_header(count, body, base_offset=base), stamped_batch(base, count, body))


def bases(cache: HotCache, offset: int, max_bytes: int = 1 << 20, limit: int = 1_000, log: int = 1) -> list[int]:
    return [header.base_offset for header, _ in cache.get(log, offset, max_bytes, limit)]


def test_the_bound_is_in_bytes_and_the_oldest_goes_first() -> None:
    cache = HotCache(1_000)
    for base in range(8):
        put(cache, base)
        assert cache.used_bytes <= 1_000
    assert cache.used_bytes == 1_000
    assert bases(cache, 2) == []
    assert bases(cache, 3) == [3, 4, 5, 6, 7]


def test_one_large_batch_pushes_out_as_many_small_ones_as_it_needs() -> None:
    cache = HotCache(1_000)
    for base in range(5):
        put(cache, base)
    put(cache, 5, body=b"y" * 600)
    assert cache.used_bytes <= 1_000
    assert bases(cache, 4) == [4, 5]
    assert bases(cache, 3) == []


def test_a_batch_larger_than_the_cache_is_not_kept_and_pushes_nothing_out() -> None:
    cache = HotCache(300)
    put(cache, 0)
    put(cache, 1, body=b"y" * 1_000)
    assert bases(cache, 0) == [0]
    assert HotCache(0).get(1, 0, 100, 100) == []


def test_control_batches_are_not_kept() -> None:
    cache = HotCache()
    batch = control_batch(Flag.SEAL)
    cache.put(1, parse_header(batch), batch)
    assert cache.used_bytes == 0


def test_logs_share_the_bytes_and_not_the_offsets() -> None:
    cache = HotCache(600)
    put(cache, 0, log=1)
    put(cache, 0, log=2)
    put(cache, 1, log=2)
    assert bases(cache, 0, log=1) == [0]
    assert bases(cache, 0, log=2) == [0, 1]
    put(cache, 2, log=2)
    assert bases(cache, 0, log=1) == []


@pytest.mark.parametrize(
    ("offset", "max_bytes", "limit", "expected"),
    [
        (0, 1 << 20, 100, [0, 10, 20]),
        (10, 1 << 20, 100, [10, 20]),
        (5, 1 << 20, 100, []),
        (0, 0, 100, [0]),
        (0, 399, 100, [0]),
        (0, 400, 100, [0, 10]),
        (0, 1 << 20, 20, [0, 10]),
        (0, 1 << 20, 19, [0]),
        (0, 1 << 20, 9, []),
        (30, 1 << 20, 100, []),
    ],
)
def test_a_read_gives_at_least_one_batch_and_stops_at_bytes_limit_and_gap(
    offset: int, max_bytes: int, limit: int, expected: list[int]
) -> None:
    cache = HotCache()
    for base in (0, 10, 20, 40):
        put(cache, base, count=10)
    assert bases(cache, offset, max_bytes, limit) == expected


def test_the_bound_is_in_batches_too() -> None:
    cache = HotCache()
    for base in range(MOST_BATCHES + 10):
        put(cache, base)
    assert cache.used_bytes == 200 * MOST_BATCHES
    assert bases(cache, 9, max_bytes=1) == []
    assert bases(cache, 10, max_bytes=1) == [10]


def test_a_batch_that_is_there_is_not_counted_twice() -> None:
    cache = HotCache(1_000)
    for _ in range(3):
        put(cache, 0)
    assert cache.used_bytes == 200
    for base in range(1, 8):
        put(cache, base)
    assert bases(cache, 3) == [3, 4, 5, 6, 7]


def test_pushing_a_batch_out_takes_no_longer_than_putting_one_in() -> None:
    cache = HotCache()
    header, data = make_header(1, b"x" * 104, base_offset=0), stamped_batch(0, 1, b"x" * 104)

    def seconds(first: int) -> float:
        began = time.process_time()
        for log in range(first, first + MOST_BATCHES):
            cache.put(log, header, data)
        return time.process_time() - began

    filling = seconds(0)
    assert seconds(MOST_BATCHES) < 10 * filling, "the oldest is searched behind all that have gone before"
