"""Which broker serves a segment: one record, a small state machine, changed only by compare-and-swap.

    (none) ──► ASSIGNED ──► SERVING ──► DRAINING ──► SEALED ──► ASSIGNED …
                  │  ▲         │           │
                  │  └─────────┴───────────┘   its owner, restarted, takes it again: epoch + 1
                  └──► ASSIGNED                to another broker, if the assigned one died before it served

    ASSIGNED, SERVING, DRAINING ──► RECOVERING ──► ASSIGNED    only with replicas: its owner is gone, they vote

- ASSIGNED: the owner is to open the segment in this epoch. Nothing was confirmed in this epoch yet.
- SERVING: the owner takes publishes. Written in one transaction with the storage's *begin*.
- SERVING with a `move`: the owner still serves, and prepares: it brings history to where the next owner can read it.
- SERVING with a `change`: the owner still serves, and changes the set of its replicas, or the number that confirms.
- DRAINING: the owner takes no more publishes; it confirms, exports and seals the records that it took.
- SEALED: no broker serves the segment. Written in one transaction with the storage's sealed state; the next owner
  continues after the last record.
- RECOVERING: no broker serves the segment. Its replicas are asked to promise this epoch, which no earlier record had.
  The vote of enough of them assigns the segment in the same epoch (model/log/replication.py). RECOVERING with an
  accepted loss: fewer votes suffice.

Every ASSIGNED has a higher epoch than all records before it, but for the RECOVERING that it ends. A record's owner and
epoch are the fence: they do not change while one owner serves, drains and seals, so a write under a record that still
names (owner, epoch) is a write of the rightful owner. RECOVERING names the last owner, which may write nothing. The
package cluster/ownership has the table of which broker acts in which state.

`clean` tells whether records are lost with an owner that is gone. While it is true, any broker (of `holders`, if these
are named) can read everything that was ever confirmed, so the leader may give the segment to another one by itself. It
is false from the first confirm of an owner until the owner seals, or until the log has ended and shared storage holds
all of it. A segment with `replicas` is not lost with its owner: a vote finds a replica that holds everything that was
confirmed. Without a vote, a sealed state or an accepted loss, such a segment goes to no other broker either (I2).

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
from braid.model.log.replication import LogPosition, votes_needed
from braid.model.stored_record import StoredRecord, decode, encode


class OwnershipState(Enum):
    ASSIGNED = "ASSIGNED"
    SERVING = "SERVING"
    DRAINING = "DRAINING"
    SEALED = "SEALED"
    RECOVERING = "RECOVERING"


TRANSITIONS: Final[dict[OwnershipState, frozenset[OwnershipState]]] = {
    OwnershipState.ASSIGNED: frozenset({OwnershipState.ASSIGNED, OwnershipState.SERVING, OwnershipState.RECOVERING}),
    OwnershipState.SERVING: frozenset(
        {OwnershipState.SERVING, OwnershipState.DRAINING, OwnershipState.ASSIGNED, OwnershipState.RECOVERING}
    ),
    OwnershipState.DRAINING: frozenset({OwnershipState.SEALED, OwnershipState.ASSIGNED, OwnershipState.RECOVERING}),
    OwnershipState.SEALED: frozenset({OwnershipState.ASSIGNED}),
    OwnershipState.RECOVERING: frozenset({OwnershipState.RECOVERING, OwnershipState.ASSIGNED}),
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


class ReplicaChange(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """A request that other brokers hold copies of the log, or that another number of them confirm."""

    replicas: tuple[str, ...]
    """The owner's id among them; empty: the segment is not to be replicated any more."""
    write_quorum: int


class Ownership(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    state: OwnershipState
    owner: str
    """A broker's id; of a sealed or recovering segment, the last owner's."""
    epoch: Epoch
    move: Move | None = None
    holders: tuple[str, ...] = ()
    """The brokers whose own disks hold the whole history; empty: every broker can read it, or there is none."""
    clean: bool = False
    accept_loss: bool = False
    """Of an assigned segment: an operator or the topic's policy has accepted the loss of the records that only the last
    owner's disk held. Of a recovering segment: of the records that only replicas held that do not answer."""
    given_up: tuple[str, ...] = ()
    """With `accept_loss`: the brokers whose disks are given up, because they are gone. A broker of these that comes
    back before the segment is served has lost nothing: it gets the segment, or has its vote."""
    before: Ownership | None = None
    """With `accept_loss`, of a segment that other brokers got because none of several keepers was there: its record
    until then. It counts again if one of `given_up` is back before the segment is served."""
    refusal: str = ""
    """Why the owner gave the last move up; empty again with the next move."""
    failures: tuple[OpeningFailure, ...] = ()
    """The brokers that could not open the segment since it was served last, in the order of their ids."""
    ended_at: Offset | None = None
    """Where the log ends for ever: no owner appends at or after this offset. None: it goes on. It says what the catalog
    says, also after an accepted loss."""
    inherited: int = 0
    """The transition whose parents' producer tables this segment has; 0: none."""
    replicas: tuple[str, ...] = ()
    """The brokers that hold copies of the log, the owner's id among them; empty: the segment is not replicated."""
    write_quorum: int = 1
    """How many replicas must hold a record before it is confirmed."""
    elected: LogPosition | None = None
    """Of an assigned segment: what its owner's disk must hold, by the vote. None: there was no vote. Of a recovering
    segment: the same, of an owner that did not come to serve; that owner alone may win the next vote."""
    change: ReplicaChange | None = None
    """What the replicas are to become. The leader writes it; the owner carries it out. It ends with the owner's epoch:
    the leader then decides anew."""

    @classmethod
    def first(cls, owner: str, replicas: tuple[str, ...] = (), write_quorum: int = 1) -> Ownership:
        """Return the first record of a segment."""
        record = cls(state=OwnershipState.ASSIGNED, owner=owner, epoch=Epoch(1), clean=True)
        return record._with_replicas(replicas, write_quorum)

    @property
    def keepers(self) -> tuple[str, ...]:
        """The brokers whose own disks hold what no other disk does; empty if there are none."""
        return self.holders if self.clean else self.replicas or (self.owner,)

    @property
    def keepers_needed(self) -> int:
        """How many of the keepers must be there, so that nothing that was confirmed is lost."""
        return 1 if self.clean or not self.replicas else votes_needed(len(self.replicas), self.write_quorum)

    @property
    def all_confirm(self) -> bool:
        """Tell whether each of several replicas holds everything that was confirmed."""
        return len(self.replicas) == self.write_quorum > 1

    def keeps_copy(self, broker: str) -> bool:
        """Tell whether the broker is one of the segment's replicas, or is to become one."""
        return broker in self.copies

    @property
    def copies(self) -> frozenset[str]:
        """The brokers that keep a copy of the log, or are to get one; empty if the segment is not replicated."""
        if not self.replicas and self.change is None:
            return frozenset()
        change = self.change.replicas if self.change is not None else ()
        target = (self.move.to,) if self.move is not None and self.move.to else ()
        return frozenset((*self.replicas, *change, *target))

    def failure_of(self, broker: str) -> OpeningFailure | None:
        return next((each for each in self.failures if each.broker == broker), None)

    def assigned(
        self,
        owner: str,
        *,
        replicas: tuple[str, ...] | None = None,
        write_quorum: int = 1,
        accept_loss: bool = False,
        given_up: Collection[str] = (),
    ) -> Ownership:
        """Assign the segment to its next owner; the leader does this. `replicas` and `write_quorum` are new ones; None:
        they stay. A loss that was accepted once stays accepted until a broker serves the segment; with it, the disks
        that held the history are given up (`given_up` names those of brokers that are gone). If one of several
        keepers that are given up gets a new copy, the loss cannot be taken back any more."""
        if not self.clean and owner != self.owner and not accept_loss:
            raise BrokenInvariant(f"I2: {self.owner} has not sealed epoch {self.epoch}, {owner} cannot continue it")
        if replicas is None:
            replicas, write_quorum = self.replicas, self.write_quorum
        elif not self.clean and not accept_loss and (replicas, write_quorum) != (self.replicas, self.write_quorum):
            raise BrokenInvariant(f"I2: {self.owner} has not sealed epoch {self.epoch}, its replicas cannot change")
        before, all_given_up = self.before_loss(accept_loss=accept_loss), {*self.given_up, *given_up}
        if before is not None and not {owner, *replicas}.isdisjoint(before.keepers):
            before, all_given_up = None, set()  # The new copy would be taken for the old one.
        new = self._to(
            OwnershipState.ASSIGNED,
            owner=owner,
            epoch=Epoch(self.epoch + 1),
            move=None,
            change=None,
            elected=None,
            holders=() if accept_loss else self.holders,
            clean=self.clean or accept_loss,
            accept_loss=self.accept_loss or accept_loss,
            given_up=tuple(sorted(all_given_up)),
            before=before,
            failures=tuple(each for each in self.failures if each.broker != owner),  # It is to try anew.
            inherited=0 if accept_loss else self.inherited,  # The table may have been on the disk that is given up.
        )
        return new._with_replicas(replicas, write_quorum)

    def before_loss(self, *, accept_loss: bool) -> Ownership | None:
        """Return the record of several keepers that are given up if the segment is assigned to others; None: there are
        none. `accept_loss` tells whether a loss is accepted for it."""
        if self.accept_loss and self.before is not None:
            return self.before
        return self if accept_loss and len(self.keepers) > 1 else None

    def restored(self, back: str) -> Ownership:
        """Take back that several keepers were given up, because this one is back before the segment was served; the
        leader does this. Nothing was confirmed since, so the record of that time counts: replicas vote, and of others
        the one that is back gets the segment. A loss is to be accepted anew: it is another one."""
        if self.state is not OwnershipState.ASSIGNED or not self.accept_loss or self.before is None:
            raise BrokenInvariant(f"I2: a segment that is {self.state.value} was not given up by several brokers")
        before = msgspec.structs.replace(self.before, epoch=self.epoch)
        return before.assigned(back) if before.clean else before.recovering()

    def recovering(self, *, accept_loss: bool = False, given_up: Collection[str] = ()) -> Ownership:
        """Ask the replicas to vote in the next epoch, because the owner is gone or cannot open the segment; the leader
        does this. What was asked for or accepted before does not count any more. With `accept_loss`, fewer votes than
        needed suffice. An owner that was elected and did not come to serve has confirmed nothing, so `elected` stays:
        what its disk holds is still the whole log. It does not stay if replicas were given up for it that may be back
        now, and hold more."""
        if self.clean or not self.replicas:
            raise BrokenInvariant(f"I3: a segment that is {self.state.value} cannot recover: it has nothing to vote on")
        return self._to(
            OwnershipState.RECOVERING,
            epoch=Epoch(self.epoch + 1),
            move=None,
            change=None,
            elected=None if self.given_up else self.elected,
            accept_loss=accept_loss,
            given_up=tuple(sorted(given_up)),
        )

    def losing(self, given_up: Collection[str]) -> Ownership:
        """Accept the loss of what only replicas held that do not answer: the vote goes on in its epoch, and fewer votes
        than needed suffice. The leader or an operator does this. `given_up` names the replicas that are gone."""
        if self.state is not OwnershipState.RECOVERING:
            raise BrokenInvariant(f"I2: the replicas of a segment that is {self.state.value} do not vote")
        given_up = tuple(sorted({*self.given_up, *given_up}))
        return self._to(OwnershipState.RECOVERING, accept_loss=True, given_up=given_up)

    def voted(
        self, owner: str, elected: LogPosition, *, accept_loss: bool = False, given_up: Collection[str] = ()
    ) -> Ownership:
        """Assign the segment to the replica that the vote has found, in the epoch that the replicas have promised; the
        leader does this. With `accept_loss`, too few replicas have answered, and this one holds the most of them. A
        loss that was accepted for the vote stays accepted until a broker serves the segment."""
        if self.state is not OwnershipState.RECOVERING or owner not in self.replicas:
            raise BrokenInvariant(f"I3: {owner} cannot be elected in epoch {self.epoch}: {self.state.value}")
        return self._to(
            OwnershipState.ASSIGNED,
            owner=owner,
            elected=elected,
            accept_loss=self.accept_loss or accept_loss,
            given_up=tuple(sorted({*self.given_up, *given_up})),
            failures=tuple(each for each in self.failures if each.broker != owner),  # It is to try anew.
        )

    def rejoined(self, replicas: tuple[str, ...], write_quorum: int) -> Ownership:
        """Give other replicas to an owner that was elected: some of the last ones are gone, and the owner could confirm
        nothing; the leader does this. From now on those that are gone are too late. So a loss must be accepted for it,
        unless each replica holds everything: then the others do not miss them, also if this owner does not come to
        serve. The new set must be of the same kind."""
        if self.state is not OwnershipState.ASSIGNED or self.elected is None:
            raise BrokenInvariant(f"I2: the replicas of a segment that is {self.state.value} cannot be given up")
        if not self.accept_loss and not (self.all_confirm and len(replicas) == write_quorum == self.write_quorum):
            raise BrokenInvariant(f"I2: not each of the replicas {', '.join(self.replicas)} holds everything")
        new = self._to(
            OwnershipState.ASSIGNED,
            epoch=Epoch(self.epoch + 1),
            given_up=(),
            failures=tuple(each for each in self.failures if each.broker != self.owner),
        )
        return new._with_replicas(replicas, write_quorum)

    def changing(self, change: ReplicaChange | None) -> Ownership:
        """Ask the owner to change the replicas, or how many of them must hold a record; the leader does this. None
        takes the request back."""
        if self.state is not OwnershipState.SERVING or self.move is not None:
            raise BrokenInvariant(f"I3: the replicas of a segment that is {self.state.value} or moves cannot change")
        if change is not None:
            self._with_replicas(change.replicas, change.write_quorum)
        return self._to(OwnershipState.SERVING, change=change)

    def replicas_changed(self, replicas: tuple[str, ...], write_quorum: int) -> Ownership:
        """Change the replicas, or how many of them must hold a record, as `change` asks; the owner does this."""
        if self.state is not OwnershipState.SERVING:
            raise BrokenInvariant(f"I3: the replicas of a segment that is {self.state.value} cannot change")
        return self._to(OwnershipState.SERVING, change=None)._with_replicas(replicas, write_quorum)

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
        return self._taken()

    def kept(self, refusal: str) -> Ownership:
        """Give the move up; an owner that cannot hand over does this. If it had begun to drain, it takes the segment
        again."""
        if self.state is OwnershipState.SERVING:
            return self._to(OwnershipState.SERVING, move=None, refusal=refusal)
        return self._taken(move=None, refusal=refusal)

    def serving(self, holders: tuple[str, ...] = (), end: Offset | None = None) -> Ownership:
        """Note that the owner serves the segment; the owner does this. `end` is where its log ends, if it has ended: an
        accepted loss may have taken the last records of a log that had ended."""
        return self._to(
            OwnershipState.SERVING,
            ended_at=end if self.ended_at is not None and end is not None else self.ended_at,
            holders=holders,
            clean=False,
            accept_loss=False,
            given_up=(),
            before=None,
            failures=(),
            elected=None,
        )

    def complete(self) -> Ownership:
        """Note that the log has ended and that every broker can read all of it; its owner does this."""
        return self._to(OwnershipState.SERVING, clean=True)

    def incomplete(self) -> Ownership:
        """Note that the disks of the owner, and of followers, hold what nobody else can read: acks of a queue. Its
        owner does this."""
        return self._to(OwnershipState.SERVING, clean=False)

    def ended(self, end: Offset) -> Ownership:
        """Note that the log has ended for ever; its owner does this."""
        return self._to(OwnershipState.SERVING, ended_at=end)

    def inheriting(self, transition: int) -> Ownership:
        """Note that the segment has the producer tables of its parents in this transition; its owner does this."""
        return self._to(OwnershipState.SERVING, inherited=transition)

    def moving(self, move: Move) -> Ownership:
        """Ask the owner to hand the segment over. A change of its replicas is taken back: the leader decides it anew
        when the segment is served again."""
        return self._to(OwnershipState.SERVING, move=move, refusal="", change=None)

    def draining(self) -> Ownership:
        return self._to(OwnershipState.DRAINING)

    def sealed(self, holders: tuple[str, ...] = ()) -> Ownership:
        return self._to(OwnershipState.SEALED, holders=holders, clean=True)

    def handed_to(self, target: str, position: LogPosition) -> Ownership:
        """Give the segment to a broker that holds all of the log, up to this position; the owner does this. Where the
        target was no replica, it takes the owner's place: with the other holders, it makes a quorum."""
        if self.state is not OwnershipState.DRAINING or not self.replicas:
            raise BrokenInvariant(f"I3: a segment that is {self.state.value} cannot be handed to {target}")
        replicas = self.replicas
        if target not in replicas:
            replicas = tuple(target if each == self.owner else each for each in replicas)
        return self._to(
            OwnershipState.ASSIGNED,
            owner=target,
            epoch=Epoch(self.epoch + 1),
            replicas=replicas,
            elected=position,
            move=None,
            change=None,
        )

    def is_held_by(self, owner: str, epoch: Epoch) -> bool:
        """Tell whether this owner, in this epoch, may still write for the segment (I3)."""
        return self.owner == owner and self.epoch == epoch and self.is_owned

    @property
    def is_owned(self) -> bool:
        """Tell whether the owner serves the segment or is to serve it; otherwise it only was the last one."""
        return self.state not in (OwnershipState.SEALED, OwnershipState.RECOVERING)

    def _taken(self, **changes: object) -> Ownership:
        if self.state is OwnershipState.RECOVERING:
            raise BrokenInvariant(f"I3: {self.owner} cannot take a segment in epoch {self.epoch} whose replicas vote")
        return self._to(OwnershipState.ASSIGNED, epoch=Epoch(self.epoch + 1), change=None, **changes)

    def _with_replicas(self, replicas: tuple[str, ...], write_quorum: int) -> Ownership:
        if replicas and self.owner not in replicas:
            raise BrokenInvariant(f"I2: the owner {self.owner} is none of the replicas {', '.join(replicas)}")
        if not 1 <= write_quorum <= max(len(replicas), 1) or len(set(replicas)) != len(replicas):
            raise BrokenInvariant(f"I2: {write_quorum} of the replicas {replicas} cannot confirm a record")
        return msgspec.structs.replace(self, replicas=replicas, write_quorum=write_quorum)

    def _to(self, state: OwnershipState, **changes: object) -> Ownership:
        if state not in TRANSITIONS[self.state]:
            raise BrokenInvariant(f"I3: a segment that is {self.state.value} cannot become {state.value}")
        return msgspec.structs.replace(self, state=state, **changes)

    def to_json(self) -> bytes:
        return encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Ownership:
        return decode(cls, data, "an ownership record")
