"""A subscription that nobody uses holds retention back visibly, and only as long as its topic lets it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.admin.topic_metrics import read_segment, read_topic, topic_families
from braid.broker.auth import ANONYMOUS
from braid.broker.broker import Broker
from braid.model.ids import Offset
from braid.testing.batches import opaque_batch
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, Machine
from tests.kits.waiting import until

HOUR_S = 3_600
PAUSE_S = 900
"""Between two records. A file is closed after 600 s, so each record has a file of its own."""
WAITS = {"retentionWaitsForSubscriptionsMs": 5 * PAUSE_S * 1000}


async def publish(broker: Broker, body: bytes = b"x" * 1_000) -> None:
    log = broker.segments.get(ORDERS.path, 0).storage.log
    await log.confirmed.reached(log.append(opaque_batch(body)).next_offset)


async def fill(broker: Broker, records: int) -> None:
    for _ in range(records):
        await publish(broker)
        await asyncio.sleep(PAUSE_S)


async def call(broker: Broker, name: str, **arguments: Any) -> Any:
    return await broker.front_door.calls.call(name, {"topic": "orders", **arguments}, ANONYMOUS)


async def billing(broker: Broker) -> dict[str, Any]:
    found: dict[str, Any] = await call(broker, "get_subscription", subscription="billing")
    return found


async def opened(machine: Machine, policies: dict[str, Any]) -> Broker:
    broker = await machine.start()
    await call(broker, "create_topic", policies={"retentionBytes": 2_500, **policies})
    await call(broker, "create_subscription", subscription="billing", start="earliest")
    return broker


def held_by_metrics(broker: Broker) -> list[float]:
    row = read_topic(broker, ORDERS.path, [read_segment(each, 0) for each in broker.segments.of_topic(ORDERS.path)])
    families = {family.name: family for family in topic_families([row])}
    return [sample.value for sample in families["braid_subscription_held_bytes"].samples]


async def test_what_a_subscription_holds_back_is_shown(simulation: Simulation) -> None:
    broker = await opened(Machine(simulation), {})
    await fill(broker, 4)
    first = await billing(broker)
    assert 1_000 < first["heldBytes"] < 4_000
    assert held_by_metrics(broker) == [first["heldBytes"]]
    await fill(broker, 10)
    later = await billing(broker)
    assert later["heldBytes"] > 10_000, "it waits for ever"
    assert later["movedAt"] == first["movedAt"]
    segment = broker.segments.get(ORDERS.path, 0)
    assert segment.earliest == 0
    segment.cursors.advance("billing", Offset(14))
    await until(lambda: segment.earliest > 9, 120)
    consumed = await billing(broker)
    assert (consumed["heldBytes"], held_by_metrics(broker)) == (0, [])
    assert consumed["movedAt"] > later["movedAt"]
    await broker.close()


async def test_retention_stops_waiting_for_a_subscription_that_does_not_move(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    broker = await opened(Machine(simulation), WAITS)
    await fill(broker, 4)
    segment = broker.segments.get(ORDERS.path, 0)
    assert segment.earliest == 0
    await fill(broker, 4)
    assert segment.earliest > 2
    assert (await billing(broker))["heldBytes"] == 0
    warnings = [each for each in caplog.messages if "does not wait for subscription billing any more" in each]
    assert len(warnings) == 1
    await broker.close()


async def test_retention_waits_for_a_subscription_that_moves_however_slowly(simulation: Simulation) -> None:
    machine = Machine(simulation)
    broker = await opened(machine, WAITS)
    await fill(broker, 4)
    for consumed in range(1, 4):
        broker.segments.get(ORDERS.path, 0).cursors.advance("billing", Offset(consumed))
        await fill(broker, 2)
        await broker.close()
        broker = await machine.start()
        await fill(broker, 2)
    assert broker.segments.get(ORDERS.path, 0).earliest <= 3
    await broker.close()


async def test_a_burst_after_a_long_silence_waits_for_a_subscription_that_had_consumed_everything(
    simulation: Simulation,
) -> None:
    """A broker stores only once an hour that a subscription has consumed everything, so this waits for hours."""
    machine = Machine(simulation)
    broker = await opened(machine, {"retentionWaitsForSubscriptionsMs": 5 * HOUR_S * 1000})
    await publish(broker)
    broker.segments.get(ORDERS.path, 0).cursors.advance("billing", Offset(1))
    await asyncio.sleep(6 * HOUR_S)
    await broker.close()
    broker = await machine.start()
    await fill(broker, 4)
    assert broker.segments.get(ORDERS.path, 0).earliest <= 1
    await broker.close()
