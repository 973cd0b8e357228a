"""Numbers that must not be mixed up. Each is an `int` at run time and a type of its own to the type checker."""

from random import Random
from typing import Final, NewType

Offset = NewType("Offset", int)
"""A record's position in one segment's log: 0, 1, 2, …"""

Epoch = NewType("Epoch", int)
"""Ownership epoch: counts the owners of one segment. Stamped into every batch, chunk and metadata write."""

LayoutEpoch = NewType("LayoutEpoch", int)
"""Counts the layouts of one topic."""

Revision = NewType("Revision", int)
"""A metadata store's commit counter: one number for the whole store, raised by every transaction that writes."""

SegmentId = NewType("SegmentId", int)
"""Identifies a hash-range segment inside its topic; never reused."""

ProducerId = NewType("ProducerId", int)
"""Identifies one producer for deduplication: an unsigned 64-bit number, 0 for none."""

Sequence = NewType("Sequence", int)
"""Counts the records of one producer in one segment."""

RequestId = NewType("RequestId", int)
"""Names one call of a client, however often it is sent. What the call makes is stored with it."""

NO_REQUEST: Final = RequestId(0)
MAX_RANDOM_ID: Final = (1 << 53) - 1
"""What every JSON parser reads exactly."""


def random_id(random: Random) -> int:
    """Draw a number from 1 on, so large that no other draw gets it."""
    return random.randint(1, MAX_RANDOM_ID)
