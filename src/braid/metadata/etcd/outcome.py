"""What a failed call to etcd means for the request that it carried.

The one question that matters for a write is whether it may have happened. etcd answers it only by the text of its
errors, so this is a table. Whatever is not in the table is UNKNOWN: that costs a read, guessing would cost the data.

Two entries that one would expect are missing on purpose. `request timed out` and `leader changed` come after the
proposal went to the log. `database space exceeded` is also sent for the very write that crossed the quota, which *was*
applied.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import Final


class Verdict(Enum):
    NO_EFFECT = auto()
    """Turned away before it was taken up; another endpoint, or this one later, may take it."""
    UNKNOWN = auto()
    """It may have happened."""
    TOKEN_REJECTED = auto()
    """Turned away; log in again."""
    LEASE_MISSING = auto()
    """Turned away; the lease does not exist."""
    COMPACTED = auto()
    """Turned away; the revision is gone."""
    FORBIDDEN = auto()
    """Turned away; this user may not."""
    REFUSED = auto()
    """Turned away; it can never work."""


NOT_CONNECTED: Final = "NOT_CONNECTED"
"""Our own code beside gRPC's: there was no connection, so nothing was sent."""

_BY_TEXT: Final = (
    ("etcdserver: no leader", Verdict.NO_EFFECT),  # checked before the request's handler runs
    ("etcdserver: too many requests", Verdict.NO_EFFECT),  # checked before the proposal
    ("etcdserver: rpc not supported for learner", Verdict.NO_EFFECT),
    ("etcdserver: invalid auth token", Verdict.TOKEN_REJECTED),
    ("etcdserver: revision of auth store is old", Verdict.TOKEN_REJECTED),
    ("etcdserver: permission denied", Verdict.FORBIDDEN),
    ("etcdserver: user name is empty", Verdict.FORBIDDEN),
    ("etcdserver: requested lease not found", Verdict.LEASE_MISSING),
    ("etcdserver: mvcc: required revision has been compacted", Verdict.COMPACTED),
    ("etcdserver: mvcc: database space exceeded", Verdict.UNKNOWN),
)

_BY_CODE: Final = {
    NOT_CONNECTED: Verdict.NO_EFFECT,
    "PERMISSION_DENIED": Verdict.FORBIDDEN,
    "UNAUTHENTICATED": Verdict.FORBIDDEN,
    "INVALID_ARGUMENT": Verdict.REFUSED,
    "NOT_FOUND": Verdict.REFUSED,
    "FAILED_PRECONDITION": Verdict.REFUSED,
    "OUT_OF_RANGE": Verdict.REFUSED,
    "RESOURCE_EXHAUSTED": Verdict.REFUSED,
    "UNIMPLEMENTED": Verdict.REFUSED,
}


def verdict_of(code: str, details: str) -> Verdict:
    for text, verdict in _BY_TEXT:
        if text in details:
            return verdict
    return _BY_CODE.get(code, Verdict.UNKNOWN)
