"""Topics, subscriptions and brokers, from a program: the calls that the REST interface offers too, over the wire.

Results are what REST answers: plain dictionaries and lists with camelCase keys.

What can be retried is retried until the client's timeout. When the outcome of a try is not known, because the link was
lost before the answer came, the next try may find that it has happened, or it may still happen, late, on a broker that
stood still. So each call says exactly what it is about, and is carried out once at most (decision 17):

- a create brings an id along that is stored with what it makes; a repeat recognises that;
- a delete names the topic or subscription by its id: one of the same name that somebody made since is not touched;
- a seek or skip names the placements from which it begins: it does not undo one that came after it.
"""

from __future__ import annotations

import asyncio
import datetime
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from braid.model.errors import (
    BraidError,
    ConditionFailed,
    ConnectFailed,
    ConnectionLost,
    InvalidArgument,
    MetadataUncertain,
    SubscriptionNotFound,
    TimedOut,
    TopicNotFound,
)
from braid.model.ids import random_id
from braid.model.names import DEFAULT_NAMESPACE, DEFAULT_TENANT
from braid.wire.link import within
from braid.wire.operations import AdminReply, AdminRequest, Kind, decode, encode

if TYPE_CHECKING:
    from braid.client.client import Client

Json = dict[str, Any]

_UNKNOWN_OUTCOME: Final = (ConnectionLost, MetadataUncertain, TimedOut)
"""After these, the call may have happened."""
_NOTHING_SPECIAL: Final[Mapping[type[BraidError], Callable[[BraidError], None]]] = {}
MOVE_TIMEOUT_S: Final = 60.0


class Admin:
    """Made by `Client.admin`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    # Topics.

    async def create_topic(
        self,
        topic: str,
        segments: int = 1,
        *,
        durability: str = "fsync",
        replicas: int = 1,
        write_quorum: int | None = None,
        retention_ms: int | None = None,
        retention_bytes: int | None = None,
        retention_ignores_subscriptions: bool = False,
        on_owner_loss: str = "wait",
        owner_loss_after_ms: int = 60_000,
        properties: Mapping[str, str] | None = None,
    ) -> Json:
        """Create a topic whose key hashes are cut into `segments` equal ranges. `TopicExists` if there is one.

        `durability` is what a publish waits for: `memory`, `fsync` or `replicated`. `retention_ms` and
        `retention_bytes` (of each segment) say what may be deleted; without them, nothing is. `on_owner_loss` is what
        becomes of a segment whose broker is gone: it may `wait` for it, or, after `owner_loss_after_ms`, `continue` on
        another one without what only the first one's disk had.
        """
        policies: Json = {
            "durability": durability,
            "replicas": replicas,
            "writeQuorum": (replicas // 2 + 1) if write_quorum is None else write_quorum,
            "retentionMs": retention_ms,
            "retentionBytes": retention_bytes,
            "retentionIgnoresSubscriptions": retention_ignores_subscriptions,
        }
        if on_owner_loss != "wait":  # Which is all that older brokers do, and they know no word for it.
            policies |= {"onOwnerLoss": on_owner_loss, "ownerLossAfterMs": owner_loss_after_ms}
        arguments: Json = {
            "topic": topic,
            "segments": segments,
            "policies": {name: value for name, value in policies.items() if value is not None},
        }
        if properties:
            arguments["properties"] = dict(properties)

        result: Json = await self._call("create_topic", arguments | {"requestId": self._new_id()})
        return result

    async def list_topics(self, namespace: str = f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}") -> list[str]:
        """The topics of a namespace, as `topic://tenant/namespace/name`."""
        tenant, slash, name = namespace.partition("/")
        if not slash:
            raise InvalidArgument(f"{namespace!r} is no namespace: write 'tenant/namespace'")
        result: list[str] = await self._call("list_topics", {"tenant": tenant, "namespace": name})
        return result

    async def topic(self, topic: str) -> Json:
        """A topic's layout and policies. `TopicNotFound`."""
        result: Json = await self._call("get_topic", {"topic": topic})
        return result

    async def topic_stats(self, topic: str) -> Json:
        """What is in a topic's segments, what went in and out, and how far its subscriptions are."""
        result: Json = await self._call("topic_stats", {"topic": topic})
        return result

    async def topic_storage(self, topic: str) -> Json:
        """Under `storage`, the URL of the topic's chunks and manifests; empty where each broker keeps its own."""
        result: Json = await self._call("topic_storage", {"topic": topic})
        return result

    async def delete_topic(self, topic: str, *, force: bool = False) -> None:
        """Delete a topic and everything in it. `force`: also if it has connected consumers."""
        found = await self._call("get_topic", {"topic": topic, "deleting": True})
        arguments = {"topic": topic, "topicId": found["topicId"], "force": force}
        await self._call("delete_topic", arguments, in_doubt={TopicNotFound: _nothing})

    async def split(self, topic: str, segment: int, *, at: str | None = None) -> Json:
        """Split a segment in two, at the middle of its range or at a hash of four hex digits."""
        return await self._change("split_segment", {"topic": topic, "segment": segment, "at": at})

    async def merge(self, topic: str, first: int, second: int) -> Json:
        """Merge two adjacent segments into one."""
        return await self._change("merge_segments", {"topic": topic, "segments": [first, second]})

    async def repartition(self, topic: str, segments: int) -> Json:
        """Give the topic so many equal segments."""
        return await self._change("repartition_topic", {"topic": topic, "segments": segments})

    async def move(
        self, topic: str, *, segment: int | None = None, to: str | None = None, timeout: float = MOVE_TIMEOUT_S
    ) -> Json:
        """Move a segment, or all of a topic, to another broker: to the one named, or wherever it fits best.

        Returns when they are served there: for each segment from where, to where, in which epoch, and how long it took.
        `MoveRefused` if it cannot move or did not arrive; `TimedOut` if it is still on its way after `timeout` seconds.
        """
        arguments = {"topic": topic, "segment": segment, "to": to, "timeout": timeout}
        # To ask twice for the same place is to ask once; "wherever it fits" would be another place then.
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
        """Let another broker continue the segments whose broker is gone, without what only that one's disk had. The
        answer says of each segment what that is. Without `accept_loss` nothing is changed: the error says it."""
        arguments = {"topic": topic, "segment": segment, "to": to, "acceptLoss": accept_loss, "timeout": timeout}
        return await self._change("recover_topic", arguments, timeout_s=timeout)

    async def replace_chunks(self, topic: str, segment: int, old: list[str], new: str) -> Json:
        """Let the joined chunk `new`, an object that stands in the topic's storage, take the place of neighbouring
        chunks. `braid pipeline compact` makes such objects. `ConditionFailed` if the old ones are not there now."""
        arguments = {"topic": topic, "segment": segment, "old": old, "new": new}
        return await self._change("replace_chunks", arguments, repeatable=True)

    async def auto_scale_policy(self, topic: str) -> Json:
        return await self._change("get_auto_scale_policy", {"topic": topic})

    async def set_auto_scale_policy(self, topic: str, policy: Mapping[str, Any]) -> Json:
        return await self._change("set_auto_scale_policy", {"topic": topic, "policy": dict(policy)})

    async def delete_auto_scale_policy(self, topic: str) -> None:
        await self._change("delete_auto_scale_policy", {"topic": topic})

    async def create_segment(self, topic: str, descriptor: str, *, subscriptions: list[str] | None = None) -> Json:
        """Create one segment, named by its descriptor (`0000-7fff-1`). Layouts change by split and merge."""
        arguments = {"topic": topic, "descriptor": descriptor, "subscriptions": subscriptions or []}
        return await self._change("create_segment", arguments)

    async def delete_segment(self, topic: str, descriptor: str) -> None:
        await self._change("delete_segment", {"topic": topic, "descriptor": descriptor})

    async def terminate_segment(self, topic: str, descriptor: str) -> Json:
        """Seal one segment."""
        return await self._change("terminate_segment", {"topic": topic, "descriptor": descriptor})

    # Subscriptions.

    async def create_subscription(
        self, topic: str, subscription: str, *, start: str = "latest", kind: str = "stream"
    ) -> Json:
        """Create a subscription at `earliest` or `latest`. `SubscriptionExists` if there is one."""
        arguments = {"topic": topic, "subscription": subscription, "start": start, "kind": kind}
        result: Json = await self._call("create_subscription", arguments | {"requestId": self._new_id()})
        return result

    async def subscriptions(self, topic: str) -> list[Json]:
        """All subscriptions of a topic, each as `subscription` has it."""
        result: list[Json] = await self._call("list_subscriptions", {"topic": topic})
        return result

    async def subscription(self, topic: str, subscription: str) -> Json:
        """Where a subscription is, how much it lags, and who consumes. `SubscriptionNotFound`."""
        arguments = {"topic": topic, "subscription": subscription}
        result: Json = await self._call("get_subscription", arguments)
        return result

    async def delete_subscription(self, topic: str, subscription: str, *, force: bool = False) -> None:
        """Delete a subscription and its cursors. `force`: also if it has connected consumers."""
        about = {"topic": topic, "subscription": subscription}
        found = await self._call("identify_subscription", about)
        arguments = about | {"subscriptionId": found["subscriptionId"], "force": force}
        await self._call("delete_subscription", arguments, in_doubt={SubscriptionNotFound: _nothing})

    async def seek(self, topic: str, subscription: str, to: str | int | datetime.datetime | Mapping[int, int]) -> Json:
        """Set a subscription to another place; its consumers go on from there. Returns the offsets.

        `to`: `earliest`, `latest`, a time (datetime, or ms since 1970: the first record of that time or later), or the
        next offset by segment id; segments that are not named stay where they are.
        """
        arguments: Json = {"topic": topic, "subscription": subscription}
        match to:
            case str():
                arguments["to"] = to
            case datetime.datetime():
                arguments["timestamp"] = round(to.timestamp() * 1_000)
            case int():
                arguments["timestamp"] = to
            case _:
                arguments["offsets"] = {str(segment): offset for segment, offset in to.items()}
        return await self._place("seek_subscription", arguments)

    async def skip(
        self, topic: str, subscription: str, *, segment: int | None = None, count: int | None = None
    ) -> Json:
        """Skip everything that waits, or `count` records of one segment. Returns the offsets."""
        arguments: Json = {"topic": topic, "subscription": subscription}
        if segment is not None:
            arguments["segment"] = segment
        if count is not None:
            arguments["count"] = count
        return await self._place("skip_subscription", arguments, relative=count is not None)

    async def _place(self, call: str, arguments: Json, *, relative: bool = False) -> Json:
        """Set a subscription to another place, beginning from where it is now. When somebody else sets it meanwhile,
        that happens first, and this begins again; but for a `relative` place only if it is certain that it has not
        happened before that."""
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
        """Every broker that is there, and those that are gone (`down`) and own segments."""
        result: list[Json] = await self._call("list_brokers", {})
        return result

    async def drain(self, broker: str) -> Json:
        """Ask for everything to move away from a broker, for maintenance. Returns the broker's state at once: it is
        `draining` until nothing is left on it, then `drained`."""
        return await self._change("drain_broker", {"broker": broker}, repeatable=True)

    async def activate(self, broker: str) -> Json:
        """Give a drained broker work again."""
        return await self._change("activate_broker", {"broker": broker}, repeatable=True)

    async def balance(self, *, dry_run: bool = False) -> Json:
        """Begin the moves that even the brokers' load best, or only say which these are, and why there are no more."""
        return await self._change("balance", {"dryRun": dry_run})

    async def topology(self) -> Json:
        """What clients are told: every topic with its segments and their owners."""
        result: Json = await self._call("topology", {})
        return result

    # How.

    def _new_id(self) -> int:
        return random_id(self._client.random)

    def _deadline(self, timeout_s: float | None = None) -> float:
        return asyncio.get_running_loop().time() + self._client.timeout_s + (timeout_s or 0)

    async def _change(
        self, call: str, arguments: Json, *, repeatable: bool = False, timeout_s: float | None = None
    ) -> Json:
        """A call that must not happen twice, unless it says otherwise."""
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
        """`timeout_s`: how long the broker itself may take; what it says then is waited for, so that it can explain
        itself. `in_doubt`: what errors mean that a try meets when an earlier one may have done the work."""
        loop = asyncio.get_running_loop()
        deadline = self._deadline(timeout_s) if deadline is None else deadline
        backoff = self._client.backoff()
        body = encode(AdminRequest(call, arguments))
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
    """A delete found that what it was to delete is gone."""


def _not_known(error: BraidError) -> None:
    raise TimedOut(f"it is not known whether records were skipped before this: {error}") from error
