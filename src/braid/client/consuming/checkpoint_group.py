"""A checkpoint consumer that shares the segments of a topic with the other consumers of its group.

The topic's controller assigns the segments, as it does for stream consumers, and keeps no position in the metadata
(docs/decisions/0043-checkpoint-groups.md). A checkpoint is what an ack is for a stream consumer:

    checkpoint() ─► PROGRESS to the controller ─► the next consumer of a segment begins there
                                               └► END of a segment: the group gets its children

`_kept` has what this consumer knows of the group's progress, and tells each controller that it joins: positions of
checkpoints, the places where it began with segments, and END for the ancestors of every segment that it was given.

**When a segment goes to another consumer**, no more of its records are handed out. The application may still take a
checkpoint for a while. Then the segment is given back; records after the last checkpoint come again, elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Final

from braid.client.consuming.channel import SegmentGrant
from braid.client.consuming.checkpoint import END, CheckpointConsumer, ConsumerCheckpoint, Position, Start
from braid.client.consuming.consumer import SegmentReader
from braid.client.consuming.group_session import GroupSession
from braid.client.consuming.stream import RELEASE_GRACE_S
from braid.client.retry import retrying
from braid.client.routing import TopicMap
from braid.model.errors import BraidError, InvalidArgument
from braid.model.ids import Epoch
from braid.model.log.epochs import UNKNOWN_EPOCH
from braid.model.names import TopicName, check_name
from braid.model.subscription import DEFAULT_START, group_key
from braid.ports.tasks import cancel
from braid.wire.operations import ENDED, Assignment, GroupPosition

if TYPE_CHECKING:
    from braid.client.client import Client


class GroupCheckpointConsumer(CheckpointConsumer):
    """Reads its share of a topic from positions that the group keeps; `client.checkpoint_consumer` makes it."""

    def __init__(
        self,
        client: Client,
        topic: TopicName,
        group: str,
        *,
        name: str = "",
        start: Start,
        window_bytes: int | None = None,
    ) -> None:
        super().__init__(client, topic, start=start, window_bytes=window_bytes)
        if isinstance(self._start, dict) or (isinstance(self._start, ConsumerCheckpoint) and self._start.hashes):
            raise InvalidArgument("a group reads all segments: begin at 'earliest', 'latest', a time or checkpoints")
        self.group: Final = check_name("group", group)
        self.name: Final = check_name("consumer", name or f"consumer-{client.random.getrandbits(48):012x}")
        """Unique in the group: a second consumer of the same name replaces the first."""
        self._session = GroupSession(
            client, self.topic, group_key(group), self.name, DEFAULT_START, self._on_assignment, positions=self._known
        )
        self._kept: dict[int, GroupPosition] = {}
        self._kept_more = asyncio.Event()
        self._told: dict[int, GroupPosition] = {}
        """Where the last assignment says that the group is."""
        self._held: set[int] = set()
        """The segments that were assigned and are not given back."""
        self._returning: dict[int, asyncio.Task[None]] = {}
        """Tasks that give segments back."""
        self._keeper: asyncio.Task[None] | None = None

    @property
    def segments(self) -> tuple[int, ...]:
        """The segments that are assigned to this consumer now."""
        return tuple(sorted(self._read_grants))

    def checkpoint(self) -> bytes:
        """Return the positions that this consumer knows. The group goes on after them: its other consumers do not get
        the records before them again."""
        taken = self._checkpoint()
        self._keep(
            _position(segment, taken.positions, taken.epochs) for segment in self._kept if segment in taken.positions
        )
        return taken.to_bytes()

    def _known(self) -> tuple[GroupPosition, ...]:
        return tuple(self._kept.values())

    def _keep(self, positions: Iterable[GroupPosition]) -> None:
        """Note positions of the group, and tell the controller of those that are new."""
        new = {each.segment: each for each in positions if self._kept.get(each.segment) != each}
        if new:
            self._kept |= new
            self._session.progress(tuple(new.values()))
            self._kept_more.set()

    # The session.

    async def _begin(self) -> None:
        self._client.add_consumer(self)
        deadline = asyncio.get_running_loop().time() + self._client.timeout_s
        try:
            await retrying(self._find_positions, deadline, self._client.backoff())
            self._session.topic_id = self._topic_id
            if isinstance(self._start, ConsumerCheckpoint):
                positions, epochs = self._start.positions, self._start.epochs
                self._kept = {segment: _position(segment, positions, epochs) for segment in positions}
            await self._session.join_until(deadline)
        except BaseException:
            self._client.forget_consumer(self)
            raise
        if self._failure is not None:  # It was closed meanwhile.
            await self.end()
            await self._session.leave()
            raise self._failure.again()
        self._keeper = asyncio.get_running_loop().create_task(self._keep_session(), name=f"consumer {self.name}")

    async def _keep_session(self) -> None:
        """Keep the session. While it joins again, reading continues."""
        try:
            await self._session.keep()
        except BraidError as error:
            self._fail(error)
            await cancel(self._tasks.values())
            await self._session.leave()

    async def close(self) -> None:
        """End reading, and leave the group. Its other consumers go on after the last checkpoint."""
        if not self._closed:
            await super().close()
            await self._session.leave()

    async def end(self) -> None:
        self._session.end()
        self._session.ignore()
        await cancel([*self._returning.values(), *([self._keeper] if self._keeper is not None else [])])
        await super().end()

    # One segment.

    def _on_assignment(self, assignment: Assignment) -> None:
        key = group_key(self.group)
        self._told = {position.segment: position for position in assignment.positions}
        self._read_grants = {
            segment: SegmentGrant(key, assignment.term, grant)
            for segment, grant in zip(assignment.segments, assignment.grants, strict=True)
        }
        for segment in self._read_grants.keys() - self._held:
            self._take_up(segment)
        for segment in self._held - self._read_grants.keys() - self._returning.keys():
            if (reader := self._readers.get(segment)) is not None:
                self._stop(reader)
            task = asyncio.get_running_loop().create_task(self._give_back(segment), name=f"give back {segment}")
            self._returning[segment] = task

    def _take_up(self, segment: int) -> None:
        self._held.add(segment)
        self._in_background(segment, partial(self._hold, segment))

    async def _hold(self, segment: int) -> None:
        """Read a segment from where the group is. If the group has not begun with it, read it from the own start."""

        async def topic_with_segment() -> TopicMap:
            await self._client.routing.until(self.topic, lambda topic: segment in topic.by_id)
            return await self._client.routing.topic(self.topic)

        topic = await retrying(topic_with_segment, math.inf, self._client.backoff())
        self._note_ancestors(topic, segment)
        begin = self._told.get(segment) or _position(segment, self._positions, self._epochs)
        self._keep([begin])
        if begin.offset == ENDED:
            self._positions[segment] = END
            return
        self._positions.pop(segment, None)
        reader = self._readers[segment] = SegmentReader(segment, begin.offset, begin.epoch)
        await self._read(reader)

    def _note_ancestors(self, topic: TopicMap, segment: int) -> None:
        """The group has read all ancestors of a segment that it is given. Forget segments that the layout has lost."""
        ended = {each: GroupPosition(each, ENDED) for each in topic.ancestors(segment)}
        self._positions |= dict.fromkeys(ended, END)
        self._keep(ended.values())
        self._positions = {each: at for each, at in self._positions.items() if each in topic.by_id or at != END}
        self._kept = {each: at for each, at in self._kept.items() if each in topic.by_id or each in self._held}

    def _finish(self, reader: SegmentReader) -> None:
        """The application has everything of a segment that has ended. The group has, when a checkpoint says so."""
        self._ending.pop(reader, None)
        del self._readers[reader.segment]
        self._positions[reader.segment] = END
        if self._kept[reader.segment].offset >= reader.delivered:
            self._keep([GroupPosition(reader.segment, ENDED)])

    def _stop(self, reader: SegmentReader) -> None:
        """Hand out nothing more of a segment, and let the owner stop."""
        channel = reader.channel
        reader.end()
        self._ending.pop(reader, None)
        if channel is not None and channel.working:
            channel.abandon()

    async def _give_back(self, segment: int) -> None:
        await cancel([self._tasks[segment]])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RELEASE_GRACE_S):
                while not self._is_kept(segment):
                    self._kept_more.clear()
                    await self._kept_more.wait()
        self._readers.pop(segment, None)
        if (kept := self._kept.get(segment)) is not None:
            self._positions[segment] = END if kept.offset == ENDED else kept.offset
            self._epochs = self._epochs | {segment: Epoch(kept.epoch)}
        await self._session.release(segment)
        self._held.discard(segment)
        del self._returning[segment]
        if segment in self._read_grants:
            self._take_up(segment)

    def _is_kept(self, segment: int) -> bool:
        """Whether a checkpoint covers all that the application got of the segment."""
        kept, reader = self._kept.get(segment), self._readers.get(segment)
        if kept is None or kept.offset == ENDED:
            return True
        if reader is None:  # It has not begun, or it has finished and no checkpoint says so.
            return self._positions.get(segment) != END
        return kept.offset >= reader.delivered


def _position(segment: int, positions: Mapping[int, Position], epochs: Mapping[int, Epoch]) -> GroupPosition:
    """Return the position of a segment; a segment that has none begins with its first record."""
    position = positions.get(segment, 0)
    if position == END:
        return GroupPosition(segment, ENDED)
    return GroupPosition(segment, position, epochs.get(segment, UNKNOWN_EPOCH))
