"""Who is logged in. A cookie holds a random id; the token stays in the memory of the console, and goes nowhere but to
the brokers."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Final

COOKIE: Final = "braid-console"
MAX_SESSIONS: Final = 256
"""Beyond it, the session that was unused longest ends."""
IDLE_S: Final = 12 * 3_600.0


class Sessions:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tokens: dict[str, tuple[str, float]] = {}
        """By id: the token, and when it was last used; in that order."""

    def open(self, token: str) -> str:
        """Begin a session and return its id."""
        while len(self._tokens) >= MAX_SESSIONS:
            del self._tokens[next(iter(self._tokens))]
        id_ = secrets.token_urlsafe(32)
        self._tokens[id_] = (token, self._clock())
        return id_

    def token(self, id_: str | None) -> str | None:
        """Return the token of a session; None if there is no such session any more."""
        found = self._tokens.pop(id_, None) if id_ else None
        if id_ is None or found is None or self._clock() - found[1] > IDLE_S:
            return None
        self._tokens[id_] = (found[0], self._clock())
        return found[0]

    def close(self, id_: str | None) -> None:
        if id_:
            self._tokens.pop(id_, None)


def cookie_header(id_: str, *, secure: bool) -> str:
    """Return the Set-Cookie header of a session; an empty id ends it. Only this site's own pages send it back."""
    ends = "; Max-Age=0" if not id_ else ""
    return f"{COOKIE}={id_}; Path=/; HttpOnly; SameSite=Strict{'; Secure' if secure else ''}{ends}"
