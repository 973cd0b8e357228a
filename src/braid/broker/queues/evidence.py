"""What a replica that was elected must know of queues before it serves: everything that was ever confirmed.

A confirmed event is on the disks of w replicas, as a confirmed record is. So it is in the answers of n - w + 1 members.
The elected replica holds the whole message log, and may lack events: the vote looks at the message log alone. So it
asks, joins the answers, and stores the result on its own disk. Only then does its record say that it serves. After a
crash in between the vote is still in the record, and everything is asked again.

An answer is a promise, too: that replica takes no event of an earlier owner any more.

A journal that is damaged counts as missing, whether or not there was a vote: others must say what was settled. Without
replicas nobody can, and the segment is not opened until an operator decides.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from braid.metadata import paths
from braid.metadata.store import Store
from braid.model.errors import BraidError, LogDamaged, NotEnoughReplicas
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.queue.events import QueueImage, decode_snapshot, joined, unpack_state
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.ports.disk import Disk
from braid.ports.tasks import all_of
from braid.storage.history.catalog import Frontier
from braid.storage.log import promise as promises
from braid.storage.queue_journal import FOLDER, QueueJournal, folder_of, read_image, remove_others

Ask = Callable[[str, list[str]], Awaitable[Mapping[str, Any]]]
"""Asks a broker what it knows of these subscriptions (`QueueCopies.read`)."""

_log: Final = logging.getLogger(__name__)


async def gather(
    store: Store, disk: Disk, folder: str, name: SegmentName, record: Ownership, here: str, ask: Ask
) -> None:
    """Bring everything that is known of the segment's queues to this broker's disk, if a vote has found it, or if a
    journal here cannot be read. If too little is known, this fails the opening: the record can still say why."""
    kept = await disk.list_folders(f"{folder}/{FOLDER}")
    lost = await _lost_events(store, disk, folder, name, record)
    if record.elected is None and not kept and not lost:
        return
    cursors = await _queue_cursors(store, name)
    own, damage = await _own_images(disk, folder, [each for each in cursors if each in kept])
    if record.accept_loss:
        # The cursors have new placements, and the log is about to be cut: no journal may tell of what is lost (I8).
        of_now = {each for each in cursors if (image := own.get(each)) and image.placement == cursors[each].placement}
        await remove_others(disk, folder, of_now | damage.keys())
    doubtful = cursors if record.elected is not None or lost else damage
    wanted = [each for each in doubtful if not _is_whole(cursors[each], record.epoch - 1)]
    if wanted and not record.accept_loss and await _was_lost(store, disk, folder, name, record):
        return
    answers = await all_of(_answer(ask, broker, wanted) for broker in record.replicas if broker != here and wanted)
    if wanted and not record.accept_loss:
        if damage and not record.replicas:
            raise _beyond_repair(name, next(iter(damage.values())))
        is_member = not damage and (await promises.read(disk, folder)).member
        _check_members(name, record, int(is_member) + sum(bool(each["member"]) for each in answers if each))
    for subscription in sorted({*wanted, *damage}):
        cursor = cursors[subscription]
        images = [
            QueueImage.of(decode_snapshot(each["images"][subscription]))
            for each in answers
            if each and subscription in each["images"]
        ]
        stored = QueueImage.of(unpack_state(cursor.state)) if cursor.state else None
        known = joined(cursor.placement, cursor.offset, [own.get(subscription), stored, *images])
        await _store(disk, folder_of(folder, subscription), known)


async def _lost_events(store: Store, disk: Disk, folder: str, name: SegmentName, record: Ownership) -> bool:
    """Tell whether an owner that takes its segment again has lost its disk, and opens the segment all the same: chunks
    have the whole of a log that has ended. They do not have acks, so the followers must say what was settled (I9)."""
    if record.elected is not None or not record.replicas or record.clean or record.accept_loss:
        return False
    if (await promises.read(disk, folder)).member:
        return False
    entry = await store.get(paths.current_chunk(name.topic.path, name.descriptor))
    return entry is not None and decode(Frontier, entry.value).complete


async def _was_lost(store: Store, disk: Disk, folder: str, name: SegmentName, record: Ownership) -> bool:
    """Tell whether this broker has lost its disk since the vote, and chunks do not have the log that the vote found.
    Then the segment is about to be refused here (recovery_start.py), and no journal may tell of messages that this disk
    does not hold (I8)."""
    if record.elected is None or (await promises.read(disk, folder)).member:
        return False
    entry = await store.get(paths.current_chunk(name.topic.path, name.descriptor))
    return entry is None or decode(Frontier, entry.value).next_offset < record.elected.end


async def _own_images(
    disk: Disk, folder: str, subscriptions: Sequence[str]
) -> tuple[dict[str, QueueImage | None], dict[str, LogDamaged]]:
    """Return what this disk knows of these queues, and which journals cannot be read: these count as missing."""
    found: dict[str, QueueImage | None] = {}
    damage: dict[str, LogDamaged] = {}
    for subscription in subscriptions:
        try:
            found[subscription] = await read_image(disk, folder_of(folder, subscription))
        except LogDamaged as error:
            _log.error("a journal cannot be read, so others must say what was settled: %s", error)
            damage[subscription] = error
    return found, damage


def _check_members(name: SegmentName, record: Ownership, members: int) -> None:
    if members < record.keepers_needed:
        raise NotEnoughReplicas(
            f"{name} has queues, and {record.keepers_needed} of its replicas {', '.join(record.replicas)} must say "
            f"what was settled; {members} can"
        )


def _beyond_repair(name: SegmentName, error: LogDamaged) -> LogDamaged:
    message = (
        f"{error}, and no other broker knows which messages of {name} are settled; put the file back from a backup, or "
        f"recover the segment and accept the loss: its queues then go back to their cursors"
    )
    return LogDamaged(message, 0, 0)


async def _queue_cursors(store: Store, name: SegmentName) -> dict[str, Cursor]:
    listing = await store.list(paths.segment_prefix(name.topic.path, name.descriptor))
    found = {}
    for entry in listing.entries:
        subscription = paths.subscription_of_cursor(entry.key)
        if subscription is not None:
            cursor = decode(Cursor, entry.value, f"the Cursor at {entry.key}")
            if cursor.queue:
                found[subscription] = cursor
    return found


def _is_whole(cursor: Cursor, last: int) -> bool:
    """Tell whether the state beside the cursor is that of the `last` epoch: its owner has handed the segment over. The
    log does not tell who was the last owner: nobody writes into a log that has ended."""
    return bool(cursor.state) and unpack_state(cursor.state).epoch >= last


async def _answer(ask: Ask, broker: str, subscriptions: list[str]) -> Mapping[str, Any] | None:
    try:
        return await ask(broker, subscriptions)
    except BraidError as error:
        _log.info("broker %s does not say what was settled: %s", broker, error)
        return None


async def _store(disk: Disk, folder: str, image: QueueImage) -> None:
    journal = await QueueJournal.open(disk, folder, may_be_damaged=True)
    try:
        await journal.durable.reached(journal.begin_anew(image.snapshot()))
    finally:
        await journal.abandon()
