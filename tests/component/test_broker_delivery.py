"""A channel at the live tail: its consumer hears of a record in the turn in which the watermark rose, not before."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.metrics import TopicMetrics
from braid.broker.segments.delivery import DeliveryChannel, ReadAhead
from braid.broker.unsent_bytes import UnsentBytes
from braid.model.errors import Fenced
from braid.model.ids import Offset
from braid.storage.segment import SegmentStorage
from braid.wire.connection import Connection
from braid.wire.operations import Kind
from tests.kits.storage import World, fill, make_batch
from tests.kits.wire import Recorder, RecordingTransport


def channel_of(segment: SegmentStorage, connection: Connection, offset: int) -> DeliveryChannel:
    return DeliveryChannel(
        1,
        connection,
        segment,
        Offset(offset),
        1 << 20,
        subscription=None,
        read_bytes=1 << 20,
        read_ahead=ReadAhead(1 << 20),
        unsent_bytes=UnsentBytes(1 << 20),
        metrics=TopicMetrics(),
        on_end=lambda _: None,
    )


async def test_a_delivery_at_the_tail_is_written_before_the_next_follower_hears_of_the_rise(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 1)
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.connection_made(transport)
    channel = channel_of(segment, handler.connection, 1)
    channel.pump()
    written_by_then: list[int] = []
    confirmed = segment.log.confirmed
    confirmed.follow(lambda: written_by_then.append(len(transport.written)))
    confirmed.follow(channel.deliver, first=True)
    await segment.log.confirm(segment.append(make_batch()))
    assert written_by_then == [1]
    assert transport.data[12] == Kind.DELIVER
    await asyncio.sleep(0)
    assert len(transport.written) == 1
    channel.drop()
    await segment.close()


async def test_a_channel_sends_nothing_that_was_written_and_never_confirmed(world: World) -> None:
    """I7: the disk takes a batch, and the lease is over by then."""
    held = True
    segment = await world.a.open(may_confirm=lambda: held)
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.connection_made(transport)
    segment.log.confirmed.follow(channel_of(segment, handler.connection, 0).deliver, first=True)
    appended = segment.append(make_batch())
    held = False
    with pytest.raises(Fenced):
        await segment.log.confirm(appended)
    assert (segment.log.written.value, segment.log.confirmed.value) == (1, 0)
    assert [data[12] for data in transport.written] == [Kind.CLOSED]
    await segment.abandon()
