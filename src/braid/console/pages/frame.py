"""What surrounds every page: navigation, title, messages about the console itself, theme and keys."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from nicegui import ui

from braid.console.html import Html, el, join
from braid.console.pages.parts import LOGO, icon
from braid.console.pages.visit import Visit

PAGES: Final = (
    ("cluster", "/", "hub", "Cluster", "c"),
    ("topics", "/topics", "waves", "Topics", "t"),
    ("messages", "/messages", "mail_outline", "Messages", "m"),
    ("subscriptions", "/subscriptions", "inbox", "Subscriptions", "s"),
    ("pipeline", "/pipeline", "account_tree", "Pipeline", "p"),
)
KEYS: Final = (
    ("g c · g t · g m · g s · g p", "go to a page"),
    ("/", "search"),
    ("+ · − · 0", "zoom the braid in, out, and back"),
    ("Ctrl or Alt + wheel", "zoom the braid at the pointer; with Shift only in time"),
    ("Enter", "in a field of a dialog: press its button"),
    ("d", "light or dark"),
    ("?", "this list"),
)


@contextmanager
def frame(visit: Visit, page: str, title: str) -> Iterator[ui.element]:
    """Write the frame; the page goes inside."""
    ui.page_title(f"{title} · Braid")
    ui.colors(primary="#2b50c8", negative="#b42318")
    theme = ui.context.client.request.cookies.get("braid-theme")
    dark = ui.dark_mode({"dark": True, "light": False}.get(theme or ""))
    ui.on("theme", lambda event: dark.set_value(bool(_arguments(event).get("dark"))))
    ui.on("keys", lambda: _show_keys())
    with ui.element("div").classes("shell"):
        ui.html(_navigation(visit, page), sanitize=False, tag="nav").classes("side")
        with ui.element("div").classes("main") as main:  # Inside the page's <main>, which NiceGUI writes.
            visit.live(lambda: _messages(visit), cls="stack")
            yield main


def _arguments(event: Any) -> dict[str, Any]:
    given = event.args
    return given if isinstance(given, dict) else {}


def _navigation(visit: Visit, page: str) -> Html:
    items = [
        el(
            "a",
            icon(sign),
            el("span", name),
            el("kbd", f"g {key}"),
            cls="item here" if id_ == page else "item",
            href=path,
            aria_current="page" if id_ == page else None,
        )
        for id_, path, sign, name, key in PAGES
    ]
    log_out = (
        el("form", el("button", icon("logout"), "Log out", title="Log out"), method="post", action="/logout")
        if visit.token
        else None
    )
    foot = el(
        "div",
        el("span", icon("lock"), " read-only") if visit.read_only else None,
        el("button", icon("contrast"), "Light or dark", title="Light or dark", onclick="braidTheme()", type="button"),
        el("button", icon("keyboard"), "Keys", cls="keys", onclick="emitEvent('keys', {})", type="button"),
        log_out,
        cls="foot",
    )
    return join([el("a", LOGO, "Braid", cls="brand", href="/"), *items, foot])


def _messages(visit: Visit) -> Html:
    view = visit.view
    found: list[Html] = []
    if view.error and not view.at:
        found.append(_banner("", "cloud_off", f"No broker answers: {view.error}. Start one with `braid up`."))
    elif view.error:
        found.append(_banner("", "cloud_off", f"No news from the cluster: {view.error}. What you see is old."))
    elif not view.at:
        found.append(_banner("note", "hourglass_empty", "Asking the brokers…"))
    elif view.limited:
        text = "Your token may not see the cluster: brokers and their load are left out."
        found.append(_banner("note", "lock", text))
    return join(found)


def _banner(kind: str, sign: str, text: str) -> Html:
    return el("div", icon(sign), el("span", text), cls=f"banner {kind}".strip(), role="status")


def head(title: str, sub: str = "", crumbs: Html | None = None) -> Html:
    left = el(
        "div",
        el("div", crumbs, cls="crumbs") if crumbs else None,
        el("h1", title),
        el("div", sub, cls="sub") if sub else None,
    )
    return join([left])


def _show_keys() -> None:
    with ui.dialog(value=True), ui.element("div").classes("dialog"):
        rows = [el("tr", el("td", el("kbd", keys)), el("td", text)) for keys, text in KEYS]
        ui.html(join([el("h1", "Keys"), el("table", el("tbody", rows), cls="list")]), sanitize=False)
