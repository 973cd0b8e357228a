"""What the client knows of topics: which segment takes a key, and which broker serves a segment.

The first question about a topic fetches its routing and asks the broker to push changes. A routing counts only if its
generation is newer than the one in hand, whether it was fetched or pushed, so that a slow answer never undoes a newer
push. Nothing here is needed for correctness: a broker refuses what is routed by a wrong map, and the refusal makes the
client fetch again (`refresh`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from functools import cached_property

import msgspec

from braid.client.address import parse_address
from braid.client.link import Link
from braid.client.pool import Pool
from braid.model.errors import ConnectionLost, NotServing, SegmentNotFound, TopicNotFound
from braid.ports.network import Address
from braid.wire.operations import Kind, Route, SegmentRoute, TopicRoute, Topology, TopologyRequest, encode


class TopicMap(msgspec.Struct, frozen=True, dict=True):
    """The routing of one topic, at one generation."""

    generation: int
    route: TopicRoute

    @property
    def topic(self) -> str:
        return self.route.topic

    @property
    def topic_id(self) -> int:
        return self.route.topic_id

    @cached_property
    def active(self) -> tuple[SegmentRoute, ...]:
        """The segments that take writes, in order of their ranges."""
        active = (segment for segment in self.route.segments if segment.active)
        return tuple(sorted(active, key=lambda segment: segment.first_hash))

    @cached_property
    def starts(self) -> list[int]:
        return [segment.first_hash for segment in self.active]

    @cached_property
    def by_id(self) -> dict[int, SegmentRoute]:
        return {segment.id: segment for segment in self.route.segments}

    def find_active(self, key_hash: int) -> SegmentRoute:
        return self.active[bisect_right(self.starts, key_hash) - 1]

    def segment(self, segment_id: int) -> SegmentRoute:
        try:
            return self.by_id[segment_id]
        except KeyError:
            raise SegmentNotFound(f"topic {self.topic} has no segment {segment_id}") from None

    def publish_route(self, segment_id: int) -> bytes:
        """What a publish to this segment carries, encoded."""
        return encode(Route(self.topic, self.topic_id, segment_id, self.route.layout_epoch))

    def owner(self, segment_id: int) -> Address:
        owner = self.segment(segment_id).owner
        if not owner:
            raise NotServing(f"nobody serves segment {segment_id} of topic {self.topic} at the moment")
        return parse_address(owner)


class Routing:
    def __init__(self, timeout_s: float) -> None:
        self.pool: Pool
        """Set by the client: pool and routing know each other."""
        self._timeout_s = timeout_s
        self._maps: dict[str, TopicMap] = {}
        self._fetches: dict[str, asyncio.Task[TopicMap]] = {}
        self._sources: dict[str, Link] = {}

    async def topic(self, path: str) -> TopicMap:
        """The map of this topic; fetched if it is not known, or if the link that would push its changes is gone."""
        known, source = self._maps.get(path), self._sources.get(path)
        if known is not None and source is not None and source.alive:
            return known
        return await self.refresh(path)

    async def refresh(self, path: str) -> TopicMap:
        """Fetch the map anew. Callers that ask at the same time share one fetch."""
        task = self._fetches.get(path)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._fetch(path), name=f"fetch routing of {path}")
            self._fetches[path] = task
            task.add_done_callback(lambda done: self._fetched(path, done))
        return await asyncio.shield(task)

    async def owner_link(self, path: str, segment_id: int) -> Link:
        """A link to the broker that serves this segment."""
        topic = await self.topic(path)
        return await self.pool.link(topic.owner(segment_id))

    def on_topology(self, topology: Topology) -> None:
        """A push."""
        for route in topology.topics:
            # A push may come in one read with the answer to the first fetch, before that was looked at.
            if route.topic in self._maps or route.topic in self._fetches:
                self._apply(topology.generation, route)

    async def _fetch(self, path: str) -> TopicMap:
        link = await self.pool.any()
        known = self._maps.get(path)
        request = TopologyRequest((path,), known.generation if known is not None else 0)
        topology = link.resolved(await link.ask(Kind.TOPOLOGY, encode(request), Topology, self._timeout_s))
        route = next((route for route in topology.topics if route.topic == path), None)
        if route is None:
            raise ConnectionLost(f"broker {link.broker_id} did not answer about topic {path}")
        self._sources[path] = link
        fresh = self._apply(topology.generation, route)
        if not fresh.topic_id:
            raise TopicNotFound(f"topic {path} does not exist")
        return fresh

    def _apply(self, generation: int, route: TopicRoute) -> TopicMap:
        known = self._maps.get(route.topic)
        if known is not None and known.generation >= generation:
            return known
        if not route.topic_id:
            self._maps.pop(route.topic, None)
        fresh = TopicMap(generation, route)
        if route.topic_id:
            self._maps[route.topic] = fresh
        return fresh

    def _fetched(self, path: str, task: asyncio.Task[TopicMap]) -> None:
        self._fetches.pop(path, None)
        if not task.cancelled():
            task.exception()
