"""A few of the planted defects, as `make mutants` runs them all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import Laboratory, main
from tests.mutants.planted import Hunk, Mutant

QUICK = ["start-at-n-plus-2", "lower-read-grant-accepted", "serving-stays-clean"]
HARMLESS = Hunk("src/braid/broker/segments/read_grants.py", "class ReadGrants:\n", "class ReadGrants:  # Changed.\n")
GONE = Hunk("src/braid/broker/segments/read_grants.py", "class Seats:\n", "")
TESTS = ["tests/unit/test_read_grants.py"]

pytestmark = pytest.mark.processes


def test_planted_defects_turn_their_tests_red(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(QUICK) == 0
    assert capsys.readouterr().out.endswith("3 of 3 planted defects were noticed\n")


def test_a_survivor_a_patch_that_does_not_apply_and_a_test_that_does_not_exist_are_told_apart(tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path / "tree")
    assert laboratory.notices(Mutant("harmless", "", TESTS, [HARMLESS])) == "SURVIVED"
    assert laboratory.notices(Mutant("outdated", "", TESTS, [GONE])).startswith("DOES NOT APPLY: outdated")
    assert laboratory.notices(Mutant("misspelt", "", ["tests/unit/no.py"], [HARMLESS])).startswith("NOTHING RAN")
