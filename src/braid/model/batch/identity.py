"""The identity of a producer in the logs that it writes to, where the identity must outlive the program.

An ordinary producer draws a random id when it starts, and no other producer ever uses that id. A *derived* id is
computed from the work instead: every program that is told to write the same thing, in another process and on another
machine, comes to the same id, and the logs recognise what they have. The highest bit of an id tells the two apart.

    id        1 ‖ 63 bits of blake2b over what identifies the writer
    sequence  era, 32 bits ‖ number of the record in this era and segment, 32 bits

One identity writes many times: its *eras*. Each begins at number 0, a later one may begin at any time, and an earlier
one must be complete by then (storage/log/producers.py says what logs conclude from that). Spark's micro-batches are
eras: the next one begins when the last one is written.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import msgspec

from braid.model.errors import InvalidArgument

DERIVED: Final = 1 << 63
"""Set in ids that are derived, not in those that are drawn."""
ERA_BITS: Final = 32
MAX_ERA: Final = (1 << 32) - 1
ERA_RECORDS: Final = 1 << ERA_BITS
"""The most records that an era can number in one segment."""

NOT_KNOWN: Final = -1
"""As a producer's next sequence in a log: the log has nothing of the producer, or has forgotten it."""
CANNOT_TELL: Final = -2
"""As a producer's next sequence: the log has forgotten producers, and this one may be among them; or the producer used
one id in several of the logs that this log continues. In the second case, and if this log continues others, only those
can tell."""


class ProducerIdentity(msgspec.Struct, frozen=True):
    """The identity of a producer in one segment."""

    id: int
    era: int
    number: int = 0
    """Of its first record in this era and segment."""

    def __post_init__(self) -> None:
        if not DERIVED <= self.id < 2 * DERIVED:
            raise InvalidArgument(f"{self.id:#x} is no derived producer id: it has 64 bits, of which the highest is 1")
        if not 0 <= self.era <= MAX_ERA:
            raise InvalidArgument(f"era {self.era} is not among 0 to {MAX_ERA}")

    @property
    def first_sequence(self) -> int:
        return (self.era << ERA_BITS) + self.number


def derived_id(*parts: str | int) -> int:
    """Derive an id: the same for the same parts, everywhere and for ever. Checkpoints of running queries rely on it."""
    digest = blake2b(digest_size=8)
    for part in parts:
        data = str(part).encode()
        digest.update(len(data).to_bytes(4, "little"))
        digest.update(data)
    return DERIVED | int.from_bytes(digest.digest(), "little")


def is_derived(producer_id: int) -> bool:
    return producer_id >= DERIVED


def era_of(sequence: int) -> int:
    return sequence >> ERA_BITS


def begins_era(producer_id: int, first_sequence: int) -> bool:
    """Tell whether a batch of this producer with this first sequence is the first one of an era."""
    return is_derived(producer_id) and not first_sequence % ERA_RECORDS


def leaves_era(producer_id: int, first_sequence: int, count: int) -> bool:
    """Tell whether a batch runs into the numbers of the next era."""
    return is_derived(producer_id) and first_sequence % ERA_RECORDS + count > ERA_RECORDS
