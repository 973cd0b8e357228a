"""The producer table as an object of its own, for a log whose newest chunk is gone.

A log that continues others has no chunk when it takes over their tables: its frontier holds them, or names such an
object from the start if they are large (`SegmentStorage.inherit`). In any other log, the footer of the newest chunk
carries the table (log/producers.py), and the next owner reads it there. Retention may delete that chunk, and the next
owner must still recognise what producers send again (I10). So an owner that is about to delete the newest chunk first
stores the chunk's footer without its batches, and names the object in the transaction that removes the chunk
(`Frontier.producers`). The next chunk carries the table again, and the object is then left to the sweep. A crash before
the transaction leaves an object that no catalog refers to, which the sweep finds too.
"""

from __future__ import annotations

import re
from typing import Final

from braid.model.ids import Epoch, Offset
from braid.storage.chunk import Footer, Index, encode_footer
from braid.storage.history.catalog import ProducerObject
from braid.storage.history.object_names import id_suffix
from braid.storage.objects.store import Objects, create_once

SUFFIX: Final = ".producers"
_NAME: Final = re.compile(r"(\d{20})-(\d{10})(?:-[0-9a-f]{14})?\.producers")


def producers_name(next_offset: int, epoch: int, topic_id: int = 0) -> str:
    return f"{next_offset:020d}-{epoch:010d}{id_suffix(topic_id)}{SUFFIX}"


def is_outdated(name: str, next_offset: Offset, epoch: Epoch) -> bool:
    """Tell whether an object of this name is a producer table that the owner of this epoch can never name: an earlier
    owner made it, or chunks have come further since."""
    match = _NAME.fullmatch(name)
    return match is not None and (int(match[2]) < epoch or int(match[1]) < next_offset)


async def store_producers(
    objects: Objects, folder: str, footer: Footer, epoch: Epoch, topic_id: int = 0
) -> ProducerObject | None:
    """Store a footer without its batches; None if it knows no producer."""
    if not len(footer.producers):
        return None
    data = encode_footer(
        base_offset=footer.next_offset,
        next_offset=footer.next_offset,
        batch_bytes=0,
        first_epoch=footer.last_epoch,
        last_epoch=footer.last_epoch,
        sealed=footer.sealed,
        index=Index(),
        producers=footer.producers,
    )
    name = producers_name(footer.next_offset, epoch, topic_id)
    await create_once(objects, f"{folder}/{name}", data)
    return ProducerObject(name, len(data), footer.next_offset)
