"""The blocking consumer of a queue against a real broker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from braid import sync
from braid.client.blocking.queue import BlockingQueueConsumer
from braid.model.errors import AckStale, ClientClosed, InvalidArgument
from braid.model.message import QueueMessage
from tests.kits.broker import broker_in_a_thread
from tests.kits.waiting import WAIT_S

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def queue_of(data: Path, messages: int, **options: Any) -> Iterator[sync.Client]:
    """A broker, and a queue, `work`, with messages 0, 1, 2, …"""
    with broker_in_a_thread(str(data)) as url, sync.connect(url, timeout=WAIT_S) as client:
        client.admin.create_topic("orders")
        client.admin.create_subscription("orders", "work", kind="queue", **options)
        with client.producer("orders") as producer:
            producer.send_many([b"%d" % number for number in range(messages)])
        yield client


def backlog(client: sync.Client) -> int:
    found: int = client.admin.subscription("orders", "work")["backlog"]
    return found


def take(consumer: BlockingQueueConsumer) -> QueueMessage:
    message = consumer.receive(timeout=WAIT_S)
    assert message is not None
    return message


def test_messages_are_settled_returned_and_given_back(tmp_path: Path) -> None:
    with queue_of(tmp_path, 6) as client:
        with client.queue_consumer("orders", "work", name="worker-1") as consumer:
            assert (consumer.subscription, consumer.name) == ("work", "worker-1")
            messages = [take(consumer)]
            while len(messages) < 6:
                messages += consumer.receive_many(2, timeout=WAIT_S)
            assert [each.value for each in messages] == [b"%d" % number for number in range(6)]
            assert (consumer.receive(timeout=0.01), consumer.receive_many(5, timeout=0.01)) == (None, [])
            consumer.ack(messages[0])
            assert backlog(client) == 5, "it is stored when the call returns"
            consumer.submit_ack(messages[1])
            consumer.flush()
            assert backlog(client) == 4
            consumer.nack(messages[2], reason="no stamps")
            again = take(consumer)
            assert (again.value, again.redelivery_count, again.failure) == (b"2", 1, "no stamps")
            consumer.nack(messages[3], delay=3_600)
            with pytest.raises(InvalidArgument, match="delay is -1"):
                consumer.nack(messages[4], delay=-1)
            consumer.submit_ack(messages[4])
        assert backlog(client) == 3, "the end of the block stores the last ack"
        with client.queue_consumer("orders", "work") as consumer:
            for message in consumer:
                assert message.value in (b"2", b"5"), "the delayed message waits"
                consumer.ack(message)
                if backlog(client) == 1:
                    break
        for call in (consumer.receive, consumer.receive_many, lambda: next(consumer), lambda: consumer.ack(again)):
            with pytest.raises(ClientClosed):
                call()


def test_a_lease_runs_out_unless_it_is_extended(tmp_path: Path) -> None:
    with (
        queue_of(tmp_path, 3, ack_timeout_ms=2_000) as client,
        client.queue_consumer("orders", "work", prefetch=3) as consumer,
    ):
        late, later, kept = (take(consumer) for _ in range(3))
        consumer.extend(kept, 60)
        again = {each.value: each for each in (take(consumer), take(consumer))}
        assert again.keys() == {b"0", b"1"}
        assert {each.redelivery_count for each in again.values()} == {1}
        for each in again.values():
            consumer.extend(each, 60)
        answers: list[Callable[[], None]] = [
            lambda: consumer.ack(late),
            lambda: consumer.nack(late),
            lambda: consumer.extend(late, 5),
        ]
        for answer in answers:
            with pytest.raises(AckStale):
                answer()
        consumer.submit_ack(later)
        with pytest.raises(AckStale):
            consumer.flush()
        consumer.flush()
        for each in (*again.values(), kept):
            consumer.ack(each)
        assert backlog(client) == 0
