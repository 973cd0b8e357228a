"""When the record at an offset was written, from memory alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from braid.storage.chunk import Index, IndexEntry
from braid.storage.log.wal import WalFile
from braid.storage.record_times import Stretch, written_at


def _file(base: int, end: int, max_us: int, runs: list[tuple[int, int, int]] | None = None) -> WalFile:
    index = None
    if runs is not None:
        index = Index()
        index.runs = [IndexEntry(first, 0, low, high, 0, 0, 1) for first, low, high in runs]  # type: ignore[arg-type]
    return WalFile("f", base, end, 0, 0, 1, 1, max_us, index=index)  # type: ignore[arg-type]


def _sources(files: list[WalFile], chunks: list[Stretch], cached: dict[int, int]) -> Any:
    def find(offset: int) -> Any:
        return next(
            (
                SimpleNamespace(
                    base_offset=each.first,
                    next_offset=each.next,
                    min_timestamp=each.began_us,
                    max_timestamp=each.ended_us,
                )
                for each in chunks
                if each.first <= offset < each.next
            ),
            None,
        )

    def peek(log: int, offset: int) -> Any:
        assert log == 7
        return SimpleNamespace(min_timestamp=cached[offset]) if offset in cached else None

    return SimpleNamespace(
        log=SimpleNamespace(number=7, files=files),
        catalog=SimpleNamespace(find=find),
        cache=SimpleNamespace(peek=peek),
    )


@pytest.mark.parametrize(
    ("stretch", "offset", "expected"),
    [
        (Stretch(0, 11, 100, 200), 0, 100),
        (Stretch(0, 11, 100, 200), 5, 150),
        (Stretch(0, 11, 100, 200), 10, 200),
        (Stretch(0, 11, 100, 200), 99, 200),
        (Stretch(5, 6, 100, 200), 5, 100),
        (Stretch(0, 11, 200, 100), 10, 200),  # A producer's clock went back.
    ],
)
def test_records_of_a_stretch_are_spread_evenly(stretch: Stretch, offset: int, expected: int) -> None:
    assert stretch.time_at(offset) == expected


CHUNKS = [Stretch(0, 10, 1_000, 1_900)]
FILES = [_file(10, 21, 3_000), _file(21, 32, 5_000), _file(32, 43, 9_000, [(32, 6_000, 7_000), (37, 7_500, 9_000)])]


@pytest.mark.parametrize(
    ("offset", "expected"),
    [
        (0, 1_000),  # a chunk
        (9, 1_900),
        (10, 1_900),  # a closed file after a chunk: its first record came after the chunk's last one
        (20, 3_000),
        (21, 3_000),  # a closed file after another
        (26, 4_000),
        (32, 6_000),  # the open file's index
        (36, 7_000),
        (42, 9_000),
        (43, None),
    ],
)
def test_the_nearest_source_tells_the_time(offset: int, expected: int | None) -> None:
    assert written_at(_sources(FILES, CHUNKS, {}), offset) == expected


def test_the_hot_cache_is_exact() -> None:
    assert written_at(_sources(FILES, CHUNKS, {36: 6_001}), 36) == 6_001


def test_a_file_with_nothing_before_it_has_the_time_of_its_last_record() -> None:
    assert written_at(_sources([_file(0, 5, 4_000)], [], {}), 2) == 4_000
