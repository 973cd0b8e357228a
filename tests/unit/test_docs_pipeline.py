"""What the pages about Spark say of options and settings is what the code takes."""

from __future__ import annotations

import re
from pathlib import Path

from braid.client.client import DEFAULT_TIMEOUT_S
from braid.spark import session
from braid.spark.sink import options as sink_options
from braid.spark.source import options
from braid.wire.address import DEFAULT_URL

PAGES = Path(__file__).parents[2] / "docs" / "pipeline"


def table(page: str, after: str) -> dict[str, str]:
    """The first table behind `after`: its second column by the names in its first."""
    text = (PAGES / page).read_text(encoding="utf-8").partition(f"\n{after}")[2]
    rows = re.search(r"(?:^\|.*\n)+", text, flags=re.MULTILINE)
    assert rows is not None
    found = re.findall(r"^\| (`[^|]+) \| ([^|]*)\|", rows[0], flags=re.MULTILINE)
    return {name: second.strip() for names, second in found for name in re.findall(r"`([^`]+)`", names)}


def test_every_option_of_reading_is_in_the_table_and_no_other() -> None:
    rows = table("README.md", "Reading (")
    assert sorted(rows) == sorted(options.NAMES)
    assert DEFAULT_URL in rows["url"]
    assert rows["timeout"] == f"{DEFAULT_TIMEOUT_S:g}"
    given = options.SourceOptions.parse({"topic": "orders"})
    assert rows["failOnDataLoss"] == f"`{given.fail_on_data_loss}`".lower()
    assert rows["includeHeaders"] == f"`{given.include_headers}`".lower()


def test_every_option_of_writing_is_in_the_table_and_no_other() -> None:
    rows = table("README.md", "Writing (")
    assert sorted(rows) == sorted(sink_options.NAMES)
    assert rows["ordering"] == f"`{sink_options.SinkOptions.parse({'topic': 'orders'}, streaming=False).ordering}`"


def test_the_settings_that_are_recommended_are_those_of_our_own_sessions() -> None:
    rows = table("clusters.md", "## A session of your own")
    ours = {f"{name}={value}" for name, value in session.SETTINGS.items()}
    assert {name for name in rows if "=" in name} <= ours
