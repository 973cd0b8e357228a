"""Poison, bombs and invented read grants against a real broker, with a healthy client beside them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from braid.model.errors import BatchError, BatchTooLarge, PermissionDenied
from braid.wire.operations import Kind, Opened, Positions, PositionsRequest, Published
from tests.kits import poison
from tests.kits.bad_input import MEGABYTES, MadeTopic, a_batch, joined, make_topic
from tests.kits.raw_client import RawClient, WatchedBroker

pytestmark = pytest.mark.processes

SLOWEST_S = 0.25
"""For 99 of 100 publishes of the healthy client."""
MOST_BYTES = 300 * MEGABYTES
"""Of the broker."""


@contextlib.contextmanager
def healthy_client(broker: WatchedBroker) -> Iterator[None]:
    """Publishes one record after the other meanwhile, and is not kept waiting."""
    took: list[float] = []
    over = threading.Event()

    def publish() -> None:
        with broker.connect() as client:
            topic = make_topic(client)
            while not over.is_set() or len(took) < 200:
                began = time.monotonic()
                client.ask(Kind.PUBLISH, topic.route, Published, a_batch())
                took.append(time.monotonic() - began)
                time.sleep(0.002)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert sorted(took)[len(took) * 99 // 100] < SLOWEST_S
    assert broker.resident_bytes < MOST_BYTES


def end_of(client: RawClient, topic: MadeTopic) -> int:
    (positions,) = client.ask(Kind.POSITIONS, PositionsRequest(topic.path), Positions).segments
    return positions.end


def test_what_the_header_shows_is_refused_and_the_rest_costs_the_broker_nothing(broker: WatchedBroker) -> None:
    hidden, shown = poison.shown_by_the_body(), poison.shown_by_the_header()
    bombs = [poison.bomb(100 << 20), poison.crowd(3 << 20)]
    with healthy_client(broker), broker.connect() as client:
        topic = make_topic(client)
        for _ in range(5):
            for batch in shown.values():
                with pytest.raises(BatchError):
                    client.ask(Kind.PUBLISH, topic.route, Published, batch)
            for batch in bombs:
                assert len(batch) < 20_000
                with pytest.raises(BatchTooLarge, match="the topic takes"):
                    client.ask(Kind.PUBLISH, topic.route, Published, batch)
            for batch in hidden.values():
                client.ask(Kind.PUBLISH, topic.route, Published, batch)
        assert end_of(client, topic) == 5 * poison.COUNT * len(hidden)


def test_invented_read_grants_keep_no_consumer_out(broker: WatchedBroker) -> None:
    with healthy_client(broker), broker.connect() as consumer, broker.connect() as stranger:
        topic = make_topic(consumer)
        held = joined(consumer, topic)
        highest = (1 << 63) - 1
        forged = ({"grant": 1}, {"term": 1}, {"term": highest - held.term}, {"grant": highest - held.grants[0]})
        for number in range(100):
            with pytest.raises(PermissionDenied, match="no controller gave"):
                stranger.ask(Kind.OPEN, topic.open_as(held, number + 1, **forged[number % 4]), Opened)
        consumer.ask(Kind.OPEN, topic.open_as(held, 7), Opened)


CONSUMER = r"""
import json, re, sys
import braid.sync
from braid.model.errors import BatchUnreadable

url, topic, records = sys.argv[1], sys.argv[2], int(sys.argv[3])
got = size = 0
stopped = []
with braid.sync.connect(url) as client, client.checkpoint_consumer(topic, start="earliest") as consumer:
    while got < records:
        try:
            message = consumer.receive(timeout=30)
        except BatchUnreadable as error:
            stopped.append([error.segment, error.first_offset, error.next_offset])
            consumer.seek(error.segment, error.next_offset)
            continue
        got, size = got + 1, size + len(message.value)
peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1])
print(json.dumps({"size": size, "stopped": stopped, "peak": peak}))
"""


def test_a_consumer_reads_bombs_in_bounded_memory_and_seeks_past_poison(broker: WatchedBroker) -> None:
    """Two gigabytes in some kilobytes, a record with millions of headers, and a batch that cannot be decoded."""
    bombs, size = 60, 32 << 20
    batch = poison.bomb(size)
    with healthy_client(broker), broker.connect() as client:
        topic = make_topic(client)
        for number in range(bombs):
            client.ask(Kind.PUBLISH, topic.route, Published, batch)
            if number == 9:
                client.ask(Kind.PUBLISH, topic.route, Published, poison.shown_by_the_body()["value offsets that fall"])
        client.ask(Kind.PUBLISH, topic.route, Published, poison.header_crowd(7 << 20))
        command = [sys.executable, "-c", CONSUMER, f"braid://{broker.address}", topic.path, str(bombs + 1)]
        found = json.loads(subprocess.check_output(command, timeout=100))
    assert found["size"] == bombs * size
    assert found["stopped"] == [[0, 10, 13]]
    assert found["peak"] < 300 * MEGABYTES
