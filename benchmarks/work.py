"""How much work a record takes, beside another checkout: `python -m benchmarks.work [--against PATH] [--instructions]`

Rates differ from minute to minute on a machine that others use. The work differs much less:

- Processor time of client and broker for a record. Each round runs both checkouts one after the other, and the least of
  the rounds counts: what others do on the machine can only add to it.
- `--instructions` counts what the processor executes, by valgrind: first the client beside a plain broker, then the
  broker beside a plain client. Each case runs with n and with 2 n records. The difference belongs to n records:
  starting the process is not in it. A virtual machine shares caches and memory with others, so processor time differs
  by 15 % from minute to minute where instructions differ by 3 %. Valgrind sees no work of the kernel.

Batches are small (64 KiB), so that the cost of a batch shows, and does not depend on when replies come. The table also
has the batches and syncs of a run: work for a record can be compared only if both checkouts made as many batches. The
number of syncs depends on how many batches gather while the disk is busy, and a broker that syncs more often works
more. A ratio is that of this checkout to the other: above 1, this one works more. The other checkout needs its own
`.venv` (`make setup`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
import urllib.request
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import msgspec

from benchmarks.report import Report
from braid.cli.bench.measure import fill, fresh_topic, run_worker
from braid.cli.bench.workload import Consume, Form, Mode, Publish
from braid.cli.target import Target
from braid.testing.processes import BRAID, BrokerProcess

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

BROKER_TIMES: Final = 10
"""How many times as many records a broker's instructions are counted for. It also does other things while it waits."""
VALGRIND: Final = ("valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null")

METRICS: Final = {"batches": "braid_publish_batch_size_bytes_count", "syncs": "braid_log_sync_seconds_count"}
"""What a run makes, by its name in the table, and the broker's metric that counts it."""

Counts = dict[str, dict[str, float]]
"""By case, by process: how much one record takes. Under the names of `METRICS`: how many of them the run made."""


class Round(msgspec.Struct, frozen=True):
    """What a checkout measures at a time."""

    cases: list[str]
    records: int
    instructions: bool


def measure(work: Round) -> Counts:
    """Measure with the checkout whose interpreter runs this."""
    counted = instructions if work.instructions else processor_ns
    return {case: counted(CASES[case][0], work.records // CASES[case][1]) for case in work.cases}


def processor_ns(way: Mode | Form, records: int) -> dict[str, float]:
    with TemporaryDirectory(prefix="braid-bench-") as folder, BrokerProcess(Path(folder) / "data") as broker:
        target = Target(url=broker.url)
        with fresh_topic(target) as topic:
            if isinstance(way, Form):
                fill(target, topic, records, SIZE, BATCH_BYTES)
            before = made(broker)
            clock = BrokerClock(broker)
            done = run_worker(task(target, topic, way, records), clock)
            counts = {"client": done.cpu_s / records * 1e9, "broker": clock.passed_s() / records * 1e9}
            if isinstance(way, Mode):
                counts |= {name: number - before[name] for name, number in made(broker).items()}
            return counts


def made(broker: BrokerProcess) -> dict[str, float]:
    """Return how many batches and syncs the broker has made since it started."""
    with urllib.request.urlopen(f"{broker.ready['adminUrl']}/metrics") as response:
        values = dict(line.rsplit(" ", 1) for line in response.read().decode().splitlines() if line[0] != "#")
    return {name: float(values[metric]) for name, metric in METRICS.items()}


def instructions(way: Mode | Form, records: int) -> dict[str, float]:
    many = BROKER_TIMES * records
    client = [client_instructions(way, count, 2 * records) for count in (records, 2 * records)]
    broker = [broker_instructions(way, count, 2 * many) for count in (many, 2 * many)]
    return {"client": (client[1] - client[0]) / records, "broker": (broker[1] - broker[0]) / many}


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


def client_instructions(way: Mode | Form, records: int, filled: int) -> int:
    """Count what a client executes from its start to its end; a consumer finds a topic of `filled` records."""
    with TemporaryDirectory(prefix="braid-bench-") as folder, BrokerProcess(Path(folder) / "data") as broker:
        target = Target(url=broker.url)
        with fresh_topic(target) as topic:
            if isinstance(way, Form):
                fill(target, topic, filled, SIZE, BATCH_BYTES)
            done = subprocess.run(
                [*VALGRIND, sys.executable, "-m", "braid.cli.bench.worker"],
                input=msgspec.json.encode(task(target, topic, way, records)),
                capture_output=True,
                env=os.environ | REPEATABLE,
            )
    if done.returncode:
        raise RuntimeError(f"the worker under valgrind failed: {done.stderr.decode()[-2000:]}")
    return counted_in(done.stderr)


def broker_instructions(way: Mode | Form, records: int, filled: int) -> int:
    """Count what a broker executes from its start to its end."""
    os.environ.update(REPEATABLE)
    with TemporaryDirectory(prefix="braid-bench-") as folder:
        with BrokerProcess(Path(folder) / "data", braid=(*VALGRIND, *BRAID)) as broker:
            target = Target(url=broker.url)
            with fresh_topic(target) as topic:
                if isinstance(way, Form):
                    fill(target, topic, filled, SIZE, BATCH_BYTES)
                run_worker(task(target, topic, way, records))
            broker.stop()
        return counted_in(broker.log_path.read_bytes())


REPEATABLE: Final = {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
"""The environment of a process whose instructions are counted: idle threads of OpenBLAS count, too."""


def counted_in(output: bytes) -> int:
    counted = re.search(rb"I\s+refs:\s*([\d,]+)", output)
    if counted is None:
        raise RuntimeError(f"valgrind has counted nothing: {output.decode()[-2000:]}")
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
            per = "a run" if process in METRICS else f"{unit}/record"
            report.add(case, min(found), per, of=process, record=SIZE, **against)
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records, once: shows that it runs")
    parser.add_argument(
        "--against", type=Path, metavar="PATH", help="another checkout, measured in turns with this one"
    )
    parser.add_argument("--instructions", action="store_true", help="count instructions, by valgrind")
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
