"""`braid serve`: runs one broker until a signal stops it.

The first SIGTERM or SIGINT stops the broker in order: it takes no new records, confirms those that it took, and stores
the cursors. A second signal ends the process immediately. This also loses nothing that was confirmed, but the next
start must recover. A broker that has broken stops by itself with exit code 1, so that a supervisor can start it again.
SIGHUP reloads what can change while the broker runs (cli/reload.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import math
import os
import signal
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click
import msgspec

from braid.admin.logs import LEVELS, configure_logging
from braid.cli.extras import require_server
from braid.cli.terminal.output import json_option, paint
from braid.cli.terminal.param_types import DURATION
from braid.model.errors import BraidError, InvalidConfig

if TYPE_CHECKING:
    from braid.admin.server import AdminServer
    from braid.broker.broker import Broker
    from braid.broker.config import BrokerConfig

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread may keep the interpreter while another wants it; Python's default is 5 ms. The logs write and sync
in threads, and the loop waits for them: measured, the default makes the 99th percentile of a publish 1.43 ms instead of
0.75 ms."""

GC_THRESHOLDS: Final = (10_000, 10, 10)
"""Allocations before the young generation is collected, and such collections before the older ones are. Batches and
requests form no cycles, so collecting finds next to nothing; Python's default (700) would look for it 14 times as
often, and each time stop every client. Not higher: an error's cycle can keep a batch's memory until then."""

_log: Final = logging.getLogger(__name__)


@click.command()
@click.option("--config", "file", envvar="BRAID_CONFIG", metavar="FILE", help="TOML; options win over it.")
@click.option("--id", "id_", envvar="BRAID_ID", metavar="NAME", help="Unique in the cluster. [default: broker-1]")
@click.option("--data", envvar="BRAID_DATA", metavar="DIR", help="Where its files are. [default: ./braid-data]")
@click.option("--listen", envvar="BRAID_LISTEN", metavar="HOST:PORT", help="For clients. [default: 127.0.0.1:6660]")
@click.option(
    "--advertise", envvar="BRAID_ADVERTISE", metavar="HOST:PORT", help="What clients connect to. [default: --listen]"
)
@click.option(
    "--admin", envvar="BRAID_ADMIN", metavar="HOST:PORT", help="REST, metrics, health. [default: 127.0.0.1:8660]"
)
@click.option(
    "--metadata",
    envvar="BRAID_METADATA",
    metavar="URL",
    help="sqlite:PATH or etcd://HOST:PORT,…  [default: a file in the data folder]",
)
@click.option(
    "--storage",
    envvar="BRAID_STORAGE",
    metavar="URL",
    help="Where history goes: local, file:///PATH or s3://BUCKET/PREFIX. [default: local]",
)
@click.option(
    "--balance", envvar="BRAID_BALANCE", is_flag=True, default=None, help="Move segments by itself to even the load."
)
@click.option("--rack", envvar="BRAID_RACK", metavar="NAME", help="Replicas of a segment go to different racks.")
@click.option(
    "--replace-after",
    envvar="BRAID_REPLACE_AFTER",
    type=DURATION,
    metavar="TIME",
    help="How long a broker is gone before others get its replicas. [default: 10m]",
)
@click.option(
    "--log-level",
    envvar="BRAID_LOG_LEVEL",
    type=click.Choice(LEVELS),
    help="[default: info]",
)
@click.option(
    "--log-format", envvar="BRAID_LOG_FORMAT", type=click.Choice(["text", "json"]), default="text", show_default=True
)
@json_option
def serve(
    file: str | None,
    id_: str | None,
    data: str | None,
    listen: str | None,
    advertise: str | None,
    admin: str | None,
    metadata: str | None,
    storage: str | None,
    balance: bool | None,
    rack: str | None,
    replace_after: int | None,
    log_level: str | None,
    log_format: str,
    as_json: bool,
) -> int:
    """Run a broker. No option is needed: one broker, its data in ./braid-data.

    It prints its addresses on stdout when it is ready (one line of JSON with --json) and logs to stderr. Ctrl-C or
    SIGTERM stops it in order. SIGHUP makes it read its file again, for the log level, keys, grants and certificates.
    Each option also has an environment variable: BRAID_ID, BRAID_DATA, BRAID_LISTEN, BRAID_ADVERTISE, BRAID_ADMIN,
    BRAID_METADATA, BRAID_STORAGE, BRAID_BALANCE, BRAID_RACK, BRAID_REPLACE_AFTER, BRAID_CONFIG, BRAID_LOG_LEVEL,
    BRAID_LOG_FORMAT.

    \b
    Examples:
      braid serve
      braid serve --data /var/lib/braid --listen 0.0.0.0:6660
      braid serve --config broker.toml
    """
    require_server("braid serve")
    from braid.cli.config import load_config

    settings = {"id": id_, "data": data, "listen": listen, "advertise": advertise, "admin": admin}
    settings |= {"metadata": metadata, "storage": storage, "log_level": log_level, "rack": rack}

    def read() -> BrokerConfig:
        return load_config(file, {**settings, "balance": balance, "replace_after_s": replace_after})

    config = read()
    _check_folder(config)
    configure_logging(config.log_level, log_format)
    tune_process()
    return asyncio.run(_serve(config, read, as_json=as_json))


def _check_folder(config: BrokerConfig) -> None:
    """Refuse the folder of `braid up` to a broker that would find its metadata there: the topics belong to the brokers
    of that cluster."""
    of_up = (os.path.join(config.data, name) for name in ("metadata.db", "broker-0/braid.json"))
    own = os.path.join(config.data, "braid.json")
    if not config.metadata and all(map(os.path.exists, of_up)) and not os.path.exists(own):
        raise InvalidConfig(
            f"{config.data} belongs to the brokers of `braid up`: give `braid serve` another folder with --data"
        )


def tune_process() -> None:
    from braid.ports.allocator import keep_freed_memory

    keep_freed_memory()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def within_open_files(config: BrokerConfig) -> BrokerConfig:
    """Raise the process's limit of open files. Where it stays too low, lower that of connections: a broker that has no
    file left for its logs is worse than one that refuses clients."""
    from braid.ports.open_files import connections_within, raise_open_files

    files, wanted = raise_open_files(), config.limits.max_connections
    if wanted <= (most := connections_within(files)):
        return config
    _log.warning(
        "max_connections is %d instead of %d: this process may open only %d files; raise its hard limit (ulimit -Hn)",
        most,
        wanted,
        files,
    )
    return msgspec.structs.replace(config, limits=msgspec.structs.replace(config.limits, max_connections=most))


async def _serve(config: BrokerConfig, read: Callable[[], BrokerConfig], *, as_json: bool) -> int:
    from braid.cli.reload import Reload

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_LoopErrors())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, stop, number)
    loop.add_signal_handler(signal.SIGHUP, _log.warning, "SIGHUP: the broker is starting, and reads its files anyway")
    opening = loop.create_task(_open(within_open_files(config)), name="open broker")
    stopping = loop.create_task(stop.wait(), name="wait for a signal")
    try:
        await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()  # a signal came while the broker was still starting
            with contextlib.suppress(asyncio.CancelledError, BraidError):
                await opening
            return 0
        broker, admin = opening.result()
        loop.add_signal_handler(signal.SIGHUP, Reload(read, config, broker, admin))
        # Some 35,000 objects of imported code live as long as the broker. Collecting them takes 15 to 30 ms in
        # which no client gets an answer. Frozen objects are not collected again.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)
        _announce(broker, admin, as_json=as_json)
        return await serve_until(stopping, broker, admin)
    finally:
        stopping.cancel()


async def serve_until(stopping: asyncio.Future[Any], broker: Broker, admin: AdminServer) -> int:
    """Wait for the signal, or until the broker breaks, and stop both. Returns the exit code."""
    waiting: list[asyncio.Future[Any]] = [stopping, broker.failed]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    failed = broker.failed.done()
    try:
        await broker.close()
    except Exception:
        if not failed:
            raise
        _log.exception("broker %s, which had broken, could not be closed in order", broker.id)
    finally:
        await admin.close()  # Last: until the broker has stopped, the port answers that it is not ready.
    return 1 if failed else 0


class _LoopErrors:
    """Logs that no file is left for new connections, in one line a second: asyncio, which tries again after a second,
    would show a traceback for each connection that waits. Other errors are logged as asyncio does it."""

    def __init__(self) -> None:
        self._told_at = -math.inf

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not isinstance(error, OSError) or error.errno not in (errno.EMFILE, errno.ENFILE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._told_at + 1.0:
            self._told_at = loop.time()
            _log.error("no file is left for new connections: %s", os.strerror(error.errno))


def _on_signal(stop: asyncio.Event, number: signal.Signals) -> None:
    if stop.is_set():
        os._exit(128 + number)
    stop.set()


async def _open(config: BrokerConfig) -> tuple[Broker, AdminServer]:
    from braid.admin.port import AdminPort
    from braid.admin.server import AdminServer
    from braid.broker.broker import Broker
    from braid.broker.connections.tls import server_tls
    from braid.wire.address import parse_address

    admin_tls = server_tls(config.admin_tls) if config.admin_tls is not None else None
    port = AdminPort.take(parse_address(config.admin))
    try:
        broker = await Broker.open(msgspec.structs.replace(config, admin=str(port.address)))
    except BaseException:
        port.close()
        raise
    return broker, AdminServer(broker, port, admin_tls, on_load=gc.freeze)


def _announce(broker: Broker, admin: AdminServer, *, as_json: bool) -> None:
    from braid.wire.address import format_address, format_url

    config = broker.config
    url = format_url([broker.address])
    scheme = "https" if config.admin_tls is not None else "http"
    admin_url = f"{scheme}://{format_address(admin.address)}"
    data = os.path.abspath(config.data)
    if as_json:
        ready = {"id": broker.id, "url": url, "adminUrl": admin_url, "data": data, "pid": os.getpid()}
        click.echo(msgspec.json.encode(ready))
    else:
        click.echo(f"{paint('Braid broker', '1')} {paint(broker.id, '1;36')} {paint('is ready.', '1')}")
        told = broker.front_door.topology.own_address
        listening = "" if told == str(broker.address) else f" (it listens on {broker.address})"
        click.echo(f"  clients  {paint(f'braid://{told}', '4')}{listening}")
        click.echo(f"  admin    {paint(admin_url, '4')}")
        click.echo(f"  data     {data}")
    sys.stdout.flush()
