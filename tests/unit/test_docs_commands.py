"""Every `braid …` in the pages for newcomers is a command that exists, with options that it has."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from braid.cli.main import braid

DOCS = Path(__file__).parents[2] / "docs"
OF_THE_CONSOLE = {"console", "--console"}
"""The web console is an extra of its own; a build without it has neither the command nor the option."""
PAGES = [DOCS / "tutorial.md", *sorted((DOCS / "coming-from").glob("*.md"))]


def commands(page: Path) -> Iterator[str]:
    text = page.read_text(encoding="utf-8").replace("\\|", "|")
    for code in re.findall(r"`([^`\n]+)`|^(?:    (?:\$ )?|(?=braid ))(.+)$", text, flags=re.MULTILINE):
        for part in re.split(r"[|;]| && ", "".join(code)):
            if part.strip().startswith("braid "):
                yield part.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    found = list(commands(page))
    assert found
    for line in found:
        words = shlex.split(line.replace("…", ""))[1:]
        command: click.Command = braid
        context = click.Context(braid)
        while isinstance(command, click.Group) and words:
            name = words.pop(0)
            inner = command.get_command(context, name)
            assert inner is not None or name in OF_THE_CONSOLE, line
            if inner is None:
                break
            command = inner
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if re.match(r"--?[a-z]", word)} <= known | OF_THE_CONSOLE, line
