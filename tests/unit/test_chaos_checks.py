"""What `make chaos` compares at the end must be able to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from braid.model.batch.header import stamp, verify
from braid.model.ids import Epoch, Offset
from braid.testing.batches import opaque_batch
from tests.chaos.copies import Batches, batches_in, compare
from tests.chaos.load import BrokenPromise, LineOrder


def copy_of(folder: Path, *bodies: bytes, first: int = 0, commit_lag: int = 0) -> Batches:
    """The batches of one WAL file: one record each, then zeros."""
    data = b""
    for offset, body in enumerate(bodies, start=first):
        batch = opaque_batch(body)
        stamp(batch, verify(batch), Offset(offset), 1, Epoch(1), incarnation=7, commit_lag=commit_lag)
        data += batch
    folder.mkdir(exist_ok=True)
    (folder / f"{first:020d}.wal").write_bytes(data + bytes(4_096))
    return batches_in(folder.glob("*.wal"))


def test_copies_that_differ_only_in_the_commit_lag_are_equal(tmp_path: Path) -> None:
    one, other = copy_of(tmp_path / "a", b"0", b"1"), copy_of(tmp_path / "b", b"0", b"1", commit_lag=1)
    assert compare("a segment", {"a": one, "b": other}, {}, 2) == 2


def test_another_body_at_the_same_offset_is_noticed(tmp_path: Path) -> None:
    one, other = copy_of(tmp_path / "a", b"0", b"1"), copy_of(tmp_path / "b", b"0", b"x")
    with pytest.raises(BrokenPromise, match="offset 1 on a and b differ"):
        compare("a segment", {"a": one, "b": other}, {}, 2)


def test_chunks_are_compared_with_copies(tmp_path: Path) -> None:
    copy, chunks = copy_of(tmp_path / "a", b"1", first=1), copy_of(tmp_path / "c", b"0", b"x")
    with pytest.raises(BrokenPromise, match="offset 1 on a and chunks differ"):
        compare("a segment", {"a": copy}, {"chunks": chunks}, 2)


def test_a_copy_that_lacks_the_end_is_noticed_unless_chunks_hold_it(tmp_path: Path) -> None:
    one, other = copy_of(tmp_path / "a", b"0", b"1"), copy_of(tmp_path / "b", b"0")
    with pytest.raises(BrokenPromise, match="b holds it up to 1, chunks to 0, not to 2"):
        compare("a segment", {"a": one, "b": other}, {}, 2)
    assert compare("a segment", {"a": one, "b": other}, {"chunks": one}, 2) == 4


def test_a_gap_in_a_copy_is_noticed(tmp_path: Path) -> None:
    copy = copy_of(tmp_path / "a", b"0") | copy_of(tmp_path / "b", b"2", first=2)
    with pytest.raises(BrokenPromise, match="goes from offset 1 to 2"):
        compare("a segment", {"a": copy}, {}, 3)


def test_a_number_that_is_left_out_is_noticed_and_one_that_comes_again_is_counted() -> None:
    order = LineOrder("a reader")
    order.see([b"p0:k:0:", b"p0:k:1:", b"p1:k:0:..", b"p0:k:0:"])
    assert order.again == 1
    with pytest.raises(BrokenPromise, match="has not seen number 2"):
        order.see([b"p0:k:3:"])
