"""What the console refuses before any page: other names, other origins, other sites. And its sessions."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from braid.console.guard import ConsoleGuard, refusal
from braid.console.html import Html, el, join
from braid.console.sessions import IDLE_S, MAX_SESSIONS, Sessions, cookie_header

HERE = {"host": "127.0.0.1:8670"}


@pytest.mark.parametrize(
    ("headers", "refused"),
    [
        (HERE, False),
        ({"host": "localhost:8670", "origin": "http://localhost:8670"}, False),
        ({"host": "braid.example:443"}, False),
        ({"host": "BRAID.example"}, False),
        ({"host": "evil.example:8670"}, True),  # DNS rebinding: the name points here.
        ({"host": "evil.example:8670", "origin": "http://evil.example:8670"}, True),
        ({}, True),
        ({**HERE, "origin": "http://evil.example"}, True),
        ({**HERE, "origin": "http://127.0.0.1:9999"}, True),
        ({**HERE, "origin": "null"}, True),
        ({**HERE, "origin": "http://["}, True),
        ({**HERE, "sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"}, True),
        ({**HERE, "sec-fetch-site": "same-site", "sec-fetch-mode": "no-cors"}, True),
        ({**HERE, "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),  # A link.
        ({**HERE, "sec-fetch-site": "same-origin", "sec-fetch-mode": "websocket"}, False),
    ],
)
def test_only_this_console_s_own_pages_may_use_it(headers: dict[str, str], refused: bool) -> None:
    assert (refusal(headers, {"braid.example"}) is not None) is refused


async def _asked(kind: str, headers: dict[str, str]) -> tuple[bool, list[Message]]:
    """Ask the guard. Returns whether the application was reached, and what was sent."""
    reached = False
    sent: list[Message] = []

    async def app(_: Scope, __: Receive, send: Send) -> None:
        nonlocal reached
        reached = True
        if kind == "http":
            start: dict[str, Any] = {"type": "http.response.start", "status": 200}
            await send(start | {"headers": [(b"access-control-allow-origin", b"*")]})

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    await ConsoleGuard(app, ["Braid.Example"])({"type": kind, "headers": encoded}, receive, send)
    return reached, sent


async def test_a_websocket_of_another_site_is_closed() -> None:
    reached, sent = await _asked("websocket", {**HERE, "origin": "http://evil.example"})
    assert not reached
    assert (sent[0]["type"], sent[0]["code"]) == ("websocket.close", 1008)
    assert (await _asked("websocket", {**HERE, "origin": "http://127.0.0.1:8670"}))[0]


async def test_answers_forbid_frames_and_other_origins() -> None:
    reached, sent = await _asked("http", HERE)
    headers = dict(sent[0]["headers"])
    assert reached
    assert b"access-control-allow-origin" not in headers
    assert b"frame-ancestors 'none'" in headers[b"content-security-policy"]
    assert b"connect-src 'self'" in headers[b"content-security-policy"]
    reached, sent = await _asked("http", {"host": "evil.example"})
    assert (reached, sent[0]["status"]) == (False, 403)
    assert b"frame-ancestors 'none'" in dict(sent[0]["headers"])[b"content-security-policy"], "also of a refusal"


@pytest.mark.parametrize("name", ["braid.example", "Braid.Example:443", "BRAID.EXAMPLE"])
async def test_a_name_that_is_allowed_is_so_in_any_case(name: str) -> None:
    assert (await _asked("http", {"host": name}))[0]


# Sessions.


def test_a_session_is_known_by_its_id_alone_and_ends() -> None:
    sessions = Sessions()
    first, second = sessions.open("token-1"), sessions.open("token-2")
    assert first != second
    assert len(first) >= 40
    assert "token" not in first
    assert (sessions.token(first), sessions.token(second)) == ("token-1", "token-2")
    assert (sessions.token(None), sessions.token(""), sessions.token("guess")) == (None, None, None)
    sessions.close(first)
    assert sessions.token(first) is None


def test_a_session_that_nobody_uses_ends() -> None:
    now = 0.0
    sessions = Sessions(lambda: now)
    id_ = sessions.open("token")
    now = IDLE_S - 1
    assert sessions.token(id_) == "token"
    now = 2 * IDLE_S - 2
    assert sessions.token(id_) == "token", "use keeps it"
    now = 4 * IDLE_S
    assert sessions.token(id_) is None


def test_sessions_are_bounded_and_the_unused_go_first() -> None:
    sessions = Sessions()
    ids = [sessions.open(f"token-{number}") for number in range(MAX_SESSIONS)]
    assert sessions.token(ids[0]) == "token-0"
    sessions.open("one more")
    assert sessions.token(ids[1]) is None
    assert sessions.token(ids[0]) == "token-0"


def test_a_cookie_is_for_this_site_s_own_pages() -> None:
    cookie = cookie_header("abc", secure=True)
    assert cookie.startswith("braid-console=abc;")
    assert all(word in cookie for word in ("HttpOnly", "SameSite=Strict", "Secure", "Path=/"))
    assert "Max-Age=0" in cookie_header("", secure=False)


# HTML.


def test_text_is_escaped_and_markup_is_not() -> None:
    assert el("td", "<b>", el("i", "x"), cls="n") == '<td class="n">&lt;b&gt;<i>x</i></td>'
    assert el("a", "x", href='"><script>') == '<a href="&quot;&gt;&lt;script&gt;">x</a>'
    assert el("input", disabled=True, value=None, data_act="go") == '<input disabled data-act="go">'
    assert el("tr", data_segment=0) == '<tr data-segment="0"></tr>'
    assert join(["a&b", Html("<br>"), None, ["c", ["<d>"]]]) == "a&amp;b<br>c&lt;d&gt;"
