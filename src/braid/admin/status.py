"""Which HTTP status an error is answered with."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from braid.model.errors import (
    BraidError,
    BrokerNotActive,
    BrokerNotFound,
    ConditionFailed,
    InvalidArgument,
    MoveRefused,
    NotAvailable,
    OffsetOutOfRange,
    PermissionDenied,
    SegmentNotFound,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionKindConflict,
    SubscriptionNotFound,
    TimedOut,
    TopicExists,
    TopicNotFound,
    TransitionRefused,
    TransitionRunning,
    Unauthenticated,
)

_STATUSES: Final[tuple[tuple[type[BraidError], int], ...]] = (
    (InvalidArgument, 400),
    (OffsetOutOfRange, 400),
    (Unauthenticated, 401),
    (PermissionDenied, 403),
    (TopicNotFound, 404),
    (SegmentNotFound, 404),
    (SubscriptionNotFound, 404),
    (BrokerNotFound, 404),
    (TopicExists, 409),
    (SubscriptionExists, 409),
    (SubscriptionBusy, 409),
    (SubscriptionKindConflict, 409),
    (MoveRefused, 409),
    (TransitionRunning, 409),
    (ConditionFailed, 412),
    (BrokerNotActive, 412),
    (TransitionRefused, 412),
    (NotAvailable, 501),
    (TimedOut, 503),
)


class ErrorBody(msgspec.Struct, frozen=True):
    """What every answer of 400 and above holds."""

    code: Annotated[str, msgspec.Meta(description="Stable; docs/errors.md lists them.")]
    message: str
    retriable: Annotated[bool, msgspec.Meta(description="Whether the same request may succeed later, unchanged.")]

    def json(self) -> bytes:
        return msgspec.json.encode(self)


def status_of(error: BraidError) -> int:
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return status
    return 503 if error.retriable else 500


def body_of(error: BraidError) -> ErrorBody:
    return ErrorBody(error.code, str(error), error.retriable)


def headers_of(status: int) -> dict[str, str]:
    """What HTTP wants beside certain statuses."""
    match status:
        case 401:
            return {"WWW-Authenticate": 'Bearer realm="braid"'}
        case 503:
            return {"Retry-After": "1"}
        case _:
            return {}
