"""The segments that this broker serves: opened, opened again after a failure, handed over, closed.

What it should serve is written in the ownership records (model/ownership.py); what it does serve is here, and each
change of a record, each failure and each end of a task leads to one look at the segment (`_reconcile`), which starts
what is missing. So nothing depends on an event that must not be missed:

    record says                              served here   not served here
    this owner, this epoch, no move          —             open it (take it again first, unless it was just assigned)
    this owner, this epoch, a move           hand it over  open it; the move goes on when it is served
    another owner or epoch, or none          let it go     —

A segment is served under the epoch of its record. Its log asks before each confirm whether the broker's lease still
holds (I3); cursors and chunks are written only while the record names this owner and epoch. When a log fails, because a
write or a sync did, the segment is abandoned and opened again in the next epoch: recovery finds out what the disk
really holds. Until then requests are answered with *not serving*, which clients retry.

A segment that cannot be opened is tried again and again, with longer and longer pauses, in one epoch as long as no try
has claimed the catalog in it. The record says why (opening.py).

One task at a time works on a segment (`_work`), until the broker stops; everything runs on the broker's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Final

from braid.broker.config import BrokerConfig
from braid.broker.cursors.cursors import Cursors
from braid.broker.keyed_locks import KeyedLocks
from braid.broker.metrics import BrokerMetrics
from braid.broker.replicas.copies import ReplicaCopies
from braid.broker.segment_folders import has_room, remove_segment, remove_topic
from braid.broker.segments.endings import Endings, outlived
from braid.broker.segments.handover import HandOver, MoveGivenUp
from braid.broker.segments.opening import Opening, Replicate
from braid.broker.segments.owned_segment import OwnedSegment
from braid.broker.segments.segment_access import Ask, SegmentAccesses
from braid.broker.segments.succession import Succession
from braid.broker.topics import Topics
from braid.cluster.members import Members
from braid.cluster.owners import Owners, SegmentKey
from braid.cluster.ownership import owner_step
from braid.cluster.ownership.move_request import move_progress
from braid.cluster.ownership.owner_step import OwnerAction
from braid.model.errors import (
    BraidError,
    DiskFull,
    Fenced,
    Moved,
    NotEnoughReplicas,
    NotServing,
    SegmentNotFound,
    ShuttingDown,
    TopicNotFound,
)
from braid.model.ids import Epoch, Revision, SegmentId
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic
from braid.ports.tasks import TaskScope, all_of, cancel, join
from braid.storage.context import StorageContext
from braid.storage.history.housekeeper import Housekeeper

__all__ = ["OwnedSegment", "Segments"]

MAX_OPENING: Final = 16
MAX_HANDING_OVER: Final = 8
REOPEN_FIRST_S: Final = 0.1
REOPEN_MAX_S: Final = 10.0
ROOM_PROBE_S: Final = 1.0

_log: Final = logging.getLogger(__name__)

Key = tuple[str, int]
"""A topic's path and a segment's id."""


class Segments:
    def __init__(
        self,
        context: StorageContext,
        config: BrokerConfig,
        metrics: BrokerMetrics,
        *,
        may_act: Callable[[], bool],
        topics: Topics,
        owners: Owners,
        members: Members,
        housekeeper: Housekeeper,
        hand_over: HandOver,
        write_manifest: Callable[[str], Awaitable[None]],
        ask: Ask,
        copies: ReplicaCopies,
        replicate: Replicate,
    ) -> None:
        self._context = context
        self._metrics = metrics
        self._topics = topics
        self._owners = owners
        self._members = members
        self._housekeeper = housekeeper
        self._hand_over = hand_over
        self.accesses: Final = SegmentAccesses(context.broker_id, self, owners, members, ask)
        """To the segments of all brokers."""
        self._succession = Succession(context.broker_id, topics, owners, self.accesses)
        self._copies = copies
        self._opening = Opening(
            context,
            config,
            metrics,
            topics,
            owners,
            members,
            housekeeper,
            may_act,
            write_manifest,
            copies,
            replicate,
            ask,
        )
        self._served: dict[Key, OwnedSegment] = {}
        self._absent: dict[Key, BraidError] = {}
        """Why a segment that belongs to this broker is not served now."""
        self._work = TaskScope[Key]()
        """The task that works on each segment."""
        self._leaving: set[Key] = set()
        """Segments that are drained, and not sealed yet."""
        self._endings = Endings(housekeeper)
        self._tried: dict[Key, asyncio.Event] = {}
        """Set when the first attempt to open a segment has ended."""
        self._pauses: dict[Key, tuple[Epoch, asyncio.Event]] = {}
        """Of each segment that could not be opened: the epoch that was tried. Another epoch in its record ends the
        pause before the next try."""
        self._removals = KeyedLocks()
        """By a topic's path: the removal of its files. No segment of a new topic of that name is opened meanwhile."""
        self._slots = asyncio.Semaphore(MAX_OPENING)
        self._moves = asyncio.Semaphore(MAX_HANDING_OVER)
        self._closing = False
        self._stopped = True
        """No segment is opened: the broker has not started yet, or has lost its lease."""
        self.on_open: list[Callable[[str], None]] = []
        """Called with a topic's path when one of its segments is served."""
        owners.table.on_change.append(self._on_record)
        topics.on_change.append(self._reconcile_topic)
        members.brokers.on_change.append(self._on_member)

    # Looking up.

    def get(self, path: str, segment_id: int) -> OwnedSegment:
        segment = self._served.get((path, segment_id))
        if segment is None:
            raise self.not_here(path, segment_id)
        return segment

    def not_here(self, path: str, segment_id: int) -> BraidError:
        """Return the error for a caller that asked for a segment that is not served here."""
        info = self._topics.get(path).segments.get(SegmentId(segment_id))
        if info is None:
            return SegmentNotFound(f"topic {path} has no segment {segment_id}")
        name = SegmentName.of(TopicName.parse(path), info)
        record = self._owners.find(name)
        if (unreadable := self._owners.unreadable(name)) is not None:
            return unreadable.again()
        if record is None:
            return NotServing(f"segment {segment_id} of topic {path} has no owner yet; try again in a moment")
        owner = record.owner
        if record.state is OwnershipState.RECOVERING:
            return NotServing(f"segment {segment_id} of topic {path} is not served: {move_progress(record)}")
        if owner == self._context.broker_id and record.state in (OwnershipState.ASSIGNED, OwnershipState.SERVING):
            reason = self._absent.get((path, segment_id))
            return NotServing(
                f"segment {segment_id} of topic {path} is not open yet" + (f": {reason}" if reason is not None else "")
            )
        if record.state is not OwnershipState.SEALED and not self._members.is_live(owner):
            return NotServing(f"segment {segment_id} of topic {path} waits for its owner {owner}, which is down")
        if (failure := record.failure_of(owner)) is not None:
            return NotServing(f"segment {segment_id} of topic {path}: broker {owner} cannot open it: {failure.reason}")
        if record.state is OwnershipState.SERVING:
            address = self._members.address(owner)
            return Moved(f"broker {owner} serves segment {segment_id} of topic {path}", address, record.epoch)
        return Moved(f"segment {segment_id} of topic {path} is moving; try again in a moment", "", record.epoch)

    def of_topic(self, path: str) -> list[OwnedSegment]:
        """The segments of a topic that are served here, in the order of their ids."""
        return [segment for (topic, _), segment in sorted(self._served.items()) if topic == path]

    def all(self) -> list[OwnedSegment]:
        return list(self._served.values())

    def absent(self) -> dict[Key, BraidError]:
        return dict(self._absent)

    # From records to deeds.

    async def start(self) -> None:
        """Begin to serve this broker's segments; return when it has tried once to open each of them."""
        self._stopped = False
        for key in self._owners.table.all():
            self._reconcile(*key)
        await asyncio.gather(*(tried.wait() for tried in self._tried.values()))

    async def opened(self, path: str) -> None:
        """Return when this broker has tried once to open each of its segments of a topic."""
        await asyncio.gather(*(tried.wait() for (topic, _), tried in list(self._tried.items()) if topic == path))

    def _on_record(self, key: SegmentKey) -> None:
        self._reconcile(*key)
        record = self._owners.table.get(key)
        if record is not None and record.ended_at is not None:
            self._reconcile_children(SegmentName.at(*key))

    def _reconcile_children(self, parent: SegmentName) -> None:
        """Look at the segments that a transition lets wait for the end of this one."""
        topic = self._topics.find(parent.topic.path)
        if topic is not None and topic.transition is not None and parent.id in topic.transition.parents:
            children = (topic.segments[child] for child in topic.transition.child_ids)
            for name in (SegmentName.of(parent.topic, child) for child in children if parent.id in child.parent_ids):
                self._reconcile(name.topic.path, name.descriptor)

    def _on_member(self, broker: str) -> None:
        """Tell streams that a broker has registered or is gone, and try openings again that need it."""
        for segment in self._served.values():
            if segment.replication is not None:
                segment.replication.on_member(broker)
        for key, (_, changed) in self._pauses.items():
            if isinstance(self._absent.get(key), NotEnoughReplicas):
                changed.set()

    def _reconcile_topic(self, path: str) -> None:
        for segment in self.of_topic(path):
            segment.follow_layout(self._topics.find(path))
        for descriptor in self._owners.of_topic(path):
            self._reconcile(path, descriptor)

    def _reconcile(self, path: str, descriptor: str) -> None:
        name = SegmentName.at(path, descriptor)
        key = (path, name.id)
        if self._stopped or self._closing:
            return
        record = self._owners.find(name)
        if (pause := self._pauses.get(key)) is not None and (record is None or record.epoch != pause[0]):
            pause[1].set()
        segment = self._served.get(key)
        topic = self._topics.find(path)
        unreadable = self._topics.unreadable(path)
        if unreadable is not None and segment is None and record is not None and self._is_ours(record):
            self._note_absent(key, name, unreadable)
            return
        # It may have failed while another task worked on the segment.
        failure = segment.failure if segment is not None else None
        action = owner_step.decide(
            record,
            self._context.broker_id,
            segment.epoch if segment is not None else None,
            failed=failure is not None,
            full=isinstance(failure, DiskFull),
            renewed=segment is not None and _is_renewed(segment, record, topic),
            busy=key in self._work,
            known=topic is not None and name.id in topic.segments,
            role=self._succession.role(name, topic, segment),
        )
        if segment is not None and segment.replication is not None and action is not OwnerAction.LET_GO:
            known = self._owners.known(name)
            if known is not None and known.value.is_held_by(self._context.broker_id, segment.epoch):
                segment.replication.follow(known)
        match action:
            case OwnerAction.OPEN:
                self._tried[key] = asyncio.Event()
                self._begin(key, self._keep_opening(key, name), f"open {name}")
            case OwnerAction.HAND_OVER if segment is not None:
                self._begin(key, self._move(key, segment), f"hand over {name}")
            case OwnerAction.END_LOG | OwnerAction.INHERIT if segment is not None:
                self._begin(key, self._succeed(key, segment), f"{action.value} {name}")
            case OwnerAction.REOPEN if segment is not None and failure is not None:
                self._on_failure(segment, failure)
            case OwnerAction.RENEW if segment is not None:
                self._begin(key, self._renew(key, segment), f"renew {name}")
            case OwnerAction.LET_GO if segment is not None:
                self._let_go(
                    key,
                    segment,
                    Fenced(
                        f"{name} is not ours in epoch {segment.epoch} any more; its record says: {_described(record)}"
                    ),
                )
            case OwnerAction.NOT_OURS:
                self._absent.pop(key, None)

    def _is_ours(self, record: Ownership) -> bool:
        return record.owner == self._context.broker_id and record.is_owned

    def _begin(self, key: Key, work: Coroutine[Any, Any, None], what: str) -> None:
        self._work.start(key, work, name=what).add_done_callback(lambda done: self._done(key, done))

    def _done(self, key: Key, task: asyncio.Task[None]) -> None:
        if (tried := self._tried.pop(key, None)) is not None:
            tried.set()
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            _log.error("work on segment %d of topic %s broke", key[1], key[0], exc_info=error)
        path, segment_id = key
        topic = self._topics.find(path)
        info = topic.segments.get(SegmentId(segment_id)) if topic is not None else None
        if info is not None:  # The record may have changed while the task ran.
            self._reconcile(path, SegmentName.of(TopicName.parse(path), info).descriptor)

    # Opening.

    async def _keep_opening(self, key: Key, name: SegmentName) -> None:
        """Try to open a segment until it is served, or until it is not this broker's any more."""
        pause_s = REOPEN_FIRST_S
        tried_epoch = Epoch(0)
        failing_since: float | None = None
        while True:
            async with self._removals.of(name.topic.path):  # Waits without a slot, which the removal may need.
                pass
            known, topic = self._owners.known(name), self._topics.find(name.topic.path)
            if known is None or topic is None or not self._is_ours(known.value):
                self._absent.pop(key, None)
                return None
            try:
                async with self._slots:
                    record, revision = await self._opening.take(name, known, tried_epoch)
                    tried_epoch = record.epoch
                    return await self._open(key, name, topic, record, revision)
            except BraidError as error:
                failing_since = self._context.clock.monotonic() if failing_since is None else failing_since
                self._note_absent(key, name, error)
                await self._opening.note_failure(name, tried_epoch, error, failing_since)
            self._tried[key].set()
            await self._pause(key, tried_epoch, pause_s)
            pause_s = min(2 * pause_s, REOPEN_MAX_S)

    async def _pause(self, key: Key, epoch: Epoch, pause_s: float) -> None:
        """Return after a while, or when the record is assigned anew: perhaps a loss was accepted."""
        changed = asyncio.Event()
        self._pauses[key] = epoch, changed
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await changed.wait()
        finally:
            del self._pauses[key]

    def _note_absent(self, key: Key, name: SegmentName, error: BraidError) -> None:
        if str(self._absent.get(key)) != str(error):
            _log.warning("%s cannot be opened: %s", name, error)
        self._absent[key] = error

    async def _open(self, key: Key, name: SegmentName, topic: Topic, record: Ownership, revision: Revision) -> None:
        segment = await self._opening.open(
            name,
            topic,
            record,
            revision,
            on_failure=self._on_failure,
            on_fenced=lambda cursors, error: self._on_fenced(key, cursors, error),
        )
        segment.follow_layout(self._topics.find(name.topic.path))  # It may have changed since the opening began.
        self._absent.pop(key, None)
        self._served[key] = segment
        for callback in self.on_open:
            callback(name.topic.path)

    # Handing over.

    async def _move(self, key: Key, segment: OwnedSegment) -> None:
        async with self._moves:
            try:
                await self._hand_over.prepare(segment)
                await self._finish(key, segment)
            except MoveGivenUp as error:
                _log.warning("%s is not handed over: %s", segment.name, error)
                await self._hand_over.give_up(segment, str(error))
            except Fenced as error:
                _log.warning("%s is not handed over: %s", segment.name, error)

    async def _finish(self, key: Key, segment: OwnedSegment) -> None:
        """Withdraw and hand over the segment. Whatever happens, it is not served here after this."""
        self._withdraw(key, segment)
        self._housekeeper.remove(segment.storage)
        self._leaving.add(key)
        try:
            await self._hand_over.finish(segment)
            await segment.stop_replication()
        except BaseException as error:
            reason = error if isinstance(error, BraidError) else NotServing(f"{segment.name} is being opened again")
            await self._endings.end(segment, reason, orderly=False)
            raise
        finally:
            self._leaving.discard(key)

    async def _renew(self, key: Key, segment: OwnedSegment) -> None:
        """Close the segment; then it is opened again as its topic says now."""
        _log.info("%s is opened again, because the durability of its topic has changed", segment.name)
        self._withdraw(key, segment)
        await self._endings.end(segment, NotServing(f"{segment.name} is being opened again"), orderly=True)

    def _withdraw(self, key: Key, segment: OwnedSegment) -> None:
        segment.stop_serving()
        self._served.pop(key, None)

    # Changes of the layout.

    async def _succeed(self, key: Key, segment: OwnedSegment) -> None:
        """End the log of a parent, or let a child inherit; until it is done, or is not this owner's to do."""
        await self._succession.go_on(segment, lambda: self._served.get(key) is segment)

    # Failing.

    def _on_failure(self, segment: OwnedSegment, error: BraidError) -> None:
        """Start a task that abandons the segment. The log calls this while it fails, so nothing else is done here."""
        key = (segment.name.topic.path, segment.name.id)
        if self._closing or self._served.get(key) is not segment or key in self._work:
            return
        _log.error("%s has failed and will be opened again: %s", segment.name, error)
        full = isinstance(error, DiskFull)
        if not full:
            self._withdraw(key, segment)
            self._absent[key] = error
            reason = NotServing(f"{segment.name} is being opened again")
            self._begin(key, outlived(self._endings.begin(segment, reason, orderly=False)), f"abandon {segment.name}")
        else:
            self._begin(key, self._abandon(key, segment, error), f"abandon {segment.name}")

    async def _abandon(self, key: Key, segment: OwnedSegment, error: BraidError) -> None:
        """Abandon a segment when its full disk has room again; then it is opened again. A full disk stops only writers:
        readers go on until there is room, or until the segment is to move: then it is handed over as it is."""
        if not await self._room(segment) or self._served.get(key) is not segment:
            return  # Another owner got it meanwhile, and `_let_go` has ended it; or it is to move.
        self._withdraw(key, segment)
        self._absent[key] = error
        await self._endings.end(segment, NotServing(f"{segment.name} is being opened again"), orderly=False)

    async def _room(self, segment: OwnedSegment) -> bool:
        """Return True when the disk has room again, False when the segment is to move."""
        while True:
            await asyncio.sleep(ROOM_PROBE_S)
            record = self._owners.find(segment.name)
            if record is not None and record.move is not None:
                return False
            if await has_room(self._context.disk, segment.storage.log.folder):
                return True

    def _on_fenced(self, key: Key, cursors: Cursors, error: Fenced) -> None:
        """Let the segment go: another owner has it. Acks would be lost here, so nothing more is delivered here."""
        segment = self._served.get(key)
        if segment is not None and segment.cursors is cursors and not self._closing:
            self._let_go(key, segment, error)

    def _let_go(self, key: Key, segment: OwnedSegment, error: Fenced) -> None:
        """End a segment that another owner has: nothing is confirmed or delivered here from this moment on."""
        _log.error("%s is not served here any more: %s", segment.name, error)
        self._withdraw(key, segment)
        segment.fail_channels(error)
        ending = self._endings.begin(segment, error, orderly=False)
        if key not in self._work:  # Otherwise another task, a move or a wait for room, comes to its own end.
            self._begin(key, outlived(ending), f"let go {segment.name}")

    # Ending.

    async def abandon_all(self, reason: BraidError) -> None:
        """Abandon all segments, because the broker has lost its lease. `start` begins anew."""
        self._stopped = True
        segments, self._served = list(self._served.values()), {}
        # Begun before the first wait: a stop of the broker may cancel this call.
        endings = [self._endings.begin(segment, reason, orderly=False) for segment in segments]
        await self._cancel_work()
        await all_of(map(outlived, endings))

    async def _cancel_work(self, *, but: Collection[Key] = ()) -> None:
        tasks = [task for key, task in self._work.items() if key not in but]
        for task in tasks:
            task.cancel()
        await join([*tasks, *self._endings])

    async def flush(self) -> None:
        """Return when every publish that was taken is confirmed or refused."""
        await asyncio.gather(*(segment.flush() for segment in self.all()), return_exceptions=True)

    async def hand_over_all(self, timeout_s: float) -> int:
        """Hand over as many segments as this time allows; return how many. Called before `close`, where other brokers
        can serve them."""

        async def hand_over(key: Key, segment: OwnedSegment) -> bool:
            async with self._moves:
                try:
                    await self._hand_over.ask(segment)
                    await self._finish(key, segment)
                except (MoveGivenUp, BraidError) as error:
                    _log.warning("%s stays with this broker while it is away: %s", segment.name, error)
                    return False
                return True

        async def wait_for_move(task: asyncio.Task[None]) -> bool:
            """Let a move that has drained its segment finish: if it were cancelled, the segment would wait for this
            broker's return."""
            await asyncio.wait([task])
            return not task.cancelled()

        self._stopped = True
        leaving = {key: task for key, task in self._work.items() if key in self._leaving}
        await self._cancel_work(but=leaving)
        tasks = [asyncio.create_task(hand_over(key, segment)) for key, segment in list(self._served.items())]
        tasks += [asyncio.create_task(wait_for_move(task)) for task in leaving.values()]
        if not tasks:
            return 0
        done, late = await asyncio.wait(tasks, timeout=timeout_s)
        await cancel(late)
        return sum(task.result() for task in done if not task.cancelled() and task.exception() is None)

    async def close(self) -> None:
        """Close all segments in order: store the cursors, close the logs. An error is logged, and the other segments
        are closed all the same."""
        self._closing = True
        await self._opening.stop()
        await self._cancel_work()
        segments, self._served = list(self._served.values()), {}
        stopping = ShuttingDown("the broker is stopping")
        endings = (self._endings.end(segment, stopping, orderly=True) for segment in segments)
        for outcome in await asyncio.gather(*endings, return_exceptions=True):
            if isinstance(outcome, BaseException):
                _log.error("a segment did not close in order: %s", outcome)

    async def ended(self, name: SegmentName) -> None:
        """Return when this broker has let go of a segment that is another broker's. `NotServing` if it still has it."""
        await self._endings.ended(name)
        if (name.topic.path, name.id) in self._served:
            raise NotServing(f"broker {self._context.broker_id} has not let go of {name} yet")

    async def drop(self, name: SegmentName) -> None:
        """End a segment that its topic no longer has, and remove what this broker's own disk holds of it. Can be
        repeated after a crash anywhere."""
        key = (name.topic.path, name.id)
        if (task := self._work.get(key)) is not None:
            await cancel([task])
        self._absent.pop(key, None)
        if (segment := self._served.pop(key, None)) is not None:
            await self._endings.end(segment, SegmentNotFound(f"{name} is gone"), orderly=False)
        await self._endings.ended(name)
        await remove_segment(self._context, name)

    async def drop_topic(self, name: TopicName) -> None:
        """End the segments of a topic that is being deleted, and remove what this broker's own disk holds of the topic.
        Can be repeated after a crash anywhere."""
        async with self._removals.of(name.path):
            await self._drop_topic(name)

    async def _drop_topic(self, name: TopicName) -> None:
        gone = TopicNotFound(f"topic {name.path} was deleted")

        async def end(key: Key) -> None:
            async with self._slots:
                self._absent.pop(key, None)
                if (segment := self._served.pop(key, None)) is not None:
                    await self._endings.end(segment, gone, orderly=False)

        working = {key: task for key, task in self._work.items() if key[0] == name.path}
        keys = working.keys() | {key for key in self._served if key[0] == name.path}
        await cancel(working.values())
        await all_of(end(key) for key in sorted(keys))
        await self._copies.drop_topic(name.path)
        await self._endings.ended_of_topic(name)
        await remove_topic(self._context, name)
        self._metrics.topics.pop(name.path, None)


def _is_renewed(segment: OwnedSegment, record: Ownership | None, topic: Topic | None) -> bool:
    """Tell whether the log was opened with another durability than the segment is to have now."""
    if record is None or topic is None:
        return False
    return segment.durability is not owner_step.durability(record, topic.policies)


def _described(record: Ownership | None) -> str:
    return "none" if record is None else f"{record.owner} in epoch {record.epoch}, {record.state.value}"
