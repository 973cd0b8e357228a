"""`python -m tests.mutants`: plant each defect in a copy of the tree and see its tests go red. `make mutants` runs it.

With `--seeds 200`, random seeds of the simulations look for each defect instead: a measure, not a test.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from tests.mutants.planted import ROOT, DoesNotApply, Mutant, all_mutants

LEFT_OUT: Final = shutil.ignore_patterns(".git", ".venv", ".*_cache", ".hypothesis", "__pycache__", "build", "dist")
TESTS_FAILED: Final = 1
"""The exit code of pytest, and of a simulation, when something was noticed. Others mean that nothing ran."""
FAILED_SEED: Final = re.compile(r"^seed (\d+) failed:$", re.MULTILINE)


class Laboratory:
    """A copy of the tree, in which defects are planted one after the other."""

    def __init__(self, tree: Path, processes: int | None = None) -> None:
        """`processes` is how many seeds run at the same time, by default one for each core."""
        self._tree = tree
        self._processes = () if processes is None else ("--processes", str(processes))
        shutil.copytree(ROOT, tree, ignore=LEFT_OUT)
        # Two versions of a file within one second could have the same time and size: no bytecode is kept.
        self._environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}

    def run_tests(self, tests: list[str]) -> subprocess.CompletedProcess[str]:
        return self._run("-m", "pytest", "-x", "-n", "0", *tests)

    def run_seeds(self, simulation: str, seeds: int) -> subprocess.CompletedProcess[str]:
        return self._run("-m", "braid.testing.simulate", simulation, "--seeds", str(seeds), "--stop", *self._processes)

    def _run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=self._tree,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def notices(self, mutant: Mutant, seeds: int | None = None) -> str:
        """Return `noticed`, with the seed that did, `SURVIVED`, or why it is not known."""
        try:
            before = mutant.apply(self._tree)
        except DoesNotApply as error:
            return f"DOES NOT APPLY: {error}"
        try:
            done = self.run_tests(mutant.tests) if seeds is None else self.run_seeds(_simulation_of(mutant), seeds)
        finally:
            for path, text in before.items():
                path.write_text(text, encoding="utf-8")
        if done.returncode == TESTS_FAILED:
            seed = FAILED_SEED.search(done.stdout)
            return f"noticed by seed {seed[1]}" if seed is not None else "noticed"
        return "SURVIVED" if done.returncode == 0 else f"NOTHING RAN: {done.stdout[-2_000:]}"


def _simulation_of(mutant: Mutant) -> str:
    """Name the simulation whose seeds may meet the defect: most topics of the others have no queue."""
    return "queues" if mutant.name.startswith("queue-") else "cluster"


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    mutants = [each for each in all_mutants() if not options.names or each.name in options.names]
    if unknown := set(options.names) - {each.name for each in mutants}:
        print(f"there is no planted defect {', '.join(sorted(unknown))}")
        return 2
    with tempfile.TemporaryDirectory(prefix="braid-mutants-") as folder:
        laboratory = Laboratory(Path(folder) / "tree", options.processes)
        if options.seeds is None:
            done = laboratory.run_tests(sorted({test for each in mutants for test in each.tests}))
            if done.returncode != 0:
                print(f"the tests are red without any defect:\n{done.stdout[-4_000:]}")
                return 2
        width = max(len(each.name) for each in mutants)
        results = []
        for mutant in mutants:
            started = time.monotonic()
            results.append(laboratory.notices(mutant, options.seeds))
            print(f"{mutant.name:<{width}}  {time.monotonic() - started:5.1f} s  {results[-1]}", flush=True)
    noticed = sum(each.startswith("noticed") for each in results)
    print(f"{noticed} of {len(results)} planted defects were noticed")
    return 0 if noticed == len(results) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="only these (default: all)")
    parser.add_argument("--seeds", type=int, metavar="N", help="look for each with N seeds of the simulations")
    parser.add_argument(
        "--processes", type=int, metavar="N", help="seeds at the same time (default: one for each core)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
