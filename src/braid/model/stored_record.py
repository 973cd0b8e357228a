"""Stored records: the values of metadata keys, and the JSON in which they are stored.

Brokers of two versions share a store during a rolling upgrade. So a record keeps the fields that this build does not
know, and they are stored again when this build rewrites the record. They stay with the struct that they were found in,
at any depth: `msgspec.structs.replace` keeps them, a new struct has none.

In memory they are the JSON text of one object, in the field `unknown`. In the store they stand beside the fields that
this build knows:

    {"state": "SERVING", "owner": "b1", "epoch": 3, …, "tier": "gold"}    Ownership(…, unknown='{"tier":"gold"}')

A record that cannot be read in spite of this (a state from the future, damage) raises `RecordUnreadable`. It is there,
and nothing may take it for absent.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from braid.model.errors import InvalidArgument, RecordUnreadable

T = TypeVar("T")

UNKNOWN: Final = "?"
"""The name under which `unknown` travels between the two forms. No record has a field of this name."""
_UNKNOWN_KEY: Final = b'"?":'


class StoredRecord(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    unknown: str | UnsetType = msgspec.field(default=UNSET, name=UNKNOWN)
    """The fields that this build does not know, as JSON."""


def encode(value: Any) -> bytes:
    """Return the JSON of a record, or of anything that has records in it, with the fields that this build does not
    know."""
    data = msgspec.json.encode(value)
    if _UNKNOWN_KEY not in data:
        return data
    plain = msgspec.json.decode(data)
    _put_back(value, plain)
    return msgspec.json.encode(plain)


def decode(kind: type[T], data: bytes, what: str = "") -> T:
    """Read a record. `what` names it in the error, which is `RecordUnreadable`."""
    try:
        record = msgspec.json.decode(data, type=kind)
        known = msgspec.json.encode(record)
        if known == data:  # Mostly: this build has written it.
            return record
        stored = msgspec.json.decode(data)
        _set_aside(stored, msgspec.json.decode(known))
        return msgspec.convert(stored, kind, str_keys=True)
    except (msgspec.DecodeError, UnicodeDecodeError, InvalidArgument, RecursionError) as error:
        raise RecordUnreadable(f"{what or f'a {kind.__name__} record'} cannot be read: {error}") from error


def _put_back(value: Any, plain: Any) -> None:
    """Move the unknown fields of all records in `value` to their places; `plain` is its JSON."""
    match value:
        case msgspec.Struct():
            for field, name in zip(value.__struct_fields__, value.__struct_encode_fields__, strict=True):
                if name in plain:
                    _put_back(getattr(value, field), plain[name])
            if isinstance(value, StoredRecord) and value.unknown:
                plain |= msgspec.json.decode(plain.pop(UNKNOWN))
        case Mapping():
            for each, its_plain in zip(value.values(), plain.values(), strict=True):
                _put_back(each, its_plain)
        case list() | tuple():
            for each, its_plain in zip(value, plain, strict=True):
                _put_back(each, its_plain)


def _set_aside(stored: Any, known: Any) -> None:
    """Gather what only `stored` has under `UNKNOWN`, in each object. A record has all of its fields in `known`."""
    match stored, known:
        case dict(), dict():
            unknown = {name: stored.pop(name) for name in list(stored) if name not in known}
            for name, value in stored.items():
                _set_aside(value, known[name])
            if unknown:
                stored[UNKNOWN] = msgspec.json.encode(unknown).decode()
        case list(), list():
            for value, its_known in zip(stored, known, strict=False):  # A list may have elements of the future.
                _set_aside(value, its_known)
