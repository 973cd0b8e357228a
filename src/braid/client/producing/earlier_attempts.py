"""What earlier attempts at the same rows have stored in segments that have ended since (decision 40).

A row belongs to the line of its hash: the segments that ever had this hash, each of which ended before the next began.
An ended log has a final number of rows of an era. An attempt that knows these numbers finds the segment of each row,
whatever the layout was when other attempts stored it.

The active segments tell in which era each of their ancestors has the writer: a child inherits its parents' tables, and
keeps them when the layout drops the parents. An ancestor that has rows of this era is then asked how many it has. One
that has left the layout cannot be asked, and the repeat is refused (`RepeatTooLate`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

import msgspec

from braid.client.retry import retrying
from braid.client.routing import LOOKUP_TIMEOUT_S, TopicMap
from braid.model.batch.identity import ERA_RECORDS, derived_id
from braid.model.errors import ConnectionLost, NotAvailable, NotServing, RepeatTooLate, TimedOut
from braid.model.layout import LAST_HASH, HashRange
from braid.ports.tasks import all_of
from braid.wire.operations import Kind, SegmentRoute, Stored, StoredRequest, encode

if TYPE_CHECKING:
    from braid.client.producing.producer import Producer

MAX_ASKED: Final = 1_000
"""Producers in one STORED (broker/connections/questions.py)."""
RING: Final = LAST_HASH + 1
FIRST: Final = -1
"""Stands for the segments of the topic's first layout, in which a writer has one id."""


class Writer(msgspec.Struct, frozen=True, dict=True):
    """A repeatable producer's identity in the segments of one topic."""

    app: str
    topic_id: int
    part: int
    era: int
    first_segments: int

    @cached_property
    def first_id(self) -> int:
        """The id in all segments of the topic's first layout."""
        return derived_id(self.app, self.topic_id, self.part)

    def id_in(self, segment: int) -> int:
        if segment < self.first_segments:
            return self.first_id
        return derived_id(self.app, self.topic_id, self.part, segment)

    def keyless_hash(self, block: int) -> int:
        """Return the hash that the rows without a key in this block count as.

        Blocks go round the ranges of the first layout, and evenly to all places of each range."""
        round_, turn = divmod(self.first_id + block, self.first_segments)
        start, end = (place * RING // self.first_segments for place in (turn, turn + 1))  # As in `equal_ranges`.
        return start + _reversed_bits(round_) * (end - start) // RING


def _reversed_bits(number: int) -> int:
    """Return the last 16 bits of a number in reverse order: numbers that follow each other are far apart."""
    return int(f"{number & LAST_HASH:016b}"[::-1], 2)


class EarlierAttempts(msgspec.Struct, frozen=True):
    rows: Mapping[int, int]
    """How many rows of this era the ended segments have that have any; in order of their ids."""
    complete: bool
    """Whether a later era has begun."""


class Lineage:
    """The ancestors of a segment, as far as the map of the topic has them."""

    def __init__(self, topic: TopicMap, segment: int, first_segments: int) -> None:
        self.ancestors: Final = sorted(topic.ancestors(segment))
        line = (*self.ancestors, segment)
        self.is_whole: Final = all(each < first_segments or _has_all_parents(topic, each) for each in line)
        """Whether the layout has dropped no ancestor."""
        dropped = (each for each in range(first_segments, segment) if each not in topic.by_id)
        later = (each for each in self.ancestors if each >= first_segments)
        self.may_have_rows: Final = [FIRST, *later, *(() if self.is_whole else dropped)]
        """Whose ids to ask for: the ancestors, and all that may have been. No segment id is used twice."""


def _has_all_parents(topic: TopicMap, segment: int) -> bool:
    own = _hashes(topic.by_id[segment])
    shared = (own.overlap(_hashes(topic.by_id[parent])) for parent in topic.by_id[segment].parents)
    return len(own) == sum(len(each) for each in shared if each is not None)


def _hashes(route: SegmentRoute) -> HashRange:
    return HashRange(route.first_hash, route.last_hash)


def begun_in(topic: TopicMap, lineage: Lineage, eras: Mapping[int, int], writer: Writer) -> set[int]:
    """Return the ended segments that may have rows of the writer's era. `eras` are the answers to `may_have_rows`."""
    begun: set[int] = set()
    for segment in (segment for segment, era in eras.items() if era == writer.era):
        if segment == FIRST and lineage.is_whole:
            begun.update(each for each in lineage.ancestors if each < writer.first_segments)
        elif segment in topic.by_id:
            begun.add(segment)
        else:
            raise RepeatTooLate(
                f"rows of era {writer.era} were written to a segment of {topic.topic} that has left the layout since, "
                f"with its records: whether these rows are among them cannot be known any more"
            )
    return begun


async def earlier_attempts(producer: Producer, topic: TopicMap, writer: Writer) -> EarlierAttempts:
    """Ask the brokers. Retries until the producer's timeout."""
    if not topic.route.layout_epoch:
        return EarlierAttempts({}, complete=False)
    questions = _Questions(producer, topic, writer)
    lineages = {
        route.id: Lineage(topic, route.id, writer.first_segments)
        for route in topic.active
        if route.id >= writer.first_segments
    }
    answers = await all_of(questions.eras(segment, each.may_have_rows) for segment, each in lineages.items())
    if any(era > writer.era for eras in answers for era in eras.values()):
        return EarlierAttempts({}, complete=True)
    begun = sorted(set().union(*(begun_in(topic, *each, writer) for each in zip(lineages.values(), answers))))
    counts = dict(zip(begun, await all_of(map(questions.rows, begun))))
    return EarlierAttempts({segment: count for segment, count in counts.items() if count}, complete=False)


class _Questions:
    """What an attempt asks brokers about its writer."""

    def __init__(self, producer: Producer, topic: TopicMap, writer: Writer) -> None:
        self._client = producer.client
        self._topic = topic
        self._writer = writer
        self._deadline = asyncio.get_running_loop().time() + producer.options.timeout_s

    async def eras(self, active: int, ancestors: Sequence[int]) -> dict[int, int]:
        """Ask an active segment for the last era of the writer in each of these ancestors, and in itself."""
        asked = [*ancestors, active]
        eras: dict[int, int] = {}
        for first in range(0, len(asked), MAX_ASKED):
            segments = asked[first : first + MAX_ASKED]
            eras |= zip(segments, (await self._ask(active, segments)).eras)
        if eras[active] <= self._writer.era:
            del eras[active]  # Its log recognises what it has.
        return eras

    async def rows(self, ended: int) -> int:
        """Ask an ended segment for the number of rows that it has of the writer's era."""
        stored = await self._ask(ended, [ended], ended=True)
        if stored.eras != (self._writer.era,):
            return 0
        return stored.next_sequences[0] - self._writer.era * ERA_RECORDS

    async def _ask(self, segment: int, about: Sequence[int], *, ended: bool = False) -> Stored:
        path, writer = self._topic.topic, self._writer
        ids = tuple(writer.first_id if each == FIRST else writer.id_in(each) for each in about)
        request = encode(StoredRequest(path, self._topic.topic_id, segment, ids))

        async def once() -> Stored:
            link = await self._client.routing.owner_link(path, segment)
            try:
                stored = await link.ask(Kind.STORED, request, Stored, LOOKUP_TIMEOUT_S)
            except TimedOut as error:  # The question changes nothing, so it may be repeated.
                raise ConnectionLost(
                    f"broker {link.broker_id} was asked about segment {segment} of {path}: {error}"
                ) from error
            if len(stored.eras) != len(ids):
                raise NotAvailable(
                    f"the layout of {path} has changed, and broker {link.broker_id} runs a version that does not say "
                    f"what earlier attempts have stored: upgrade it"
                )
            if ended and not stored.ended:
                raise NotServing(f"segment {segment} of {path} has ended, and its owner does not know it yet")
            return stored

        return await retrying(once, self._deadline, self._client.backoff())
