"""`braid produce`: lines of stdin become records. A line is a value, a key and a value, or a record as JSON.

One `send_many` at a time, of all lines that have been read by then: that keeps the order, needs no timer, and makes big
batches exactly when there is much to send. While one is being confirmed, the next lines are read.
"""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.target import Target, with_target
from braid.cli.terminal.output import bytes_text, count_text, duration_text, print_json, print_note
from braid.cli.terminal.record_lines import json_table
from braid.model.errors import BraidError, TopicNotFound
from braid.ports.allocator import keep_freed_memory

if TYPE_CHECKING:
    from braid.cli.terminal.stdin_reader import LineReader
    from braid.client.producing.producer import Producer

PACE_S: Final = 0.05
"""With --rate, how often a group of lines is sent."""
PROGRESS_S: Final = 0.5


@click.command()
@click.argument("topic")
@click.option("--key-separator", metavar="CHAR", help=r"Lines are KEY CHAR VALUE; `\t` is a tab.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", help="A header of each record. Repeatable."
)
@click.option("--rate", type=click.FloatRange(min=0, min_open=True), metavar="N", help="At most N records a second.")
@click.option(
    "--compression", type=click.Choice(["none", "lz4", "zstd"]), default="none", show_default=True, help="Of batches."
)
@click.option("-v", "--verbose", is_flag=True, help="Print a summary at the end, also if stderr is no terminal.")
@click.option(
    "--json", "as_json", is_flag=True, help="Lines are records as `braid consume --json` prints them; answer in JSON."
)
@with_target
def produce(
    target: Target,
    topic: str,
    key_separator: str | None,
    headers: tuple[str, ...],
    rate: float | None,
    compression: str,
    verbose: bool,
    as_json: bool,
) -> int:
    """Publish lines of stdin, one record each.

    Lines are sent as they come. The command ends when the input has ended and every record is confirmed. Bytes are not
    changed; an empty line is an empty record.

    With --json, a line is an object with value, and if wanted key, headers and timestamp; valueBase64, keyBase64 and
    headersBase64 hold bytes that are no text. deliverAfterMs and ttlMs say when queues deliver the record. The command
    ignores segment and offset, and prints a summary to stdout at the end.

    \b
    Examples:
      echo paid | braid produce orders
      braid produce orders -H source=shop < orders.jsonl
      echo '{"key": "customer-7", "value": "paid", "headers": {"trace": "a1"}}' | braid produce orders --json
      tail -f access.log | braid produce access
      printf 'customer-7\\tpaid\\n' | braid produce orders --key-separator '\\t'
    """
    if as_json and key_separator is not None:
        raise click.UsageError("--json and --key-separator are two formats; choose one")
    separator = key_separator.encode().replace(rb"\t", b"\t") if key_separator is not None else None
    if separator == b"":
        raise click.UsageError("--key-separator is empty; give a character")
    if sys.stdin is None:
        raise click.ClickException("there is nothing to read: standard input is closed")
    typed = sys.stdin.isatty()
    table = _table_maker(parse_headers(headers), separator, as_json=as_json)
    run = _ProduceRun(topic, table, rate, show_progress=sys.stderr.isatty() and not typed)
    if typed:
        print_note(f"Each line becomes a record of {topic}; Ctrl-D ends.")
    keep_freed_memory()
    asyncio.run(run.run(target, compression))
    if as_json:
        print_json({"records": run.records, "bytes": run.bytes, "seconds": round(run.seconds, 6)})
    elif verbose or sys.stderr.isatty():
        click.echo(run.summary(), err=True)
    return 128 + run.interrupted_by if run.interrupted_by else 0


MakeTable = Callable[[list[bytes], int], Any]
"""Makes an Arrow table of lines. The number is that of the first line, for errors."""


def _table_maker(headers: dict[str, bytes], separator: bytes | None, *, as_json: bool) -> MakeTable | None:
    """Return how lines become rows; None if each line is a value and nothing else."""
    if as_json:
        return lambda lines, first: json_table(lines, headers, first=first)
    if separator is None and not headers:
        return None
    return lambda lines, first: with_headers(split_keys(lines, separator, first=first), headers)


class _ProduceRun:
    """One run of the command, and its counts."""

    def __init__(self, topic: str, table: MakeTable | None, rate: float | None, *, show_progress: bool) -> None:
        self._topic = topic
        self._table = table
        self._rate = rate
        self._show_progress = show_progress
        self._input_bytes = _size_of_file(0)
        self._began = self._now = self._shown = self._due = 0.0
        self.records = 0
        self.bytes = 0
        self.interrupted_by = 0

    async def run(self, target: Target, compression: str) -> None:
        from braid.cli.terminal.stdin_reader import LineReader

        try:
            async with target.connected() as client:
                codec = None if compression == "none" else compression
                async with client.producer(self._topic, compression=codec) as producer:
                    reader = LineReader(0)
                    self._stop_on_signals(reader)
                    self._began = self._now = self._shown = self._due = time.monotonic()
                    while lines := await reader.take():
                        await self._send(producer, lines)
        except TopicNotFound as error:
            error.args = (f"{error}; create it with `braid topic create {self._topic}`",)
            raise
        except BraidError as error:
            if self.records:
                error.args = (f"{error} ({count_text(self.records)} records were confirmed before)",)
            raise
        finally:
            self._clear_progress()

    async def _send(self, producer: Producer, lines: list[bytes]) -> None:
        step = len(lines) if self._rate is None else max(1, int(self._rate * PACE_S))
        for first in range(0, len(lines), step):
            if self.interrupted_by:
                return
            part = lines if step >= len(lines) else lines[first : first + step]
            if self._rate is not None:
                # Lines that were late are not caught up: the rate holds from now on.
                self._due = max(self._due, time.monotonic() - PACE_S)
                await asyncio.sleep(self._due - time.monotonic())
                self._due += len(part) / self._rate
            if self._table is None:
                await producer.send_many(part)
            else:
                await producer.send_table(self._table(part, self.records + 1))
            self.records += len(part)
            self.bytes += sum(map(len, part))
            self._now = time.monotonic()
            self._progress()

    def _stop_on_signals(self, reader: LineReader) -> None:
        """Let the first signal end the input; sent records are still confirmed. The second signal ends the process."""

        def interrupt(number: int) -> None:
            if self.interrupted_by:
                os._exit(128 + number)
            self.interrupted_by = number
            reader.stop()

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)

    @property
    def seconds(self) -> float:
        return self._now - self._began

    def summary(self) -> str:
        rate = f", {count_text(round(self.records / self.seconds))} records/s" if self.seconds > 1 else ""
        plural = "record" if self.records == 1 else "records"
        return f"{count_text(self.records)} {plural}, {bytes_text(self.bytes)} in {duration_text(self.seconds)}{rate}"

    def _progress(self) -> None:
        if self._show_progress and self._now - self._shown > PROGRESS_S:
            self._shown = self._now
            share = (
                f"  {min(self.bytes + self.records, self._input_bytes) * 100 // self._input_bytes} %"
                if self._input_bytes
                else ""
            )
            sys.stderr.write(f"\r\x1b[K{self.summary()}{share}")
            sys.stderr.flush()

    def _clear_progress(self) -> None:
        if self._show_progress:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()


def parse_headers(given: Sequence[str]) -> dict[str, bytes]:
    """Parse NAME=VALUE of each header."""
    headers: dict[str, bytes] = {}
    for text in given:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise click.BadParameter(f"{text[:200]!r} must be NAME=VALUE", param_hint="'--header'")
        if name in headers:
            raise click.BadParameter(f"{name[:200]!r} is given twice", param_hint="'--header'")
        headers[name] = os.fsencode(value)
    return headers


def with_headers(table: Any, headers: dict[str, bytes]) -> Any:
    """Return the table with these headers in each row."""
    import pyarrow as pa

    if not headers:
        return table
    column = pa.array([list(headers.items())] * table.num_rows, pa.map_(pa.string(), pa.binary()))
    return table.append_column("headers", column)


def split_keys(lines: list[bytes], separator: bytes | None, *, first: int = 1) -> Any:
    """Return an Arrow table of keys and values; without a separator, only of values. `first` is the number of the first
    line, for the error.

    Working on whole columns is nine times as fast as line by line: all lines form one buffer, and cuts at both ends of
    each separator make it key, separator, value, key, separator, value, …
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    rows = pa.array(lines, pa.binary())
    if separator is None:
        return pa.table({"value": rows})
    found = pc.find_substring(rows, pattern=separator).to_numpy()
    if (found < 0).any():
        number = first + int((found < 0).argmax())
        raise BraidError(f"line {number} has no key: there is no {separator.decode()!r} in it")
    _, starts, data = rows.buffers()
    cuts = np.empty(3 * len(rows) + 1, np.int32)
    cuts[0::3] = np.frombuffer(starts, np.int32, len(rows) + 1)
    cuts[1::3] = cuts[0:-1:3] + found
    cuts[2::3] = cuts[1::3] + len(separator)
    parts = pa.Array.from_buffers(pa.binary(), 3 * len(rows), [None, pa.py_buffer(cuts), data])
    keys = np.arange(0, 3 * len(rows), 3)
    return pa.table({"key": parts.take(pa.array(keys)), "value": parts.take(pa.array(keys + 2))})


def _size_of_file(descriptor: int) -> int:
    """Return the size of a file; 0 for a pipe, whose length is not known."""
    try:
        info = os.fstat(descriptor)
    except OSError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0
