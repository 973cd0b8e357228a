"""What each producer has stored in one log, so that a batch that is sent again is stored once (I10).

The table remembers, for each producer, its latest batches: enough to answer a retry with the offsets that the first try
got. It is rebuilt from the log itself: the footer of the last closed file carries it as rows, and all later batches are
applied on top. Where retention has deleted that file, an object of its own holds the rows (producer_objects.py). Both
bounds are limits with a price. A producer with a drawn id that 10,000 others have outlived is forgotten, and has to
start again under a new id. A retry of a batch older than the remembered ones is still recognised, but answered without
its offsets.

A producer that is not in the table must start at sequence 0. So everything below a known producer's next sequence has
been stored, and "older than remembered" never means "never arrived".

A *derived* producer (batch/identity.py) counts in eras: it may go on at number 0 of any later era. Inside an era there
are no gaps, as above. Between two eras there are, so what "older than remembered" means rests on a promise that the
table cannot check: when an era begins, those before it are complete. A batch of an earlier era is then a late copy of
one that is stored, and is answered so. What the table can still see is held to that: a batch that would stand between
two remembered ones, or is cut in another way than they are, is out of sequence and not a copy. An era may begin only at
its number 0, and what is not known begins one. So an era that is repeated from its beginning, completely and cut in the
same way, is stored once, however often and by however many programs at the same time.

**Forgetting.** An unknown producer at sequence 0 is new, or forgotten: an open log cannot tell, and takes the batch.
A drawn id is repeated for seconds, a derived id perhaps for weeks. So the two kinds have a limit each: ordinary
producers, however many come and go, never make a log forget a derived one. Of a derived producer that 10,000 others
have outlived, the table still has the last batch, in few bytes: enough to tell what is stored. It forgets one that
100,000 others have outlived, and counts that (`forgotten`); decision 13 says why it does not refuse all new ones then.
A table that has forgotten a drawn id is marked `incomplete`. It does not say that an unknown drawn id has stored
nothing (`next_sequence`).

A log that continues other logs begins with their tables (`inherited`). Offsets of another log mean nothing here, so a
retry of a batch that stands there is recognised and answered without offsets. A producer that numbered its batches in
several of those logs has no single number to go on from: its last era is closed. What belongs to that era cannot be
judged any more and is out of sequence, earlier eras are stored, and a later one may begin. Two logs may also have
inherited one producer from the same log, as when the halves of a split are merged. A drawn id belongs to one log, so
its batches are the same in both tables, and count once.

Only a client that has missed a change of the layout, and cannot reach the log itself, asks for a drawn id whose log has
ended. So an ended log hands on few of them, those that wrote last (`handed_on`), and the tables that begin with them
are incomplete. A topic that is split into a thousand segments would otherwise keep each id a thousand times.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import islice, zip_longest
from typing import Final, NamedTuple, TypeAlias

from braid.model.batch.header import BatchHeader
from braid.model.batch.identity import (
    CANNOT_TELL,
    DERIVED,
    ERA_BITS,
    ERA_RECORDS,
    NOT_KNOWN,
    begins_era,
    era_of,
    is_derived,
    leaves_era,
)
from braid.model.errors import ChunkCorrupt, OutOfSequence
from braid.model.ids import Offset, ProducerId, Sequence

MAX_PRODUCERS: Final = 10_000
"""Of drawn ids, and as many again of derived ones, with their latest batches."""
MAX_DERIVED: Final = 100_000
"""Of derived ids in all. Those that wrote longest ago are there with their last batch only: 140 bytes of memory each,
and 32 in each footer."""
REMEMBERED_BATCHES: Final = 8
MAX_HANDED_ON: Final = 256
"""So many drawn ids, those that wrote last, are handed on to the logs that continue a log."""
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


_LAST: Final = struct.Struct("<QQI")
"""The last batch of a producer: first sequence, base offset, number of records. As bytes it takes half the memory."""

_Stored: TypeAlias = tuple[Sequence, Offset, int]
"""First sequence, base offset and number of records of a batch. A plain tuple: two are made for each batch."""
_Known: TypeAlias = list[_Stored] | tuple[_Stored]
"""The batches of a producer, oldest first. A tuple is of another log: many tables may have it."""
_INCOMPLETE: Final = _ROW.pack(0, 0, ELSEWHERE, 0)
"""The row of no producer marks a table that has forgotten drawn ids."""


class Duplicate(NamedTuple):
    """Where a retried batch already stands. `base_offset` is None when that is no longer remembered; the batch then
    lies somewhere below `next_offset`, or in another log if that is 0."""

    base_offset: Offset | None
    next_offset: Offset


class ProducerTable:
    """Owned by the log whose batches it describes."""

    def __init__(self) -> None:
        # In order of their latest batch, so that the first one is the one to forget.
        self._drawn: dict[ProducerId, _Known] = {}
        self._derived: dict[ProducerId, _Known] = {}
        self._outlived: dict[ProducerId, bytes] = {}
        """The last batch of derived producers that MAX_PRODUCERS others have outlived (`_LAST`), in the same order."""
        self.forgotten = 0
        """How many derived producers this table has forgotten since it was made."""
        self.incomplete = False
        """Whether a drawn id was forgotten, or not handed on."""

    def __iter__(self) -> Iterator[ProducerId]:
        yield from self._drawn
        yield from self._outlived
        yield from self._derived

    def __len__(self) -> int:
        return len(self._drawn) + len(self._outlived) + len(self._derived)

    @property
    def is_full(self) -> bool:
        """Tell whether the table may lack what it was told."""
        return max(len(self._drawn), len(self._derived)) >= MAX_PRODUCERS

    def _find(self, producer: int) -> _Known | None:
        if producer < DERIVED:
            return self._drawn.get(ProducerId(producer))
        known = self._derived.get(ProducerId(producer))
        if known is None and (last := self._outlived.get(ProducerId(producer))) is not None:
            known = (_unpacked(last),)
        return known

    def check(self, header: BatchHeader) -> Duplicate | None:
        """Return where the batch is stored, if it is a retry. `OutOfSequence` if it neither continues nor repeats."""
        producer, first = header.producer_id, header.first_sequence
        if producer == 0:
            return None
        derived = producer >= DERIVED  # Each publish comes here: so calls are written out for drawn ids.
        if derived and leaves_era(producer, first, header.count):
            raise OutOfSequence(
                f"producer {producer:#x} sent {header.count} records of which some do not fit era {era_of(first)}; "
                f"a batch lies in one era"
            )
        known = self._find(producer) if derived else self._drawn.get(producer)
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
        """Return the sequence with which the producer would go on; `NOT_KNOWN` or `CANNOT_TELL` if there is none."""
        known = self._find(producer)
        if known is None:
            return CANNOT_TELL if self.incomplete and not is_derived(producer) else NOT_KNOWN
        first_sequence, _, records = known[-1]
        return first_sequence + records if known[-1] != _closed_era(first_sequence) else CANNOT_TELL

    def last_era(self, producer: int) -> int:
        """Return the era of the last batch of a derived producer, here or in a log that this log continues."""
        known = self._find(producer)
        return era_of(known[-1][0]) if known is not None else NOT_KNOWN

    def has_later_era(self, header: BatchHeader) -> bool:
        """Tell whether the producer, a derived one, has come to a later era than this batch belongs to."""
        known = self._find(header.producer_id)
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
        kind = self._derived if producer >= DERIVED else self._drawn
        known = kind.pop(producer, None)
        if known is None:
            if kind is self._derived and (last := self._outlived.pop(producer, None)) is not None:
                known = (_unpacked(last),)
            if len(kind) >= MAX_PRODUCERS:
                self._outlive(kind)
        if known is None:
            known = [batch]
        else:
            last_sequence, _, last_records = known[-1]
            if batch[0] >= last_sequence + last_records:
                if isinstance(known, tuple):
                    known = list(known)
                known.append(batch)
                if len(known) > REMEMBERED_BATCHES:
                    del known[0]
        kind[producer] = known

    def _outlive(self, kind: dict[ProducerId, _Known]) -> None:
        """Make room for another producer of this kind. `kind` is full."""
        oldest = next(iter(kind))
        known = kind.pop(oldest)
        if kind is self._drawn:
            self.incomplete = True
            return
        self._outlived[oldest] = _LAST.pack(*known[-1])
        if len(self._outlived) > MAX_DERIVED - MAX_PRODUCERS:
            del self._outlived[next(iter(self._outlived))]
            self.forgotten += 1

    def _last_batches(self) -> dict[ProducerId, _Known]:
        """Return the last batch of every derived producer, the longest idle producer first."""
        last: dict[ProducerId, _Known] = {producer: (_unpacked(data),) for producer, data in self._outlived.items()}
        last.update((producer, (known[-1],)) for producer, known in self._derived.items())
        return last

    def rows(self) -> Iterator[bytes]:
        if self.incomplete:
            yield _INCOMPLETE
        for producer, known in self._drawn.items():
            for batch in known:
                yield _ROW.pack(producer, *batch)
        for producer, last in self._outlived.items():
            yield _ROW.pack(producer, *_unpacked(last))
        for producer, known in self._derived.items():
            for batch in known:
                yield _ROW.pack(producer, *batch)

    @classmethod
    def from_rows(cls, data: bytes | memoryview) -> ProducerTable:
        if len(data) % ROW_BYTES:
            raise ChunkCorrupt(f"a producer table of {len(data)} bytes is no whole number of {ROW_BYTES}-byte rows")
        table = cls()
        for producer, first_sequence, base_offset, count in _ROW.iter_unpack(data):
            if producer:
                table._remember(producer, (first_sequence, base_offset, count))
            else:
                table.incomplete = True
        if len(table._drawn) >= MAX_PRODUCERS:
            table.incomplete = True  # Earlier builds forgot without a mark.
        return table

    def extended(self, later: ProducerTable) -> ProducerTable:
        """Return this table with what a later one of the same log adds; batches in both count once."""
        table = self.copy()
        table.incomplete = self.incomplete or later.incomplete
        for producer, last in later._outlived.items():
            table._remember(producer, _unpacked(last))
        for kind in (later._drawn, later._derived):
            for producer, known in kind.items():
                for batch in known:
                    table._remember(producer, batch)
        return table

    def copy(self) -> ProducerTable:
        twin = ProducerTable()
        twin._drawn, twin._derived = _copied(self._drawn), _copied(self._derived)
        twin._outlived = self._outlived.copy()
        twin.incomplete = self.incomplete
        return twin

    def _take_last(self, batches: dict[ProducerId, _Known]) -> None:
        """Begin with the last batches of these derived producers, the longest idle producer first."""
        for producer in [*islice(batches, max(0, len(batches) - MAX_PRODUCERS))]:
            self._outlived[producer] = _LAST.pack(*batches.pop(producer)[-1])
        self._derived = batches

    def handed_on(self) -> ProducerTable:
        """Return what logs that continue this one need: the last batch of each derived producer, and of the drawn ones
        that wrote last."""
        table = ProducerTable()
        left_out = max(0, len(self._drawn) - MAX_HANDED_ON)
        table._drawn = {producer: (known[-1],) for producer, known in islice(self._drawn.items(), left_out, None)}
        table._take_last(self._last_batches())
        table.incomplete = self.incomplete or left_out > 0
        return table


def inherited(tables: Iterable[ProducerTable]) -> ProducerTable:
    """Return the table with which a log begins that continues the logs of these tables.

    Of too many producers, those are kept that wrote last; each of the logs counts the same."""
    handed_on = [each.handed_on() for each in tables]
    table = ProducerTable()
    drawn, derived = [each._drawn for each in handed_on], [each._last_batches() for each in handed_on]
    table._drawn = _joined(drawn, MAX_HANDED_ON)
    table._take_last(_joined(derived, MAX_DERIVED))
    table.forgotten = len(set().union(*derived)) - len(table._derived) - len(table._outlived)
    left_out = len(table._drawn) < len(set().union(*drawn))
    table.incomplete = left_out or any(each.incomplete for each in handed_on)
    return table


def _unpacked(last: bytes) -> _Stored:
    first_sequence, base_offset, records = _LAST.unpack(last)
    return first_sequence, base_offset, records


def _copied(kind: Mapping[ProducerId, _Known]) -> dict[ProducerId, _Known]:
    return {producer: known if isinstance(known, tuple) else known.copy() for producer, known in kind.items()}


def _joined(logs: Collection[dict[ProducerId, _Known]], most: int) -> dict[ProducerId, _Known]:
    """Return the last batch of each producer of one kind, as it counts in a log that continues all these logs."""
    by_rank = zip_longest(*(reversed(log) for log in logs))
    newest_first = dict.fromkeys(producer for rank in by_rank for producer in rank if producer is not None)
    joined: dict[ProducerId, _Known] = {}
    for producer in reversed(list(islice(newest_first, most))):
        found = [log[producer][-1] for log in logs if producer in log]
        first, _, records = found[0]
        if len(found) == 1 or _one_origin(producer, found):
            joined[producer] = ((first, ELSEWHERE, records),)
        else:
            joined[producer] = (_closed_era(max(first for first, _, _ in found)),)
    return joined


def _one_origin(producer: ProducerId, found: Collection[_Stored]) -> bool:
    """Tell whether these last batches of one producer, from several tables, are one batch of one log."""
    return not is_derived(producer) and len(set(found)) == 1 and next(iter(found))[1] == ELSEWHERE


def _closed_era(sequence: Sequence) -> _Stored:
    """Return a batch that takes every number of the era of `sequence`: nothing repeats it and nothing continues it."""
    return Sequence(era_of(sequence) << ERA_BITS), ELSEWHERE, ERA_RECORDS - 1
