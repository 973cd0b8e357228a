"""The administrative calls of the REST interface, over the wire: topics, subscriptions and brokers.

Results are the JSON of REST: plain dictionaries and lists with camelCase keys.

A call is retried until the client's timeout. If the link is lost before the reply, the outcome of a try is not known.
The next try may find that the first has succeeded; or the first may still run, late, on a broker that was frozen. So
each call names exactly its subject, and is carried out at most once (decision 17):

- a create has an id, which is stored with the new topic or subscription; a repeat recognises the id;
- a delete names the topic or subscription by its id, so it never deletes a newer one of the same name;
- an abort names the change of layout by its id, so it never takes back a later one;
- a seek or skip names the placements from which it begins, so it never undoes a later seek or skip.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from msgspec import UNSET, UnsetType

from braid.model.errors import (
    BraidError,
    ConditionFailed,
    ConnectFailed,
    ConnectionLost,
    InvalidArgument,
    MetadataUncertain,
    SegmentNotFound,
    SubscriptionNotFound,
    TimedOut,
    TopicNotFound,
    TransitionRefused,
    quote,
)
from braid.model.ids import random_id
from braid.model.names import DEFAULT_NAMESPACE, DEFAULT_TENANT
from braid.model.subscription import DEFAULT_START, MISTAKEN_MS, check_seek_ms
from braid.wire.link import within
from braid.wire.operations import AdminReply, AdminRequest, Kind, decode, encode

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.model.message import Message

Json = dict[str, Any]

_UNKNOWN_OUTCOME: Final = (ConnectionLost, MetadataUncertain, TimedOut)
"""After these errors, the call may have been carried out."""
_NOTHING_SPECIAL: Final[Mapping[type[BraidError], Callable[[BraidError], None]]] = {}
MOVE_TIMEOUT_S: Final = 60.0


class Admin:
    """Manages topics, subscriptions and brokers; `Client.admin` returns it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # Topics.

    async def create_topic(
        self,
        topic: str,
        segments: int = 1,
        *,
        durability: str | None = None,
        replicas: int | None = None,
        confirm: int | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_ignores_subscriptions: bool = False,
        retention_waits_for_subscriptions_ms: int | None = None,
        on_owner_loss: str = "wait",
        owner_loss_after_ms: int = 60_000,
        max_decoded_bytes: int | None = None,
        max_batch_records: int | None = None,
        message_ttl_ms: int | None = None,
        properties: Mapping[str, str] | None = None,
        exist_ok: bool = False,
    ) -> Json:
        """Create a topic whose key hashes are divided into `segments` equal ranges. Raises `TopicExists`; with
        `exist_ok`, an existing topic stays as it is and is returned.

        `durability` is what a publish waits for: `memory`, `fsync` (the default) or `replicated`. With `replicas`, so
        many brokers keep a copy of each segment, and a publish waits until `confirm` of them, its owner included, have
        it on disk: a majority, if `confirm` is not given. `retention_ms` and
        `retention_bytes` (of each segment) say which records may be deleted; without them, none are. Records that a
        subscription has not consumed stay, as long as it has moved within `retention_waits_for_subscriptions_ms`; None
        waits for ever, `retention_ignores_subscriptions` not at all. When the broker of
        a segment is lost, `on_owner_loss` decides: the segment may `wait` for it, or, after `owner_loss_after_ms`,
        `continue` on another broker without the records that only the lost broker's disk had. `max_decoded_bytes` and
        `max_batch_records` limit a batch after decompression: readers hold a whole batch in memory. Queues settle
        messages that are older than `message_ttl_ms` without delivering them; the records stay.
        """
        policies: Json = {
            "durability": durability,
            "replicas": replicas,
            "writeQuorum": confirm,
            "retentionMs": retention_ms,
            "retentionBytes": retention_bytes,
            "retentionIgnoresSubscriptions": retention_ignores_subscriptions,
            "maxDecodedBytes": max_decoded_bytes,
            "maxBatchRecords": max_batch_records,
            "messageTtlMs": message_ttl_ms,
        }
        if retention_waits_for_subscriptions_ms is not None:  # Older brokers do not know it.
            policies["retentionWaitsForSubscriptionsMs"] = retention_waits_for_subscriptions_ms
        if on_owner_loss != "wait":  # Older brokers always wait, and do not know this field.
            policies |= {"onOwnerLoss": on_owner_loss, "ownerLossAfterMs": owner_loss_after_ms}
        arguments: Json = {
            "topic": topic,
            "segments": segments,
            "policies": {name: value for name, value in policies.items() if value is not None},
        }
        if properties:
            arguments["properties"] = dict(properties)
        if exist_ok:  # Older brokers do not know it.
            arguments["existOk"] = True
        result: Json = await self._call("create_topic", arguments | {"requestId": self._new_id()})
        return result

    async def update_topic(
        self,
        topic: str,
        *,
        durability: str | UnsetType = UNSET,
        replicas: int | UnsetType = UNSET,
        confirm: int | UnsetType = UNSET,
        retention_ms: int | UnsetType | None = UNSET,
        retention_bytes: int | UnsetType | None = UNSET,
        retention_ignores_subscriptions: bool | UnsetType = UNSET,
        retention_waits_for_subscriptions_ms: int | UnsetType | None = UNSET,
        on_owner_loss: str | UnsetType = UNSET,
        owner_loss_after_ms: int | UnsetType = UNSET,
        max_decoded_bytes: int | UnsetType = UNSET,
        max_batch_records: int | UnsetType = UNSET,
        message_ttl_ms: int | UnsetType | None = UNSET,
    ) -> Json:
        """Change policies of a topic; those that are not given stay. None removes a limit. Returns the topic. Raises
        `TopicNotFound`. A new durability opens the topic's segments again, for which clients wait a moment. Other
        `replicas` are brought about while clients go on; `topic_replicas` shows how far that is."""
        policies = {
            "durability": durability,
            "replicas": replicas,
            "writeQuorum": confirm,
            "retentionMs": retention_ms,
            "retentionBytes": retention_bytes,
            "retentionIgnoresSubscriptions": retention_ignores_subscriptions,
            "retentionWaitsForSubscriptionsMs": retention_waits_for_subscriptions_ms,
            "onOwnerLoss": on_owner_loss,
            "ownerLossAfterMs": owner_loss_after_ms,
            "maxDecodedBytes": max_decoded_bytes,
            "maxBatchRecords": max_batch_records,
            "messageTtlMs": message_ttl_ms,
        }
        given = {name: value for name, value in policies.items() if value is not UNSET}
        found = await self.topic(topic)
        arguments = {"topic": topic, "policies": given, "topicId": found["topicId"]}
        result: Json = await self._call("update_topic", arguments)
        return result

    async def list_topics(self, namespace: str = f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}") -> list[str]:
        """List the topics of a namespace, as `topic://tenant/namespace/name`."""
        result: list[str] = await self._call("list_topics", _namespace(namespace))
        return result

    async def topic(self, topic: str) -> Json:
        """Return a topic's layout and policies. Raises `TopicNotFound`."""
        result: Json = await self._call("get_topic", {"topic": topic})
        return result

    async def topic_stats(self, topic: str) -> Json:
        """Return the contents and traffic of a topic's segments, and the positions of its subscriptions."""
        result: Json = await self._call("topic_stats", {"topic": topic})
        return result

    async def topic_replicas(self, topic: str) -> Json:
        """Return the replicas of each segment: how far each is, how many must confirm, and the change under way."""
        result: Json = await self._call("topic_replicas", {"topic": topic})
        return result

    async def set_replicas(self, topic: str, replicas: int | None = None, *, confirm: int | None = None) -> Json:
        """Ask for another number of replicas, of which `confirm` (a majority, if only `replicas` is given) confirm a
        record. Returns as `topic_replicas` does, before the change is done. Raises `TopicNotFound`."""
        found = await self.topic(topic)
        given = {"replicas": replicas, "writeQuorum": confirm}
        arguments = {"topic": topic, "topicId": found["topicId"]}
        arguments |= {name: value for name, value in given.items() if value is not None}
        result: Json = await self._call("set_replicas", arguments)
        return result

    async def topic_storage(self, topic: str) -> Json:
        """Return, under `storage`, the URL of the topic's chunks and manifests; empty if each broker keeps its own."""
        result: Json = await self._call("topic_storage", {"topic": topic})
        return result

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic and everything in it; with `force`, also if consumers are connected."""
        found = await self._call("get_topic", {"topic": topic, "deleting": True})
        arguments = {"topic": topic, "topicId": found["topicId"], "force": force}
        await self._call("delete_topic", arguments, in_doubt={TopicNotFound: _nothing})

    async def split(
        self, topic: str, segment: int, *, at: str | None = None, into: int = 2, timeout: float = MOVE_TIMEOUT_S
    ) -> Json:
        """Split a segment while clients go on: in two at the middle of its range, in two at a hash (hex digits: the
        first one of the upper half), or into more parts of equal size. Returns the parents and the children when the
        children take writes. Raises `TransitionRunning`, `TransitionRefused`, and `TimedOut` after `timeout` seconds:
        the change is then still under way."""
        arguments: Json = {"segment": segment, "at": at}
        if into != 2:
            arguments["into"] = into
        return await self._change_layout("split_segment", topic, arguments, timeout)

    async def merge(self, topic: str, first: int, second: int, *, timeout: float = MOVE_TIMEOUT_S) -> Json:
        """Merge two neighbouring segments into one, as `split` splits."""
        return await self._change_layout("merge_segments", topic, {"segments": [first, second]}, timeout)

    async def repartition(self, topic: str, segments: int, *, timeout: float = MOVE_TIMEOUT_S) -> Json:
        """Give the topic this many segments of equal size, as `split` splits. A segment that has such a range already
        stays."""
        return await self._change_layout("repartition_topic", topic, {"segments": segments}, timeout)

    async def abort_transition(self, topic: str) -> None:
        """Take back the change of the layout that is under way now. Raises `TransitionRefused` if its parents are being
        sealed already, or if there is none."""
        found = (await self.layout(topic))["transition"]
        if found is None:
            raise TransitionRefused(f"the layout of topic {topic} is not being changed: there is nothing to abort")
        arguments: Json = {"topic": topic}
        if "id" in found:  # Older brokers do not tell it, and do not know these arguments.
            arguments |= {"transition": found["id"], "children": [int(child) for child in found["children"]]}
        await self._call("abort_transition", arguments)

    async def layout(self, topic: str) -> Json:
        """Return the topic's segments of all generations, their owners, and the change that is under way."""
        result: Json = await self._call("get_layout", {"topic": topic})
        return result

    async def _change_layout(self, call: str, topic: str, arguments: Json, timeout: float) -> Json:
        arguments |= {"topic": topic, "timeout": timeout, "requestId": self._new_id()}
        given = {name: value for name, value in arguments.items() if value is not None}
        result: Json = await self._call(call, given, timeout_s=timeout, in_doubt={TransitionRefused: _not_known_layout})
        return result

    async def move(
        self, topic: str, *, segment: int | None = None, to: str | None = None, timeout: float = MOVE_TIMEOUT_S
    ) -> Json:
        """Move a segment, or all segments of a topic, to the named broker, or to the best one.

        Returns when the segments are served there: for each, the old and the new broker, the epoch, and the time it
        took. Raises `MoveRefused` if a segment cannot move or did not arrive, and `TimedOut` after `timeout` seconds.
        """
        arguments = {"topic": topic, "segment": segment, "to": to, "timeout": timeout}
        # A repeated move to the same broker is one move. A repeat without a target could choose another broker.
        return await self._change("move_topic", arguments, repeatable=to is not None, timeout_s=timeout)

    async def recover(
        self,
        topic: str,
        *,
        segment: int | None = None,
        to: str | None = None,
        accept_loss: bool = False,
        timeout: float = MOVE_TIMEOUT_S,
    ) -> Json:
        """Let other brokers continue the segments of a broker that is gone or cannot open them, without the records
        that only its disk had. The result names the loss of each segment. Without `accept_loss` nothing changes, and
        the error names the loss."""
        arguments = {"topic": topic, "segment": segment, "to": to, "acceptLoss": accept_loss, "timeout": timeout}
        return await self._change("recover_topic", arguments, timeout_s=timeout)

    async def replace_chunks(self, topic: str, segment: int, old: list[str], new: str) -> Json:
        """Replace neighbouring chunks by the joined chunk `new`, an object in the topic's storage. `braid pipeline
        compact` makes such objects. Raises `ConditionFailed` if the old chunks are not there now."""
        arguments = {"topic": topic, "segment": segment, "old": old, "new": new}
        return await self._change("replace_chunks", arguments, repeatable=True)

    # Auto-scaling.

    async def auto_scale_policy(self, topic: str) -> Json:
        """Return what the topic itself says of its auto-scaling; its namespace and the brokers say the rest."""
        return await self._change("get_auto_scale_policy", {"topic": topic}, repeatable=True)

    async def set_auto_scale_policy(self, topic: str, policy: Mapping[str, Any]) -> None:
        """Replace what the topic says. Raises `InvalidArgument` if it cannot be, also together with what its namespace
        says."""
        await self._change("set_auto_scale_policy", {"topic": topic, "policy": dict(policy)}, repeatable=True)

    async def delete_auto_scale_policy(self, topic: str) -> None:
        await self._change("delete_auto_scale_policy", {"topic": topic}, repeatable=True)

    async def auto_scale_proposal(self, topic: str) -> Json:
        """Return what auto-scaling would do with the topic now, and why, whether or not it is on."""
        return await self._change("propose_auto_scaling", {"topic": topic}, repeatable=True)

    async def key_hashes(self, topic: str) -> Json:
        """Return how the load of each segment spreads over its key hashes: a histogram, the hottest hashes, and where a
        split halves the load. The owners measure for two minutes after each call, so a first one shows little."""
        return await self._change("get_key_hashes", {"topic": topic}, repeatable=True)

    async def namespace_auto_scale_policy(self, namespace: str) -> Json:
        """Return what a namespace (`tenant/namespace`) says of the auto-scaling of its topics."""
        return await self._change("get_namespace_auto_scale_policy", _namespace(namespace), repeatable=True)

    async def set_namespace_auto_scale_policy(self, namespace: str, policy: Mapping[str, Any]) -> None:
        arguments = {**_namespace(namespace), "policy": dict(policy)}
        await self._change("set_namespace_auto_scale_policy", arguments, repeatable=True)

    async def delete_namespace_auto_scale_policy(self, namespace: str) -> None:
        await self._change("delete_namespace_auto_scale_policy", _namespace(namespace), repeatable=True)

    # Single segments.

    async def create_segment(self, topic: str, descriptor: str, *, subscriptions: list[str] | None = None) -> None:
        """Make sure that the topic has this segment (`0000-7fff-1`), with cursors of these subscriptions. Raises
        `TransitionRefused` if it does not have it: only a change of layout makes segments."""
        arguments = {"topic": topic, "descriptor": descriptor, "subscriptions": subscriptions or []}
        await self._change("create_segment", arguments, repeatable=True)

    async def delete_segment(self, topic: str, descriptor: str) -> None:
        """Delete a sealed segment with its records, when every subscription has consumed it. Raises
        `TransitionRefused` if it is needed."""
        arguments = {"topic": topic, "descriptor": descriptor}
        await self._call("delete_segment", arguments, in_doubt={SegmentNotFound: _nothing})

    async def terminate_segment(self, topic: str, descriptor: str, *, timeout: float = MOVE_TIMEOUT_S) -> Json:
        """Seal a segment. A new one of the same range takes its place, as after a split."""
        return await self._change_layout("terminate_segment", topic, {"descriptor": descriptor}, timeout)

    # Subscriptions.

    async def create_subscription(
        self,
        topic: str,
        subscription: str,
        *,
        start: str = DEFAULT_START,
        kind: str = "stream",
        ack_timeout_ms: int | None = None,
        max_deliveries: int | None = None,
        dead_letter_topic: str | None = None,
        query: bool = False,
    ) -> Json:
        """Create a subscription at `earliest` (the first record that is kept) or `latest`. Raises
        `SubscriptionExists`.

        A message of a `queue` that is not settled within `ack_timeout_ms` is delivered again. After `max_deliveries` it
        goes to the `dead_letter_topic`. A `query` keeps its own positions, and shows by `seek` how far it is."""
        arguments: Json = {"topic": topic, "subscription": subscription, "start": start, "kind": kind}
        given = {"ackTimeoutMs": ack_timeout_ms, "maxDeliveries": max_deliveries, "deadLetterTopic": dead_letter_topic}
        arguments |= {name: value for name, value in given.items() if value is not None}
        if query:
            arguments["query"] = True
        result: Json = await self._call("create_subscription", arguments | {"requestId": self._new_id()})
        return result

    async def check_queues(self, topic: str) -> dict[int, list[str]]:
        """Return, by segment, what does not agree between the queues of a topic, their journals and the log."""
        found: dict[str | int, list[str]] = await self._call("check_queues", {"topic": topic})
        return {int(segment): findings for segment, findings in found.items()}

    async def peek(self, topic: str, subscription: str, *, count: int = 10) -> list[Message]:
        """Return the first `count` messages that a queue has not settled, segment by segment. This takes nothing away
        from its consumers: some of the messages may be with them, or wait for their time."""
        from braid.client.peek import peek  # Needs Arrow.

        return await peek(self._client, topic, subscription, count)

    async def unsettled(self, topic: str, subscription: str, count: int) -> dict[int, list[tuple[int, int]]]:
        """Return, by segment, the ranges of the first `count` messages that a queue has not settled."""
        arguments = {"topic": topic, "subscription": subscription, "count": count}
        found: dict[str | int, list[list[int]]] = await self._call("peek_subscription", arguments)
        return {int(segment): [(start, end) for start, end in ranges] for segment, ranges in found.items()}

    async def subscriptions(self, topic: str) -> list[Json]:
        """List the subscriptions of a topic, each as `subscription` returns it."""
        result: list[Json] = await self._call("list_subscriptions", {"topic": topic})
        return result

    async def subscription(self, topic: str, subscription: str) -> Json:
        """Return the positions, backlog and consumers of a subscription. Raises `SubscriptionNotFound`."""
        arguments = {"topic": topic, "subscription": subscription}
        result: Json = await self._call("get_subscription", arguments)
        return result

    async def delete_subscription(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Delete a subscription and its cursors; with `force`, also if consumers are connected."""
        about = {"topic": topic, "subscription": subscription}
        found = await self._call("identify_subscription", about)
        arguments = about | {"subscriptionId": found["subscriptionId"], "force": force}
        await self._call("delete_subscription", arguments, in_doubt={SubscriptionNotFound: _nothing})

    async def seek(
        self,
        topic: str,
        subscription: str,
        to: str | int | datetime.datetime | Mapping[int, int],
        *,
        epochs: Mapping[int, int] | None = None,
    ) -> Json:
        """Set a subscription to another place; its consumers continue from there. Returns the offsets.

        `to` is `earliest`, `latest`, a time (a datetime with its zone, or ms since 1970; the first record of that time
        or later), or the next offset of each segment id; other segments keep their position. With offsets, `epochs` may
        say in which epochs the records before them were read: `PositionDiverged` if the topic has lost these records.
        """
        arguments: Json = {"topic": topic, "subscription": subscription}
        match to:
            case str():
                arguments["to"] = to
            case datetime.datetime():
                if to.tzinfo is None:
                    raise InvalidArgument(f"seek to {to}, a time without a zone: give it one, such as datetime.UTC")
                arguments["timestamp"] = round(to.timestamp() * 1_000)
                if arguments["timestamp"] in MISTAKEN_MS:
                    arguments["unit"] = "ms"
            case int():
                check_seek_ms(to)
                arguments["timestamp"] = to
            case Mapping():
                arguments["offsets"] = {str(segment): offset for segment, offset in to.items()}
                if epochs:
                    arguments["epochs"] = {str(segment): epoch for segment, epoch in epochs.items()}
            case _:
                raise InvalidArgument(
                    f"seek to {quote(to)}: it must be 'earliest', 'latest', a datetime with its zone, milliseconds "
                    "since 1970, or offsets by segment, as {0: 1500}"
                )
        return await self._place("seek_subscription", arguments)

    async def skip(
        self, topic: str, subscription: str, *, segment: int | None = None, count: int | None = None
    ) -> Json:
        """Skip the whole backlog, or `count` records of one segment. Returns the offsets."""
        arguments: Json = {"topic": topic, "subscription": subscription}
        if segment is not None:
            arguments["segment"] = segment
        if count is not None:
            arguments["count"] = count
        return await self._place("skip_subscription", arguments, relative=count is not None)

    async def redrive(self, topic: str, subscription: str, *, to: str | None = None, count: int | None = None) -> Json:
        """Publish the dead letters of a queue again, at most `count`: to its topic, where all subscriptions get them,
        or to another one. Returns how many. They stay in the dead-letter topic, and another call does not publish them
        once more: a subscription there remembers them."""
        from braid.client.redrive import redrive  # Needs Arrow.

        return await redrive(self._client, topic, subscription, to=to, count=count)

    async def _place(self, call: str, arguments: Json, *, relative: bool = False) -> Json:
        """Set a subscription to another place, from its present one. If another program sets it meanwhile, this begins
        again. A `relative` change begins again only if it certainly was not carried out before."""
        deadline = self._deadline()
        backoff = self._client.backoff()
        about = {"topic": arguments["topic"], "subscription": arguments["subscription"]}
        while True:
            found = await self._call("identify_subscription", about, deadline=deadline)
            request = {
                "requestId": self._new_id(),
                "subscriptionId": found["subscriptionId"],
                "since": found["placements"],
            }
            try:
                result: Json = await self._call(
                    call,
                    arguments | request,
                    deadline=deadline,
                    in_doubt={ConditionFailed: _not_known} if relative else {},
                )
            except ConditionFailed:
                delay_s = backoff.next()
                if asyncio.get_running_loop().time() + delay_s > deadline:
                    raise
            else:
                return result
            await asyncio.sleep(delay_s)

    # The cluster.

    async def brokers(self) -> list[Json]:
        """List the running brokers, and unreachable brokers (`down`) that own segments."""
        result: list[Json] = await self._call("list_brokers", {})
        return result

    async def drain(self, broker: str) -> Json:
        """Move all segments away from a broker, for maintenance. Returns the broker's state immediately: `draining`
        until it owns no segment, then `drained`."""
        return await self._change("drain_broker", {"broker": broker}, repeatable=True)

    async def activate(self, broker: str) -> Json:
        """Let a drained broker own segments again."""
        return await self._change("activate_broker", {"broker": broker}, repeatable=True)

    async def balance(self, *, dry_run: bool = False) -> Json:
        """Start the moves that best balance the brokers, or only list them and the reason for no more."""
        return await self._change("balance", {"dryRun": dry_run})

    async def topology(self) -> Json:
        """Return the routing of clients: every topic with its segments and their owners."""
        result: Json = await self._call("topology", {})
        return result

    async def changes(self) -> list[Json]:
        """List the changes of layouts, moves, votes and changes of replicas that are under way in the cluster."""
        result: list[Json] = await self._call("list_changes", {})
        return result

    # How.

    def _new_id(self) -> int:
        return random_id(self._client.random)

    def _deadline(self, timeout_s: float | None = None) -> float:
        return asyncio.get_running_loop().time() + self._client.timeout_s + (timeout_s or 0)

    async def _change(
        self, call: str, arguments: Json, *, repeatable: bool = False, timeout_s: float | None = None
    ) -> Json:
        """Make a call that must not be carried out twice, unless it says otherwise."""
        given = {name: value for name, value in arguments.items() if value is not None}
        result: Json = await self._call(call, given, repeatable=repeatable, timeout_s=timeout_s)
        return result

    async def _call(
        self,
        call: str,
        arguments: Json,
        *,
        repeatable: bool = True,
        timeout_s: float | None = None,
        deadline: float | None = None,
        in_doubt: Mapping[type[BraidError], Callable[[BraidError], None]] = _NOTHING_SPECIAL,
    ) -> Any:
        """Make a call. `timeout_s` is how long the broker itself may take; the client waits longer, to get the broker's
        own error. `in_doubt` gives the meaning of errors when an earlier try may have done the work."""
        loop = asyncio.get_running_loop()
        deadline = self._deadline(timeout_s) if deadline is None else deadline
        backoff = self._client.backoff()
        try:
            body = encode(AdminRequest(call, arguments))
        except (OverflowError, TypeError) as error:  # A number above 64 bits, an object of the program's own.
            raise InvalidArgument(f"an argument of {call} cannot be sent: {error}") from error
        doubt = False
        while True:
            try:
                link = await self._client.pool.any()
                reply = link.request(Kind.ADMIN, body)
                frame = await within(reply, max(0.0, deadline - loop.time()), f"{call} was not answered")
                return decode(AdminReply, frame.body).result
            except BraidError as error:
                if doubt and (explain := in_doubt.get(type(error))) is not None:
                    return explain(error)
                unknown = isinstance(error, _UNKNOWN_OUTCOME) and not isinstance(error, ConnectFailed)
                doubt = doubt or unknown
                delay_s = backoff.next()
                if not error.retriable or (unknown and not repeatable) or loop.time() + delay_s > deadline:
                    raise
            await asyncio.sleep(delay_s)


def _nothing(_: BraidError) -> None:
    """Accept that the subject of a delete is already gone."""


def _not_known_layout(error: BraidError) -> None:
    raise TimedOut(f"it is not known whether the layout was changed before this: {error}") from error


def _not_known(error: BraidError) -> None:
    raise TimedOut(f"it is not known whether records were skipped before this: {error}") from error


def _namespace(namespace: str) -> Json:
    tenant, slash, name = namespace.partition("/")
    if not slash:
        raise InvalidArgument(f"{namespace!r} is no namespace: write 'tenant/namespace'")
    return {"tenant": tenant, "namespace": name}
