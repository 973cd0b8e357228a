"""The position of a streaming query: the offsets that Spark keeps in the query's checkpoint.

    {"version": 1, "topic": "public/default/orders", "topicId": 7,
     "positions": {"0": "END", "1": 17, "2": 0}, "partitions": 4, "epochs": {"1": 3}, "from": {"0": 12},
     "notBefore": 1794700800000000}

An offset says where a micro-batch ends and the next one begins. This JSON is stable: it is in the checkpoints of
users, and a newer build must understand it years later.

**positions** has the *next* offset of each segment, never the last one that was read: nothing is skipped when retention
deletes up to exactly there. END says that a segment is sealed and was read to its end. END stays as long as the topic
has the segment; otherwise the segment would be read again. A segment without a position is new and begins at its first
record, because its parents are read before it.

**epochs** has the epoch of the record before each position, as far as it is known. If the topic has lost records that
the query had read, new records take their offsets. By the epoch, the query notices that (model/log/epochs.py). A
position without an epoch, as in the checkpoints of older builds, is not checked.

**partitions**: how many partitions the micro-batch that ends here has. Spark journals the end of a micro-batch before
it runs, and runs it again from the journal after a crash. The sink recognises repeated rows by partition number and row
number, so the second run must make the same partitions, even if options have changed. Only the journal survives, so the
number is in it.

**from**: where the micro-batch that ends here begins, if the offset before it does not say so. The journal has only the
ends of micro-batches. It lacks the beginning of a query's first one, and after a crash `latest` would be another place.
It also lacks the beginning of a micro-batch that skips lost records. An offset whose `from` equals its positions is the
beginning of a query: no record is before it.

**notBefore**: the `startingTimestamp` with which the query began, in microseconds. Every micro-batch leaves out older
rows, also when it runs again under other options; so each offset passes the time on to the next.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

import msgspec

from braid.client.consuming.checkpoint import END, Position
from braid.model.errors import InvalidArgument, NotServing
from braid.model.ids import Epoch
from braid.scan.snapshot import TopicSnapshot

T = TypeVar("T")

OFFSET_VERSION: Final = 1


class StreamOffset(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    version: int = OFFSET_VERSION
    topic: str
    topic_id: int = 0
    """0: not known, because the manifests do not have it."""
    positions: dict[int, Position]
    partitions: int = 1
    epochs: dict[int, Epoch] = {}
    since: dict[int, Position] | None = msgspec.field(default=None, name="from")
    not_before: int | None = None

    @property
    def is_beginning(self) -> bool:
        """Whether no micro-batch was made yet."""
        return self.since == self.positions

    def to_json(self) -> dict[str, Any]:
        """Return the JSON that Spark stores. Equal offsets have equal texts, because Spark compares texts."""
        found: dict[str, Any] = {
            "version": self.version,
            "topic": self.topic,
            "topicId": self.topic_id,
            "positions": _by_segment(self.positions),
            "partitions": self.partitions,
        }
        if self.epochs:
            found["epochs"] = _by_segment(self.epochs)
        if self.since is not None:
            found["from"] = _by_segment(self.since)
        if self.not_before is not None:
            found["notBefore"] = self.not_before
        return found

    @classmethod
    def beginning(
        cls,
        topic: str,
        topic_id: int,
        positions: dict[int, Position],
        not_before: int | None = None,
        epochs: dict[int, Epoch] | None = None,
    ) -> StreamOffset:
        """Make the first offset of a query."""
        return cls(
            topic=topic,
            topic_id=topic_id,
            positions=positions,
            epochs=epochs or {},
            since=positions,
            not_before=not_before,
        )

    @classmethod
    def from_json(cls, json: Mapping[str, Any], topic: str) -> StreamOffset:
        """Read an offset from a checkpoint. Raises if it belongs to another topic."""
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
    """Return where the micro-batch between these offsets begins. Equal offsets have no records between them: Spark runs
    such micro-batches for watermarks, and their `from` belongs to the micro-batch before."""
    return start.positions if end.since is None or start == end else end.since


def is_other_topic(offset: StreamOffset, topic_id: int) -> bool:
    """Whether the topic was deleted and created again since."""
    return offset.topic_id not in (0, topic_id) and topic_id != 0


def is_behind(snapshot: TopicSnapshot, offset: StreamOffset) -> bool:
    """Whether a snapshot is older than an offset: the newest segment of a topic is always in its layout."""
    newest = max(offset.positions, default=-1)
    return not is_other_topic(offset, snapshot.topic_id) and newest > max(snapshot.segments, default=-1)


def still_behind(snapshot: TopicSnapshot, offset: StreamOffset) -> NotServing:
    newest = max(offset.positions)
    return NotServing(f"segment {newest} of {snapshot.topic} was seen before, and is not known now; try again later")


def _by_segment(values: Mapping[int, T]) -> dict[str, T]:
    return {str(segment): value for segment, value in sorted(values.items())}


def _all_sound(offset: StreamOffset) -> bool:
    return all(
        segment >= 0 and (position == END or position >= 0)
        for positions in (offset.positions, offset.since or {})
        for segment, position in positions.items()
    ) and all(epoch >= 0 for epoch in offset.epochs.values())
