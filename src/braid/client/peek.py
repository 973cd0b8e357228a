"""Peek: look at the messages of a queue that are not settled, and take nothing away from its consumers.

The owner of each segment says which messages these are. They are read from the topic, as any record is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Final

from braid.model.errors import InvalidArgument
from braid.model.message import Message
from braid.model.names import TopicName
from braid.model.subscription import MAX_PEEK

if TYPE_CHECKING:
    from braid.client.client import Client

READ_ON: Final = 1_000
"""So many settled messages between two others are read with them. Beyond a longer gap, reading begins anew."""


async def peek(client: Client, topic: str, subscription: str, count: int) -> list[Message]:
    """Return the first messages of a queue that are not settled; `Admin.peek` says how."""
    if not 1 <= count <= MAX_PEEK:
        raise InvalidArgument(f"count is {count}; peek at 1 to {MAX_PEEK:,} messages")
    path = TopicName.parse(topic).path
    found: list[Message] = []
    for segment, ranges in sorted((await client.admin.unsettled(path, subscription, count)).items()):
        for wanted in close_together(first_of(ranges, count - len(found))):
            found += await _read(client, path, segment, wanted)
    return found


def first_of(ranges: Iterable[tuple[int, int]], count: int) -> Iterator[range]:
    """Yield the first `count` offsets of these ranges, as ranges."""
    for start, end in ranges:
        if count <= 0:
            return
        yield range(start, min(end, start + count))
        count -= end - start


def close_together(ranges: Iterable[range]) -> Iterator[list[range]]:
    """Group ranges, in order, that lie so close together that one reader reads them."""
    group: list[range] = []
    for each in ranges:
        if group and each.start - group[-1].stop > READ_ON:
            yield group
            group = []
        group.append(each)
    if group:
        yield group


async def _read(client: Client, topic: str, segment: int, wanted: list[range]) -> list[Message]:
    found: list[Message] = []
    async with client.checkpoint_consumer(topic, start={segment: wanted[0].start}) as consumer:
        offset = wanted[0].start
        while offset < wanted[-1].stop:
            batch = await consumer.receive_batch(client.timeout_s)
            if batch is None or batch.segment != segment:
                break  # Retention has deleted the rest meanwhile.
            found += [each for each in batch.iter_messages() if any(each.offset in part for part in wanted)]
            offset = batch.next_offset
    return found
