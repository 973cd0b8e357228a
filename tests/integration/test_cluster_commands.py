"""The commands that move segments between brokers, against three real brokers that share metadata and storage."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.kits.commands import run
from tests.kits.forked_broker import ForkedBroker
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


class Brokers:
    """b1, b2 and b3; commands go to b1, which no test kills."""

    def __init__(self, folder: Path) -> None:
        shared = ("--metadata", f"sqlite:{folder / 'metadata.db'}", "--storage", f"file://{folder / 'shared'}")
        self.processes = {id_: ForkedBroker(folder / id_, "--id", id_, *shared) for id_ in ("b1", "b2", "b3")}

    def run(self, *arguments: str, given: bytes = b"", code: int = 0) -> str:
        """What the command prints."""
        return run(self.processes["b1"].url, *arguments, given=given, code=code)

    def listed(self) -> dict[str, dict[str, Any]]:
        return {each["id"]: each for each in json.loads(self.run("broker", "list", "--json"))}

    def owners(self) -> list[str]:
        found = json.loads(self.run("topic", "stats", "orders", "--json"))
        return [segment["owner"] for segment in found["segments"].values()]


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    made = Brokers(tmp_path)
    try:
        with ThreadPoolExecutor() as threads:
            list(threads.map(ForkedBroker.start, made.processes.values()))
        yield made
    finally:
        for process in made.processes.values():
            if process.running:
                process.kill()


def test_segments_move_brokers_are_drained_and_what_a_dead_one_had_is_recovered(brokers: Brokers) -> None:
    brokers.run("topic", "create", "orders", "--segments", "3")
    assert sorted(brokers.owners()) == ["b1", "b2", "b3"]
    brokers.run("produce", "orders", given=b"".join(b"line %d\n" % number for number in range(1000)))

    moved = brokers.run("topic", "move", "orders", "--to", "b2")
    assert len(re.findall(r"^ +[012] +b[13] +b2 +2 +\d+ ms$", moved, re.MULTILINE)) == 2
    assert len(re.findall(r"^ +[012] +b2 +b2 +1 +was there$", moved, re.MULTILINE)) == 1
    assert brokers.owners() == ["b2"] * 3

    assert brokers.run("broker", "drain", "b2") == "Broker b2 is drained.\n"
    assert "b2" not in brokers.owners()
    assert [each["state"] for each in brokers.listed().values()] == ["active", "drained", "active"]
    assert brokers.run("broker", "activate", "b2") == "Broker b2 is active.\n"

    brokers.run("topic", "unload", "orders", "--segment", "0")
    brokers.run("topic", "move", "orders", "--to", "b3")
    brokers.processes["b3"].kill()
    wait_until(lambda: brokers.listed()["b3"]["state"] == "down", "b3 is shown as down")
    assert "its owner b3 is down" in brokers.run("topic", "move", "orders", "--to", "b1", code=1)
    assert "chunks reach offset" in brokers.run("topic", "recover", "orders", code=2)
    recovered = brokers.run("topic", "recover", "orders", "--to", "b1", "--accept-loss")
    assert len(re.findall(r"^ +[012] +b3 +b1 +\d+ +\d+ ms$", recovered, re.MULTILINE)) == 3
    assert brokers.owners() == ["b1"] * 3

    # All was handed over at least once, so all of it was in chunks.
    consumed = brokers.run("consume", "orders", "-s", "s", "--from", "earliest", "--count", "1000")
    assert sorted(consumed.splitlines()) == sorted(f"line {number}" for number in range(1000))
    for id_ in ("b1", "b2"):
        assert brokers.processes[id_].stop() == 0
