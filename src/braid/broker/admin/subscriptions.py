"""The calls about subscriptions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta

from braid.broker.admin.call import (
    MAX_SEGMENTS,
    CallId,
    OnTopic,
    by_segment,
    on_topic,
    some_names,
    who_knows_the_topic,
)
from braid.broker.admin.results.subscriptions import PlacedSubscription, SubscriptionDescription
from braid.broker.admin.route import (
    MAX_NUMBER,
    NO_CONTENT,
    SUBSCRIPTION,
    SUBSCRIPTIONS,
    End,
    Force,
    HttpRoute,
    Rest,
    SegmentNumber,
    SubscriptionName,
)
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.broker.groups.subscriptions import SeekRequest
from braid.model.batch.header import MAX_EPOCH
from braid.model.errors import InvalidArgument, RecordUnreadable, SubscriptionBusy, SubscriptionNotFound
from braid.model.ids import NO_REQUEST, Offset, SegmentId
from braid.model.names import TopicName, check_name
from braid.model.subscription import (
    DEFAULT_QUEUE,
    DEFAULT_START,
    MAX_ACK_TIMEOUT_MS,
    MAX_MAX_DELIVERIES,
    MAX_PEEK,
    QueuePolicies,
    Subscription,
    SubscriptionKind,
    check_seek_ms,
)

Milliseconds = Annotated[
    int, Meta(ge=0, le=MAX_NUMBER, description="Milliseconds since 1970: the first records at or after it.")
]
SkipCount = Annotated[int, Meta(ge=1, le=MAX_NUMBER, description="How many records are left out.")]
OffsetsBySegment = Annotated[
    dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,17})$")], Annotated[int, Meta(ge=0, le=MAX_NUMBER)]],
    Meta(
        min_length=1, max_length=MAX_SEGMENTS, description="The next offset by segment id; others stay where they are."
    ),
]
EpochsBySegment = Annotated[
    dict[Annotated[str, Meta(pattern="^(0|[1-9][0-9]{0,17})$")], Annotated[int, Meta(ge=0, le=MAX_EPOCH)]],
    Meta(
        max_length=MAX_SEGMENTS,
        description="By segment id, the epoch in which the record before the offset was read. The seek fails if that "
        "record is lost.",
    ),
]

_log: Final = logging.getLogger(__name__)


class ListSubscriptions(OnTopic, frozen=True):
    needs = who_knows_the_topic
    http = HttpRoute("GET", SUBSCRIPTIONS, errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> list[SubscriptionDescription]:  # noqa: ARG002
        found = await services.subscriptions.list(self.name)
        report = await services.reports.of_topic(self.name)
        return [SubscriptionDescription.of(subscription, each, report) for subscription, each in sorted(found.items())]


class OnSubscription(OnTopic, frozen=True):
    subscription: SubscriptionName

    @property
    def checked(self) -> str:
        """The subscription's name. `InvalidName`"""
        return check_name("subscription", self.subscription)


class CreateSubscription(OnSubscription, frozen=True, rename="camel"):
    needs = on_topic(Action.ADMIN, Action.CONSUME)
    http = HttpRoute(
        "PUT",
        SUBSCRIPTION,
        query=("start", "kind", "ackTimeoutMs", "maxDeliveries", "deadLetterTopic", "query"),
        status=201,
        errors=(404, 409, 501),
    )
    start: Annotated[End, Meta(description="Where it begins.")] = DEFAULT_START
    kind: SubscriptionKind = SubscriptionKind.STREAM
    request_id: CallId = NO_REQUEST
    ack_timeout_ms: Annotated[
        int,
        Meta(
            ge=1,
            le=MAX_ACK_TIMEOUT_MS,
            description="Of a queue: a message that is not settled for so long is delivered again.",
        ),
    ] = DEFAULT_QUEUE.ack_timeout_ms
    max_deliveries: Annotated[
        int,
        Meta(
            ge=0,
            le=MAX_MAX_DELIVERIES,
            description="Of a queue: after so many deliveries a message is a dead letter. 0: never.",
        ),
    ] = 0
    dead_letter_topic: Annotated[str, Meta(max_length=1_000, description="Of a queue: where dead letters go.")] = ""
    query: Annotated[
        bool,
        Meta(description="Whether it shows how far a query is that keeps its own positions, such as one of Spark."),
    ] = False

    async def run(self, services: CallServices, principal: Principal) -> SubscriptionDescription:
        created = await services.subscriptions.create(
            self.name,
            self.subscription,
            kind=self.kind,
            start=self.start,
            request_id=self.request_id,
            queue=self._policies(),
            query=self.query,
        )
        _log.info("%s created subscription %s of %s", principal.name, self.subscription, self.name)
        report = await services.reports.of_topic(self.name)
        return SubscriptionDescription.of(self.subscription, created, report)

    def _policies(self) -> QueuePolicies:
        dead_letters = TopicName.parse(self.dead_letter_topic) if self.dead_letter_topic else None
        if dead_letters == self.name:
            raise InvalidArgument(f"dead letters of {self.name} cannot go to the same topic: they would come back")
        policies = QueuePolicies(
            ack_timeout_ms=self.ack_timeout_ms,
            max_deliveries=self.max_deliveries,
            dead_letter_topic=dead_letters.path if dead_letters is not None else "",
        )
        if self.kind is not SubscriptionKind.QUEUE and policies != DEFAULT_QUEUE:
            raise InvalidArgument("only a queue has an ack time-out, dead letters and a limit of deliveries")
        if self.kind is SubscriptionKind.QUEUE and self.query:
            raise InvalidArgument("a queue cannot show how far a query is: leave query out, or kind")
        return policies


class GetSubscription(OnSubscription, frozen=True):
    needs = who_knows_the_topic
    http = HttpRoute("GET", SUBSCRIPTION, errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> SubscriptionDescription:  # noqa: ARG002
        subscription = self.checked
        found: Subscription | RecordUnreadable
        try:
            found = await services.subscriptions.get(self.name, subscription)
        except RecordUnreadable as error:
            found = error
        report = await services.reports.of_topic(self.name)
        return SubscriptionDescription.of(subscription, found, report)


class IdentifySubscription(OnSubscription, frozen=True):
    """What a call that may be repeated has to name: which subscription it means, and where it knew it to be."""

    needs = on_topic(Action.ADMIN, Action.CONSUME)

    async def run(self, services: CallServices, principal: Principal) -> dict[str, Any]:  # noqa: ARG002
        id_, placements = await services.subscriptions.identify(self.name, self.checked)
        return {"subscriptionId": id_, "placements": placements}


class DeleteSubscription(OnSubscription, frozen=True, rename="camel"):
    needs = on_topic(Action.ADMIN, Action.CONSUME)
    http = HttpRoute("DELETE", SUBSCRIPTION, query=("force",), status=NO_CONTENT, errors=(404, 409))
    force: Force = False
    subscription_id: int | None = None
    """The subscription that is meant: one of the same name that was created since stays."""

    async def run(self, services: CallServices, principal: Principal) -> None:
        name, subscription = self.name, self.checked
        # First, for the consumers that are connected may be those of the next subscription of that name.
        id_, _ = await services.subscriptions.identify(name, subscription)
        if id_ and self.subscription_id not in (None, id_):
            raise SubscriptionNotFound(
                f"there is no such subscription {subscription} of {name} any more: it was deleted"
            )
        report = await services.reports.of_topic(name)
        consumers = report.connected(subscription)
        if consumers and not self.force:
            raise SubscriptionBusy(
                f"subscription {subscription} of {name} cannot be deleted: it has {len(consumers)} connected consumers "
                f"({some_names(consumers)}); stop them, or use force"
            )
        await services.subscriptions.delete(name, subscription, self.subscription_id)
        services.groups.forget(name, subscription)
        _log.info("%s deleted subscription %s of %s", principal.name, subscription, name)


class _PlaceSubscription(OnSubscription, frozen=True, rename="camel"):
    needs = on_topic(Action.ADMIN, Action.CONSUME)
    request_id: CallId = NO_REQUEST
    subscription_id: int | None = None
    """The subscription that is meant: one of the same name that was created since stays where it is."""
    since: dict[str | int, int] | None = None
    """By segment id, the placements that the caller knew (`IdentifySubscription`). Where the subscription was placed
    since, it stays, and the call fails."""

    @property
    def request(self) -> SeekRequest:
        since = None if self.since is None else by_segment(self.since, "since")
        return SeekRequest(self.request_id, since, self.subscription_id)


class SeekSubscription(_PlaceSubscription, frozen=True):
    """To a time (`timestamp`), to one end (`to`) or to given `offsets`: exactly one of these. With offsets, `epochs`
    may say in which epochs the records before them were read."""

    http = HttpRoute(
        "POST",
        SUBSCRIPTION + "/seek",
        operation="seek",
        query=("timestamp", "unit", "to"),
        body=("offsets", "epochs"),
        status=NO_CONTENT,
        errors=(404, 409),
    )
    to: End | None = None
    timestamp: Annotated[int | None, Rest(Milliseconds)] = None
    unit: Annotated[
        Literal["ms"] | None,
        Meta(description="Given: the timestamp is meant, also if it lies before 1973, as other units do."),
    ] = None
    offsets: Annotated[dict[str | int, int] | None, Rest(OffsetsBySegment)] = None
    epochs: Annotated[dict[str | int, int] | None, Rest(EpochsBySegment)] = None

    async def run(self, services: CallServices, principal: Principal) -> PlacedSubscription:
        offsets = await self._seek(services, self.checked)
        _log.info("%s set subscription %s of %s to %s", principal.name, self.subscription, self.name, offsets)
        return PlacedSubscription(offsets)

    async def _seek(self, services: CallServices, subscription: str) -> dict[SegmentId, Offset]:
        name, subscriptions = self.name, services.subscriptions
        if self.epochs and not self.offsets:
            raise InvalidArgument("epochs belong to offsets: give the offsets, too, or leave the epochs out")
        match self.to, self.timestamp, self.offsets:
            case str(place), None, None:
                return await subscriptions.seek_to(name, subscription, place, self.request)
            case None, int(timestamp_ms), None:
                check_seek_ms(timestamp_ms, meant=self.unit is not None)
                return await subscriptions.seek_to_time(name, subscription, timestamp_ms * 1_000, self.request)
            case None, None, dict(places) if places:
                offsets = {segment: Offset(offset) for segment, offset in by_segment(places, "offsets").items()}
                epochs = by_segment(self.epochs or {}, "epochs")
                return await subscriptions.seek_to_offsets(name, subscription, offsets, self.request, epochs=epochs)
            case _:
                raise InvalidArgument(
                    "seek_subscription needs exactly one of to ('earliest' or 'latest'), timestamp (milliseconds "
                    "since 1970) and offsets (by segment id, at least one)"
                )


class SkipSubscription(_PlaceSubscription, frozen=True):
    """So many records of one segment, or everything that waits."""

    http = (
        HttpRoute("POST", SUBSCRIPTION + "/skip-all", operation="skip_all", status=NO_CONTENT, errors=(404, 409)),
        HttpRoute(
            "POST",
            SUBSCRIPTION + "/skip",
            operation="skip",
            query=("segment", "count"),
            required=("segment", "count"),
            status=NO_CONTENT,
            errors=(404, 409),
        ),
    )
    segment: SegmentNumber | None = None
    count: Annotated[int | None, Rest(SkipCount)] = None

    async def run(self, services: CallServices, principal: Principal) -> PlacedSubscription:
        name, subscription = self.name, self.checked
        subscriptions = services.subscriptions
        segment, count = self.segment, self.count
        if (segment is None) != (count is None):
            raise InvalidArgument(
                "skip_subscription needs segment and count together, to skip so many records of one segment, or "
                "neither, to skip everything"
            )
        if segment is None or count is None:
            offsets = await subscriptions.skip_all(name, subscription, self.request)
        else:
            offsets = await subscriptions.skip(name, subscription, SegmentId(segment), count, self.request)
        _log.info("%s skipped subscription %s of %s to %s", principal.name, subscription, name, offsets)
        return PlacedSubscription(offsets)


class PeekSubscription(OnSubscription, frozen=True):
    """By segment id, the ranges of the first messages that a queue has not settled. A client reads them from the
    topic."""

    needs = on_topic(Action.ADMIN, Action.CONSUME)
    count: Annotated[int, Meta(ge=1, le=MAX_PEEK)]

    async def run(self, services: CallServices, principal: Principal) -> dict[SegmentId, Sequence[tuple[int, int]]]:  # noqa: ARG002
        return await services.subscriptions.unsettled(self.name, self.checked, self.count)


class CheckQueues(OnTopic, frozen=True):
    """By segment id, what does not agree between the queues of a topic, their journals and the log; empty if all is
    well. The audit asks for it."""

    needs = on_topic(Action.ADMIN, Action.CONSUME)

    async def run(self, services: CallServices, principal: Principal) -> dict[SegmentId, Sequence[str]]:  # noqa: ARG002
        return await services.subscriptions.check_queues(self.name)
