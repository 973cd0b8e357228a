"""What the owner of a segment does for one follower: find the common prefix, then send what is missing, piece by piece.

    begin ─► the copy's position ─┬─ it is a beginning of the log ──────────► pieces, pieces, …
                   ▲              │
                   └── cut it, or begin it anew ◄─ it is not (alignment.py)

The owner sends ahead, up to the credit that the follower has granted. So the follower syncs one piece while the next
one is under way. Each answer says how far the follower's disk has come, and `on_held` hears of it.

A stream that has caught up sends each group of batches from memory, when the owner's disk begins to write it: all
disks of a segment sync at the same time. Otherwise the stream reads the owner's files. So a copy may hold batches that
the owner's disk does not have. They do not count: nothing is confirmed before the owner's own disk has it. If the owner
dies first, they are an unconfirmed tail like any other.

Any failure ends the session. What the follower held does not count any more until the next session shows it: its disk
may have been replaced in between. The next session begins after a pause, or as soon as the follower registers anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import msgspec

from braid.broker.replicas.alignment import CopyState, LogEvidence, Repair, Send, Step, align
from braid.model.errors import (
    BraidError,
    Fenced,
    FileMissing,
    LogDamaged,
    NotServing,
    OutOfSequence,
    TimedOut,
    quote,
)
from braid.model.ids import Offset
from braid.model.log.epochs import begin_epoch
from braid.model.log.replication import FollowerStatus, LogPosition
from braid.model.names import SegmentName
from braid.ports.disk import Buffer
from braid.storage.frames import FramePlace, LogFrames
from braid.storage.history.catalog import Catalog
from braid.storage.log.log import Log
from braid.storage.log.store import PlacedGroup

PIECE_BYTES: Final = 1 << 20
"""A follower syncs each piece by itself. Larger pieces gain nothing, and delay other segments on the same link."""
MAX_READS: Final = 32
"""Pieces that are read from files for one follower and are not answered yet, of all segments. A broker that was away
catches up with all of them at the same time, and each piece is a megabyte (I12)."""
MAX_UNANSWERED: Final = 32
"""Pieces of one stream that are under way, however small they are."""
ANSWER_S: Final = 10.0
FIRST_PAUSE_S: Final = 0.05
MAX_PAUSE_S: Final = 10.0
"""A follower that registers is tried immediately, so this is for followers that are there and do not answer well."""

_log: Final = logging.getLogger(__name__)


class Call(Protocol):
    """A call to another broker (`Peers.call`)."""

    async def __call__(
        self, broker_id: str, name: str, arguments: dict[str, Any], payload: Sequence[Buffer] = (), timeout_s: float = 0
    ) -> Any: ...


class FollowerCalls(Protocol):
    """Calls to other brokers (`Peers`)."""

    @property
    def call(self) -> Call: ...

    async def ready(self, broker_id: str) -> None: ...

    def post(
        self,
        broker_id: str,
        name: str,
        arguments: dict[str, Any],
        payload: Sequence[Buffer],
        on_answer: Callable[[Any, BraidError | None], None],
    ) -> bool: ...


class StreamSource(msgspec.Struct, frozen=True):
    """What all streams of one segment send."""

    name: SegmentName
    topic_id: int
    log: Log
    catalog: Catalog
    frames: LogFrames
    calls: FollowerCalls
    covered: Callable[[], Offset]
    """Below this offset, followers need no files any more."""
    bring_history: Callable[[str], Awaitable[None]]
    """Returns when the follower has the chunks, where brokers share no storage."""
    reads: Callable[[str], asyncio.Semaphore]
    """Bounds the pieces that are read for a follower (MAX_READS)."""
    sessions: Iterator[int]
    """The numbers of all sessions of this ownership: a follower that leaves and comes back gets another number."""

    @property
    def is_in_chunks(self) -> bool:
        """Tell whether the log has ended, and chunks hold all of it: then a copy needs no batch of its own."""
        return self.log.sealed and self.catalog.next_offset >= self.log.end


class FollowerStream:
    """One task sends to one follower (`run`). Everything runs on the broker's loop."""

    def __init__(
        self, follower: str, source: StreamSource, revision: Callable[[], int], on_held: Callable[[], None]
    ) -> None:
        """`revision` is that of the record under which this broker owns the segment."""
        self.follower: Final = follower
        self.held: LogPosition | None = None
        """What the follower's disk holds, in this session; None: no session has shown it yet."""
        self.member = False
        self.error = ""
        """Why nothing is sent now."""
        self._source = source
        self._revision = revision
        self._on_held = on_held
        self._session = next(source.sessions)
        self._credit = 0
        self._place: FramePlace | None = None
        """What is sent next; None while no session has begun."""
        self._waits = False
        """Whether everything that is written was sent, and the stream waits for more."""
        self._more = asyncio.Event()
        """Set when there may be something to do: more to send, an answer, an error."""
        self._unanswered = 0
        self._unanswered_bytes = 0
        self._failure: BraidError | None = None
        self._retry = asyncio.Event()
        """Ends the pause before the next session."""
        self._permits: list[asyncio.Semaphore] = []
        """For each piece under way that was read from a file."""
        self._answers = 0
        """Counts the answers to pieces."""
        self._is_fine = False
        """Whether the follower has stored something since the last pause."""
        self._patience: asyncio.TimerHandle | None = None
        """Ends a session in which nothing is answered. Only while something is under way."""
        self._told_covered = Offset(0)

    @property
    def session(self) -> int:
        """The number of the session, of which there is never another."""
        return self._session

    @property
    def counts(self) -> bool:
        """Tell whether the follower's copy counts. Its last batch is of this owner's epoch: then it holds BEGIN of the
        epoch, and with it all that earlier owners have confirmed. Of a log that had ended before, it holds the end."""
        held, log = self.held, self._source.log
        if held is None or held.epoch == log.epoch:
            return held is not None
        return log.sealed and held.sealed and held.end == log.end

    @property
    def lag_bytes(self) -> int:
        """How many bytes of the log the follower's disk does not have, in a session that has begun."""
        place, files = self._place, self._source.log.files
        if place is None:
            return sum(file.batch_bytes for file in files)
        unsent = sum(file.batch_bytes for file in files if file.base_offset >= place.file_base) - place.position
        return max(self._unanswered_bytes + unsent, 0)

    @property
    def status(self) -> FollowerStatus:
        position = self.held or LogPosition()
        return FollowerStatus(
            broker=self.follower,
            position=position,
            in_sync=self.counts,
            member=self.member,
            behind=self._source.log.end - position.end,
            error=self.error,
        )

    async def run(self) -> None:
        """Send until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                await self._begin()
                await self._send()
            except BraidError as error:
                if str(error) != self.error:
                    level = logging.INFO if isinstance(error, Fenced) else logging.WARNING
                    _log.log(level, "%s: nothing is sent to %s: %s", self._source.name, self.follower, error)
                self.error = str(error)
            except Exception as error:
                _log.exception("%s: the stream to %s broke", self._source.name, self.follower)
                self.error = f"the stream broke: {quote(error)}"
            finally:
                self._end_session()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._retry.wait()
            # A follower that has registered may need a moment until it answers.
            soon = self._retry.is_set() or self._is_fine
            pause_s = FIRST_PAUSE_S if soon else min(2 * pause_s, MAX_PAUSE_S)
            self._is_fine = False
            self._retry.clear()

    def on_member(self) -> None:
        """Hear that the follower has registered, or is gone: its session is over, and the next one needs no pause."""
        self.restart(f"broker {self.follower} is gone, or has started again")

    def restart(self, why: str) -> None:
        """End the session now, and begin the next one without a pause."""
        self._failure = self._failure or NotServing(why)
        self.held = None
        self._on_held()
        self._more.set()
        self._retry.set()

    def on_start(self, placed: PlacedGroup) -> None:
        """Hear that the owner's disk begins to write these batches. They are sent now, if everything before them was
        sent. Otherwise they are read from the file, when it has them."""
        size = placed.group.size
        if (
            self._waits
            and self._failure is None
            and self._place == (placed.file_base, placed.start)
            and self._may_send(size)
            and self._post(placed.file_base, placed.group.batches, size)
        ):
            self._place = FramePlace(placed.file_base, placed.start + size)

    def on_written(self) -> None:
        """Hear that the owner's disk has taken a group."""
        if self._place is not None and self._place < self._source.frames.end:
            self._more.set()

    def look(self) -> None:
        """Look whether something else is to be told: chunks hold more of the log."""
        self._more.set()

    # The beginning of a session.

    async def _begin(self) -> None:
        """Make the copy a beginning of the log, and find the place at which it goes on."""
        source = self._source
        self._failure = None
        await source.bring_history(self.follower)
        copy = await self._ask_state("copy_begin", revision=self._revision())
        tried: set[Repair] = set()
        while not isinstance(step := align(copy, await self._evidence(copy), tried), Send):
            if step is None:
                raise LogDamaged(
                    f"no batch here follows the copy on {self.follower}, which ends at {copy.position}",
                    copy.position.end,
                    source.log.end,
                )
            tried.add(step.repair)
            copy = await self._repair(copy, step)
        self.member = copy.member
        self._credit = copy.credit
        self._place = step.place
        self.error = ""
        self._note(step.held)

    async def _evidence(self, copy: CopyState) -> LogEvidence:
        """Find what the log has beside this copy."""
        source, log = self._source, self._source.log
        starts = source.catalog.epochs
        if not starts or starts[-1][0] != log.epoch:
            starts = begin_epoch(starts, log.epoch, log.end)
        last = await source.frames.mark_before(copy.position.end) if copy.last is not None else None
        # The copy may hold batches that the disk here is still writing.
        await log.written.reached(min(copy.position.end, log.end))
        return LogEvidence(
            starts=starts,
            base_offset=log.base_offset,
            position=log.position,
            is_in_chunks=source.is_in_chunks,
            last=last,
            next=await source.frames.after(copy.position),
            end=source.frames.end,
        )

    async def _repair(self, copy: CopyState, step: Step) -> CopyState:
        """Carry out a repair; return the copy as it is then."""
        match step.repair:
            case Repair.BEGIN_FILE:
                await self._source.log.begin_file()
                return copy
            case Repair.BEGIN_ANEW:
                return await self._reset(step.why)
        _log.warning("%s: %s is cut at offset %d: %s", self._source.name, self.follower, step.end, step.why)
        try:
            return await self._ask_state("copy_cut", end=step.end)
        except OutOfSequence as error:  # Any other error leaves the copy as it is: others may not hold what it holds.
            return await self._reset(f"it cannot be cut at {step.end}: {error}")

    async def _reset(self, why: str) -> CopyState:
        _log.warning("%s: the copy on %s begins anew: %s", self._source.name, self.follower, why)
        return await self._ask_state("copy_reset")

    async def _ask_state(self, call: str, **arguments: Any) -> CopyState:
        return msgspec.convert(await self._ask(call, **arguments), CopyState)

    async def _ask(self, call: str, **arguments: Any) -> Any:
        return await self._source.calls.call(self.follower, call, {**self._about(), **arguments}, timeout_s=ANSWER_S)

    def _about(self) -> dict[str, Any]:
        source = self._source
        return {
            "segment": str(source.name),
            "topic_id": source.topic_id,
            "epoch": source.log.epoch,
            "session": self._session,
        }

    # Pieces.

    async def _send(self) -> None:
        source = self._source
        while True:
            self._more.clear()
            if self._failure is not None:
                raise self._failure
            assert self._place is not None
            if self._may_send(1):
                if await self._send_from_file(self._place):
                    continue
                if source.covered() > self._told_covered and not self._unanswered:
                    await self._deliver(self._place.file_base, [], 0)
                    continue
                self._waits = not self._more.is_set()
            await self._more.wait()
            self._waits = False

    async def _send_from_file(self, place: FramePlace) -> bool:
        """Send the piece at this place, if something is written there."""
        if place >= self._source.frames.end:
            return False
        reads = self._source.reads(self.follower)
        await reads.acquire()
        try:
            piece = await self._source.frames.read(place, min(PIECE_BYTES, self._credit))
            if piece is not None:
                await self._deliver(piece.place.file_base, [piece.data], len(piece.data), reads)
        except FileMissing as error:  # Chunks have covered it meanwhile: the copy begins at the frontier.
            reads.release()
            raise FileMissing(f"{self.follower} was left behind: {error}") from error
        except BaseException:
            reads.release()
            raise
        if piece is None:
            reads.release()
            return False
        self._place = piece.next
        return True

    def _may_send(self, size: int) -> bool:
        """Tell whether the follower has room. A piece that is larger than its credit goes alone."""
        return not self._unanswered or (
            self._unanswered < MAX_UNANSWERED and self._unanswered_bytes + size <= self._credit
        )

    async def _deliver(
        self, file_base: Offset, batches: Sequence[Buffer], size: int, reads: asyncio.Semaphore | None = None
    ) -> None:
        """Send a piece as soon as the link takes it. Nothing is awaited after that: the caller goes on at the next
        place before a group can start."""
        while not self._post(file_base, batches, size, reads):
            await self._source.calls.ready(self.follower)

    def _post(
        self, file_base: Offset, batches: Sequence[Buffer], size: int, reads: asyncio.Semaphore | None = None
    ) -> bool:
        """Send a piece in this iteration of the loop; False if the link is not ready. Pieces leave in their order, and
        an answer counts when it comes. `reads` is released with the answer, or with the session."""
        session, covered = self._session, max(self._told_covered, self._source.covered())

        def on_answer(answer: Any, error: BraidError | None) -> None:
            if session == self._session:
                self._on_answer(answer, error, size, reads)

        arguments = {**self._about(), "file_base": file_base, "covered": covered}
        if not self._source.calls.post(self.follower, "copy_append", arguments, batches, on_answer):
            return False
        self._told_covered = covered
        self._unanswered += 1
        self._unanswered_bytes += size
        if reads is not None:
            self._permits.append(reads)
        if self._patience is None:
            self._patience = asyncio.get_running_loop().call_later(ANSWER_S, self._lose_patience, self._answers)
        return True

    def _on_answer(self, answer: Any, error: BraidError | None, size: int, reads: asyncio.Semaphore | None) -> None:
        self._answers += 1
        self._unanswered -= 1
        self._unanswered_bytes -= size
        if reads is not None:
            self._permits.remove(reads)
            reads.release()
        self._failure = self._failure or error
        if self._failure is None:
            self._is_fine = True
            self._note(msgspec.convert(answer["position"], LogPosition))
        if not self._waits or self._failure is not None or self._source.covered() > self._told_covered:
            self._more.set()

    def _lose_patience(self, answers: int) -> None:
        """End the session if something is under way, and nothing was answered since the last look."""
        self._patience = None
        if self._unanswered and self._answers == answers:
            self._failure = self._failure or TimedOut(f"broker {self.follower} has answered nothing for {ANSWER_S:g} s")
            self._more.set()
        elif self._unanswered:
            self._patience = asyncio.get_running_loop().call_later(ANSWER_S, self._lose_patience, self._answers)

    def _note(self, position: LogPosition) -> None:
        """Note what the follower's disk holds. Answers may come in another order than they were asked for."""
        if self.held is None or position.rank >= self.held.rank:
            self.held = position
            self._on_held()

    def _end_session(self) -> None:
        self._session = next(self._source.sessions)  # What is under way counts no longer.
        self.held = None
        self._place = None
        self._waits = False
        self._unanswered = self._unanswered_bytes = 0
        while self._permits:
            self._permits.pop().release()
        self._told_covered = Offset(0)
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None
        self._on_held()

    async def admit(self) -> None:
        """Tell the follower that it holds everything that is confirmed."""
        session = self._session
        await self._ask("copy_admit")
        if session == self._session:  # In another session it may have another disk.
            self.member = True
