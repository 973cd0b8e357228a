"""Everything that this broker does as an owner of segments: serve, move and delete them, and tidy their history."""

from __future__ import annotations

import asyncio

from braid.broker.config import BrokerConfig
from braid.broker.layouts.manifests import TopicManifests
from braid.broker.metrics import BrokerMetrics
from braid.broker.parts.cluster_node import ClusterNode
from braid.broker.parts.resources import Resources
from braid.broker.peers.calls import PeerCalls
from braid.broker.replicas.copies import ReplicaCopies
from braid.broker.replicas.elections import Elections
from braid.broker.replicas.queue_copies import QueueCopies
from braid.broker.replicas.replication import Replication
from braid.broker.replicas.stream import MAX_READS
from braid.broker.segments.deletion import Deletion
from braid.broker.segments.handover import HandOver
from braid.broker.segments.history_copy import IncomingHistory, OutgoingHistory
from braid.broker.segments.leftover_chunks import Copies
from braid.broker.segments.segment_access import answer_for
from braid.broker.segments.segments import Segments
from braid.model.names import SegmentName
from braid.model.ownership import Ownership
from braid.storage.context import StorageMode
from braid.storage.history.catalog import Catalog
from braid.storage.history.housekeeper import Housekeeper


class SegmentHost:
    def __init__(
        self, config: BrokerConfig, resources: Resources, cluster: ClusterNode, metrics: BrokerMetrics
    ) -> None:
        storage, may_act = resources.storage, cluster.registration.may_act
        topics, owners, members, peers = cluster.topics, cluster.owners, cluster.members, cluster.peers
        self.housekeeper = Housekeeper()
        self.copies = Copies(storage, owners)
        self.manifests = TopicManifests(topics, storage.objects, lambda path: bool(self.segments.of_topic(path)))
        self._cluster = cluster
        self._reads: dict[str, asyncio.Semaphore] = {}
        self._storage = storage
        self._outgoing = outgoing = OutgoingHistory(storage, peers)
        self.replicas = ReplicaCopies(
            storage,
            topics,
            owners,
            ended=lambda name: self.segments.ended(name),
            on_sync=metrics.sync_latency_s.observe,
        )
        self.queue_copies = QueueCopies(self.replicas)
        self.incoming = IncomingHistory(storage, topics, self.copies, self.replicas.settled)
        self.segments = Segments(
            storage,
            config,
            metrics,
            may_act=may_act,
            topics=topics,
            owners=owners,
            members=members,
            housekeeper=self.housekeeper,
            hand_over=HandOver(storage, owners, members, outgoing, self.copies, resources.clock),
            write_manifest=self.manifests.write,
            ask=peers.call,
            copies=self.replicas,
            replicate=self._replicate,
        )
        self.elections = Elections(
            config.id,
            topics,
            owners,
            members,
            storage.clock,
            self.replicas.promise,
            cluster.stream_peers.call,
            lambda: cluster.leader.fence,
        )
        cluster.leader.on_look.append(self.elections.look)
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

    def _replicate(self, name: SegmentName, topic_id: int, record: Ownership) -> Replication:
        owners = self._cluster.owners

        async def bring_history(follower: str, catalog: Catalog) -> None:
            known = owners.known(name)
            if self._storage.mode is StorageMode.LOCAL and catalog.objects and known is not None:
                await self._outgoing.copy(name, topic_id, follower, catalog.objects, known.revision)

        peers = self._cluster.stream_peers
        return Replication(self._storage, owners, name, topic_id, record, peers, bring_history, self._reads_for)

    def _reads_for(self, follower: str) -> asyncio.Semaphore:
        return self._reads.setdefault(follower, asyncio.Semaphore(MAX_READS))

    def answer(self, calls: PeerCalls) -> None:
        """Answer the calls of other brokers that concern segments."""
        calls.register("list_history", self.incoming.list_history)
        calls.register_with_payload("put_history", self.incoming.put_history)
        answer_for(self.segments, calls)
        self.replicas.answer(calls)
        self.queue_copies.answer(calls)

    async def start(self) -> None:
        """Return when this broker has tried once to open each of its segments."""
        await self.replicas.start()
        await self.segments.start()
        self.deletion.start()
        await self.copies.start()
        self.housekeeper.start()

    async def stop(self) -> None:
        await self.housekeeper.stop()
        await self.copies.stop()
        await self.deletion.stop()
        await self.manifests.stop()
        await self.elections.stop()
        await self.segments.close()
        await self.replicas.stop()
        await self.incoming.close()
