"""Dialogs that ask back: what will happen, then progress, then the outcome in a sentence.

A dialog calls REST with the token of whoever looks, so it can do no more than that token may. A refusal shows the
broker's own words.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from nicegui import ui

from braid.console.html import Html, el, join
from braid.console.numbers import age_text
from braid.console.pages.consequences import changes_of
from braid.console.pages.visit import Visit
from braid.console.rest import RestError
from braid.model.errors import BraidError

Run = Callable[[], Awaitable[str]]

PROGRESS_S: Final = 0.5
LISTED: Final = 6
"""Changes under way that a dialog lists."""
FADING_S: Final = 0.4
"""For so long browsers fade a dialog out."""

_log: Final = logging.getLogger(__name__)


def ask_back(
    visit: Visit,
    title: str,
    what: Sequence[str],
    run: Run,
    *,
    button: str,
    fields: Callable[[], None] | None = None,
    danger: bool = False,
    type_to_confirm: str = "",
    topic: str = "",
) -> None:
    """Say what will happen; on a click, do it, show how it goes, and then its outcome.

    `topic`: what is under way in this topic is listed until the outcome is there.
    """
    with ui.dialog(value=True) as dialog, ui.element("div").classes("dialog").props('role="dialog"'):
        ui.html(join([el("h1", title)]), sanitize=False)
        if what:
            ui.html(el("ul", [el("li", line) for line in what]), sanitize=False)
        if fields is not None:
            fields()
        typed = None
        if type_to_confirm:
            typed = ui.input(f"Type {type_to_confirm} to confirm").props("outlined dense").classes("w-full")
        outcome = ui.html("", sanitize=False)
        with ui.element("div").classes("buttons"):
            ui.button("Close", on_click=dialog.close, color=None).props("flat no-caps").classes("quiet")
            go = ui.button(button).props(f"unelevated no-caps color={'negative' if danger else 'primary'}")

    async def do() -> None:
        if typed is not None and typed.value != type_to_confirm:
            outcome.set_content(el("div", f"Type {type_to_confirm} first.", cls="outcome bad"))
            return
        go.disable()
        began = time.monotonic()

        def show_progress() -> None:
            changes = changes_of(visit.view, topic) if topic else ()
            outcome.set_content(progress(time.monotonic() - began, changes))

        show_progress()
        with dialog:
            timer = ui.timer(PROGRESS_S, show_progress)
        try:
            visit.check_may_change()
            text = await run()
        except Exception as error:
            known = isinstance(error, RestError | BraidError | ValueError)
            if not known:
                _log.exception("an action broke")
            reason = str(error) if known else "The console could not do this. Its log says why."
            outcome.set_content(el("div", reason, cls="outcome bad"))
            go.enable()
            return
        finally:
            timer.cancel()
        outcome.set_content(el("div", text, cls="outcome good"))
        go.set_visibility(False)
        visit.watch.hurry()

    go.on_click(do)
    dialog.on("hide", lambda: _remove_later(dialog))


def progress(waited_s: float, changes: Sequence[str]) -> Html:
    """Return what a dialog shows while its action runs."""
    lines = [el("li", each) for each in changes[:LISTED]]
    if len(changes) > LISTED:
        lines.append(el("li", f"… and {len(changes) - LISTED} more"))
    waited = f" for {age_text(waited_s)}" if waited_s >= 1 else "…"
    return el("div", f"Under way{waited}", el("ul", lines) if lines else None, cls="outcome live")


def _remove_later(dialog: ui.dialog) -> None:
    def remove() -> None:
        if not dialog.is_deleted:
            dialog.delete()

    asyncio.get_running_loop().call_later(FADING_S, remove)


def whole_number(given: Any, name: str) -> int:
    """Read a field of a number. An empty one is a `ValueError` with a sentence."""
    if given is None:
        raise ValueError(f"fill in: {name}")
    return int(given)


def on_acts(visit: Visit, handlers: dict[str, Callable[[dict[str, Any]], Any]]) -> None:
    """Call the handler of each click on a button that `parts.act` wrote. After a logout, clicks do nothing."""

    async def handle(event: Any) -> None:
        given = event.args if isinstance(event.args, dict) else {}
        handler = handlers.get(str(given.get("act", "")))
        if handler is not None and visit.logged_in:
            result = handler(given)
            if asyncio.iscoroutine(result):
                await result

    ui.on("act", handle)
