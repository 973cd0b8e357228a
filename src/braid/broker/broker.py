"""The broker: everything that it owns, opened in order and closed in the opposite one.

Opening: data folder (locked) → metadata store → storage shared by all segments → the listening port → registration
under a lease → the view of the cluster → candidate for its leadership → its segments (recovered). It is ready when
clients can connect.

Closing in order: not to be given segments any more → where others can go on, hand over what it has → accept nothing
new → confirm what was taken → close the connections → store the cursors → close the logs → give up the lease → unlock
the folder. A crash anywhere loses nothing that was confirmed; closing in order also loses no ack and no time.

When the lease is lost (the machine slept, the store was away too long) the broker may not act for its segments any more
(I3): it abandons them, asks for a new lease, and opens them again in a new epoch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random as random_module
import socket
from typing import Final

import braid
from braid.broker.admin.calls import Calls
from braid.broker.admin.reports import Reports
from braid.broker.auth import Access
from braid.broker.config import BrokerConfig
from braid.broker.connections.server import Server
from braid.broker.connections.tls import peer_tls, server_tls
from braid.broker.data_folder import DataFolder, open_data_folder
from braid.broker.groups.controllers import NO_LEASE, Controllers
from braid.broker.groups.host import Groups
from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.load import reading
from braid.broker.metrics import BrokerMetrics
from braid.broker.peers.calls import PeerCalls
from braid.broker.peers.links import Peers, cluster_secret
from braid.broker.segments.deletion import Deletion
from braid.broker.segments.delivery import ReadAhead
from braid.broker.segments.handover import HandOver
from braid.broker.segments.history_copy import IncomingHistory, OutgoingHistory
from braid.broker.segments.host import Segments
from braid.broker.segments.leftover_chunks import Copies
from braid.broker.segments.segment_access import SegmentAccesses, answer_for
from braid.broker.storage_context import open_storage_context
from braid.broker.topics import Topics
from braid.broker.topology import TopologyView
from braid.cluster.leader import Leader, LeaderConfig
from braid.cluster.load_reports import LoadReports
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Compare, Put, Store
from braid.metadata.view import View
from braid.model.cluster import BrokerState
from braid.model.errors import (
    BraidError,
    InvalidConfig,
    MetadataError,
    NotServing,
)
from braid.model.ids import Revision
from braid.model.registration import Registration
from braid.ports.clock import Clock, SystemClock
from braid.ports.disk import Disk
from braid.ports.network import Address, Network, SocketNetwork
from braid.ports.os_disk import OsDisk
from braid.ports.processor import NoProcessor, Processor, SystemProcessor
from braid.storage.history.housekeeper import Housekeeper
from braid.storage.objects.store import Objects
from braid.storage.segment import StorageContext, StorageMode
from braid.wire.operations import HERE

REGISTER_RETRY_S: Final = 0.05
COME_BACK_S: Final = 1.0
HAND_OVER_TIMEOUT_S: Final = 20.0
"""What a broker that stops does not get rid of in this time waits for its return."""
ANY_HOST: Final = ("0.0.0.0", "::")  # noqa: S104 (compared, not bound to)

_log: Final = logging.getLogger(__name__)


class Broker:
    """Made by `open`. Implements `session.Services`."""

    def __init__(self, config: BrokerConfig, clock: Clock, processor: Processor, random: random_module.Random) -> None:
        self.config: Final = config
        self.id = config.id
        self.limits = config.limits
        self.metrics = BrokerMetrics()
        self.access = Access(config.auth)
        self.read_ahead = ReadAhead(config.limits.max_read_ahead_bytes)
        self.ready = False
        self.closing = False
        self.failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        """Done when something broke without which the broker serves nobody: it is to be closed, and started again."""
        self.started_at: Final = clock.now_us()
        self.address: Address
        self.store: Store
        self.view: View
        self.topics: Topics
        self.segments: Segments
        self.subscriptions: Subscriptions
        self.controllers: Controllers
        self.groups: Groups
        self.calls: Calls
        self.topology: TopologyView
        self.server: Server
        self.owners: Owners
        self.members: Members
        self.leader: Leader
        self.loads: LoadReports
        self.peers: Peers
        self.peer_calls: PeerCalls
        self.reports: Reports
        self.incoming: IncomingHistory
        self.copies: Copies
        self.housekeeper: Final = Housekeeper()
        self.deletion: Deletion
        self.context: StorageContext
        self.folder: DataFolder
        self._clock = clock
        self._processor = processor
        self._random = random
        self._stack = contextlib.AsyncExitStack()
        self._keeper: LeaseKeeper | None = None
        self._lease_watch: asyncio.Task[None] | None = None

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
        """Ready when it returns. Ports that are not given are the real ones."""
        processor = SystemProcessor() if clock is None else NoProcessor()
        broker = cls(config, clock or SystemClock(), processor, random or random_module.Random(os.urandom(16)))
        try:
            await broker._open(network, store, disk, objects)
        except BaseException:
            await broker._stack.aclose()
            raise
        return broker

    async def _open(
        self, network: Network | None, store: Store | None, disk: Disk | None, objects: Objects | None
    ) -> None:
        network = await self._open_ports(network, store, disk, objects)
        self._put_together(network)
        await self._start()

    async def _open_ports(
        self, network: Network | None, store: Store | None, disk: Disk | None, objects: Objects | None
    ) -> Network:
        """What the broker stands on."""
        config, stack = self.config, self._stack
        if network is None:
            tls = config.tls
            network = SocketNetwork(
                client_tls=peer_tls(tls) if tls is not None else None,
                server_tls=server_tls(tls) if tls is not None else None,
            )
        if disk is None:
            disk = OsDisk()
            stack.push_async_callback(disk.close)
        self.folder = await open_data_folder(disk, config.data, config.id)
        stack.push_async_callback(self.folder.release)
        if store is None:
            store = await _open_store(config.metadata or f"sqlite:{self.folder.metadata_file}", self._clock)
            stack.push_async_callback(store.close)
        self.store = store
        self.context = await stack.enter_async_context(
            open_storage_context(config, self.folder, store, disk, self._clock, self._random, objects)
        )
        return network

    def _put_together(self, network: Network) -> None:
        """The parts, each with those that it knows. Nothing happens yet."""
        config, context, store = self.config, self.context, self.store
        self.view = View(store)
        self.view.on_failure = self._fail
        self.topics = Topics(self.view, self._clock, self._random)
        self.owners = Owners(self.view)
        self.members = Members(self.view)
        self.leader = Leader(
            self.view,
            self.topics,
            self.owners,
            self.members,
            self._clock,
            self.id,
            LeaderConfig(balance=config.balance, copies_history=context.mode is StorageMode.LOCAL),
        )
        self.leader.on_failure = self._fail
        self.loads = LoadReports(
            store,
            self._clock,
            self._processor,
            self.id,
            lambda: reading(self.segments, self.metrics, self.server.adopted_generation()),
        )
        self.peers = Peers(self.id, self.members, network)
        self.copies = Copies(context, self.owners)
        self.incoming = IncomingHistory(context, self.topics, self.copies)
        self.segments = Segments(
            context,
            config,
            self.metrics,
            may_act=self._may_act,
            topics=self.topics,
            owners=self.owners,
            members=self.members,
            housekeeper=self.housekeeper,
            hand_over=HandOver(
                context, self.owners, self.members, OutgoingHistory(context, self.peers), self.copies, self._clock
            ),
        )
        self.deletion = Deletion(
            context,
            self.topics,
            self.owners,
            self.members,
            self.segments,
            may_act=self._may_act,
            leads=lambda: self.leader.leading,
        )
        self.leader.on_deleting.append(self.deletion.finish_later)
        self.controllers = Controllers(self.view, self.members, self.id, self._lease_id)
        self.groups = Groups(self.topics, self.controllers, self._clock, config.groups)
        self.peer_calls = PeerCalls()
        self.peer_calls.register("list_history", self.incoming.list_history)
        self.peer_calls.register_with_payload("put_history", self.incoming.put_history)
        answer_for(self.segments, self.peer_calls)
        self.reports = Reports(
            self.id,
            self.topics,
            self.segments,
            self.owners,
            self.members,
            self.metrics,
            self.groups,
            self.controllers,
            self.peers.call,
        )
        self.reports.answer_for(self.peer_calls)
        self.accesses = SegmentAccesses(self.id, self.segments, self.owners, self.members, self.peers.call)
        self.subscriptions = Subscriptions(store, self.topics, self.segments, self.accesses, self._clock, self._random)
        self.topology = TopologyView(self.id, self.topics, self.owners, self.members, self.controllers.address)
        self.controllers.table.on_change.append(self.topology.changed)
        self.calls = Calls(self)
        self.server = Server(self, network, self._clock)

    async def _start(self) -> None:
        """In this order, and backwards when it closes."""
        config, stack = self.config, self._stack
        stack.push_async_callback(self.peers.close)
        stack.push_async_callback(self.incoming.close)
        # Until the port is open nobody knows its number, and until then it accepts nobody: registering comes behind.
        self.address = await self.server.listen(_address(config.listen))
        stack.push_async_callback(self.server.close)
        if config.advertise or self.address.host not in ANY_HOST:
            self.topology.own_address = config.advertise or str(self.address)
            self.topology.told_address = self.topology.own_address
        else:  # It has as many addresses as the machine; a client that is here has found one that works.
            self.topology.own_address = f"{socket.gethostname()}:{self.address.port}"
            self.topology.told_address = HERE
        self.peers.secret = self.access.peer_secret = await cluster_secret(self.store)
        await self._register()
        stack.push_async_callback(self._unregister)
        await self.view.load()
        stack.push_async_callback(self.view.stop)
        self.groups.start()
        stack.push_async_callback(self.groups.close)
        stack.push_async_callback(self.segments.close)
        stack.push_async_callback(self.deletion.stop)
        stack.push_async_callback(self.calls.close)
        stack.push_async_callback(self.peer_calls.close)
        stack.push_async_callback(self.leader.stop)
        stack.push_async_callback(self.loads.stop)
        self._lead()
        self.segments.on_open.append(self.subscriptions.sweep_later)
        stack.push_async_callback(self.subscriptions.stop)
        await self.segments.start()
        self.deletion.start()
        await self.copies.start()
        stack.push_async_callback(self.copies.stop)
        self.housekeeper.start()
        stack.push_async_callback(self.housekeeper.stop)
        self._lease_watch = asyncio.get_running_loop().create_task(self._watch_lease(), name="watch lease")
        self._lease_watch.add_done_callback(self._on_lease_watch_end)
        self.ready = True
        _log.info("broker %s serves %s", self.id, self.topology.own_address)

    def _lead(self) -> None:
        assert self._keeper is not None
        self.leader.start(self._keeper.lease)
        self.loads.start(self._keeper.lease)

    async def close(self) -> None:
        """Stop in order. What fails is said; the rest is closed all the same."""
        if self.closing:
            return
        self.ready = False
        self.closing = True
        if self._lease_watch is not None:
            self._lease_watch.cancel()
            await asyncio.wait([self._lease_watch])
        await self.groups.close()
        await self._leave()
        await self.server.stop_listening()
        await self.segments.flush()
        await self.server.close()
        await self._stack.aclose()
        _log.info("broker %s has stopped", self.id)

    async def _leave(self) -> None:
        """Where storage is shared, others go on with what this broker serves, at once and without a loss."""
        if self.context.mode is StorageMode.LOCAL or not self._may_act():
            return
        others = [each for each in self.members.brokers.all() if each != self.id and self.members.is_active(each)]
        if not others:
            return
        with contextlib.suppress(MetadataError):
            await self._write_registration(BrokerState.STOPPING)
        handed_over = await self.segments.hand_over_all(HAND_OVER_TIMEOUT_S)
        _log.info("broker %s has handed over %d segments", self.id, handed_over)

    def _fail(self, error: BaseException) -> None:
        _log.critical("broker %s has broken and must be started again: %r", self.id, error, exc_info=error)
        self.ready = False
        if not self.failed.done():
            self.failed.set_result(error)

    # The lease.

    def _may_act(self) -> bool:
        return self._keeper is not None and self._keeper.may_act()

    def _lease_id(self) -> int:
        """Of the lease that this broker may act under."""
        return self._keeper.lease.id if self._keeper is not None and self._keeper.may_act() else NO_LEASE

    async def _register(self) -> None:
        """Register under a fresh lease. A broker of the same id that was killed is waited for as long as its lease."""
        key = paths.broker(self.id)
        lease = await self.store.grant_lease(self.config.lease_ttl_s)
        record = self._registration()
        give_up_at = self._clock.monotonic() + self.config.lease_ttl_s
        while True:
            result = await self.store.txn([Compare(key, Revision(0))], [Put(key, record.to_json(), lease.id)])
            if result.succeeded:
                break
            if self._clock.monotonic() >= give_up_at:
                await lease.revoke()
                raise InvalidConfig(f"a broker with the id {self.id} is running; give this one another with --id")
            await asyncio.sleep(REGISTER_RETRY_S)
            await lease.renew()
        self._keeper = LeaseKeeper(lease, self._clock)
        self._keeper.start()

    def _registration(self, state: BrokerState = BrokerState.ACTIVE) -> Registration:
        return Registration(
            address=self.topology.own_address,
            admin=self.config.admin,
            state=state.value,
            version=braid.__version__,
            started_at=self.started_at,
            labels=self.config.labels,
        )

    async def _write_registration(self, state: BrokerState) -> None:
        assert self._keeper is not None
        put = Put(paths.broker(self.id), self._registration(state).to_json(), self._keeper.lease.id)
        result = await self.store.txn([], [put])
        await self.view.caught_up(result.revision)

    async def _unregister(self) -> None:
        if self._keeper is not None:
            await self._keeper.stop()
            with contextlib.suppress(MetadataError):
                await self._keeper.lease.revoke()

    async def _watch_lease(self) -> None:
        while True:
            assert self._keeper is not None
            loss = await self._keeper.wait_lost()
            _log.error("%s", loss)
            self.ready = False
            await self._keeper.stop()
            await self.loads.stop()
            await self.leader.stop()
            lost = NotServing(f"broker {self.id} has lost its lease and is coming back")
            self.groups.lose_all(lost)
            await self.segments.abandon_all(lost)
            await self._come_back()
            self.ready = True
            _log.info("broker %s has a lease again", self.id)

    def _on_lease_watch_end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _come_back(self) -> None:
        while True:
            try:
                await self._register()
                self._lead()
                return await self.segments.start()
            except (MetadataError, InvalidConfig) as error:
                _log.warning("no new lease yet: %s", error)
            await asyncio.sleep(COME_BACK_S)


async def _open_store(url: str, clock: Clock) -> Store:
    scheme, _, rest = url.partition(":")
    try:
        if scheme == "sqlite" and rest:
            return await SqliteStore.open(rest, clock=clock)
        if scheme == "etcd" and rest.startswith("//"):
            from braid.metadata.etcd.store import EtcdStore  # needs grpcio, which only clusters install

            return await EtcdStore.open(rest.removeprefix("//").split(","), clock=clock)
    except ImportError as error:
        raise InvalidConfig(str(error)) from error
    except BraidError as error:
        raise InvalidConfig(f"--metadata {url}: {error}") from error
    raise InvalidConfig(f"--metadata {url} is not understood: write sqlite:PATH or etcd://HOST:PORT,…")


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidConfig(f"{text!r} is no address to listen on: write HOST:PORT, with a port from 0 to 65535")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))
