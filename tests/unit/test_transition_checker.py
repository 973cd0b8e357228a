"""What the checker of the simulation demands of a child that inherits producers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from braid.broker.segments.owned_segment import OwnedSegment
from braid.model.ids import Offset, SegmentId
from braid.model.layout import Layout
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.model.topic import Topic
from braid.model.transition import plan_split
from braid.storage.log.producers import ProducerTable, inherited
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.transition_checker import TransitionChecker
from tests.kits.storage import make_header

TOPIC = TopicName.parse("public/default/orders")
WHOLE = Topic(id=1, layout=Layout.initial(1))
SPLITTING = WHOLE.beginning(plan_split(WHOLE.layout, 0), transition_id=7, created_at=0).sealing()
PARENT, CHILD = SegmentId(0), SegmentId(1)
SERVING = Ownership.first("a").serving()
INHERITING = SERVING.inheriting(7)


class Log:
    def __init__(self, producers: ProducerTable) -> None:
        self._producers = producers

    def inherit(self, producers: ProducerTable) -> None:
        self._producers = producers.copy()


class Storage:
    """It writes the record, and hears of that when `answered` is set."""

    def __init__(self, producers: ProducerTable) -> None:
        self.log = Log(producers)
        self.answered = asyncio.Event()

    async def inherit(self, producers: ProducerTable, *_change: Sequence[Any]) -> None:
        await self.answered.wait()
        self.log.inherit(producers)


def producers_of(*ids: int) -> ProducerTable:
    table = ProducerTable()
    for each in ids:
        table.apply(make_header(5, producer=each, sequence=0), Offset(0))
    return table


def opened(segment: SegmentId, producers: ProducerTable, *, has_inherited: bool = False) -> OwnedSegment:
    name = SegmentName.of(TOPIC, SPLITTING.segments[segment])
    return cast("OwnedSegment", SimpleNamespace(name=name, storage=Storage(producers), inherited=has_inherited))


class Split:
    """A split whose parent has ended, with producers 7 and 8."""

    def __init__(self) -> None:
        self.failures: list[BaseException] = []
        self.checker = TransitionChecker(
            TOPIC.path, lambda: SPLITTING.segments, lambda: SPLITTING.segments, self.failures.append
        )
        assert self.checker.note_end(opened(PARENT, producers_of(7, 8)))


@pytest.mark.parametrize("record", [SERVING, INHERITING])
@pytest.mark.parametrize(("known", "failures"), [((7, 8), 0), ((7,), 1)])
async def test_child_that_is_met_while_it_inherits(record: Ownership, known: tuple[int, ...], failures: int) -> None:
    """The record may say it already: the log knows the producers when the storage hears of that, and must then."""
    split, child = Split(), opened(CHILD, ProducerTable())
    inheriting = asyncio.create_task(child.storage.inherit(inherited([producers_of(*known)]), (), ()))
    await asyncio.sleep(0)
    split.checker.meet(child, record)
    assert split.failures == []
    cast("Any", child.storage).answered.set()
    await inheriting
    assert len(split.failures) == failures
    assert all("does not know producers of 0: [8]" in str(each) for each in split.failures)


async def test_child_that_is_opened_after_it_has_inherited() -> None:
    split = Split()
    split.checker.meet(opened(CHILD, inherited([producers_of(7, 8)]), has_inherited=True), INHERITING)
    with pytest.raises(PromiseBroken, match=r"I10 .* does not know producers of 0: \[7, 8\]"):
        split.checker.meet(opened(CHILD, ProducerTable(), has_inherited=True), INHERITING)


async def test_child_that_inherits_after_it_is_met() -> None:
    """Also if the log never hears of it."""
    split, child = Split(), opened(CHILD, ProducerTable())
    storage = cast("Any", child.storage)
    storage.answered.set()
    storage.log.inherit = lambda _producers: None
    split.checker.meet(child, SERVING)
    await child.storage.inherit(inherited([producers_of(7, 8)]), (), ())
    assert split.failures
