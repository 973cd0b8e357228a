"""How far the copies of a log reach, and what may be concluded from several of them. Values and pure rules.

A segment has n replicas, and w of them must hold a record durably before it counts. Three rules keep what was confirmed
(docs/decisions/0044-replicas.md):

- A **watermark** counts a replica only if the last batch that it holds is of the owner's epoch. Copies of an older tail
  alone prove nothing: a replica with a later epoch may win without them.
- A **vote** needs the promises of n - w + 1 members. Any w replicas and any n - w + 1 have one in common, so the
  highest position among the promises contains everything that was ever confirmed.
- A replica is a **member** only since it held everything that was confirmed. A disk that was lost is no witness.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import msgspec

from braid.model.ids import Epoch, Offset
from braid.model.stored_record import StoredRecord


class LogPosition(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """How far a copy of a log reaches."""

    epoch: Epoch = Epoch(0)
    """Of the last batch; 0: there is none."""
    end: Offset = Offset(0)
    """The offset after the last record."""
    sealed: bool = False
    """Whether the last batch is a seal."""

    @property
    def rank(self) -> tuple[Epoch, Offset, bool]:
        """Of two copies, the one with the higher rank contains everything that was confirmed in the other one."""
        return self.epoch, self.end, self.sealed


class Promise(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What a replica answers when it is asked to promise an epoch: it takes no batch of a lower one any more."""

    broker: str
    epoch: Epoch
    """The epoch that it has promised."""
    position: LogPosition
    """What its disk holds."""
    member: bool
    """Whether it once held everything that had been confirmed then, and has lost nothing since."""


class FollowerStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """How far a follower's copy of a log has come, as its owner knows it."""

    broker: str
    position: LogPosition
    """What its disk holds."""
    in_sync: bool
    """Whether its copy counts now: the last batch that it holds is of the owner's epoch."""
    member: bool
    """Whether it once held everything that had been confirmed then, and has lost nothing since."""
    behind: int
    """The number of the log's records that its disk does not have."""
    error: str = ""
    """Why the owner sends nothing to it; empty: the owner does."""


def votes_needed(replicas: int, write_quorum: int) -> int:
    """Return how many members must answer, so that one of them holds each confirmed record."""
    return replicas - write_quorum + 1


def elected(
    promises: Iterable[Promise],
    replicas: Collection[str],
    write_quorum: int,
    epoch: Epoch,
    avoid: Collection[str] = (),
    owned: Mapping[str, int] | None = None,
) -> Promise | None:
    """Return the replica that holds everything that was ever confirmed; None: too few members have promised the epoch.
    Of equal positions, the broker that owns the fewest segments wins, then the first one of `replicas`.

    Replicas in `avoid` have no part if the others suffice: among n - w + 1 others, the highest position also contains
    everything that was confirmed. Otherwise they count, and such a replica wins if it alone holds the most."""
    votes = {each.broker: each for each in promises if each.member and each.epoch == epoch}
    members = [votes[broker] for broker in replicas if broker in votes]
    fit = [each for each in members if each.broker not in avoid]
    needed = votes_needed(len(replicas), write_quorum)
    if len(members) < needed:
        return None
    owned = owned or {}

    def value(promise: Promise) -> tuple[tuple[Epoch, Offset, bool], bool, int]:
        return promise.position.rank, promise.broker not in avoid, -owned.get(promise.broker, 0)

    return max(fit if len(fit) >= needed else members, key=value)


def is_heir(promise: Promise | None, position: LogPosition | None) -> bool:
    """Tell whether this replica holds everything without the answers of others: the last vote has found it, at this
    position, and no owner has confirmed anything since. Its disk must be the same one."""
    if promise is None or position is None:
        return False
    return promise.member and promise.position.rank >= position.rank


def replicated_end(ends: Collection[Offset], write_quorum: int) -> Offset:
    """Return the offset below which `write_quorum` replicas hold every record. `ends` are the durable ends of the
    replicas that count, the owner's among them."""
    if len(ends) < write_quorum:
        return Offset(0)
    return sorted(ends, reverse=True)[write_quorum - 1]
