"""The console's poller against a REST interface that is scripted: what it asks, and what it makes of the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import msgspec
import pytest

from braid.console.rest import Rest, RestError
from braid.console.watch.cluster_watch import MAX_WANTED, ClusterWatch

pytestmark = pytest.mark.real_loop


class Cluster:
    """Two brokers, of which one may be away, and their answers."""

    def __init__(self, topics: int = 1) -> None:
        self.paths = [f"public/default/topic-{number}" for number in range(topics)]
        self.away: set[str] = set()
        self.asked: list[str] = []
        self.forbidden = False
        self.end = 100

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if request.url.netloc.decode() in self.away:
            raise httpx.ConnectError("refused")
        if path in ("/admin/v2/brokers", "/admin/v2/topology") and self.forbidden:
            return httpx.Response(403, content=b'{"code":"permission-denied","message":"may not","retriable":false}')
        if path == "/metrics":
            lines = [f'braid_segment_end_offset{{segment="0",topic="{each}"}} {self.end}' for each in self.paths]
            return httpx.Response(200, text="\n".join(lines))
        found = self._found(path)
        return httpx.Response(200, content=msgspec.json.encode(found))

    def _found(self, path: str) -> Any:
        segment = {"segmentId": 0, "hashRange": {"start": 0, "end": 65535}}
        if path == "/admin/v2/brokers":
            return [
                {"id": id_, "address": f"{id_}:6660", "admin": f"{id_}:8660", "version": "1", "startedAt": 1,
                 "state": "active", "segments": 1, "replicas": 0, "labels": {}, "leader": id_ == "a", "load": None,
                 "obstacles": []}
                for id_ in ("a", "b")
            ]  # fmt: skip
        if path == "/admin/v2/topology":
            routed = segment | {"active": True, "parentIds": [], "childIds": [], "owner": "b:6660", "epoch": 1}
            return {"topics": [{"topic": each, "topicId": 1, "segments": [routed]} for each in self.paths]}
        if path == "/admin/v2/scalable/public/default":
            return [f"topic://{each}" for each in self.paths]
        if path.endswith("/layout"):
            return {"segments": {"0": segment | {"state": "ACTIVE"}}, "owners": {"0": "b"}, "transition": None}
        if path.endswith("/stats"):
            return {"segments": {"0": segment | {"replicas": [], "bytes": 7, "endOffset": 1}}, "subscriptions": {}}
        return []


def watching(cluster: Cluster) -> ClusterWatch:
    http = httpx.AsyncClient(transport=httpx.MockTransport(cluster.answer))
    return ClusterWatch(Rest(http, ["http://a:8660"]))


async def look(watch: ClusterWatch) -> None:
    watch.hurry()
    await watch.look()


async def test_a_broker_that_misses_two_probes_is_silent_and_its_segments_are_not_served() -> None:
    cluster = Cluster()
    watch = watching(cluster)
    await look(watch)
    assert {each.id: each.state for each in watch.view.brokers} == {"a": "active", "b": "active"}
    assert watch.view.topics[cluster.paths[0]].alarms == ()
    cluster.away = {"b:8660"}
    await look(watch)
    assert {each.id: each.state for each in watch.view.brokers} == {"a": "active", "b": "active"}, "one is no sign"
    await look(watch)
    await look(watch)
    assert {each.id: each.state for each in watch.view.brokers} == {"a": "active", "b": "silent"}
    assert watch.view.topics[cluster.paths[0]].alarms == ("1 of 1 segments are not served",)
    cluster.away = set()
    await look(watch)
    assert {each.state for each in watch.view.brokers} == {"active"}


async def test_traffic_is_made_of_how_fast_logs_grow() -> None:
    cluster = Cluster()
    watch = watching(cluster)
    await look(watch)
    history = watch.histories[cluster.paths[0]]
    assert history.rate(0) is None
    cluster.end = 10_100
    await asyncio.sleep(0.02)
    await look(watch)
    rate = history.rate(0)
    assert rate is not None
    assert rate > 1_000


async def test_every_topic_that_is_shown_gets_its_turn() -> None:
    cluster = Cluster(MAX_WANTED + 20)
    watch = watching(cluster)
    await look(watch)
    for path in cluster.paths:
        watch.want(path)
    await look(watch)
    assert len(watch.details) == MAX_WANTED
    await look(watch)
    assert set(watch.details) == set(cluster.paths)
    cluster.asked.clear()
    for path in cluster.paths:
        watch.unwant(path)
    await look(watch)
    assert not any(path.endswith("/stats") for path in cluster.asked)


async def test_a_token_that_may_not_see_the_cluster_gets_its_topics() -> None:
    cluster = Cluster()
    cluster.forbidden = True
    watch = watching(cluster)
    await look(watch)
    assert (watch.view.limited, watch.view.brokers, watch.view.error) == (True, (), "")
    (topic,) = watch.view.topics.values()
    assert [each.owner for each in topic.segments] == ["b"]


async def test_a_change_is_not_repeated_when_its_outcome_is_unknown() -> None:
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.netloc.decode())
        if request.url.netloc == b"a:1":
            raise httpx.ConnectError("refused")
        raise httpx.ReadTimeout("no answer")

    rest = Rest(httpx.AsyncClient(transport=httpx.MockTransport(answer)), ["http://a:1", "http://b:1", "http://c:1"])
    with pytest.raises(RestError, match="not known whether it was done"):
        await rest.call("POST", "/admin/v2/x")
    assert asked == ["a:1", "b:1"], "it was not sent to the first; the second may have done it"
    asked.clear()
    with pytest.raises(RestError, match="did not answer"):
        await rest.get("/admin/v2/x")
    assert asked == ["a:1", "b:1", "c:1"], "a read is asked of all"
