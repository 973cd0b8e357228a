"""`python -m tests.simulation.note_seeds cluster`: find the seeds that notice each broken promise soonest.

A change of the code leads seeds elsewhere. A test of the simulation's teeth then has to search for a seed that notices,
which takes long. This prints the seeds to note in `MUTANTS` of the test, each with its seconds of processor time.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import ModuleType
from typing import Any

import pytest

from tests.simulation import test_broker_simulation, test_cluster_simulation, test_log_simulation

SUITES: dict[str, ModuleType] = {
    "broker": test_broker_simulation,
    "cluster": test_cluster_simulation,
    "log": test_log_simulation,
}
SHOWN = 4


def noticing(suite: ModuleType, break_it: Any, seeds: range) -> list[tuple[float, int]]:
    """Return how long each seed took that noticed, the quickest first."""
    noted = suite.MUTANTS[break_it]
    favoured = noted[:1] if isinstance(noted, tuple) else ()
    found: list[tuple[float, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        for seed in seeds:
            started = time.process_time()
            if suite.notices(seed, *favoured):
                found.append((time.process_time() - started, seed))
    return sorted(found)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.note_seeds", description=__doc__)
    parser.add_argument("simulation", choices=sorted(SUITES))
    parser.add_argument("--seeds", type=int, default=20, metavar="N", help="how many are tried (default 20)")
    parser.add_argument("--only", metavar="NAME", help="only the break of this name")
    options = parser.parse_args(arguments)
    suite = SUITES[options.simulation]
    for break_it in suite.MUTANTS:
        if options.only in (None, break_it.__name__):
            found = noticing(suite, break_it, range(options.seeds))
            seeds = ", ".join(f"{seed} ({seconds:.1f} s)" for seconds, seed in found[:SHOWN])
            print(f"{break_it.__name__}: {seeds or 'none'}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
