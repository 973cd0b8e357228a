"""The contents of a topic at one moment, from which a read is planned.

    brokers:    layout, first and last offset of each segment, whether it has ended, where its storage is
    manifests:  which chunks hold what                       (storage/history/manifest.py)

With brokers, a segment has every record that a consumer could read now: chunks from storage, the rest from its owner.
The driver asks the brokers first and reads the manifests afterwards, so chunks reach at least as far as they did at the
moment of the snapshot; records after its end are not read.

With `manifest`, the driver asks only storage: a topic then ends where its chunks end.

Executors read chunks from the same URL as the driver. If they cannot reach it, or if brokers keep their history on
their own disks (`storage = "local"`), the snapshot has no chunks, and everything comes from the owners.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from braid.client.retry import retrying
from braid.model.errors import StaleRoute, TopicNotFound
from braid.model.layout import HashRange
from braid.ports.tasks import all_of
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.manifest import SegmentManifest, read_segment_manifest, read_topic_manifest
from braid.storage.objects.store import Objects
from braid.wire.operations import Kind, Positions, PositionsRequest, SegmentPositions, TopicRoute, encode

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.scan.options import ScanOptions

GUESSED_RECORD_BYTES: Final = 200.0
"""Of a segment, if nothing is known about its topic."""
_MANIFESTS_AT_ONCE: Final = 32


class SegmentBounds(msgspec.Struct, frozen=True):
    """The place of a segment in its topic, and the range of its records."""

    id: int
    descriptor: str
    parents: tuple[int, ...]
    first_hash: int
    last_hash: int
    earliest: int
    end: int
    """The records from `earliest` up to but not including `end` exist."""
    sealed: bool
    """Nothing will ever follow `end`."""


class SegmentSnapshot(SegmentBounds, frozen=True):
    chunks: tuple[ChunkDescriptor, ...]
    """The chunks in storage, oldest first; empty if executors cannot reach the storage."""
    bytes_per_record: float
    """For limits by bytes; an estimate."""
    epochs: Sequence[tuple[int, int]] = ()
    """Which epoch has written which offsets, as far as it is known (model/log/epochs.py)."""


class TopicSnapshot(msgspec.Struct, frozen=True):
    topic: str
    """Its path: tenant/namespace/name."""
    topic_id: int
    """0 if the manifest does not have it."""
    storage: str
    """The URL of the storage that executors read chunks from; empty: none."""
    segments: dict[int, SegmentSnapshot]
    live: bool = True
    """Whether it came from brokers. Manifests may be a little older than an earlier answer of brokers."""


def take_snapshot(options: ScanOptions) -> TopicSnapshot:
    """Take a snapshot over a new connection. Blocks. With a connection, call its `snapshot` instead."""
    from braid.scan.connection import ScanConnection

    with ScanConnection(options) as connection:
        return connection.snapshot()


async def snapshot_from_brokers(client: Client, topic: str, objects_of: Callable[[str], Objects]) -> TopicSnapshot:
    """Ask brokers, then read manifests. `objects_of` opens a storage URL."""
    deadline = asyncio.get_running_loop().time() + client.timeout_s
    route, places = await retrying(lambda: _routes_and_places(client, topic), deadline, client.backoff())
    storage = str((await client.admin.topic_storage(topic))["storage"])
    descriptors = {each.id: f"{HashRange(each.first_hash, each.last_hash)}-{each.id}" for each in route.segments}
    manifests: dict[int, SegmentManifest | None] = {}
    if storage:
        manifests = await _manifests(objects_of(storage), topic, route.topic_id, descriptors)
    chunks_of = {each.id: _below(places[each.id].end, manifests.get(each.id)) for each in route.segments}
    weights: dict[int, float] = {}
    if not all(chunks_of[place.segment] or place.earliest == place.end for place in places.values()):
        weights = _weights(await client.admin.topic_stats(topic))
    segments = {}
    for each in route.segments:
        place, chunks = places[each.id], chunks_of[each.id]
        segments[each.id] = SegmentSnapshot(
            id=each.id,
            descriptor=descriptors[each.id],
            parents=each.parents,
            first_hash=each.first_hash,
            last_hash=each.last_hash,
            earliest=place.earliest,
            end=place.end,
            sealed=place.sealed,
            chunks=chunks,
            bytes_per_record=_bytes_per_record(chunks) or weights.get(each.id, 0.0),
            epochs=place.epochs,
        )
    return TopicSnapshot(topic, route.topic_id, storage, _with_guesses(segments))


async def snapshot_from_manifests(objects: Objects, storage: str, topic: str) -> TopicSnapshot:
    found = await read_topic_manifest(objects, topic)
    if found is None:
        raise TopicNotFound(
            f"there is no manifest of topic {topic} in {storage}: correct the topic's name or the storage's URL; a "
            "topic has its manifest there from the moment that a broker serves it with this storage"
        )
    infos = found.layout.segments
    descriptors = {int(each): f"{info.hash_range}-{each}" for each, info in infos.items()}
    manifests = await _manifests(objects, topic, found.topic_id, descriptors)
    segments = {}
    for number, info in infos.items():
        manifest = manifests[number]
        chunks = manifest.chunks if manifest is not None else ()
        end = manifest.next_offset if manifest is not None else 0
        segments[int(number)] = SegmentSnapshot(
            id=number,
            descriptor=descriptors[number],
            parents=info.parent_ids,
            first_hash=info.hash_range.start,
            last_hash=info.hash_range.end,
            earliest=chunks[0].base_offset if chunks else end,
            end=end,
            sealed=manifest is not None and manifest.sealed,
            chunks=chunks,
            bytes_per_record=_bytes_per_record(chunks),
            epochs=manifest.epochs if manifest is not None else (),
        )
    return TopicSnapshot(topic, found.topic_id, storage, _with_guesses(segments), live=False)


async def _routes_and_places(client: Client, topic: str) -> tuple[TopicRoute, dict[int, SegmentPositions]]:
    """Ask for routes and positions of one layout. Raises `StaleRoute` if the layout changes in between."""
    route = (await client.routing.refresh(topic)).route
    link = await client.pool.any()
    answer = await link.ask(Kind.POSITIONS, encode(PositionsRequest(topic)), Positions, client.timeout_s)
    places = {place.segment: place for place in answer.segments}
    if answer.topic_id != route.topic_id or any(each.id not in places for each in route.segments):
        raise StaleRoute(f"topic {topic} was changed while it was looked at")
    return route, places


async def _manifests(
    objects: Objects, topic: str, topic_id: int, descriptors: Mapping[int, str]
) -> dict[int, SegmentManifest | None]:
    """Read the newest manifest of each segment. One that a deleted topic of this name has left does not count."""
    turns = asyncio.Semaphore(_MANIFESTS_AT_ONCE)

    async def read(descriptor: str) -> SegmentManifest | None:
        async with turns:
            manifest = await read_segment_manifest(objects, topic, descriptor)
            stale = manifest is not None and 0 not in (manifest.topic_id, topic_id) and manifest.topic_id != topic_id
            return None if stale else manifest

    found = await all_of(read(descriptor) for descriptor in descriptors.values())
    return dict(zip(descriptors, found))


def _below(end: int, manifest: SegmentManifest | None) -> tuple[ChunkDescriptor, ...]:
    return tuple(chunk for chunk in manifest.chunks if chunk.base_offset < end) if manifest is not None else ()


def _bytes_per_record(chunks: Iterable[ChunkDescriptor]) -> float:
    """Return the mean of the chunks; 0 if there are none."""
    records = size = 0
    for chunk in chunks:
        records += chunk.next_offset - chunk.base_offset
        size += chunk.batch_bytes
    return size / records if records else 0.0


def _weights(stats: Mapping[str, Any]) -> dict[int, float]:
    """Return the bytes per record of each segment, as far as owners know them."""
    known = {int(number): (each["records"], each["bytes"]) for number, each in stats["segments"].items()}
    return {number: size / records for number, (records, size) in known.items() if records and size}


def _with_guesses(segments: dict[int, SegmentSnapshot]) -> dict[int, SegmentSnapshot]:
    """Give segments without an estimate the mean of the others."""
    known = [segment.bytes_per_record for segment in segments.values() if segment.bytes_per_record]
    guess = sum(known) / len(known) if known else GUESSED_RECORD_BYTES
    return {
        number: segment if segment.bytes_per_record else msgspec.structs.replace(segment, bytes_per_record=guess)
        for number, segment in segments.items()
    }
