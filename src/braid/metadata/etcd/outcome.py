"""What a failed call to etcd means for the request that it carried.

The one question that matters for a write is whether it may have happened. etcd answers it only by the text of its
errors, so this is a table. An error that is not in the table is UNKNOWN: that costs a read, while guessing could cost
data.

Two expected entries are missing on purpose: `request timed out` and `leader changed` come after the proposal went to
the log. `database space exceeded` is UNKNOWN, because etcd also sends it for the very write that crossed the quota,
which *was* applied.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class CallOutcome(Enum):
    NO_EFFECT = auto()
    """Refused before etcd began it; another endpoint, or this one later, may take it."""
    UNKNOWN = auto()
    """It may have happened."""
    TOKEN_REJECTED = auto()
    """Refused; log in again."""
    LEASE_MISSING = auto()
    """Refused; the lease does not exist."""
    COMPACTED = auto()
    """Refused; the revision is gone."""
    FORBIDDEN = auto()
    """Refused; this user lacks the permission."""
    REFUSED = auto()
    """Refused; the request can never work."""


NOT_CONNECTED: Final = "NOT_CONNECTED"
"""Our own code beside gRPC's: there was no connection, so nothing was sent."""

_BY_TEXT: Final = (
    ("etcdserver: no leader", CallOutcome.NO_EFFECT),  # checked before the request's handler runs
    ("etcdserver: too many requests", CallOutcome.NO_EFFECT),  # checked before the proposal
    ("etcdserver: rpc not supported for learner", CallOutcome.NO_EFFECT),
    ("etcdserver: invalid auth token", CallOutcome.TOKEN_REJECTED),
    ("etcdserver: revision of auth store is old", CallOutcome.TOKEN_REJECTED),
    ("etcdserver: permission denied", CallOutcome.FORBIDDEN),
    ("etcdserver: user name is empty", CallOutcome.FORBIDDEN),
    ("etcdserver: requested lease not found", CallOutcome.LEASE_MISSING),
    ("etcdserver: mvcc: required revision has been compacted", CallOutcome.COMPACTED),
    ("etcdserver: mvcc: database space exceeded", CallOutcome.UNKNOWN),
)

_BY_CODE: Final = {
    NOT_CONNECTED: CallOutcome.NO_EFFECT,
    "PERMISSION_DENIED": CallOutcome.FORBIDDEN,
    "UNAUTHENTICATED": CallOutcome.FORBIDDEN,
    "INVALID_ARGUMENT": CallOutcome.REFUSED,
    "NOT_FOUND": CallOutcome.REFUSED,
    "FAILED_PRECONDITION": CallOutcome.REFUSED,
    "OUT_OF_RANGE": CallOutcome.REFUSED,
    "RESOURCE_EXHAUSTED": CallOutcome.REFUSED,
    "UNIMPLEMENTED": CallOutcome.REFUSED,
}


def outcome_of(code: str, details: str) -> CallOutcome:
    for text, outcome in _BY_TEXT:
        if text in details:
            return outcome
    return _BY_CODE.get(code, CallOutcome.UNKNOWN)
