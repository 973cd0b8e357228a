"""The broker: everything that it owns, opened in order and closed in the opposite one.

Opening: data folder (locked) → metadata store → registration under a lease → storage shared by all segments → topics,
consumers' sessions, segments (recovered) → the listening port. It is ready when clients can connect.

Closing in order: accept nothing new → confirm what was taken → close the connections → store the cursors → close the
logs → give up the lease → unlock the folder. A crash anywhere loses nothing that was confirmed; closing in order also
loses no ack and no time.

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
from braid.broker.auth import Access
from braid.broker.calls import Calls
from braid.broker.config import BrokerConfig
from braid.broker.data_folder import DataFolder, open_data_folder
from braid.broker.delivery import ReadAhead
from braid.broker.groups import Groups
from braid.broker.metrics import BrokerMetrics
from braid.broker.segments import Segments
from braid.broker.server import Server
from braid.broker.shelf import opened_shelf
from braid.broker.subscriptions import Subscriptions
from braid.broker.tls import server_tls
from braid.broker.topics import Topics
from braid.broker.topology import TopologyView
from braid.metadata import paths
from braid.metadata.keepalive import LeaseKeeper
from braid.metadata.sqlite import SqliteStore
from braid.metadata.store import Compare, Put, Store
from braid.model.errors import (
    BraidError,
    InvalidConfig,
    MetadataError,
    NotServing,
)
from braid.model.ids import Revision
from braid.model.names import TopicName
from braid.model.registration import Registration
from braid.ports.clock import Clock, SystemClock
from braid.ports.disk import Disk
from braid.ports.network import Address, Network, SocketNetwork
from braid.ports.os_disk import OsDisk
from braid.storage.housekeeper import Housekeeper
from braid.wire.operations import HERE

REGISTER_RETRY_S: Final = 0.05
COME_BACK_S: Final = 1.0
ANY_HOST: Final = ("0.0.0.0", "::")  # noqa: S104 (compared, not bound to)

_log: Final = logging.getLogger(__name__)


class Broker:
    """Made by `open`. Implements `session.Services`."""

    def __init__(self, config: BrokerConfig, clock: Clock, random: random_module.Random) -> None:
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
        self.topics: Topics
        self.segments: Segments
        self.subscriptions: Subscriptions
        self.groups: Groups
        self.calls: Calls
        self.topology: TopologyView
        self.server: Server
        self.folder: DataFolder
        self._clock = clock
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
    ) -> Broker:
        """Ready when it returns. Ports that are not given are the real ones."""
        broker = cls(config, clock or SystemClock(), random or random_module.Random(os.urandom(16)))
        try:
            await broker._open(network, store, disk)
        except BaseException:
            await broker._stack.aclose()
            raise
        return broker

    async def _open(self, network: Network | None, store: Store | None, disk: Disk | None) -> None:
        config, stack = self.config, self._stack
        if network is None:
            network = SocketNetwork(server_tls=server_tls(config.tls) if config.tls is not None else None)
        if disk is None:
            disk = OsDisk()
            stack.push_async_callback(disk.close)
        self.folder = await open_data_folder(disk, config.data, config.id)
        stack.push_async_callback(self.folder.release)
        if store is None:
            store = await _open_store(config.metadata or f"sqlite:{self.folder.metadata_file}", self._clock)
            stack.push_async_callback(store.close)
        self.store = store
        shelf = await stack.enter_async_context(
            opened_shelf(config, self.folder, store, disk, self._clock, self._random)
        )
        housekeeper = Housekeeper()
        self.topics = Topics(store, self._clock, self._random)
        self.topics.on_failure = self._fail
        self.segments = Segments(
            shelf,
            config,
            self.metrics,
            may_act=self._may_act,
            find_topic=self.topics.find,
            housekeeper=housekeeper,
        )
        self.groups = Groups(store, self.topics, self._clock, config.groups)
        self.subscriptions = Subscriptions(store, self.topics, self.segments, self._clock)
        self.topology = TopologyView(store, self.topics, self.segments)
        self.calls = Calls(self)
        self.server = Server(self, network, self._clock)

        # Until the port is open nobody knows its number, and until then it accepts nobody: registering comes behind.
        self.address = await self.server.listen(_address(config.listen))
        stack.push_async_callback(self.server.close)
        if config.advertise or self.address.host not in ANY_HOST:
            self.topology.own_address = config.advertise or str(self.address)
            self.topology.told_address = self.topology.own_address
        else:  # It has as many addresses as the machine; a client that is here has found one that works.
            self.topology.own_address = f"{socket.gethostname()}:{self.address.port}"
            self.topology.told_address = HERE
        await self._register()
        stack.push_async_callback(self._unregister)
        await self.topics.load()
        stack.push_async_callback(self.topics.stop)
        await self.groups.load()
        stack.push_async_callback(self.groups.close)
        stack.push_async_callback(self.segments.close)
        stack.push_async_callback(self.calls.close)
        await self._open_segments()
        await self.calls.finish_deletes()
        self.topics.on_change.append(self.server.announce)
        self.segments.on_open.append(self.server.announce)
        housekeeper.start()
        stack.push_async_callback(housekeeper.stop)
        self._lease_watch = asyncio.get_running_loop().create_task(self._watch_lease(), name="watch lease")
        self._lease_watch.add_done_callback(self._on_lease_watch_end)
        self.ready = True
        _log.info("broker %s serves %s", self.id, self.topology.own_address)

    async def _open_segments(self) -> None:
        # By way of the calls, which let a topic be opened or deleted, but not both at once.
        await asyncio.gather(*(self.calls.open_topic(TopicName.parse(path)) for path in self.topics.all()))

    async def close(self) -> None:
        """Stop in order. What fails is said; the rest is closed all the same."""
        if self.closing:
            return
        self.ready = False
        self.closing = True
        if self._lease_watch is not None:
            self._lease_watch.cancel()
            await asyncio.wait([self._lease_watch])
        await self.server.stop_listening()
        await self.segments.flush()
        await self.server.close()
        await self._stack.aclose()
        _log.info("broker %s has stopped", self.id)

    def _fail(self, error: BaseException) -> None:
        _log.critical("broker %s has broken and must be started again: %r", self.id, error, exc_info=error)
        self.ready = False
        if not self.failed.done():
            self.failed.set_result(error)

    # The lease.

    def _may_act(self) -> bool:
        return self._keeper is not None and self._keeper.may_act()

    async def _register(self) -> None:
        """Register under a fresh lease. A broker of the same id that was killed is waited for as long as its lease."""
        key = paths.broker(self.id)
        lease = await self.store.grant_lease(self.config.lease_ttl_s)
        record = Registration(
            address=self.topology.own_address,
            admin=self.config.admin,
            version=braid.__version__,
            started_at=self.started_at,
        )
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
            await self.segments.abandon_all(NotServing(f"broker {self.id} has lost its lease and is coming back"))
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
                return await self._open_segments()
            except (MetadataError, InvalidConfig) as error:
                _log.warning("no new lease yet: %s", error)
            await asyncio.sleep(COME_BACK_S)


async def _open_store(url: str, clock: Clock) -> Store:
    scheme, _, rest = url.partition(":")
    try:
        if scheme == "sqlite" and rest:
            return await SqliteStore.open(rest, clock=clock)
        if scheme == "etcd" and rest.startswith("//"):
            from braid.metadata.etcd import EtcdStore  # needs grpcio, which only clusters install

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
