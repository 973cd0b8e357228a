"""What a watch of a cluster keeps when brokers refuse its token, in part or at all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx

from braid.console.rest import Rest
from braid.console.watch.cluster_watch import ClusterWatch

RANGE = {"start": 0, "end": 0xFFFF}
Answers = dict[str, Any]


def broker(id_: str) -> Answers:
    return {
        "id": id_,
        "address": "127.0.0.1:1",
        "admin": "127.0.0.1:2",
        "version": "1",
        "startedAt": 1,
        "state": "active",
        "leader": True,
        "segments": 1,
        "replicas": 0,
        "load": None,
        "labels": {},
        "obstacles": [],
    }


def routed(topic: str) -> Answers:
    segment = {
        "segmentId": 0,
        "hashRange": RANGE,
        "active": True,
        "parentIds": [],
        "childIds": [],
        "owner": "127.0.0.1:1",
        "epoch": 1,
    }
    return {"topic": topic, "topicId": 7, "segments": [segment]}


def layout() -> Answers:
    return {"segments": {"0": {"segmentId": 0, "hashRange": RANGE, "state": "ACTIVE"}}, "owners": {"0": "a"}}


def cluster(*topics: str) -> Answers:
    """What an operator's token may ask."""
    return {
        "/admin/v2/brokers": [broker("a")],
        "/admin/v2/topology": {"topics": [routed(f"public/default/{each}") for each in topics]},
        "/admin/v2/changes": [{"topic": "public/default/salaries", "kind": "move"}],
    }


def limited(*topics: str) -> Answers:
    """What a token may ask that has rights on these topics alone."""
    layouts = {f"/admin/v2/scalable/public/default/{each}/layout": layout() for each in topics}
    names = [f"topic://public/default/{each}" for each in topics]
    return {"/admin/v2/scalable/public/default": names, **layouts}


class Brokers:
    """Answer REST calls from a table. Everything else is refused with `status`."""

    def __init__(self, answers: Answers) -> None:
        self.answers = answers
        self.status = 403
        self.gone = ""
        """What is answered by 404."""

    def watch(self) -> ClusterWatch:
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._answer))
        return ClusterWatch(Rest(http, ["http://127.0.0.1:2"], "token"))

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        if path in self.answers:
            return httpx.Response(200, json=self.answers[path])
        status = 404 if path == self.gone else self.status
        return httpx.Response(status, json={"code": "refused", "message": f"{path} is refused"})


async def look(watch: ClusterWatch) -> None:
    watch.hurry()
    await watch.look()


async def shown_after(change: Callable[[Brokers], None]) -> ClusterWatch:
    """Return a watch that has seen a whole cluster, after a change of what its token may do."""
    brokers = Brokers(cluster("orders", "salaries"))
    watch = brokers.watch()
    await look(watch)
    assert set(watch.view.topics) == {"public/default/orders", "public/default/salaries"}
    assert [each.id for each in watch.view.brokers] == ["a"]
    change(brokers)
    await look(watch)
    return watch


async def test_a_token_that_loses_rights_shows_no_more_than_it_may() -> None:
    def narrow(brokers: Brokers) -> None:
        brokers.answers = limited("orders")

    watch = await shown_after(narrow)
    assert watch.view.limited
    assert set(watch.view.topics) == set(watch.histories) == {"public/default/orders"}
    assert (watch.view.brokers, watch.view.changes) == ((), ())


async def test_a_token_that_ends_shows_nothing() -> None:
    def end(brokers: Brokers) -> None:
        brokers.answers, brokers.status = {}, 401

    watch = await shown_after(end)
    assert "refused" in watch.view.error
    assert (watch.view.topics, watch.histories, watch.view.brokers, watch.view.changes) == ({}, {}, (), ())


async def test_brokers_that_do_not_answer_leave_what_was_seen() -> None:
    def fail(brokers: Brokers) -> None:
        brokers.answers, brokers.status = {}, 503

    watch = await shown_after(fail)
    assert watch.view.error
    assert len(watch.view.topics) == 2


async def test_a_limited_token_forgets_topics_that_are_deleted() -> None:
    brokers = Brokers(limited("orders", "returns"))
    watch = brokers.watch()
    await look(watch)
    assert len(watch.view.topics) == 2
    brokers.answers = limited("orders")
    names = brokers.answers["/admin/v2/scalable/public/default"]
    brokers.answers["/admin/v2/scalable/public/default"] = [*names, "topic://public/default/returns"]
    brokers.gone = "/admin/v2/scalable/public/default/returns/layout"  # It goes after the list was made.
    await look(watch)
    assert set(watch.view.topics) == {"public/default/orders"}
