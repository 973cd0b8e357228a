"""Who serves a segment: one record, a small state machine, changed only by compare-and-swap.

    (none) ──► ASSIGNED ──► SERVING ──► DRAINING ──► SEALED ──► ASSIGNED …
                  │  ▲         │           │
                  │  └─────────┴───────────┘   its owner, restarted, takes it again: epoch + 1
                  └──► ASSIGNED                to another broker, if the assigned one died before it served

- ASSIGNED: the owner is to open it in this epoch. Nothing was confirmed in this epoch yet.
- SERVING: it takes publishes. Written in one transaction with the storage's *begin*.
- SERVING with a `move`: it still serves as ever, and prepares: history goes to where the next owner can read it.
- DRAINING: it takes no more publishes; what it took is being confirmed, exported and sealed.
- SEALED: nobody serves it. Written in one transaction with the storage's sealed state; whoever comes next continues
  behind its last record.

Every ASSIGNED has a higher epoch than all records before it. A record's owner and epoch are what fences: they do not
change while one owner serves, drains and seals, so a write under a record that still names (owner, epoch) is a write of
the rightful owner.

`clean` tells what an owner that is gone has taken with it. While it is true, everything that was ever confirmed can be
read by any broker (of `holders`, if these are named), so that the leader may give the segment to another one without
asking anybody. It is false from the first confirm of an owner until it seals.
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
    """The wish that another broker serve the segment."""

    to: str = ""
    """A broker's id; empty: whichever the leader finds best, once it is sealed."""
    id: str = ""
    """Tells whoever asked for it from others."""


class Ownership(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    state: OwnershipState
    owner: str
    """A broker's id. Of a sealed segment: the last one."""
    epoch: Epoch
    move: Move | None = None
    holders: tuple[str, ...] = ()
    """The brokers whose own disks hold the whole history; empty: it lies where every broker can read it, or there is
    none."""
    clean: bool = False
    accept_loss: bool = False
    """Of an assigned segment: somebody has accepted that what only the last owner's disk held is lost."""
    refusal: str = ""
    """Why the last move was given up, until another is asked for."""

    @classmethod
    def first(cls, owner: str) -> Ownership:
        """Of a segment that nobody has served."""
        return cls(state=OwnershipState.ASSIGNED, owner=owner, epoch=Epoch(1), clean=True)

    def assigned(self, owner: str, *, accept_loss: bool = False) -> Ownership:
        """By the leader, to whoever is to serve it next. A loss that was accepted once stays accepted until somebody
        serves the segment; with it, the disks that held the history are given up."""
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
        """By its owner, which has restarted, or failed to open it: what it had begun counts for nothing. A move that
        was wanted still is."""
        return self._to(OwnershipState.ASSIGNED, epoch=Epoch(self.epoch + 1))

    def kept(self, refusal: str) -> Ownership:
        """By its owner, which cannot hand it over. One that had begun to drain takes it again."""
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
        """Whether this owner, in this epoch, may still write what belongs to the segment (I3)."""
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
