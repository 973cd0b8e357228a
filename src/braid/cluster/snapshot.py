"""The cluster at one moment, as plain values, for decisions.

Everything in a snapshot comes from one view, so from one revision. Only `gone_since` and `unable_since` do not: no
store has them, so this broker watches itself (downtime.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple, Protocol

import msgspec

from braid.cluster.downtime import Downtime, Unable
from braid.cluster.members import Members
from braid.cluster.owners import Owners, SegmentKey
from braid.cluster.placement import Tally
from braid.metadata.store import Compare
from braid.metadata.view import Known
from braid.model.cluster import REPLICAS, BrokerState, BrokerView, ClusterLoad, SegmentPlacement, SegmentRef
from braid.model.layout import SegmentInfo
from braid.model.load import LoadReport
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import Topic


class KnownTopics(Protocol):
    def all(self) -> dict[str, Topic]:
        """Return all topics by path, also those that are being deleted."""

    def unchanged(self, path: str) -> Compare:
        """Return a condition that holds while the topic is as it is known. `TopicNotFound`"""


class Placed(NamedTuple):
    """A segment of a layout, with its record if it has one."""

    path: str
    topic: Topic
    info: SegmentInfo
    known: Known[Ownership] | None

    @property
    def name(self) -> SegmentName:
        return SegmentName.of(TopicName.parse(self.path), self.info)

    @property
    def key(self) -> SegmentKey:
        return self.path, f"{self.info.hash_range}-{self.info.segment_id}"

    @property
    def is_pending(self) -> bool:
        """Tell whether it is a child of a transition: the layout does not show it yet."""
        return self.info.segment_id not in self.topic.layout.segments

    @property
    def ref(self) -> SegmentRef:
        return SegmentRef(self.path, self.info.segment_id)


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    topics: Mapping[str, Topic]
    """By path; also those that are being deleted."""
    records: Mapping[SegmentKey, Known[Ownership]]
    brokers: Mapping[str, BrokerView]
    """The live ones, by id."""
    unreadable: Collection[SegmentKey] = ()
    """Segments whose records this build cannot read. It decides nothing about them."""
    loads: Mapping[str, LoadReport] = {}
    gone_since: Mapping[str, float] = {}
    """When brokers that are not live were last seen so, on a clock that never goes back."""
    unable_since: Mapping[Unable, float] = {}
    """When a broker was first seen to be unable to open a segment, on the same clock. Only failures that last."""

    def segments(self) -> Iterator[Placed]:
        """Yield the segments of all topics that are not being deleted, in order; none whose record is unreadable."""
        for path, topic in sorted(self.topics.items()):
            if not topic.deleting:
                for info in topic.segments.values():
                    key = (path, f"{info.hash_range}-{info.segment_id}")
                    if key not in self.unreadable:
                        yield Placed(path, topic, info, self.records.get(key))

    def is_live(self, broker: str) -> bool:
        return broker in self.brokers

    def is_active(self, broker: str) -> bool:
        """Tell whether the broker may be given segments."""
        found = self.brokers.get(broker)
        return found is not None and found.available

    def tally(self) -> Tally:
        """Add up the load of each broker. A segment that is to move counts for its target."""
        owned = [
            SegmentPlacement(
                topic_path=each.path,
                segment_id=each.info.segment_id,
                owner=record.move.to if record.move is not None and record.move.to in self.brokers else record.owner,
                replicas=coming_replicas(record),
            )
            for each in self.segments()
            if each.known is not None and (record := each.known.value).state is not OwnershipState.SEALED
        ]
        return Tally(self.brokers.values(), self.loads, owned)

    def cluster_load(self, *, copies_history: bool) -> ClusterLoad:
        """Return the values that balancing decides on."""
        owned = tuple(
            SegmentPlacement(
                topic_path=each.path,
                segment_id=each.info.segment_id,
                owner=each.known.value.owner,
                replicas=coming_replicas(each.known.value),
                moving=_is_settling(each.known.value),
            )
            for each in self.segments()
            if each.known is not None
        )
        return ClusterLoad(
            brokers=tuple(self.brokers.values()), owned=owned, loads=self.loads, copies_history=copies_history
        )


def coming_replicas(record: Ownership) -> tuple[str, ...]:
    """Return the brokers that hold copies of the segment, or will when the owner has changed them as it is asked."""
    return record.replicas if record.change is None else record.change.replicas


def _is_settling(record: Ownership) -> bool:
    """Tell whether the segment is on its way, so that it must not be moved now."""
    return record.state is not OwnershipState.SERVING or record.move is not None


def taken(topics: KnownTopics, owners: Owners, members: Members, downtime: Downtime) -> Snapshot:
    """Take a snapshot of the cluster as this broker knows it now."""
    records = {key: known for key in owners.table.all() if (known := owners.table.known(key)) is not None}
    owning = {
        broker
        for known in records.values()
        if (record := known.value).state is not OwnershipState.SEALED
        for broker in (record.owner, *record.replicas, *coming_replicas(record))
    }
    all_topics = topics.all()
    replicated = any(each.policies.replicas > 1 for each in all_topics.values()) or any(
        coming_replicas(each.value) for each in records.values()
    )
    brokers = {
        id_: BrokerView(
            id=id_,
            address=found.address,
            state=broker_state(id_, members, owning),
            labels=dict(found.labels),
            outdated=replicated and REPLICAS not in found.features,
        )
        for id_, found in sorted(members.brokers.all().items())
    }
    return Snapshot(
        topics=all_topics,
        records=records,
        brokers=brokers,
        unreadable=owners.table.all_unreadable(),
        loads=members.loads.all(),
        gone_since=downtime.since(owning | _wanted(records)),
        unable_since=downtime.unable_since(),
    )


def broker_state(id_: str, members: Members, owning: set[str]) -> BrokerState:
    if id_ not in members.drains:
        return BrokerState.ACTIVE if members.is_active(id_) else BrokerState.STOPPING
    return BrokerState.DRAINING if id_ in owning else BrokerState.DRAINED


def _wanted(records: Mapping[SegmentKey, Known[Ownership]]) -> set[str]:
    """Return the brokers whose own disks hold a segment's history, or were given up."""
    return {broker for known in records.values() for broker in (*known.value.holders, *known.value.given_up)}
