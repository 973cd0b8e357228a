"""Layouts that follow their load, on whole brokers in virtual time."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from msgspec import structs

from braid.broker.layouts.auto_scaling import INTERVAL_S
from braid.broker.topics import Topics
from braid.client.client import Client
from braid.cluster.leader import Leader
from braid.metadata import paths
from braid.metadata.store import Compare, Put
from braid.model.cluster import Registration
from braid.model.errors import (
    InvalidArgument,
    SegmentNotFound,
    SubscriptionExists,
    SubscriptionNotFound,
    TimedOut,
    TopicNotFound,
    TransitionRefused,
)
from braid.model.hashing import key_hash
from braid.model.ids import Revision
from braid.model.topic import AutoScaleOverride
from braid.testing.checkers.fence_checker import FenceChecker
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

KEYS = [b"key-%d" % number for number in range(100)]
ON: dict[str, Any] = {
    "enabled": True,
    "splitMsgRateInThreshold": 20,
    "mergeMsgRateInThreshold": 2,
    "mergeWindowSeconds": 60,
    "mergeCooldownSeconds": 60,
}
"""A load that a simulation makes in a moment is much here."""


async def a_topic(brokers: Brokers, segments: int = 1, **policy: Any) -> None:
    await brokers.call("a", "create_topic", topic="orders", segments=segments)
    await until(lambda: all(brokers.owner(segment) for segment in range(segments)))
    if policy:
        await brokers.call("a", "set_auto_scale_policy", topic="orders", policy=policy)


@contextlib.asynccontextmanager
async def load(client: Client, rate: int, keys: Sequence[bytes | None] = KEYS) -> AsyncIterator[None]:
    """Publish so many records a second, one after the other, with these keys in turn."""

    async def publish() -> None:
        async with client.producer("orders") as producer:
            number = 0
            while True:
                await producer.send(b"value", key=keys[number % len(keys)])
                number += 1
                await asyncio.sleep(1 / rate)

    task = asyncio.create_task(publish())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def active(brokers: Brokers) -> dict[int, str]:
    return {segment.segment_id: str(segment.hash_range) for segment in brokers.any().topics.get(PATH).layout.active}


def leader_of(brokers: Brokers) -> str:
    return next(name for name, each in brokers.running.items() if each.cluster.leader.leading)


async def proposal(brokers: Brokers, name: str = "b") -> dict[str, Any]:
    found: dict[str, Any] = await brokers.call(name, "propose_auto_scaling", topic="orders")
    return found


async def test_a_hot_segment_is_split_where_half_of_its_load_is(simulation: Simulation) -> None:
    corner = [key for key in (b"k%d" % number for number in range(20_000)) if key_hash(key) < 0x1000][:100]
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON, maxSegments=2)
        async with load(client, 50, corner):
            await until(lambda: len(active(brokers)) == 2, 120)
        at = int(active(brokers)[2].partition("-")[0], 16)
        below = sum(key_hash(key) < at for key in corner)
        assert 45 <= below <= 55, f"{below} of 100 keys are below {at:04x}"


async def test_layouts_stay_as_they_are_while_no_policy_is_on(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **(ON | {"enabled": False}))
        async with load(client, 50):
            await asyncio.sleep(120)
            found = await proposal(brokers)
        assert len(active(brokers)) == 1
        assert (found["enabled"], found["action"]) == (False, None)
        assert "waits until the key hashes of its records are measured" in found["reason"], "nobody had asked before"
        async with load(client, 50):
            await asyncio.sleep(20)
            found = await proposal(brokers)
        assert (found["enabled"], found["action"], found["segments"]) == (False, "split", [0])
        assert len(active(brokers)) == 1, "asking changes nothing"


async def test_a_load_below_the_threshold_changes_nothing(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON)
        async with load(client, 10):
            await asyncio.sleep(120)
        assert len(active(brokers)) == 1


async def test_cold_segments_are_merged_and_no_more_than_may_be(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers, 4, **ON, minSegments=2)
        began = simulation.clock.monotonic()
        await until(lambda: len(active(brokers)) == 3, 180)
        assert simulation.clock.monotonic() - began >= 60, "they were not cold for the whole window"
        await until(lambda: len(active(brokers)) == 2, 180)
        await asyncio.sleep(300)
        assert len(active(brokers)) == 2


@pytest.mark.parametrize(("field", "segments"), [("split_at", 1), ("merged_at", 2)])
async def test_a_cooldown_ends_though_the_clock_that_wrote_its_beginning_was_far_ahead(
    field: str, segments: int, simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, segments, **ON, splitCooldownSeconds=60, maxSegments=2)
        topic = brokers.any().topics.get(PATH)
        ahead = structs.replace(topic, **{field: simulation.clock.now_us() + 365 * 86_400_000_000})
        await brokers.store.txn([], [Put(paths.layout(PATH), ahead.to_json())])
        async with contextlib.AsyncExitStack() as stack:
            for number in range(2 if field == "split_at" else 0):
                consumer = client.stream_consumer("orders", "billing", name=f"worker-{number}")
                await stack.enter_async_context(consumer)
            await asyncio.sleep(50)
            assert len(active(brokers)) == segments
            await until(lambda: len(active(brokers)) == 3 - segments, 60)


async def test_a_topic_gets_a_segment_for_each_consumer(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON, splitCooldownSeconds=0, maxSegments=3)
        async with contextlib.AsyncExitStack() as stack:
            for number in range(4):
                consumer = client.stream_consumer("orders", "billing", name=f"worker-{number}")
                await stack.enter_async_context(consumer)
            await until(lambda: len(active(brokers)) == 3, 60)
            found = await proposal(brokers)
            assert "A subscription has 4 consumers" in found["findings"][0]
            assert "max_segments is 3" in found["findings"][0]


async def test_a_topic_wins_over_its_namespace(simulation: Simulation) -> None:
    place = {"tenant": "public", "namespace": "default"}
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await brokers.call("b", "set_namespace_auto_scale_policy", **place, policy=ON | {"enabled": False})
        await brokers.call("b", "set_auto_scale_policy", topic="orders", policy={"maxSegments": 2})
        async with load(client, 50):
            await asyncio.sleep(60)
            assert len(active(brokers)) == 1, "the namespace says no"
            await brokers.call("c", "set_auto_scale_policy", topic="orders", policy={"enabled": True, "maxSegments": 2})
            await until(lambda: len(active(brokers)) == 2, 120)
            await asyncio.sleep(120)
        assert len(active(brokers)) == 2, "the topic's own limit holds"
        kept = await brokers.call("a", "get_auto_scale_policy", topic="orders")
        assert kept == {"enabled": True, "maxSegments": 2}, "it did not survive the split"


async def test_policies_are_set_read_and_deleted_on_both_levels(simulation: Simulation) -> None:
    place = {"tenant": "public", "namespace": "default"}
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers)
        assert await brokers.call("a", "get_auto_scale_policy", topic="orders") == {}
        assert await brokers.call("a", "get_namespace_auto_scale_policy", **place) == {}
        await brokers.call("a", "set_auto_scale_policy", topic="orders", policy={"maxSegments": 4})
        await brokers.call("a", "set_namespace_auto_scale_policy", **place, policy={"minSegments": 2})
        assert await brokers.call("a", "get_auto_scale_policy", topic="orders") == {"maxSegments": 4}
        assert await brokers.call("a", "get_namespace_auto_scale_policy", **place) == {"minSegments": 2}
        policy = (await proposal(brokers, "a"))["policy"]
        assert (policy["maxSegments"], policy["minSegments"], policy["mergeWindowSeconds"]) == (4, 2, 300)
        assert policy.keys() == set(AutoScaleOverride.__struct_encode_fields__)
        await brokers.call("a", "delete_auto_scale_policy", topic="orders")
        await brokers.call("a", "delete_namespace_auto_scale_policy", **place)
        assert await brokers.call("a", "get_auto_scale_policy", topic="orders") == {}
        assert not (await brokers.store.list("/namespaces/")).entries


async def test_a_policy_that_cannot_be_is_refused(simulation: Simulation) -> None:
    place = {"tenant": "public", "namespace": "default"}
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers)
        await brokers.call("a", "set_namespace_auto_scale_policy", **place, policy={"maxSegments": 4})
        for policy in ({"minSegments": 5}, {"maxSegments": 0}, {"maxSegmentz": 4}, {"maxSegments": "4"}):
            with pytest.raises(InvalidArgument):
                await brokers.call("a", "set_auto_scale_policy", topic="orders", policy=policy)
        with pytest.raises(InvalidArgument, match="min_segments is 65"):
            await brokers.call("a", "set_namespace_auto_scale_policy", **place, policy={"minSegments": 65})
        for call in ("get_auto_scale_policy", "set_auto_scale_policy", "delete_auto_scale_policy"):
            with pytest.raises(TopicNotFound):
                await brokers.call("a", call, topic="absent")


async def test_policies_that_contradict_each_other_later_switch_it_off_and_say_so(
    simulation: Simulation, caplog: pytest.LogCaptureFixture
) -> None:
    place = {"tenant": "public", "namespace": "default"}
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON, minSegments=10)
        await brokers.call("b", "set_namespace_auto_scale_policy", **place, policy={"maxSegments": 4})
        async with load(client, 50):
            await asyncio.sleep(60)
            found = await proposal(brokers)
        assert len(active(brokers)) == 1
        assert (found["enabled"], found["policy"]) == (False, None)
        assert found["findings"] == [found["reason"]]
        why = "min_segments is 10, above max_segments, which is 4"
        assert why in found["reason"]
        assert sum(why in record.getMessage() for record in caplog.records) == 1, "the log says it once"


async def test_a_cooldown_survives_the_end_of_the_leader(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b", "c", "d")) as brokers, brokers.client(timeout=120) as client:
        few = {"splitMsgRateInThreshold": 8, "mergeMsgRateInThreshold": 0}
        await a_topic(brokers, **(ON | few), splitCooldownSeconds=200)
        async with load(client, 30):
            await until(lambda: len(active(brokers)) == 2, 120)
            began = simulation.clock.monotonic()
            brokers.kill(leader_of(brokers))
            await until(lambda: any(each.cluster.leader.leading for each in brokers.running.values()), 60)
            await asyncio.sleep(100)
            assert len(active(brokers)) == 2, "the new leader forgot the last split"
            assert "because of the last split" in (await proposal(brokers, leader_of(brokers)))["reason"]
            await until(lambda: len(active(brokers)) == 3, 200)
            assert simulation.clock.monotonic() - began >= 200 - 2 * INTERVAL_S


async def test_an_aborted_split_costs_no_cooldown(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON, splitCooldownSeconds=3_600, maxSegments=2)
        transitions = brokers.running[leader_of(brokers)].group_host.transitions

        async def not_yet(*_: Any) -> tuple[str, ...]:
            return ("an owner that does not answer",)

        async with load(client, 50):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(transitions, "_asked", not_yet)
                await until(lambda: brokers.any().topics.get(PATH).transition is not None, 120)
                await brokers.call("a", "abort_transition", topic="orders")
            await until(lambda: len(active(brokers)) == 2, 60)


async def test_a_change_that_cannot_begin_says_why(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON)
        old = Registration(address="old:6660", admin="", version="0.1.0", state="stopping")
        await brokers.store.txn([], [Put(paths.broker("old"), old.to_json())])
        async with load(client, 50):
            await asyncio.sleep(60)
            found = await proposal(brokers)
        assert (found["action"], len(active(brokers))) == ("split", 1)
        assert any("broker old runs version 0.1.0" in each for each in found["findings"])


async def test_a_broker_that_no_longer_leads_begins_no_change(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON)
        former = Compare(paths.CLUSTER_LEADER, Revision(1))
        monkeypatch.setattr(Leader, "fence", property(lambda _: former))
        begun = []
        brokers.any().topics.on_change.append(lambda path: begun.append(brokers.any().topics.get(path).transition))
        async with load(client, 50):
            await asyncio.sleep(60)
        assert not any(begun), "two brokers that both believe to lead would both change layouts"


async def test_a_key_that_is_the_load_is_named_and_not_split(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON)
        async with load(client, 50, [b"one"] * 19 + [b"two"]):
            await asyncio.sleep(60)
            found = await proposal(brokers)
            stats = await brokers.call("b", "topic_stats", topic="orders")
        assert len(active(brokers)) == 1
        assert any("have 95% of the load of segment 0" in each for each in found["findings"])
        (segment,) = stats["segments"].values()
        assert segment["hotKeyHashes"]["start"] <= key_hash(b"one") <= segment["hotKeyHashes"]["end"]
        assert (segment["hotKeyShare"], segment["recordsInPerS"] > 40) == (pytest.approx(0.95, abs=0.01), True)


async def test_any_broker_tells_how_the_load_of_each_segment_spreads_over_its_key_hashes(
    simulation: Simulation,
) -> None:
    corner = [key for key in (b"k%d" % number for number in range(20_000)) if 0x8000 <= key_hash(key) < 0x9000][:98]
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, 2)
        asked = {"topic": "orders"}
        first = await brokers.call("a", "get_key_hashes", **asked)
        assert all(set(each["shares"]) == {0} for each in first["segments"].values()), "nobody had asked before"
        async with load(client, 50, [*corner, *([next(each for each in KEYS if key_hash(each) < 0x8000)] * 98)]):
            await asyncio.sleep(60)
            answers = [await brokers.call(name, "get_key_hashes", **asked) for name in brokers.running]
        assert all(each["segments"].keys() == {"0", "1"} and not each["unknown"] for each in answers)
        one_key, upper = answers[0]["segments"]["0"], answers[0]["segments"]["1"]
        assert sum(one_key["shares"]) == pytest.approx(1, abs=0.001)
        assert (len(one_key["shares"]), max(one_key["shares"])) == (128, 1)
        assert (one_key["hotKey"], one_key["splitHelps"]) == (True, False)
        # 128 parts of 0x8000 hashes: the sixteen lowest ones have all of it.
        assert sum(upper["shares"][:16]) == pytest.approx(1, abs=0.001)
        assert (upper["hotKey"], upper["splitHelps"]) == (False, True)
        at = int(upper["splitAt"], 16)
        assert 0.45 <= sum(key_hash(key) < at for key in corner) / len(corner) <= 0.55
        assert upper["lowerShare"] + upper["upperShare"] == pytest.approx(1, abs=0.001)
        await brokers.move(0, other := next(name for name in brokers.running if name != brokers.owner(1)))
        brokers.kill(other)
        left = await brokers.call(brokers.owner(1), "get_key_hashes", **asked)
        assert left["segments"].keys() == {"1"}
        (why,) = left["unknown"]
        assert f"segments on broker {other} is not known" in why


async def test_records_without_keys_are_spread_by_splits(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, **ON, maxSegments=2)
        async with load(client, 50, [None]):
            await until(lambda: len(active(brokers)) == 2, 120)
        assert active(brokers) == {1: "0000-7fff", 2: "8000-ffff"}


async def test_nothing_is_decided_about_a_broker_that_does_not_answer(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers, 3, **ON)
        leader = leader_of(brokers)
        for segment in range(3):
            if brokers.owner(segment) == leader:
                await brokers.move(segment, next(name for name in brokers.running if name != leader))
        for victim in [name for name in brokers.running if name != leader]:
            brokers.kill(victim)
        await asyncio.sleep(120)
        assert len(active(brokers)) == 3
        found = await proposal(brokers, leader)
        assert (found["action"], len(found["findings"])) == (None, 2)
        with pytest.raises(TimedOut):
            await brokers.call(leader, "merge_segments", topic="orders", segments=[0, 1], timeout=1.0)


async def test_records_keep_their_order_while_the_layout_follows_the_load(simulation: Simulation) -> None:
    """A burst, from one segment to several, and back when it is over."""
    policy = ON | {"splitCooldownSeconds": 10, "mergeCooldownSeconds": 10, "mergeWindowSeconds": 20}
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await a_topic(brokers, **policy)
        await client.admin.create_subscription("orders", "billing")
        async with client.producer("orders") as producer:
            for number in range(6_000):
                await producer.send(b"%d" % number, key=KEYS[number % len(KEYS)])
                await asyncio.sleep(0.01)
        assert len(active(brokers)) > 3
        await until(lambda: len(active(brokers)) == 1, 600)
        last: dict[bytes | None, int] = {}
        async with client.stream_consumer("orders", "billing", name="worker") as consumer:
            for _ in range(6_000):
                message = await consumer.receive(timeout=60)
                assert message is not None, "I5: records are missing"
                assert last.get(message.key, -1) < int(message.value), "I4: out of order"
                last[message.key] = int(message.value)
                await consumer.ack(message)
        assert {number % len(KEYS) for number in last.values()} == set(range(len(KEYS)))
        assert min(last.values()) >= 5_900


# Single segments.


async def test_a_segment_that_is_terminated_makes_way_for_one_of_the_same_range(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers, 2)
        await client.admin.create_subscription("orders", "billing")
        async with client.producer("orders") as producer:
            for number in range(40):
                await producer.send(b"%d" % number, key=KEYS[number % 7])
                if number == 20:
                    done = await client.admin.terminate_segment("orders", "0000-7fff-0")
                    assert (done["parents"], done["children"]) == ([0], [2])
        assert active(brokers) == {2: "0000-7fff", 1: "8000-ffff"}
        again = await client.admin.terminate_segment("orders", "0000-7fff-0")
        assert (again["children"], again["epoch"]) == ([2], 1), "it had ended"
        with pytest.raises(TransitionRefused, match="not consumed by billing"):
            await client.admin.delete_segment("orders", "0000-7fff-0")
        last: dict[bytes | None, int] = {}
        async with client.stream_consumer("orders", "billing", name="worker") as consumer:
            for _ in range(40):
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert last.get(message.key, -1) < int(message.value), "I4: out of order"
                last[message.key] = int(message.value)
                await consumer.ack(message)
        await until(lambda: brokers.any().topics.committed.get(PATH) is None)
        with pytest.raises(TransitionRefused, match="takes writes"):
            await client.admin.delete_segment("orders", "8000-ffff-1")
        broken: list[BaseException] = []
        FenceChecker(brokers.store, broken.append)
        await client.admin.delete_segment("orders", "0000-7fff-0")
        assert not broken
        assert set(brokers.any().topics.get(PATH).layout.segments) == {1, 2}
        await until(lambda: set(brokers.any().cluster.owners.of_topic(PATH)) == {"0000-7fff-2", "8000-ffff-1"})
        with pytest.raises(SegmentNotFound):
            await client.admin.delete_segment("orders", "0000-7fff-0")


async def test_a_segment_is_kept_when_a_seek_back_is_faster_than_its_deletion(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        async with client.producer("orders") as producer:
            await producer.send(b"value")
        await client.admin.terminate_segment("orders", "0000-ffff-0")
        await client.admin.skip("orders", "billing")
        await until(lambda: brokers.any().topics.committed.get(PATH) is None)
        prune = Topics.prune

        async def prune_after_a_seek(*arguments: Any) -> bool:
            await client.admin.seek("orders", "billing", "earliest")
            return await prune(*arguments)

        monkeypatch.setattr(Topics, "prune", prune_after_a_seek)
        with pytest.raises(TransitionRefused, match="not consumed by billing"):
            await client.admin.delete_segment("orders", "0000-ffff-0")
        assert 0 in brokers.any().topics.get(PATH).layout.segments


async def test_a_segment_is_kept_when_a_subscription_is_created_in_the_moment_of_its_deletion(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The subscription exists before the segment is gone, so it is to see the segment's records (I5)."""
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client() as client:
        await a_topic(brokers)
        async with client.producer("orders") as producer:
            await producer.send(b"value")
        await client.admin.terminate_segment("orders", "0000-ffff-0")
        await until(lambda: brokers.any().topics.committed.get(PATH) is None)
        prune = Topics.prune

        async def prune_after_a_creation(*arguments: Any) -> bool:
            with contextlib.suppress(SubscriptionExists):
                await client.admin.create_subscription("orders", "billing", start="earliest")
            return await prune(*arguments)

        monkeypatch.setattr(Topics, "prune", prune_after_a_creation)
        with pytest.raises(TransitionRefused, match="not consumed by billing"):
            await client.admin.delete_segment("orders", "0000-ffff-0")
        async with client.stream_consumer("orders", "billing", name="worker") as consumer:
            message = await consumer.receive(timeout=60)
        assert message is not None
        assert message.value == b"value"


async def test_a_segment_is_created_by_a_change_of_layout_only(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        await client.admin.create_segment("orders", "0000-ffff-0", subscriptions=["billing"])
        with pytest.raises(SubscriptionNotFound):
            await client.admin.create_segment("orders", "0000-ffff-0", subscriptions=["absent"])
        with pytest.raises(TransitionRefused, match="its hashes belong to other segments"):
            await client.admin.create_segment("orders", "0000-7fff-1")
