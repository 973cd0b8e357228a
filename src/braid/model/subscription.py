"""Subscriptions, and how far each has consumed a segment."""

from __future__ import annotations

from enum import Enum
from typing import Final

import msgspec

from braid.model.errors import InvalidArgument
from braid.model.ids import NO_REQUEST, Epoch, Offset, RequestId
from braid.model.stored_record import StoredRecord

DEFAULT_START: Final = "earliest"
"""Where a new subscription or reader begins, in each interface, unless it is told otherwise: nothing is left out."""


_GROUP: Final = "group:"
"""No name of a subscription has a colon."""


def group_key(group: str) -> str:
    """Return the name under which a group of checkpoint consumers stands where subscriptions do: on the wire, in the
    keys of sessions, and in read grants."""
    return _GROUP + group


def group_name(key: str) -> str:
    """Return the name of the group of a `group_key`."""
    return key.removeprefix(_GROUP)


def is_group(subscription: str) -> bool:
    """Whether this is the name of a group of checkpoint consumers, which keep their positions themselves."""
    return subscription.startswith(_GROUP)


class SubscriptionKind(Enum):
    STREAM = "stream"
    """Ordered, one consumer per segment, cumulative ack."""
    QUEUE = "queue"


MAX_ACK_TIMEOUT_MS: Final = 7 * 86_400_000
MAX_MAX_DELIVERIES: Final = 10_000
MAX_PEEK: Final = 1_000
"""Messages that one look at a queue returns."""


class QueuePolicies(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """How a queue treats messages that are not settled."""

    ack_timeout_ms: int = 30_000
    """A message that is neither settled nor extended for so long is delivered again."""
    max_deliveries: int = 0
    """After so many deliveries a message is a dead letter. 0: it is delivered until it is settled."""
    dead_letter_topic: str = ""
    """Where dead letters go: a topic's path."""

    def check(self) -> None:
        """Raise `InvalidArgument` for policies that cannot be."""
        if not 1 <= self.ack_timeout_ms <= MAX_ACK_TIMEOUT_MS:
            raise InvalidArgument(f"ack_timeout_ms is {self.ack_timeout_ms}; it must be 1 to {MAX_ACK_TIMEOUT_MS}")
        if not 0 <= self.max_deliveries <= MAX_MAX_DELIVERIES:
            raise InvalidArgument(
                f"max_deliveries is {self.max_deliveries}; it must be 0 (no limit) to {MAX_MAX_DELIVERIES}"
            )
        if self.dead_letter_topic and not self.max_deliveries:
            raise InvalidArgument(
                f"messages would never get to the dead-letter topic {self.dead_letter_topic}: set max_deliveries, too"
            )
        if self.max_deliveries and not self.dead_letter_topic:
            raise InvalidArgument(
                f"after {self.max_deliveries} deliveries a message has nowhere to go: name a dead-letter topic, too"
            )


DEFAULT_QUEUE: Final = QueuePolicies()


class Subscription(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    id: int = 0
    """Random: tells a subscription from one of the same name that was deleted. 0: made before there were ids."""
    kind: SubscriptionKind = SubscriptionKind.STREAM
    created_at: int = 0
    """µs since 1970."""
    created_by: RequestId = NO_REQUEST
    """The call that created it: a repeat of that call recognises its own work."""
    queue: QueuePolicies = DEFAULT_QUEUE
    """Of a queue subscription."""
    query: bool = False
    """Whether it shows how far a query is that keeps its own positions, such as one of Spark."""


class Cursor(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """What a subscription has consumed of one segment, as it is stored."""

    offset: Offset
    """Everything below is consumed."""
    epoch: Epoch
    """The ownership epoch that wrote it."""
    placement: int = 0
    """Changes whenever anything but an ack sets the offset: a reader that knew an older number looks again."""
    placed_by: RequestId = NO_REQUEST
    """The call that placed it: a repeat of that call recognises its own work."""
    moved_at: int = 0
    """When an ack or a call last moved it, or found it at the end of the segment: µs since 1970. 0: not known."""
    queue: bool = False
    """Whether messages are settled one by one: `offset` is that of the first message that is not."""
    state: bytes = b""
    """Of a queue whose owner has handed the segment over: a `QueueSnapshot`. Empty: journals on disks have it."""


class Drained(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """A mark beside the cursor: the segment's log has ended, and nothing of it is left for the subscription. A cursor
    and its mark change in one transaction."""

    end: Offset
    """Where the log ends."""


class Placing(msgspec.Struct, frozen=True):
    """A request to set the cursor of a subscription on one segment."""

    subscription: str
    offset: Offset
    """Where to; with `skip`, the first offset that still exists: skipping begins there or at the cursor."""
    skip: int = 0
    """So many records on, or as many as there are. The owner counts them from where the cursor is when it is placed, so
    acks that come meanwhile are not undone."""
    only_if_absent: bool = False
    request_id: RequestId = NO_REQUEST
    """A cursor that this call has placed is not placed again."""
    since: int | None = None
    """The placement that the caller knew: a cursor that was placed after that is left alone."""
    queue: bool = False
    """Whether the subscription is a queue, as far as the caller knows."""


class ConsumerSession(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """A consumer that belongs to a subscription, also while it is disconnected, until its grace has passed."""

    joined_at: int
    """µs since 1970."""


MAX_MS: Final = 253_402_300_799_999
"""The end of the year 9999. Microseconds of this era are higher."""
MISTAKEN_MS: Final = range(1, 10**11)
"""The years 1970 to 1973. Seconds of this era, and most offsets, are among these numbers."""


def check_seek_ms(timestamp: int, *, meant: bool = False) -> None:
    """Raise if a subscription cannot be set to this time, or if the number is another unit's, unless it is `meant`."""
    if abs(timestamp) > MAX_MS:
        number = str(timestamp) if abs(timestamp) < 10**30 else "a huge number"
        side = "high" if timestamp > 0 else "low"
        raise InvalidArgument(f"seek to {number}: a number is milliseconds since 1970; this one is too {side}")
    if timestamp in MISTAKEN_MS and not meant:
        raise InvalidArgument(
            f"seek to {timestamp}: a number is milliseconds since 1970, and this one lies before 1973; multiply "
            f"seconds by 1,000, and name offsets by segment, as {{0: {timestamp}}}"
        )
