"""Answers of a queue consumer, on their way to the segment's owner."""

from __future__ import annotations

import asyncio

import pytest

from braid.client.consuming.queue_answers import AnswerKind, PendingAnswer, SegmentAnswers, as_ranges, one_for_each
from braid.model.errors import AckStale, BraidError


class Consumer:
    closed = leaving = False

    def __init__(self) -> None:
        self.failures: list[BraidError] = []

    def note_failure(self, error: BraidError) -> None:
        self.failures.append(error)

    def on_answered(self) -> None:
        pass


def ack(offset: int, lease: int = 1, done: asyncio.Future[None] | None = None) -> PendingAnswer:
    return PendingAnswer(AnswerKind.ACK, offset, lease, placement=1, done=done)


def test_messages_one_after_the_other_are_one_range_of_their_lease() -> None:
    assert as_ranges([(3, 1), (1, 1), (2, 1), (2, 1), (4, 2), (6, 2)]) == ((1, 4, 1), (4, 5, 2), (6, 7, 2))


def test_two_answers_to_one_message_go_one_after_the_other() -> None:
    first, other, same = ack(1, lease=1), ack(1, lease=2), ack(1, lease=1)
    assert one_for_each([first, other, same, ack(2)]) == ([first, same, ack(2)], [other])


async def test_answers_about_a_segment_that_retention_has_deleted_count_as_stored() -> None:
    """A program may still work on a message when its segment is gone."""
    consumer = Consumer()
    answers = SegmentAnswers(0, consumer)
    before, after = (asyncio.get_running_loop().create_future() for _ in range(2))
    answers.add(ack(1, done=before))
    answers.end()
    answers.add(ack(2, done=after))
    answers.add(ack(3))
    assert (before.result(), after.result(), consumer.failures) == (None, None, [])
    assert answers.is_quiet


async def test_answers_of_another_placement_are_refused() -> None:
    consumer = Consumer()
    answers = SegmentAnswers(0, consumer)
    done = asyncio.get_running_loop().create_future()
    answers.add(ack(1, done=done))
    answers.add(ack(2))
    answers.refuse_all()
    assert isinstance(done.exception(), AckStale)
    with pytest.raises(AckStale):
        raise consumer.failures[0]


async def test_a_stale_answer_that_the_consumer_gave_itself_is_no_failure_of_the_program() -> None:
    """Such as the ack of an expired message, which no program has seen."""
    consumer = Consumer()
    answers = SegmentAnswers(0, consumer)
    answers.add(ack(1)._replace(seen=False))
    answers.refuse_all()
    assert consumer.failures == []
