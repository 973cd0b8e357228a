from __future__ import annotations

from braid.metadata.history import PAGE_REVISIONS, History, HistoryLimits, below
from braid.metadata.store import Changes, Event
from braid.model.ids import Revision


def change(revision: int, *keys: str, value: bytes = b"v") -> Changes:
    return Changes(Revision(revision), tuple(Event(key, value, Revision(revision)) for key in keys))


def filled(limits: HistoryLimits, count: int, value: bytes = b"v") -> History:
    history = History(limits, Revision(0))
    for revision in range(1, count + 1):
        history.append(change(revision, "/even" if revision % 2 == 0 else "/odd", value=value))
    return history


def test_a_watch_sees_only_its_part_of_a_transaction() -> None:
    changes = change(1, "/a/x", "/b/x", "/a/y")
    assert below("/a/", changes) == change(1, "/a/x", "/a/y")
    assert below("/c/", changes) is None
    assert below("", changes) is changes


def test_reading_goes_page_by_page_and_skips_what_does_not_match() -> None:
    history = filled(HistoryLimits(), 3 * PAGE_REVISIONS + 10)
    position, seen = Revision(5), []
    while position < history.revision:
        page = history.read("/even", position)
        assert len(page.changes) <= PAGE_REVISIONS
        assert page.position > position
        seen += [changes.revision for changes in page.changes]
        position = page.position
    assert seen == [revision for revision in range(6, history.revision + 1) if revision % 2 == 0]


def test_reading_at_the_head_and_beyond_it_finds_nothing() -> None:
    history = filled(HistoryLimits(), 10)
    assert history.read("/", Revision(10)) == ([], 10)
    assert history.read("/", Revision(15)) == ([], 15)


def test_the_number_of_revisions_is_bounded() -> None:
    history = filled(HistoryLimits(revisions=100), 1_000)
    assert history.floor == 900
    assert [changes.revision for changes in history.read("", Revision(900)).changes] == [*range(901, 1_001)]


def test_the_number_of_bytes_is_bounded() -> None:
    history = filled(HistoryLimits(max_bytes=10_000), 100, value=b"x" * 995)
    assert 88 <= history.floor <= 91
    assert history.read("", history.floor).position == 100


def test_the_newest_change_stays_whatever_its_size() -> None:
    history = filled(HistoryLimits(max_bytes=10), 3, value=b"x" * 100)
    assert history.floor == 2
    assert len(history.read("", Revision(2)).changes) == 1


def test_what_is_forgotten_is_below_the_floor_and_the_rest_goes_on() -> None:
    history = filled(HistoryLimits(), 10)
    history.forget()
    assert (history.floor, history.revision) == (10, 10)
    history.append(change(11, "/a"))
    assert history.read("", Revision(10)).changes == [change(11, "/a")]
