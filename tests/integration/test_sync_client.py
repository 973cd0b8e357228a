"""The blocking client against a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from braid import sync
from braid.client.blocking.consumer import BlockingCheckpointConsumer, BlockingConsumer, BlockingStreamConsumer
from braid.client.blocking.producer import MAX_GATHERED_RECORDS
from braid.model.errors import (
    ClientClosed,
    ConnectFailed,
    InvalidArgument,
    SubscriptionNotFound,
    TimedOut,
    TopicExists,
    TopicNotFound,
)
from braid.model.message import DELIVER_AT, EXPIRES_AT, Message, MessageId
from tests.kits.broker import broker_in_a_thread

pytestmark = pytest.mark.processes


@contextlib.contextmanager
def cluster(data: Path, *, segments: int = 1) -> Iterator[tuple[str, sync.Client]]:
    with broker_in_a_thread(str(data)) as url, sync.connect(url, timeout=20) as client:
        client.admin.create_topic("orders", segments=segments)
        yield url, client


def test_records_go_out_and_come_back(tmp_path: Path) -> None:
    with cluster(tmp_path, segments=2) as (_, client):
        with client.producer("orders") as producer:
            first = producer.send(b"paid", key=b"customer-7", headers={"trace": "a1"})
            many = producer.send_many([(b"k%d" % number, b"v%d" % number) for number in range(100)])
            table = producer.send_table(pa.table({"value": [b"x", b"y"]}))
            receipts = [producer.submit(f"text {number}") for number in range(100)]
            producer.flush()
            submitted = [receipt.result() for receipt in receipts]
        sent: list[MessageId] = [first, *many, *table, *submitted]
        assert len(set(sent)) == 203
        with client.stream_consumer("orders", "billing", start="earliest") as consumer:
            messages = []
            for message in consumer:
                messages.append(message)
                consumer.ack(message)
                if len(messages) == len(sent):
                    break
            assert consumer.receive(timeout=0.05) is None
        assert sorted(message.id for message in messages) == sorted(sent)
        found = next(message for message in messages if message.id == first)
        assert (found.key, found.value, found.headers) == (b"customer-7", b"paid", {"trace": b"a1"})
        with client.stream_consumer("orders", "billing") as consumer:
            assert consumer.receive_batch(timeout=0.2) is None, "closing stored the acks"


def test_batches_and_messages_can_be_mixed(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, client):
        with client.producer("orders") as producer:
            producer.send_many([b"%d" % number for number in range(100)])
        with client.checkpoint_consumer("orders", start="earliest") as consumer:
            first = [consumer.receive(timeout=20) for _ in range(7)]
            assert [message.offset for message in first if message is not None] == list(range(7))
            saved = consumer.checkpoint()
            batch = consumer.receive_batch(timeout=20)
            assert batch is not None
            assert (batch.base_offset, batch.next_offset) == (7, 100)
            assert batch.table["value"].to_pylist() == [b"%d" % number for number in range(7, 100)]
        with client.checkpoint_consumer("orders", start=saved) as consumer:
            message = consumer.receive(timeout=20)
            assert message is not None
            assert message.offset == 7


def test_records_say_when_queues_deliver_them(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, client), client.producer("orders") as producer:
        producer.send(b"late", deliver_after=60)
        producer.submit(b"short", headers={"trace": "a1"}, ttl=60).result(timeout=20)
        refused = producer.submit(b"wrong", ttl=-1)
        assert isinstance(refused.exception(timeout=20), InvalidArgument)
        with pytest.raises(InvalidArgument, match="ttl is -1"):
            producer.flush()
        with client.checkpoint_consumer("orders", start="earliest") as consumer:
            late, short = (consumer.receive(timeout=20) for _ in range(2))
            assert late is not None
            assert short is not None
            assert list(late.headers) == [DELIVER_AT]
            assert list(short.headers) == ["trace", EXPIRES_AT]


def test_an_ack_is_stored_when_the_block_is_left(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, client):
        with client.producer("orders") as producer:
            producer.send_many([b"x"] * 30)
        for first in range(0, 30, 3):
            consumer = client.stream_consumer("orders", "billing", start="earliest")
            with contextlib.closing(consumer) if first % 2 else consumer:
                consumer.start()
                messages = [consumer.receive(timeout=20) for _ in range(3)]
                assert messages[2] is not None
                assert messages[2].offset == first + 2
                consumer.ack(messages[2])


def test_acks_are_stored_also_when_only_the_client_is_closed(tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, client):
        with client.producer("orders") as producer:
            producer.send_many([b"x"] * 10)
        with sync.connect(url) as other:
            consumer = other.stream_consumer("orders", "billing", start="earliest")
            consumer.start()
            batch = consumer.receive_batch(timeout=20)
            assert batch is not None
            consumer.ack(batch)
        with sync.connect(url) as other:
            producer = other.producer("orders", max_in_flight_bytes=4_096, max_batch_bytes=2_000)
            producer.open()
            receipts = [producer.submit(bytes(1_000)) for _ in range(100)]
        assert [receipt.result().offset for receipt in receipts] == list(range(10, 110))
        with client.stream_consumer("orders", "billing") as consumer:
            message = consumer.receive(timeout=20)
            assert message is not None
            assert message.offset == 10
        with pytest.raises(ClientClosed):
            other.producer("orders")
        with pytest.raises(ClientClosed):
            producer.submit(b"too late")


def test_errors_are_those_of_the_asyncio_client(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, client):
        with pytest.raises(TopicNotFound):
            client.producer("unknown").open()
        with pytest.raises(TopicNotFound):
            client.stream_consumer("unknown", "billing").start()
        with pytest.raises(InvalidArgument):
            client.stream_consumer("orders", "billing", start="noon")
        with pytest.raises(TopicExists):
            client.admin.create_topic("orders")
        assert "create_topic" in dir(client.admin)
        with pytest.raises(AttributeError):
            client.admin.make_coffee()
        with pytest.raises(SubscriptionNotFound), client.queue_consumer("orders", "mailer") as queue:
            queue.receive(timeout=20)
        with client.producer("orders") as producer:
            wrong: Any = 17
            receipt = producer.submit(wrong)
            assert isinstance(receipt.exception(timeout=20), InvalidArgument)
            with pytest.raises(InvalidArgument):
                producer.flush()
            producer.flush()
        with client.stream_consumer("orders", "billing") as consumer:
            pass
        for call in (consumer.receive, consumer.receive_batch, lambda: next(consumer)):
            with pytest.raises(ClientClosed):
                call()
        consumer.close()
    with pytest.raises(ConnectFailed), sync.connect("braid://127.0.0.1:1", timeout=0.2):
        pass
    with pytest.raises(ConnectFailed):
        sync.connect("braid://127.0.0.1:1", timeout=0.2).producer("orders")
    with pytest.raises(ConnectFailed, match=r"the host name 'no\.such\.host\.invalid' cannot be resolved"):
        sync.connect("braid://no.such.host.invalid:6660", timeout=2.0).open()


def loop_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "braid"}


def test_without_with_it_connects_at_the_first_use_and_close_ends_its_thread(tmp_path: Path) -> None:
    with broker_in_a_thread(str(tmp_path)) as url:
        before = loop_threads()
        client = sync.connect(url, timeout=20)
        assert loop_threads() == before
        client.admin.create_topic("orders")
        producer = client.producer("orders")
        producer.open()
        receipt = producer.submit(b"paid")
        assert len(loop_threads() - before) == 1
        client.close()
        assert receipt.result(timeout=0).offset == 0, "closing waits for what was sent"
        assert loop_threads() == before
        client.close()
        for call in (lambda: client.admin, lambda: client.producer("orders"), client.open):
            with pytest.raises(ClientClosed, match="connect again"):
                call()


def test_without_with_everything_opens_when_it_is_first_used(tmp_path: Path) -> None:
    with broker_in_a_thread(str(tmp_path)) as url:
        client = sync.connect(url, timeout=20)
        client.admin.create_topic("orders")
        receipts = [client.producer("orders").submit(b"paid") for _ in range(2)]
        assert [receipt.result(timeout=20).offset for receipt in receipts] == [0, 1]
        with pytest.raises(TopicNotFound):
            client.producer("unknown").submit(b"paid")
        consumer = client.stream_consumer("orders", "billing", start="earliest")
        message = consumer.receive(timeout=20)
        assert message is not None
        consumer.ack(message)
        reader = client.checkpoint_consumer("orders", start="earliest")
        saved = reader.checkpoint()
        assert [next(reader).offset, next(reader).offset] == [0, 1]
        assert next(client.checkpoint_consumer("orders", start=saved)).offset == 0
        client.close()
        with sync.connect(url, timeout=20) as other:
            assert next(other.stream_consumer("orders", "billing")).offset == 1, "closing the client stored the ack"


FORKING = """
import os, sys, asyncio
import braid, braid.sync
client = braid.sync.connect(sys.argv[1], timeout=20)
unused = braid.sync.connect(sys.argv[1], timeout=20)
producer = client.producer("orders")
producer.send(b"before")
consumer = client.stream_consumer("orders", "billing", start="earliest")
assert consumer.receive(timeout=20).value == b"before"
assert consumer.receive(timeout=0.01) is None  # A take is pending now.
loop = asyncio.new_event_loop()
asyncio_client = braid.connect(sys.argv[1], timeout=20)
asyncio_producer = loop.run_until_complete(asyncio_client.producer("orders").open())
asyncio_consumer = asyncio_client.checkpoint_consumer("orders")
loop.run_until_complete(asyncio_consumer.start())

def refused(what, call):
    try:
        call()
    except braid.errors.ClientClosed as error:
        assert "braid.sync.connect(" in str(error), error
    else:
        sys.exit(f"{what} did not raise")

if (child := os.fork()) == 0:
    refused("send", lambda: producer.send(b"from the child"))
    refused("submit", lambda: producer.submit(b"from the child"))
    refused("receive", consumer.receive)
    refused("admin", lambda: client.admin.list_topics())
    refused("producer", lambda: client.producer("orders"))
    consumer.close(), producer.close(), client.close()
    new = asyncio.new_event_loop()
    refused("asyncio send", lambda: new.run_until_complete(asyncio_producer.send(b"from the child")))
    refused("asyncio submit", lambda: asyncio_producer.submit(b"from the child"))
    refused("asyncio receive", lambda: new.run_until_complete(asyncio_consumer.receive()))
    refused("asyncio admin", lambda: new.run_until_complete(asyncio_client.admin.list_topics()))
    refused("asyncio open", lambda: new.run_until_complete(asyncio_client.open()))
    with unused.producer("orders") as own:
        own.send(b"from the child")
    os._exit(0)
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0
assert consumer.receive(timeout=20).value == b"from the child"
assert producer.send(b"after").offset == 2
assert loop.run_until_complete(asyncio_producer.send(b"after")).offset == 3
loop.run_until_complete(asyncio_client.close())
client.close()
print("done")
"""


def test_a_forked_child_is_told_to_connect_by_itself_and_the_parent_goes_on(tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, _):
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        command = [sys.executable, "-c", FORKING, url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


def test_a_client_that_was_closed_before_its_first_use_stays_closed() -> None:
    client = sync.connect("braid://127.0.0.1:1")
    client.close()
    with pytest.raises(ClientClosed, match="connect again"):
        client.producer("orders")


def test_threads_that_use_a_client_for_the_first_time_share_one_connection(tmp_path: Path) -> None:
    with broker_in_a_thread(str(tmp_path)) as url:
        before, found = loop_threads(), []
        client = sync.connect(url, timeout=20)
        threads = [threading.Thread(target=lambda: found.append(client.admin.list_topics())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [[]] * 8
        assert len(loop_threads() - before) == 1
        client.close()


LEFT_OPEN = """
import braid.sync
client = braid.sync.connect({url!r}, timeout=20)
client.admin.create_topic("orders")
producer = client.producer("orders")
producer.open()
producer.submit(b"paid")
consumer = client.stream_consumer("orders", "billing", start="earliest")
consumer.__enter__()
print(consumer.receive(timeout=20).value)
"""


def test_a_program_that_closes_nothing_ends_without_a_word(tmp_path: Path) -> None:
    with broker_in_a_thread(str(tmp_path)) as url:
        command = [sys.executable, "-X", "dev", "-W", "error", "-c", LEFT_OPEN.format(url=url)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "b'paid'\n", "")


def test_submitting_does_not_change_threads_for_each_record(tmp_path: Path) -> None:
    """Far more records than the producer may have under way: the caller waits now and then, for many at once."""
    with cluster(tmp_path) as (_, client):
        count = 3 * MAX_GATHERED_RECORDS
        with client.producer("orders", max_in_flight_bytes=64 << 10) as producer:
            receipts = [producer.submit(b"%d" % number) for number in range(count)]
            producer.flush()
            assert [receipt.result().offset for receipt in receipts] == list(range(count))
        handed_over = {id(receipt._gathered) for receipt in receipts}
        assert len(handed_over) < count / 10
        with client.checkpoint_consumer("orders", start="earliest") as consumer:
            values: list[bytes] = []
            while len(values) < count:
                batch = consumer.receive_batch(timeout=20)
                assert batch is not None
                values += batch.values()
            assert values == [b"%d" % number for number in range(count)]


def test_what_is_sent_after_what_was_submitted_is_stored_after_it(tmp_path: Path) -> None:
    with (
        cluster(tmp_path) as (_, client),
        client.producer("orders", max_in_flight_bytes=4_096, max_batch_bytes=2_000) as producer,
    ):
        for first in range(0, 500, 100):
            receipts = [producer.submit(bytes(1_000)) for _ in range(99)]
            assert producer.send(b"y").offset == first + 99
            assert [receipt.result(timeout=20).offset for receipt in receipts] == list(range(first, first + 99))
        receipts = [producer.submit(bytes(1_000)) for _ in range(100)]
        producer.flush()
        assert all(receipt.done() for receipt in receipts)


def test_a_receipt_can_be_waited_for_with_a_limit(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, client), client.producer("orders", linger=1.0) as producer:
        receipt = producer.submit(b"x")
        with pytest.raises(TimedOut):
            receipt.result(timeout=0.01)
        producer.flush()
        assert receipt.result() == MessageId(0, 0)
        assert receipt.exception() is None


def test_it_works_while_a_loop_runs_in_the_same_thread(tmp_path: Path) -> None:
    """As in a notebook."""

    async def cell(client: sync.Client) -> None:
        with client.producer("orders") as producer:
            producer.send(b"from a cell")
        with client.checkpoint_consumer("orders", start="earliest") as consumer:
            message = consumer.receive(timeout=20)
            assert message is not None
            assert message.value == b"from a cell"

    with cluster(tmp_path) as (_, client):
        asyncio.run(cell(client))


def test_several_threads_share_a_client_and_a_producer(tmp_path: Path) -> None:
    with cluster(tmp_path) as (_, client), client.producer("orders") as producer:
        receipts: list[Any] = []

        def work() -> None:
            receipts.extend([producer.submit(b"x") for _ in range(500)])
            producer.send(b"y")

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(receipt.result() for receipt in receipts).offset <= 2_003
        assert len({receipt.result() for receipt in receipts}) == 2_000


def test_messages_that_a_timed_out_receive_waited_for_are_not_lost(tmp_path: Path) -> None:
    with (
        cluster(tmp_path) as (_, client),
        client.producer("orders") as producer,
        client.stream_consumer("orders", "billing", start="earliest") as consumer,
    ):
        seen = []
        for number in range(50):
            assert consumer.receive(timeout=0.001) is None
            producer.send(b"%d" % number)
            message = consumer.receive(timeout=20)
            assert message is not None
            seen.append(message.value)
        assert seen == [b"%d" % number for number in range(50)]


def test_a_segment_that_goes_to_another_consumer_is_not_handed_out_further(tmp_path: Path) -> None:
    with cluster(tmp_path, segments=2) as (_, client):
        with client.producer("orders") as producer:
            sent = set(producer.send_many([(b"k%d" % number, b"v") for number in range(200)]))
        with client.stream_consumer("orders", "billing", name="a", start="earliest") as first:
            got: list[MessageId] = []
            by_name: dict[str, list[int]] = {"a": [], "b": []}

            def work(consumer: BlockingStreamConsumer, count: int, timeout: float) -> int:
                for number in range(count):
                    message = consumer.receive(timeout=timeout)
                    if message is None:
                        return number
                    got.append(message.id)
                    by_name[consumer.name].append(message.segment)
                    consumer.ack(message)
                return count

            work(first, 5, 20)
            with client.stream_consumer("orders", "billing", name="b", start="earliest") as second:
                deadline = time.monotonic() + 20
                while len(first.segments) != 1 or len(second.segments) != 1:
                    assert time.monotonic() < deadline
                    time.sleep(0.005)
                before = len(by_name["a"])
                while len(got) < len(sent):
                    assert time.monotonic() < deadline
                    work(first, 10, 0.01)
                    work(second, 10, 0.01)
                assert set(by_name["a"][before:]) <= set(first.segments)
                assert set(by_name["b"]) == set(second.segments)
            assert len(got) == len(sent)
            assert set(got) == sent


def test_a_split_and_a_merge_are_ridden_out_with_every_key_in_order(tmp_path: Path) -> None:
    keys = [b"key-%d" % number for number in range(6)]
    rounds = 4

    def complete(numbers: dict[bytes, list[int]]) -> bool:
        return all(numbers[key] == list(range(rounds * 20)) for key in keys)

    def taken(consumer: BlockingConsumer[Any], numbers: dict[bytes, list[int]]) -> Iterator[Message]:
        while sum(map(len, numbers.values())) < rounds * 20 * len(keys):
            message = consumer.receive(timeout=20)
            assert message is not None, f"only {numbers} came"
            assert message.key is not None
            numbers[message.key].append(int(message.value))
            yield message

    with cluster(tmp_path) as (_, client):
        streamed: dict[bytes, list[int]] = {key: [] for key in keys}
        changes: tuple[Callable[[], object], ...] = (
            lambda: client.admin.split("orders", 0),
            lambda: client.admin.split("orders", 1),
            lambda: client.admin.merge("orders", 3, 4),
            lambda: None,
        )
        with client.producer("orders") as producer, client.stream_consumer("orders", "billing") as consumer:
            for turn, change in enumerate(changes):
                for number in range(turn * 20, (turn + 1) * 20):
                    for key in keys:
                        producer.submit(b"%d" % number, key=key)
                change()  # While batches are under way.
            producer.flush()
            for message in taken(consumer, streamed):
                consumer.ack(message)
            assert consumer.segments == (2, 5)
        assert complete(streamed)
        read: dict[bytes, list[int]] = {key: [] for key in keys}
        with client.checkpoint_consumer("orders") as reader:
            first = taken(reader, read)
            for _ in range(150):
                next(first)
            saved = reader.checkpoint()
        with client.checkpoint_consumer("orders", start=saved) as reader:
            list(taken(reader, read))
        assert complete(read)


def test_checkpoint_consumers_share_a_topic_as_a_group(tmp_path: Path) -> None:
    with cluster(tmp_path, segments=2) as (_, client):
        with client.producer("orders") as producer:
            producer.send_many([(b"key-%d" % number, b"%d" % number) for number in range(40)])

        def take(consumer: BlockingCheckpointConsumer, count: int) -> list[bytes]:
            messages = [consumer.receive(timeout=20) for _ in range(count)]
            return [message.value for message in messages if message is not None]

        with client.checkpoint_consumer("orders", group="etl", name="one") as one:
            values = take(one, 15)
            saved = one.checkpoint()
            assert one.segments == (0, 1)
        with client.checkpoint_consumer("orders", group="etl", start=[saved]) as two:
            values += take(two, 25)
            assert two.receive(timeout=0.05) is None
        assert sorted(map(int, values)) == list(range(40))


def test_importing_it_does_not_import_arrow() -> None:
    check = "import sys, braid.sync; sys.exit('pyarrow' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", check], env=environment, check=False).returncode == 0


SCRIPT = """
import sys
from braid import sync
with sync.connect(sys.argv[1]) as client:
    with client.stream_consumer("orders", "billing", start="earliest") as consumer:
        for message in consumer:
            consumer.ack(message)
            print(message.value.decode(), flush=True)
"""


def test_control_c_ends_a_waiting_consumer_and_its_acks_are_stored(tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, client):
        with client.producer("orders") as producer:
            producer.send_many([b"1", b"2", b"3"])
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, url],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        try:
            assert process.stdout is not None
            assert [process.stdout.readline().strip() for _ in range(3)] == ["1", "2", "3"]
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
            process.wait()
        assert "KeyboardInterrupt" in errors
        assert process.returncode in (1, 130, -signal.SIGINT)
        with client.stream_consumer("orders", "billing") as consumer:
            assert consumer.receive(timeout=0.3) is None


def test_a_closed_client_leaves_no_thread_behind(tmp_path: Path) -> None:
    with cluster(tmp_path) as (url, _):
        before = threading.active_count()
        for _ in range(3):
            with sync.connect(url):
                assert threading.active_count() == before + 1
        assert threading.active_count() == before
