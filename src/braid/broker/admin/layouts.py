"""The calls that change a topic's layout: split, merge, repartition, and taking a change back.

Any broker takes them: it writes the intent, the cluster leader drives it, and the call waits for the outcome
(broker/layouts/transitions.py). When the time is over before that, the change is still under way. A call that is
repeated joins what its first try has begun.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from braid.broker.admin.call import CallId, OnTopic, WaitSeconds, on_topic, who_knows_the_topic
from braid.broker.admin.results import ChangedLayout, LayoutDescription
from braid.broker.admin.route import (
    NO_CONTENT,
    SEGMENT,
    TOPIC,
    Descriptor,
    HttpRoute,
    SegmentCount,
    SegmentNumber,
)
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.model.errors import InvalidArgument, NotAvailable
from braid.model.ids import NO_REQUEST
from braid.model.layout import MAX_SEGMENTS, Layout
from braid.model.names import SegmentName
from braid.model.transition import LayoutPlan, plan_merge, plan_repartition, plan_split

CHANGE_WAIT_S: Final = 60.0


def _change(method: str, path: str, tag: str = "layout", **more: Any) -> HttpRoute:
    return HttpRoute(method, path, tag=tag, status=NO_CONTENT, errors=(404, 409, 412, 501), **more)


class _ChangeLayout(OnTopic, frozen=True, kw_only=True, rename="camel"):
    needs = on_topic(Action.ADMIN)
    timeout: WaitSeconds = CHANGE_WAIT_S
    request_id: CallId = NO_REQUEST

    async def _carried_out(self, services: CallServices, plan: Callable[[Layout], LayoutPlan]) -> ChangedLayout:
        began = asyncio.get_running_loop().time()
        name, transitions = self.name, services.transitions
        transition = await transitions.begin(name, plan, self.request_id)
        topic = await transitions.committed(name, transition, self.timeout)
        seconds = asyncio.get_running_loop().time() - began
        return ChangedLayout(str(name), topic.layout.epoch, transition.parents, transition.child_ids, round(seconds, 3))


class SplitSegment(_ChangeLayout, frozen=True, kw_only=True):
    http = _change("POST", TOPIC + "/split/{segmentId}", names={"segmentId": "segment"}, query=("at", "into"))
    segment: SegmentNumber
    at: (
        Annotated[
            str,
            Meta(
                pattern="^[0-9a-fA-F]{1,4}$",
                description="The first hash of the second child; the midpoint if absent.",
            ),
        ]
        | None
    ) = None
    into: Annotated[int, Meta(ge=2, le=MAX_SEGMENTS, description="How many children of equal size.")] = 2

    async def run(self, services: CallServices, principal: Principal) -> ChangedLayout:  # noqa: ARG002
        at = int(self.at, 16) if self.at is not None else None
        return await self._carried_out(services, lambda layout: plan_split(layout, self.segment, at=at, into=self.into))


class MergeSegments(_ChangeLayout, frozen=True, kw_only=True):
    http = _change(
        "POST",
        TOPIC + "/merge/{segmentId1}/{segmentId2}",
        names={"segmentId1": "segments", "segmentId2": "segments"},
    )
    segments: list[SegmentNumber]

    async def run(self, services: CallServices, principal: Principal) -> ChangedLayout:  # noqa: ARG002
        if len(self.segments) != 2 or self.segments[0] == self.segments[1]:
            raise InvalidArgument("a merge joins two segments: name two different ones")
        first, second = self.segments
        return await self._carried_out(services, lambda layout: plan_merge(layout, first, second))


class RepartitionTopic(_ChangeLayout, frozen=True, kw_only=True):
    http = _change("POST", TOPIC + "/repartition/{segments}")
    segments: SegmentCount

    async def run(self, services: CallServices, principal: Principal) -> ChangedLayout:  # noqa: ARG002
        return await self._carried_out(services, lambda layout: plan_repartition(layout, self.segments))


class AbortTransition(OnTopic, frozen=True):
    """Takes back a change of the layout whose parents still take writes."""

    needs = on_topic(Action.ADMIN)
    http = _change("DELETE", TOPIC + "/transition")

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        await services.transitions.abort(self.name)


class GetLayout(OnTopic, frozen=True):
    """The segments of all generations, where each is served, and the change that is under way."""

    needs = who_knows_the_topic
    http = HttpRoute("GET", TOPIC + "/layout", tag="layout", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> LayoutDescription:  # noqa: ARG002
        name = self.name
        topic = services.topics.get(name.path)
        records = {
            segment: services.owners.find(SegmentName.of(name, info)) for segment, info in topic.segments.items()
        }
        return LayoutDescription.of(name, topic, records, services.transitions.waits_for(name.path))


# Segments are created and ended by changes of the layout, and the load does not change the layout by itself yet.


class _NotYet(OnTopic, frozen=True):
    needs = on_topic(Action.ADMIN)

    def _not_yet(self) -> NotAvailable:
        return NotAvailable(
            f"topic {self.name}: this is not in this version yet; change the layout by split, merge or repartition"
        )


class GetAutoScalePolicy(_NotYet, frozen=True):
    http = HttpRoute("GET", TOPIC + "/autoScalePolicy", tag="layout", errors=(404, 501))

    async def run(self, services: CallServices, principal: Principal) -> dict[str, Any]:  # noqa: ARG002
        raise self._not_yet()


class SetAutoScalePolicy(_NotYet, frozen=True):
    http = _change("PUT", TOPIC + "/autoScalePolicy", body="policy", required=("policy",))
    policy: dict[str, Any] = msgspec.field(default_factory=dict)

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        raise self._not_yet()


class DeleteAutoScalePolicy(_NotYet, frozen=True):
    http = _change("DELETE", TOPIC + "/autoScalePolicy")

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        raise self._not_yet()


class CreateSegment(_NotYet, frozen=True):
    http = _change("PUT", SEGMENT, "segments")
    descriptor: Descriptor
    subscriptions: list[str] = msgspec.field(default_factory=list)

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        raise self._not_yet()


class DeleteSegment(_NotYet, frozen=True):
    http = _change("DELETE", SEGMENT, "segments")
    descriptor: Descriptor
    subscriptions: list[str] = msgspec.field(default_factory=list)

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        raise self._not_yet()


class TerminateSegment(_NotYet, frozen=True):
    http = _change("POST", SEGMENT + "/terminate", "segments")
    descriptor: Descriptor
    subscriptions: list[str] = msgspec.field(default_factory=list)

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        raise self._not_yet()
