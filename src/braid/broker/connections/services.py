"""The parts of the broker that a session uses."""

from __future__ import annotations

from typing import Protocol

from braid.broker.admin.calls import Calls
from braid.broker.auth import Access
from braid.broker.config import Limits
from braid.broker.connections.unfinished_frames import UnfinishedFrames
from braid.broker.groups.controllers import Controllers
from braid.broker.groups.groups import Groups
from braid.broker.groups.order_gate import OrderGate
from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.metrics import BrokerMetrics
from braid.broker.peers.calls import PeerCalls
from braid.broker.segments.delivery import ReadAhead
from braid.broker.segments.read_grants import GrantSigner
from braid.broker.segments.segments import OwnedSegment, Segments
from braid.broker.topics import Topics
from braid.broker.topology import TopologyView
from braid.broker.turns import Turns
from braid.broker.unsent_bytes import UnsentBytes
from braid.model.errors import NotServing
from braid.model.topic import Topic


class Services(Protocol):
    id: str
    limits: Limits
    metrics: BrokerMetrics
    topics: Topics
    segments: Segments
    subscriptions: Subscriptions
    groups: Groups
    controllers: Controllers
    grant_signer: GrantSigner
    order_gate: OrderGate
    calls: Calls
    peer_calls: PeerCalls
    access: Access
    topology: TopologyView
    read_ahead: ReadAhead
    turns: Turns
    unfinished_frames: UnfinishedFrames
    unsent_bytes: UnsentBytes
    ready: bool
    closing: bool


def segment_in_layout(services: Services, path: str, topic: Topic, segment_id: int) -> OwnedSegment:
    """Return a segment that the topic's layout has. A child that is still pending is served, and not in it."""
    if segment_id not in topic.layout.segments:
        raise NotServing(
            f"segment {segment_id} is not in the layout of topic {path} that broker {services.id} has now, "
            f"of epoch {topic.layout.epoch}"
        )
    return services.segments.get(path, segment_id)
