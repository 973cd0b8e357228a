"""The routing that clients get for a topic: layout, the address of each segment's owner, and where consumers join.

All of it comes from the view of the metadata (metadata/view.py), without waiting and without asking another broker. So
a route shows one revision of the metadata, and that revision is the route's generation: a route never changes without a
higher generation. This holds only while routes show nothing but the view. Whether a segment is open here, for example,
is taken from its record and not from the segment.

Clients see an owner of a segment while the segment's record says SERVING and the owner is registered. While the segment
moves, or waits for a broker that is gone, they see none and wait for the push that names the next owner. Only changed
content causes a push: a follower of `on_change` compares the route that it sent last (`encoded`) with the present one.
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
"""Routes that are kept encoded, because many clients ask for the same topics."""


class TopologyView:
    def __init__(
        self,
        broker_id: str,
        topics: Topics,
        owners: Owners,
        members: Members,
        controller: Callable[[str], str] = lambda _path: "",
    ) -> None:
        """`controller` returns the address of the broker that runs a topic's groups, empty if there is none. It must
        read the same view, and its changes must be announced by `changed`."""
        self.own_address = ""
        self.told_address = ""
        """The address that clients get for this broker's own segments: `own_address`, or HERE."""
        self.on_change: list[Callable[[str], None]] = []
        """Called with the path of a topic whose route may have changed."""
        self._broker_id = broker_id
        self._topics = topics
        self._owners = owners
        self._members = members
        self._controller = controller
        self._encoded: dict[str, bytes] = {}
        self._shown: dict[SegmentKey, tuple[str, bool, int]] = {}
        """What routes show of each record: owner, whether it serves, and its epoch."""
        topics.on_change.append(self.changed)
        owners.table.on_change.append(self._on_owner)
        members.brokers.on_change.append(self._on_member)

    @property
    def generation(self) -> int:
        """The revision of the view, which every route shows."""
        return self._topics.generation

    def route(self, path: str) -> TopicRoute:
        """The routing of one topic, with real addresses; topic id 0 if it does not exist."""
        return self._route(path)

    def encoded(self, path: str) -> bytes:
        """The routing as clients get it, ready to stand in a Topology (`encoded_topology`)."""
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
        """`instead_of_own` replaces this broker's own address."""
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
            topic.first_segments,
        )

    def _address(self, record: Ownership, instead_of_own: str) -> str:
        """The address of the broker that serves the segment; empty if there is none."""
        address = self._members.address(record.owner)
        if record.state is not OwnershipState.SERVING or not address:
            return ""
        return instead_of_own or address if record.owner == self._broker_id else address

    # Changes in the view.

    def _on_owner(self, key: SegmentKey) -> None:
        """Announce only what a route shows: a change of the layout writes each record several times."""
        shown = self._part_of_route(key)
        if shown != self._shown.pop(key, None):
            self.changed(key[0])
        if shown is not None:
            self._shown[key] = shown

    def _part_of_route(self, key: SegmentKey) -> tuple[str, bool, int] | None:
        path, descriptor = key
        topic, record = self._topics.find(path), self._owners.table.get(key)
        if topic is None or record is None or SegmentName.at(path, descriptor).id not in topic.layout.segments:
            return None  # The topic's own change announces a segment that comes into its layout.
        return record.owner, record.state is OwnershipState.SERVING, record.epoch

    def _on_member(self, broker_id: str) -> None:
        """A registration came, changed or went, and with it the address of all segments that the broker owns. Changes
        of controllers are announced separately, but encoded routes may hold a controller's old address."""
        self._encoded.clear()
        for path in {path: None for path, _ in self._owners.of_broker(broker_id)}:
            self.changed(path)


def encoded_topology(generation: int, routes: list[bytes]) -> bytes:
    """Return a `Topology` of routes that are encoded already."""
    return encode((generation, [msgspec.Raw(route) for route in routes]))
