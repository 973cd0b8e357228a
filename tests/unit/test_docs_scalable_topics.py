"""The page that maps PIP-468 and live routing to Braid names code and tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scalable-topics.md").read_text(encoding="utf-8")


def test_every_test_that_the_page_names_exists() -> None:
    found = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)
    assert len(found) > 20
    for path, name in found:
        source = ROOT / path
        assert source.exists(), path
        assert not name or f"def {name}(" in source.read_text(encoding="utf-8"), f"{path} has no {name}"


def test_every_module_that_the_page_names_exists() -> None:
    modules = set(re.findall(r"`([a-z_]+/[\w/]+\.py)`", PAGE)) - set(re.findall(r"`(tests/[\w/]+\.py)", PAGE))
    assert len(modules) > 10
    for path in modules:
        assert (ROOT / "src" / "braid" / path).exists(), path
