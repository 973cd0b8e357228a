"""This broker as a node of its cluster: its registration under a lease, its load reports, its candidacy for the
leadership, and what it sees of the others: topics, owners, drained segments and members in the metadata, and links to
the other brokers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from braid.broker.config import BrokerConfig
from braid.broker.parts.registration import BrokerRegistration
from braid.broker.parts.resources import Resources
from braid.broker.peers.links import Peers
from braid.broker.topics import Topics
from braid.cluster.drained import DrainedSegments
from braid.cluster.leader import Leader, LeaderConfig
from braid.cluster.load_reports import LoadReports, Reading
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata.view import View
from braid.storage.context import StorageMode

MAX_PIECES_IN_FLIGHT: Final = 1_024
"""Pieces of logs to one broker. Each stream has a limit of its own, in bytes; this one is for many small streams."""


class ClusterNode:
    def __init__(
        self,
        config: BrokerConfig,
        resources: Resources,
        *,
        read_load: Callable[[], Reading],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        """`on_failure` is called when the view or the leader breaks: the broker cannot go on without them."""
        store, clock = resources.store, resources.clock
        self.view = View(store)
        self.view.on_failure = on_failure
        self.registration = BrokerRegistration(config, store, clock)
        self.topics = Topics(self.view, clock, resources.random)
        self.owners = Owners(self.view)
        self.drained = DrainedSegments(self.view)
        self.members = Members(self.view)
        self.peers = Peers(config.id, self.members, resources.network)
        self.stream_peers = Peers(config.id, self.members, resources.network, max_in_flight=MAX_PIECES_IN_FLIGHT)
        """Links of their own for copies of logs: a question does not wait for megabytes."""
        self.leader = Leader(
            self.view,
            self.topics,
            self.owners,
            self.members,
            clock,
            config.id,
            LeaderConfig(
                balance=config.balance,
                copies_history=resources.storage.mode is StorageMode.LOCAL,
                replace_after_s=config.replace_after_s,
            ),
        )
        self.leader.on_failure = on_failure
        self.loads = LoadReports(store, clock, resources.processor, config.id, read_load)

    async def join(self, address: str, secret: str) -> None:
        """Register, and follow the metadata. From now on the other brokers know this one."""
        self.peers.secret = self.stream_peers.secret = secret
        self.registration.address = address
        await self.registration.register()
        await self.view.load()

    def campaign(self) -> None:
        """Stand for the leadership and report load, under the lease of the registration."""
        self.leader.start(self.registration.lease)
        self.loads.start(self.registration.lease)

    async def resign(self) -> None:
        await self.loads.stop()
        await self.leader.stop()

    async def leave(self) -> None:
        await self.view.stop()
        await self.registration.unregister()
        await self.stream_peers.close()
        await self.peers.close()
