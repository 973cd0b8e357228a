"""Every program in docs/pipeline/without-spark.md runs, in order, and prints what the page says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from braid.scan.columns import TOPIC_SCHEMA
from tests.kits.forked_broker import ForkedBroker
from tests.kits.page_programs import compiled, programs, run

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "pipeline" / "without-spark.md"
URL, STORAGE = "braid://127.0.0.1:6660", "file:///srv/braid/history"


def test_every_program_runs_and_prints_what_the_page_says(tmp_path: Path) -> None:
    async def all_of_them(instead: dict[str, str]) -> None:
        namespace: dict[str, Any] = {}
        for program in programs(PAGE):
            said = await run(compiled(program, instead), namespace)
            assert said.splitlines() == program.promised, str(program)

    storage = f"file://{tmp_path}/history"
    with ForkedBroker(tmp_path / "data", "--storage", storage) as broker:
        asyncio.run(all_of_them({URL: broker.url, STORAGE: storage}))


def test_the_table_of_columns_is_the_schema() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    types = {name: str(TOPIC_SCHEMA.field(name).type) for name in TOPIC_SCHEMA.names}
    assert [(name, kind.replace("UTC", "tz=UTC")) for name, kind in rows] == list(types.items())
