"""Braid against the bare loop, in turns, in one run. Run: `python -m benchmarks.broker [--quick] [--only NAME …]`

The bare loop (bare_loop.py) is the least that a durable broker in Python has to do. It is measured on the same machine
in the same minute. Braid runs as users run it: a `braid serve` process, and producers and consumers in their own
processes that use the public client. There is one topic with one segment, with durability `fsync` unless named
otherwise.

Both write into files that were filled with zeros before. The loop does this before its clock starts; Braid does it when
it is idle (storage/log/preallocated.py), so it gets some seconds of rest before it publishes. A case "no rest"
publishes directly after another, when the preallocated files are used up. It is compared with a loop whose file is only
reserved.

Beside each rate stands the processor time that client and server spent on a record. Numbers and ratios are medians over
the rounds. The machine is shared and noisy, so the ratios say more than the rates. Some cases have no counterpart in
the bare loop (records that are sent one by one and batched by the client): there only the rate counts.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.bare_loop import bare_loop
from benchmarks.report import Report
from braid.cli.bench.machine import cpu_s, rss_bytes
from braid.cli.bench.measure import (
    SUBSCRIPTION,
    fill,
    fresh_topic,
    measure_consume,
    measure_latency,
    measure_publish,
    worker,
)
from braid.cli.bench.workload import Done, Form, Mode, Publish
from braid.cli.target import Target
from braid.testing.processes import BrokerProcess

BATCH_BYTES = 1 << 20
WAITING = 64
REST_S = 20.0
"""The broker begins to refill its stock of files 5 s after the last use, and needs a second for each file."""
FILE_BYTES = 64 << 20
"""The size of a log's files, as brokers have it by default."""
BATCH_OVERHEAD = 1.1
"""A published byte takes at most this many bytes of log, in either system."""


class Effort(NamedTuple):
    """How much is measured."""

    rounds: int
    sizes: tuple[int, ...]
    rates: tuple[int, ...]
    publish_bytes: int
    auto_batched_records: int
    singles: int
    lone_records: int
    latency_s: float
    backlog_bytes: int
    idle_s: float


FULL = Effort(
    rounds=5,
    sizes=(100, 1024),
    rates=(1_000, 10_000),
    publish_bytes=300_000_000,
    auto_batched_records=1_500_000,
    singles=50_000,
    lone_records=3_000,
    latency_s=4.0,
    backlog_bytes=1 << 30,
    idle_s=12.0,
)
QUICK = Effort(
    rounds=1,
    sizes=(100,),
    rates=(1_000,),
    publish_bytes=500_000,
    auto_batched_records=2_000,
    singles=200,
    lone_records=20,
    latency_s=0.1,
    backlog_bytes=2 << 20,
    idle_s=0.3,
)


class Results:
    """The measurements, by case and facts; every round adds to them."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, str, int], list[float]] = defaultdict(list)
        self.facts: dict[tuple[str, str, int], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, case: str, value: float, unit: str, record: int, **facts: float) -> None:
        key = (case, unit, record)
        self.values[key].append(value)
        for name, fact in facts.items():
            self.facts[key][name].append(fact)

    def median(self, case: str, record: int = 100) -> float | None:
        for (name, _, size), values in self.values.items():
            if name == case and size == record:
                return median(values)
        return None

    def of_loop(self, case: str, record: int = 100) -> float | None:
        """Return the median ratio of the rounds. Each round compares two measurements that were made one after the
        other."""
        mine, limits = (
            next((values for (name, _, size), values in self.values.items() if (name, size) == (wanted, record)), [])
            for wanted in (case, f"loop: {LIMITS.get(case)}")
        )
        return median(value / limit for value, limit in zip(mine, limits, strict=True)) if mine and limits else None

    def report(self, name: str) -> Report:
        report = Report(name)
        for (case, unit, record), values in self.values.items():
            system = "bare loop" if case.startswith("loop: ") else "braid"
            report.add(
                case.removeprefix("loop: "),
                median(values),
                unit,
                system=system,
                record=record,
                of_loop=self.of_loop(case, record),
                lowest=min(values),
                highest=max(values),
                **{fact: median(found) for fact, found in self.facts[case, unit, record].items()},
            )
        return report


LIMITS = {
    "publish, send_many": "publish, send_many",
    "publish, send_table": "publish, send_table",
    "publish, send_table, no rest": "publish into a fresh file",
    "64 waiting, one producer": "64 waiting",
    "64 waiting, 64 producers": "64 waiting",
    "one at a time": "one at a time",
    "consume as Arrow": "consume as Arrow",
    "consume as values": "consume as values",
    "consume as messages": "consume as values",
    **{
        f"latency at {rate}/s, {name}": f"latency at {rate}/s, {name}"
        for rate in FULL.rates
        for name in ("p50", "p99", "p99.9")
    },
}
"""Which case of the bare loop is the limit of a case of Braid."""


class Bench:
    def __init__(self, effort: Effort, folder: str, broker: BrokerProcess, results: Results) -> None:
        self.effort = effort
        self.folder = folder
        self.broker = broker
        self.target = Target(url=broker.url)
        self.results = results

    def braid(self, case: str, size: int, done: Done, watch: Watch) -> None:
        costs = cpu_costs(done.records, done.cpu_s, watch.broker_cpu_s())
        self.results.add(case, done.rate, "records/s", size, **costs)

    def loop(self, case: str, size: int, answer: dict[str, float]) -> float:
        costs = cpu_costs(answer["records"], answer["cpu_s"], answer["server_cpu_s"])
        self.results.add(f"loop: {case}", answer["rate"], "records/s", size, **costs)
        return answer["records"]

    # The cases. Each runs once a round.

    def publish(self) -> None:
        file_bytes = int(self.effort.publish_bytes * BATCH_OVERHEAD) + (32 << 20)
        if not spare_bytes(self.broker):
            with fresh_topic(self.target) as topic:  # So the broker learns how many spare files such a burst takes.
                fill(self.target, topic, self.effort.publish_bytes // 1024, 1024, BATCH_BYTES)
        for size in self.effort.sizes:
            records = self.effort.publish_bytes // size
            for mode in (Mode.SEND_MANY, Mode.SEND_TABLE):
                self._rest(file_bytes)
                with bare_loop(self.folder, file_bytes) as loop:
                    self.loop(f"publish, {mode.value}", size, loop.publish(records, size, BATCH_BYTES))
                self._publish(f"publish, {mode.value}", mode, records, size)
            with bare_loop(self.folder, file_bytes, prepared=False) as loop:
                self.loop("publish into a fresh file", size, loop.publish(records, size, BATCH_BYTES))
            self._publish("publish, send_table, no rest", Mode.SEND_TABLE, records, size)

    def _rest(self, file_bytes: int) -> None:
        """Wait until the broker has preallocated files for this many bytes; the first file of a log is not
        preallocated."""
        deadline = time.monotonic() + REST_S
        while spare_bytes(self.broker) < file_bytes - 2 * FILE_BYTES and time.monotonic() < deadline:
            time.sleep(0.1)

    def auto(self) -> None:
        """Records that are sent one by one and batched by the client."""
        for mode, case in ((Mode.SUBMIT, "submit, one task"), (Mode.SEND, "send, 2,000 tasks")):
            self._publish(case, mode, self.effort.auto_batched_records)

    def single(self) -> None:
        effort = self.effort
        with bare_loop(self.folder, 64 << 20) as loop:
            self.loop("64 waiting", 100, loop.singles(effort.singles, 100, WAITING))
            self.loop("one at a time", 100, loop.singles(effort.lone_records, 100, 1))
        self._publish("64 waiting, one producer", Mode.SEND, effort.singles, tasks=WAITING)
        self._publish("64 waiting, 64 producers", Mode.SINGLE, effort.singles, tasks=WAITING)
        self._publish("one at a time", Mode.SEND, effort.lone_records, tasks=1)

    def _publish(self, case: str, mode: Mode, records: int, size: int = 100, tasks: int | None = None) -> None:
        watch = Watch(self.broker)
        with fresh_topic(self.target) as topic:
            done = measure_publish(
                self.target,
                topic,
                mode=mode,
                records=records,
                size=size,
                batch_bytes=BATCH_BYTES,
                tasks=tasks,
                observer=watch,
            )
            self.braid(case, size, done, watch)

    def consume(self) -> None:
        for size in self.effort.sizes:
            records = self.effort.publish_bytes // size
            with bare_loop(self.folder, int(self.effort.publish_bytes * BATCH_OVERHEAD) + (32 << 20)) as loop:
                published = int(loop.publish(records, size, BATCH_BYTES)["records"])
                self.loop("consume as Arrow", size, loop.consume(published, "arrow"))
                self.loop("consume as values", size, loop.consume(published, "bytes"))
            with fresh_topic(self.target) as topic:
                fill(self.target, topic, records, size, BATCH_BYTES)
                names = {Form.ARROW: "consume as Arrow", Form.VALUES: "consume as values"}
                names |= {Form.MESSAGES: "consume as messages", Form.EACH: "consume by async for"}
                for form, case in names.items():
                    watch = Watch(self.broker)
                    done = measure_consume(
                        self.target, topic, records=records, form=form, subscription=form.value, observer=watch
                    )
                    self.braid(case, size, done, watch)

    def latency(self) -> None:
        for rate in self.effort.rates:
            with bare_loop(self.folder, 64 << 20) as loop:
                answer = loop.latency(rate, self.effort.latency_s, 100)
            with fresh_topic(self.target) as topic:
                done = measure_latency(self.target, topic, rate=rate, duration_s=self.effort.latency_s, size=100)
            for name, key in (("p50", "p50"), ("p99", "p99"), ("p99.9", "p999")):
                self.results.add(f"loop: latency at {rate}/s, {name}", answer[key], "ms", 100)
                self.results.add(f"latency at {rate}/s, {name}", done.latency_ms[name], "ms", 100)


def cpu_costs(records: float, client_s: float, server_s: float) -> dict[str, float]:
    """Return the processor time per record: it shows where the time goes, and other processes change it less."""
    return {"client_us": client_s / records * 1e6, "server_us": server_s / records * 1e6}


class Watch:
    """An observer that remembers how much processor time the broker had used when the clock started."""

    def __init__(self, broker: BrokerProcess) -> None:
        self._broker = broker
        self._at_ready_s = cpu_s(broker.pid)

    def on_ready(self) -> None:
        self._at_ready_s = cpu_s(self._broker.pid)

    def on_progress(self, records: int) -> None:
        pass

    def broker_cpu_s(self) -> float:
        return cpu_s(self._broker.pid) - self._at_ready_s


class Enough:
    """An observer that ends the wait when this many records are done."""

    class ReachedError(Exception):
        pass

    def __init__(self, records: int) -> None:
        self._records = records

    def on_ready(self) -> None:
        pass

    def on_progress(self, records: int) -> None:
        if records >= self._records:
            raise self.ReachedError


def operate(effort: Effort, results: Results) -> None:
    """Measure, once, a broker that holds a backlog, is idle, or was killed."""
    size = 1024
    records = effort.backlog_bytes // size
    with TemporaryDirectory(prefix="braid-bench-") as folder, BrokerProcess(Path(folder) / "data") as broker:
        time.sleep(effort.idle_s / 4)
        results.add("idle broker", idle_share(broker, effort.idle_s) * 100, "% of a core", 0)
        results.add("memory of an empty broker", rss_bytes(broker.pid) / 1e6, "MB", 0)
        target = Target(url=broker.url)
        with fresh_topic(target) as topic:
            fill(target, topic, records, size, BATCH_BYTES)
            results.add("memory with a backlog", rss_bytes(broker.pid) / 1e6, "MB", size)
            measure_consume(target, topic, records=records, form=Form.ARROW)
            results.add("memory after consuming it", rss_bytes(broker.pid) / 1e6, "MB", size)
            results.add("memory at its peak", rss_bytes(broker.pid, peak=True) / 1e6, "MB", size)
            work = Publish(
                target=target,
                topic=topic,
                mode=Mode.SEND_MANY,
                records=100 * records,
                size=size,
                batch_bytes=BATCH_BYTES,
                tasks=2,
                warm_up=False,
            )
            # Killed while it publishes: the recovered log ends somewhere in the middle of a group of batches.
            with worker(work, Enough(records // 10)) as publisher:
                with suppress(Enough.ReachedError):
                    publisher.wait_done()
                broker.kill()
            results.add("ready after kill -9", broker.start(), "s", size)
            done = measure_consume(target, topic, records=records, form=Form.ARROW, subscription=f"{SUBSCRIPTION}-2")
            assert done.records >= records
            results.add("idle broker with a backlog", idle_share(broker, effort.idle_s) * 100, "% of a core", size)


def spare_bytes(broker: BrokerProcess) -> int:
    """The bytes of preallocated files that the broker has in stock."""
    return sum(file.stat().st_size for file in (broker.data / "spare").iterdir())


def idle_share(broker: BrokerProcess, seconds: float) -> float:
    before, began = cpu_s(broker.pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(broker.pid) - before) / (time.perf_counter() - began)


def bars_of(results: Results) -> Report:
    """Compare the goals with this run."""
    bars = Report("broker-bars")

    def bar(
        case: str, reached: float | None, unit: str, asked: float, *, at_least: bool, otherwise: Any = None
    ) -> None:
        """Add one goal. `otherwise` is a second way to pass, as (reached, asked at most)."""
        if reached is None:
            return
        met = reached >= asked if at_least else reached <= asked
        other, other_asked = otherwise or (None, 0.0)
        if not met and other is not None:
            met = other <= other_asked
        sign = "≥" if at_least else "≤"
        words = f"{sign} {asked:g}" + (f" or ≤ {other_asked:g} × loop" if otherwise else "")
        bars.add(case, reached, unit, asked=words, of_loop=other, met=met)

    for size in FULL.sizes:
        for call in ("send_many", "send_table"):
            bar(f"{call}, {size} B", results.of_loop(f"publish, {call}", size), "of loop", 0.6, at_least=True)
    for case in ("submit, one task", "send, 2,000 tasks"):
        bar(case, results.median(case), "records/s", 850_000, at_least=True)
    for case in ("64 waiting, one producer", "64 waiting, 64 producers"):
        bar(case, results.median(case), "records/s", 45_000, at_least=True)
    bar("one at a time", results.of_loop("one at a time"), "of loop", 0.6, at_least=True)
    bar("consume as messages", results.median("consume as messages"), "records/s", 4e6, at_least=True)
    bar("consume as Arrow", results.median("consume as Arrow"), "records/s", 15e6, at_least=True)
    for rate, name, asked in ((1_000, "p50", 0.5), (1_000, "p99", 1.0), (10_000, "p99", 2.0)):
        case = f"latency at {rate}/s, {name}"
        bar(case, results.median(case), "ms", asked, at_least=False, otherwise=(results.of_loop(case), 1.4))
    bar("ready after kill -9", results.median("ready after kill -9", 1024), "s", 2.0, at_least=False)
    for case in ("memory with a backlog", "memory after consuming it"):
        bar(case, results.median(case, 1024), "MB", 150, at_least=False)
    bar("idle broker", results.median("idle broker", 0), "% of a core", 1.0, at_least=False)
    return bars


CASES = ("publish", "auto", "single", "consume", "latency")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, once: shows that it runs, not how fast")
    parser.add_argument("--rounds", type=int, help="how often each case is measured")
    parser.add_argument("--only", nargs="+", choices=[*CASES, "operate"], help="leave the others out")
    options = parser.parse_args()
    effort = QUICK if options.quick else FULL
    chosen = options.only or [*CASES, "operate"]
    results = Results()
    with TemporaryDirectory(prefix="braid-bench-") as folder:
        with BrokerProcess(Path(folder) / "data") as broker:
            bench = Bench(effort, folder, broker, results)
            for _ in range(options.rounds or effort.rounds):
                for case in CASES:
                    if case in chosen:
                        getattr(bench, case)()
        if "operate" in chosen:
            operate(effort, results)
    report = results.report("broker")
    report.print()
    report.write_jsonl()
    if not options.quick:
        bars = bars_of(results)
        bars.print()
        bars.write_jsonl()


if __name__ == "__main__":
    main()
