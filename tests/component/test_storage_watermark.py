"""Waiting for an offset to be passed."""

from __future__ import annotations

import pytest

from braid.model.errors import BrokenInvariant, Fenced, LogClosed
from braid.storage.log.watermark import Watermark


async def test_each_waiter_wakes_when_its_own_offset_is_passed_and_not_before() -> None:
    watermark = Watermark(10)
    waiting = {offset: watermark.reached(offset) for offset in (13, 11, 12, 12, 20)}
    twin = watermark.reached(12)
    assert watermark.reached(10).done()
    watermark.advance(11)
    assert [offset for offset, future in waiting.items() if future.done()] == [11]
    watermark.advance(13)
    assert [offset for offset, future in waiting.items() if future.done()] == [13, 11, 12]
    assert twin.done()
    assert watermark.value == 13


def test_a_watermark_never_falls() -> None:
    watermark = Watermark(5)
    watermark.advance(5)
    with pytest.raises(BrokenInvariant, match="from 5 to 4"):
        watermark.advance(4)
    assert watermark.value == 5


async def test_a_failed_watermark_never_rises_again_and_keeps_its_first_error() -> None:
    watermark = Watermark(5)
    early = watermark.reached(6)
    watermark.fail(Fenced("the lease has run out"))
    watermark.fail(LogClosed("closed later"))
    watermark.advance(100)
    assert watermark.value == 5
    late = watermark.reached(6)
    for future in (early, late):
        with pytest.raises(Fenced, match="run out"):
            await future
    assert watermark.reached(5).done(), "what was reached before stays reached"


async def test_every_waiter_gets_an_error_object_of_its_own() -> None:
    watermark = Watermark(0)
    futures = [watermark.reached(1) for _ in range(3)]
    watermark.fail(Fenced("no"))
    errors = [future.exception() for future in futures]
    assert len({id(error) for error in errors}) == 3


async def test_a_waiter_that_gave_up_does_not_disturb_the_others() -> None:
    watermark = Watermark(0)
    impatient, patient, failed = watermark.reached(1), watermark.reached(1), watermark.reached(2)
    impatient.cancel()
    failed.cancel()
    watermark.advance(1)
    assert patient.done()
    watermark.fail(Fenced("no"))


def test_a_follower_hears_of_every_rise_and_of_the_failure_once() -> None:
    watermark = Watermark(5)
    heard: list[tuple[int, bool]] = []
    watermark.follow(lambda: heard.append((watermark.value, watermark.error is not None)))
    watermark.advance(6)
    watermark.advance(9)
    watermark.fail(LogClosed("over"))
    watermark.fail(LogClosed("again"))
    assert heard == [(6, False), (9, False), (9, True)]


def test_a_follower_hears_of_the_last_rise_before_the_end() -> None:
    watermark = Watermark(5)
    heard: list[tuple[int, bool]] = []
    watermark.follow(lambda: heard.append((watermark.value, watermark.error is not None)))
    watermark.end_at(7, LogClosed("the end"))
    watermark.advance(7)
    assert heard[-2:] == [(7, False), (7, True)]


def test_those_who_follow_first_hear_of_a_rise_before_the_others() -> None:
    watermark = Watermark(5)
    heard: list[str] = []
    for name, first in (("producers", False), ("consumers", True), ("others", False)):
        watermark.follow(lambda name=name: heard.append(name), first=first)  # type: ignore[misc]
    watermark.advance(6)
    assert heard == ["consumers", "producers", "others"]
