"""What every read of a topic may ask for: `braid.history` as it is here, Spark's source with options of its own.

Errors name an option as its user wrote it. So they ask `called` for the name.
"""

from __future__ import annotations

from typing import ClassVar, Final, Literal

import msgspec

from braid.client.client import DEFAULT_TIMEOUT_S
from braid.client.consuming.checkpoint import Position

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
Offsets = Literal["earliest", "latest"] | dict[int, Position]
BadRecords = Literal["fail", "skip"]

_ARGUMENTS: Final = {
    "manifest": "storage",
    "starting_offsets": "start",
    "starting_timestamp": "start",
    "ending_offsets": "end",
    "ending_timestamp": "end",
}
"""The arguments of `braid.history` that have other names than the fields."""


class ScanOptions(msgspec.Struct, frozen=True, kw_only=True):
    client_name: ClassVar[str] = "history"
    """The name that brokers show for the connection."""

    topic: str
    """Its path: tenant/namespace/name."""
    url: str = ""
    """Of brokers; empty if the read uses manifests alone."""
    manifest: str = ""
    """Of the storage that holds the manifests."""
    token: str = ""
    tls: bool | str = False
    """Whether to use TLS with the system's authorities, or the path of a file of authorities to trust."""
    timeout_s: float = DEFAULT_TIMEOUT_S
    """How long the client retries while segments move and brokers restart or cannot be reached."""
    starting_offsets: Offsets | None = None
    """None: not given. Then a batch read begins at the earliest records, a stream at the latest."""
    ending_offsets: Offsets | None = None
    starting_timestamp: int | None = None
    """µs since 1970. Older rows are not read."""
    ending_timestamp: int | None = None
    """µs since 1970. Rows of this time or later are not read."""
    fail_on_data_loss: bool = True
    bad_records: BadRecords = "fail"
    """What becomes of batches that cannot be decoded."""

    def called(self, field: str) -> str:
        """Return a field's name for its user."""
        return f"argument {_ARGUMENTS.get(field, field)}"
