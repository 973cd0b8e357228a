"""A broker registers under its id, also soon after a broker of the same id was killed."""

from __future__ import annotations

import pytest

from braid.broker.config import BrokerConfig
from braid.broker.parts.registration import LEASES_OF_PREDECESSOR, MARGIN_S, BrokerRegistration
from braid.metadata import paths
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Put
from braid.model.errors import InvalidConfig
from braid.testing.sim.loop import Simulation
from tests.kits.control import faults

TTL_S = 10.0
CONFIG = BrokerConfig(id="a", lease_ttl_s=TTL_S)


def registration(simulation: Simulation, store: MemoryStore) -> BrokerRegistration:
    return BrokerRegistration(CONFIG, store, simulation.clock)


async def test_a_broker_waits_for_the_lease_of_its_predecessor(simulation: Simulation) -> None:
    """The store lets it last longer than it was asked for."""
    store = MemoryStore(simulation.clock)
    killed = await store.client().grant_lease(1.9 * TTL_S)
    await store.txn([], [Put(paths.broker("a"), b"{}", killed.id)])
    fresh = registration(simulation, store)
    await fresh.register()
    assert simulation.loop.time() >= 1.9 * TTL_S
    entry = await store.get(paths.broker("a"))
    assert entry is not None
    assert entry.lease == fresh.lease.id
    await fresh.unregister()


async def test_a_broker_whose_id_is_in_use_gives_up(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    lease = await store.client().grant_lease(TTL_S)
    await store.txn([], [Put(paths.broker("a"), b"{}", lease.id)])
    running = LeaseKeeper(lease, simulation.clock)
    running.start()
    with pytest.raises(InvalidConfig, match="a broker with the id a is running"):
        await registration(simulation, store).register()
    assert simulation.loop.time() == pytest.approx(LEASES_OF_PREDECESSOR * TTL_S + MARGIN_S, abs=0.1)
    await running.stop()


async def test_a_registration_whose_answer_was_lost_stands(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    fresh = registration(simulation, store)
    lease = await store.grant_lease(TTL_S)
    store.fault = faults(Fault.UNCERTAIN)
    assert await fresh._has_registered(lease)
    assert not await fresh._has_registered(lease)
