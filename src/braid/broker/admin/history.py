"""The call about a topic's history: to let a chunk that somebody has joined take the place of small ones.

Joining is not the broker's work (storage/history/compaction.py); that the segment's owner, and nobody else, changes its
catalog is. Any broker takes the call and reaches the owner behind it. Repeating it is fine: the second swap finds the
first.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from braid.broker.admin.call import OnTopic, on_topic
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.broker.segments.segment_access import SwapChunks
from braid.model.errors import SegmentNotFound
from braid.model.ids import SegmentId
from braid.model.names import SegmentName

_log: Final = logging.getLogger(__name__)


class ReplaceChunks(OnTopic, frozen=True):
    needs = on_topic(Action.ADMIN)
    segment: int
    old: list[str]
    """The objects of neighbouring chunks, oldest first."""
    new: str
    """The object that holds the same batches."""

    async def run(self, services: CallServices, principal: Principal) -> dict[str, Any]:
        name = self.name
        topic = services.topics.get(name.path)
        info = topic.layout.segments.get(SegmentId(self.segment))
        if info is None:
            raise SegmentNotFound(f"topic {name} has no segment {self.segment}")
        segment = services.accesses.of(SegmentName.of(name, info), topic.id)
        chunks = await segment.ask(SwapChunks(self.old, self.new))
        _log.info("%s replaced %d chunks of %s by %s", principal.name, len(self.old), name, self.new)
        return {"topic": str(name), "segment": self.segment, "chunks": chunks}
