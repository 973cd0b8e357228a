"""Where clients and other brokers come in: the listening port, the calls that it answers, the routing for clients."""

from __future__ import annotations

import asyncio
import socket
from typing import Final

from braid.broker.admin import cluster as cluster_calls
from braid.broker.admin.calls import Calls
from braid.broker.admin.reports import Reports
from braid.broker.auth import Access
from braid.broker.config import BrokerConfig
from braid.broker.connections.server import Server
from braid.broker.connections.unfinished_frames import UnfinishedFrames
from braid.broker.metrics import BrokerMetrics
from braid.broker.parts.cluster_node import ClusterNode
from braid.broker.parts.group_host import GroupHost
from braid.broker.parts.resources import Resources
from braid.broker.parts.segment_host import SegmentHost
from braid.broker.peers.calls import PeerCalls
from braid.broker.segments.delivery import ReadAhead
from braid.broker.segments.segment_access import Ask
from braid.broker.topology import TopologyView
from braid.broker.turns import Turns
from braid.broker.unsent_bytes import UnsentBytes
from braid.model.errors import InvalidConfig
from braid.ports.network import Address
from braid.wire.operations import HERE

ANY_HOST: Final = ("0.0.0.0", "::")  # noqa: S104 (compared, not bound to)


class FrontDoor:
    """Implements `session.Services` and `admin.services.CallServices`: sessions and calls find here what they need."""

    def __init__(
        self,
        config: BrokerConfig,
        resources: Resources,
        metrics: BrokerMetrics,
        cluster: ClusterNode,
        segment_host: SegmentHost,
        group_host: GroupHost,
    ) -> None:
        self.id = config.id
        self.config: Final = config
        self.limits = config.limits
        self.metrics = metrics
        self.access = Access(config.auth)
        self.read_ahead = ReadAhead(config.limits.max_read_ahead_bytes)
        self.turns = Turns()
        self.unfinished_frames = UnfinishedFrames(config.limits.max_unfinished_bytes, asyncio.get_running_loop().time)
        self.unsent_bytes = UnsentBytes(config.limits.max_unsent_bytes)
        self.ready = False
        """Whether clients are let in."""
        self.closing = False
        self.store = resources.store
        self.topics, self.owners, self.members = cluster.topics, cluster.owners, cluster.members
        self.leader, self.drained = cluster.leader, cluster.drained
        self.ask: Ask = cluster.peers.call
        self.segments, self.accesses, self.deletion = (
            segment_host.segments,
            segment_host.accesses,
            segment_host.deletion,
        )
        self.groups, self.subscriptions = group_host.groups, group_host.subscriptions
        self.transitions, self.auto_scaling = group_host.transitions, group_host.auto_scaling
        self.grant_signer, self.order_gate = group_host.grant_signer, group_host.order_gate
        controllers = self.controllers = group_host.controllers
        self.reports = Reports(
            config.id,
            self.topics,
            self.segments,
            self.owners,
            cluster.drained,
            self.members,
            metrics,
            self.groups,
            controllers,
            self.ask,
            cluster.loads.rates.of_segment,
        )
        self.peer_calls = PeerCalls()
        segment_host.answer(self.peer_calls)
        self.reports.answer_for(self.peer_calls)
        self.auto_scaling.answer_for(self.peer_calls)
        cluster_calls.answer_for(self, self.peer_calls)
        self.topology = TopologyView(config.id, self.topics, self.owners, self.members, controllers.address)
        controllers.table.on_change.append(self.topology.changed)
        self.calls = Calls(self)
        self.server = Server(self, resources.network, resources.clock)

    async def listen(self) -> Address:
        """Open the port. Clients and brokers that connect are asked to wait until `ready`."""
        config, topology = self.config, self.topology
        address = await self.server.listen(_address(config.listen))
        if config.advertise or address.host not in ANY_HOST:
            topology.own_address = topology.told_address = config.advertise or str(address)
        else:  # The broker has every address of the machine. A connected client has found one that works: HERE.
            topology.own_address = f"{socket.gethostname()}:{address.port}"
            topology.told_address = HERE
        return address

    async def shut(self) -> None:
        """Accept no more connections, confirm the publishes that were taken, then close the connections."""
        await self.server.stop_listening()
        await self.segments.flush()
        await self.server.close()

    async def finish_calls(self) -> None:
        """Wait for the calls that are under way."""
        await self.peer_calls.close()
        await self.calls.close()


def _address(text: str) -> Address:
    host, _, port = text.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65_535:
        raise InvalidConfig(f"{text!r} is no address to listen on: write HOST:PORT, with a port from 0 to 65535")
    return Address(host.removeprefix("[").removesuffix("]"), int(port))
