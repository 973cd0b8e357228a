"""The Spark examples run as a user runs them, and say what their pages say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from tests.spark.quickstart_pages import NOTEBOOK, PAGE, cells, notebook, run
from tests.spark.spark_kit import ROOT, StoredBroker

EXAMPLE_S = 240.0
"""Far above what it takes (40 s), for machines that do much else."""


@pytest.mark.usefixtures("spark")  # The page's own session is this one: a process has one.
def test_every_cell_of_the_quickstart_prints_what_its_page_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with StoredBroker(tmp_path) as broker:
        for cell in cells():
            said = run(cell, names, {"braid://127.0.0.1:6660": broker.url})
            assert said == cell.said, f"{PAGE.name}, line {cell.line}"
    assert isinstance(names["spark"], SparkSession)


def test_the_notebook_is_the_page() -> None:
    """`python -m tests.spark.quickstart_pages` writes it anew."""
    assert json.loads(NOTEBOOK.read_text(encoding="utf-8")) == json.loads(notebook())


def test_the_readme_shows_a_cell_of_the_quickstart() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert sum(f"```python\n{cell.code}```\n\n```text\n{cell.said}```\n" in readme for cell in cells()) == 1


def test_the_notebook_is_one() -> None:
    whole = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (whole["nbformat"], whole["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in whole["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in whole["cells"]:
        fields = {"cell_type", "id", "metadata", "source"}
        assert cell.keys() == (fields | {"execution_count", "outputs"} if cell["cell_type"] == "code" else fields)


def test_the_clickstream_counts_every_click_once_and_prints_what_its_page_shows(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path), "SPARK_LOCAL_DIRS": str(tmp_path)}
    command = [sys.executable, str(ROOT / "examples" / "clickstream.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=EXAMPLE_S)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stderr == ""
    published = re.search(r"clicks that were published +([\d,]+)\n", done.stdout)
    counted = re.search(r"clicks that are counted in sessions +([\d,]+)\n", done.stdout)
    assert published is not None
    assert counted is not None
    assert published[1] == counted[1]
    page = (ROOT / "docs" / "pipeline" / "clickstream.md").read_text(encoding="utf-8")
    shown = page.partition("`make demo` ends with it:\n\n```text\n")[2].partition("```")[0]
    assert repeatable(done.stdout) == repeatable(shown)
    assert list(tmp_path.iterdir()) == [], "the example leaves files behind"


def repeatable(text: str) -> list[str]:
    """Which broker gets which segment, and so what is in chunks, differs from run to run."""
    return re.sub(r"\d+(; what they held| chunks)", r"N\1", text).strip().splitlines()
