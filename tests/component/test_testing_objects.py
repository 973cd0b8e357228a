"""The faults that tests and simulations inject must themselves be what they say."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

from braid.model.errors import ObjectExists, ObjectMissing, ObjectStoreUnavailable
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.objects import Fault, Faults, FaultyObjects, MemoryObjects

CALLS: dict[str, Callable[[FaultyObjects], Awaitable[object]]] = {
    "create": lambda objects: objects.create("new", [b"x"]),
    "read": lambda objects: objects.read("old", 0, 10),
    "stat": lambda objects: objects.stat("old"),
    "list": lambda objects: objects.list(""),
    "delete": lambda objects: objects.delete("old"),
}


def over_an_old_object(faults: Faults) -> tuple[MemoryObjects, FaultyObjects]:
    memory = MemoryObjects()
    asyncio.run(memory.create("old", [b"content"]))
    return memory, FaultyObjects(memory, random.Random(1), faults)


def names_in(memory: MemoryObjects) -> list[str]:
    return [stat.name for stat in asyncio.run(memory.list(""))]


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_fails_before_changes_nothing(call: Callable[[FaultyObjects], Awaitable[None]]) -> None:
    memory, faulty = over_an_old_object(Faults(fails_before=1))
    with pytest.raises(ObjectStoreUnavailable, match="request was lost"):
        asyncio.run(told(call(faulty)))
    assert names_in(memory) == ["old"]
    assert faulty.suffered == Counter({Fault.FAILS_BEFORE: 1})


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_that_fails_after_has_happened(call: Callable[[FaultyObjects], Awaitable[None]]) -> None:
    memory, faulty = over_an_old_object(Faults(fails_after=1))
    with pytest.raises(ObjectStoreUnavailable, match="answer was lost"):
        asyncio.run(told(call(faulty)))
    changed = {CALLS["create"]: ["new", "old"], CALLS["delete"]: []}
    assert names_in(memory) == changed.get(call, ["old"])


def test_a_lost_upload_is_confirmed_and_absent() -> None:
    memory, faulty = over_an_old_object(Faults(loses_upload=1))
    asyncio.run(faulty.create("new", [b"x"]))
    assert names_in(memory) == ["old"]
    with pytest.raises(ObjectMissing):
        asyncio.run(faulty.stat("new"))
    with pytest.raises(ObjectExists):
        asyncio.run(faulty.create("old", [b"x"]))
    assert faulty.suffered[Fault.LOSES_UPLOAD] == 2


def test_a_read_that_breaks_half_way_returns_nothing_and_others_do_not_break() -> None:
    _, faulty = over_an_old_object(Faults(breaks_read=1))
    with pytest.raises(ObjectStoreUnavailable, match="half-way"):
        asyncio.run(faulty.read("old", 0, 7))
    assert asyncio.run(faulty.stat("old")).size == 7


def test_a_healed_store_works() -> None:
    _, faulty = over_an_old_object(Faults(fails_before=1))
    faulty.faults = Faults()
    assert asyncio.run(faulty.read("old", 0, 7)) == b"content"


def test_slowness_takes_the_time_of_the_loop() -> None:
    async def main(simulation: Simulation) -> float:
        objects = FaultyObjects(MemoryObjects(simulation.clock), simulation.random, Faults(slow=1, slowest_s=3_600))
        before = simulation.clock.now_us()
        await objects.create("a", [b"x"])
        assert (await objects.stat("a")).modified_us > before
        return simulation.clock.monotonic()

    assert run_simulation(1, main) != run_simulation(2, main)


def test_the_same_seed_suffers_the_same_faults() -> None:
    async def outcomes(seed: int) -> list[str]:
        faults = Faults(fails_before=0.1, fails_after=0.1, breaks_read=0.2, loses_upload=0.2)
        objects = FaultyObjects(MemoryObjects(), random.Random(seed), faults)
        seen = []
        for n in range(200):
            for call in (objects.create(f"{n}", [b"x"]), objects.read(f"{n}", 0, 1)):
                try:
                    seen.append(repr(await call))
                except (ObjectStoreUnavailable, ObjectMissing) as error:
                    seen.append(str(error))
        assert set(objects.suffered) == set(Fault)
        return seen

    assert asyncio.run(outcomes(7)) == asyncio.run(outcomes(7))
    assert asyncio.run(outcomes(7)) != asyncio.run(outcomes(8))


async def test_owners_share_a_memory_and_one_that_closes_does_not_touch_the_others() -> None:
    shared = MemoryObjects()
    await shared.create("a", [b"x"])
    await shared.close()
    assert await shared.read("a", 0, 1) == b"x"


@pytest.mark.parametrize(
    ("luck", "fault"),
    [
        (0.0, Fault.FAILS_BEFORE),
        (0.09, Fault.FAILS_BEFORE),
        (0.11, Fault.FAILS_AFTER),
        (0.31, Fault.LOSES_UPLOAD),
        (0.99, None),
    ],
)
def test_luck_chooses_at_most_one_fault(luck: float, fault: Fault | None) -> None:
    faults = Faults(fails_before=0.1, fails_after=0.2, breaks_read=0.5, loses_upload=0.1)
    assert faults.chosen(luck, creates=True) is fault


async def told(call: Awaitable[None]) -> None:
    await call
