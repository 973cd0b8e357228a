"""What a replay copies next, and what it remembers."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import DataLoss, InvalidArgument, JobFailed
from braid.scan.planning import NO_PRUNING, Prune, Range
from braid.scan.snapshot import SegmentSnapshot, TopicSnapshot
from braid.spark.jobs.replay.job import bounds, check_not_lost, check_topics, first_positions, next_step, until
from braid.spark.jobs.replay.journal import Replay, ReplayJournal, ReplayStep, default_folder
from braid.spark.source.options import SourceOptions
from braid.spark.stream.batch_limits import BatchLimits
from braid.storage.history.catalog import ChunkDescriptor

TOPIC = "public/default/orders"
NO_LIMITS = BatchLimits()


def segment(
    number: int,
    end: int,
    *parents: int,
    earliest: int = 0,
    sealed: bool = False,
    chunks: tuple[ChunkDescriptor, ...] = (),
) -> SegmentSnapshot:
    return SegmentSnapshot(
        id=number,
        descriptor=f"0000-ffff-{number}",
        parents=parents,
        first_hash=0,
        last_hash=0xFFFF,
        earliest=earliest,
        end=end,
        sealed=sealed,
        chunks=chunks,
        bytes_per_record=100.0,
    )


def topic(*segments: SegmentSnapshot) -> TopicSnapshot:
    return TopicSnapshot(TOPIC, 7, "", {each.id: each for each in segments})


def chunk(base: int, until: int, first_us: int, last_us: int) -> ChunkDescriptor:
    fields = dict.fromkeys(ChunkDescriptor.__struct_fields__, 0)
    fields |= {"base_offset": base, "next_offset": until, "min_timestamp": first_us, "max_timestamp": last_us}
    return ChunkDescriptor(**fields)  # type: ignore[arg-type]


def a_replay(step: ReplayStep | None = None, **more: object) -> Replay:
    whole = Replay(id="r", source=TOPIC, source_id=7, target="public/default/copy", target_id=8, bounds={}, step=step)
    return msgspec.structs.replace(whole, **more)


def options(**given: str) -> SourceOptions:
    return SourceOptions.parse({"topic": TOPIC, "url": "braid://127.0.0.1:1", **given}).for_batch()


def test_bounds_are_offsets_or_times() -> None:
    assert bounds("earliest", "latest") == {}
    assert bounds("2026-11-15T18:00:00Z", "1700000000000") == {
        "startingTimestamp": "2026-11-15T18:00:00Z",
        "endingTimestamp": "1700000000000",
    }
    assert bounds('{"0": 3}', '{"0": 9}') == {"startingOffsets": '{"0": 3}', "endingOffsets": '{"0": 9}'}
    with pytest.raises(InvalidArgument, match="startingOffsets is latest"):
        options(**bounds("latest", "latest"))
    with pytest.raises(InvalidArgument, match="endingOffsets is earliest"):
        options(**bounds("earliest", "earliest"))
    with pytest.raises(InvalidArgument, match="startingTimestamp"):
        options(**bounds("yesterday", "latest"))


def test_a_topic_is_not_replayed_into_itself() -> None:
    with pytest.raises(InvalidArgument, match="into itself"):
        check_topics(TOPIC, TOPIC)


def test_a_replay_begins_at_what_is_retained_or_where_it_is_told() -> None:
    there = topic(segment(0, 9, earliest=4, sealed=True), segment(1, 5, 0))
    assert first_positions(options(), there) == {0: 4, 1: 0}
    assert first_positions(options(startingOffsets='{"0": 6}', endingOffsets='{"0": 6}'), there) == {0: 6, 1: 0}
    assert first_positions(options(startingOffsets='{"0": "END", "1": 2}'), there) == {0: END, 1: 2}
    with pytest.raises(InvalidArgument, match="endingOffsets names segment 7, which topic"):
        first_positions(options(endingOffsets='{"7": 2}'), there)
    with pytest.raises(InvalidArgument, match=r"from offset 3 up to 2 of segment 1 .*: the end is before the start"):
        first_positions(options(startingOffsets='{"1": 3}', endingOffsets='{"1": 2}'), there)


def test_a_segment_that_is_not_copied_to_its_end_holds_back_its_children() -> None:
    there = topic(segment(0, 9, sealed=True), segment(1, 5, 0))
    view = until(options(endingOffsets='{"0": 6}'), there)
    step = next_step(view, a_replay(), {0: 0, 1: 0}, NO_LIMITS, NO_PRUNING, 1)
    assert step is not None
    assert step.ranges == (Range(0, 0, 6),)
    assert next_step(view, a_replay(step), step.positions, NO_LIMITS, NO_PRUNING, 1) is None
    assert until(options(endingOffsets='{"0": "END"}'), there) == there


def test_nothing_is_lost_or_copied_where_retention_took_all_that_was_asked_for() -> None:
    there, asked = topic(segment(0, 9, earliest=4)), options(endingOffsets='{"0": 3}')
    begin = first_positions(asked, there)
    for stands in (begin, {0: 3}):
        assert next_step(until(asked, there), a_replay(), stands, NO_LIMITS, NO_PRUNING, 1) is None
    with pytest.raises(DataLoss, match=r"offsets 1 to 2 of segment 0"):
        next_step(until(asked, there), a_replay(), {0: 1}, NO_LIMITS, NO_PRUNING, 1)


def test_chunks_outside_of_the_time_are_stepped_over_without_a_step() -> None:
    chunks = (chunk(0, 10, 0, 99), chunk(10, 20, 100, 199), chunk(20, 30, 200, 299))
    there = topic(segment(0, 30, sealed=True, chunks=chunks), segment(1, 4, 0))
    step = next_step(there, a_replay(), {0: 0, 1: 0}, NO_LIMITS, Prune(since_us=150, before_us=180), 1)
    assert step is not None
    assert step.ranges == (Range(0, 10, 30),)
    late = next_step(there, a_replay(), {0: 0, 1: 0}, NO_LIMITS, Prune(since_us=1_000), 1)
    assert late is not None
    assert (late.ranges, late.positions) == ((Range(1, 0, 4),), {0: END, 1: 4})


def test_what_is_lost_ends_the_replay() -> None:
    with pytest.raises(DataLoss, match=r"offsets 2 to 5 of segment 0 .* another --name"):
        next_step(topic(segment(0, 9, earliest=6)), a_replay(), {0: 2}, NO_LIMITS, NO_PRUNING, 1)


def test_a_loss_of_records_that_were_copied_ends_the_replay() -> None:
    before = topic(msgspec.structs.replace(segment(0, 9), epochs=((1, 0),)))
    step = next_step(before, a_replay(), {0: 0}, NO_LIMITS, NO_PRUNING, 1)
    assert step is not None
    assert step.epochs == {0: 1}
    after = topic(msgspec.structs.replace(segment(0, 20), epochs=((1, 0), (2, 4))))
    with pytest.raises(DataLoss, match=r"holds other records from offset 4 on.*another --name"):
        next_step(after, a_replay(step), step.positions, NO_LIMITS, NO_PRUNING, 1)
    assert check_not_lost(before, a_replay(step), step.positions) == {0: 9}


def test_small_steps_have_one_partition_and_large_ones_one_for_each_core() -> None:
    def partitions(records: int, parallelism: int) -> int:
        step = next_step(topic(segment(0, records)), a_replay(), {0: 0}, NO_LIMITS, NO_PRUNING, parallelism)
        assert step is not None
        return step.partitions

    assert [partitions(1, 4), partitions(99_999, 4), partitions(100_000, 4), partitions(10**9, 4)] == [1, 1, 2, 4]


def test_every_offset_is_copied_once_and_parents_before_children_in_any_dag() -> None:
    for seed in range(60):
        draw = random.Random(seed)
        segments: list[SegmentSnapshot] = []
        for number in range(draw.randint(1, 9)):
            parents = [each.id for each in draw.sample(segments, min(len(segments), draw.randint(0, 2)))]
            segments = [msgspec.structs.replace(each, sealed=each.sealed or each.id in parents) for each in segments]
            segments.append(segment(number, draw.randint(0, 12), *parents))
        there = topic(*segments)
        state, most = a_replay(), draw.randint(1, 8)
        positions: dict[int, Position] = first_positions(options(), there)
        copied: list[tuple[int, int]] = []
        while (step := next_step(there, state, positions, BatchLimits(records=most), NO_PRUNING, 2)) is not None:
            assert step.number == (0 if state.step is None else state.step.number + 1)
            for each in step.ranges:
                for parent in there.segments[each.segment].parents:
                    assert sum(one == parent for one, _ in copied) == there.segments[parent].end, seed
            copied += ((each.segment, offset) for each in step.ranges for offset in range(each.first, each.until))
            state, positions = a_replay(step), step.positions
        assert len(copied) == len(set(copied)), seed
        assert sorted(copied) == [(each.id, offset) for each in segments for offset in range(each.end)], seed


STEP = ReplayStep(number=3, ranges=(Range(0, 5, 9),), partitions=2, positions={0: 9, 1: END})


def test_a_journal_gives_back_what_was_written(tmp_path: Path) -> None:
    folder = str(tmp_path / "replay")
    with ReplayJournal(folder) as journal:
        assert journal.begin(a_replay()) == a_replay()
        journal.write(a_replay(STEP))
    with ReplayJournal(folder) as journal:
        assert journal.begin(a_replay(id="another id, which does not count")) == a_replay(STEP)


def test_a_journal_is_of_one_copy(tmp_path: Path) -> None:
    with ReplayJournal(str(tmp_path)) as journal:
        journal.begin(a_replay())
        with pytest.raises(
            InvalidArgument, match=r"is about another replay: .* into public/default/copy \(everything\)"
        ):
            journal.begin(a_replay(target="public/default/other"))
        with pytest.raises(InvalidArgument, match=r"\(startingTimestamp 17\)"):
            journal.begin(a_replay(bounds={"startingTimestamp": "17"}))
        with pytest.raises(InvalidArgument, match="public/default/copy was deleted and created again"):
            journal.begin(a_replay(target_id=9))
        assert journal.begin(a_replay(source_id=0)) == a_replay()  # A manifest may not tell it.


def test_a_journal_learns_the_id_of_a_topic_when_it_becomes_known(tmp_path: Path) -> None:
    with ReplayJournal(str(tmp_path)) as journal:
        journal.begin(a_replay(source_id=0))
        assert journal.begin(a_replay()) == a_replay()


def test_a_folder_of_something_else_or_a_damaged_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with ReplayJournal(str(tmp_path)) as journal:
        with pytest.raises(InvalidArgument, match=r"holds something else \(notes\.txt\)"):
            journal.begin(a_replay())
        (tmp_path / "replay.json").write_bytes(b'{"version":')
        with pytest.raises(InvalidArgument, match="is damaged"):
            journal.begin(a_replay())
        (tmp_path / "replay.json").write_bytes(msgspec.json.encode(a_replay(version=2)))
        with pytest.raises(InvalidArgument, match="has version 2; this build reads 1"):
            journal.begin(a_replay())


HOLDER = """
import sys
from braid.spark.jobs.replay.journal import ReplayJournal
with ReplayJournal(sys.argv[1]):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_one_replay_at_a_time_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(JobFailed, match="another replay is at work"), ReplayJournal(str(tmp_path)):
            pass
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait()
    with ReplayJournal(str(tmp_path)) as journal:
        assert journal.read() is None


def test_the_journal_lies_where_programs_keep_their_state() -> None:
    assert default_folder("n", {"HOME": "/home/ada"}) == "/home/ada/.local/state/braid/replay/n"
    assert default_folder("n", {"HOME": "/home/ada", "XDG_STATE_HOME": "/state"}) == "/state/braid/replay/n"
