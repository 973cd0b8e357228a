"""A blocking consumer and its loop meet at bad moments. (integration/test_sync_client.py has it at work.)"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from braid.client.blocking.consumer import BlockingConsumer
from braid.client.blocking.loop_thread import LoopThread
from braid.client.consuming.consumer import Consumer, Fetched, SegmentReader
from braid.client.consuming.delivery import ReceivedBatch, checked_slices
from braid.model.batch.header import parse_header, stamp
from braid.model.errors import BatchUnreadable, BraidError, NotServing, TimedOut
from braid.model.ids import Epoch, Offset
from tests.kits import poison
from tests.kits.scripted_broker import TOPIC, stamped


class Idle(Consumer):
    """A consumer to which nothing comes; what its caller takes, the thread below says."""

    async def _begin(self) -> None: ...

    async def close(self) -> None: ...

    async def end(self) -> None: ...


class LateFuture(concurrent.futures.Future[Fetched | None]):
    """Done at the very moment at which the one who waits for it gives up."""

    def __init__(self, taken: Fetched) -> None:
        super().__init__()
        self._taken = taken

    def result(self, timeout: float | None = None) -> Fetched | None:
        if self.done():
            return super().result(timeout)
        self.set_result(self._taken)
        raise TimeoutError


class LateThread(LoopThread):
    def __init__(self, *deliveries: Fetched) -> None:
        self._deliveries = list(deliveries)

    def check_running(self) -> None: ...

    def begin(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        work.close()
        return LateFuture(self._deliveries.pop(0))


def delivery(feed: SegmentReader, *values: bytes) -> Fetched:
    payload = memoryview(stamped(values, feed.taken))
    batch = ReceivedBatch(TOPIC, feed.segment, payload, checked_slices(payload), feed.taken, feed.taken + len(values))
    feed.taken = batch.next_offset
    return Fetched(feed, batch)


def test_what_comes_in_the_moment_of_a_timeout_is_handed_out_by_the_next_receive() -> None:
    feed = SegmentReader(0, 0)
    consumer = BlockingConsumer(LateThread(delivery(feed, b"a", b"b"), delivery(feed, b"c")), Idle(TOPIC))
    assert consumer.receive(timeout=1) is None
    assert [message.value for _ in range(2) if (message := consumer.receive(timeout=1)) is not None] == [b"a", b"b"]
    assert consumer.receive(timeout=1) is None
    batch = consumer.receive_batch(timeout=1)
    assert batch is not None
    assert batch.values() == [b"c"]


class FailingThread(LateThread):
    """A loop whose work fails."""

    def __init__(self, *errors: BraidError) -> None:
        self._errors = list(errors)

    def begin(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        work.close()
        failed: concurrent.futures.Future[Any] = concurrent.futures.Future()
        failed.set_exception(self._errors.pop(0))
        return failed


def test_an_error_of_the_consumer_is_raised_also_if_it_is_a_timeout() -> None:
    errors = [TimedOut("JOIN was not answered within 5 s"), NotServing("not now")]
    consumer = BlockingConsumer(FailingThread(*errors), Idle(TOPIC))
    for error in errors:
        with pytest.raises(type(error), match=str(error)):
            consumer.receive(timeout=1)


def test_a_delivery_that_waited_while_its_segment_went_to_another_consumer_is_not_handed_out() -> None:
    lost, kept = SegmentReader(0, 0), SegmentReader(1, 0)
    consumer = BlockingConsumer(LateThread(delivery(lost, b"a"), delivery(kept, b"b")), Idle(TOPIC))
    assert consumer.receive_batch(timeout=1) is None
    lost.end()
    assert consumer.receive_batch(timeout=1) is None, "the one that waited is dropped, and the next one is late too"
    batch = consumer.receive_batch(timeout=1)
    assert batch is not None
    assert batch.values() == [b"b"]
    assert lost.delivered == 0


class PlainThread(LoopThread):
    """Does everything immediately, in the thread of the caller."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer

    def check_running(self) -> None: ...

    def begin(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        work.close()
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        taken = self._consumer._take()
        if taken is not None:
            future.set_result(taken)
        return future

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


@pytest.mark.parametrize("whole", [True, False], ids=["batches", "messages"])
def test_poison_stops_its_segment_again_and_again_and_no_other_segment(whole: bool) -> None:
    consumer = Idle(TOPIC)
    bad, fine = SegmentReader(0, 0), SegmentReader(1, 0)
    batch = poison.shown_by_the_body()["value offsets that fall"]
    header = stamp(batch, parse_header(batch), Offset(2), 1_000, Epoch(1), 7, 0)
    payload = memoryview(stamped([b"a", b"b"], 0) + batch)
    consumer.put_back(Fetched(bad, ReceivedBatch(TOPIC, 0, payload, checked_slices(payload), 0, header.next_offset)))
    consumer.put_back(delivery(fine, b"c", b"d"))
    blocking = BlockingConsumer(PlainThread(consumer), consumer)

    def receive() -> list[bytes]:
        if whole:
            batch = blocking.receive_batch(timeout=0)
            return [] if batch is None else batch.values()
        message = blocking.receive(timeout=0)
        return [] if message is None else [message.value]

    got: list[bytes] = []
    errors: list[BatchUnreadable] = []
    for _ in range(10):
        try:
            got += receive()
        except BatchUnreadable as error:
            errors.append(error)
    assert sorted(got) == [b"a", b"b", b"c", b"d"]
    assert len(errors) >= 5
    assert {(error.segment, error.first_offset, error.next_offset) for error in errors} == {(0, 2, 5)}
    assert bad.delivered == 2
