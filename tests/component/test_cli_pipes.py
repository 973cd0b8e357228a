"""Reading lines ahead, and knowing what the reader of a pipe has taken."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braid.cli.commands.consume import whole_lines
from braid.cli.commands.produce import split_keys
from braid.cli.terminal import stdin_reader as lines_module
from braid.cli.terminal.record_lines import record_object
from braid.cli.terminal.stdin_reader import LineReader
from braid.cli.terminal.stdout_writer import Printer
from braid.model.errors import BraidError
from braid.model.message import Message


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    reading, writing = os.pipe()
    try:
        yield reading, writing
    finally:
        for descriptor in (reading, writing):
            with suppress(OSError):  # closed by the test
                os.close(descriptor)


# Lines.


async def all_lines(descriptor: int) -> list[bytes]:
    reader = LineReader(descriptor)
    found: list[bytes] = []
    while lines := await reader.take():
        found += lines
    return found


def lines_of(data: bytes, folder: Path) -> list[bytes]:
    path = folder / "input"
    path.write_bytes(data)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return asyncio.run(all_lines(descriptor))
    finally:
        os.close(descriptor)


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"", []),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\nb", [b"a", b"b"]),
        (b"\n\na\n\n", [b"", b"", b"a", b""]),
        (b"a\r\n\xff\x00\n", [b"a\r", b"\xff\x00"]),
    ],
)
def test_lines_are_bytes_between_newlines(tmp_path: Path, data: bytes, lines: list[bytes]) -> None:
    assert lines_of(data, tmp_path) == lines


@pytest.mark.parametrize("block", [1, 2, 3, 7, 64])
def test_lines_are_whole_wherever_a_read_ends(tmp_path: Path, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "READ_BYTES", block)
    expected = [b"x" * size for size in (0, 1, 2, 3, 10, 0, 200, 1)]
    assert lines_of(b"\n".join(expected), tmp_path) == expected
    assert lines_of(b"\n".join(expected) + b"\n", tmp_path) == expected


def test_a_line_is_handed_out_before_the_input_ends() -> None:
    async def scenario(reading: int, writing: int) -> None:
        reader = LineReader(reading)
        os.write(writing, b"first\nsec")
        assert await reader.take() == [b"first"]
        os.write(writing, b"ond\n")
        assert await reader.take() == [b"second"]
        os.close(writing)
        assert await reader.take() == []

    with pipe() as (reading, writing):
        asyncio.run(scenario(reading, writing))


def test_what_is_read_ahead_is_bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(lines_module, "READ_BYTES", 1_000)
    monkeypatch.setattr(lines_module, "MAX_AHEAD_BYTES", 5_000)
    (tmp_path / "input").write_bytes(b"123456789\n" * 10_000)

    async def scenario(descriptor: int) -> None:
        reader = LineReader(descriptor)
        while not reader._ended and not getattr(reader._state, "_waiters"):  # noqa: ASYNC110, B009 (the thread's state)
            await asyncio.sleep(0)
        # One more block is read while it waits for its place.
        assert reader.read_bytes == 6_000
        found = 0
        while lines := await reader.take():
            found += len(lines)
        assert found == 10_000

    descriptor = os.open(tmp_path / "input", os.O_RDONLY)
    asyncio.run(scenario(descriptor))
    os.close(descriptor)


def test_a_line_without_end_is_refused_instead_of_filling_the_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(lines_module, "READ_BYTES", 100)
    monkeypatch.setattr(lines_module, "MAX_LINE_BYTES", 1_000)
    with pytest.raises(BraidError, match="line 3 is longer than a record may be"):
        lines_of(b"a\nb\n" + b"c" * 2_000, tmp_path)


def test_stopping_wakes_who_waits_for_lines() -> None:
    async def scenario(reading: int) -> None:
        reader = LineReader(reading)
        taking = asyncio.ensure_future(reader.take())
        await asyncio.sleep(0)
        reader.stop()
        assert await taking == []

    with pipe() as (reading, _):
        asyncio.run(scenario(reading))


# Keys.


@settings(deadline=None)  # the first example imports Arrow
@given(
    lines=st.lists(st.tuples(st.binary(max_size=4), st.binary(max_size=6)), min_size=1, max_size=20),
    separator=st.sampled_from([b":", b"\t", b"::", b"\xff"]),
)
def test_keys_are_split_at_the_first_separator_as_line_by_line(
    lines: list[tuple[bytes, bytes]], separator: bytes
) -> None:
    texts = [key + separator + value for key, value in lines]
    table = split_keys(texts, separator)
    expected = [text.partition(separator) for text in texts]
    assert table["key"].to_pylist() == [key for key, _, _ in expected]
    assert table["value"].to_pylist() == [value for _, _, value in expected]


def test_a_line_without_a_separator_is_named_by_its_number() -> None:
    with pytest.raises(BraidError, match="line 12 has no key: there is no ':' in it"):
        split_keys([b"a:1", b"::", b"c", b"d"], b":", first=10)


# Printing.


@asynccontextmanager
async def printing(descriptor: int) -> AsyncIterator[Printer]:
    printer = Printer(descriptor)
    try:
        yield printer
    finally:
        printer.close()


def test_in_a_pipe_only_what_the_reader_took_is_printed() -> None:
    async def scenario(reading: int, writing: int) -> None:
        async with printing(writing) as printer:
            await printer.write(b"0123456789")
            assert printer.printed() == 0
            assert os.read(reading, 4) == b"0123"
            assert printer.printed() == 4
            os.close(reading)
            await printer.closed
            assert printer.printed() == 4
            with pytest.raises(BrokenPipeError):
                await printer.write(b"more")
            assert printer.printed() == 4

    with pipe() as (reading, writing):
        asyncio.run(scenario(reading, writing))


def test_a_reader_that_leaves_in_the_middle_of_a_long_write_took_what_it_read() -> None:
    async def scenario(reading: int, writing: int) -> None:
        async with printing(writing) as printer:
            write = asyncio.ensure_future(printer.write(b"x" * (4 << 20)))
            taken = len(await asyncio.to_thread(os.read, reading, 1000))
            os.close(reading)
            with pytest.raises(BrokenPipeError):
                await write
            assert printer.printed() == taken == 1000

    with pipe() as (reading, writing):
        asyncio.run(scenario(reading, writing))


def test_what_a_reader_took_of_a_write_that_its_leaving_ended_is_known_after_settling(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    counting = threading.Event()
    write = os.write

    def late(descriptor: int, data: memoryview) -> int:
        """As on a busy machine: the loop hears of the end of the pipe before the thread goes on."""
        count = write(descriptor, data)
        assert counting.wait(10)
        return count

    async def scenario(reading: int, writing: int) -> None:
        async with printing(writing) as printer:
            monkeypatch.setattr(os, "write", late)
            unfinished = asyncio.ensure_future(printer.write(b"x" * (4 << 20)))
            assert len(await asyncio.to_thread(os.read, reading, 1000)) == 1000
            os.close(reading)
            await printer.closed
            unfinished.cancel()
            asyncio.get_running_loop().call_later(0.05, counting.set)
            await printer.settle()
            assert printer.printed() == 1000

    with pipe() as (reading, writing):
        asyncio.run(scenario(reading, writing))


def test_in_a_file_everything_is_printed_when_it_is_written(tmp_path: Path) -> None:
    async def scenario(descriptor: int) -> None:
        async with printing(descriptor) as printer:
            await printer.write(b"0123456789")
            assert printer.printed() == 10

    descriptor = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY)
    asyncio.run(scenario(descriptor))
    os.close(descriptor)
    assert (tmp_path / "out").read_bytes() == b"0123456789"


@pytest.mark.parametrize(("size", "count"), [(0, 0), (2, 0), (3, 1), (5, 2), (6, 2), (7, 2), (8, 3), (100, 3)])
def test_only_whole_lines_count(size: int, count: int) -> None:
    assert whole_lines([b"ab", b"c", b"de"], size) == count


# Records as JSON.


def test_a_record_in_json_says_what_is_text_and_what_is_not() -> None:
    text = Message(b"caf\xc3\xa9", b"k", 1_700_000_000_000_001, 7, {"trace": b"a1"}, 2, "public/default/t")
    assert record_object(text) == {
        "key": "k",
        "value": "café",
        "timestamp": "2023-11-14T22:13:20.000001Z",
        "segment": 2,
        "offset": 7,
        "headers": {"trace": "a1"},
    }
    binary = record_object(Message(b"\xff", None, 1 << 62, 0, {"raw": b"\xfe", "plain": b""}))
    assert (binary["key"], binary["valueBase64"], binary["timestamp"]) == (None, "/w==", 1 << 62)
    assert (binary["headers"], binary["headersBase64"]) == ({"plain": ""}, {"raw": "/g=="})
    assert "value" not in binary
