"""The console's poller against a REST interface that is scripted: what it asks, and what it makes of the answers."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import msgspec
import pytest

from braid.console.rest import Rest, RestError
from braid.console.watch.cluster_watch import MAX_WANTED, ClusterWatch
from braid.console.watch.history import EARLIER_STEP_S

pytestmark = pytest.mark.real_loop


class Cluster:
    """Two brokers, of which one may be away, and their answers."""

    def __init__(self, topics: int = 1) -> None:
        self.paths = [f"public/default/topic-{number}" for number in range(topics)]
        self.away: set[str] = set()
        self.asked: list[str] = []
        self.forbidden = False
        self.end = 100
        self.changes: list[Any] = []
        self.metrics = ""
        self.bytes: int | None = 7
        self.subscriptions: dict[str, Any] = {}

    def answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.asked.append(path)
        if request.url.netloc.decode() in self.away:
            raise httpx.ConnectError("refused")
        if path in ("/admin/v2/brokers", "/admin/v2/topology") and self.forbidden:
            return httpx.Response(403, content=b'{"code":"permission-denied","message":"may not","retriable":false}')
        if path == "/metrics":
            lines = [f'braid_segment_end_offset{{segment="0",topic="{each}"}} {self.end}' for each in self.paths]
            return httpx.Response(200, text="\n".join([*lines, self.metrics]))
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
        if path == "/admin/v2/changes":
            return self.changes
        if path == "/admin/v2/scalable/public/default":
            return [f"topic://{each}" for each in self.paths]
        if path.endswith("/layout"):
            return {"segments": {"0": segment | {"state": "ACTIVE"}}, "owners": {"0": "b"}, "transition": None}
        if path.endswith("/stats"):
            return {
                "segments": {"0": segment | {"replicas": [], "bytes": self.bytes, "endOffset": 1}},
                "subscriptions": self.subscriptions,
            }
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
    assert watch.view.topics[cluster.paths[0]].subscriptions == 0
    cluster.away = {"b:8660"}
    await look(watch)
    assert {each.id: each.state for each in watch.view.brokers} == {"a": "active", "b": "active"}, "one is no sign"
    await look(watch)
    await look(watch)
    assert {each.id: each.state for each in watch.view.brokers} == {"a": "active", "b": "silent"}
    assert watch.view.topics[cluster.paths[0]].alarms == ("1 of 1 segment not served",)
    cluster.away = set()
    await look(watch)
    assert {each.state for each in watch.view.brokers} == {"active"}


async def test_a_broker_that_hangs_is_silent_while_its_answers_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("braid.console.watch.cluster_watch.TICK_S", 0.01)
    cluster = Cluster()
    hung = asyncio.Event()

    async def answer(request: httpx.Request) -> httpx.Response:
        if hung.is_set() and request.url.host == "b":
            if request.url.path == "/readyz":
                raise httpx.ReadTimeout("no answer")
            await asyncio.Event().wait()
        return cluster.answer(request)

    watch = ClusterWatch(Rest(httpx.AsyncClient(transport=httpx.MockTransport(answer)), ["http://a:8660"]))
    watch.start()
    try:
        await watch.first_look()
        hung.set()
        async with asyncio.timeout(5):
            while {each.id: each.state for each in watch.view.brokers} != {"a": "active", "b": "silent"}:
                watch.hurry()
                await asyncio.sleep(0.01)
    finally:
        await watch.close()


async def test_what_metrics_and_changes_show_of_a_topic_are_its_alarms() -> None:
    cluster = Cluster(topics=2)
    watch = watching(cluster)
    path, other = cluster.paths
    cluster.metrics = f'braid_replica_in_sync{{follower="c",segment="0",topic="{path}"}} 0'
    change = {"kind": "layout", "topic": path, "segments": [0], "children": [1, 2], "step": "SEALING", "since": 1}
    cluster.changes = [change]
    await look(watch)
    of_change, of_copies = watch.view.topics[path].alarms
    assert of_change.startswith("a change of its layout waits for ")
    assert of_copies == "1 copy behind"
    assert watch.view.topics[other].alarms == ()
    cluster.forbidden = True
    await look(watch)
    assert watch.view.topics[path].alarms == (), "this token may not see them any more"


async def test_a_topic_that_is_created_while_the_console_watches_has_no_time_before() -> None:
    cluster = Cluster()
    watch = watching(cluster)
    await look(watch)
    cluster.paths.append("public/default/new")
    await look(watch)
    old, new = (watch.histories[path] for path in cluster.paths)
    assert (old.watched_since > 0, new.watched_since) == (True, 0.0)
    (strand,) = new.strands()
    assert (strand.timed, old.strands()[0].timed) == (True, False)
    assert time.time() - strand.born < EARLIER_STEP_S
    # After a look that failed, a new topic may be as old as the last one that did not.
    cluster.away = {"a:8660", "b:8660"}
    await look(watch)
    cluster.away = set()
    cluster.paths.append("public/default/unknown")
    await look(watch)
    assert watch.histories["public/default/unknown"].watched_since > 0


async def test_a_topic_that_no_broker_tells_the_size_of_has_none() -> None:
    cluster = Cluster()
    watch = watching(cluster)
    (path,) = cluster.paths
    watch.want(path)
    await look(watch)
    assert watch.view.topics[path].stored_bytes == 7
    cluster.bytes = None
    await look(watch)
    assert watch.view.topics[path].stored_bytes is None


async def test_brokers_are_asked_in_turn_and_those_that_do_not_answer_last() -> None:
    cluster = Cluster()
    asked: list[str] = []

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/admin/v2/topology":
            asked.append(request.url.host)
        return cluster.answer(request)

    watch = ClusterWatch(Rest(httpx.AsyncClient(transport=httpx.MockTransport(answer)), ["http://a:8660"]))
    for _ in range(5):
        await look(watch)
    assert asked == ["a", "b", "a", "b", "a"]
    cluster.away = {"b:8660"}
    for _ in range(5):
        await look(watch)
    assert asked[-3:] == ["a", "a", "a"]


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
    assert watch.details == {}, "another page would show them as if they were of now"


async def test_an_answer_about_a_topic_that_no_page_shows_any_more_is_dropped() -> None:
    cluster = Cluster()
    path = cluster.paths[0]

    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path.endswith("/stats"):
            watch.unwant(path)
        return cluster.answer(request)

    watch = ClusterWatch(Rest(httpx.AsyncClient(transport=httpx.MockTransport(answer)), ["http://a:8660"]))
    await look(watch)
    watch.want(path)
    await look(watch)
    assert watch.details == {}


async def test_a_token_that_may_not_see_the_cluster_gets_its_topics() -> None:
    cluster = Cluster()
    cluster.forbidden = True
    watch = watching(cluster)
    await look(watch)
    assert (watch.view.limited, watch.view.brokers, watch.view.error) == (True, (), "")
    (topic,) = watch.view.topics.values()
    assert [each.owner for each in topic.segments] == ["b"]
    assert (topic.subscriptions, topic.backlog) == (None, None), "nobody has said yet that there are none"
    cluster.subscriptions = {"billing": {"backlog": 5}, "mails": {"backlog": 8}}
    watch.want(cluster.paths[0])
    await look(watch)
    (topic,) = watch.view.topics.values()
    assert (topic.subscriptions, topic.backlog) == (2, 8)


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
