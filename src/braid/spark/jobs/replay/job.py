"""`replay`: copies a topic, or a time of it, into another topic, in the order of keys, each record once.

    journal ──► one step ──► read ──► by key hash ──► sort ──► write ──► done
                offsets      Spark    n partitions    (segment, offset)  recognised if it is written again

**Steps.** The driver cuts the copy into steps, by the rule of micro-batches (batch_limits.py): a step has only segments
whose ancestors were copied to their end in earlier steps. The driver journals a step before it runs (journal.py), and
runs it until it succeeds; only then comes the next step.

**Once.** A step is written with the replay's id as `txnAppId` and its number as `txnVersion`. The sink numbers the rows
of each partition; if a task or a whole step is repeated, brokers recognise what they have stored. For that, a repeat
must have the same rows in the same partitions in the same order. The journal has the offsets of the rows and the number
of partitions; a hash of each row chooses its partition; and each partition is sorted, because rows come in any order
after a shuffle.

**Order.** All records of a key have the same hash, so one task writes them. For one key, a step has records of one
segment only (its ancestors and descendants are in other steps), so sorting by segment and offset gives the order in
which they were published (I4). Records without a key have no order between segments; those of one segment stay
together, in their order. The target may have any number of segments: the key chooses the segment again.

**Time.** With bounds of time the copy is exact: the source leaves out records outside the bounds. The driver steps over
chunks that are wholly outside, without reading them and without a step.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812 (as everybody calls it)

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import DataLoss, InvalidArgument, TopicNotFound
from braid.model.names import TopicName
from braid.scan.connection import ScanConnection
from braid.scan.planning import Prune, Range
from braid.scan.ranges import check_named
from braid.scan.snapshot import TopicSnapshot
from braid.spark.connect import parallelism
from braid.spark.jobs.bounded_read import counted, records_seen, records_skipped, rows_between, within
from braid.spark.jobs.replay.journal import Replay, ReplayJournal, ReplayStep
from braid.spark.jobs.report import CopiedSegment, JobReport, lag
from braid.spark.source.options import SourceOptions
from braid.spark.stream.batch_limits import BatchLimits, admit, beginning, bounded, epochs_at, ranges, stream_position
from braid.spark.stream.offsets import StreamOffset

MAX_RECORDS: Final = 20_000_000
"""Of one step. Spark keeps a step's rows on disk between reading and writing, so this bounds the disk space."""
PARTITION_RECORDS: Final = 50_000
"""Fewer are not worth a separate task."""
_WITHOUT_KEY: Final = 1 << 16
"""Above all key hashes."""


class ReplayReport(JobReport, frozen=True, kw_only=True):
    ok: bool
    source: str
    target: str
    checkpoint: str
    steps: int
    repeated: int
    """How many steps an earlier run had begun."""
    records: int
    duplicates: int
    """Records of a repeated step that were in the target already. An estimate if other producers write to the target at
    the same time."""
    skipped: int
    """How many records could not be decoded and were not copied, because `badRecords` is skip."""
    lag: int
    """How many more records the source had when the run ended."""
    segments: tuple[CopiedSegment, ...]
    seconds: float


# Deciding.


def check_topics(source: str, target: str) -> None:
    if source == target:
        raise InvalidArgument(f"topic {source} cannot be replayed into itself: it would never end; name another target")


def bounds(start: str, until: str) -> dict[str, str]:
    """Turn `--from` and `--until` into options of the source."""
    given: dict[str, str] = {}
    for value, open_end, name in ((start, "earliest", "starting"), (until, "latest", "ending")):
        if value.strip().lower() == open_end:
            continue
        is_offsets = value.lstrip().startswith("{") or value.strip().lower() in ("earliest", "latest")
        given[f"{name}{'Offsets' if is_offsets else 'Timestamp'}"] = value
    return given


def checked_bounds(source: Mapping[str, str], start: str, until: str) -> dict[str, str]:
    """Check the bounds, too. Errors name the options of the command line."""
    SourceOptions.parse(source)
    for name, value, open_end, asked in (
        ("--from", start, "earliest", bounds(start, "latest")),
        ("--until", until, "latest", bounds("earliest", until)),
    ):
        try:
            SourceOptions.parse({**source, **asked}).for_batch()
        except InvalidArgument:
            raise InvalidArgument(
                f"{name} is {value!r}: it must be {open_end}, a time with its zone such as 2026-11-15T18:00:00Z, "
                'milliseconds since 1970, or offsets by segment such as {"0": 17, "3": "END"}'
            ) from None
    given = bounds(start, until)
    SourceOptions.parse({**source, **given})
    return given


def first_positions(options: SourceOptions, snapshot: TopicSnapshot) -> dict[int, Position]:
    check_named(snapshot, options)
    asked = msgspec.structs.replace(
        options, starting_offsets=options.starting_offsets or "earliest", ending_offsets=None
    )
    positions = beginning(asked, snapshot)
    for segment, end in _ends(options).items():
        position = positions[segment]
        if position == END or position <= end:
            continue
        if position > snapshot.segments[segment].earliest:
            raise InvalidArgument(
                f"--from and --until ask for records from offset {position} up to {end} of segment {segment} of topic "
                f"{snapshot.topic}: the end is before the start"
            )
        positions[segment] = end  # Retention has deleted all records that were asked for.
    return positions


def until(options: SourceOptions, snapshot: TopicSnapshot) -> TopicSnapshot:
    """Return the topic as if it ended where the copy ends. A segment that is not copied to its end counts as not
    sealed, so its children are not copied."""
    segments = dict(snapshot.segments)
    for segment, end in _ends(options).items():
        found = segments.get(segment)
        if found is not None and end < found.end:
            earliest = min(found.earliest, end)  # Deleted records after `end` were not to be copied.
            segments[segment] = msgspec.structs.replace(found, earliest=earliest, end=end, sealed=False)
    return msgspec.structs.replace(snapshot, segments=segments)


def _ends(options: SourceOptions) -> dict[int, int]:
    """Return the ends of the segments that are not copied to their own ends."""
    asked = options.ending_offsets
    places = asked.items() if isinstance(asked, dict) else ()
    return {segment: place for segment, place in places if place != END and place >= 0}


def check_not_lost(snapshot: TopicSnapshot, replay: Replay, positions: Mapping[int, Position]) -> dict[int, Position]:
    """Return the positions of every segment. Raises `DataLoss` if records that were copied, or that are to be copied,
    are gone."""
    epochs = replay.step.epochs if replay.step is not None else {}
    offset = StreamOffset(topic=replay.source, topic_id=replay.source_id, positions=dict(positions), epochs=epochs)
    place = stream_position(offset, snapshot)
    if place.losses:
        raise DataLoss(
            f"{'; '.join(place.losses)}. The replay cannot go on after that; begin a new one with another --name, "
            "from the records that are there"
        )
    return place.positions


def next_step(
    snapshot: TopicSnapshot,
    replay: Replay,
    positions: Mapping[int, Position],
    limits: BatchLimits,
    times: Prune,
    parallelism: int,
) -> ReplayStep | None:
    """Plan the next step from these positions; None if nothing is left."""
    places = check_not_lost(snapshot, replay, positions)
    begin = {segment: _stepped_over(snapshot, segment, at, times) for segment, at in places.items()}
    ends = admit(snapshot, begin, limits)
    wanted = ranges(begin, ends, snapshot)
    if not wanted:
        return None
    records = sum(each.records for each in wanted)
    return ReplayStep(
        number=replay.step.number + 1 if replay.step is not None else 0,
        ranges=tuple(wanted),
        partitions=max(1, min(parallelism, records // PARTITION_RECORDS)),
        positions=ends,
        epochs=epochs_at(ends, snapshot),
    )


def _stepped_over(snapshot: TopicSnapshot, segment: int, position: Position, times: Prune) -> Position:
    """Return the position after the chunks that have no records of the time that was asked for."""
    if position == END:
        return END
    found = snapshot.segments[segment]
    at = position
    for chunk in found.chunks:
        if chunk.base_offset <= at < chunk.next_offset and times.leaves_out(chunk):
            at = max(at, min(chunk.next_offset, found.end))
    return at


# Acting.


def in_order(rows: DataFrame, partitions: int) -> DataFrame:
    """Put all records of a key into one partition, in the order in which they were published. A repeat has the same
    rows in the same partitions in the same order."""
    spread = F.when(F.col("key").isNull(), F.col("segment") + _WITHOUT_KEY).otherwise(F.col("keyHash"))
    return rows.repartition(partitions, spread).sortWithinPartitions("segment", "offset")


class Copied(NamedTuple):
    records: dict[int, int]
    """How many records of each segment were copied."""
    skipped: int
    """How many records could not be decoded."""


def copy(
    spark: SparkSession,
    source: Mapping[str, str],
    sink: Mapping[str, str],
    replay: Replay,
    step: ReplayStep,
    others: tuple[int, ...],
) -> Copied:
    """Write a step."""
    times = {name: value for name, value in replay.bounds.items() if name.endswith("Timestamp")}
    columns = ("segment", "offset", "keyHash", "key", "value", "timestamp", "headers")
    options = SourceOptions.parse({**source, **times})
    read = Observation() if options.bad_records == "skip" else None
    if read is None:
        rows = rows_between(spark, source, step.ranges, others, columns, times)
    else:  # Rows outside the bounds are read, too: they are not among the records that cannot be decoded.
        rows = within(options, rows_between(spark, source, step.ranges, others, columns, {}, read))
    seen = Observation()
    (
        in_order(counted(rows, step.ranges, seen), step.partitions)
        .select("key", "value", "timestamp", "headers")
        .write.format("braid")
        .options(**sink, txnAppId=f"replay-{replay.id}", txnVersion=str(step.number))
        .mode("append")
        .save()
    )
    skipped = {} if read is None else records_skipped(step.ranges, records_seen(read))
    return Copied(records_seen(seen), sum(skipped.values()))


class ReplayRun:
    """One run of a replay. Owns the driver's connections to both topics."""

    def __init__(
        self,
        spark: SparkSession,
        source: Mapping[str, str],
        sink: Mapping[str, str],
        journal: ReplayJournal,
        *,
        bounded_by: Mapping[str, str] | None = None,
        max_records: int = MAX_RECORDS,
        create: bool = False,
        on_step: Callable[[ReplayStep], None] = lambda _: None,
    ) -> None:
        """Take `source` and `sink` as options of `format("braid")`, and the result of `bounds` as `bounded_by`."""
        self._spark = spark
        self._source = {**source, "topic": TopicName.parse(source["topic"]).path}
        self._sink = {**sink, "topic": TopicName.parse(sink["topic"]).path}
        check_topics(self._source["topic"], self._sink["topic"])
        self._bounds = dict(bounded_by or {})
        self._options = SourceOptions.parse({**self._source, **self._bounds}).for_batch()
        self._times = Prune(since_us=self._options.starting_timestamp, before_us=self._options.ending_timestamp)
        self._journal = journal
        self._limits = BatchLimits(records=max_records)
        self._create = create
        self._on_step = on_step
        self._ranges: dict[int, Range] = {}
        self._records: dict[int, int] = {}
        self._steps = self._repeated = self._repeated_records = self._skipped = 0

    def run(self) -> ReplayReport:
        began = time.monotonic()
        sink = SourceOptions.parse({name: self._sink[name] for name in self._sink if name in _CONNECTING})
        with ScanConnection(self._options) as connection, ScanConnection(sink) as target, self._journal:
            goal = connection.snapshot()
            if self._journal.read() is None:
                first_positions(self._options, goal)  # Impossible bounds are refused before the target is created.
            before = self._target(target, goal)
            replay = self._journal.begin(
                Replay(
                    id=str(uuid.uuid4()),
                    source=goal.topic,
                    source_id=goal.topic_id,
                    target=before.topic,
                    target_id=before.topic_id,
                    bounds=self._bounds,
                )
            )
            if replay.step is not None and not replay.step.done:
                self._repeated, self._repeated_records = 1, replay.step.records
                now = connection.snapshot()
                check_not_lost(until(self._options, bounded(now, goal)), replay, replay.step.positions)
                replay = self._run_step(replay, replay.step, now)
            while True:
                now = connection.snapshot()
                positions = replay.step.positions if replay.step is not None else first_positions(self._options, now)
                view = until(self._options, bounded(now, goal))
                step = next_step(view, replay, positions, self._limits, self._times, parallelism(self._spark))
                if step is None:
                    break
                replay = self._run_step(replay, step, now)
            stored = _records_in(target.snapshot()) - _records_in(before)
        return self._report(replay, until(self._options, now), positions, stored, time.monotonic() - began)

    def _run_step(self, replay: Replay, step: ReplayStep, now: TopicSnapshot) -> Replay:
        replay = self._journal.write(msgspec.structs.replace(replay, step=step))
        others = tuple(sorted(now.segments.keys() - {each.segment for each in step.ranges}))
        copied = copy(self._spark, self._source, self._sink, replay, step, others)
        replay = self._journal.write(msgspec.structs.replace(replay, step=msgspec.structs.replace(step, done=True)))
        for each in step.ranges:
            known = self._ranges.get(each.segment, each)
            self._ranges[each.segment] = msgspec.structs.replace(known, until=each.until)
        for segment, count in copied.records.items():
            self._records[segment] = self._records.get(segment, 0) + count
        self._skipped += copied.skipped
        self._steps += 1
        self._on_step(step)
        return replay

    def _target(self, target: ScanConnection, source: TopicSnapshot) -> TopicSnapshot:
        path = self._sink["topic"]
        try:
            return target.snapshot()
        except TopicNotFound as error:
            if not self._create:
                raise TopicNotFound(
                    f"there is no topic {path} to replay into; create it first, or let --create do it"
                ) from error
        active = sum(not segment.sealed for segment in source.segments.values())
        target.call(target.client.admin.create_topic(path, segments=max(1, active)))
        return target.snapshot()

    def _report(
        self, replay: Replay, now: TopicSnapshot, positions: Mapping[int, Position], stored: int, seconds: float
    ) -> ReplayReport:
        records = sum(self._records.values())
        return ReplayReport(
            ok=True,
            source=replay.source,
            target=replay.target,
            checkpoint=self._journal.folder,
            steps=self._steps,
            repeated=self._repeated,
            records=records,
            duplicates=min(self._repeated_records, max(0, records - stored)),
            skipped=self._skipped,
            lag=sum(lag(segment.end, positions.get(segment.id, 0)) for segment in now.segments.values()),
            segments=tuple(
                CopiedSegment(segment, each.first, each.until, self._records[segment])
                for segment, each in sorted(self._ranges.items())
            ),
            seconds=seconds,
        )


_CONNECTING: Final = ("url", "token", "tls", "timeout", "topic")


def _records_in(snapshot: TopicSnapshot) -> int:
    """Count the records that the topic has ever had."""
    return sum(segment.end for segment in snapshot.segments.values())
