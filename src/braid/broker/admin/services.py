"""What the administrative calls need of their broker."""

from __future__ import annotations

from typing import Protocol

from braid.broker.admin.reports import Reports
from braid.broker.auth import Access
from braid.broker.config import BrokerConfig
from braid.broker.groups.groups import Groups
from braid.broker.groups.subscriptions import Subscriptions
from braid.broker.layouts.auto_scaling import AutoScaling
from braid.broker.layouts.transitions import Transitions
from braid.broker.metrics import BrokerMetrics
from braid.broker.segments.deletion import Deletion
from braid.broker.segments.segment_access import Ask, SegmentAccesses
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.broker.topology import TopologyView
from braid.cluster.drained import DrainedSegments
from braid.cluster.leader import Leader
from braid.cluster.members import Members
from braid.cluster.owners import Owners
from braid.metadata.store import Store


class CallServices(Protocol):
    id: str
    store: Store
    metrics: BrokerMetrics
    topics: Topics
    segments: Segments
    accesses: SegmentAccesses
    subscriptions: Subscriptions
    reports: Reports
    groups: Groups
    access: Access
    topology: TopologyView
    owners: Owners
    drained: DrainedSegments
    members: Members
    leader: Leader
    deletion: Deletion
    transitions: Transitions
    auto_scaling: AutoScaling
    ask: Ask
    """Calls another broker."""

    @property
    def config(self) -> BrokerConfig: ...
