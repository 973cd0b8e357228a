"""HTTP on the broker's own event loop.

uvicorn's HTTP/1.1 protocol does the work, without its `Server`: that one takes over signals, wakes up ten times a
second, and has no limit for a client that sends half a request and then nothing. What is needed of it fits here: bound
the connections and their time, and close in order.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle
from uvicorn.server import ServerState

from braid.admin.app import build_app
from braid.admin.guard import HEAD_TOO_LONG, MAX_HEAD_BYTES, head_too_long
from braid.admin.status import ErrorBody
from braid.ports.tasks import cancel
from braid.wire.web_origin import is_loopback

if TYPE_CHECKING:
    from braid.broker.broker import Broker

MAX_CONNECTIONS: Final = 512
"""Beyond it, connections are dropped as they come."""
REQUEST_TIMEOUT_S: Final = 15.0
"""A request, head and body, must be here so long after its connection, or after the answer before it."""
ANSWER_TIMEOUT_S: Final = 120.0
"""And its answer must be written so long after that, whether we or a client that does not read are to blame."""
KEEP_ALIVE_S: Final = 10
LINGER_S: Final = 2.0
"""How long a refused client may go on sending before it is cut off. A connection that is closed while bytes arrive is
reset, and the client may never see the answer."""
CLOSE_TIMEOUT_S: Final = 5.0
"""How long requests in flight may take when the broker stops."""


class _Connection(H11Protocol):
    """uvicorn's, with a limit for the number of connections and for the time that a request takes to arrive."""

    _deadline: asyncio.TimerHandle | None = None
    _refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()
        else:
            self._start_deadline(REQUEST_TIMEOUT_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, or a head that is too long: then h11 has as much of it as it may keep."""
        status, body = 400, ErrorBody("invalid-argument", msg, False)
        if len(self.conn.trailing_data[0]) > MAX_HEAD_BYTES:
            status, body = HEAD_TOO_LONG, head_too_long()
        data = body.json()
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(data)}\r\nconnection: close\r\n\r\n".encode()
            + data
        )
        self._refused = True
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._start_deadline(LINGER_S)
        else:
            self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        cycle: RequestResponseCycle | None = self.cycle  # None before the first request
        if cycle is not None and not cycle.more_body and not cycle.response_complete:
            self._start_deadline(ANSWER_TIMEOUT_S)

    def on_response_complete(self) -> None:
        self._start_deadline(REQUEST_TIMEOUT_S)
        super().on_response_complete()

    def _start_deadline(self, seconds: float) -> None:
        self._stop_deadline()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None


class Connections:
    """The application, and the connections that ask it."""

    def __init__(self, broker: Broker, host: str) -> None:
        app = build_app(broker, check_host=is_loopback(host) and not broker.front_door.access.enabled)
        self._config = Config(
            app=app,
            http=_Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",
            access_log=False,
            proxy_headers=False,
            server_header=False,
            date_header=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
        )
        self._config.load()
        self._state = ServerState()
        self._app_state: dict[str, Any] = {}

    def accept(self) -> asyncio.Protocol:
        """Make the protocol of one more connection."""
        loop = asyncio.get_running_loop()
        return _Connection(config=self._config, server_state=self._state, app_state=self._app_state, _loop=loop)

    async def close(self) -> None:
        """Let what is being answered be answered, then cut. Closing twice is fine."""
        for connection in list(self._state.connections):
            connection.shutdown()
        if self._state.tasks:
            _, late = await asyncio.wait(list(self._state.tasks), timeout=CLOSE_TIMEOUT_S)
            await cancel(late)
        for connection in list(self._state.connections):
            connection.transport.abort()
