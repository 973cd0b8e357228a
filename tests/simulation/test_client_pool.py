"""A client's pool of links, and its map of topics."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from braid.client.pool import Pool
from braid.client.routing import Routing
from braid.model.errors import (
    ClientClosed,
    ConnectFailed,
    ConnectionLost,
    NotServing,
    Overloaded,
    ShuttingDown,
    TopicNotFound,
    Unauthenticated,
)
from braid.ports.network import Address, Network
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.connection import CLOSE_TIMEOUT_S, Connection
from braid.wire.frame import Frame
from braid.wire.operations import Kind, Leave, SegmentRoute, TopicRoute, Topology, TopologyRequest, decode, encode
from tests.kits.links import ignore
from tests.kits.wire import RawBroker

ORDERS = "public/default/orders"


pytestmark = pytest.mark.seed(0)


# ── pool ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def a_pool(network: Network, addresses: Sequence[Address], routing: Routing | None = None) -> Pool:
    return Pool(
        network,
        addresses,
        client="test",
        token=lambda: "t",
        connect_timeout_s=5,
        on_topology=routing.on_topology if routing is not None else ignore,
        shuffle=random.Random(0),
    )


async def two_brokers(network: SimulatedNetwork, **options: Any) -> tuple[list[RawBroker], list[Address]]:
    brokers = [RawBroker(**options), RawBroker(**options)]
    addresses = [await broker.listen(network.host(name), name, 1) for broker, name in zip(brokers, "ab", strict=True)]
    return brokers, addresses


async def test_callers_that_ask_for_a_link_at_the_same_time_share_one(network: SimulatedNetwork) -> None:
    brokers, addresses = await two_brokers(network)
    pool = a_pool(network.host("client"), addresses)
    calls = [asyncio.create_task(pool.link(addresses[0])) for _ in range(20)]
    await asyncio.sleep(0)
    calls[0].cancel()
    links = await asyncio.gather(*calls[1:])
    assert len({id(link) for link in links}) == 1
    assert len(brokers[0].peers) == 1
    assert await pool.link(addresses[0]) is links[0]
    assert await pool.any() is links[0]
    assert pool.links() == [links[0]]
    await pool.close(ClientClosed("done"))


async def test_a_dead_link_is_replaced_when_it_is_asked_for_again(network: SimulatedNetwork) -> None:
    brokers, addresses = await two_brokers(network)
    pool = a_pool(network.host("client"), addresses)
    first = await pool.link(addresses[0])
    network.reset("client", "a")
    await first.lost
    assert pool.links() == []
    second = await pool.link(addresses[0])
    assert second is not first
    assert second.alive
    assert len(brokers[0].peers) == 2
    await pool.close(ClientClosed("done"))


@pytest.mark.parametrize("trouble", ["nobody listens", "no answer", "silent", "full", "stopping"])
@pytest.mark.parametrize("dead", [0, 1])
async def test_when_one_address_does_not_work_the_other_one_is_taken(
    trouble: str, dead: int, network: SimulatedNetwork
) -> None:
    brokers, addresses = await two_brokers(network)
    match trouble:
        case "nobody listens":
            await brokers[dead].listener.close()
        case "no answer":
            network.cut("client", addresses[dead].host)
        case "silent":
            del brokers[dead].answers[Kind.HELLO]
        case "full":
            brokers[dead].answers[Kind.HELLO] = lambda connection, frame: connection.refuse(Overloaded("full"))
        case "stopping":
            brokers[dead].answers[Kind.HELLO] = lambda connection, frame: connection.reply_error(
                frame.kind, frame.request, ShuttingDown("stopping")
            )
    for seed in range(2):
        pool = a_pool(network.host("client"), addresses)
        pool._shuffle = random.Random(seed)
        link = await pool.any()
        assert link.address == addresses[1 - dead]
        await pool.close(ClientClosed("done"))


async def test_when_no_address_works_the_error_names_all_of_them(network: SimulatedNetwork) -> None:
    network.host("a"), network.host("b")
    pool = a_pool(network.host("client"), [Address("a", 1), Address("b", 1)])
    with pytest.raises(ConnectFailed, match=r"none of a:1, b:1 answers: .*Connection refused; .*Connection refused"):
        await pool.any()
    with pytest.raises(ConnectFailed, match=r"^broker a:1 cannot be reached"):
        await a_pool(network.host("client"), [Address("a", 1)]).any()


async def test_a_refusal_that_no_other_broker_would_change_is_raised_at_once(network: SimulatedNetwork) -> None:
    brokers, addresses = await two_brokers(network)
    for broker in brokers:
        broker.answers[Kind.HELLO] = lambda connection, frame: connection.reply_error(
            frame.kind, frame.request, Unauthenticated("no token")
        )
    with pytest.raises(Unauthenticated):
        await a_pool(network.host("client"), addresses).any()
    assert len(brokers[0].peers) + len(brokers[1].peers) == 1


async def test_closing_the_pool_fails_requests_and_whoever_is_still_connecting(network: SimulatedNetwork) -> None:
    brokers, addresses = await two_brokers(network)
    del brokers[1].answers[Kind.HELLO]
    pool = a_pool(network.host("client"), addresses)
    link = await pool.link(addresses[0])
    request = link.request(Kind.LEAVE, encode(Leave(1)))
    connecting = asyncio.create_task(pool.link(addresses[1]))
    await asyncio.sleep(1)
    await pool.close(ClientClosed("the client was closed"))
    for waiting in (request, connecting):
        with pytest.raises(ClientClosed, match="closed"):
            await waiting
    with pytest.raises(ClientClosed):
        await pool.link(addresses[0])
    await pool.close(ClientClosed("twice is fine"))
    for broker in brokers:
        await broker.peers[0].until(lambda broker=broker: broker.peers[0].lost)  # type: ignore[misc]


async def test_closing_the_pool_does_not_wait_for_brokers_that_do_not_read(network: SimulatedNetwork) -> None:
    brokers, addresses = await two_brokers(network, heartbeat_ms=60_000)
    pool = a_pool(network.host("client"), addresses)
    for broker, address in zip(brokers, addresses, strict=True):
        link = await pool.link(address)
        broker.peers[0].connection.pause_reading()
        while not link.connection.congested:
            link.request(Kind.PUBLISH, b"", [bytes(1 << 20)])
    started = asyncio.get_running_loop().time()
    await pool.close(ClientClosed("done"))
    assert asyncio.get_running_loop().time() - started <= CLOSE_TIMEOUT_S + 0.1


# ── routing ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def a_topology(generation: int, *, topic_id: int = 7, owner: str = "a:1", path: str = ORDERS) -> Topology:
    segments = (
        SegmentRoute(1, 0x8000, 0xFFFF, True, (), (), owner, 1),
        SegmentRoute(0, 0, 0x7FFF, True, (), (), "", 1),
        SegmentRoute(2, 0, 0xFFFF, False, (), (0, 1), owner, 1),
    )
    return Topology(generation, (TopicRoute(path, topic_id, generation, segments if topic_id else ()),))


class Routed:
    """A broker that answers about topics, and a client's routing that asks it."""

    def __init__(self) -> None:
        self.broker = RawBroker()
        self.answer = a_topology(10)
        self.push_too: Topology | None = None
        self.asked: list[TopologyRequest] = []
        self.routing = Routing(timeout_s=5)

    @classmethod
    async def start(cls, network: SimulatedNetwork) -> Routed:
        routed = cls()
        address = await routed.broker.listen(network.host("a"), "a", 1)
        routed.routing.pool = a_pool(network.host("client"), [address], routed.routing)
        routed.broker.answers[Kind.TOPOLOGY] = routed._on_topology
        return routed

    def _on_topology(self, connection: Connection, frame: Frame) -> None:
        self.asked.append(decode(TopologyRequest, frame.body))
        connection.reply(frame, encode(self.answer))
        if self.push_too is not None:
            connection.send(Kind.TOPOLOGY, encode(self.push_too))

    def push(self, topology: Topology) -> None:
        self.broker.peers[-1].connection.send(Kind.TOPOLOGY, encode(topology))


@contextlib.asynccontextmanager
async def open_routed(network: SimulatedNetwork) -> AsyncIterator[Routed]:
    made = await Routed.start(network)
    yield made
    await made.routing.pool.close(ClientClosed("done"))


async def test_a_topic_is_fetched_once_also_by_many_at_the_same_time(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        maps = await asyncio.gather(*(routed.routing.topic(ORDERS) for _ in range(10)))
        assert len({id(each) for each in maps}) == 1
        assert routed.asked == [TopologyRequest((ORDERS,), 0)]
        await routed.routing.topic(ORDERS)
        assert len(routed.asked) == 1
        await routed.routing.refresh(ORDERS)
        assert routed.asked[1] == TopologyRequest((ORDERS,), 10)


async def test_a_map_finds_the_segment_of_a_hash_and_its_owner(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        topic = await routed.routing.topic(ORDERS)
        assert [topic.find_active(key_hash).id for key_hash in (0, 0x7FFF, 0x8000, 0xFFFF)] == [0, 0, 1, 1]
        assert topic.owner(1) == Address("a", 1)
        with pytest.raises(NotServing, match="no broker serves segment 0"):
            topic.owner(0)
        assert (await routed.routing.owner_link(ORDERS, 1)).broker_id == "scripted"


async def test_only_what_is_newer_counts_whether_fetched_or_pushed(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        await routed.routing.topic(ORDERS)
        for generation, expected in ((12, 12), (11, 12), (12, 12), (13, 13)):
            routed.push(a_topology(generation))
            await asyncio.sleep(1)
            assert (await routed.routing.topic(ORDERS)).generation == expected
        routed.answer = a_topology(12)
        assert (await routed.routing.refresh(ORDERS)).generation == 13
        routed.answer = a_topology(12, topic_id=0)
        assert (await routed.routing.refresh(ORDERS)).generation == 13, "an old absence is no absence"


async def test_a_push_that_comes_with_the_answer_to_the_first_fetch_is_not_lost(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        routed.push_too = a_topology(11)
        assert (await routed.routing.topic(ORDERS)).generation in (10, 11)
        await asyncio.sleep(1)
        assert (await routed.routing.topic(ORDERS)).generation == 11
        assert len(routed.asked) == 1


async def test_pushes_about_topics_that_nobody_asked_for_are_ignored(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        await routed.routing.topic(ORDERS)
        routed.push(a_topology(11, path="public/default/other"))
        await asyncio.sleep(1)
        assert list(routed.routing._maps) == [ORDERS]


async def test_a_topic_that_does_not_exist_or_is_deleted_is_not_found(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        routed.answer = a_topology(10, topic_id=0)
        with pytest.raises(TopicNotFound, match=ORDERS):
            await routed.routing.topic(ORDERS)
        routed.answer = a_topology(11)
        assert (await routed.routing.topic(ORDERS)).topic_id == 7
        routed.push(a_topology(12, topic_id=0))
        await asyncio.sleep(1)
        routed.answer = a_topology(12, topic_id=0)
        with pytest.raises(TopicNotFound):
            await routed.routing.topic(ORDERS)


async def test_when_the_link_that_pushes_is_gone_the_topic_is_fetched_again(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        await routed.routing.topic(ORDERS)
        network.reset("client", "a")
        routed.answer = a_topology(15)
        await asyncio.sleep(1)
        assert (await routed.routing.topic(ORDERS)).generation == 15
        assert len(routed.broker.peers) == 2


async def test_an_answer_about_something_else_is_an_error(network: SimulatedNetwork) -> None:
    async with open_routed(network) as routed:
        routed.answer = a_topology(10, path="public/default/other")
        with pytest.raises(ConnectionLost, match="did not answer about topic"):
            await routed.routing.topic(ORDERS)
