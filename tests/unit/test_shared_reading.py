"""What the simulation demands of the results of a group of checkpoint consumers."""

from __future__ import annotations

import pytest

from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.topic_history import Log, TopicHistory
from braid.testing.scenarios.shared_reading import SharedResults

LOG: Log = {0: [(b"1", b"key"), (b"2", b"key"), None], 1: [(b"4", b"key")]}


def results() -> SharedResults:
    topic = TopicHistory(survives_power_loss=True)
    for number in (1, 2, 4):
        topic.give(7, number, b"key", b"%d" % number)
    return SharedResults(topic)


def test_results_that_come_again_are_no_inversion() -> None:
    shared = results()
    shared.store("one", [(0, 0, b"1"), (0, 1, b"2")])
    shared.store("two", [(0, 1, b"2"), (1, 0, b"4")])
    shared.check_whole(LOG)
    assert shared.stored == 7


def test_a_record_that_comes_after_later_ones_of_its_key_is_reported() -> None:
    shared = results()
    shared.store("one", [(0, 0, b"1"), (1, 0, b"4")])
    with pytest.raises(PromiseBroken, match=r"I4 .* two stores b'2' at offset 1 of segment 0 after number 4"):
        shared.store("two", [(0, 1, b"2")])


def test_a_record_that_the_group_has_left_out_is_reported_in_the_end() -> None:
    shared = results()
    shared.store("one", [(0, 0, b"1"), (1, 0, b"4")])
    with pytest.raises(PromiseBroken, match="a reader of the whole log stores b'2'"):
        shared.check_whole(LOG)
