"""The columns of a topic in Spark: exactly those of the documentation, or a choice of them."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, IntegerType, MapType, StringType, StructField, StructType

from braid.model.errors import InvalidArgument
from braid.spark.source.schema import SOURCE_SCHEMA, arrow_schema, checked_projection, source_schema


def choice(*names: str) -> StructType:
    return StructType([SOURCE_SCHEMA[name] for name in names])


def test_the_schema_is_the_documented_one() -> None:
    assert source_schema(include_headers=True).simpleString() == (
        "struct<segment:int,offset:bigint,key:binary,value:binary,timestamp:timestamp,headers:map<string,binary>,"
        "keyHash:int,epoch:int>"
    )


def test_headers_can_be_left_out() -> None:
    assert source_schema(include_headers=False).names == [name for name in SOURCE_SCHEMA.names if name != "headers"]


def test_its_arrow_twin_has_plain_binaries_and_microseconds_in_utc() -> None:
    assert arrow_schema(SOURCE_SCHEMA) == pa.schema(
        [
            ("segment", pa.int32()),
            ("offset", pa.int64()),
            ("key", pa.binary()),
            ("value", pa.binary()),
            ("timestamp", pa.timestamp("us", tz="UTC")),
            ("headers", pa.map_(pa.string(), pa.binary())),
            ("keyHash", pa.int32()),
            ("epoch", pa.int32()),
        ]
    )


def test_any_columns_in_any_order_may_be_asked_for() -> None:
    asked = choice("value", "offset")
    assert checked_projection(asked) is asked
    never_null = StructType([StructField("offset", SOURCE_SCHEMA["offset"].dataType, nullable=False)])
    assert checked_projection(never_null) is never_null
    assert not arrow_schema(never_null).field("offset").nullable


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (
            [StructField("valeu", BinaryType())],
            "a column 'valeu', which a topic does not have; choose from segment int, offset bigint",
        ),
        ([StructField("value", StringType())], "column value as string; it is binary: ask for that, and cast it"),
        ([StructField("offset", IntegerType())], "column offset as int; it is bigint"),
        ([StructField("headers", MapType(StringType(), StringType()))], "column headers as map<string,string>"),
        ([StructField("key", BinaryType(), nullable=False)], "says that column key is never null"),
        ([SOURCE_SCHEMA["value"], SOURCE_SCHEMA["value"]], "each only once"),
        ([], "at least one column"),
    ],
)
def test_a_schema_that_a_topic_does_not_have_is_refused_by_name(asked: list[StructField], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checked_projection(StructType(asked))
    assert says in str(caught.value)
