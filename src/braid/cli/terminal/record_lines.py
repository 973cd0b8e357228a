"""Records as lines of text: what `braid consume` prints, and what `braid produce --json` reads.

As JSON, a record is one object in one line:

    {"key":"customer-7","value":"paid","timestamp":"2026-11-15T12:57:00.240545Z","segment":0,"offset":0,"headers":{}}

A message of a queue also has its `redeliveryCount`.

A key, value or header that is no UTF-8 has another name, so that it is not taken for text: `keyBase64`, `valueBase64`,
`headersBase64`. What `consume` prints, `produce` reads; it ignores segment, offset and redeliveryCount. A line for
`produce` may have `deliverAfterMs` and `ttlMs`, which queues obey.
"""

from __future__ import annotations

import base64
import binascii
import datetime
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Final, Protocol

import msgspec

from braid.model.errors import BraidError, InvalidArgument
from braid.model.message import Message, QueueMessage


class Records(Protocol):
    """Of one delivery, in order."""

    def values(self) -> list[bytes]: ...

    def messages(self) -> Sequence[Message]: ...

    def columns(self, names: tuple[str, ...]) -> Any:
        """Return an Arrow table of these columns."""


Format = Callable[[Records], list[bytes]]

_MAX_QUOTED: Final = 200
"""How many characters of a bad line an error repeats."""


# Printing.


def value_lines(batch: Records) -> list[bytes]:
    return batch.values()


def column_lines(separator: bytes, *, headers: bool, key: bool) -> Format:
    """Make lines of the value, after the key and the headers if they are wanted. Headers are NAME=VALUE,NAME=VALUE."""

    def keyed(batch: Records) -> list[bytes]:  # Faster: it makes no objects.
        columns = batch.columns(("key", "value"))
        pairs = zip(columns.column(0).to_pylist(), columns.column(1).to_pylist())
        return [(found or b"") + separator + value for found, value in pairs]

    def full(batch: Records) -> list[bytes]:
        return [separator.join((*_before_value(message), message.value)) for message in batch.messages()]

    def _before_value(message: Message) -> list[bytes]:
        pairs = (name.encode() + b"=" + value for name, value in message.headers.items())
        return [b",".join(pairs), *([message.key or b""] if key else [])]

    return full if headers else keyed


def json_lines(batch: Records) -> list[bytes]:
    encode = msgspec.json.Encoder().encode
    return [encode(record_object(message)) for message in batch.messages()]


def record_object(message: Message) -> dict[str, Any]:
    """Return a record for JSON."""
    headers = {name: _text(value) for name, value in message.headers.items()}
    shown: dict[str, Any] = {
        **_named("key", message.key),
        **_named("value", message.value),
        "timestamp": _iso(message.timestamp_us),
        "segment": message.segment,
        "offset": message.offset,
        "headers": {name: text for name, text in headers.items() if text is not None},
    }
    binary = {name: _base64(message.headers[name]) for name, text in headers.items() if text is None}
    if isinstance(message, QueueMessage):
        shown["redeliveryCount"] = message.redelivery_count
    return {**shown, "headersBase64": binary} if binary else shown


def _named(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    text = _text(data)
    return {f"{name}Base64": _base64(data)} if text is None else {name: text}


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@lru_cache(maxsize=4_096)  # Records of one batch often have the same time.
def _iso(timestamp_us: int) -> str | int:
    """Return ISO 8601 in UTC, or the number itself if the calendar has no such time."""
    try:
        moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=timestamp_us)
    except OverflowError:
        return timestamp_us
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


# Reading.


class RecordObject(msgspec.Struct, frozen=True, rename="camel", forbid_unknown_fields=True):
    """One line of JSON."""

    value: str | None = None
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] = {}
    headers_base64: dict[str, str] = {}
    timestamp: datetime.datetime | int | None = None
    """ISO 8601 with its zone, or µs since 1970."""
    deliver_after_ms: int | None = None
    """Queues deliver the record so long after it was read here."""
    ttl_ms: int | None = None
    """Queues do not deliver it later than that."""
    segment: int = 0
    offset: int = 0
    redelivery_count: int = 0


_DECODER: Final = msgspec.json.Decoder(RecordObject)


def json_table(lines: Sequence[bytes], headers: dict[str, bytes], *, first: int = 1) -> Any:
    """Return an Arrow table of records that are JSON objects. Each record also gets `headers`, unless it has its own of
    that name. `first` is the number of the first line, for the error."""
    import pyarrow as pa

    keys, values, times, all_headers = [], [], [], []
    for number, line in enumerate(lines, first):
        try:
            record = _DECODER.decode(line)
            value = _bytes(record.value, record.value_base64)
            if value is None:
                raise ValueError("it has no value")
            keys.append(_bytes(record.key, record.key_base64))
            values.append(value)
            times.append(_microseconds(record.timestamp))
            own = {name: text.encode() for name, text in record.headers.items()}
            binary = {name: _decoded(text) for name, text in record.headers_base64.items()}
            all_headers.append(list((headers | own | binary | _times(record)).items()))
        except (msgspec.MsgspecError, ValueError, InvalidArgument) as error:
            shown = line[:_MAX_QUOTED].decode(errors="replace")
            raise BraidError(
                f'line {number} is no record, such as {{"key": "k", "value": "v", "headers": {{"trace": "a1"}}}}: '
                f"{error}: {shown}"
            ) from error
    return pa.table(
        {
            "key": pa.array(keys, pa.binary()),
            "value": pa.array(values, pa.binary()),
            "timestamp": pa.array(times, pa.timestamp("us", "UTC")),
            "headers": pa.array(all_headers, pa.map_(pa.string(), pa.binary())),
        }
    )


def _times(record: RecordObject) -> dict[str, bytes]:
    """Return the headers that tell queues when to deliver the record."""
    if record.deliver_after_ms is None and record.ttl_ms is None:
        return {}
    from braid.client.producing.records import delivery_times  # Needs Arrow.

    after, ttl = (None if each is None else each / 1000 for each in (record.deliver_after_ms, record.ttl_ms))
    return delivery_times(time.time_ns() // 1_000, after, None, ttl)


def _bytes(text: str | None, encoded: str | None) -> bytes | None:
    if text is not None and encoded is not None:
        raise ValueError("it has the same field as text and as Base64")
    if encoded is not None:
        return _decoded(encoded)
    return None if text is None else text.encode()


def _decoded(encoded: str) -> bytes:
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise ValueError(f"its Base64 is wrong: {error}") from error


def _microseconds(timestamp: datetime.datetime | int | None) -> int | None:
    from braid.client.producing.records import as_microseconds  # Needs Arrow.

    if isinstance(timestamp, datetime.datetime) and timestamp.tzinfo is None:
        raise ValueError("its timestamp has no zone; write 2026-11-15T12:00:00Z")
    return None if timestamp is None else as_microseconds(timestamp)
