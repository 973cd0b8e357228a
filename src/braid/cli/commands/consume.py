"""`braid consume`: prints the records of a subscription to stdout.

The command acks exactly the records that it printed; stdout_writer.py defines what counts as printed. The acks follow a
few milliseconds later, and the command ends only when they are stored. Records that arrived but were not printed stay
with the subscription. After an interrupt, or when the reader closes the pipe, the command does not wait for lost
brokers.
"""

from __future__ import annotations

import asyncio
import base64
import datetime
import os
import signal
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from braid.cli.target import Target, with_target
from braid.cli.terminal.output import json_option, print_error
from braid.client.retry import retrying
from braid.model.errors import BraidError, NotServing, TopicNotFound
from braid.model.names import TopicName
from braid.model.subscription import DEFAULT_START
from braid.ports.allocator import keep_freed_memory

if TYPE_CHECKING:
    from braid.cli.terminal.stdout_writer import Printer
    from braid.client.client import Client
    from braid.client.consuming.delivery import ReceivedBatch
    from braid.client.consuming.stream import StreamConsumer
    from braid.model.message import Message

IDLE_S: Final = 0.25
"""After this long without a record, ask the broker whether other consumers of the subscription are at the end."""
SERVED_S: Final = 10.0
"""How long to wait for a segment that is being opened."""
ENDING_S: Final = 2.0
"""How long a broker may take to store the acks when the user waits for the end: after a signal, or after the pipe was
closed. A broker that is not connected then gets no time."""
LOOK_S: Final = 0.01
"""How often to ask a pipe how much its reader has taken, while the pipe is not empty."""

Format = Callable[["ReceivedBatch"], list[bytes]]


@click.command()
@click.argument("topic")
@click.option("-s", "--subscription", required=True, metavar="NAME", help="Remembers the position; created if absent.")
@click.option("--queue", is_flag=True, help="Share all segments with other consumers, in no order.")
@click.option(
    "--from",
    "start",
    type=click.Choice(["earliest", "latest"]),
    default=DEFAULT_START,
    show_default=True,
    help="Where a new subscription begins.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("--follow", is_flag=True, help="Wait for more records at the end, until Ctrl-C.")
@click.option("--key-separator", metavar="CHAR", help=r"Print KEY CHAR VALUE; `\t` is a tab.")
@json_option
@with_target
def consume(
    target: Target,
    topic: str,
    subscription: str,
    queue: bool,
    start: str,
    count: int | None,
    follow: bool,
    key_separator: str | None,
    as_json: bool,
) -> int:
    """Print the records of a subscription, one per line.

    The command stops at the end that the topic had at the start, or waits for more records with --follow. It acks
    printed records, so the next run continues after them. In a pipe, a record is printed when the reader has taken it.

    --json prints one object per record: key, value, timestamp, segment, offset, headers. A key or value that is no
    UTF-8 becomes keyBase64 or valueBase64.

    \b
    Examples:
      braid consume orders -s billing
      braid consume orders -s billing --follow --json | jq .value
      braid consume orders -s copy --key-separator '\\t' | braid produce orders2 --key-separator '\\t'
    """
    if as_json and key_separator is not None:
        raise click.UsageError("--json and --key-separator are two formats; choose one")
    formatted: Format = json_lines if as_json else value_lines
    if key_separator is not None:
        formatted = keyed_lines(key_separator.encode().replace(rb"\t", b"\t"))
    run = _ConsumeRun(formatted, count, follow=follow)
    keep_freed_memory()
    return asyncio.run(run.run(target, topic, subscription, start=start, queue=queue))


class _Printed(NamedTuple):
    """Lines that the printer got and that are not acked yet."""

    begins: int
    """The position of the first line in the whole output, in bytes."""
    ends: int
    lines: list[bytes]
    segment: int
    first_offset: int


class _ConsumeRun:
    def __init__(self, formatted: Format, count: int | None, *, follow: bool) -> None:
        self._format = formatted
        self._left = count
        self._follow = follow
        self._ends: dict[int, int] = {}
        """Without --follow: the end of each segment at the start, until it is reached."""
        self._printed: deque[_Printed] = deque()
        self._given_bytes = 0
        self._acked = False
        """Whether this run has acked anything."""
        self._signal = 0

    async def run(self, target: Target, topic: str, subscription: str, *, start: str, queue: bool) -> int:
        """Run the command. Returns the exit code."""
        from braid.cli.terminal.stdout_writer import Printer

        try:
            printer = Printer(1)
        except OSError as error:
            raise BraidError(f"there is no output to print to: {error.strerror}") from error
        try:
            async with target.connected() as client:
                if queue:
                    client.queue_consumer(topic, subscription)
                async with client.stream_consumer(topic, subscription, start=start) as consumer:
                    if not self._follow:
                        await self._find_ends(client, topic, subscription)
                    printing = asyncio.ensure_future(self._print(client, consumer, printer, topic, subscription))
                    await self._until_done(printing, client, consumer, printer)
        except TopicNotFound as error:
            error.args = (f"{error}; create it with `braid topic create {topic}`",)
            raise
        finally:
            printer.close()
        return self._exit_code()

    def _exit_code(self) -> int:
        return 128 + self._signal if self._signal and not self._follow else 0

    def _end_soon(self, client: Client) -> None:
        """End the process if closing takes too long for a user who waits."""
        patience_s = ENDING_S if client.pool.connected() is not None else 0.0
        asyncio.get_running_loop().call_later(patience_s, self._give_up)

    def _give_up(self) -> None:
        if not self._acked and not self._printed:
            os._exit(self._exit_code())
        print_error("no broker answers to store what was acked: records that were printed may come again")
        os._exit(128 + self._signal if self._signal else 1)

    async def _until_done(
        self, printing: asyncio.Task[None], client: Client, consumer: StreamConsumer, printer: Printer
    ) -> None:
        """Ack printed records until printing ends: by itself, by a signal, or because the reader closed the pipe."""
        stopped = asyncio.get_running_loop().create_future()
        self._stop_on_signals(stopped, client)
        try:
            while not printing.done() and not stopped.done() and not printer.closed.done():
                waiting = {printing, stopped, printer.closed}
                await asyncio.wait(
                    waiting, timeout=LOOK_S if self._printed else IDLE_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._ack(consumer, printer.printed())
            if printer.closed.done():
                raise BrokenPipeError
            if printing.done():
                printing.result()
        except BrokenPipeError:
            self._end_soon(client)  # The reader wants no more.
        except BraidError:  # Before OSError, because `TimedOut` is both.
            raise
        except OSError as error:
            raise BraidError(f"the output cannot be written: {error.strerror}") from error
        finally:
            printing.cancel()
            await asyncio.wait([printing])
            if printer.closed.done():
                await printer.settle()
            self._ack(consumer, printer.printed(), last=True)

    async def _print(
        self, client: Client, consumer: StreamConsumer, printer: Printer, topic: str, subscription: str
    ) -> None:
        while self._left != 0 and (self._follow or self._ends):
            batch = await consumer.receive_batch(timeout=None if self._follow else IDLE_S)
            if batch is None:
                await self._leave_out_what_others_consumed(client, topic, subscription)
                continue
            lines = self._wanted(batch)
            if lines:
                data = b"\n".join(lines) + b"\n"
                begins, self._given_bytes = self._given_bytes, self._given_bytes + len(data)
                self._printed.append(_Printed(begins, self._given_bytes, lines, batch.segment, batch.base_offset))
                await printer.write(data)
        while printer.printed() < self._given_bytes:  # noqa: ASYNC110 (there is no event when a reader takes bytes)
            await asyncio.sleep(LOOK_S)

    def _wanted(self, batch: ReceivedBatch) -> list[bytes]:
        """Return the lines of a batch that are to be printed."""
        count = len(batch)
        if not self._follow:
            end = self._ends.get(batch.segment, 0)
            count = min(count, max(end - batch.base_offset, 0))
            if batch.next_offset >= end:
                self._ends.pop(batch.segment, None)
        if self._left is not None:
            count = min(count, self._left)
            self._left -= count
        return self._format(batch)[:count] if count else []

    async def _find_ends(self, client: Client, topic: str, subscription: str) -> None:
        """Find the end of each segment. Wait for segments that no broker serves: their records must not be left out."""

        async def ends() -> dict[int, int]:
            layout = (await client.routing.topic(TopicName.parse(topic).path)).by_id
            segments = await self._progress(client, topic, subscription)
            if missing := sorted(layout.keys() - segments.keys()):
                raise NotServing(f"segment {missing[0]} of {topic} is not served by the broker that was asked")
            return {segment: each["end"] for segment, each in segments.items() if each["offset"] < each["end"]}

        self._ends = await retrying(ends, asyncio.get_running_loop().time() + SERVED_S, client.backoff())

    async def _leave_out_what_others_consumed(self, client: Client, topic: str, subscription: str) -> None:
        for segment, each in (await self._progress(client, topic, subscription)).items():
            if each["offset"] >= self._ends.get(segment, 0):
                self._ends.pop(segment, None)

    async def _progress(self, client: Client, topic: str, subscription: str) -> dict[int, dict[str, int]]:
        found = await client.admin.subscription(topic, subscription)
        return {int(segment): each for segment, each in found["segments"].items()}

    def _ack(self, consumer: StreamConsumer, printed: int, *, last: bool = False) -> None:
        """Ack the records below this position of the output: whole batches, and at the end single records."""
        while self._printed and self._printed[0].ends <= printed:
            done = self._printed.popleft()
            self._acked = True
            consumer.mark_acked(done.segment, done.first_offset + len(done.lines))
        if last and self._printed:
            cut = self._printed[0]
            self._acked = True
            consumer.mark_acked(cut.segment, cut.first_offset + whole_lines(cut.lines, printed - cut.begins))

    def _stop_on_signals(self, stopped: asyncio.Future[None], client: Client) -> None:
        """Let the first signal end the output; printed records are still acked. The second signal ends the process."""

        def interrupt(number: int) -> None:
            if self._signal:
                os._exit(128 + number)
            self._signal = number
            stopped.set_result(None)
            self._end_soon(client)

        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, interrupt, number)


def whole_lines(lines: list[bytes], size: int) -> int:
    """Return how many of these lines, each with a newline, fit in this many bytes."""
    for count, line in enumerate(lines):
        size -= len(line) + 1
        if size < 0:
            return count
    return len(lines)


# Formats.


def value_lines(batch: ReceivedBatch) -> list[bytes]:
    return batch.values()


def keyed_lines(separator: bytes) -> Format:
    def lines(batch: ReceivedBatch) -> list[bytes]:
        columns = batch.columns(("key", "value"))
        pairs = zip(columns.column(0).to_pylist(), columns.column(1).to_pylist())
        return [(key or b"") + separator + value for key, value in pairs]

    return lines


def json_lines(batch: ReceivedBatch) -> list[bytes]:
    encode = msgspec.json.Encoder().encode
    return [encode(record_object(message)) for message in batch.messages()]


def record_object(message: Message) -> dict[str, Any]:
    """Return a record for JSON. Bytes that are no UTF-8 get another name, so that they are not taken for text."""
    headers = {name: _text(value) for name, value in message.headers.items()}
    shown: dict[str, Any] = {
        **_named("key", message.key),
        **_named("value", message.value),
        "timestamp": _iso(message.timestamp_us),
        "segment": message.segment,
        "offset": message.offset,
        "headers": {name: text for name, text in headers.items() if text is not None},
    }
    binary = {name: _base64(message.headers[name]) for name, text in headers.items() if text is None}
    return {**shown, "headersBase64": binary} if binary else shown


def _named(name: str, data: bytes | None) -> dict[str, str | None]:
    if data is None:
        return {name: None}
    text = _text(data)
    return {f"{name}Base64": _base64(data)} if text is None else {name: text}


def _text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


@lru_cache(maxsize=4_096)  # Records of one batch often have the same time.
def _iso(timestamp_us: int) -> str | int:
    """Return ISO 8601 in UTC, or the number itself if the calendar has no such time."""
    try:
        moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(microseconds=timestamp_us)
    except OverflowError:
        return timestamp_us
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")
