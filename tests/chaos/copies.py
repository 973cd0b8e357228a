"""Compares what disks hold of one segment: the same batches at the same offsets, wherever two of them have any.

A copy differs from its owner's log in two fields of a header: the commit lag speaks of the copy's own disk, and the
header's checksum contains it. Everything else of a batch is compared, with its body.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, pairwise
from pathlib import Path

import msgspec

from braid.model.batch.header import HEADER_BYTES, MAGIC, BatchHeader, verify
from tests.chaos.load import BrokenPromise

Place = tuple[int, int, int]
"""Offset, epoch and flags of a batch: several control batches may stand at one offset."""
Batches = dict[Place, tuple[BatchHeader, bytes]]


def batches_in(files: Iterable[Path]) -> Batches:
    return {(each.base_offset, each.epoch, each.flags): (each, body) for file in files for each, body in _walk(file)}


def compare(segment: str, copies: dict[str, Batches], chunks: dict[str, Batches], end: int) -> int:
    """Raise `BrokenPromise` if copies differ from each other or from chunks, or if one has a gap, or does not reach the
    end of the log. A copy without records is fine where chunks hold them all. Returns how many pairs were compared."""
    reach = max((_reach(batches) for batches in chunks.values()), default=0)
    for broker, batches in copies.items():
        _check_offsets(f"the copy of {segment} on {broker}", batches)
        if max(_reach(batches), reach) != end:
            raise BrokenPromise(
                f"{segment}: {broker} holds it up to {_reach(batches)}, chunks to {reach}, not to {end}"
            )
    pairs = 0
    for (one, first), (other, second) in combinations([*copies.items(), *chunks.items()], 2):
        for place in first.keys() & second.keys():
            pairs += 1
            if first[place] != second[place]:
                raise BrokenPromise(f"{segment}: the batches at offset {place[0]} on {one} and {other} differ")
    return pairs


def _walk(file: Path) -> Iterator[tuple[BatchHeader, bytes]]:
    """Yield the batches of a WAL file or chunk, each verified. They end at zeros, at a footer or with the file."""
    data, at = file.read_bytes(), 0
    while data[at : at + len(MAGIC)] == MAGIC:
        header = verify(data, at)
        yield msgspec.structs.replace(header, commit_lag=0), data[at + HEADER_BYTES : at + header.size]
        at += header.size


def _reach(batches: Batches) -> int:
    """Return the offset after the last record."""
    return max((header.next_offset for header, _ in batches.values()), default=0)


def _check_offsets(whose: str, batches: Batches) -> None:
    records = sorted((header.base_offset, header.next_offset) for header, _ in batches.values() if header.count)
    for (_, before), (after, _) in pairwise(records):
        if before != after:
            raise BrokenPromise(f"I1: {whose} goes from offset {before} to {after}")
