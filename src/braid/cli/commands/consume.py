"""`braid consume`: prints the records of a topic to stdout, for a subscription or only to look.

Without a subscription, the command reads with a checkpoint consumer: it leaves nothing on the brokers.

With a subscription, a queue or not, the command acks exactly the records that it printed; stdout_writer.py defines
what counts as printed. The acks follow a few milliseconds later, and the command ends only when they are stored.
Records that arrived but were not printed stay with the subscription. After an interrupt, or when the reader closes the
pipe, the command does not wait for lost brokers.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from braid.cli.commands.readings import Ack, Delivered, Reading, looking, queued, subscribed
from braid.cli.target import Target, with_target
from braid.cli.terminal.output import json_option, print_error
from braid.cli.terminal.record_lines import Format, column_lines, json_lines, value_lines
from braid.cli.terminal.start_point import START, StartPoint
from braid.model.errors import BraidError, SubscriptionKindConflict, TopicNotFound
from braid.model.names import TopicName
from braid.model.subscription import DEFAULT_START
from braid.ports.allocator import keep_freed_memory

if TYPE_CHECKING:
    from braid.cli.terminal.stdout_writer import Printer
    from braid.client.client import Client

IDLE_S: Final = 0.25
"""After this long without a record, ask the broker whether other consumers of the subscription are at the end."""
ENDING_S: Final = 2.0
"""How long a broker may take to store the acks when the user waits for the end: after a signal, or after the pipe was
closed. A broker that is not connected then gets no time."""
LOOK_S: Final = 0.01
"""How often to ask a pipe how much its reader has taken, while the pipe is not empty."""


@click.command()
@click.argument("topic")
@click.option(
    "-s",
    "--subscription",
    metavar="NAME",
    help="Remembers the position; created if absent. Without it, the command only looks and leaves nothing behind.",
)
@click.option(
    "--queue", is_flag=True, help="Consume a queue subscription: messages one by one, in no order, beside others."
)
@click.option(
    "--from",
    "start",
    type=START,
    default=DEFAULT_START,
    show_default=True,
    metavar="START",
    help="earliest, latest, -1h, a TIME, an OFFSET, or -N for the last N of each segment. A new subscription begins at "
    "earliest or latest.",
)
@click.option("--count", type=click.IntRange(min=1), metavar="N", help="Stop after N records.")
@click.option("--follow", is_flag=True, help="Wait for more records at the end, until Ctrl-C.")
@click.option(
    "--segment", "segments", type=click.IntRange(min=0), multiple=True, metavar="ID", help="Only look here. Repeatable."
)
@click.option("--key", is_flag=True, help="Print the key, a tab and the value.")
@click.option("--headers", is_flag=True, help="Print the headers first: NAME=VALUE,NAME=VALUE and a tab.")
@click.option("--key-separator", metavar="CHAR", help=r"As --key, with CHAR instead of the tab.")
@json_option
@with_target
def consume(
    target: Target,
    topic: str,
    subscription: str | None,
    queue: bool,
    start: StartPoint,
    count: int | None,
    follow: bool,
    segments: tuple[int, ...],
    key: bool,
    headers: bool,
    key_separator: str | None,
    as_json: bool,
) -> int:
    """Print the records of a topic, one per line.

    The command stops at the end that the topic had at the start, or waits for more records with --follow. Without -s it
    only looks. With -s it acks printed records, so the next run continues after them. In a pipe, a record is printed
    when the reader has taken it.

    With --queue, the subscription is a queue. The command shares the messages with all other consumers, and stops when
    none is ready: messages that others have, or that wait for their time, stay.

    --json prints one object per record: key, value, timestamp, segment, offset, headers. A key or value that is no
    UTF-8 becomes keyBase64 or valueBase64. A message of a queue also has its redeliveryCount.

    \b
    Examples:
      braid consume orders --from -1h --count 10
      braid consume orders --segment 0 --from 1500 --key
      braid consume orders -s billing --follow --json | jq .value
      braid consume orders -s mailer --queue --count 10
      braid consume orders --json | braid produce orders2 --json
    """
    _check_usage(subscription, start, segments, queue=queue)
    if as_json and (key or headers or key_separator is not None):
        raise click.UsageError("--json and --key, --headers or --key-separator are two formats; choose one")
    run = _ConsumeRun(
        _format(key, headers, key_separator, as_json=as_json),
        count,
        follow=follow,
        acks=subscription is not None,
        queue=queue,
    )
    keep_freed_memory()

    def opened(client: Client) -> AbstractAsyncContextManager[Reading]:
        if subscription is None:
            return looking(client, topic, start, segments)
        assert isinstance(start, str)
        if queue:
            return queued(client, topic, subscription, start, count)
        return subscribed(client, topic, subscription, start)

    return asyncio.run(run.run(target, topic, opened))


def _check_usage(subscription: str | None, start: StartPoint, segments: Sequence[int], *, queue: bool) -> None:
    if subscription is None and queue:
        raise click.UsageError("--queue shares a subscription; name it with -s")
    if subscription is not None and not isinstance(start, str):
        raise click.UsageError(
            "with -s, --from is earliest or latest; `braid subscription seek` sets a subscription to another place"
        )
    if subscription is not None and segments:
        raise click.UsageError("--segment is for a look without -s: the consumers of a subscription share its segments")


def _format(key: bool, headers: bool, separator: str | None, *, as_json: bool) -> Format:
    if as_json:
        return json_lines
    if not key and not headers and separator is None:
        return value_lines
    between = b"\t" if separator is None else separator.encode().replace(rb"\t", b"\t")
    return column_lines(between, headers=headers, key=key or separator is not None)


class _Printed(NamedTuple):
    """Lines that the printer got and that are not acked yet."""

    begins: int
    """The position of the first line in the whole output, in bytes."""
    ends: int
    lines: list[bytes]
    ack: Ack


class _ConsumeRun:
    def __init__(self, formatted: Format, count: int | None, *, follow: bool, acks: bool, queue: bool) -> None:
        self._format = formatted
        self._acks = acks
        """Whether printed records are acked, and the command waits until that is stored."""
        self._queue = queue
        self._left = count
        self._follow = follow
        self._ends: dict[int, int] = {}
        """Without --follow: the end of each segment at the start, until it is reached."""
        self._printed: deque[_Printed] = deque()
        self._given_bytes = 0
        self._acked = False
        """Whether this run has acked anything."""
        self._signal = 0

    async def run(
        self, target: Target, topic: str, opened: Callable[[Client], AbstractAsyncContextManager[Reading]]
    ) -> int:
        """Run the command. Returns the exit code."""
        from braid.cli.terminal.stdout_writer import Printer

        try:
            printer = Printer(1)
        except OSError as error:
            raise BraidError(f"there is no output to print to: {error.strerror}") from error
        try:
            async with target.connected() as client, opened(client) as reading:
                if not self._follow:
                    self._ends = await reading.ends()
                printing = asyncio.ensure_future(self._print(reading, printer))
                await self._until_done(printing, client, printer)
        except SubscriptionKindConflict as error:
            raise SubscriptionKindConflict(
                f"{error}, or {'leave --queue out' if self._queue else 'add --queue'}"
            ) from error
        except TopicNotFound as error:
            path = TopicName.parse(topic).path
            raise TopicNotFound(f"topic {path} does not exist; create it with `braid topic create {topic}`") from error
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
        if not self._acks or (not self._acked and not self._printed):
            os._exit(self._exit_code())
        print_error("no broker answers to store what was acked: records that were printed may come again")
        os._exit(128 + self._signal if self._signal else 1)

    async def _until_done(self, printing: asyncio.Task[None], client: Client, printer: Printer) -> None:
        """Ack printed records until printing ends: by itself, by a signal, or because the reader closed the pipe."""
        stopped = asyncio.get_running_loop().create_future()
        self._stop_on_signals(stopped, client)
        try:
            while not printing.done() and not stopped.done() and not printer.closed.done():
                waiting = {printing, stopped, printer.closed}
                await asyncio.wait(
                    waiting, timeout=LOOK_S if self._printed else IDLE_S, return_when=asyncio.FIRST_COMPLETED
                )
                self._ack(printer.printed())
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
            self._ack(printer.printed(), last=True)

    async def _print(self, reading: Reading, printer: Printer) -> None:
        while self._left != 0 and (self._follow or self._ends):
            batch = await reading.receive(None if self._follow else IDLE_S, self._left)
            if batch is None:
                await reading.on_idle(self._ends)
                continue
            first = reading.leading(batch)
            lines = self._wanted(batch, first)
            if lines:
                data = b"\n".join(lines) + b"\n"
                begins, self._given_bytes = self._given_bytes, self._given_bytes + len(data)
                self._printed.append(_Printed(begins, self._given_bytes, lines, reading.acker(batch, first)))
                await printer.write(data)
        while printer.printed() < self._given_bytes:  # noqa: ASYNC110 (there is no event when a reader takes bytes)
            await asyncio.sleep(LOOK_S)

    def _wanted(self, batch: Delivered, first: int) -> list[bytes]:
        """Return the lines of a batch that are to be printed, from its record number `first` on."""
        until = len(batch)
        if not self._follow:
            end = self._ends.get(batch.segment, 0)
            until = min(until, max(end - batch.base_offset, 0))
            if batch.next_offset >= end:
                self._ends.pop(batch.segment, None)
        if self._left is not None:
            until = min(until, first + self._left)
            self._left -= max(until - first, 0)
        return self._format(batch)[first:until] if first < until else []

    def _ack(self, printed: int, *, last: bool = False) -> None:
        """Ack the records below this position of the output: whole batches, and at the end single records."""
        while self._printed and self._printed[0].ends <= printed:
            done = self._printed.popleft()
            self._acked = True
            done.ack(len(done.lines))
        if last and self._printed:
            cut = self._printed[0]
            self._acked = True
            cut.ack(whole_lines(cut.lines, printed - cut.begins))

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
