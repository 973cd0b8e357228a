"""The columns of a topic in Spark, and the same in Arrow.

    segment int, offset long, key binary, value binary, timestamp timestamp, headers map<string,binary>,
    keyHash int, epoch int

Spark does not tell a Python source which columns a query uses. A user who needs few of them names them by
`.schema("offset long, value binary")`: any of the columns, in any order. Other columns are neither decoded nor sent to
the JVM. Spark compares the batches of a source with the schema that it expects, down to nullability, so Spark's own
conversion makes the Arrow schema.
"""

from __future__ import annotations

from typing import Any, Final

from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from braid.model.errors import InvalidArgument

SOURCE_SCHEMA: Final = StructType(
    [
        StructField("segment", IntegerType()),
        StructField("offset", LongType()),
        StructField("key", BinaryType()),
        StructField("value", BinaryType()),
        StructField("timestamp", TimestampType()),
        StructField("headers", MapType(StringType(), BinaryType())),
        StructField("keyHash", IntegerType()),
        StructField("epoch", IntegerType()),
    ]
)
_NEVER_NULL: Final = frozenset(SOURCE_SCHEMA.names) - {"key"}


def source_schema(*, include_headers: bool) -> StructType:
    return StructType([field for field in SOURCE_SCHEMA if include_headers or field.name != "headers"])


def checked_projection(asked: StructType) -> StructType:
    """Return `asked`, if it is a selection of the source's columns with their types."""
    for field in asked:
        if field.name not in SOURCE_SCHEMA.names:
            raise InvalidArgument(
                f"the schema asks for a column {field.name!r}, which a topic does not have; choose from "
                f"{', '.join(f'{each.name} {each.dataType.simpleString()}' for each in SOURCE_SCHEMA)}"
            )
        _check_type(field, SOURCE_SCHEMA[field.name].dataType)
    twice = {name for name in asked.names if asked.names.count(name) > 1}
    if twice or not asked.names:
        raise InvalidArgument(f"the schema asks for {asked.simpleString()}: name at least one column, each only once")
    return asked


def _check_type(field: StructField, known: DataType) -> None:
    if field.dataType.simpleString() != known.simpleString():
        raise InvalidArgument(
            f"the schema asks for column {field.name} as {field.dataType.simpleString()}; it is "
            f"{known.simpleString()}: ask for that, and cast it afterwards"
        )
    if not field.nullable and field.name not in _NEVER_NULL:
        raise InvalidArgument(
            f"the schema says that column {field.name} is never null; records without a key have none"
        )


def arrow_schema(schema: StructType) -> Any:
    """Return the `pyarrow.Schema` of the batches that Spark expects for this schema."""
    return to_arrow_schema(schema, timezone="UTC")
