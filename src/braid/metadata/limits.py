"""The limits of requests. Every store checks requests here first, so that all stores refuse the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

from braid.metadata.store import (
    MAX_KEY_BYTES,
    MAX_TXN_OPERATIONS,
    MAX_VALUE_BYTES,
    Compare,
    CompareValue,
    Condition,
    Operation,
    Put,
)
from braid.model.errors import InvalidArgument, quote

MAX_TXN_BYTES = 1_400_000
"""Keys and values of one transaction together. etcd refuses requests above 1.5 MiB; the rest is room for framing."""
MAX_LEASE_TTL_S = 86_400.0
"""A lease says that its holder is alive. A lease that outlives its holder by more than a day says nothing."""


def encode_key(key: str) -> bytes:
    """Return the key as it is stored and ordered: UTF-8, not empty, within the limit."""
    if not key:
        raise InvalidArgument("a metadata key is empty; give it at least one character")
    return _encode(key, "key")


def encode_prefix(prefix: str) -> bytes:
    """Return the prefix as bytes. The empty prefix stands for every key."""
    return _encode(prefix, "prefix")


def prefix_end(prefix: bytes) -> bytes | None:
    """Return the first key after every key that starts with `prefix`; None when no such key exists.

    UTF-8 has no byte ff, so only the empty prefix is without an end.
    """
    return prefix[:-1] + bytes([prefix[-1] + 1]) if prefix else None


def check_txn(conditions: Sequence[Condition], operations: Sequence[Operation]) -> None:
    for name, parts in (("conditions", conditions), ("operations", operations)):
        if len(parts) > MAX_TXN_OPERATIONS:
            raise InvalidArgument(
                f"a transaction has {len(parts)} {name}, at most {MAX_TXN_OPERATIONS} are allowed; split it"
            )
    size = 0
    for condition in conditions:
        size += len(encode_key(condition.key))
        match condition:
            case CompareValue(key, value):
                size += _checked_size(key, value)
            case Compare(key, revision):
                if revision < 0:
                    raise InvalidArgument(
                        f"{key!r} is compared with revision {revision}; revisions start at 0 (absent)"
                    )
    written: set[str] = set()
    for operation in operations:
        size += len(encode_key(operation.key))
        if operation.key in written:
            raise InvalidArgument(f"a transaction writes {operation.key!r} twice; a key may stand in it once")
        written.add(operation.key)
        if isinstance(operation, Put):
            size += _checked_size(operation.key, operation.value)
    if size > MAX_TXN_BYTES:
        raise InvalidArgument(f"a transaction carries {size} bytes, at most {MAX_TXN_BYTES} are allowed; split it")


def check_ttl(ttl_s: float) -> None:
    if not (math.isfinite(ttl_s) and 0 < ttl_s <= MAX_LEASE_TTL_S):
        raise InvalidArgument(
            f"a lease of {ttl_s} s was asked for; it must be above 0 and at most {MAX_LEASE_TTL_S:g} s"
        )


def _checked_size(key: str, value: bytes) -> int:
    if not isinstance(value, bytes):
        raise InvalidArgument(f"the value of {key!r} is a {type(value).__name__}; values are bytes")
    if len(value) > MAX_VALUE_BYTES:
        raise InvalidArgument(
            f"the value of {key!r} has {len(value)} bytes, at most {MAX_VALUE_BYTES} are allowed; "
            "larger things belong into the object store"
        )
    return len(value)


def _encode(text: str, what: str) -> bytes:
    try:
        encoded = text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"the metadata {what} {quote(text)} is not valid Unicode: {error.reason}") from None
    if len(encoded) > MAX_KEY_BYTES:
        raise InvalidArgument(
            f"a metadata {what} has {len(encoded)} bytes, at most {MAX_KEY_BYTES} are allowed: {quote(text)}"
        )
    return encoded
