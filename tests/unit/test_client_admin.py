"""Admin calls over the wire: what is retried, and what a second try that finds its work done means."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import pytest

from braid.client.client import Client, connect
from braid.model.errors import (
    BraidError,
    ConnectionLost,
    InvalidArgument,
    MetadataUnavailable,
    NotAvailable,
    SubscriptionExists,
    TimedOut,
    TopicExists,
    TopicNotFound,
)
from braid.testing.loop import Simulation, run_simulation
from braid.testing.network import SimulatedNetwork
from braid.testing.scripted_broker import CUT, ScriptedBroker

POLICIES = {
    "durability": "fsync",
    "replicas": 1,
    "writeQuorum": 1,
    "retentionMs": None,
    "retentionBytes": None,
    "retentionIgnoresSubscriptions": False,
}


class Calls:
    """Answers each call with the next of its results; an error is raised."""

    def __init__(self, **results: list[Any]) -> None:
        self.results = results
        self.seen: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, call: str, arguments: dict[str, Any]) -> Any:
        self.seen.append((call, arguments))
        result = self.results[call].pop(0)
        if isinstance(result, BraidError):
            raise result
        return result


def play(calls: Calls, body: Callable[[Client], Awaitable[None]]) -> None:
    async def main(simulation: Simulation) -> None:
        network = SimulatedNetwork(Random(1))
        broker = ScriptedBroker(network.host("broker"))
        broker.on_admin = calls
        await broker.start("broker", 6660)
        async with connect(
            "braid://broker:6660", network=network.host("client"), random=Random(1), timeout=5
        ) as client:
            await body(client)
        await broker.stop()

    run_simulation(1, main)


def test_arguments_travel_as_the_broker_reads_them() -> None:
    calls = Calls(create_topic=[{"name": "orders"}], seek_subscription=[{}] * 3, list_topics=[["topic://a/b/c"]])

    async def body(client: Client) -> None:
        assert await client.admin.create_topic("orders", segments=2, retention_ms=5) == {"name": "orders"}
        await client.admin.seek("orders", "billing", to="earliest")
        await client.admin.seek("orders", "billing", to={0: 17})
        await client.admin.seek("orders", "billing", to=1_700_000_000_000)
        assert await client.admin.list_topics("a/b") == ["topic://a/b/c"]
        with pytest.raises(InvalidArgument):
            await client.admin.list_topics("a")

    play(calls, body)
    create, *seeks, listed = [arguments for _, arguments in calls.seen]
    assert create["topic"] == "orders"
    assert create["segments"] == 2
    assert create["policies"]["retentionMs"] == 5
    assert "retentionBytes" not in create["policies"]
    assert [seek.get("to") or seek.get("offsets") or seek.get("timestamp") for seek in seeks] == [
        "earliest",
        {"0": 17},
        1_700_000_000_000,
    ]
    assert listed == {"tenant": "a", "namespace": "b"}


def test_what_becomes_of_lost_owners_travels_only_when_it_is_not_the_default() -> None:
    """Brokers of the version before refuse what they have no word for."""
    calls = Calls(create_topic=[{}, {}])

    async def body(client: Client) -> None:
        await client.admin.create_topic("orders")
        await client.admin.create_topic("orders", on_owner_loss="continue", owner_loss_after_ms=5)

    play(calls, body)
    first, second = (arguments["policies"] for _, arguments in calls.seen)
    assert "onOwnerLoss" not in first
    assert (second["onOwnerLoss"], second["ownerLossAfterMs"]) == ("continue", 5)


def test_a_move_to_a_named_broker_is_asked_for_again_when_its_answer_was_lost() -> None:
    calls = Calls(move_topic=[CUT, {"segments": []}, CUT], drain_broker=[CUT, {"state": "draining"}])

    async def body(client: Client) -> None:
        assert await client.admin.move("orders", to="b", timeout=7) == {"segments": []}
        with pytest.raises(ConnectionLost):
            await client.admin.move("orders")  # Another try would move it once more.
        assert await client.admin.drain("b") == {"state": "draining"}

    play(calls, body)
    assert calls.seen[0] == calls.seen[1] == ("move_topic", {"topic": "orders", "to": "b", "timeout": 7})


def test_recovering_and_balancing_say_what_may_be_lost_and_what_may_move() -> None:
    calls = Calls(recover_topic=[{}], balance=[{}])

    async def body(client: Client) -> None:
        await client.admin.recover("orders", segment=3, accept_loss=True)
        await client.admin.balance(dry_run=True)

    play(calls, body)
    recover = {"topic": "orders", "segment": 3, "acceptLoss": True, "timeout": 60.0}
    assert calls.seen == [("recover_topic", recover), ("balance", {"dryRun": True})]


def test_a_retriable_error_is_retried_until_the_timeout_and_a_final_one_is_raised() -> None:
    calls = Calls(
        get_topic=[MetadataUnavailable("later"), {"name": "x"}, TopicNotFound("no")],
        topology=[MetadataUnavailable("later")] * 100,
        split_segment=[NotAvailable("not yet")],
    )

    async def body(client: Client) -> None:
        assert await client.admin.topic("x") == {"name": "x"}
        with pytest.raises(TopicNotFound):
            await client.admin.topic("x")
        with pytest.raises(MetadataUnavailable):
            await client.admin.topology()
        with pytest.raises(NotAvailable):
            await client.admin.split("x", 0)

    play(calls, body)


def test_a_create_whose_answer_was_lost_succeeds_when_it_finds_its_own_topic() -> None:
    found = {"name": "x", "segments": {"0": {}, "1": {}}, "policies": POLICIES}
    calls = Calls(create_topic=[CUT, TopicExists("x")], get_topic=[found])

    async def body(client: Client) -> None:
        assert await client.admin.create_topic("x", segments=2) == found

    play(calls, body)


@pytest.mark.parametrize("policies", [POLICIES, {**POLICIES, "durability": "memory"}])
def test_a_create_whose_answer_was_lost_fails_when_it_finds_another_topic(policies: dict[str, Any]) -> None:
    segments: dict[str, Any] = {"0": {}} if policies is POLICIES else {"0": {}, "1": {}}
    found = {"name": "x", "segments": segments, "policies": policies}
    calls = Calls(create_topic=[CUT, TopicExists("x")], get_topic=[found])

    async def body(client: Client) -> None:
        with pytest.raises(TopicExists):
            await client.admin.create_topic("x", segments=2)

    play(calls, body)


def test_without_doubt_exists_and_not_found_are_errors() -> None:
    calls = Calls(
        create_topic=[TopicExists("x")],
        delete_topic=[TopicNotFound("x")],
        create_subscription=[SubscriptionExists("s")],
    )

    async def body(client: Client) -> None:
        with pytest.raises(TopicExists):
            await client.admin.create_topic("x")
        with pytest.raises(TopicNotFound):
            await client.admin.delete_topic("x")
        with pytest.raises(SubscriptionExists):
            await client.admin.create_subscription("x", "s")

    play(calls, body)


def test_a_delete_whose_answer_was_lost_succeeds_when_nothing_is_left() -> None:
    calls = Calls(delete_topic=[CUT, TopicNotFound("x")])

    async def body(client: Client) -> None:
        await client.admin.delete_topic("x")

    play(calls, body)


def test_a_skip_by_count_is_not_repeated_when_its_outcome_is_unknown() -> None:
    calls = Calls(skip_subscription=[CUT, CUT, {"0": 9}])

    async def body(client: Client) -> None:
        with pytest.raises((ConnectionLost, TimedOut)):
            await client.admin.skip("x", "s", segment=0, count=5)
        assert len(calls.seen) == 1
        assert await client.admin.skip("x", "s") == {"0": 9}

    play(calls, body)
