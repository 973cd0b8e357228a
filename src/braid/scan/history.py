"""`braid.history`: a topic's records as an Arrow reader, for DuckDB, Polars, pandas and every other user of Arrow.

    brokers up     chunks from storage, the tail from the segments' owners
    brokers down   chunks from storage, as far as they reach

The call plans the read from one snapshot, as Spark's source does (snapshot.py, planning.py). So a topic may grow, move
and split meanwhile: the reader returns each record of the snapshot once. Parents come before their children and offsets
rise in each segment, so the records of a key come in the order in which they were written.

The reader connects when its first batch is asked for, and disconnects after the last one.
"""

from __future__ import annotations

import datetime
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa

from braid.client.client import DEFAULT_TIMEOUT_S
from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import ConnectFailed, InvalidArgument
from braid.model.names import TopicName
from braid.scan.columns import projected
from braid.scan.connection import ScanConnection
from braid.scan.options import BadRecords, ScanOptions
from braid.scan.planning import Partition, Prune, Range, plan_batch
from braid.scan.ranges import asked_ranges
from braid.scan.reading import record_batches
from braid.scan.snapshot import TopicSnapshot, take_snapshot
from braid.wire.address import DEFAULT_URL, parse_url

Bound = Mapping[int, Position] | datetime.datetime | str
"""Offsets by segment, a time with its zone, or such a time in ISO 8601."""

BROKERS_ANSWER_S: Final = 3.0
"""How long a read that may do without brokers looks for one."""
_1970: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_MAX_OFFSET: Final = (1 << 63) - 1
_log: Final = logging.getLogger(__name__)


def history(
    topic: str,
    *,
    columns: Sequence[str] | None = None,
    start: Bound | None = None,
    end: Bound | None = None,
    url: str | None = None,
    storage: str | None = None,
    token: str = "",
    tls: bool | str = False,
    timeout: float = DEFAULT_TIMEOUT_S,
    fail_on_data_loss: bool = True,
    bad_records: BadRecords = "fail",
) -> Any:
    """Open a topic's history as a `pyarrow.RecordBatchReader`. Blocks while it plans the read.

    `columns` chooses from segment, offset, key, value, timestamp, headers, keyHash and epoch; all by default.

    `start` and `end` bound the read, `end` exclusively: by offsets such as `{0: 17}`, where an absent segment is read
    whole and "END" is its end, or by a time with its zone, as a `datetime` or in ISO 8601.

    `url` names brokers (by default BRAID_URL, or this machine), `storage` the URL of the chunks. With `storage` alone
    no broker is asked: the history ends where the chunks end. With both, the read does without brokers if none
    answers within 3 s.

    The metadata of the reader's schema has `braid.topic`, `braid.live` (`true` if brokers were asked) and, unless
    `end` is a time, `braid.next`: JSON of the offsets at which this read ends. Given as `start`, they continue it.

    Raises `BraidError`, also while the reader is used. `fail_on_data_loss=False` skips records that were deleted
    meanwhile, `bad_records="skip"` batches that cannot be decoded; each with a warning in the log.
    """
    schema = projected(columns)
    starting, since = _bound("start", start)
    ending, before = _bound("end", end)
    if since is not None and before is not None and since > before:
        raise InvalidArgument(f"argument end is {end}, which is before start {start}")
    options = ScanOptions(
        topic=TopicName.parse(topic).path,
        url="" if url is None and storage is not None else url or os.environ.get("BRAID_URL") or DEFAULT_URL,
        manifest=storage or "",
        token=token or os.environ.get("BRAID_TOKEN", ""),
        tls=tls,
        timeout_s=timeout,
        starting_offsets=starting,
        starting_timestamp=since,
        ending_offsets=ending,
        ending_timestamp=before,
        fail_on_data_loss=fail_on_data_loss,
        bad_records=bad_records,
    )
    options, snapshot = _snapshot(options)
    ranges = asked_ranges(snapshot, options)
    prune = Prune(since_us=since, before_us=before)
    planned = plan_batch(snapshot, [each for each in ranges if each.records], prune=prune)
    schema = schema.with_metadata(_metadata(snapshot, options, ranges))
    return pa.RecordBatchReader.from_batches(schema, _batches(planned, options, schema, prune))


def _batches(planned: Sequence[Partition], options: ScanOptions, schema: Any, prune: Prune) -> Iterator[Any]:
    with ScanConnection(options) as connection:
        for partition in planned:
            yield from record_batches(partition, options, schema, prune=prune, connection=connection)


def _snapshot(options: ScanOptions) -> tuple[ScanOptions, TopicSnapshot]:
    """Take a snapshot, and return how to read it: without brokers if none answers and the storage is known."""
    if options.url:
        parse_url(options.url)
    if not (options.url and options.manifest):
        return options, take_snapshot(options)
    quick = msgspec.structs.replace(options, timeout_s=min(options.timeout_s, BROKERS_ANSWER_S))
    try:
        with ScanConnection(quick) as connection:
            _ = connection.client
    except ConnectFailed as error:
        _log.warning("the history of topic %s ends where its chunks end: %s", options.topic, error)
        options = msgspec.structs.replace(options, url="")
    return options, take_snapshot(options)


def _bound(name: str, bound: Bound | None) -> tuple[dict[int, Position] | None, int | None]:
    """Return the offsets or the time, in µs since 1970."""
    match bound:
        case None:
            return None, None
        case Mapping():
            return {_segment(name, segment): _place(name, place) for segment, place in bound.items()}, None
        case str():
            try:
                bound = datetime.datetime.fromisoformat(bound)
            except ValueError:
                raise InvalidArgument(
                    f"argument {name} is {bound!r}: it must be a time in ISO 8601, such as 2026-11-15T18:00:00Z"
                ) from None
        case datetime.datetime():
            pass
        case _:
            raise InvalidArgument(
                f"argument {name} is {bound!r}: it must be offsets by segment, such as {{0: 17}}, or a time"
            )
    if bound.tzinfo is None:
        raise InvalidArgument(f"argument {name} is {bound.isoformat()}, which has no time zone; add one")
    return None, (bound - _1970) // _MICROSECOND


def _segment(name: str, segment: object) -> int:
    """Take a segment's id as a number, or as the text that JSON makes of it."""
    if isinstance(segment, int) and not isinstance(segment, bool) and segment >= 0:
        return segment
    if isinstance(segment, str) and segment.isascii() and segment.isdigit():
        return int(segment)
    raise InvalidArgument(f"argument {name} names segment {segment!r}: a segment's id is a number")


def _place(name: str, place: object) -> Position:
    if place == END:
        return END
    if isinstance(place, int) and not isinstance(place, bool) and 0 <= place <= _MAX_OFFSET:
        return place
    raise InvalidArgument(f"argument {name} names offset {place!r}: it must be a number, or {END!r}")


def _metadata(snapshot: TopicSnapshot, options: ScanOptions, ranges: Sequence[Range]) -> dict[str, str]:
    found = {"braid.topic": snapshot.topic, "braid.live": str(snapshot.live).lower()}
    if options.ending_timestamp is None:  # Otherwise later rows below these offsets would never be read.
        found["braid.next"] = json.dumps({str(each.segment): each.until for each in sorted(ranges)})
    return found
