"""Every administrative call, once, for the REST interface and for the wire's ADMIN.

A call has a name, arguments (`arguments.py`) and a result (`results.py`), all of them JSON. What it does is
in `topic_calls.py`, `move_calls.py`, `history_calls.py`, `subscription_calls.py` and `cluster_calls.py`; here is the
table of them, and what all have in common.

    who may                                                             needs, on the topic
    create, delete and change topics                                    admin
    create, delete, seek and skip subscriptions                         consume, or admin
    know of a topic or a subscription: get, list, stats                 produce, consume or admin
    know where a topic's storage is                                     consume, or admin
    know of the cluster: brokers, topology; change it                   admin on everything ("*")

A call is carried to its end even if the one who asked is gone meanwhile (`shielded_tasks.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple

from braid.broker.admin.arguments import (
    Arguments,
    Balance,
    CreateSubscription,
    CreateTopic,
    DeleteSubscription,
    DeleteTopic,
    GetTopic,
    MergeSegments,
    MoveTopic,
    NoArguments,
    OnBroker,
    OnNamespace,
    OnSegment,
    OnSubscription,
    OnTopic,
    RecoverTopic,
    RepartitionTopic,
    ReplaceChunks,
    SeekSubscription,
    SetAutoScalePolicy,
    SkipSubscription,
    SplitSegment,
    read_arguments,
)
from braid.broker.admin.cluster_calls import ClusterCalls
from braid.broker.admin.history_calls import HistoryCalls
from braid.broker.admin.move_calls import MoveCalls
from braid.broker.admin.services import CallServices
from braid.broker.admin.subscription_calls import SubscriptionCalls
from braid.broker.admin.topic_calls import TopicCalls
from braid.broker.auth import Principal
from braid.broker.error_mapping import told_to_clients
from braid.broker.shielded_tasks import Errands
from braid.model.errors import Fenced, InvalidArgument, LogClosed


class _Call(NamedTuple):
    arguments: type[Arguments]
    run: Callable[[Any, Principal], Coroutine[Any, Any, Any]]


class Calls:
    def __init__(self, services: CallServices) -> None:
        topics, moves = TopicCalls(services), MoveCalls(services)
        subscriptions, cluster = SubscriptionCalls(services), ClusterCalls(services)
        history = HistoryCalls(services)
        self._view = services.owners.view
        self._errands = Errands()
        self._calls = {
            "list_topics": _Call(OnNamespace, topics.list_topics),
            "create_topic": _Call(CreateTopic, topics.create_topic),
            "get_topic": _Call(GetTopic, topics.get_topic),
            "delete_topic": _Call(DeleteTopic, topics.delete_topic),
            "topic_stats": _Call(OnTopic, topics.topic_stats),
            "topic_storage": _Call(OnTopic, topics.topic_storage),
            "create_subscription": _Call(CreateSubscription, subscriptions.create_subscription),
            "list_subscriptions": _Call(OnTopic, subscriptions.list_subscriptions),
            "get_subscription": _Call(OnSubscription, subscriptions.get_subscription),
            "identify_subscription": _Call(OnSubscription, subscriptions.identify_subscription),
            "delete_subscription": _Call(DeleteSubscription, subscriptions.delete_subscription),
            "seek_subscription": _Call(SeekSubscription, subscriptions.seek_subscription),
            "skip_subscription": _Call(SkipSubscription, subscriptions.skip_subscription),
            "list_brokers": _Call(NoArguments, cluster.list_brokers),
            "topology": _Call(NoArguments, cluster.topology),
            "split_segment": _Call(SplitSegment, topics.change_layout),
            "merge_segments": _Call(MergeSegments, topics.change_layout),
            "repartition_topic": _Call(RepartitionTopic, topics.change_layout),
            "get_auto_scale_policy": _Call(OnTopic, topics.change_layout),
            "set_auto_scale_policy": _Call(SetAutoScalePolicy, topics.change_layout),
            "delete_auto_scale_policy": _Call(OnTopic, topics.change_layout),
            "create_segment": _Call(OnSegment, topics.change_layout),
            "delete_segment": _Call(OnSegment, topics.change_layout),
            "terminate_segment": _Call(OnSegment, topics.change_layout),
            "move_topic": _Call(MoveTopic, moves.move_topic),
            "recover_topic": _Call(RecoverTopic, moves.recover_topic),
            "replace_chunks": _Call(ReplaceChunks, history.replace_chunks),
            "drain_broker": _Call(OnBroker, cluster.drain_broker),
            "activate_broker": _Call(OnBroker, cluster.activate_broker),
            "balance": _Call(Balance, cluster.balance),
        }

    async def call(self, name: str, arguments: dict[str, Any], principal: Principal) -> Any:
        known = self._calls.get(name)
        if known is None:
            raise InvalidArgument(f"there is no call {name!r}; the calls are {', '.join(sorted(self._calls))}")
        read = read_arguments(name, known.arguments, arguments)
        try:
            return await self._errands.run(name, known.run(read, principal))
        except (Fenced, LogClosed) as error:
            raise told_to_clients(error) from error

    async def close(self) -> None:
        """Waits for the calls that are under way. Those that only wait for other brokers end at once: what they began
        goes on without them."""
        self._view.end_waits()
        await self._errands.close()
