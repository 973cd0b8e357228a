"""Every administrative call, once, for the REST interface and for the wire's ADMIN.

A call has a name, arguments and a result, all of them JSON. Its arguments are a struct below: what is not in it is
refused, so that a misspelt option is not taken for its default; an argument that is null counts as absent.

    who may                                                             needs, on the topic
    create, delete and change topics                                    admin
    create, delete, seek and skip subscriptions                         consume, or admin
    know of a topic or a subscription: get, list, stats                 produce, consume or admin
    know of the cluster: brokers, topology; change it                   admin on everything ("*")

A call is carried to its end even if the one who asked is gone meanwhile: half a deletion would be worse than one that
nobody waits for. What a crash interrupts is taken up at the next start (`finish_deletes`), and a deletion that failed
on the way is finished by asking for it again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from braid.broker.auth import ALL, Access, Action, Principal
from braid.broker.groups import Groups
from braid.broker.metrics import BrokerMetrics, TopicMetrics
from braid.broker.refusal import told_to_clients
from braid.broker.segments import Segments, ServedSegment
from braid.broker.subscriptions import LATEST, Subscriptions
from braid.broker.topics import Topics
from braid.broker.topology import TopologyView
from braid.broker.turns import Turns
from braid.metadata import paths
from braid.metadata.store import Store
from braid.model.errors import (
    BraidError,
    Fenced,
    InvalidArgument,
    LogClosed,
    NotAvailable,
    PermissionDenied,
    SubscriptionBusy,
    TopicNotFound,
)
from braid.model.ids import Offset, SegmentId
from braid.model.layout import SegmentInfo
from braid.model.names import TopicName, check_name
from braid.model.ownership import Ownership
from braid.model.registration import Registration
from braid.model.subscription import Subscription, SubscriptionKind
from braid.model.topic import Durability, Topic, TopicPolicies
from braid.storage.segment import SegmentStorage
from braid.wire.operations import TopicRoute

MAX_TIMESTAMP_MS: Final = 1 << 53
"""What every JSON parser reads exactly."""

_log: Final = logging.getLogger(__name__)


class Services(Protocol):
    """What the calls need of their broker."""

    id: str
    store: Store
    metrics: BrokerMetrics
    topics: Topics
    segments: Segments
    subscriptions: Subscriptions
    groups: Groups
    access: Access
    topology: TopologyView


# Arguments.


class _Arguments(msgspec.Struct, frozen=True, kw_only=True):
    pass


class NoArguments(_Arguments, frozen=True):
    pass


class OnNamespace(_Arguments, frozen=True):
    tenant: str
    namespace: str


class OnTopic(_Arguments, frozen=True):
    topic: str

    @property
    def name(self) -> TopicName:
        return TopicName.parse(self.topic)


class CreateTopic(OnTopic, frozen=True):
    segments: int = 1
    policies: TopicPolicies = TopicPolicies()
    properties: dict[str, str] = {}


class DeleteTopic(OnTopic, frozen=True):
    force: bool = False


class OnSubscription(OnTopic, frozen=True):
    subscription: str


class CreateSubscription(OnSubscription, frozen=True):
    start: str = LATEST
    kind: SubscriptionKind = SubscriptionKind.STREAM


class DeleteSubscription(OnSubscription, frozen=True):
    force: bool = False


class SeekSubscription(OnSubscription, frozen=True):
    to: str | None = None
    timestamp: int | None = None
    """ms since 1970."""
    offsets: dict[str | int, int] | None = None
    """The next offset by segment id."""


class SkipSubscription(OnSubscription, frozen=True):
    segment: int | None = None
    count: int | None = None


class SplitSegment(OnTopic, frozen=True):
    segment: int
    at: str | None = None


class MergeSegments(OnTopic, frozen=True):
    segments: list[int]


class RepartitionTopic(OnTopic, frozen=True):
    segments: int


class MoveTopic(OnTopic, frozen=True):
    segment: int | None = None
    to: str | None = None


class SetAutoScalePolicy(OnTopic, frozen=True):
    policy: dict[str, Any] = {}


class OnSegment(OnTopic, frozen=True):
    descriptor: str
    subscriptions: list[str] = []


class OnBroker(_Arguments, frozen=True):
    broker: str


class _Call(NamedTuple):
    arguments: type[_Arguments]
    run: Callable[[Calls, Any, Principal], Awaitable[Any]]


class Calls:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._access = services.access
        self._turns = Turns()
        """By a topic's path: whoever creates, opens or deletes it."""
        self._running: set[asyncio.Task[Any]] = set()

    async def call(self, name: str, arguments: dict[str, Any], principal: Principal) -> Any:
        known = _CALLS.get(name)
        if known is None:
            raise InvalidArgument(f"there is no call {name!r}; the calls are {', '.join(sorted(_CALLS))}")
        read = _read_arguments(name, known.arguments, arguments)
        try:
            return await self._to_the_end(name, known.run(self, read, principal))
        except (Fenced, LogClosed) as error:
            raise told_to_clients(error) from error

    async def finish_deletes(self) -> None:
        """At start, when the segments are open: end the deletions that a crash interrupted. From here on, a topic that
        appears without its segments, because the one who created it never heard of it, is opened too."""
        for path, topic in self._services.topics.all().items():
            if topic.deleting:
                try:
                    await self._delete(TopicName.parse(path))
                except BraidError as error:
                    _log.warning("topic %s is still to be deleted; delete it again: %s", path, error)
        removed = await self._services.subscriptions.sweep()
        if removed:
            _log.info("%d cursors without a subscription were removed", removed)
        self._services.topics.on_change.append(self._open_later)

    async def close(self) -> None:
        """Waits for the calls that are under way."""
        with contextlib.suppress(ValueError):
            self._services.topics.on_change.remove(self._open_later)
        if self._running:
            await asyncio.wait(self._running)

    async def _to_the_end(self, name: str, work: Awaitable[Any]) -> Any:
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # Whoever asked is told; if he is gone, nobody needs to be.

    # Permissions.

    def _may(self, principal: Principal, topic: TopicName, *actions: Action) -> None:
        """One of these actions is enough."""
        for action in actions[:-1]:
            with contextlib.suppress(PermissionDenied):
                return self._access.check(principal, action, topic.tenant, topic.namespace, topic.name)
        return self._access.check(principal, actions[-1], topic.tenant, topic.namespace, topic.name)

    def _may_know(self, principal: Principal, topic: TopicName) -> None:
        self._may(principal, topic, Action.PRODUCE, Action.CONSUME, Action.ADMIN)

    def _may_subscribe(self, principal: Principal, topic: TopicName) -> None:
        self._may(principal, topic, Action.ADMIN, Action.CONSUME)

    def _may_run_the_cluster(self, principal: Principal) -> None:
        self._access.check(principal, Action.ADMIN, ALL)

    # Topics.

    async def list_topics(self, arguments: OnNamespace, principal: Principal) -> list[str]:
        tenant, namespace = check_name("tenant", arguments.tenant), check_name("namespace", arguments.namespace)
        found = []
        for path, topic in sorted(self._services.topics.all().items()):
            name = TopicName.parse(path)
            if (name.tenant, name.namespace) == (tenant, namespace) and not topic.deleting:
                with contextlib.suppress(PermissionDenied):
                    self._may_know(principal, name)
                    found.append(str(name))
        return found

    async def create_topic(self, arguments: CreateTopic, principal: Principal) -> dict[str, Any]:
        name, policies = arguments.name, arguments.policies
        self._may(principal, name, Action.ADMIN)
        if policies.durability is Durability.REPLICATED or policies.replicas > 1:
            raise NotAvailable(
                f"topic {name} cannot be replicated yet: replicas come in a later version; "
                "ask for 1 replica and durability 'fsync' or 'memory'"
            )
        topic = await self._services.topics.create(
            name, segments=arguments.segments, policies=policies, properties=arguments.properties
        )
        await self.open_topic(name)
        _log.info("%s created topic %s with %d segments", principal.name, name, arguments.segments)
        return _topic_json(name, topic)

    async def get_topic(self, arguments: OnTopic, principal: Principal) -> dict[str, Any]:
        self._may_know(principal, arguments.name)
        return _topic_json(arguments.name, self._services.topics.get(arguments.name.path))

    async def delete_topic(self, arguments: DeleteTopic, principal: Principal) -> None:
        name = arguments.name
        self._may(principal, name, Action.ADMIN)
        if name.path not in self._services.topics.all():
            raise TopicNotFound(f"topic {name} cannot be deleted: it does not exist")
        consumers = self._services.groups.connected(name.path)
        if consumers and not arguments.force:
            raise SubscriptionBusy(
                f"topic {name} cannot be deleted: it has {len(consumers)} connected consumers "
                f"({_some(consumers)}); stop them, or use force"
            )
        await self._delete(name)
        _log.info("%s deleted topic %s", principal.name, name)

    async def topic_stats(self, arguments: OnTopic, principal: Principal) -> dict[str, Any]:
        name, services = arguments.name, self._services
        self._may_know(principal, name)
        topic = services.topics.get(name.path)
        subscriptions = await services.subscriptions.list(name)
        served = {segment.name.id: segment for segment in services.segments.of_topic(name.path)}
        return {
            "name": str(name),
            "epoch": topic.layout.epoch,
            "segments": {
                str(info.segment_id): self._segment_json(info, served.get(info.segment_id))
                for info in topic.layout.segments.values()
            },
            **_counts_json(services.metrics.topics.get(name.path) or TopicMetrics()),
            "subscriptions": {
                subscription: self._subscription_json(name, subscription, found)
                for subscription, found in sorted(subscriptions.items())
            },
        }

    async def open_topic(self, name: TopicName) -> None:
        """Open what is not open of a topic, unless it is being deleted."""
        async with self._turns.of(name.path):
            topic = self._services.topics.find(name.path)
            if topic is not None:
                await self._services.segments.open_topic(name, topic)

    def _open_later(self, path: str) -> None:
        topic = self._services.topics.find(path)
        if topic is not None and len(self._services.segments.of_topic(path)) < len(topic.layout.segments):
            task = asyncio.get_running_loop().create_task(self.open_topic(TopicName.parse(path)), name=f"open {path}")
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def _delete(self, name: TopicName) -> None:
        """Every step can be repeated; the record goes last, and until then the deletion is known to be unfinished."""
        async with self._turns.of(name.path):
            topic = await self._services.topics.mark_deleting(name)
            await self._services.segments.delete_topic(name, topic)
            await self._services.topics.remove(name)

    # Subscriptions.

    async def create_subscription(self, arguments: CreateSubscription, principal: Principal) -> dict[str, Any]:
        name = arguments.name
        self._may_subscribe(principal, name)
        created = await self._services.subscriptions.create(
            name, arguments.subscription, kind=arguments.kind, start=arguments.start
        )
        _log.info("%s created subscription %s of %s", principal.name, arguments.subscription, name)
        return self._subscription_json(name, arguments.subscription, created)

    async def list_subscriptions(self, arguments: OnTopic, principal: Principal) -> list[dict[str, Any]]:
        name = arguments.name
        self._may_know(principal, name)
        found = await self._services.subscriptions.list(name)
        return [self._subscription_json(name, subscription, each) for subscription, each in sorted(found.items())]

    async def get_subscription(self, arguments: OnSubscription, principal: Principal) -> dict[str, Any]:
        name = arguments.name
        self._may_know(principal, name)
        subscription = check_name("subscription", arguments.subscription)
        found = await self._services.subscriptions.get(name, subscription)
        return self._subscription_json(name, subscription, found)

    async def delete_subscription(self, arguments: DeleteSubscription, principal: Principal) -> None:
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        consumers = self._services.groups.connected(name.path, subscription)
        if consumers and not arguments.force:
            raise SubscriptionBusy(
                f"subscription {subscription} of {name} cannot be deleted: it has {len(consumers)} connected consumers "
                f"({_some(consumers)}); stop them, or use force"
            )
        await self._services.subscriptions.delete(name, subscription)
        self._services.groups.forget(name, subscription)
        _log.info("%s deleted subscription %s of %s", principal.name, subscription, name)

    async def seek_subscription(self, arguments: SeekSubscription, principal: Principal) -> dict[str, Any]:
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        subscriptions = self._services.subscriptions
        match arguments.to, arguments.timestamp, arguments.offsets:
            case str(place), None, None:
                offsets = await subscriptions.seek_to(name, subscription, place)
            case None, int(timestamp_ms), None:
                if abs(timestamp_ms) > MAX_TIMESTAMP_MS:
                    raise InvalidArgument(f"{timestamp_ms} is no time in milliseconds since 1970")
                offsets = await subscriptions.seek_to_time(name, subscription, timestamp_ms * 1_000)
            case None, None, dict(places) if places:
                offsets = await subscriptions.seek_to_offsets(name, subscription, _read_offsets(places))
            case _:
                raise InvalidArgument(
                    "seek_subscription needs exactly one of to ('earliest' or 'latest'), timestamp (milliseconds "
                    "since 1970) and offsets (by segment id, at least one)"
                )
        _log.info("%s set subscription %s of %s to %s", principal.name, subscription, name, offsets)
        return _offsets_json(offsets)

    async def skip_subscription(self, arguments: SkipSubscription, principal: Principal) -> dict[str, Any]:
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        segment, count = arguments.segment, arguments.count
        if (segment is None) != (count is None):
            raise InvalidArgument(
                "skip_subscription needs segment and count together, to skip so many records of one segment, or "
                "neither, to skip everything"
            )
        if segment is None or count is None:
            offsets = await self._services.subscriptions.seek_to(name, subscription, LATEST)
        else:
            offsets = await self._services.subscriptions.skip(name, subscription, SegmentId(segment), count)
        _log.info("%s skipped subscription %s of %s to %s", principal.name, subscription, name, offsets)
        return _offsets_json(offsets)

    # The cluster.

    async def list_brokers(self, _: NoArguments, principal: Principal) -> list[dict[str, Any]]:
        self._may_run_the_cluster(principal)
        services = self._services
        listing = await services.store.list(paths.BROKERS_PREFIX)
        brokers = {paths.broker_of(entry.key): Registration.from_json(entry.value) for entry in listing.entries}
        served = Counter({services.id: len(services.segments.all())})
        if set(brokers) - {services.id}:
            served.update(await self._owned_by_others())
        return [
            {"id": broker, **msgspec.to_builtins(found), "segments": served[broker]}
            for broker, found in sorted(brokers.items())
        ]

    async def _owned_by_others(self) -> Counter[str]:
        listing = await self._services.store.list(paths.SEGMENTS_PREFIX)
        owners = (
            Ownership.from_json(entry.value).owner for entry in listing.entries if paths.segment_of_ownership(entry.key)
        )
        return Counter(owner for owner in owners if owner != self._services.id)

    async def topology(self, _: NoArguments, principal: Principal) -> dict[str, Any]:
        self._may_run_the_cluster(principal)
        generation = self._services.topology.generation
        routes = [
            await self._services.topology.route(path)
            for path, topic in sorted(self._services.topics.all().items())
            if not topic.deleting
        ]
        return {"generation": generation, "topics": [_route_json(route) for route in routes]}

    # What later versions do.

    async def change_layout(self, arguments: OnTopic, principal: Principal) -> None:
        self._may(principal, arguments.name, Action.ADMIN)
        raise NotAvailable(
            f"the layout of topic {arguments.name} cannot be changed: that is not in this version yet; layouts change "
            "in a later one. Choose the number of segments when you create the topic"
        )

    async def move_topic(self, arguments: OnTopic, principal: Principal) -> None:
        self._may(principal, arguments.name, Action.ADMIN)
        raise NotAvailable(
            f"topic {arguments.name} cannot be moved: that is not in this version yet; segments move between brokers "
            "in a later one"
        )

    async def change_broker(self, arguments: OnBroker, principal: Principal) -> None:
        self._may_run_the_cluster(principal)
        raise NotAvailable(
            f"broker {arguments.broker} can be neither drained nor activated: that is not in this version yet; "
            "segments move between brokers in a later one"
        )

    # Results.

    def _segment_json(self, info: SegmentInfo, served: ServedSegment | None) -> dict[str, Any]:
        """None stands for what is not known here: the segment is not served by this broker now."""
        described = {
            "segmentId": info.segment_id,
            "hashRange": msgspec.to_builtins(info.hash_range),
            "state": info.state.value,
        }
        if served is None:
            unknown = ("owner", "epoch", "earliestOffset", "endOffset", "records", "bytes")
            return {**described, **dict.fromkeys(unknown)}
        return {
            **described,
            "owner": self._services.id,
            "epoch": served.epoch,
            "earliestOffset": served.earliest,
            "endOffset": served.end,
            "records": served.end - served.earliest,
            "bytes": _stored_bytes(served.storage),
        }

    def _subscription_json(self, topic: TopicName, name: str, subscription: Subscription) -> dict[str, Any]:
        progress = self._services.subscriptions.progress(topic, name)
        return {
            "name": name,
            "kind": subscription.kind.value,
            "createdAt": subscription.created_at,
            "backlog": sum(each.backlog for each in progress.values()),
            "segments": {
                str(segment): {
                    "offset": each.offset,
                    "earliest": each.earliest,
                    "end": each.end,
                    "backlog": each.backlog,
                }
                for segment, each in progress.items()
            },
            "consumers": {
                consumer: {"segments": list(each.segments), "connected": each.connected}
                for consumer, each in self._services.groups.consumers(topic.path, name).items()
            },
        }


_CALLS: Final[dict[str, _Call]] = {
    "list_topics": _Call(OnNamespace, Calls.list_topics),
    "create_topic": _Call(CreateTopic, Calls.create_topic),
    "get_topic": _Call(OnTopic, Calls.get_topic),
    "delete_topic": _Call(DeleteTopic, Calls.delete_topic),
    "topic_stats": _Call(OnTopic, Calls.topic_stats),
    "create_subscription": _Call(CreateSubscription, Calls.create_subscription),
    "list_subscriptions": _Call(OnTopic, Calls.list_subscriptions),
    "get_subscription": _Call(OnSubscription, Calls.get_subscription),
    "delete_subscription": _Call(DeleteSubscription, Calls.delete_subscription),
    "seek_subscription": _Call(SeekSubscription, Calls.seek_subscription),
    "skip_subscription": _Call(SkipSubscription, Calls.skip_subscription),
    "list_brokers": _Call(NoArguments, Calls.list_brokers),
    "topology": _Call(NoArguments, Calls.topology),
    "split_segment": _Call(SplitSegment, Calls.change_layout),
    "merge_segments": _Call(MergeSegments, Calls.change_layout),
    "repartition_topic": _Call(RepartitionTopic, Calls.change_layout),
    "get_auto_scale_policy": _Call(OnTopic, Calls.change_layout),
    "set_auto_scale_policy": _Call(SetAutoScalePolicy, Calls.change_layout),
    "delete_auto_scale_policy": _Call(OnTopic, Calls.change_layout),
    "create_segment": _Call(OnSegment, Calls.change_layout),
    "delete_segment": _Call(OnSegment, Calls.change_layout),
    "terminate_segment": _Call(OnSegment, Calls.change_layout),
    "move_topic": _Call(MoveTopic, Calls.move_topic),
    "drain_broker": _Call(OnBroker, Calls.change_broker),
    "activate_broker": _Call(OnBroker, Calls.change_broker),
}


def _read_arguments(call: str, kind: type[_Arguments], arguments: dict[str, Any]) -> _Arguments:
    known = kind.__struct_fields__
    unknown = sorted(str(name) for name in arguments if name not in known)
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InvalidArgument(f"{call} has no argument {', '.join(map(repr, unknown))}; {takes}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"an argument of {call} is wrong: {error}") from None


def _read_offsets(places: dict[str | int, int]) -> dict[SegmentId, Offset]:
    offsets: dict[SegmentId, Offset] = {}
    for segment, offset in places.items():
        text = str(segment)
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise InvalidArgument(f"{segment!r} is no segment id; offsets are given by segment id, as {{'0': 17}}")
        if SegmentId(int(text)) in offsets:
            raise InvalidArgument(f"segment {int(text)} is named twice in offsets")
        offsets[SegmentId(int(text))] = Offset(offset)
    return offsets


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _offsets_json(offsets: dict[SegmentId, Offset]) -> dict[str, Any]:
    return {"offsets": {str(segment): offset for segment, offset in offsets.items()}}


def _topic_json(name: TopicName, topic: Topic) -> dict[str, Any]:
    """The layout is PIP-468's JSON as it is stored, with what belongs to the topic beside it."""
    layout = msgspec.to_builtins(topic.layout, str_keys=True)
    return {
        "name": str(name),
        "topicId": topic.id,
        **layout,
        "policies": msgspec.to_builtins(topic.policies),
        "createdAt": topic.created_at,
    }


def _counts_json(metrics: TopicMetrics) -> dict[str, int]:
    """Since this broker started."""
    return {
        "publishedBatches": metrics.published_batches,
        "publishedRecords": metrics.published_records,
        "publishedBytes": metrics.published_bytes,
        "duplicateBatches": metrics.duplicate_batches,
        "deliveredBatches": metrics.delivered_batches,
        "deliveredRecords": metrics.delivered_records,
        "deliveredBytes": metrics.delivered_bytes,
    }


def _route_json(route: TopicRoute) -> dict[str, Any]:
    return {
        "topic": route.topic,
        "topicId": route.topic_id,
        "layoutEpoch": route.layout_epoch,
        "segments": [
            {
                "segmentId": segment.id,
                "hashRange": {"start": segment.first_hash, "end": segment.last_hash},
                "active": segment.active,
                "parentIds": list(segment.parents),
                "childIds": list(segment.children),
                "owner": segment.owner,
                "epoch": segment.epoch,
            }
            for segment in route.segments
        ],
    }


def _stored_bytes(storage: SegmentStorage) -> int:
    """Chunks, and local files as far as no chunk covers them."""
    exported = storage.catalog.next_offset
    tail = (file.batch_bytes for file in storage.log.files if file.next_offset > exported)
    return sum(chunk.size for chunk in storage.catalog.chunks) + sum(tail)
