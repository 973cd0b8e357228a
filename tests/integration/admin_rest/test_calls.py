"""The calls of the REST interface."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.kits.admin import ORDERS, TOPICS, AdminBroker
from tests.kits.admin_rest import BILLING, publish

# Topics.


def test_a_topic_is_created_shown_listed_and_deleted(broker: AdminBroker) -> None:
    made = broker.ask("PUT", f"{ORDERS}?numInitialSegments=4", {"durability": "memory", "retentionMs": 60_000})
    assert made.status == 201
    assert made.json["epoch"] == 0
    assert made.json["nextSegmentId"] == 4
    assert made.json["segments"]["1"] == {
        "segmentId": 1,
        "hashRange": {"start": 16384, "end": 32767},
        "state": "ACTIVE",
        "parentIds": [],
        "childIds": [],
        "createdAtEpoch": 0,
        "sealedAtEpoch": 0,
    }
    assert made.json["policies"]["durability"] == "memory"
    assert made.json["policies"]["retentionMs"] == 60_000
    assert broker.ask("GET", ORDERS).json == made.json
    assert any("orders" in str(each) for each in broker.ask("GET", TOPICS).json)
    assert broker.ask("GET", "/admin/v2/scalable/public/other").json == []

    again = broker.ask("PUT", ORDERS)
    assert (again.status, again.error) == (409, "topic-exists")
    assert broker.ask("PUT", f"{ORDERS}?existOk=true").json == made.json
    changed = broker.ask("PATCH", ORDERS, {"retentionMs": None, "retentionBytes": 5})
    assert changed.status == 200
    assert changed.json["policies"] == made.json["policies"] | {"retentionMs": None, "retentionBytes": 5}
    assert broker.ask("PATCH", ORDERS).status == 400, "it needs a body"
    gone = broker.ask("DELETE", ORDERS)
    assert (gone.status, gone.body) == (204, b"")
    for answer in (broker.ask("GET", ORDERS), broker.ask("GET", f"{ORDERS}/stats"), broker.ask("DELETE", ORDERS)):
        assert (answer.status, answer.error) == (404, "topic-not-found")


def test_stats_show_segments_and_subscriptions(broker: AdminBroker, orders: str) -> None:
    broker.ask("PUT", f"{BILLING}?start=earliest")
    broker.run(publish(broker.broker.address, 20))
    stats = broker.ask("GET", f"{ORDERS}/stats").json
    assert sum(segment["records"] for segment in stats["segments"].values()) == 20
    assert stats["publishedRecords"] == 20
    assert stats["subscriptions"]["billing"]["backlog"] == 20
    assert stats["groups"] == {}


def test_readers_without_a_broker_are_told_where_a_topics_storage_is(broker: AdminBroker, orders: str) -> None:
    assert broker.ask("GET", f"{ORDERS}/storage").json == {"storage": ""}
    absent = broker.ask("GET", f"{ORDERS}-absent/storage")
    assert (absent.status, absent.error) == (404, "topic-not-found")


MALFORMED: dict[str, tuple[str, str, Any]] = {
    "a segment count of 0": ("PUT", f"{ORDERS}?numInitialSegments=0", None),
    "a segment count of words": ("PUT", f"{ORDERS}?numInitialSegments=many", None),
    "too many segments": ("PUT", f"{ORDERS}?numInitialSegments=100000", None),
    "a misspelt parameter": ("PUT", f"{ORDERS}?numInitialSegment=2", None),
    "a parameter where none is taken": ("GET", f"{TOPICS}?x=1", None),
    "an unknown policy": ("PUT", ORDERS, {"durabilty": "memory"}),
    "a policy of the wrong type": ("PUT", ORDERS, {"replicas": "1"}),
    "a policy of the wrong value": ("PUT", ORDERS, {"durability": "never"}),
    "a quorum above the replicas": ("PUT", ORDERS, {"replicas": 1, "writeQuorum": 2}),
    "a list as policies": ("PUT", ORDERS, [1]),
    "snake case": ("PUT", ORDERS, {"write_quorum": 1}),
    "a bad name": ("GET", f"{TOPICS}/-orders", None),
    "dots as a name": ("GET", f"{TOPICS}/..", None),
    "a name that is too long": ("GET", f"{TOPICS}/{'x' * 129}", None),
    "a line end in a name": ("GET", f"{TOPICS}/orders%0A", None),
    "a hash that is none": ("POST", f"{ORDERS}/split/0?at=xyz", None),
    "a negative segment": ("POST", f"{ORDERS}/split/-1", None),
    "a bad descriptor": ("DELETE", "/admin/v2/segments/public/default/orders/0-1-2", None),
    "a seek to nowhere": ("POST", f"{BILLING}/seek", None),
    "a seek to two places": ("POST", f"{BILLING}/seek?to=earliest&timestamp=5", None),
    "a seek to a negative time": ("POST", f"{BILLING}/seek?timestamp=-1", None),
    "a seek to seconds": ("POST", f"{BILLING}/seek?timestamp=1700000000", None),
    "a seek to microseconds": ("POST", f"{BILLING}/seek?timestamp=1700000000000000", None),
    "a seek to a word": ("POST", f"{BILLING}/seek?to=middle", None),
    "a seek to a negative offset": ("POST", f"{BILLING}/seek", {"offsets": {"0": -1}}),
    "a seek of a segment that is no number": ("POST", f"{BILLING}/seek", {"offsets": {"zero": 1}}),
    "a seek without offsets": ("POST", f"{BILLING}/seek", {"offsets": {}}),
    "a seek to an epoch alone": ("POST", f"{BILLING}/seek", {"epochs": {"0": 1}}),
    "a skip of nothing": ("POST", f"{BILLING}/skip?segment=0&count=0", None),
    "a skip of no segment": ("POST", f"{BILLING}/skip?count=1", None),
    "force that is neither": ("DELETE", f"{ORDERS}?force=perhaps", None),
}


@pytest.mark.parametrize(("method", "path", "body"), list(MALFORMED.values()), ids=list(MALFORMED))
def test_a_request_is_refused_with(broker: AdminBroker, method: str, path: str, body: Any) -> None:
    answer = broker.ask(method, path, body)
    assert (answer.status, answer.error) in ((400, "invalid-argument"), (400, "invalid-name"))


def test_json_that_is_none_is_refused(broker: AdminBroker) -> None:
    for raw in (b"{", b"\xff\xfe", b"[" * 100_000, b'{"durability": "memory"', b"NaN"):
        answer = broker.ask("PUT", ORDERS, raw=raw, headers={"Content-Type": "application/json"})
        assert (answer.status, answer.error) == (400, "invalid-argument")
    form = broker.ask("PUT", ORDERS, raw=b"durability=memory", headers={"Content-Type": "text/plain"})
    assert form.status == 400
    assert "application/json" in form.json["message"]
    assert broker.ask("GET", ORDERS).status == 404


def test_policies_of_auto_scaling_are_set_read_and_deleted(broker: AdminBroker, orders: str) -> None:
    for path in (f"{ORDERS}/autoScalePolicy", "/admin/v2/namespaces/public/default/autoScalePolicy"):
        assert broker.ask("PUT", path, {"maxSegments": 4, "splitCooldownSeconds": 5}).status == 204
        assert broker.ask("GET", path).json == {"maxSegments": 4, "splitCooldownSeconds": 5}
        assert broker.ask("PUT", path, {"minSegments": 2}).status == 204
        assert broker.ask("GET", path).json == {"minSegments": 2}, "PUT replaces"
        for wrong in ({"minSegments": 65}, {"maxSegments": 0}, {"maxSegmentz": 3}, {"maxSegments": None}, None):
            assert broker.ask("PUT", path, wrong).status == 400
        assert broker.ask("DELETE", path).status == 204
        assert broker.ask("GET", path).json == {}
    proposal = broker.ask("GET", f"{ORDERS}/autoScaleProposal").json
    assert (proposal["enabled"], proposal["action"], proposal["policy"]["maxSegments"]) == (False, None, 64)
    measured = broker.ask("GET", f"{ORDERS}/keyHashes").json
    assert measured["topic"] == "topic://public/default/orders"
    assert {each["hotKey"] for each in measured["segments"].values()} <= {False}
    absent = "/admin/v2/scalable/public/default/absent/autoScalePolicy"
    assert {broker.ask(method, absent, {}).status for method in ("GET", "PUT", "DELETE")} == {404}


def test_replicas_are_shown_and_set(broker: AdminBroker, orders: str) -> None:
    path = f"{ORDERS}/replicas"
    shown = broker.ask("GET", path).json
    assert (shown["replicas"], shown["writeQuorum"]) == (1, 1)
    assert {each["state"] for segment in shown["segments"].values() for each in segment["replicas"]} == {"owner"}
    same = broker.ask("PUT", path, {"replicas": 1, "writeQuorum": 1})
    assert (same.status, same.json) == (200, shown)
    for wrong in (
        {"replicas": 0},
        {"replicas": 8},
        {"replicas": 3},
        {"writeQuorum": 2},
        {"replica": 1},
        {"replicas": "1"},
    ):
        assert broker.ask("PUT", path, wrong).status == 400, wrong
    absent = "/admin/v2/scalable/public/default/absent/replicas"
    assert {broker.ask(method, absent, {}).status for method in ("GET", "PUT")} == {404}


def test_single_segments_are_ended_and_deleted_without_leaving_a_hole(broker: AdminBroker, orders: str) -> None:
    place = "/admin/v2/segments/public/default/orders"
    before = broker.ask("GET", f"{ORDERS}/layout").json
    (first, *_) = [each for each in before["segments"].values() if each["state"] == "ACTIVE"]
    hashes = f"{first['hashRange']['start']:04x}-{first['hashRange']['end']:04x}"
    segment = f"{place}/{hashes}-{first['segmentId']}"
    assert broker.ask("PUT", segment).status == 204, "it is there"
    assert broker.ask("PUT", segment, ["absent"]).status == 404
    assert broker.ask("PUT", f"{place}/{hashes}-999").status == 412
    assert broker.ask("DELETE", segment).status == 412
    assert [broker.ask("POST", f"{segment}/terminate").status for _ in range(2)] == [204, 204]
    after = broker.ask("GET", f"{ORDERS}/layout").json
    (child,) = after["segments"][str(first["segmentId"])]["childIds"]
    assert after["segments"][str(child)]["hashRange"] == first["hashRange"]
    assert broker.ask("POST", f"{place}/{hashes}-999/terminate").status == 404
    assert broker.ask("DELETE", f"{place}/{hashes}-999").status == 404


def test_the_layout_changes(broker: AdminBroker, orders: str) -> None:
    before = broker.ask("GET", f"{ORDERS}/layout").json
    count = len(before["segments"])
    changes = [f"{ORDERS}/split/0?at=1000", f"{ORDERS}/merge/{count}/{count + 1}", f"{ORDERS}/repartition/3"]
    assert [broker.ask("POST", change).status for change in changes] == [204, 204, 204]
    assert [broker.ask("POST", change).status for change in changes] == [204, 204, 204], "repeats change nothing"
    after = broker.ask("GET", f"{ORDERS}/layout").json
    assert (after["epoch"], after["transition"]) == (before["epoch"] + 3, None)
    assert sum(each["state"] == "ACTIVE" for each in after["segments"].values()) == 3
    answers = {
        path: (answer := broker.ask(method, path)).status * (answer.error is not None)
        for method, path in [
            ("POST", f"{ORDERS}/split/0"),
            ("POST", f"{ORDERS}/split/999"),
            ("POST", f"{ORDERS}/split/0?at=xyz"),
            ("POST", f"{ORDERS}/merge/0/{count}"),
            ("POST", f"{ORDERS}/repartition/0"),
            ("POST", f"{ORDERS}/repartition/70000"),
            ("DELETE", f"{ORDERS}/transition"),
        ]
    }
    assert list(answers.values()) == [412, 404, 400, 412, 400, 400, 412], answers


def test_segments_move_where_they_can(broker: AdminBroker, orders: str) -> None:
    here = broker.broker.id
    assert broker.ask("POST", f"{ORDERS}/move?segment=0&to={here}").status == 204
    assert broker.ask("POST", f"{ORDERS}/move").error == "move-refused"
    assert broker.ask("POST", f"{ORDERS}/move?to=broker-7").status == 404
    assert broker.ask("POST", f"{ORDERS}/move?segment=77").status == 404
    answer = broker.ask("POST", f"{ORDERS}/recover?acceptLoss=true")
    assert (answer.status, answer.error) == (409, "move-refused")


def test_brokers_are_drained_activated_and_balanced(broker: AdminBroker) -> None:
    here = broker.broker.id
    assert broker.ask("POST", f"/admin/v2/brokers/{here}/drain").status == 204
    (listed,) = broker.ask("GET", "/admin/v2/brokers").json
    assert listed["state"] in ("draining", "drained")
    assert broker.ask("POST", f"/admin/v2/brokers/{here}/activate").status == 204
    (listed,) = broker.ask("GET", "/admin/v2/brokers").json
    assert (listed["state"], listed["leader"]) == ("active", True)
    assert broker.ask("POST", "/admin/v2/brokers/nobody/drain").status == 404
    plan = broker.ask("POST", "/admin/v2/brokers/balance?dryRun=true").json
    assert (plan["dryRun"], plan["moves"]) == (True, [])


def test_brokers_and_topology_are_shown(broker: AdminBroker, orders: str) -> None:
    assert broker.broker.id in json.dumps(broker.ask("GET", "/admin/v2/brokers").json)
    assert orders in json.dumps(broker.ask("GET", "/admin/v2/topology").json)
    assert broker.ask("GET", "/admin/v2/changes").json == []


# Subscriptions.


def test_a_subscription_is_created_moved_skipped_and_deleted(broker: AdminBroker, orders: str) -> None:
    assert broker.ask("GET", f"{ORDERS}/subscriptions").json in ([], {})
    assert broker.ask("PUT", f"{BILLING}?start=earliest").status == 201
    again = broker.ask("PUT", BILLING)
    assert (again.status, again.error) == (409, "subscription-exists")
    assert "billing" in json.dumps(broker.ask("GET", f"{ORDERS}/subscriptions").json)
    before_ms = time.time_ns() // 1_000_000 - 1_000
    broker.run(publish(broker.broker.address, 40))

    def backlog() -> int:
        shown = broker.ask("GET", BILLING).json
        assert shown["backlog"] == sum(segment["backlog"] for segment in shown["segments"].values())
        return int(shown["backlog"])

    assert backlog() == 40
    assert broker.ask("POST", f"{BILLING}/skip-all").status == 204
    assert backlog() == 0
    assert broker.ask("POST", f"{BILLING}/seek?to=earliest").status == 204
    assert backlog() == 40
    assert broker.ask("POST", f"{BILLING}/seek?to=latest").status == 204
    assert backlog() == 0
    assert broker.ask("POST", f"{BILLING}/seek?timestamp={before_ms}").status == 204
    assert backlog() == 40
    assert broker.ask("POST", f"{BILLING}/skip?segment=0&count=3").status == 204
    assert backlog() == 37
    assert broker.ask("POST", f"{BILLING}/seek", {"offsets": {"0": 1}}).status == 204
    assert broker.ask("GET", BILLING).json["segments"]["0"]["offset"] == 1
    beyond = broker.ask("POST", f"{BILLING}/seek", {"offsets": {"0": 1_000}})
    assert (beyond.status, beyond.error) == (400, "invalid-argument")
    assert broker.ask("DELETE", BILLING).status == 204
    for answer in (
        broker.ask("GET", BILLING),
        broker.ask("POST", f"{BILLING}/skip-all"),
        broker.ask("DELETE", BILLING),
    ):
        assert (answer.status, answer.error) == (404, "subscription-not-found")
