"""Which broker serves a segment: one record, a small state machine, changed only by compare-and-swap.

    (none) ──► ASSIGNED ──► SERVING ──► DRAINING ──► SEALED ──► ASSIGNED …
                  │  ▲         │           │
                  │  └─────────┴───────────┘   its owner, restarted, takes it again: epoch + 1
                  └──► ASSIGNED                to another broker, if the assigned one died before it served

- ASSIGNED: the owner is to open the segment in this epoch. Nothing was confirmed in this epoch yet.
- SERVING: the owner takes publishes. Written in one transaction with the storage's *begin*.
- SERVING with a `move`: the owner still serves, and prepares: it brings history to where the next owner can read it.
- DRAINING: the owner takes no more publishes; it confirms, exports and seals the records that it took.
- SEALED: no broker serves the segment. Written in one transaction with the storage's sealed state; the next owner
  continues after the last record.

Every ASSIGNED has a higher epoch than all records before it. A record's owner and epoch are the fence: they do not
change while one owner serves, drains and seals, so a write under a record that still names (owner, epoch) is a write of
the rightful owner. The package cluster/ownership has the table of which broker acts in which state.

`clean` tells whether records are lost with an owner that is gone. While it is true, any broker (of `holders`, if these
are named) can read everything that was ever confirmed, so the leader may give the segment to another one by itself. It
is false from the first confirm of an owner until the owner seals.
"""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from braid.model.errors import BrokenInvariant, MetadataCorrupt
from braid.model.ids import Epoch


class OwnershipState(Enum):
    ASSIGNED = "ASSIGNED"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    SEALED = "SEALED"


TRANSITIONS: Final[dict[OwnershipState, frozenset[OwnershipState]]] = {
    OwnershipState.ASSIGNED: frozenset({OwnershipState.ASSIGNED, OwnershipState.SERVING}),
    OwnershipState.SERVING: frozenset({OwnershipState.SERVING, OwnershipState.DRAINING, OwnershipState.ASSIGNED}),
    OwnershipState.DRAINING: frozenset({OwnershipState.SEALED, OwnershipState.ASSIGNED}),
    OwnershipState.SEALED: frozenset({OwnershipState.ASSIGNED}),
}


class Move(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A request that another broker serve the segment."""

    to: str = ""
    """A broker's id; empty: the leader chooses when the segment is sealed."""
    id: str = ""
    """Tells apart requests of different origins: balancing, a drain, a call."""


class Ownership(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    state: OwnershipState
    owner: str
    """A broker's id; of a sealed segment, the last owner's."""
    epoch: Epoch
    move: Move | None = None
    holders: tuple[str, ...] = ()
    """The brokers whose own disks hold the whole history; empty: every broker can read it, or there is none."""
    clean: bool = False
    accept_loss: bool = False
    """Of an assigned segment: an operator or the topic's policy has accepted the loss of the records that only the last
    owner's disk held."""
    refusal: str = ""
    """Why the owner gave the last move up; empty again with the next move."""

    @classmethod
    def first(cls, owner: str) -> Ownership:
        """Return the first record of a segment."""
        return cls(state=OwnershipState.ASSIGNED, owner=owner, epoch=Epoch(1), clean=True)

    def assigned(self, owner: str, *, accept_loss: bool = False) -> Ownership:
        """Assign the segment to its next owner; the leader does this. A loss that was accepted once stays accepted
        until a broker serves the segment; with it, the disks that held the history are given up."""
        if not self.clean and owner != self.owner and not accept_loss:
            raise BrokenInvariant(f"I2: {self.owner} has not sealed epoch {self.epoch}, {owner} cannot continue it")
        return self._to(
            OwnershipState.ASSIGNED,
            owner=owner,
            epoch=Epoch(self.epoch + 1),
            move=None,
            holders=() if accept_loss else self.holders,
            clean=self.clean or accept_loss,
            accept_loss=self.accept_loss or accept_loss,
        )

    def taken_again(self) -> Ownership:
        """Assign the segment to its owner again; an owner that has restarted, or failed to open it, does this. What the
        owner had begun does not count. A move stays."""
        return self._to(OwnershipState.ASSIGNED, epoch=Epoch(self.epoch + 1))

    def kept(self, refusal: str) -> Ownership:
        """Give the move up; an owner that cannot hand over does this. If it had begun to drain, it takes the segment
        again."""
        if self.state is OwnershipState.SERVING:
            return self._to(OwnershipState.SERVING, move=None, refusal=refusal)
        return self._to(OwnershipState.ASSIGNED, epoch=Epoch(self.epoch + 1), move=None, refusal=refusal)

    def serving(self, holders: tuple[str, ...] = ()) -> Ownership:
        return self._to(OwnershipState.SERVING, holders=holders, clean=False, accept_loss=False)

    def moving(self, move: Move) -> Ownership:
        return self._to(OwnershipState.SERVING, move=move, refusal="")

    def draining(self) -> Ownership:
        return self._to(OwnershipState.DRAINING)

    def sealed(self, holders: tuple[str, ...] = ()) -> Ownership:
        return self._to(OwnershipState.SEALED, holders=holders, clean=True)

    def is_held_by(self, owner: str, epoch: Epoch) -> bool:
        """Tell whether this owner, in this epoch, may still write for the segment (I3)."""
        return self.owner == owner and self.epoch == epoch and self.state is not OwnershipState.SEALED

    def _to(self, state: OwnershipState, **changes: object) -> Ownership:
        if state not in TRANSITIONS[self.state]:
            raise BrokenInvariant(f"I3: a segment that is {self.state.value} cannot become {state.value}")
        return msgspec.structs.replace(self, state=state, **changes)

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Ownership:
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise MetadataCorrupt(f"an ownership record cannot be read: {error}") from error
