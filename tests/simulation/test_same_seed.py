"""A seed that failed anywhere fails everywhere: what a simulation does depends on its seed alone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import hashlib, sys
from braid.testing.sim.captured_log import LogCapture
from braid.testing.simulate import SIMULATIONS

digest = hashlib.sha256()
note = LogCapture.note

def noted(self, line):
    note(self, line)
    digest.update(self.lines[-1].encode())

LogCapture.note = noted
simulate, _ = SIMULATIONS[sys.argv[1]]
print(simulate(int(sys.argv[2])), digest.hexdigest())
"""
"""What was counted, and every line of the log with its time."""


def course(simulation: str, seed: int, folder: Path, hash_seed: int) -> bytes:
    folder.mkdir(parents=True)
    return subprocess.check_output(
        [sys.executable, "-c", PROGRAM, simulation, str(seed)],
        cwd=folder,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        timeout=100,
    )


@pytest.mark.parametrize(("simulation", "seed"), [("log", 7), ("broker", 29), ("cluster", 7)])
def test_another_process_in_another_folder_does_the_same(tmp_path: Path, simulation: str, seed: int) -> None:
    here = course(simulation, seed, tmp_path / "a", 1)
    assert here == course(simulation, seed, tmp_path / "some" / "deeper" / "folder", 2)
