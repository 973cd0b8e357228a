"""Who owns a segment. The record is changed only by compare-and-swap."""

from __future__ import annotations

from enum import Enum

import msgspec

from braid.model.errors import MetadataCorrupt
from braid.model.ids import Epoch


class OwnershipState(Enum):
    ASSIGNED = "ASSIGNED"
    SERVING = "SERVING"


class Ownership(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    state: OwnershipState
    owner: str
    """A broker's id."""
    epoch: Epoch

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Ownership:
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise MetadataCorrupt(f"an ownership record cannot be read: {error}") from error
