"""What each producer has stored in one log, so that a batch that is sent again is stored once (I10).

The table remembers, for each producer, its latest batches: enough to answer a retry with the offsets that the first try
got. It is rebuilt from the log itself: the footer of the last closed file carries it as rows, and all later batches are
applied on top. Where retention has deleted that file, an object of its own holds the rows (producer_objects.py). Both
bounds are limits with a price. A producer that 10,000 others have outlived is forgotten
and has to start again under a new id. A retry of a batch older than the remembered ones is still recognised, but
answered without its offsets.

A producer that is not in the table must start at sequence 0. So everything below a known producer's next sequence has
been stored, and "older than remembered" never means "never arrived".

A *derived* producer (batch/identity.py) counts in eras: it may go on at number 0 of any later era. Inside an era there
are no gaps, as above. Between two eras there are, so what "older than remembered" means rests on a promise that the
table cannot check: when an era begins, those before it are complete. A batch of an earlier era is then a late copy of
one that is stored, and is answered so. What the table can still see is held to that: a batch that would stand between
two remembered ones, or is cut in another way than they are, is out of sequence and not a copy. An era may begin only at
its number 0, and what is not known begins one (so a derived producer that was forgotten stores again what it repeats:
the price of the first limit is higher for it). So an era that is repeated from its beginning, completely and cut in the
same way, is stored once, however often and by however many programs at the same time.

A log that continues other logs begins with their tables (`inherited`). Offsets of another log mean nothing here, so a
retry of a batch that stands there is recognised and answered without offsets. A producer that numbered its batches in
several of those logs has no single number to go on from: its last era is closed. What belongs to that era cannot be
judged any more and is out of sequence, earlier eras are stored, and a later one may begin. Two logs may also have
inherited one producer from the same log, as when the halves of a split are merged. A drawn id belongs to one log, so
its batches are the same in both tables, and count once.

Only a client that has missed a change of the layout, and cannot reach the log itself, asks for a drawn id whose log has
ended. So few of them are handed on from log to log. A topic that is changed often would otherwise collect 10,000.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Collection, Iterator
from itertools import zip_longest
from typing import Final, NamedTuple

from braid.model.batch.header import BatchHeader
from braid.model.batch.identity import (
    ERA_BITS,
    ERA_RECORDS,
    NOT_KNOWN,
    SEVERAL_LOGS,
    begins_era,
    era_of,
    is_derived,
    leaves_era,
)
from braid.model.errors import ChunkCorrupt, OutOfSequence
from braid.model.ids import Offset, ProducerId, Sequence

MAX_PRODUCERS: Final = 10_000
REMEMBERED_BATCHES: Final = 8
MAX_HANDED_ON: Final = 256
"""Of drawn ids whose log has ended, so many are handed on again when the next log ends, too."""
ELSEWHERE: Final = Offset((1 << 64) - 1)
"""The offset of a batch that stands in another log."""

_ROW: Final = struct.Struct(
    "<"
    "Q"  #  0 producer id
    "Q"  #  8 sequence of the batch's first record
    "Q"  # 16 offset of the batch's first record
    "I"  # 24 records in the batch
    "4x"  # 28
)
ROW_BYTES: Final = _ROW.size


_Stored = tuple[Sequence, Offset, int]
"""First sequence, base offset and number of records of a batch. A plain tuple: two are made for each batch."""


class Duplicate(NamedTuple):
    """Where a retried batch already stands. `base_offset` is None when that is no longer remembered; the batch then
    lies somewhere below `next_offset`, or in another log if that is 0."""

    base_offset: Offset | None
    next_offset: Offset


class ProducerTable:
    """Owned by the log whose batches it describes."""

    def __init__(self) -> None:
        # In order of their latest batch, so that the first one is the one to forget.
        self._batches: dict[ProducerId, deque[_Stored]] = {}

    def __len__(self) -> int:
        return len(self._batches)

    def check(self, header: BatchHeader) -> Duplicate | None:
        """Return where the batch is stored, if it is a retry. `OutOfSequence` if it neither continues nor repeats."""
        producer, first = header.producer_id, header.first_sequence
        if producer == 0:
            return None
        if leaves_era(producer, first, header.count):
            raise OutOfSequence(
                f"producer {producer:#x} sent {header.count} records of which some do not fit era {era_of(first)}; "
                f"a batch lies in one era"
            )
        known = self._batches.get(producer)
        if known is None:
            if first and not begins_era(producer, first):
                raise OutOfSequence(
                    f"producer {producer:#x} is not known here and sent sequence {first}; "
                    f"a producer starts at 0, under a new id if it was forgotten"
                )
            return None
        last_sequence, _, last_records = known[-1]
        expected = last_sequence + last_records
        if first == expected or (first > expected and begins_era(producer, first)):
            return None
        if first + header.count <= expected:
            for first_sequence, base_offset, records in known:
                if first_sequence == first and records == header.count:
                    if base_offset == ELSEWHERE:
                        return Duplicate(None, Offset(0))
                    return Duplicate(base_offset, Offset(base_offset + records))
            oldest_sequence, oldest_offset, _ = known[0]
            if first + header.count <= oldest_sequence:
                return Duplicate(None, oldest_offset if oldest_offset != ELSEWHERE else Offset(0))
        raise OutOfSequence(
            f"producer {producer:#x} sent sequences {first}–{header.last_sequence}, "
            f"but its next sequence in this log is {expected}"
        )

    def next_sequence(self, producer: int) -> int:
        """Return the sequence with which the producer would go on; `NOT_KNOWN` or `SEVERAL_LOGS` if there is none."""
        known = self._batches.get(ProducerId(producer))
        if known is None:
            return NOT_KNOWN
        first_sequence, _, records = known[-1]
        return first_sequence + records if known[-1] != _closed_era(first_sequence) else SEVERAL_LOGS

    def last_era(self, producer: int) -> int:
        """Return the era of the last batch of a derived producer, here or in a log that this log continues."""
        known = self._batches.get(ProducerId(producer))
        return era_of(known[-1][0]) if known is not None else NOT_KNOWN

    def has_later_era(self, header: BatchHeader) -> bool:
        """Tell whether the producer, a derived one, has come to a later era than this batch belongs to."""
        known = self._batches.get(header.producer_id)
        return (
            known is not None
            and is_derived(header.producer_id)
            and era_of(known[-1][0]) > era_of(header.first_sequence)
        )

    def apply(self, header: BatchHeader, base_offset: Offset) -> None:
        """Remember a batch that now stands in the log."""
        producer, records = header.producer_id, header.count
        if producer and records:
            self._remember(producer, (header.first_sequence, base_offset, records))

    def _remember(self, producer: ProducerId, batch: _Stored) -> None:
        batches = self._batches
        known = batches.pop(producer, None)
        if known is None:
            known = deque((batch,), REMEMBERED_BATCHES)
            if len(batches) >= MAX_PRODUCERS:
                del batches[next(iter(batches))]
        else:
            last_sequence, _, last_records = known[-1]
            if batch[0] >= last_sequence + last_records:
                known.append(batch)
        batches[producer] = known

    def rows(self) -> Iterator[bytes]:
        for producer, known in self._batches.items():
            for first_sequence, base_offset, records in known:
                yield _ROW.pack(producer, first_sequence, base_offset, records)

    @classmethod
    def from_rows(cls, data: bytes | memoryview) -> ProducerTable:
        if len(data) % ROW_BYTES:
            raise ChunkCorrupt(f"a producer table of {len(data)} bytes is no whole number of {ROW_BYTES}-byte rows")
        table = cls()
        for producer, first_sequence, base_offset, count in _ROW.iter_unpack(data):
            table._remember(producer, (first_sequence, base_offset, count))
        return table

    def extended(self, later: ProducerTable) -> ProducerTable:
        """Return this table with what a later one of the same log adds; batches in both count once."""
        table = self.copy()
        for producer, known in later._batches.items():
            for batch in known:
                table._remember(producer, batch)
        return table

    def copy(self) -> ProducerTable:
        twin = ProducerTable()
        twin._batches = {producer: deque(known, REMEMBERED_BATCHES) for producer, known in self._batches.items()}
        return twin


def inherited(tables: Collection[ProducerTable]) -> ProducerTable:
    """Return the table with which a log begins that continues the logs of these tables.

    Of more than `MAX_PRODUCERS`, those are kept that wrote last; each of the logs counts the same."""
    table = ProducerTable()
    by_rank = zip_longest(*(reversed(other._batches) for other in tables))
    newest_first = list(dict.fromkeys(producer for rank in by_rank for producer in rank if producer is not None))
    ended = [producer for producer in newest_first if _has_ended(producer, tables)]
    forgotten = set(ended[MAX_HANDED_ON:])
    kept = [producer for producer in newest_first if producer not in forgotten][:MAX_PRODUCERS]
    for producer in reversed(kept):
        found = [other._batches[producer] for other in tables if producer in other._batches]
        known = list(found[0]) if is_derived(producer) else [found[0][-1]]  # A drawn id belongs to one log, and ends.
        batches = [(first, ELSEWHERE, records) for first, _, records in known]
        if len(found) > 1 and not _one_origin(producer, found):
            batches = [_closed_era(max(known[-1][0] for known in found))]
        table._batches[producer] = deque(batches, REMEMBERED_BATCHES)
    return table


def _has_ended(producer: ProducerId, tables: Collection[ProducerTable]) -> bool:
    """Tell whether a drawn id belongs to a log that had ended before those of these tables."""
    if is_derived(producer):
        return False
    known = (table._batches[producer] for table in tables if producer in table._batches)
    return all(offset == ELSEWHERE for batches in known for _, offset, _ in batches)


def _one_origin(producer: ProducerId, found: list[deque[_Stored]]) -> bool:
    """Tell whether these batches of one producer, from several tables, are those of one log."""
    inherited_all = all(offset == ELSEWHERE for known in found for _, offset, _ in known)
    return inherited_all and not is_derived(producer) and all(known == found[0] for known in found)


def _closed_era(sequence: Sequence) -> _Stored:
    """Return a batch that takes every number of the era of `sequence`: nothing repeats it and nothing continues it."""
    return Sequence(era_of(sequence) << ERA_BITS), ELSEWHERE, ERA_RECORDS - 1
