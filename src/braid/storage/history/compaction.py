"""Compaction: many small chunks of a segment become few large ones, and no reader can tell.

A log that gets few records, or is cut by many moves, leaves many small chunks; each costs its readers a request and the
catalog an entry. A chunk is batches and a footer (chunk.py), so joining neighbours is putting their batches one after
the other, byte for byte, and writing a new footer: an index with the new positions, the producer table of the last one.
Offsets, epochs, control batches and checksums stay as they are.

    plan        which neighbours to join                        pure; needs the catalog or a manifest
    join        the new object's bytes, every batch checked     pure; needs to read storage (Spark's executors)
    create      the object, only if absent                      the same
    replace     check the object, swap it in, write a manifest  the segment's owner (`SegmentStorage.replace_chunks`)
    sweep       delete what was replaced, after a while         the segment's owner

The swap is one transaction under the owner's fence (`Catalog.replace`): before it, no catalog refers to the new object;
after it, none refers to the old ones. So a run that dies anywhere leaves only unreferenced objects. The name of a
joined chunk says what is in it, so the next run finds what the last one left, compares it and uses it.

**How long things are left alone.** Readers fix their plan and then read; an object that was replaced stays for
`GRACE_S`, counted from the creation of the chunk that replaced it. A reader that is slower looks into the newest
manifest. An object that was created and never swapped in stays for the same time, because its run may be on its way to
the owner. Both times are those of the store, so they outlive restarts and moves of the owner. An owner that is about to
be fenced out may still delete an object that was old when it looked. So no owner swaps in an object that is older than
half the grace: an object that is deleted as left over never becomes a part of history.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from braid.model.batch.header import HEADER_BYTES, parse_header, verify
from braid.model.errors import (
    BatchError,
    ChunkCorrupt,
    ConditionFailed,
    InvalidArgument,
    ObjectExists,
    ObjectMissing,
    cut,
    quote,
)
from braid.model.ids import Epoch
from braid.ports.disk import Buffer
from braid.storage.chunk import Footer, Index, decode_footer, encode_footer, read_footer
from braid.storage.handles import NO_LOG, FooterCache
from braid.storage.history.catalog import MAX_REPLACED_CHUNKS, ChunkDescriptor
from braid.storage.history.object_names import id_suffix, topic_id_of
from braid.storage.objects.store import Objects, ObjectStat
from braid.storage.reader import ObjectBytes

GRACE_S: Final = 3_600.0
"""How long unreferenced objects of compaction are left alone. The longest Spark task is shorter."""
MIN_TARGET_BYTES: Final = 64 << 10
MAX_TARGET_BYTES: Final = 1 << 30
"""The process that makes a joined chunk holds all of it in memory."""
DEFAULT_TARGET_BYTES: Final = 64 << 20
"""As large as a broker's files become by themselves."""

_JOINED: Final = re.compile(r"\d{20}-\d{20}-\d{10}(-[0-9a-f]{14})?-joined\.chunk")


def joined_name(base_offset: int, next_offset: int, epoch: int, topic_id: int = 0) -> str:
    """Name a joined chunk as no exported chunk is named (`chunk_name`). `epoch` is the highest of its parts."""
    return f"{base_offset:020d}-{next_offset:020d}-{epoch:010d}{id_suffix(topic_id)}-joined.chunk"


def _name_of_joined(chunks: Sequence[ChunkDescriptor]) -> str:
    """Name the joined chunk of these. A part that was exported before names had the topic's id does not say it."""
    epoch = max(chunk.epoch for chunk in chunks)
    topic_id = max(topic_id_of(chunk.object) for chunk in chunks)
    return joined_name(chunks[0].base_offset, chunks[-1].next_offset, epoch, topic_id)


def is_joined(name: str) -> bool:
    return _JOINED.fullmatch(name) is not None


# Planning.


def plan_compaction(
    chunks: Sequence[ChunkDescriptor], target_bytes: int = DEFAULT_TARGET_BYTES
) -> list[tuple[ChunkDescriptor, ...]]:
    """Return the runs of neighbours to join, oldest first: as many as fit into `target_bytes` together.

    A chunk of half the target or more is large already and is never changed. Of two neighbours that a plan makes or
    leaves, at least one is large or both together exceed the target, so planning what a plan has made plans nothing.
    Only where a swap's limit of `MAX_REPLACED_CHUNKS` ended a run there is more to do in another round.
    """
    if not MIN_TARGET_BYTES <= target_bytes <= MAX_TARGET_BYTES:
        raise InvalidArgument(
            f"chunks of {target_bytes} bytes were asked for; a joined chunk may have {MIN_TARGET_BYTES} to "
            f"{MAX_TARGET_BYTES} bytes"
        )
    runs: list[list[ChunkDescriptor]] = []
    room = 0
    for chunk in chunks:
        size = chunk.batch_bytes
        large = 2 * size >= target_bytes
        follows = bool(runs) and bool(runs[-1]) and runs[-1][-1].next_offset == chunk.base_offset
        if large or size > room or not follows or len(runs[-1]) == MAX_REPLACED_CHUNKS:
            runs.append([])
            room = target_bytes
        if large:
            room = 0  # Nothing joins it.
        runs[-1].append(chunk)
        room -= size
    return [tuple(run) for run in runs if len(run) > 1]


# Joining.


def join(chunks: Sequence[ChunkDescriptor], contents: Iterable[bytes]) -> list[Buffer]:
    """Join these chunks and return the new chunk in parts. `contents` are their objects, in the same order; every batch
    is checked.

    `ChunkCorrupt` if a chunk is not what its descriptor says: damage is not spread."""
    parts: list[Buffer] = []
    index = Index()
    position = 0
    first: Footer | None = None
    last: Footer | None = None
    for chunk, data in zip(chunks, contents, strict=True):
        last = _checked(chunk, data, index, position, after=last)
        first = first or last
        parts.append(memoryview(data)[: last.batch_bytes])
        position += last.batch_bytes
    assert first is not None, "nothing to join"
    assert last is not None, "nothing to join"
    footer = encode_footer(
        base_offset=first.base_offset,
        next_offset=last.next_offset,
        batch_bytes=position,
        first_epoch=first.first_epoch,
        last_epoch=last.last_epoch,
        sealed=last.sealed,
        index=index,
        producers=last.producers,
    )
    return [*parts, footer]


async def store_joined(objects: Objects, folder: str, chunks: Sequence[ChunkDescriptor]) -> str:
    """Join these chunks and store the result; return its name. An object that is there already is compared and used."""
    name = _name_of_joined(chunks)
    contents = [await objects.read(f"{folder}/{chunk.object}", 0, chunk.size) for chunk in chunks]
    parts = join(chunks, contents)
    size = sum(map(len, parts))
    try:
        await objects.create(f"{folder}/{name}", parts)
    except ObjectExists:
        if (await objects.stat(f"{folder}/{name}")).size != size or not await _holds(
            objects, f"{folder}/{name}", parts
        ):
            raise ChunkCorrupt(f"object {name} exists and holds something else; nothing was overwritten") from None
    return name


async def _holds(objects: Objects, path: str, parts: Sequence[Buffer]) -> bool:
    position = 0
    for part in parts:
        if await objects.read(path, position, len(part)) != part:
            return False
        position += len(part)
    return True


def _checked(chunk: ChunkDescriptor, data: bytes, index: Index, shift: int, *, after: Footer | None) -> Footer:
    """Return a chunk's footer. Its batches are whole, in place, and now in `index`, `shift` bytes further on."""
    try:
        footer = decode_footer(data)
        described = (chunk.base_offset, chunk.next_offset, chunk.batch_bytes, chunk.size)
        found = (footer.base_offset, footer.next_offset, footer.batch_bytes, len(data))
        if described != found or footer.batch_bytes + footer.size != len(data):
            raise ChunkCorrupt(f"offsets and bytes should be {described}, and are {found}")
        if after is not None and (after.next_offset != footer.base_offset or after.last_epoch > footer.first_epoch):
            raise ChunkCorrupt(
                f"it begins at offset {footer.base_offset} in epoch {footer.first_epoch}, and does not continue offset "
                f"{after.next_offset} and epoch {after.last_epoch}"
            )
        if after is not None and after.sealed:
            raise ChunkCorrupt("it stands after the end of a sealed log")
        at, expected, epoch = 0, footer.base_offset, footer.first_epoch
        while at < footer.batch_bytes:
            header = verify(data, at)
            if header.base_offset != expected or header.epoch < epoch:
                raise ChunkCorrupt(
                    f"the batch at byte {at} has offset {header.base_offset} and epoch {header.epoch}, expected were "
                    f"{expected} and {epoch}"
                )
            index.add(header, shift + at)
            expected, epoch = header.next_offset, header.epoch
            at += header.size
        if (at, expected, epoch) != (footer.batch_bytes, footer.next_offset, footer.last_epoch):
            raise ChunkCorrupt(f"its batches end at byte {at} with offset {expected} in epoch {epoch}")
    except (BatchError, ChunkCorrupt) as error:
        raise ChunkCorrupt(f"{chunk.object} cannot be joined: {error}") from error
    return footer


# What the owner checks.


def chosen(chunks: Sequence[ChunkDescriptor], objects: Sequence[str]) -> list[ChunkDescriptor]:
    """Return the chunks of a catalog whose objects these are: neighbours, in order."""
    if not 2 <= len(objects) <= MAX_REPLACED_CHUNKS:
        raise InvalidArgument(f"{len(objects)} chunks were to be replaced; it may be 2 to {MAX_REPLACED_CHUNKS}")
    at = next((at for at, chunk in enumerate(chunks) if chunk.object == objects[0]), len(chunks))
    found = list(chunks[at : at + len(objects)])
    if [chunk.object for chunk in found] != list(objects):
        raise ConditionFailed(
            f"the {len(objects)} chunks from {cut(objects[0])} on cannot be replaced: they are not neighbours in the "
            "catalog any more, because retention or another compaction was faster; plan again"
        )
    return found


async def check_joined(
    objects: Objects, footers: FooterCache, folder: str, old: Sequence[ChunkDescriptor], name: str, now_us: int
) -> ChunkDescriptor:
    """Return the descriptor of the joined chunk, if it may take the place of the old ones.

    The process that joined them compared their bytes. This function makes sure that the object is their chunk, that it
    is whole, and that recovery and readers find in it what they found in the old ones."""
    epoch = Epoch(max(chunk.epoch for chunk in old))
    expected_name = _name_of_joined(old)
    if name != expected_name:
        raise InvalidArgument(f"{quote(name)} cannot replace these chunks: the joined one is called {expected_name}")
    path = f"{folder}/{name}"
    stat = await objects.stat(path)
    if now_us - stat.modified_us > GRACE_S / 2 * 1e6:
        raise ObjectMissing(
            f"{name} is of an earlier run, and so old that it is being removed; join the chunks again when it is gone"
        )
    source = ObjectBytes(objects, path)
    footer = await read_footer(source, stat.size)
    first = await _footer_of(objects, footers, folder, old[0])
    last = await _footer_of(objects, footers, folder, old[-1])
    facts = {
        "first offset": (footer.base_offset, old[0].base_offset),
        "next offset": (footer.next_offset, old[-1].next_offset),
        "bytes of batches": (footer.batch_bytes, sum(chunk.batch_bytes for chunk in old)),
        "epochs": ((footer.first_epoch, footer.last_epoch), (first.first_epoch, last.last_epoch)),
        "seal": (footer.sealed, last.sealed),
        "times": (
            (footer.index.min_timestamp, footer.index.max_timestamp),
            (min(chunk.min_timestamp for chunk in old), max(chunk.max_timestamp for chunk in old)),
        ),
        "key hashes": (
            footer.index.key_hashes,
            (min(chunk.min_key_hash for chunk in old), max(chunk.max_key_hash for chunk in old)),
        ),
        "producers": (list(footer.producers.rows()), list(last.producers.rows())),
    }
    wrong = [what for what, (found, expected) in facts.items() if found != expected]
    if wrong:
        raise ChunkCorrupt(f"{name} is not the chunk that it is called: {' and '.join(wrong)} differ")
    await _check_ends(source, footer, name)
    return ChunkDescriptor(
        base_offset=footer.base_offset,
        next_offset=footer.next_offset,
        epoch=epoch,
        object=name,
        size=stat.size,
        batch_bytes=footer.batch_bytes,
        min_timestamp=footer.index.min_timestamp,
        max_timestamp=footer.index.max_timestamp,
        min_key_hash=footer.index.key_hashes[0],
        max_key_hash=footer.index.key_hashes[1],
    )


async def _footer_of(objects: Objects, footers: FooterCache, folder: str, chunk: ChunkDescriptor) -> Footer:
    path = f"{folder}/{chunk.object}"
    return await footers.get(NO_LOG, path, ObjectBytes(objects, path), chunk.size)


async def _check_ends(source: ObjectBytes, footer: Footer, name: str) -> None:
    """Check that the first batch, and those of the last run, stand where they should."""
    try:
        if parse_header(await source.read(0, HEADER_BYTES)).base_offset != footer.base_offset:
            raise ChunkCorrupt("its first batch has another offset")
        run = footer.index.runs[-1]
        data = await source.read(run.position, footer.batch_bytes - run.position)
        at, expected = 0, run.offset
        while at < len(data):
            header = verify(data, at)
            if header.base_offset != expected:
                raise ChunkCorrupt(f"offset {header.base_offset} stands where {expected} should")
            at, expected = at + header.size, header.next_offset
        if expected != footer.next_offset:
            raise ChunkCorrupt(f"its last batch ends at offset {expected}")
    except (BatchError, ChunkCorrupt) as error:
        raise ChunkCorrupt(f"{name} is not the chunk that it is called: {error}") from error


# What may be deleted.


def may_go(orphan: ObjectStat, holder: ObjectStat | None, now_us: int) -> bool:
    """Tell whether an object that no catalog refers to may be deleted. `holder` is the chunk with its offsets now."""
    leaf = orphan.name.rpartition("/")[2]
    kept_since = orphan.modified_us if is_joined(leaf) else None
    if holder is not None and is_joined(holder.name.rpartition("/")[2]):
        kept_since = max(kept_since or 0, holder.modified_us)
    return kept_since is None or now_us - kept_since > GRACE_S * 1e6
