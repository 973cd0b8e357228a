"""The scan of chunks and tails: it checks every byte, and no defect ends it.

The scan walks a chunk from its first byte, a few MiB at a time. After an unreadable header it goes on at the next batch
of this log: a batch with the epoch and the incarnation of the last good batch, or a batch at a place that the footer's
index names. (A value may hold whole batches of another log; model/batch/header.py says why the incarnation tells them
apart.) After a damaged body, the batch's header says where the next batch begins.

The scan yields the headers of all batches, in order, and findings between them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from braid.model.batch.body import Body, Data
from braid.model.batch.header import HEADER_BYTES, MAGIC, BatchHeader, parse_header, verify
from braid.model.errors import BatchError, ChunkCorrupt
from braid.spark.jobs.audit.rules import Finding, SegmentFacts
from braid.storage.chunk import FOOTER_READ_BYTES, TRAILER_BYTES, Footer, Index, decode_footer, footer_size
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.log.producers import ProducerTable

WINDOW_BYTES: Final = 4 << 20

Read = Callable[[int, int], bytes]
"""Returns bytes of an object at a position: so many, or fewer where the object ends."""


class Seen(NamedTuple):
    header: BatchHeader
    position: int
    """In the object; -1 if the batch came from an owner."""


class LogWalk:
    """Checks that each batch follows the one before it, in a chunk or a tail. One for each piece of a segment's log."""

    def __init__(self, segment: SegmentFacts, name: str) -> None:
        self._segment = segment
        self._name = name
        self.expected: int | None = None
        """The next offset; None before the first batch."""
        self.epoch = 0
        self.incarnation = 0
        self.sealed = False
        self.intact = True
        """Whether every batch so far has followed the one before it."""

    def finding(self, rule: str, offset: int, text: str, *, since: int = -1, until: int = -1) -> Finding:
        return Finding(rule, self._segment.id, offset, self._name, text, since, until)

    def lost(self, rule: str, until: int, text: str) -> Finding:
        """Report that records up to `until` cannot be read."""
        at = self.expected or 0
        self.expected, self.intact = until, False
        return self.finding(rule, at, text, since=at, until=until)

    def undecodable(self, header: BatchHeader, batch: Data, position: int = 0) -> Iterator[Finding]:
        """Report a batch whose records no reader can decode, although its checksums are right."""
        if header.is_control:
            return
        try:
            Body(batch, header, position).check()
        except BatchError as error:
            text = f"offsets {header.base_offset} to {header.next_offset - 1} cannot be decoded: {error}"
            yield self.finding("batch-contents", header.base_offset, text)

    def next(self, header: BatchHeader) -> Iterator[Finding]:
        base, expected = header.base_offset, self.expected
        if expected is not None and base != expected:
            self.intact = False
            if base > expected:
                taken_over = self.epoch not in (0, header.epoch)
                text = f"offsets {expected} to {base - 1} are not there"
                if taken_over:
                    text += f": epoch {self.epoch} ends before them, epoch {header.epoch} begins after them"
                yield self.finding(
                    "takeover-gap" if taken_over else "offset-gap", expected, text, since=expected, until=base
                )
            else:
                text = f"a batch begins at offset {base}, which has been given out: {expected} should follow"
                yield self.finding("offset-overlap", base, text)
        if header.epoch < self.epoch:
            yield self.finding("epoch-order", base, f"epoch {header.epoch} comes after epoch {self.epoch}")
        elif header.epoch == self.epoch and header.incarnation != self.incarnation:
            text = f"epoch {header.epoch} has incarnation {header.incarnation:08x} after {self.incarnation:08x}"
            yield self.finding("epoch-order", base, text)
        if self.sealed:
            yield self.finding("behind-seal", base, "a batch follows the seal of the log")
        if header.min_key_hash <= header.max_key_hash and not (
            self._segment.first_hash <= header.min_key_hash and header.max_key_hash <= self._segment.last_hash
        ):
            text = (
                f"a batch has key hashes {header.min_key_hash:04x} to {header.max_key_hash:04x}, the segment takes "
                f"{self._segment.first_hash:04x} to {self._segment.last_hash:04x}"
            )
            yield self.finding("key-range", base, text)
        self.expected = header.next_offset
        self.epoch, self.incarnation = header.epoch, header.incarnation
        self.sealed = header.is_seal


class ChunkScan:
    """The scan of one whole chunk. `size` is the object's, which may differ from its descriptor's. A deep scan opens
    the bodies, too."""

    def __init__(
        self, segment: SegmentFacts, chunk: ChunkDescriptor, size: int, read: Read, *, deep: bool = False
    ) -> None:
        self._chunk = chunk
        self._size = size
        self._read = read
        self._deep = deep
        self._walk = LogWalk(segment, chunk.object)
        self._footer: Footer | None = None

    def run(self) -> Iterator[Seen | Finding]:
        chunk, walk = self._chunk, self._walk
        yield from self._check_footer()
        footer = self._footer
        end = footer.batch_bytes if footer is not None else min(chunk.batch_bytes, self._size)
        walk.expected = int(chunk.base_offset)
        index, producers = Index(), ProducerTable()
        for each in self._batches(end):
            if isinstance(each, Finding):
                yield each
                continue
            yield from walk.next(each.header)
            index.add(each.header, each.position)
            producers.apply(each.header, each.header.base_offset)
            yield each
        if walk.expected != chunk.next_offset:
            text = f"its batches end at offset {walk.expected}, the manifest says {chunk.next_offset}"
            yield walk.finding("chunk-descriptor", min(walk.expected, chunk.next_offset), text)
        if footer is not None and walk.intact:
            yield from self._compare(footer, index, producers)

    # The footer.

    def _check_footer(self) -> Iterator[Finding]:
        chunk, walk = self._chunk, self._walk
        base = chunk.base_offset
        if self._size != chunk.size:
            text = f"the object has {self._size:,} bytes, the manifest says {chunk.size:,}"
            yield walk.finding("chunk-descriptor", base, text)
        try:
            footer = self._footer = self._read_footer()
        except ChunkCorrupt as error:
            yield walk.finding("chunk-footer", base, str(error))
            return
        low, high = footer.index.key_hashes
        facts = {
            "first offset": (footer.base_offset, chunk.base_offset),
            "next offset": (footer.next_offset, chunk.next_offset),
            "bytes of batches": (footer.batch_bytes, chunk.batch_bytes),
            "lowest time": (footer.index.min_timestamp, chunk.min_timestamp),
            "highest time": (footer.index.max_timestamp, chunk.max_timestamp),
            "lowest key hash": (low, chunk.min_key_hash),
            "highest key hash": (high, chunk.max_key_hash),
        }
        for what, (found, described) in facts.items():
            if found != described:
                text = f"the footer's {what} is {found}, the manifest's {described}"
                yield walk.finding("chunk-descriptor", base, text)

    def _read_footer(self) -> Footer:
        length = min(self._size, FOOTER_READ_BYTES)
        tail = self._read(self._size - length, length)
        if len(tail) >= TRAILER_BYTES and (needed := footer_size(tail)) > length:
            tail = self._read(max(0, self._size - needed), needed)
        footer = decode_footer(tail)
        if footer.batch_bytes + footer.size != self._size:
            raise ChunkCorrupt(
                f"the trailer describes {footer.batch_bytes + footer.size} bytes, but the chunk has {self._size}"
            )
        return footer

    def _compare(self, footer: Footer, index: Index, producers: ProducerTable) -> Iterator[Finding]:
        walk, base = self._walk, self._chunk.base_offset
        if index.runs != footer.index.runs:
            differing = next(
                (run for run, other in zip(footer.index.runs, index.runs) if run != other),
                footer.index.runs[-1] if footer.index.runs else None,
            )
            text = "the index does not describe the batches that are there"
            yield walk.finding("chunk-index", int(differing.offset) if differing is not None else base, text)
        if (walk.epoch, walk.sealed) != (footer.last_epoch, footer.sealed):
            text = (
                f"the footer says epoch {footer.last_epoch}, sealed {footer.sealed}; the batches end in epoch "
                f"{walk.epoch}, sealed {walk.sealed}"
            )
            yield walk.finding("chunk-footer", base, text)
        if not footer.producers.is_full and not set(producers.rows()) <= set(footer.producers.rows()):
            yield walk.finding("producer-table", base, "the producer table lacks batches of the chunk")

    # The batches.

    def _batches(self, end: int) -> Iterator[Seen | Finding]:
        """Yield the batches in order, and a finding in place of each unreadable batch."""
        walk = self._walk
        window, start, at = b"", 0, 0
        while start + at < end:
            position = start + at
            try:
                header = parse_header(window, at) if len(window) - at >= HEADER_BYTES else None
                if header is not None and position + header.size > end:
                    raise ChunkCorrupt(f"the batch at byte {position} has {header.size} bytes and runs over the end")
            except (BatchError, ChunkCorrupt) as error:
                following = self._batch_after(position, end)
                until = following.header.base_offset if following is not None else self._chunk.next_offset
                yield walk.lost("batch-header", until, f"at byte {position}: {error}")
                window, start, at = b"", following.position if following is not None else end, 0
                continue
            if header is None or at + header.size > len(window):
                wanted = max(WINDOW_BYTES, header.size if header is not None else HEADER_BYTES)
                window, start, at = self._read(position, min(wanted, end - position)), position, 0
                if len(window) < min(HEADER_BYTES if header is None else header.size, end - position) or (
                    header is None and len(window) < HEADER_BYTES
                ):
                    yield walk.lost("batch-header", self._chunk.next_offset, f"the object ends at byte {position}")
                    return
                continue
            try:
                verify(window, at)
            except BatchError as error:
                yield walk.finding("batch-body", header.base_offset, str(error))
            else:
                if self._deep:
                    yield from walk.undecodable(header, window, at)
            yield Seen(header, position)
            at += header.size

    def _batch_after(self, position: int, end: int) -> Seen | None:
        """Find the first batch of this log after an unreadable header."""
        runs = {run.position: int(run.offset) for run in self._footer.index.runs} if self._footer is not None else {}
        start = position + 8
        while start < end:
            window = self._read(start, min(WINDOW_BYTES, end - start))
            at = window.find(MAGIC)
            while at >= 0:
                found = self._whole(start + at, end)
                if found is not None and self._belongs(found, runs):
                    return found
                at = window.find(MAGIC, at + 1)
            if start + len(window) >= end or len(window) <= len(MAGIC):
                return None
            start += len(window) - len(MAGIC) + 1
        return None

    def _whole(self, position: int, end: int) -> Seen | None:
        if position % 8 or end - position < HEADER_BYTES:
            return None
        try:
            header = parse_header(self._read(position, HEADER_BYTES))
            if position + header.size > end:
                return None
            return Seen(verify(self._read(position, header.size)), position)
        except BatchError:
            return None

    def _belongs(self, found: Seen, runs: dict[int, int]) -> bool:
        header, walk, chunk = found.header, self._walk, self._chunk
        if not (walk.expected or 0) <= header.base_offset <= header.next_offset <= chunk.next_offset:
            return False
        if walk.incarnation:
            if (header.epoch, header.incarnation) == (walk.epoch, walk.incarnation):
                return True
        elif header.incarnation:  # Not even the first batch was readable: only the epoch can be compared.
            footer = self._footer
            lowest, highest = (footer.first_epoch, footer.last_epoch) if footer is not None else (0, chunk.epoch)
            return bool(lowest <= header.epoch <= highest)
        return runs.get(found.position) == header.base_offset
