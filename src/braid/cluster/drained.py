"""Which sealed segments each subscription has drained, as this broker knows it: the marks that owners keep beside their
cursors (broker/cursors/cursors.py). Every broker follows these few keys, and no cursor."""

from __future__ import annotations

import logging
from typing import Final, NamedTuple

from braid.metadata import paths
from braid.metadata.view import Table, View
from braid.model.errors import InvalidName
from braid.model.ids import SegmentId
from braid.model.names import SegmentName
from braid.model.stored_record import decode
from braid.model.subscription import Drained

_log: Final = logging.getLogger(__name__)


class DrainedKey(NamedTuple):
    path: str
    descriptor: str
    subscription: str

    @property
    def segment(self) -> SegmentId:
        return SegmentName.at(self.path, self.descriptor).id


class DrainedSegments:
    def __init__(self, view: View) -> None:
        self.view: Final = view
        self.table: Final[Table[DrainedKey, Drained]] = view.add(
            Table(paths.SEGMENTS_PREFIX, _identify, lambda data: decode(Drained, data), lambda key: paths.drained(*key))
        )
        self._by_subscription: dict[tuple[str, str], frozenset[SegmentId]] = {}
        self.table.on_change.append(self._index)

    def of(self, path: str, subscription: str) -> frozenset[SegmentId]:
        """Return the segments of a topic that the subscription has drained."""
        return self._by_subscription.get((path, subscription), frozenset())

    def of_topic(self, path: str) -> dict[str, frozenset[SegmentId]]:
        """Return the drained segments of a topic by subscription."""
        return {name: segments for (topic, name), segments in self._by_subscription.items() if topic == path}

    def _index(self, key: DrainedKey) -> None:
        whose, segment = (key.path, key.subscription), frozenset((key.segment,))
        known = self.of(*whose)
        drained = known | segment if key in self.table else known - segment
        if drained:
            self._by_subscription[whose] = drained
        else:
            self._by_subscription.pop(whose, None)


def _identify(key: str) -> DrainedKey | None:
    """Return the mark that a key is; None for any other key."""
    found = paths.drained_of(key)
    if found is None:
        return None
    try:
        SegmentName.at(found[0], found[1])
    except InvalidName as error:
        _log.error("%s is no drained mark: %s", key, error)
        return None
    return DrainedKey(*found)
