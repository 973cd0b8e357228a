"""The suite's own machinery."""

import pytest


@pytest.mark.xdist_group("alone")
def test_groups_of_tests_stay_on_one_worker(request: pytest.FixtureRequest) -> None:
    """xdist names an item's group in its id. With a pytest that xdist does not know, it is silent and splits groups."""
    if hasattr(request.config, "workerinput"):
        assert request.node.nodeid.endswith("@alone")
