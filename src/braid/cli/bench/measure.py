"""Runs the worker processes of one measurement, and returns their results."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Protocol

import click
import msgspec

from braid.cli.bench.workload import (
    DEFAULT_TASKS,
    Consume,
    Done,
    Failed,
    Form,
    LatencyReceive,
    LatencySend,
    Mode,
    ProgressReport,
    Publish,
    Ready,
    Told,
    Work,
)
from braid.cli.target import Target, ask
from braid.model.topic import Durability

DEFAULT_BATCH_BYTES: Final = 256 << 10
WARM_UP_S: Final = 0.5
"""The start of a latency measurement. Records that are sent in this time do not count."""
SUBSCRIPTION: Final = "bench"
WORKER: Final = "braid.cli.bench.worker"
"""The module that a worker process runs. Another module may do the same work with another broker's client."""


class Observer(Protocol):
    """Follows a measurement."""

    def on_ready(self) -> None:
        """Called when the measured worker has connected and warmed up."""

    def on_progress(self, records: int) -> None: ...


class WorkerProcess:
    def __init__(self, work: Work, observer: Observer | None = None, module: str = WORKER) -> None:
        self._observer = observer
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(  # noqa: S603 (our own command)
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(work))
        self._process.stdin.close()

    def wait_ready(self) -> None:
        self._wait_for(Ready)

    def wait_done(self) -> Done:
        done = self._wait_for(Done)
        assert isinstance(done, Done)
        self._process.wait()
        return done

    def stop(self) -> None:
        """Ask a worker that would run for ever to finish."""
        self._process.terminate()

    def end(self) -> None:
        """End the worker immediately."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _wait_for(self, kind: type[Told]) -> Told:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told: Told = msgspec.json.decode(line, type=Told)
            if isinstance(told, kind):
                return told
            match told:
                case Ready() if self._observer is not None:
                    self._observer.on_ready()
                case ProgressReport(records) if self._observer is not None:
                    self._observer.on_progress(records)
                case Failed(message):
                    raise click.ClickException(message)
        raise click.ClickException(f"a worker process of the benchmark ended with exit code {self._process.wait()}")


@contextmanager
def worker(work: Work, observer: Observer | None = None, module: str = WORKER) -> Iterator[WorkerProcess]:
    process = WorkerProcess(work, observer, module)
    try:
        yield process
    finally:
        process.end()


def run_worker(work: Work, observer: Observer | None = None, module: str = WORKER) -> Done:
    with worker(work, observer, module) as process:
        return process.wait_done()


@contextmanager
def fresh_topic(target: Target, durability: Durability = Durability.FSYNC) -> Iterator[str]:
    """Create a topic of one segment, and delete it at the end of the block."""
    topic = f"bench-{random.SystemRandom().getrandbits(48):012x}"
    ask(target, lambda client: client.admin.create_topic(topic, segments=1, durability=durability.value))
    try:
        yield topic
    finally:
        ask(target, lambda client: client.admin.delete_topic(topic, force=True))


def measure_publish(
    target: Target,
    topic: str,
    *,
    mode: Mode,
    records: int,
    size: int,
    batch_bytes: int = DEFAULT_BATCH_BYTES,
    tasks: int | None = None,
    warm_up: bool = True,
    observer: Observer | None = None,
    module: str = WORKER,
) -> Done:
    work = Publish(
        target=target,
        topic=topic,
        mode=mode,
        records=records,
        size=size,
        batch_bytes=batch_bytes,
        tasks=tasks or DEFAULT_TASKS[mode],
        warm_up=warm_up,
    )
    return run_worker(work, observer, module)


def fill(target: Target, topic: str, records: int, size: int, batch_bytes: int = DEFAULT_BATCH_BYTES) -> Done:
    """Publish exactly this many records to the topic."""
    return measure_publish(
        target, topic, mode=Mode.SEND_MANY, records=records, size=size, batch_bytes=batch_bytes, warm_up=False
    )


def measure_consume(
    target: Target,
    topic: str,
    *,
    records: int,
    form: Form,
    subscription: str = SUBSCRIPTION,
    observer: Observer | None = None,
) -> Done:
    """Consume the topic from its beginning, by a new subscription."""
    work = Consume(target=target, topic=topic, subscription=subscription, records=records, form=form)
    return run_worker(work, observer)


def measure_latency(
    target: Target,
    topic: str,
    *,
    rate: float,
    duration_s: float,
    size: int,
    observer: Observer | None = None,
    module: str = WORKER,
) -> Done:
    """Measure from the time at which each record was due until the consumer has it."""
    duration_s += WARM_UP_S
    receive = LatencyReceive(
        target=target,
        topic=topic,
        subscription=SUBSCRIPTION,
        records=int(rate * duration_s),
        warm_up_records=int(rate * WARM_UP_S),
    )
    send = LatencySend(target=target, topic=topic, rate=rate, duration_s=duration_s, size=size)
    with worker(receive, module=module) as receiver:
        receiver.wait_ready()
        run_worker(send, observer, module)
        return receiver.wait_done()
