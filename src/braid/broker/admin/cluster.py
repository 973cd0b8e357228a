"""The calls about the cluster: its brokers, who is to be emptied, balancing, and what clients are told."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from braid.broker.admin.call import AdminCall, on_cluster
from braid.broker.admin.results.brokers import BalanceResult, BrokerDescription
from braid.broker.admin.results.changes import ClusterChange
from braid.broker.admin.results.routing import ClusterRouting, RoutedTopic
from braid.broker.admin.route import BROKER, BROKERS, NO_CONTENT, BrokerName, HttpRoute
from braid.broker.admin.services import CallServices
from braid.broker.auth import Principal
from braid.broker.peers.calls import PeerCalls
from braid.cluster.snapshot import Snapshot
from braid.metadata import paths
from braid.metadata.store import Delete, Operation, Put
from braid.model.errors import BrokerNotFound, MetadataUncertain, cut
from braid.model.ownership import OwnershipState

BALANCE: Final = "balance"
"""A call to the leader."""
ANSWER_S: Final = 10.0
"""How long the leader may take."""
MAX_TRIES: Final = 5
MAX_OBSTACLES: Final = 5
"""How many segments of a draining broker say why they do not move."""

MAX_CHANGES: Final = 1_000
"""That one answer names."""

_log: Final = logging.getLogger(__name__)


class ListBrokers(AdminCall, frozen=True):
    needs = on_cluster
    http = HttpRoute("GET", BROKERS)

    async def run(self, services: CallServices, principal: Principal) -> list[BrokerDescription]:  # noqa: ARG002
        return _described(services)


class _OnBroker(AdminCall, frozen=True):
    needs = on_cluster
    broker: BrokerName

    async def _ask_for(
        self, services: CallServices, operation: Operation, what: str, principal: Principal
    ) -> BrokerDescription:
        broker = self.broker
        known = {each.id for each in _described(services)} | set(services.members.drains.all())
        if broker not in known:
            raise BrokerNotFound(f"there is no broker {cut(broker)}; the brokers are {', '.join(sorted(known))}")
        for _ in range(MAX_TRIES):
            try:
                result = await services.store.txn([], [operation])
            except MetadataUncertain:
                continue  # Writing it again changes nothing.
            await services.owners.view.caught_up(result.revision)
            _log.info("broker %s %s: %s asked for it", broker, what, principal.name)
            found = [each for each in _described(services) if each.id == broker]
            return found[0] if found else BrokerDescription.of_down(broker, 0)
        raise MetadataUncertain(f"it is not known whether broker {broker} {what}; look, then try again")


class DrainBroker(_OnBroker, frozen=True):
    """Ask for a broker to be emptied. The leader carries it out, a few segments at a time."""

    http = HttpRoute("POST", BROKER + "/drain", status=NO_CONTENT, errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> BrokerDescription:
        operation = Put(paths.drain(self.broker), b"{}")
        return await self._ask_for(services, operation, "is to be drained", principal)


class ActivateBroker(_OnBroker, frozen=True):
    """Give a drained broker work again."""

    http = HttpRoute("POST", BROKER + "/activate", status=NO_CONTENT, errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> BrokerDescription:
        return await self._ask_for(services, Delete(paths.drain(self.broker)), "is active", principal)


class Balance(AdminCall, frozen=True, rename="camel"):
    """Begin the moves that even the load best, whether or not balancing is enabled; with `dryRun`, only say which. The
    cluster leader begins them, whichever broker is asked."""

    needs = on_cluster
    http = HttpRoute("POST", BROKERS + "/balance", query=("dryRun",))
    dry_run: Annotated[bool, Meta(description="Only say what would move.")] = False

    async def run(self, services: CallServices, principal: Principal) -> BalanceResult:
        if self.dry_run:
            return BalanceResult.of(services.leader.balance_plan(), begun=0, dry_run=True)
        leader = services.leader.leader
        if leader is None or leader == services.id:
            return await _balance(services, principal.name)
        answer = await services.ask(leader, BALANCE, {"principal": principal.name}, timeout_s=ANSWER_S)
        return msgspec.convert(answer, BalanceResult)


def answer_for(services: CallServices, calls: PeerCalls) -> None:
    """Begin balancing for brokers that do not lead."""
    calls.register(BALANCE, lambda arguments: _balance(services, arguments["principal"]))


async def _balance(services: CallServices, principal: str) -> BalanceResult:
    plan, begun = await services.leader.balance()
    _log.info("%s balances the cluster: %d segments move", principal, begun)
    return BalanceResult.of(plan, begun=begun, dry_run=False)


class Topology(AdminCall, frozen=True):
    """What clients are told: which broker has which segment of which topic."""

    needs = on_cluster
    http = HttpRoute("GET", "/admin/v2/topology")

    async def run(self, services: CallServices, principal: Principal) -> ClusterRouting:  # noqa: ARG002
        topology = services.topology
        paths = [path for path, topic in sorted(services.topics.all().items()) if not topic.deleting]
        return ClusterRouting(topology.generation, [RoutedTopic.of(topology.route(path)) for path in paths])


class ListChanges(AdminCall, frozen=True):
    """What is under way: changes of layouts, moves, votes, segments that are being opened, changes of replicas. At most
    1,000 of them."""

    needs = on_cluster
    http = HttpRoute("GET", "/admin/v2/changes")

    async def run(self, services: CallServices, principal: Principal) -> list[ClusterChange]:  # noqa: ARG002
        return list(islice(_changes(services.leader.snapshot()), MAX_CHANGES))


def _changes(snapshot: Snapshot) -> Iterator[ClusterChange]:
    for path, topic in sorted(snapshot.topics.items()):
        if not topic.deleting and (change := ClusterChange.of_topic(path, topic)) is not None:
            yield change
    for each in snapshot.segments():
        if each.known is not None:
            change = ClusterChange.of_segment(each.path, each.info.segment_id, each.known.value)
            if change is not None:
                yield change


def _described(services: CallServices) -> list[BrokerDescription]:
    """The brokers that are live, and those that are gone and own what nobody else can serve, or hold copies."""
    snapshot = services.leader.snapshot()
    owned, copies = _owned(snapshot), _copies(snapshot)
    leader = services.leader.leader
    live = {
        id_: BrokerDescription.of(
            id_,
            registration,
            state=snapshot.brokers[id_].state.value,
            segments=owned[id_],
            replicas=copies[id_],
            leader=id_ == leader,
            load=snapshot.loads.get(id_),
            obstacles=_obstacles(snapshot, id_) if id_ in services.members.drains else (),
        )
        for id_, registration in services.members.brokers.all().items()
    }
    down = {id_: BrokerDescription.of_down(id_, owned[id_], copies[id_]) for id_ in owned | copies if id_ not in live}
    return [each for _, each in sorted({**live, **down}.items())]


def _obstacles(snapshot: Snapshot, broker: str) -> list[str]:
    """Why segments of a broker that is to be drained do not move, as far as their records say."""
    found: list[str] = []
    for each in snapshot.segments():
        record = each.known.value if each.known is not None else None
        if record is None or record.state is OwnershipState.SEALED:
            continue
        failure = record.failure_of(broker)
        if record.owner == broker:
            reason = f"broker {broker} cannot open it: {failure.reason}" if failure is not None else record.refusal
        elif broker in record.replicas and record.change is None:
            reason = f"broker {broker} holds a replica, and no other broker can take its place now"
        else:
            continue
        if reason and len(found) < MAX_OBSTACLES:
            found.append(f"{each.ref}: {reason}")
    return found


def _owned(snapshot: Snapshot) -> Counter[str]:
    """How many segments each broker has; who has handed one over does not have it any more."""
    return Counter(
        each.known.value.owner
        for each in snapshot.segments()
        if each.known is not None and each.known.value.state is not OwnershipState.SEALED
    )


def _copies(snapshot: Snapshot) -> Counter[str]:
    """How many segments of others each broker has copies of."""
    return Counter(
        broker
        for each in snapshot.segments()
        if each.known is not None
        for broker in each.known.value.replicas
        if broker != each.known.value.owner
    )
