"""What the checker of the simulation demands of cursors and drained marks."""

from __future__ import annotations

import pytest

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Operation, Put
from braid.model.ids import NO_REQUEST, Epoch, Offset, RequestId
from braid.model.layout import Layout
from braid.model.ownership import Ownership
from braid.model.stored_record import encode
from braid.model.subscription import Cursor, Drained
from braid.model.topic import Topic
from braid.model.transition import plan_split
from braid.ports.clock import SystemClock
from braid.testing.checkers.cursor_checker import CursorChecker
from braid.testing.checkers.history import PromiseBroken

TOPIC = "public/default/orders"
PARENT, CHILD = "0000-ffff-0", "0000-7fff-1"
WHOLE = Topic(id=1, layout=Layout.initial(1))
HALVES = WHOLE.beginning(plan_split(WHOLE.layout, 0), transition_id=7, created_at=0).sealing().committed()
ENDED = Ownership.first("a").serving().ended(Offset(5))
MARK = paths.drained(TOPIC, PARENT, "billing")


def cursor(offset: int, segment: str = PARENT, placed_by: int = NO_REQUEST) -> Put:
    stored = Cursor(offset=Offset(offset), epoch=Epoch(1), placed_by=RequestId(placed_by))
    return Put(paths.cursor(TOPIC, segment, "billing"), encode(stored))


def mark(end: int) -> Put:
    return Put(MARK, encode(Drained(end=Offset(end))))


class Metadata:
    """A topic whose only segment was split."""

    def __init__(self) -> None:
        self.store = MemoryStore(SystemClock())
        self.checker = CursorChecker(self.store, lambda _path: HALVES.layout.segments)
        self.apply(Put(paths.ownership(TOPIC, PARENT), ENDED.to_json()))

    def apply(self, *operations: Operation) -> None:
        self.checker.on_transaction(operations)
        self.store._server.txn([], list(operations))


def test_a_mark_comes_with_a_cursor_at_the_end_and_goes_with_a_seek_back() -> None:
    metadata = Metadata()
    metadata.apply(cursor(3))
    metadata.apply(cursor(5), mark(5))
    metadata.apply(cursor(2, placed_by=1), Delete(MARK))
    metadata.apply(cursor(5), mark(5))
    metadata.apply(Delete(paths.cursor(TOPIC, PARENT, "billing")), Delete(MARK))


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param([cursor(4), mark(5)], id="before the end"),
        pytest.param([cursor(4), mark(4)], id="another end"),
        pytest.param([mark(5)], id="no cursor"),
    ],
)
def test_a_mark_that_does_not_fit_its_cursor_is_reported(wrong: list[Operation]) -> None:
    with pytest.raises(PromiseBroken, match="I4"):
        Metadata().apply(*wrong)


def test_a_seek_back_that_leaves_the_mark_is_reported() -> None:
    metadata = Metadata()
    metadata.apply(cursor(5), mark(5))
    with pytest.raises(PromiseBroken, match="billing stands at 2 of 0000-ffff-0"):
        metadata.apply(cursor(2, placed_by=1))


def test_records_that_are_deleted_or_lost_excuse_a_mark_before_the_end() -> None:
    metadata = Metadata()
    metadata.checker.may_lack_records = lambda path: path == TOPIC
    metadata.apply(cursor(2), mark(5))


def test_a_seek_sets_ancestors_back_first() -> None:
    metadata = Metadata()
    metadata.apply(cursor(0, placed_by=1))
    metadata.apply(cursor(0, CHILD, placed_by=1))
    metadata.apply(cursor(3, CHILD, placed_by=2))
    with pytest.raises(PromiseBroken, match="was set on segment 1 before its ancestor 0"):
        metadata.apply(cursor(3, placed_by=2))


def test_an_ack_after_a_seek_is_no_seek() -> None:
    metadata = Metadata()
    metadata.apply(cursor(0, placed_by=1))
    metadata.apply(cursor(0, CHILD, placed_by=1))
    metadata.apply(cursor(1, placed_by=1))
