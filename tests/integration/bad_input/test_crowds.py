"""Clients that are silent, slow or many."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from braid.model.batch.header import verify
from braid.model.errors import BraidError, ConnectionLost, Overloaded
from braid.testing.processes import BRAID
from braid.wire.frame import PREFIX, Flags, encode_frame
from braid.wire.operations import (
    Assignment,
    Close,
    Join,
    Joined,
    Kind,
    Leave,
    Opened,
    PositionsRequest,
    Published,
    Topology,
    TopologyRequest,
    decode,
    encode,
)
from tests.kits.bad_input import MEGABYTES, a_batch, can_connect, joined, make_topic, survives
from tests.kits.raw_client import HELLO, RawClient, WatchedBroker, tracebacks
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import wait_until

pytestmark = pytest.mark.processes


SHORT: dict[str, Any] = {
    "hello_timeout_s": 0.5,
    "heartbeat_s": 0.6,
    "max_connections": 5,
    "max_channels": 3,
    "max_consumers": 10,
}


SOON_S = 15.0
"""Some three seconds, on a machine that has other things to do."""


@pytest.fixture(scope="module")
def running_short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchedBroker]:
    """With limits that are quickly reached."""
    settings: dict[str, Any] = {"limits": SHORT, "groups": {"session_grace_s": 0.1}}
    with WatchedBroker(tmp_path_factory.mktemp("broker"), **settings) as broker:
        yield broker
        broker.end()


@pytest.fixture
def short(running_short: WatchedBroker) -> Iterator[WatchedBroker]:
    yield from survives(running_short)


# ── silence, slowness and crowds ─────────────────────────────────────────────────────────────────────────────────────


def test_a_connection_without_a_hello_is_closed_in_time(short: WatchedBroker) -> None:
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(short.connect(hello=False)) for _ in range(3)]
        whole = encode_frame(Kind.HELLO, encode(HELLO), request=1)
        for client, data in zip(clients, (b"", b"\x10", whole[:-1]), strict=True):
            client.socket.sendall(data)
        for client in clients:
            assert isinstance(client.ended_with(), ConnectionLost)
    assert time.monotonic() - started < SOON_S


def test_half_a_frame_and_then_silence_is_closed_in_time(short: WatchedBroker) -> None:
    frame = encode_frame(Kind.PUBLISH, b"x" * 30, request=1, payload_bytes=1_000) + bytes(1_000)
    started = time.monotonic()
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(short.connect()) for _ in range(4)]
        for client, cut in zip(clients, (1, 16, 20, 500), strict=True):
            client.socket.sendall(frame[:cut])
        for client in clients:
            assert isinstance(client.ended_with(), ConnectionLost)
    assert time.monotonic() - started < SOON_S


def test_a_client_that_says_nothing_is_closed_and_one_that_pings_is_not(short: WatchedBroker) -> None:
    with short.connect() as silent, short.connect() as lively:
        assert silent.hello.heartbeat_ms == 600
        stop = threading.Event()

        def ping() -> None:
            while not stop.wait(0.2):
                lively.ping()

        pinging = threading.Thread(target=ping)
        pinging.start()
        try:
            reason = silent.ended_with()
        finally:
            stop.set()
            pinging.join()
        assert isinstance(reason, ConnectionLost)
        assert "no whole frame came" in str(reason)
        lively.ping()


def test_a_slow_loris_that_sends_a_byte_now_and_then_is_closed(short: WatchedBroker) -> None:
    with short.connect() as client:
        client.socket.sendall(PREFIX.pack(1_000_000, 0, 1, Kind.PUBLISH, 0, 0))
        started = time.monotonic()
        with contextlib.suppress(ConnectionError):
            while time.monotonic() - started < 2 * SOON_S:
                client.socket.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - started < SOON_S, "a byte is no sign of life"


def test_more_connections_than_the_limit_are_refused_with_a_reason(short: WatchedBroker) -> None:
    limit = SHORT["max_connections"]
    with contextlib.ExitStack() as stack:
        wait_until(lambda: short.open_sockets < 20, "earlier connections are gone")
        clients: list[RawClient] = []
        refused: BraidError | None = None
        for _ in range(limit + 1):
            try:
                clients.append(stack.enter_context(short.connect()))
            except Overloaded as error:
                refused = error
        assert len(clients) == limit
        assert refused is not None
        assert f"{limit} clients are connected" in str(refused)
        with short.connect(hello=False) as unannounced:
            assert isinstance(unannounced.ended_with(), Overloaded)
        clients[0].ping()
        clients[0].socket.close()
        wait_until(lambda: can_connect(short), "there is room again")


def test_more_channels_than_the_limit_are_refused(short: WatchedBroker) -> None:
    with short.connect() as client:
        topic = make_topic(client)
        for number in range(1, SHORT["max_channels"] + 1):
            client.ask(Kind.OPEN, topic.open(number), Opened)
        with pytest.raises(Overloaded, match="channels"):
            client.ask(Kind.OPEN, topic.open(50), Opened)
        client.reply(client.send(Kind.CLOSE, Close(1)))
        client.ask(Kind.OPEN, topic.open(51), Opened)


def test_more_consumers_than_the_limit_are_refused(short: WatchedBroker) -> None:
    with short.connect() as client:
        topic = make_topic(client)
        asked = [client.send(Kind.JOIN, Join(topic.path, "s", f"c{number}")) for number in range(300)]
        sessions: list[int] = []
        refused: list[str] = []
        for request in asked:
            try:
                sessions.append(decode(Joined, client.reply(request).body).session)
            except Overloaded as error:
                refused.append(str(error))
        assert (len(sessions), len(refused)) == (10, 290)
        assert "10 consumers have joined over this connection" in refused[0]
        client.reply(client.send(Kind.LEAVE, Leave(sessions[0])))
        client.ask(Kind.JOIN, Join(topic.path, "s", "next"), Joined)


def test_a_connection_may_ask_for_any_number_of_topics_but_not_for_a_million_at_once(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        paths = tuple(f"public/default/t-{number}" for number in range(4_000))
        for more in ("", "", "-more"):
            asked = tuple(path + more for path in paths)
            assert len(client.ask(Kind.TOPOLOGY, TopologyRequest(asked), Topology).topics) == 4_000
        started = time.monotonic()
        with pytest.raises(Overloaded):
            client.ask(Kind.TOPOLOGY, TopologyRequest(("a",) * 1_500_000), Topology)
        client.ping()
        assert time.monotonic() - started < 3, "a million names hold nobody up"


def test_a_client_that_floods_the_broker_with_requests_gets_every_answer(broker: WatchedBroker) -> None:
    """More requests than the limit at once: the broker stops reading for a while and drops nothing."""
    with broker.connect() as client:
        topic = make_topic(client)
        requests = [client.send(Kind.POSITIONS, PositionsRequest(topic.path)) for _ in range(6_000)]
        for request in requests:
            client.reply(request)


def test_a_thousand_connections_that_do_nothing_cost_little_and_disturb_nobody(broker: WatchedBroker) -> None:
    before = broker.resident_bytes
    with contextlib.ExitStack() as stack:
        idle = []
        for _ in range(1_000):
            idle.append(stack.enter_context(broker.connect(hello=False)))
            idle[-1].send(Kind.HELLO, HELLO)
        for client in idle:
            client.next_frame()
        with broker.connect() as client:
            topic = make_topic(client)
            started = time.monotonic()
            for offset in range(200):
                assert client.ask(Kind.PUBLISH, topic.route, Published, a_batch()).base_offset == offset
            assert time.monotonic() - started < SOON_S
        cost = (broker.resident_bytes - before) / len(idle)
        assert cost < 64 * 1024, f"an idle connection costs {cost:.0f} bytes"
    wait_until(lambda: broker.open_sockets < 50, "the sockets are closed")


def test_a_consumer_that_never_reads_costs_bounded_memory_and_disturbs_nobody(broker: WatchedBroker) -> None:
    """It grants all the credit there is and takes nothing, while 300 MB are published and read by another one."""
    batch = a_batch(b"x" * 1_000_000)
    count = 300
    with broker.connect() as stuck, broker.connect() as publisher, broker.connect() as reader:
        topic = make_topic(publisher)
        for number in range(1, 11):
            stuck.ask(Kind.OPEN, topic.open(number, credit=1 << 31), Opened)
        reader.ask(Kind.OPEN, topic.open(1, credit=1 << 31), Opened)
        before = broker.resident_bytes
        failures: list[BaseException] = []

        def publish() -> None:
            try:
                waiting = [publisher.send(Kind.PUBLISH, topic.route, batch) for _ in range(4)]
                for _ in range(count - 4):
                    publisher.reply(waiting.pop(0))
                    waiting.append(publisher.send(Kind.PUBLISH, topic.route, batch))
                for request in waiting:
                    publisher.reply(request)
            except BaseException as error:
                failures.append(error)

        publishing = threading.Thread(target=publish)
        publishing.start()
        offset, most = 0, 0
        while offset < count:
            payload = reader.push(Kind.DELIVER).payload
            assert payload is not None
            at = 0
            while at < len(payload):
                header = verify(payload, at)
                assert header.base_offset == offset
                offset = header.next_offset
                at += header.size
            most = max(most, broker.resident_bytes)
        publishing.join()
        assert failures == []
        assert most - before < 120 * MEGABYTES, f"memory grew by {(most - before) / MEGABYTES:.0f} MB"
        stuck_bytes = stuck.socket.recv(1 << 20)
        assert stuck_bytes, "it gets what waits for it when it reads at last"


def test_a_stuck_consumer_loses_its_segments_to_another(short: WatchedBroker) -> None:
    batch = a_batch(b"x" * 4_000_000)
    with short.connect() as stuck, short.connect() as other:
        topic = make_topic(other)
        stuck.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        held = joined(stuck, topic, "a")
        stuck.ask(Kind.OPEN, msgspec.structs.replace(topic.open_as(held), credit=1 << 31), Opened)
        for _ in range(10):
            other.ask(Kind.PUBLISH, topic.route, Published, batch)
        session = other.ask(Kind.JOIN, Join(topic.path, "s", "b", "earliest"), Joined).session
        stop = threading.Event()

        def ping() -> None:
            while not stop.wait(0.2):
                other.send(Kind.PING, request=0)

        pinging = threading.Thread(target=ping)
        pinging.start()
        try:
            while not (assignment := decode(Assignment, other.push(Kind.ASSIGN).body)).segments:
                pass
        finally:
            stop.set()
            pinging.join()
        assert assignment.session == session
        opened = other.ask(Kind.OPEN, topic.open_as(assignment), Opened)
        assert (opened.offset, opened.end) == (0, 10)


def test_a_publisher_that_never_reads_its_confirms_is_not_read_from_for_ever(broker: WatchedBroker) -> None:
    """Its confirms fill its buffers; then the broker stops reading from it, and others go on."""
    with broker.connect() as rude, broker.connect() as client:
        topic = make_topic(client)
        rude.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        rude.socket.settimeout(1.0)
        frame = encode_frame(Kind.POSITIONS, encode(PositionsRequest("x" * 2_000)), request=1)
        before = broker.resident_bytes
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 400 * MEGABYTES:
                sent += rude.socket.send(frame * 50)
        assert sent < 400 * MEGABYTES, "the broker went on reading"
        assert broker.resident_bytes - before < 50 * MEGABYTES
        for offset in range(50):
            assert client.ask(Kind.PUBLISH, topic.route, Published, a_batch()).base_offset == offset


def test_more_connections_than_files_end_neither_the_broker_nor_its_clients(tmp_path: Path) -> None:
    """With 128 files, 64 are for clients. A crowd of 600 comes faster than it can be refused."""
    few_files = ("prlimit", "--nofile=128:128", *BRAID)
    with WatchedBroker(tmp_path, braid=few_files) as broker, broker.connect() as healthy:
        assert "max_connections is 64 instead of 10000" in broker.log
        topic = make_topic(healthy)
        crowd = [socket.socket() for _ in range(600)]
        try:
            for each in crowd:
                each.setblocking(False)
                each.connect_ex(broker.address)
            for offset in range(100):
                assert healthy.ask(Kind.PUBLISH, topic.route, Published, a_batch()).base_offset == offset
            wait_until(lambda: broker.open_sockets > 60, "as many are let in as there is room for")
        finally:
            for each in crowd:
                each.close()
        wait_until(lambda: can_connect(broker), "there is room again")
        assert broker.running
        assert tracebacks(broker.log) == []
        broker.end()


# ── TLS ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_handshakes_that_fail_or_never_end_leave_nothing_behind(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    tls = {"certificate": str(certificate), "key": str(key)}
    broker = WatchedBroker(tmp_path, limits={"hello_timeout_s": 0.5, "max_connections": 10}, tls=tls)
    context = ssl.create_default_context(cafile=str(certificate))

    def answers() -> bool:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(broker.address, timeout=5) as plain,
            context.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
        ):
            wrapped.sendall(encode_frame(Kind.HELLO, encode(HELLO), request=1))
            prefix = wrapped.recv(16)
            return len(prefix) == 16 and prefix[13] == Flags.REPLY
        return False

    with broker:
        assert answers()
        for data in (b"GET / HTTP/1.1\r\n\r\n", encode_frame(Kind.HELLO, encode(HELLO), request=1), b"\x16\x03\x01"):
            for _ in range(10):
                with socket.create_connection(broker.address, timeout=5) as plain:
                    plain.sendall(data)
        with contextlib.ExitStack() as stack:
            for _ in range(9):
                stack.enter_context(socket.create_connection(broker.address, timeout=5))
            wait_until(answers, "those who began no handshake have made room")
        wait_until(answers, "the broker still takes connections")
        assert tracebacks(broker.log) == []
        broker.end()
