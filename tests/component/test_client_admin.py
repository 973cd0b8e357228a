"""Admin calls over the wire: what is retried, and what a second try that finds its work done means."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest

from braid.client.client import Client, connect
from braid.model.errors import (
    BraidError,
    ConditionFailed,
    ConnectionLost,
    InvalidArgument,
    MetadataUnavailable,
    NotAvailable,
    SubscriptionExists,
    SubscriptionNotFound,
    TimedOut,
    TopicExists,
    TopicNotFound,
)
from braid.testing.scripted_broker import CUT, ScriptedBroker
from braid.testing.sim.network import SimulatedNetwork

KNOWN = {"subscriptionId": 7, "placements": {"0": 41, "1": 40}}


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

    def of(self, call: str) -> list[dict[str, Any]]:
        return [arguments for name, arguments in self.seen if name == call]


@contextlib.asynccontextmanager
async def connected(calls: Calls) -> AsyncIterator[Client]:
    network = SimulatedNetwork(Random(1))
    broker = ScriptedBroker(network.host("broker"))
    broker.on_admin = calls
    await broker.start("broker", 6660)
    async with connect("braid://broker:6660", network=network.host("client"), random=Random(1), timeout=5) as client:
        yield client
    await broker.stop()


async def test_arguments_travel_as_the_broker_reads_them() -> None:
    calls = Calls(
        create_topic=[{"name": "orders"}],
        identify_subscription=[KNOWN] * 3,
        seek_subscription=[{}] * 3,
        list_topics=[["topic://a/b/c"]],
    )
    async with connected(calls) as client:
        assert await client.admin.create_topic("orders", segments=2, retention_ms=5) == {"name": "orders"}
        await client.admin.seek("orders", "billing", to="earliest")
        await client.admin.seek("orders", "billing", to={0: 17})
        await client.admin.seek("orders", "billing", to=1_700_000_000_000)
        assert await client.admin.list_topics("a/b") == ["topic://a/b/c"]
        with pytest.raises(InvalidArgument):
            await client.admin.list_topics("a")
    create, *seeks, listed = [arguments for call, arguments in calls.seen if call != "identify_subscription"]
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


async def test_policies_that_older_brokers_do_not_know_travel_only_when_they_are_not_the_default() -> None:
    """Brokers of the version before refuse what they have no word for."""
    calls = Calls(create_topic=[{}, {}, {}])
    async with connected(calls) as client:
        await client.admin.create_topic("orders")
        await client.admin.create_topic("orders", on_owner_loss="continue", owner_loss_after_ms=5)
        await client.admin.create_topic("orders", max_decoded_bytes=4_096, max_batch_records=7)
    first, second, third = (arguments["policies"] for _, arguments in calls.seen)
    assert not {"onOwnerLoss", "maxDecodedBytes", "maxBatchRecords"} & first.keys()
    assert (second["onOwnerLoss"], second["ownerLossAfterMs"]) == ("continue", 5)
    assert (third["maxDecodedBytes"], third["maxBatchRecords"]) == (4_096, 7)


async def test_a_move_to_a_named_broker_is_asked_for_again_when_its_answer_was_lost() -> None:
    calls = Calls(move_topic=[CUT, {"segments": []}, CUT], drain_broker=[CUT, {"state": "draining"}])
    async with connected(calls) as client:
        assert await client.admin.move("orders", to="b", timeout=7) == {"segments": []}
        with pytest.raises(ConnectionLost):
            await client.admin.move("orders")  # Another try would move it once more.
        assert await client.admin.drain("b") == {"state": "draining"}
    assert calls.seen[0] == calls.seen[1] == ("move_topic", {"topic": "orders", "to": "b", "timeout": 7})


async def test_where_the_load_is_may_be_asked_again_after_a_lost_answer() -> None:
    calls = Calls(get_key_hashes=[CUT, {"topic": "topic://public/default/orders", "segments": {}, "unknown": []}])
    async with connected(calls) as client:
        assert (await client.admin.key_hashes("orders"))["segments"] == {}
    assert calls.seen == [("get_key_hashes", {"topic": "orders"})] * 2


async def test_recovering_and_balancing_say_what_may_be_lost_and_what_may_move() -> None:
    calls = Calls(recover_topic=[{}], balance=[{}])
    async with connected(calls) as client:
        await client.admin.recover("orders", segment=3, accept_loss=True)
        await client.admin.balance(dry_run=True)
    recover = {"topic": "orders", "segment": 3, "acceptLoss": True, "timeout": 60.0}
    assert calls.seen == [("recover_topic", recover), ("balance", {"dryRun": True})]


async def test_a_retriable_error_is_retried_until_the_timeout_and_a_final_one_is_raised() -> None:
    calls = Calls(
        get_topic=[MetadataUnavailable("later"), {"name": "x"}, TopicNotFound("no")],
        topology=[MetadataUnavailable("later")] * 100,
        split_segment=[NotAvailable("not yet")],
    )
    async with connected(calls) as client:
        assert await client.admin.topic("x") == {"name": "x"}
        with pytest.raises(TopicNotFound):
            await client.admin.topic("x")
        with pytest.raises(MetadataUnavailable):
            await client.admin.topology()
        with pytest.raises(NotAvailable):
            await client.admin.split("x", 0)


async def test_replicas_are_named_as_the_broker_names_them() -> None:
    calls = Calls(
        create_topic=[{"name": "x"}] * 2,
        get_topic=[{"topicId": 5}] * 3,
        update_topic=[{"name": "x"}],
        set_replicas=[CUT, {"replicas": 5}, {"replicas": 5}],
        topic_replicas=[{"replicas": 3}],
    )
    async with connected(calls) as client:
        await client.admin.create_topic("x")
        await client.admin.create_topic("x", replicas=3, confirm=2)
        await client.admin.update_topic("x", replicas=1)
        assert await client.admin.set_replicas("x", 5) == {"replicas": 5}
        await client.admin.set_replicas("x", confirm=3)
        assert await client.admin.topic_replicas("x") == {"replicas": 3}
    plain, replicated = (each["policies"] for each in calls.of("create_topic"))
    assert not {"replicas", "writeQuorum", "durability"} & plain.keys(), "the broker knows the defaults"
    assert (replicated["replicas"], replicated["writeQuorum"]) == (3, 2)
    assert calls.of("update_topic") == [{"topic": "x", "topicId": 5, "policies": {"replicas": 1}}]
    more, again, confirm = calls.of("set_replicas")
    assert more == again == {"topic": "x", "topicId": 5, "replicas": 5}
    assert confirm == {"topic": "x", "topicId": 5, "writeQuorum": 3}


async def test_every_try_of_a_create_brings_the_same_id_and_no_two_creates_the_same() -> None:
    """The broker then knows its own work (tests/component/test_broker_topics.py)."""
    calls = Calls(create_topic=[CUT, {"name": "x"}, {"name": "y"}], create_subscription=[CUT, {"name": "s"}])
    async with connected(calls) as client:
        assert await client.admin.create_topic("x", segments=2) == {"name": "x"}
        await client.admin.create_topic("x", segments=2)
        assert await client.admin.create_subscription("x", "s") == {"name": "s"}
    first, again, other = calls.of("create_topic")
    assert first == again
    assert first["requestId"] != other["requestId"]
    assert min(first["requestId"], other["requestId"]) > 0
    first, again = calls.of("create_subscription")
    assert first == again
    assert first["requestId"] > 0


async def test_a_create_whose_answer_was_lost_does_not_take_what_somebody_else_made_for_its_own() -> None:
    """However much it looks like it: the other one deletes it, or reads other records from it."""
    calls = Calls(create_topic=[CUT, TopicExists("x")], create_subscription=[CUT, SubscriptionExists("s")])
    async with connected(calls) as client:
        with pytest.raises(TopicExists):
            await client.admin.create_topic("x", segments=2)
        with pytest.raises(SubscriptionExists):
            await client.admin.create_subscription("x", "s")


async def test_without_doubt_exists_and_not_found_are_errors() -> None:
    calls = Calls(
        create_topic=[TopicExists("x")],
        get_topic=[TopicNotFound("x"), {"topicId": 5}],
        delete_topic=[TopicNotFound("x")],
        create_subscription=[SubscriptionExists("s")],
        identify_subscription=[KNOWN],
        delete_subscription=[SubscriptionNotFound("s")],
    )
    async with connected(calls) as client:
        with pytest.raises(TopicExists):
            await client.admin.create_topic("x")
        for _ in range(2):
            with pytest.raises(TopicNotFound):
                await client.admin.delete_topic("x")
        with pytest.raises(SubscriptionExists):
            await client.admin.create_subscription("x", "s")
        with pytest.raises(SubscriptionNotFound):
            await client.admin.delete_subscription("x", "s")


async def test_a_delete_names_what_it_means_and_succeeds_when_an_earlier_try_has_done_it() -> None:
    calls = Calls(
        get_topic=[{"topicId": 5}],
        delete_topic=[CUT, TopicNotFound("x")],
        identify_subscription=[KNOWN],
        delete_subscription=[CUT, SubscriptionNotFound("s")],
    )
    async with connected(calls) as client:
        await client.admin.delete_topic("x")
        await client.admin.delete_subscription("x", "s", force=True)
    assert calls.of("get_topic") == [{"topic": "x", "deleting": True}]
    assert calls.of("delete_topic") == [{"topic": "x", "topicId": 5, "force": False}] * 2
    about = {"topic": "x", "subscription": "s", "subscriptionId": 7, "force": True}
    assert calls.of("delete_subscription") == [about] * 2


@pytest.mark.parametrize("count", [None, 5])
async def test_a_seek_or_skip_says_where_it_began_and_says_the_same_when_it_is_repeated(count: int | None) -> None:
    calls = Calls(identify_subscription=[KNOWN], skip_subscription=[CUT, CUT, {"offsets": {"0": 9}}])
    async with connected(calls) as client:
        segment = None if count is None else 0
        assert await client.admin.skip("x", "s", segment=segment, count=count) == {"offsets": {"0": 9}}
    first, second, third = calls.of("skip_subscription")
    assert first == second == third
    assert first["since"] == {"0": 41, "1": 40}
    assert first["requestId"] > 0


async def test_a_skip_that_met_a_seek_begins_again_where_that_has_set_the_subscription() -> None:
    later = {"subscriptionId": 7, "placements": {"0": 60, "1": 40}}
    calls = Calls(
        identify_subscription=[KNOWN, later],
        skip_subscription=[ConditionFailed("placed since"), {"offsets": {"0": 5}}],
    )
    async with connected(calls) as client:
        assert await client.admin.skip("x", "s", segment=0, count=5) == {"offsets": {"0": 5}}
    first, second = calls.of("skip_subscription")
    assert second["since"] == later["placements"]
    assert first["requestId"] != second["requestId"], "a try of the first that is late must not pass for the second"


async def test_a_skip_whose_answer_was_lost_and_that_then_met_a_seek_says_that_it_is_not_known() -> None:
    """It may have happened before the seek: skipping once more would be wrong then."""
    calls = Calls(identify_subscription=[KNOWN], skip_subscription=[CUT, ConditionFailed("placed since")])
    async with connected(calls) as client:
        with pytest.raises(TimedOut, match="not known"):
            await client.admin.skip("x", "s", segment=0, count=5)


async def test_a_seek_whose_answer_was_lost_and_that_then_met_another_is_made_again() -> None:
    calls = Calls(
        identify_subscription=[KNOWN, KNOWN],
        seek_subscription=[CUT, ConditionFailed("placed since"), {"offsets": {"0": 0}}],
    )
    async with connected(calls) as client:
        assert await client.admin.seek("x", "s", "earliest") == {"offsets": {"0": 0}}


async def test_seeks_that_meet_others_again_and_again_end_with_the_timeout() -> None:
    calls = Calls(identify_subscription=[KNOWN] * 100, seek_subscription=[ConditionFailed("placed since")] * 100)
    async with connected(calls) as client:
        with pytest.raises(ConditionFailed):
            await client.admin.seek("x", "s", "earliest")


@pytest.mark.parametrize(
    ("mistaken", "cure"),
    [
        (datetime.datetime(2026, 11, 15, 12), "without a zone: give it one"),  # noqa: DTZ001 (it has no zone)
        (1_794_744_000_000_000, "milliseconds since 1970; this one is too high"),
        (1_794_744_000, "before 1973; multiply seconds by 1,000"),
        (1_500, r"name offsets by segment, as \{0: 1500\}"),
        (1.5, "it must be 'earliest', 'latest', a datetime"),
        (None, "it must be 'earliest', 'latest', a datetime"),
    ],
)
async def test_a_seek_to_a_place_that_can_be_mistaken_is_refused(mistaken: Any, cure: str) -> None:
    client = connect("braid://broker:6660", network=SimulatedNetwork(Random(1)).host("client"))
    with pytest.raises(InvalidArgument, match=cure):
        await client.admin.seek("orders", "billing", mistaken)


async def test_a_seek_to_a_datetime_of_the_first_years_says_that_it_is_meant() -> None:
    calls = Calls(identify_subscription=[KNOWN] * 2, seek_subscription=[{}] * 2)
    async with connected(calls) as client:
        await client.admin.seek("x", "s", datetime.datetime(1971, 1, 1, tzinfo=datetime.UTC))
        await client.admin.seek("x", "s", datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC))
    assert [(each["timestamp"], each.get("unit")) for each in calls.of("seek_subscription")] == [
        (31_536_000_000, "ms"),
        (1_767_225_600_000, None),
    ]


@pytest.mark.parametrize("mistaken", [10**30, object()])
async def test_an_argument_that_no_frame_can_hold_is_refused(mistaken: Any) -> None:
    client = connect("braid://broker:6660", network=SimulatedNetwork(Random(1)).host("client"))
    with pytest.raises(InvalidArgument, match="an argument of create_topic cannot be sent"):
        await client.admin.create_topic("orders", retention_ms=mistaken)
