"""Requests that are wrong, large, slow or many; pages, health and the OpenAPI document."""

from __future__ import annotations

import contextlib
import http.client
import json
import logging
import re
import socket
import time
from typing import Any

import pytest

from braid.admin import connections, guard
from tests.kits.admin import ORDERS, TOPICS, AdminBroker

# HTTP itself.


def test_unknown_paths_and_methods_are_said_in_the_same_form(broker: AdminBroker) -> None:
    unknown = broker.ask("GET", "/admin/v2/nothing")
    assert (unknown.status, unknown.error) == (404, "not-found")
    wrong = broker.ask("POST", ORDERS)
    assert (wrong.status, wrong.error) == (405, "method-not-allowed")
    assert wrong.headers["allow"] == "DELETE, GET, PATCH, PUT"


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


@pytest.mark.parametrize("piece", [1_000, 1 << 20], ids=["in pieces", "whole"])
def test_a_head_above_the_limit_is_refused_however_it_comes(broker: AdminBroker, piece: int) -> None:
    head = f"GET {ORDERS} HTTP/1.1\r\nHost: localhost\r\nX-Long: {'x' * 40_000}\r\n\r\n".encode()
    with socket.create_connection(broker.address, timeout=20) as connection:
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(head), piece):
                connection.sendall(head[start : start + piece])
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 431
        error = json.loads(response.read())
        assert (error["code"], error["retriable"]) == ("too-large", False)
        assert "32768 bytes" in error["message"]


def test_what_is_no_http_is_answered_in_the_same_form(broker: AdminBroker) -> None:
    with socket.create_connection(broker.address, timeout=20) as connection:
        connection.sendall(b"\0\1\2 nonsense\r\n\r\n" + bytes(10_000))
        response = http.client.HTTPResponse(connection)
        response.begin()
        assert response.status == 400
        assert json.loads(response.read())["code"] == "invalid-argument"


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
            refused = b"HTTP/1.1 431" if len(garbage) > guard.MAX_HEAD_BYTES else b"HTTP/1.1 400"
            assert answer == b"" or answer.startswith(refused)
    assert broker.ask("GET", "/healthz").status == 200


def test_half_a_request_is_cut_off_after_a_while(broker: AdminBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_TIMEOUT_S", 0.2)
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
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
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

    monkeypatch.setattr(broker.broker.front_door.calls, "call", broken)
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
    broker.broker.front_door.ready = False
    try:
        answer = broker.ask("GET", "/readyz")
        assert (answer.status, answer.error, answer.json["retriable"]) == (503, "not-ready", True)
        assert broker.ask("GET", "/healthz").status == 200
    finally:
        broker.broker.front_door.ready = True


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
        *((f"{topic}/replicas", method) for method in ("get", "put")),
        *((f"{topic}/autoScalePolicy", method) for method in ("get", "put", "delete")),
        *((segment, method) for method in ("put", "delete")),
        (f"{segment}/terminate", "post"),
        ("/admin/v2/brokers", "get"),
        ("/admin/v2/brokers/{broker}/drain", "post"),
        ("/admin/v2/brokers/{broker}/activate", "post"),
        ("/admin/v2/brokers/balance", "post"),
        (f"{topic}/recover", "post"),
        ("/admin/v2/topology", "get"),
        ("/admin/v2/changes", "get"),
        ("/metrics", "get"),
        ("/healthz", "get"),
        ("/readyz", "get"),
    }
    written = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert promised <= written
    assert "422" not in json.dumps(document)
    assert "security" not in json.dumps(document)
