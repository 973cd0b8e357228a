"""What clients and operators hear when a segment's log, its ownership, or the broker itself ends under requests."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.client.producing.retry_decision import NOT_STORED
from braid.model.errors import BraidError, Fenced, NotServing, ShuttingDown
from braid.testing.batches import opaque_batch
from braid.testing.sim.loop import Simulation
from braid.wire.link import connect_link
from braid.wire.operations import Join, Joined, Kind, encode
from tests.kits.control import ORDERS, Machine, own


class Waiting:
    """A connection that published and waits."""

    def __init__(self) -> None:
        self.refused: list[BraidError] = []
        self.told = asyncio.Event()

    def confirm(self, frame: bytes, size: int) -> None:
        raise AssertionError("nothing is confirmed by a log that was abandoned")

    def refuse(self, request: int, size: int, error: BraidError) -> None:
        self.refused.append(error)
        self.told.set()

    def flush(self) -> None:
        pass


async def with_orders(machine: Machine) -> Broker:
    broker = await machine.start()
    await broker.front_door.calls.call("create_topic", {"topic": "orders"}, ANONYMOUS)
    return broker


async def test_a_batch_that_a_log_had_taken_is_never_said_to_be_not_stored(simulation: Simulation) -> None:
    """I10: a producer may send again under another number what it is told was not stored. This one was."""
    machine = Machine(simulation)
    broker = await with_orders(machine)
    segment, publisher = broker.segments.get(ORDERS.path, 0), Waiting()
    segment.publishes.take(memoryview(opaque_batch(bytes(64), 3)), publisher, 1, 0.0)
    segment.publishes.commit()
    await asyncio.sleep(0)  # Its write is on the way to the disk.
    await broker.segments.abandon_all(NotServing("the lease is lost"))
    await publisher.told.wait()
    (error,) = publisher.refused
    assert error.retriable
    assert not isinstance(error, NOT_STORED)
    await broker.segments.start()
    assert broker.segments.get(ORDERS.path, 0).end == 3
    await broker.close()


async def test_a_call_that_finds_its_segment_owned_by_another_broker_may_be_tried_again(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await with_orders(machine)
    arguments = {"topic": "orders", "subscription": "billing"}
    await broker.front_door.calls.call("create_subscription", arguments, ANONYMOUS)
    await own(machine.store, broker.segments.get(ORDERS.path, 0).name, owner="broker-2", epoch=9)
    with pytest.raises(NotServing):
        await broker.front_door.calls.call("seek_subscription", {**arguments, "to": "earliest"}, ANONYMOUS)
    await broker.close()


async def test_a_request_that_finds_its_segment_owned_by_another_broker_may_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, simulation: Simulation
) -> None:
    """That its log is fenced is the broker's affair; a client that heard of it would give up."""
    machine = Machine(simulation)
    broker = await with_orders(machine)
    link = await connect_link(
        machine.host, broker.address, client="test", token="", timeout_s=10, on_topology=lambda _: None
    )

    async def fenced(*_: object, **__: object) -> None:
        raise Fenced("segment 0 has another owner now")

    monkeypatch.setattr(broker.front_door.subscriptions, "ensure", fenced)
    with pytest.raises(NotServing):
        await link.ask(Kind.JOIN, encode(Join(ORDERS.path, "billing", "worker-1")), Joined, 10)
    assert broker.metrics.errors["join", NotServing.code] == 1
    link.close(BraidError("done"))
    await link.lost
    await broker.close()


async def test_a_broker_that_breaks_says_that_it_has_to_be_started_again(simulation: Simulation) -> None:
    broker = await Machine(simulation).start()

    def broken(path: str) -> None:
        raise LookupError(path)

    broker.topics.on_change.append(broken)
    await broker.front_door.calls.call("create_topic", {"topic": "orders"}, ANONYMOUS)
    with pytest.raises(ShuttingDown):
        await broker.front_door.calls.call("create_topic", {"topic": "later"}, ANONYMOUS)
    assert isinstance(broker.failed.result(), LookupError)
    assert not broker.ready
    with pytest.raises(LookupError):
        await broker.close()
