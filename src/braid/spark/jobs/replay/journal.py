"""The state of a replay: which copy it makes, and which step is under way.

    DIR/replay.json      a Replay, replaced as a whole
    DIR/lock             held while a replay runs; the kernel releases it however the process ends

The journal has a step before its first record is written, with everything that decides how it is written: offsets,
number of partitions, and the replay's id, by which brokers recognise repeated records. So a step can always be repeated
exactly, and the replay repeats it until it is marked as done.

The id is drawn when the folder is made. If the folder is lost, so is the id, and a new replay copies everything again.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Mapping
from types import TracebackType
from typing import Final, Self

import msgspec

from braid.client.consuming.checkpoint import Position
from braid.model.errors import InvalidArgument, JobFailed
from braid.model.ids import Epoch
from braid.scan.planning import Range

JOURNAL_VERSION: Final = 1
_FILE: Final = "replay.json"


class ReplayStep(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The records of one write."""

    number: int
    ranges: tuple[Range, ...]
    partitions: int
    positions: dict[int, Position]
    """Where the next step begins."""
    epochs: dict[int, Epoch] = {}
    """Of the records before `positions`, as far as they are known: by these the next step notices a loss."""
    done: bool = False

    @property
    def records(self) -> int:
        return sum(each.records for each in self.ranges)


class Replay(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """One copy of a topic into another."""

    version: int = JOURNAL_VERSION
    id: str
    source: str
    source_id: int
    target: str
    target_id: int
    bounds: dict[str, str]
    """Which records are copied, as options of the source."""
    step: ReplayStep | None = None

    def same_copy(self, other: Replay) -> bool:
        return (self.source, self.target, self.bounds) == (other.source, other.target, other.bounds)


class ReplayJournal:
    """Use it with `with`. Belongs to the process that holds the lock."""

    def __init__(self, folder: str) -> None:
        self.folder: Final = os.path.abspath(folder)
        self._path: Final = os.path.join(self.folder, _FILE)
        self._lock = -1

    def __enter__(self) -> Self:
        os.makedirs(self.folder, exist_ok=True)
        self._lock = os.open(os.path.join(self.folder, "lock"), os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise JobFailed(
                f"another replay is at work in {self.folder}; wait for it, or start one with another --name or "
                "--checkpoint"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        os.close(self._lock)

    def begin(self, wanted: Replay) -> Replay:
        """Return the replay of this folder: `wanted` if the folder is new, otherwise the known one, if it is the same
        copy."""
        known = self.read()
        if known is None:
            others = set(os.listdir(self.folder)) - {"lock", _temporary(_FILE)}
            if others:
                raise InvalidArgument(
                    f"{self.folder} holds something else ({min(others)}): name another folder by --checkpoint"
                )
            return self.write(wanted)
        if not known.same_copy(wanted):
            raise InvalidArgument(
                f"{self.folder} is about another replay: {_said(known)}. This one is {_said(wanted)}. Give it another "
                "--name or --checkpoint"
            )
        for what, then, now in (
            (known.source, known.source_id, wanted.source_id),
            (known.target, known.target_id, wanted.target_id),
        ):
            if then and now and then != now:
                raise InvalidArgument(
                    f"topic {what} was deleted and created again since the replay in {self.folder} began: what was "
                    "copied says nothing about it. Begin a new one with another --name or --checkpoint"
                )
        source_id, target_id = known.source_id or wanted.source_id, known.target_id or wanted.target_id
        return msgspec.structs.replace(known, source_id=source_id, target_id=target_id)

    def read(self) -> Replay | None:
        try:
            with open(self._path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            return None
        try:
            found = msgspec.json.decode(data, type=Replay)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidArgument(f"{self._path} is not the journal of a replay, or is damaged: {error}") from None
        if found.version > JOURNAL_VERSION:
            raise InvalidArgument(f"{self._path} has version {found.version}; this build reads {JOURNAL_VERSION}")
        return found

    def write(self, replay: Replay) -> Replay:
        """Make the state durable."""
        temporary = os.path.join(self.folder, _temporary(_FILE))
        with open(temporary, "wb") as file:
            file.write(msgspec.json.encode(replay))
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._path)
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return replay


def default_folder(name: str, environment: Mapping[str, str]) -> str:
    """Return the folder in which programs of this system keep their state."""
    state = environment.get("XDG_STATE_HOME") or os.path.join(environment.get("HOME", "."), ".local", "state")
    return os.path.join(state, "braid", "replay", name)


def _temporary(name: str) -> str:
    return f"{name}.tmp"


def _said(replay: Replay) -> str:
    bounds = ", ".join(f"{name} {value}" for name, value in sorted(replay.bounds.items()))
    return f"{replay.source} into {replay.target} ({bounds or 'everything'})"
