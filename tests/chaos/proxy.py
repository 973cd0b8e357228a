"""A TCP proxy in front of a broker: the broker advertises its address, so that clients and other brokers go through it.

It cuts all connections, or holds the bytes of one direction or of both back. Bytes that are held back stay in the
kernel's buffers, as on a network that loses every packet; they arrive when the proxy is mended.
"""

from __future__ import annotations

import asyncio
from typing import Self


class Proxy:
    """Everything here runs on the loop that has opened the proxy."""

    def __init__(self, port: int, broker_port: int) -> None:
        self.port = port
        self.broker_port = broker_port
        self.refuses = False
        self.holds_to_broker = False
        self.holds_from_broker = False
        self._ends: set[_End] = set()
        self._server: asyncio.Server | None = None
        self._connecting: set[asyncio.Task[None]] = set()

    async def open(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self, to_broker=True), "127.0.0.1", self.port)
        return self

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._connecting:
            task.cancel()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def cut(self) -> None:
        """Reset every connection, and refuse new ones until `mend`."""
        self.refuses = True
        for end in list(self._ends):
            end.abort()

    def hold(self, *, to_broker: bool, from_broker: bool) -> None:
        """Let no byte pass in these directions until `mend`."""
        self.holds_to_broker, self.holds_from_broker = to_broker, from_broker
        self._look()

    def mend(self) -> None:
        self.refuses = self.holds_to_broker = self.holds_from_broker = False
        self._look()

    def add(self, end: _End) -> None:
        self._ends.add(end)
        if end.to_broker:
            task = asyncio.get_running_loop().create_task(self._connect(end))
            self._connecting.add(task)
            task.add_done_callback(self._connecting.discard)

    def remove(self, end: _End) -> None:
        self._ends.discard(end)

    def _look(self) -> None:
        for end in self._ends:
            end.look()

    async def _connect(self, client: _End) -> None:
        broker = _End(self, to_broker=False)
        try:
            await asyncio.get_running_loop().create_connection(lambda: broker, "127.0.0.1", self.broker_port)
        except OSError:
            client.abort()
            return
        client.join(broker)


class _End(asyncio.Protocol):
    """One of the two connections of a pair. It reads while the other one takes bytes and nothing holds them back."""

    def __init__(self, proxy: Proxy, *, to_broker: bool) -> None:
        self.to_broker = to_broker
        """Whether what it reads goes to the broker."""
        self._proxy = proxy
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._other_is_full = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._proxy.refuses:
            transport.abort()
            return
        transport.pause_reading()
        self._proxy.add(self)

    def join(self, other: _End) -> None:
        if self._transport is None or self._transport.is_closing():
            other.abort()
            return
        self._other, other._other = other, self
        self.look()
        other.look()

    def look(self) -> None:
        transport, proxy = self._transport, self._proxy
        if transport is None or transport.is_closing() or self._other is None:
            return
        held = proxy.holds_to_broker if self.to_broker else proxy.holds_from_broker
        if held or self._other_is_full:
            transport.pause_reading()
        else:
            transport.resume_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.write(data)

    def pause_writing(self) -> None:
        self._tell_other(full=True)

    def resume_writing(self) -> None:
        self._tell_other(full=False)

    def _tell_other(self, *, full: bool) -> None:
        if self._other is not None:
            self._other._other_is_full = full
            self._other.look()

    def connection_lost(self, error: Exception | None) -> None:
        self._proxy.remove(self)
        self._transport = None
        if self._other is not None:
            other, self._other = self._other, None
            if other._transport is not None:
                other._transport.close()  # What it was given already still leaves.

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
