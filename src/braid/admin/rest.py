"""The REST API: PIP-468's two groups of paths, brokers and topology. Each call is one of `broker/admin/calls.py`.

Nothing is decided here. A handler takes a request apart, names the call, and answers with what the call returned; the
call checks arguments and permissions, the same as when it comes over the wire.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from fastapi import APIRouter, Body, Depends, Query, Request, Response

from braid.admin.models import (
    AutoScalePolicy,
    BalancePlan,
    BalanceQuery,
    Broker,
    BrokerPath,
    CreateSubscriptionQuery,
    CreateTopicQuery,
    DescriptorPath,
    ErrorAnswer,
    ForceQuery,
    MoveQuery,
    Namespace,
    NoQuery,
    Policies,
    Recovered,
    RecoverQuery,
    SeekBody,
    SeekQuery,
    SegmentCount,
    SegmentPath,
    SkipQuery,
    SplitQuery,
    Subscription,
    SubscriptionPath,
    Tenant,
    Topic,
    TopicPath,
    TopicStats,
    TopicStorage,
    Topology,
)
from braid.broker.auth import Principal
from braid.model.errors import InvalidArgument, ShuttingDown

if TYPE_CHECKING:
    from braid.broker import broker as served

TOPICS: Final = "/admin/v2/scalable/{tenant}/{namespace}"
TOPIC: Final = TOPICS + "/{topic}"
SUBSCRIPTIONS: Final = TOPIC + "/subscriptions"
SUBSCRIPTION: Final = SUBSCRIPTIONS + "/{subscription}"
SEGMENT: Final = "/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}"
BROKERS: Final = "/admin/v2/brokers"

_MEANINGS: Final = {
    400: "Malformed",
    401: "No valid token",
    403: "Not permitted",
    404: "Absent",
    409: "Exists, or is in use",
    412: "Not in a state for this",
    413: "The body is above 1 MiB",
    500: "A failure of the broker; see its log",
    501: "Not in this version",
    503: "Not now; try again",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """For OpenAPI: what a call may answer beside success. Any call may be malformed, not permitted or not possible."""
    all_statuses = sorted({400, 401, 403, 413, 500, 503, *statuses})
    return {status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in all_statuses}


def answer(result: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(result), status, media_type="application/json")


async def _topic_of(tenant: Tenant, namespace: Namespace, topic: TopicPath) -> str:
    return f"{tenant}/{namespace}/{topic}"


TopicOf = Annotated[str, Depends(_topic_of)]
Call = Callable[..., Awaitable[Any]]
NothingElse = Annotated[NoQuery, Query()]
_DONE: Final[dict[str, Any]] = {"status_code": 204, "response_class": Response}


def add_routes(router: APIRouter, broker: served.Broker) -> None:
    async def call(request: Request, name: str, **arguments: Any) -> Any:
        if broker.closing:
            raise ShuttingDown(f"broker {broker.id} is stopping; ask another one")
        given = {key: value for key, value in arguments.items() if value is not None}
        principal: Principal = request.state.principal  # the guard's
        return await broker.front_door.calls.call(name, given, principal)

    _add_topics(router, call)
    _add_subscriptions(router, call)
    _add_layout(router, call)
    _add_segments(router, call)
    _add_cluster(router, call)


def _add_topics(router: APIRouter, call: Call) -> None:
    @router.get(TOPICS, tags=["topics"], responses={200: {"model": list[str]}, **errors()})
    async def list_topics(request: Request, tenant: Tenant, namespace: Namespace, _: NothingElse) -> Response:
        return answer(await call(request, "list_topics", tenant=tenant, namespace=namespace))

    @router.put(TOPIC, tags=["topics"], status_code=201, responses={201: {"model": Topic}, **errors(409, 501)})
    async def create_topic(
        request: Request,
        path: TopicOf,
        query: Annotated[CreateTopicQuery, Query()],
        policies: Annotated[Policies | None, Body()] = None,
    ) -> Response:
        result = await call(
            request,
            "create_topic",
            topic=path,
            segments=query.num_initial_segments,
            policies=policies.model_dump(by_alias=True, exclude_unset=True) if policies is not None else None,
        )
        return answer(result, 201)

    @router.get(TOPIC, tags=["topics"], responses={200: {"model": Topic}, **errors(404)})
    async def get_topic(request: Request, path: TopicOf, _: NothingElse) -> Response:
        return answer(await call(request, "get_topic", topic=path))

    @router.delete(TOPIC, tags=["topics"], **_DONE, responses=errors(404, 409))
    async def delete_topic(
        request: Request,
        path: TopicOf,
        query: Annotated[ForceQuery, Query()],
    ) -> Response:
        await call(request, "delete_topic", topic=path, force=query.force == "true")
        return Response(status_code=204)

    @router.get(TOPIC + "/stats", tags=["topics"], responses={200: {"model": TopicStats}, **errors(404)})
    async def topic_stats(request: Request, path: TopicOf, _: NothingElse) -> Response:
        return answer(await call(request, "topic_stats", topic=path))

    @router.get(TOPIC + "/storage", tags=["topics"], responses={200: {"model": TopicStorage}, **errors(404)})
    async def topic_storage(request: Request, path: TopicOf, _: NothingElse) -> Response:
        return answer(await call(request, "topic_storage", topic=path))


def _add_subscriptions(router: APIRouter, call: Call) -> None:
    @router.get(SUBSCRIPTIONS, tags=["subscriptions"], responses={200: {"model": list[Subscription]}, **errors(404)})
    async def list_subscriptions(request: Request, path: TopicOf, _: NothingElse) -> Response:
        return answer(await call(request, "list_subscriptions", topic=path))

    @router.put(
        SUBSCRIPTION,
        tags=["subscriptions"],
        status_code=201,
        responses={201: {"model": Subscription}, **errors(404, 409, 501)},
    )
    async def create_subscription(
        request: Request,
        path: TopicOf,
        subscription: SubscriptionPath,
        query: Annotated[CreateSubscriptionQuery, Query()],
    ) -> Response:
        result = await call(
            request,
            "create_subscription",
            topic=path,
            subscription=subscription,
            start=query.start,
            kind=query.kind,
        )
        return answer(result, 201)

    @router.get(SUBSCRIPTION, tags=["subscriptions"], responses={200: {"model": Subscription}, **errors(404)})
    async def get_subscription(
        request: Request,
        path: TopicOf,
        subscription: SubscriptionPath,
        _: NothingElse,
    ) -> Response:
        return answer(await call(request, "get_subscription", topic=path, subscription=subscription))

    @router.delete(SUBSCRIPTION, tags=["subscriptions"], **_DONE, responses=errors(404, 409))
    async def delete_subscription(
        request: Request,
        path: TopicOf,
        subscription: SubscriptionPath,
        query: Annotated[ForceQuery, Query()],
    ) -> Response:
        force = query.force == "true"
        await call(request, "delete_subscription", topic=path, subscription=subscription, force=force)
        return Response(status_code=204)

    @router.post(SUBSCRIPTION + "/seek", tags=["subscriptions"], **_DONE, responses=errors(404, 409))
    async def seek(
        request: Request,
        path: TopicOf,
        subscription: SubscriptionPath,
        query: Annotated[SeekQuery, Query()],
        body: Annotated[SeekBody | None, Body()] = None,
    ) -> Response:
        """To a time (`timestamp`), to one end (`to`) or to offsets (in the body): exactly one of these."""
        places = {
            "to": query.to,
            "timestamp": query.timestamp,
            "offsets": body.offsets if body is not None else None,
        }
        if sum(place is not None for place in places.values()) != 1:
            raise InvalidArgument(
                "a seek needs exactly one of ?timestamp= (milliseconds), ?to=earliest|latest and a body "
                'like {"offsets": {"0": 17}}'
            )
        await call(request, "seek_subscription", topic=path, subscription=subscription, **places)
        return Response(status_code=204)

    @router.post(SUBSCRIPTION + "/skip-all", tags=["subscriptions"], **_DONE, responses=errors(404, 409))
    async def skip_all(
        request: Request,
        path: TopicOf,
        subscription: SubscriptionPath,
        _: NothingElse,
    ) -> Response:
        await call(request, "skip_subscription", topic=path, subscription=subscription)
        return Response(status_code=204)

    @router.post(SUBSCRIPTION + "/skip", tags=["subscriptions"], **_DONE, responses=errors(404, 409))
    async def skip(
        request: Request,
        path: TopicOf,
        subscription: SubscriptionPath,
        query: Annotated[SkipQuery, Query()],
    ) -> Response:
        place = {"segment": query.segment, "count": query.count}
        await call(request, "skip_subscription", topic=path, subscription=subscription, **place)
        return Response(status_code=204)


def _add_layout(router: APIRouter, call: Call) -> None:
    changed: dict[str, Any] = {"tags": ["layout"], **_DONE, "responses": errors(404, 409, 412, 501)}

    @router.post(TOPIC + "/split/{segmentId}", **changed)
    async def split_segment(
        request: Request,
        path: TopicOf,
        segmentId: SegmentPath,  # noqa: N803  # PIP-468's name
        query: Annotated[SplitQuery, Query()],
    ) -> Response:
        await call(request, "split_segment", topic=path, segment=segmentId, at=query.at)
        return Response(status_code=204)

    @router.post(TOPIC + "/merge/{segmentId1}/{segmentId2}", **changed)
    async def merge_segments(
        request: Request,
        path: TopicOf,
        segmentId1: SegmentPath,  # noqa: N803
        segmentId2: SegmentPath,  # noqa: N803
        _: NothingElse,
    ) -> Response:
        await call(request, "merge_segments", topic=path, segments=[segmentId1, segmentId2])
        return Response(status_code=204)

    @router.post(TOPIC + "/repartition/{segments}", **changed)
    async def repartition_topic(
        request: Request,
        path: TopicOf,
        segments: SegmentCount,
        _: NothingElse,
    ) -> Response:
        await call(request, "repartition_topic", topic=path, segments=segments)
        return Response(status_code=204)

    @router.post(TOPIC + "/move", **changed)
    async def move_topic(
        request: Request,
        path: TopicOf,
        query: Annotated[MoveQuery, Query()],
    ) -> Response:
        await call(request, "move_topic", topic=path, segment=query.segment, to=query.to)
        return Response(status_code=204)

    @router.post(TOPIC + "/recover", tags=["layout"], responses={200: {"model": Recovered}, **errors(404, 409, 412)})
    async def recover_topic(
        request: Request,
        path: TopicOf,
        query: Annotated[RecoverQuery, Query()],
    ) -> Response:
        """Segments whose broker is gone continue on another one, without what only that broker's disk had."""
        result = await call(
            request,
            "recover_topic",
            topic=path,
            segment=query.segment,
            to=query.to,
            acceptLoss=query.accept_loss == "true",
        )
        return answer(result)

    scaling = TOPIC + "/autoScalePolicy"

    @router.get(scaling, tags=["layout"], responses={200: {"model": AutoScalePolicy}, **errors(404, 501)})
    async def get_auto_scale_policy(request: Request, path: TopicOf, _: NothingElse) -> Response:
        return answer(await call(request, "get_auto_scale_policy", topic=path))

    @router.put(scaling, **changed)
    async def set_auto_scale_policy(
        request: Request,
        path: TopicOf,
        _: NothingElse,
        policy: Annotated[AutoScalePolicy, Body()],
    ) -> Response:
        await call(request, "set_auto_scale_policy", topic=path, policy=policy.model_dump())
        return Response(status_code=204)

    @router.delete(scaling, **changed)
    async def delete_auto_scale_policy(request: Request, path: TopicOf, _: NothingElse) -> Response:
        await call(request, "delete_auto_scale_policy", topic=path)
        return Response(status_code=204)


def _add_segments(router: APIRouter, call: Call) -> None:
    def add(method: str, path: str, name: str) -> None:
        async def handler(
            request: Request,
            path: TopicOf,
            descriptor: DescriptorPath,
            _: NothingElse,
        ) -> Response:
            await call(request, name, topic=path, descriptor=descriptor)
            return Response(status_code=204)

        router.add_api_route(
            path, handler, methods=[method], name=name, tags=["segments"], responses=errors(404, 409, 412, 501), **_DONE
        )

    add("PUT", SEGMENT, "create_segment")
    add("DELETE", SEGMENT, "delete_segment")
    add("POST", SEGMENT + "/terminate", "terminate_segment")


def _add_cluster(router: APIRouter, call: Call) -> None:
    @router.get(BROKERS, tags=["cluster"], responses={200: {"model": list[Broker]}, **errors()})
    async def list_brokers(request: Request, _: NothingElse) -> Response:
        return answer(await call(request, "list_brokers"))

    @router.post(BROKERS + "/{broker}/drain", tags=["cluster"], **_DONE, responses=errors(404))
    async def drain_broker(request: Request, broker: BrokerPath, _: NothingElse) -> Response:
        await call(request, "drain_broker", broker=broker)
        return Response(status_code=204)

    @router.post(BROKERS + "/{broker}/activate", tags=["cluster"], **_DONE, responses=errors(404))
    async def activate_broker(request: Request, broker: BrokerPath, _: NothingElse) -> Response:
        await call(request, "activate_broker", broker=broker)
        return Response(status_code=204)

    @router.post(BROKERS + "/balance", tags=["cluster"], responses={200: {"model": BalancePlan}, **errors()})
    async def balance(request: Request, query: Annotated[BalanceQuery, Query()]) -> Response:
        """Begin the moves that even the load best; with `dryRun`, only say which these are."""
        return answer(await call(request, "balance", dryRun=query.dry_run == "true"))

    @router.get("/admin/v2/topology", tags=["cluster"], responses={200: {"model": Topology}, **errors()})
    async def topology(request: Request, _: NothingElse) -> Response:
        """What clients are told: which broker has which segment of which topic."""
        return answer(await call(request, "topology"))
