"""What pages see of the cluster: values, made anew by each look."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from braid.console.watch.history import SegmentSeen

Json = dict[str, Any]


class BrokerSeen(Struct, frozen=True, kw_only=True):
    id: str
    address: str = ""
    admin: str = ""
    version: str = ""
    started_at: float | None = None
    state: str = "active"
    """As REST says; `silent` while it does not answer, and others do not know yet that it is down."""
    lease: Literal["held", "lost", "unknown"] = "unknown"
    leader: bool = False
    segments: int = 0
    replicas: int = 0
    cpu: float | None = None
    bytes_in_per_s: float | None = None
    bytes_out_per_s: float | None = None
    backlog_bytes: float | None = None
    disk_size: float | None = None
    disk_free: float | None = None
    connections: int | None = None
    out_of_sync: int = 0
    labels: dict[str, str] = {}
    obstacles: tuple[str, ...] = ()

    @property
    def up(self) -> bool:
        return self.state not in ("down", "silent")


class TopicSeen(Struct, frozen=True, kw_only=True):
    path: str
    topic_id: int = 0
    segments: tuple[SegmentSeen, ...] = ()
    records_in_per_s: float | None = None
    bytes_in_per_s: float | None = None
    records_out_per_s: float | None = None
    bytes_out_per_s: float | None = None
    stored_bytes: float | None = None
    backlog: float | None = None
    """Records that subscriptions have before them, of the one that has most."""
    subscriptions: int | None = None
    """None: that is not known."""
    ages_s: dict[str, float] = {}
    """By subscription: how old the oldest record is that it has before it. Absent where the token sees no metrics."""
    alarms: tuple[str, ...] = ()

    @property
    def active(self) -> int:
        return sum(each.active for each in self.segments)


class TopicDetail(Struct, frozen=True, kw_only=True):
    """What only a topic's own calls tell, for topics that a page shows."""

    layout: Json
    stats: Json
    replicas: Json | None = None
    proposal: Json | None = None
    """What auto-scaling would do; None if the token may not know, or if no page asks."""
    key_hashes: Json | None = None
    """Where the load is; None as above, or from brokers of an earlier version."""


class ClusterView(Struct, frozen=True, kw_only=True):
    at: float = 0.0
    """When brokers last answered; 0: they have not yet."""
    error: str = ""
    """Why there is no news; empty if there is."""
    limited: bool = False
    """Whether the token may not see the cluster, only some topics."""
    brokers: tuple[BrokerSeen, ...] = ()
    topics: dict[str, TopicSeen] = {}
    changes: tuple[Json, ...] = ()

    def broker(self, id_: str) -> BrokerSeen | None:
        return next((each for each in self.brokers if each.id == id_), None)
