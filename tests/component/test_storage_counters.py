"""What storage counts for those who watch a broker."""

from __future__ import annotations

from braid.model.topic import Durability
from braid.storage.cache import HotCache
from braid.storage.log.context import LogConfig
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.storage import make_batch, make_header, open_log, stamped_batch


def test_the_cache_counts_reads_that_found_something_and_reads_that_did_not() -> None:
    cache = HotCache(1_000)
    cache.put(1, make_header(1, b"x", base_offset=5), stamped_batch(5, 1, b"x"))
    assert cache.get(1, 5, 100, 10)
    assert not cache.get(1, 6, 100, 10)
    assert not cache.get(2, 5, 100, 10)
    assert (cache.hits, cache.misses) == (1, 2)


async def test_each_commit_that_is_synced_is_reported_once(simulation: Simulation) -> None:
    seconds: list[float] = []
    log = await open_log(SimulatedDisk(simulation.random), simulation, config=LogConfig(on_sync=seconds.append))
    opened = len(seconds)
    assert opened == 1, "the first batch of an owner is durable when the log is open"
    await log.confirm(log.append(make_batch(1)))
    assert len(seconds) == opened + 1
    appended = [log.append(make_batch(1)) for _ in range(3)]
    await log.confirm(appended[-1])
    assert len(seconds) == opened + 2, "what gathers is one commit"
    assert all(each >= 0 for each in seconds)
    await log.close()


async def test_a_write_that_is_not_synced_is_reported_when_its_sync_comes(simulation: Simulation) -> None:
    seconds: list[float] = []
    config = LogConfig(durability=Durability.MEMORY, memory_sync_s=1_000, on_sync=seconds.append)
    log = await open_log(SimulatedDisk(simulation.random), simulation, config=config)
    opened = len(seconds)
    await log.confirm(log.append(make_batch(1)))
    assert len(seconds) == opened
    await log.flush()
    assert len(seconds) == opened + 1
    await log.close()
