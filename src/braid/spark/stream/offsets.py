"""Where a streaming query stands: the offsets that Spark keeps in the query's checkpoint.

    {"version": 1, "topic": "public/default/orders", "topicId": 7,
     "positions": {"0": "END", "1": 17, "2": 0}, "partitions": 4, "from": {"0": 12},
     "notBefore": 1794700800000000}

An offset says where a micro-batch ends and thereby where the next one begins. This JSON is stable: it lies in the
checkpoints of users, where years later a newer build must understand it.

**positions** has the *next* offset of each segment, never the last one that was read: nothing is skipped when retention
deletes up to just there. END says that a segment is sealed and was read to its end. END stays as long as the topic has
the segment, or the segment would be read again; a segment that is not named is new and begins at its first record,
because its parents are read before it.

**partitions**: into how many partitions the micro-batch that ends here is cut. Spark journals the end of a micro-batch
before it runs it, and after a crash runs it again from the journal. The sink recognises what it already has by
partition number and row number, so the second run must cut it the same way, whatever the options say by then. What the
journal holds is all that survives; so the number lies in there.

**from**: where the micro-batch that ends here begins, if the offset before it does not say so. The journal has ends
only, and the beginning of a query's first micro-batch is not among them: were it asked for again after a crash,
`latest` would be another place. The same holds where the start had to be given up because records are lost. An offset
whose `from` equals its positions is the beginning of a query: no record is before it.

**notBefore**: the `startingTimestamp` with which the query began, in microseconds. Rows that are older are left out of
every micro-batch, also of those that run again under other options; so it goes from offset to offset.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import InvalidArgument

OFFSET_VERSION: Final = 1


class StreamOffset(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    version: int = OFFSET_VERSION
    topic: str
    topic_id: int = 0
    """0: not known, because it was read from manifests that do not tell."""
    positions: dict[int, Position]
    partitions: int = 1
    since: dict[int, Position] | None = msgspec.field(default=None, name="from")
    not_before: int | None = None

    @property
    def is_beginning(self) -> bool:
        """Whether no micro-batch was made yet."""
        return self.since == self.positions

    def to_json(self) -> dict[str, Any]:
        """As Spark stores it. Equal offsets are equal texts: Spark compares them as such."""
        found: dict[str, Any] = {
            "version": self.version,
            "topic": self.topic,
            "topicId": self.topic_id,
            "positions": _positions_json(self.positions),
            "partitions": self.partitions,
        }
        if self.since is not None:
            found["from"] = _positions_json(self.since)
        if self.not_before is not None:
            found["notBefore"] = self.not_before
        return found

    @classmethod
    def beginning(
        cls, topic: str, topic_id: int, positions: dict[int, Position], not_before: int | None = None
    ) -> StreamOffset:
        """Of a query that has read nothing."""
        return cls(topic=topic, topic_id=topic_id, positions=positions, since=positions, not_before=not_before)

    @classmethod
    def from_json(cls, json: Mapping[str, Any], topic: str) -> StreamOffset:
        """Read an offset out of a checkpoint; it must be one of this topic."""
        version = json.get("version")
        if isinstance(version, int) and version > OFFSET_VERSION:
            raise InvalidArgument(
                f"the query's checkpoint has offsets of version {version}, and this build of Braid reads versions up "
                f"to {OFFSET_VERSION}; run the query with the newer Braid that wrote it"
            )
        try:
            offset = msgspec.convert(json, cls, str_keys=True)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"the query's checkpoint has an offset that is none of Braid's: {error}; it may belong to another "
                "source: give each query a checkpointLocation of its own"
            ) from None
        if offset.version < 1 or offset.partitions < 1 or not _all_sound(offset):
            raise InvalidArgument(f"the query's checkpoint has an impossible offset: {json}; it is damaged")
        if offset.topic != topic:
            raise InvalidArgument(
                f"the query's checkpoint is of topic {offset.topic}, the query reads {topic}; an offset of one topic "
                "says nothing about another: give the query a new checkpointLocation, or the topic that it had"
            )
        return offset


def begins(start: StreamOffset, end: StreamOffset) -> dict[int, Position]:
    """Where the micro-batch between these two begins. Between equal ones there is none: Spark runs those for the sake
    of watermarks, and the `from` of both is then that of the micro-batch before."""
    return start.positions if end.since is None or start == end else end.since


def is_other_topic(offset: StreamOffset, topic_id: int) -> bool:
    """Whether the topic was deleted and created again since."""
    return offset.topic_id not in (0, topic_id) and topic_id != 0


def _positions_json(positions: Mapping[int, Position]) -> dict[str, Position]:
    return {str(segment): position for segment, position in sorted(positions.items())}


def _all_sound(offset: StreamOffset) -> bool:
    return all(
        segment >= 0 and (position == END or position >= 0)
        for positions in (offset.positions, offset.since or {})
        for segment, position in positions.items()
    )
