"""A channel at the live tail: its consumer hears of a record in the turn in which the watermark rose."""

from __future__ import annotations

import asyncio

from braid.broker.metrics import TopicMetrics
from braid.broker.segments.delivery import DeliveryChannel, ReadAhead
from braid.model.ids import Offset
from braid.wire.operations import Kind
from tests.kits.storage import World, fill, make_batch
from tests.kits.wire import Recorder, RecordingTransport


async def test_a_delivery_at_the_tail_is_written_before_the_next_follower_hears_of_the_rise(world: World) -> None:
    segment = await world.a.open()
    await fill(segment, 1)
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.connection_made(transport)
    channel = DeliveryChannel(
        1,
        handler.connection,
        segment,
        Offset(1),
        1 << 20,
        subscription=None,
        read_bytes=1 << 20,
        read_ahead=ReadAhead(1 << 20),
        metrics=TopicMetrics(),
        on_end=lambda _: None,
    )
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
