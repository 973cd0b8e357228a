"""A broker's entry in the metadata store; lives as long as its lease."""

from __future__ import annotations

import msgspec

from braid.model.errors import MetadataCorrupt


class Registration(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    address: str
    """`host:port`, as clients reach it."""
    admin: str
    state: str = "active"
    version: str = ""
    started_at: int = 0
    """µs since 1970."""
    labels: dict[str, str] = {}

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Registration:
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise MetadataCorrupt(f"a broker's registration cannot be read: {error}") from error
