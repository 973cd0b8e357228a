"""One record, as an application sees it."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

import msgspec

NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})
"""Shared by all messages without headers, therefore read-only."""

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class MessageId(NamedTuple):
    """Where a record stands in its topic. Of one segment, a higher offset is a later record."""

    segment: int
    offset: int


class Message(msgspec.Struct, frozen=True, gc=False):
    # gc=False: a message holds only bytes, numbers and flat headers, so it is never part of a cycle, and the garbage
    # collector need not walk over millions of them.
    value: bytes
    key: bytes | None
    timestamp_us: int
    """Microseconds since 1970, as the producer gave them."""
    offset: int
    headers: Mapping[str, bytes] = NO_HEADERS
    segment: int = 0
    topic: str = ""
    """The path `tenant/namespace/name`; empty where a batch was decoded by itself."""

    @property
    def id(self) -> MessageId:
        return MessageId(self.segment, self.offset)

    @property
    def timestamp(self) -> datetime.datetime:
        """In UTC. `OverflowError` outside the years 1 to 9999, which a producer may write: see `timestamp_us`."""
        return _EPOCH + datetime.timedelta(microseconds=self.timestamp_us)
