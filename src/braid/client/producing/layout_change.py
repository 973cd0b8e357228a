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

**Cut.** What is certainly not stored, and what was never sent, is cut by the ranges of the heirs (cut_batch.py), in
order. The heirs number it anew, each under its own producer id.

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
from typing import TYPE_CHECKING

from braid.client.producing.cut_batch import cut_batch
from braid.client.producing.open_batch import ProducerBatch
from braid.client.routing import LOOKUP_TIMEOUT_S
from braid.model.batch.identity import CANNOT_TELL, NOT_KNOWN
from braid.model.errors import BraidError, InvalidArgument
from braid.wire.operations import Kind, Stored, StoredRequest, encode

if TYPE_CHECKING:
    from braid.client.producing.producer import Producer
    from braid.client.producing.segment_writer import SegmentWriter


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
