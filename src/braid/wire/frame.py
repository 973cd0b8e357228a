"""Frames: how requests, replies and pushes follow each other on a byte stream.

    0        4        8        12   13   14   16
    │ length │ body   │ request│kind│flag│ 0  │ body, zeros to a multiple of 8 │ payload …
             │ length │ id     │              │

`length` counts everything after the 16-byte prefix. The body is a small MessagePack array (operations.py says which for
each kind); the payload is raw bytes, in practice record batches, and begins at a multiple of 8, so that a receiver with
the frame in one buffer can read the batch's columns in place.

A reply carries the request's kind and id with the flag REPLY, and ERROR if it failed. Request id 0 wants no reply.

`FrameReader` takes bytes as they come and knows nothing of sockets. It fills either its own scratch buffer, from which
all complete small frames are cut together, or, when a larger frame has begun, that frame's own buffer directly: its
bytes are received where they stay. That buffer has room for the prefix of the next frame, too. So when large frames
follow each other, each of them takes one read, and not one for its beginning and one for the rest. Every length is
checked against the limit before it is used.
"""

from __future__ import annotations

import mmap
import struct
from enum import IntFlag
from typing import Final, NamedTuple

from braid.model.batch.header import MAX_BATCH_BYTES
from braid.model.errors import FrameTooLarge, ProtocolError
from braid.ports.allocator import unfilled

PREFIX: Final = struct.Struct(
    "<"
    "I"  #  0 length of what follows the prefix
    "I"  #  4 length of the body
    "I"  #  8 request id; 0: no reply is wanted, or a push
    "B"  # 12 kind (operations.py)
    "B"  # 13 flags
    "H"  # 14 must be 0
)
PREFIX_BYTES: Final = PREFIX.size
assert PREFIX_BYTES == 16

MAX_BODY_BYTES: Final = 4 << 20
"""Bodies are small; only the layout of a topic with many thousand segments comes near this."""
MAX_FRAME_BYTES: Final = MAX_BATCH_BYTES + MAX_BODY_BYTES
"""After the prefix: the largest batch, and any body."""
FIRST_FRAME_BYTES: Final = 64 << 10
"""Until a peer has said hello, it gets no more memory than this."""

SCRATCH_BYTES: Final = 8 << 10
"""Each connection has one scratch buffer, also when it is idle. It doubles when a read fills it."""
MAX_SCRATCH_BYTES: Final = 64 << 10
_OWN_BUFFER_BYTES: Final = 4 << 10
"""A frame that has begun and is longer than this gets a buffer of its own; shorter ones are moved to the front."""

_HEAP_BYTES: Final = 2 << 20
"""Frames up to this size, which is that of most batches, are received into memory that the process keeps; that of
larger ones comes from the system page by page, as it is written, and goes back."""

READ_BYTES: Final = 1 << 20
"""The most that is received at a time: a reader that is asked to stop holds no more than this beyond what it has."""

_KEPT_BODY_BYTES: Final = 1 << 10
"""A kept payload keeps the whole buffer of its frame, but not if the body is longer than this: a small batch could
otherwise hold on to megabytes."""

MAX_REQUEST_ID: Final = (1 << 32) - 1
_ZEROS: Final = tuple(bytes(count) for count in range(8))

_HTTP: Final = int.from_bytes(b"HTTP", "little")
"""The first bytes of an answer in HTTP, read as the length of a frame."""


class Flags(IntFlag):
    REPLY = 1
    ERROR = 2
    """Only on a reply: its body is an `ErrorBody`."""


REPLY: Final = int(Flags.REPLY)
ERROR: Final = int(Flags.ERROR)
"""As plain numbers, for code that looks at every frame: `&` of an IntFlag takes 0.7 µs."""
_KNOWN_FLAGS: Final = REPLY | ERROR


class Frame(NamedTuple):
    kind: int
    flags: int
    request: int
    body: bytes
    payload: memoryview | None
    """Writable, and the receiver's to keep; None when the frame has none."""


def encode_frame(kind: int, body: bytes = b"", *, request: int = 0, flags: int = 0, payload_bytes: int = 0) -> bytes:
    """Encode the frame up to its payload; the caller sends `payload_bytes` bytes directly after it."""
    size = len(body)
    if size > MAX_BODY_BYTES:
        raise FrameTooLarge(
            f"a body of {size} bytes is above the limit of {MAX_BODY_BYTES}: ask for less in one request"
        )
    if not payload_bytes:
        return PREFIX.pack(size, size, request, kind, flags, 0) + body
    gap = -size % 8
    return PREFIX.pack(size + gap + payload_bytes, size, request, kind, flags, 0) + body + _ZEROS[gap]


class FrameReader:
    """Receives bytes into `buffer()` and returns complete frames from `received()`."""

    __slots__ = ("_end", "_own", "_own_bytes", "_scratch", "_view", "held_bytes", "limit", "partial_bytes")

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        """The largest `length` that is accepted; may be raised at any time."""
        self.partial_bytes = 0
        """How much of an unfinished frame has arrived: 0 between frames."""
        self.held_bytes = 0
        """The same for a frame that has a buffer of its own; others hold nothing extra, nor does a prefix alone."""
        self._scratch = bytearray(SCRATCH_BYTES)
        self._view = memoryview(self._scratch)
        self._end = 0  # how far the scratch buffer is filled, or the frame's own buffer if there is one
        self._own: memoryview | None = None
        self._own_bytes = 0  # how long the frame is that has its own buffer

    def buffer(self) -> memoryview:
        """Return the memory for the next bytes; never empty."""
        if self._own is None:
            return self._view[self._end :]
        return self._own[self._end : self._end + READ_BYTES]

    def release(self) -> None:
        """Free the memory of a reader that is of no more use: its connection is over."""
        self._own = None
        self._scratch = bytearray()
        self._view = memoryview(self._scratch)
        self._end = self.partial_bytes = self.held_bytes = 0

    def received(self, count: int) -> list[Frame]:
        """Take `count` bytes that were written into `buffer()`, and return the frames that are complete now. After an
        error, the rest of the stream means nothing, and the reader is of no more use."""
        self._end += count
        own = self._own
        if own is not None:
            size = self._own_bytes
            if self._end < size:
                self.partial_bytes = self.held_bytes = self._end
                return []
            self._own = None
            rest = self._end - size
            self._end = self.partial_bytes = self.held_bytes = 0
            frame = _whole_frame(own[:size])
            if not rest:
                return [frame]
            self._scratch[:rest] = own[size : size + rest]
            self._end = rest
            return [frame, *self._cut_or_end()]
        return self._cut_or_end()

    def _cut_or_end(self) -> list[Frame]:
        try:
            return self._cut_frames()
        except ProtocolError:
            self._end = 0  # A transport that is closing may still ask for room.
            raise

    def _cut_frames(self) -> list[Frame]:
        scratch, view, end = self._scratch, self._view, self._end
        frames: list[Frame] = []
        new, unpack_from, check = tuple.__new__, PREFIX.unpack_from, self._check  # a hot loop: once for each frame
        at = 0
        while end - at >= PREFIX_BYTES:
            length, body_length, request, kind, flags, zero = unpack_from(scratch, at)
            check(length, body_length, flags, zero)
            start = at + PREFIX_BYTES
            stop = start + length
            if stop > end:
                if length > _OWN_BUFFER_BYTES:
                    self._begin_own(at, PREFIX_BYTES + length)
                    return frames
                break
            body = bytes(view[start : start + body_length])
            payload_at = start + body_length + (-body_length % 8)
            payload = memoryview(bytearray(view[payload_at:stop])) if payload_at < stop else None
            frames.append(new(Frame, (kind, flags, request, body, payload)))
            at = stop
        rest = end - at
        if end == len(scratch) and end < MAX_SCRATCH_BYTES:
            self._scratch = bytearray(2 * end)
            self._scratch[:rest] = scratch[at:end]
            self._view = memoryview(self._scratch)
        elif at and rest:
            scratch[:rest] = scratch[at:end]
        self._end = self.partial_bytes = rest
        return frames

    def _begin_own(self, at: int, size: int) -> None:
        # No reader sees what was in this memory before: a frame is handed on when all of it has arrived.
        room = size + PREFIX_BYTES
        frame = memoryview(unfilled(room) if size <= _HEAP_BYTES else mmap.mmap(-1, room))
        rest = self._end - at
        frame[:rest] = self._view[at : self._end]
        self._own = frame
        self._own_bytes = size
        self._end = self.partial_bytes = rest
        self.held_bytes = rest if rest > PREFIX_BYTES else 0

    def _check(self, length: int, body_length: int, flags: int, zero: int) -> None:
        if zero or flags & ~_KNOWN_FLAGS:
            if length == _HTTP:
                raise ProtocolError(
                    "the peer answers in HTTP and does not speak Braid's protocol: this may be the port of a broker's "
                    "REST interface, and not that for clients, which is 6660 unless it was set"
                )
            raise ProtocolError("these bytes are no frame: the peer does not speak Braid's protocol, or lost its place")
        if length > self.limit:
            raise FrameTooLarge(f"a frame of {length} bytes was announced; the limit is {self.limit}")
        if body_length > length or body_length > MAX_BODY_BYTES:
            raise ProtocolError(f"a frame of {length} bytes says that its body has {body_length}")
        if 0 < length - body_length < -body_length % 8:
            raise ProtocolError(f"a frame of {length} bytes ends within the padding after its body of {body_length}")


def _whole_frame(view: memoryview) -> Frame:
    _, body_length, request, kind, flags, _ = PREFIX.unpack_from(view)
    stop = PREFIX_BYTES + body_length
    payload_at = stop + (-body_length % 8)
    payload = view[payload_at:] if payload_at < len(view) else None
    if payload is not None and body_length > _KEPT_BODY_BYTES:
        payload = memoryview(bytearray(payload))
    return Frame(kind, flags, request, bytes(view[PREFIX_BYTES:stop]), payload)
