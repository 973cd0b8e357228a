"""`python -m braid.testing.simulate log --seeds 2000`, or another one: run many seeds and say what happened."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from braid.testing.scenarios.cluster import (
    Counts,
    QueueCounts,
    simulate_broker,
    simulate_cluster,
    simulate_queues,
    simulate_replicas,
)
from braid.testing.scenarios.log_simulation import LogCounts, simulate_log

SIMULATIONS: dict[str, tuple[Callable[[int], Any], type[Any]]] = {
    "log": (simulate_log, LogCounts),
    "broker": (simulate_broker, Counts),
    "cluster": (simulate_cluster, Counts),
    "replicas": (simulate_replicas, Counts),
    "queues": (simulate_queues, QueueCounts),
}
"""The function that runs one seed, and the type of its result."""
SHOWN_FAILURES = 3
SHOWN_SLOW = 3


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    simulate, kind = SIMULATIONS[options.simulation]
    seeds = range(options.first, options.first + options.seeds)
    started = time.monotonic()
    total = kind()
    failures: list[tuple[int, str]] = []
    slowest: list[tuple[float, int]] = []
    context = multiprocessing.get_context("spawn")
    with context.Pool(options.processes) as pool:
        jobs = pool.imap_unordered(_Job(simulate), seeds)
        for done, (seed, seconds, counts, failure) in enumerate(jobs, 1):
            slowest = sorted([*slowest, (seconds, seed)], reverse=True)[:SHOWN_SLOW]
            total.add(counts if counts is not None else kind(seeds=1))
            if failure is not None:
                failures.append((seed, failure))
            _show_progress(done, len(seeds), len(failures))
            if failures and options.stop:
                break
    _report(options.simulation, total, failures, slowest, time.monotonic() - started)
    return 1 if failures else 0


class _Job:
    """A seed's run, in a process of its own pool; what went wrong comes back as text."""

    def __init__(self, simulate: Callable[[int], Any]) -> None:
        self._simulate = simulate

    def __call__(self, seed: int) -> tuple[int, float, Any, str | None]:
        """The seed, the processor time that it took, what it counted, and its failure."""
        counts, failure = None, None
        started = time.process_time()
        try:
            counts = self._simulate(seed)
        except Exception:
            failure = traceback.format_exc()
        return seed, time.process_time() - started, counts, failure


def _at_least_one(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least one seed has to run")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m braid.testing.simulate", description=__doc__)
    parser.add_argument("simulation", choices=sorted(SIMULATIONS))
    parser.add_argument("--seeds", type=_at_least_one, default=200, metavar="N", help="how many (default 200)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--stop", action="store_true", help="stop at the first seed that fails")
    parser.add_argument("--processes", type=int, default=os.cpu_count(), metavar="N", help="default: one per core")
    return parser


def _show_progress(done: int, total: int, failed: int) -> None:
    if sys.stderr.isatty():
        print(f"\r{done}/{total} seeds, {failed} failed", end="" if done < total else "\n", file=sys.stderr, flush=True)


def _report(
    name: str,
    total: LogCounts | Counts,
    failures: list[tuple[int, str]],
    slowest: list[tuple[float, int]],
    seconds: float,
) -> None:
    for seed, text in sorted(failures)[:SHOWN_FAILURES]:
        print(f"seed {seed} failed:\n{text}")
    print(f"simulation {name}, {seconds:.0f} s")
    for field in total.__struct_fields__:
        print(f"  {field.replace('_', ' '):<20} {getattr(total, field):>12,}")
    print(f"  slowest seeds        {', '.join(f'{seed} ({took:.1f} s)' for took, seed in slowest)}")
    if failures:
        print(f"  promises broken in {len(failures)} seeds: {' '.join(str(seed) for seed, _ in sorted(failures))}")
    else:
        print("  no promise broke")


if __name__ == "__main__":
    sys.exit(main())
