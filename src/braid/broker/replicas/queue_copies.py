"""What a follower keeps of the queues of other brokers' segments: a journal for each, of its own.

The owner sends events as they happen, and a checkpoint first. A journal holds no event of a message that this broker's
copy of the log does not hold (I8): the event waits for the message. Events of an owner that is deposed are refused, as
its batches are. So is what comes late: an owner that got no answer begins another *session*, with a checkpoint. A
checkpoint of an earlier session would make the journal forget what this broker has confirmed since (I9).

Journals are opened with the copy of the segment, and closed with it. A broker that becomes the owner opens them again.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from braid.broker.peers.calls import Arguments, PeerCalls
from braid.broker.replicas.copies import ReplicaCopies
from braid.model.errors import Fenced, NotServing, OutOfSequence, RecordUnreadable
from braid.model.ids import Epoch, Offset
from braid.model.names import SegmentName, check_name
from braid.model.queue.events import decode_events, decode_snapshot, encode
from braid.ports.disk import Buffer
from braid.storage.queue_journal import QueueJournal, folder_of, read_image, remove_others
from braid.storage.replica import ReplicaStorage

QUEUE_BEGIN: Final = "queue_begin"
QUEUE_APPEND: Final = "queue_append"
QUEUE_READ: Final = "queue_read"
QUEUE_KEEP: Final = "queue_keep"
MESSAGES_S: Final = 3.0
"""How long events wait for the messages that they tell of."""


class QueueCopies:
    def __init__(self, copies: ReplicaCopies) -> None:
        self._copies = copies
        self._journals: dict[tuple[SegmentName, str], QueueJournal] = {}
        self._sessions: dict[tuple[SegmentName, str], tuple[Epoch, int]] = {}
        """Of these: the owner's epoch and the number of the session that has begun last."""
        copies.on_release = self._release

    def answer(self, calls: PeerCalls) -> None:
        """Answer owners that send events, and brokers that are to become owners."""
        calls.register_with_payload(QUEUE_BEGIN, self.begin)
        calls.register_with_payload(QUEUE_APPEND, self.append)
        calls.register(QUEUE_READ, self.read)
        calls.register(QUEUE_KEEP, self.keep)

    async def begin(self, arguments: Arguments, payload: Buffer) -> None:
        """Replace what is known of a queue by the owner's checkpoint."""
        name, subscription, epoch = _about(arguments)
        snapshot = decode_snapshot(memoryview(payload))
        storage = await self._copies.opened(name, arguments["topic_id"], epoch)
        await self._hold(storage, snapshot.end, name)
        # Held: a broker that is about to own the segment must be the only one that writes into the folder.
        async with self._copies.held(name, arguments["topic_id"], epoch) as storage:
            journal = await self._journal(storage, name, subscription)
            self._copies.check_followed(name, epoch)
            session = _session(arguments, epoch)
            if session < self._sessions.get((name, subscription), session):
                raise OutOfSequence(f"a later session of the queue {subscription} of {name} has begun here")
            self._sessions[name, subscription] = session
            number = journal.begin_anew(snapshot)
        await journal.durable.reached(number)

    async def append(self, arguments: Arguments, payload: Buffer) -> None:
        """Take events; return when this broker's disk has them."""
        name, subscription, epoch = _about(arguments)
        events = decode_events(memoryview(payload))
        storage = await self._copies.opened(name, arguments["topic_id"], epoch)
        await self._hold(storage, events.end, name)
        journal = self._journals.get((name, subscription))
        if journal is None or self._sessions.get((name, subscription)) != _session(arguments, epoch):
            raise OutOfSequence(f"the queue {subscription} of {name} is not open here; begin anew")
        _check_epoch(storage, epoch, name)  # Nothing is awaited between this and the journal.
        await journal.durable.reached(journal.append(events))

    async def read(self, arguments: Arguments) -> dict[str, Any]:
        """Promise the epoch, and return what this broker's disk knows of these queues."""
        name, epoch = SegmentName.parse(arguments["segment"]), Epoch(arguments["epoch"])
        images = {}
        async with self._copies.held(name, arguments["topic_id"], epoch) as storage:
            await storage.promise(epoch)
            await self._release(name)  # What was taken before the promise is on the disk now.
            for subscription in arguments["subscriptions"]:
                folder = folder_of(storage.folder, check_name("subscription", subscription))
                image = await read_image(storage.disk, folder)
                if image is not None:
                    images[subscription] = encode(image.snapshot())
            return {"member": storage.member, "images": images}

    async def keep(self, arguments: Arguments) -> None:
        """Remove the journals of all subscriptions but those that the owner names: the others were deleted."""
        name, epoch = SegmentName.parse(arguments["segment"]), Epoch(arguments["epoch"])
        subscriptions = {check_name("subscription", each) for each in arguments["subscriptions"]}
        async with self._copies.held(name, arguments["topic_id"], epoch) as storage:
            _check_epoch(storage, epoch, name)
            session = _session(arguments, epoch)
            if any(session < begun for (segment, _), begun in self._sessions.items() if segment == name):
                raise OutOfSequence(f"a later session of the queues of {name} has begun here")
            for key in [each for each in self._journals if each[0] == name and each[1] not in subscriptions]:
                self._sessions.pop(key, None)
                await self._journals.pop(key).abandon()
            await remove_others(storage.disk, storage.folder, subscriptions)

    async def _journal(self, storage: ReplicaStorage, name: SegmentName, subscription: str) -> QueueJournal:
        """Return the journal, for a checkpoint of the owner. The caller holds the copy. The checkpoint has everything
        that is confirmed, so a journal that cannot be read is replaced by it."""
        journal = self._journals.get((name, subscription))
        if journal is None or journal.failure is not None:
            if journal is not None:
                await journal.abandon()
            folder = folder_of(storage.folder, subscription)
            journal = await QueueJournal.open(storage.disk, folder, may_be_damaged=True)
            self._journals[name, subscription] = journal
        return journal

    async def _hold(self, storage: ReplicaStorage, end: int, name: SegmentName) -> None:
        """Return when the copy holds all messages below `end` (I8)."""
        try:
            async with asyncio.timeout(MESSAGES_S):
                await storage.reached(Offset(end))
        except TimeoutError as error:
            raise NotServing(f"the copy of {name} does not hold the messages of these events yet") from error

    async def _release(self, name: SegmentName) -> None:
        """Close the journals of a segment: its copy is closed, or they are read from the disk."""
        for key in [each for each in self._journals if each[0] == name]:
            self._sessions.pop(key, None)
            await self._journals.pop(key).close()


def _check_epoch(storage: ReplicaStorage, epoch: Epoch, name: SegmentName) -> None:
    if epoch < storage.promised:
        raise Fenced(f"{name}: epoch {storage.promised} was promised, and epoch {epoch} is over")


def _about(arguments: Arguments) -> tuple[SegmentName, str, Epoch]:
    subscription = arguments["subscription"]
    if not isinstance(subscription, str):
        raise RecordUnreadable("a queue has no name")
    name = SegmentName.parse(arguments["segment"])
    return name, check_name("subscription", subscription), Epoch(arguments["epoch"])


def _session(arguments: Arguments, epoch: Epoch) -> tuple[Epoch, int]:
    """Return the session of a request. Owners of an earlier version do not number theirs."""
    return epoch, arguments.get("session", 0)
