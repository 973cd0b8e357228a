"""The extra that brings a broker's packages, and the one sentence for an installation without it.

`pip install braidmq` brings the client and the commands that talk to a broker. A command that runs a broker calls
`require_server` before it imports anything of the server's. A missing package then ends in one line, not a traceback.
"""

from __future__ import annotations

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


def require_server(what: str) -> None:
    """Raise `NotAvailable`, which says how to install the server's packages, unless they are installed.

    `what` begins the sentence: the command that needs them."""
    missing = [name for name in SERVER_IMPORTS if find_spec(name) is None]
    if missing:
        raise NotAvailable(
            f"{what} needs packages that are not installed ({', '.join(missing)}): run `pip install 'braidmq[server]'`"
        )
