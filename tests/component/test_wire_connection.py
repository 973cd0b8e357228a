"""One connection: what it writes and when, what it does when it ends, and what a slow peer costs."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from braid.model.errors import BraidError, ConnectionLost, FrameTooLarge, Overloaded, ProtocolError
from braid.ports.network import SocketNetwork
from braid.testing.sim.loop import Simulation, run_simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.connection import (
    CLOSE_TIMEOUT_S,
    GATHER_BYTES,
    JOIN_BYTES,
    WRITE_HIGH_WATER_BYTES,
    Connection,
)
from braid.wire.frame import FIRST_FRAME_BYTES, PREFIX, Flags, Frame, FrameReader, encode_frame
from braid.wire.operations import ErrorBody, decode, error_from
from tests.kits.tls_files import make_certificate
from tests.kits.wire import Recorder, RecordingTransport

OVER = ConnectionLost("that is enough")


def frames_in(data: bytes) -> list[Frame]:
    reader = FrameReader()
    found: list[Frame] = []
    while data:
        room = reader.buffer()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        found += reader.received(size)
        data = data[size:]
    return found


pytestmark = pytest.mark.seed(0)


def recorded() -> tuple[Recorder, RecordingTransport]:
    """Return a connection whose writes are recorded."""
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.connection_made(transport)
    return handler, transport


def with_transport(check: Callable[[Recorder, RecordingTransport], Awaitable[None]]) -> None:
    """Run a check on a connection whose writes are recorded, in virtual time."""

    async def main(simulation: Simulation) -> None:
        await check(*recorded())

    run_simulation(0, main)


# ── what is written, and when ────────────────────────────────────────────────────────────────────────────────────────


async def test_frames_of_one_turn_leave_in_one_write() -> None:
    handler, transport = recorded()
    for number in range(1, 101):
        handler.connection.send(2, b"body", request=number)
    assert transport.written == []
    await asyncio.sleep(0)
    assert len(transport.written) == 1
    assert [frame.request for frame in frames_in(transport.data)] == list(range(1, 101))
    assert handler.connection.sent_bytes == len(transport.data)


async def test_queued_frames_wait_for_the_flush_and_keep_their_place_among_the_others() -> None:
    handler, transport = recorded()
    connection = handler.connection
    connection.cork()
    connection.queue(encode_frame(2, b"first", request=1))
    connection.send(2, b"second", request=2)
    connection.queue(encode_frame(2, b"third", request=3))
    await asyncio.sleep(0)
    assert transport.written == []
    connection.flush()
    assert len(transport.written) == 1
    assert [frame.request for frame in frames_in(transport.data)] == [1, 2, 3]
    assert connection.sent_bytes == len(transport.data)
    connection.close(OVER)
    connection.queue(encode_frame(2, b"late"))
    connection.flush()
    assert len(transport.written) == 1


async def test_large_payloads_are_written_by_themselves_and_in_order() -> None:
    handler, transport = recorded()
    small, large = b"s" * JOIN_BYTES, b"l" * (JOIN_BYTES + 1)
    handler.connection.send(1, b"a")
    handler.connection.send(2, b"bc", [small, b"", large, memoryview(small)])
    handler.connection.send(3, b"d")
    handler.connection.flush()
    assert large in transport.written, "not joined with its neighbours"
    assert len(transport.written) == 3
    first, second, third = frames_in(transport.data)
    assert (first.kind, second.kind, third.kind) == (1, 2, 3)
    assert bytes(second.payload or b"") == small + large + small


async def test_many_bytes_leave_at_once_so_that_congestion_shows_before_the_next_sender_looks() -> None:
    handler, transport = recorded()
    handler.connection.send(1, b"", [b"p" * (GATHER_BYTES - 1)])
    assert transport.written == []
    handler.connection.send(2)
    assert transport.written == []
    handler.connection.send(3, b"x")
    assert [frame.kind for frame in frames_in(transport.data)] == [1, 2, 3]


async def test_an_empty_payload_is_a_frame_without_one() -> None:
    handler, transport = recorded()
    handler.connection.send(1, b"abc", [b""])
    handler.connection.flush()
    (frame,) = frames_in(transport.data)
    assert (frame.body, frame.payload) == (b"abc", None)


async def test_what_is_sent_before_the_connection_is_made_is_written_when_it_is() -> None:
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.send(1, b"", [b"p" * GATHER_BYTES])
    handler.connection.send(2, b"early")
    await asyncio.sleep(1)
    handler.connection.connection_made(transport)
    assert [frame.kind for frame in frames_in(transport.data)] == [1, 2]


async def test_a_connection_that_is_refused_before_it_is_made_says_why_and_closes() -> None:
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.refuse(Overloaded("too many of you"))
    handler.connection.connection_made(transport)
    (frame,) = frames_in(transport.data)
    assert (frame.request, frame.flags) == (0, Flags.REPLY | Flags.ERROR)
    assert isinstance(error_from(decode(ErrorBody, frame.body)), Overloaded)
    assert transport.ended == ["closed"]
    handler.connection.connection_lost(None)
    assert [error.code for error in handler.lost] == ["overloaded"]


async def test_a_connection_that_is_given_up_before_it_is_made_is_over_at_once_for_its_handler() -> None:
    refused, aborted = Recorder(), Recorder()
    refused.connection.refuse(OVER)
    aborted.connection.abort(OVER)
    assert refused.lost == aborted.lost == [OVER]


async def test_a_connection_that_is_aborted_before_it_is_made_is_closed_when_it_is() -> None:
    handler, transport = Recorder(), RecordingTransport()
    handler.connection.send(1)
    handler.connection.abort(OVER)
    handler.connection.connection_made(transport)
    assert transport.written == []
    assert transport.ended == ["closed"]


async def test_a_request_without_an_id_gets_no_reply_and_no_error() -> None:
    handler, transport = recorded()
    handler.connection.reply(Frame(44, 0, 0, b"", None))
    handler.connection.reply_error(44, 0, Overloaded("no"))
    handler.connection.flush()
    assert transport.written == []
    handler.connection.reply(Frame(44, 0, 5, b"", None), b"yes")
    handler.connection.reply_error(45, 6, Overloaded("no"))
    handler.connection.flush()
    answers = [(frame.kind, frame.request, frame.flags) for frame in frames_in(transport.data)]
    assert answers == [(44, 5, Flags.REPLY), (45, 6, Flags.REPLY | Flags.ERROR)]


# ── ending ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_closing_writes_what_is_queued_and_takes_nothing_more() -> None:
    handler, transport = recorded()
    handler.connection.send(1, b"last words")
    handler.connection.close(OVER)
    handler.connection.send(2, b"too late")
    handler.connection.close(ConnectionLost("again"))
    await asyncio.sleep(0)
    assert [frame.kind for frame in frames_in(transport.data)] == [1]
    assert transport.ended == ["closed"]
    assert handler.lost == [], "it is over when the transport says so"
    handler.connection.connection_lost(None)
    assert handler.lost == [OVER]


def test_aborting_drops_what_is_queued_also_while_closing() -> None:
    async def check(handler: Recorder, transport: RecordingTransport) -> None:
        handler.connection.send(1, b"never")
        handler.connection.abort(OVER)
        await asyncio.sleep(0)
        assert transport.written == []
        handler.connection.connection_lost(None)
        assert handler.lost == [OVER]

    with_transport(check)

    async def closing(handler: Recorder, transport: RecordingTransport) -> None:
        handler.connection.close(OVER)
        handler.connection.abort(ConnectionLost("now"))
        assert transport.ended == ["closed", "aborted"]
        assert handler.connection.end_reason() is OVER

    with_transport(closing)


def test_a_peer_that_does_not_take_what_is_left_is_aborted_after_a_while() -> None:
    async def check(handler: Recorder, transport: RecordingTransport) -> None:
        handler.connection.close(OVER)
        await asyncio.sleep(CLOSE_TIMEOUT_S - 0.01)
        assert transport.ended == ["closed"]
        await asyncio.sleep(0.02)
        assert transport.ended == ["closed", "aborted"]

    with_transport(check)

    async def taken(handler: Recorder, transport: RecordingTransport) -> None:
        handler.connection.close(OVER)
        handler.connection.connection_lost(None)
        await asyncio.sleep(2 * CLOSE_TIMEOUT_S)
        assert transport.ended == ["closed"]

    with_transport(taken)


async def test_the_peers_end_of_the_stream_closes_the_connection() -> None:
    handler, _transport = recorded()
    assert not handler.connection.eof_received()
    assert handler.connection.closing
    handler.connection.connection_lost(None)
    assert [str(error) for error in handler.lost] == ["[::1]:7 closed the connection"]


async def test_a_lost_connection_says_why_once() -> None:
    handler, transport = recorded()
    handler.connection.send(1)
    handler.connection.connection_lost(OSError("cable pulled"))
    await asyncio.sleep(0)
    assert transport.written == []
    assert [str(error) for error in handler.lost] == ["the connection to [::1]:7 was lost: cable pulled"]


async def test_an_error_of_the_handler_is_told_to_the_peer_and_ends_the_connection() -> None:
    handler, transport = recorded()

    def refuse(frame: Frame) -> None:
        raise ProtocolError("not like this")

    handler.on_frame = refuse
    arrive(handler.connection, encode_frame(1) + encode_frame(2))
    (frame,) = frames_in(transport.data)
    assert (frame.kind, frame.request, frame.flags) == (0, 0, Flags.REPLY | Flags.ERROR)
    assert str(error_from(decode(ErrorBody, frame.body))) == "not like this"
    assert transport.ended == ["closed"]
    assert len(handler.frames) == 1
    arrive(handler.connection, encode_frame(3))
    assert len(handler.frames) == 1, "what comes after the end is not looked at"


async def test_bytes_that_are_no_frame_are_answered_with_the_reason() -> None:
    handler, transport = Recorder(), RecordingTransport()
    connection = Connection(handler)
    handler.connection = connection
    connection.connection_made(transport)
    arrive(connection, PREFIX.pack(FIRST_FRAME_BYTES + 1, 0, 0, 1, 0, 0))
    (frame,) = frames_in(transport.data)
    assert isinstance(error_from(decode(ErrorBody, frame.body)), FrameTooLarge)
    assert transport.ended == ["closed"]


def arrive(connection: Connection, data: bytes) -> None:
    room = connection.get_buffer(-1)
    room[: len(data)] = data
    connection.buffer_updated(len(data))


async def test_those_who_wait_for_room_are_told_when_the_connection_ends() -> None:
    handler, _transport = recorded()
    handler.connection.pause_writing()
    waiters = [asyncio.create_task(handler.connection.drained()) for _ in range(3)]
    await asyncio.sleep(0)
    waiters[0].cancel()
    await asyncio.sleep(0)
    handler.connection.abort(OVER)
    done = await asyncio.gather(*waiters, return_exceptions=True)
    assert isinstance(done[0], asyncio.CancelledError)
    assert [str(error) for error in done[1:]] == ["that is enough"] * 2
    assert done[1] is not done[2], "each gets an error of its own"
    with pytest.raises(ConnectionLost):
        await handler.connection.drained()


# ── over a network ───────────────────────────────────────────────────────────────────────────────────────────────────


class Ends:
    """Two ends of one connection over a simulated network."""

    near: Recorder
    far: Recorder

    @classmethod
    async def connect(cls, simulation: Simulation) -> Ends:
        network = SimulatedNetwork(simulation.random)
        ends = cls()
        ends.near, ends.far = Recorder(), Recorder()
        await network.host("far").listen("far", 1, lambda: ends.far.connection)
        await network.host("near").connect("far", 1, lambda: ends.near.connection)
        return ends


@pytest.mark.parametrize("seed", range(5))
async def test_frames_of_all_sizes_arrive_in_order_both_ways(seed: int, simulation: Simulation) -> None:
    ends = await Ends.connect(simulation)
    sizes = [simulation.random.choice([0, 1, 100, 5_000, 20_000, 200_000]) for _ in range(40)]

    async def talk(speaker: Recorder) -> None:
        for number, size in enumerate(sizes, 1):
            await speaker.connection.drained()
            speaker.connection.send(7, b"b" * (number % 9), [bytes([number]) * size], request=number)

    await asyncio.gather(talk(ends.near), talk(ends.far))
    for hearer in (ends.near, ends.far):
        await hearer.until(lambda hearer=hearer: len(hearer.frames) == len(sizes))  # type: ignore[misc]
        for number, (size, frame) in enumerate(zip(sizes, hearer.frames, strict=True), 1):
            assert (frame.request, frame.body) == (number, b"b" * (number % 9))
            assert bytes(frame.payload or b"") == bytes([number]) * size


async def test_many_senders_exceed_the_high_water_mark_by_one_frame_together(simulation: Simulation) -> None:
    ends = await Ends.connect(simulation)
    await ends.far.until(lambda: ends.far.connection.heard_at >= 0 and ends.far.changed.is_set())
    ends.far.connection.pause_reading()
    size, senders = 256 << 10, 100
    most = 0

    async def send() -> None:
        nonlocal most
        await ends.near.connection.drained()
        ends.near.connection.send(1, b"", [b"p" * size])
        most = max(most, ends.near.connection.waiting_bytes)

    tasks = [asyncio.create_task(send()) for _ in range(senders)]
    await asyncio.sleep(10)
    assert most <= WRITE_HIGH_WATER_BYTES + size + GATHER_BYTES
    ends.far.connection.resume_reading()
    await asyncio.gather(*tasks)
    await ends.far.until(lambda: len(ends.far.frames) == senders)
    assert most <= WRITE_HIGH_WATER_BYTES + size + GATHER_BYTES
    assert ends.near.congestion[:2] == [True, False]


@pytest.mark.parametrize("seed", range(5))
async def test_two_congested_ends_do_not_wait_for_each_other(seed: int, simulation: Simulation) -> None:
    """The broker stops reading while it cannot write; the client goes on reading, so the broker can write again."""
    ends = await Ends.connect(simulation)
    client, broker = ends.near, ends.far
    requests, size = 150, 100_000
    was_paused = False

    def answer(frame: Frame) -> None:
        broker.connection.send(frame.kind, b"", [b"r" * 3 * size], request=frame.request, flags=Flags.REPLY)

    def obey(congested: bool) -> None:
        nonlocal was_paused
        was_paused = was_paused or congested
        if congested:
            broker.connection.pause_reading()
        else:
            broker.connection.resume_reading()

    broker.on_frame = answer
    broker.on_congestion = obey  # type: ignore[method-assign]
    for number in range(1, requests + 1):
        client.connection.send(16, b"", [b"q" * size], request=number)
    assert client.connection.congested
    await client.until(lambda: len(client.frames) == requests)
    assert [frame.request for frame in client.frames] == list(range(1, requests + 1))
    assert was_paused, "both ends were congested"


@pytest.mark.real_loop(timeout_s=30)
async def test_over_tcp_large_and_small_frames_arrive_and_a_close_is_noticed() -> None:
    network, far, near = SocketNetwork(), Recorder(), Recorder()
    listener = await network.listen("127.0.0.1", 0, lambda: far.connection)
    await network.connect(*listener.address, lambda: near.connection)
    payload = bytes(range(256)) * 20_000
    far.on_frame = lambda frame: far.connection.send(9, b"", [frame.payload or b""], request=frame.request)
    for number in range(1, 4):
        near.connection.send(1, b"", [payload], request=number)
        near.connection.send(2, b"small", request=number)
    await near.until(lambda: len(near.frames) == 6)
    assert [bytes(frame.payload or b"") for frame in near.frames] == [payload, b""] * 3
    assert near.connection.received_bytes == far.connection.sent_bytes
    near.connection.close(OVER)
    await near.until(lambda: near.lost)
    await far.until(lambda: far.lost)
    assert near.lost == [OVER]
    assert [error.code for error in far.lost] == ["connection-lost"]
    await listener.close()


@pytest.mark.real_loop(timeout_s=30)
async def test_over_tcp_closing_to_a_peer_that_never_reads_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("braid.wire.connection.CLOSE_TIMEOUT_S", 0.2)
    network, far = SocketNetwork(), Recorder()
    listener = await network.listen("127.0.0.1", 0, lambda: far.connection)
    loop = asyncio.get_running_loop()
    with socket.socket() as peer:
        peer.setblocking(False)
        await loop.sock_connect(peer, tuple(listener.address))
        await far.until(lambda: far.changed.is_set())
        while not far.connection.congested:
            far.connection.send(1, b"", [b"p" * (1 << 20)])
        far.connection.close(OVER)
        await far.until(lambda: far.lost)
    await listener.close()


def tls_networks(folder: Path) -> SocketNetwork:
    certificate, key = make_certificate(folder)
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(certificate, key)
    return SocketNetwork(client_tls=ssl.create_default_context(cafile=str(certificate)), server_tls=server)


@pytest.mark.real_loop(timeout_s=30)
async def test_over_tls_frames_arrive_and_garbage_is_refused(tmp_path: Path) -> None:
    network, far, near = tls_networks(tmp_path), Recorder(), Recorder()
    listener = await network.listen("127.0.0.1", 0, lambda: far.connection)
    await network.connect(*listener.address, lambda: near.connection)
    payload = bytes(range(256)) * 8_000
    far.on_frame = lambda frame: far.connection.send(9, b"", [frame.payload or b""], request=frame.request)
    near.connection.send(1, b"", [payload], request=1)
    await near.until(lambda: near.frames)
    assert bytes(near.frames[0].payload or b"") == payload
    assert near.connection.tls is not None
    near.connection._transport.write(b"\xff" * 100_000)
    await near.until(lambda: near.lost)
    (_, refusal) = near.frames
    assert isinstance(error_from(decode(ErrorBody, refusal.body)), ProtocolError)
    await far.until(lambda: far.lost)
    assert all(isinstance(error, BraidError) for error in (*near.lost, *far.lost))
    await listener.close()
