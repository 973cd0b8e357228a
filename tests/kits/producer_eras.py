"""Batches of a producer that writes in eras."""

from __future__ import annotations

from braid.model.batch.identity import derived_id

WRITER = derived_id("query", 7, 3)


def at(era: int, number: int) -> int:
    return (era << 32) + number
