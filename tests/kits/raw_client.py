"""A client that can be as wrong as a test wants, on a blocking socket; and a broker process that is looked at."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import resource
import socket
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from braid.model.errors import BraidError
from braid.ports.network import Address
from braid.testing.processes import BRAID, BrokerProcess
from braid.wire.frame import Flags, Frame, FrameReader, encode_frame
from braid.wire.operations import (
    MAGIC,
    VERSION,
    AdminReply,
    AdminRequest,
    B,
    ErrorBody,
    Hello,
    HelloReply,
    Kind,
    Topology,
    TopologyRequest,
    decode,
    encode,
    error_from,
)

TIMEOUT_S = 20.0
HELLO = Hello(MAGIC, VERSION, VERSION, "raw/1")


class Ended(Exception):
    """The broker closed the connection."""


class RawClient:
    def __init__(self, address: Address, *, hello: bool = True) -> None:
        self.socket = socket.create_connection(address, timeout=TIMEOUT_S)
        self.pushes: list[Frame] = []
        self._reader = FrameReader()
        self._frames: list[Frame] = []
        self._replies: dict[int, Frame] = {}
        self._ids = itertools.count(1)
        if hello:
            try:
                self.hello = self.ask(Kind.HELLO, HELLO, HelloReply)
            except BaseException:
                self.socket.close()
                raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.socket.close()

    def send(self, kind: int, body: Any = b"", payload: bytes | bytearray = b"", *, request: int | None = None) -> int:
        """Send a request; its id. Bodies may be messages, bytes, or anything that is to be encoded as it is."""
        number = next(self._ids) if request is None else request
        if isinstance(body, msgspec.Struct):
            body = encode(body)
        elif not isinstance(body, bytes):
            body = msgspec.msgpack.encode(body)
        self.socket.sendall(encode_frame(kind, body, request=number, payload_bytes=len(payload)) + payload)
        return number

    def next_frame(self) -> Frame:
        while not self._frames:
            room = self._reader.buffer()
            try:
                count = self.socket.recv_into(room)
            except ConnectionResetError:
                count = 0
            if not count:
                raise Ended
            self._frames += self._reader.received(count)
        return self._frames.pop(0)

    def reply(self, request: int) -> Frame:
        """The reply to this request. An error is raised."""
        while (frame := self._replies.pop(request, None)) is None:
            got = self.next_frame()
            if not got.flags:
                self.pushes.append(got)
            elif got.request:
                self._replies[got.request] = got
            else:
                raise error_from(decode(ErrorBody, got.body))
        if frame.flags & Flags.ERROR:
            raise error_from(decode(ErrorBody, frame.body))
        return frame

    def ask(self, kind: int, body: Any, reply: type[B], payload: bytes | bytearray = b"") -> B:
        return decode(reply, self.reply(self.send(kind, body, payload)).body)

    def push(self, kind: int) -> Frame:
        """The next push of this kind; others are dropped."""
        while True:
            frame = self.pushes.pop(0) if self.pushes else self.next_frame()
            if not frame.flags and frame.kind == kind:
                return frame

    def ping(self) -> None:
        self.reply(self.send(Kind.PING))

    def admin(self, call: str, **arguments: Any) -> Any:
        return self.ask(Kind.ADMIN, AdminRequest(call, arguments), AdminReply).result

    def topic(self, path: str) -> Topology:
        return self.ask(Kind.TOPOLOGY, TopologyRequest((path,)), Topology)

    def ended_with(self) -> BraidError | None:
        """Reads to the end of the connection; why the broker closed it, if it said so."""
        reason: BraidError | None = None
        while True:
            try:
                frame = self.next_frame()
            except Ended:
                return reason
            if frame.flags & Flags.ERROR:
                reason = error_from(decode(ErrorBody, frame.body))


class WatchedBroker(BrokerProcess):
    """A broker with settings of its own, which a test looks at from outside."""

    def __init__(self, folder: Path, *, braid: Sequence[str] = BRAID, **settings: Any) -> None:
        config = folder / "broker.toml"
        config.write_text("".join(_toml(settings)))
        super().__init__(folder / "data", "--config", str(config), braid=braid)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def resident_bytes(self) -> int:
        statm = Path(f"/proc/{self.pid}/statm").read_text()
        return int(statm.split()[1]) * resource.getpagesize()

    @property
    def open_sockets(self) -> int:
        sockets = 0
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed since it was listed
                sockets += os.readlink(entry).startswith("socket:")
        return sockets

    def connect(self, *, hello: bool = True) -> RawClient:
        return RawClient(self.address, hello=hello)

    def end(self) -> None:
        """In order. A broker that breaks on the way fails the test."""
        assert self.stop() == 0, self.log[-4000:]


def _toml(settings: dict[str, Any]) -> list[str]:
    plain = [f"{name} = {json.dumps(value)}\n" for name, value in settings.items() if not isinstance(value, dict)]
    tables = [(name, value) for name, value in settings.items() if isinstance(value, dict)]
    for name, table in tables:
        plain += [f"[{name}]\n", *_toml(table)]
    return plain


def tracebacks(log: str) -> list[str]:
    """What broke in the broker without anybody expecting it."""
    return re.findall(r"Traceback \(most recent call last\):.*?(?=^\S)", log, flags=re.MULTILINE | re.DOTALL)
