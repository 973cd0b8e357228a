"""The call about a topic's history: to let a chunk that somebody has joined take the place of small ones.

Joining is not the broker's work (storage/history/compaction.py); that the segment's owner, and nobody else, changes its
catalog is. Any broker takes the call and reaches the owner behind it. Repeating it is fine: the second swap finds the
first.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from braid.broker.admin.arguments import ReplaceChunks
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.broker.segments.segment_access import SwapChunks
from braid.model.errors import SegmentNotFound
from braid.model.ids import SegmentId
from braid.model.names import SegmentName

_log: Final = logging.getLogger(__name__)


class HistoryCalls:
    def __init__(self, services: CallServices) -> None:
        self._services = services

    async def replace_chunks(self, arguments: ReplaceChunks, principal: Principal) -> dict[str, Any]:
        name, services = arguments.name, self._services
        services.access.check_topic(principal, name, Action.ADMIN)
        topic = services.topics.get(name.path)
        info = topic.layout.segments.get(SegmentId(arguments.segment))
        if info is None:
            raise SegmentNotFound(f"topic {name} has no segment {arguments.segment}")
        segment = services.accesses.of(SegmentName.of(name, info), topic.id)
        chunks = await segment.ask(SwapChunks(arguments.old, arguments.new))
        _log.info("%s replaced %d chunks of %s by %s", principal.name, len(arguments.old), name, arguments.new)
        return {"topic": str(name), "segment": arguments.segment, "chunks": chunks}
