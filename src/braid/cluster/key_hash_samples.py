"""How the records of a segment spread over its key hashes, as its owner sees them arrive: where half of the load is,
and whether a few hashes have most of it. Auto-scaling splits there (scaling/auto_scale.py).

A broker moves batches without opening them, and mostly the header is enough: where its lowest and highest key hash are
the same, all records of the batch have that hash. Of the other batches, one a second is opened. It stands for all
records since the last one that was opened.

    header: one hash        counted, exactly
    header: no keys         counted as records without a key
    header: several hashes  waits; the next batch that is opened says how these spread

Nothing is counted unless somebody has asked within the last `WANTED_S`. Counts lose half of their weight every
`HALF_LIFE_S`, so that they show the load of the last minutes. The cost is bounded (I12): `CELLS` numbers, and one look
a second at `ROWS` hashes. A compressed batch is unpacked in a thread, unless it is large: then it is left out.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Final

from braid.model.batch.header import BatchHeader
from braid.model.batch.key_hashes import is_plain, sampled_key_hashes
from braid.model.errors import BatchError
from braid.model.layout import HashRange
from braid.model.load import KeyHashLoad, halving_cell
from braid.ports.threads import Threads

WANTED_S: Final = 120.0
"""Auto-scaling asks every few seconds; a leader that has just been elected soon does."""
HALF_LIFE_S: Final = 60.0
SAMPLE_S: Final = 1.0
CELLS: Final = 1_024
"""Of 64 hashes each, if the segment has the whole ring; a narrower segment has finer ones."""
ROWS: Final = 256
MAX_UNPACKED_BYTES: Final = 8 << 20
MAX_HALF_LIVES: Final = 500
"""Then all counts are written with smaller numbers."""


class KeyHashSamples:
    """Belongs to the loop of the segment's owner."""

    def __init__(self, hashes: HashRange, time: Callable[[], float], threads: Threads | None = None) -> None:
        """Without threads (in a simulation), compressed batches are unpacked where they are taken."""
        self._hashes = hashes
        self._time = time
        self._threads = threads
        self._loads = array("d", bytes(8 * min(CELLS, len(hashes))))
        self._unkeyed = 0.0
        self._waiting = 0.0
        """Records of batches with several hashes, since the last one that was opened."""
        self._wanted_until = time()
        self._next_sample = time()
        self._counted_from = time()
        """When a record had the weight 1. Instead of all counts losing weight, new ones get more."""

    def want(self) -> None:
        """Count from now on, until nobody has asked for a while."""
        self._wanted_until = self._time() + WANTED_S

    def take(self, header: BatchHeader, batch: memoryview) -> None:
        now = self._time()
        if now >= self._wanted_until:
            return
        weight = self._weight(now)
        if header.min_key_hash > header.max_key_hash:
            self._unkeyed += weight * header.count
        elif header.min_key_hash == header.max_key_hash:
            self._add(header.min_key_hash, weight * header.count)
        else:
            self._waiting += weight * header.count
            plain = is_plain(header)
            if now >= self._next_sample and (plain or header.raw_length <= MAX_UNPACKED_BYTES):
                self._next_sample = now + SAMPLE_S
                stands_for, self._waiting = self._waiting, 0.0
                if plain or self._threads is None:
                    self._count(stands_for, _look(batch, header), None)
                else:
                    self._threads.start(partial(self._count, stands_for), _look, bytes(batch), header)

    def _count(self, stands_for: float, found: Sequence[int | None], error: BaseException | None) -> None:
        if error is not None:
            raise error
        each = stands_for / max(len(found), 1)
        first, last, hashes = self._hashes.start, self._hashes.end, len(self._hashes)
        loads, cells = self._loads, self.cells  # Locals: this runs on the loop, for hundreds of rows.
        for key_hash in found:
            if key_hash is None:
                self._unkeyed += each
            elif first <= key_hash <= last:  # The header was checked; what the column says was not.
                loads[(key_hash - first) * cells // hashes] += each

    def _add(self, key_hash: int, weight: float) -> None:
        self._loads[(key_hash - self._hashes.start) * len(self._loads) // len(self._hashes)] += weight

    def _weight(self, now: float) -> float:
        """Return how much a record counts that arrives now."""
        half_lives = (now - self._counted_from) / HALF_LIFE_S
        if half_lives > MAX_HALF_LIVES:
            left = 0.5**half_lives
            self._loads = array("d", [load * left for load in self._loads])
            self._unkeyed, self._waiting = self._unkeyed * left, self._waiting * left
            self._counted_from, half_lives = now, 0.0
        weight: float = 2.0**half_lives
        return weight

    @property
    def cells(self) -> int:
        return len(self._loads)

    def cell(self, number: int) -> HashRange:
        """Return the hashes that are counted together."""
        first, end = (self._hashes.start - (-edge * len(self._hashes) // self.cells) for edge in (number, number + 1))
        return HashRange(first, end - 1)

    def summary(self, parts: int = 0) -> KeyHashLoad:
        """Return where the load is, with a histogram of so many parts, or fewer if there are fewer hashes."""
        weight = self._weight(self._time())
        loads, keyed = self._loads, sum(self._loads)
        records = keyed + self._unkeyed
        shares = self._shares(min(parts, self.cells), records)
        if not keyed:
            return KeyHashLoad(records=records / weight, shares=shares)
        hottest = max(range(self.cells), key=loads.__getitem__)
        at = halving_cell(loads) if self.cells > 1 else None
        lower = sum(loads[:at])
        return KeyHashLoad(
            records=records / weight,
            split_at=self.cell(at).start if at is not None else None,
            lower_share=lower / records,
            upper_share=(keyed - lower) / records,
            hottest=self.cell(hottest),
            hottest_share=loads[hottest] / records,
            shares=shares,
        )

    def _shares(self, parts: int, records: float) -> tuple[float, ...]:
        edges = [-(-number * self.cells // max(parts, 1)) for number in range(parts + 1)]
        return tuple(round(sum(self._loads[first:end]) / (records or 1), 5) for first, end in pairwise(edges))


def _look(batch: bytes | memoryview, header: BatchHeader) -> Sequence[int | None]:
    try:
        return sampled_key_hashes(batch, header, ROWS)
    except BatchError:
        return ()  # The producer's mistake. It is stored like any other batch, and its readers will meet it.
