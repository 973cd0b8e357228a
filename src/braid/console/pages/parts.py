"""Pieces of pages that are the same everywhere, as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from braid.console.drawing.svg import colour
from braid.console.html import Child, Html, el, join

LOGO: Final = Html(
    '<svg viewBox="0 0 30 24" fill="none" stroke-width="3.4" stroke-linecap="round" aria-hidden="true">'
    '<path d="M2 5C10 5 11 19 19 19S25 12 28 12" stroke="var(--owner-0)"/>'
    '<path d="M2 19C10 19 11 5 19 5S25 12 28 12" stroke="var(--owner-1)"/>'
    '<path d="M2 12H28" stroke="var(--owner-2)" opacity=".85"/></svg>'
)

_STATES: Final = {
    "active": "good",
    "draining": "warn",
    "drained": "",
    "stopping": "warn",
    "down": "bad",
    "silent": "bad",
}


def icon(name: str) -> Html:
    return el("i", name, cls="material-icons", aria_hidden="true")


def pill(text: str, kind: str = "") -> Html:
    return el("span", text, cls=f"pill {kind}".strip())


def state_pill(state: str) -> Html:
    return pill("not answering" if state == "silent" else state, _STATES.get(state, ""))


def figure(name: str, value: str, note: str = "") -> Html:
    number, _, unit = value.partition(" ")
    return el(
        "div",
        el("div", name, cls="name"),
        el("div", number, el("small", f" {unit}") if unit else None, cls="value"),
        el("div", note, cls="note", title=note) if note else None,
        cls="figure",
    )


def card(title: str, *body: Child, hint: str = "", tools: Child = None) -> Html:
    heading = el("header", el("h2", title, el("span", f"  {hint}", cls="hint") if hint else None), tools)
    return el("section", heading, *body, cls="card")


def empty(icon_name: str, title: str, *lines: Child) -> Html:
    return el("div", icon(icon_name), el("b", title), *lines, cls="empty")


def command(text: str) -> Html:
    return el("code", text)


def table(headings: Sequence[Child], rows: Iterable[Html]) -> Html:
    """Return a table. A heading that is text is a column of text; use `number` and `wide` for others."""
    heads = [each if isinstance(each, Html) else el("th", each) for each in headings]
    body = el("tbody", list(rows))
    return el("div", el("table", el("thead", el("tr", heads)), body, cls="list"), cls="scroll")


def number(heading: Child, *, wide: bool = False) -> Html:
    return el("th", heading, cls="n wide" if wide else "n")


def narrow(*facts: str) -> Html:
    """Return a line for phones: what the columns tell that are `wide`."""
    return el("span", [[el("span", fact), " "] for fact in facts], cls="under narrow")


def act(text: str, name: str, *, icon_name: str = "", cls: str = "", **data: str | int) -> Html:
    """Return a button whose click the page gets as an event."""
    attributes = {f"data_{key}": value for key, value in data.items()}
    return el(
        "button",
        icon(icon_name) if icon_name else None,
        text,
        cls=f"act {cls}".strip(),
        type="button",
        data_act=name,
        **attributes,
    )


def bar(part: float) -> Html:
    kind = "bad" if part > 0.9 else "warn" if part > 0.75 else ""
    return el("div", el("span", style=f"width:{min(100, max(1, part * 100)):.0f}%"), cls=f"bar {kind}".strip())


def owner_dot(owner: str, colours: Mapping[str, int]) -> Html:
    return el("span", cls="dot", style=f"background:{colour(owner, colours)}")


def owner_name(owner: str | None, colours: Mapping[str, int]) -> Html:
    if not owner:
        return el("span", "not served", cls="faint")
    return join([owner_dot(owner, colours), owner])


def short_name(path: str) -> str:
    """Return a topic's name without what every topic has that is written without a tenant."""
    return path.removeprefix("public/default/")
