"""Builds HTML of values. Text is always escaped: a record may hold anything.

el("td", count_text(7), cls="number")       <td class="number">7</td>
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

_VOID: Final = frozenset({"br", "img", "input", "hr"})


class Html(str):
    """Markup that is finished. Only the functions of this module and of the drawing make it."""

    __slots__ = ()


Child = str | None | Iterable["Child"]


def el(tag: str, /, *children: Child, cls: str = "", **attributes: str | int | float | bool | None) -> Html:
    """Return an element. An attribute that is None or False is left out; `data_tip` becomes `data-tip`."""
    given = {"class": cls, **{key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}}
    written = "".join(
        f" {key}" if value is True else f' {key}="{escape(str(value))}"'
        for key, value in given.items()
        if value is not None and value is not False and value != ""
    )
    if tag in _VOID:
        return Html(f"<{tag}{written}>")
    return Html(f"<{tag}{written}>{join(children)}</{tag}>")


def join(children: Iterable[Child]) -> Html:
    return Html("".join(map(_text, children)))


def _text(child: Child) -> str:
    if child is None:
        return ""
    if isinstance(child, Html):
        return child
    if isinstance(child, str):
        return escape(child)
    return join(child)
