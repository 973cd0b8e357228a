"""The broker's folder: one broker at a time, formats that only go forward."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.data_folder import FORMAT, MARK, STEPS, Mark, open_data_folder
from braid.model.errors import InvalidConfig
from braid.ports.disk import Disk
from braid.testing.sim.disk import Crashed, SimulatedDisk
from braid.testing.sim.loop import Simulation


async def test_a_new_folder_is_marked_with_the_present_format_and_its_broker(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    folder = await open_data_folder(disk, "data", "broker-1")
    assert folder.mark == Mark(FORMAT, "broker-1")
    await folder.release()
    assert (await open_data_folder(disk, "data", "broker-1")).mark == folder.mark


async def test_a_second_broker_is_refused_while_the_first_uses_the_folder(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    first = await open_data_folder(disk, "data", "broker-1")
    with pytest.raises(InvalidConfig, match="used by another broker"):
        await open_data_folder(disk, "data", "broker-1")
    await first.release()
    await open_data_folder(disk, "data", "broker-1")


async def test_a_folder_of_another_broker_is_refused_and_says_whose_it_is(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    await (await open_data_folder(disk, "data", "broker-1")).release()
    with pytest.raises(InvalidConfig, match="--id broker-1"):
        await open_data_folder(disk, "data", "broker-2")
    await open_data_folder(disk, "data", "broker-1")  # it was not left locked


async def test_a_folder_of_a_newer_format_is_refused_and_left_as_it_is(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    await (await open_data_folder(disk, "data", "broker-1", target=FORMAT + 1)).release()
    before = disk.content(f"data/{MARK}")
    with pytest.raises(InvalidConfig, match="newer version"):
        await open_data_folder(disk, "data", "broker-1")
    assert disk.content(f"data/{MARK}") == before


async def test_a_mark_that_cannot_be_read_is_no_new_folder(simulation: Simulation) -> None:
    disk = SimulatedDisk(simulation.random)
    await (await open_data_folder(disk, "data", "broker-1")).release()
    disk.corrupt(f"data/{MARK}", 0, b"????")
    with pytest.raises(InvalidConfig, match="cannot be read"):
        await open_data_folder(disk, "data", "broker-1")


def test_every_format_before_the_present_one_has_a_step_to_the_next() -> None:
    assert set(STEPS) == set(range(1, FORMAT))


@pytest.mark.parametrize("seed", range(20))
async def test_an_upgrade_that_crashes_anywhere_is_finished_by_the_next_opening(
    seed: int, simulation: Simulation
) -> None:
    async def add_file(disk: Disk, path: str, name: str) -> None:
        if not any(stat.name == name for stat in await disk.list(path)):
            await (await disk.open(f"{path}/{name}", create=True)).close()

    async def first(disk: Disk, path: str) -> None:
        await add_file(disk, path, "first")

    async def second(disk: Disk, path: str) -> None:
        assert "first" in [stat.name for stat in await disk.list(path)], "steps run in order"
        await add_file(disk, path, "second")

    disk = SimulatedDisk(simulation.random)
    await (await open_data_folder(disk, "data", "broker-1", target=1)).release()
    upgrade = asyncio.ensure_future(open_data_folder(disk, "data", "broker-1", target=3, steps={1: first, 2: second}))
    await asyncio.sleep(simulation.random.uniform(0, 0.01))
    crashed = not upgrade.done()
    disk.crash()
    if crashed:
        with pytest.raises(Crashed):
            await upgrade
    disk = disk.mount()
    folder = await open_data_folder(disk, "data", "broker-1", target=3, steps={1: first, 2: second})
    assert folder.mark.format == 3
    assert {"first", "second", MARK} <= {stat.name for stat in await disk.list("data")}
