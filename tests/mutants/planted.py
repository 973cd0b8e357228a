"""Planted defects: small patches of the source, each with the tests that must notice it.

A file `NAME.patch` of this folder has one sentence that says what breaks, a line `red: TEST` for each test that must
fail, and a unified diff. A patch is found by its lines, not by its line numbers: the lines that a hunk takes away, with
the lines around them, must stand in the file exactly once.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent
ROOT: Final = FOLDER.parents[1]
RED: Final = "red: "


class DoesNotApply(Exception):
    """The source has changed since the patch was made; make the patch again."""


class Hunk(NamedTuple):
    file: str
    before: str
    after: str


class Mutant(NamedTuple):
    name: str
    story: str
    tests: list[str]
    hunks: list[Hunk]

    def apply(self, tree: Path) -> dict[Path, str]:
        """Plant the defect. Return the files as they were. Nothing is changed if a hunk does not apply."""
        before: dict[Path, str] = {}
        after: dict[Path, str] = {}
        for hunk in self.hunks:
            path = tree / hunk.file
            before.setdefault(path, path.read_text(encoding="utf-8"))
            text = after.get(path, before[path])
            places = [found.start() for found in re.finditer("^" + re.escape(hunk.before), text, re.MULTILINE)]
            if len(places) != 1:
                raise DoesNotApply(f"{self.name}: {hunk.file} has {len(places)} times, not once:\n{hunk.before}")
            after[path] = text[: places[0]] + hunk.after + text[places[0] + len(hunk.before) :]
        for path, text in after.items():
            path.write_text(text, encoding="utf-8")
        return before


def read_mutant(path: Path) -> Mutant:
    story, tests, hunks = "", [], []
    file, before, after = "", "", ""
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.startswith(("--- ", "+++ ", "@@")):
            if before or after:
                hunks.append(Hunk(file, before, after))
            before = after = ""
            if line.startswith("+++ "):
                file = line.removeprefix("+++ b/").strip()
        elif file:
            before += line[1:] if line[0] != "+" else ""
            after += line[1:] if line[0] != "-" else ""
        elif line.startswith(RED):
            tests.append(line.removeprefix(RED).strip())
        elif not story:
            story = line.strip()
    return Mutant(path.stem, story, tests, [*hunks, Hunk(file, before, after)])


def all_mutants() -> list[Mutant]:
    return [read_mutant(path) for path in sorted(FOLDER.glob("*.patch"))]
