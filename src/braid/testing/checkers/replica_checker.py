"""The checker of replicas: what a copy of a log has on its disk, whatever its broker says about it.

It reads the bytes that every loss of power leaves, so it needs to trust no broker:

- when an owner confirms a record, enough replicas have this very batch on disk, and a vote would find them: each has
  the mark of a member (I2). While the set changes, that is true of whichever set the record names;
- a follower that is as far as its owner knows the same producers (I10);
- in the end, every copy holds what the log holds (I1).

A walk through a file goes on where the last one ended. So a look at each confirm costs little.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

import msgspec

from braid.model.batch.header import HEADER_BYTES, BatchHeader, verify
from braid.model.errors import BatchError
from braid.storage.log import promise as promises
from braid.storage.log.producers import ProducerTable
from braid.storage.log.promise import ReplicaMark
from braid.storage.log.wal import base_of
from braid.testing.checkers.history import PromiseBroken
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.sectors import SectorFile


class BatchContent(NamedTuple):
    """What all copies of a batch have in common."""

    base_offset: int
    records: int
    epoch: int
    body_crc: int
    producer_id: int
    first_sequence: int

    @classmethod
    def of(cls, header: BatchHeader) -> BatchContent:
        return cls(
            header.base_offset,
            header.count,
            header.epoch,
            header.body_crc,
            header.producer_id,
            header.first_sequence,
        )


class _Walked:
    """How far a file was walked through."""

    def __init__(self) -> None:
        self.position = 0
        self.last = b""
        """The header of the last batch, as it stands before `position`."""
        self.last_at = 0
        self.batches: list[BatchContent] = []
        """With records, in order."""


class CopiesOnDisk:
    """Reads the copies of logs on simulated disks."""

    def __init__(self, folder: str) -> None:
        """`folder` is where brokers keep the files of their logs."""
        self._folder = folder
        self._walked: WeakKeyDictionary[SectorFile, _Walked] = WeakKeyDictionary()

    def is_member(self, disk: SimulatedDisk, segment: str) -> bool:
        """Tell whether the copy has the mark of a member. `segment` is the topic's path and the descriptor."""
        file = disk.files().get(f"{self._folder}/{segment}/{promises.NAME}")
        if file is None:
            return False
        try:
            return msgspec.json.decode(bytes(file.durable), type=ReplicaMark).member
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False

    def find(self, disk: SimulatedDisk, segment: str, offset: int) -> BatchContent | None:
        """Return the batch with this record, if the disk surely has it."""
        for base, file in reversed(self._files(disk, segment)):
            if base <= offset:
                batches = self._batches(file)
                return next((each for each in reversed(batches) if _covers(each, offset)), None)
        return None

    def all_batches(self, disk: SimulatedDisk, segment: str) -> Iterator[BatchContent]:
        for _, file in self._files(disk, segment):
            yield from self._batches(file)

    def _files(self, disk: SimulatedDisk, segment: str) -> list[tuple[int, SectorFile]]:
        prefix = f"{self._folder}/{segment}/"
        found = [
            (base, file)
            for path, file in disk.files().items()
            if path.startswith(prefix) and (base := base_of(path.removeprefix(prefix))) is not None
        ]
        return sorted(found, key=lambda each: each[0])

    def _batches(self, file: SectorFile) -> list[BatchContent]:
        walked, data = self._walked.get(file), file.durable
        if walked is None or data[walked.last_at : walked.last_at + len(walked.last)] != walked.last:
            walked = self._walked[file] = _Walked()  # The file was cut.
        while True:
            try:
                header = verify(data, walked.position)
            except BatchError:
                return walked.batches
            walked.last_at = walked.position
            walked.last = bytes(data[walked.position : walked.position + HEADER_BYTES])
            walked.position += header.size
            if header.count:
                walked.batches.append(BatchContent.of(header))


class ReplicaChecker:
    """Compares the copies of one topic's segments."""

    def __init__(self, folder: str) -> None:
        self.copies = CopiesOnDisk(folder)
        self.confirms = 0
        """How many confirms were compared with disks."""

    def check_confirmed(
        self, segment: str, offset: int, disks: Mapping[str, SimulatedDisk], owner: str, write_quorum: int
    ) -> None:
        """I2: enough of these replicas' disks hold the record that the owner's disk holds, as members."""
        self.confirms += 1
        content = self.copies.find(disks[owner], segment, offset)
        held = {broker: self.copies.find(disk, segment, offset) for broker, disk in disks.items()}
        holders = [
            broker
            for broker, found in held.items()
            if content is not None and found == content and self.copies.is_member(disks[broker], segment)
        ]
        if len(holders) < write_quorum:
            members = [broker for broker, disk in disks.items() if self.copies.is_member(disk, segment)]
            raise PromiseBroken(
                "I2",
                f"{owner} has confirmed offset {offset} of {segment}, of which {write_quorum} of {sorted(disks)} must "
                f"hold a copy; the disks have {held}, members are {members}",
            )

    def check_whole(
        self, segment: str, disk: SimulatedDisk, broker: str, log: Mapping[int, BatchContent], first: int, end: int
    ) -> None:
        """I1: the copy holds the log's batches from its own beginning on, up to its end. `first` is where the copy has
        to begin at the latest: chunks hold all that is before it."""
        expected: int | None = None
        for batch in self.copies.all_batches(disk, segment):
            if expected is not None and batch.base_offset != expected:
                raise PromiseBroken("I1", f"the copy of {segment} on {broker} has {batch} where {expected} is due")
            if expected is None and batch.base_offset > first:
                raise PromiseBroken("I1", f"the copy of {segment} on {broker} begins with {batch}, not with {first}")
            expected = batch.base_offset + batch.records
            if batch.base_offset in log and log[batch.base_offset] != batch:
                raise PromiseBroken(
                    "I1", f"the copy of {segment} on {broker} has {batch}, and the log {log[batch.base_offset]}"
                )
        if (expected if expected is not None else first) != end:
            raise PromiseBroken("I1", f"the copy of {segment} on {broker} ends at {expected}, and the log at {end}")


def check_same_producers(segment: str, broker: str, owners: ProducerTable, copy: ProducerTable) -> None:
    """I10: a copy that is as far as the owner's log knows the last batch of the same producers. It may remember fewer
    of the batches before: where it began, it was told the last ones only."""
    ours, others = set(owners.handed_on().rows()), set(copy.handed_on().rows())
    if ours != others:
        raise PromiseBroken(
            "I10",
            f"{broker} has all batches of {segment} and knows other producers than its owner: "
            f"{_rows(others - ours)} are too many, {_rows(ours - others)} are missing",
        )


def _rows(rows: set[bytes]) -> list[str]:
    return sorted(row.hex() for row in rows)[:5]


def _covers(batch: BatchContent, offset: int) -> bool:
    return batch.base_offset <= offset < batch.base_offset + batch.records
