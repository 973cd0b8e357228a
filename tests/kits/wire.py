"""For tests of the wire: handlers that write down what they see, and a broker that answers as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from braid.model.errors import BraidError
from braid.ports.network import Address, Listener, Network
from braid.wire.connection import Connection
from braid.wire.frame import MAX_FRAME_BYTES, Frame
from braid.wire.operations import VERSION, HelloReply, Kind, encode


class Recorder:
    """A handler that keeps everything."""

    def __init__(self) -> None:
        self.connection = Connection(self, frame_limit=MAX_FRAME_BYTES)
        self.frames: list[Frame] = []
        self.congestion: list[bool] = []
        self.lost: list[BraidError] = []
        self.on_frame: Callable[[Frame], None] | None = None
        self.changed = asyncio.Event()

    def on_connected(self, connection: Connection) -> None:
        assert connection is self.connection
        self.changed.set()

    def on_frames(self, frames: Sequence[Frame]) -> None:
        for frame in frames:
            self.frames.append(frame)
            if self.on_frame is not None:
                self.on_frame(frame)
        self.changed.set()

    def on_congestion(self, congested: bool) -> None:
        self.congestion.append(congested)
        self.changed.set()

    def on_lost(self, error: BraidError) -> None:
        self.lost.append(error)
        self.changed.set()

    async def until(self, so: Callable[[], object], timeout_s: float = 30.0) -> None:
        """Wait until something that this handler sees has become so."""
        async with asyncio.timeout(timeout_s):
            while not so():
                self.changed.clear()
                await self.changed.wait()


class RecordingTransport(asyncio.Transport):
    """Takes what is written and does nothing with it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.ended: list[str] = []

    @property
    def data(self) -> bytes:
        return b"".join(self.written)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("::1", 7) if name == "peername" else default

    def close(self) -> None:
        self.ended.append("closed")

    def abort(self) -> None:
        self.ended.append("aborted")


class RawBroker:
    """Says hello, answers each PING, and everything else as `answers` says; what has no answer gets none."""

    def __init__(self, *, heartbeat_ms: int = 1_000, hello: bool = True) -> None:
        self.answers: dict[int, Callable[[Connection, Frame], None]] = {
            Kind.PING: lambda connection, frame: connection.reply(frame)
        }
        if hello:
            reply = HelloReply(VERSION, "scripted", MAX_FRAME_BYTES, heartbeat_ms)
            self.answers[Kind.HELLO] = lambda connection, frame: connection.reply(frame, encode(reply))
        self.peers: list[Recorder] = []
        self.listener: Listener

    async def listen(self, network: Network, host: str = "127.0.0.1", port: int = 0) -> Address:
        self.listener = await network.listen(host, port, self._accept)
        return self.listener.address

    def _accept(self) -> Connection:
        peer = Recorder()

        def answer(frame: Frame) -> None:
            if (action := self.answers.get(frame.kind)) is not None:
                action(peer.connection, frame)

        peer.on_frame = answer
        self.peers.append(peer)
        return peer.connection
