"""What clients are told about topics: layout, the address of each segment's owner, and where consumers join.

All of it comes from the view of the metadata (metadata/view.py), at once and without asking anybody, so it is the truth
of one revision, which is the generation that goes with it: a route never changes without its generation rising. That
holds only as long as nothing else is mixed in; whether a segment is open here, for example, is told by its record.

A segment has an owner for clients while its record says SERVING and the owner is registered. In between, while it
moves or waits for a broker that is gone, it has none, and clients wait for the push that names the next one. Pushes are
caused by content: whoever follows `on_change` compares what he told last (`encoded`) with what is so now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import msgspec

from braid.broker.topics import Topics
from braid.cluster.members import Members
from braid.cluster.owners import Owners, SegmentKey
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.wire.operations import SegmentRoute, TopicRoute, encode

MAX_ENCODED: Final = 4_096
"""Routes that are kept encoded, for the many that ask for the same topics."""


class TopologyView:
    def __init__(
        self,
        broker_id: str,
        topics: Topics,
        owners: Owners,
        members: Members,
        controller: Callable[[str], str] = lambda _path: "",
    ) -> None:
        """`controller` tells the address of the broker that runs a topic's groups, empty if nobody does. It must be
        told by the same view; who knows of its changes calls `changed`."""
        self.own_address = ""
        self.told_address = ""
        """What clients are told of this broker's own segments: its address, or HERE."""
        self.on_change: list[Callable[[str], None]] = []
        """Called with the path of a topic whose route may be another one now."""
        self._broker_id = broker_id
        self._topics = topics
        self._owners = owners
        self._members = members
        self._controller = controller
        self._encoded: dict[str, bytes] = {}
        topics.on_change.append(self.changed)
        owners.table.on_change.append(self._on_owner)
        members.brokers.on_change.append(self._on_member)

    @property
    def generation(self) -> int:
        """Of the view: what any route shows is of this revision."""
        return self._topics.generation

    def route(self, path: str) -> TopicRoute:
        """The routing of one topic, with real addresses; topic id 0 if it does not exist."""
        return self._route(path)

    def encoded(self, path: str) -> bytes:
        """The routing as clients are told it, ready to stand in a Topology (`encoded_topology`)."""
        found = self._encoded.get(path)
        if found is None:
            if len(self._encoded) >= MAX_ENCODED:
                self._encoded.clear()
            found = self._encoded[path] = encode(self._route(path, self.told_address))
        return found

    def changed(self, path: str) -> None:
        self._encoded.pop(path, None)
        for callback in list(self.on_change):
            callback(path)

    def _route(self, path: str, instead_of_own: str = "") -> TopicRoute:
        """`instead_of_own` is told where this broker's own address would stand."""
        topic = self._topics.find(path)
        if topic is None:
            return TopicRoute(path, 0, 0, ())
        name = TopicName.parse(path)
        routes = []
        for info in topic.layout.segments.values():
            record = self._owners.find(SegmentName.of(name, info))
            routes.append(
                SegmentRoute(
                    info.segment_id,
                    info.hash_range.start,
                    info.hash_range.end,
                    info.is_active,
                    tuple(info.parent_ids),
                    tuple(info.child_ids),
                    self._address(record, instead_of_own) if record is not None else "",
                    record.epoch if record is not None else 0,
                )
            )
        controller = self._controller(path)
        return TopicRoute(
            path,
            topic.id,
            topic.layout.epoch,
            tuple(routes),
            instead_of_own or controller if controller == self.own_address else controller,
        )

    def _address(self, record: Ownership, instead_of_own: str) -> str:
        """Where the segment is served, if it is."""
        address = self._members.address(record.owner)
        if record.state is not OwnershipState.SERVING or not address:
            return ""
        return instead_of_own or address if record.owner == self._broker_id else address

    # What the view tells.

    def _on_owner(self, key: SegmentKey) -> None:
        self.changed(key[0])

    def _on_member(self, broker_id: str) -> None:
        """Its registration came, changed or went: so did the address of all that it owns. What else it is to topics,
        somebody else announces, but what is kept encoded may show its address."""
        self._encoded.clear()
        for path in {path: None for path, _ in self._owners.of_broker(broker_id)}:
            self.changed(path)


def encoded_topology(generation: int, routes: list[bytes]) -> bytes:
    """A `Topology` of routes that are encoded already."""
    return encode((generation, [msgspec.Raw(route) for route in routes]))
