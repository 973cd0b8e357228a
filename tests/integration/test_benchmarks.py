"""Every benchmark runs, with small sizes. How fast it runs is no test's business."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.__main__ import NAMES

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.processes


@pytest.mark.parametrize("name", NAMES)
def test_a_benchmark_runs_and_prints_its_table(name: str) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    assert "unit" in done.stdout
