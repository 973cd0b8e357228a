"""The columns of a topic in Arrow. Spark's source has the same (spark/source/schema.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

from braid.model.batch.body import HEADERS_TYPE, TIMESTAMP_TYPE
from braid.model.errors import InvalidArgument

TOPIC_SCHEMA: Final = pa.schema(
    [
        ("segment", pa.int32()),
        ("offset", pa.int64()),
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", TIMESTAMP_TYPE),
        ("headers", HEADERS_TYPE),
        ("keyHash", pa.int32()),
        ("epoch", pa.int32()),
    ]
)


def projected(columns: Sequence[str] | None) -> Any:
    """Return the `pyarrow.Schema` of these columns, in this order; of all columns without a choice."""
    if columns is None:
        return TOPIC_SCHEMA
    known = ", ".join(TOPIC_SCHEMA.names)
    if isinstance(columns, str) or not columns or len(set(columns)) != len(columns):
        raise InvalidArgument(f"argument columns is {columns!r}: list at least one of {known}, each only once")
    for name in columns:
        if name not in TOPIC_SCHEMA.names:
            raise InvalidArgument(f"argument columns names {name!r}, which a topic does not have; choose from {known}")
    return pa.schema([TOPIC_SCHEMA.field(name) for name in columns])
