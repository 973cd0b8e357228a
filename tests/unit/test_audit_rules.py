"""The audit's rules without Spark: what a scan finds in chunks, what manifests and lineages give away."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from crc32c import crc32c

from braid.model.batch.header import HEADER_BYTES, BatchHeader, Flag, body_of, control_batch, parse_header, stamp
from braid.model.ids import Epoch, Offset
from braid.model.layout import Layout
from braid.spark.jobs.audit.rules import (
    CLOCK_SKEW_US,
    EXPIRED,
    RULES,
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
from braid.spark.jobs.audit.scan import ChunkScan, Seen
from braid.storage.chunk import decode_footer, encode_footer
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.log.producers import ProducerTable
from tests.kits import poison
from tests.kits.history import BATCH_RECORDS, FILE_BATCHES, RECORDS, Batches, History, chunk_of, make_history, split

CHUNK = 3
"""The first one of the second owner: it begins with a BEGIN."""
BASE = CHUNK * FILE_BATCHES * BATCH_RECORDS


@cache
def sound() -> History:
    return make_history(split(Layout.initial(1), 0))


def facts(history: History, segment: int = 0, **changes: Any) -> SegmentFacts:
    info = history.layout.segment(segment)
    manifest = history.manifest(segment)
    own = SegmentFacts(
        id=segment,
        descriptor=manifest.descriptor,
        parents=tuple(map(int, info.parent_ids)),
        first_hash=info.hash_range.start,
        last_hash=info.hash_range.end,
        earliest=0,
        end=manifest.next_offset,
        sealed=manifest.sealed,
        manifest=manifest,
    )
    return msgspec.structs.replace(own, **changes)


def scanned(
    data: bytes, chunk: ChunkDescriptor, segment: SegmentFacts | None = None, *, deep: bool = False
) -> tuple[list[Seen], list[Finding]]:
    def read(position: int, length: int) -> bytes:
        return data[position : position + length]

    found = list(ChunkScan(segment or facts(sound()), chunk, len(data), read, deep=deep).run())
    return [each for each in found if isinstance(each, Seen)], [each for each in found if isinstance(each, Finding)]


def places(findings: list[Finding]) -> list[tuple[str, int]]:
    return [(finding.rule, finding.offset) for finding in findings]


def flipped(position: int, data: bytes | None = None) -> bytes:
    changed = bytearray(data if data is not None else sound().content(0, CHUNK))
    changed[position] ^= 0x10
    return bytes(changed)


# Chunks.


@pytest.mark.parametrize("number", range(6))
def test_a_sound_chunk_has_no_finding_and_every_batch_is_seen(number: int) -> None:
    history = sound()
    seen, findings = scanned(history.content(0, number), history.chunk(0, number))
    assert findings == []
    assert [each.header for each in seen] == [header for header, _ in history.batches(0, number)]
    assert [each.position for each in seen] == [history.position(0, number, batch) for batch in range(len(seen))]


@pytest.mark.parametrize("batch", range(FILE_BATCHES + 1))
@pytest.mark.parametrize("byte", [0, 5, 13, 40, 70, 94])
def test_a_flipped_bit_in_any_header_is_found_there_and_all_other_batches_are_still_read(batch: int, byte: int) -> None:
    history = sound()
    data = flipped(history.position(0, CHUNK, batch) + byte)
    seen, findings = scanned(data, history.chunk(0, CHUNK))
    header = history.batches(0, CHUNK)[batch][0]
    assert places(findings) == [("batch-header", header.base_offset)]
    assert (findings[0].since, findings[0].until) == (header.base_offset, header.next_offset)
    assert [each.header for each in seen] == [other for other, _ in history.batches(0, CHUNK) if other != header]


@pytest.mark.parametrize("batch", range(1, FILE_BATCHES + 1))
def test_a_flipped_bit_in_a_body_is_found_and_hides_nothing(batch: int) -> None:
    history = sound()
    data = flipped(history.position(0, CHUNK, batch) + HEADER_BYTES)
    seen, findings = scanned(data, history.chunk(0, CHUNK))
    assert places(findings) == [("batch-body", BASE + (batch - 1) * BATCH_RECORDS)]
    assert len(seen) == FILE_BATCHES + 1


def test_a_flipped_bit_anywhere_is_found_unless_it_means_nothing() -> None:
    """Nothing stands in the padding of a body and behind the last checksum."""
    history = sound()
    chunk, data = history.chunk(0, CHUNK), history.content(0, CHUNK)
    silent = set()
    at = 0
    for header, _ in history.batches(0, CHUNK):
        silent |= set(range(at + HEADER_BYTES + header.body_length, at + header.size))
        at += header.size
    silent |= set(range(len(data) - 4, len(data)))
    for position in range(len(data)):
        _, findings = scanned(flipped(position, data), chunk)
        assert bool(findings) != (position in silent), position


def test_two_defects_in_one_chunk_are_both_found() -> None:
    history = sound()
    data = flipped(history.position(0, CHUNK, 2) + 50)
    data = flipped(history.position(0, CHUNK, 5) + HEADER_BYTES, data)
    data = flipped(len(data) - 30, data)
    _, findings = scanned(data, history.chunk(0, CHUNK))
    assert sorted(places(findings)) == [
        ("batch-body", BASE + 4 * BATCH_RECORDS),
        ("batch-header", BASE + BATCH_RECORDS),
        ("chunk-footer", BASE),
    ]


def test_a_chunk_that_is_cut_short_tells_what_is_lost() -> None:
    history = sound()
    chunk = history.chunk(0, CHUNK)
    seen, findings = scanned(history.content(0, CHUNK)[: history.position(0, CHUNK, 3) + 40], chunk)
    assert len(seen) == 3
    rules = [finding.rule for finding in findings]
    assert rules == ["chunk-descriptor", "chunk-footer", "batch-header"]
    assert (findings[-1].since, findings[-1].until) == (BASE + 2 * BATCH_RECORDS, chunk.next_offset)


def test_an_embedded_batch_of_another_log_is_not_taken_for_one_of_this() -> None:
    """A value may hold whole batches: behind a header that cannot be read they look like any other."""
    history = sound()
    like, body = history.batches(0, CHUNK)[5]
    foreign = msgspec.structs.replace(like, incarnation=like.incarnation ^ 1)  # Of a copy of this very topic.
    inner = chunk_of([(foreign, body)], ProducerTable(), 1)[0][: foreign.size]
    batches = history.batches(0, CHUNK)
    header = batches[2][0]
    outer = msgspec.structs.replace(header, body_length=len(inner), raw_length=len(inner), body_crc=crc32c(inner))
    batches[2] = (outer, inner)
    data, chunk = chunk_of(batches, ProducerTable(), 2)
    damaged = flipped(sum(each.size for each, _ in batches[:2]) + 8, data)
    seen, findings = scanned(damaged, chunk)
    assert [place for place in places(findings) if place[0] == "batch-header"] == [("batch-header", header.base_offset)]
    assert foreign not in [each.header for each in seen]
    assert len(seen) == FILE_BATCHES


def rewritten(edit: Callable[[Batches], Batches]) -> list[tuple[str, int]]:
    data, chunk = chunk_of(edit(sound().batches(0, CHUNK)), ProducerTable(), 2)
    return places(scanned(data, chunk)[1])


def with_header(batches: Batches, at: int, **changes: object) -> Batches:
    header, body = batches[at]
    changed: BatchHeader = msgspec.structs.replace(header, **changes)
    return [*batches[:at], (changed, body), *batches[at + 1 :]]


def test_gaps_overlaps_and_epochs_inside_a_chunk_are_found() -> None:
    third = BASE + 2 * BATCH_RECORDS
    assert rewritten(lambda batches: [*batches[:3], *batches[4:]]) == [("offset-gap", third)]
    assert rewritten(lambda batches: [*batches[:3], *batches[2:]]) == [("offset-overlap", BASE + BATCH_RECORDS)]
    falls = [("epoch-order", third), ("epoch-order", third + BATCH_RECORDS)]
    assert rewritten(lambda batches: with_header(batches, 3, epoch=1))[:1] == falls[:1]
    assert rewritten(lambda batches: with_header(batches, 3, incarnation=5)) == falls
    gap = rewritten(lambda batches: with_header(batches[:2] + batches[3:], 2, epoch=3)[:3])
    assert gap == [("takeover-gap", BASE + BATCH_RECORDS)]
    stray = rewritten(lambda batches: with_header(batches, 3, min_key_hash=1, max_key_hash=0))
    assert stray == [], "no key, no range"


def test_what_stands_behind_a_seal_is_found() -> None:
    def sealed_early(batches: Batches) -> Batches:
        begin = batches[0][0]
        seal = msgspec.structs.replace(begin, flags=int(Flag.SEAL), base_offset=batches[3][0].base_offset)
        return [*batches[:3], (seal, b""), *batches[3:]]

    assert rewritten(sealed_early)[:1] == [("behind-seal", BASE + 2 * BATCH_RECORDS)]


def test_a_footer_that_does_not_agree_with_its_batches_is_found() -> None:
    history = sound()
    chunk, data = history.chunk(0, CHUNK), history.content(0, CHUNK)
    footer = decode_footer(data)

    def with_footer(**changes: object) -> list[tuple[str, int]]:
        fields: dict[str, Any] = {name: getattr(footer, name) for name in footer.__struct_fields__ if name != "size"}
        made = data[: footer.batch_bytes] + encode_footer(**(fields | changes))
        return places(scanned(made, msgspec.structs.replace(chunk, size=len(made)))[1])

    assert with_footer() == []
    assert with_footer(sealed=True) == [("chunk-footer", BASE)]
    assert with_footer(last_epoch=3) == [("chunk-footer", BASE)]
    assert with_footer(producers=ProducerTable()) == [("producer-table", BASE)]
    assert with_footer(next_offset=chunk.next_offset + 1) == [("chunk-descriptor", BASE)]
    wrong = type(footer.index)()
    wrong.runs = [msgspec.structs.replace(footer.index.runs[0], position=0)]
    assert with_footer(index=wrong) == [("chunk-index", BASE)]


@pytest.mark.parametrize("field", ["base_offset", "next_offset", "size", "min_timestamp", "max_key_hash"])
def test_a_manifest_that_describes_another_chunk_is_found(field: str) -> None:
    history = sound()
    chunk = history.chunk(0, CHUNK)
    wrong = msgspec.structs.replace(chunk, **{field: getattr(chunk, field) + 1})
    _, findings = scanned(history.content(0, CHUNK), wrong)
    assert "chunk-descriptor" in {finding.rule for finding in findings}


@pytest.mark.parametrize("what", poison.shown_by_the_body())
def test_a_batch_that_no_reader_can_decode_is_found_where_bodies_are_opened(what: str) -> None:
    batches = [poison.good(), poison.shown_by_the_body()[what], control_batch(Flag.SEAL)]
    stamped, at = [], 0
    for batch in batches:
        header = stamp(batch, parse_header(batch), Offset(at), 5_000_000, Epoch(1), 7, 0)
        stamped.append((header, bytes(body_of(batch, header))))
        at = header.next_offset
    data, chunk = chunk_of(stamped, ProducerTable(), 1)
    assert places(scanned(data, chunk)[1]) == []
    seen, findings = scanned(data, chunk, deep=True)
    assert places(findings) == [("batch-contents", poison.COUNT)]
    assert f"offsets {poison.COUNT} to {2 * poison.COUNT - 1} cannot be decoded" in findings[0].text
    assert len(seen) == len(batches)
    damaged = bytearray(data)
    damaged[stamped[0][0].size + HEADER_BYTES] ^= 1
    assert places(scanned(bytes(damaged), chunk, deep=True)[1]) == [("batch-body", poison.COUNT)], "one defect, once"


def test_keys_of_another_segment_are_found_by_their_hashes() -> None:
    history = sound()
    narrow = facts(history, first_hash=1)
    _, findings = scanned(history.content(0, CHUNK), history.chunk(0, CHUNK), narrow)
    assert places(findings) == [("key-range", BASE + number * BATCH_RECORDS) for number in range(FILE_BATCHES)]


# Manifests.


def test_manifests_that_end_elsewhere_than_their_chunks_are_found() -> None:
    own = facts(sound())
    assert own.manifest is not None
    assert list(manifest_end(own)) == []
    wrong = msgspec.structs.replace(own.manifest, next_offset=Offset(RECORDS + 1))
    assert places(list(manifest_end(facts(sound(), manifest=wrong)))) == [("manifest-end", RECORDS)]


def test_a_producer_table_that_is_not_what_the_manifest_says_is_found() -> None:
    history = sound().copy()
    name = history.name_producers(1)
    data = history.objects[f"{history.folder(1)}/{name}"]
    own = facts(history, 1)
    assert own.manifest is not None
    assert list(producer_object(facts(sound(), 1), None)) == [], "no table is named"
    assert list(producer_object(own, data)) == []
    short = msgspec.structs.replace(own.manifest, next_offset=Offset(RECORDS + 1))
    broken = {
        "is not in storage": list(producer_object(own, None)),
        "bytes, the manifest says": list(producer_object(own, data + b"x")),
        "cannot be read": list(producer_object(own, flipped(5, data))),
        f"and chunks end at {RECORDS + 1}": list(producer_object(facts(history, 1, manifest=short), data)),
    }
    for text, (finding,) in broken.items():
        assert (finding.rule, finding.segment, finding.object) == ("producer-object", 1, name)
        assert text in finding.text


def test_manifests_that_are_wrong_about_a_seal_are_found() -> None:
    own = facts(sound())
    assert own.manifest is not None
    assert own.manifest.sealed
    sealed = SegmentTotals(seal_at=RECORDS)
    assert list(manifest_seal(own, sealed)) == []
    assert list(manifest_seal(own, SegmentTotals())) == [], "a seal that stands alone in its file is not exported"
    opened = facts(sound(), manifest=msgspec.structs.replace(own.manifest, sealed=False))
    assert places(list(manifest_seal(opened, sealed))) == [("manifest-seal", RECORDS)]
    assert places(list(manifest_seal(facts(sound(), end=RECORDS + 9), sealed))) == [("manifest-seal", RECORDS)]


def test_chunks_that_begin_above_what_the_owner_still_has_are_found() -> None:
    own = facts(sound())
    assert own.manifest is not None
    cut = facts(sound(), manifest=msgspec.structs.replace(own.manifest, chunks=own.manifest.chunks[1:]))
    assert places(list(retained_start(cut, 0))) == [("retained-start", 0)]
    assert list(retained_start(cut, own.manifest.chunks[1].base_offset)) == [], "retention came in between"


def test_objects_without_a_manifest_are_a_defect_and_objects_that_it_does_not_list_are_a_note() -> None:
    own = facts(sound())
    listed = [chunk.object for chunk in sound().manifest(0).chunks]
    assert unreferenced(own, [*listed, "manifests/1.json"]) is None
    note = unreferenced(own, [*listed, "a.chunk", "b.chunk", "c.chunk", "d.chunk"])
    assert note is not None
    assert "4 objects" in note
    assert "from a.chunk on" in note
    assert list(missing_manifest(own, listed)) == []
    without = facts(sound(), manifest=None)
    assert places(list(missing_manifest(without, listed))) == [("manifest-missing", 0)]
    assert list(missing_manifest(without, ["manifests/1.json"])) == []


# Parents and children.


def lineage(*, sealed: bool = True) -> dict[int, SegmentFacts]:
    """0 → 1 → 2, and 3 alone."""
    parents = {0: (), 1: (0,), 2: (1,), 3: ()}
    return {each: facts(sound(), id=each, parents=above, sealed=sealed) for each, above in parents.items()}


def wrote(first: int, last: int, records: int = 9) -> SegmentTotals:
    return SegmentTotals(records=records, first_append=first * CLOCK_SKEW_US, last_append=last * CLOCK_SKEW_US)


def test_a_child_that_begins_before_an_ancestor_has_ended_is_found() -> None:
    empty = SegmentTotals()
    segments = lineage()
    good = {0: wrote(0, 10), 1: wrote(10, 20), 2: wrote(20, 30), 3: wrote(0, 99)}
    assert list(parent_end(segments, good)) == []
    assert list(parent_end(segments, good | {1: wrote(9, 20)})) == [], "two clocks differ by that much"
    assert [each.segment for each in parent_end(segments, good | {1: wrote(8, 20)})] == [1]
    through_an_empty_one = {0: wrote(0, 10), 1: empty, 2: wrote(5, 30), 3: empty}
    assert [each.segment for each in parent_end(segments, through_an_empty_one)] == [2]


def test_offsets_after_the_end_that_a_manifest_names_are_found() -> None:
    def found(end: int | None, totals: SegmentTotals, of_owner: int = RECORDS) -> list[tuple[str, int]]:
        own = facts(sound(), end=of_owner)
        assert own.manifest is not None
        changed = msgspec.structs.replace(own.manifest, end=end)
        return places([*manifest_seal(msgspec.structs.replace(own, manifest=changed), totals)])

    sealed = SegmentTotals(seal_at=RECORDS)
    assert found(RECORDS, sealed) == found(None, sealed) == []
    assert found(RECORDS - 5, sealed) == [("manifest-seal", RECORDS - 5)]
    assert found(RECORDS, SegmentTotals(), RECORDS + 1) == [("manifest-seal", RECORDS)]


def test_hashes_that_no_segment_or_more_than_one_has_are_found() -> None:
    family = {segment: facts(sound(), segment) for segment in range(3)}
    assert [*layout_tiling(family)] == []
    assert [*layout_tiling({1: family[1], 2: family[2]})] == [], "the parent has left the layout"
    narrow = {**family, 2: msgspec.structs.replace(family[2], first_hash=family[2].first_hash + 1)}
    assert [each.segment for each in layout_tiling(narrow)] == [0, 0]
    wide = {**family, 2: msgspec.structs.replace(family[2], first_hash=family[2].first_hash - 1)}
    assert [each.rule for each in layout_tiling(wide)] == ["layout-tiling"] * 2
    orphan = {**family, 2: msgspec.structs.replace(family[2], parents=())}
    assert [(each.segment, "do not tile its hashes" in each.text) for each in layout_tiling(orphan)] == [(0, True)]


def test_children_with_records_of_a_parent_that_is_open_are_found() -> None:
    totals = {0: wrote(0, 1), 1: wrote(2, 3), 2: SegmentTotals(), 3: wrote(0, 9)}
    assert list(parent_sealed(lineage(), totals)) == []
    assert [each.segment for each in parent_sealed(lineage(sealed=False), totals)] == [0], "2 has no records yet"


def test_a_batch_that_stands_in_a_segment_and_its_ancestor_is_found_and_one_in_strangers_is_not() -> None:
    same = [(0, 5, "a.chunk"), (2, 7, "b.chunk"), (3, 9, "c.chunk")]
    found = list(repeated_in_lineage(lineage(), [Repeat(7, 3, tuple(same))]))
    assert [(each.segment, each.offset, each.object) for each in found] == [(2, 7, "b.chunk")]
    assert list(repeated_in_lineage(lineage(), [Repeat(7, 3, tuple(same[1:]))])) == []


# One defect, one finding.


def gap(rule: str, since: int, until: int, segment: int = 0, offset: int | None = None) -> Finding:
    return Finding(rule, segment, since if offset is None else offset, "", "", since, until)


def test_a_gap_with_a_known_cause_is_not_told_and_one_without_is() -> None:
    lost = gap("missing-object", 10, 20)
    echo, own, elsewhere = gap("offset-gap", 10, 20), gap("offset-gap", 40, 50), gap("takeover-gap", 10, 20, segment=1)
    assert without_echoes([echo, own, lost, elsewhere]) == [lost, own, elsewhere]
    jump = gap("sequence-gap", 8, 20, offset=20)
    assert without_echoes([jump, lost, echo]) == [lost]
    assert without_echoes([jump, echo]) == [echo], "a gap in offsets explains one in sequences"
    assert without_echoes([jump]) == [jump]
    assert without_echoes([gap("sequence-gap", 20, 20, offset=20), lost]) == [lost, gap("sequence-gap", 20, 20)]


def test_what_expired_during_the_audit_explains_its_gap_and_is_no_defect() -> None:
    assert without_echoes([gap(EXPIRED, 0, 10), gap("offset-gap", 0, 10)]) == []


def test_what_two_looks_found_is_told_once() -> None:
    assert len(without_echoes([gap("offset-gap", 5, 9), gap("offset-gap", 5, 9)])) == 1


def test_every_rule_is_documented_in_the_words_of_the_code() -> None:
    page = (Path(__file__).parents[2] / "docs/pipeline/audit.md").read_text()
    documented = dict(re.findall(r"^\| `([a-z][a-z-]+)` \| (.+) \|$", page, flags=re.MULTILINE))
    assert documented.keys() == RULES.keys()
    assert [rule for rule, text in RULES.items() if not documented[rule].startswith(text)] == []
