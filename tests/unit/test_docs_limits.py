"""docs/limits.md has every bound of the code, with its number."""

from __future__ import annotations

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

from braid.model.errors import BraidError
from braid.model.queue.state import DEFAULT_LIMITS

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "braid"
PAGE = ROOT / "docs" / "limits.md"

BOUND = re.compile(r"(MAX|MIN|MOST|LONGEST|LARGEST)_[A-Z0-9_]+")
NOT_OF_USERS = ("testing", "cli/bench", "cli/doctor", "console/drawing", "spark/benchmark.py")
"""Parts that only measure, simulate or draw."""


def documented() -> dict[str, str]:
    rows = re.findall(r"^\| [^|]+ \| ([^|]+) \| [^|]+ \| `([\w.]+:[\w.]+)` \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    assert len({name for _, name in rows}) == len(rows), "a bound is there twice"
    return {name: number for number, name in rows}


def value_of(name: str) -> object:
    """Of `module:NAME`, below `braid`; also of a field, `module:NAME.field`."""
    module, _, path = name.partition(":")
    return functools.reduce(getattr, path.split("."), importlib.import_module(f"braid.{module}"))


def shown(name: str, value: object) -> str:
    assert isinstance(value, int | float)
    if "BYTES" in name and isinstance(value, int):
        for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def bounds() -> Iterator[str]:
    """Every bound at the top of a module, and those of a queue."""
    yield from (f"model.queue.state:DEFAULT_LIMITS.{field}" for field in DEFAULT_LIMITS._fields)
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        if str(place).startswith(NOT_OF_USERS):
            continue
        for node in ast.parse(path.read_text("utf-8")).body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and BOUND.fullmatch(target.id):
                    yield f"{'.'.join(place.with_suffix('').parts)}:{target.id}"


def test_every_bound_of_the_code_is_on_the_page() -> None:
    assert set(bounds()) - set(documented()) == set()


def test_every_number_is_that_of_the_code() -> None:
    found = documented()
    assert found == {name: shown(name, value_of(name)) for name in found}


def test_every_error_code_on_the_page_exists() -> None:
    codes = re.findall(r"`([a-z]+(?:-[a-z]+)+)`", PAGE.read_text("utf-8"))
    assert codes
    assert set(codes) <= set(BraidError.by_code)
