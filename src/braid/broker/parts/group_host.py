"""Everything that this broker does for consumers and for the shape of topics: control topics, run their groups, keep
their subscriptions, change their layouts."""

from __future__ import annotations

from braid.broker.config import BrokerConfig
from braid.broker.groups.controllers import NO_LEASE, Controllers
from braid.broker.groups.cursor_sweep import CursorSweep
from braid.broker.groups.groups import Groups
from braid.broker.groups.order_gate import OrderGate
from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.layouts.auto_scaling import AutoScaling
from braid.broker.layouts.finalizing import Finalizing
from braid.broker.layouts.pruning import Pruning
from braid.broker.layouts.removal import SegmentRemoval
from braid.broker.layouts.transitions import Transitions
from braid.broker.parts.cluster_node import ClusterNode
from braid.broker.parts.resources import Resources
from braid.broker.parts.segment_host import SegmentHost
from braid.broker.segments.read_grants import GrantSigner
from braid.model.cluster import QUEUES, without_feature


class GroupHost:
    def __init__(self, config: BrokerConfig, resources: Resources, cluster: ClusterNode, host: SegmentHost) -> None:
        registration = cluster.registration

        def lease_id() -> int:
            return registration.lease.id if registration.may_act() else NO_LEASE

        self.controllers = Controllers(cluster.view, cluster.members, config.id, lease_id)
        self.grant_signer = GrantSigner(lambda: cluster.peers.secret)
        self.groups = Groups(
            cluster.topics, self.controllers, cluster.drained, resources.clock, config.groups, self.grant_signer
        )
        self.order_gate = OrderGate(cluster.topics, host.segments, cluster.drained)
        self.subscriptions = Subscriptions(
            resources.store,
            cluster.topics,
            host.accesses,
            resources.clock,
            resources.random,
            without_queues=lambda: without_feature(cluster.members.brokers.all(), QUEUES),
        )
        self.cursor_sweep = CursorSweep(resources.store, cluster.topics, host.segments, self.subscriptions)
        host.segments.on_open.append(self.cursor_sweep.sweep_later)
        self.transitions = Transitions(
            cluster.topics,
            cluster.owners,
            cluster.members,
            cluster.leader,
            self.subscriptions,
            host.accesses,
            resources.clock,
        )
        cluster.leader.on_transition.append(self.transitions.drive_later)
        self.auto_scaling = AutoScaling(
            config.id,
            config.auto_scale,
            cluster.topics,
            cluster.owners,
            cluster.leader,
            self.transitions,
            host.segments,
            cluster.loads.rates,
            cluster.peers.call,
            resources.clock,
            resources.threads,
        )
        cluster.leader.on_look.append(self.auto_scaling.look)
        self.finalizing = Finalizing(
            cluster.topics,
            cluster.members,
            cluster.leader,
            cluster.drained,
            self.groups.subscription_names,
            resources.clock,
        )
        cluster.leader.on_look.append(self.finalizing.look)
        self.pruning = Pruning(cluster.topics, cluster.owners, host.segments)
        self.removal = SegmentRemoval(
            resources.storage,
            cluster.topics,
            cluster.owners,
            cluster.members,
            host.segments,
            may_act=registration.may_act,
            leads=lambda: cluster.leader.leading,
        )
        cluster.leader.on_look.append(self.removal.look)

    def start(self) -> None:
        self.groups.start()
        self.removal.start()
        self.pruning.start()

    async def stop(self) -> None:
        """Stop the groups. Stopping twice is fine."""
        await self.pruning.stop()
        await self.removal.stop()
        await self.auto_scaling.stop()
        await self.finalizing.stop()
        await self.transitions.stop()
        await self.cursor_sweep.stop()
        await self.groups.close()
