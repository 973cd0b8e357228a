"""The quickstart: its page, its notebook, and the way to run them cell by cell."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.spark.spark_kit import ROOT

PAGE: Final = ROOT / "docs" / "pipeline" / "quickstart.md"
NOTEBOOK: Final = ROOT / "examples" / "quickstart.ipynb"

_CELL: Final = re.compile(r"^```python\n(?P<code>.*?)^```\n\n^```text\n(?P<said>.*?)^```", re.MULTILINE | re.DOTALL)


class Cell(NamedTuple):
    code: str
    said: str
    """What it prints."""
    line: int
    """Of the page, at which it begins."""


def cells(page: Path = PAGE) -> list[Cell]:
    text = page.read_text(encoding="utf-8")
    return [
        Cell(found["code"], found["said"], text.count("\n", 0, found.start("code")) + 1)
        for found in _CELL.finditer(text)
    ]


def run(cell: Cell, names: dict[str, Any], replace: dict[str, str]) -> str:
    """What it prints now. `replace`: what stands for what the page writes, such as an address."""
    code = cell.code
    for written, real in replace.items():
        code = code.replace(written, real)
    said = io.StringIO()
    tree = ast.parse("\n" * (cell.line - 1) + code, str(PAGE))
    with contextlib.redirect_stdout(said):
        exec(compile(tree, str(PAGE), "exec", dont_inherit=True), names)
    return said.getvalue()


def notebook(page: Path = PAGE) -> str:
    """The page as a notebook: prose and cells with their output, in nbformat 4."""
    text = page.read_text(encoding="utf-8")
    parts: list[dict[str, Any]] = []
    at = 0
    for number, found in enumerate(_CELL.finditer(text), 1):
        parts.append(_prose(text[at : found.start()], len(parts)))
        output = {"name": "stdout", "output_type": "stream", "text": _lines(found["said"])}
        parts.append(
            {
                "cell_type": "code",
                "execution_count": number,
                "id": f"cell-{len(parts)}",
                "metadata": {},
                "outputs": [output] if found["said"] else [],
                "source": _lines(found["code"].rstrip("\n")),
            }
        )
        at = found.end()
    parts.append(_prose(text[at:], len(parts)))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": parts, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


def _prose(text: str, number: int) -> dict[str, Any]:
    # Links of the page are relative to its folder.
    there = re.sub(r"\]\((?!https?:)([^)]+)\)", r"](../docs/pipeline/\1)", text.strip("\n"))
    return {"cell_type": "markdown", "id": f"cell-{number}", "metadata": {}, "source": _lines(there)}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
