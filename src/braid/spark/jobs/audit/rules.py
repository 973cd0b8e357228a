"""The rules of an audit by name, and those of them that the driver checks.

A *finding* says which rule is broken, where, and how. The scan checks rules about bytes (scan.py), Spark SQL checks
rules about rows of batches (queries.py). This module has the rules about a whole topic: its manifests, its objects, its
parents and children. All of them are plain functions from facts to findings.

One defect is one finding. A missing chunk also leaves a gap between its neighbours and jumps in the sequences of
producers, and so does an unreadable header. `without_echoes` keeps only the cause.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import msgspec

from braid.model.errors import ChunkCorrupt
from braid.model.layout import FULL_RANGE, HashRange, reachable, tiles
from braid.scan.snapshot import SegmentBounds
from braid.storage.chunk import decode_footer
from braid.storage.history.manifest import SegmentManifest

RULES: Final[Mapping[str, str]] = {
    "missing-object": "every chunk that a manifest lists is there",
    "chunk-descriptor": "a chunk is what its manifest says: size, offsets, times, key hashes",
    "chunk-footer": "a chunk's footer is readable and agrees with its batches",
    "chunk-index": "a chunk's index leads to its batches",
    "producer-table": "a chunk's producer table has the producers of its batches",
    "producer-object": "a producer table that a manifest names is there, and reaches where the chunks end",
    "batch-header": "every header is readable",
    "batch-body": "every body has the checksum that its header says",
    "batch-contents": "with `--deep`, the records of every body can be decoded",
    "offset-gap": "offsets have no gap",
    "offset-overlap": "no offset is given twice",
    "takeover-gap": "a new owner begins where the last one ended",
    "epoch-order": "epochs never fall, and each has one incarnation",
    "behind-seal": "nothing follows the seal of a log",
    "key-range": "keys lie in the range of their segment",
    "duplicate-batch": "no batch of a producer is stored twice",
    "sequence-gap": "the sequences of a producer have no gap",
    "parent-end": "a child begins after its parents have ended",
    "parent-sealed": "a segment whose children have records is sealed",
    "layout-tiling": "the segments that take writes have every key hash once, and children have their parents' hashes",
    "manifest-end": "a manifest ends where its chunks end",
    "manifest-seal": "a manifest says that a log is sealed if it is, and where it ends",
    "manifest-missing": "a segment that has chunks has a manifest",
    "retained-start": "chunks begin where the owner says that history begins",
    "owner-damaged": "the owner can read what only it has",
    "queue-state": "the journal of a queue agrees with its owner and with the log, and its cursor with both",
}
"""Each text says what is true of a sound history."""

EXPIRED: Final = "expired"
"""Not a defect: retention deleted a chunk before the audit had read it."""
CLOCK_SKEW_US: Final = 1_000_000
"""How far the clocks of two brokers may differ: parent and child may have different owners."""
_LOSSES: Final = frozenset({"missing-object", "batch-header", "owner-damaged", EXPIRED})
_GAPS: Final = frozenset({"offset-gap", "takeover-gap"})


class Finding(msgspec.Struct, frozen=True, order=True):
    rule: str
    segment: int
    offset: int
    """Of the first record concerned."""
    object: str
    """In the segment's folder; empty if no single object is the cause."""
    text: str
    since: int = -1
    until: int = -1
    """The range of offsets in which records are missing, if any are."""

    @property
    def key(self) -> tuple[str, int, int]:
        return self.rule, self.segment, self.offset


class SegmentFacts(SegmentBounds, frozen=True):
    """A segment as the driver knows it before its batches are read."""

    manifest: SegmentManifest | None


class SegmentTotals(msgspec.Struct, frozen=True):
    """Sums over the batches of a segment."""

    batches: int = 0
    records: int = 0
    bytes: int = 0
    first_append: int | None = None
    last_append: int | None = None
    """Of batches with records; None if there are none."""
    seal_at: int | None = None
    """The offset of a SEAL; None if there is none."""
    first_offset: int = 0
    first_object: str = ""


# Manifests and objects.


def manifest_end(facts: SegmentFacts) -> Iterator[Finding]:
    manifest = facts.manifest
    if manifest is not None and manifest.chunks and manifest.chunks[-1].next_offset != manifest.next_offset:
        last = manifest.chunks[-1]
        text = f"the manifest ends at offset {manifest.next_offset}, its last chunk at {last.next_offset}"
        yield Finding("manifest-end", facts.id, last.next_offset, last.object, text)


def manifest_seal(facts: SegmentFacts, totals: SegmentTotals) -> Iterator[Finding]:
    manifest = facts.manifest
    if manifest is None:
        return
    if totals.seal_at is not None and totals.seal_at == manifest.next_offset and not manifest.sealed:
        text = f"the log is sealed at offset {totals.seal_at}, and the manifest says that it goes on"
        yield Finding("manifest-seal", facts.id, totals.seal_at, "", text)
    if manifest.end is not None and totals.seal_at not in (None, manifest.end):
        text = f"the log is sealed at offset {totals.seal_at}, and the manifest says that it ends at {manifest.end}"
        yield Finding("manifest-seal", facts.id, manifest.end, "", text)
    elif manifest.end is not None and max(facts.end, manifest.next_offset) > manifest.end:
        text = f"the manifest says that the log ends at {manifest.end}, and there are offsets after that"
        yield Finding("manifest-seal", facts.id, manifest.end, "", text)
    elif manifest.sealed and facts.end > manifest.next_offset:
        text = f"the manifest says that the log is sealed at {manifest.next_offset}, and its owner has {facts.end}"
        yield Finding("manifest-seal", facts.id, manifest.next_offset, "", text)


def producer_object(facts: SegmentFacts, data: bytes | None) -> Iterator[Finding]:
    """Check the object that the manifest names as producer table: `data` is its content, None if it is not there."""
    manifest = facts.manifest
    if manifest is None or manifest.producers is None:
        return
    named = manifest.producers
    try:
        if data is None:
            text = "the producer table is not in storage: the next owner cannot recognise batches that are sent again"
        elif len(data) != named.size:
            text = f"the producer table has {len(data):,} bytes, the manifest says {named.size:,}"
        elif (ends := (decode_footer(data).next_offset, named.next_offset)) != (manifest.next_offset,) * 2:
            text = (
                f"the producer table reaches offset {ends[0]}, the manifest says {ends[1]}, and chunks end at "
                f"{manifest.next_offset}"
            )
        else:
            return
    except ChunkCorrupt as error:
        text = f"the producer table cannot be read: {error}"
    yield Finding("producer-object", facts.id, manifest.next_offset, named.object, text)


def retained_start(facts: SegmentFacts, earliest_later: int) -> Iterator[Finding]:
    """Compare the first chunk with `earliest_later`, which the owner said after the manifest was read. A start only
    rises, so it must not be below the chunks."""
    manifest = facts.manifest
    if manifest is not None and manifest.chunks and earliest_later < manifest.chunks[0].base_offset:
        first = manifest.chunks[0]
        text = f"history begins at offset {earliest_later}, the first chunk at {first.base_offset}"
        yield Finding("retained-start", facts.id, earliest_later, first.object, text)


def missing_manifest(facts: SegmentFacts, objects: Iterable[str]) -> Iterator[Finding]:
    chunks = [name for name in objects if name.endswith(".chunk")]
    if facts.manifest is None and chunks:
        text = f"there are {len(chunks)} chunks in storage, and no manifest that lists them"
        yield Finding("manifest-missing", facts.id, 0, min(chunks), text)


def unreferenced(facts: SegmentFacts, objects: Iterable[str]) -> str | None:
    """Note objects that no manifest lists: abandoned uploads, chunks that compaction replaced. They are not defects."""
    listed = {chunk.object for chunk in facts.manifest.chunks} if facts.manifest is not None else set[str]()
    left = sorted(name for name in objects if name.endswith(".chunk") and name not in listed)
    if not left or facts.manifest is None:
        return None
    return f"segment {facts.id}: {len(left)} objects that no manifest lists, from {left[0]} on; the owner removes them"


# Parents and children.


def ancestors(facts: Mapping[int, SegmentFacts], segment: int) -> set[int]:
    """Return those that the layout still holds."""

    def parents(each: int) -> Iterator[int]:
        return (parent for parent in facts[each].parents if parent in facts)

    return reachable(parents(segment), parents)


def layout_tiling(facts: Mapping[int, SegmentFacts]) -> Iterator[Finding]:
    """Check that no hash is lost or has two places: among the segments without children, and among the children of each
    parent. Parents that have left the layout are not missed."""
    ranges = {number: HashRange(fact.first_hash, fact.last_hash) for number, fact in facts.items()}
    children = {number: [each for each, fact in facts.items() if number in fact.parents] for number in facts}
    newest = sorted(ranges[number] for number, found in children.items() if not found)
    if not tiles(newest, FULL_RANGE):
        text = f"the segments without children have the hashes {', '.join(map(str, newest))}"
        yield Finding("layout-tiling", min(facts), 0, "", f"{text}: they do not tile {FULL_RANGE}")
    for parent, found in children.items():
        shared = [ranges[parent].overlap(ranges[child]) for child in found]
        if found and not tiles(sorted(each for each in shared if each is not None), ranges[parent]):
            text = f"its children {', '.join(map(str, sorted(found)))} do not tile its hashes {ranges[parent]}"
            yield Finding("layout-tiling", parent, 0, "", text)


def parent_end(facts: Mapping[int, SegmentFacts], totals: Mapping[int, SegmentTotals]) -> Iterator[Finding]:
    """Check that every ancestor ends before a child begins, also where a parent between them has no records."""
    for child in facts:
        began = totals[child].first_append
        for parent in sorted(ancestors(facts, child)):
            ended = totals[parent].last_append
            if began is not None and ended is not None and began + CLOCK_SKEW_US < ended:
                early_ms = (ended - began) / 1_000
                text = f"its first batch was appended {early_ms:,.0f} ms before the last one of its parent {parent}"
                yield Finding("parent-end", child, totals[child].first_offset, totals[child].first_object, text)


def parent_sealed(facts: Mapping[int, SegmentFacts], totals: Mapping[int, SegmentTotals]) -> Iterator[Finding]:
    for child, own in facts.items():
        for parent in own.parents:
            known = facts.get(parent)
            if totals[child].records and known is not None and not known.sealed:
                text = f"its child {child} has {totals[child].records:,} records, and it is not sealed"
                yield Finding("parent-sealed", parent, known.end, "", text)


class Repeat(msgspec.Struct, frozen=True):
    """Batches of several segments with the same producer, sequence and body."""

    producer: int
    sequence: int
    places: tuple[tuple[int, int, str], ...]
    """Segment, offset, object."""


def repeated_in_lineage(facts: Mapping[int, SegmentFacts], repeats: Iterable[Repeat]) -> Iterator[Finding]:
    """Find batches that are in a segment and in one of its ancestors: sent again after a split, and stored twice."""
    for repeat in repeats:
        at = {segment: offset for segment, offset, _ in repeat.places}
        for segment, offset, name in repeat.places:
            for parent in sorted(ancestors(facts, segment) & at.keys()):
                text = (
                    f"producer {repeat.producer:#x} stored sequence {repeat.sequence} here and before, in segment "
                    f"{parent} at offset {at[parent]}"
                )
                yield Finding("duplicate-batch", segment, offset, name, text)


# One defect, one finding.


def without_echoes(findings: Sequence[Finding]) -> list[Finding]:
    """Return the causes, each once, in order of segment and offset. `EXPIRED` explains gaps and is not a defect."""
    once = {finding.key: finding for finding in reversed(findings)}
    losses = [each for each in once.values() if each.rule in _LOSSES]
    gaps = [each for each in once.values() if each.rule in _GAPS and not _explained(each, losses)]
    rest = [each for each in once.values() if each.rule not in _GAPS and each.rule not in (EXPIRED, "sequence-gap")]
    jumps = [each for each in once.values() if each.rule == "sequence-gap" and not _explained(each, [*losses, *gaps])]
    return sorted([*rest, *gaps, *jumps], key=lambda each: (each.segment, each.offset, each.rule))


def _explained(finding: Finding, causes: Iterable[Finding]) -> bool:
    return any(
        cause.segment == finding.segment and cause.since < finding.until and finding.since < cause.until
        for cause in causes
    )
