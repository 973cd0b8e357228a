"""The calls about the cluster: its brokers, who is to be emptied, balancing, and what clients are told."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any, Final

from braid.broker.admin.arguments import Balance, NoArguments, OnBroker
from braid.broker.admin.results import broker_json, down_json, plan_json, topology_json
from braid.broker.admin.services import CallServices
from braid.broker.auth import ALL, Action, Principal
from braid.cluster.leader import balancing_decisions
from braid.cluster.snapshot import Snapshot
from braid.metadata import paths
from braid.metadata.store import Delete, Operation, Put
from braid.model.errors import BrokerNotFound, MetadataUncertain
from braid.model.ownership import OwnershipState

MAX_TRIES: Final = 5

_log: Final = logging.getLogger(__name__)


class ClusterCalls:
    def __init__(self, services: CallServices) -> None:
        self._services = services
        self._access = services.access

    async def list_brokers(self, _: NoArguments, principal: Principal) -> list[dict[str, Any]]:
        self._access.check(principal, Action.ADMIN, ALL)
        return self._described(self._services.leader.snapshot())

    def _described(self, snapshot: Snapshot) -> list[dict[str, Any]]:
        """Those that are live, and those that are gone and own what nobody else can serve."""
        services = self._services
        owned = _owned(snapshot)
        leader = services.leader.leader
        live = {
            id_: broker_json(
                id_,
                registration,
                state=snapshot.brokers[id_].state.value,
                segments=owned[id_],
                leader=id_ == leader,
                load=snapshot.loads.get(id_),
            )
            for id_, registration in services.members.brokers.all().items()
        }
        down = {id_: down_json(id_, count) for id_, count in owned.items() if id_ not in live}
        return [each for _, each in sorted({**live, **down}.items())]

    async def drain_broker(self, arguments: OnBroker, principal: Principal) -> dict[str, Any]:
        """The wish is all; the leader carries it out, a few segments at a time."""
        key = paths.drain(arguments.broker)
        return await self._wish(arguments.broker, Put(key, b"{}"), "is to be drained", principal)

    async def activate_broker(self, arguments: OnBroker, principal: Principal) -> dict[str, Any]:
        return await self._wish(arguments.broker, Delete(paths.drain(arguments.broker)), "is active", principal)

    async def _wish(self, broker: str, operation: Operation, what: str, principal: Principal) -> dict[str, Any]:
        self._access.check(principal, Action.ADMIN, ALL)
        services = self._services
        known = {each["id"] for each in self._described(services.leader.snapshot())} | set(
            services.members.drains.all()
        )
        if broker not in known:
            raise BrokerNotFound(f"there is no broker {broker}; the brokers are {', '.join(sorted(known))}")
        for _ in range(MAX_TRIES):
            try:
                result = await services.store.txn([], [operation])
            except MetadataUncertain:
                continue  # Writing it again changes nothing.
            await services.owners.view.caught_up(result.revision)
            _log.info("broker %s %s: %s asked for it", broker, what, principal.name)
            found = [each for each in self._described(services.leader.snapshot()) if each["id"] == broker]
            return found[0] if found else down_json(broker, 0)
        raise MetadataUncertain(f"it is not known whether broker {broker} {what}; look, then try again")

    async def balance(self, arguments: Balance, principal: Principal) -> dict[str, Any]:
        """What balancing would do now; without `dryRun` also begin it, whether or not it is enabled."""
        self._access.check(principal, Action.ADMIN, ALL)
        leader, owners = self._services.leader, self._services.owners
        snapshot, plan = leader.snapshot(), leader.balance_plan()
        begun = 0
        if not arguments.dry_run:
            for decision in balancing_decisions(snapshot, plan):
                unchanged = self._services.topics.unchanged(decision.segment.topic.path)
                revision = await owners.swap(
                    decision.segment, decision.revision, decision.record, conditions=[unchanged]
                )
                if revision is not None:
                    begun += 1
                    await owners.view.caught_up(revision)
            _log.info("%s balances the cluster: %d segments move", principal.name, begun)
        return plan_json(plan, begun=begun, dry_run=arguments.dry_run)

    async def topology(self, _: NoArguments, principal: Principal) -> dict[str, Any]:
        self._access.check(principal, Action.ADMIN, ALL)
        topology = self._services.topology
        paths = [path for path, topic in sorted(self._services.topics.all().items()) if not topic.deleting]
        return topology_json(topology.generation, [topology.route(path) for path in paths])


def _owned(snapshot: Snapshot) -> Counter[str]:
    """How many segments each broker has; who has handed one over does not have it any more."""
    return Counter(
        each.known.value.owner
        for each in snapshot.segments()
        if each.known is not None and each.known.value.state is not OwnershipState.SEALED
    )
