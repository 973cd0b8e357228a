"""What stands in front of the console's pages: no other web site may use them.

A console on a developer's machine has no password, and any page that the developer opens can send requests to
127.0.0.1. It could also open a websocket, to which browsers apply no rule of their own. Three checks stop that:

- `Host` must be an address, `localhost`, or a name that the operator has allowed: otherwise another site could let its
  own name point here and be of the same origin (DNS rebinding);
- `Origin`, where it is sent, must be this host: of each websocket, each form, and each request that a script makes;
- a browser that says `Sec-Fetch-Site: cross-site` may only follow a link.

Cookies are `SameSite=Strict` beside it (`sessions.py`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from braid.wire.web_origin import names_this_machine

POLICY: Final = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self' data:; connect-src 'self'; object-src 'none'; base-uri 'self'; "
    "form-action 'self'; frame-ancestors 'none'"
)
"""Scripts of the pages are inline, as NiceGUI writes them; but nothing is loaded from elsewhere or sent there."""
HEADERS: Final = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),  # With no-referrer, browsers send no Origin with the console's own forms.
)


def refusal(headers: Mapping[str, str], allowed: Collection[str]) -> str | None:
    """Return why a request is refused; None if it is not. `allowed` are the names of this console beside addresses."""
    host = headers.get("host", "")
    if not names_this_machine(host) and _name(host) not in allowed:
        return (
            f"this console does not answer to the name {_name(host)[:80]!r}: use its address, or start it with "
            "--allow-host NAME"
        )
    origin = headers.get("origin")
    if origin is not None and _netloc(origin) != host.lower():
        return "a page of another origin may not use this console"
    if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
        return "a page of another site may not use this console"
    return None


def _name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""


class ConsoleGuard:
    """An ASGI application around the console's: HTTP and websockets."""

    def __init__(self, app: ASGIApp, allowed_hosts: Collection[str] = ()) -> None:
        self.app = app  # NiceGUI looks for its application behind this name.
        self._allowed = frozenset(name.lower() for name in allowed_hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        reason = refusal(headers, self._allowed)
        if reason is None:
            await self.app(scope, receive, _with_headers(send) if scope["type"] == "http" else send)
        elif scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": reason})
        else:
            await _refuse(send, reason)


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            kept = [(name, value) for name, value in message["headers"] if name != b"access-control-allow-origin"]
            message = {**message, "headers": [*kept, *HEADERS]}
        await send(message)

    return send_with_headers


async def _refuse(send: Send, reason: str) -> None:
    body = reason.encode()
    headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": body})
