"""Compaction of a topic: many small chunks become few large ones, while the topic is written and read.

storage/history/compaction.py says what that means and why it is safe. The work is divided like this:

    driver      reads the manifests, plans runs of neighbours             plan_compaction
    executors   read a run, check every batch, store the joined object    store_joined
    driver      asks the segment's owner to swap it in                    admin.replace_chunks
    owner       checks the object, one fenced transaction, new manifest; deletes the replaced chunks an hour later

A task joins one run of neighbouring chunks. Tasks come in waves, and the driver asks for the swaps when a wave is done:
an object waits minutes at most for its swap, and the swaps of a job that is stopped stay. If a segment moves meanwhile,
its new owner knows the same catalog. If the chunks of a run have changed meanwhile, the owner refuses the swap and the
report has a note.

One swap takes at most 127 chunks. Where that limit, and not the size, ended a run, another round joins the chunks that
the first round made.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from braid.model.errors import ChunkCorrupt, ConditionFailed, InvalidArgument, NotAvailable, ObjectMissing
from braid.model.names import TopicName
from braid.ports.os_disk import OsDisk
from braid.scan.connection import ScanConnection
from braid.scan.snapshot import TopicSnapshot
from braid.spark.connect import parallelism
from braid.spark.jobs.report import JobReport
from braid.spark.jobs.task_rows import task_rows
from braid.spark.source.options import SourceOptions
from braid.storage.history.catalog import ChunkDescriptor
from braid.storage.history.compaction import DEFAULT_TARGET_BYTES, plan_compaction, store_joined
from braid.storage.history.manifest import segment_folder
from braid.storage.objects.urls import open_objects

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

MAX_ROUNDS: Final = 5
"""Each round makes chunks a hundred times as large, so a job never needs this many."""
WAVE: Final = 8
"""How many tasks a wave has for each task that Spark runs at the same time."""

ROW_SCHEMA: Final = "number int, name string, code string, error string"
_ARROW_SCHEMA: Final = pa.schema(
    [("number", pa.int32()), ("name", pa.string()), ("code", pa.string()), ("error", pa.string())]
)


class CompactionTask(msgspec.Struct, frozen=True):
    """A run of neighbouring chunks that becomes one chunk."""

    number: int
    segment: int
    folder: str
    chunks: tuple[ChunkDescriptor, ...]

    @property
    def bytes(self) -> int:
        return sum(chunk.batch_bytes for chunk in self.chunks)


class CompactedSegment(JobReport, frozen=True):
    segment: int
    range: str
    chunks_before: int
    chunks_after: int
    swaps: int
    joined_chunks: int
    """How many chunks the swaps replaced."""
    joined_bytes: int


class CompactFailure(JobReport, frozen=True):
    """A run that the job could not join because something is wrong with it."""

    segment: int
    object: str
    """The first object of the run."""
    code: str
    text: str


class CompactReport(JobReport, frozen=True):
    topic: str
    ok: bool
    """Whether nothing is wrong. A chunk that changed before its swap is a note, not a failure."""
    dry_run: bool
    target_bytes: int
    chunks_before: int
    chunks_after: int
    """In a dry run, how many there would be after the first round."""
    joined_bytes: int
    segments: tuple[CompactedSegment, ...]
    failures: tuple[CompactFailure, ...]
    notes: tuple[str, ...]
    seconds: float


class _Tally(msgspec.Struct):
    descriptor: str
    before: int
    after: int
    swaps: int = 0
    joined_chunks: int = 0
    joined_bytes: int = 0


def compact_topic(
    spark: SparkSession,
    options: Mapping[str, str],
    *,
    target_bytes: int = DEFAULT_TARGET_BYTES,
    dry_run: bool = False,
) -> CompactReport:
    """Compact a topic. `options` are topic, url, token, tls and timeout, as of `format("braid")`. The job can be
    stopped and run again."""
    began = time.monotonic()
    read = SourceOptions.parse(options).for_batch()
    if read.manifest:
        raise InvalidArgument(
            "compaction needs brokers: only a segment's owner may swap chunks; give url, not manifest"
        )
    with ScanConnection(read) as connection:
        return _Compaction(spark, connection, target_bytes).run(began, dry_run=dry_run)


class _Compaction:
    def __init__(self, spark: SparkSession, connection: ScanConnection, target_bytes: int) -> None:
        self._spark = spark
        self._connection = connection
        self._target_bytes = target_bytes
        self._tallies: dict[int, _Tally] = {}
        self._failures: dict[str, CompactFailure] = {}
        self._notes: list[str] = []

    def run(self, began: float, *, dry_run: bool) -> CompactReport:
        snapshot = self._connection.snapshot()
        if not snapshot.storage:
            raise NotAvailable(
                f"topic {snapshot.topic} cannot be compacted: its brokers keep chunks on their own disks, where they "
                "are made only when a segment moves; start them with --storage to have a shared history"
            )
        for _ in range(MAX_ROUNDS):
            runs = self._plan(snapshot)
            if dry_run:
                for run in runs:
                    self._count(run)
                break
            if not runs or not self._round(snapshot, runs):
                break
        return self._report(snapshot, began, dry_run=dry_run)

    def _plan(self, snapshot: TopicSnapshot) -> list[CompactionTask]:
        """Plan from the manifests as they are now, without runs that have failed before."""
        runs: list[CompactionTask] = []
        for segment in snapshot.segments.values():
            chunks = self._chunks(snapshot, segment.id)
            self._tallies.setdefault(segment.id, _Tally(segment.descriptor, len(chunks), len(chunks)))
            folder = segment_folder(snapshot.topic, segment.descriptor)
            runs += [
                CompactionTask(0, segment.id, folder, chosen)
                for chosen in plan_compaction(chunks, self._target_bytes)
                if chosen[0].object not in self._failures
            ]
        return [msgspec.structs.replace(run, number=number) for number, run in enumerate(runs)]

    def _round(self, snapshot: TopicSnapshot, runs: list[CompactionTask]) -> int:
        """Join the runs and swap them in. Returns how many swaps there were."""
        size = WAVE * parallelism(self._spark)
        swaps = 0
        for first in range(0, len(runs), size):
            wave = runs[first : first + size]
            rows = task_rows(self._spark, "compact", ROW_SCHEMA, wave, partial(join_run, snapshot.storage))
            for row in rows.collect():
                run = runs[row["number"]]
                if row["code"] is not None:
                    self._refused(run, row["code"], row["error"], wrong=self._is_current(snapshot, run))
                elif self._swapped(snapshot, run, row["name"]):
                    swaps += 1
        return swaps

    def _swapped(self, snapshot: TopicSnapshot, run: CompactionTask, name: str) -> bool:
        admin = self._connection.client.admin
        old = [chunk.object for chunk in run.chunks]
        try:
            answer = self._connection.call(admin.replace_chunks(snapshot.topic, run.segment, old, name))
        except (ConditionFailed, ObjectMissing, ChunkCorrupt) as error:
            self._refused(run, error.code, str(error))
            return False
        self._count(run)
        self._tallies[run.segment].after = int(answer["chunks"])
        return True

    def _count(self, run: CompactionTask) -> None:
        tally = self._tallies[run.segment]
        tally.swaps += 1
        tally.joined_chunks += len(run.chunks)
        tally.joined_bytes += run.bytes
        tally.after -= len(run.chunks) - 1

    def _is_current(self, snapshot: TopicSnapshot, run: CompactionTask) -> bool:
        """Whether the run's chunks are still listed. Owners take a chunk off the list before they delete it. So a chunk
        that is listed and cannot be read was not taken by retention or another compaction meanwhile."""
        listed = {chunk.object for chunk in self._chunks(snapshot, run.segment)}
        return all(chunk.object in listed for chunk in run.chunks)

    def _chunks(self, snapshot: TopicSnapshot, segment: int) -> Sequence[ChunkDescriptor]:
        """Return the chunks that the segment's manifest lists now."""
        descriptor = snapshot.segments[segment].descriptor
        found = self._connection.segment_manifest(snapshot.storage, snapshot.topic, descriptor)
        return found.chunks if found is not None else ()

    def _refused(self, run: CompactionTask, code: str, text: str, *, wrong: bool = False) -> None:
        first = run.chunks[0].object
        if wrong or code == ChunkCorrupt.code:
            self._failures[first] = CompactFailure(run.segment, first, code, text)
        else:
            self._notes.append(f"segment {run.segment}: {len(run.chunks)} chunks stay as they are: {text}")

    def _report(self, snapshot: TopicSnapshot, began: float, *, dry_run: bool) -> CompactReport:
        segments = tuple(
            CompactedSegment(
                segment=number,
                range=tally.descriptor.rpartition("-")[0],
                chunks_before=tally.before,
                chunks_after=tally.after,
                swaps=tally.swaps,
                joined_chunks=tally.joined_chunks,
                joined_bytes=tally.joined_bytes,
            )
            for number, tally in sorted(self._tallies.items())
        )
        return CompactReport(
            topic=str(TopicName.parse(snapshot.topic)),
            ok=not self._failures,
            dry_run=dry_run,
            target_bytes=self._target_bytes,
            chunks_before=sum(each.chunks_before for each in segments),
            chunks_after=sum(each.chunks_after for each in segments),
            joined_bytes=sum(each.joined_bytes for each in segments),
            segments=segments,
            failures=tuple(self._failures.values()),
            notes=tuple(self._notes),
            seconds=round(time.monotonic() - began, 3),
        )


def join_run(storage: str, run: CompactionTask) -> Iterator[Any]:
    """Do the work of one task. An object that cannot be joined becomes a row with its error. A store that does not
    answer fails the task, and Spark tries it again."""
    name = code = error = None
    try:
        name = asyncio.run(_join(storage, run))
    except (ChunkCorrupt, ObjectMissing) as found:
        code, error = found.code, str(found)
    yield pa.RecordBatch.from_arrays(
        [pa.array([value], field.type) for value, field in zip((run.number, name, code, error), _ARROW_SCHEMA)],
        schema=_ARROW_SCHEMA,
    )


async def _join(storage: str, run: CompactionTask) -> str:
    """Join with a separate disk: the disk of a reading connection cannot write."""
    disk = OsDisk(threads=2)
    try:
        objects = open_objects(storage, disk=disk)
        try:
            return await store_joined(objects, run.folder, run.chunks)
        finally:
            await objects.close()
    finally:
        await disk.close()
