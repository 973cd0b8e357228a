"""Manifests of a topic whose layout changes: with every broker down, storage alone tells the whole history."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from braid.model.errors import ObjectStoreUnavailable
from braid.model.ids import SegmentId
from braid.model.layout import SegmentInfo
from braid.ports.disk import Buffer
from braid.storage.history.manifest import SegmentManifest, TopicManifest, read_segment_manifest, read_topic_manifest
from braid.storage.objects.store import Objects
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until


async def topic_manifest(brokers: Brokers) -> TopicManifest:
    assert brokers.objects is not None
    found = await read_topic_manifest(brokers.objects, PATH)
    assert found is not None
    return found


async def segment_manifest(brokers: Brokers, info: SegmentInfo) -> SegmentManifest | None:
    assert brokers.objects is not None
    return await read_segment_manifest(brokers.objects, PATH, f"{info.hash_range}-{info.segment_id}")


async def shows_the_layout(brokers: Brokers) -> bool:
    return (await topic_manifest(brokers)).layout == brokers.any().topics.get(PATH).layout


@pytest.mark.parametrize("records", [0, 100])
async def test_storage_shows_each_layout_and_where_the_parents_ended(records: int, simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        for change, parents in ((("split", 0), [0]), (("merge", 1, 2), [1, 2])):
            async with client.producer("orders") as producer:
                await producer.send_many([(b"key-%d" % number, b"value") for number in range(records)])
            await getattr(client.admin, change[0])("orders", *change[1:])
            await until(lambda: shows_the_layout(brokers))
            layout = (await topic_manifest(brokers)).layout
            for parent in parents:
                info = layout.segments[SegmentId(parent)]

                async def has_ended(info: SegmentInfo = info) -> bool:
                    manifest = await segment_manifest(brokers, info)
                    return manifest is not None and manifest.sealed

                await until(has_ended)
                manifest = await segment_manifest(brokers, info)
                assert manifest is not None
                assert manifest.end == manifest.next_offset
        segments = (await topic_manifest(brokers)).layout.segments.values()
        kept = [await segment_manifest(brokers, info) for info in segments if not info.is_active]
        assert sum(manifest.next_offset for manifest in kept if manifest is not None) == 2 * records


async def test_storage_forgets_what_has_left_the_layout(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", retention_ms=1_000)
        async with client.producer("orders") as producer:
            await producer.send(b"value")
        await client.admin.split("orders", 0)
        await until(lambda: [*brokers.any().topics.get(PATH).layout.segments] == [1, 2], 3_600)
        await until(lambda: shows_the_layout(brokers))


class AbsentManifests:
    """Object storage that refuses the manifests of topics for a while."""

    def __init__(self, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
        self.away = True
        self._create = objects.create
        monkeypatch.setattr(objects, "create", self._create_unless_away)

    async def _create_unless_away(self, name: str, parts: Sequence[Buffer]) -> None:
        if self.away and name.startswith(f"{PATH}/manifests/"):
            raise ObjectStoreUnavailable("it is away")
        await self._create(name, parts)


async def test_a_layout_is_shown_although_storage_was_away_when_it_changed(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        assert brokers.objects is not None
        await client.admin.create_topic("orders")
        await until(lambda: brokers.owner(0))
        manifests = AbsentManifests(brokers.objects, monkeypatch)
        await client.admin.split("orders", 0)
        await asyncio.sleep(5)
        assert not await shows_the_layout(brokers)
        manifests.away = False
        await until(lambda: shows_the_layout(brokers))


async def test_a_layout_is_shown_although_storage_was_away_when_the_topic_was_created(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        assert brokers.objects is not None
        manifests = AbsentManifests(brokers.objects, monkeypatch)
        await client.admin.create_topic("orders")
        async with client.producer("orders") as producer:
            await producer.send(b"no segment waits for it")
        assert await read_topic_manifest(brokers.objects, PATH) is None
        manifests.away = False
        await asyncio.sleep(5)
        assert await shows_the_layout(brokers)
