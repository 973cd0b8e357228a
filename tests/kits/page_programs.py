"""The Python programs of a page in docs/, and how they run: in order, each with the names that earlier ones left."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple


class Program(NamedTuple):
    page: Path
    text: str
    line: int
    """Of the page, at which it begins."""

    @property
    def promised(self) -> list[str]:
        return re.findall(r"# prints (.+)", self.text)

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"


def programs(page: Path) -> Iterator[Program]:
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        yield Program(page, found[1], text.count("\n", 0, found.start(1)) + 1)


def compiled(program: Program, instead: Mapping[str, str]) -> CodeType:
    """With `await` outside of functions, as in a notebook; errors name the line of the page. `instead` has real
    addresses for those that the page writes."""
    text = program.text
    for written, real in instead.items():
        text = text.replace(written, real)
    lines = "\n" * (program.line - 1) + text
    code: CodeType = compile(lines, program.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    return code


async def run(code: CodeType, namespace: dict[str, Any]) -> str:
    """What it prints. Code that does not await runs in a thread, because it may block or bring its own loop."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        if code.co_flags & inspect.CO_COROUTINE:
            await eval(code, namespace)
        else:
            await asyncio.to_thread(exec, code, namespace)
    return said.getvalue()
