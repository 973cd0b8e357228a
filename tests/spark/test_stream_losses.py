"""Queries whose records are gone: deleted by retention before they were read, or with their topic. The reader is
driven as Spark drives it, against a broker whose retention runs when it is told to."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import braid.sync
from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig
from braid.broker.segments.owned_segment import OwnedSegment
from braid.client.blocking.loop_thread import LoopThread
from braid.model.errors import DataLoss
from braid.storage.retention import RetentionPolicy
from braid.wire.address import format_address
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import numbered
from tests.spark.stream_kit import EARLIEST, Query


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is so is seen at once, not a tenth of a second later."""
    monkeypatch.setattr("braid.spark.stream.topic_watch.MAX_FRESH_S", 0.0)


class Retaining:
    """A broker in this process, whose retention runs when it is told to."""

    def __init__(self, folder: Path) -> None:
        self._thread = LoopThread()
        config = BrokerConfig(
            data=str(folder / "data"), listen="127.0.0.1:0", admin="127.0.0.1:0", storage=f"file://{folder}/history",
            file_bytes=64 << 10, spare_files=0,
        )  # fmt: skip
        self._broker = self._thread.call(Broker.open(config))
        self.url = f"braid://{format_address(self._broker.address)}"

    def fill(self, topic: str, count: int) -> None:
        """A thousand records are a chunk, or more; the exporter would put all files that wait into one."""
        with braid.sync.connect(self.url) as client, client.producer(topic, max_batch_records=100) as producer:
            for first in range(0, count, 1_000):
                records, before = numbered(count)[first : first + 1_000], self._exported(topic)
                for key, value in records:
                    producer.submit(value, key=key)
                producer.flush()
                if len(records) == 1_000:
                    wait_until(lambda before=before: self._exported(topic) > before, "a chunk")  # type: ignore[misc]

    def earliest(self, topic: str) -> int:
        return self._segment(topic).earliest

    def _exported(self, topic: str) -> int:
        return self._segment(topic).storage.catalog.next_offset

    def _segment(self, topic: str) -> OwnedSegment:
        return self._broker.segments.get(f"public/default/{topic}", 0)

    def retain(self, topic: str) -> int:
        """Delete what may go, if a topic keeps 100 kB; the first offset that is left. The housekeeper does the same
        once a minute, and keeps more on local disks."""
        segment = self._segment(topic)
        policy = RetentionPolicy(max_bytes=100_000)
        self._thread.call(segment.storage.apply_retention(policy, needed_from=segment.cursors.lowest()))
        return self.earliest(topic)

    def close(self) -> None:
        self._thread.call(self._broker.close())
        self._thread.stop()


@pytest.fixture(scope="module")
def retaining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Retaining]:
    broker = Retaining(tmp_path_factory.mktemp("retaining"))
    yield broker
    broker.close()


def create(broker: Retaining, topic: str) -> str:
    with braid.sync.connect(broker.url) as client:
        client.admin.create_topic(topic)
    return topic


@pytest.mark.usefixtures("always_looking")
def test_a_query_whose_records_were_deleted_fails_and_says_which(retaining: Retaining) -> None:
    topic = create(retaining, "eaten")
    retaining.fill(topic, 5_000)
    with Query(retaining.url, topic, **EARLIEST, maxRecordsPerTrigger=10) as query:
        assert query.next() is not None
        earliest = retaining.retain(topic)
        retaining.fill(topic, 1)
        with pytest.raises(DataLoss) as failure:
            query.next()
    message = str(failure.value)
    assert f"offsets 10 to {earliest - 1} of segment 0 of public/default/eaten were deleted by retention" in message
    assert "failOnDataLoss" in message
    assert "checkpointLocation" in message


@pytest.mark.usefixtures("always_looking")
def test_a_query_that_may_lose_records_goes_on_with_the_first_that_is_there(
    retaining: Retaining, caplog: pytest.LogCaptureFixture
) -> None:
    topic = create(retaining, "eaten-on")
    retaining.fill(topic, 5_000)
    journal: list[str] = []
    options = {**EARLIEST, "maxRecordsPerTrigger": 1_000, "failOnDataLoss": "false"}
    with Query(retaining.url, topic, journal, **options) as query:
        first = query.next()
        assert first is not None
        assert len(first.rows) == 1_000
        earliest = retaining.retain(topic)
        assert earliest > 1_000
        retaining.fill(topic, 1)
        with caplog.at_level(logging.WARNING):
            second = query.next()
        assert second is not None
        assert f"offsets 1000 to {earliest - 1} of segment 0" in caplog.text
        assert second.rows[0].offset == earliest
        caplog.clear()
        rest = [row for batch in query.all() for row in batch.rows]
        assert caplog.text == "", "it was said once"
    offsets = [row.offset for row in second.rows + rest]
    assert offsets == list(range(earliest, 5_001))
    with Query(retaining.url, topic, journal[:2], **options) as query:
        assert query.again().partitions == second.partitions


def test_a_replayed_micro_batch_whose_records_are_gone_fails(retaining: Retaining) -> None:
    topic = create(retaining, "eaten-again")
    retaining.fill(topic, 5_000)
    with Query(retaining.url, topic, **EARLIEST) as query:
        assert query.next() is not None
        journal = query.journal
    retaining.retain(topic)
    with Query(retaining.url, topic, journal, **EARLIEST) as query, pytest.raises(DataLoss, match="were deleted"):
        query.again()


def test_no_record_is_skipped_when_retention_deletes_up_to_where_the_query_stands(retaining: Retaining) -> None:
    topic = create(retaining, "eaten-up-to")
    retaining.fill(topic, 5_000)
    earliest = retaining.retain(topic)
    with Query(retaining.url, topic, startingOffsets=json.dumps({"0": earliest})) as query:
        rows = [row for batch in query.all() for row in batch.rows]
    assert [row.offset for row in rows] == list(range(earliest, 5_000))


def test_retention_waits_for_a_query_with_a_subscription(retaining: Retaining) -> None:
    topic = create(retaining, "kept")
    with Query(retaining.url, topic, subscription="nightly", **EARLIEST, maxRecordsPerTrigger=2_000) as query:
        query.start()  # The subscription is there before the first micro-batch.
        retaining.fill(topic, 5_000)
        assert query.some().rows
        assert retaining.retain(topic) == 0
        assert sum(len(batch.rows) for batch in query.all()) == 3_000
        query.next()
        assert retaining.retain(topic) > 2_000


def test_a_topic_that_was_created_again_is_not_taken_for_the_old_one(
    retaining: Retaining, caplog: pytest.LogCaptureFixture
) -> None:
    topic = create(retaining, "anew")
    retaining.fill(topic, 100)
    with Query(retaining.url, topic, **EARLIEST) as query:
        assert query.next() is not None
        journal = query.journal
    with braid.sync.connect(retaining.url) as client:
        client.admin.delete_topic(topic)
        client.admin.create_topic(topic)
    retaining.fill(topic, 30)
    with Query(retaining.url, topic, list(journal)) as query:
        with pytest.raises(DataLoss, match="was deleted and created again"):
            query.next()
        with pytest.raises(DataLoss, match="was deleted and created again"):
            query.again()
    with Query(retaining.url, topic, journal, failOnDataLoss="false") as query, caplog.at_level(logging.WARNING):
        batch = query.next()
        assert batch is not None
        assert [row.offset for row in batch.rows] == list(range(30))
        assert "was deleted and created again" in caplog.text
        assert query.again() == batch
        assert query.next() is None


def test_a_topic_that_is_created_again_under_a_running_query_is_noticed(retaining: Retaining) -> None:
    topic = create(retaining, "anew-meanwhile")
    retaining.fill(topic, 100)
    with Query(retaining.url, topic, **EARLIEST) as query:
        assert query.next() is not None
        with braid.sync.connect(retaining.url) as client:
            client.admin.delete_topic(topic)
            client.admin.create_topic(topic)
        retaining.fill(topic, 120)
        with pytest.raises(DataLoss, match="was deleted and created again"):
            query.some()


class Forgetful:
    """A broker in this process. Its disk can lose what came after a moment, as a power loss does to a topic that
    confirms before it syncs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = LoopThread()
        self._wal = ""
        self._open()

    def _open(self) -> None:
        config = BrokerConfig(data=str(self._folder / "data"), listen="127.0.0.1:0", admin="127.0.0.1:0", spare_files=0)
        self._broker = self._thread.call(Broker.open(config))
        self.url = f"braid://{format_address(self._broker.address)}"

    def create(self, topic: str) -> str:
        with braid.sync.connect(self.url) as client:
            client.admin.create_topic(topic, durability="memory")
        return topic

    def send(self, topic: str, word: str, numbers: range) -> None:
        with braid.sync.connect(self.url) as client, client.producer(topic) as producer:
            for number in numbers:
                assert producer.send(f"{word} {number}").offset == number

    def remember(self, topic: str) -> None:
        """Keep what is synced now."""
        log = self._broker.segments.get(f"public/default/{topic}", 0).storage.log
        self._thread.call(log.flush())
        self._wal = log.folder
        shutil.copytree(self._wal, self._folder / "synced")

    def lose_power(self) -> None:
        """Start again with what was kept."""
        self._thread.call(self._broker.close())
        shutil.rmtree(self._wal)
        shutil.move(self._folder / "synced", self._wal)
        self._open()

    def close(self) -> None:
        self._thread.call(self._broker.close())
        self._thread.stop()


@pytest.fixture
def forgetful(tmp_path: Path) -> Iterator[Forgetful]:
    broker = Forgetful(tmp_path)
    yield broker
    broker.close()


def test_a_query_that_had_read_lost_records_does_not_skip_those_that_took_their_offsets(
    forgetful: Forgetful, caplog: pytest.LogCaptureFixture
) -> None:
    topic = forgetful.create("orders")
    forgetful.send(topic, "old", range(4))
    forgetful.remember(topic)
    forgetful.send(topic, "old", range(4, 10))
    with Query(forgetful.url, topic, **EARLIEST) as query:
        assert [row.offset for row in query.some().rows] == list(range(10))
        journal = query.journal
    forgetful.lose_power()
    forgetful.send(topic, "new", range(4, 20))
    with Query(forgetful.url, topic, list(journal), **EARLIEST) as query:
        with pytest.raises(
            DataLoss, match=r"holds other records from offset 4 on: the query had read it up to offset 10"
        ):
            query.next()
        with pytest.raises(DataLoss, match=r"from offset 4 on: the micro-batch reaches up to offset 10"):
            query.again()
    unchecked = [json.dumps({name: value for name, value in json.loads(journal[0]).items() if name != "epochs"})]
    with Query(forgetful.url, topic, unchecked, **EARLIEST) as query:
        assert query.some().rows[0].offset == 10, "the checkpoint of an older build"
    with Query(forgetful.url, topic, journal, failOnDataLoss="false") as query, caplog.at_level(logging.WARNING):
        batch = query.some()
        assert "from offset 4 on" in caplog.text
        assert [row.value for row in batch.rows] == [b"new %d" % number for number in range(4, 20)]
        caplog.clear()
        assert query.again() == batch
        assert query.next() is None
        assert caplog.text == "", "it was said once"
