"""Decides at which offset an owner begins: one pure function over everything that is known.

Six kinds of evidence, from the strongest to the weakest:

1. **Sealed state**: the owner before wrote, in one transaction, that its last record was N and that all of it is in
   chunks. Begin at N + 1.
2. **A vote** of the replicas: this broker's copy reached the position that the vote names, and no replica that counts
   had more. Only then are local batches of a follower the log: a copy that lags behind looks the same. If chunks reach
   further than the vote, they are the log.
3. **Local batches**, if the last owner that wrote at all has written them. Then they are the log, exported or not.
   Every owner's first durable batch is a BEGIN with its epoch, and the owner confirms nothing before the frontier says
   that it has begun. So local batches are the log if that owner's epoch is among theirs; later epochs that never began
   left nothing but a BEGIN.
4. **Chunks of a log that has ended**: the frontier says where, and chunks reach that offset. Nothing can be missing.
5. **Chunks** of a log that goes on. Without a seal and without the last owner's files, records that the owner confirmed
   but had not exported may be missing. That is a loss, and only a person or a policy can accept it.
6. **Nothing**: a new log, at 0.

Where two pieces contradict each other, the log does not open; the error names both. An error while *reading* evidence
is not "nothing": it is raised long before this function is called.

A loss that is accepted includes local batches that do not fit to the chunks: they are damaged, chunks are the log.
Metadata that contradicts itself, or is older than the disk, is no loss, and stays a contradiction.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from braid.model.errors import RecoveryConflict, RecoveryUnsafe
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.storage.history.catalog import Frontier, SealedState


class RecoverySource(Enum):
    SEALED = "sealed"
    LOCAL = "local"
    CHUNKS = "chunks"
    EMPTY = "empty"


class LocalEvidence(msgspec.Struct, frozen=True):
    """What recovery found in the local folder."""

    base_offset: Offset
    next_offset: Offset
    epochs: frozenset[Epoch]
    """Of the batches there."""


class Start(msgspec.Struct, frozen=True):
    offset: Offset
    source: RecoverySource
    loss_accepted: bool = False


def resolve_recovery_start(
    *,
    sealed: SealedState | None,
    frontier: Frontier | None,
    local: LocalEvidence | None,
    accept_loss: bool = False,
    elected: LogPosition | None = None,
    replicated: bool = False,
) -> Start:
    if frontier is None:
        if local is not None or sealed is not None:
            found = f"local batches of epoch {max(local.epochs)}" if local is not None else f"the sealed state {sealed}"
            raise RecoveryConflict(f"there are {found}, but no owner was ever recorded: the metadata is incomplete")
        return Start(Offset(0), RecoverySource.EMPTY)
    if local is not None and max(local.epochs) > frontier.epoch:
        raise RecoveryConflict(
            f"local batches were written in epoch {max(local.epochs)}, but the metadata knows only {frontier.epoch} "
            f"epochs: it is older than this disk"
        )
    if sealed is not None:
        return _from_seal(sealed, frontier, local)
    if elected is not None:
        return _from_vote(elected, frontier, local, accept_loss=accept_loss)
    if local is not None and frontier.last_writer in local.epochs:
        try:
            return _from_local(frontier, local)
        except RecoveryConflict:
            if not accept_loss:
                raise
    if frontier.last_writer == 0:
        return Start(Offset(0), RecoverySource.EMPTY)
    if frontier.complete:
        return Start(frontier.next_offset, RecoverySource.CHUNKS)
    if accept_loss:
        return Start(frontier.next_offset, RecoverySource.CHUNKS, loss_accepted=True)
    if replicated:
        raise RecoveryUnsafe(
            f"the owner of epoch {frontier.last_writer} did not seal this log, and its files are not on this disk. "
            f"Chunks reach offset {frontier.next_offset}; replicas that hold what was confirmed beyond are to vote"
        )
    raise RecoveryUnsafe(
        f"the owner of epoch {frontier.last_writer} did not seal this log, and its files are not here. Chunks reach "
        f"offset {frontier.next_offset}; what it confirmed beyond is on its disk only ({frontier.holder} was the last "
        f"holder). Bring that disk back, or accept the loss"
    )


def _from_seal(sealed: SealedState, frontier: Frontier, local: LocalEvidence | None) -> Start:
    start = Offset(sealed.last_committed_offset + 1)
    if frontier.last_writer != sealed.epoch:
        raise RecoveryConflict(f"epoch {sealed.epoch} sealed the log, but epoch {frontier.last_writer} wrote after it")
    if frontier.next_offset != start:
        raise RecoveryConflict(
            f"the sealed state says that the last record is {sealed.last_committed_offset}, "
            f"but chunks end before offset {frontier.next_offset}"
        )
    if local is not None and sealed.epoch in local.epochs and local.next_offset > start:
        raise RecoveryConflict(
            f"the sealed state of epoch {sealed.epoch} says that the last record is {sealed.last_committed_offset}, "
            f"but local batches of the same epoch reach offset {local.next_offset}"
        )
    return Start(start, RecoverySource.SEALED)


def _from_vote(elected: LogPosition, frontier: Frontier, local: LocalEvidence | None, *, accept_loss: bool) -> Start:
    if max(elected.end, local.next_offset if local is not None else 0) <= frontier.next_offset:
        return Start(frontier.next_offset, RecoverySource.CHUNKS, loss_accepted=accept_loss)
    if local is None or (max(local.epochs), local.next_offset) < (elected.epoch, elected.end):
        held = f"end at {local.next_offset} in epoch {max(local.epochs)}" if local is not None else "are gone"
        raise RecoveryUnsafe(
            f"the vote of the replicas says that this broker holds the log up to offset {elected.end} of epoch "
            f"{elected.epoch}, but its files {held}"
        )
    return msgspec.structs.replace(_from_local(frontier, local), loss_accepted=accept_loss)


def _from_local(frontier: Frontier, local: LocalEvidence) -> Start:
    if local.next_offset < frontier.next_offset:
        raise RecoveryConflict(
            f"chunks reach offset {frontier.next_offset}, but the local batches that they were made from end at "
            f"{local.next_offset}"
        )
    if local.base_offset > frontier.next_offset:
        raise RecoveryConflict(
            f"chunks end at offset {frontier.next_offset} and local batches begin at {local.base_offset}: "
            f"what was between them is missing"
        )
    if frontier.end is not None and local.next_offset > frontier.end:
        raise RecoveryConflict(
            f"the log has ended at offset {frontier.end}, but local batches of its last owner reach {local.next_offset}"
        )
    return Start(local.next_offset, RecoverySource.LOCAL)
