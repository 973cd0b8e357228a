"""Numbers that must not be mixed up. Each is an `int` at run time and a type of its own to the type checker."""

from typing import NewType

Offset = NewType("Offset", int)
"""A record's position in one segment's log: 0, 1, 2, …"""

Epoch = NewType("Epoch", int)
"""Ownership epoch: counts the owners of one segment. Stamped into every batch, chunk and metadata write."""

LayoutEpoch = NewType("LayoutEpoch", int)
"""Counts the layouts of one topic."""

Generation = NewType("Generation", int)
"""The metadata revision that a client's routing reflects."""

Revision = NewType("Revision", int)
"""A metadata store's commit counter: one number for the whole store, raised by every transaction that writes."""

SegmentId = NewType("SegmentId", int)
"""Identifies a hash-range segment inside its topic; never reused."""

ProducerId = NewType("ProducerId", int)
"""Identifies one producer for deduplication: an unsigned 64-bit number, 0 for none."""

Sequence = NewType("Sequence", int)
"""Counts the records of one producer in one segment."""
