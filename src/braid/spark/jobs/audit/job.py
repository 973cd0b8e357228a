"""The audit: proves over the whole history of a topic that nothing is missing, doubled, damaged or out of place (I1).

    driver      layout, owners' positions, manifests, a listing of storage
       │        one piece for each chunk, and for each tail that only an owner has
    executors   read and check every byte (scan.py) → one row for each batch, and findings
       │
    Spark SQL   from piece to piece, from producer to producer, from parent to child (queries.py)
       │
    driver      the rules about manifests and lineage, the causes without their echoes (rules.py) → a report

The auditor trusts as little as it can: it parses manifests, chunks and footers itself. It shares with the source only
the bytes that it checks (scan/range_reader.py) and, for tails, the client.

A live topic changes during the audit. The offsets to audit are fixed at its beginning, as in every read. A chunk may be
gone when its turn comes. If compaction replaced it, the audit reads its offsets from the new chunk. If retention
deleted it, the report has a note. Otherwise it is missing, which is a defect.

The cost is one pass over all bytes, spread over tasks by size, each with one window in memory; and a sort of one short
row for each batch, by producer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

import msgspec
from pyspark import StorageLevel

from braid.model.errors import ObjectMissing
from braid.model.names import TopicName
from braid.scan.connection import ScanConnection
from braid.scan.range_reader import range_reader
from braid.scan.snapshot import SegmentBounds, TopicSnapshot
from braid.spark.connect import parallelism
from braid.spark.jobs.audit import queries
from braid.spark.jobs.audit.rules import (
    EXPIRED,
    Finding,
    Repeat,
    SegmentFacts,
    SegmentTotals,
    layout_tiling,
    manifest_end,
    manifest_seal,
    missing_manifest,
    parent_end,
    parent_sealed,
    producer_object,
    repeated_in_lineage,
    retained_start,
    unreferenced,
    without_echoes,
)
from braid.spark.jobs.audit.tasks import AuditPiece, packed, plan_pieces, scan_pieces
from braid.spark.jobs.report import JobReport
from braid.spark.jobs.task_rows import task_rows
from braid.spark.source.options import SourceOptions
from braid.storage.history.manifest import segment_folder

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

MAX_FINDINGS: Final = 1_000
"""How many findings the driver collects: nobody reads more of them line by line."""


class Defect(JobReport, frozen=True):
    rule: str
    segment: int
    object: str
    """In the segment's folder; empty if no single object is the cause."""
    offset: int
    text: str


class AuditedSegment(JobReport, frozen=True):
    segment: int
    range: str
    chunks: int
    batches: int
    records: int
    bytes: int
    first_offset: int
    next_offset: int
    sealed: bool


class AuditReport(JobReport, frozen=True):
    topic: str
    ok: bool
    """Whether there are no defects."""
    segments: tuple[AuditedSegment, ...]
    chunks: int
    batches: int
    records: int
    bytes: int
    seconds: float
    defects: tuple[Defect, ...]
    notes: tuple[str, ...]


def audit_topic(spark: SparkSession, options: Mapping[str, str], *, deep: bool = False) -> AuditReport:
    """Audit a topic. `options` are those of `format("braid")`: topic, and url or manifest. A deep audit opens the body
    of every batch, too."""
    began = time.monotonic()
    read = SourceOptions.parse(options).for_batch()
    with ScanConnection(read) as connection:
        snapshot = connection.snapshot()
        facts, notes, findings = _facts(connection, snapshot)
        findings += [*_starts(connection, facts), *_producer_objects(connection, snapshot, facts)]
        findings += _queues(connection, snapshot)
    pieces = plan_pieces(snapshot, facts)
    rows = batch_rows(spark, read, snapshot, facts, pieces, deep=deep).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        totals = {each: SegmentTotals() for each in facts} | _totals(rows, pieces)
        found = _collected(rows, pieces)
        related = sorted({each for fact in facts.values() for each in fact.parents} | _with_parents(facts))
        again = _repeats(rows, related, pieces) if related else []
    finally:
        rows.unpersist()
    if sum(each.rule != EXPIRED for each in found) >= MAX_FINDINGS:
        notes.append(f"there are more than {MAX_FINDINGS:,} findings; these are some of them")
    findings += found
    for fact in facts.values():
        findings += [*manifest_end(fact), *manifest_seal(fact, totals[fact.id])]
    findings += layout_tiling(facts)
    findings += [*parent_end(facts, totals), *parent_sealed(facts, totals), *repeated_in_lineage(facts, again)]
    notes += [each.text for each in findings if each.rule == EXPIRED]
    return _report(snapshot, facts, totals, findings, notes, time.monotonic() - began)


def batch_rows(
    spark: SparkSession,
    options: SourceOptions,
    snapshot: TopicSnapshot,
    facts: Mapping[int, SegmentFacts],
    pieces: Iterable[AuditPiece],
    *,
    deep: bool = False,
) -> DataFrame:
    """Scan the pieces: one row for each batch of the topic, and for each finding."""
    tasks = packed(pieces, 2 * parallelism(spark))
    # Executors need the tasks, not the manifests from which they were planned.
    bare = {number: msgspec.structs.replace(fact, manifest=None) for number, fact in facts.items()}
    topic = msgspec.structs.replace(snapshot, segments={})
    return task_rows(spark, "audit", queries.BATCH_SCHEMA, tasks, partial(scan_pieces, options, topic, bare, deep))


def _facts(
    connection: ScanConnection, snapshot: TopicSnapshot
) -> tuple[dict[int, SegmentFacts], list[str], list[Finding]]:
    """Collect what manifests and a listing of storage say: facts, notes and findings."""
    facts: dict[int, SegmentFacts] = {}
    notes: list[str] = []
    findings: list[Finding] = []
    for segment in snapshot.segments.values():
        manifest = None
        names: list[str] = []
        if snapshot.storage:
            objects = connection.objects(snapshot.storage)
            folder = segment_folder(snapshot.topic, segment.descriptor)
            # Listed first: a chunk that is exported meanwhile is then in the manifest, and not in the listing.
            names = [stat.name.removeprefix(f"{folder}/") for stat in connection.call(objects.list(folder))]
            manifest = connection.segment_manifest(snapshot.storage, snapshot.topic, segment.descriptor)
        bounds = {name: getattr(segment, name) for name in SegmentBounds.__struct_fields__}
        fact = facts[segment.id] = SegmentFacts(**bounds, manifest=manifest)
        findings += missing_manifest(fact, names)
        if (note := unreferenced(fact, names)) is not None:
            notes.append(note)
        if manifest is not None and manifest.chunks and manifest.chunks[0].base_offset:
            notes.append(
                f"segment {segment.id} begins at offset {manifest.chunks[0].base_offset:,}: retention took the rest"
            )
    return facts, notes, findings


def _starts(connection: ScanConnection, facts: Mapping[int, SegmentFacts]) -> list[Finding]:
    """Ask owners again where history begins, if chunks begin later than they said: that tells retention from loss."""
    doubtful = [
        fact
        for fact in facts.values()
        if fact.manifest is not None and fact.manifest.chunks and fact.earliest < fact.manifest.chunks[0].base_offset
    ]
    if not doubtful or not connection.has_brokers:
        return []
    later = connection.snapshot().segments
    return [
        finding for fact in doubtful if fact.id in later for finding in retained_start(fact, later[fact.id].earliest)
    ]


def _producer_objects(
    connection: ScanConnection, snapshot: TopicSnapshot, facts: Mapping[int, SegmentFacts]
) -> Iterator[Finding]:
    """Check the producer tables that manifests name. An owner that exports another chunk may remove the table, so the
    audit reads the manifest again before it reports a table as missing."""
    for fact in facts.values():
        named = fact.manifest.producers if fact.manifest is not None else None
        if named is None:
            continue
        name = f"{segment_folder(snapshot.topic, fact.descriptor)}/{named.object}"
        data = None
        with contextlib.suppress(ObjectMissing), range_reader(connection, snapshot.storage).open(name) as object_:
            data = object_.read(0, object_.size())
        if data is None:
            newest = connection.segment_manifest(snapshot.storage, snapshot.topic, fact.descriptor)
            if newest is None or newest.producers != named:
                continue
        yield from producer_object(fact, data)


def _queues(connection: ScanConnection, snapshot: TopicSnapshot) -> list[Finding]:
    """Ask the owners of the segments to check their queues. Without brokers there is nobody to ask."""
    if not connection.has_brokers:
        return []
    found = connection.call(connection.client.admin.check_queues(snapshot.topic))
    return [Finding("queue-state", segment, -1, "", text) for segment, texts in found.items() for text in texts]


def _totals(rows: DataFrame, pieces: list[AuditPiece]) -> dict[int, SegmentTotals]:
    found: dict[int, SegmentTotals] = {}
    for row in queries.totals(rows).collect():
        values = row.asDict()
        segment, first_piece = values.pop("segment"), values.pop("first_piece")
        found[segment] = SegmentTotals(**values, first_object=pieces[first_piece].object)
    return found


def _collected(rows: DataFrame, pieces: list[AuditPiece]) -> list[Finding]:
    return [
        Finding(
            row["rule"],
            row["segment"],
            row["base"],
            row["object"] if row["object"] is not None else pieces[row["piece"]].object,
            row["text"],
            row["since"],
            row["until"],
        )
        for row in queries.findings(rows, MAX_FINDINGS).collect()
    ]


def _repeats(rows: DataFrame, related: list[int], pieces: list[AuditPiece]) -> list[Repeat]:
    return [
        Repeat(
            row["producer"] % (1 << 64),
            int(row["sequence"]),
            tuple((place["segment"], place["base"], pieces[place["piece"]].object) for place in row["places"]),
        )
        for row in queries.repeats(rows, related).limit(MAX_FINDINGS).collect()
    ]


def _with_parents(facts: Mapping[int, SegmentFacts]) -> set[int]:
    return {fact.id for fact in facts.values() if fact.parents}


def _report(
    snapshot: TopicSnapshot,
    facts: Mapping[int, SegmentFacts],
    totals: Mapping[int, SegmentTotals],
    findings: list[Finding],
    notes: list[str],
    seconds: float,
) -> AuditReport:
    defects = tuple(
        Defect(each.rule, each.segment, each.object, each.offset, each.text) for each in without_echoes(findings)
    )
    segments = tuple(
        AuditedSegment(
            segment=fact.id,
            range=fact.descriptor.rpartition("-")[0],
            chunks=len(fact.manifest.chunks) if fact.manifest is not None else 0,
            batches=totals[fact.id].batches,
            records=totals[fact.id].records,
            bytes=totals[fact.id].bytes,
            first_offset=fact.earliest,
            next_offset=max(fact.end, fact.manifest.next_offset if fact.manifest is not None else 0),
            sealed=fact.sealed,
        )
        for fact in sorted(facts.values(), key=lambda fact: fact.id)
    )
    return AuditReport(
        topic=str(TopicName.parse(snapshot.topic)),
        ok=not defects,
        segments=segments,
        chunks=sum(each.chunks for each in segments),
        batches=sum(each.batches for each in segments),
        records=sum(each.records for each in segments),
        bytes=sum(each.bytes for each in segments),
        seconds=round(seconds, 3),
        defects=defects,
        notes=tuple(notes),
    )
