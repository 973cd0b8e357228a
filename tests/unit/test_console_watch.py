"""What the console keeps of what it saw: histories, rates, paces, and what it reads of metrics."""

from __future__ import annotations

import pytest

from braid.console.drawing.strands import Change, Strand
from braid.console.watch.history import (
    EARLIER_STEP_S,
    MAX_SAMPLES,
    MAX_TENURES,
    SETTLE_S,
    Samples,
    SegmentSeen,
    TopicHistory,
)
from braid.console.watch.metrics_text import read_metrics
from braid.console.watch.pace import MAX_S, Pace
from braid.console.watch.rates import Rates


def seen(id_: int, owner: str = "a", *, active: bool = True, epoch: int = 1, **more: tuple[int, ...]) -> SegmentSeen:
    return SegmentSeen(id=id_, first_hash=0, last_hash=0xFFFF, active=active, owner=owner, epoch=epoch, **more)


def strands(history: TopicHistory) -> dict[int, Strand]:
    return {each.segment: each for each in history.strands()}


def tenures(history: TopicHistory, segment: int = 0) -> list[tuple[str, float, Change]]:
    return [(each.owner, each.since, each.how) for each in strands(history)[segment].tenures]


# Histories.


def test_a_split_that_is_seen_has_its_time() -> None:
    history = TopicHistory(1, 100.0)
    history.look([seen(0)], 100.0)
    history.look([seen(0, active=False, children=(1, 2)), seen(1, "b", parents=(0,)), seen(2, parents=(0,))], 130.0)
    found = strands(history)
    assert (found[0].sealed, found[1].born, found[2].born) == (130.0, 130.0, 130.0)
    assert (found[0].timed, found[1].timed) == (False, True)
    assert found[1].parents == (0,)


def test_layouts_before_the_first_look_keep_their_order() -> None:
    history = TopicHistory(1, 1000.0)
    history.look(
        [
            seen(0, active=False, children=(1, 2)),
            seen(1, active=False, parents=(0,), children=(3,)),
            seen(2, parents=(0,)),
            seen(3, parents=(1,)),
        ],
        1000.0,
    )
    found = strands(history)
    assert found[0].born < found[1].born < found[3].born < 1000.0
    assert found[0].sealed == found[1].born == found[2].born
    assert found[1].sealed == found[3].born == 1000.0 - EARLIER_STEP_S
    assert found[2].sealed is None
    assert not any(each.timed for each in found.values())


def test_a_move_is_told_from_a_fail_over_by_whether_the_owner_is_down() -> None:
    history = TopicHistory(1, 0.0)
    history.look([seen(0)], 0.0)
    history.look([seen(0, "b", epoch=2)], 10.0)
    history.look([seen(0, "")], 20.0, down=["b"])
    history.look([seen(0, "c", epoch=3)], 30.0, down=["b"])
    history.look([seen(0, "c", epoch=4)], 40.0)
    assert [each[1:] for each in tenures(history)][1:] == [
        (10.0, Change.MOVED),
        (20.0, Change.UNSERVED),
        (30.0, Change.FAILED_OVER),
        (40.0, Change.REOPENED),
    ]
    assert [each[0] for each in tenures(history)] == ["a", "b", "", "c", "c"]


def test_a_segment_that_retention_takes_out_stays_in_the_picture() -> None:
    history = TopicHistory(1, 0.0)
    history.look([seen(0)], 0.0)
    history.look([seen(0, active=False, children=(1,)), seen(1, parents=(0,))], 10.0)
    history.look([seen(1)], 20.0)
    found = strands(history)
    assert (found[0].sealed, found[1].parents) == (10.0, (0,)), "with its children"


def test_owners_that_come_and_go_are_bounded() -> None:
    history = TopicHistory(1, 0.0)
    for number in range(4 * MAX_TENURES):
        history.look([seen(0, f"broker-{number % 2}", epoch=number)], float(number))
    assert len(tenures(history)) <= MAX_TENURES + 1
    assert tenures(history)[-1][0] == "broker-1"


def test_changes_are_counted_so_that_a_picture_follows() -> None:
    history = TopicHistory(1, 0.0)
    history.look([seen(0)], 0.0)
    before = history.changes
    history.look([seen(0)], 1.0)
    assert history.changes == before
    history.look([seen(0, "b", epoch=2)], 2.0)
    assert history.changes > before


# Numbers.


def test_samples_are_bounded_and_recent_ones_are_exact() -> None:
    samples = Samples()
    for number in range(10 * MAX_SAMPLES):
        samples.add(float(number), float(number))
    assert len(samples.times) <= MAX_SAMPLES + 1
    assert list(samples.times) == sorted(samples.times)
    recent = MAX_SAMPLES // 4
    assert list(samples.values)[-recent:] == [float(each) for each in range(10 * MAX_SAMPLES)][-recent:]
    assert samples.times[0] < MAX_SAMPLES, "the beginning is still there, thinly"


def test_a_rate_needs_two_looks_and_survives_a_counter_that_begins_again() -> None:
    rates = Rates()
    assert rates.seen(("a",), 100.0, 0.0) is None
    assert rates.seen(("a",), 200.0, 10.0) == 10.0
    assert rates.seen(("a",), 5.0, 20.0) == 10.0, "it stays what it was"
    assert rates.seen(("a",), 25.0, 30.0) == 6.0, "half of the last, half of the new"
    rates.forget_before(31.0)
    assert rates.seen(("a",), 50.0, 40.0) is None


@pytest.mark.parametrize(
    ("took_s", "watched", "every_s"), [(0.001, True, 1.0), (0.001, False, 5.0), (0.02, True, 4.0), (9.0, True, MAX_S)]
)
def test_a_question_is_asked_less_often_the_more_it_costs(took_s: float, watched: bool, every_s: float) -> None:
    pace = Pace(1.0, 5.0)
    for _ in range(3):
        pace.asked(100.0, took_s)
    assert pace.interval_s(watched=watched) == pytest.approx(every_s)
    assert not pace.due(100.0 + every_s - 0.1, watched=watched)
    assert pace.due(100.0 + every_s, watched=watched)
    pace.hurry()
    assert pace.due(100.0, watched=watched)


def test_slow_first_answers_do_not_slow_the_pace() -> None:
    pace = Pace(1.0, 5.0)
    pace.asked(0.0, 3.0)
    assert pace.interval_s(watched=True) == 1.0
    for took_s in (0.001, 3.0, 0.5):
        pace.asked(0.0, took_s)
    assert pace.interval_s(watched=True) == 1.0


def test_metrics_are_read_by_the_names_of_their_labels() -> None:
    text = (
        "# HELP braid_x A help with {braces} 1\n# TYPE braid_x gauge\n"
        'braid_x{topic="public/default/orders",segment="3"} 17.0\n'
        'braid_x{segment="4",topic="a\\"b"} 1e+06\n'
        "braid_up 1.0\nbraid_other 5.0\nbraid_bad{} nonsense\n"
    )
    found = read_metrics(text, {"braid_x", "braid_up", "braid_none"})
    assert found == {
        "braid_x": {("3", "public/default/orders"): 17.0, ("4", 'a\\"b'): 1e6},
        "braid_up": {(): 1.0},
        "braid_none": {},
    }


# Rates around a change of the layout.


def split_at_20() -> TopicHistory:
    """A segment with 100 records a second that is seen to be split at 20 s; it had been split some time before."""
    history = TopicHistory(1, 0.0)
    for now in (0.0, 10.0, 18.0):
        history.look([ring(0, 0xFFFF)], now)
        history.measure(0, now, 100.0)
    history.measure(0, 19.0, 40.0)  # An interval in which it ended.
    children = (ring(0, 0x3FFF, 1, parents=(0,)), ring(0x4000, 0xFFFF, 2, parents=(0,)))
    history.look([ring(0, 0xFFFF, active=False, children=(1, 2)), *children], 20.0)
    return history


def ring(first: int, last: int, id_: int = 0, *, active: bool = True, **more: tuple[int, ...]) -> SegmentSeen:
    return SegmentSeen(id=id_, first_hash=first, last_hash=last, active=active, owner="a", epoch=1, **more)


def test_a_parent_keeps_the_rate_that_it_had_before_its_end() -> None:
    history = split_at_20()
    history.measure(0, 22.0, 0.0)
    assert (list(strands(history)[0].times), list(strands(history)[0].rates)) == ([0.0, 10.0, 18.0], [100.0] * 3)


def test_a_parent_that_was_measured_only_while_it_ended_keeps_that_rate() -> None:
    history = TopicHistory(1, 0.0)
    history.look([ring(0, 0xFFFF)], 0.0)
    history.measure(0, 1.0, 80.0)
    history.measure(0, 2.0, 20.0)
    history.look([ring(0, 0xFFFF, active=False, children=(1,)), ring(0, 0xFFFF, 1, parents=(0,))], 3.0)
    assert list(strands(history)[0].rates) == [80.0]
    assert history.rate(1) == 80.0


def test_children_have_the_rate_that_they_take_over_until_they_are_measured() -> None:
    history = split_at_20()
    assert (history.rate(1), history.rate(2)) == (25.0, 75.0)
    history.measure(1, 25.0, 30.0)
    assert (history.rate(1), history.rate(2)) == (30.0, 75.0)


def test_a_new_segment_is_measured_when_its_writers_have_come() -> None:
    history = split_at_20()
    assert not history.is_settled(1, 20.5)
    assert history.is_settled(1, 20.0 + SETTLE_S)
    assert not history.is_settled(9, 100.0), "nobody knows it"
    fresh = TopicHistory(1, 100.0)
    fresh.look([seen(0)], 100.0)
    assert fresh.is_settled(0, 100.0), "it was there before"


def test_a_segment_without_parents_that_were_measured_has_no_rate_yet() -> None:
    history = TopicHistory(1, 0.0)
    history.look([ring(0, 0xFFFF)], 0.0)
    assert history.rate(0) is None
    history.look([ring(0, 0xFFFF, active=False, children=(1,)), ring(0, 0xFFFF, 1, parents=(0,))], 5.0)
    assert history.rate(1) is None
