"""The producer table: what is a retry, what continues, what is neither (I10)."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest

from braid.model.batch.identity import CANNOT_TELL, DERIVED, ERA_RECORDS, NOT_KNOWN, derived_id
from braid.model.errors import ChunkCorrupt, OutOfSequence
from braid.model.ids import Offset
from braid.storage.log import producers
from braid.storage.log.producers import REMEMBERED_BATCHES, ROW_BYTES, Duplicate, ProducerTable, inherited
from braid.storage.segment import MAX_INHERITED_BYTES
from braid.wire.frame import MAX_BODY_BYTES
from tests.kits.storage import make_header


def table_of(*batches: tuple[int, int, int, int]) -> ProducerTable:
    """(producer, first sequence, count, base offset) of each stored batch."""
    table = ProducerTable()
    for producer, sequence, count, base in batches:
        table.apply(make_header(count, producer=producer, sequence=sequence), Offset(base))
    return table


TEN_BATCHES = tuple((7, 5 * n, 5, 100 + 10 * n) for n in range(10))
"""Sequences 0–49 of producer 7, five in each batch; the last eight batches are remembered."""


@pytest.mark.parametrize(
    ("sequence", "count", "expected"),
    [
        (50, 1, None),
        (50, 1_000, None),
        (45, 5, Duplicate(Offset(190), Offset(195))),
        (10, 5, Duplicate(Offset(120), Offset(125))),
        (5, 5, Duplicate(None, Offset(120))),
        (0, 5, Duplicate(None, Offset(120))),
        (0, 10, Duplicate(None, Offset(120))),
        (3, 4, Duplicate(None, Offset(120))),
    ],
    ids=[
        "continues",
        "continues with many",
        "repeats the last batch",
        "repeats the oldest remembered batch",
        "repeats a forgotten batch",
        "repeats the first batch",
        "repeats two forgotten batches as one",
        "repeats a forgotten part",
    ],
)
def test_a_batch_continues_or_repeats(sequence: int, count: int, expected: Duplicate | None) -> None:
    assert table_of(*TEN_BATCHES).check(make_header(count, producer=7, sequence=sequence)) == expected


@pytest.mark.parametrize(
    ("sequence", "count"),
    [(51, 1), (1_000, 5), (49, 2), (45, 6), (45, 4), (46, 4), (44, 2), (5, 10), (9, 2), (0, 100)],
    ids=[
        "one missing",
        "many missing",
        "overlaps the end",
        "repeats the last batch and one more",
        "a part of the last batch",
        "the end of the last batch",
        "across two batches",
        "a forgotten batch and a remembered one",
        "across the edge of what is remembered",
        "everything and more",
    ],
)
def test_what_neither_continues_nor_repeats_is_out_of_sequence(sequence: int, count: int) -> None:
    with pytest.raises(OutOfSequence, match=rf"0x7 sent sequences {sequence}–{sequence + count - 1}.*is 50"):
        table_of(*TEN_BATCHES).check(make_header(count, producer=7, sequence=sequence))


def test_a_producer_without_an_id_is_never_a_retry_and_takes_no_room() -> None:
    table = table_of((0, 0, 1, 0), (0, 0, 1, 1))
    assert table.check(make_header(producer=0, sequence=0)) is None
    assert table.check(make_header(producer=0, sequence=77)) is None
    assert len(table) == 0


def test_an_unknown_producer_begins_at_zero_so_that_a_refused_first_batch_is_never_taken_for_stored() -> None:
    table = table_of(*TEN_BATCHES)
    assert table.check(make_header(producer=8, sequence=0)) is None
    with pytest.raises(OutOfSequence, match="0x8 is not known here and sent sequence 1"):
        table.check(make_header(producer=8, sequence=1))


def test_control_batches_leave_no_trace() -> None:
    table = ProducerTable()
    table.apply(make_header(0, producer=7, sequence=3), Offset(5))
    assert len(table) == 0


def test_of_too_many_producers_the_one_that_was_silent_longest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 3)
    table = table_of((1, 0, 1, 0), (2, 0, 1, 1), (3, 0, 1, 2), (1, 1, 1, 3), (4, 0, 1, 4))
    assert len(table) == 3
    with pytest.raises(OutOfSequence, match="not known"):
        table.check(make_header(producer=2, sequence=1))
    assert table.check(make_header(producer=2, sequence=0)) is None, "2 is forgotten, so it begins again"
    for known in (1, 3, 4):
        assert table.check(make_header(producer=known, sequence=0)) is not None


def test_the_bound_of_ten_thousand_producers_holds() -> None:
    table = table_of(*((1 + number, 0, 1, number) for number in range(10_102)))
    assert len(table) == producers.MAX_PRODUCERS == 10_000
    assert table.is_full
    assert len(ProducerTable.from_rows(b"".join(table.rows()))) == 10_000


def test_the_bound_of_a_hundred_thousand_derived_producers_holds_also_in_memory() -> None:
    header = make_header(producer=WRITER)
    table = ProducerTable()
    tracemalloc.start()
    try:
        for number in range(100_002):
            table.apply(msgspec.structs.replace(header, producer_id=DERIVED + number), Offset(number))
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert (len(table), table.forgotten) == (producers.MAX_DERIVED, 2) == (100_000, 2)
    assert used < 24 << 20
    assert len(rows_of(table.handed_on())) < MAX_BODY_BYTES - 4_096, "a child's owner gets it in one answer"
    twin = ProducerTable.from_rows(rows_of(table))
    assert (rows_of(twin), twin.forgotten) == (rows_of(table), 0)


FEW_WRITERS = [derived_id("query", each) for each in range(9)]


def outlived(monkeypatch: pytest.MonkeyPatch) -> ProducerTable:
    """A table that has the latest batches of 2 writers, and the last batch of 4 more. Each has written two batches."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 2)
    monkeypatch.setattr(producers, "MAX_DERIVED", 6)
    batches = [
        (each, era(3) + 5 * number, 5, 10 * at + 5 * number) for at, each in enumerate(FEW_WRITERS) for number in (0, 1)
    ]
    return table_of(*batches)


def test_a_derived_producer_that_many_have_outlived_is_known_by_its_last_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink repeats its micro-batch after weeks: whatever the others have written, nothing is stored twice (I10)."""
    table = outlived(monkeypatch)
    assert (len(table), table.forgotten) == (6, 3)
    later = [table.copy(), ProducerTable.from_rows(rows_of(table)), ProducerTable().extended(table)]
    for each in (table, *later):
        for at in range(3, 9):
            writer, detailed = FEW_WRITERS[at], at >= 7
            last = Duplicate(Offset(10 * at + 5), Offset(10 * at + 10))
            first = Duplicate(Offset(10 * at) if detailed else None, Offset(10 * at + 5))
            assert each.check(make_header(5, producer=writer, sequence=era(3) + 5)) == last
            assert each.check(make_header(5, producer=writer, sequence=era(3))) == first
            assert each.check(make_header(5, producer=writer, sequence=era(2))) is not None
            assert each.check(make_header(5, producer=writer, sequence=era(3) + 10)) is None, "it goes on"
            assert each.check(make_header(5, producer=writer, sequence=era(4))) is None, "a later era may begin"
            assert (each.next_sequence(writer), each.last_era(writer)) == (era(3) + 10, 3)
    for each in (
        inherited([table]),
        inherited([table, ProducerTable()]),
        inherited([ProducerTable.from_rows(rows_of(table))]),
    ):
        assert [each.last_era(writer) for writer in FEW_WRITERS] == [NOT_KNOWN] * 3 + [3] * 6
        assert each.check(make_header(5, producer=FEW_WRITERS[3], sequence=era(3))) == Duplicate(None, Offset(0))


def test_a_derived_producer_that_comes_back_is_one_of_the_latest_again(monkeypatch: pytest.MonkeyPatch) -> None:
    table = outlived(monkeypatch)
    back, gone = FEW_WRITERS[3], FEW_WRITERS[7]
    table.apply(make_header(5, producer=back, sequence=era(3) + 10), Offset(200))
    assert table.check(make_header(5, producer=back, sequence=era(3) + 5)) == Duplicate(Offset(35), Offset(40))
    assert table.check(make_header(5, producer=gone, sequence=era(3))) == Duplicate(None, Offset(75)), "7 made room"
    assert (len(table), table.forgotten) == (6, 3)


def test_of_too_many_inherited_producers_those_that_wrote_longest_ago_are_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = outlived(monkeypatch)
    second = table_of(*((derived_id("other", each), era(1), 5, 5 * each) for each in range(6)))
    table = inherited([first, second])
    assert (len(table), table.forgotten) == (6, 6)
    assert table.last_era(FEW_WRITERS[8]) == 3
    assert table.last_era(FEW_WRITERS[3]) == NOT_KNOWN


def test_ordinary_producers_never_make_a_log_forget_a_derived_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sink repeats its rows days later. Programs that come and go meanwhile must not cost it its place (I11)."""
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 3)
    table = table_of((WRITER, era(4), 5, 0), *((each, 0, 1, 4 + each) for each in range(1, 50)))
    for each in (table, table.copy(), ProducerTable.from_rows(rows_of(table)), ProducerTable().extended(table)):
        assert each.check(make_header(5, producer=WRITER, sequence=era(4))) == Duplicate(Offset(0), Offset(5))
        assert len(each) == 4


def test_a_table_that_has_forgotten_a_drawn_id_denies_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 3)
    table = table_of(*((each, 0, 1, each) for each in range(1, 4)))
    assert table.next_sequence(9) == NOT_KNOWN, "nothing was forgotten"
    table.apply(make_header(producer=4), Offset(4))
    later = [table.copy(), ProducerTable.from_rows(rows_of(table)), ProducerTable().extended(table)]
    for each in (table, *later, inherited([table]), inherited([ProducerTable(), inherited([table])])):
        assert [each.next_sequence(producer) for producer in (1, 4, 9)] == [CANNOT_TELL, 1, CANNOT_TELL]
        assert each.next_sequence(WRITER) == NOT_KNOWN, "no derived id was forgotten"
        assert each.check(make_header(producer=9)) is None, "a new producer may begin"


def test_a_full_table_of_an_earlier_build_may_have_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    full = rows_of(table_of(*((each, 0, 1, each) for each in range(1, 4))))
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 3)
    assert ProducerTable.from_rows(full).next_sequence(9) == CANNOT_TELL
    assert ProducerTable.from_rows(full[ROW_BYTES:]).next_sequence(9) == NOT_KNOWN


def test_derived_producers_do_not_make_a_log_forget_a_drawn_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 2)
    table = table_of((1, 0, 1, 0), *((derived_id("query", each), era(1), 1, each) for each in range(1, 50)))
    assert len(table) == 50
    assert table.next_sequence(1) == 1
    assert table.next_sequence(2) == NOT_KNOWN


STRANGER = (1 << 63) - 1
"""The highest id that can be drawn."""


def rows_of(table: ProducerTable) -> bytes:
    return b"".join(table.rows())


def test_rows_round_trip_with_what_is_remembered_and_the_order_of_forgetting(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(*TEN_BATCHES, (STRANGER, (1 << 63), 2, (1 << 62)), (7, 50, 1, 300))
    twin = ProducerTable.from_rows(rows_of(table))
    assert len(rows_of(table)) == (REMEMBERED_BATCHES + 1) * ROW_BYTES
    assert rows_of(twin) == rows_of(table)
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 2)
    for each in (table, twin):
        each.apply(make_header(producer=9, sequence=0), Offset(400))
        with pytest.raises(OutOfSequence, match="not known"):
            each.check(make_header(producer=STRANGER, sequence=(1 << 63) + 2))
        assert each.check(make_header(producer=7, sequence=50)) == Duplicate(Offset(300), Offset(301))


def test_rows_that_are_not_whole_are_refused() -> None:
    with pytest.raises(ChunkCorrupt, match="31 bytes"):
        ProducerTable.from_rows(rows_of(table_of((1, 0, 1, 0)))[:-1])


def test_extending_by_a_later_table_counts_what_both_know_once() -> None:
    early = table_of(*TEN_BATCHES, (1, 0, 3, 500))
    later = table_of(*TEN_BATCHES[8:], (7, 50, 5, 200), (2, 0, 1, 600))
    early = early.extended(later)
    assert rows_of(early).count(rows_of(table_of(TEN_BATCHES[9]))) == 1
    assert early.check(make_header(5, producer=7, sequence=45)) == Duplicate(Offset(190), Offset(195))
    assert early.check(make_header(5, producer=7, sequence=55)) is None
    assert early.check(make_header(3, producer=1, sequence=0)) == Duplicate(Offset(500), Offset(503))
    assert early.check(make_header(1, producer=2, sequence=0)) == Duplicate(Offset(600), Offset(601))


def test_a_copy_goes_its_own_way() -> None:
    table = table_of((1, 0, 1, 0))
    twin = table.copy()
    twin.apply(make_header(producer=1, sequence=1), Offset(1))
    twin.apply(make_header(producer=2, sequence=0), Offset(2))
    assert table.check(make_header(producer=1, sequence=1)) is None
    assert len(table) == 1
    for sequence in range(2, 2 + 2 * REMEMBERED_BATCHES):
        twin.apply(make_header(producer=1, sequence=sequence), Offset(10 + sequence))
    assert len(rows_of(twin)) == (REMEMBERED_BATCHES + 1) * ROW_BYTES, "the copy has the same bound"


# A log that continues other logs.


def era(number: int, first: int = 0) -> int:
    return number * ERA_RECORDS + first


WRITER = derived_id("query", 1, 0)


def test_a_log_that_continues_another_knows_its_batches_and_not_their_places() -> None:
    table = inherited([table_of((7, 0, 5, 100), (7, 5, 5, 105))])
    assert table.check(make_header(5, producer=7, sequence=5)) == Duplicate(None, Offset(0))
    assert table.check(make_header(5, producer=7, sequence=0)) == Duplicate(None, Offset(0))
    assert table.check(make_header(5, producer=7, sequence=10)) is None
    with pytest.raises(OutOfSequence):
        table.check(make_header(4, producer=7, sequence=6))
    with pytest.raises(OutOfSequence):
        table.check(make_header(1, producer=8, sequence=3))


def test_batches_of_this_log_follow_those_of_the_logs_before_it() -> None:
    table = inherited([table_of(*TEN_BATCHES)])
    table.apply(make_header(5, producer=7, sequence=50), Offset(0))
    assert table.check(make_header(5, producer=7, sequence=50)) == Duplicate(Offset(0), Offset(5))
    assert table.check(make_header(5, producer=7, sequence=45)) == Duplicate(None, Offset(0))
    assert table.check(make_header(5, producer=7, sequence=0)) == Duplicate(None, Offset(0))
    again = ProducerTable.from_rows(b"".join(table.rows()))
    assert list(again.rows()) == list(table.rows())
    assert again.check(make_header(5, producer=7, sequence=45)) == Duplicate(None, Offset(0))


def test_only_the_last_batch_of_a_producer_is_inherited() -> None:
    """It has all that a retry needs, and a table that many logs have handed on stays small."""
    table = inherited([table_of(*TEN_BATCHES, *((WRITER, era(1, 5 * each), 5, 50 + 5 * each) for each in range(3)))])
    assert [struct.unpack_from("<QQ", row) for row in table.rows()] == [(7, 45), (WRITER, era(1, 10))]


def test_few_drawn_ids_are_handed_on_and_those_that_are_left_out_are_not_denied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(producers, "MAX_HANDED_ON", 2)
    table = inherited([table_of((WRITER, era(1), 5, 0), (2, 0, 1, 6), (3, 0, 1, 7))])
    assert [table.next_sequence(each) for each in (1, 2, 3)] == [NOT_KNOWN, 1, 1], "nothing was left out"
    table.apply(make_header(1, producer=4), Offset(0))
    table = inherited([table])
    assert [table.next_sequence(each) for each in (2, 3, 4)] == [CANNOT_TELL, 1, 1]
    table.apply(make_header(1, producer=5), Offset(0))
    table = inherited([ProducerTable.from_rows(rows_of(table))])
    assert [table.next_sequence(each) for each in (2, 3, 4, 5)] == [CANNOT_TELL, CANNOT_TELL, 1, 1]
    assert table.next_sequence(WRITER) == era(1, 5), "a derived id may come back at any time"


def test_what_parents_hand_on_is_all_that_a_child_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a parent's owner need not send the rest."""
    monkeypatch.setattr(producers, "MAX_HANDED_ON", 2)
    shared = derived_id("query", 2)
    parents = [
        table_of(*TEN_BATCHES, (WRITER, era(1), 5, 0), (shared, era(1), 5, 5), (2, 0, 1, 10), (2, 1, 1, 11)),
        table_of((3, 0, 1, 0), (4, 0, 1, 1), (shared, era(2), 5, 2), (5, 0, 1, 7), (6, 0, 1, 8)),
    ]
    sent = [ProducerTable.from_rows(rows_of(parent.handed_on())) for parent in parents]
    assert rows_of(inherited(sent)) == rows_of(inherited(parents))
    assert [len(each) for each in sent] == [2 + 2, 2 + 1]
    assert [inherited(sent).next_sequence(each) for each in (7, 2, 6)] == [CANNOT_TELL, 2, 1]


def test_the_producers_of_a_log_cost_each_of_many_children_little() -> None:
    """I12: a log with 10,000 producers may be split into a thousand."""
    table = table_of(*((number, 0, 1, number) for number in range(1, 10_001)))
    rows = rows_of(table.handed_on())
    tracemalloc.start()
    try:
        children = [inherited([ProducerTable.from_rows(rows)]) for _ in range(20)]
        used = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert used < len(children) * 128 << 10
    assert len(rows_of(children[0])) <= MAX_INHERITED_BYTES, "no object is needed"


def test_a_log_can_continue_several_logs_and_be_continued() -> None:
    first, second = table_of((7, 0, 5, 0), (8, 0, 1, 5)), table_of((9, 0, 2, 0))
    table = inherited([inherited([first, second]), table_of((10, 0, 1, 77))])
    assert len(table) == 4
    for producer, count in ((7, 5), (8, 1), (9, 2), (10, 1)):
        assert table.check(make_header(count, producer=producer)) == Duplicate(None, Offset(0))
        assert table.check(make_header(1, producer=producer, sequence=count)) is None
    assert len(inherited([])) == 0


def test_halves_that_are_joined_again_know_what_the_whole_has_stored() -> None:
    whole = table_of((7, 0, 5, 100), (7, 5, 5, 105), (WRITER, era(5), 10, 110))
    table = inherited([inherited([whole]), inherited([whole])])
    assert table.check(make_header(5, producer=7, sequence=5)) == Duplicate(None, Offset(0))
    assert table.check(make_header(5, producer=7, sequence=10)) is None
    assert table.next_sequence(7) == 10
    with pytest.raises(OutOfSequence):  # A derived id may be that of several logs.
        table.check(make_header(10, producer=WRITER, sequence=era(5)))


def test_the_next_sequence_is_that_of_the_last_batch_or_not_known() -> None:
    left, right = table_of((7, 0, 5, 0), (WRITER, era(5), 10, 5)), table_of((WRITER, era(5), 10, 0), (8, 0, 1, 10))
    assert [left.next_sequence(each) for each in (7, 8, WRITER)] == [5, NOT_KNOWN, era(5, 10)]
    both = inherited([left, right])
    assert [both.next_sequence(each) for each in (7, 8, 9, WRITER)] == [5, 1, NOT_KNOWN, CANNOT_TELL]
    both.apply(make_header(4, producer=WRITER, sequence=era(6)), Offset(0))
    assert both.next_sequence(WRITER) == era(6, 4)


def test_an_era_that_was_numbered_in_two_logs_cannot_be_judged_and_a_later_one_begins() -> None:
    left = table_of((WRITER, era(4), 3, 0), (WRITER, era(5), 10, 3))
    right = table_of((WRITER, era(5), 7, 0), (WRITER, era(5, 7), 2, 7))
    table = inherited([left, right])
    for first, count in ((0, 10), (0, 7), (7, 2), (0, 1), (10, 1), (9, 1), (0, 17)):
        with pytest.raises(OutOfSequence):
            table.check(make_header(count, producer=WRITER, sequence=era(5, first)))
    assert table.check(make_header(3, producer=WRITER, sequence=era(4))) == Duplicate(None, Offset(0))
    assert table.has_later_era(make_header(3, producer=WRITER, sequence=era(4)))
    assert table.check(make_header(4, producer=WRITER, sequence=era(6))) is None


def test_of_too_many_producers_those_that_wrote_last_in_each_log_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_HANDED_ON", 4)
    tables = [table_of(*((10 * n + each, 0, 1, each) for each in range(4))) for n in (1, 2)]
    table = inherited(tables)
    rows = [struct.unpack_from("<Q", row)[0] for row in table.rows()]
    assert rows == [0, 22, 12, 23, 13], "the longest idle producer first, after the mark that some were left out"
