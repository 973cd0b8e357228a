"""One open page: who looks, what it may do, and the pieces of it that follow the cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

from nicegui import ui

from braid.console.console import Console
from braid.console.html import Html
from braid.console.rest import CHANGE_TIMEOUT_S, RestError
from braid.console.watch.cluster_watch import ClusterWatch
from braid.console.watch.view import ClusterView

REFRESH_S: Final = 0.5


class Visit:
    """Belongs to one browser tab, and ends with it."""

    def __init__(self, console: Console, token: str) -> None:
        self.console: Final = console
        self.token: Final = token
        self.watch: Final[ClusterWatch] = console.watch(token)
        self._pieces: list[tuple[ui.html, Callable[[], Html], str]] = []
        self._ends: list[Callable[[], object]] = []
        self._seen: tuple[object, ...] = ()
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

    def at_end(self, action: Callable[[], object]) -> None:
        self._ends.append(action)

    def _end(self) -> None:
        while self._ends:
            self._ends.pop()()

    def live(self, render: Callable[[], Html], cls: str = "stack") -> ui.html:
        """Show what `render` returns, and again whenever that changes."""
        content = render()
        piece = ui.html(content, sanitize=False).classes(cls)
        self._pieces.append((piece, render, content))
        return piece

    def refresh(self) -> None:
        for number, (piece, render, before) in enumerate(self._pieces):
            content = render()
            if content != before:
                piece.set_content(content)
                self._pieces[number] = (piece, render, content)

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
        if self.read_only:
            raise RestError(403, "read-only", "this console was started with --read-only: it changes nothing")


Change = Callable[[], Awaitable[str]]
"""Does something and returns a sentence about it."""
