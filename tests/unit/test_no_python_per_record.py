"""The work of Python for a batch does not grow with its records: it is counted, not timed.

Every call of a Python function, every call of a C function out of Python and every bytecode instruction counts: calls
alone would not show a loop that makes an object for each record. What C does by itself (`map`, numpy, Arrow) does not
count: that is the point. Headers that a producer gives as dictionaries are Python objects, one for each record, and
are walked through in Python; as an Arrow column they are not.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import pyarrow as pa
import pytest

from braid.model.batch.columns import decode_arrow
from braid.model.batch.encode import encode_batch, encode_table
from braid.model.batch.header import Codec
from braid.storage.log.context import FileConfig, LogConfig
from braid.testing.sim.clock import START_US
from tests.kits.storage import World, run

FEW, MANY = 100, 10_000
SLACK = 100
"""A larger batch may take another branch. One instruction for each further record would be 9,900."""
MONITOR = 4
"""A number that debuggers, coverage and profilers leave free."""


class Work:
    def __init__(self) -> None:
        self.steps = 0


Counts = Callable[[CodeType], bool]


@contextmanager
def counting(counts: Counts = lambda _: True) -> Iterator[Work]:
    """Count what this thread does meanwhile in code that counts. The collector rests: its work is not ours."""
    work = Work()
    gc.disable()
    try:
        with _monitored(work, counts) if sys.version_info >= (3, 12) else _traced(work, counts):
            yield work
    finally:
        gc.enable()


@contextmanager
def _traced(work: Work, counts: Counts) -> Iterator[None]:
    """Python 3.11. From 3.12 on, asking for instructions from inside a trace function comes too late for its frame."""

    def note_call(frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_call") and counts(frame.f_code):
            work.steps += 1

    def note_frame(frame: FrameType, event: str, argument: object) -> Callable[..., Any] | None:
        if not counts(frame.f_code):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return note_instruction

    def note_instruction(frame: FrameType, event: str, argument: object) -> Callable[..., Any]:
        if event == "opcode":
            work.steps += 1
        return note_instruction

    former = sys.getprofile(), sys.gettrace()
    sys.setprofile(note_call)
    sys.settrace(note_frame)
    try:
        yield
    finally:
        sys.settrace(former[1])
        sys.setprofile(former[0])


@contextmanager
def _monitored(work: Work, counts: Counts) -> Iterator[None]:
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined]  # Python 3.12 and newer
    thread = threading.get_ident()

    def note(code: CodeType, *_: object) -> None:
        if threading.get_ident() == thread and counts(code):
            work.steps += 1

    events = (monitoring.events.PY_START, monitoring.events.CALL, monitoring.events.INSTRUCTION)
    monitoring.use_tool_id(MONITOR, "counting")
    for event in events:
        monitoring.register_callback(MONITOR, event, note)
    monitoring.set_events(MONITOR, sum(events))
    try:
        yield
    finally:
        monitoring.set_events(MONITOR, 0)
        for event in events:
            monitoring.register_callback(MONITOR, event, None)
        monitoring.free_tool_id(MONITOR)


def in_the_broker(code: CodeType) -> bool:
    """Not in the simulated disk, which works sector by sector, and not in the loop."""
    name = code.co_filename
    return "/braid/" in name and "/braid/testing/" not in name


def assert_same_steps(steps_for: Callable[[int], int]) -> None:
    steps_for(FEW)  # imports, caches
    few, many = steps_for(FEW), steps_for(MANY)
    assert few > 0
    assert abs(many - few) <= SLACK, f"{FEW} records took {few} steps, {MANY} took {many}"


def some_keys(count: int) -> list[bytes | None]:
    return [b"key-%d" % number for number in range(count)]


def some_values(count: int) -> list[bytes]:
    return [b"value-%d" % number for number in range(count)]


def some_times(count: int) -> list[int]:
    return [START_US + number for number in range(count)]


def some_table(count: int) -> Any:
    headers = pa.array([[("trace", b"%d" % number)] for number in range(count)], pa.map_(pa.string(), pa.binary()))
    return pa.table(
        {
            "key": pa.array(some_keys(count), pa.binary()),
            "value": pa.array(some_values(count), pa.binary()),
            "timestamp": pa.array(some_times(count), pa.timestamp("us", "UTC")),
            "headers": headers,
        }
    )


WALKS: dict[str, Callable[[list[bytes]], object]] = {
    "a call for each": lambda values: [value.hex() for value in values],
    "an object for each": lambda values: [str(value, "ascii") for value in values],
    "nothing for each": b"".join,
}


@pytest.mark.parametrize("walk", WALKS)
def test_the_count_sees_what_python_does_for_each_record_and_only_that(walk: str) -> None:
    def steps_for(records: int) -> int:
        values = some_values(records)
        with counting() as work:
            WALKS[walk](values)
        return work.steps

    grown = steps_for(MANY) - steps_for(FEW)
    assert grown == 0 if walk == "nothing for each" else grown >= MANY - FEW


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
@pytest.mark.parametrize("without_key", [False, True], ids=["all have keys", "one has no key"])
def test_a_batch_is_encoded_without_python_for_each_record(codec: Codec, without_key: bool) -> None:
    def steps_for(records: int) -> int:
        keys, values, times = some_keys(records), some_values(records), some_times(records)
        if without_key:
            keys[0] = None
        with counting() as work:
            encode_batch(values, keys=keys, timestamps=times, now_us=START_US, codec=codec)
        return work.steps

    assert_same_steps(steps_for)


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
def test_a_table_is_encoded_without_python_for_each_record(codec: Codec) -> None:
    def steps_for(records: int) -> int:
        table = some_table(records)
        with counting() as work:
            encode_table(table, now_us=START_US, codec=codec)
        return work.steps

    assert_same_steps(steps_for)


@pytest.mark.parametrize("codec", list(Codec), ids=lambda codec: codec.name.lower())
def test_a_batch_is_decoded_to_arrow_without_python_for_each_record(codec: Codec) -> None:
    def steps_for(records: int) -> int:
        batch = encode_table(some_table(records), now_us=START_US, codec=codec)
        with counting() as work:
            assert decode_arrow(batch).num_rows == records
        return work.steps

    assert_same_steps(steps_for)


def test_appending_and_committing_runs_no_python_for_each_record() -> None:
    def steps_for(records: int) -> int:
        async def story(world: World) -> int:
            # Room for either batch: making more of it takes steps too.
            segment = await world.a.open(LogConfig(files=FileConfig(first_reserve_bytes=1 << 20)))
            batch = encode_batch(some_values(records), keys=some_keys(records), now_us=START_US)
            with counting(in_the_broker) as work:
                await segment.log.confirm(segment.append(batch))
            await segment.close()
            return work.steps

        return run(story)

    assert_same_steps(steps_for)


@pytest.mark.parametrize("source", ["cache", "file", "chunk"])
def test_reading_runs_no_python_for_each_record(source: str) -> None:
    def steps_for(records: int) -> int:
        async def story(world: World) -> int:
            world.a.start(cache_bytes=1 << 20 if source == "cache" else 1)
            segment = await world.a.open(LogConfig())
            for _ in range(2):
                batch = encode_batch(some_values(records), keys=some_keys(records), now_us=START_US)
                await segment.log.confirm(segment.append(batch))
                if source == "chunk":
                    await segment.log.rotate()
            if source == "chunk":
                await segment.exporter.stop()
                await segment.exporter.export_closed()
                segment.log.forget_files({segment.log.files[0].name})
            world.a.noting.reads.clear()
            with counting(in_the_broker) as work:
                batches = await segment.reader(0).read()
            assert batches[0].header.count == records
            assert bool(world.a.noting.reads) == (source == "file")
            await segment.close()
            return work.steps

        return run(story)

    assert_same_steps(steps_for)
