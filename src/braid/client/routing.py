"""What the client knows of topics: which segment takes a key, and which broker serves a segment.

The first question about a topic fetches its routing and asks the broker to push changes. A routing counts only if its
generation is newer than the one in hand, whether it was fetched or pushed, so that a slow answer never undoes a newer
push. Brokers are told which generation counts here now. When the link that pushes is lost, another broker is asked.

A broker that does not serve a segment any more may say who does (`Moved`). That counts at once, before any push: the
segment's owner in the map becomes another, in a higher ownership epoch. Since the broker that said so may know more
than the one that pushes, a newer map never takes a segment back to a lower epoch.

Nothing here is needed for correctness: a broker refuses what is routed by a wrong map. Whoever is refused, or loses its
link, goes on by its `OwnerSearch`: it waits until the map names a later owner, and asks anew after a pause that
doubles. So a segment that moves is found as soon as its new owner serves it, and a broker that dies costs its clients
no error.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from functools import cached_property
from typing import Final

import msgspec

from braid.client.pool import Pool
from braid.client.retry import Backoff
from braid.client.shared import result_of
from braid.model.errors import (
    BraidError,
    ClientClosed,
    ConnectionLost,
    Moved,
    NotServing,
    SegmentNotFound,
    TimedOut,
    TopicNotFound,
)
from braid.ports.network import Address
from braid.wire.address import parse_address
from braid.wire.link import Link
from braid.wire.operations import Kind, Route, SegmentRoute, TopicRoute, Topology, TopologyRequest, encode

LOOKUP_TIMEOUT_S: Final = 3.0
"""How long one broker may take to answer a lookup before another one is asked."""
NOWHERE: Final = -1
"""As an epoch: below that of every owner."""


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

    def addresses(self) -> frozenset[Address]:
        """Of all brokers that it names."""
        named = {segment.owner for segment in self.route.segments} | {self.route.controller}
        return frozenset(parse_address(address) for address in named if address)


class Routing:
    def __init__(self, timeout_s: float) -> None:
        self.pool: Pool
        """Set by the client: pool and routing know each other."""
        self._timeout_s = timeout_s
        self._maps: dict[str, TopicMap] = {}
        """Also of topics that were deleted, so that nothing older brings them back."""
        self._fetches: dict[str, asyncio.Task[TopicMap]] = {}
        self._sources: dict[str, Link] = {}
        """Who pushes the changes of a topic."""
        self._watching_again: asyncio.Task[None] | None = None
        self._closed = False
        self._named: dict[str, frozenset[Address]] = {}
        """The brokers that each topic's map names."""
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """Those who wait for the map of a topic to change."""

    async def topic(self, path: str) -> TopicMap:
        """The map of this topic; fetched if it is not known, or if the link that would push its changes is gone."""
        known, source = self._maps.get(path), self._sources.get(path)
        if known is not None and known.topic_id and source is not None and source.alive:
            return known
        return await self.refresh(path)

    async def refresh(self, path: str) -> TopicMap:
        """Fetch the map anew. Callers that ask at the same time share one fetch."""
        task = self._fetches.get(path)
        if task is None:
            if self._closed:
                raise ClientClosed("the client is closed")
            task = asyncio.get_running_loop().create_task(self._fetch(path), name=f"fetch routing of {path}")
            self._fetches[path] = task
            task.add_done_callback(lambda done: self._fetched(path, done))
        return await result_of(task)

    async def owner_link(self, path: str, segment_id: int) -> Link:
        """A link to the broker that serves this segment."""
        topic = await self.topic(path)
        return await self.pool.link(topic.owner(segment_id))

    async def controller_link(self, path: str) -> Link:
        """A link to the broker that runs the topic's ordered subscriptions, or to any that may become it."""
        topic = await self.topic(path)
        controller = topic.route.controller
        return await (self.pool.link(parse_address(controller)) if controller else self.pool.any())

    async def changed(self, path: str, segment_id: int, than_epoch: int, timeout_s: float) -> bool:
        """Whether, within this time, the map names an owner of the segment with an epoch above `than_epoch`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_later(path, segment_id, than_epoch):
                    future = asyncio.get_running_loop().create_future()
                    waiting = self._waiting.setdefault(path, [])
                    waiting.append(future)
                    try:
                        await future
                    finally:  # Maps may stay as they are for long.
                        if future in waiting:
                            waiting.remove(future)
        except TimeoutError:
            return False
        return True

    def redirect(self, path: str, segment_id: int, moved: Moved) -> None:
        """A broker said who serves a segment now. It counts unless the map knows better."""
        known = self._maps.get(path)
        if known is None or segment_id not in known.by_id or not moved.owner:
            return
        segment = known.by_id[segment_id]
        if moved.epoch > segment.epoch or (moved.epoch == segment.epoch and not segment.owner):
            fresh = msgspec.structs.replace(segment, owner=moved.owner, epoch=moved.epoch)
            segments = tuple(fresh if each is segment else each for each in known.route.segments)
            self._set(TopicMap(known.generation, msgspec.structs.replace(known.route, segments=segments)))

    def on_topology(self, topology: Topology) -> None:
        """A push."""
        for route in topology.topics:
            # A push may come in one read with the answer to the first fetch, before that was looked at.
            if route.topic in self._maps or route.topic in self._fetches:
                self._apply(topology.generation, route)

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._fetches.values(), *([self._watching_again] if self._watching_again is not None else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # Asking.

    async def _fetch(self, path: str) -> TopicMap:
        """Ask one broker after the other until one answers."""
        asked: list[Link] = []
        failure: BraidError | None = None
        while True:
            try:
                link = await self.pool.any(but=asked)
            except BraidError:
                if failure is None:
                    raise
                raise failure from None
            try:
                return await self._ask(link, path)
            except TimedOut as error:  # To ask is not to change anything: it may always be done again.
                failure = ConnectionLost(f"broker {link.broker_id} was asked about topic {path}: {error}")
            except BraidError as error:
                if not error.retriable:
                    raise
                failure = error
            asked.append(link)

    async def _ask(self, link: Link, path: str) -> TopicMap:
        known = self._maps.get(path)
        request = TopologyRequest((path,), known.generation if known is not None else 0)
        timeout_s = min(LOOKUP_TIMEOUT_S, self._timeout_s)
        topology = link.resolved(await link.ask(Kind.TOPOLOGY, encode(request), Topology, timeout_s))
        route = next((route for route in topology.topics if route.topic == path), None)
        if route is None:
            raise ConnectionLost(f"broker {link.broker_id} did not answer about topic {path}")
        if self._sources.get(path) is not link:
            self._sources[path] = link
            link.lost.add_done_callback(self._on_source_lost)
        fresh = self._apply(topology.generation, route)
        link.ack_topology(topology.generation)
        if not fresh.topic_id:
            raise TopicNotFound(f"topic {path} does not exist")
        return fresh

    def _fetched(self, path: str, task: asyncio.Task[TopicMap]) -> None:
        self._fetches.pop(path, None)
        if not task.cancelled():
            task.exception()

    def _on_source_lost(self, _lost: asyncio.Future[BraidError]) -> None:
        if self._watching_again is None and not self._closed:
            self._watching_again = asyncio.get_running_loop().create_task(self._watch_again(), name="watch again")

    async def _watch_again(self) -> None:
        """Have the changes of all topics pushed that nobody pushes now."""
        backoff = self.pool.backoff()
        try:
            while path := self._unwatched():
                try:
                    await self.refresh(path)
                except TopicNotFound:
                    del self._sources[path]
                except BraidError as error:
                    if not error.retriable:
                        return  # Whoever uses the topic next is told.
                if path == self._unwatched():
                    await asyncio.sleep(backoff.next())
        finally:
            self._watching_again = None

    def _unwatched(self) -> str | None:
        return next((path for path, source in self._sources.items() if not source.alive), None)

    # The maps.

    def _apply(self, generation: int, route: TopicRoute) -> TopicMap:
        known = self._maps.get(route.topic)
        if known is not None and known.generation >= generation:
            return known
        if known is not None and known.topic_id == route.topic_id:
            latest = (_later(segment, known.by_id.get(segment.id)) for segment in route.segments)
            route = msgspec.structs.replace(route, segments=tuple(latest))
        fresh = TopicMap(generation, route)
        self._set(fresh)
        if known is not None:
            for address in known.addresses() - fresh.addresses():
                self.pool.suspect(address)
        return fresh

    def _set(self, topic: TopicMap) -> None:
        path = topic.topic
        self._maps[path] = topic
        for future in self._waiting.pop(path, ()):
            if not future.done():
                future.set_result(None)
        named = topic.addresses()
        if named != self._named.get(path):
            self._named[path] = named
            self.pool.name(frozenset().union(*self._named.values()))

    def _is_later(self, path: str, segment_id: int, than_epoch: int) -> bool:
        known = self._maps.get(path)
        segment = known.by_id.get(segment_id) if known is not None else None
        return segment is not None and segment.epoch > than_epoch and bool(segment.owner)

    def epoch(self, path: str, segment_id: int) -> int:
        """Of the segment's owner in the map as it is; `NOWHERE` if that does not have it."""
        known = self._maps.get(path)
        segment = known.by_id.get(segment_id) if known is not None else None
        return segment.epoch if segment is not None else NOWHERE


class OwnerSearch:
    """One user's way to the owner of a segment, wherever it goes."""

    def __init__(self, routing: Routing, path: str, segment_id: int, backoff: Backoff) -> None:
        self._routing = routing
        self._path = path
        self._segment_id = segment_id
        self._backoff = backoff
        self._epoch = NOWHERE
        """Of the last owner that was worth an attempt. Only a later one is worth the next attempt at once: the attempt
        may end before it comes to the owner, and would then be repeated without a pause for as long as nobody
        answers."""

    async def link(self) -> Link:
        """A link to the owner. `NotServing` while there is none."""
        topic = await self._routing.topic(self._path)
        address = topic.owner(self._segment_id)
        self._try_next(topic.segment(self._segment_id).epoch)
        return await self._routing.pool.link(address)

    async def after(self, error: BraidError) -> None:
        """Return when it is time to try again, after this error."""
        if isinstance(error, Moved):
            self._routing.redirect(self._path, self._segment_id, error)
        if await self._routing.changed(self._path, self._segment_id, self._epoch, self._backoff.next()):
            self._try_next(self._routing.epoch(self._path, self._segment_id))
        else:
            await self._routing.refresh(self._path)

    def worked(self) -> None:
        """The next error is a first one again."""
        self._backoff.reset()

    def _try_next(self, epoch: int) -> None:
        if epoch > self._epoch:
            # Another owner: that the last one was tried for long says nothing of this one, which may be a few
            # milliseconds behind its record.
            self._backoff.reset()
        self._epoch = epoch


def _later(fresh: SegmentRoute, known: SegmentRoute | None) -> SegmentRoute:
    if known is None or known.epoch <= fresh.epoch:
        return fresh
    return msgspec.structs.replace(fresh, owner=known.owner, epoch=known.epoch)
