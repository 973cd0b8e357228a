"""The memory for bytes that clients have not taken yet: one budget for all connections of a broker (I12).

One connection holds at most its high-water mark and one piece (an answer, or a delivery). A crowd that reads nothing
would hold that a thousand times. When half of the budget is used, the broker is *pressed*, until three quarters are
free:

- The high-water mark falls to nothing. A connection with unsent bytes is congested: its frames are not read, its
  questions do not begin, and its channels are not pumped.
- Other connections are given pieces up to `share`, a sixteenth of what is left. So the budget is never used up, but for
  pieces of SHORT_BYTES, and clients that read go on.
- The server ends the connections that have stood still longest (`server.py`), each after PATIENCE_S at the earliest.

Only large writes are counted immediately. Small ones are seen when the server counts, once a second.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterable
from typing import Final

from braid.wire.connection import WRITE_HIGH_WATER_BYTES, Connection

PATIENCE_S: Final = 5.0
"""How long a connection may stand still while the broker is pressed."""
SHORT_BYTES: Final = 16 << 10
"""A piece of this size is always sent: an idle connection costs more."""
PIECES: Final = 16
PRESSED_HIGH_WATER_BYTES: Final = 1
"""With 0, a TLS connection without unsent bytes would be congested."""
_ANY: Final = sys.maxsize


class UnsentBytes:
    def __init__(self, max_bytes: int) -> None:
        self.bytes = 0
        """As counted last; those that were taken since may be in it."""
        self.pressed = False
        self.share = _ANY
        """The largest piece that a connection may be given now. While the broker is pressed, only `count` raises it."""
        self._max_bytes = max_bytes
        self._connections: dict[Connection, None] = {}
        self._held: dict[Connection, int] = {}
        """The unsent bytes by connection, where there are any."""
        self._waiting: dict[Callable[[], None], int] = {}
        """What to call when there is room for a piece of some size."""
        self._risen: asyncio.Future[None] | None = None

    def add(self, connection: Connection) -> None:
        self._connections[connection] = None
        if self.pressed:
            connection.set_high_water(PRESSED_HIGH_WATER_BYTES)

    def forget(self, connection: Connection) -> None:
        self._connections.pop(connection, None)
        self.bytes -= self._held.pop(connection, 0)
        self._press_or_release()

    def note(self, connection: Connection) -> None:
        """Count one connection, after a large write, or when it has been drained."""
        if connection not in self._connections:
            return
        self._set(connection, connection.waiting_bytes)
        if not self.pressed and self._is_much():
            self._count(list(self._held))
        self._press_or_release()

    def count(self) -> None:
        """Count all connections, and let those go on for which there is room again."""
        self._count(self._connections)
        self._press_or_release()
        if self.pressed:
            self.share = self._share()
            self._rise()

    @property
    def left(self) -> int:
        return self._max_bytes - self.bytes

    async def risen(self) -> None:
        """Return when `share` has risen."""
        if self._risen is None:
            self._risen = asyncio.get_running_loop().create_future()
        await asyncio.shield(self._risen)

    def call_when_room(self, size: int, callback: Callable[[], None]) -> None:
        """Call this once, when a piece of this size may be sent."""
        self._waiting[callback] = size

    def _set(self, connection: Connection, held: int) -> None:
        self.bytes += held - self._held.pop(connection, 0)
        if held:
            self._held[connection] = held

    def _count(self, connections: Iterable[Connection]) -> None:
        for connection in connections:
            self._set(connection, connection.waiting_bytes)

    def _press_or_release(self) -> None:
        if not self.pressed and self._is_much():
            self.pressed = True
            self._set_high_water(PRESSED_HIGH_WATER_BYTES)
        elif self.pressed and 4 * self.bytes < self._max_bytes:
            self.pressed = False
            self.share = _ANY
            self._set_high_water(WRITE_HIGH_WATER_BYTES)
            self._rise()
        if self.pressed:
            self.share = min(self.share, self._share())

    def _is_much(self) -> bool:
        return 2 * self.bytes >= self._max_bytes

    def _share(self) -> int:
        return max(SHORT_BYTES, self.left // PIECES)

    def _set_high_water(self, size: int) -> None:
        for connection in list(self._connections):
            connection.set_high_water(size)

    def _rise(self) -> None:
        if self._risen is not None:
            self._risen.set_result(None)
            self._risen = None
        for callback in [callback for callback, size in self._waiting.items() if size <= self.share]:
            del self._waiting[callback]
            asyncio.get_running_loop().call_soon(callback)
