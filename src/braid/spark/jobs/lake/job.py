"""`lake`: a topic lands in a table, each record exactly once, and the table itself remembers how far it has come.

    the table's last commit ──► where the topic stands ──► one step ──► Spark reads and writes ──► one commit
    {segment: next | END}       begin, losses              end            rows, invisible yet        files + positions

There is no checkpoint beside the table that could disagree with the table. Files and their positions become visible
together (table.py). So a run that is killed has either landed its step or has not, and the next run finds in the
table's last commit where to go on. A step that was written but not committed is read again: the same offsets, hence the
same records (I1). Of two runs at the same time both do the work, and one of them fails at its commit.

**Steps** follow the rule of micro-batches (batch_limits.py): a step has only segments whose ancestors have landed to
their end in earlier steps, so parents land before their children. `max_records` bounds the work that a kill can cost.
Positions are *next* offsets; a sealed segment that has landed completely is at END and stays there.

**Rows stay in Spark.** The source gives Arrow batches to the JVM, and Spark's own Parquet writer takes them from there,
without Python in between.

**Losses.** If retention has deleted records before they landed, or if the topic has lost records that have landed and
others have taken their offsets, the run ends with an error. With `skip_lost` it goes on, and the report says what was
lost. A topic that was deleted and created again is another topic, whose offsets mean something else: it never lands in
the same table.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import msgspec
from pyspark.sql import DataFrame, Observation, SparkSession

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import DataLoss, InvalidArgument, TableConflict, TableMismatch
from braid.scan.connection import ScanConnection
from braid.scan.planning import Range
from braid.scan.snapshot import TopicSnapshot
from braid.spark.connect import parallelism
from braid.spark.jobs.bounded_read import columns_schema, records_seen, records_skipped, rows_between
from braid.spark.jobs.lake.parquet import ParquetTable
from braid.spark.jobs.lake.table import LakeTable, Landed
from braid.spark.jobs.report import CopiedSegment, JobReport, lag
from braid.spark.source.options import SourceOptions
from braid.spark.source.schema import SOURCE_SCHEMA, arrow_schema
from braid.spark.stream.batch_limits import BatchLimits, admit, bounded, epochs_at, ranges, stream_position
from braid.spark.stream.offsets import StreamOffset, is_other_topic
from braid.spark.stream.topic_watch import TopicWatch

MAX_RECORDS: Final = 20_000_000
"""Of one step: some gigabytes, some minutes on two cores. A kill costs at most this much work."""
FOLLOW_POLL_S: Final = 1.0
"""Between two looks at a topic without new records. Readers of tables do not need records sooner."""
FORMATS: Final = ("parquet", "delta")
FILE_BYTES: Final = 32 << 20
"""As stored in the topic. Several tasks write a larger step, if there are cores for them."""
_TIMESTAMPS: Final = "spark.sql.parquet.outputTimestampType"
_writing: Final = threading.Lock()


class LakeStep(msgspec.Struct, frozen=True):
    """The records that land next, in one commit."""

    landed: Landed
    """The table's commit after this step."""
    ranges: tuple[Range, ...]
    others: tuple[int, ...] = ()
    """Segments of the topic without records in this step."""
    estimated_bytes: float = 0.0
    losses: tuple[str, ...] = ()
    """Records that are gone and cannot land, each the beginning of a sentence."""

    @property
    def records(self) -> int:
        return sum(each.records for each in self.ranges)


class StepReport(JobReport, frozen=True):
    step: int
    records: int
    files: int
    bytes: int
    seconds: float
    skipped: dict[int, int]
    """How many records of each segment could not be decoded and did not land."""


class LandedSegment(CopiedSegment, frozen=True):
    position: Position
    """The next run begins here."""
    lag: int
    """How many more records the topic had when the run ended."""


class LakeReport(JobReport, frozen=True, kw_only=True):
    ok: bool
    """Whether no record was lost before it could land."""
    topic: str
    table: str
    format: str
    step: int
    """The table's last commit."""
    steps: tuple[StepReport, ...]
    records: int
    files: int
    bytes: int
    skipped: int
    """How many records could not be decoded and did not land, because `badRecords` is skip."""
    lag: int
    segments: tuple[LandedSegment, ...]
    losses: tuple[str, ...]
    leftovers: int
    """How many uncommitted folders of earlier runs this run has removed."""
    seconds: float


def open_table(where: str, kind: str) -> LakeTable:
    if kind == "parquet":
        return ParquetTable(where)
    if kind == "delta":
        from braid.spark.jobs.lake.delta import DeltaTable

        return DeltaTable(where)
    raise InvalidArgument(f"{kind!r} is not a table format: choose one of {', '.join(FORMATS)}")


# Deciding.


def begin(landed: Landed | None, snapshot: TopicSnapshot, columns: Sequence[str] | None, where: str) -> Landed:
    """Return what the table holds before the run. Raises if the topic cannot land there."""
    if landed is None:
        wanted = tuple(columns or SOURCE_SCHEMA.names)
        return Landed(topic=snapshot.topic, topic_id=snapshot.topic_id, step=0, positions={}, columns=wanted)
    if landed.topic != snapshot.topic:
        raise TableMismatch(f"{where} is a table of topic {landed.topic}; land {snapshot.topic} in another folder")
    if is_other_topic(_offset(landed), snapshot.topic_id):
        raise TableMismatch(
            f"{where} is a table of topic {landed.topic} with id {landed.topic_id}; that topic was deleted and created "
            f"again with id {snapshot.topic_id}, and its offsets count from 0 again: land it in another folder"
        )
    if columns is not None and tuple(columns) != landed.columns:
        raise TableMismatch(
            f"{where} has the columns {', '.join(landed.columns)}, and {', '.join(columns)} were asked for; leave that "
            "out, or land the topic in another folder"
        )
    return msgspec.structs.replace(landed, topic_id=landed.topic_id or snapshot.topic_id)


def next_step(
    snapshot: TopicSnapshot,
    landed: Landed,
    limits: BatchLimits,
    *,
    target: TopicSnapshot | None = None,
    skip_lost: bool = False,
) -> LakeStep | None:
    """Plan the next step of a table that holds `landed`, up to `target`; None if nothing is new. Raises `DataLoss` if
    records are gone that should land first. The table's position is compared with the topic as it is now: another run
    may have landed more than there was when this run took its target."""
    if landed.step == 0:
        known: dict[int, Position] = {segment: found.earliest for segment, found in snapshot.segments.items()}
    else:
        known = landed.positions
    place = stream_position(_offset(msgspec.structs.replace(landed, positions=known)), snapshot)
    if place.losses and not skip_lost:
        raise DataLoss(
            f"{'; '.join(place.losses)}. The table of topic {landed.topic} lacks these records: run the command again "
            "with --skip-lost to go on without them"
        )
    ends = admit(snapshot if target is None else bounded(snapshot, target), place.positions, limits)
    wanted = ranges(place.positions, ends, snapshot)
    finished = any(end == END and landed.positions.get(segment) != END for segment, end in ends.items())
    if not wanted and not finished and not place.losses:
        return None
    # A segment that the topic has forgotten is finished or lost: it gets no more records.
    forgotten: dict[int, Position] = {each: END for each in landed.positions if each not in ends}
    after = msgspec.structs.replace(
        landed, step=landed.step + 1, positions=forgotten | ends, epochs=epochs_at(ends, snapshot)
    )
    return LakeStep(
        after,
        tuple(wanted),
        others=tuple(snapshot.segments.keys() - {each.segment for each in wanted}),
        estimated_bytes=sum(each.records * snapshot.segments[each.segment].bytes_per_record for each in wanted),
        losses=place.losses,
    )


def _offset(landed: Landed) -> StreamOffset:
    return StreamOffset(topic=landed.topic, topic_id=landed.topic_id, positions=landed.positions, epochs=landed.epochs)


# Acting.


def step_rows(
    spark: SparkSession, source: Mapping[str, str], step: LakeStep, seen: Observation | None = None
) -> DataFrame:
    """Read the rows of a step, in few and large partitions: each becomes a file."""
    files = min(parallelism(spark), int(step.estimated_bytes / FILE_BYTES))
    more = {"minPartitions": str(max(1, files))}
    return rows_between(spark, source, step.ranges, step.others, step.landed.columns, more, seen)


def write_files(rows: DataFrame, folder: str) -> None:
    with _microseconds(rows.sparkSession):
        rows.write.mode("error").parquet(f"file://{folder}")


@contextmanager
def _microseconds(spark: SparkSession) -> Iterator[None]:
    """Write timestamps in microseconds: other readers refuse Spark's default, INT96, or take it for nanoseconds. The
    setting belongs to the whole session, so lakes that share a session write in turn."""
    with _writing:
        before = spark.conf.get(_TIMESTAMPS)
        assert before is not None
        spark.conf.set(_TIMESTAMPS, "TIMESTAMP_MICROS")
        try:
            yield
        finally:
            spark.conf.set(_TIMESTAMPS, before)


def land(spark: SparkSession, source: Mapping[str, str], table: LakeTable, step: LakeStep) -> StepReport:
    """Read, write and commit a step."""
    began = time.monotonic()
    folder = table.stage(step.landed.step)
    skips = SourceOptions.parse(source).bad_records == "skip"
    skipped: dict[int, int] = {}
    try:
        if step.records:
            seen = Observation() if skips else None
            write_files(step_rows(spark, source, step, seen), folder)
            if seen is not None:
                skipped = records_skipped(step.ranges, records_seen(seen))
        landing = table.prepare(folder, step.records - sum(skipped.values()))
    except BaseException:
        table.discard(folder)
        raise
    try:
        table.commit(landing, step.landed)
    except TableConflict:
        table.discard(folder)
        raise
    seconds = time.monotonic() - began
    return StepReport(step.landed.step, landing.rows, len(landing.files), landing.bytes, seconds, skipped)


class Lake:
    """One run of the job. Owns the driver's connection to the topic."""

    def __init__(
        self,
        spark: SparkSession,
        source: Mapping[str, str],
        table: LakeTable,
        *,
        columns: Sequence[str] | None = None,
        max_records: int = MAX_RECORDS,
        skip_lost: bool = False,
        on_step: Callable[[StepReport], None] = lambda _: None,
    ) -> None:
        self._spark = spark
        self._source = dict(source)
        self._options = SourceOptions.parse(source)
        self._table = table
        self._columns = columns
        self._limits = BatchLimits(records=max_records)
        self._skip_lost = skip_lost
        self._on_step = on_step
        self._steps: list[StepReport] = []
        self._ranges: dict[int, list[Range]] = {}
        """The ranges that have landed, by segment."""
        self._losses: dict[str, None] = {}

    def run(self, follow: threading.Event | None = None) -> LakeReport:
        """Land what the topic holds now. With `follow`, also land new records until the event is set."""
        began = time.monotonic()
        columns_schema(self._columns or SOURCE_SCHEMA.names)
        with ScanConnection(self._options) as connection:
            view = TopicWatch(connection)
            now = view.refresh()
            before = begin(self._table.landed(), now, self._columns, self._table.path)
            if before.step == 0:
                self._table.create(before, arrow_schema(columns_schema(before.columns)))
            leftovers = self._table.remove_leftovers()
            target = None if follow is not None else now
            while follow is None or not follow.is_set():
                step = self._planned(before.columns, view, target)
                if step is not None:
                    self._land(step, lambda: self._planned(before.columns, view, target))
                elif follow is None or follow.wait(FOLLOW_POLL_S):
                    break
            now = view.refresh()
            after = begin(self._table.landed(), now, before.columns, self._table.path)
        return self._report(after, now, leftovers, time.monotonic() - began)

    def _planned(self, columns: tuple[str, ...], view: TopicWatch, target: TopicSnapshot | None) -> LakeStep | None:
        """Plan the next step from the table's last commit."""
        landed = self._table.landed()
        if landed is not None:
            view.reached(_offset(landed))
        now = view.refresh()
        landed = begin(landed, now, columns, self._table.path)
        return next_step(now, landed, self._limits, target=target, skip_lost=self._skip_lost)

    def _land(self, step: LakeStep, plan_again: Callable[[], LakeStep | None]) -> None:
        try:
            report = land(self._spark, self._source, self._table, step)
        except Exception:
            # Retention may delete records between planning and reading. With --skip-lost the run goes on without them.
            again = plan_again() if self._skip_lost else None
            if again is None or again.losses == step.losses:
                raise
            return
        for each in step.ranges:
            self._ranges.setdefault(each.segment, []).append(each)
        self._losses |= dict.fromkeys(step.losses)
        self._steps.append(report)
        self._on_step(report)

    def _report(self, landed: Landed, now: TopicSnapshot, leftovers: int, seconds: float) -> LakeReport:
        segments = []
        for segment, position in sorted(landed.positions.items()):
            end = now.segments[segment].end if segment in now.segments else 0
            did = self._ranges.get(segment) or [Range(segment, 0, 0)]
            records = sum(each.records for each in did) - sum(step.skipped.get(segment, 0) for step in self._steps)
            segments.append(LandedSegment(segment, did[0].first, did[-1].until, records, position, lag(end, position)))
        unread = sum(found.end - found.earliest for found in now.segments.values() if found.id not in landed.positions)
        return LakeReport(
            ok=not self._losses,
            topic=landed.topic,
            table=self._table.path,
            format=self._table.kind,
            step=landed.step,
            steps=tuple(self._steps),
            records=sum(step.records for step in self._steps),
            files=sum(step.files for step in self._steps),
            bytes=sum(step.bytes for step in self._steps),
            skipped=sum(sum(step.skipped.values()) for step in self._steps),
            lag=sum(each.lag for each in segments) + unread,
            segments=tuple(segments),
            losses=tuple(self._losses),
            leftovers=leftovers,
            seconds=seconds,
        )
