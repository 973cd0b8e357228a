"""What the owner of a replicated segment does: it streams its log to the followers, and counts what their disks hold.

**One number** gates confirms, readers, cursors and exports: the log's `replicated` watermark. It is the offset below
which `write_quorum` replicas hold every record, this broker's disk included (model/log/replication.py). A follower
counts only in its session, only when its last batch is of this owner's epoch, and only as a member: a vote must find
it.

**Too few followers.** While fewer replicas than the quorum are in sync, the log refuses new batches immediately.
Batches that it took before wait, and are confirmed when followers are back.

**Members.** A follower that holds everything that is confirmed is told so. From then on its promise counts in a vote.

**A change of the replicas** is carried out in steps, and each can be repeated after a crash:

    1. stream to the old replicas and to the new ones
    2. from now on, confirm only what both sets hold, each by its own quorum
    3. when the new set holds everything that is confirmed, replace the record
    4. stop streaming to those that left

Between 2 and 3 a vote of the old set finds everything that was confirmed, and so does a vote of the new set.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, Final

from braid.broker.queues.segment_queue import SegmentQueue
from braid.broker.queues.segment_queues import SegmentQueues
from braid.broker.replicas.queue_copies import QUEUE_BEGIN
from braid.broker.replicas.queue_streams import QueueStream
from braid.broker.replicas.stream import FollowerCalls, FollowerStream, StreamSource
from braid.cluster.owners import Owners
from braid.metadata.view import Known
from braid.model.errors import BraidError, Fenced, MetadataError, NotEnoughReplicas, NotServing
from braid.model.ids import Offset
from braid.model.log.replication import FollowerStatus, LogPosition, replicated_end
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState, ReplicaChange
from braid.model.queue.events import QueueEvents, QueueSnapshot, encode
from braid.ports.tasks import TaskScope
from braid.storage import queue_journal
from braid.storage.context import StorageContext, StorageMode
from braid.storage.frames import LogFrames
from braid.storage.history.catalog import Catalog
from braid.storage.log.log import Log
from braid.storage.log.store import PlacedGroup

BEGIN_S: Final = 10.0
"""How long an opening waits for followers. Then it is tried again, in the next epoch."""
RETRY_S: Final = 0.5

_log: Final = logging.getLogger(__name__)


class Replication:
    """One segment, in one epoch. Everything here runs on the broker's loop."""

    def __init__(
        self,
        context: StorageContext,
        owners: Owners,
        name: SegmentName,
        topic_id: int,
        record: Ownership,
        calls: FollowerCalls,
        bring_history: Callable[[str, Catalog], Awaitable[None]],
        reads: Callable[[str], asyncio.Semaphore],
    ) -> None:
        """`bring_history` returns when a follower has the chunks of the catalog, where brokers share no storage.
        `reads` bounds the pieces that are read from files for a follower, of all segments."""
        self._context = context
        self._owners = owners
        self._name = name
        self._topic_id = topic_id
        self._record = record
        """As this owner has seen or written it last."""
        self._calls = calls
        self._bring_history = bring_history
        self._reads = reads
        self._log: Log | None = None
        self._streams: dict[str, FollowerStream] = {}
        self._sessions = itertools.count(1)
        self._tasks = TaskScope[str]()
        self._begun: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when enough replicas hold BEGIN of this epoch."""
        self._next: ReplicaChange | None = None
        """The set that the log obeys, too, while it is being changed."""
        self._news = asyncio.Event()
        """Set when followers hold more, or fewer of them are there."""
        self._queues: SegmentQueues | None = None
        self._queue_streams: dict[str, QueueStream] = {}
        """By follower; only of a segment that has queues."""
        self._stopped = False

    async def begin(self, log: Log, catalog: Catalog) -> None:
        """Stream the log; return when enough replicas hold its first batch. Called by the log's opening."""
        self._log, self._catalog = log, catalog
        log.watch(self._on_start, self._on_written)
        self._follow_set()
        self._count()
        if log.sealed:
            return  # It had ended before, and enough replicas hold its end.
        try:
            async with asyncio.timeout(BEGIN_S):
                await self._begun
                while len(self._counting(self._replicas)) < self._record.write_quorum:
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError as error:
            raise NotEnoughReplicas(f"{self._name} cannot begin: {self._shortage()}") from error

    @property
    def followers(self) -> tuple[FollowerStatus, ...]:
        return tuple(stream.status for stream in self._streams.values())

    def follow(self, known: Known[Ownership]) -> None:
        """Carry out what the record says now; it still names this owner and epoch."""
        if self._stopped or self._log is None or known.value == self._record:
            return
        self._record = known.value
        if self._next is not None and self._record.change != self._next:
            self._next = None  # It is the present set now, or the leader wants another one.
        self._follow_set()
        self._count()
        if self._record.change is not None and "change" not in self._tasks:
            self._tasks.start("change", self._change(), name=f"change the replicas of {self._name}")

    async def brought_to(self, target: str, lag_bytes: int) -> LogPosition:
        """Return when this broker's copy is a member's, and holds all that the log took, but for so many bytes; and how
        far it reaches."""
        while True:
            self._news.clear()
            log, stream = self._log, self._streams.get(target)
            assert log is not None
            held = stream.held if stream is not None and stream.counts and stream.member else None
            # A copy may hold more: batches that this broker's disk is writing, or that found no room on it.
            if held is not None and (
                held.rank >= log.position.rank or 0 < self._streams[target].lag_bytes <= lag_bytes
            ):
                return held
            await self._news.wait()

    def on_member(self, broker: str) -> None:
        """Hear that a broker has registered, or is gone."""
        if (stream := self._streams.get(broker)) is not None:
            stream.on_member()
        if (events := self._queue_streams.get(broker)) is not None:
            events.on_member()

    def on_inherited(self) -> None:
        """Begin all sessions anew: the log has got the producers of other logs, and copies read them at a session's
        beginning. No record may come to a copy before (I10)."""
        for stream in self._streams.values():
            stream.restart("the log has inherited producers")

    def on_exported(self) -> None:
        """Tell followers that chunks hold more of the log: they need fewer files."""
        for stream in self._streams.values():
            stream.look()

    async def stop(self) -> None:
        """Stop streaming. The log rises no more."""
        self._stopped = True
        if self._log is not None:
            self._log.watch(None)
        await self._tasks.cancel()
        self._streams.clear()
        self._queue_streams.clear()
        self._begun.cancel()

    # Streams.

    def _follow_set(self) -> None:
        """Stream to the followers of the present set, to those of the next one, and to the target of a move."""
        wanted = self._record.copies - {self._context.broker_id}
        for follower in sorted(wanted - self._streams.keys()):
            self._start(follower)
        for follower in sorted(self._streams.keys() - wanted):
            del self._streams[follower]
            if (task := self._tasks.get(follower)) is not None:
                task.cancel()
        self._follow_queue_set()

    def _start(self, follower: str) -> None:
        assert self._log is not None
        if follower in self._tasks:
            return  # It is being stopped; `_on_stream_end` starts it again.
        source = StreamSource(
            name=self._name,
            topic_id=self._topic_id,
            log=self._log,
            catalog=self._catalog,
            frames=LogFrames(self._log, self._context.handles),
            calls=self._calls,
            covered=self._covered,
            bring_history=lambda follower: self._bring_history(follower, self._catalog),
            reads=self._reads,
            sessions=self._sessions,
        )
        stream = FollowerStream(follower, source, self._revision, self._count)
        self._streams[follower] = stream
        task = self._tasks.start(follower, stream.run(), name=f"stream {self._name} to {follower}")
        task.add_done_callback(self._on_stream_end)

    def _on_stream_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a stream of %s broke", self._name, exc_info=error)
        if not self._stopped:
            self._follow_set()  # The follower may be one again.

    def _covered(self) -> Offset:
        """Return the offset below which followers need no files: chunks hold it, or retention has deleted it."""
        assert self._log is not None
        if self._context.mode is StorageMode.LOCAL:
            return self._log.base_offset
        return self._catalog.next_offset

    def _revision(self) -> int:
        known = self._owners.known(self._name)
        if known is None or not known.value.is_held_by(self._context.broker_id, self._record.epoch):
            raise Fenced(f"{self._name} has another owner")
        return known.revision

    def _on_start(self, placed: PlacedGroup) -> None:
        for stream in self._streams.values():
            stream.on_start(placed)

    def _on_written(self) -> None:
        for stream in self._streams.values():
            stream.on_written()
        self._count()

    # Queues.

    def follow_queues(self, queues: SegmentQueues) -> None:
        """Send the events of the segment's queues to the followers, too."""
        self._queues = queues
        queues.on_events = self._on_events

    def agreed(self, own: int, held: Mapping[str, int]) -> int:
        """Return the number up to which enough replicas have a queue's events: this broker's disk is at `own`, those of
        the followers are as `held` says. Only members count, as for records."""
        return min([own, *(self._events_end(own, held, *rule) for rule in self._rules())])

    def _events_end(self, own: int, held: Mapping[str, int], replicas: tuple[str, ...], quorum: int) -> int:
        followers = [each for each in self._counting(replicas) if each != self._context.broker_id]
        return replicated_end([Offset(own), *(Offset(held.get(each, 0)) for each in followers)], quorum)

    def _hold_events(self, replicas: tuple[str, ...], quorum: int) -> bool:
        """Tell whether enough of these replicas hold all events of queues that are confirmed."""
        return all(
            self._events_end(queue.durable, queue.held, replicas, quorum) >= queue.confirmed.value
            for queue in (self._queues.all() if self._queues is not None else ())
        )

    def _on_events(self, queue: SegmentQueue, number: int, events: QueueEvents | QueueSnapshot) -> None:
        self._follow_set()
        for stream in self._queue_streams.values():
            stream.on_events(queue, number, events)

    def _follow_queue_set(self) -> None:
        """Send events to the followers that are sent the log. A segment without queues has nothing to send."""
        queues = self._queues
        if queues is None or not queues.all() or self._stopped:
            return
        for follower in sorted(self._streams.keys() - self._queue_streams.keys()):
            stream = QueueStream(follower, queues, self._about_queues, self._calls.call, self._count, self._sessions)
            key = f"events {follower}"
            if key not in self._tasks:
                self._queue_streams[follower] = stream
                sending = self._tasks.start(key, stream.run(), name=f"send events of {self._name} to {follower}")
                sending.add_done_callback(self._on_stream_end)
        for follower in sorted(self._queue_streams.keys() - self._streams.keys()):
            del self._queue_streams[follower]
            if (task := self._tasks.get(f"events {follower}")) is not None:
                task.cancel()

    async def _bring_events(self, follower: str) -> None:
        """Return when the follower holds all events of queues that were confirmed before its session began. Raise if it
        does not yet. It may have lost a disk that was counted for them."""
        assert self._log is not None
        if self._queues is not None and self._queues.loaded:
            if self._queues.all() and not (
                follower in self._queue_streams and self._queue_streams[follower].holds_all()
            ):
                raise NotServing(f"{follower} does not hold the events of queues yet")
            return
        # The segment is being opened. All events that were ever confirmed are on this broker's disk (evidence.py).
        disk, folder = self._context.disk, f"{self._log.folder}/{queue_journal.FOLDER}"
        for subscription in await disk.list_folders(folder):
            image = await queue_journal.read_image(disk, f"{folder}/{subscription}")
            if image is not None:
                about = {**self._about_queues, "subscription": subscription}
                data = encode(image.snapshot())
                await self._calls.call(follower, QUEUE_BEGIN, about, payload=[data], timeout_s=BEGIN_S)

    @property
    def _about_queues(self) -> dict[str, Any]:
        return {"segment": str(self._name), "topic_id": self._topic_id, "epoch": self._record.epoch}

    # What counts.

    def _count(self) -> None:
        """Raise the watermark over what enough replicas hold, and admit followers that hold all of it."""
        self._news.set()
        log = self._log
        if self._stopped or log is None or log.failure is not None or log.ended is not None:
            return
        rules = self._rules()
        try:
            if all(len(self._counting(replicas)) >= quorum for replicas, quorum in rules):
                self._note(log, min(self._end(replicas, quorum) for replicas, quorum in rules), rules)
                log.resume()
            elif self._begun.done():
                log.hold(NotEnoughReplicas(f"{self._name} takes no records now: {self._shortage()}"))
        except Fenced:
            return  # The lease is over: the broker abandons the segment.
        for stream in self._streams.values():
            if stream.counts and not stream.member and self._begun.done():
                self._admit(stream)
        if self._queues is not None:
            self._queues.recount()

    def _rules(self) -> list[tuple[tuple[str, ...], int]]:
        """Return the sets of replicas that must hold what is confirmed, each with its quorum."""
        rules = [(self._replicas, self._record.write_quorum)]
        if self._next is not None:
            rules.append((self._next.replicas or (self._context.broker_id,), self._next.write_quorum))
        return rules

    def _note(self, log: Log, end: Offset, rules: list[tuple[tuple[str, ...], int]]) -> None:
        if not self._begun.done():
            self._begun.set_result(None)
        if end > log.replicated.value:
            log.note_replicated(min(end, Offset(log.synced.value)))
        if log.sealed and all(self._sealed(replicas) >= quorum for replicas, quorum in rules):
            log.note_seal_replicated()

    @property
    def _replicas(self) -> tuple[str, ...]:
        return self._record.replicas or (self._context.broker_id,)

    def _in_sync(self, replicas: tuple[str, ...]) -> list[str]:
        """Return the replicas whose copies count now, this broker among them."""
        here = self._context.broker_id
        streams = self._streams
        return [each for each in replicas if each == here or (each in streams and streams[each].counts)]

    def _counting(self, replicas: tuple[str, ...]) -> list[str]:
        """Return the replicas of which a quorum confirms: those in sync that a vote would find, too. Before this owner
        has begun, nothing is confirmed, and members are made only after that."""
        begun, streams = self._begun.done(), self._streams
        return [each for each in self._in_sync(replicas) if each not in streams or streams[each].member or not begun]

    def _end(self, replicas: tuple[str, ...], quorum: int) -> Offset:
        assert self._log is not None
        ends = [Offset(self._log.synced.value)]
        for replica in self._counting(replicas):
            if replica != self._context.broker_id:
                held = self._streams[replica].held
                assert held is not None
                ends.append(held.end)
        return replicated_end(ends, quorum)

    def _sealed(self, replicas: tuple[str, ...]) -> int:
        """Return how many members hold the log's seal. `Log.seal` waits for this broker's own disk itself."""
        held = (self._streams[each].held for each in self._counting(replicas) if each in self._streams)
        return 1 + sum(position is not None and position.sealed for position in held)

    def _shortage(self) -> str:
        """Say which replicas are missing."""
        replicas, quorum = self._replicas, self._record.write_quorum
        there = self._counting(replicas)
        missing = ", ".join(each for each in replicas if each not in there)
        return f"{quorum} of its {len(replicas)} replicas must hold a record; these lag behind or are down: {missing}"

    # Members.

    def _admit(self, stream: FollowerStream) -> None:
        key = f"admit {stream.follower}"
        if self._holds_all(stream) and key not in self._tasks:
            admitting = self._tasks.start(key, self._try_to_admit(stream), name=f"{key} of {self._name}")
            # Tried again when the task is forgotten, and only if the follower still holds everything: it may have
            # another disk by now.
            admitting.add_done_callback(lambda _: self._count())

    async def _try_to_admit(self, stream: FollowerStream) -> None:
        try:
            session = stream.session
            await self._bring_events(stream.follower)
            if stream.session == session:
                await stream.admit()
        except BraidError as error:
            _log.info("%s: %s is no member yet: %s", self._name, stream.follower, error)
            await asyncio.sleep(RETRY_S)

    def _holds_all(self, stream: FollowerStream) -> bool:
        """Tell whether the follower holds everything that is confirmed."""
        assert self._log is not None
        return stream.counts and stream.held is not None and stream.held.end >= self._log.replicated.value

    # Changes.

    async def _change(self) -> None:
        """Make the next set the present one, when it holds everything that is confirmed."""
        log = self._log
        assert log is not None
        while (change := self._record.change) is not None and self._record.state is OwnershipState.SERVING:
            replicas = change.replicas or (self._context.broker_id,)
            ready = self._are_members(added(self._replicas, replicas)) and (
                len(self._counting(replicas)) >= change.write_quorum
            )
            if ready and self._next is None:
                self._next = change  # Until the view shows that the record is another one: see `follow`.
            try:
                holds = ready and self._end(replicas, change.write_quorum) >= log.replicated.value
                if holds and self._hold_events(replicas, change.write_quorum):
                    await self._replace(change)
            except Fenced:
                return  # Another owner changes them.
            except MetadataError as error:
                _log.warning("%s keeps its replicas for now: %s", self._name, error)
            if self._record.change == change:
                await asyncio.sleep(RETRY_S)

    def _are_members(self, followers: Collection[str]) -> bool:
        """Tell whether all these followers hold what is confirmed, and have been admitted: a vote must find them."""
        streams = [self._streams.get(each) for each in followers]
        return all(stream is not None and stream.counts and stream.member for stream in streams)

    async def _replace(self, change: ReplicaChange) -> None:
        known = self._owners.known(self._name)
        if known is None or not known.value.is_held_by(self._context.broker_id, self._record.epoch):
            raise Fenced(f"{self._name} has another owner")
        if known.value.change != change:
            return
        record = known.value.replicas_changed(change.replicas, change.write_quorum)
        revision = await self._owners.swap(self._name, known.revision, record)
        if revision is None:
            return  # The record has changed meanwhile: look again.
        _log.info(
            "%s has the replicas %s now; %d of them confirm",
            self._name, ", ".join(change.replicas), change.write_quorum,
        )  # fmt: skip
        # Both sets count until this broker's view shows the record: then `follow` has it.
        await self._owners.view.caught_up(revision)


def added(before: tuple[str, ...], after: tuple[str, ...]) -> list[str]:
    """Return the replicas that a change adds. All of them must hold everything before one that leaves may drop it."""
    return [each for each in after if each not in before]
