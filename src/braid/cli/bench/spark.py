"""`braid bench spark`: measures how Spark reads and writes a topic, beside Parquet and memory.

The benchmark starts a broker, which exports a topic to a folder. The broker stays: Spark reads the tail from it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from braid.cli.bench.machine import machine_facts, machine_text
from braid.cli.target import Target
from braid.cli.terminal.output import Column, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnBroker

EXPORT_TIMEOUT_S: Final = 300.0
LOOK_S: Final = 0.2
BATCH_BYTES: Final = 1 << 20
AUDITED: Final = (1, 2, 4)
"""Multiples of the smallest audited topic."""
SMALL_BATCHES: Final = 7
"""Micro-batches of one record in each round; the median of all rounds counts."""
PARTS: Final = ("read", "stream", "write", "audit")


@click.command()
@click.option("--records", type=click.IntRange(min=1_000), default=10_000_000, show_default=True, metavar="N")
@click.option("--size", "value_bytes", type=SIZE, default=100, show_default=True, help="Bytes of a value.")
@click.option("--master", default="local[2]", show_default=True, help="Where Spark runs.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Rounds; the median counts.")
@click.option(
    "--audit-bytes",
    type=SIZE,
    default="2560MiB",
    show_default=True,
    help="The size of the smallest audited topic; the others are two and four times as large.",
)
@click.option(
    "--part",
    "parts",
    type=click.Choice(PARTS),
    multiple=True,
    default=PARTS,
    show_default=True,
    help="What to measure; may be repeated.",
)
@json_option
def spark(
    records: int, value_bytes: int, master: str, rounds: int, audit_bytes: int, parts: tuple[str, ...], as_json: bool
) -> None:
    """Read, stream, write and audit a topic with Spark.

    \b
    braid bench spark
    braid bench spark --records 1000000 --part read --part write
    """
    from braid.spark.session import build_session, end_session

    with status_line("spark") as show, own_spark_broker() as (broker, folder):
        show("starting Spark")
        with open(f"{folder}/spark.log", "wb") as log:
            session = build_session(master, "braid bench", {"spark.local.dir": folder}, log=log)
            try:
                measured = Bench(broker, folder, records, value_bytes, rounds, show).run(session, parts, audit_bytes)
            finally:
                end_session(session)
    if as_json:
        print_json({"bench": "spark", "master": master, "machine": machine_facts(), "results": measured})
        return
    print_table(
        [Column(f"spark, {records:,} records of {value_bytes} B, {master}"), Column("", right=True), Column("")],
        [text for part in parts for text in _TEXT[part](measured[part])],
        empty="nothing was measured",
    )
    click.echo(f"\n{machine_text('its own broker')}")


class Bench:
    def __init__(
        self,
        broker: OwnBroker,
        folder: str,
        records: int,
        value_bytes: int,
        rounds: int,
        show: Callable[[str], None],
    ) -> None:
        self._target = Target(url=broker.url)
        self._folder = folder
        self._records = records
        self._value_bytes = value_bytes
        self._rounds = rounds
        self._show = show

    def run(self, session: Any, parts: tuple[str, ...], audit_bytes: int) -> dict[str, Any]:
        measured: dict[str, Any] = {}
        if "read" in parts or "stream" in parts:
            with self._filled("history", self._records) as options:
                if "read" in parts:
                    measured["read"] = self._read(session, options)
                if "stream" in parts:
                    measured["stream"] = self._stream(session, options)
        if "write" in parts:
            measured["write"] = self._write(session)
        if "audit" in parts:
            measured["audit"] = self._audit(session, audit_bytes)
        return measured

    def _read(self, session: Any, options: dict[str, str]) -> dict[str, Any]:
        from braid.spark import benchmark

        self._show("writing the same rows as Parquet")
        benchmark.write_parquet(session, options, f"{self._folder}/parquet")
        self._show("reading")
        parquet, memory = benchmark.measure_read(
            session,
            options,
            f"{self._folder}/parquet",
            records=self._records,
            value_bytes=self._value_bytes,
            rounds=self._rounds,
        )
        shutil.rmtree(f"{self._folder}/parquet")
        return {"parquet": parquet, "memory": memory}

    def _stream(self, session: Any, options: dict[str, str]) -> Any:
        from braid.spark import benchmark

        self._show("streaming")
        small = SMALL_BATCHES * self._rounds
        return benchmark.measure_stream(session, options, f"{self._folder}/stream", small_batches=small)

    def _write(self, session: Any) -> Any:
        from braid.cli.bench.measure import fresh_topic
        from braid.spark import benchmark

        self._show("writing")
        with fresh_topic(self._target) as topic:
            return benchmark.measure_write(
                session,
                {"url": self._target.url, "topic": topic},
                records=max(1, self._records // 2),
                value_bytes=self._value_bytes,
                rounds=self._rounds,
            )

    def _audit(self, session: Any, smallest_bytes: int) -> list[dict[str, float]]:
        from braid.spark.jobs.audit.job import audit_topic

        rows = []
        for times in AUDITED:
            records = max(1_000, smallest_bytes * times // self._value_bytes)
            with self._filled(f"history of {times} times the size", records) as options:
                self._show(f"auditing {times} times the size")
                if times == 1:
                    audit_topic(session, options)  # Warms up.
                began = time.perf_counter()
                report = audit_topic(session, options)
                seconds = time.perf_counter() - began
                if not report.ok or report.records != records:
                    raise click.ClickException(f"the audit of a sound topic of {records} records said {report}")
                rows.append({"times": times, "records": records, "bytes": report.bytes, "seconds": seconds})
        return rows

    @contextlib.contextmanager
    def _filled(self, what: str, records: int) -> Iterator[dict[str, str]]:
        """Make a topic of this many records, and export all but its last file."""
        from braid.cli.bench.measure import fill, fresh_topic
        from braid.scan.snapshot import take_snapshot
        from braid.spark.source.options import SourceOptions

        with fresh_topic(self._target) as topic:
            self._show(f"publishing {what}")
            fill(self._target, topic, records, self._value_bytes, BATCH_BYTES)
            options = {"url": self._target.url, "topic": topic}
            self._show(f"waiting for the export of {what}")
            deadline = time.monotonic() + EXPORT_TIMEOUT_S
            left_records = 0.1 * records + (64 << 20) / self._value_bytes
            while True:
                (segment,) = take_snapshot(SourceOptions.parse(options)).segments.values()
                if segment.end - (segment.chunks[-1].next_offset if segment.chunks else 0) <= left_records:
                    break
                if time.monotonic() > deadline:
                    raise click.ClickException(f"the broker did not export {what} within {EXPORT_TIMEOUT_S:.0f} s")
                time.sleep(LOOK_S)
            yield options


@contextlib.contextmanager
def own_spark_broker() -> Iterator[tuple[OwnBroker, str]]:
    """Run a broker that exports. Yields the broker and the temporary folder of all its files."""
    from braid.cli.bench.broker import OwnBroker

    folder = tempfile.mkdtemp(prefix="braid-bench-")
    broker = OwnBroker(f"{folder}/data", options=("--storage", f"file://{folder}/history"))
    try:
        broker.start()
        try:
            yield broker, folder
        finally:
            broker.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


Cells = tuple[str, str, str]


def _read_text(measured: Any) -> list[Cells]:
    braid = measured["parquet"]
    return [
        ("read into an aggregate", f"{braid.rate / 1e6:.2f} M records/s", f"{braid.seconds:.2f} s"),
        ("  against Parquet", f"{braid.ratio:.2f} x its time", f"{braid.against_s:.2f} s"),
        ("  against memory", f"{measured['memory'].ratio:.2f} x its time", f"{measured['memory'].against_s:.2f} s"),
    ]


def _stream_text(measured: Any) -> list[Cells]:
    return [
        ("stream", f"{measured.rate / 1e6:.2f} M records/s", f"first micro-batch {measured.first_batch_s:.1f} s"),
        ("  a micro-batch of one record", f"{measured.small_batch_ms:.0f} ms", "median"),
    ]


def _write_text(measured: Any) -> list[Cells]:
    return [
        ("write", f"{measured.rate / 1e6:.2f} M records/s", f"{measured.seconds:.2f} s"),
        ("  against throwing the rows away", f"{measured.ratio:.1f} x its time", f"{measured.against_s:.2f} s"),
    ]


def _audit_text(measured: list[dict[str, float]]) -> list[Cells]:
    first = measured[0]
    return [
        (
            f"audit of {row['bytes'] / 2**30:.2f} GiB",
            f"{row['bytes'] / row['seconds'] / 1e6:,.0f} MB/s",
            f"{row['seconds']:.1f} s, {row['seconds'] / first['seconds']:.2f} x for {row['times']:.0f} x the data",
        )
        for row in measured
    ]


_TEXT: Final[dict[str, Callable[[Any], list[Cells]]]] = {
    "read": _read_text,
    "stream": _stream_text,
    "write": _write_text,
    "audit": _audit_text,
}
