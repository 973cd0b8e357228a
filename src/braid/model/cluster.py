"""The cluster as its leader sees it: registrations of brokers, and plain values, made from metadata, by which placing
and balancing decide."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Final

import msgspec

from braid.model.ids import SegmentId
from braid.model.load import LoadReport
from braid.model.stored_record import StoredRecord, decode, encode


class BrokerState(Enum):
    ACTIVE = "active"
    DRAINING = "draining"
    """Its segments are moving away; it gets no new ones."""
    DRAINED = "drained"
    """It has no segments left and gets none until it is activated again."""
    STOPPING = "stopping"
    """It hands over what it has by itself, and will be gone."""


TRANSITIONS: Final = "transitions"
"""A feature: changes of a topic's layout."""
REPLICAS: Final = "replicas"
"""A feature: copies of a segment's log on several brokers."""
QUEUES: Final = "queues"
"""A feature: subscriptions that settle messages one by one."""


RACK: Final = "rack"
"""A label: brokers of one rack fail together."""


class Registration(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """A broker's entry in the metadata store; lives as long as its lease."""

    address: str
    """`host:port`, as clients reach it."""
    admin: str
    state: str = "active"
    version: str = ""
    started_at: int = 0
    """µs since 1970."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    features: tuple[str, ...] = ()
    """What this build takes part in, and earlier builds do not know."""

    def to_json(self) -> bytes:
        return encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Registration:
        return decode(cls, data, "a broker's registration")


def without_feature(brokers: Mapping[str, Registration], feature: str) -> list[str]:
    """Return the brokers of earlier versions, which do not know this feature."""
    return sorted(broker for broker, registration in brokers.items() if feature not in registration.features)


class BrokerView(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    address: str = ""
    state: BrokerState = BrokerState.ACTIVE
    labels: dict[str, str] = {}
    live: bool = True
    """Whether it holds its lease."""
    outdated: bool = False
    """Whether its version does not know what the cluster uses: it would serve a replicated segment alone."""

    @property
    def available(self) -> bool:
        """Whether segments may be given to it."""
        return self.live and self.state is BrokerState.ACTIVE and not self.outdated

    @property
    def rack(self) -> str:
        """What fails together with it; empty: not known."""
        return self.labels.get(RACK, "")


class SegmentRef(msgspec.Struct, frozen=True, order=True):
    """A segment in a cluster; its range does not matter here."""

    topic_path: str
    """`tenant/namespace/name`"""
    segment_id: SegmentId

    def __str__(self) -> str:
        return f"segment {self.segment_id} of {self.topic_path}"


class SegmentPlacement(msgspec.Struct, frozen=True, kw_only=True):
    topic_path: str
    segment_id: SegmentId
    owner: str
    """A broker's id, of a live broker or not."""
    replicas: tuple[str, ...] = ()
    """The brokers that hold copies of its log, the owner's among them; empty: it is not replicated."""
    moving: bool = False
    """A move has begun and has not ended."""

    @property
    def ref(self) -> SegmentRef:
        return SegmentRef(self.topic_path, self.segment_id)


class RecentMove(msgspec.Struct, frozen=True, kw_only=True):
    """A move that was begun, whether or not it has ended."""

    segment: SegmentRef
    source: str
    target: str
    at: int
    """µs since 1970, when it was begun."""
    automatic: bool = True
    """Whether balancing began it. Others only keep their segment and brokers quiet for a while."""


class ClusterLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What balancing decides on: brokers, the segments that they own, and their reports."""

    brokers: tuple[BrokerView, ...]
    owned: tuple[SegmentPlacement, ...]
    """Every segment that has an owner."""
    loads: Mapping[str, LoadReport]
    """The last report of each broker, by its id."""
    copies_history: bool = False
    """Whether a move copies the segment's history: `local` storage on brokers that share no disk."""
