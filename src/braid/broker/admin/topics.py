"""The calls about topics.

A topic is created by writing its record; the cluster leader then gives its segments to brokers, which open them. Its
deletion is deletion.py's.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from braid.broker.admin.call import AdminCall, CallId, OnTopic, anybody, on_topic, some_names, who_knows_the_topic
from braid.broker.admin.results.topics import StorageLocation, TopicDescription, TopicStatistics
from braid.broker.admin.route import (
    NO_CONTENT,
    TOPIC,
    TOPICS,
    Force,
    HttpRoute,
    NamespaceName,
    Rest,
    SegmentCount,
    TenantName,
)
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.broker.config import LOCAL
from braid.broker.segments.segment_access import SwapChunks
from braid.model.cluster import REPLICAS
from braid.model.errors import (
    InvalidArgument,
    NotAvailable,
    NotServing,
    PermissionDenied,
    SegmentNotFound,
    ShuttingDown,
    SubscriptionBusy,
    TopicExists,
    TopicNotFound,
)
from braid.model.ids import NO_REQUEST, SegmentId
from braid.model.names import SegmentName, TopicName, check_name
from braid.model.ownership import OwnershipState
from braid.model.topic import PolicyChanges, Topic, TopicPolicies

START_WAIT_S: Final = 3.0
"""How long a call for replicas waits for brokers that are about to register."""
CREATE_WAIT_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class ListTopics(AdminCall, frozen=True):
    """Those that the caller may know of."""

    needs = anybody
    http = HttpRoute("GET", TOPICS)
    tenant: TenantName
    namespace: NamespaceName

    async def run(self, services: CallServices, principal: Principal) -> list[str]:
        tenant, namespace = check_name("tenant", self.tenant), check_name("namespace", self.namespace)
        found = []
        existing = {path for path, topic in services.topics.all().items() if not topic.deleting}
        for path in sorted(existing | services.topics.all_unreadable().keys()):
            name = TopicName.parse(path)
            if (name.tenant, name.namespace) == (tenant, namespace):
                with contextlib.suppress(PermissionDenied):
                    services.access.check_may_know(principal, name)
                    found.append(str(name))
        return found


class CreateTopic(OnTopic, frozen=True, rename="camel"):
    needs = on_topic(Action.ADMIN)
    http = HttpRoute(
        "PUT",
        TOPIC,
        query=("numInitialSegments", "existOk"),
        names={"numInitialSegments": "segments"},
        body="policies",
        status=201,
        errors=(409, 501),
    )
    segments: Annotated[int, Rest(SegmentCount)] = 1
    policies: PolicyChanges = PolicyChanges()
    """From the defaults."""
    properties: dict[str, str] = msgspec.field(default_factory=dict)
    exist_ok: Annotated[bool, Meta(description="Whether a topic of this name may exist; it stays as it is.")] = False
    request_id: CallId = NO_REQUEST

    async def run(self, services: CallServices, principal: Principal) -> TopicDescription:
        name, policies = self.name, self.policies.apply(TopicPolicies())
        await _check_replicas(services, name, policies)
        if not any(services.members.is_active(broker) for broker in services.members.brokers.all()):
            raise NotServing(f"topic {name} cannot be created: no broker may be given segments; start or activate one")
        try:
            topic = await services.topics.create(
                name,
                segments=self.segments,
                policies=policies,
                properties=self.properties,
                request_id=self.request_id,
            )
        except TopicExists:
            found = services.topics.find(name.path)
            if not self.exist_ok or found is None:
                raise
            return _described(services, name, found)
        await _served(services, name, topic)
        _log.info("%s created topic %s with %d segments", principal.name, name, self.segments)
        return _described(services, name, topic)


class UpdateTopic(OnTopic, frozen=True, rename="camel"):
    """Change policies of a topic; those that are not given stay. A new durability opens its segments again. The cluster
    leader carries out another number of replicas."""

    needs = on_topic(Action.ADMIN)
    http = HttpRoute("PATCH", TOPIC, body="policies", required=("policies",), errors=(404, 501))
    policies: PolicyChanges = PolicyChanges()
    topic_id: int | None = None
    """The topic that is meant: one of the same name that was created since stays as it is."""

    async def run(self, services: CallServices, principal: Principal) -> TopicDescription:
        name = self.name
        await _check_replicas(services, name, self.policies.apply(services.topics.get(name.path).policies))
        topic = await services.topics.update(name, self.policies, self.topic_id)
        given = msgspec.json.encode(self.policies).decode()
        _log.info("%s changed policies of topic %s: %s", principal.name, name, given)
        return _described(services, name, topic)


class GetTopic(OnTopic, frozen=True):
    needs = who_knows_the_topic
    http = HttpRoute("GET", TOPIC, errors=(404,))
    deleting: bool = False
    """Whether one is wanted, too, that is being deleted."""

    async def run(self, services: CallServices, principal: Principal) -> TopicDescription:  # noqa: ARG002
        topics, path = services.topics, self.name.path
        stored = await topics.stored(path) if self.deleting else None
        return _described(services, self.name, stored or topics.get(path))


class DeleteTopic(OnTopic, frozen=True, rename="camel"):
    needs = on_topic(Action.ADMIN)
    http = HttpRoute("DELETE", TOPIC, query=("force",), status=NO_CONTENT, errors=(404, 409))
    force: Force = False
    topic_id: int | None = None
    """The topic that is meant: one of the same name that was created since stays."""

    async def run(self, services: CallServices, principal: Principal) -> None:
        name = self.name
        # From the store, for another broker may just have created it; and before consumers are looked at, which may be
        # those of the next topic of that name.
        topic = await services.topics.stored(name.path)
        if topic is None or self.topic_id not in (None, topic.id):
            raise TopicNotFound(f"topic {name} cannot be deleted: it does not exist")
        consumers = [] if self.force else await _connected(services, name)
        if consumers:
            raise SubscriptionBusy(
                f"topic {name} cannot be deleted: it has {len(consumers)} connected consumers "
                f"({some_names(consumers)}); stop them, or use force"
            )
        await services.deletion.delete(name, topic.id)
        _log.info("%s deleted topic %s", principal.name, name)


class TopicStats(OnTopic, frozen=True):
    needs = who_knows_the_topic
    http = HttpRoute("GET", TOPIC + "/stats", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> TopicStatistics:  # noqa: ARG002
        name = self.name
        if (unreadable := services.topics.unreadable(name.path)) is not None:
            segments = [SegmentName.at(name.path, each) for each in services.owners.of_topic(name.path)]
            return TopicStatistics.of_unreadable(name, segments, str(unreadable))
        topic = services.topics.get(name.path)
        found = await services.subscriptions.list(name)
        report = await services.reports.of_topic(name)
        return TopicStatistics.of(name, topic, found, report)


class TopicStorage(OnTopic, frozen=True):
    """Where readers without a broker find the topic's chunks; nowhere if each broker keeps its own."""

    needs = on_topic(Action.CONSUME, Action.ADMIN)
    http = HttpRoute("GET", TOPIC + "/storage", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> StorageLocation:  # noqa: ARG002
        services.topics.get(self.name.path)
        storage = services.config.storage
        return StorageLocation("" if storage == LOCAL else storage)


class ReplaceChunks(OnTopic, frozen=True):
    """Let a chunk that somebody has joined take the place of small ones.

    Joining is not the broker's work (storage/history/compaction.py); that the segment's owner, and nobody else, changes
    its catalog is. Repeating the call is fine: the second swap finds the first."""

    needs = on_topic(Action.ADMIN)
    segment: int
    old: list[str]
    """The objects of neighbouring chunks, oldest first."""
    new: str
    """The object that holds the same batches."""

    async def run(self, services: CallServices, principal: Principal) -> dict[str, Any]:
        name = self.name
        topic = services.topics.get(name.path)
        info = topic.layout.segments.get(SegmentId(self.segment))
        if info is None:
            raise SegmentNotFound(f"topic {name} has no segment {self.segment}")
        segment = services.accesses.of(SegmentName.of(name, info), topic.id)
        chunks = await segment.ask(SwapChunks(self.old, self.new))
        _log.info("%s replaced %d chunks of %s by %s", principal.name, len(self.old), name, self.new)
        return {"topic": str(name), "segment": self.segment, "chunks": chunks}


async def _check_replicas(services: CallServices, name: TopicName, policies: TopicPolicies) -> None:
    """Refuse a replicated topic that a broker of this cluster would not understand, or that could confirm nothing. Wait
    a moment for brokers first: those that are started together do not register at the same time."""
    if policies.replicas == 1:
        return
    members = services.members

    def active() -> int:
        return sum(map(members.is_active, members.brokers.all()))

    await services.owners.view.until(lambda: active() >= policies.write_quorum, START_WAIT_S)
    brokers, count = members.brokers.all(), active()
    if count < policies.write_quorum:
        raise InvalidArgument(
            f"topic {name} cannot be replicated: {policies.write_quorum} replicas confirm a record, and "
            f"{count} {'broker is' if count == 1 else 'brokers are'} active; start more, or ask for fewer replicas"
        )
    for broker, registration in sorted(brokers.items()):
        if REPLICAS not in registration.features:
            raise NotAvailable(
                f"topic {name} cannot be replicated: broker {broker} runs version "
                f"{registration.version or 'unknown'}, which does not know replicas; upgrade it first"
            )


def _described(services: CallServices, name: TopicName, topic: Topic) -> TopicDescription:
    records = {
        segment_id: services.owners.find(SegmentName.of(name, info))
        for segment_id, info in topic.layout.segments.items()
    }
    return TopicDescription.of(name, topic, records)


async def _connected(services: CallServices, name: TopicName) -> list[str]:
    if services.topics.find(name.path) is None:
        return []  # It is being deleted already.
    return (await services.reports.of_topic(name)).connected()


async def _served(services: CallServices, name: TopicName, topic: Topic) -> None:
    """Return when every segment of a new topic is served, or when that takes too long: it will be."""
    owners = services.owners

    def all_serve() -> bool:
        records = owners.of_topic(name.path).values()
        serving = sum(record.state is OwnershipState.SERVING for record in records)
        return serving >= len(topic.layout.segments) or services.topics.find(name.path) is None

    try:
        served = await owners.view.until(all_serve, CREATE_WAIT_S)
    except ShuttingDown:  # The topic is there, whatever becomes of this broker.
        served = False
    if served:
        await services.segments.opened(name.path)
    else:
        _log.warning("not every segment of the new topic %s is served yet", name)
