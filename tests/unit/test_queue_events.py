"""What a queue stores: images join to what all of them know, in any order, and never across placements."""

from __future__ import annotations

import itertools
import zlib
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.broker.queues.segment_queues import _up_to
from braid.model.errors import RecordUnreadable
from braid.model.ids import Offset
from braid.model.queue.events import (
    COARSE_US,
    MAX_REASON_CHARS,
    MAX_STATE_BYTES,
    QueueEvents,
    QueueImage,
    QueueSnapshot,
    Returned,
    all_events,
    decode_events,
    decode_snapshot,
    encode,
    joined,
    pack_state,
    shortened,
    unpack_state,
)
from braid.model.queue.settled import SettledOffsets

PLACEMENT = 7
END = 40

ranges = st.tuples(st.integers(0, END - 1), st.integers(1, 8)).map(lambda each: (each[0], min(each[0] + each[1], END)))
returns = st.builds(
    Returned,
    st.integers(0, END - 1).map(Offset),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from(["", "too slow", "poison"]),
)
events = st.builds(QueueEvents, st.lists(ranges, max_size=5).map(tuple), st.lists(returns, max_size=5).map(tuple))


@st.composite
def images(draw: st.DrawFn) -> QueueImage:
    image = QueueImage(PLACEMENT, draw(st.integers(0, 10)))
    for each in draw(st.lists(events, max_size=3)):
        image.apply(each)
    return image


def known(image: QueueImage) -> tuple[set[int], set[Returned]]:
    """What an image says: the settled offsets, and the unsettled messages that were returned."""
    snapshot = image.snapshot()
    return {each for each in range(END) if each in image.settled}, set(snapshot.returned)


def union(*some: QueueImage) -> QueueImage:
    return joined(PLACEMENT, 0, some)


@given(images(), images())
def test_a_join_is_commutative(one: QueueImage, two: QueueImage) -> None:
    assert known(union(one, two)) == known(union(two, one))


def test_reasons_join_alike_in_any_order() -> None:
    one, two = QueueImage(PLACEMENT, 0), QueueImage(PLACEMENT, 0)
    one.apply(QueueEvents((), (Returned(Offset(3), 1, 0, "poison"),)))
    two.apply(QueueEvents((), (Returned(Offset(3), 1, 0, "too slow"),)))
    assert known(union(one, two)) == known(union(two, one))


@given(images(), images(), images())
def test_a_join_is_associative(one: QueueImage, two: QueueImage, three: QueueImage) -> None:
    assert known(union(union(one, two), three)) == known(union(one, union(two, three)))


@given(images(), images())
def test_a_join_is_idempotent_and_knows_all_that_each_image_knows(one: QueueImage, two: QueueImage) -> None:
    both = union(one, two)
    assert known(union(both, one, two, both)) == known(both)
    assert known(both)[0] == known(one)[0] | known(two)[0]
    for each in known(one)[1] | known(two)[1]:
        assert each.offset in both.settled or both.returned[each.offset] >= each


@given(st.lists(events, max_size=6), st.randoms(use_true_random=False))
def test_events_mean_the_same_in_any_order_and_twice(groups: list[QueueEvents], random: object) -> None:
    in_order, shuffled, together = (QueueImage(PLACEMENT, 0) for _ in range(3))
    for each in groups:
        in_order.apply(each)
    again = [*groups, *groups]
    random.shuffle(again)  # type: ignore[attr-defined]
    for each in again:
        shuffled.apply(each)
    together.apply(all_events(groups))
    assert known(in_order) == known(shuffled) == known(together)


@given(st.lists(events, max_size=6))
def test_events_that_go_together_have_ranges_in_order_that_do_not_touch(groups: list[QueueEvents]) -> None:
    settled = all_events(groups).settled
    assert all(before[1] < after[0] for before, after in itertools.pairwise(settled))
    assert {each for group in groups for pair in group.settled for each in range(*pair)} == {
        each for pair in settled for each in range(*pair)
    }


@given(images(), images())
def test_images_of_other_placements_add_nothing(one: QueueImage, two: QueueImage) -> None:
    other = QueueImage(PLACEMENT + 1, two.settled.base)
    other.apply(QueueEvents(tuple(two.settled), tuple(two.returned.values())))
    assert known(joined(PLACEMENT, 0, [one, other, None])) == known(union(one))
    assert known(joined(PLACEMENT + 2, 3, [one, other])) == ({0, 1, 2}, set())
    with pytest.raises(AssertionError):
        one.join(other)


def test_a_joined_image_begins_at_the_cursor_at_least() -> None:
    behind = QueueImage(PLACEMENT, 2)
    assert joined(PLACEMENT, 5, [behind]).settled.base == 5
    assert joined(PLACEMENT, 5, [None]).settled.base == 5
    assert joined(PLACEMENT, 1, [behind]).settled.base == 2


@given(images(), st.integers(0, END))
def test_an_image_is_cut_to_the_messages_that_the_log_has(image: QueueImage, end: int) -> None:
    cut = _up_to(image, end)
    assert cut.placement == image.placement
    assert cut.snapshot().end <= end
    assert known(cut)[0] == {each for each in known(image)[0] if each < end}
    assert known(cut)[1] == {each for each in known(image)[1] if each.offset < end}


@given(events)
def test_the_end_of_events_is_after_the_last_message_that_they_tell_of(each: QueueEvents) -> None:
    told = {offset for pair in each.settled for offset in range(*pair)} | {one.offset for one in each.returned}
    assert each.end == max(told, default=-1) + 1


@given(images(), events)
def test_what_is_encoded_is_decoded(image: QueueImage, some: QueueEvents) -> None:
    snapshot = image.snapshot()
    assert decode_snapshot(encode(snapshot)) == snapshot
    assert known(QueueImage.of(decode_snapshot(memoryview(encode(snapshot))))) == known(image)
    assert decode_events(encode(some)) == some


def test_a_snapshot_of_an_earlier_version_has_no_epoch() -> None:
    assert decode_snapshot(b"\x92\x03\x04") == QueueSnapshot(3, 4)


@pytest.mark.parametrize("data", [b"", b"\x00", b"\xc1", b"\x92\xa1x\x01", encode(QueueSnapshot(1, 2))[:-1], b"\x80"])
def test_bad_bytes_are_refused_with_an_error_that_says_so(data: bytes) -> None:
    with pytest.raises(RecordUnreadable, match="the state of a queue cannot be read"):
        decode_snapshot(data)
    with pytest.raises(RecordUnreadable, match="events of a queue cannot be read"):
        decode_events(data + b"\x91")


@given(st.integers(0, 6), st.lists(ranges, max_size=12))
def test_settled_offsets_are_a_set(base: int, some: list[tuple[int, int]]) -> None:
    settled = SettledOffsets(base, some)
    expected = {*range(base), *(each for pair in some for each in range(*pair))}
    assert {each for each in range(END + 2) if each in settled} == expected
    assert settled.base == next(each for each in range(END + 2) if each not in expected)
    assert settled.count == len(expected) - settled.base
    pairs = list(settled)
    assert len(pairs) == len(settled)
    assert all(before[1] < after[0] for before, after in itertools.pairwise(pairs))
    for offset in range(END):
        first = settled.first_unsettled(offset)
        assert first == next(each for each in range(offset, END + 2) if each not in expected)
        if offset not in expected:
            assert settled.next_settled(offset, END) == next(
                (each for each in range(offset, END) if each in expected), END
            )


def test_events_that_gather_say_each_thing_once() -> None:
    """A disk may stand still while messages come and go."""
    groups = [QueueEvents(returned=(Returned(Offset(3), count, 10, "no"),)) for count in (1, 3, 2)]
    assert all_events(groups).returned == (Returned(Offset(3), 3, 10, "no"),)


def test_a_delay_lasts_as_long_by_another_clock_and_what_is_due_stays_due() -> None:
    waiting, due = Returned(Offset(1), 1, 150), Returned(Offset(2), 1, 100)
    assert waiting.between_clocks(100, 1_000_000).not_before == 1_000_050
    assert waiting.between_clocks(100, 7).not_before == 57
    assert due.between_clocks(100, 1_000_000).not_before == 0


def random_state(count: int) -> QueueSnapshot:
    """Return a state that does not compress: most messages came back once, the first hundred five times."""
    random = Random(1)
    span_us = 366 * 86_400_000_000
    returned = tuple(
        Returned(Offset(3 * each), 5 if each < 100 else 1, random.randrange(1, span_us)) for each in range(count)
    )
    return QueueSnapshot(PLACEMENT, 0, ((1, 2),), returned, leased=((4, 5),))


def test_a_large_state_keeps_its_counts_and_no_message_comes_early() -> None:
    state = random_state(120_000)
    packed = pack_state(state, 9)
    found = unpack_state(packed)
    assert len(packed) <= MAX_STATE_BYTES < len(zlib.compress(encode(state), 1))
    assert (found.epoch, found.leased, found.settled) == (9, None, state.settled)
    assert [(each.offset, each.deliveries) for each in found.returned] == [
        (each.offset, each.deliveries) for each in state.returned
    ]
    for told, known in zip(found.returned, state.returned):
        assert known.not_before <= told.not_before < known.not_before + COARSE_US[-1]


def test_a_state_without_bounds_is_packed_nevertheless_and_knows_what_was_delivered_most_often() -> None:
    packed = pack_state(random_state(600_000), 9)
    found = unpack_state(packed)
    assert len(packed) <= MAX_STATE_BYTES
    assert found.settled == ((1, 2),)
    assert len([each for each in found.returned if each.deliveries == 5]) == 100


def test_a_reason_is_cut_and_is_always_utf_8() -> None:
    assert shortened("no file \udcff") == "no file ?"
    assert len(shortened("é" * 1_000)) == MAX_REASON_CHARS
