"""The command that runs many seeds, as `make simulate` does."""

from __future__ import annotations

import pytest

from braid.testing.simulate import main

pytestmark = pytest.mark.processes


def test_seeds_run_in_processes_and_are_counted_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["log", "--seeds", "3", "--first", "1000", "--processes", "2"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("simulation log, ")
    assert f"  {'seeds':<20} {3:>12,}\n" in printed
    assert printed.endswith("  no promise broke\n")
