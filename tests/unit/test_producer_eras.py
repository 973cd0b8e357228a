"""Derived producers in the producer table: eras begin, are repeated, and end (I10, I11)."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.model.batch.identity import DERIVED, ERA_RECORDS, MAX_ERA, ProducerIdentity, derived_id
from braid.model.errors import InvalidArgument, OutOfSequence
from braid.model.ids import Offset
from braid.storage.log import producers
from braid.storage.log.producers import Duplicate, ProducerTable
from tests.kits.producer_eras import WRITER, at
from tests.kits.storage import make_header


class Log:
    """Stores what the table lets in."""

    def __init__(self, *batches: tuple[int, int, int]) -> None:
        """(era, number, count) of each batch that is stored."""
        self.table = ProducerTable()
        self.stored: list[tuple[int, int]] = []
        """(sequence, count), in order."""
        self.end = 0
        for era, number, count in batches:
            assert self.send(at(era, number), count) is None

    def send(self, sequence: int, count: int, producer: int = WRITER) -> Duplicate | None:
        header = make_header(count, producer=producer, sequence=sequence)
        duplicate = self.table.check(header)
        if duplicate is None:
            self.table.apply(header, Offset(self.end))
            self.stored.append((sequence, count))
            self.end += count
        return duplicate


STORED = [(4, 0, 10), (4, 10, 10), (6, 0, 5), (6, 5, 5), (6, 10, 5)]
"""Era 4 at offsets 0–19, era 6 at 20–34; era 5 had nothing for this log."""


@pytest.mark.parametrize(
    ("era", "number", "count", "expected"),
    [
        (6, 15, 3, None),
        (7, 0, 3, None),
        (900, 0, 3, None),
        (MAX_ERA, 0, 3, None),
        (6, 10, 5, Duplicate(Offset(30), Offset(35))),
        (6, 0, 5, Duplicate(Offset(20), Offset(25))),
        (4, 0, 10, Duplicate(Offset(0), Offset(10))),
        (3, 0, 10, Duplicate(None, Offset(0))),
        (3, 99, 1, Duplicate(None, Offset(0))),
        (0, 0, 1, Duplicate(None, Offset(0))),
    ],
    ids=[
        "the era goes on",
        "the next era",
        "a much later era",
        "the last era of all",
        "the last batch again",
        "the era from its beginning again",
        "an earlier era again, still remembered",
        "an era before all that is remembered",
        "a later part of such an era",
        "the first era of all",
    ],
)
def test_an_era_goes_on_or_begins_or_is_repeated(era: int, number: int, count: int, expected: Duplicate | None) -> None:
    assert Log(*STORED).send(at(era, number), count) == expected


@pytest.mark.parametrize(
    ("era", "number", "count"),
    [(6, 16, 1), (7, 1, 1), (900, 5, 1), (6, 0, 4), (6, 0, 6), (6, 12, 6), (4, 20, 5), (5, 0, 5), (4, 0, 5)],
    ids=[
        "a gap in the era",
        "the next era, but not from its beginning",
        "a later era from its middle",
        "the era from its beginning, cut shorter",
        "the era from its beginning, cut longer",
        "across the end of what is stored",
        "more of an era that is over",
        "an era between two that are remembered",
        "an earlier era, cut in another way",
    ],
)
def test_what_cannot_be_a_copy_is_out_of_sequence(era: int, number: int, count: int) -> None:
    log = Log(*STORED)
    with pytest.raises(OutOfSequence):
        log.send(at(era, number), count)
    assert log.stored == Log(*STORED).stored


def test_a_writer_that_is_not_known_begins_with_any_era_but_only_at_its_beginning() -> None:
    for era in (0, 1, 17, MAX_ERA):
        assert Log().send(at(era, 0), 3) is None
        with pytest.raises(OutOfSequence, match="not known"):
            Log().send(at(era, 3), 3)


def test_an_ordinary_producer_has_no_eras() -> None:
    log = Log()
    assert log.send(0, 3, producer=7) is None
    for producer in (7, DERIVED - 1):
        with pytest.raises(OutOfSequence):
            log.send(at(1, 0), 3, producer=producer)


def test_a_batch_lies_in_one_era() -> None:
    log = Log((2, 0, 10))
    log.table.apply(make_header(20, producer=WRITER, sequence=at(3, 0) - 30), Offset(10))
    with pytest.raises(OutOfSequence, match="do not fit era 2"):
        log.send(at(3, 0) - 10, 11)
    assert log.send(at(3, 0) - 10, 10) is None, "up to the last number of the era"
    assert log.send(at(3, 0), 10) is None, "and the next one begins"
    assert log.send(at(3, 0), 10) is not None


def test_a_writer_that_too_many_have_outlived_begins_its_era_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The price of the bound, which the decision page names."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 1)
    monkeypatch.setattr(producers, "MAX_DERIVED", 2)
    log = Log((1, 0, 5), (1, 5, 5))
    for other in (1, 2, 3):
        assert log.send(0, 1, producer=other) is None
    assert log.send(at(1, 5), 5) is not None, "ordinary producers take no place of a derived one"
    for other in (1, 2):
        assert log.send(0, 1, producer=derived_id("another", other)) is None
    with pytest.raises(OutOfSequence, match="not known"):
        log.send(at(1, 5), 5)
    assert log.send(at(1, 0), 5) is None


@given(st.integers(0, 1 << 32), st.data())
def test_attempts_that_repeat_an_era_beside_each_other_store_each_batch_once(seed: int, data: st.DataObject) -> None:
    """Any number of attempts, each from the beginning to wherever it dies, in any interleaving; the last one is whole.
    Copies of finished eras come late. The table is written and read in between."""
    random = Random(seed)
    log = Log()
    expected: list[tuple[int, int]] = []
    finished: list[tuple[int, int]] = []
    for era in sorted(random.sample(range(50), data.draw(st.integers(1, 4)))):
        counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=20))
        batches = [(at(era, sum(counts[:number])), count) for number, count in enumerate(counts)]
        attempts = [batches[: random.randint(0, len(batches))] for _ in range(random.randint(0, 3))]
        attempts.append(batches.copy())
        while any(attempts):
            log.send(*random.choice([attempt for attempt in attempts if attempt]).pop(0))
            if finished and random.random() < 0.3:
                assert log.send(*random.choice(finished)) is not None
            if random.random() < 0.2:
                log.table = ProducerTable.from_rows(b"".join(log.table.rows()))
            if random.random() < 0.2:
                log.table = log.table.copy().extended(log.table)
        expected += batches
        finished += batches
    assert log.stored == expected


def test_an_identity_is_the_same_everywhere_and_for_ever() -> None:
    assert derived_id("query", 7, 3) == 0x96F08F0B6D273CB0
    assert derived_id("a", "bc") != derived_id("ab", "c")
    ids = {derived_id("query", topic, part) for topic in range(30) for part in range(30)}
    assert len(ids) == 900
    assert all(DERIVED <= each < 2 * DERIVED for each in ids)


@pytest.mark.parametrize(("number", "era"), [(7, 0), (0, 0), (2 * DERIVED, 0), (WRITER, -1), (WRITER, MAX_ERA + 1)])
def test_an_identity_that_logs_would_not_recognise_is_refused(number: int, era: int) -> None:
    with pytest.raises(InvalidArgument):
        ProducerIdentity(number, era)


def test_the_last_number_of_the_last_era_fits_a_sequence() -> None:
    last = ProducerIdentity(WRITER, MAX_ERA).first_sequence + ERA_RECORDS - 1
    assert last == (1 << 64) - 1
    assert make_header(1, producer=WRITER, sequence=last).last_sequence == last
