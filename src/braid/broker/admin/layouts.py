"""The calls that change a topic's layout: split, merge, repartition, taking a change back, and the policies by which it
changes by itself.

Any broker takes them: it writes the intent, the cluster leader drives it, and the call waits for the outcome
(broker/layouts/transitions.py). When the time is over before that, the change is still under way. A call that is
repeated joins what its first try has begun, and gets its answer also when the change is finished.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from braid.broker.admin.call import (
    AdminCall,
    CallId,
    OnTopic,
    WaitSeconds,
    on_cluster,
    on_namespace,
    on_topic,
    some_names,
    who_knows_the_topic,
)
from braid.broker.admin.results.layouts import ChangedLayout, LayoutDescription
from braid.broker.admin.route import (
    NAMESPACE,
    NO_CONTENT,
    SEGMENT,
    TOPIC,
    Descriptor,
    HttpRoute,
    NamespaceName,
    SegmentCount,
    SegmentNumber,
    TenantName,
)
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.broker.layouts.auto_scaling import AutoScaleProposal
from braid.broker.layouts.key_hashes import TopicKeyHashes
from braid.cluster.drained import DrainedKey
from braid.model.errors import (
    InvalidArgument,
    SegmentNotFound,
    SubscriptionNotFound,
    TransitionRefused,
    TransitionRunning,
)
from braid.model.ids import NO_REQUEST, SegmentId
from braid.model.layout import MAX_SEGMENTS, Layout, SegmentInfo
from braid.model.names import SegmentName, TopicName, check_name
from braid.model.topic import AutoScaleOverride, StoredOverride
from braid.model.transition import (
    CommittedTransition,
    FinishedChange,
    LayoutPlan,
    Transition,
    TransitionKey,
    plan_merge,
    plan_repartition,
    plan_rollover,
    plan_split,
)

CHANGE_WAIT_S: Final = 60.0

_log: Final = logging.getLogger(__name__)


def _change(method: str, path: str, tag: str = "layout", **more: Any) -> HttpRoute:
    return HttpRoute(method, path, tag=tag, status=NO_CONTENT, errors=(404, 409, 412, 501), **more)


class _ChangeLayout(OnTopic, frozen=True, kw_only=True, rename="camel"):
    needs = on_topic(Action.ADMIN)
    timeout: WaitSeconds = CHANGE_WAIT_S
    request_id: CallId = NO_REQUEST

    async def _carried_out(
        self, services: CallServices, plan: Callable[[Layout], LayoutPlan], *parents: int
    ) -> ChangedLayout:
        """Make the change, or find what an earlier call for the same change has made. `parents` are those that the call
        names."""
        began = asyncio.get_running_loop().time()
        name, transitions = self.name, services.transitions
        change: Transition | CommittedTransition | FinishedChange
        try:
            change = await transitions.begin(name, plan, self.request_id)
        except (TransitionRefused, TransitionRunning):
            if (found := transitions.find_begun(name, plan, parents)) is None:
                raise
            change = found
        done_before = isinstance(change, FinishedChange)
        if not isinstance(change, FinishedChange):
            topic = await transitions.committed(name, change, self.timeout)
            epoch = topic.layout.segment(change.child_ids[0]).created_at_epoch
            change = FinishedChange(epoch, change.parents, change.child_ids)
        seconds = asyncio.get_running_loop().time() - began
        return ChangedLayout(str(name), change.epoch, change.parents, change.child_ids, round(seconds, 3), done_before)


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
        return await self._carried_out(
            services, lambda layout: plan_split(layout, self.segment, at=at, into=self.into), self.segment
        )


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
        return await self._carried_out(services, lambda layout: plan_merge(layout, first, second), first, second)


class RepartitionTopic(_ChangeLayout, frozen=True, kw_only=True):
    http = _change("POST", TOPIC + "/repartition/{segments}")
    segments: SegmentCount

    async def run(self, services: CallServices, principal: Principal) -> ChangedLayout:  # noqa: ARG002
        return await self._carried_out(services, lambda layout: plan_repartition(layout, self.segments))


class AbortTransition(OnTopic, frozen=True):
    """Takes back a change of the layout whose parents still take writes.

    A caller that repeats the call names the change, so that no repeat takes back a later one."""

    needs = on_topic(Action.ADMIN)
    http = _change("DELETE", TOPIC + "/transition")
    transition: int | None = None
    """Its id. Without one, the change that is under way when the call arrives is taken back."""
    children: tuple[SegmentNumber, ...] = ()
    """Of the named change. If the layout has them, the change can be taken back no more."""

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        children = tuple(map(SegmentId, self.children))
        asked = TransitionKey(self.transition, children) if self.transition is not None else None
        await services.transitions.abort(self.name, asked)


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
        return LayoutDescription.of(name, topic, records, await services.transitions.waits_for(name.path))


# Auto-scaling.


class GetAutoScalePolicy(OnTopic, frozen=True):
    """What the topic itself says, not what results of all levels."""

    needs = on_topic(Action.ADMIN)
    http = HttpRoute("GET", TOPIC + "/autoScalePolicy", tag="layout", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> AutoScaleOverride:  # noqa: ARG002
        return _shown(services.topics.get(self.name.path).auto_scale)


class SetAutoScalePolicy(OnTopic, frozen=True):
    """Replace what the topic says; settings that are not given are those of its namespace, or of the broker."""

    needs = on_topic(Action.ADMIN)
    http = _change("PUT", TOPIC + "/autoScalePolicy", body="policy", required=("policy",))
    policy: AutoScaleOverride = AutoScaleOverride()

    async def run(self, services: CallServices, principal: Principal) -> None:
        name, override = self.name, msgspec.to_builtins(self.policy)
        services.topics.get(name.path)
        services.auto_scaling.check(override, name.path)
        await services.topics.set_auto_scale(name, override)
        _log.info("%s set the auto-scaling of topic %s: %s", principal.name, name, override)


class DeleteAutoScalePolicy(OnTopic, frozen=True):
    needs = on_topic(Action.ADMIN)
    http = _change("DELETE", TOPIC + "/autoScalePolicy")

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        await services.topics.set_auto_scale(self.name, None)


class ProposeAutoScaling(OnTopic, frozen=True):
    """What auto-scaling would do now, and why; nothing changes. The cluster leader answers, whichever broker is asked.
    Its owners measure the topic's key hashes from now on, for two minutes."""

    needs = on_topic(Action.ADMIN)
    http = HttpRoute("GET", TOPIC + "/autoScaleProposal", tag="layout", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> AutoScaleProposal:  # noqa: ARG002
        return await services.auto_scaling.proposal(self.name)


class GetKeyHashes(OnTopic, frozen=True):
    """How the load of each segment spreads over its key hashes: a histogram, its hottest hashes, and where a split
    halves it. Its owners measure the topic's key hashes from now on, for two minutes."""

    needs = on_topic(Action.ADMIN)
    http = HttpRoute("GET", TOPIC + "/keyHashes", tag="layout", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> TopicKeyHashes:  # noqa: ARG002
        return await services.auto_scaling.key_hashes(self.name)


class _OnNamespace(AdminCall, frozen=True):
    needs = on_namespace(Action.ADMIN)
    tenant: TenantName
    namespace: NamespaceName

    @property
    def path(self) -> str:
        return f"{check_name('tenant', self.tenant)}/{check_name('namespace', self.namespace)}"


class GetNamespaceAutoScalePolicy(_OnNamespace, frozen=True):
    http = HttpRoute("GET", NAMESPACE + "/autoScalePolicy", tag="layout")

    async def run(self, services: CallServices, principal: Principal) -> AutoScaleOverride:  # noqa: ARG002
        return _shown(services.topics.namespace_policies(self.path).auto_scale)


class SetNamespaceAutoScalePolicy(_OnNamespace, frozen=True):
    """Replace what the namespace says to all of its topics."""

    http = _change("PUT", NAMESPACE + "/autoScalePolicy", body="policy", required=("policy",))
    policy: AutoScaleOverride = AutoScaleOverride()

    async def run(self, services: CallServices, principal: Principal) -> None:
        path, override = self.path, msgspec.to_builtins(self.policy)
        services.auto_scaling.check(override)
        await services.topics.set_namespace_auto_scale(path, override)
        _log.info("%s set the auto-scaling of namespace %s: %s", principal.name, path, override)


class DeleteNamespaceAutoScalePolicy(_OnNamespace, frozen=True):
    http = _change("DELETE", NAMESPACE + "/autoScalePolicy")

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        await services.topics.set_namespace_auto_scale(self.path, None)


def _shown(stored: StoredOverride | None) -> AutoScaleOverride:
    """Return a stored override, without the settings of another build."""
    known = {
        name: value for name, value in (stored or {}).items() if name in AutoScaleOverride.__struct_encode_fields__
    }
    return msgspec.convert(known, AutoScaleOverride)


# Single segments. PIP-468's controller makes these calls; in Braid a change of layout does their work. They are for
# administrators of everything, and never leave a hole in the ring (I6) or a subscription without its records (I5).


def _find(services: CallServices, topic: TopicName, descriptor: str) -> SegmentInfo | None:
    """Return a segment, also a child of a change that is under way; None if the topic has none like it."""
    name = SegmentName.at(topic.path, descriptor)
    info = services.topics.get(topic.path).segments.get(name.id)
    return info if info is not None and SegmentName.of(topic, info) == name else None


def _found(services: CallServices, topic: TopicName, descriptor: str) -> SegmentInfo:
    if (info := _find(services, topic, descriptor)) is None:
        raise SegmentNotFound(f"topic {topic} has no segment {descriptor}, or not any more")
    return info


class CreateSegment(OnTopic, frozen=True, kw_only=True):
    """Make sure that the topic has a segment, with cursors of these subscriptions. Only a change of layout makes
    one."""

    needs = on_cluster
    http = _change("PUT", SEGMENT, "segments", body="subscriptions")
    descriptor: Descriptor
    subscriptions: list[str] = msgspec.field(default_factory=list)

    async def run(self, services: CallServices, principal: Principal) -> None:  # noqa: ARG002
        if _find(services, self.name, self.descriptor) is None:
            raise TransitionRefused(
                f"topic {self.name} has no segment {self.descriptor}, and its hashes belong to other segments: split "
                "or merge those"
            )
        if missing := set(self.subscriptions) - (await services.subscriptions.list(self.name)).keys():
            raise SubscriptionNotFound(
                f"topic {self.name} has no subscription {some_names(sorted(missing))}; a subscription that is created "
                "gets its cursor on every segment"
            )


class TerminateSegment(_ChangeLayout, frozen=True, kw_only=True):
    """End a segment's log. A new segment takes its range over, as after a split."""

    needs = on_cluster
    http = _change("POST", SEGMENT + "/terminate", "segments")
    descriptor: Descriptor

    async def run(self, services: CallServices, principal: Principal) -> ChangedLayout:  # noqa: ARG002
        info = _found(services, self.name, self.descriptor)
        if not info.is_active:
            return ChangedLayout(str(self.name), info.sealed_at_epoch, (info.segment_id,), info.child_ids, 0.0, True)
        return await self._carried_out(services, lambda layout: plan_rollover(layout, info.segment_id), info.segment_id)


class DeleteSegment(OnTopic, frozen=True, kw_only=True):
    """Delete a sealed segment with its records before retention does, when every subscription has consumed it."""

    needs = on_cluster
    http = _change("DELETE", SEGMENT, "segments")
    descriptor: Descriptor

    async def run(self, services: CallServices, principal: Principal) -> None:
        name, path = self.name, self.name.path
        _found(services, name, self.descriptor)
        # It may go by a write whose answer was lost.
        while (info := _find(services, name, self.descriptor)) is not None:
            subscriptions, none_created = await services.subscriptions.list_until_created(name)
            undrained = [each for each in subscriptions if info.segment_id not in services.drained.of(path, each)]
            mark = services.topics.committed.get(path)
            if info.segment_id not in services.topics.get(path).layout.segments or info.is_active:
                why = "takes writes, or will: end it by a split, a merge or terminate"
            elif info.parent_ids:
                why = f"has a parent that is kept, {info.parent_ids[0]}: delete that one first"
            elif undrained:
                why = f"is not consumed by {some_names(sorted(undrained))}: skip or delete that subscription"
            elif mark is not None and info.segment_id in mark.parents:
                why = "was replaced a moment ago, and some clients may not know that yet: try again later"
            else:
                # A seek backwards in this moment removes the mark, and wins.
                drained = [DrainedKey(path, self.descriptor, each) for each in subscriptions]
                conditions = [services.drained.table.unchanged(key) for key in drained]
                conditions += [services.owners.table.unchanged((path, self.descriptor)), none_created]
                if await services.topics.prune(name, info.segment_id, conditions):
                    _log.info("%s deleted segment %s of topic %s", principal.name, self.descriptor, name)
                    return
                continue
            raise TransitionRefused(f"segment {self.descriptor} of topic {name} cannot be deleted: it {why}")
