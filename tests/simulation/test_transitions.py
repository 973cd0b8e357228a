"""Changes of a topic's layout on whole brokers, in virtual time (decision 34)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.broker import topics
from braid.broker.groups import subscriptions
from braid.broker.layouts.finalizing import ADOPTION_S, Finalizing
from braid.broker.layouts.removal import RETRY_S
from braid.broker.layouts.transitions import Transitions
from braid.broker.topics import Topics
from braid.cluster.leader import Leader
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Put
from braid.model.errors import TimedOut, TopicNotFound, TransitionRefused, TransitionRunning
from braid.model.hashing import key_hash
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Move
from braid.model.stored_record import encode
from braid.model.topic import Topic
from braid.model.transition import TransitionStep, plan_split
from braid.storage.objects.disk import DiskObjects
from braid.storage.segment import SegmentStorage
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until


async def a_topic(brokers: Brokers, segments: int = 1) -> None:
    await brokers.call("a", "create_topic", topic="orders", segments=segments)
    await until(lambda: all(brokers.owner(segment) for segment in range(segments)))


def active(brokers: Brokers) -> dict[int, str]:
    return {segment.segment_id: str(segment.hash_range) for segment in brokers.any().topics.get(PATH).layout.active}


@pytest.mark.parametrize("shared", [True, False])
async def test_a_split_replaces_a_segment_by_its_halves(simulation: Simulation, shared: bool) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        async with client.producer("orders") as producer:
            for number in range(20):
                await producer.send(b"%d" % number, key=b"key-%d" % (number % 5))
        done = await brokers.call("b", "split_segment", topic="orders", segment=0)
        assert (done["parents"], done["children"], done["epoch"]) == ([0], [1, 2], 1)
        assert active(brokers) == {1: "0000-7fff", 2: "8000-ffff"}
        async with brokers.client() as later, later.producer("orders") as producer:
            for number in range(20, 40):
                key = b"key-%d" % (number % 5)
                sent = await producer.send(b"%d" % number, key=key)
                assert sent.segment == (1 if key_hash(key) < 0x8000 else 2)


async def test_a_merge_joins_neighbours_and_a_repartition_changes_the_number(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers, 4)
        done = await brokers.call("c", "merge_segments", topic="orders", segments=[2, 1])
        assert (done["parents"], done["children"]) == ([1, 2], [4])
        assert active(brokers) == {0: "0000-3fff", 4: "4000-bfff", 3: "c000-ffff"}
        await brokers.call("a", "repartition_topic", topic="orders", segments=2)
        assert active(brokers) == {5: "0000-7fff", 6: "8000-ffff"}


async def test_a_repartition_that_changes_nothing_is_refused(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a",)) as brokers:
        await a_topic(brokers, 2)
        with pytest.raises(TransitionRefused, match="has 2 segments of equal size already"):
            await brokers.call("a", "repartition_topic", topic="orders", segments=2)


async def test_a_change_for_which_the_topics_record_has_no_room_is_refused_before_it_begins(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the parents would end, and the layout with their children could never be written."""
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await brokers.call("a", "split_segment", topic="orders", segment=0)
        size = len(brokers.any().topics.get(PATH).to_json())
        monkeypatch.setattr(topics, "MAX_CHANGED_BYTES", size + 100)
        with pytest.raises(TransitionRefused, match=r"has 3 segments, with those that are sealed, .* are the most"):
            await brokers.call("a", "split_segment", topic="orders", segment=1)
        assert brokers.any().topics.get(PATH).transition is None
        async with client.producer("orders") as producer:
            await producer.send(b"value", key=b"key")


async def test_one_transition_at_a_time(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers, 2)
        transitions = brokers.running["a"].group_host.transitions
        await transitions.begin(TopicName.parse("orders"), lambda layout: plan_split(layout, 0))
        with pytest.raises(TransitionRunning, match="segments 0 are being replaced"):
            await brokers.call("b", "split_segment", topic="orders", segment=1)


async def test_a_call_that_is_repeated_joins_what_its_first_try_has_begun(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)

        async def split(asked: str) -> list[int]:
            children: list[int] = (await brokers.call(asked, "split_segment", topic="orders", segment=0, requestId=7))[
                "children"
            ]
            return children

        assert [*await asyncio.gather(split("a"), split("b"))] == [[1, 2], [1, 2]]
        assert await split("c") == [1, 2], "it is committed"
        assert brokers.any().topics.get(PATH).layout.epoch == 1


async def hold_up(brokers: Brokers, parent: int) -> str:
    """Kill the owner of a parent, so that a transition waits for it; return the owner."""
    owner = brokers.owner(parent)
    brokers.kill(owner)
    await until(lambda: not brokers.any().cluster.members.is_live(owner))
    return owner


async def folders(brokers: Brokers, owner: str) -> list[str]:
    return await brokers.disks[owner].mount().list_folders(f"/{owner}/wal/{PATH}")


@pytest.mark.parametrize("shared", [True, False])
async def test_a_transition_that_waits_says_why_and_can_be_taken_back(simulation: Simulation, shared: bool) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        gone = await hold_up(brokers, 0)
        survivor = next(iter(brokers.running))
        with pytest.raises(TimedOut, match=f"the owner of segment 0, {gone}, is down"):
            await brokers.call(survivor, "split_segment", topic="orders", segment=0, timeout=2.0)
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        owners = {brokers.owner(1), brokers.owner(2)}
        assert "0000-7fff-1" in await folders(brokers, brokers.owner(1))
        shown = await brokers.call(survivor, "get_layout", topic="orders")
        assert shown["transition"]["step"] == "CREATING"
        assert shown["transition"]["waitsFor"] == [f"the owner of segment 0, {gone}, is down"]
        await brokers.call(survivor, "abort_transition", topic="orders")
        await until(lambda: set(brokers.any().cluster.owners.of_topic(PATH)) == {"0000-ffff-0"})
        for prefix in (paths.topic_segments_prefix(PATH), paths.topic_storage_prefix(PATH)):
            left = {entry.key.split("/")[5] for entry in (await brokers.store.list(prefix)).entries}
            assert left == {"0000-ffff-0"}, "an aborted transition left something behind"
        for owner in owners:
            assert {"0000-7fff-1", "8000-ffff-2"}.isdisjoint(await folders(brokers, owner))
        with pytest.raises(TransitionRefused, match="there is nothing to abort"):
            await brokers.call(survivor, "abort_transition", topic="orders")
        await brokers.start(gone)
        await until(lambda: brokers.owner(0) == gone)
        done = await brokers.call(survivor, "split_segment", topic="orders", segment=0)
        assert done["children"] == [3, 4], "the ids of an aborted transition are never used again"


@pytest.mark.parametrize("call", ["create_subscription", "seek"])
async def test_a_transition_that_is_taken_back_fails_no_call_that_did_not_name_its_children(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    monkeypatch.setattr(Transitions, "drive_later", lambda _self, _path: None)
    find_start, aborted = subscriptions._start, False

    async def abort_first(*arguments: Any) -> Any:
        nonlocal aborted
        if brokers.any().topics.get(PATH).transition is not None and not aborted:
            aborted = True
            await brokers.any().group_host.transitions.abort(TopicName.parse("orders"))
            await until(lambda: set(brokers.any().cluster.owners.of_topic(PATH)) == {"0000-ffff-0"})
        return await find_start(*arguments)

    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        await brokers.any().group_host.transitions.begin(TopicName.parse("orders"), lambda each: plan_split(each, 0))
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        monkeypatch.setattr(subscriptions, "_start", abort_first)
        if call == "seek":
            await client.admin.seek("orders", "billing", "earliest")
        else:
            await client.admin.create_subscription("orders", "mailer")
        assert aborted


async def test_children_of_a_transition_that_was_taken_back_go_when_their_owner_has_its_lease_again(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transitions, "drive_later", lambda _self, _path: None)
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        transitions = brokers.any().group_host.transitions
        await transitions.begin(TopicName.parse("orders"), lambda layout: plan_split(layout, 0))
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        for each in brokers.running.values():  # No leader is faster.
            monkeypatch.setattr(each.group_host.removal, "_leads", lambda: False)
        store, owner = brokers.store_of(brokers.owner(1)), brokers.running[brokers.owner(1)]
        other = next(each for each in brokers.running.values() if each is not owner)
        store.fault = lambda _: Fault.UNAVAILABLE
        await other.group_host.transitions.abort(TopicName.parse("orders"))
        await until(lambda: not owner.cluster.registration.may_act())
        await asyncio.sleep(2 * RETRY_S)
        store.fault = lambda _: Fault.NONE
        await until(lambda: set(other.cluster.owners.of_topic(PATH)) == {"0000-ffff-0"})


async def test_a_transition_ends_when_the_parents_are_consumed_and_clients_know_the_children(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers)
        for name in ("billing", "mailer"):
            await client.admin.create_subscription("orders", name)
        async with client.producer("orders") as producer:
            for number in range(10):
                await producer.send(b"%d" % number)
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        mark = brokers.any().topics.committed.get(PATH)
        assert mark is not None
        assert (mark.parents, mark.child_ids) == ((0,), (1, 2))
        await asyncio.sleep(60)
        finalizing = brokers.any().group_host.finalizing
        assert finalizing.undrained(PATH, mark) == {"billing": [0], "mailer": [0]}
        assert brokers.any().topics.committed.get(PATH) == mark, "nobody has consumed the parent"
        await client.admin.seek("orders", "mailer", "latest")
        async with client.stream_consumer("orders", "billing", name="worker") as consumer:
            for number in range(10):
                message = await consumer.receive(timeout=10)
                assert message is not None
                assert message.value == b"%d" % number
                await consumer.ack(message)
            await until(lambda: PATH not in brokers.any().topics.committed)


async def test_a_client_that_never_says_which_routing_it_has_delays_the_end_of_a_transition_only_for_a_while(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        began = simulation.clock.monotonic()
        assert PATH in brokers.any().topics.committed
        await until(lambda: PATH not in brokers.any().topics.committed)
        assert ADOPTION_S - 1 <= simulation.clock.monotonic() - began <= ADOPTION_S + 10


@pytest.mark.parametrize("late", ["leader", "mark"])
async def test_a_transition_is_ended_by_the_leader_alone_and_no_other_one_with_it(
    late: str, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Finalizing, "look", lambda _self: None)
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        leader = next(each for each in brokers.running.values() if each.cluster.leader.leading)
        mark = leader.topics.committed.known(PATH)
        assert mark is not None
        if late == "leader":
            stale = leader.cluster.leader.fence
            await leader.cluster.leader.stop()
            others = [each for each in brokers.running.values() if each is not leader]
            await until(lambda: any(each.cluster.leader.leading for each in others))
            monkeypatch.setattr(Leader, "fence", property(lambda _self: stale))
        else:
            store, put = leader.topics.view.store, Put(paths.transition(PATH), encode(mark.value))
            txn = store.txn

            async def txn_after_the_next_commit(*arguments: Any) -> Any:
                await brokers.store.txn([], [put])
                return await txn(*arguments)

            monkeypatch.setattr(store, "txn", txn_after_the_next_commit)
        await leader.group_host.finalizing._end(PATH, mark)
        assert await brokers.store.get(paths.transition(PATH)) is not None


async def test_a_parent_stays_in_the_layout_until_its_transition_has_ended(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Finalizing, "undrained", lambda *_: {"not yet": [0]})
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", retention_ms=1_000)
        async with client.producer("orders") as producer:
            await producer.send(b"old")
        await client.admin.split("orders", 0)
        await asyncio.sleep(600)
        assert sorted(brokers.any().topics.get(PATH).layout.segments) == [0, 1, 2], "clients may have the old layout"
        monkeypatch.undo()
        await until(lambda: sorted(brokers.any().topics.get(PATH).layout.segments) == [1, 2], within_s=600)


@pytest.mark.parametrize("shared", [True, False])
async def test_a_sealed_segment_is_dropped_when_its_records_are_gone_and_every_subscription_has_left_it(
    simulation: Simulation, shared: bool
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", retention_ms=120_000)
        await until(lambda: bool(brokers.owner(0)))
        await client.admin.create_subscription("orders", "billing")
        async with client.producer("orders") as producer:
            await producer.send(b"old")
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        await brokers.call("b", "split_segment", topic="orders", segment=1)
        await asyncio.sleep(600)
        assert sorted(brokers.any().topics.get(PATH).layout.segments) == [0, 1, 2, 3, 4], "billing has not consumed it"
        await client.admin.skip("orders", "billing")
        await until(lambda: sorted(brokers.any().topics.get(PATH).layout.segments) == [2, 3, 4], within_s=600)
        await until(lambda: len(brokers.any().cluster.owners.of_topic(PATH)) == 3)
        async with brokers.client() as later, later.producer("orders") as producer:
            await producer.send(b"new")


async def test_a_segment_that_is_dropped_leaves_no_folder_on_a_shared_filesystem(simulation: Simulation) -> None:
    shared = SimulatedDisk(simulation.random)
    objects = DiskObjects(shared, "/shared", random=simulation.random)
    async with running_brokers(simulation, objects=objects) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", retention_ms=120_000)
        async with client.producer("orders") as producer:
            await producer.send(b"old")
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        await asyncio.sleep(10)
        assert "0000-ffff-0" in await shared.list_folders(f"/shared/{PATH}"), "its chunk is there"
        await until(lambda: len(brokers.any().cluster.owners.of_topic(PATH)) == 2, within_s=600)
        assert "0000-ffff-0" not in await shared.list_folders(f"/shared/{PATH}")


async def test_what_is_kept_for_ever_keeps_its_segment(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers)
        async with client.producer("orders") as producer:
            await producer.send(b"old")
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        await brokers.call("b", "split_segment", topic="orders", segment=1)
        await asyncio.sleep(600)
        kept = sorted(brokers.any().topics.get(PATH).layout.segments)
        assert kept == [0, 1, 2, 3, 4], "segment 1 has no records, but its parent has"


async def test_the_parents_go_on_until_every_subscription_has_its_cursors_on_the_children(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers)
        await client.admin.create_subscription("orders", "billing")
        for broker in brokers.running.values():
            monkeypatch.setattr(broker.segments, "on_open", [])  # Otherwise a segment that opens gets its cursors.
        with pytest.raises(TimedOut, match="the change goes on"):
            await brokers.call("a", "split_segment", topic="orders", segment=0, timeout=5.0)
        for broker in brokers.running.values():
            assert await broker.group_host.transitions.waits_for(PATH) == (
                "segment 1 has no cursor yet of billing",
                "segment 2 has no cursor yet of billing",
            )
        async with client.producer("orders") as producer:
            assert (await producer.send(b"still taken")).segment == 0
        for broker in brokers.running.values():
            await broker.group_host.cursor_sweep.sweep(PATH)
        await until(lambda: active(brokers) == {1: "0000-7fff", 2: "8000-ffff"})


@pytest.mark.parametrize("shared", [True, False])
async def test_a_child_that_is_opened_again_knows_what_its_parents_have_stored(
    simulation: Simulation, shared: bool
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client() as client:
        await a_topic(brokers)
        async with client.producer("orders") as producer:
            await producer.send(b"by a producer of the parent")
        await brokers.call("b", "split_segment", topic="orders", segment=0)
        known = brokers.running[brokers.owner(0)].segments.get(PATH, 0).producer_rows()
        owner = brokers.owner(1)
        brokers.kill(owner)
        await brokers.start(owner)
        await until(lambda: brokers.owner(1) == owner)
        child = brokers.running[owner].segments.get(PATH, 1).storage.log
        await child.seal()
        assert len(child.producer_rows()) == len(known) > 0


@pytest.mark.parametrize("reached", [TransitionStep.CREATING, TransitionStep.SEALING])
async def test_a_broker_that_no_longer_leads_takes_no_step(
    reached: TransitionStep, simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Transitions, "drive_later", lambda _self, _path: None)
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        leader = next(each for each in brokers.running.values() if each.cluster.leader.leading)
        transitions, topics = leader.group_host.transitions, leader.topics
        name = TopicName.parse("orders")
        await transitions.begin(name, lambda layout: plan_split(layout, 0))

        async def step() -> bool:
            topic = topics.get(PATH)
            assert topic.transition is not None
            return await transitions._step(name, topic, topic.transition)

        async def is_ready() -> bool:
            return not await transitions.waits_for(PATH)

        if reached is TransitionStep.SEALING:
            await until(step)
        await until(is_ready)
        stale = leader.cluster.leader.fence
        await leader.cluster.leader.stop()
        await until(lambda: any(each.cluster.leader.leading for each in brokers.running.values() if each is not leader))
        monkeypatch.setattr(Leader, "fence", property(lambda _self: stale))
        assert not await step()
        topic = topics.get(PATH)
        assert topic.transition is not None
        assert (topic.layout.epoch, topic.transition.step) == (0, reached)


async def test_a_driver_ends_quietly_when_its_broker_stops(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        await hold_up(brokers, 0)
        await until(lambda: any(each.cluster.leader.leading for each in brokers.running.values()))
        name, leader = next((name, each) for name, each in brokers.running.items() if each.cluster.leader.leading)
        transitions = leader.group_host.transitions
        await transitions.begin(TopicName.parse("orders"), lambda layout: plan_split(layout, 0))
        await until(lambda: PATH in transitions._driving)
        driving = transitions._driving.get(PATH)
        assert driving is not None
        await leader.cluster.view.stop()
        await driving  # It raises nothing.
        brokers.kill(name)


async def test_a_move_that_is_asked_for_while_a_log_ends_is_not_forgotten(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        source = brokers.owner(0)
        target = next(each for each in brokers.running if each != source)
        end_log = SegmentStorage.end_log

        async def moved_meanwhile(storage: SegmentStorage, rider: Any) -> Any:
            owners = brokers.running[target].cluster.owners
            segment = SegmentName.at(PATH, "0000-ffff-0")
            known = owners.known(segment)
            assert known is not None
            if known.value.move is None and known.value.owner == source:
                assert await owners.swap(segment, known.revision, known.value.moving(Move(to=target)))
            return await end_log(storage, rider)

        monkeypatch.setattr(SegmentStorage, "end_log", moved_meanwhile)
        await brokers.call("a", "split_segment", topic="orders", segment=0)
        await until(lambda: brokers.owner(0) == target)
        record = brokers.any().cluster.owners.find(SegmentName.at(PATH, "0000-ffff-0"))
        assert record is not None
        assert record.ended_at == 0


async def test_a_topic_is_deleted_in_the_middle_of_a_split(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(brokers)
        gone = await hold_up(brokers, 0)
        survivor = next(iter(brokers.running))
        splitting = asyncio.create_task(brokers.call(survivor, "split_segment", topic="orders", segment=0))
        await until(lambda: bool(brokers.owner(1) and brokers.owner(2)))
        await client.admin.delete_topic("orders")
        with pytest.raises(TopicNotFound):
            await splitting
        for prefix in (paths.topic_prefix(PATH), paths.topic_segments_prefix(PATH), paths.topic_storage_prefix(PATH)):
            assert not (await brokers.store.list(prefix)).entries
        await brokers.start(gone)


async def test_a_limit_by_size_counts_a_sealed_segment_together_with_those_that_came_after_it(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await client.admin.create_topic("orders", retention_bytes=200_000)
        await until(lambda: brokers.owner(0))

        async def send(kilobytes: int) -> None:
            async with client.producer("orders") as producer:
                await producer.send_many([(b"key-%d" % number, bytes(1_000)) for number in range(kilobytes)])

        def segments() -> set[int]:
            return set(brokers.any().topics.get(PATH).layout.segments)

        await send(150)
        await client.admin.split("orders", 0)
        await send(30)
        await asyncio.sleep(600)
        assert segments() == {0, 1, 2}, "there is room for all of it"
        await send(120)
        await until(lambda: segments() == {1, 2}, 600)
        await asyncio.sleep(600)
        assert segments() == {1, 2}


async def test_many_transitions_in_a_row_leave_little_behind(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await brokers.call("a", "create_topic", topic="orders", policies={"retentionMs": 1_000})
        await until(lambda: bool(brokers.owner(0)))
        for _ in range(15):
            first = min(active(brokers))
            done = await brokers.call("a", "split_segment", topic="orders", segment=first)
            await brokers.call("a", "merge_segments", topic="orders", segments=done["children"])
        topic = brokers.any().topics.get(PATH)
        assert (topic.layout.epoch, topic.layout.next_segment_id) == (30, 46)
        await until(lambda: len(brokers.any().topics.get(PATH).layout.segments) == 1, within_s=1_000)
        await until(lambda: len(brokers.any().cluster.owners.of_topic(PATH)) == 1)
        keys = [entry.key for entry in (await brokers.store.list("/")).entries if PATH in entry.key]
        assert len(keys) < 8, keys


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("step", [TransitionStep.CREATING, TransitionStep.SEALING])
async def test_a_child_whose_owner_is_gone_for_good_before_the_commit_is_given_to_another_broker(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, step: TransitionStep, shared: bool
) -> None:
    """It has no record yet, so nothing can be lost; and without it, a part of the ring would take no writes."""
    async with running_brokers(simulation, ("a", "b", "c", "d"), shared=shared) as brokers:
        async with brokers.client() as client:
            await a_topic(brokers)
            async with client.producer("orders") as producer:
                await producer.send(b"by a producer of the parent")
        held = asyncio.Event()
        commit = Topics.advance

        async def advance(topics: Topics, name: Any, transition: int, change: Any, *more: Any) -> bool:
            if (change is Topic.sealing) is (step is TransitionStep.CREATING):
                await held.wait()
            return await commit(topics, name, transition, change, *more)

        monkeypatch.setattr(Topics, "advance", advance)
        leader = next(name for name, each in brokers.running.items() if each.cluster.leader.leading)
        splitting = asyncio.create_task(brokers.call(leader, "split_segment", topic="orders", segment=0))
        owners = brokers.running[leader].cluster.owners

        def ready() -> bool:
            records = [owners.find(SegmentName.at(PATH, each)) for each in ("0000-7fff-1", "8000-ffff-2")]
            return all(each is not None and (each.inherited or step is TransitionStep.CREATING) for each in records)

        await until(lambda: brokers.owner(1) and brokers.owner(2) and ready())
        victim = next(name for name in (brokers.owner(1), brokers.owner(2)) if name not in (leader, brokers.owner(0)))
        lost = 1 if brokers.owner(1) == victim else 2
        brokers.kill(victim)
        await until(lambda: not brokers.running[leader].cluster.members.is_live(victim))
        held.set()
        await splitting
        await until(lambda: brokers.owner(lost) not in ("", victim))
        child = brokers.running[brokers.owner(lost)].segments.get(PATH, lost)
        await until(lambda: child.takes_publishes)
        parent = brokers.running[brokers.owner(0)].segments.get(PATH, 0).producer_rows()
        await child.storage.log.seal()
        assert len(child.producer_rows()) == len(parent) > 0, "I10: the child does not know what its parent has stored"
