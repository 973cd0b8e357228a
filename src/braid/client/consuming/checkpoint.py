"""The checkpoint consumer: reads a topic in order from positions that the caller keeps.

It belongs to no subscription and leaves nothing on the brokers. Several of them can share a topic as a group
(checkpoint_group.py). `checkpoint()` returns the positions of the application as bytes, to be stored beside its
results. A consumer that begins at those bytes continues exactly there. In them,

    {"version": 1, "topic": "public/default/orders", "topicId": 7, "positions": {"0": "END", "1": 17, "2": 0},
     "epochs": {"1": 3}}

a number is the next offset of a segment, and END says that the segment is sealed and was read to its end. END is kept
as long as the layout has the segment: without it, a restored consumer would read the segment again. `epochs` has the
epoch of the record before each offset, as far as it is known. By these, the owner of a segment notices a consumer that
has read records which are lost (model/log/epochs.py).

A consumer that was given offsets of some segments reads these, and follows them when they are split and merged: it
reads each later segment that holds hashes of theirs. The checkpoint then has these ranges as `hashes`. The segments
that are left out have the position END.

Order across layouts: a segment is read only when each of its ancestors was read to its end (I4). A pure function of
segments and positions, `readable_segments`, says which segments may be read.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from braid.client.consuming.channel import ClientChannel, SegmentGrant, checked_window
from braid.client.consuming.consumer import Consumer, Fetched, SegmentReader, closed_error, may_pass
from braid.client.retry import retrying
from braid.client.routing import OwnerSearch, TopicMap
from braid.model.errors import (
    BatchUnreadable,
    BraidError,
    ClientClosed,
    InvalidArgument,
    NotServing,
    OffsetOutOfRange,
    PositionDiverged,
    SegmentNotFound,
    TopicNotFound,
)
from braid.model.ids import Epoch
from braid.model.layout import reachable
from braid.model.log.epochs import UNKNOWN_EPOCH, epoch_before
from braid.model.names import TopicName
from braid.ports.tasks import cancel
from braid.wire.operations import Kind, Positions, PositionsRequest, SegmentPositions, encode

if TYPE_CHECKING:
    from braid.client.client import Client

CHECKPOINT_VERSION: Final = 1
END: Final = "END"
Position = int | Literal["END"]
Start = str | bytes | Sequence[bytes] | datetime.datetime | Mapping[int, int]
"""Where a consumer begins: `earliest`, `latest`, a checkpoint, those of a group, a time, or offsets by segment."""

_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class ConsumerCheckpoint(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    version: int = CHECKPOINT_VERSION
    topic: str
    topic_id: int
    positions: dict[int, Position]
    epochs: dict[int, Epoch] = {}
    """Of the records before the positions; a position without an epoch is not checked."""
    hashes: tuple[tuple[int, int], ...] = ()
    """The first and last hashes of the ranges that are read; empty: all."""

    def to_bytes(self) -> bytes:
        fields = msgspec.to_builtins(self)
        for optional in ("epochs", "hashes"):
            if not fields[optional]:
                del fields[optional]
        return msgspec.json.encode(fields)

    @classmethod
    def from_bytes(cls, data: bytes) -> ConsumerCheckpoint:
        try:
            version = msgspec.json.decode(data, type=_Version).version
            if version != CHECKPOINT_VERSION:
                raise InvalidArgument(f"the checkpoint has version {version}; this build reads {CHECKPOINT_VERSION}")
            checkpoint = msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"these bytes are no checkpoint: {error}") from error
        if any(position != END and position < 0 for position in checkpoint.positions.values()):
            raise InvalidArgument("these bytes are no checkpoint: it has a negative offset")
        if any(epoch < 0 for epoch in checkpoint.epochs.values()):
            raise InvalidArgument("these bytes are no checkpoint: it has a negative epoch")
        return checkpoint


class _Version(msgspec.Struct):
    version: int


def readable_segments(parents: Mapping[int, Iterable[int]], positions: Mapping[int, Position]) -> tuple[int, ...]:
    """Return the segments that may be read now: they have records left, and their ancestors in the layout have none."""

    def ancestors_read(segment: int) -> bool:
        seen: set[int] = set()
        to_visit = [parent for parent in parents[segment] if parent in parents]
        while to_visit:
            parent = to_visit.pop()
            if positions.get(parent) != END:
                return False
            if parent not in seen:
                seen.add(parent)
                to_visit += (each for each in parents[parent] if each in parents)
        return True

    unread = (segment for segment in sorted(parents) if positions.get(segment) != END)
    return tuple(segment for segment in unread if ancestors_read(segment))


def kept_positions(
    segments: Iterable[int], positions: Mapping[int, Position], left_out: Collection[int] = ()
) -> dict[int, Position]:
    """Return positions for exactly the segments of a layout. A new segment begins at its first record, because its
    parents are read before it; if it is one of `left_out`, nothing of it is read. A segment that is gone must have been
    read to its end. `NotServing` if the layout is older than the positions: the newest segment of a topic is always in
    its layout."""
    known = set(segments)
    newest = max(positions, default=-1)
    if newest > max(known, default=-1):
        raise NotServing(f"no broker that was asked knows segment {newest} of the topic yet; try again")
    if lost := sorted(segment for segment, position in positions.items() if position != END and segment not in known):
        raise SegmentNotFound(
            f"the topic has no segment {', '.join(map(str, lost))} any more, and it was not read to its end: what was "
            "left of it is gone; begin at 'earliest' to read what there is"
        )
    return {segment: positions.get(segment, END if segment in left_out else 0) for segment in sorted(known)}


def chosen_positions(children: Mapping[int, Iterable[int]], offsets: Mapping[int, int]) -> dict[int, Position]:
    """Return positions of all segments, if only some and their descendants are to be read. `children` has the children
    of each segment."""
    if missing := sorted(offsets.keys() - children.keys()):
        raise SegmentNotFound(f"the topic has no segment {missing[0]}; it has {', '.join(map(str, sorted(children)))}")
    read = reachable(offsets, lambda segment: (child for child in children[segment] if child in children))
    return {segment: offsets.get(segment, 0) if segment in read else END for segment in sorted(children)}


def first_positions(start: str | int, segments: Iterable[SegmentPositions]) -> dict[int, Position]:
    """Return the first positions for `earliest`, `latest`, or the time in µs that the request named."""

    def first(segment: SegmentPositions) -> Position:
        if start == "earliest":
            return segment.earliest
        if start == "latest":
            return END if segment.sealed else segment.end
        return max(segment.at_time, segment.earliest)

    return {segment.segment: first(segment) for segment in segments}


def epochs_before(
    positions: Mapping[int, Position], starts: Mapping[int, Sequence[tuple[int, int]]]
) -> dict[int, Epoch]:
    """Return the epochs of the records before these positions, as far as they are known. `starts` has the epochs of
    each segment."""
    found = {
        segment: epoch_before(starts.get(segment, ()), position)
        for segment, position in positions.items()
        if position != END
    }
    return {segment: epoch for segment, epoch in found.items() if epoch != UNKNOWN_EPOCH}


def furthest(checkpoints: Sequence[ConsumerCheckpoint]) -> ConsumerCheckpoint:
    """Return one checkpoint with the furthest position that any of these has of each segment: those of a group."""
    first = checkpoints[0]
    if len({(each.topic, each.topic_id, each.hashes) for each in checkpoints}) > 1:
        raise InvalidArgument("these checkpoints are of several topics, or of some segments: give those of one group")
    positions: dict[int, Position] = {}
    epochs: dict[int, Epoch] = {}
    for each in checkpoints:
        for segment, position in each.positions.items():
            known = positions.get(segment, -1)
            if known != END and (position == END or position > known):
                positions[segment] = position
                epochs[segment] = each.epochs.get(segment, UNKNOWN_EPOCH)
    epochs = {segment: epoch for segment, epoch in epochs.items() if epoch != UNKNOWN_EPOCH}
    return msgspec.structs.replace(first, positions=positions, epochs=epochs)


class CheckpointConsumer(Consumer):
    """Reads a topic from positions that the caller keeps; `client.checkpoint_consumer` makes it."""

    def __init__(
        self,
        client: Client,
        topic: TopicName,
        *,
        start: Start,
        window_bytes: int | None = None,
    ) -> None:
        super().__init__(topic.path)
        self._client = client
        self._window_bytes = checked_window(window_bytes)
        self._start = _checked_start(start, topic)
        self._topic_id = 0
        self._positions: dict[int, Position] = {}
        """The positions of segments that are not being read: they wait for their ancestors, or have ended."""
        self._epochs: dict[int, Epoch] = {}
        """The epochs that came with the first positions."""
        self._hashes: tuple[tuple[int, int], ...] = ()
        """The ranges that are read; empty: all."""
        self._read_grants: dict[int, SegmentGrant] = {}
        """Of the segments that were assigned to a consumer of a group."""
        self._readers: dict[int, SegmentReader] = {}
        self._ending: dict[SegmentReader, None] = {}
        """Readers whose last delivery is on its way to the application."""
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._closed = False

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that this consumer reads now."""
        return tuple(sorted(self._readers))

    def checkpoint(self) -> bytes:
        """Return the positions of the application: in each segment, after the last record that it got."""
        return self._checkpoint().to_bytes()

    def _checkpoint(self) -> ConsumerCheckpoint:
        if not self.started:
            raise InvalidArgument(
                "the consumer has not begun, so it has no positions: call `await consumer.start()` first, or use it as "
                "`async with client.checkpoint_consumer(…) as consumer`"
            )
        positions = self._positions | {segment: reader.delivered for segment, reader in self._readers.items()}
        epochs = self._epochs | {segment: reader.delivered_epoch for segment, reader in self._readers.items()}
        return ConsumerCheckpoint(
            topic=self.topic,
            topic_id=self._topic_id,
            positions=positions,
            epochs={segment: epoch for segment, epoch in epochs.items() if epoch and positions.get(segment) != END},
            hashes=self._hashes,
        )

    async def seek(self, segment: int, offset: int) -> None:
        """Go on at this offset of a segment that is being read, such as after records that cannot be decoded."""
        self.check_usable()
        reader = self._readers.get(segment)
        if reader is None or offset < 0:
            raise InvalidArgument(
                f"segment {segment} cannot be read from offset {offset} on: this consumer reads now the segments "
                f"{', '.join(map(str, sorted(self._readers)))}, and offsets begin with 0"
            )
        channel, task = reader.channel, self._tasks[segment]
        reader.end()
        self._ending.pop(reader, None)
        await cancel([task])
        if channel is not None and channel.working:
            channel.abandon()
        self.check_usable()
        another = self._readers[segment] = SegmentReader(segment, offset)
        self._in_background(segment, partial(self._read, another))

    def _way_past(self, error: BatchUnreadable) -> str:
        return f"To skip them: await consumer.seek({error.segment}, {error.next_offset})"

    async def _begin(self) -> None:
        self._client.add_consumer(self)
        deadline = asyncio.get_running_loop().time() + self._client.timeout_s
        try:
            await retrying(self._find_positions, deadline, self._client.backoff())
            sealed = await retrying(self._find_just_sealed, deadline, self._client.backoff())
            await retrying(self._read_what_may_be_read, deadline, self._client.backoff())
        except BaseException:
            self._client.forget_consumer(self)
            raise
        for segment in sealed:
            self._in_background(segment, partial(self._read_children, segment))
        if isinstance(self._failure, ClientClosed):  # It was closed meanwhile.
            await self.end()
            raise self._failure.again()

    async def close(self) -> None:
        """End reading. `checkpoint` still works."""
        if self._closed:
            return
        await self.end()
        for reader in self._readers.values():
            if reader.channel is not None:
                with contextlib.suppress(BraidError):
                    await reader.channel.close(self._client.timeout_s)

    async def end(self) -> None:
        self._closed = True
        self._client.forget_consumer(self)
        self._fail(closed_error("the consumer"))
        await self._end_opening()
        await cancel(self._tasks.values())

    async def _find_positions(self) -> None:
        topic = await self._client.routing.topic(self.topic)
        self._topic_id = topic.topic_id
        if isinstance(self._start, ConsumerCheckpoint):
            if self._start.topic_id != topic.topic_id:
                raise InvalidArgument(
                    f"the checkpoint is of topic {self._start.topic} with id {self._start.topic_id}; that topic was "
                    f"deleted and created again with id {topic.topic_id}, so the checkpoint's offsets mean nothing"
                )
            self._hashes = self._start.hashes
            self._positions = kept_positions(topic.by_id, self._start.positions, self._left_out(topic))
            self._epochs = self._start.epochs
            return
        if isinstance(self._start, dict):
            children = {segment.id: segment.children for segment in topic.route.segments}
            self._positions = chosen_positions(children, self._start)
            if END in self._positions.values():
                named = (topic.segment(segment) for segment in sorted(self._start))
                self._hashes = tuple((segment.first_hash, segment.last_hash) for segment in named)
            return
        segments = await self._ask_positions(self._start if isinstance(self._start, int) else None)
        self._positions = first_positions(self._start, segments)
        self._epochs = epochs_before(self._positions, {each.segment: each.epochs for each in segments})

    async def _ask_positions(self, timestamp_us: int | None = None) -> tuple[SegmentPositions, ...]:
        link = await self._client.pool.any()
        request = encode(PositionsRequest(self.topic, timestamp_us))
        return (await link.ask(Kind.POSITIONS, request, Positions, self._client.timeout_s)).segments

    async def _find_just_sealed(self) -> list[int]:
        """Find the sealed segments of which nothing is left to read, and whose children the layout does not have yet:
        nothing else would wait for these children."""
        topic = await self._client.routing.topic(self.topic)
        left_out = self._left_out(topic)
        done = {segment.id for segment in topic.active if self._positions.get(segment.id) == END} - left_out
        positions = await self._ask_positions() if done else ()
        return [each.segment for each in positions if each.sealed and each.segment in done]

    async def _read_what_may_be_read(self) -> None:
        topic = await self._client.routing.topic(self.topic)
        if topic.topic_id != self._topic_id:
            raise TopicNotFound(f"topic {self.topic} was deleted and created again; its positions mean nothing now")
        positions = self._positions | {segment: reader.taken for segment, reader in self._readers.items()}
        positions = kept_positions(topic.by_id, positions, self._left_out(topic))
        parents = {segment.id: segment.parents for segment in topic.route.segments}
        for segment in readable_segments(parents, positions):
            if segment not in self._readers:
                position = positions.pop(segment)
                assert position != END
                epoch = self._epochs.get(segment, UNKNOWN_EPOCH)
                reader = self._readers[segment] = SegmentReader(segment, position, epoch)
                self._in_background(segment, partial(self._read, reader))
        self._positions = {each: position for each, position in positions.items() if each not in self._readers}

    def _left_out(self, topic: TopicMap) -> set[int]:
        """Return the segments that hold nothing of the ranges that are read."""
        if not self._hashes:
            return set()
        return {
            each.id
            for each in topic.route.segments
            if not any(first <= each.last_hash and each.first_hash <= last for first, last in self._hashes)
        }

    def _in_background(self, segment: int, work: Callable[[], Awaitable[None]]) -> None:
        self._tasks[segment] = asyncio.get_running_loop().create_task(self._or_fail(work), name=f"segment {segment}")

    async def _or_fail(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except BraidError as error:
            self._fail(error)

    # One segment.

    async def _read(self, reader: SegmentReader) -> None:
        """Keep a channel open until the segment has ended."""
        owner = OwnerSearch(self._client.routing, self.topic, reader.segment, self._client.backoff())
        error: BraidError | None = None
        while True:
            try:
                if error is not None:
                    await owner.after(error)
                error = await self._read_channel(reader, owner)
                if error is None:
                    return
                owner.worked()
            except OffsetOutOfRange as failure:
                raise self._out_of_range(reader, failure) from failure
            except BraidError as failure:
                if not may_pass(failure):
                    raise
                error = failure

    async def _read_channel(self, reader: SegmentReader, owner: OwnerSearch) -> BraidError | None:
        """Open a channel at the reader's position. Returns None when the segment has ended, and the error when the
        channel worked and then failed in a way that may pass."""
        over = asyncio.Event()

        def on_news() -> None:
            if not channel.working:
                over.set()
            if reader.channel is channel:
                self._arrived(reader)

        link = await owner.link()
        channel = ClientChannel(link, self.topic, reader.segment, self._window_bytes, on_news)
        await channel.open(
            self._topic_id,
            read_grant=self._read_grants.get(reader.segment),
            offset=reader.taken,
            after_epoch=reader.taken_epoch,
            timeout_s=self._client.timeout_s,
        )
        if not reader.valid:  # The segment went to another consumer while its channel was opened.
            if channel.working:
                channel.abandon()
            return None
        reader.channel = channel
        channel.begin(reader.taken)
        if channel.working:
            await over.wait()
        if channel.ended:
            return None
        assert channel.over is not None
        reader.channel = None
        if isinstance(channel.over, OffsetOutOfRange) or (channel.delivered and may_pass(channel.over)):
            return channel.over  # Opening again shows which offsets exist now.
        raise channel.over

    def _out_of_range(self, reader: SegmentReader, error: OffsetOutOfRange) -> OffsetOutOfRange:
        where = f"offset {reader.taken} of segment {reader.segment} of {self.topic}"
        if isinstance(error, PositionDiverged):
            message = (
                f"{where} follows records that the topic has lost: the consumer had read them, and from offset "
                f"{error.parted_at} on the segment holds other records now. Begin at 'earliest' to read what there is, "
                f"or, to read only the new records, set the segment's position in the checkpoint to {error.parted_at} "
                "and remove its epoch there"
            )
            return PositionDiverged(message, error.earliest, error.end, error.parted_at)
        if reader.taken < error.earliest:
            message = (
                f"{where} is gone: retention has deleted everything before offset {error.earliest}. Begin at "
                "'earliest' to read what is left, or at a later checkpoint; and let the topic keep its records longer "
                "than its readers may pause"
            )
        else:
            message = (
                f"{where} does not exist: the segment ends at {error.end}. The checkpoint is of another topic, or the "
                "topic has lost records; begin at 'earliest' or 'latest'"
            )
        return OffsetOutOfRange(message, error.earliest, error.end)

    def _take(self) -> Fetched | None:
        for reader in [reader for reader in self._ending if reader.finished]:
            self._finish(reader)
        return super()._take()

    def _on_nothing_left(self, reader: SegmentReader) -> None:
        if reader.finished:
            self._finish(reader)
        elif reader.channel is not None and reader.channel.ended:
            self._ending[reader] = None

    def _finish(self, reader: SegmentReader) -> None:
        """Finish a segment that has ended and of which the application has everything: now its children may be read."""
        self._ending.pop(reader, None)
        del self._readers[reader.segment]
        self._positions[reader.segment] = END
        self._in_background(reader.segment, partial(self._read_children, reader.segment))

    async def _read_children(self, segment: int) -> None:
        """Wait for the layout that has the children, and read them. It becomes visible a moment after the seal."""

        def has_children(topic: TopicMap) -> bool:
            known = topic.by_id.get(segment)
            return known is None or not known.active

        backoff = self._client.backoff()
        while True:
            try:
                await self._client.routing.until(self.topic, has_children)
                return await self._read_what_may_be_read()
            except BraidError as error:
                if not may_pass(error):
                    raise
            await asyncio.sleep(backoff.next())


def _checked_start(start: Start, topic: TopicName) -> str | int | dict[int, int] | ConsumerCheckpoint:
    """Return `earliest`, `latest`, a time in µs since 1970, offsets by segment, or a checkpoint of this topic."""
    if isinstance(start, bytes | bytearray | memoryview):
        start = [bytes(start)]
    if isinstance(start, list | tuple) and start and all(isinstance(each, bytes) for each in start):
        checkpoint = furthest([ConsumerCheckpoint.from_bytes(each) for each in start])
        if checkpoint.topic != topic.path:
            raise InvalidArgument(f"the checkpoint is of topic {checkpoint.topic}; it says nothing about {topic.path}")
        return checkpoint
    if isinstance(start, datetime.datetime):
        if start.tzinfo is None:
            raise InvalidArgument(f"start is {start}, a time without a zone; give it one, such as datetime.UTC")
        return (start - _EPOCH) // _MICROSECOND
    if isinstance(start, Mapping):
        if not start or not all(_is_number(each) for pair in start.items() for each in pair):
            raise InvalidArgument("start must name the next offset of at least one segment, as in {0: 1500}")
        return dict(start)
    if not isinstance(start, str) or start not in ("earliest", "latest"):
        raise InvalidArgument(
            f"start is {start!r}; it must be 'earliest', 'latest', a datetime, offsets by segment or a checkpoint"
        )
    return start


def _is_number(given: object) -> bool:
    return isinstance(given, int) and given >= 0
