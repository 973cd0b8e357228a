"""Without faults and crashes the simulated disk and the real one are the same disk."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from braid.model.errors import BraidError
from braid.ports.disk import Disk, DiskFile
from braid.ports.os_disk import OsDisk
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.examples import share

Step = tuple[Any, ...]

# Few names, so that they collide; two levels, so that files stand where folders are expected.
paths = st.sampled_from(["a", "b", "d", "d/a", "d/e", "d/e/b", "a/b"])
sizes = st.integers(0, 3_000)
chunks = st.lists(st.binary(max_size=700) | st.integers(0, 2_000).map(lambda n: b"z" * n), max_size=4)
steps = st.one_of(
    st.tuples(st.just("create"), paths),
    st.tuples(st.just("open"), paths),
    st.tuples(st.just("prepare"), paths, sizes),
    st.tuples(st.just("list"), paths),
    st.tuples(st.just("list_folders"), paths),
    st.tuples(st.just("make_folder"), paths),
    st.tuples(st.just("sync_folder"), paths),
    st.tuples(st.just("rename"), paths, paths),
    st.tuples(st.just("publish"), paths, paths),
    st.tuples(st.just("remove"), paths),
    st.tuples(st.just("remove_folder"), paths),
    st.tuples(st.just("write"), st.integers(0, 3), sizes, chunks, st.booleans()),
    st.tuples(st.just("read"), st.integers(0, 3), sizes, sizes),
    st.tuples(st.just("sync"), st.integers(0, 3)),
    st.tuples(st.just("reserve"), st.integers(0, 3), sizes),
    st.tuples(st.just("truncate"), st.integers(0, 3), sizes),
    st.tuples(st.just("size"), st.integers(0, 3)),
    st.tuples(st.just("close"), st.integers(0, 3)),
)


async def results(disk: Disk, root: str, sequence: list[Step]) -> list[object]:
    """What each step returned or raised, and the whole tree at the end."""
    files: list[DiskFile] = []
    seen: list[object] = []
    await disk.make_folder(root)
    for step in sequence:
        try:
            seen.append(await perform(disk, root, files, step))
        except BraidError as error:
            seen.append(type(error).__name__)
    seen.append(await tree(disk, root))
    return seen


async def perform(disk: Disk, root: str, files: list[DiskFile], step: Step) -> object:
    def at(name: str) -> str:
        return f"{root}/{name}"

    match step:
        case ("create" | "open" as verb, path):
            files.append(await disk.open(at(path), create=verb == "create"))
            return "opened"
        case ("list", path):
            return [(stat.name, stat.size) for stat in await disk.list(at(path))]
        case ("rename" | "publish" as verb, source, target):
            change: Callable[[str, str], Any] = disk.rename if verb == "rename" else disk.publish
            return await change(at(source), at(target))
        case ("prepare" as verb, path, size):
            return await getattr(disk, verb)(at(path), size)
        case ("list_folders" | "make_folder" | "sync_folder" | "remove" | "remove_folder" as verb, path):
            return await getattr(disk, verb)(at(path))
        case (_, index, *_) if index >= len(files):
            return "no such open file"
        case ("write", index, position, data, sync):
            await files[index].write(position, data, sync=sync)
            return "written"
        case (verb, index, *arguments):
            return await getattr(files[index], verb)(*arguments)
    raise AssertionError(step)


async def tree(disk: Disk, folder: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for stat in await disk.list(folder):
        file = await disk.open(f"{folder}/{stat.name}")
        found[stat.name] = await file.read(0, stat.size + 1)
    for name in await disk.list_folders(folder):
        found[name] = await tree(disk, f"{folder}/{name}")
    return found


async def on_the_real_disk(sequence: list[Step]) -> list[object]:
    disk = OsDisk()
    with tempfile.TemporaryDirectory() as root:
        try:
            return await results(disk, root, sequence)
        finally:
            await disk.close()


def on_the_simulated_disk(sequence: list[Step]) -> list[object]:
    async def main(sim: Simulation) -> list[object]:
        return await results(SimulatedDisk(Random(1)), "/root", sequence)

    return run_simulation(1, main)


@settings(max_examples=share(150), deadline=None)
@given(st.lists(steps, max_size=25))
@example([("create", "a"), ("sync_folder", "a"), ("sync_folder", "a/b"), ("sync_folder", "d"), ("sync_folder", "d/e")])
@example([("create", "a"), ("create", "b"), ("rename", "a", "b"), ("write", 1, 0, [b"orphan"], True), ("size", 0)])
@example([("create", "a"), ("open", "a/b"), ("make_folder", "a/b"), ("list", "a"), ("publish", "a", "a")])
@example([("create", "a"), ("rename", "b", "a/b"), ("rename", "b", "d/b"), ("publish", "a/b", "c")])
@example([("create", "a"), ("write", 0, 600, [b"x" * 600], True), ("truncate", 0, 700), ("reserve", 0, 1_200)])
def test_the_same_operations_have_the_same_results_on_both_disks(sequence: list[Step]) -> None:
    assert on_the_simulated_disk(sequence) == asyncio.run(on_the_real_disk(sequence))
