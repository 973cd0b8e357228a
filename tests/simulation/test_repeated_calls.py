"""Calls of operators that come twice, or late: a broker stands still in the middle of one, its client gives it up and
goes on through another broker, and then the first one comes to its end.

The seeds that found these no longer take the same course: 900092 and 910852 of the cluster's simulation.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

import pytest

from braid.metadata import paths
from braid.model.errors import (
    BraidError,
    ConditionFailed,
    MetadataUncertain,
    SubscriptionNotFound,
    TimedOut,
    TopicExists,
    TopicNotFound,
)
from braid.model.names import SegmentName, TopicName
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

LATE_S = 2.0
"""How long the broker that stands still takes for each way to the metadata store and back: its lease lives on."""


def slow(brokers: Brokers, name: str) -> None:
    brokers.store_of(name).delay_s = lambda: LATE_S


async def outcome(work: Awaitable[Any]) -> Any:
    try:
        return await work
    except BraidError as error:
        return error


async def a_subscription(brokers: Brokers) -> dict[str, Any]:
    """With a hundred records before it. Returns what identifies it."""
    async with brokers.client("b") as client:
        await client.admin.create_topic("orders")
        await client.admin.create_subscription("orders", "billing", start="earliest")
        async with client.producer("orders") as producer:
            await producer.send_many([b"%d" % number for number in range(100)])
    if brokers.owner(0) != "b":
        await brokers.move(0, "b")
    return dict(await brokers.call("b", "identify_subscription", topic="orders", subscription="billing"))


def stands_at(brokers: Brokers) -> int | None:
    return brokers.running["b"].segments.get(PATH, 0).cursors.offset("billing")


@pytest.mark.parametrize(
    "late",
    [
        ("skip_subscription", {"segment": 0, "count": 15}),
        ("skip_subscription", {}),
        ("seek_subscription", {"offsets": {"0": 70}}),
        ("seek_subscription", {"to": "latest"}),
    ],
)
async def test_a_skip_that_its_client_has_given_up_does_not_undo_a_later_seek(
    late: tuple[str, dict[str, Any]], simulation: Simulation
) -> None:
    """910852: records 0 to 14 were never delivered."""
    async with running_brokers(simulation, ("b", "a")) as brokers:
        known = await a_subscription(brokers)
        call, arguments = late
        request = {"requestId": 5, "since": known["placements"]}
        slow(brokers, "a")
        skipping = asyncio.ensure_future(
            outcome(brokers.call("a", call, topic="orders", subscription="billing", **arguments, **request))
        )
        await asyncio.sleep(0.1)
        async with brokers.client("b") as client:
            assert await client.admin.seek("orders", "billing", {0: 3}) == {"offsets": {"0": 3}}
        assert not skipping.done()
        assert isinstance(await skipping, ConditionFailed)
        assert stands_at(brokers) == 3


async def test_a_skip_that_two_brokers_carry_out_skips_once(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("b", "a")) as brokers:
        known = await a_subscription(brokers)
        about = {"topic": "orders", "subscription": "billing", "segment": 0, "count": 15}
        request = {"requestId": 5, "since": known["placements"]}
        slow(brokers, "a")
        first = asyncio.ensure_future(brokers.call("a", "skip_subscription", **about, **request))
        await asyncio.sleep(0.1)
        assert await brokers.call("b", "skip_subscription", **about, **request) == {"offsets": {"0": 15}}
        assert await first == {"offsets": {"0": 15}}
        assert stands_at(brokers) == 15


async def test_of_two_who_create_a_topic_that_looks_the_same_one_is_told_that_it_exists(simulation: Simulation) -> None:
    """900092: the answer to the first one's first try was lost, and its second try found the other one's topic."""
    async with running_brokers(simulation, ("b", "a")) as brokers:
        slow(brokers, "a")
        async with brokers.client("a") as first, brokers.client("b") as second:
            creating = asyncio.ensure_future(outcome(first.admin.create_topic("orders", segments=2)))
            await asyncio.sleep(0.1)
            made = await second.admin.create_topic("orders", segments=2)
            brokers.store_of("a").delay_s = lambda: 0.0
            brokers.network.reset("a", "client")
            assert isinstance(await creating, TopicExists)
            assert (await second.admin.topic("orders"))["topicId"] == made["topicId"]


async def test_a_create_whose_answer_was_lost_finds_what_it_has_made(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("b", "a")) as brokers, brokers.client("a", "b") as client:
        creating = asyncio.ensure_future(client.admin.create_topic("orders", segments=2))
        await until(lambda: any(broker.topics.find(PATH) for broker in brokers.running.values()))
        for name in brokers.running:
            brokers.network.reset(name, "client")
        made = await creating
        assert (await client.admin.topic("orders"))["topicId"] == made["topicId"]


async def test_a_deletion_that_its_client_has_given_up_does_not_touch_the_next_topic_or_subscription(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, ("b", "a")) as brokers:
        known = await a_subscription(brokers)
        topic = await brokers.call("b", "get_topic", topic="orders")
        slow(brokers, "a")
        removing = asyncio.ensure_future(
            outcome(
                brokers.call(
                    "a",
                    "delete_subscription",
                    topic="orders",
                    subscription="billing",
                    subscriptionId=known["subscriptionId"],
                )
            )
        )
        async with brokers.client("b") as client:
            await client.admin.delete_subscription("orders", "billing")
            await client.admin.create_subscription("orders", "billing", start="latest")
            assert isinstance(await removing, SubscriptionNotFound)
            assert (await client.admin.subscription("orders", "billing"))["segments"]["0"]["offset"] == 100

            deleting = asyncio.ensure_future(
                outcome(brokers.call("a", "delete_topic", topic="orders", topicId=topic["topicId"], force=True))
            )
            await client.admin.delete_topic("orders", force=True)
            made = await client.admin.create_topic("orders")
            assert isinstance(await deleting, TopicNotFound)
            assert (await client.admin.topic("orders"))["topicId"] == made["topicId"]


def stored(brokers: Brokers) -> Cursor:
    """The cursor on the first segment, as the metadata store has it."""
    name = SegmentName.of(TopicName.parse(PATH), brokers.running["b"].topics.get(PATH).layout.segment(0))
    entry = brokers.store._server.get(paths.cursor(PATH, name.descriptor, "billing"))
    assert entry is not None
    return decode(Cursor, entry.value)


async def test_a_skip_beside_a_seek_that_is_stored_and_not_answered_yet_counts_from_there(
    simulation: Simulation,
) -> None:
    """It knew the new placement and the old offset, and jumped over what the seek had brought back."""
    async with running_brokers(simulation, ("b", "a")) as brokers:
        await a_subscription(brokers)
        async with brokers.client("b") as one, brokers.client("a") as two:
            await one.admin.seek("orders", "billing", {0: 50})
            before = stored(brokers).placement
            slow(brokers, "b")
            seeking = asyncio.ensure_future(one.admin.seek("orders", "billing", {0: 0}))
            await until(lambda: stored(brokers).placement != before)
            await two.admin.skip("orders", "billing", segment=0, count=15)
            await seeking
            assert stands_at(brokers) in (0, 15)


async def test_a_skip_whose_answer_was_lost_between_brokers_is_not_made_twice(simulation: Simulation) -> None:
    """The broker that asked was refused at its second try, for others had skipped since, and told that as certain."""
    async with running_brokers(simulation, ("b", "a")) as brokers:
        await a_subscription(brokers)
        before = stored(brokers).placement
        async with brokers.client("a") as one, brokers.client("b") as two:
            slow(brokers, "b")
            first = asyncio.ensure_future(outcome(one.admin.skip("orders", "billing", segment=0, count=15)))
            await until(lambda: stored(brokers).placement != before)
            brokers.network.cut("a", "b")
            brokers.network.reset("a", "b")
            brokers.store_of("b").delay_s = lambda: 0.0
            await until(lambda: stands_at(brokers) == 15)
            await two.admin.skip("orders", "billing", segment=0, count=10)
            brokers.network.heal()
            assert isinstance(await first, TimedOut), "it is not known"
            assert stands_at(brokers) == 25


async def test_a_subscription_can_be_set_after_the_store_was_away_in_the_middle_of_a_seek(
    simulation: Simulation,
) -> None:
    """The seek was stored, and its owner did not know: nobody could set the subscription until an ack came."""
    async with running_brokers(simulation, ("b", "a")) as brokers:
        await a_subscription(brokers)
        before, store = stored(brokers).placement, brokers.store_of("b")
        store.delay_s = lambda: 0.5
        seek = brokers.call("b", "seek_subscription", topic="orders", subscription="billing", to="latest")
        seeking = asyncio.ensure_future(outcome(seek))
        await until(lambda: stored(brokers).placement != before)
        store.disconnect()
        await asyncio.sleep(1)
        store.delay_s = lambda: 0.0
        store.reconnect()
        assert isinstance(await seeking, MetadataUncertain)
        async with brokers.client("b") as client:
            assert await client.admin.seek("orders", "billing", {0: 10}) == {"offsets": {"0": 10}}


async def test_a_late_deletion_does_not_end_the_consumers_of_the_next_subscription(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("b", "a")) as brokers:
        known = await a_subscription(brokers)
        slow(brokers, "a")
        about = {"topic": "orders", "subscription": "billing", "subscriptionId": known["subscriptionId"]}
        removing = asyncio.ensure_future(outcome(brokers.call("a", "delete_subscription", **about)))
        await until(lambda: brokers.store._server.get(paths.subscription(PATH, "billing")) is None)
        async with brokers.client("b") as client:
            await client.admin.create_subscription("orders", "billing", start="earliest")
            async with client.stream_consumer("orders", "billing") as consumer:
                assert await consumer.receive(10) is not None
                await removing
                for _ in range(99):
                    assert await consumer.receive(10) is not None


async def test_a_deletion_that_is_repeated_is_not_held_up_by_the_consumers_of_the_next_one(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, ("b", "a")) as brokers:
        known = await a_subscription(brokers)
        topic = await brokers.call("b", "get_topic", topic="orders")
        about = {"topic": "orders", "subscription": "billing", "subscriptionId": known["subscriptionId"]}
        async with brokers.client("b") as client:
            await client.admin.delete_subscription("orders", "billing")
            async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
                assert await consumer.receive(10) is not None
                assert isinstance(
                    await outcome(brokers.call("a", "delete_subscription", **about)), SubscriptionNotFound
                )
            await client.admin.delete_topic("orders", force=True)
            await client.admin.create_topic("orders")
            async with client.stream_consumer("orders", "billing", start="earliest") as consumer:
                await consumer.receive(0.1)
                repeat = outcome(brokers.call("a", "delete_topic", topic="orders", topicId=topic["topicId"]))
                assert isinstance(await repeat, TopicNotFound)


async def test_a_topic_is_deleted_through_a_broker_that_has_not_heard_of_it_yet(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("b", "a")) as brokers:
        await a_subscription(brokers)
        async with brokers.client("a") as behind, brokers.client("b") as client:
            brokers.store_of("a").lag()
            await client.admin.delete_topic("orders")
            await client.admin.create_topic("orders")
            asyncio.get_running_loop().call_later(1, brokers.store_of("a").catch_up)
            await behind.admin.delete_topic("orders")
            assert brokers.store._server.get(paths.layout(PATH)) is None


CHANGES = [
    ("split_segment", {"segment": 0}),
    ("merge_segments", {"segments": [0, 1]}),
    ("repartition_topic", {"segments": 3}),
    ("terminate_segment", {"descriptor": "0000-7fff-0"}),
]


def without_time(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("seconds", "doneBefore")}


@pytest.mark.parametrize(("call", "arguments"), CHANGES, ids=[call for call, _ in CHANGES])
async def test_a_change_of_the_layout_that_is_repeated_later_gets_the_first_answer(
    call: str, arguments: dict[str, Any], simulation: Simulation
) -> None:
    """A REST call has no request id, and when the change is finalized, nothing remembers the ids either."""
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", segments=2)
        first = await brokers.call("a", call, topic="orders", **arguments)
        await until(lambda: PATH not in brokers.running["b"].topics.committed)
        repeated = await brokers.call("b", call, topic="orders", **arguments)
        assert without_time(repeated) == without_time(first)
        assert (first["doneBefore"], repeated["doneBefore"]) == (False, True)
        for other in range(2):  # Another change comes, and is under way; later it is finished, too.
            last = max(brokers.any().topics.get(PATH).layout.active, key=lambda each: each.segment_id).segment_id
            splitting = asyncio.ensure_future(client.admin.split("orders", last))
            if call != "repartition_topic":
                assert without_time(await brokers.call("b", call, topic="orders", **arguments)) == without_time(first)
            await splitting
            assert brokers.any().topics.get(PATH).layout.epoch == 2 + other


@pytest.mark.parametrize(("call", "arguments"), CHANGES, ids=[call for call, _ in CHANGES])
async def test_a_change_of_the_layout_that_timed_out_is_joined_by_its_repeat(
    call: str, arguments: dict[str, Any], simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", segments=2)
        owner = brokers.owner(0)
        brokers.kill(owner)
        asked = next(iter(brokers.running))
        await until(lambda: not brokers.any().cluster.members.is_live(owner))
        with pytest.raises(TimedOut, match="the change goes on"):
            await brokers.call(asked, call, topic="orders", timeout=1.0, **arguments)
        repeat = asyncio.ensure_future(brokers.call(asked, call, topic="orders", **arguments))
        await brokers.start(owner)
        answer = await repeat
        assert (answer["epoch"], min(answer["children"])) == (1, 2)
        assert without_time(await brokers.call(asked, call, topic="orders", **arguments)) == without_time(answer)
