"""The options of a read, `.option(…)`, checked once, on the driver.

Options have the names and meanings of Spark's Kafka source where it has the same option. Where Braid has another name
for the same option, it takes both. Spark does not keep the case of their names, so Braid ignores it. An unknown name or
value is an error that names the option: an option that is silently ignored is worse than none.
"""

from __future__ import annotations

import datetime
import difflib
import json
import os
import re
from collections.abc import Mapping
from typing import Any, ClassVar, Final, NoReturn, Self

from braid.client.client import DEFAULT_TIMEOUT_S
from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import BraidError, InvalidArgument
from braid.model.names import TopicName, check_name
from braid.scan.options import EARLIEST, LATEST, BadRecords, Offsets, ScanOptions
from braid.wire.address import DEFAULT_URL, parse_url

_EARLIEST_NUMBER: Final = -2
_LATEST_NUMBER: Final = -1
"""As Spark's Kafka source writes them in JSON."""
_MAX_OFFSET: Final = (1 << 63) - 1
_MICROSECOND: Final = datetime.timedelta(microseconds=1)
_1970: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MAX_MS: Final = 253_402_300_799_999
"""The end of the year 9999, where Spark's timestamps end."""

NAMES: Final = (
    "url",
    "manifest",
    "topic",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "maxRecordsPerTrigger",
    "maxBytesPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "badRecords",
    "includeHeaders",
    "pruneByFilters",
    "subscription",
    "token",
    "tls",
    "timeout",
)
KAFKA_NAMES: Final = {"subscribe": "topic", "maxOffsetsPerTrigger": "maxRecordsPerTrigger"}
"""Options of Spark's Kafka source that mean the same, and their names here."""
_KAFKA_NAME_OF: Final = {name: kafka for kafka, name in KAFKA_NAMES.items()}
KAFKA_HINTS: Final = {
    "kafka.bootstrap.servers": "option url names brokers, as in braid://host:6660",
    "subscribePattern": "a read has one topic, named by option topic; join several reads by union",
    "assign": "option topic names what to read; startingOffsets and endingOffsets choose offsets by segment",
    "startingOffsetsByTimestamp": "use startingTimestamp, one time for all segments",
    "endingOffsetsByTimestamp": "use endingTimestamp, one time for all segments",
    "startingOffsetsByTimestampStrategy": "a segment without records of the starting time is read from its end on",
    "minOffsetsPerTrigger": "use the trigger's interval; maxRecordsPerTrigger limits a micro-batch",
    "maxTriggerDelay": "use the trigger's interval; maxRecordsPerTrigger limits a micro-batch",
    "kafka.group.id": "option subscription shows a query's progress under a name",
    "groupIdPrefix": "option subscription shows a query's progress under a name",
    "kafkaConsumer.pollTimeoutMs": "use option timeout, in seconds",
    "fetchOffset.numRetries": "use option timeout, in seconds: how long a read retries",
    "fetchOffset.retryIntervalMs": "use option timeout, in seconds: how long a read retries",
}
"""Options of Spark's Kafka source that do not exist here, and what to use instead."""
ONLY_STREAMING: Final = ("maxRecordsPerTrigger", "maxBytesPerTrigger", "subscription")
ONLY_BATCH: Final = ("endingOffsets", "endingTimestamp", "pruneByFilters")


class SourceOptions(ScanOptions, frozen=True, kw_only=True):
    client_name: ClassVar[str] = "spark"

    max_records_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    min_partitions: int | None = None
    include_headers: bool = True
    prune_by_filters: bool = False
    """Whether the query's filters leave out chunks. Correct only if each query has its own load() (data_source.py)."""
    subscription: str = ""

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> Self:
        """Check what every read has in common; `for_batch` and `for_stream` check the rest."""
        values = named_options(given, NAMES)
        if "topic" not in values:
            raise InvalidArgument("option topic is missing: it says what to read, as in .option('topic', 'orders')")
        if "url" in values and "manifest" in values:
            raise InvalidArgument(
                "options url and manifest were both given: url reads through brokers, manifest from storage without "
                "any; give one of them"
            )
        manifest = values.get("manifest", "")
        options = cls(
            topic=topic_path(values["topic"]),
            url="" if manifest else broker_url(values.get("url")),
            manifest=manifest,
            token=values.get("token", os.environ.get("BRAID_TOKEN", "")),
            tls=trust(values.get("tls")),
            timeout_s=timeout_seconds(values.get("timeout")),
            starting_offsets=_offsets("startingOffsets", values.get("startingOffsets")),
            ending_offsets=_offsets("endingOffsets", values.get("endingOffsets")),
            starting_timestamp=_timestamp("startingTimestamp", values.get("startingTimestamp")),
            ending_timestamp=_timestamp("endingTimestamp", values.get("endingTimestamp")),
            max_records_per_trigger=_count("maxRecordsPerTrigger", values.get("maxRecordsPerTrigger")),
            max_bytes_per_trigger=_count("maxBytesPerTrigger", values.get("maxBytesPerTrigger")),
            min_partitions=_count("minPartitions", values.get("minPartitions")),
            fail_on_data_loss=_truth("failOnDataLoss", values.get("failOnDataLoss"), default=True),
            bad_records=_bad_records(values.get("badRecords")),
            include_headers=_truth("includeHeaders", values.get("includeHeaders"), default=True),
            prune_by_filters=_truth("pruneByFilters", values.get("pruneByFilters"), default=False),
            subscription=_subscription(values.get("subscription")),
        )
        since, before = options.starting_timestamp, options.ending_timestamp
        if since is not None and before is not None and since > before:
            raise InvalidArgument(
                f"option endingTimestamp is {values['endingTimestamp']}, which is before startingTimestamp "
                f"{values['startingTimestamp']}"
            )
        return options

    def for_batch(self) -> Self:
        self._refuse(ONLY_STREAMING, "a batch read has no triggers and no progress; use spark.readStream, or leave it")
        if self.starting_offsets == LATEST:
            raise InvalidArgument("option startingOffsets is latest: a batch read would be empty; name an offset")
        if isinstance(self.starting_offsets, dict):
            _refuse_number("startingOffsets", self.starting_offsets, _LATEST_NUMBER, "latest")
        if self.ending_offsets == EARLIEST:
            raise InvalidArgument("option endingOffsets is earliest: a batch read would be empty; name an offset")
        if isinstance(self.ending_offsets, dict):
            _refuse_number("endingOffsets", self.ending_offsets, _EARLIEST_NUMBER, "earliest")
        return self

    def for_stream(self) -> Self:
        self._refuse(ONLY_BATCH, "a stream has no end and is offered no filters; use spark.read, or leave it out")
        return self

    def called(self, field: str) -> str:
        return f"option {_NAME[field]}"

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if getattr(self, _FIELD[name]) not in (None, "", False):
                raise InvalidArgument(f"option {name} was given: {why}")


_FIELD: Final = {name: re.sub("[A-Z]", lambda match: "_" + match[0].lower(), name) for name in NAMES}
_NAME: Final = {field: name for name, field in _FIELD.items()}


def named_options(given: Mapping[str, str], names: tuple[str, ...]) -> dict[str, str]:
    """Return the options by their documented names. Raises if an option is not among `names`."""
    known = {name.lower(): name for name in names}
    known |= {kafka.lower(): name for kafka, name in KAFKA_NAMES.items() if name in names}
    values: dict[str, str] = {}
    for name, value in given.items():
        if name.lower() == "path":
            raise InvalidArgument(f"a path was given ({value}): a topic has none; name it by .option('topic', …)")
        if name.lower() not in known and (hint := _kafka_hint(name.lower())):
            raise InvalidArgument(f"option {name} belongs to Spark's Kafka source: {hint}")
        if name.lower() not in known:
            near = difflib.get_close_matches(name.lower(), known, 1)
            hint = f"did you mean {known[near[0]]}?" if near else f"known are {', '.join(names)}"
            raise InvalidArgument(f"option {name} is unknown: {hint}")
        if known[name.lower()] in values:
            both = f"{known[name.lower()]} and {_KAFKA_NAME_OF[known[name.lower()]]}"
            raise InvalidArgument(f"options {both} were both given; leave one of them out")
        if name.lower() == "subscribe" and "," in value:
            raise InvalidArgument(f"option subscribe is {value!r}: a read has one topic; join several reads by union")
        values[known[name.lower()]] = value
    return values


def _kafka_hint(name: str) -> str:
    hints = {option.lower(): hint for option, hint in KAFKA_HINTS.items()}
    if name in hints:
        return hints[name]
    return "settings of Kafka's own clients mean nothing here; leave it out" if name.startswith("kafka.") else ""


def wrong_value(name: str, value: object, expected: str) -> NoReturn:
    raise InvalidArgument(f"option {name} is {value!r}: it must be {expected}") from None


def broker_url(value: str | None) -> str:
    url = value if value is not None else os.environ.get("BRAID_URL") or DEFAULT_URL
    try:
        parse_url(url)
    except BraidError as error:
        raise InvalidArgument(f"option url: {error}") from None
    return url


def topic_path(value: str) -> str:
    try:
        return TopicName.parse(value).path
    except BraidError as error:
        raise InvalidArgument(f"option topic: {error}") from None


def trust(value: str | None) -> bool | str:
    """Parse option tls."""
    if value is None or value.lower() == "false":
        return False
    return True if value.lower() == "true" else value


def timeout_seconds(value: str | None) -> float:
    if value is None:
        return DEFAULT_TIMEOUT_S
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= 86_400:
        wrong_value("timeout", value, "a number of seconds above 0, at most a day")
    return seconds


def _subscription(value: str | None) -> str:
    if value is None:
        return ""
    try:
        return check_name("subscription", value)
    except BraidError as error:
        raise InvalidArgument(f"option subscription: {error}") from None


def _bad_records(value: str | None) -> BadRecords:
    match (value or "fail").lower():
        case "fail":
            return "fail"
        case "skip":
            return "skip"
    wrong_value("badRecords", value, "fail or skip")


def _truth(name: str, value: str | None, *, default: bool) -> bool:
    if value is None:
        return default
    if value.lower() not in ("true", "false"):
        wrong_value(name, value, "true or false")
    return value.lower() == "true"


def _count(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or not 0 < int(value) <= _MAX_OFFSET:
        wrong_value(name, value, "a whole number above 0")
    return int(value)


def _timestamp(name: str, value: str | None) -> int | None:
    expected = "milliseconds since 1970, or a time with its zone, such as 2026-11-15T18:00:00Z"
    if value is None:
        return None
    if re.fullmatch(r"\d+", value, re.ASCII):
        if int(value) > _MAX_MS:
            wrong_value(name, value, expected)
        return int(value) * 1_000
    try:
        time = datetime.datetime.fromisoformat(value)
    except ValueError:
        wrong_value(name, value, expected)
    if time.tzinfo is None:
        wrong_value(name, value, expected + "; this one has no zone")
    return (time - _1970) // _MICROSECOND


def _offsets(name: str, value: str | None) -> Offsets | None:
    expected = 'earliest, latest, or JSON of offsets by segment, such as {"0": 17, "3": "END"}'
    if value is None:
        return None
    match value.strip().lower():
        case "earliest":
            return "earliest"
        case "latest":
            return "latest"
    try:
        found: Any = json.loads(value, object_pairs_hook=_once_each)
    except ValueError:
        wrong_value(name, value, expected)
    if not isinstance(found, dict):
        wrong_value(name, value, expected)
    places: dict[int, Position] = {}
    for segment, place in found.items():
        if not re.fullmatch(r"0|[1-9]\d{0,17}", segment, re.ASCII):
            wrong_value(name, value, f"{expected}; {segment!r} is not a segment id")
        if place == END:
            places[int(segment)] = END
        elif isinstance(place, int) and not isinstance(place, bool) and _EARLIEST_NUMBER <= place <= _MAX_OFFSET:
            places[int(segment)] = place
        else:
            wrong_value(name, value, f"{expected}; {place!r} is not an offset")
    return places


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a segment is named twice")
    return found


def _refuse_number(name: str, places: dict[int, Position], number: int, meaning: str) -> None:
    for segment, place in places.items():
        if place == number:
            raise InvalidArgument(
                f"option {name} has {number} ({meaning}) for segment {segment}: a batch read of it would be empty; "
                "name an offset, or END"
            )
