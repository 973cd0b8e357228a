"""Everything that this broker does as an owner of segments: serve, move and delete them, and tidy their history."""

from __future__ import annotations

from braid.broker.config import BrokerConfig
from braid.broker.layouts.manifests import TopicManifests
from braid.broker.metrics import BrokerMetrics
from braid.broker.parts.cluster_node import ClusterNode
from braid.broker.parts.resources import Resources
from braid.broker.peers.calls import PeerCalls
from braid.broker.segments.deletion import Deletion
from braid.broker.segments.handover import HandOver
from braid.broker.segments.history_copy import IncomingHistory, OutgoingHistory
from braid.broker.segments.leftover_chunks import Copies
from braid.broker.segments.segment_access import answer_for
from braid.broker.segments.segments import Segments
from braid.storage.history.housekeeper import Housekeeper


class SegmentHost:
    def __init__(
        self, config: BrokerConfig, resources: Resources, cluster: ClusterNode, metrics: BrokerMetrics
    ) -> None:
        storage, may_act = resources.storage, cluster.registration.may_act
        topics, owners, members, peers = cluster.topics, cluster.owners, cluster.members, cluster.peers
        self.housekeeper = Housekeeper()
        self.copies = Copies(storage, owners)
        self.incoming = IncomingHistory(storage, topics, self.copies)
        self.manifests = TopicManifests(topics, storage.objects, lambda path: bool(self.segments.of_topic(path)))
        self.segments = Segments(
            storage,
            config,
            metrics,
            may_act=may_act,
            topics=topics,
            owners=owners,
            members=members,
            housekeeper=self.housekeeper,
            hand_over=HandOver(storage, owners, members, OutgoingHistory(storage, peers), self.copies, resources.clock),
            write_manifest=self.manifests.write,
            ask=peers.call,
        )
        self.segments.on_open.append(self.manifests.look)
        self.accesses = self.segments.accesses
        self.deletion = Deletion(
            storage,
            topics,
            owners,
            members,
            self.segments,
            may_act=may_act,
            leads=lambda: cluster.leader.leading,
        )
        cluster.leader.on_deleting.append(self.deletion.finish_later)

    def answer(self, calls: PeerCalls) -> None:
        """Answer the calls of other brokers that concern segments."""
        calls.register("list_history", self.incoming.list_history)
        calls.register_with_payload("put_history", self.incoming.put_history)
        answer_for(self.segments, calls)

    async def start(self) -> None:
        """Return when this broker has tried once to open each of its segments."""
        await self.segments.start()
        self.deletion.start()
        await self.copies.start()
        self.housekeeper.start()

    async def stop(self) -> None:
        await self.housekeeper.stop()
        await self.copies.stop()
        await self.deletion.stop()
        await self.manifests.stop()
        await self.segments.close()
        await self.incoming.close()
