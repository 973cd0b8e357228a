"""A small dose of `make chaos`, which breaks things for longer, and draws another seed each time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.chaos.__main__ import TOPICS, main

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_replicated_topics_keep_their_promises_while_brokers_are_killed_and_cut_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["--seconds", "10", "--seed", "3", "--folder", str(tmp_path / "cluster")])
    said = capsys.readouterr().out
    assert code == 0, said
    assert "What happened: nothing" not in said
    for topic in TOPICS:
        assert re.search(rf" {topic}: [\d,]+ records in \d+ segments are what was confirmed, seen and read\n", said)
        assert re.search(rf" {topic}: \d+ copies are equal: [1-9][\d,]* pairs of batches were compared\n", said)
