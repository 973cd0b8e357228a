"""The extras that bring the packages of a broker and of the console, and the one sentence for an installation without.

`pip install braidmq` brings the client and the commands that talk to a broker. A command that runs a broker calls
`require_server` before it imports anything of the server's. A missing package then ends in one line, not a traceback.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

from braid.model.errors import NotAvailable

SERVER_IMPORTS: Final = (
    "apsw",
    "cryptography",
    "fastapi",
    "fastapi_offline",
    "jwt",
    "obstore",
    "prometheus_client",
    "uvicorn",
)
"""The packages of the extra `server`, by their import names. caio is not among them: a broker runs without it."""

CONSOLE_IMPORTS: Final = ("fastapi", "httpx", "nicegui", "uvicorn")
"""The packages of the extra `console`, by their import names."""


def require_server(what: str) -> None:
    """Raise `NotAvailable`, which says how to install the server's packages, unless they are installed.

    `what` begins the sentence: the command that needs them."""
    _require(what, SERVER_IMPORTS, "server")


def require_console(what: str) -> None:
    """Raise `NotAvailable`, which says how to install the console's packages, unless they are installed."""
    _require(what, CONSOLE_IMPORTS, "console")


def _require(what: str, imports: Sequence[str], extra: str) -> None:
    missing = [name for name in imports if find_spec(name) is None]
    if missing:
        raise NotAvailable(
            f"{what} needs packages that are not installed ({', '.join(missing)}): run `pip install 'braidmq[{extra}]'`"
        )
