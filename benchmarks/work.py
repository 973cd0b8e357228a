"""How much work a record takes, beside another checkout: `python -m benchmarks.work [--against PATH] [--instructions]`

Rates differ from minute to minute on a machine that others use. The work differs much less:

- Processor time of client and broker for a record. Each round runs both checkouts one after the other, and the least of
  the rounds counts: what others do on the machine can only add to it.
- `--instructions` counts what the client's processor executes, by valgrind. Each case runs with n and with 2 n records.
  The difference belongs to n records: starting the process is not in it.

Batches are small (64 KiB), so that the cost of a batch shows, and does not depend on when replies come. A ratio is that
of this checkout to the other: above 1, this one works more. The other checkout needs its own `.venv` (`make setup`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from benchmarks.report import Report
from braid.cli.bench.measure import fill, fresh_topic, run_worker
from braid.cli.bench.workload import Consume, Form, Mode, Publish
from braid.cli.target import Target
from braid.testing.processes import BrokerProcess

ROOT: Final = Path(__file__).parents[1]
BATCH_BYTES: Final = 64 << 10
SIZE: Final = 100

CASES: Final[dict[str, tuple[Mode | Form, int]]] = {
    "submit": (Mode.SUBMIT, 1),
    "send_many": (Mode.SEND_MANY, 1),
    "send_table": (Mode.SEND_TABLE, 1),
    "consume as Arrow": (Form.ARROW, 1),
    "consume as messages": (Form.MESSAGES, 1),
    "one at a time": (Mode.SEND, 500),
}
"""How records are sent or consumed, and by how much fewer of them are measured: one at a time, each is a batch."""

Counts = dict[str, dict[str, float]]
"""By case, by process: how much one record takes."""


class Round(msgspec.Struct, frozen=True):
    """What a checkout measures at a time."""

    cases: list[str]
    records: int
    instructions: bool


def measure(work: Round) -> Counts:
    """Measure with the checkout whose interpreter runs this."""
    with TemporaryDirectory(prefix="braid-bench-") as folder, BrokerProcess(Path(folder) / "data") as broker:
        target = Target(url=broker.url)
        counts: Counts = {}
        for case in work.cases:
            way, fewer = CASES[case]
            records = work.records // fewer
            with fresh_topic(target) as topic:
                if isinstance(way, Form):
                    fill(target, topic, 2 * records, SIZE, BATCH_BYTES)
                if work.instructions:
                    once, twice = (instructions(task(target, topic, way, count)) for count in (records, 2 * records))
                    counts[case] = {"client": (twice - once) / records}
                else:
                    counts[case] = processor_ns(task(target, topic, way, records), broker)
        return counts


def task(target: Target, topic: str, way: Mode | Form, records: int) -> Publish | Consume:
    if isinstance(way, Form):
        return Consume(target=target, topic=topic, subscription=f"all-{records}", records=records, form=way)
    return Publish(
        target=target, topic=topic, mode=way, records=records, size=SIZE, batch_bytes=BATCH_BYTES, tasks=1,
        warm_up=False,
    )  # fmt: skip


class BrokerClock:
    """An observer that measures the broker's processor time from the moment at which the client begins."""

    def __init__(self, broker: BrokerProcess) -> None:
        # Linux names the clock of a process's processor time so. /proc/PID/stat counts only hundredths of a second.
        self._clock = (~broker.pid << 3) | 2
        self._begun_s = 0.0

    def on_ready(self) -> None:
        self._begun_s = time.clock_gettime(self._clock)

    def on_progress(self, records: int) -> None:
        pass

    def passed_s(self) -> float:
        return time.clock_gettime(self._clock) - self._begun_s


def processor_ns(work: Publish | Consume, broker: BrokerProcess) -> dict[str, float]:
    clock = BrokerClock(broker)
    done = run_worker(work, clock)
    return {"client": done.cpu_s / work.records * 1e9, "broker": clock.passed_s() / work.records * 1e9}


def instructions(work: Publish | Consume) -> int:
    counting = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    done = subprocess.run(
        [*counting, sys.executable, "-m", "braid.cli.bench.worker"],
        input=msgspec.json.encode(work),
        capture_output=True,
        env={**os.environ, "PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"},  # Its idle threads count, too.
    )
    counted = re.search(rb"I\s+refs:\s*([\d,]+)", done.stderr)
    if done.returncode or counted is None:
        raise RuntimeError(f"the worker under valgrind failed: {done.stderr.decode()[-2000:]}")
    return int(counted[1].replace(b",", b""))


def measured_by(checkout: Path, work: Round) -> Counts:
    """Run a round in a process of this checkout. The benchmark itself is the same for every checkout."""
    python = sys.executable if checkout == ROOT else str(checkout / ".venv/bin/python")
    command = [python, "-m", "benchmarks.work", "--round", msgspec.json.encode(work).decode()]
    return msgspec.json.decode(
        subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout, type=Counts
    )


def compare(checkouts: list[Path], work: Round, rounds: int) -> Report:
    least: dict[tuple[str, str, Path], list[float]] = defaultdict(list)
    for _ in range(rounds):
        for checkout in checkouts:
            for case, counts in measured_by(checkout, work).items():
                for process, count in counts.items():
                    least[case, process, checkout].append(count)
    unit = "instructions" if work.instructions else "ns"
    report = Report("work")
    for (case, process, checkout), found in least.items():
        if checkout == ROOT:
            other = min(least[case, process, checkouts[-1]])
            against = {"other": other, "ratio": min(found) / other} if len(checkouts) > 1 else {}
            report.add(case, min(found), f"{unit}/record", process=process, record=SIZE, **against)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records, once: shows that it runs")
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="another checkout, measured in turns with this one"
    )
    parser.add_argument("--instructions", action="store_true", help="count the client's instructions, by valgrind")
    parser.add_argument("--rounds", type=int, help="how often each case is measured; the least counts")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="leave the others out")
    parser.add_argument("--round", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.round:
        print(msgspec.json.encode(measure(msgspec.json.decode(options.round, type=Round))).decode())
        return
    records = 20_000 if options.quick else 100_000 if options.instructions else 1_000_000
    rounds = options.rounds or (1 if options.quick or options.instructions else 7)
    checkouts = [ROOT, *([options.against.resolve()] if options.against else [])]
    report = compare(checkouts, Round(options.only, records, options.instructions), rounds)
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
