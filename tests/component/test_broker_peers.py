"""Brokers know each other by a secret, and ask each other over links that come and go with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker.auth import PEER_TOKEN, Access
from braid.broker.peers.links import IDLE_S, MAX_IN_FLIGHT, cluster_secret
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.model.errors import (
    BrokenInvariant,
    ConnectFailed,
    ConnectionLost,
    Fenced,
    Moved,
    NotServing,
    PermissionDenied,
    ShuttingDown,
    TimedOut,
    Unauthenticated,
    UnknownOperation,
)
from braid.testing.sim.loop import Simulation
from braid.wire.operations import Kind, PeerReply, PeerRequest, encode
from tests.kits.cluster import ClientLink, Cluster
from tests.kits.control import faults
from tests.kits.waiting import until


async def test_all_brokers_find_one_secret_whoever_comes_first(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    a, b, c = store.client("a"), store.client("b"), store.client("c")
    a.fault = faults(Fault.UNCERTAIN)
    secrets = await asyncio.gather(cluster_secret(a), cluster_secret(b), cluster_secret(c))
    assert len(set(secrets)) == 1
    assert len(secrets[0]) >= 32
    entry = await store.get(paths.CLUSTER_SECRET)
    assert entry is not None
    assert entry.value.decode() == secrets[0]


def test_only_the_clusters_secret_makes_a_peer() -> None:
    access = Access(None)
    with pytest.raises(Unauthenticated):
        access.authenticate(PEER_TOKEN)  # no secret is known yet, and none was given
    access.peer_secret = "s" * 32
    assert access.authenticate(PEER_TOKEN + "s" * 32).peer
    assert not access.authenticate("").peer
    for wrong in ("", "s" * 31, "s" * 33, "t" * 32, "ß" * 32):
        with pytest.raises(Unauthenticated) as caught:
            access.authenticate(PEER_TOKEN + wrong)
        assert "sss" not in str(caught.value)


async def echo(arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments


async def test_a_peer_is_asked_and_its_errors_come_back_as_they_were(simulation: Simulation) -> None:
    async def moved(_: dict[str, Any]) -> None:
        raise Moved("it went away", "c:1", 7)

    async def fenced(_: dict[str, Any]) -> None:
        raise Fenced("epoch 3 is over")

    async def broken(_: dict[str, Any]) -> None:
        raise KeyError("a bug")

    async with Cluster(simulation, "a", "b") as cluster:
        for name, handler in (("echo", echo), ("moved", moved), ("fenced", fenced), ("broken", broken)):
            cluster["b"].peer_calls.register(name, handler)
        ask = cluster["a"].peers.call
        assert await ask("b", "echo", {"x": [1, None, "y"]}) == {"x": [1, None, "y"]}
        with pytest.raises(Moved, match="went away") as caught:
            await ask("b", "moved", {})
        assert (caught.value.owner, caught.value.epoch) == ("c:1", 7)
        with pytest.raises(Fenced, match="epoch 3"):
            await ask("b", "fenced", {})
        with pytest.raises(BrokenInvariant, match="a bug"):
            await ask("b", "broken", {})
        with pytest.raises(UnknownOperation, match="sing"):
            await ask("b", "sing", {})
        assert await ask("b", "echo", {}) == {}, "the link has survived all of them"


async def test_bytes_travel_beside_arguments(simulation: Simulation) -> None:
    received: list[bytes] = []

    async def take(arguments: dict[str, Any], payload: Any) -> int:
        received.append(bytes(payload))
        return len(payload) + int(arguments["more"])

    async with Cluster(simulation, "a", "b") as cluster:
        cluster["b"].peer_calls.register_with_payload("take", take)
        sent = bytes(range(256)) * (4 << 12)  # 4 MiB
        assert await cluster["a"].peers.call("b", "take", {"more": 1}, (sent,), timeout_s=600) == len(sent) + 1
        assert await cluster["a"].peers.call("b", "take", {"more": 0}) == 0
        assert received == [sent, b""]


async def test_ordinary_clients_may_not_ask_what_brokers_ask(simulation: Simulation) -> None:
    async with Cluster(simulation, "a") as cluster:
        cluster["a"].peer_calls.register("echo", echo)
        client = await ClientLink.open(cluster, "a")
        with pytest.raises(PermissionDenied, match="brokers"):
            await client.link.ask(Kind.PEER, encode(PeerRequest("echo", {})), PeerReply, 5)
        await client.link.request(Kind.PING)
        with pytest.raises(Unauthenticated):
            await ClientLink.open(cluster, "a", PEER_TOKEN + "guessed")
        client.close()


async def test_a_broker_that_is_not_there_is_told_from_one_that_does_not_answer(simulation: Simulation) -> None:
    async def never(_: dict[str, Any]) -> None:
        await asyncio.Event().wait()

    async with Cluster(simulation, "a", "b") as cluster:
        ask = cluster["a"].peers.call
        with pytest.raises(NotServing, match="broker c"):
            await ask("c", "echo", {})
        cluster["b"].peer_calls.register("never", never)
        with pytest.raises(TimedOut, match="broker b"):
            await ask("b", "never", {}, timeout_s=1)
        await cluster["b"].server.stop_listening()
        cluster.network.reset("a", "b")
        await asyncio.sleep(0.1)
        with pytest.raises(ConnectFailed):
            await ask("b", "echo", {})


async def test_another_broker_at_the_registered_address_is_not_taken_for_the_one(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b", "c") as cluster:
        cluster["b"].peer_calls.register("echo", echo)
        await cluster["c"].register("b:6660")
        await cluster.agree()
        with pytest.raises(ConnectFailed, match="where b answers"):
            await cluster["a"].peers.call("c", "echo", {})


async def test_a_link_ends_with_its_broker_and_the_next_one_goes_to_the_new_address(simulation: Simulation) -> None:
    waiting = asyncio.Event()

    async def wait(_: dict[str, Any]) -> None:
        waiting.set()
        await asyncio.Event().wait()

    async with Cluster(simulation, "a", "b") as cluster:
        cluster["b"].peer_calls.register("wait", wait)
        cluster["b"].peer_calls.register("echo", echo)
        asked = asyncio.ensure_future(cluster["a"].peers.call("b", "wait", {}, timeout_s=1_000))
        await waiting.wait()
        began = simulation.clock.monotonic()
        await cluster["b"].unregister()
        with pytest.raises(ConnectionLost, match="gone"):
            await asked
        assert simulation.clock.monotonic() - began < 1, "nobody waits for one that has lost its lease"
        with pytest.raises(NotServing):
            await cluster["a"].peers.call("b", "echo", {})
        await cluster["b"].register("b:6660")
        await cluster.agree()
        assert await cluster["a"].peers.call("b", "echo", {}) == {}


async def test_a_link_is_closed_when_nothing_was_asked_for_a_while(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        cluster["b"].peer_calls.register("echo", echo)
        await cluster["a"].peers.call("b", "echo", {})
        assert cluster["b"].metrics.connections == 1
        await cluster["a"].peers.call("b", "echo", {})
        assert cluster["b"].metrics.connections_total == 1, "one link for all calls"
        await asyncio.sleep(3 * IDLE_S)
        assert cluster["b"].metrics.connections == 0
        await cluster["a"].peers.call("b", "echo", {})
        assert cluster["b"].metrics.connections_total == 2


async def test_so_many_requests_are_on_their_way_to_one_broker_and_no_more(simulation: Simulation) -> None:
    running = most = 0
    go_on = asyncio.Event()

    async def count(_: dict[str, Any]) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await go_on.wait()
        running -= 1

    async with Cluster(simulation, "a", "b") as cluster:
        cluster["b"].peer_calls.register("count", count)
        calls = [
            asyncio.ensure_future(cluster["a"].peers.call("b", "count", {}, timeout_s=1_000))
            for _ in range(3 * MAX_IN_FLIGHT)
        ]
        await until(lambda: running == MAX_IN_FLIGHT)
        await asyncio.sleep(10)
        assert running == MAX_IN_FLIGHT
        go_on.set()
        await asyncio.gather(*calls)
        assert most <= MAX_IN_FLIGHT


async def test_a_broker_that_stops_asks_nothing_more(simulation: Simulation) -> None:
    async with Cluster(simulation, "a", "b") as cluster:
        cluster["b"].peer_calls.register("echo", echo)
        connecting = asyncio.ensure_future(cluster["a"].peers.call("b", "echo", {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        peers = cluster["a"].peers
        await peers.close()
        with pytest.raises((ConnectionLost, ShuttingDown)):
            await connecting
        with pytest.raises(ShuttingDown):
            await peers.call("b", "echo", {})
