"""Links, pool and routing of a client, over a network in virtual time and over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from braid.model.errors import (
    BraidError,
    ClientClosed,
    ConnectFailed,
    ConnectionLost,
    ConsumerReplaced,
    FrameTooLarge,
    NotServing,
    Overloaded,
    ProtocolError,
    ShuttingDown,
    TimedOut,
    Unauthenticated,
    UnsupportedVersion,
)
from braid.ports.network import Address, Network, SocketNetwork
from braid.testing.sim.loop import run_simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.connection import Connection
from braid.wire.frame import MAX_BODY_BYTES, MAX_FRAME_BYTES, MAX_REQUEST_ID, Flags, Frame
from braid.wire.link import EARLY_SESSIONS, SILENT_PERIODS, Link, connect_link
from braid.wire.operations import (
    MAGIC,
    VERSION,
    Assignment,
    Closed,
    Delivery,
    ErrorBody,
    Expelled,
    Hello,
    HelloReply,
    Kind,
    Leave,
    Need,
    decode,
    encode,
)
from braid.wire.silence import ANSWER_S, PING_AFTER_S
from tests.kits.links import ignore
from tests.kits.wire import RawBroker


async def a_link(network: Network, address: Address, *, timeout_s: float = 5.0) -> Link:
    return await connect_link(network, address, client="test", token="t", timeout_s=timeout_s, on_topology=ignore)


pytestmark = pytest.mark.seed(0)


async def broker_and_link(network: SimulatedNetwork, **options: Any) -> tuple[RawBroker, Link]:
    broker = RawBroker(**options)
    address = await broker.listen(network.host("broker"), "broker")
    return broker, await a_link(network.host("client"), address)


class Receiver:
    """Of a channel and of a session."""

    def __init__(self) -> None:
        self.seen: list[object] = []
        self.on_last: Callable[[], None] = lambda: None
        """Called when the broker closes the channel: whether anything may follow, its receiver knows."""

    def on_delivery(self, delivery: Delivery, payload: memoryview) -> None:
        self.seen.append((delivery, bytes(payload)))

    def on_need(self, need: Need) -> None:
        self.seen.append(need)

    def on_closed(self, error: Closed | BraidError) -> None:
        self.seen.append(error)
        self.on_last()

    def on_assignment(self, assignment: Assignment) -> None:
        self.seen.append(assignment)

    def on_session_lost(self, error: BraidError) -> None:
        self.seen.append(error)


# ── connecting ───────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_the_first_frame_is_hello_and_the_reply_is_taken_over(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)
    (first,) = broker.peers[0].frames
    assert first.kind == Kind.HELLO
    assert decode(Hello, first.body) == Hello(MAGIC, VERSION, VERSION, "test", "t")
    assert (link.broker_id, link.max_frame_bytes, link.alive) == ("scripted", MAX_FRAME_BYTES, True)


def refused_with(error: BraidError) -> BraidError:
    async def main(network: SimulatedNetwork) -> BraidError:
        broker = RawBroker()

        def refuse(connection: Connection, frame: Frame) -> None:
            connection.reply_error(frame.kind, frame.request, error)
            connection.close(error)

        broker.answers[Kind.HELLO] = refuse
        address = await broker.listen(network.host("broker"), "broker")
        with pytest.raises(BraidError) as raised:
            await a_link(network.host("client"), address)
        await broker.peers[0].until(lambda: broker.peers[0].lost)
        return raised.value

    return run_simulation(0, lambda simulation: main(SimulatedNetwork(simulation.random)))


@pytest.mark.parametrize("error", [Unauthenticated("no token"), UnsupportedVersion("too old"), ShuttingDown("soon")])
def test_what_the_broker_refuses_a_hello_by_is_raised_as_it_is(error: BraidError) -> None:
    raised = refused_with(error)
    assert (type(raised), str(raised)) == (type(error), str(error))


async def test_a_broker_that_refuses_the_connection_as_such_is_heard(network: SimulatedNetwork) -> None:
    broker = RawBroker()
    broker.answers[Kind.HELLO] = lambda connection, frame: connection.refuse(Overloaded("full"))
    address = await broker.listen(network.host("broker"), "broker")
    with pytest.raises(Overloaded, match="full"):
        await a_link(network.host("client"), address)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (HelloReply(VERSION + 1, "b", MAX_FRAME_BYTES, 1_000), UnsupportedVersion),
        (HelloReply(VERSION, "b", MAX_FRAME_BYTES, 0), ProtocolError),
        (HelloReply(VERSION, "b", MAX_FRAME_BYTES, -5), ProtocolError),
        (Leave(1), ProtocolError),
    ],
)
async def test_a_reply_to_hello_that_cannot_be_is_refused(
    reply: Any, error: type[BraidError], network: SimulatedNetwork
) -> None:
    broker = RawBroker()
    broker.answers[Kind.HELLO] = lambda connection, frame: connection.reply(frame, encode(reply))
    address = await broker.listen(network.host("broker"), "broker")
    with pytest.raises(error):
        await a_link(network.host("client"), address)
    await broker.peers[0].until(lambda: broker.peers[0].lost)


async def test_a_broker_that_says_nothing_is_given_up_in_time_and_the_connection_is_closed(
    network: SimulatedNetwork,
) -> None:
    broker = RawBroker(hello=False)
    address = await broker.listen(network.host("broker"), "broker")
    started = asyncio.get_running_loop().time()
    with pytest.raises(ConnectFailed, match="did not answer within 5 s"):
        await a_link(network.host("client"), address)
    assert asyncio.get_running_loop().time() - started == pytest.approx(5, abs=0.1)
    await broker.peers[0].until(lambda: broker.peers[0].lost)


async def test_a_host_that_does_not_answer_is_given_up_in_time(network: SimulatedNetwork) -> None:
    network.host("broker")
    network.cut("client", "broker")
    with pytest.raises(ConnectFailed, match="broker:6660 did not answer within 5 s"):
        await a_link(network.host("client"), Address("broker", 6660))


async def test_where_nobody_listens_the_error_says_so(network: SimulatedNetwork) -> None:
    network.host("broker")
    with pytest.raises(ConnectFailed, match="broker:6660 cannot be reached: Connection refused") as raised:
        await a_link(network.host("client"), Address("broker", 6660))
    assert raised.value.retriable


@pytest.mark.real_loop
@pytest.mark.parametrize("host", ["a..b", "x" * 70 + ".example"])
async def test_a_host_that_cannot_be_a_name_is_an_error_of_ours(host: str) -> None:
    with pytest.raises(ConnectFailed, match="cannot be reached"):
        await a_link(SocketNetwork(), Address(host, 1))


@pytest.mark.real_loop
async def test_a_server_of_another_protocol_is_recognised() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(ProtocolError, match="does not speak Braid's protocol"):
        await a_link(SocketNetwork(), Address(host, port))
    server.close()


# ── requests ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(3))
async def test_requests_are_pipelined_and_each_gets_its_own_reply_in_any_order(
    seed: int, network: SimulatedNetwork
) -> None:
    broker, link = await broker_and_link(network)
    waiting: list[tuple[Connection, Frame]] = []

    def answer_later(connection: Connection, frame: Frame) -> None:
        waiting.append((connection, frame))
        if len(waiting) == 500:
            network.random.shuffle(waiting)
            for each, request in waiting:
                if decode(Leave, request.body).session % 7:
                    each.reply(request, request.body)
                else:
                    each.reply_error(request.kind, request.request, NotServing(f"{request.request}"))

    broker.answers[Kind.LEAVE] = answer_later
    futures = [link.request(Kind.LEAVE, encode(Leave(number))) for number in range(500)]
    done = await asyncio.gather(*futures, return_exceptions=True)
    for number, outcome in enumerate(done):
        if number % 7:
            assert isinstance(outcome, Frame)
            assert decode(Leave, outcome.body).session == number
        else:
            assert isinstance(outcome, NotServing)


async def test_request_ids_wrap_around_and_skip_those_that_are_still_open(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)
    link._last_request = MAX_REQUEST_ID - 2
    open_ones = [link.request(Kind.LEAVE, encode(Leave(number))) for number in range(4)]
    link._last_request = MAX_REQUEST_ID - 2
    open_ones.append(link.request(Kind.LEAVE, encode(Leave(9))))
    peer = broker.peers[0]
    await peer.until(lambda: len(peer.frames) == 6)
    ids = [frame.request for frame in peer.frames[1:]]
    assert ids == [MAX_REQUEST_ID - 1, MAX_REQUEST_ID, 1, 2, 3]
    for frame in peer.frames[1:]:
        peer.connection.reply(frame, frame.body)
    replies = await asyncio.gather(*open_ones)
    assert [decode(Leave, reply.body).session for reply in replies] == [0, 1, 2, 3, 9]


async def test_a_request_that_is_not_answered_in_time_times_out_and_its_late_reply_is_ignored(
    network: SimulatedNetwork,
) -> None:
    broker, link = await broker_and_link(network)
    peer = broker.peers[0]
    with pytest.raises(TimedOut, match="LEAVE was not answered within 2 s"):
        await link.ask(Kind.LEAVE, encode(Leave(1)), Leave, 2)
    peer.connection.reply(peer.frames[1], encode(Leave(1)))
    broker.answers[Kind.LEAVE] = lambda connection, frame: connection.reply(frame, frame.body)
    assert await link.ask(Kind.LEAVE, encode(Leave(2)), Leave, 2) == Leave(2)
    assert link.alive


async def test_a_reply_to_nothing_ends_the_link(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)
    broker.peers[0].connection.send(Kind.LEAVE, request=77, flags=Flags.REPLY)
    assert isinstance(await link.lost, ProtocolError)


async def test_an_error_reply_that_cannot_be_read_fails_its_request_with_the_link(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)

    def garble(connection: Connection, frame: Frame) -> None:
        connection.send(frame.kind, b"\xc1", request=frame.request, flags=Flags.REPLY | Flags.ERROR)

    broker.answers[Kind.LEAVE] = garble
    with pytest.raises(ProtocolError, match="no ErrorBody"):
        await link.ask(Kind.LEAVE, encode(Leave(1)), Leave, 60)


async def test_a_request_that_is_too_large_to_send_leaves_no_trace(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)
    with pytest.raises(FrameTooLarge):
        link.request(Kind.ADMIN, bytes(MAX_BODY_BYTES + 1))
    assert link._requests == {}
    broker.answers[Kind.LEAVE] = lambda connection, frame: connection.reply(frame, frame.body)
    assert await link.ask(Kind.LEAVE, encode(Leave(2)), Leave, 2) == Leave(2)


async def test_a_request_on_a_dead_link_fails_at_once_and_nobody_need_look(network: SimulatedNetwork) -> None:
    _, link = await broker_and_link(network)
    link.close(ClientClosed("done"))
    link.request(Kind.PING)  # nobody waits for it
    with pytest.raises(ClientClosed):
        await link.request(Kind.PING)
    assert not link.alive


# ── losing the link ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("how", ["reset", "closed", "refused"])
async def test_a_lost_link_fails_all_requests_and_tells_every_receiver_once(
    how: str, network: SimulatedNetwork
) -> None:
    broker, link = await broker_and_link(network)
    channels, sessions = [Receiver() for _ in range(3)], [Receiver() for _ in range(2)]
    for channel in channels:
        link.open_channel(channel)
    for number, session in enumerate(sessions, 1):
        link.open_session(number, session)
    forgotten = Receiver()
    link.forget_channel(link.open_channel(forgotten))
    link.open_session(9, forgotten)
    link.forget_session(9)
    requests = [link.request(Kind.LEAVE, encode(Leave(number))) for number in range(50)]
    requests[0].cancel()
    await broker.peers[0].until(lambda: len(broker.peers[0].frames) == 51)
    match how:
        case "reset":
            network.reset("client", "broker")
        case "closed":
            broker.peers[0].connection.close(ConnectionLost("bye"))
        case "refused":
            broker.peers[0].connection.refuse(ShuttingDown("stopping"))
    reason = await link.lost
    assert isinstance(reason, ShuttingDown if how == "refused" else ConnectionLost)
    outcomes = await asyncio.gather(*requests[1:], return_exceptions=True)
    assert {type(outcome) for outcome in outcomes} == {type(reason)}
    assert len({id(outcome) for outcome in outcomes}) == 49, "each gets an error of its own"
    for receiver in (*channels, *sessions):
        (told,) = receiver.seen
        assert type(told) is type(reason)
    assert forgotten.seen == []
    assert not link.alive


async def test_a_silent_broker_is_noticed_after_three_heartbeats(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network, heartbeat_ms=1_000)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(20)
    assert link.alive, "it answers each PING"
    waiting = link.request(Kind.LEAVE, encode(Leave(1)))
    network.cut("client", "broker")
    cut_at = loop.time()
    reason = await link.lost
    assert "was silent for" in str(reason)
    assert SILENT_PERIODS - 1 <= loop.time() - cut_at <= SILENT_PERIODS + 2
    with pytest.raises(ConnectionLost):
        await waiting
    assert broker.peers


async def test_a_silent_broker_is_noticed_sooner_while_an_answer_is_due(network: SimulatedNetwork) -> None:
    _, link = await broker_and_link(network, heartbeat_ms=10_000)
    loop = asyncio.get_running_loop()
    await asyncio.sleep(25)
    network.cut("client", "broker")
    await asyncio.sleep(3)
    assert link.alive, "no answer is due"
    waiting = link.request(Kind.LEAVE, encode(Leave(1)))
    asked_at = loop.time()
    with pytest.raises(ConnectionLost, match="was silent for 6 s"):
        await waiting
    assert loop.time() - asked_at == pytest.approx(PING_AFTER_S + ANSWER_S)


async def test_a_request_that_takes_long_keeps_its_link_while_the_broker_shows_life(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network, heartbeat_ms=10_000)
    waiting = link.request(Kind.LEAVE, encode(Leave(1)))
    await asyncio.sleep(120)
    assert link.alive
    assert not waiting.done()
    pings = [frame for frame in broker.peers[0].frames if frame.kind == Kind.PING]
    assert len(pings) <= 120 / ANSWER_S + 120 / 10 + 1


async def test_a_quiet_link_sends_something_in_every_heartbeat(network: SimulatedNetwork) -> None:
    broker, _ = await broker_and_link(network, heartbeat_ms=1_000)
    await asyncio.sleep(10.5)
    pings = [frame for frame in broker.peers[0].frames if frame.kind == Kind.PING]
    assert len(pings) == 10


# ── pushes ───────────────────────────────────────────────────────────────────────────────────────────────────────────


async def test_pushes_go_to_the_receiver_that_they_name_and_others_are_ignored(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)
    first, second, session = Receiver(), Receiver(), Receiver()
    assert [link.open_channel(first), link.open_channel(second)] == [1, 2]
    second.on_last = lambda: link.forget_channel(2)
    link.open_session(5, session)
    send = broker.peers[0].connection.send
    send(Kind.DELIVER, encode(Delivery(2, 40)), [b"batches"])
    send(Kind.DELIVER, encode(Delivery(99, 40)), [b"for nobody"])
    send(Kind.NEED, encode(Need(1, 1_000)))
    send(Kind.NEED, encode(Need(99, 1_000)))
    send(Kind.CLOSED, encode(Closed(2, "reset", "again", True)))
    send(Kind.CLOSED, encode(Closed(2, "reset", "again", True)))
    send(Kind.DELIVER, encode(Delivery(2, 41)), [b"too late"])
    send(Kind.ASSIGN, encode(Assignment(5, 1, (0, 1))))
    send(200, b"from the future")
    send(Kind.EXPEL, encode(Expelled(5, "consumer-replaced", "another worker-1", False)))
    send(Kind.ASSIGN, encode(Assignment(5, 2, ())))
    broker.answers[Kind.LEAVE] = lambda connection, frame: connection.reply(frame, frame.body)
    await link.ask(Kind.LEAVE, encode(Leave(1)), Leave, 5)
    assert first.seen == [Need(1, 1_000)]
    assert second.seen == [(Delivery(2, 40), b"batches"), Closed(2, "reset", "again", True)]
    assert session.seen[0] == Assignment(5, 1, (0, 1))
    assert [type(each) for each in session.seen[1:]] == [ConsumerReplaced]
    assert link.alive


async def test_pushes_that_come_with_the_reply_to_a_join_are_kept_until_their_session_is_opened(
    network: SimulatedNetwork,
) -> None:
    broker, link = await broker_and_link(network)

    def join(connection: Connection, frame: Frame) -> None:
        session = decode(Leave, frame.body).session
        connection.reply(frame, frame.body)
        connection.send(Kind.ASSIGN, encode(Assignment(session, 1, ())))
        connection.send(Kind.ASSIGN, encode(Assignment(session, 2, (session,))))
        if session == 3:
            connection.send(Kind.EXPEL, encode(Expelled(session, "consumer-replaced", "another one", False)))

    broker.answers[Kind.LEAVE] = join
    replies = [link.request(Kind.LEAVE, encode(Leave(number))) for number in (1, 2, 3)]
    await asyncio.gather(*replies)
    await asyncio.sleep(1)
    first, second, third = Receiver(), Receiver(), Receiver()
    for number, receiver in ((2, second), (1, first), (3, third)):
        link.open_session(number, receiver)
    assert first.seen == [Assignment(1, 2, (1,))]
    assert second.seen == [Assignment(2, 2, (2,))]
    assert [type(each) for each in third.seen] == [ConsumerReplaced]


async def test_pushes_to_sessions_that_nobody_opens_are_kept_in_a_bounded_number(network: SimulatedNetwork) -> None:
    broker, link = await broker_and_link(network)
    for number in range(1, 10 * EARLY_SESSIONS + 1):
        broker.peers[0].connection.send(Kind.ASSIGN, encode(Assignment(number, 1, ())))
    broker.answers[Kind.LEAVE] = lambda connection, frame: connection.reply(frame, frame.body)
    await link.ask(Kind.LEAVE, encode(Leave(1)), Leave, 5)
    assert len(link._early) == EARLY_SESSIONS
    last = Receiver()
    link.open_session(10 * EARLY_SESSIONS, last)
    assert len(last.seen) == 1, "the newest is kept"


async def test_a_session_that_is_opened_after_the_link_was_lost_hears_of_it(network: SimulatedNetwork) -> None:
    _, link = await broker_and_link(network)
    link.close(ClientClosed("done"))
    await link.lost
    receiver = Receiver()
    link.open_session(1, receiver)
    assert [type(each) for each in receiver.seen] == [ClientClosed]


@pytest.mark.parametrize("kind", [Kind.DELIVER, Kind.NEED, Kind.CLOSED, Kind.ASSIGN, Kind.EXPEL, Kind.TOPOLOGY])
async def test_a_push_that_cannot_be_read_ends_the_link_and_the_broker_is_told(
    kind: Kind, network: SimulatedNetwork
) -> None:
    broker, link = await broker_and_link(network)
    peer = broker.peers[0]
    peer.connection.send(kind, b"\x90", [b"payload"])
    assert isinstance(await link.lost, ProtocolError)
    await peer.until(lambda: peer.lost)
    assert peer.frames[-1].flags == Flags.REPLY | Flags.ERROR
    assert decode(ErrorBody, peer.frames[-1].body).code == "protocol"
