"""One open page: who looks, what it may do, and the pieces of it that follow the cluster."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

from nicegui import ui

from braid.console.console import Console
from braid.console.html import Html, el
from braid.console.pages.parts import icon
from braid.console.rest import CHANGE_TIMEOUT_S, Rest, RestError
from braid.console.watch.cluster_watch import ClusterWatch
from braid.console.watch.view import ClusterView

if TYPE_CHECKING:
    from braid.client.client import Client

REFRESH_S: Final = 0.5

_log: Final = logging.getLogger(__name__)


class Piece:
    """A part of the page, and what it showed last."""

    def __init__(self, render: Callable[[], Html], cls: str) -> None:
        self._render = render
        self._content = self._drawn()
        self.element: Final = ui.html(self._content, sanitize=False).classes(cls)

    def refresh(self) -> None:
        content = self._drawn()
        if content != self._content:
            self._content = content
            self.element.set_content(content)

    def clear(self) -> None:
        self._content = Html("")
        self.element.set_content(self._content)

    def _drawn(self) -> Html:
        """Return what the piece shows now. One that cannot be drawn says so, and leaves the others alone."""
        try:
            return self._render()
        except Exception:
            _log.exception("a part of a page could not be drawn")
            text = "This part of the page could not be drawn. The log of the console says why."
            return el("div", icon("error_outline"), el("span", text), cls="banner", role="status")


class Visit:
    """Belongs to one browser tab, and ends with it. A logout ends the visits of all tabs at their next refresh."""

    def __init__(self, console: Console, token: str, session: str | None = None) -> None:
        """`session` is that of the token; None where brokers want no token."""
        self.console: Final = console
        self.token: Final = token
        self.watch: Final[ClusterWatch] = console.watch(token)
        self._session = session
        self._pieces: list[Piece] = []
        self._ends: list[Callable[[], object]] = []
        self._left = False
        open_page = self.watch.page()
        open_page.__enter__()
        self.at_end(lambda: open_page.__exit__(None, None, None))
        ui.context.client.on_delete(self._end)
        ui.timer(REFRESH_S, self.refresh)

    @property
    def view(self) -> ClusterView:
        return self.watch.view

    @property
    def read_only(self) -> bool:
        return self.console.config.read_only

    @property
    def logged_in(self) -> bool:
        """Whether the session that opened the page still has its token. An open page is a use of the session."""
        return self._session is None or self.console.sessions.token(self._session) == self.token

    @property
    def rest(self) -> Rest:
        """REST with the token of whoever looks. Raises `RestError` after a logout."""
        self._check_logged_in()
        return self.watch.rest

    @property
    def client(self) -> Client:
        """A client with the token of whoever looks. Raises `RestError` after a logout."""
        self._check_logged_in()
        return self.console.client(self.token)

    def _check_logged_in(self) -> None:
        if not self.logged_in:
            raise RestError(401, "logged-out", "this session has ended: log in again")

    def at_end(self, action: Callable[[], object]) -> None:
        self._ends.append(action)

    def _end(self) -> None:
        while self._ends:
            self._ends.pop()()

    def live(self, render: Callable[[], Html], cls: str = "stack") -> ui.html:
        """Show what `render` returns, and again whenever that changes."""
        piece = Piece(render, cls)
        self._pieces.append(piece)
        return piece.element

    def refresh(self) -> None:
        if self._left:
            return
        if not self.logged_in:
            self._leave()
            return
        for piece in self._pieces:
            piece.refresh()

    def _leave(self) -> None:
        """Show nothing any more. The browser is sent to the login; one that does not go has an empty page."""
        self._left = True
        self._end()
        for piece in self._pieces:
            piece.clear()
        ui.navigate.to("/login")

    def want(self, path: str) -> None:
        """Let the watch ask for this topic's details while the page is open."""
        self.watch.want(path)
        self.at_end(lambda: self.watch.unwant(path))

    async def change(self, method: str, path: str, *, query: dict[str, str] | None = None, body: Any = None) -> Any:
        """Make a call that changes something, with the rights of whoever looks."""
        self.check_may_change()
        try:
            return await self.watch.rest.call(method, path, query=query, body=body, timeout_s=CHANGE_TIMEOUT_S)
        finally:
            self.watch.hurry()

    def check_may_change(self) -> None:
        self._check_logged_in()
        if self.read_only:
            raise RestError(403, "read-only", "this console was started with --read-only: it changes nothing")


Change = Callable[[], Awaitable[str]]
"""Does something and returns a sentence about it."""
