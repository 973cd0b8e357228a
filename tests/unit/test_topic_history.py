"""The judge of a topic's simulation: what an accepted loss takes from its demands, and what not."""

from __future__ import annotations

import pytest

from braid.model.errors import OffsetOutOfRange, PositionDiverged
from braid.model.hashing import key_hash
from braid.model.layout import Layout
from braid.model.topic import Topic
from braid.model.transition import plan_split
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.topic_history import Record, Seek, TopicHistory


def history(records: int = 20) -> TopicHistory:
    """A topic of one segment that is open; a subscription has stored acks below 17."""
    made = TopicHistory(survives_power_loss=True)
    made.recovered(0, 0, now=1.5)
    for number in range(records):
        made.give(1, number, None, b"%d" % number)
    first = made.consumer("billing", "first", now=0.0)
    for number in range(17):
        first.handed(0, number, b"%d" % number, 0.5)
    made.subscription("billing").stored[0] = Seek(17, at=1.0)
    return made


def test_what_was_acked_and_stored_is_not_to_be_delivered_again() -> None:
    topic = history()
    with pytest.raises(PromiseBroken, match="acked below 17"):
        topic.consumer("billing", "late", now=2.0).handed(0, 16, b"16", 3.0)
    topic.consumer("billing", "late", now=2.0).handed(0, 17, b"17", 3.0)


def test_acks_of_what_was_lost_are_forgiven_as_soon_as_the_log_is_open_again() -> None:
    """2536106257: the judge heard of it a moment later than a consumer."""
    topic = history()
    topic.lost({0: 20})
    topic.recovered(0, 12, now=1.5)
    topic.consumer("billing", "late", now=2.0).handed(0, 12, b"12", 3.0)


def test_acks_of_what_was_kept_count_after_a_loss_as_before() -> None:
    topic = history()
    topic.lost({0: 20})
    topic.recovered(0, 12, now=1.5)
    with pytest.raises(PromiseBroken, match="acked below 12"):
        topic.consumer("billing", "late", now=2.0).handed(0, 11, b"11", 3.0)


def test_each_loss_says_where_the_log_was_cut() -> None:
    """910692: the answer to a flush came when the log had been cut back by another owner."""
    topic = history()
    topic.recovered(0, 20, now=1.5)
    assert topic.cuts[0] == []
    topic.lost({0: 20})
    topic.recovered(0, 20, now=1.5)  # Nothing of it was lost.
    assert topic.cuts[0] == []
    for end in (12, 5):
        topic.lost({0: 20})
        topic.recovered(0, end, now=1.5)
    assert [cut.offset for cut in topic.cuts[0]] == [12, 5]


def test_what_a_consumer_kept_from_before_a_loss_does_not_hide_that_the_new_record_was_handed_out() -> None:
    """20000491: the new record came first, and the judge remembered only the last."""
    topic = history()
    topic.lost({0: 20})
    topic.stopped()
    topic.recovered(0, 16, now=1.5)
    topic.give(2, 1, None, b"new")
    log = {0: [(b"%d" % number, None) for number in range(16)] + [(b"new", None)]}
    with pytest.raises(PromiseBroken, match="never given b'new'"):
        topic.check_log(log)
    topic.consumer("billing", "quick", now=2.0).handed(0, 16, b"new", 3.0)
    topic.consumer("billing", "slow", now=0.0).handed(0, 16, b"16", 4.0)
    topic.check_log(log)
    topic.subscription("billing").seeks[0] = Seek(16, at=3.5)
    with pytest.raises(PromiseBroken, match="never given b'new'"):
        topic.check_log(log)


def test_a_consumer_that_came_after_a_loss_is_not_to_hand_out_what_was_lost() -> None:
    topic = history()
    topic.lost({0: 20})
    topic.stopped()
    topic.recovered(0, 16, now=1.5)
    topic.give(2, 1, None, b"new")
    topic.consumer("billing", "one", now=2.0).handed(0, 16, b"new", 3.0)
    topic.consumer("billing", "old", now=1.0).handed(0, 16, b"16", 3.0)  # It may have waited there.
    with pytest.raises(PromiseBroken, match="I7"):
        topic.consumer("billing", "two", now=3.0).handed(0, 16, b"16", 4.0)


# A program has read all 20 records. Then the log lost those from 12 on, took others, and retention deleted some.

EXPIRED = OffsetOutOfRange("the record is gone", 0, 0)
DIVERGED = PositionDiverged("the record is another one", 0, 0, 12)
READ = {0: {number: b"%d" % number for number in range(20)}}


def history_after_a_loss(deleted: int) -> tuple[TopicHistory, dict[int, list[Record | None]]]:
    """With the log, whose first records retention has deleted."""
    topic = history()
    topic.lost({0: 20})
    topic.stopped()
    topic.recovered(0, 12, now=1.5)
    values = [b"%d" % number for number in range(12)] + [b"new %d" % number for number in range(12, 30)]
    reader = topic.consumer("billing", "reader", now=2.0)
    for offset in range(12, 30):
        topic.give(2, offset, None, values[offset])
        reader.handed(0, offset, values[offset], 3.0)
    topic.deleted(0, deleted)
    log: list[Record | None] = [(value, None) for value in values]
    return topic, {0: [None] * deleted + log[deleted:]}


@pytest.mark.parametrize("deleted", [0, 5, 15, 25], ids=lambda each: f"{each} deleted")
def test_a_program_that_has_read_lost_records_must_be_refused_whatever_retention_has_deleted(deleted: int) -> None:
    topic, log = history_after_a_loss(deleted)
    with pytest.raises(PromiseBroken, match="I1"):
        topic.check_checkpoint("reader", {0: 20}, READ, log, topic.earliest, None)
    topic.check_checkpoint("reader", {0: 20}, READ, log, topic.earliest, DIVERGED)


# The same program, and the log had ended: nothing comes after what it lost.


def history_after_a_loss_of_an_ended_log() -> tuple[TopicHistory, dict[int, list[Record | None]]]:
    topic = history()
    topic.lost({0: 20})
    topic.stopped()
    topic.recovered(0, 12, now=1.5)
    return topic, {0: [(b"%d" % number, None) for number in range(12)]}


@pytest.mark.parametrize("pruned", [False, True], ids=["kept", "dropped by the layout"])
def test_a_program_that_had_read_a_segment_to_its_end_goes_on_whatever_the_segment_has_lost_since(pruned: bool) -> None:
    """135, with changes of the layout: no position in the checkpoint names the segment, so nobody can be asked."""
    topic, log = history_after_a_loss_of_an_ended_log()
    if pruned:
        for number in range(12):
            topic.consumer(None, "another", now=2.0).handed(0, number, b"%d" % number, 3.0)
        topic.pruned(0, 12)
        log = {0: [None] * 12}
    topic.check_checkpoint("reader", {}, READ, log, topic.earliest, None, {0: 1.0})
    with pytest.raises(PromiseBroken, match=r"PositionDiverged.* another log: \{0: False\}"):
        topic.check_checkpoint("reader", {}, READ, log, topic.earliest, DIVERGED, {0: 1.0})


def test_a_process_that_began_after_the_loss_must_not_be_told_that_it_has_read_the_segment_to_its_end() -> None:
    topic, log = history_after_a_loss_of_an_ended_log()
    with pytest.raises(PromiseBroken, match=r"another log: \{0: True\}"):
        topic.check_checkpoint("reader", {}, READ, log, topic.earliest, None, {0: 2.0})


def test_what_no_accepted_loss_explains_counts_also_in_a_segment_that_was_read_to_its_end() -> None:
    topic, log = history_after_a_loss_of_an_ended_log()
    with_others: list[Record | None] = [*log[0], (b"new 12", None)]
    for wrong in (log[0][:11], with_others):
        with pytest.raises(PromiseBroken, match=r"another log: \{0: True\}"):
            topic.check_checkpoint("reader", {}, READ, {0: wrong}, topic.earliest, None, {0: 1.0})


def test_a_program_that_has_read_what_the_log_holds_must_not_be_told_that_it_diverged() -> None:
    for deleted in (0, 5, 11):
        topic, log = history_after_a_loss(deleted)
        read = {0: {number: b"%d" % number for number in range(11)}}
        topic.check_checkpoint("reader", {0: 11}, read, log, topic.earliest, None)
        for refusal in (DIVERGED, EXPIRED):
            with pytest.raises(PromiseBroken, match="I1"):
                topic.check_checkpoint("reader", {0: 11}, read, log, topic.earliest, refusal)


def test_a_program_whose_next_record_is_deleted_must_be_told_that_and_nothing_else() -> None:
    topic, log = history_after_a_loss(12)
    read = {0: {number: b"%d" % number for number in range(5)}}
    topic.check_checkpoint("reader", {0: 5}, read, log, topic.earliest, EXPIRED)
    for refusal in (DIVERGED, None):
        with pytest.raises(PromiseBroken, match="I1"):
            topic.check_checkpoint("reader", {0: 5}, read, log, topic.earliest, refusal)


def test_a_complaint_about_a_program_quotes_little_of_what_it_has_read() -> None:
    topic, log = history_after_a_loss(0)
    read = {0: {number: b"%d" % number * 10_000 for number in range(20)}}
    with pytest.raises(PromiseBroken, match=r"another log: \{0: True\}; it has read \{0: \{0: b'000") as caught:
        topic.check_checkpoint("reader", {0: 20}, read, log, topic.earliest, None)
    assert len(str(caught.value)) < 1_000


def test_a_segment_never_begins_with_records_that_retention_has_deleted() -> None:
    topic, _ = history_after_a_loss(15)
    topic.begins(0, 15)
    topic.begins(0, 16)
    with pytest.raises(PromiseBroken, match="segment 0 begins at 14 again, after 15"):
        topic.begins(0, 14)


def test_retention_may_delete_the_next_record_of_a_program_while_it_reads() -> None:
    topic, log = history_after_a_loss(12)
    read = {0: {number: b"%d" % number for number in range(5)}}
    for refusal in (EXPIRED, None):
        topic.check_checkpoint("reader", {0: 5}, read, log, {0: 3}, refusal)


def test_what_nobody_saw_before_it_was_deleted_speaks_neither_for_nor_against_a_program() -> None:
    topic, log = history_after_a_loss(15)
    topic.seen.clear()
    for refusal in (DIVERGED, EXPIRED):
        topic.check_checkpoint("reader", {0: 14}, {0: {13: b"13"}}, log, topic.earliest, refusal)


# ── order, by key ────────────────────────────────────────────────────────────────────────────────────────────────────


def split_history() -> TopicHistory:
    """A producer has sent eight records of one key to a topic that was split: 0 is replaced by 1 and 2."""
    whole = Topic(id=1, layout=Layout.initial(1))
    splitting = whole.beginning(plan_split(whole.layout, 0), transition_id=7, created_at=0)
    made = TopicHistory(survives_power_loss=True, segments=splitting.committed().layout.segments)
    for number in range(1, 9):
        made.give(1, number, KEY, b"%d" % number)
    return made


KEY = b"key-1"
CHILD = 1 if key_hash(KEY) < 0x8000 else 2


def log_of(parent: list[int], child: list[int]) -> dict[int, list[Record | None]]:
    log: dict[int, list[Record | None]] = {0: [], 1: [], 2: []}
    log[0] += [(b"%d" % number, KEY) for number in parent]
    log[CHILD] += [(b"%d" % number, KEY) for number in child]
    return log


def test_a_keys_records_stand_in_order_along_the_line_of_their_segments() -> None:
    split_history().check_log(log_of([1, 2, 3], [4, 5]))
    with pytest.raises(PromiseBroken, match=r"I4 .* sent 4 of key .* before 5"):
        split_history().check_log(log_of([1, 2, 5], [4]))
    with pytest.raises(PromiseBroken, match="I10"):
        split_history().check_log(log_of([1, 2, 3], [3]))


def test_a_record_stands_in_a_segment_that_has_its_hash() -> None:
    log: dict[int, list[Record | None]] = {0: [], CHILD: [], 3 - CHILD: [(b"1", KEY)]}
    with pytest.raises(PromiseBroken, match="I6"):
        split_history().check_log(log)


def test_what_the_layout_has_dropped_is_judged_by_what_was_seen_there() -> None:
    topic = split_history()
    for offset, number in enumerate([1, 2, 5]):
        topic.confirm(b"%d" % number, 0, offset)
    topic.pruned(0, 3)
    log = topic.whole({CHILD: [(b"4", KEY)], 3 - CHILD: []})
    with pytest.raises(PromiseBroken, match="I4"):
        topic.check_log(log)


def test_a_dropped_segment_must_have_been_read_by_every_subscription() -> None:
    topic = split_history()
    topic.consumer("billing", "first", now=0.0).handed(0, 0, b"1", 0.5)
    topic.pruned(0, 1)
    topic = split_history()
    topic.consumer("billing", "first", now=0.0).handed(0, 0, b"1", 0.5)
    with pytest.raises(PromiseBroken, match="I5"):
        topic.pruned(0, 2)


def test_a_subscription_gets_a_keys_records_in_order_across_segments_and_consumers() -> None:
    topic = split_history()
    first = topic.consumer("billing", "first", now=0.0)
    for number in (1, 2):
        first.handed(0, number - 1, b"%d" % number, 0.5)
    second = topic.consumer("billing", "second", now=1.0)
    second.handed(0, 1, b"2", 1.5)  # A redelivery.
    second.handed(CHILD, 0, b"4", 1.5)
    with pytest.raises(PromiseBroken, match=r"I4 .*'3' .* after number 4"):
        first.handed(0, 2, b"3", 2.0)


def test_a_reader_gets_a_keys_records_in_order_across_segments() -> None:
    reader = split_history().consumer(None, "reader", now=0.0)
    reader.handed(CHILD, 0, b"4", 0.5)
    with pytest.raises(PromiseBroken, match="I4"):
        reader.handed(0, 0, b"1", 0.5)


def test_order_counts_anew_after_a_seek_for_consumers_that_have_followed_it() -> None:
    topic = split_history()
    before = topic.consumer("billing", "before", now=0.0)
    for offset in range(3):
        before.handed(0, offset, b"%d" % (offset + 1), 0.5)
    before.handed(CHILD, 0, b"4", 0.5)
    subscription = topic.subscription("billing")
    subscription.set_to({0: 0}, began=1.0)
    subscription.sought_at = 1.0
    before.handed(CHILD, 1, b"5", 1.5)  # What it had already.
    before.handed(0, 0, b"1", 2.0)
    after = topic.consumer("billing", "after", now=2.0)
    after.handed(CHILD, 2, b"6", 2.5)
    with pytest.raises(PromiseBroken, match=r"I4 .*'2' .* after number 6"):
        before.handed(0, 1, b"2", 3.0)


def test_a_seek_of_one_segment_does_not_forbid_redeliveries_of_others() -> None:
    topic = split_history()
    before = topic.consumer("billing", "before", now=0.0)
    before.handed(0, 0, b"1", 0.5)
    subscription = topic.subscription("billing")
    subscription.set_to({CHILD: 0}, began=1.0)
    subscription.sought_at = 1.0
    after = topic.consumer("billing", "after", now=2.0)
    after.handed(0, 2, b"3", 2.5)
    after.handed(0, 0, b"1", 3.0)  # The acks were not stored.
    with pytest.raises(PromiseBroken, match=r"I4 .*'2' .* after number 3"):
        after.handed(0, 1, b"2", 3.0)


def test_a_record_may_be_redelivered_that_a_consumer_got_before_it_had_followed_a_seek() -> None:
    topic = split_history()
    before = topic.consumer("billing", "before", now=0.0)
    before.handed(0, 0, b"1", 0.5)
    subscription = topic.subscription("billing")
    subscription.set_to({0: 1}, began=1.0)  # It stands there, so it has nowhere to go.
    subscription.sought_at = 1.0
    before.handed(0, 1, b"2", 1.5)
    after = topic.consumer("billing", "after", now=2.0)
    after.handed(0, 3, b"4", 2.5)
    after.handed(0, 1, b"2", 3.0)  # The acks were not stored.
    before.handed(0, 2, b"3", 3.0)
    with pytest.raises(PromiseBroken, match=r"I4 .*'3' .* after number 4"):
        after.handed(0, 2, b"3", 3.0)
