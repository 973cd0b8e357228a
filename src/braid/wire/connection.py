"""One connection: frames in, frames out, on an asyncio transport. Both ends use it.

Incoming: all frames that one wake-up completed go to the handler in one call. Outgoing: frames gather until the end of
the loop's iteration and leave in one write, so that a burst of small replies costs one system call; large payloads are
not copied to be joined with others. Frames that are many bytes together leave immediately. So `congested` is true
before the next of many senders looks at it, and together they exceed the high-water mark by one frame, not by one each.

Two limits keep a peer from costing unbounded memory (I12): the reader's frame limit, and the transport's write buffer.
An owner of many connections bounds their unfinished frames together (`on_unfinished`), and their unsent bytes
(`on_large_write`, `set_high_water`).
Above the high-water mark, senders that can wait do so in `drained`, and `on_congestion` tells the handler, which may
stop reading. A client must not stop reading because it cannot write: with both ends waiting for the other to read,
nothing would ever move again. The broker may; so only the broker does.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, cast

from braid.model.errors import BraidError, ConnectionLost
from braid.ports.disk import Buffer
from braid.wire.frame import FIRST_FRAME_BYTES, Flags, Frame, FrameReader, encode_frame
from braid.wire.operations import ErrorBody, encode, error_body

WRITE_HIGH_WATER_BYTES: Final = 1 << 20
GATHER_BYTES: Final = 64 << 10
"""Gathered frames of this size are written before the iteration ends."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long a closed connection waits for the peer to take the rest; then the rest is dropped."""
JOIN_BYTES: Final = 16 << 10
"""Payloads up to this size are joined with their neighbours; larger ones are written by themselves, uncopied."""


class Handler(Protocol):
    """The owner of a connection. All calls come from the loop, one at a time."""

    def on_connected(self, connection: Connection) -> None: ...

    def on_frames(self, frames: Sequence[Frame]) -> None:
        """Take frames. A `BraidError` raised here ends the connection, and the peer is told why."""

    def on_congestion(self, congested: bool) -> None:
        """Hear that the write buffer has passed its high-water mark, or is empty enough again. The former comes in the
        middle of a `send` or `flush`, so this must not send or close."""

    def on_lost(self, error: BraidError) -> None:
        """Hear that the connection is over. Called once, also after `close`."""


class Connection(asyncio.BufferedProtocol):
    def __init__(
        self,
        handler: Handler,
        *,
        frame_limit: int = FIRST_FRAME_BYTES,
        on_unfinished: Callable[[int], None] | None = None,
        on_large_write: Callable[[], None] | None = None,
    ) -> None:
        """`on_unfinished` hears how many bytes an unfinished frame holds, whenever that changes; 0 when it is whole.
        `on_large_write` hears of writes after which many bytes may wait for the peer."""
        self._handler = handler
        self._on_unfinished = on_unfinished
        self._on_large_write = on_large_write
        self._high_water_bytes = WRITE_HIGH_WATER_BYTES
        self._held_bytes = 0
        self.frames = FrameReader(frame_limit)
        self.peer = "?"
        self.heard_at = 0.0
        """The loop's time when the peer last sent something."""
        self.received_bytes = 0
        self.sent_bytes = 0
        self.congested = False
        self.closing = False
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._made = False
        self._told = False
        """Whether the handler knows that the connection is over."""
        self._loop = asyncio.get_running_loop()
        self._out: list[Buffer] = []
        self._gathered_bytes = 0
        self._large = False
        """Whether something in `_out` may be too large to be joined with others."""
        self._flush_planned = False
        self._drained: asyncio.Future[None] | None = None
        self._reason: BraidError | None = None
        self._close_timer: asyncio.TimerHandle | None = None

    # Sending.

    def send(
        self,
        kind: int,
        body: bytes = b"",
        payload: Sequence[Buffer] = (),
        *,
        request: int = 0,
        flags: int = 0,
    ) -> None:
        """Queue one frame. Never blocks; a caller that can wait awaits `drained()` first. The connection may keep the
        payload's buffers until the peer has taken them: do not write into them any more."""
        if self.closing:
            return
        out = self._out
        if payload:
            size = sum(map(len, payload))
            out.append(encode_frame(kind, body, request=request, flags=flags, payload_bytes=size))
            out.extend(payload)
            self._gathered_bytes += size + len(body)
            if size > JOIN_BYTES:
                self._large = True
        else:
            out.append(encode_frame(kind, body, request=request, flags=flags))
            self._gathered_bytes += len(body)
        if self._gathered_bytes >= GATHER_BYTES:
            self.flush()
        elif not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self.flush)

    def queue(self, frame: bytes) -> None:
        """Queue a small frame that is encoded already. The caller must `flush` before the iteration ends."""
        if not self.closing:
            self._out.append(frame)

    def reply(self, frame: Frame, body: bytes = b"") -> None:
        if frame.request:
            self.send(frame.kind, body, request=frame.request, flags=Flags.REPLY)

    def reply_error(self, kind: int, request: int, error: BraidError) -> None:
        if request:
            self.send(kind, encode(error_body(error)), request=request, flags=Flags.REPLY | Flags.ERROR)

    def flush(self) -> None:
        """Write what has gathered; before the connection is made, the frames wait for it."""
        self._flush_planned = False
        self._gathered_bytes = 0
        if not self._made or not self._out:
            return
        out, self._out = self._out, []
        write = self._transport.write
        if not self._large:
            data = b"".join(out) if len(out) > 1 else out[0]
            self.sent_bytes += len(data)
            write(data)
            if len(data) > JOIN_BYTES and self._on_large_write is not None:
                self._on_large_write()
            return
        self._large = False
        small: list[Buffer] = []
        for part in out:
            self.sent_bytes += len(part)
            if len(part) <= JOIN_BYTES:
                small.append(part)
                continue
            if small:
                write(b"".join(small))
                small.clear()
            write(part)
        if small:
            write(b"".join(small) if len(small) > 1 else small[0])
        if self._on_large_write is not None:
            self._on_large_write()

    def cork(self) -> None:
        """Promise a `flush` before the iteration ends, so that frames until then need not schedule one."""
        self._flush_planned = True

    async def drained(self) -> None:
        """Return when the write buffer is below its high-water mark; raise when the connection is over."""
        while self.congested and not self.closing:
            if self._drained is None:
                self._drained = self._loop.create_future()
            await asyncio.shield(self._drained)
        if self.closing:
            raise self.end_reason().again()

    @property
    def waiting_bytes(self) -> int:
        """Return how many bytes the peer has not taken yet."""
        return self._transport.get_write_buffer_size() if self._made else 0

    def set_high_water(self, size: int) -> None:
        """Be congested while more than this waits for the peer, and until three quarters of it are taken."""
        self._high_water_bytes = size
        if self._made:
            self._transport.set_write_buffer_limits(high=size)

    def pause_reading(self) -> None:
        if not self.closing:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if not self.closing:
            self._transport.resume_reading()

    # Ending.

    def close(self, reason: BraidError) -> None:
        """Send what is queued, then close. Waiters on this side get `reason`."""
        if self.closing:
            return
        self.flush()
        self._end(reason)
        self._close_transport()

    def _close_transport(self) -> None:
        if not self._made:
            # The connection may never be made: a TLS handshake can take as long as the peer likes.
            self._tell_lost()
        elif self._close_timer is None:
            self._transport.close()
            self._close_timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, reason: BraidError) -> None:
        """Close immediately, dropping what was not sent."""
        self._out.clear()
        if not self.closing:
            self._end(reason)
        if self._made:
            self._transport.abort()
        else:
            self._tell_lost()

    def refuse(self, error: BraidError) -> None:
        """Tell the peer which rule it broke, as an unasked reply, and close."""
        body: ErrorBody = error_body(error)
        self.send(0, encode(body), flags=Flags.REPLY | Flags.ERROR)
        self.close(error)

    def end_reason(self) -> BraidError:
        return self._reason if self._reason is not None else ConnectionLost(f"the connection to {self.peer} is over")

    def _end(self, reason: BraidError) -> None:
        self._reason = reason
        self.closing = True
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._made = True
        self._transport.set_write_buffer_limits(high=self._high_water_bytes)
        self.peer = _name_of(transport.get_extra_info("peername"))
        self.heard_at = self._loop.time()
        if not self.closing:
            self._handler.on_connected(self)
        self.flush()
        if self.closing:  # The connection was closed or refused before it was made, or as soon as it was.
            self._close_transport()

    def on_accepted(self) -> None:
        if not self._made:
            self.abort(ConnectionLost("the TLS handshake failed"))

    @property
    def tls(self) -> ssl.SSLObject | None:
        found: ssl.SSLObject | None = self._transport.get_extra_info("ssl_object")
        return found

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        return self.frames.buffer()

    def buffer_updated(self, count: int) -> None:
        self.heard_at = self._loop.time()
        self.received_bytes += count
        if self.closing:
            return
        try:
            frames = self.frames.received(count)
            if frames:
                self._handler.on_frames(frames)
        except BraidError as error:
            self.refuse(error)
            return
        if self._on_unfinished is not None and (held := self.frames.held_bytes) != self._held_bytes:
            self._held_bytes = held
            self._on_unfinished(held)

    def pause_writing(self) -> None:
        self.congested = True
        self._handler.on_congestion(True)

    def resume_writing(self) -> None:
        self.congested = False
        if self._drained is not None:
            self._drained.set_result(None)
            self._drained = None
        self._handler.on_congestion(False)

    def eof_received(self) -> bool:
        self.close(ConnectionLost(f"{self.peer} closed the connection"))  # this protocol has no half-closed connections
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._out.clear()
        self.frames.release()  # Handler and connection know each other: only the garbage collector frees them.
        if self._close_timer is not None:
            self._close_timer.cancel()
        if not self.closing:
            detail = f": {exc}" if exc is not None else ""
            self._end(ConnectionLost(f"the connection to {self.peer} was lost{detail}"))
        self._tell_lost()

    def _tell_lost(self) -> None:
        if not self._told:
            self._told = True
            self._handler.on_lost(self.end_reason())


def _name_of(peer: Any) -> str:
    if not isinstance(peer, tuple) or len(peer) < 2:
        return str(peer or "?")
    return f"[{peer[0]}]:{peer[1]}" if ":" in peer[0] else f"{peer[0]}:{peer[1]}"
