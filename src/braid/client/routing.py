"""The client's maps of topics: which segment takes a key, and which broker serves a segment.

The first use of a topic fetches its routing and asks the broker to push changes. A fetched or pushed routing counts
only if its generation is newer than the known one, so a slow reply never undoes a newer push. The client tells brokers
which generation it has. When the link that pushes is lost, the client asks another broker.

A broker that no longer serves a segment may name the new owner (`Moved`). The map takes this owner immediately, with
its higher ownership epoch, before any push. The broker that named the owner may know more than the broker that pushes,
so a newer map never takes a segment back to a lower epoch.

Nothing here is needed for correctness: a broker refuses requests that were routed by a wrong map. A caller that is
refused, or loses its link, uses its `OwnerSearch`: it waits until the map names a later owner, and fetches the map
again after a pause that doubles. So a client finds a segment that moves as soon as the new owner serves it, and a
broker that dies causes no error.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Callable, Iterator
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
from braid.model.layout import reachable
from braid.ports.network import Address
from braid.ports.tasks import cancel
from braid.wire.address import parse_address
from braid.wire.link import Link
from braid.wire.operations import Kind, Route, SegmentRoute, TopicRoute, Topology, TopologyRequest, encode

LOOKUP_TIMEOUT_S: Final = 3.0
"""How long one broker may take to answer a lookup before the client asks another."""
NOWHERE: Final = -1
"""An epoch below that of every owner."""


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

    def ancestors(self, segment_id: int) -> set[int]:
        """Return the segments that this one continues, in every generation that the map still has."""

        def parents(each: int) -> Iterator[int]:
            return (parent for parent in self.by_id[each].parents if parent in self.by_id)

        return reachable(parents(segment_id), parents)

    def publish_route(self, segment_id: int) -> bytes:
        """Return the encoded route that a publish to this segment carries."""
        return encode(Route(self.topic, self.topic_id, segment_id, self.route.layout_epoch))

    def owner(self, segment_id: int) -> Address:
        owner = self.segment(segment_id).owner
        if not owner:
            raise NotServing(f"no broker serves segment {segment_id} of topic {self.topic} at the moment")
        return parse_address(owner)

    def addresses(self) -> frozenset[Address]:
        """Return the addresses of all brokers that the map names."""
        named = {segment.owner for segment in self.route.segments} | {self.route.controller}
        return frozenset(parse_address(address) for address in named if address)


class Routing:
    def __init__(self, timeout_s: float) -> None:
        self.pool: Pool
        """Set by the client: pool and routing know each other."""
        self._timeout_s = timeout_s
        self._maps: dict[str, TopicMap] = {}
        """Includes deleted topics, so that no older map brings them back."""
        self._fetches: dict[str, asyncio.Task[TopicMap]] = {}
        self._sources: dict[str, Link] = {}
        """The link that pushes the changes of each topic."""
        self._watching_again: asyncio.Task[None] | None = None
        self._closed = False
        self._named: dict[str, frozenset[Address]] = {}
        """The brokers that each topic's map names."""
        self._waiting: dict[str, list[asyncio.Future[None]]] = {}
        """Futures of callers that wait for a change of a topic's map."""

    async def topic(self, path: str) -> TopicMap:
        """Return the map of this topic. Fetch it if it is unknown, or if the link that pushes its changes is lost."""
        known, source = self._maps.get(path), self._sources.get(path)
        if known is not None and known.topic_id and source is not None and source.alive:
            return known
        return await self.refresh(path)

    async def refresh(self, path: str) -> TopicMap:
        """Fetch the map again. Callers that ask at the same time share one fetch."""
        task = self._fetches.get(path)
        if task is None:
            if self._closed:
                raise ClientClosed("the client is closed")
            task = asyncio.get_running_loop().create_task(self._fetch(path), name=f"fetch routing of {path}")
            self._fetches[path] = task
            task.add_done_callback(lambda done: self._fetched(path, done))
        return await result_of(task)

    async def owner_link(self, path: str, segment_id: int) -> Link:
        """Return a link to the broker that serves this segment."""
        topic = await self.topic(path)
        return await self.pool.link(topic.owner(segment_id))

    async def controller_link(self, path: str) -> Link:
        """Return a link to the topic's controller, or to any broker if there is none yet."""
        topic = await self.topic(path)
        controller = topic.route.controller
        return await (self.pool.link(parse_address(controller)) if controller else self.pool.any())

    async def changed(self, path: str, segment_id: int, than_epoch: int, timeout_s: float) -> bool:
        """Wait until the map names an owner of the segment with an epoch above `than_epoch`. False after the
        timeout."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self._is_later(path, segment_id, than_epoch):
                    await self._next_map(path)
        except TimeoutError:
            return False
        return True

    async def until(self, path: str, condition: Callable[[TopicMap], bool]) -> TopicMap:
        """Wait until the condition holds for the map of this topic, and return the map. Brokers push each map, so
        nothing asks for it."""
        topic = await self.topic(path)
        while not condition(topic):
            await self._next_map(path)
            topic = self._maps[path]
        return topic

    async def later_layout(self, path: str, than_epoch: int, timeout_s: float) -> bool:
        """Wait until the map has a layout of an epoch above `than_epoch`. False after the timeout. Nothing is asked
        here: while no broker answers, a caller that repeats this would ask without a pause."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._maps[path].route.layout_epoch <= than_epoch:
                    await self._next_map(path)
        except TimeoutError:
            return False
        return True

    async def _next_map(self, path: str) -> None:
        """Wait until the topic's map has changed."""
        future = asyncio.get_running_loop().create_future()
        waiting = self._waiting.setdefault(path, [])
        waiting.append(future)
        try:
            await future
        finally:  # The map may not change for a long time.
            if future in waiting:
                waiting.remove(future)

    def redirect(self, path: str, segment_id: int, moved: Moved) -> None:
        """Take over the owner that a broker named, unless the map has a later one."""
        known = self._maps.get(path)
        if known is None or segment_id not in known.by_id or not moved.owner:
            return
        segment = known.by_id[segment_id]
        if moved.epoch > segment.epoch or (moved.epoch == segment.epoch and not segment.owner):
            fresh = msgspec.structs.replace(segment, owner=moved.owner, epoch=moved.epoch)
            segments = tuple(fresh if each is segment else each for each in known.route.segments)
            self._set(TopicMap(known.generation, msgspec.structs.replace(known.route, segments=segments)))

    def on_topology(self, topology: Topology) -> None:
        """Take over a pushed map."""
        for route in topology.topics:
            # A push may arrive together with the reply to the first fetch, before that reply is handled.
            if route.topic in self._maps or route.topic in self._fetches:
                self._apply(topology.generation, route)

    async def close(self) -> None:
        self._closed = True
        tasks = [*self._fetches.values(), *([self._watching_again] if self._watching_again is not None else [])]
        await cancel(tasks)

    # Asking.

    async def _fetch(self, path: str) -> TopicMap:
        """Ask one broker after another until one answers."""
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
            except TimedOut as error:  # A lookup changes nothing, so it may be repeated.
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
        """Ask for pushes of all topics that no link pushes now."""
        backoff = self.pool.backoff()
        try:
            while path := self._unwatched():
                try:
                    await self.refresh(path)
                except TopicNotFound:
                    del self._sources[path]
                except BraidError as error:
                    if not error.retriable:
                        return  # The next use of the topic gets the error.
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
            for address in sorted(known.addresses() - fresh.addresses()):
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
        """Return the epoch of the segment's owner in the map; `NOWHERE` if the map does not have the segment."""
        known = self._maps.get(path)
        segment = known.by_id.get(segment_id) if known is not None else None
        return segment.epoch if segment is not None else NOWHERE


class OwnerSearch:
    """Follows a segment to its owner, for one producer or consumer."""

    def __init__(self, routing: Routing, path: str, segment_id: int, backoff: Backoff) -> None:
        self._routing = routing
        self._path = path
        self._segment_id = segment_id
        self._backoff = backoff
        self._epoch = NOWHERE
        """The epoch of the last owner that was tried. Only a later owner is tried without a pause. An attempt may fail
        before it reaches the owner, and would then be repeated without a pause while no broker answers."""

    async def link(self) -> Link:
        """Return a link to the owner. Raises `NotServing` while there is none."""
        topic = await self._routing.topic(self._path)
        address = topic.owner(self._segment_id)
        self._try_next(topic.segment(self._segment_id).epoch)
        return await self._routing.pool.link(address)

    async def after(self, error: BraidError) -> None:
        """Wait until it is time to try again after this error."""
        if isinstance(error, Moved):
            self._routing.redirect(self._path, self._segment_id, error)
        if await self._routing.changed(self._path, self._segment_id, self._epoch, self._backoff.next()):
            self._try_next(self._routing.epoch(self._path, self._segment_id))
        else:
            await self._routing.refresh(self._path)

    async def later_layout(self, than_epoch: int) -> None:
        """Wait until the map may show a layout above this epoch: the segment has ended, and others take its range."""
        if not await self._routing.later_layout(self._path, than_epoch, self._backoff.next()):
            await self._routing.refresh(self._path)

    def worked(self) -> None:
        """Note a success: the next error gets the shortest pause."""
        self._backoff.reset()

    def _try_next(self, epoch: int) -> None:
        if epoch > self._epoch:
            # The long pauses were for the last owner. The new owner may need only a few milliseconds more to serve.
            self._backoff.reset()
        self._epoch = epoch


def _later(fresh: SegmentRoute, known: SegmentRoute | None) -> SegmentRoute:
    if known is None or known.epoch <= fresh.epoch:
        return fresh
    return msgspec.structs.replace(fresh, owner=known.owner, epoch=known.epoch)
