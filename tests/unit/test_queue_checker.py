"""The checker of queues notices each broken promise, and nothing else."""

from __future__ import annotations

from random import Random

import pytest

from braid.model.ids import Offset
from braid.model.queue.events import QueueEvents, QueueSnapshot, Returned
from braid.model.queue.state import Handed
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.queue_checker import EvidenceChecker, Place, QueueChecker, QueueWatch
from braid.testing.sim.disk import SimulatedDisk

FIRST_LEASE = 1 << 31


def watched(checker: QueueChecker, snapshot: QueueSnapshot | None = None) -> QueueWatch:
    snapshot = snapshot or QueueSnapshot(1, 0)
    watch = QueueWatch(checker, 0, "b1", snapshot, sought=False)
    watch.begun(1, snapshot)
    watch.on_confirmed(1)
    return watch


def hand(watch: QueueWatch, offset: int, lease: int = FIRST_LEASE, deliveries: int = 0, until: int = 100) -> None:
    watch.handed([Handed(Offset(offset), Offset(offset + 1), lease, deliveries, "")], 1, until)


def settle(watch: QueueWatch, offset: int, number: int) -> None:
    watch.on_events(number, QueueEvents(((offset, offset + 1),)), 0)


def give_back(watch: QueueWatch, offset: int, number: int, now: int, deliveries: int = 1) -> None:
    watch.on_events(number, QueueEvents(returned=(Returned(Offset(offset), deliveries, 0),)), now)


def test_message_is_not_handed_out_after_its_ack_was_confirmed() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0)
    settle(watch, 0, 2)
    assert watch.on_confirmed(2) == {0}
    with pytest.raises(PromiseBroken, match="I9"):
        hand(watch, 0, FIRST_LEASE + 1)


def test_next_owner_knows_confirmed_acks() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    settle(watch, 3, 2)
    watched(checker)  # The ack was not confirmed: it may be lost.
    watch.on_confirmed(2)
    watched(checker, QueueSnapshot(1, 0, ((3, 4),)))
    with pytest.raises(PromiseBroken, match="I9"):
        watched(checker)


def test_next_owner_invents_no_acks() -> None:
    checker = QueueChecker()
    watched(checker)
    with pytest.raises(PromiseBroken, match="lost"):
        watched(checker, QueueSnapshot(1, 2))


def test_another_placement_begins_anew_and_none_comes_back() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    settle(watch, 0, 2)
    watch.on_confirmed(2)
    hand(watched(checker, QueueSnapshot(2, 0)), 0)
    with pytest.raises(PromiseBroken, match="placements"):
        watched(checker, QueueSnapshot(1, 1))


def test_skip_takes_nothing_back_and_invents_nothing() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    checker.acking(Place(0, 1, 2), FIRST_LEASE)
    settle(watch, 2, 2)
    watch.on_confirmed(2)
    watch.reset(QueueSnapshot(2, 1, ((2, 3),)), sought=True)
    with pytest.raises(PromiseBroken, match="I9"):
        hand(watch, 2)
    checker.check_whole(0, [0, 2], {})
    with pytest.raises(PromiseBroken, match="lost"):
        watch.reset(QueueSnapshot(3, 1, ((4, 5),)), sought=True)


def test_lease_lasts_until_its_time_is_over() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0, until=100)
    with pytest.raises(PromiseBroken, match="early"):
        give_back(watch, 0, 2, now=99)
    hand(watch, 1, until=100)
    give_back(watch, 1, 3, now=100)
    hand(watch, 1, FIRST_LEASE + 1, deliveries=1)
    with pytest.raises(PromiseBroken, match="has not ended"):
        hand(watch, 1, FIRST_LEASE + 2, deliveries=1)


def test_no_more_deliveries_count_than_programs_may_have_seen() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0)
    watch.answering([(0, FIRST_LEASE, False)], [])
    watch.refused()
    watch.answered()
    give_back(watch, 0, 2, now=100)
    hand(watch, 0, FIRST_LEASE + 1, deliveries=1)
    watch.answering([(0, FIRST_LEASE + 1, False)], [])
    watch.answered()
    with pytest.raises(PromiseBroken, match="as delivered 2 times, and 1 count"):
        hand(watch, 0, FIRST_LEASE + 2, deliveries=2)
    hand(watch, 0, FIRST_LEASE + 2, deliveries=1)


def test_deliveries_of_an_earlier_place_count_if_they_are_kept() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0)
    give_back(watch, 0, 2, now=100)
    watch.reset(QueueSnapshot(2, 0, (), (Returned(Offset(0), 1, 0),)), sought=True)
    hand(watch, 0, FIRST_LEASE + 1, deliveries=1)
    watch.reset(QueueSnapshot(3, 0), sought=True)
    with pytest.raises(PromiseBroken, match="as delivered 1 times, and 0 count"):
        hand(watch, 0, FIRST_LEASE + 2, deliveries=1)


def test_consumer_may_return_a_message_or_keep_it_longer() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0, until=100)
    watch.answering([(0, FIRST_LEASE, True)], [])
    give_back(watch, 0, 2, now=1)
    watch.answered()
    hand(watch, 0, FIRST_LEASE + 1, deliveries=1, until=100)
    watch.answering([], [(0, FIRST_LEASE + 1, 200)])
    with pytest.raises(PromiseBroken, match="early"):
        give_back(watch, 0, 3, now=150, deliveries=2)


def test_stored_deliveries_are_not_forgotten() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    hand(watch, 0)
    give_back(watch, 0, 2, now=100)
    watch.on_confirmed(2)
    with pytest.raises(PromiseBroken, match="counts"):
        hand(watch, 0, FIRST_LEASE + 1, deliveries=0)
    with pytest.raises(PromiseBroken, match="counts"):
        watched(checker)


def test_program_gets_only_what_was_handed_out_once_and_not_too_often() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    place = Place(0, 1, 0)
    with pytest.raises(PromiseBroken, match="no owner has given"):
        checker.received(place, FIRST_LEASE, 0, 0)
    hand(watch, 0)
    checker.received(place, FIRST_LEASE, 0, 2)
    with pytest.raises(PromiseBroken, match="twice"):
        checker.received(place, FIRST_LEASE, 0, 2)
    hand(watch, 1)
    with pytest.raises(PromiseBroken, match="counts"):
        checker.received(Place(0, 1, 1), FIRST_LEASE, 2, 2)


def test_program_is_told_of_an_ack_after_disks_have_it() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    hand(watch, 0)
    settle(watch, 0, 2)
    with pytest.raises(PromiseBroken, match="I9"):
        checker.told(Place(0, 1, 0))
    watch.on_confirmed(2)
    checker.told(Place(0, 1, 0))


def test_answer_is_stale_only_if_another_consumer_got_the_message() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    hand(watch, 0, until=100)
    with pytest.raises(PromiseBroken, match="nobody else"):
        checker.refused(Place(0, 1, 0), FIRST_LEASE, ack=True)
    give_back(watch, 0, 2, now=100)
    hand(watch, 0, FIRST_LEASE + 1, deliveries=1)
    checker.refused(Place(0, 1, 0), FIRST_LEASE, ack=True)


def test_cursor_follows_what_is_settled_for_good() -> None:
    checker = QueueChecker()
    watch = watched(checker)
    settle(watch, 0, 2)
    with pytest.raises(PromiseBroken, match="I5"):
        checker.cursor_stored(0, 1, 1)
    watch.on_confirmed(2)
    checker.cursor_stored(0, 1, 1)


def test_every_message_is_acked_or_buried_or_skipped() -> None:
    checker = QueueChecker()
    watched(checker)
    checker.acking(Place(0, 1, 0), FIRST_LEASE)
    checker.check_whole(0, [0, 1], {(0, 1): 1})
    with pytest.raises(PromiseBroken, match="lost"):
        checker.check_whole(0, [0, 1], {})
    QueueWatch(checker, 0, "b1", QueueSnapshot(2, 2), sought=True)
    checker.check_whole(0, [0, 1], {})
    with pytest.raises(PromiseBroken, match="I10"):
        checker.check_dead({(0, 1): 3})


def test_message_stays_with_the_next_channel_of_its_consumer() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0, until=100)
    watch.kept([(0, 1, FIRST_LEASE)], [], consumer=8, until_us=200)
    watch.leaving(8)
    give_back(watch, 0, 2, now=1)
    watch.answered()
    watch.kept([(1, 3, FIRST_LEASE)], [2], consumer=8, until_us=200)
    watch.kept([(1, 2, FIRST_LEASE + 1)], [], consumer=9, until_us=200)
    with pytest.raises(PromiseBroken, match="beside"):
        watch.kept([(1, 2, FIRST_LEASE)], [], consumer=8, until_us=200)
    with pytest.raises(PromiseBroken, match="early"):
        give_back(watch, 1, 3, now=199)
    hand(watch, 2, FIRST_LEASE + 1)


def test_ack_that_is_refused_because_of_a_seek_may_have_counted() -> None:
    checker = QueueChecker()
    watched(checker)
    checker.acking(Place(0, 1, 0), FIRST_LEASE)
    QueueWatch(checker, 0, "b1", QueueSnapshot(2, 1), sought=False)
    checker.refused(Place(0, 1, 0), FIRST_LEASE, ack=True)
    checker.check_whole(0, [0], {})


def test_message_that_no_program_has_seen_is_returned_without_an_event() -> None:
    watch = watched(QueueChecker())
    hand(watch, 0, until=100)
    watch.answering([(0, FIRST_LEASE, False)], [])
    watch.refused()
    watch.answered()
    with pytest.raises(PromiseBroken, match="has not ended"):
        hand(watch, 0, FIRST_LEASE + 1)
    watch.answering([(0, FIRST_LEASE, False)], [])
    hand(watch, 0, FIRST_LEASE + 1)


def test_cursor_of_an_owner_that_is_opening_stands_at_what_its_disk_says() -> None:
    checker = QueueChecker()
    settle(watched(checker), 0, 2)
    with pytest.raises(PromiseBroken, match="I5"):
        checker.cursor_stored(0, 1, 1)
    checker.cursor_stored(0, 1, 1, {0})
    with pytest.raises(PromiseBroken, match="I5"):
        checker.cursor_stored(0, 1, 2, {0})


def test_replica_takes_no_event_of_an_owner_that_a_vote_has_deposed() -> None:
    disk, evidence = SimulatedDisk(Random(1)), EvidenceChecker()
    evidence.began(disk, "orders", 1, QueueSnapshot(1, 2))
    evidence.took(disk, "orders", 1, 1, [(3, 4)])
    evidence.said(disk, "orders", 2, QueueSnapshot(1, 2, ((3, 4),)))
    evidence.took(disk, "orders", 1, 1, [(3, 4)])  # It has told the vote of this: only its answer comes late.
    evidence.began(disk, "orders", 1, QueueSnapshot(1, 2))
    evidence.took(disk, "orders", 2, 1, [(5, 6)])
    with pytest.raises(PromiseBroken, match=r"I3.*epoch 2.*epoch 1.*6"):
        evidence.took(disk, "orders", 1, 1, [(6, 7)])
    with pytest.raises(PromiseBroken, match="I3"):
        evidence.began(disk, "orders", 1, QueueSnapshot(1, 3))


def test_replica_without_a_journal_takes_no_event_after_a_vote() -> None:
    disk, evidence = SimulatedDisk(Random(1)), EvidenceChecker()
    evidence.said(disk, "orders", 2, None)
    with pytest.raises(PromiseBroken, match="I3"):
        evidence.took(disk, "orders", 1, 1, [(0, 1)])


def test_an_answer_about_an_earlier_placement_is_compared_with_nothing() -> None:
    disk, evidence = SimulatedDisk(Random(1)), EvidenceChecker()
    evidence.began(disk, "orders", 1, QueueSnapshot(1, 2))
    placement = evidence.placement(disk, "orders")
    assert placement == 1
    evidence.began(disk, "orders", 1, QueueSnapshot(2, 0))
    evidence.said(disk, "orders", 2, QueueSnapshot(2, 0))
    evidence.took(disk, "orders", 1, placement, [(3, 4)])
