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
is false from the first confirm of an owner until the owner seals, or until the log has ended and shared storage holds
all of it.

An owner that cannot open the segment says why in `failures`, and goes on trying. What counts for everybody else is
whether the segment is served, not whether its owner's process lives.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import Enum
from typing import Final

import msgspec

from braid.model.errors import BrokenInvariant
from braid.model.ids import Epoch, Offset
from braid.model.stored_record import StoredRecord, decode, encode


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


MAX_REASON_CHARS: Final = 500
"""How much of an error a record keeps. Every broker watches every record."""


class OpeningFailure(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """Why a broker could not open the segment that was assigned to it."""

    broker: str
    reason: str
    lasting: bool = False
    """Whether time alone does not mend it: records are missing on the broker's disk, or are damaged, or the disk is
    broken."""


class Move(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """A request that another broker serve the segment."""

    to: str = ""
    """A broker's id; empty: the leader chooses when the segment is sealed."""
    id: str = ""
    """Tells apart requests of different origins: balancing, a drain, a call."""


class Ownership(StoredRecord, frozen=True, kw_only=True, rename="camel"):
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
    given_up: tuple[str, ...] = ()
    """With `accept_loss`: the brokers whose disks are given up, because they are gone. A broker of these that comes
    back before the segment is served has lost nothing, and gets the segment."""
    refusal: str = ""
    """Why the owner gave the last move up; empty again with the next move."""
    failures: tuple[OpeningFailure, ...] = ()
    """The brokers that could not open the segment since it was served last, in the order of their ids."""
    ended_at: Offset | None = None
    """Where the log ends for ever: no owner appends at or after this offset. None: it goes on."""
    inherited: int = 0
    """The transition whose parents' producer tables this segment has; 0: none."""

    @classmethod
    def first(cls, owner: str) -> Ownership:
        """Return the first record of a segment."""
        return cls(state=OwnershipState.ASSIGNED, owner=owner, epoch=Epoch(1), clean=True)

    @property
    def keepers(self) -> tuple[str, ...]:
        """The brokers whose own disks hold what no other disk does; empty if there are none."""
        return self.holders if self.clean else (self.owner,)

    def failure_of(self, broker: str) -> OpeningFailure | None:
        return next((each for each in self.failures if each.broker == broker), None)

    def assigned(self, owner: str, *, accept_loss: bool = False, given_up: Collection[str] = ()) -> Ownership:
        """Assign the segment to its next owner; the leader does this. A loss that was accepted once stays accepted
        until a broker serves the segment; with it, the disks that held the history are given up (`given_up` names those
        of brokers that are gone)."""
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
            given_up=tuple(sorted({*self.given_up, *given_up})),
            failures=tuple(each for each in self.failures if each.broker != owner),  # It is to try anew.
            inherited=0 if accept_loss else self.inherited,  # The table may have been on the disk that is given up.
        )

    def unopened(self, reason: str, *, lasting: bool) -> Ownership:
        """Note why the owner cannot open the segment in this epoch; the owner does this, and goes on trying."""
        if self.state is not OwnershipState.ASSIGNED:
            raise BrokenInvariant(f"I3: a segment that is {self.state.value} was opened by {self.owner}")
        failure = OpeningFailure(broker=self.owner, reason=reason[:MAX_REASON_CHARS], lasting=lasting)
        others = [each for each in self.failures if each.broker != self.owner]
        failures = tuple(sorted([*others, failure], key=lambda each: each.broker))
        return self._to(OwnershipState.ASSIGNED, failures=failures)

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
        return self._to(
            OwnershipState.SERVING, holders=holders, clean=False, accept_loss=False, given_up=(), failures=()
        )

    def complete(self) -> Ownership:
        """Note that the log has ended and that every broker can read all of it; its owner does this."""
        return self._to(OwnershipState.SERVING, clean=True)

    def ended(self, end: Offset) -> Ownership:
        """Note that the log has ended for ever; its owner does this."""
        return self._to(OwnershipState.SERVING, ended_at=end)

    def inheriting(self, transition: int) -> Ownership:
        """Note that the segment has the producer tables of its parents in this transition; its owner does this."""
        return self._to(OwnershipState.SERVING, inherited=transition)

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
        return encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Ownership:
        return decode(cls, data, "an ownership record")
