"""How a producer follows a change of its topic's layout: settle, cut, and a barrier (I1, I4, I10).

A split, a merge or a repartition ends segments, and new segments take their ranges. A producer learns of it when an
ended segment refuses a batch (`SegmentSealed`), or when a writer that looks for its owner sees a later map. It then
goes on with one writer for each active segment of the newest map, however many layouts lie between. Writers whose
segments are still active stay as they are. A writer whose segment has ended *retires*; the new writers whose ranges
touch its range are its *heirs*.

    writer of an ended segment ── settle ──► cut ──┬──► the front of the queue of one heir
                                                   └──► the front of the queue of another

**Settle.** A retired writer sends no new batch. It sends those again that have no certain answer: the ended log answers
a batch that it has with its offsets, and refuses any other for good. If the segment's owner cannot be reached or does
not serve the segment, an heir's owner is asked (STORED): its log has inherited what the ended log knew of producers.
It knows no offsets, so it is asked only after one try at the segment itself. A batch that stays in doubt, because the
logs have forgotten the producer, fails with `TimedOut`, as in a round (segment_writer.py).

**Cut.** What is certainly not stored, and what was never sent, is cut by the ranges of the heirs, in order. The heirs
number it anew, each under its own producer id. Each piece of a batch has the records of one range, in their order.
Records without a key may go anywhere; all of them go to the first range, so they keep their order, too. The program
holds receipts of the whole batch, and waits for it: the whole is settled when its pieces are, and says in which piece
each record is (`Pieces`).

**Barrier.** An heir sends nothing until every retired writer whose range touches its own has handed over. Handed over
batches go to the front of its queue; what the program gave the heir meanwhile waits after them. Two parents of a merge
have no key in common, so their order among each other does not matter. So the records of a key reach the logs in the
order in which the program gave them: first those of the ended segment, then those of its heirs.

An heir may retire itself before its parents have handed over. Then it hands over after them: writers form the same
graph as their segments. After the hand-over, a retired writer passes on what it is still given: a `send_many` that
began before the change may have the rest of a slice for it.

Deadlines, the limit of unconfirmed bytes and `flush` do not notice any of this: they count batches, and these stay
those that the program gave, or are pieces of them.

A producer with a fixed identity follows in another way: another process must be able to reproduce its batches
(repeatable_producer.py).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from braid.client.producing.open_batch import Pieces, ProducerBatch
from braid.client.routing import LOOKUP_TIMEOUT_S
from braid.model.batch.identity import CANNOT_TELL, NOT_KNOWN
from braid.model.errors import BraidError, InvalidArgument
from braid.model.hashing import key_hashes
from braid.wire.operations import Kind, Stored, StoredRequest, encode

if TYPE_CHECKING:
    from braid.client.producing.producer import Producer
    from braid.client.producing.segment_writer import SegmentWriter

T = TypeVar("T")


def retire(writers: Collection[SegmentWriter], successors: Sequence[SegmentWriter]) -> None:
    """Let writers hand over to those of the successors, given in order of their ranges, that touch their ranges."""
    retirements = [
        (writer, [each for each in successors if each.hashes.overlap(writer.hashes) is not None]) for writer in writers
    ]
    for writer, heirs in retirements:  # An heir knows all its parents before the first of them hands over.
        for heir in heirs:
            heir.parents.add(writer)
    for writer, heirs in retirements:
        writer.retire(Retirement(writer, heirs))


class Retirement:
    """The end of one writer."""

    def __init__(self, writer: SegmentWriter, heirs: Sequence[SegmentWriter]) -> None:
        self.over = False
        """Whether the writer has handed over."""
        self._writer = writer
        self._heirs = heirs
        self._starts = [heir.hashes.start for heir in heirs]

    def hand_over(self, batches: Sequence[ProducerBatch]) -> None:
        """Give batches that are certainly not stored to the heirs; later ones follow them."""
        queues = self._cut(batches)
        for heir, queue in zip(self._heirs, queues):
            if self.over:
                heir.add_batches(queue)
            else:
                heir.inherit(self._writer, queue)
        self.over = True

    def _cut(self, batches: Sequence[ProducerBatch]) -> list[list[ProducerBatch]]:
        queues: list[list[ProducerBatch]] = [[] for _ in self._heirs]
        for batch in batches:
            try:
                pieces = cut_batch(batch, self._starts)
            except Exception as error:  # numpy or Arrow refuse a strange table; the other batches must go on
                refusal = InvalidArgument(f"the records cannot be routed by their keys: {error}")
                refusal.__cause__ = error
                self._writer.refuse(batch, refusal)
                continue
            for number, piece in pieces:
                piece.renew(self._heirs[number].segment)
                queues[number].append(piece)
        return queues

    async def ask(self, producer: Producer, producer_id: int) -> int | None:
        """Ask the heirs how far the ended log has this id (model/batch/identity.py). None if no heir can tell: a log
        hands on only some of the producers that it has inherited, so only a child knows what its parent never had."""
        path = producer.topic.path
        segments = (await producer.client.routing.topic(path)).by_id
        for heir in self._heirs:
            request = encode(StoredRequest(path, producer.topic_id, heir.segment, (producer_id,)))
            try:
                link = await producer.client.routing.owner_link(path, heir.segment)
                stored = await link.ask(Kind.STORED, request, Stored, LOOKUP_TIMEOUT_S)
            except BraidError:
                continue
            (next_sequence,) = stored.next_sequences
            is_child = heir.segment in segments and self._writer.segment in segments[heir.segment].parents
            if next_sequence != CANNOT_TELL and (next_sequence != NOT_KNOWN or is_child):
                return next_sequence
        return None


# Cutting.


class Piece(NamedTuple):
    range: int
    """The number of its range among those by which the batch was cut."""
    batch: ProducerBatch


def range_numbers(keys: Sequence[bytes | None], starts: Sequence[int], keyless: int) -> npt.NDArray[np.int64]:
    """Return which range takes each key, by the ranges' starts, in order; `keyless` takes the records without one."""
    null = np.fromiter([key is None for key in keys], np.bool_, len(keys))
    hashes = key_hashes([b"" if key is None else key for key in keys] if null.any() else keys)  # type: ignore[arg-type]
    numbers = np.searchsorted(np.array(starts), hashes, "right") - 1
    numbers[null] = keyless
    return numbers


def table_keys(table: Any) -> list[bytes | None] | None:
    if "key" not in table.column_names:
        return None
    return [key.encode() if isinstance(key, str) else key for key in table.column("key").to_pylist()]


def cut_batch(batch: ProducerBatch, starts: Sequence[int]) -> list[Piece]:
    """Return the batches that have the records from now on. If one range takes all records, it gets the batch itself.

    The batch takes no more records and is not settled. No piece has a segment yet.
    """
    keys = _keys(batch)
    ranges = np.zeros(batch.count, np.int64) if keys is None else range_numbers(keys, starts, keyless=0)
    found, places = np.unique(ranges, return_inverse=True)
    if len(found) == 1:
        return [Piece(int(found[0]), batch)]
    rows_of = [np.flatnonzero(places == place) for place in range(len(found))]
    numbers = np.empty(batch.count, np.int64)
    for rows in rows_of:
        numbers[rows] = np.arange(len(rows))
    pieces = [_piece(batch, keys, rows) for rows in rows_of]
    pieces[-1].size += batch.size - sum(piece.size for piece in pieces)
    batch.cut(Pieces(pieces, places, numbers))
    return [Piece(int(number), piece) for number, piece in zip(found, pieces)]


def _keys(batch: ProducerBatch) -> list[bytes | None] | None:
    if batch.table is not None:
        return table_keys(batch.table)
    return None if batch.keys is None else batch.pad_keys()


def _piece(batch: ProducerBatch, keys: list[bytes | None] | None, rows: npt.NDArray[np.intp]) -> ProducerBatch:
    piece = ProducerBatch(batch.segment, batch.opened_at, batch.deadline, batch.now_us)
    piece.whole = batch
    piece.count = len(rows)
    piece.size = batch.size * len(rows) // batch.count
    if batch.table is not None:
        piece.table = batch.table.take(pa.array(rows))
        return piece
    numbers: list[int] = rows.tolist()
    piece.values = [batch.values[number] for number in numbers]
    piece.keys = None if keys is None else [keys[number] for number in numbers]
    piece.headers = _chosen(batch.headers, numbers)
    piece.timestamps = _chosen(batch.timestamps, numbers)
    return piece


def _chosen(by_number: dict[int, T] | None, numbers: list[int]) -> dict[int, T] | None:
    if by_number is None:
        return None
    return {new: by_number[old] for new, old in enumerate(numbers) if old in by_number} or None
