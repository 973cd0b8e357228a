"""The calls about topics.

A topic is created by writing its record; the cluster leader then gives its segments to brokers, which open them. Its
deletion is deletion.py's.
"""

from __future__ import annotations

import contextlib
import logging
from typing import Any, Final

from braid.broker.admin.arguments import CreateTopic, DeleteTopic, GetTopic, OnNamespace, OnTopic
from braid.broker.admin.results import some_names, topic_json, topic_stats_json
from braid.broker.admin.services import CallServices
from braid.broker.admin.subscription_calls import subscription_described
from braid.broker.auth import Action, Principal
from braid.broker.storage_context import LOCAL
from braid.model.errors import NotAvailable, NotServing, PermissionDenied, ShuttingDown, SubscriptionBusy, TopicNotFound
from braid.model.names import TopicName, check_name
from braid.model.ownership import OwnershipState
from braid.model.topic import Durability, Topic

CREATE_WAIT_S: Final = 5.0

_log: Final = logging.getLogger(__name__)


class TopicCalls:
    def __init__(self, services: CallServices) -> None:
        self._services = services
        self._access = services.access

    async def list_topics(self, arguments: OnNamespace, principal: Principal) -> list[str]:
        tenant, namespace = check_name("tenant", arguments.tenant), check_name("namespace", arguments.namespace)
        found = []
        for path, topic in sorted(self._services.topics.all().items()):
            name = TopicName.parse(path)
            if (name.tenant, name.namespace) == (tenant, namespace) and not topic.deleting:
                with contextlib.suppress(PermissionDenied):
                    self._access.check_may_know(principal, name)
                    found.append(str(name))
        return found

    async def create_topic(self, arguments: CreateTopic, principal: Principal) -> dict[str, Any]:
        name, policies = arguments.name, arguments.policies
        self._access.check_topic(principal, name, Action.ADMIN)
        if policies.durability is Durability.REPLICATED or policies.replicas > 1:
            raise NotAvailable(
                f"topic {name} cannot be replicated yet: replicas come in a later version; "
                "ask for 1 replica and durability 'fsync' or 'memory'"
            )
        if not any(self._services.members.is_active(broker) for broker in self._services.members.brokers.all()):
            raise NotServing(f"topic {name} cannot be created: no broker may be given segments; start or activate one")
        topic = await self._services.topics.create(
            name,
            segments=arguments.segments,
            policies=policies,
            properties=arguments.properties,
            request_id=arguments.request_id,
        )
        await self._served(name, topic)
        _log.info("%s created topic %s with %d segments", principal.name, name, arguments.segments)
        return topic_json(name, topic)

    async def get_topic(self, arguments: GetTopic, principal: Principal) -> dict[str, Any]:
        self._access.check_may_know(principal, arguments.name)
        topics, path = self._services.topics, arguments.name.path
        stored = await topics.stored(path) if arguments.deleting else None
        return topic_json(arguments.name, stored or topics.get(path))

    async def delete_topic(self, arguments: DeleteTopic, principal: Principal) -> None:
        name = arguments.name
        self._access.check_topic(principal, name, Action.ADMIN)
        # From the store, for another broker may just have created it; and before consumers are looked at, which may be
        # those of the next topic of that name.
        topic = await self._services.topics.stored(name.path)
        if topic is None or arguments.topic_id not in (None, topic.id):
            raise TopicNotFound(f"topic {name} cannot be deleted: it does not exist")
        consumers = [] if arguments.force else await self._connected(name)
        if consumers:
            raise SubscriptionBusy(
                f"topic {name} cannot be deleted: it has {len(consumers)} connected consumers "
                f"({some_names(consumers)}); stop them, or use force"
            )
        await self._services.deletion.delete(name, topic.id)
        _log.info("%s deleted topic %s", principal.name, name)

    async def topic_stats(self, arguments: OnTopic, principal: Principal) -> dict[str, Any]:
        name, services = arguments.name, self._services
        self._access.check_may_know(principal, name)
        topic = services.topics.get(name.path)
        found = await services.subscriptions.list(name)
        report = await services.reports.of_topic(name)
        return topic_stats_json(
            name,
            topic,
            report,
            {each: subscription_described(each, found[each], report) for each in sorted(found)},
        )

    async def topic_storage(self, arguments: OnTopic, principal: Principal) -> dict[str, Any]:
        """Where readers without a broker find the topic's chunks; nowhere if each broker keeps its own."""
        self._access.check_topic(principal, arguments.name, Action.CONSUME, Action.ADMIN)
        self._services.topics.get(arguments.name.path)
        storage = self._services.config.storage
        return {"storage": "" if storage == LOCAL else storage}

    async def change_layout(self, arguments: OnTopic, principal: Principal) -> None:
        self._access.check_topic(principal, arguments.name, Action.ADMIN)
        raise NotAvailable(
            f"the layout of topic {arguments.name} cannot be changed: that is not in this version yet; layouts change "
            "in a later one. Choose the number of segments when you create the topic"
        )

    async def _connected(self, name: TopicName) -> list[str]:
        if self._services.topics.find(name.path) is None:
            return []  # It is being deleted already.
        return (await self._services.reports.of_topic(name)).connected()

    async def _served(self, name: TopicName, topic: Topic) -> None:
        """Return when every segment of a new topic is served, or when that takes too long: it will be."""
        owners = self._services.owners

        def all_serve() -> bool:
            records = owners.of_topic(name.path).values()
            serving = sum(record.state is OwnershipState.SERVING for record in records)
            return serving >= len(topic.layout.segments) or self._services.topics.find(name.path) is None

        try:
            served = await owners.view.until(all_serve, CREATE_WAIT_S)
        except ShuttingDown:  # The topic is there, whatever becomes of this broker.
            served = False
        if served:
            await self._services.segments.opened(name.path)
        else:
            _log.warning("not every segment of the new topic %s is served yet", name)
