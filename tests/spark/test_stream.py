"""The stream reader against a real broker, driven as Spark drives it. Spark itself: test_stream_queries.py."""

from __future__ import annotations

import copy
import datetime
import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxBytes, ReadMaxFiles, ReadMaxRows

import braid.sync
from braid.model.errors import BraidError, DataLoss, InvalidArgument, OffsetOutOfRange, TopicNotFound
from braid.model.ids import LayoutEpoch, Revision, SegmentId
from braid.model.layout import HashRange, Layout, SegmentInfo, SegmentState
from braid.scan.connection import ScanConnection
from braid.spark.source.options import SourceOptions
from braid.spark.stream.topic_watch import FRESH_S, TopicWatch
from braid.storage.history.manifest import SegmentManifest, TopicManifest
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import StoredBroker, numbered
from tests.spark.stream_kit import EARLIEST, MicroBatch, Query, Row


def sent_rows(sent: list[Any]) -> set[Row]:
    return {Row(each.segment, each.offset, each.key, each.value) for each in sent}


def check_order(batches: list[MicroBatch]) -> None:
    """Offsets rise by one in each segment, over all micro-batches."""
    offsets: dict[int, list[int]] = {}
    for batch in batches:
        for row in sorted(batch.rows):
            offsets.setdefault(row.segment, []).append(row.offset)
        for partition in batch.partitions:
            for before, after in pairwise(partition):
                assert before.segment != after.segment or after.offset == before.offset + 1
    for found in offsets.values():
        assert found == list(range(found[0], found[0] + len(found)))


@pytest.fixture
def always_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is so is seen at once, not a tenth of a second later."""
    monkeypatch.setattr("braid.spark.stream.topic_watch.MAX_FRESH_S", 0.0)


# ── each record once ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("limits", "batches"),
    [
        ({}, 1),
        ({"maxRecordsPerTrigger": 700}, 5),
        ({"maxBytesPerTrigger": 70_000}, 5),
        ({"maxRecordsPerTrigger": 3_000, "maxBytesPerTrigger": 70_000}, 5),
    ],
)
def test_each_record_is_read_once_and_in_order(broker: StoredBroker, limits: dict[str, Any], batches: int) -> None:
    topic = broker.create(f"once-{'-'.join(map(str, limits.values()))}", 3)
    sent = broker.fill(topic, numbered(3_000))
    with Query(broker.url, topic, **EARLIEST, **limits) as query:
        found = list(query.all())
        assert query.next() is None
        assert len(found) >= batches
        assert all(len(batch.rows) <= limits.get("maxRecordsPerTrigger", 3_000) for batch in found)
        more = broker.fill(topic, numbered(100))
        found.append(query.some())
    rows = [row for batch in found for row in batch.rows]
    assert set(rows) == sent_rows(sent + more)
    assert len(rows) == 3_100
    check_order(found)


def test_nothing_new_gives_the_start_back_to_the_letter(broker: StoredBroker) -> None:
    topic = broker.create("idle", 2)
    broker.fill(topic, numbered(100))
    with Query(broker.url, topic, **EARLIEST) as query:
        assert query.next() is not None
        start = query.start()
        for limit in (ReadAllAvailable(), ReadMaxRows(1), ReadMaxBytes(1)):
            assert query.reader.latestOffset(start, limit) is start
        assert query.reader.partitions(start, start) == []


def test_a_query_may_begin_before_the_first_record(broker: StoredBroker) -> None:
    topic = broker.create("empty")
    with Query(broker.url, topic) as query:
        assert query.next() is None
        sent = broker.fill(topic, numbered(10))
        assert set(query.some().rows) == sent_rows(sent)


def test_a_stream_begins_at_the_latest_records_unless_told_otherwise(broker: StoredBroker) -> None:
    topic = broker.create("latest", 2)
    broker.fill(topic, numbered(100))
    with Query(broker.url, topic) as query:
        assert query.next() is None
        sent = broker.fill(topic, numbered(10))
        assert set(query.some().rows) == sent_rows(sent)


def test_a_stream_begins_at_the_offsets_that_are_named(broker: StoredBroker) -> None:
    topic = broker.create("named", 3)
    sent = broker.fill(topic, numbered(1_000))
    with Query(broker.url, topic, startingOffsets='{"0": 17, "1": "END"}') as query:
        rows = [row for batch in query.all() for row in batch.rows]
    expected = {row for row in sent_rows(sent) if row.segment == 2 or (row.segment == 0 and row.offset >= 17)}
    assert set(rows) == expected


def test_rows_before_the_starting_time_are_never_given(broker: StoredBroker) -> None:
    topic = broker.create("timed", 2)
    broker.fill(topic, numbered(500))
    with braid.sync.connect(broker.url) as client, client.producer(topic) as producer:
        limit = datetime.datetime.now(datetime.UTC)
        old, new = limit - datetime.timedelta(hours=1), limit + datetime.timedelta(hours=1)
        times = [old, new, old, new]  # not in order, in one batch
        receipts = [producer.submit(b"%d" % number, key=b"k", timestamp=each) for number, each in enumerate(times)]
        producer.flush()
        assert all(receipt.result() for receipt in receipts)
    with Query(broker.url, topic, startingTimestamp=limit.isoformat()) as query:
        rows = [row for batch in query.all() for row in batch.rows]
        assert sum(query.start()["positions"].values()) == 504
        assert sum(json.loads(query.journal[0])["from"].values()) >= 250, "the brokers' time index was not used"
    assert [row.value for row in rows] == [b"1", b"3"]


# ── restarts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_restarted_query_goes_on_where_its_checkpoint_is(broker: StoredBroker) -> None:
    topic = broker.create("restarted", 2)
    sent = broker.fill(topic, numbered(1_000))
    journal: list[str] = []
    found: list[MicroBatch] = []
    for _ in range(10):
        # `latest` and `earliest` mean nothing any more: the checkpoint counts.
        place = "latest" if journal else "earliest"
        with Query(broker.url, topic, journal, startingOffsets=place, maxRecordsPerTrigger=150) as query:
            batch = query.next()
            found.extend([batch] if batch is not None else [])
    assert {row for batch in found for row in batch.rows} == sent_rows(sent)
    assert sum(len(batch.rows) for batch in found) == 1_000
    check_order(found)


@pytest.mark.parametrize("partitions", [1, 2, 7])
def test_a_micro_batch_that_runs_again_has_the_same_rows_in_the_same_partitions(
    broker: StoredBroker, partitions: int
) -> None:
    topic = broker.create(f"again-{partitions}", 3)
    broker.fill(topic, numbered(900))
    options = {**EARLIEST, "maxRecordsPerTrigger": 600}
    with Query(broker.url, topic, minPartitions=partitions, **options) as query:
        query.next()
        second = query.next()
        assert second is not None
        assert len(second.partitions) == partitions
        journal = query.journal
    chunks = len(broker.chunks(topic))
    broker.fill(topic, numbered(5_000))  # What was read from the owner is in chunks afterwards.
    broker.until_chunks(topic, chunks + 3)
    with Query(broker.url, topic, journal, minPartitions=partitions + 5, **options) as query:
        assert query.again() == second


@pytest.mark.parametrize("asked", [{}, {"startingTimestamp": "2000-01-01T00:00:00Z"}], ids=["no time", "another time"])
def test_the_starting_time_of_a_query_holds_whatever_is_asked_later(
    broker: StoredBroker, asked: dict[str, str]
) -> None:
    topic = broker.create(f"begun-at-a-time-{len(asked)}", 2)
    limit = datetime.datetime.now(datetime.UTC)
    hour = datetime.timedelta(hours=1)

    def fill() -> None:
        with braid.sync.connect(broker.url) as client, client.producer(topic) as producer:
            for number, time in enumerate([limit - hour, limit + hour] * 10):
                producer.submit(b"%d" % number, key=b"%d" % (number // 2), timestamp=time)
            producer.flush()

    fill()
    with Query(broker.url, topic, startingTimestamp=limit.isoformat()) as query:
        first = query.some()
        journal = query.journal
    assert len(first.rows) == 10
    with Query(broker.url, topic, journal, **asked) as query:
        assert query.again().partitions == first.partitions
        fill()
        assert {int(row.value) % 2 for row in query.some().rows} == {1}


def test_the_first_micro_batch_runs_again_from_where_it_began(broker: StoredBroker) -> None:
    """Its beginning is in no journal of Spark's, and `latest` is another place after the crash."""
    topic = broker.create("first")
    broker.fill(topic, numbered(100))
    with Query(broker.url, topic) as query:
        assert query.next() is None
        sent = broker.fill(topic, numbered(50))
        first = query.some()
        journal = query.journal
    broker.fill(topic, numbered(70))
    with Query(broker.url, topic, journal) as query:
        assert query.again().partitions == first.partitions
        assert set(first.rows) == sent_rows(sent)
        following = query.next()
        assert following is not None
        assert len(following.rows) == 70


def test_an_empty_first_micro_batch_runs_again_empty(broker: StoredBroker) -> None:
    topic = broker.create("first-empty")
    broker.fill(topic, numbered(100))
    with Query(broker.url, topic) as query:
        start = query.start()
        journal = [json.dumps(query.reader.latestOffset(start, query.limit))]  # Spark runs it although it is empty.
    broker.fill(topic, numbered(70))
    with Query(broker.url, topic, journal) as query:
        assert query.again().rows == []
        following = query.next()
        assert following is not None
        assert len(following.rows) == 70


def test_a_broker_that_is_killed_and_started_again_is_ridden_through(tmp_path: Path) -> None:
    with StoredBroker(tmp_path) as broker:
        topic = broker.create("killed", 2)
        sent = broker.fill(topic, numbered(2_000))
        with Query(broker.url, topic, **EARLIEST, maxRecordsPerTrigger=300, subscription="q") as query:
            found = []
            for number in range(7):
                if number in (2, 4):
                    broker.kill()
                    broker.start()
                batch = query.next()
                assert batch is not None
                found.append(batch)
                query.reader.commit(batch.end)
            assert query.next() is None
    rows = [row for batch in found for row in batch.rows]
    assert set(rows) == sent_rows(sent)
    assert len(rows) == 2_000


# ── available now ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.usefixtures("always_looking")
def test_available_now_reads_what_is_there_and_ends(broker: StoredBroker) -> None:
    topic = broker.create("now", 2)
    sent = broker.fill(topic, numbered(1_000))
    journal: list[str] = []
    with Query(broker.url, topic, journal, **EARLIEST, maxRecordsPerTrigger=300) as query:
        query.reader.prepareForTriggerAvailableNow()
        found = []
        for batch in query.all():
            found.append(batch)
            assert len(found) < 10, "it does not end"
            broker.fill(topic, numbered(50))
        assert {row for batch in found for row in batch.rows} == sent_rows(sent)
        target = query.reader.reportLatestOffset()
        assert target is not None
        assert target["positions"] == query.start()["positions"]
    with Query(broker.url, topic, journal) as query:
        query.reader.prepareForTriggerAvailableNow()
        assert sum(len(batch.rows) for batch in query.all()) == 50 * len(found)


# ── parents and children ─────────────────────────────────────────────────────────────────────────────────────────────


class Family:
    """A topic that was split and merged again, in storage only: 0 → (1, 2) → 3."""

    topic = "public/default/family"

    def __init__(self, broker: StoredBroker, folder: Path) -> None:
        self.url = f"file://{folder}"
        self._folder = folder / self.topic
        whole, left, right = HashRange(0, 0xFFFF), HashRange(0, 0x7FFF), HashRange(0x8000, 0xFFFF)
        self.ends: dict[int, int] = {}
        self._layouts = [
            self._layout(0, [(0, whole, (), (), 0, 0)]),
            self._layout(2, [
                (0, whole, (), (1, 2), 0, 1), (1, left, (0,), (3,), 1, 2), (2, right, (0,), (3,), 1, 2),
                (3, whole, (1, 2), (), 2, 0),
            ]),
        ]  # fmt: skip
        for number, hashes in enumerate([whole, left, right, whole]):
            source = broker.create(f"family-{number}")
            broker.fill(source, numbered(1_500 + number))
            broker.until_chunks(source, 2)
            self._adopt(broker.folder / "history" / "public/default" / source / "0000-ffff-0", number, hashes)

    def at(self, folder: Path) -> Self:
        """A copy of it lies there."""
        other = copy.copy(self)
        other.url, other._folder = f"file://{folder}", folder / self.topic
        return other

    def _layout(self, epoch: int, infos: list[tuple[Any, ...]]) -> Layout:
        segments = {
            SegmentId(number): SegmentInfo(
                SegmentId(number), hashes, SegmentState.SEALED if sealed else SegmentState.ACTIVE, parents, children,
                LayoutEpoch(created), LayoutEpoch(sealed),
            )
            for number, hashes, parents, children, created, sealed in infos
        }  # fmt: skip
        return Layout(LayoutEpoch(epoch), SegmentId(len(segments)), segments)

    def _adopt(self, source: Path, number: int, hashes: HashRange) -> None:
        """Take over the segment of another topic, as far as its newest manifest tells."""
        descriptor = f"{hashes}-{number}"
        folder = self._folder / descriptor
        found = msgspec.json.decode(max((source / "manifests").glob("*.json")).read_bytes(), type=SegmentManifest)
        adopted = msgspec.structs.replace(found, topic=self.topic, descriptor=descriptor, sealed=number != 3)
        (folder / "manifests").mkdir(parents=True)
        (folder / "manifests" / f"{found.revision:020d}.json").write_bytes(msgspec.json.encode(adopted))
        for chunk in found.chunks:
            shutil.copyfile(source / chunk.object, folder / chunk.object)
        self.ends[number] = found.next_offset

    def show(self, layout: int) -> None:
        """As it was before the split (0), or is now (1)."""
        folder = self._folder / "manifests"
        folder.mkdir(exist_ok=True)
        manifest = TopicManifest(self.topic, Revision(layout + 1), self._layouts[layout])
        (folder / f"{layout + 1:020d}.json").write_bytes(msgspec.json.encode(manifest))


@pytest.fixture(scope="module")
def family(broker: StoredBroker, tmp_path_factory: pytest.TempPathFactory) -> Family:
    family = Family(broker, tmp_path_factory.mktemp("family"))
    family.show(1)
    return family


def test_parents_are_read_before_their_children_and_never_beside_them(family: Family) -> None:
    with Query("", family.topic, **EARLIEST, manifest=family.url, maxRecordsPerTrigger=400) as query:
        query.reader.prepareForTriggerAvailableNow()
        found = list(query.all())
    generations = [{row.segment for row in batch.rows} for batch in found]
    assert all(each in ({0}, {1}, {2}, {1, 2}, {3}) for each in generations)
    oldest = [min(each) for each in generations]
    assert oldest == sorted(oldest)
    check_order(found)
    rows = [row for batch in found for row in batch.rows]
    assert {number: sum(row.segment == number for row in rows) for number in range(4)} == family.ends
    assert found[-1].end["positions"] == {"0": "END", "1": "END", "2": "END", "3": family.ends[3]}


def test_a_topic_that_was_created_again_is_not_taken_for_the_old_one_in_storage_either(broker: StoredBroker) -> None:
    topic = broker.create("stored-anew")
    broker.fill(topic, numbered(1_000))
    broker.until_chunks(topic, 1)
    with Query("", topic, **EARLIEST, manifest=broker.storage) as query:
        query.some()
        journal = query.journal
    with braid.sync.connect(broker.url) as client:
        client.admin.delete_topic(topic)
        client.admin.create_topic(topic)
    broker.fill(topic, numbered(3_000))
    broker.until_chunks(topic, 4)  # More than the query had read of the old one.
    with Query("", topic, journal, manifest=broker.storage) as query:
        for run in (query.next, query.again):
            with pytest.raises(DataLoss, match="was deleted and created again"):
                run()


def test_a_checkpoint_of_an_older_layout_goes_on_with_the_children(family: Family) -> None:
    stored = {"version": 1, "topic": family.topic, "topicId": 0, "positions": {"0": 100}, "partitions": 1}
    with Query("", family.topic, [json.dumps(stored)], manifest=family.url) as query:
        found = list(query.all())
    assert [{row.segment for row in batch.rows} for batch in found] == [{0}, {1, 2}, {3}]
    assert min(found[0].rows).offset == 100
    assert sum(len(batch.rows) for batch in found) == sum(family.ends.values()) - 100


def test_a_micro_batch_to_the_end_of_a_segment_is_not_run_again_on_manifests_that_lack_its_end(
    family: Family, tmp_path: Path
) -> None:
    """As when brokers that had told the end are gone, and the query goes on with what they had exported."""
    shutil.copytree(family.url.removeprefix("file://"), tmp_path, dirs_exist_ok=True)
    stored = {"version": 1, "topic": family.topic, "topicId": 7, "partitions": 1}
    journal = [json.dumps({**stored, "positions": {"0": position}}) for position in (100, "END")]
    manifest = max((tmp_path / family.topic / "0000-ffff-0" / "manifests").glob("*.json"))
    whole = json.loads(manifest.read_bytes())
    chunks = whole["chunks"][:-1]
    behind = {**whole, "chunks": chunks, "nextOffset": chunks[-1]["nextOffset"], "sealed": False}
    manifest.write_text(json.dumps(behind))
    with Query("", family.topic, journal, manifest=f"file://{tmp_path}") as query, pytest.raises(DataLoss, match="end"):
        query.again()
    manifest.write_text(json.dumps(whole))
    with Query("", family.topic, journal, manifest=f"file://{tmp_path}") as query:
        assert len(query.again().rows) == family.ends[0] - 100


def test_new_segments_are_read_from_their_beginning_by_a_running_query(family: Family, tmp_path: Path) -> None:
    shutil.copytree(family.url.removeprefix("file://"), tmp_path, dirs_exist_ok=True)
    grown = family.at(tmp_path)
    shutil.rmtree(tmp_path / family.topic / "manifests")
    grown.show(0)
    with Query("", family.topic, **EARLIEST, manifest=grown.url) as query:
        first = query.next()
        assert first is not None
        assert first.end["positions"] == {"0": "END"}
        assert query.next() is None
        grown.show(1)
        second = query.some()
        assert min(second.rows).offset == 0
        assert {row.segment for row in second.rows} == {1, 2}


def test_a_running_query_crosses_changes_of_the_layout_in_order(broker: StoredBroker) -> None:
    topic = broker.create("changing")
    pairs = numbered(1_500)
    journal: list[str] = []
    found: list[MicroBatch] = []
    options: dict[str, object] = {**EARLIEST, "maxRecordsPerTrigger": 130, "minPartitions": 2, "subscription": "spark"}
    with braid.sync.connect(broker.url, timeout=60) as client:
        for turn, change in enumerate(("split 0", "split 1", "merge 4 2", "repartition 3", "repartition 1")):
            sent = pairs[turn * 300 : (turn + 1) * 300]
            broker.fill(topic, sent[:150])
            with Query(broker.url, topic, journal, **options) as query:
                found.append(query.some())
                name, *numbers = change.split()
                getattr(client.admin, name)(topic, *map(int, numbers))
                broker.fill(topic, sent[150:])
                found.append(query.some())
                assert query.again() == found[-1], "a micro-batch that is repeated is the same"
        with Query(broker.url, topic, journal, **options) as query:
            assert query.again() == found[-1]
            found += query.all()
            assert query.next() is None
        layout = client.admin.layout(topic)["segments"]
        wait_until(lambda: client.admin.subscription(topic, "spark")["backlog"] == 0, "the subscription has moved")
    check_order(found)
    check_keys(found, pairs)
    sealed = {number for number, segment in layout.items() if segment["state"] == "SEALED"}
    assert {number for number, position in found[-1].end["positions"].items() if position == "END"} == sealed
    with Query(broker.url, topic, journal[:1]) as query:
        later = [*query.all()]
    check_keys([found[0], *later], pairs)  # A checkpoint of the first layout is still good.


def check_keys(batches: list[MicroBatch], pairs: list[tuple[bytes | None, bytes]]) -> None:
    """Each record is there once, and those of a key are in order."""
    found: dict[bytes | None, list[bytes]] = {}
    wanted: dict[bytes | None, list[bytes]] = {}
    for row in (row for batch in batches for row in batch.rows):
        found.setdefault(row.key, []).append(row.value)
    for key, value in pairs:
        wanted.setdefault(key, []).append(value)
    assert found == wanted


# ── what Spark relies on ─────────────────────────────────────────────────────────────────────────────────────────────


def test_limits_are_told_to_spark(broker: StoredBroker) -> None:
    topic = broker.create("limits")
    assert Query(broker.url, topic).limit == ReadAllAvailable()
    assert Query(broker.url, topic, maxRecordsPerTrigger=5).limit == ReadMaxRows(5)
    assert Query(broker.url, topic, maxBytesPerTrigger=5).limit == ReadMaxBytes(5)
    assert Query(broker.url, topic, maxBytesPerTrigger=5, maxRecordsPerTrigger=6).limit == ReadMaxRows(6)
    broker.fill(topic, numbered(10))
    with Query(broker.url, topic, **EARLIEST, maxRecordsPerTrigger=5) as query:
        with pytest.raises(InvalidArgument, match="limit"):
            query.next(ReadMaxFiles(1))
        everything = query.next(ReadAllAvailable())  # Some triggers ask for it, and it goes before the options.
        assert everything is not None
        assert len(everything.rows) == 10


def test_the_latest_offset_is_reported_for_the_lag(broker: StoredBroker) -> None:
    topic = broker.create("reported", 2)
    broker.fill(topic, numbered(100))
    with Query(broker.url, topic, **EARLIEST, maxRecordsPerTrigger=10) as query:
        assert query.next() is not None
        reported = query.reader.reportLatestOffset()
        assert reported is not None
        assert sum(reported["positions"].values()) == 100


def test_the_topic_is_looked_at_ten_times_a_second_at_most(broker: StoredBroker) -> None:
    topic = broker.create("looked-at")
    now = 100.0
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        pauses.append(seconds)

    with ScanConnection(SourceOptions.parse({"url": broker.url, "topic": topic})) as connection:
        view = TopicWatch(connection, clock=lambda: now, sleep=sleep)
        first = view.snapshot()
        broker.fill(topic, numbered(10))
        assert all(view.snapshot() is first for _ in range(100))
        second = view.wait_and_refresh()
        assert pauses == [pytest.approx(FRESH_S)]
        assert (first.segments[0].end, second.segments[0].end) == (0, 10)
        now += FRESH_S
        assert view.snapshot() is not second


@pytest.fixture(scope="module")
def plain(broker: StoredBroker) -> str:
    return broker.create("plain")


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"topic": "nowhere"}, TopicNotFound, "nowhere"),
        ({"startingOffsets": '{"9": 0}'}, InvalidArgument, "startingOffsets names segment 9"),
        ({"startingOffsets": '{"0": 99}'}, OffsetOutOfRange, "startingOffsets names offset 99"),
        ({"endingOffsets": "latest"}, InvalidArgument, "endingOffsets"),
        ({"maxRecordsPerTrigger": "0"}, InvalidArgument, "maxRecordsPerTrigger"),
        ({"subscription": "a/b"}, InvalidArgument, "subscription"),
        ({"subscription": "a", "manifest": "file:///nowhere"}, InvalidArgument, "subscription and manifest"),
    ],
)
def test_wrong_options_are_named(
    broker: StoredBroker, plain: str, options: dict[str, Any], error: type[BraidError], message: str
) -> None:
    with pytest.raises(error, match=message), Query(broker.url, **({"topic": plain} | options)) as query:
        query.next()


def test_a_checkpoint_of_another_topic_is_refused(broker: StoredBroker) -> None:
    topic = broker.create("another")
    stored = {"version": 1, "topic": "public/default/orders", "topicId": 3, "positions": {"0": 7}, "partitions": 1}
    with Query(broker.url, topic, [json.dumps(stored)]) as query, pytest.raises(InvalidArgument, match="is of topic"):
        query.next()
