"""The calls about subscriptions."""

from __future__ import annotations

import logging
from typing import Any, Final

from braid.broker.admin.arguments import (
    MAX_TIMESTAMP_MS,
    CreateSubscription,
    DeleteSubscription,
    OnSubscription,
    OnTopic,
    SeekSubscription,
    SkipSubscription,
    read_offsets,
)
from braid.broker.admin.reports import TopicReport
from braid.broker.admin.results import offsets_json, some_names, subscription_json
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.model.errors import InvalidArgument, SubscriptionBusy, SubscriptionNotFound
from braid.model.ids import SegmentId
from braid.model.names import TopicName, check_name
from braid.model.subscription import Subscription

_log: Final = logging.getLogger(__name__)


class SubscriptionCalls:
    def __init__(self, services: CallServices) -> None:
        self._services = services
        self._access = services.access

    def _may_subscribe(self, principal: Principal, topic: TopicName) -> None:
        self._access.check_topic(principal, topic, Action.ADMIN, Action.CONSUME)

    async def create_subscription(self, arguments: CreateSubscription, principal: Principal) -> dict[str, Any]:
        name = arguments.name
        self._may_subscribe(principal, name)
        created = await self._services.subscriptions.create(
            name,
            arguments.subscription,
            kind=arguments.kind,
            start=arguments.start,
            request_id=arguments.request_id,
        )
        _log.info("%s created subscription %s of %s", principal.name, arguments.subscription, name)
        report = await self._services.reports.of_topic(name)
        return subscription_described(arguments.subscription, created, report)

    async def list_subscriptions(self, arguments: OnTopic, principal: Principal) -> list[dict[str, Any]]:
        name = arguments.name
        self._access.check_may_know(principal, name)
        found = await self._services.subscriptions.list(name)
        report = await self._services.reports.of_topic(name)
        return [subscription_described(subscription, each, report) for subscription, each in sorted(found.items())]

    async def get_subscription(self, arguments: OnSubscription, principal: Principal) -> dict[str, Any]:
        name = arguments.name
        self._access.check_may_know(principal, name)
        subscription = check_name("subscription", arguments.subscription)
        found = await self._services.subscriptions.get(name, subscription)
        report = await self._services.reports.of_topic(name)
        return subscription_described(subscription, found, report)

    async def identify_subscription(self, arguments: OnSubscription, principal: Principal) -> dict[str, Any]:
        """What a call that may be repeated has to name: which subscription it means, and where it knew it to be."""
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        id_, placements = await self._services.subscriptions.identify(name, subscription)
        return {"subscriptionId": id_, "placements": {str(segment): each for segment, each in placements.items()}}

    async def delete_subscription(self, arguments: DeleteSubscription, principal: Principal) -> None:
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        # First, for the consumers that are connected may be those of the next subscription of that name.
        id_, _ = await self._services.subscriptions.identify(name, subscription)
        if id_ and arguments.subscription_id not in (None, id_):
            raise SubscriptionNotFound(
                f"there is no such subscription {subscription} of {name} any more: it was deleted"
            )
        report = await self._services.reports.of_topic(name)
        consumers = report.connected(subscription)
        if consumers and not arguments.force:
            raise SubscriptionBusy(
                f"subscription {subscription} of {name} cannot be deleted: it has {len(consumers)} connected consumers "
                f"({some_names(consumers)}); stop them, or use force"
            )
        await self._services.subscriptions.delete(name, subscription, arguments.subscription_id)
        self._services.groups.forget(name, subscription)
        _log.info("%s deleted subscription %s of %s", principal.name, subscription, name)

    async def seek_subscription(self, arguments: SeekSubscription, principal: Principal) -> dict[str, Any]:
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        subscriptions = self._services.subscriptions
        match arguments.to, arguments.timestamp, arguments.offsets:
            case str(place), None, None:
                offsets = await subscriptions.seek_to(name, subscription, place, arguments.request)
            case None, int(timestamp_ms), None:
                if abs(timestamp_ms) > MAX_TIMESTAMP_MS:
                    raise InvalidArgument(f"{timestamp_ms} is no time in milliseconds since 1970")
                offsets = await subscriptions.seek_to_time(name, subscription, timestamp_ms * 1_000, arguments.request)
            case None, None, dict(places) if places:
                offsets = await subscriptions.seek_to_offsets(
                    name, subscription, read_offsets(places), arguments.request
                )
            case _:
                raise InvalidArgument(
                    "seek_subscription needs exactly one of to ('earliest' or 'latest'), timestamp (milliseconds "
                    "since 1970) and offsets (by segment id, at least one)"
                )
        _log.info("%s set subscription %s of %s to %s", principal.name, subscription, name, offsets)
        return offsets_json(offsets)

    async def skip_subscription(self, arguments: SkipSubscription, principal: Principal) -> dict[str, Any]:
        name, subscription = arguments.name, check_name("subscription", arguments.subscription)
        self._may_subscribe(principal, name)
        subscriptions = self._services.subscriptions
        segment, count = arguments.segment, arguments.count
        if (segment is None) != (count is None):
            raise InvalidArgument(
                "skip_subscription needs segment and count together, to skip so many records of one segment, or "
                "neither, to skip everything"
            )
        if segment is None or count is None:
            offsets = await subscriptions.skip_all(name, subscription, arguments.request)
        else:
            offsets = await subscriptions.skip(name, subscription, SegmentId(segment), count, arguments.request)
        _log.info("%s skipped subscription %s of %s to %s", principal.name, subscription, name, offsets)
        return offsets_json(offsets)


def subscription_described(name: str, found: Subscription, report: TopicReport) -> dict[str, Any]:
    """What metadata says of it, with what the segments' owners and the topic's controller know."""
    return subscription_json(name, found, report.progress(name), report.consumers.get(name, {}), report.unavailable)
