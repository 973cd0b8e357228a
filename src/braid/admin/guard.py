"""What stands in front of the REST API: tokens, limits, and the defence against other people's web pages.

With authentication on, every path wants a valid token, before a byte of the body is read, except those that say nothing
about anybody's data (`PUBLIC`). What the bearer may do is decided by each call. `/metrics` names topics and
subscriptions; it wants a token and no grant, so that a monitoring system gets a role that may do nothing else.

A broker's admin port on a developer's machine has no password, and any web page that the developer opens can send
requests to 127.0.0.1. Two checks stop it, the same as in Go's `CrossOriginProtection` and in other local services:

- a request that changes something must not come from a page of another origin (`Sec-Fetch-Site`, else `Origin`);
- without authentication, a loopback port answers only to names that can only mean this machine (`Host`): otherwise a
  page could let its own name point to 127.0.0.1 and be of the same origin (DNS rebinding).

Programs other than browsers send neither header and notice nothing.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from email.utils import formatdate
from typing import Final

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from braid.admin.status import ErrorBody, body_of, headers_of
from braid.broker.auth import Access
from braid.model.errors import Unauthenticated
from braid.wire.web_origin import SAFE_METHODS, comes_from_elsewhere, names_this_machine

MAX_BODY_BYTES: Final = 1 << 20
MAX_HEAD_BYTES: Final = 32 << 10
"""Of a request's head. A token has at most half of it."""
HEAD_TOO_LONG: Final = 431
MAX_REQUESTS: Final = 64
"""In flight at the same time. An operator's tools need a few."""
NEVER_REFUSED: Final = frozenset({"/healthz", "/readyz", "/metrics"})
"""These say how a broker is that has too much to do."""
PUBLIC: Final = frozenset(
    {"/", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json", "/healthz", "/readyz"}
)
METHODS: Final = SAFE_METHODS | {"PUT", "POST", "DELETE", "PATCH", "TRACE", "CONNECT"}

UNKNOWN: Final = ErrorBody("error", "the broker could not do this and does not know why; see its log", False)

_log: Final = logging.getLogger(__name__)


def token_of(headers: Mapping[str, str]) -> str:
    """The bearer token of a request; empty without one. Raises Unauthenticated."""
    header = headers.get("authorization", "")
    if not header:
        return ""
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated("the Authorization header must be 'Bearer' and a token")
    return token.strip()


class Guard:
    """An ASGI application around another. Also answers for it when it breaks, and counts."""

    def __init__(self, app: ASGIApp, access: Access, *, check_host: bool) -> None:
        self._app = app
        self._access = access
        self._check_host = check_host
        self._in_flight = 0
        self.answered: Counter[tuple[str, int]] = Counter()
        """By method and status."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["type"] == "http", "the server is set up without websockets and lifespan"
        method = scope["method"] if scope["method"] in METHODS else "OTHER"
        begun = False

        async def send_counted(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                self.answered[method, message["status"]] += 1
                message = {**message, "headers": [*message["headers"], *_common_headers()]}
            await send(message)

        headers = _headers(scope)
        refusal = self._refusal(scope, headers)
        if refusal is not None:
            return await _answer(send_counted, *refusal)
        self._in_flight += 1
        try:
            replay = await _read_body(receive, headers)
            if replay is None:
                return await _answer(send_counted, 413, _too_large())
            if method == "HEAD":
                scope = {**scope, "method": "GET"}  # the server leaves out the body
            await self._app(scope, replay, send_counted)
        except Exception:
            _log.exception("a %s of %s broke", method, scope["path"])
            if not begun:
                await _answer(send_counted, 500, UNKNOWN)
        finally:
            self._in_flight -= 1

    def _refusal(self, scope: Scope, headers: Mapping[str, str]) -> tuple[int, ErrorBody] | None:
        if _head_bytes(scope) > MAX_HEAD_BYTES:
            return HEAD_TOO_LONG, head_too_long()
        if self._check_host and not names_this_machine(headers.get("host", "localhost")):
            return 403, ErrorBody(
                "permission-denied",
                "this admin port listens on the loopback address and answers only to 'localhost' and to addresses in "
                "the Host header; a proxy in front of it must set one of these",
                False,
            )
        if comes_from_elsewhere(scope["method"], headers):
            return 403, ErrorBody(
                "permission-denied", "a web page of another origin may not change anything here", False
            )
        if self._in_flight >= MAX_REQUESTS and scope["path"] not in NEVER_REFUSED:
            return 503, ErrorBody("overloaded", f"{MAX_REQUESTS} requests are being answered; try again", True)
        if scope["path"] not in PUBLIC:
            try:
                principal = self._access.authenticate(token_of(headers) if self._access.enabled else "")
            except Unauthenticated as error:
                return 401, body_of(error)
            scope.setdefault("state", {})["principal"] = principal
        return None


def _headers(scope: Scope) -> dict[str, str]:
    return {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}


def _common_headers() -> list[tuple[bytes, bytes]]:
    return [
        (b"date", formatdate(usegmt=True).encode()),
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"DENY"),
        (b"referrer-policy", b"no-referrer"),
    ]


def _head_bytes(scope: Scope) -> int:
    return (
        len(scope["raw_path"])
        + len(scope["query_string"])
        + sum(len(name) + len(value) for name, value in scope["headers"])
    )


def head_too_long() -> ErrorBody:
    return ErrorBody(
        "too-large", f"the head of the request is above {MAX_HEAD_BYTES} bytes, the most that is read", False
    )


def _too_large() -> ErrorBody:
    return ErrorBody("too-large", f"the body is above {MAX_BODY_BYTES} bytes, the most that is read", False)


async def _read_body(receive: Receive, headers: Mapping[str, str]) -> Receive | None:
    """The whole body, to be received once more; None if it is too large, of which at most the limit is read."""
    length = headers.get("content-length", "0")
    if not length.isdigit() or int(length) > MAX_BODY_BYTES:
        return None
    body = bytearray()
    more = length != "0" or "transfer-encoding" in headers
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            break
        body += message.get("body", b"")
        if len(body) > MAX_BODY_BYTES:
            return None
        more = message.get("more_body", False)
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": bytes(body), "more_body": False}

    return replay


async def _answer(send: Send, status: int, body: ErrorBody) -> None:
    data = body.json()
    headers = {"content-type": "application/json", "content-length": str(len(data)), **headers_of(status)}
    encoded = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": data})
