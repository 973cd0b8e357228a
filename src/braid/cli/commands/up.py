"""`braid up`: runs a cluster on this machine, each broker in its own process.

    DATA/metadata.db    the metadata that all share: one SQLite file
    DATA/broker-i/      the files of each broker

`braid up` prints the logs of all brokers, each line after its broker's name. Ctrl-C or SIGTERM stops all brokers in
order; a second signal kills them.

A broker that ends by itself is started again on the same ports, and the other brokers keep running. `braid up` says
both. A broker that ends again and again is started after pauses that double, up to half a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, Final

import click
import msgspec

from braid.cli.extras import require_console, require_server
from braid.cli.terminal.output import Column, json_option, paint, print_json, print_table
from braid.model.errors import InvalidConfig
from braid.wire.address import format_url, parse_url

MAX_BROKERS: Final = 64
LINE_BYTES: Final = 1 << 20
"""Longer log lines are left out."""
FIRST_PAUSE_S: Final = 0.5
MAX_PAUSE_S: Final = 30.0
STEADY_S: Final = 60.0
"""A broker that ran for so long and then ended is started again after the shortest pause."""
METADATA: Final = "metadata.db"
MARK: Final = "braid.json"
"""As in broker/data_folder.py: what the folder of each broker has."""
_PR_SET_PDEATHSIG: Final = 1
_COLOURS: Final = ("36", "35", "33", "32", "34", "31")


@click.command()
@click.option("--brokers", type=click.IntRange(1, MAX_BROKERS), default=3, metavar="N", help="How many. [default: 3]")
@click.option("--data", default="./braid-data", show_default=True, metavar="DIR", help="Broker i uses DIR/broker-i.")
@click.option(
    "--port",
    type=click.IntRange(0, 65_535),
    default=6660,
    metavar="PORT",
    help="Broker i listens on PORT + i. [default: 6660]",
)
@click.option(
    "--admin-port",
    type=click.IntRange(0, 65_535),
    default=8660,
    metavar="PORT",
    help="Broker i: PORT + i. [default: 8660]",
)
@click.option(
    "--storage",
    default="local",
    show_default=True,
    metavar="URL",
    help="Where history goes: local (each broker's folder), file:///PATH or s3://BUCKET/PREFIX.",
)
@click.option("--console", "with_console", is_flag=True, help="Show the cluster in the browser, too.")
@click.option(
    "--console-port",
    type=click.IntRange(0, 65_535),
    default=8670,
    metavar="PORT",
    help="Where browsers connect. [default: 8670]",
)
@json_option
def up(
    brokers: int,
    data: str,
    port: int,
    admin_port: int,
    storage: str,
    with_console: bool,
    console_port: int,
    as_json: bool,
) -> int:
    """Run a cluster of brokers on this machine, until Ctrl-C.

    Broker i, from 0 on, is called broker-i and listens on PORT + i and ADMIN_PORT + i; with port 0, on free ports. The
    brokers share their topics: any broker takes any request. You can use the folder again with as many brokers, or
    more.

    With --console, a web console runs beside the brokers, in a process of its own.

    \b
    Examples:
      braid up
      braid up --console
      braid up --brokers 5 --data /tmp/braid --storage file:///tmp/braid/history
    """
    require_server("braid up")
    if with_console:
        require_console("braid up --console")
    for name, first in ("--port", port), ("--admin-port", admin_port):
        if first and first + brokers - 1 > 65_535:
            raise click.BadParameter(f"{first} + {brokers - 1} is above 65535", param_hint=f"'{name}'")
    try:
        os.makedirs(data, exist_ok=True)
    except OSError as error:
        raise InvalidConfig(f"the folder {data} cannot be made: {error.strerror}") from error
    _check_folder(data)
    members = [_Member(number, data, port, admin_port, storage) for number in range(brokers)]
    console = _ConsoleMember(console_port) if with_console else None
    return asyncio.run(_run(members, console, as_json=as_json))


def _check_folder(data: str) -> None:
    """Refuse the folder of a single broker: its topics belong to a broker that would not be there.

    Refuse the folder of an older version, too, in which each broker had its own metadata and topics: in one cluster,
    two topics may not have the same name."""
    if os.path.exists(os.path.join(data, MARK)):
        raise InvalidConfig(
            f"{data} belongs to a single broker of `braid serve`: give `braid up` another folder with --data"
        )
    if os.path.exists(os.path.join(data, METADATA)):
        return
    for name in sorted(os.listdir(data)):
        folder = os.path.join(data, name)
        if name.startswith("broker-") and os.path.exists(os.path.join(folder, METADATA)):
            raise InvalidConfig(
                f"{folder} belongs to a broker with metadata of its own, from before brokers shared their topics: give "
                f"`braid up` another folder with --data, and run that broker with `braid serve --id {name} "
                f"--data {folder}`"
            )


class _Member:
    """One broker's process."""

    def __init__(self, number: int, data: str, port: int, admin_port: int, storage: str) -> None:
        self.id = f"broker-{number}"
        self.ready: dict[str, Any] = {}
        """The line that the broker prints when it is ready."""
        self._prefix = paint(f"{self.id} | ", _COLOURS[number % len(_COLOURS)], sys.stderr)
        self._command = [
            *(sys.executable, "-m", "braid.cli.main", "serve", "--json"),
            *("--id", self.id),
            *("--data", os.path.join(data, self.id)),
            *("--metadata", f"sqlite:{os.path.join(data, METADATA)}"),
            *("--storage", storage),
        ]
        self._listen = f"127.0.0.1:{port + number if port else 0}"
        self._admin = f"127.0.0.1:{admin_port + number if admin_port else 0}"
        self._process: asyncio.subprocess.Process

    async def start(self) -> None:
        """Start the broker and wait until it is ready. Raises if it ends before."""
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            *self._addresses(),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=LINE_BYTES,
            start_new_session=True,  # Ctrl-C reaches only `braid up`, which stops the broker in order.
            preexec_fn=_die_with_parent,
        )
        self._logs = asyncio.get_running_loop().create_task(self._show_logs(), name=f"logs of {self.id}")
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            await self._process.wait()
            raise InvalidConfig(f"{self.id} did not start; its last lines say why")
        self.ready = msgspec.json.decode(line)
        self._remember_addresses()

    def _addresses(self) -> list[str]:
        return ["--listen", self._listen, "--admin", self._admin]

    def _remember_addresses(self) -> None:
        """Let the next start take the same ports, also where any free port was asked for: clients know them."""
        self._listen = self.ready["url"].removeprefix("braid://")
        self._admin = self.ready["adminUrl"].removeprefix("http://")

    async def keep(self, stop: asyncio.Future[None]) -> None:
        """Start the broker again whenever it has ended, until `stop` is done."""
        loop = asyncio.get_running_loop()
        pause_s = 0.0
        while not stop.done():
            began = loop.time()
            code = await self.ended()
            if stop.done():
                return
            pause_s = next_pause(pause_s, loop.time() - began)
            self._say(f"{self.id} {how_it_ended(code)}; it starts again in {pause_s:g} s")
            await asyncio.wait([stop], timeout=pause_s)
            if stop.done():
                return
            with contextlib.suppress(InvalidConfig):  # It ended before it was ready, and its last lines say why.
                await self.start()
                self._say(f"{self.id} is ready again")

    def _say(self, text: str) -> None:
        click.echo(f"{paint('braid:', '1', sys.stderr)} {text}", err=True)

    async def ended(self) -> int:
        """Wait until the broker has ended and its log is printed. Returns its exit code."""
        code = await self._process.wait()
        await self._logs
        return code

    def signal(self, number: int) -> None:
        if hasattr(self, "_process"):
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    @property
    def running(self) -> bool:
        return hasattr(self, "_process") and self._process.returncode is None

    async def _show_logs(self) -> None:
        assert self._process.stderr is not None
        while True:
            try:
                line = await self._process.stderr.readline()
            except ValueError:  # The line is too long. Keep reading: a broker whose log is not read stands still.
                continue
            if not line:
                return
            sys.stderr.write(self._prefix + line.decode(errors="replace").rstrip("\n") + "\n")
            sys.stderr.flush()


class _ConsoleMember(_Member):
    """The console's process. It is kept as brokers are."""

    def __init__(self, port: int) -> None:
        self.id = "console"
        self.ready = {}
        self._prefix = paint("console | ", "37", sys.stderr)
        self._listen = f"127.0.0.1:{port}"
        self._admin = ""

    def watch(self, members: Sequence[_Member]) -> None:
        """Show these brokers, which are ready."""
        admin_urls = ",".join(member.ready["adminUrl"] for member in members)
        self._command = [
            *(sys.executable, "-m", "braid.cli.main", "console", "--json"),
            *("--admin-url", admin_urls, "--url", _url([member.ready for member in members])),
        ]

    def _addresses(self) -> list[str]:
        return ["--listen", self._listen]

    def _remember_addresses(self) -> None:
        self._listen = self.ready["url"].removeprefix("http://")


async def _run(brokers: Sequence[_Member], console: _ConsoleMember | None, *, as_json: bool) -> int:
    members = [*brokers, *([console] if console is not None else [])]
    loop = asyncio.get_running_loop()
    stop: asyncio.Future[None] = loop.create_future()

    def interrupt() -> None:
        if stop.done():
            for member in members:
                member.signal(signal.SIGKILL)
        else:
            stop.set_result(None)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        starting = loop.create_task(_start(brokers, console), name="start the cluster")
        waiting: list[asyncio.Future[Any]] = [starting, stop]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if stop.done():
            starting.cancel()
            await asyncio.wait([starting])
            return 0
        starting.result()
        _announce(brokers, console, as_json=as_json)
        keepers = [loop.create_task(member.keep(stop), name=f"keep {member.id}") for member in members]
        await stop
        await _stop(members)
        await asyncio.wait(keepers)  # A broker may have been started while the others stopped.
        return 0
    finally:
        await _stop(members)


async def _start(brokers: Sequence[_Member], console: _ConsoleMember | None) -> None:
    await asyncio.gather(*(member.start() for member in brokers))
    if console is not None:
        console.watch(brokers)
        await console.start()


def next_pause(last_s: float, lived_s: float) -> float:
    """Return how long to wait before a broker is started again, after it lived for `lived_s`. The first time, `last_s`
    is 0."""
    if not last_s or lived_s >= STEADY_S:
        return FIRST_PAUSE_S
    return min(2 * last_s, MAX_PAUSE_S)


def how_it_ended(code: int) -> str:
    """Say how a process ended, by the exit code that asyncio reports."""
    if code >= 0:
        return f"has ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


async def _stop(members: Sequence[_Member]) -> None:
    running = [member for member in members if member.running]
    for member in running:
        member.signal(signal.SIGTERM)
    await asyncio.gather(*(member.ended() for member in running))


def _announce(brokers: Sequence[_Member], console: _Member | None, *, as_json: bool) -> None:
    ready = [member.ready for member in brokers]
    if as_json:
        print_json(ready if console is None else [*ready, {"console": console.ready["url"]}])
        return
    rows = [(each["id"], each["url"], each["adminUrl"]) for each in ready]
    print_table([Column("BROKER"), Column("CLIENTS"), Column("ADMIN")], rows, empty="")
    click.echo("Any broker takes any request. Name several, so that one may be down:")
    click.echo(f"  export BRAID_URL={_url(ready)}")
    if console is not None:
        click.echo(f"The console is at {console.ready['url']}")
    click.echo("Ctrl-C stops them.")
    sys.stdout.flush()


def _url(ready: Sequence[dict[str, Any]]) -> str:
    return format_url([address for each in ready for address in parse_url(each["url"])])


def _die_with_parent() -> None:
    """Ask the kernel, in the new process, for a SIGTERM when `braid up` ends, even if it is killed."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
