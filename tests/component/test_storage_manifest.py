"""Manifests: the newest one counts, none is overwritten, a fenced owner hides nothing."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import ChunkCorrupt, Fenced, ObjectMissing
from braid.model.ids import Epoch, Revision
from braid.model.layout import Layout
from braid.storage.history.catalog import Catalog
from braid.storage.history.manifest import (
    read_segment_manifest,
    read_topic_manifest,
    write_segment_manifest,
    write_topic_manifest,
)
from braid.testing.sim.objects import MemoryObjects
from tests.component.test_storage_catalog import chunk, owned
from tests.kits.storage import DESCRIPTOR, SEGMENT_FOLDER, TOPIC, World


async def write(objects: MemoryObjects, catalog: Catalog, *, sealed: bool = False) -> None:
    await write_segment_manifest(objects, TOPIC, DESCRIPTOR, catalog, sealed=sealed)


async def test_a_segment_manifest_tells_what_the_catalog_holds(world: World) -> None:
    assert await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR) is None
    catalog = await owned(world.store, 4)
    await catalog.commit(chunk(0, 10))
    await write(world.objects, catalog, sealed=True)
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert (manifest.topic, manifest.descriptor, manifest.sealed) == (TOPIC, DESCRIPTOR, True)
    assert (manifest.revision, manifest.epoch, manifest.next_offset) == (catalog.revision, 4, 10)
    assert manifest.chunks == tuple(catalog.chunks)


async def test_the_highest_revision_counts_and_older_manifests_go_except_one(world: World) -> None:
    catalog = await owned(world.store, 1)
    for base in range(0, 100, 10):
        await catalog.commit(chunk(base, base + 10))
        await write(world.objects, catalog)
        manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
        assert manifest is not None
        assert manifest.next_offset == base + 10
        assert len(await world.objects.list(SEGMENT_FOLDER)) <= 2


async def test_writing_the_same_revision_again_changes_nothing(world: World) -> None:
    catalog = await owned(world.store, 1)
    await write(world.objects, catalog)
    before = await world.objects.list("")
    await write(world.objects, catalog)
    assert await world.objects.list("") == before


async def test_an_owner_that_was_fenced_out_cannot_hide_its_successors_manifest(world: World) -> None:
    old = await owned(world.store, 1)
    await old.commit(chunk(0, 10))
    new = await owned(world.store, 2, "b")
    for base in range(10, 60, 10):
        await new.commit(chunk(base, base + 10, epoch=2))
        await write(world.objects, new)
    with pytest.raises(Fenced):
        await old.commit(chunk(10, 20))
    await write(world.objects, old)
    manifest = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert manifest is not None
    assert (manifest.epoch, manifest.next_offset) == (2, 60)


async def test_a_topic_manifest_round_trips_beside_those_of_its_segments(world: World) -> None:
    assert await read_topic_manifest(world.objects, TOPIC) is None
    catalog = await owned(world.store, 1)
    await write(world.objects, catalog)
    assert await read_topic_manifest(world.objects, TOPIC) is None
    layout = Layout.initial(2)
    for revision in (3, 20, 100):
        await write_topic_manifest(world.objects, TOPIC, Revision(revision), layout)
    manifest = await read_topic_manifest(world.objects, TOPIC)
    assert manifest is not None
    assert (manifest.topic, manifest.revision, manifest.layout) == (TOPIC, 100, layout)
    segment = await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)
    assert segment is not None
    assert segment.epoch == Epoch(1)


async def test_a_manifest_that_cannot_be_read_says_so(world: World) -> None:
    catalog = await owned(world.store, 1)
    await write(world.objects, catalog)
    (stat,) = await world.objects.list(SEGMENT_FOLDER)
    await world.objects.delete(stat.name)
    await world.objects.create(stat.name, [b'{"topic": "x"'])
    with pytest.raises(ChunkCorrupt, match="SegmentManifest cannot be read"):
        await read_segment_manifest(world.objects, TOPIC, DESCRIPTOR)


class Vanishing(MemoryObjects):
    """The newest manifest is removed between the listing and the reading, so often."""

    vanishes = 0

    async def read(self, name: str, start: int, length: int) -> bytes:
        if self.vanishes:
            self.vanishes -= 1
            raise ObjectMissing(f"{name} is just gone")
        return await super().read(name, start, length)


async def test_a_reader_that_meets_a_manifest_being_removed_looks_again(world: World) -> None:
    objects = Vanishing()
    await write(objects, await owned(world.store, 1))
    objects.vanishes = 4
    assert await read_segment_manifest(objects, TOPIC, DESCRIPTOR) is not None
    objects.vanishes = 5
    with pytest.raises(ObjectMissing, match="vanish as fast"):
        await read_segment_manifest(objects, TOPIC, DESCRIPTOR)


def test_no_manifest_at_all_is_none() -> None:
    assert asyncio.run(read_segment_manifest(MemoryObjects(), TOPIC, DESCRIPTOR)) is None
