"""The suite's own machinery."""

import re
from pathlib import Path

import pytest

from braid.testing.simulate import SIMULATIONS

MAKEFILE = Path(__file__).parents[2] / "Makefile"


@pytest.mark.xdist_group("alone")
def test_groups_of_tests_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    """xdist names an item's group in its id. With a pytest that xdist does not know, it is silent and splits groups."""
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@alone")


def test_make_simulate_runs_every_simulation() -> None:
    targets = re.split(r"^(?=\w+:)", MAKEFILE.read_text(), flags=re.MULTILINE)
    (simulate,) = [each for each in targets if each.startswith("simulate:")]
    assert re.findall(r"braid\.testing\.simulate (\w+) ", simulate) == list(SIMULATIONS)
