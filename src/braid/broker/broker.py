"""The broker: everything that it owns, opened and closed in order.

Four parts (parts/) stand on the broker's resources: its node in the cluster, the host of its segments, the host of its
groups, and the front door for clients and other brokers.

Opening: data folder (locked) → metadata store → storage shared by all segments → the listening port → registration
under a lease → the view of the metadata → candidacy for the cluster's leadership → its segments (recovered). The broker
is then ready, and clients can connect.

Closing: give up its groups → announce the stop and hand over its segments, where storage is shared and another broker
is active → accept no connections, confirm the publishes that were taken, close the connections → give up leadership →
finish administrative calls → store the cursors and close the logs → stop following the metadata, give up the lease,
close the links to peers → close storage and store, unlock the folder. A crash anywhere loses no confirmed record;
closing in order also loses no ack and no time.

A broker that has lost its lease (the machine slept, the store was away too long) may not act for its segments (I3): it
abandons them, takes a new lease, and opens them again in a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random as random_module
from typing import Final

from braid.broker.admin.segment_stats import stored_bytes, unsettled
from braid.broker.config import BrokerConfig
from braid.broker.groups.subscriptions import Progress
from braid.broker.metrics import BrokerMetrics
from braid.broker.parts.cluster_node import ClusterNode
from braid.broker.parts.front_door import FrontDoor
from braid.broker.parts.group_host import GroupHost
from braid.broker.parts.resources import Resources
from braid.broker.parts.segment_host import SegmentHost
from braid.broker.peers.links import cluster_secret
from braid.broker.segments.owned_segment import OwnedSegment
from braid.cluster.load_reports import Reading, SegmentReading
from braid.metadata.store import Store
from braid.model.cluster import BrokerState
from braid.model.errors import InvalidConfig, MetadataError, NotServing
from braid.ports.clock import Clock
from braid.ports.disk import Disk
from braid.ports.network import Address, Network
from braid.ports.tasks import cancel
from braid.storage.context import StorageMode
from braid.storage.objects.store import Objects

COME_BACK_S: Final = 1.0
HAND_OVER_TIMEOUT_S: Final = 20.0
"""How long a stopping broker hands over segments. Those that are left wait for its return."""

_log: Final = logging.getLogger(__name__)


class Broker:
    """One broker. `open` makes it and `close` stops it."""

    def __init__(self, config: BrokerConfig, resources: Resources) -> None:
        """Make the parts, each with the parts that it uses. Nothing starts yet."""
        self.id: Final = config.id
        self.config: Final = config
        self.resources: Final = resources
        self.metrics: Final = BrokerMetrics()
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done when a part has broken that the broker cannot serve without: close the broker and start it again."""
        self.cluster: Final = ClusterNode(config, resources, read_load=self.read_load, on_failure=self._fail)
        self.segment_host: Final = SegmentHost(config, resources, self.cluster, self.metrics)
        self.group_host: Final = GroupHost(config, resources, self.cluster, self.segment_host)
        self.front_door: Final = FrontDoor(
            config, resources, self.metrics, self.cluster, self.segment_host, self.group_host
        )
        self.topics: Final = self.cluster.topics
        self.segments: Final = self.segment_host.segments
        self.groups: Final = self.group_host.groups
        self.address: Address
        self._lease_watch: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    @classmethod
    async def open(
        cls,
        config: BrokerConfig,
        *,
        network: Network | None = None,
        store: Store | None = None,
        disk: Disk | None = None,
        clock: Clock | None = None,
        random: random_module.Random | None = None,
        objects: Objects | None = None,
    ) -> Broker:
        """Open a broker; it is ready when this returns. Ports that are not given are the real ones."""
        async with contextlib.AsyncExitStack() as stack:
            resources = await Resources.open(
                stack, config, network=network, store=store, disk=disk, clock=clock, random=random, objects=objects
            )
            broker = cls(config, resources)
            await broker._start(stack)
            broker._stack = stack.pop_all()
        return broker

    async def _start(self, stack: contextlib.AsyncExitStack) -> None:
        """Start the parts. Each stop is pushed on `stack` where it must run, not where its start stands."""
        front_door, cluster = self.front_door, self.cluster
        secret = front_door.access.peer_secret = await cluster_secret(self.resources.store)
        stack.push_async_callback(cluster.leave)
        # The port's number is not known until it is open, so the broker registers after that.
        self.address = await front_door.listen()
        stack.push_async_callback(front_door.server.close)
        await cluster.join(front_door.topology.own_address, secret)
        stack.push_async_callback(self.segment_host.stop)
        self.group_host.start()
        stack.push_async_callback(self.group_host.stop)
        stack.push_async_callback(front_door.finish_calls)
        cluster.campaign()
        stack.push_async_callback(cluster.resign)
        await self.segment_host.start()
        self._lease_watch = asyncio.get_running_loop().create_task(self._watch_lease(), name="watch lease")
        self._lease_watch.add_done_callback(self._on_lease_watch_end)
        front_door.ready = True
        _log.info("broker %s serves %s", self.id, front_door.topology.own_address)

    @property
    def ready(self) -> bool:
        return self.front_door.ready

    @property
    def closing(self) -> bool:
        return self.front_door.closing

    async def close(self) -> None:
        """Stop in order. When a part on the stack fails to close, the others are closed all the same, and then the
        error is raised."""
        if self.closing:
            return
        self.front_door.ready = False
        self.front_door.closing = True
        if self._lease_watch is not None:
            await cancel([self._lease_watch])
        await self.groups.close()
        await self._hand_over_segments()
        await self.front_door.shut()
        await self._stack.aclose()
        _log.info("broker %s has stopped", self.id)

    async def _hand_over_segments(self) -> None:
        """Hand over all segments if other brokers can serve them: storage is shared, and another broker is active."""
        cluster = self.cluster
        if self.resources.storage.mode is StorageMode.LOCAL or not cluster.registration.may_act():
            return
        members = cluster.members
        if not any(each != self.id and members.is_active(each) for each in members.brokers.all()):
            return
        with contextlib.suppress(MetadataError):
            await cluster.view.caught_up(await cluster.registration.announce(BrokerState.STOPPING))
        handed_over = await self.segments.hand_over_all(HAND_OVER_TIMEOUT_S)
        _log.info("broker %s has handed over %d segments", self.id, handed_over)

    def _fail(self, error: BaseException) -> None:
        _log.critical("broker %s has broken and must be started again: %r", self.id, error, exc_info=error)
        self.front_door.ready = False
        if not self.failed.done():
            self.failed.set_result(error)

    # The lease.

    async def _watch_lease(self) -> None:
        while True:
            loss = await self.cluster.registration.wait_lost()
            _log.error("%s", loss)
            self.front_door.ready = False
            await self.cluster.resign()
            lost = NotServing(f"broker {self.id} has lost its lease and is coming back")
            self.groups.lose_all(lost)
            await self.segments.abandon_all(lost)
            await self._come_back()
            self.front_door.ready = not self.failed.done()
            _log.info("broker %s has a lease again", self.id)

    def _on_lease_watch_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _come_back(self) -> None:
        while True:
            try:
                await self.cluster.registration.register()
                self.cluster.campaign()
                return await self.segments.start()
            except (MetadataError, InvalidConfig) as error:
                _log.warning("no new lease yet: %s", error)
            await asyncio.sleep(COME_BACK_S)

    # The load.

    def read_load(self) -> Reading:
        """Return this broker's counters, for its load report (cluster/load_reports.py)."""
        return Reading(
            [_load_of(each) for each in self.segments.all()],
            sum(topic.published_records for topic in self.metrics.topics.values()),
            self.front_door.server.adopted_generation(),
        )


def _load_of(segment: OwnedSegment) -> SegmentReading:
    earliest, end, stored = segment.earliest, segment.end, stored_bytes(segment.storage)
    queues = unsettled(segment)
    backlog = sum(
        Progress(offset, earliest, end, queues.get(name)).backlog for name, offset in segment.cursors.all().items()
    )
    return SegmentReading(
        segment.name.topic.path,
        segment.name.id,
        segment.publishes.taken_bytes,
        segment.delivered_bytes,
        stored,
        backlog * stored // max(end - earliest, 1),  # As if all records of the segment were equally long.
        segment.publishes.taken_records,
    )
