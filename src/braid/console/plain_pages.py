"""Pages of plain HTML, which need neither a token nor a websocket: the login, and that for an unknown address."""

from __future__ import annotations

from typing import Final

from braid.console.html import Html, el
from braid.console.pages.parts import LOGO

SHOWN_CHARS: Final = 200

STYLE: Final = Html(
    ".login{min-height:100vh;display:grid;place-items:center;padding:20px}"
    ".login form,.login .box{background:var(--surface);border:1px solid var(--line);border-radius:16px;padding:30px;"
    "width:380px;max-width:94vw;display:flex;flex-direction:column;gap:14px}"
    ".login input{font:13px var(--mono);padding:10px 12px;border-radius:9px;border:1px solid var(--line);"
    "background:var(--bg);color:var(--text);width:100%;box-sizing:border-box}"
    ".login input:focus{outline:2px solid var(--accent);outline-offset:-1px}"
    ".login .act.primary{justify-content:center;padding:10px}.login .brand{padding:0}"
    ".login code{overflow-wrap:anywhere}.login a.act:hover{background:var(--accent)}"
)


def login_page(stylesheet: str, *, error: str = "", dark: bool = False) -> str:
    form = el(
        "form",
        el("div", LOGO, "Braid", cls="brand"),
        el(
            "p",
            "These brokers want a token. It stays in the memory of this console, and goes only to them.",
            cls="muted",
        ),
        el("div", error, cls="outcome bad", role="alert") if error else None,
        el(
            "label",
            el("span", "Token", cls="muted"),
            el("input", name="token", type="password", autocomplete="off", autofocus=True, required=True),
        ),
        el("button", "Log in", cls="act primary", type="submit"),
        el("p", "Make one with ", el("code", "braid token create --role NAME --secret-file FILE"), cls="faint"),
        method="post",
        action="/login",
    )
    return _page("Log in", form, stylesheet, dark=dark)


def not_found_page(stylesheet: str, path: str, *, dark: bool = False) -> str:
    body = el(
        "div",
        el("div", LOGO, "Braid", cls="brand"),
        el("h1", "There is no such page"),
        el("p", "The console has nothing at ", el("code", path[:SHOWN_CHARS]), ".", cls="muted"),
        el("a", "Go to the cluster", cls="act primary", href="/"),
        el(
            "p",
            "Or see ",
            el("a", "topics", href="/topics"),
            ", ",
            el("a", "subscriptions", href="/subscriptions"),
            ".",
        ),
        cls="box",
    )
    return _page("No such page", body, stylesheet, dark=dark)


def _page(title: str, body: Html, stylesheet: str, *, dark: bool) -> str:
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title} · Braid</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<link rel="stylesheet" href="{stylesheet}"><style>{STYLE}</style></head>'
        f'<body class="{"body--dark" if dark else ""}"><main class="login">{body}</main></body></html>'
    )
