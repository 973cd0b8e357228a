"""Brokers that a benchmark starts: `braid serve` processes on free ports, in a folder that is deleted with them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final

import click

from braid.cli.extras import require_server

START_TIMEOUT_S: Final = 30.0
STOP_TIMEOUT_S: Final = 30.0
_URL: Final = re.compile(r"braid://[^\s,]*:[1-9]\d*")


class OwnBroker:
    """A broker process. `start` waits until the broker has printed its address."""

    def __init__(self, folder: str, listen: str = "127.0.0.1:0", options: Sequence[str] = ()) -> None:
        self.folder: Final = folder
        self._options = options
        self._listen = listen
        self._process: subprocess.Popen[str]
        self.url = ""

    def start(self) -> None:
        """Start the broker, or start it again after `kill` at the same address."""
        require_server("braid bench without --url starts a broker, which")
        command = [sys.executable, "-m", "braid.cli.main", "serve", "--data", self.folder]
        command += ["--listen", self._listen, "--admin", "127.0.0.1:0", *self._options]
        # Settings of brokers in the environment are meant for other brokers.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("BRAID_")}
        with open(f"{self.folder}.log", "a", encoding="utf-8") as log:
            self._process = subprocess.Popen(  # noqa: S603 (our own command)
                command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True
            )
        try:
            if self._found_url():
                return
        except BaseException:
            self.kill()
            raise
        self._process.wait(START_TIMEOUT_S)
        with open(f"{self.folder}.log", encoding="utf-8") as log:
            said = log.read().strip().splitlines()[-1:] or ["nothing"]
        raise click.ClickException(f"the benchmark's own broker did not start; it said: {said[0]}")

    def _found_url(self) -> bool:
        """Wait until the broker says where it listens. False if it ends without a word."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if (found := _URL.search(line)) is not None:
                self.url = found[0]
                self._listen = self.url.removeprefix("braid://")
                return True
        return False

    @property
    def pid(self) -> int:
        return self._process.pid

    def end(self) -> None:
        """Kill the broker if it runs: its files are not needed any more."""
        if self.url and self._process.poll() is None:
            self.kill()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def stop(self) -> None:
        """Stop the broker in order. Kill it if this takes too long."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def own_broker() -> Iterator[OwnBroker]:
    """Run a broker in a temporary folder."""
    folder = tempfile.mkdtemp(prefix="braid-bench-")
    broker = OwnBroker(f"{folder}/data")
    try:
        broker.start()
        try:
            yield broker
        finally:
            broker.stop()
    finally:
        shutil.rmtree(folder)


class OwnCluster:
    """Brokers broker-1, broker-2 … that share metadata and, with `shared`, storage."""

    def __init__(self, folder: str, count: int, *, shared: bool) -> None:
        storage = f"file://{folder}/history" if shared else "local"
        self.brokers: Final = {
            name: OwnBroker(
                f"{folder}/{name}",
                options=("--id", name, "--metadata", f"sqlite:{folder}/metadata.db", "--storage", storage),
            )
            for name in (f"broker-{number}" for number in range(1, count + 1))
        }

    @property
    def url(self) -> str:
        """The URL of all brokers that were started."""
        return self.url_without()

    def url_without(self, *names: str) -> str:
        started = [broker.url for name, broker in self.brokers.items() if broker.url and name not in names]
        return "braid://" + ",".join(url.removeprefix("braid://") for url in started)


@contextmanager
def own_cluster(count: int, *, shared: bool, start: int | None = None) -> Iterator[OwnCluster]:
    """Make a cluster in a temporary folder, and start its first `start` brokers."""
    folder = tempfile.mkdtemp(prefix="braid-bench-")
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        cluster = OwnCluster(folder, count, shared=shared)
        for broker in list(cluster.brokers.values())[:start]:
            broker.start()
        for broker in cluster.brokers.values():
            stack.callback(broker.end)
        yield cluster
