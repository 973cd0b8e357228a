"""Replicated segments on bad days, each by itself, with whole brokers in virtual time."""

from __future__ import annotations

import asyncio

import pytest

from braid.client.client import Client
from braid.model.errors import NotEnoughReplicas, OutOfSequence, TimedOut
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import OwnershipState
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, Brokers, read_all, record_of, running_brokers
from tests.kits.replicas import check, complete, in_sync, replicated, send, send_all
from tests.kits.waiting import until


@SHARED
async def test_a_killed_owner_loses_nothing_and_comes_back_as_a_follower(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 50)
        owner = brokers.owner(0)
        brokers.kill(owner)
        await send(producer, 50, 100)
        assert brokers.owner(0) not in ("", owner)
        assert record_of(brokers).epoch == 2
        await brokers.start(owner)
        assert await complete(brokers) != owner
        await check(client, 100)


@SHARED
async def test_a_lost_disk_loses_nothing_and_its_copy_is_made_again(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 50)
        lost = brokers.owner(0)
        brokers.kill(lost)
        brokers.lose_disk(lost)
        await send(producer, 50, 60)
        await brokers.start(lost)
        await complete(brokers)
        await send(producer, 60, 70)
        brokers.kill(brokers.owner(0))  # Now the new copy is needed: two of three must answer.
        await send(producer, 70, 80)
        await check(client, 80)


@SHARED
async def test_an_owner_that_comes_back_without_its_disk_is_replaced_by_a_vote(
    simulation: Simulation, shared: bool
) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 30)
        lost = brokers.owner(0)
        brokers.kill(lost)
        brokers.lose_disk(lost)
        await brokers.start(lost)  # Its lease may still be there: the leader has not noticed.
        await send(producer, 30, 60)
        await complete(brokers)
        await check(client, 60)


async def test_no_record_is_shown_or_confirmed_before_enough_disks_hold_it(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 10)
        owner = brokers.owner(0)
        log = brokers.running[owner].segments.get(PATH, 0).storage.log
        for other in "abc":
            if other != owner:
                brokers.network.cut(owner, other)
        sending = asyncio.ensure_future(producer.send(b"10"))
        await until(lambda: log.written.value == 11)
        await asyncio.sleep(1)
        assert not sending.done()
        assert log.confirmed.value == 10
        for other in "abc":
            brokers.network.heal(other)
        await sending
        await check(client, 11)


async def test_publishes_are_refused_while_too_few_replicas_are_there(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 10)
        owner = brokers.owner(0)
        followers = [each for each in "abc" if each != owner]
        for each in followers:
            brokers.kill(each)
        segment = brokers.running[owner].segments.get(PATH, 0)
        await until(lambda: not any(each.in_sync for each in segment.followers))
        async with brokers.client(owner, timeout=5) as hasty, hasty.producer("orders") as other:
            with pytest.raises((NotEnoughReplicas, TimedOut), match="replicas"):
                await other.send(b"too early")
        await brokers.start(followers[0])
        await send(producer, 10, 20)
        await check(client, 20)


@SHARED
async def test_a_deposed_owner_drops_what_it_could_not_confirm(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 20)
        owner = brokers.owner(0)
        log = brokers.running[owner].segments.get(PATH, 0).storage.log
        for other in "abc":
            if other != owner:
                brokers.network.cut(owner, other)
        brokers.store_of(owner).disconnect()
        async with brokers.client(owner) as stubborn, stubborn.producer("orders") as alone:
            pending = [asyncio.ensure_future(alone.send(b"never %d" % number)) for number in range(5)]
            await until(lambda: log.written.value == 25)
            await send(producer, 20, 30)  # To the new owner: the old one confirms nothing.
            assert log.confirmed.value == 20
            brokers.store_of(owner).reconnect()
            for other in "abc":
                brokers.network.heal(other)
            await complete(brokers)
            await asyncio.gather(*pending)  # The new owner takes them: they are stored once.
        brokers.kill(await complete(brokers))
        await until(lambda: brokers.owner(0) == owner)  # Of equal copies, that of the first replica wins.
        found = await read_all(client, 35)
        assert found[:30] == [b"%d" % number for number in range(30)]
        assert sorted(found[30:]) == [b"never %d" % number for number in range(5)]


async def test_a_blank_disk_is_no_witness(simulation: Simulation) -> None:
    """Confirmed on two of three: with one of them gone and the other one blank, the third must not continue alone."""
    async with replicated(simulation) as (brokers, client, producer):
        owner = brokers.owner(0)
        lagging, witness = (each for each in "abc" if each != owner)
        brokers.network.cut(owner, lagging)
        await send(producer, 0, 20)
        brokers.kill(witness)
        brokers.lose_disk(witness)
        brokers.kill(owner)
        for other in "abc":
            brokers.network.heal(other)
        await brokers.start(witness)
        await asyncio.sleep(60)
        assert record_of(brokers).state is not OwnershipState.SERVING or not brokers.owner(0)
        await brokers.start(owner)
        await send(producer, 20, 30)
        await check(client, 30)


@SHARED
async def test_a_move_and_a_drain_keep_the_replicas(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, ("a", "b", "c", "d"), shared=shared) as (brokers, client, producer):
        await send(producer, 0, 20)
        target = next(each for each in record_of(brokers).replicas if each != brokers.owner(0))
        await client.admin.move("orders", to=target)
        await complete(brokers)
        await send(producer, 20, 40)
        assert brokers.owner(0) == target
        await client.admin.drain(target)
        await until(lambda: target not in record_of(brokers).replicas and brokers.owner(0) not in ("", target))
        await complete(brokers)
        await send(producer, 40, 60)
        await check(client, 60)


@SHARED
async def test_an_orderly_stop_hands_over_and_the_rest_goes_on(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        for first in (0, 10, 20):
            await send(producer, first, first + 10)
            owner = await complete(brokers)
            await brokers.stop(owner)
            await until(lambda: brokers.owner(0))
            await brokers.start(owner)
        await complete(brokers)
        await send(producer, 30, 40)
        await check(client, 40)


async def test_a_follower_that_was_stopped_goes_on_in_the_file_that_its_owner_still_writes(
    simulation: Simulation,
) -> None:
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 20)
        follower = next(each for each in "abc" if each != brokers.owner(0))
        await brokers.stop(follower)
        await send(producer, 20, 30)
        await brokers.start(follower)
        await complete(brokers)
        await check(client, 30)


async def test_a_blank_disk_follows_an_idle_log_that_chunks_hold(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client(timeout=120) as client:
        await client.admin.create_topic("orders", replicas=2, confirm=2)
        async with client.producer("orders") as producer:
            owner = await complete(brokers, followers=1)
            await send(producer, 0, 20)
            await brokers.running[owner].segments.get(PATH, 0).storage.export_now()
            lost = "b" if owner == "a" else "a"
            brokers.kill(lost)
            brokers.lose_disk(lost)
            await brokers.start(lost)
            assert await complete(brokers, followers=1) == owner
            await send(producer, 20, 30)
            await check(client, 30)


@SHARED
async def test_replicas_take_over_from_an_owner_whose_disk_is_full_when_it_starts(
    simulation: Simulation, shared: bool
) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        await send(producer, 0, 20)
        owner = brokers.owner(0)
        brokers.kill(owner)
        brokers.disks[owner].faults = DiskFaults(capacity_bytes=0)
        await brokers.start(owner)
        await send(producer, 20, 30)
        await until(lambda: brokers.owner(0) not in ("", owner))
        brokers.disks[owner].faults = DiskFaults()
        await complete(brokers)
        await check(client, 30)


@SHARED
async def test_a_segment_leaves_a_disk_that_fills_up(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        values = [b"%d" % number + bytes(100_000) for number in range(30)]
        owner = brokers.owner(0)
        brokers.disks[owner].faults = DiskFaults(capacity_bytes=1_000_000)
        sending = asyncio.create_task(send_all(producer, values))
        log = brokers.running[owner].segments.get(PATH, 0).storage.log
        await until(lambda: log.is_full)
        await client.admin.move("orders", to=next(each for each in "abc" if each != owner))
        await sending
        brokers.disks[owner].faults = DiskFaults()
        await complete(brokers)
        assert await read_all(client, len(values)) == values


async def test_a_new_file_holds_up_no_record(simulation: Simulation) -> None:
    """Producers that wait for each record send nothing that would push the last one."""

    async def load(client: Client) -> None:
        async with client.producer("orders") as producer:
            await send_all(producer, [bytes(4_000)] * 700)

    async with replicated(simulation) as (_, client, _):
        await asyncio.gather(load(client), load(client))


async def test_a_record_is_confirmed_though_its_link_breaks_while_a_slow_disk_writes_it(
    simulation: Simulation,
) -> None:
    async with replicated(simulation) as (brokers, _, producer):
        await send(producer, 0, 10)
        owner = brokers.owner(0)
        lost, follower = [each for each in brokers.running if each != owner]
        brokers.kill(lost)
        await complete(brokers, followers=1)
        brokers.disks[owner].faults = DiskFaults(sync_s=(0.3, 0.3))
        brokers.network.cut(owner, follower)
        sending = asyncio.create_task(producer.send(b"10"))
        log = brokers.running[owner].segments.get(PATH, 0).storage.log
        await until(lambda: log.end == 11)
        brokers.network.reset(owner, follower)
        brokers.network.heal(owner, follower)
        await sending


async def test_a_follower_of_a_child_knows_the_producers_of_its_parents(simulation: Simulation) -> None:
    """Its own files say that they know all producers, when the owner has begun a second file."""
    async with replicated(simulation) as (brokers, client, producer):
        await send(producer, 0, 10)
        parent = brokers.running[brokers.owner(0)].segments.get(PATH, 0)
        (known,) = parent.storage.log._producers
        await client.admin.split("orders", 0)
        child = SegmentName.of(TopicName.parse(PATH), brokers.any().topics.get(PATH).layout.segment(1))
        record = brokers.any().cluster.owners.find(child)
        assert record is not None
        for part in (range(10, 50), range(50, 90)):
            for number in part:
                await producer.send(b"%d" % number, key=b"%d" % number)
            await brokers.running[record.owner].segments.get(PATH, 1).storage.log.rotate()
        await send(producer, 90, 130)  # Only files have these: chunks would tell all producers.
        await until(lambda: len(_followers(brokers, 1)) == 2)
        brokers.kill(record.owner)
        await until(lambda: brokers.owner(1))
        heir = brokers.running[brokers.owner(1)].segments.get(PATH, 1)
        assert heir.storage.log._producers.next_sequence(known) == 10


def _followers(brokers: Brokers, segment: int) -> list[str]:
    found = [each for broker in brokers.running.values() for each in broker.segments.of_topic(PATH)]
    followers = [each for owned in found if owned.name.id == segment for each in owned.followers]
    return [each.broker for each in followers if each.in_sync and each.member and not each.behind]


async def test_pieces_of_a_session_that_is_over_are_refused(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, _, producer):
        await send(producer, 0, 5)
        follower = next(each for each in "abc" if each != brokers.owner(0))
        copies = brokers.running[follower].segment_host.replicas
        name = str(brokers.running[brokers.owner(0)].segments.get(PATH, 0).name)
        about = {"segment": name, "topic_id": 1, "epoch": 1, "file_base": 0, "covered": 0}
        for session in (0, 2):
            with pytest.raises(OutOfSequence, match="begin anew"):
                await copies.append({**about, "session": session}, b"")
        with pytest.raises(OutOfSequence, match="begin anew"):
            await copies.cut({**about, "session": 2, "end": 0})
        await send(producer, 5, 10)
        await complete(brokers)


@SHARED
async def test_replicas_come_and_go_while_producers_send(simulation: Simulation, shared: bool) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client(timeout=120) as client:
        await client.admin.create_topic("orders")
        async with client.producer("orders") as producer:
            sent = 0

            async def keep_sending() -> None:
                nonlocal sent
                while True:
                    await producer.send(b"%d" % sent)
                    sent += 1
                    await asyncio.sleep(0.01)

            sending = asyncio.ensure_future(keep_sending())
            await client.admin.update_topic("orders", replicas=3, confirm=2)
            await complete(brokers)
            await until(lambda: len(record_of(brokers).replicas) == 3)
            brokers.kill(lost := brokers.owner(0))
            await until(lambda: brokers.owner(0) not in ("", lost))
            await brokers.start(lost)
            await complete(brokers)
            await client.admin.update_topic("orders", replicas=1, durability="fsync")
            await until(lambda: len(record_of(brokers).replicas) < 2)
            await until(lambda: brokers.owner(0))
            before = sent
            await until(lambda: sent > before + 10)
            sending.cancel()
            await asyncio.wait([sending])
            await producer.flush()
        found = await read_all(client, sent)
        assert found[:sent] == [b"%d" % number for number in range(sent)]


async def test_children_of_a_split_are_replicated_from_their_first_record(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client, producer):
        for number in range(40):
            await producer.send(b"%d" % number, key=b"%d" % number)
        await client.admin.split("orders", 0)
        for number in range(40, 80):
            await producer.send(b"%d" % number, key=b"%d" % number)
        records = brokers.any().cluster.owners.of_topic(PATH)
        assert all(len(record.replicas) == 3 for record in records.values())
        brokers.kill(next(record.owner for key, record in sorted(records.items()) if key.endswith("-1")))
        for number in range(80, 120):
            await producer.send(b"%d" % number, key=b"%d" % number)
        assert sorted(await read_all(client, 120), key=int) == [b"%d" % number for number in range(120)]


def followers_of(brokers: Brokers, segment: int) -> dict[str, bool]:
    """Of a segment that is served: its followers, and whether the copy of each counts."""
    served = (each for broker in brokers.running.values() for each in broker.segments.of_topic(PATH))
    owner = next((each for each in served if each.name.id == segment and each.serving), None)
    return {each.broker: each.in_sync and each.member for each in owner.followers} if owner is not None else {}


@SHARED
async def test_a_lost_copy_of_a_log_that_has_ended_is_made_again(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client, producer):
        for number in range(40):
            await producer.send(b"%d" % number, key=b"%d" % number)
        async with client.stream_consumer("orders", "late", start="earliest") as consumer:  # It keeps the parent.
            await consumer.receive()
        await client.admin.split("orders", 0)
        await until(lambda: list(followers_of(brokers, 0).values()) == [True, True])
        await asyncio.sleep(30)  # Chunks hold all of the parent.
        owner = brokers.owner(0)
        for lost in followers_of(brokers, 0):
            brokers.kill(lost)
            brokers.lose_disk(lost)
            await until(lambda: False in followers_of(brokers, 0).values())
            await brokers.start(lost)
            for segment in range(3):
                await until(lambda: list(followers_of(brokers, segment).values()) == [True, True])  # noqa: B023
        brokers.kill(owner)  # Now chunks are all that is left, and both copies vote for them.
        await until(lambda: brokers.owner(0) not in ("", owner))
        assert sorted(await read_all(client, 40), key=int) == [b"%d" % number for number in range(40)]


@SHARED
async def test_a_drain_moves_the_copies_of_a_log_that_has_ended(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, ("a", "b", "c", "d"), shared=shared) as (brokers, client, producer):
        for number in range(40):
            await producer.send(b"%d" % number, key=b"%d" % number)
        async with client.stream_consumer("orders", "late", start="earliest") as consumer:  # It keeps the parent.
            await consumer.receive()
        await client.admin.split("orders", 0)
        for drained in "abcd":
            await client.admin.drain(drained)
            await until(lambda: drained not in record_of(brokers).replicas)  # noqa: B023
            await until(lambda: list(followers_of(brokers, 0).values()) == [True, True])
            await client.admin.activate(drained)
        assert sorted(await read_all(client, 40), key=int) == [b"%d" % number for number in range(40)]


async def test_a_broker_that_is_about_to_stop_holds_no_votes_any_more(simulation: Simulation) -> None:
    """It leads a moment longer, and records change meanwhile. A vote would go on after the end of the view."""
    async with replicated(simulation) as (brokers, _, producer):
        await send(producer, 0, 5)
        owner = brokers.owner(0)
        last, other = (each for each in "abc" if each != owner)
        brokers.kill(other)
        brokers.kill(owner)
        await until(lambda: record_of(brokers).state is OwnershipState.RECOVERING)
        await until(lambda: "hold votes" in names_of_tasks())  # One vote is missing.
        elections = brokers.running[last].segment_host.elections
        await elections.stop()
        elections.look()
        assert "hold votes" not in names_of_tasks()


def names_of_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks()]


async def test_a_follower_that_was_away_for_long_is_asked_often_after_its_start(simulation: Simulation) -> None:
    """The first call to it may fail: a broker registers before it is ready. The next call comes soon nevertheless."""
    async with replicated(simulation, confirm=3) as (brokers, client, producer):
        await send(producer, 0, 5)
        owner = brokers.owner(0)
        away = next(each for each in "abc" if each != owner)
        segment = brokers.running[owner].segments.get(PATH, 0)
        brokers.kill(away)
        await asyncio.sleep(60)
        brokers.network.cut(owner, away)
        await brokers.start(away)
        await until(lambda: any("did not answer" in each.error for each in segment.followers))
        brokers.network.heal(owner)
        async with asyncio.timeout(1):
            await complete(brokers)
        await send(producer, 5, 10)
        await check(client, 10)


async def test_a_split_waits_for_the_replicas_of_its_parent_before_the_log_ends(simulation: Simulation) -> None:
    """The other brokers can have its children."""
    async with replicated(simulation, ("a", "b", "c", "d"), confirm=3) as (brokers, client, producer):
        await send(producer, 0, 10)
        owner = brokers.owner(0)
        dead = in_sync(brokers)[0]
        brokers.kill(dead)
        await until(lambda: not brokers.any().cluster.members.is_live(dead))
        with pytest.raises(TimedOut, match=f"replicas must hold a record; these lag behind or are down: {dead}"):
            await brokers.call(owner, "split_segment", topic="orders", segment=0, timeout=20)
        assert (await brokers.call(owner, "get_layout", topic="orders"))["transition"]["step"] == "CREATING"
        await brokers.call(owner, "abort_transition", topic="orders")
        await brokers.start(dead)
        assert (await producer.send(b"10")).segment == 0, "the log has not ended"
        await client.admin.split("orders", 0)
        assert (await producer.send(b"11")).segment != 0
        await check(client, 12)
