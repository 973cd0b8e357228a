"""One record, as an application sees it."""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping
from itertools import islice
from types import MappingProxyType
from typing import Final

import msgspec

NO_HEADERS: Final[Mapping[str, bytes]] = MappingProxyType({})
"""Shared by all messages without headers, therefore read-only."""

_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_SHOWN_BYTES: Final = 64
_SHOWN_HEADERS: Final = 8
"""How much of a message its `repr` shows: a log line or a traceback must not hold megabytes."""


class MessageId(msgspec.Struct, frozen=True, order=True, gc=False):
    """Where a record stands in its topic: `segment, offset = id`. Of one segment, a higher offset is a later record."""

    # No named tuple: one is made for each record that is sent, and this is three times as fast.
    segment: int
    offset: int

    def __iter__(self) -> Iterator[int]:
        return iter((self.segment, self.offset))


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

    def __repr__(self) -> str:
        shown = [f"{_cut(name)}: {_cut(value)}" for name, value in islice(self.headers.items(), _SHOWN_HEADERS)]
        if len(self.headers) > len(shown):
            shown.append(f"… {len(self.headers)} headers")
        return (
            f"Message(value={_cut(self.value)}, key={_cut(self.key)}, timestamp_us={self.timestamp_us}, "
            f"offset={self.offset}, headers={{{', '.join(shown)}}}, segment={self.segment}, topic={self.topic!r})"
        )

    @property
    def id(self) -> MessageId:
        return MessageId(self.segment, self.offset)

    @property
    def timestamp(self) -> datetime.datetime:
        """In UTC. `OverflowError` outside the years 1 to 9999, which a producer may write: see `timestamp_us`."""
        return _EPOCH + datetime.timedelta(microseconds=self.timestamp_us)


class QueueMessage(Message, frozen=True, gc=False):
    """A message of a queue: its consumer has it until it answers, or until the lease runs out."""

    redelivery_count: int = 0
    """How often the message was delivered before, as far as brokers know."""
    failure: str = ""
    """What the last consumer said when it returned the message."""
    lease: int = 0
    placement: int = 0


DELIVER_AT: Final = "braid-deliver-at"
"""The header of a message that queues do not deliver before a time: milliseconds since 1970, as decimal digits."""
EXPIRES_AT: Final = "braid-expires-at"
"""The header of a message that queues do not deliver after a time: milliseconds since 1970, as decimal digits."""


def header_ms(headers: Mapping[str, bytes], name: str) -> int:
    """Return the time in this header; 0 if there is none, or no time."""
    found = headers.get(name)
    return int(found) if found is not None and len(found) <= 15 and found.isdigit() else 0


def _cut(data: bytes | str | None) -> str:
    if data is None or len(data) <= _SHOWN_BYTES:
        return repr(data)
    return f"{data[:_SHOWN_BYTES]!r}… ({len(data)} {'bytes' if isinstance(data, bytes) else 'characters'})"
