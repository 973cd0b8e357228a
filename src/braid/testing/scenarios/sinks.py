"""Sinks of a simulated cluster: what a streaming query writes, and writes again.

A sink has one micro-batch at a time. Any client may write it, several at the same time, and again after it is stored,
as a query does that was restarted. However often that happens, each row is stored once (I10, I11).
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any, Final

import pyarrow as pa

from braid.testing.checkers.topic_history import TopicHistory

ROWS: Final = (1, 5, 20)
"""Of a block."""


class Sink:
    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.era = -1
        """The number of the micro-batch."""
        self.stored = True
        """Whether an attempt has stored all of it: only then may the next one begin."""
        self.blocks: list[Any] = []
        """Arrow tables, the same in each attempt."""

    def begin(self, random: Random, producer: int, history: TopicHistory) -> None:
        """Make the next micro-batch, of values that nothing else has."""
        self.era += 1
        self.stored = False
        self.blocks = []
        number = 0
        for _ in range(random.randint(1, 3)):
            keys, values = [], []
            for _ in range(random.choice(ROWS)):
                number += 1
                keys.append(b"key-%d" % random.randrange(8) if random.random() < 0.7 else None)
                values.append(b"%d/%d/" % (producer, number))
                history.give(producer, number, keys[-1], values[-1])
            self.blocks.append(pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}))

    def values(self) -> Iterator[bytes]:
        for block in self.blocks:
            yield from block.column("value").to_pylist()
