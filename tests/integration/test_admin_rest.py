"""The admin port of a real broker, over real HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import logging
import re
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from prometheus_client.parser import text_string_to_metric_families

from braid.admin import guard, server
from braid.broker.config import AuthConfig, Grant, TlsConfig
from braid.client.client import connect
from braid.model.errors import NotServing
from braid.wire.frame import PREFIX_BYTES
from tests.kits.admin import ORDERS, TOPICS, AdminBroker, admin_broker
from tests.kits.raw_client import RawClient
from tests.kits.tls_files import make_certificate

SECRET = "correct horse battery staple, and then some"
BILLING = f"{ORDERS}/subscriptions/billing"


@pytest.fixture(name="broker", scope="module")
def _broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminBroker]:
    with admin_broker(tmp_path_factory.mktemp("broker")) as broker:
        yield broker


@pytest.fixture(name="orders")
def _orders(broker: AdminBroker) -> Iterator[str]:
    """The topic `orders` with two segments; gone afterwards."""
    assert broker.ask("PUT", f"{ORDERS}?numInitialSegments=2").status == 201
    yield "public/default/orders"
    broker.ask("DELETE", f"{ORDERS}?force=true")


async def publish(address: Any, count: int) -> None:
    url = f"braid://{address.host}:{address.port}"
    async with connect(url) as client, client.producer("orders") as producer:
        await producer.send_many([(f"key-{number}".encode(), b"x" * 100) for number in range(count)])


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
    "a seek to a word": ("POST", f"{BILLING}/seek?to=middle", None),
    "a seek to a negative offset": ("POST", f"{BILLING}/seek", {"offsets": {"0": -1}}),
    "a seek of a segment that is no number": ("POST", f"{BILLING}/seek", {"offsets": {"zero": 1}}),
    "a seek without offsets": ("POST", f"{BILLING}/seek", {"offsets": {}}),
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


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", f"{ORDERS}/split/0", None),
        ("POST", f"{ORDERS}/split/0?at=8000", None),
        ("POST", f"{ORDERS}/merge/0/1", None),
        ("POST", f"{ORDERS}/repartition/4", None),
        ("GET", f"{ORDERS}/autoScalePolicy", None),
        ("PUT", f"{ORDERS}/autoScalePolicy", {"maxSegments": 4}),
        ("DELETE", f"{ORDERS}/autoScalePolicy", None),
        ("PUT", "/admin/v2/segments/public/default/orders/0000-ffff-0", None),
        ("DELETE", "/admin/v2/segments/public/default/orders/0000-ffff-0", None),
        ("POST", "/admin/v2/segments/public/default/orders/0000-ffff-0/terminate", None),
    ],
)
def test_what_comes_later_says_so(broker: AdminBroker, orders: str, method: str, path: str, body: Any) -> None:
    answer = broker.ask(method, path, body)
    assert (answer.status, answer.error) == (501, "not-available")


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


def test_a_queue_subscription_is_not_there_yet(broker: AdminBroker, orders: str) -> None:
    answer = broker.ask("PUT", f"{BILLING}?kind=queue")
    assert (answer.status, answer.error) == (501, "not-available")


# HTTP itself.


def test_unknown_paths_and_methods_are_said_in_the_same_form(broker: AdminBroker) -> None:
    unknown = broker.ask("GET", "/admin/v2/nothing")
    assert (unknown.status, unknown.error) == (404, "not-found")
    wrong = broker.ask("PATCH", ORDERS)
    assert (wrong.status, wrong.error) == (405, "method-not-allowed")
    assert wrong.headers["allow"] == "DELETE, GET, PUT"


def test_head_is_get_without_the_body(broker: AdminBroker) -> None:
    answer = broker.ask("HEAD", "/healthz")
    assert (answer.status, answer.body) == (200, b"")
    assert answer.headers["content-length"] == str(len(broker.ask("GET", "/healthz").body))


def test_a_body_above_the_limit_is_refused_however_it_comes(broker: AdminBroker) -> None:
    large = b'{"durability": "' + b"x" * guard.MAX_BODY_BYTES + b'"}'
    pieces = (large[start : start + 65536] for start in range(0, len(large), 65536))
    for raw in (large, pieces):
        answer = broker.ask("PUT", ORDERS, raw=raw, headers={"Content-Type": "application/json"})
        assert (answer.status, answer.error) == (413, "too-large")
    with socket.create_connection(broker.address, timeout=20) as connection:
        head = (
            f"PUT {ORDERS} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 99999999999\r\n\r\n"
        )
        connection.sendall(head.encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 413"), "it is refused before any of it is sent"


def test_a_connection_can_be_used_again_also_after_an_error(broker: AdminBroker) -> None:
    connection = http.client.HTTPConnection(*broker.address, timeout=20)
    for path, status in (("/healthz", 200), (ORDERS, 404), (f"{TOPICS}?x=1", 400), ("/readyz", 200)):
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == status
        response.read()
    connection.close()


def test_garbage_on_the_port_disturbs_nobody(broker: AdminBroker) -> None:
    for garbage in (b"\x00" * 1000, b"GET\r\n\r\n", b"GET / SMTP/1.1\r\n\r\n", b"x" * 100_000, b"\x16\x03\x01\x02\x00"):
        with socket.create_connection(broker.address, timeout=20) as connection:
            connection.sendall(garbage)
            connection.shutdown(socket.SHUT_WR)
            try:
                answer = connection.recv(1 << 16)
            except ConnectionResetError:
                answer = b""
            assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert broker.ask("GET", "/healthz").status == 200


def test_half_a_request_is_cut_off_after_a_while(broker: AdminBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "REQUEST_TIMEOUT_S", 0.2)
    halves = (
        b"",
        b"GET /hea",
        b"PUT " + ORDERS.encode() + b" HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{",
    )
    for half in halves:
        with socket.create_connection(broker.address, timeout=20) as connection:
            connection.sendall(half)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_too_many_connections_are_dropped(broker: AdminBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with (
        socket.create_connection(broker.address, timeout=20) as first,
        socket.create_connection(broker.address, timeout=20) as second,
        socket.create_connection(broker.address, timeout=20) as third,
    ):
        with contextlib.suppress(ConnectionResetError):
            assert third.recv(1) == b""
        for connection in (first, second):
            connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")


def test_too_many_requests_at_once_are_refused_but_not_those_of_monitoring(
    broker: AdminBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_REQUESTS", 0)
    answer = broker.ask("GET", TOPICS)
    assert (answer.status, answer.error, answer.headers["retry-after"]) == (503, "overloaded", "1")
    for path in ("/healthz", "/readyz", "/metrics"):
        assert broker.ask("GET", path).status == 200


def test_a_page_of_another_origin_changes_nothing(broker: AdminBroker, orders: str) -> None:
    for headers in ({"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}):
        answer = broker.ask("DELETE", ORDERS, headers=headers)
        assert (answer.status, answer.error) == (403, "permission-denied")
    assert broker.ask("GET", ORDERS, headers={"Host": "evil.example"}).status == 403
    assert broker.ask("GET", ORDERS, headers={"Host": "localhost"}).status == 200


def test_a_bug_is_answered_with_500_logged_once_and_shows_nothing(
    broker: AdminBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(*_: Any) -> Any:
        raise RuntimeError("a detail of ours")

    monkeypatch.setattr(broker.broker.calls, "call", broken)
    with caplog.at_level(logging.ERROR):
        answer = broker.ask("GET", TOPICS)
    assert (answer.status, answer.error) == (500, "error")
    assert b"detail" not in answer.body
    deadline = time.monotonic() + 20
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)  # it is logged behind the answer
    assert [record.name for record in caplog.records] == ["braid.admin.guard"]


# Health, pages, documents.


def test_health_and_readiness(broker: AdminBroker) -> None:
    assert broker.ask("GET", "/healthz").json == {"status": "alive"}
    assert broker.ask("GET", "/readyz").json == {"status": "ready"}
    broker.broker.ready = False
    try:
        answer = broker.ask("GET", "/readyz")
        assert (answer.status, answer.error, answer.json["retriable"]) == (503, "not-ready", True)
        assert broker.ask("GET", "/healthz").status == 200
    finally:
        broker.broker.ready = True


@pytest.mark.parametrize("path", ["/", "/docs"])
def test_pages_load_nothing_from_elsewhere(broker: AdminBroker, path: str) -> None:
    page = broker.ask("GET", path)
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    text = page.body.decode()
    for reference in re.findall(r"""(?:src|href|url)\s*[=:]\s*["']([^"']*)["']""", text):
        assert reference.startswith(("/", "data:,")), reference
        assert not reference.startswith("//")
        if reference.startswith("/"):
            loaded = broker.ask("GET", reference)
            assert loaded.status == 200, reference
            assert len(loaded.body) > 100
    policy = page.headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]


def test_the_openapi_document_names_every_path_of_the_interface(broker: AdminBroker) -> None:
    document = broker.ask("GET", "/openapi.json").json
    topic = "/admin/v2/scalable/{tenant}/{namespace}/{topic}"
    segment = "/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}"
    promised = {
        ("/admin/v2/scalable/{tenant}/{namespace}", "get"),
        *((topic, method) for method in ("put", "get", "delete")),
        (f"{topic}/stats", "get"),
        *((f"{topic}/subscriptions/{{subscription}}", method) for method in ("put", "delete")),
        (f"{topic}/subscriptions/{{subscription}}/seek", "post"),
        (f"{topic}/subscriptions/{{subscription}}/skip-all", "post"),
        (f"{topic}/split/{{segmentId}}", "post"),
        (f"{topic}/merge/{{segmentId1}}/{{segmentId2}}", "post"),
        (f"{topic}/move", "post"),
        *((f"{topic}/autoScalePolicy", method) for method in ("get", "put", "delete")),
        *((segment, method) for method in ("put", "delete")),
        (f"{segment}/terminate", "post"),
        ("/admin/v2/brokers", "get"),
        ("/admin/v2/brokers/{broker}/drain", "post"),
        ("/admin/v2/brokers/{broker}/activate", "post"),
        ("/admin/v2/brokers/balance", "post"),
        (f"{topic}/recover", "post"),
        ("/admin/v2/topology", "get"),
        ("/metrics", "get"),
        ("/healthz", "get"),
        ("/readyz", "get"),
    }
    written = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert promised <= written
    assert "422" not in json.dumps(document)
    assert "security" not in json.dumps(document)


# Metrics.


def test_metrics_count_the_traffic_of_connections_that_are_still_open(broker: AdminBroker) -> None:
    def received() -> float:
        families = text_string_to_metric_families(broker.ask("GET", "/metrics").body.decode())
        (sample,) = next(family.samples for family in families if family.name == "braid_network_receive_bytes")
        return sample.value

    with RawClient(broker.broker.address) as client:
        before = received()
        for _ in range(10):
            client.ping()
        assert received() == before + 10 * PREFIX_BYTES


def test_metrics_say_what_happened(broker: AdminBroker, orders: str) -> None:
    broker.ask("PUT", f"{BILLING}?start=earliest")
    broker.run(publish(broker.broker.address, 30))
    answer = broker.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}

    def total(name: str, **labels: str) -> float:
        samples = [sample for family in families.values() for sample in family.samples if sample.name == name]
        assert samples, name
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    assert total("braid_topic_publish_records_total", topic=orders) == 30
    assert total("braid_topic_publish_bytes_total", topic=orders) > 3_000
    assert total("braid_subscription_lag_records", topic=orders, subscription="billing") == 30
    assert total("braid_segment_end_offset", topic=orders) == 30
    assert total("braid_segment_earliest_offset", topic=orders) == 0
    assert total("braid_segment_log_bytes", topic=orders) > 3_000
    assert total("braid_segment_pending_bytes", topic=orders) == 0
    assert total("braid_segments_served") >= 2
    assert total("braid_segments_unavailable") == 0
    assert total("braid_publish_latency_seconds_count") >= 1
    assert total("braid_log_sync_seconds_count") >= 1
    assert total("braid_log_sync_seconds_sum") > 0
    assert total("braid_ready") == 1
    assert total("braid_admin_requests_total", method="PUT", status="201") >= 2
    assert total("braid_requests_total", operation="publish") >= 1
    assert total("braid_connections_accepted_total") >= 1
    assert total("braid_network_receive_bytes_total") > 3_000
    assert total("braid_cache_used_bytes") > 0
    assert total("process_resident_memory_bytes") > 0
    assert total("braid_metrics_omitted_series") == 0


UNITS = ("_seconds", "_bytes", "_records", "_info", "_offset")
COUNTS = {"braid_ready", "braid_topics", "braid_segments_served", "braid_segments_unavailable", "braid_connections",
          "braid_subscription_consumers", "braid_metrics_omitted_series", "braid_cluster_leader",
          "braid_cluster_segments_waiting"}  # fmt: skip


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_metrics_keep_the_rules_of_prometheus(broker: AdminBroker, orders: str, accept: str) -> None:
    text = broker.ask("GET", "/metrics", headers={"Accept": accept}).body.decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helped = set(re.findall(r"^# HELP (\S+) \S.*$", text, re.MULTILINE))
    ours = {name: kind for name, kind in kinds.items() if name.startswith("braid_")}
    assert len(ours) > 25
    for name, kind in ours.items():
        assert name in helped, f"{name} is not explained"
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert not re.search(r"_(ms|milliseconds|kb|kilobytes|minutes|percent|count|sum|bucket)(_|$)", name), name
        if kind == "counter":
            assert name.endswith("_total") or accept, name
        else:
            assert not name.endswith("_total"), name
            assert name.endswith(UNITS) or name in COUNTS, name
    values = re.findall(r"^(braid_[^ ]*) (\S+)$", text, re.MULTILINE)
    assert len({name for name, _ in values}) == len(values), "a series is there twice"


def test_metrics_are_bounded(broker: AdminBroker, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.ask("PUT", f"{TOPICS}/zebra")
    monkeypatch.setattr("braid.admin.metrics.MAX_SERIES", 15)  # two segments and seven counts
    text = broker.ask("GET", "/metrics").body.decode()
    broker.ask("DELETE", f"{TOPICS}/zebra")
    assert re.findall(r"^braid_(?:topic|segment|subscription)_.*zebra", text, re.MULTILINE) == []
    assert len(re.findall(r"^braid_(?:topic|segment|subscription)_.*orders", text, re.MULTILINE)) == 15
    assert re.findall(r"^braid_metrics_omitted_series (\S+)$", text, re.MULTILINE) == ["11.0"]


def test_a_deleted_topic_leaves_no_series(broker: AdminBroker) -> None:
    broker.ask("PUT", f"{TOPICS}/passing")
    assert b"passing" in broker.ask("GET", "/metrics").body
    broker.ask("DELETE", f"{TOPICS}/passing")
    assert b"passing" not in broker.ask("GET", "/metrics").body


def test_every_metric_is_documented(broker: AdminBroker, orders: str) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating" / "monitoring.md").read_text()
    named = set(re.findall(r"`(braid_\w+)`", page))
    for first, rest in re.findall(r"`(braid_topic_\w+?_)records_total`, `…_batches_total`, `…_(bytes_total)`", page):
        named |= {f"{first}batches_total", f"{first}{rest}"}
    text = broker.ask("GET", "/metrics").body.decode()
    shown = set(re.findall(r"^# TYPE (braid_\S+) ", text, re.MULTILINE))
    assert named == shown


# Tokens and TLS.


def token(**claims: Any) -> str:
    return jwt.encode({"sub": "ann", **claims}, SECRET, "HS256")


@pytest.fixture(name="guarded", scope="module")
def _guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AdminBroker]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret").write_text(SECRET)
    auth = AuthConfig(
        secret_file=str(folder / "secret"),
        superusers=("root",),
        grants=(Grant(role="shop", on="public/shop", allow=("admin",)),),
    )
    with admin_broker(folder, auth=auth) as broker:
        yield broker


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer "},
        {"Authorization": "Bearer not-a-token"},
        {"Authorization": "Basic YW5uOmFubg=="},
        {"Authorization": f"Bearer {token(exp=1)}"},
        {"Authorization": f"Bearer {jwt.encode({'sub': 'ann'}, 'another secret of at least 32 bytes', 'HS256')}"},
    ],
    ids=["nothing", "empty", "garbage", "basic", "expired", "forged"],
)
@pytest.mark.parametrize("path", [TOPICS, "/metrics", "/admin/v2/nothing", "/nothing", f"{TOPICS}?x=1"])
def test_without_a_valid_token_nothing_is_told(guarded: AdminBroker, path: str, headers: dict[str, str]) -> None:
    answer = guarded.ask("GET", path, headers=headers)
    assert (answer.status, answer.error) == (401, "unauthenticated")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert headers.get("Authorization", "nothing").split()[-1].encode() not in answer.body


def test_what_says_nothing_about_data_is_open(guarded: AdminBroker) -> None:
    for path in ("/healthz", "/readyz", "/", "/docs", "/docs/swagger-ui.css", "/openapi.json"):
        assert guarded.ask("GET", path).status == 200


def test_grants_decide_what_a_token_may_do(guarded: AdminBroker) -> None:
    shop, orders = token(roles=["shop"]), "/admin/v2/scalable/public/shop/orders"
    assert guarded.ask("PUT", orders, token=shop).status == 201
    assert guarded.ask("GET", orders, token=shop).status == 200
    for method, path in (("PUT", ORDERS), ("GET", "/admin/v2/brokers"), ("GET", "/admin/v2/topology")):
        answer = guarded.ask(method, path, token=shop)
        assert (answer.status, answer.error) == (403, "permission-denied")
    assert guarded.ask("GET", "/admin/v2/scalable/public/shop", token=shop).json == ["topic://public/shop/orders"]
    assert guarded.ask("GET", "/admin/v2/scalable/public/shop", token=token(roles=["other"])).json == []
    assert guarded.ask("GET", "/admin/v2/brokers", token=token(roles=["root"])).status == 200
    assert guarded.ask("GET", "/metrics", token=token(roles=["nothing"])).status == 200
    assert guarded.ask("DELETE", orders, token=shop).status == 204


def test_the_document_says_that_tokens_are_wanted(guarded: AdminBroker) -> None:
    document = guarded.ask("GET", "/openapi.json").json
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    assert document["paths"]["/admin/v2/brokers"]["get"]["security"] == [{"token": []}]
    assert "security" not in document["paths"]["/healthz"]["get"]


def test_the_admin_port_speaks_tls(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = TlsConfig(certificate=str(certificate), key=str(key))
    with admin_broker(tmp_path, admin_tls=tls) as broker:
        trust = ssl.create_default_context(cafile=str(certificate))
        assert broker.ask("GET", "/readyz", trust=trust).status == 200
        with pytest.raises(ssl.SSLCertVerificationError):
            broker.ask("GET", "/readyz", trust=ssl.create_default_context())
        with socket.create_connection(broker.address, timeout=20) as plain:
            plain.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(1 << 16).startswith(b"HTTP/1.1 200")


# Stopping.


def test_closing_lets_a_running_request_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with admin_broker(tmp_path) as broker:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def slow(*_: Any) -> Any:
            begun.set()
            await go_on.wait()
            raise NotServing("later")

        monkeypatch.setattr(broker.broker.calls, "call", slow)
        with socket.create_connection(broker.address, timeout=20) as connection:
            connection.sendall(f"GET {TOPICS} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())

            async def close() -> None:
                await begun.wait()
                closing = asyncio.ensure_future(broker.admin.close())
                await asyncio.sleep(0.1)
                assert not closing.done()
                go_on.set()
                await closing

            broker.run(close())
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"not-serving" in answer
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(broker.address, timeout=20)


def test_an_idle_admin_port_does_not_wake_up(broker: AdminBroker) -> None:
    async def timers() -> list[str]:
        waiting: Any = asyncio.get_running_loop()
        return [text for handle in waiting._scheduled if "uvicorn" in (text := repr(handle)) or "admin" in text]

    broker.ask("GET", "/healthz")
    deadline = time.monotonic() + 20
    while broker.run(timers()) and time.monotonic() < deadline:
        time.sleep(0.01)  # asyncio forgets cancelled timers when it gets round to it
    assert broker.run(timers()) == []
