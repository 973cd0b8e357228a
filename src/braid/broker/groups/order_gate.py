"""Keeps a subscription out of a segment while it has not drained every ancestor of the segment (I4), on the owner of
the segment.

The controller gives out a segment only when all of its ancestors are drained (scaling/assignment.py), and asks for it
back when one of them no longer is: the subscription was set back, and the ancestor is to be read again first. A
consumer that has lost the controller does not hear that, and reads on. So the owner looks at the drained marks too. It
opens no channel while a mark is missing, and resets the channels that are open when a mark goes.

Its view of the marks may lag a little. A seek sets ancestors back before descendants (broker/groups/subscriptions.py).
So a view that shows the place of the cursor also shows the marks that the seek took away. With an older view the owner
opens no channel on a segment that has ancestors.
"""

from __future__ import annotations

from braid.broker.segments.owned_segment import OwnedSegment
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.drained import DrainedKey, DrainedSegments
from braid.model.errors import NotServing, cut
from braid.wire.operations import RESET


class OrderGate:
    def __init__(self, topics: Topics, segments: Segments, drained: DrainedSegments) -> None:
        self._topics = topics
        self._segments = segments
        self._drained = drained
        drained.table.on_change.append(self._on_change)

    def check(self, segment: OwnedSegment, subscription: str) -> None:
        """Raise `NotServing` while the subscription may not read the segment."""
        path, layout = segment.name.topic.path, self._topics.get(segment.name.topic.path).layout
        if segment.name.id not in layout.segments:
            raise NotServing(f"segment {segment.name.id} of topic {path} is not part of its layout; try again")
        ancestors = layout.ancestors(segment.name.id)
        if not ancestors:
            return
        if segment.cursors.stored_at(subscription) > self._drained.view.generation:
            raise NotServing(f"this broker does not know yet whether segment {segment.name.id} of topic {path} is next")
        drained = self._drained.of(path, subscription)
        waits_for = [str(ancestor) for ancestor in ancestors if ancestor not in drained]
        if waits_for:
            raise NotServing(
                f"subscription {cut(subscription)} reads segment {segment.name.id} of topic {path} when it has "
                f"consumed the ancestors of that segment: {', '.join(waits_for)}"
            )

    def _on_change(self, key: DrainedKey) -> None:
        topic = self._topics.find(key.path)
        if topic is None or key in self._drained.table:
            return
        for segment in self._segments.of_topic(key.path):
            if segment.name.id in topic.layout.segments and key.segment in topic.layout.ancestors(segment.name.id):
                segment.close_channels(
                    key.subscription, RESET, f"subscription {key.subscription} reads segment {key.segment} again first"
                )
