"""How the owner of a segment finds out what its log continues: local files against the catalog.

These are the steps 1 to 3 of opening a segment (segment.py). Until the claim, nothing is changed anywhere. The claim
fences every earlier owner. After it, only files that are part of the log stay in the local folder.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

from braid.model.errors import FileMissing, RecoveryConflict, RecoveryUnsafe
from braid.model.ids import Epoch
from braid.model.log.replication import LogPosition
from braid.ports.disk import Disk
from braid.storage.chunk import Footer
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import NO_LOG
from braid.storage.history.catalog import Catalog, ChunkDescriptor, ProducerObject, SealedState
from braid.storage.log import checkpoint as checkpoints
from braid.storage.log.producers import ProducerTable
from braid.storage.log.recovery import RecoveredLog, Unclosed, recover, repair
from braid.storage.log.wal import base_of
from braid.storage.reader import ObjectBytes
from braid.storage.recovery_start import LocalEvidence, RecoverySource, Start, resolve_recovery_start


class RecoveredSegment(NamedTuple):
    start: Start
    found: RecoveredLog
    """What the local folder held."""
    continued: RecoveredLog
    """What the log continues: the same object, if the log is in the local folder."""


async def recover_segment(
    context: StorageContext,
    catalog: Catalog,
    folder: str,
    history: str,
    epoch: Epoch,
    *,
    accept_loss: bool,
    elected: LogPosition | None,
    replicated: bool,
) -> RecoveredSegment:
    """Decide where the log starts, claim the catalog in this epoch, and make the local folder fit. `history` is the
    folder of the segment's objects, `elected` what a vote of the replicas says that this broker holds, `replicated`
    tells whether there are followers. The caller holds the lock of the local folder."""
    found = await _recover(context.disk, folder, accept_loss=accept_loss)
    start = resolve_recovery_start(
        sealed=catalog.sealed,
        frontier=catalog.frontier,
        local=_evidence(found),
        accept_loss=accept_loss,
        elected=elected,
        replicated=replicated,
    )
    from_history = start.source in (RecoverySource.SEALED, RecoverySource.CHUNKS)
    if context.mode is StorageMode.LOCAL and from_history and not accept_loss:
        await _check_history(context, catalog, history)
    await catalog.claim(epoch, context.broker_id)
    if accept_loss and start.source is not RecoverySource.LOCAL and context.mode is StorageMode.LOCAL:
        await _forget_missing(context, catalog, history)
    continued = await _continue(context, catalog, history, folder, epoch, start, found)
    if replicated and catalog.end is None:
        continued.sealed = False  # Nobody was told of a seal that only some replicas have: the log goes on after it.
    return RecoveredSegment(start, found, continued)


async def last_footer(context: StorageContext, catalog: Catalog, history: str) -> Footer:
    """Read the footer that knows every producer, and a seal: that of the newest chunk, or what is left of it."""
    last = catalog.producers or catalog.chunks[-1]
    name = f"{history}/{last.object}"
    return await context.footers.get(NO_LOG, name, ObjectBytes(context.objects, name), last.size)


async def remove_file(disk: Disk, path: str) -> None:
    """Remove a file, if it is there."""
    with contextlib.suppress(FileMissing):
        await disk.remove(path)


async def _recover(disk: Disk, folder: str, *, accept_loss: bool) -> RecoveredLog:
    """Find out what the folder holds. Files that contradict each other count for nothing if a loss is accepted."""
    try:
        return await recover(disk, folder)
    except RecoveryConflict:
        if not accept_loss:
            raise
        return RecoveredLog()


def _evidence(recovered: RecoveredLog) -> LocalEvidence | None:
    """Return what the local files prove; None for files without a single batch."""
    if not recovered.epochs:
        return None
    return LocalEvidence(recovered.base_offset, recovered.next_offset, frozenset(recovered.epochs))


async def _continue(
    context: StorageContext,
    catalog: Catalog,
    history: str,
    folder: str,
    epoch: Epoch,
    start: Start,
    found: RecoveredLog,
) -> RecoveredLog:
    """Leave in the local folder only what is part of the log, and return what the log continues."""
    continued = found
    if start.source is not RecoverySource.LOCAL:
        await _clear_folder(context, folder, found, catalog.sealed, epoch)
        continued = RecoveredLog(next_offset=start.offset)
    continued.sealed = continued.sealed or catalog.end is not None
    footer = await add_known_producers(context, catalog, history, continued)
    continued.sealed = continued.sealed or (footer is not None and footer.sealed)
    if start.source is RecoverySource.LOCAL:
        _close_exported(continued, catalog)
        await repair(context.disk, folder, continued)
    return continued


async def add_known_producers(
    context: StorageContext, catalog: Catalog, history: str, recovered: RecoveredLog
) -> Footer | None:
    """Add to local files what the catalog knows of producers before them, if they do not know it themselves. Returns
    the footer that it was taken from, if there is one."""
    if recovered.producers_complete:
        return None
    if not catalog.objects:
        _add_producers(recovered, ProducerTable.from_rows(catalog.inherited))
        return None
    footer = await last_footer(context, catalog, history)
    _add_producers(recovered, footer.producers)
    return footer


def _close_exported(recovered: RecoveredLog, catalog: Catalog) -> None:
    """Have the newest file closed if a chunk holds all of it: a full log was exported and not handed over. A chunk must
    begin where the last one ends, so nothing may follow in that file."""
    tail = recovered.tail
    if tail is None or tail.file.closed or tail.file.damage or not tail.file.records:
        return
    if tail.file.next_offset <= catalog.next_offset:
        recovered.unclosed.append(Unclosed(tail.file, recovered.producers.copy()))
        recovered.tail = None  # Its torn bytes go with the rest of the file after the footer.


async def _clear_folder(
    context: StorageContext, folder: str, recovered: RecoveredLog, sealed: SealedState | None, epoch: Epoch
) -> None:
    """Remove local files that are not part of the log, if chunks hold all of their records. Otherwise keep them aside,
    in a folder that is named after the epoch that found them."""
    names = [stat.name for stat in await context.disk.list(folder) if base_of(stat.name) is not None]
    redundant = (
        sealed is not None
        and sealed.epoch in recovered.epochs
        and recovered.next_offset <= sealed.last_committed_offset + 1
        and not recovered.damage
    )
    aside = f"{folder}/aside-{epoch}"
    if names and not redundant:
        await context.disk.make_folder(aside)
    await remove_file(context.disk, f"{folder}/{checkpoints.NAME}")
    for name in names:
        if redundant:
            await remove_file(context.disk, f"{folder}/{name}")
        else:
            await context.disk.rename(f"{folder}/{name}", f"{aside}/{name}")


def _add_producers(recovered: RecoveredLog, earlier: ProducerTable) -> None:
    """Add to the local files what is known of producers before them."""
    recovered.producers = earlier.extended(recovered.producers)
    recovered.unclosed = [Unclosed(each.file, earlier.extended(each.producers)) for each in recovered.unclosed]


async def _check_history(context: StorageContext, catalog: Catalog, history: str) -> None:
    """Refuse to begin without all of history: the last owner removes its copies as soon as this broker serves."""
    missing = await _missing(context, catalog, history)
    if missing:
        raise RecoveryUnsafe(
            f"{len(missing)} of {len(catalog.objects)} chunks of this log are not on this broker's disk, the first one "
            f"is {missing[0].object}; bring them back from a broker that holds them"
        )


async def _forget_missing(context: StorageContext, catalog: Catalog, history: str) -> None:
    """Let history begin after the last chunk that lies only on the disk that was given up."""
    missing = await _missing(context, catalog, history)
    if catalog.producers in missing:
        await catalog.forget_producers()
    gone = max((at for at, chunk in enumerate(catalog.chunks, 1) if chunk in missing), default=0)
    if gone:
        await catalog.remove(catalog.chunks[:gone])


async def _missing(context: StorageContext, catalog: Catalog, history: str) -> list[ChunkDescriptor | ProducerObject]:
    """Return which of the catalog's objects are not in this broker's object store."""
    here = {stat.name: stat.size for stat in await context.objects.list(history)}
    return [each for each in catalog.objects if here.get(f"{history}/{each.object}") != each.size]
