"""Manifests: what a reader needs when no broker and no metadata store answers.

    {topic}/manifests/{revision:020d}.json                 the layout, one per layout change
    {topic}/{descriptor}/manifests/{revision:020d}.json    the segment's chunks, one per change of its catalog

Nothing is ever overwritten: each manifest is a new object named after the metadata revision that it shows, and the
highest name counts. An owner that has been fenced out has no new revision to name a manifest after, so it cannot hide
its successor's. Older manifests are removed once a newer one is stored; a reader that meets one being removed looks
again.
"""

from __future__ import annotations

import re
from typing import Final, TypeVar

import msgspec

from braid.model.errors import ChunkCorrupt, ObjectExists, ObjectMissing, ObjectStoreUnavailable
from braid.model.ids import Epoch, Offset, Revision
from braid.model.layout import Layout
from braid.model.log.epochs import EpochStarts
from braid.model.stored_record import encode
from braid.storage.history.catalog import Catalog, ChunkDescriptor, ProducerObject
from braid.storage.objects.store import Objects

T = TypeVar("T")

_MAX_BYTES: Final = 256 << 20
_NAME: Final = re.compile(r"\d{20}\.json")
_KEPT: Final = 2
"""The newest manifest and the one before it, which a reader may just have found in a listing."""
_TRIES: Final = 5


class SegmentManifest(msgspec.Struct, frozen=True, rename="camel"):
    topic: str
    descriptor: str
    revision: Revision
    epoch: Epoch
    next_offset: Offset
    """Chunks hold every retained offset below this one."""
    sealed: bool
    """Whether the log has ended: nothing will ever follow `next_offset`."""
    chunks: tuple[ChunkDescriptor, ...]
    version: int = 1
    producers: ProducerObject | None = None
    """The producer table, where no chunk holds it."""
    epochs: EpochStarts = ()
    """Which epoch has written which offsets; empty in manifests that do not say."""
    topic_id: int = 0
    """Tells the topic from one of the same name that was deleted; 0 in manifests that do not say."""
    end: Offset | None = None
    """Where the log ends for ever, also while chunks do not reach so far. None: it goes on, or that is not known."""


class TopicManifest(msgspec.Struct, frozen=True, rename="camel"):
    topic: str
    revision: Revision
    layout: Layout
    version: int = 1
    topic_id: int = 0
    """Tells the topic from one of the same name that was deleted; 0 in manifests that do not say."""


def segment_folder(topic_path: str, descriptor: str) -> str:
    return f"{topic_path}/{descriptor}"


async def write_segment_manifest(
    objects: Objects, topic_path: str, descriptor: str, catalog: Catalog, *, sealed: bool, topic_id: int = 0
) -> None:
    frontier = catalog.frontier
    assert frontier is not None
    manifest = SegmentManifest(
        topic=topic_path,
        descriptor=descriptor,
        revision=catalog.revision,
        epoch=frontier.epoch,
        next_offset=frontier.next_offset,
        sealed=sealed,
        chunks=tuple(catalog.chunks),
        producers=frontier.producers,
        epochs=frontier.epochs,
        topic_id=topic_id,
        end=frontier.end,
    )
    await _write(objects, segment_folder(topic_path, descriptor), catalog.revision, manifest)


async def read_segment_manifest(objects: Objects, topic_path: str, descriptor: str) -> SegmentManifest | None:
    """Read the newest manifest; None for a segment that has none."""
    data = await _read(objects, segment_folder(topic_path, descriptor))
    return _decode(data, SegmentManifest) if data is not None else None


async def write_topic_manifest(
    objects: Objects, topic_path: str, revision: Revision, layout: Layout, topic_id: int = 0
) -> None:
    await _write(objects, topic_path, revision, TopicManifest(topic_path, revision, layout, topic_id=topic_id))


async def read_topic_manifest(objects: Objects, topic_path: str) -> TopicManifest | None:
    data = await _read(objects, topic_path)
    return _decode(data, TopicManifest) if data is not None else None


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ChunkCorrupt(f"a {kind.__name__} cannot be read: {error}") from error


async def _names(objects: Objects, folder: str) -> list[str]:
    """The manifests of `folder`, oldest first."""
    return [stat.name for stat in await objects.list(f"{folder}/manifests") if _NAME.fullmatch(stat.name[-25:])]


async def _write(objects: Objects, folder: str, revision: Revision, manifest: msgspec.Struct) -> None:
    name = f"{folder}/manifests/{revision:020d}.json"
    try:
        await objects.create(name, [encode(manifest)])
    except ObjectExists:
        return  # An earlier try of the same write: a revision is written by one owner, once.
    names = await _names(objects, folder)
    if not names or names[-1] < name:
        raise ObjectStoreUnavailable(f"object {name} was stored, but is not there: the upload was lost")
    for old in names[:-_KEPT]:
        await objects.delete(old)


async def _read(objects: Objects, folder: str) -> bytes | None:
    for _ in range(_TRIES):
        names = await _names(objects, folder)
        if not names:
            return None
        try:
            return await objects.read(names[-1], 0, _MAX_BYTES)
        except ObjectMissing:
            continue
    raise ObjectMissing(f"the manifests of {folder} vanish as fast as they are listed")
