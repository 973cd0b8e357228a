"""The checker of cursors and their drained marks: what each transaction leaves of them.

The fence checker shows it each transaction before the store applies it:

- a mark stands beside a cursor only when the segment's log has ended, and the cursor is at its end, or the rest is
  deleted or lost (I4): otherwise consumers of the children would go on while a parent is to be read;
- one seek sets ancestors back before their descendants (I4): a broker that knows the place of a descendant's cursor
  knows that the ancestor is to be read first.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.metadata.store import Delete, Operation, Put
from braid.model.ids import NO_REQUEST, RequestId, SegmentId
from braid.model.layout import SegmentInfo, reachable
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.model.stored_record import decode
from braid.model.subscription import Cursor, Drained
from braid.testing.checkers.history import PromiseBroken

Mark = tuple[str, str, str]
"""A topic's path, a segment's descriptor, and a subscription."""


class CursorChecker:
    def __init__(self, store: MemoryStore, segments: Callable[[str], Mapping[SegmentId, SegmentInfo]]) -> None:
        """`segments` returns every segment that a topic has had, by the topic's path."""
        self.may_lack_records: Callable[[str], bool] = lambda _path: False
        """Tells whether retention may have deleted records of a topic, or a loss was accepted."""
        self._server = store._server
        self._segments = segments
        self._placed: dict[tuple[str, str, RequestId], set[SegmentId]] = defaultdict(set)
        """By topic, subscription and call: the segments on which the call has placed the cursor."""

    def on_transaction(self, operations: Sequence[Operation]) -> None:
        """A transaction is to be applied."""
        after: dict[str, bytes | None] = {
            operation.key: None if isinstance(operation, Delete) else operation.value for operation in operations
        }
        for operation in operations:
            match operation.key.split("/"):
                case ["", "segments", *topic, descriptor, "cursors", subscription]:
                    mark = "/".join(topic), descriptor, subscription
                    if isinstance(operation, Put):
                        self._check_order(mark, operation)
                    self._check_mark(mark, after)
                case ["", "segments", *topic, descriptor, "drained", subscription]:
                    self._check_mark(("/".join(topic), descriptor, subscription), after)

    def _check_order(self, mark: Mark, put: Put) -> None:
        path, descriptor, subscription = mark
        placed_by = decode(Cursor, put.value).placed_by
        stored = self._server.get(put.key)
        before = decode(Cursor, stored.value).placed_by if stored is not None else NO_REQUEST
        if placed_by in (NO_REQUEST, before):
            return
        segment, known = SegmentName.at(path, descriptor).id, self._segments(path)
        placed = self._placed[path, subscription, placed_by]
        placed.add(segment)
        for other in placed:
            if segment in reachable(known[other].parent_ids, lambda each: known[each].parent_ids):
                raise PromiseBroken(
                    "I4", f"{subscription} of {path} was set on segment {other} before its ancestor {segment}"
                )

    def _check_mark(self, mark: Mark, after: Mapping[str, bytes | None]) -> None:
        path, descriptor, subscription = mark
        drained = self._read(paths.drained(path, descriptor, subscription), after)
        record = self._read(paths.ownership(path, descriptor), after)
        if drained is None or record is None:
            return
        cursor = self._read(paths.cursor(path, descriptor, subscription), after)
        end, offset = decode(Drained, drained).end, decode(Cursor, cursor).offset if cursor else None
        ended_at = Ownership.from_json(record).ended_at  # The seal is durable before the record says so.
        if offset is None or ((ended_at not in (None, end) or offset != end) and not self.may_lack_records(path)):
            raise PromiseBroken(
                "I4", f"{subscription} stands at {offset} of {descriptor} of {path}, ended at {ended_at}: {drained!r}"
            )

    def _read(self, key: str, after: Mapping[str, bytes | None]) -> bytes | None:
        """Return what stands there when the transaction is applied."""
        if key in after:
            return after[key]
        entry = self._server.get(key)
        return entry.value if entry is not None else None
