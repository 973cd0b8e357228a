"""The pages that map the designs that Braid follows, and Pulsar's tests, to Braid name code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scalable-topics.md").read_text(encoding="utf-8")
REPLICATION = (ROOT / "docs" / "replication.md").read_text(encoding="utf-8")
PULSAR = (ROOT / "docs" / "pulsar-tests.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("page", "at_least"), [(PAGE, 20), (REPLICATION, 40), (PULSAR, 200)], ids=["pip", "replicas", "pulsar"]
)
def test_every_test_that_the_page_names_exists(page: str, at_least: int) -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    assert len(found) > at_least
    for path, name in found:
        source = ROOT / path
        assert source.exists(), path
        assert not name or f"def {name}(" in source.read_text(encoding="utf-8"), f"{path} has no {name}"


def test_every_behaviour_of_pulsars_tests_has_a_test_or_a_reason() -> None:
    rows = re.findall(r"^\| (\w+) \| (.+?) \| (.+) \|$", PULSAR, flags=re.MULTILINE)[1:]
    assert len({name for name, _, _ in rows}) == 87
    for name, behaviours, answer in rows:
        assert behaviours, name
        assert re.match(r"`tests/|does not apply: [\w`]|open: \w", answer), f"{name}: {answer}"


@pytest.mark.parametrize("page", [PAGE, REPLICATION], ids=["scalable-topics", "replication"])
def test_every_module_that_the_page_names_exists(page: str) -> None:
    modules = set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", page)) - set(re.findall(r"`(tests/[\w/]+\.py)", page))
    assert len(modules) > 10
    for path in modules:
        assert (ROOT / "src" / "braid" / path).exists(), path
