"""What clients are told about topics: layout, and the address of each segment's owner."""

from __future__ import annotations

from braid.broker.segments import Segments
from braid.broker.topics import Topics
from braid.metadata import paths
from braid.metadata.store import Store
from braid.model.ids import Epoch
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership
from braid.model.registration import Registration
from braid.wire.operations import SegmentRoute, TopicRoute


class TopologyView:
    def __init__(self, store: Store, topics: Topics, segments: Segments) -> None:
        self.own_address = ""
        self.told_address = ""
        """What clients are told of this broker's own segments: its address, or HERE."""
        self._store = store
        self._topics = topics
        self._segments = segments

    @property
    def generation(self) -> int:
        """Rises with everything that a route shows: layouts, and who owns the segments."""
        return max(self._topics.generation, self._segments.generation)

    async def route_for_clients(self, path: str) -> TopicRoute:
        return await self.route(path, self.told_address)

    async def route(self, path: str, own_address: str = "") -> TopicRoute:
        """The routing of one topic; topic id 0 if it does not exist."""
        topic = self._topics.find(path)
        if topic is None:
            return TopicRoute(path, 0, 0, ())
        name = TopicName.parse(path)
        served = {segment.name.id: segment for segment in self._segments.of_topic(path)}
        routes = []
        for info in topic.layout.segments.values():
            here = served.get(info.segment_id)
            if here is not None:
                owner, epoch = own_address or self.own_address, here.epoch
            else:
                owner, epoch = await self._elsewhere(SegmentName.of(name, info))
            routes.append(
                SegmentRoute(
                    info.segment_id,
                    info.hash_range.start,
                    info.hash_range.end,
                    info.is_active,
                    tuple(info.parent_ids),
                    tuple(info.child_ids),
                    owner,
                    epoch,
                )
            )
        return TopicRoute(path, topic.id, topic.layout.epoch, tuple(routes))

    async def _elsewhere(self, name: SegmentName) -> tuple[str, Epoch]:
        """Who owns a segment that is not served here. That may be this broker, which then will serve it soon."""
        entry = await self._store.get(paths.ownership(name.topic.path, name.descriptor))
        if entry is None:
            return "", Epoch(0)
        ownership = Ownership.from_json(entry.value)
        registration = await self._store.get(paths.broker(ownership.owner))
        if registration is None:
            return "", ownership.epoch
        return Registration.from_json(registration.value).address, ownership.epoch
