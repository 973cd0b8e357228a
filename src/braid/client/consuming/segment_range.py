"""Reads one range of a segment's offsets from its owner, also while the segment moves.

This is for readers that know exactly what they want, such as the tasks of a Spark job. They belong to no subscription
and leave nothing on the brokers. After a move, a redirect, a lost connection or a restart of the owner, reading
continues after the last delivery. It fails only when nothing arrives for as long as the client's timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from braid.client.consuming.channel import ClientChannel, checked_window
from braid.client.consuming.consumer import may_pass
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.routing import OwnerSearch
from braid.model.errors import BraidError, OffsetOutOfRange, TimedOut
from braid.model.log.epochs import UNKNOWN_EPOCH

if TYPE_CHECKING:
    from braid.client.client import Client


async def read_segment_range(
    client: Client, topic: str, topic_id: int, segment: int, first: int, until: int, *, window_bytes: int | None = None
) -> AsyncGenerator[ReceivedBatch, None]:
    """Yield the deliveries from offset `first` on, in order. The last delivery may reach beyond `until`, because
    batches travel whole.

    Raises `OffsetOutOfRange` if the next offset was deleted, or if the segment ends before it, and `PositionDiverged`
    if the segment has lost records that were delivered. A caller that stops early closes the iterator (`aclose`).
    """
    loop = asyncio.get_running_loop()
    owner = OwnerSearch(client.routing, topic, segment, client.backoff())
    offset, epoch = first, UNKNOWN_EPOCH
    deadline = loop.time() + client.timeout_s
    failure: BraidError | None = None
    while offset < until:
        channel: ClientChannel | None = None
        try:
            if failure is not None:
                await owner.after(failure)
            arrived = asyncio.Event()
            opening = ClientChannel(await owner.link(), topic, segment, checked_window(window_bytes), arrived.set)
            left_s = max(0.0, deadline - loop.time())
            await opening.open(topic_id, offset=offset, after_epoch=epoch, timeout_s=left_s)
            channel = opening
            channel.begin(offset)
            while offset < until:
                batch = await _next(channel, arrived, deadline)
                offset, epoch = batch.next_offset, batch.last_epoch
                yield batch
                owner.worked()
                failure, deadline = None, loop.time() + client.timeout_s
        except OffsetOutOfRange as error:
            if channel is None or channel.ended or loop.time() >= deadline:
                raise
            failure = error  # Opening again shows which offsets exist now.
        except BraidError as error:
            if not may_pass(error) or loop.time() >= deadline:
                raise
            failure = error
        except TimeoutError:  # After BraidError, because `TimedOut` is both.
            raise TimedOut(
                f"offset {offset} of segment {segment} of {topic} did not arrive within {client.timeout_s:g} s"
            ) from failure
        finally:
            if channel is not None and channel.working:
                channel.abandon()


async def _next(channel: ClientChannel, arrived: asyncio.Event, deadline: float) -> ReceivedBatch:
    while (batch := channel.take()) is None:
        if channel.over is not None:
            raise channel.over
        if channel.ended:
            raise OffsetOutOfRange(
                f"segment {channel.segment} of {channel.topic} has ended at offset {channel.end}", 0, channel.end
            )
        arrived.clear()
        async with asyncio.timeout_at(deadline):
            await arrived.wait()
    return batch
