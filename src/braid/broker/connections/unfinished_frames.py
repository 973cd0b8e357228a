"""The memory for frames that have begun and are not complete: one budget for all connections of a broker (I12).

A frame's bytes are kept from the first to the last, and clients may be slow. While all unfinished frames together are
below the budget, every connection is read. Above it, only these connections are read:

- those whose frame holds less than an equal share of the budget, so that a crowd of large frames does not hold up
  clients that send small ones;
- the one whose frame began first, so that one frame always gets on, and all frames in the end.

The others wait unread; nothing of theirs is dropped. A client that keeps the first place for OLDEST_S while others wait
for it has stopped sending, or is too slow for a crowded broker: its connection ends, and its frame makes room.

All together hold at most twice the budget and one frame: frames above their share stop at the budget, and those below
it reach their share at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from braid.wire.frame import READ_BYTES

OLDEST_S: Final = 5.0


class Holder(Protocol):
    """A connection with an unfinished frame."""

    def wait_for_room(self, waits: bool) -> None:
        """Stop reading from the connection, or go on."""


class UnfinishedFrames:
    def __init__(self, max_bytes: int, time: Callable[[], float]) -> None:
        self.bytes = 0
        self._max_bytes = max_bytes
        self._time = time
        self._held: dict[Holder, int] = {}
        """Bytes by connection, in the order in which their frames began."""
        self._waiting: dict[Holder, None] = {}
        self._waited_since = 0.0
        """Since when others have waited for the first of `_held`."""

    def note(self, holder: Holder, held: int) -> None:
        """Note how many bytes a connection holds of an unfinished frame; 0 when it has none, or is gone.

        Hot: called after each read of a large frame. While there is room and nobody waits, this only counts.
        """
        was_full = self.bytes >= self._max_bytes
        if held:
            self.bytes += held - self._held.get(holder, 0)
            self._held[holder] = held
        elif self._waiting:
            self._forget(holder)
        else:
            self.bytes -= self._held.pop(holder, 0)
        if self._waiting or self.bytes >= self._max_bytes:
            self._choose_readers(holder, was_full)

    def late(self, now: float) -> Holder | None:
        """Return the connection that keeps the others waiting for too long, if there is one."""
        return next(iter(self._held)) if self._waiting and now - self._waited_since > OLDEST_S else None

    def _choose_readers(self, changed: Holder, was_full: bool) -> None:
        if self.bytes < self._max_bytes:
            self._let_go_on()
        elif was_full:
            self._stop_if_due(changed)
        else:
            for each in self._held:
                self._stop_if_due(each)

    def _forget(self, holder: Holder) -> None:
        held = self._held.get(holder)
        if held is None:
            return
        self._waiting.pop(holder, None)
        was_oldest = next(iter(self._held)) is holder
        self.bytes -= self._held.pop(holder)
        if was_oldest and self._held:
            self._waited_since = self._time()
            self._go_on(next(iter(self._held)))

    def _stop_if_due(self, holder: Holder) -> None:
        held = self._held.get(holder, 0)
        is_oldest = next(iter(self._held), None) is holder
        if held * len(self._held) > self._max_bytes and not is_oldest and holder not in self._waiting:
            if not self._waiting:
                self._waited_since = self._time()
            self._waiting[holder] = None
            holder.wait_for_room(True)

    def _let_go_on(self) -> None:
        """Let as many go on as have room for what each may read next, the oldest first."""
        readers = (self._max_bytes - self.bytes) // READ_BYTES + 1
        for holder in [each for each in self._held if each in self._waiting][:readers]:
            self._go_on(holder)

    def _go_on(self, holder: Holder) -> None:
        if holder in self._waiting:
            del self._waiting[holder]
            holder.wait_for_room(False)
