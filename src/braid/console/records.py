"""Looks into topics by the Python client: a page of records from an offset, a time, the end, or of one key.

A look belongs to no subscription and leaves nothing on the brokers. It is bounded in records, bytes and time.
"""

from __future__ import annotations

import asyncio
import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from msgspec import Struct

from braid.model.hashing import key_hash
from braid.model.message import Message

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.consuming.checkpoint import Start

MAX_RECORDS: Final = 200
MAX_SCANNED: Final = 50_000
"""Records that a search for a key reads at most."""
MAX_SHOWN_BYTES: Final = 64 << 10
"""Of a value; the page says that there is more."""
MAX_INDENTED_CHARS: Final = 8 * MAX_SHOWN_BYTES
"""A value of 64 KiB, nested 900 times, would have 60 MB of indents."""
LOOK_S: Final = 8.0
WINDOW_BYTES: Final = 1 << 20


Kept = TypeVar("Kept", bound=Message)


class Place(Struct, frozen=True, kw_only=True):
    """Where to look."""

    by: str = "end"
    """`end` (the last records), `begin`, `offset`, `time`, `key`, `follow`."""
    segment: int | None = None
    offset: int = 0
    time: datetime.datetime | None = None
    key: bytes = b""
    count: int = 50


class Shown(Message, frozen=True, gc=False):
    """A record of which only the beginning is kept, for a page."""

    size: int = 0
    """Of the whole value, in bytes."""


def shown(message: Message) -> Shown:
    """Return what a page needs of a record: records may have 128 MiB, and a page holds hundreds."""
    return Shown(
        value=message.value[:MAX_SHOWN_BYTES],
        key=None if message.key is None else message.key[:MAX_SHOWN_BYTES],
        timestamp_us=message.timestamp_us,
        offset=message.offset,
        headers={name: value[:MAX_SHOWN_BYTES] for name, value in message.headers.items()},
        segment=message.segment,
        topic=message.topic,
        size=len(message.value),
    )


def read_moment(text: str) -> datetime.datetime:
    """Read a time that a person typed. Raises `ValueError` with a sentence."""
    try:
        moment = datetime.datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError("write the time as 2026-01-31 12:00 or 2026-01-31T12:00:00Z; it is in UTC") from None
    return moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)


class Ends(Struct, frozen=True):
    """Of a segment, as statistics tell."""

    earliest: int
    end: int
    first_hash: int
    last_hash: int
    active: bool


def ends_of(stats: Mapping[str, Any]) -> dict[int, Ends]:
    """Return the segments whose owners answered."""
    return {
        int(segment): Ends(
            each["earliestOffset"],
            each["endOffset"],
            each["hashRange"]["start"],
            each["hashRange"]["end"],
            each["state"] == "ACTIVE",
        )
        for segment, each in stats["segments"].items()
        if each["endOffset"] is not None
    }


def first_offsets(place: Place, ends: Mapping[int, Ends]) -> dict[int, int]:
    """Return where to begin in each segment that is read; a place at its end is left out."""
    chosen = {id_: each for id_, each in ends.items() if place.segment in (None, id_)}
    if place.by == "key":
        key = key_hash(place.key)
        chosen = {id_: each for id_, each in chosen.items() if each.first_hash <= key <= each.last_hash}
        share = MAX_SCANNED // max(1, len(chosen))
        starts = {id_: max(each.earliest, each.end - share) for id_, each in chosen.items()}
    elif place.by == "end":
        starts = {id_: max(each.earliest, each.end - place.count) for id_, each in chosen.items()}
    elif place.by == "offset":
        starts = {id_: max(each.earliest, place.offset) for id_, each in chosen.items()}
    else:
        starts = {id_: each.earliest for id_, each in chosen.items()}
    return {id_: start for id_, start in starts.items() if start < chosen[id_].end}


async def look(
    client: Client,
    topic: str,
    place: Place,
    ends: Mapping[int, Ends],
    keep: Callable[[Message], Kept],
) -> list[Kept]:
    """Return at most `place.count` records, the newest last: what `keep` makes of them."""
    starts = first_offsets(place, ends)
    if not starts:
        return []
    start: Start = place.time if place.by == "time" and place.time is not None else starts
    left = {id_: ends[id_].end for id_ in starts}
    found: list[Kept] = []
    deadline = asyncio.get_running_loop().time() + LOOK_S
    async with client.checkpoint_consumer(topic, start=start, window_bytes=WINDOW_BYTES) as consumer:
        while left and not _is_full(found, place):
            message = await consumer.receive(timeout=min(1.0, max(0.0, deadline - asyncio.get_running_loop().time())))
            if message is None:
                break
            if message.segment in starts and _is_wanted(message, place):
                found.append(keep(message))
                if len(found) > 4 * MAX_RECORDS:
                    found = _newest(found, place)
            if message.offset + 1 >= left.get(message.segment, 0):
                left.pop(message.segment, None)
    return _newest(found, place)


def _newest(found: list[Kept], place: Place) -> list[Kept]:
    """Return the records that were asked for, of those that were found."""
    found.sort(key=lambda each: (each.timestamp_us, each.segment, each.offset))
    return found[-place.count :] if place.by in ("end", "key") else found[: place.count]


def _is_full(found: Sequence[Message], place: Place) -> bool:
    return place.by in ("begin", "offset", "time") and len(found) >= place.count


def _is_wanted(message: Message, place: Place) -> bool:
    if place.segment not in (None, message.segment):
        return False
    if place.by == "key":
        return message.key == place.key
    if place.by == "time" and place.time is not None:
        return message.timestamp_us >= place.time.timestamp() * 1e6
    return True


# How bytes look.


def decoded(data: bytes | None, form: str = "auto") -> tuple[str, str]:
    """Return bytes as text, and which form that is: `json`, `text` or `hex`."""
    if data is None:
        return "", "none"
    if form in ("auto", "json"):
        try:
            value = json.loads(data)
            if form == "json" or isinstance(value, dict | list):
                return _indented(value), "json"
        except (ValueError, RecursionError):
            pass
    if form != "hex":
        try:
            text = data.decode()
            if all(char.isprintable() or char in "\n\r\t" for char in text):
                return text, "text"
        except UnicodeDecodeError:
            pass
    return hex_dump(data), "hex"


def _indented(value: Any) -> str:
    """Return JSON in lines. Raises `ValueError` for what a page cannot show: indents of deep values that are longer
    than the value itself by far, and escaped halves of surrogate pairs, which UTF-8 cannot write."""
    parts: list[str] = []
    length = 0
    for part in json.JSONEncoder(indent=2, ensure_ascii=False).iterencode(value):
        parts.append(part)
        length += len(part)
        if length > MAX_INDENTED_CHARS:
            raise ValueError("the value is nested too deeply to be indented")
    text = "".join(parts)
    text.encode()
    return text


def hex_dump(data: bytes) -> str:
    """Return lines of sixteen bytes with their place and what is readable of them."""
    lines = []
    for place in range(0, len(data), 16):
        part = data[place : place + 16]
        readable = "".join(chr(byte) if 32 <= byte < 127 else "." for byte in part)
        lines.append(f"{place:06x}  {part.hex(' '):<47}  {readable}")
    return "\n".join(lines)


def one_line(data: bytes | None, limit: int = 200) -> str:
    """Return the begin of a value, for a row."""
    if data is None:
        return "–"
    text, form = decoded(data[: limit * 4], "auto" if len(data) <= limit * 4 else "text")
    if form == "hex":
        return data[:limit].hex(" ")[:limit]
    return " ".join(text.split())[:limit]
