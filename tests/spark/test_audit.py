"""The audit finds every defect that is planted in a sound history, each by its rule and in its place, and no others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from pyspark.sql import SparkSession

import braid.sync
from braid.model.batch.header import HEADER_BYTES, BatchHeader
from braid.model.batch.identity import derived_id
from braid.model.layout import Layout
from braid.spark.jobs.audit.job import AuditReport, audit_topic
from braid.spark.jobs.audit.queries import BATCH_SCHEMA, SEQUENCE_BIAS, findings, sequences
from braid.spark.jobs.audit.rules import EXPIRED
from braid.storage.log.producers import ProducerTable
from braid.testing.processes import BrokerProcess
from braid.wire.operations import Kind, Published
from tests.kits import poison
from tests.kits.bad_input import MadeTopic
from tests.kits.hand_made_topic import HandMadeTopic, records
from tests.kits.history import (
    BATCH_RECORDS,
    FILES,
    OWNERS,
    RECORDS,
    Batches,
    History,
    chunk_of,
    make_history,
    moved,
    split,
)
from tests.kits.raw_client import RawClient
from tests.kits.waiting import wait_until
from tests.spark.spark_kit import WAIT_S, StoredBroker, numbered

BODY, HEADER, FOOTER, MISSING, UNLISTED, OVERLAP, TAKEOVER, DOUBLED, STRAY, EPOCH, TWO, JUMP = range(12)
"""Segments by what is planted in them."""
UNSEALED, GOOD_PARENT, LATE_PARENT = 12, 13, 14
EARLY_CHILD, REPEATING_CHILD = 19, 20


def layout() -> Layout:
    """Of 15 segments, the last three of which are split: 15 and 16, 17 and 18, 19 and 20 are their children."""
    made = Layout.initial(15)
    for parent in (UNSEALED, GOOD_PARENT, LATE_PARENT):
        made = split(made, parent)
    return made


def audited(spark: SparkSession, history: History, folder: Path) -> AuditReport:
    return audit_topic(spark, {"topic": "orders", "manifest": history.save(folder)})


def found(report: AuditReport) -> set[tuple[str, int, str, int]]:
    return {(defect.rule, defect.segment, defect.object, defect.offset) for defect in report.defects}


def test_a_sound_history_has_no_defect_and_is_counted_whole(spark: SparkSession, tmp_path: Path) -> None:
    history = make_history(layout())
    history.name_producers(JUMP)
    report = audited(spark, history, tmp_path)
    assert report.defects == ()
    assert report.ok
    segments = len(history.layout.segments)
    assert (len(report.segments), report.chunks) == (segments, segments * OWNERS * FILES)
    assert report.records == segments * RECORDS
    assert report.batches == segments * RECORDS // BATCH_RECORDS
    assert report.notes == ()
    assert [each.segment for each in report.segments if each.sealed] == [UNSEALED, GOOD_PARENT, LATE_PARENT]


def test_every_planted_defect_is_found_by_its_rule_and_in_its_place(spark: SparkSession, tmp_path: Path) -> None:
    history = make_history(layout(), late=frozenset({LATE_PARENT}), stray=frozenset({STRAY}))
    expected = set(plant(history))
    report = audited(spark, history, tmp_path)
    assert found(report) == expected
    assert not report.ok
    assert len(report.defects) == len(expected), "each defect is told once, and its consequences are not"
    assert any("1 objects that no manifest lists" in note for note in report.notes)


def plant(history: History) -> Iterator[tuple[str, int, str, int]]:
    """Damage the history; yields what should be found."""
    chunks = {int(segment): history.manifest(segment).chunks for segment in history.layout.segments}

    def place(segment: int, number: int, records: int = 0) -> tuple[int, str, int]:
        chunk = chunks[segment][number]
        return segment, chunk.object, chunk.base_offset + records

    history.flip(BODY, 1, history.position(BODY, 1, 3) + HEADER_BYTES + 1)
    yield "batch-body", *place(BODY, 1, 3 * BATCH_RECORDS)

    history.flip(HEADER, 3, history.position(HEADER, 3, 4) + 40)  # Behind the BEGIN of the second owner.
    yield "batch-header", *place(HEADER, 3, 3 * BATCH_RECORDS)

    history.flip(FOOTER, 0, chunks[FOOTER][0].batch_bytes + 3)
    yield "chunk-footer", *place(FOOTER, 0)

    history.drop(MISSING, 1)
    yield "missing-object", *place(MISSING, 1)

    history.set_manifest(UNLISTED, chunks=(chunks[UNLISTED][0], *chunks[UNLISTED][2:]))
    yield "offset-gap", UNLISTED, chunks[UNLISTED][2].object, chunks[UNLISTED][1].base_offset

    # The last three batches of a chunk, once more in a chunk of their own.
    data, again = chunk_of(history.batches(OVERLAP, 1)[3:], ProducerTable(), 1)
    history.objects[f"{history.folder(OVERLAP)}/{again.object}"] = data
    history.set_manifest(OVERLAP, chunks=(*chunks[OVERLAP][:2], again, *chunks[OVERLAP][2:]))
    yield "offset-overlap", OVERLAP, again.object, again.base_offset

    for number in (3, 4, 5):
        history.rewrite(TAKEOVER, number, lambda batches: [(moved(header, 5), body) for header, body in batches])
    yield "takeover-gap", TAKEOVER, history.chunk(TAKEOVER, 3).object, chunks[TAKEOVER][3].base_offset

    history.rewrite(DOUBLED, 5, lambda batches: [*batches, behind(batches, batches[1])])
    yield "duplicate-batch", DOUBLED, history.chunk(DOUBLED, 5).object, RECORDS

    yield "key-range", *place(STRAY, 3, 3 * BATCH_RECORDS)

    history.rewrite(EPOCH, 5, lambda batches: [(changed(header, epoch=1), body) for header, body in batches])
    yield "epoch-order", EPOCH, history.chunk(EPOCH, 5).object, chunks[EPOCH][5].base_offset

    history.flip(TWO, 0, history.position(TWO, 0, 2) + HEADER_BYTES)
    history.flip(TWO, 3, history.position(TWO, 3, 1) + 8)
    yield "batch-body", *place(TWO, 0, BATCH_RECORDS)
    yield "batch-header", *place(TWO, 3)

    history.rewrite(JUMP, 5, jumping)
    yield "sequence-gap", JUMP, history.chunk(JUMP, 5).object, chunks[JUMP][5].base_offset + 4 * BATCH_RECORDS

    history.rewrite(UNSEALED, 5, lambda batches: batches[:-1])
    history.set_manifest(UNSEALED, sealed=False)
    yield "parent-sealed", UNSEALED, "", RECORDS

    gone = history.name_producers(GOOD_PARENT)
    del history.objects[f"{history.folder(GOOD_PARENT)}/{gone}"]
    yield "producer-object", GOOD_PARENT, gone, RECORDS

    yield "parent-end", *place(EARLY_CHILD, 0)
    yield "parent-end", *place(REPEATING_CHILD, 0)
    resent = history.batches(LATE_PARENT, 1)[1]
    history.rewrite(REPEATING_CHILD, 5, lambda batches: [*batches, behind(batches, resent)])
    yield "duplicate-batch", REPEATING_CHILD, history.chunk(REPEATING_CHILD, 5).object, RECORDS


def changed(header: BatchHeader, **changes: object) -> BatchHeader:
    return msgspec.structs.replace(header, **changes)


def behind(batches: Batches, batch: tuple[BatchHeader, bytes]) -> tuple[BatchHeader, bytes]:
    """The batch once more, as the owner of these would store it behind them."""
    (header, body), last = batch, batches[-1][0]
    kept = ("epoch", "incarnation", "append_time", "min_key_hash", "max_key_hash")
    owner = {name: getattr(last, name) for name in kept}
    return changed(header, base_offset=last.next_offset, **owner), body


def jumping(batches: Batches) -> Batches:
    """One batch's sequence lies three further on than it should."""
    header, body = batches[4]
    later = changed(header, first_sequence=header.first_sequence + BATCH_RECORDS)
    return [*batches[:4], (later, body), *batches[5:]]


ORDINARY = 7
DERIVED = derived_id("query", 1, 0) - (1 << 64)
ERA = 1 << 32
HIGH_ERA = (1 << 31) * ERA


@pytest.mark.parametrize("producer", [ORDINARY, DERIVED])
def test_sequences_of_a_producer_go_on_repeat_or_jump(spark: SparkSession, producer: int) -> None:
    """Each case in a segment of its own, batches of three records."""
    cases: dict[int, tuple[list[int], list[tuple[str, int]]]] = {
        0: ([0, 3, 6], []),
        1: ([3, 6], []),  # Retention took the beginning.
        2: ([0, 3, 3], [("duplicate-batch", 6)]),
        3: ([0, 3, 9], [("sequence-gap", 6)]),
        4: ([0, 3, 0, 6], [("duplicate-batch", 6)]),
        5: ([0, 2 * ERA, 2 * ERA + 3], [] if producer == DERIVED else [("sequence-gap", 3)]),
        6: ([0, 2 * ERA + 3], [("sequence-gap", 3)]),
        7: ([HIGH_ERA, HIGH_ERA + 3, HIGH_ERA + 3], [("duplicate-batch", 6)]),
        8: ([HIGH_ERA - ERA, HIGH_ERA], [] if producer == DERIVED else [("sequence-gap", 3)]),
    }
    rows = [
        {
            "segment": segment,
            "piece": 0,
            "position": number,
            "base": 3 * number,
            "next": 3 * number + 3,
            "count": 3,
            "producer": producer,
            "sequence": sequence - SEQUENCE_BIAS,
        }
        for segment, (stored, _) in cases.items()
        for number, sequence in enumerate(stored)
    ]
    found: dict[int, list[tuple[str, int]]] = {segment: [] for segment in cases}
    for row in sequences(spark.createDataFrame(rows, BATCH_SCHEMA)).collect():
        found[row["segment"]].append((row["rule"], row["base"]))
        assert "-" not in row["text"], "sequences are told as their producer counts"
    assert found == {segment: expected for segment, (_, expected) in cases.items()}


def test_what_has_expired_keeps_no_defect_out_of_a_report_that_is_full(spark: SparkSession) -> None:
    def row(rule: str, offset: int) -> tuple[object, ...]:
        return (0, 0, 0, offset, offset, 0, 0, 0, 0, 0, 0, 0, 0, rule, "", "", offset, offset + 1)

    rows = [row(EXPIRED, offset) for offset in range(5)] + [row("batch-body", 7)]
    found = findings(spark.createDataFrame(rows, BATCH_SCHEMA), 2).collect()
    assert sorted(each["rule"] for each in found) == ["batch-body", *[EXPIRED] * 5]


def test_only_a_deep_audit_finds_batches_that_no_reader_can_decode(spark: SparkSession, tmp_path: Path) -> None:
    topic = HandMadeTopic(tmp_path)
    falling = poison.shown_by_the_body()["value offsets that fall"]
    chunk = topic.add_chunk(0, records(0, 5), falling, records(8, 2))
    assert audit_topic(spark, topic.options).ok
    report = audit_topic(spark, topic.options, deep=True)
    assert found(report) == {("batch-contents", 0, chunk.object, 5)}
    assert (report.records, report.ok) == (10, False)


def test_the_hot_tail_is_audited_at_its_owners(spark: SparkSession, broker: StoredBroker) -> None:
    broker.create("audited", 3)
    sent = broker.fill("audited", numbered(4_000))
    broker.until_chunks("audited", 4)
    report = audit_topic(spark, {"topic": "audited", "url": broker.url})
    assert report.defects == ()
    assert report.records == len(sent)
    assert report.chunks >= 4
    stored = sum(chunk["nextOffset"] - chunk["baseOffset"] for chunk in broker.chunks("audited"))
    assert stored < report.records, "there was a tail"


def test_brokers_that_keep_their_history_to_themselves_are_audited_through_them(
    spark: SparkSession, tmp_path: Path
) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with braid.sync.connect(broker.url) as client:
            client.admin.create_topic("kept", segments=2)
            with client.producer("kept") as producer:
                producer.send_many(numbered(1_000))
        options = {"topic": "kept", "url": broker.url}
        report = audit_topic(spark, options)
        assert (report.ok, report.records, report.chunks) == (True, 1_000, 0)
        with RawClient(broker.address) as client:
            route = MadeTopic("public/default/kept", client.topic("public/default/kept")).route
            falling = poison.shown_by_the_body()["value offsets that fall"]
            offset = client.ask(Kind.PUBLISH, route, Published, falling).base_offset
        assert audit_topic(spark, options).ok
        assert found(audit_topic(spark, options, deep=True)) == {("batch-contents", 0, "", offset)}


def test_a_journal_that_cannot_be_read_is_a_defect_and_dead_letters_are_a_topic(
    spark: SparkSession, broker: StoredBroker
) -> None:
    for topic in ("jobs", "jobs-dead"):
        broker.create(topic)
    with braid.sync.connect(broker.url) as client:
        client.admin.create_subscription("jobs", "work", kind="queue", max_deliveries=1, dead_letter_topic="jobs-dead")
        with client.producer("jobs") as producer:
            producer.send(b"hopeless", key=b"7", headers={"trace": "a1"})
        with client.queue_consumer("jobs", "work") as consumer:
            message = consumer.receive(timeout=WAIT_S)
            assert message is not None
            consumer.nack(message, reason="no stamps")
            wait_until(lambda: not client.admin.subscription("jobs", "work")["backlog"], "it is a dead letter")
        (letter,) = spark.read.format("braid").options(topic="jobs-dead", url=broker.url).load().collect()
        headers = {name: bytes(value).decode() for name, value in letter.headers.items()}
        assert (bytes(letter.key), bytes(letter.value), headers["trace"]) == (b"7", b"hopeless", "a1")
        assert headers["braid-dead-letter-reason"] == "no stamps"
        options = {"topic": "jobs", "url": broker.url}
        assert audit_topic(spark, options).ok
        (journal,) = broker.data.rglob("jobs/*/queues/work/*.queue")
        damaged = bytearray(journal.read_bytes())
        damaged[30] ^= 0xFF
        journal.write_bytes(damaged)
        assert found(audit_topic(spark, options)) == {("queue-state", 0, "", -1)}
        client.admin.delete_topic("jobs")
