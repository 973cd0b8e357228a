"""A log under `kill -9`, on a real disk, with SQLite and chunks as files.

The owner says each confirmed batch on its standard output; the test kills it after some of them, starts the next owner
in the next epoch, which sends again what was not confirmed, and at the end reads everything.
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.model.batch.header import body_of
from braid.model.errors import RecoveryUnsafe
from tests.kits import storage_owner
from tests.kits.storage_owner import RECORDS, Machine

pytestmark = pytest.mark.processes


SOURCES = str(Path(__file__).parents[2] / "src")
ROTATING = 4_000
CALM = 1 << 20


class Owner:
    def __init__(self, root: Path, epoch: int, first: int, count: int, file_bytes: int) -> None:
        arguments = [str(root), *map(str, (epoch, first, count, file_bytes))]
        self.process = subprocess.Popen(
            [sys.executable, storage_owner.__file__, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": SOURCES},
        )
        self.said: list[str] = []

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"the owner ended by itself after {self.said[-3:]}"
        self.said.append(line.strip())
        return self.said[-1]

    def kill(self) -> None:
        """`kill -9`; also takes what it had said and nobody had read."""
        self.process.kill()
        self._read_the_rest()

    def wait(self) -> None:
        self._read_the_rest()
        assert self.process.returncode == 0

    def _read_the_rest(self) -> None:
        assert self.process.stdout is not None
        if not self.process.stdout.closed:
            # The last line may be cut off in its middle: then nobody was told.
            self.said += [line.strip() for line in self.process.stdout.read().splitlines(True) if line[-1:] == "\n"]
            self.process.wait()
            self.process.stdout.close()

    def confirmed(self) -> dict[int, int]:
        words = (line.split() for line in self.said)
        return {int(each[1]): int(each[2]) for each in words if each[0] == "confirmed"}


class Owners:
    """One after the other, and what they confirmed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.epoch = 0
        self.confirmed: dict[int, int] = {}
        self.running: list[Owner] = []

    def start(self, *, file_bytes: int, count: int = 0) -> Owner:
        self.epoch += 1
        # The one before may have stored more than it could say: from the first unconfirmed batch on, all is sent again.
        owner = Owner(self.root, self.epoch, len(self.confirmed), count, file_bytes)
        self.running.append(owner)
        return owner

    def note(self, owner: Owner) -> None:
        for number, offset in owner.confirmed().items():
            assert self.confirmed.setdefault(number, offset) == offset
        assert list(self.confirmed) == list(range(len(self.confirmed)))

    async def check(self, broker: str = "a") -> None:
        """Each confirmed batch at its offset, no gap, no repeat, each batch once."""
        async with Machine(str(self.root), CALM, broker) as machine:
            self.epoch += 1
            segment = await machine.open(self.epoch)
            assert segment.recovered.damage == []
            reader = segment.reader(0)
            stored: dict[int, int] = {}
            while batches := await reader.read_available(50_000):
                for header, data in batches:
                    number = int(bytes(body_of(data, header)))
                    assert number not in stored, "I10"
                    assert header.base_offset == RECORDS * len(stored), "I1"
                    stored[number] = header.base_offset
            assert self.confirmed.items() <= stored.items(), "I2"
            assert list(stored) == list(range(len(stored)))
            await segment.close()


@pytest.fixture
def owners(tmp_path: Path) -> Iterator[Owners]:
    owners = Owners(tmp_path)
    yield owners
    for owner in owners.running:
        owner.kill()


@pytest.mark.parametrize(("file_bytes", "rounds"), [(CALM, 6), (ROTATING, 8)], ids=["calm", "rotating all the time"])
def test_whatever_was_confirmed_is_there_after_any_number_of_kills(
    owners: Owners, file_bytes: int, rounds: int
) -> None:
    chance = random.Random(file_bytes)
    for _ in range(rounds):
        owner = owners.start(file_bytes=file_bytes)
        for _ in range(chance.randrange(1, 120)):
            owner.line()
        owner.kill()
        owners.note(owner)
    assert len(owners.confirmed) > 20
    asyncio.run(owners.check())


def test_a_kill_at_any_moment_of_a_hand_over_leaves_a_log_that_can_be_continued(owners: Owners) -> None:
    steps = (1, 2, 3, 5, 7)
    for step in steps:
        owner = owners.start(file_bytes=ROTATING, count=30)
        while owner.line() != "handing over":
            pass
        for _ in range(step):
            if owner.line() == "handed over":
                break
        owner.kill()
        owners.note(owner)
    assert len(owners.confirmed) == len(steps) * 30
    asyncio.run(owners.check())


def test_another_broker_continues_after_a_hand_over_and_not_after_a_kill(owners: Owners) -> None:
    owner = owners.start(file_bytes=ROTATING, count=30)
    owner.wait()
    owners.note(owner)
    assert owner.said[-1] == "handed over"
    owner = owners.start(file_bytes=ROTATING)
    while len(owner.confirmed()) < 5:
        owner.line()
    owner.kill()
    owners.note(owner)
    with pytest.raises(RecoveryUnsafe):
        asyncio.run(owners.check("b"))
    owner = owners.start(file_bytes=ROTATING, count=10)
    owner.wait()
    owners.note(owner)
    asyncio.run(owners.check("b"))
