"""Which files and chunks a policy expires."""

from __future__ import annotations

import pytest

from braid.model.ids import Epoch, Offset
from braid.storage.log.wal import Damage, WalFile, wal_name
from braid.storage.retention import Aged, RetentionPolicy, expired, reclaimable, removable

S = 1_000_000


FOUR = [Aged(Offset(10), 100, 10 * S), Aged(Offset(20), 100, 20 * S), Aged(Offset(30), 100, 15 * S),
        Aged(Offset(40), 100, 40 * S)]  # fmt: skip
"""Four pieces of ten records and 100 bytes; the third one's clock was behind."""


@pytest.mark.parametrize(
    ("policy", "needed_from", "total_bytes", "count"),
    [
        (RetentionPolicy(), None, 400, 0),
        (RetentionPolicy(max_age_s=31), None, 400, 1),
        (RetentionPolicy(max_age_s=40), None, 400, 0),
        (RetentionPolicy(max_age_s=21.9), None, 400, 3),
        (RetentionPolicy(max_age_s=22), None, 400, 1),
        (RetentionPolicy(max_age_s=0), None, 400, 4),
        (RetentionPolicy(max_bytes=400), None, 400, 0),
        (RetentionPolicy(max_bytes=399), None, 400, 1),
        (RetentionPolicy(max_bytes=399), None, 800, 4),
        (RetentionPolicy(max_bytes=250), None, 400, 2),
        (RetentionPolicy(max_bytes=0), None, 400, 4),
        (RetentionPolicy(max_bytes=0), Offset(0), 400, 0),
        (RetentionPolicy(max_bytes=0), Offset(19), 400, 1),
        (RetentionPolicy(max_bytes=0), Offset(20), 400, 2),
        (RetentionPolicy(max_age_s=0), Offset(20), 400, 2),
        (RetentionPolicy(max_bytes=0), Offset(99), 400, 4),
        (RetentionPolicy(max_bytes=0, delete_unconsumed=True), Offset(0), 400, 4),
        (RetentionPolicy(max_age_s=31, max_bytes=250), None, 400, 2),
        (RetentionPolicy(max_age_s=21.9, max_bytes=350), None, 400, 3),
    ],
)
def test_how_many_of_the_oldest_pieces_have_outlived_the_policy(
    policy: RetentionPolicy, needed_from: Offset | None, total_bytes: int, count: int
) -> None:
    now = 42 * S
    assert expired(FOUR, policy, total_bytes=total_bytes, now_us=now, needed_from=needed_from) == count


def wal_file(base: int, *, closed: bool = True, damaged: bool = False) -> WalFile:
    """A file of ten records and 100 bytes of batches."""
    file = WalFile(wal_name(base), Offset(base), Offset(base + 10), 100, 150, Epoch(1), Epoch(1), 0, closed=closed)
    if damaged:
        file.damage = (Damage(file.name, 0, Offset(base), Offset(base + 1), "flipped"),)
    return file


@pytest.mark.parametrize(
    ("files", "bases"),
    [
        ([], []),
        ([wal_file(0, closed=False)], []),
        ([wal_file(0)], []),
        ([wal_file(0), wal_file(10)], [0]),
        ([wal_file(0), wal_file(10, closed=False)], []),
        ([wal_file(0), wal_file(10), wal_file(20, closed=False)], [0]),
        ([wal_file(0), wal_file(10), wal_file(20), wal_file(30, closed=False)], [0, 10]),
        ([wal_file(0, damaged=True), wal_file(10), wal_file(20)], []),
        ([wal_file(0), wal_file(10, damaged=True), wal_file(20)], [0]),
        ([wal_file(0), wal_file(10, closed=False, damaged=True), wal_file(20), wal_file(30)], [0]),
        ([wal_file(0), wal_file(10), wal_file(20, closed=False, damaged=True)], [0]),
    ],
)
def test_the_newest_closed_file_stays_and_so_does_everything_from_damage_on(
    files: list[WalFile], bases: list[int]
) -> None:
    assert [file.base_offset for file in removable(files)] == bases


@pytest.mark.parametrize(
    ("covered", "keep_bytes", "bases"),
    [(0, 0, []), (9, 0, []), (10, 0, [0]), (25, 0, [0, 10]), (40, 0, [0, 10, 20]), (40, 250, [0, 10]),
     (40, 300, [0]), (40, 299, [0, 10]), (40, 400, []), (10, 1_000, [])],
)  # fmt: skip
def test_local_files_go_oldest_first_when_chunks_cover_them(covered: int, keep_bytes: int, bases: list[int]) -> None:
    files = [wal_file(0), wal_file(10), wal_file(20), wal_file(30)]
    found = reclaimable(files, covered=Offset(covered), keep_bytes=keep_bytes)
    assert [file.base_offset for file in found] == bases


@pytest.mark.parametrize(("earliest", "bases"), [(0, []), (19, [0]), (20, [0, 10]), (40, [0, 10, 20])])
def test_local_files_of_deleted_records_go_however_much_is_to_be_kept(earliest: int, bases: list[int]) -> None:
    files = [wal_file(0), wal_file(10), wal_file(20), wal_file(30)]
    found = reclaimable(files, covered=Offset(40), keep_bytes=1_000, earliest=Offset(earliest))
    assert [file.base_offset for file in found] == bases


@pytest.mark.parametrize(
    ("policy", "keep_newest", "count"),
    [
        (RetentionPolicy(max_bytes=0), True, 1),
        (RetentionPolicy(max_bytes=0), False, 2),
        (RetentionPolicy(max_age_s=1), True, 2),
    ],
)
def test_size_alone_never_takes_the_newest_chunk_whose_footer_knows_the_producers(
    policy: RetentionPolicy, keep_newest: bool, count: int
) -> None:
    pieces = [Aged(Offset(10), 100, 0), Aged(Offset(20), 100, 0)]
    found = expired(pieces, policy, total_bytes=200, now_us=60_000_000, needed_from=None, keep_newest=keep_newest)
    assert found == count
