"""The planted defects (tests/mutants) fit the source as it is, and name tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.mutants.planted import ROOT, DoesNotApply, Mutant, all_mutants, read_mutant

MUTANTS = all_mutants()

PATCH = """\
The sum is wrong.

red: tests/test_sum.py::test_sum

--- a/sum.py
+++ b/sum.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_planted_defect_applies_to_the_source_as_it_is(mutant: Mutant, tmp_path: Path) -> None:
    for hunk in mutant.hunks:
        target = tmp_path / hunk.file
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text((ROOT / hunk.file).read_text(encoding="utf-8"), encoding="utf-8")
    for path, before in mutant.apply(tmp_path).items():
        assert path.read_text(encoding="utf-8") != before
        compile(path.read_text(encoding="utf-8"), path, "exec")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda each: each.name)
def test_a_planted_defect_says_what_breaks_and_names_tests_that_exist(mutant: Mutant) -> None:
    assert mutant.story.endswith(".")
    assert mutant.tests
    for test in mutant.tests:
        file, _, name = test.partition("::")
        name = name.partition("[")[0]
        assert re.search(rf"^(async )?def {name}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE), test


def test_a_patch_whose_lines_are_gone_or_not_unique_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "wrong-sum.patch").write_text(PATCH, encoding="utf-8")
    mutant = read_mutant(tmp_path / "wrong-sum.patch")
    assert (mutant.name, mutant.story, mutant.tests) == (
        "wrong-sum",
        "The sum is wrong.",
        ["tests/test_sum.py::test_sum"],
    )
    source = tmp_path / "sum.py"
    indented = "class Sum:\n    def add(a, b):\n    return a + b\n"
    for text in ("def add(a, b):\n    return b + a\n", 2 * "def add(a, b):\n    return a + b\n", indented):
        source.write_text(text, encoding="utf-8")
        with pytest.raises(DoesNotApply):
            mutant.apply(tmp_path)
        assert source.read_text(encoding="utf-8") == text
    source.write_text("# Elsewhere now.\n\ndef add(a, b):\n    return a + b\n", encoding="utf-8")
    mutant.apply(tmp_path)
    assert source.read_text(encoding="utf-8") == "# Elsewhere now.\n\ndef add(a, b):\n    return a - b\n"
