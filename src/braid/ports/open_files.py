"""How many files, and so connections, this process may have open."""

from __future__ import annotations

import resource
from typing import Final

OWN_FILES: Final = 1_024
"""Kept free of clients: for logs, chunks, the metadata, the admin port, and connections that are being refused."""


def raise_open_files() -> int:
    """Raise the soft limit of open files to the hard one, which needs no permission. Returns the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def connections_within(files: int) -> int:
    """Return how many connections a process with this limit can serve: all but OWN_FILES, or half of a low limit."""
    return max(files - OWN_FILES, files // 2)
