"""Queues of replicated segments on bad days, with whole brokers in virtual time: what w disks have confirmed is known
to the next owner, whichever replica that is (I8, I9)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from braid.broker.peers.calls import Arguments
from braid.broker.replicas.queue_copies import QUEUE_APPEND, QUEUE_BEGIN, QUEUE_READ
from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.model.errors import BraidError, Fenced, OutOfSequence
from braid.model.message import QueueMessage
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import OwnershipState, ReplicaChange
from braid.model.queue.events import QueueEvents, QueueImage, QueueSnapshot, decode_snapshot, encode
from braid.ports.disk import Buffer
from braid.storage.queue_journal import folder_of, read_image
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, Brokers, record_of
from tests.kits.queues import numbers, queue_at, queue_of, remaining, send, served, take, take_all
from tests.kits.waiting import until

NAMES = ("a", "b", "c")
Handler = Callable[[Arguments, Buffer], Coroutine[Any, Any, Any]]


@asynccontextmanager
async def replicated(
    simulation: Simulation,
    names: tuple[str, ...] = NAMES,
    *,
    shared: bool = True,
    messages: int = 30,
    confirm: int = 2,
    **options: Any,
) -> AsyncIterator[tuple[Brokers, Client]]:
    topic = {"replicas": 3, "confirm": confirm}
    made = queue_of(simulation, names, shared=shared, messages=messages, topic=topic, **options)
    async with made as (brokers, client):
        await complete(brokers)
        yield brokers, client


def members(brokers: Brokers, segment: int = 0) -> list[str]:
    """The followers that hold everything, events of queues too, as the owner knows it."""
    owner = brokers.owner(segment)
    if not owner or PATH not in brokers.running[owner].topics.all():
        return []
    found = brokers.running[owner].segments.get(PATH, segment)
    replication = found.replication
    if replication is None:
        return []
    behind = {each.broker for each in found.followers if not (each.in_sync and each.member) or each.behind}
    events = {each for each, stream in replication._queue_streams.items() if stream.holds_all()}
    return [each.broker for each in found.followers if each.broker not in behind and each.broker in events]


async def knows(brokers: Brokers, name: str, acked: set[int]) -> bool:
    image = await image_on(brokers, name)
    return image is not None and all(each in image.settled for each in acked)


async def ask_for(brokers: Brokers, change: ReplicaChange) -> None:
    """Write a change of replicas into the record, as the leader does."""
    broker = brokers.any()
    name = SegmentName.of(TopicName.parse(PATH), broker.topics.get(PATH).layout.segment(0))
    known = broker.cluster.owners.known(name)
    assert known is not None
    record = msgspec.structs.replace(known.value, change=change)
    assert await broker.cluster.owners.swap(name, known.revision, record) is not None


async def complete(brokers: Brokers, followers: int = 2, segment: int = 0) -> str:
    def enough() -> bool:
        try:
            return len(members(brokers, segment)) == followers
        except BraidError:
            return False

    await until(enough)
    return brokers.owner(segment)


async def ack_some(client: Client, count: int = 30) -> set[int]:
    """Ack every third message; return which."""
    async with client.queue_consumer("orders", "work") as consumer:
        return await ack(consumer, (await take(consumer, count))[::3])


async def ack(consumer: QueueConsumer, messages: list[QueueMessage]) -> set[int]:
    await asyncio.gather(*(consumer.ack(message) for message in messages))
    return {int(message.value) for message in messages}


async def image_on(brokers: Brokers, name: str, segment: int = 0) -> QueueImage | None:
    """What the disk of a broker knows of the queue."""
    descriptor = brokers.any().topics.get(PATH).layout.segment(segment)
    (folder,) = {
        path.rpartition("/queues/")[0]
        for path in brokers.disks[name].paths()
        if "/queues/work/" in path and f"-{descriptor.segment_id}/" in path
    } or {""}
    return await read_image(brokers.disks[name], folder_of(folder, "work")) if folder else None


def delay_calls(brokers: Brokers, name: str, *calls: str, until_open: asyncio.Event) -> None:
    """Let a broker answer these calls of other brokers only when the event is set."""
    handlers = brokers.running[name].front_door.peer_calls._handlers
    for call in calls:
        handler, shielded = handlers[call]

        async def late(arguments: Arguments, payload: Buffer, handler: Handler = handler) -> Any:
            await until_open.wait()
            return await handler(arguments, payload)

        handlers[call] = (late, shielded)


@SHARED
@pytest.mark.parametrize("lost", [False, True], ids=["killed", "disk-lost"])
async def test_a_dead_owner_takes_no_confirmed_ack_with_it(simulation: Simulation, shared: bool, lost: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client):
        acked = await ack_some(client)
        owner = brokers.owner(0)
        brokers.kill(owner)
        if lost:
            brokers.lose_disk(owner)
        await until(lambda: brokers.owner(0) not in ("", owner))
        assert set(await remaining(client)) == set(range(30)) - acked
        await brokers.start(owner)
        await complete(brokers)
        await send(client, range(30, 40))
        again = {each + 30 for each in (0, 3, 6)}
        async with client.queue_consumer("orders", "work") as consumer:
            messages = {int(each.value): each for each in await take(consumer, 10)}
            await ack(consumer, [messages[each] for each in sorted(again)])
        brokers.kill(brokers.owner(0))
        await served(brokers)
        assert set(await remaining(client)) == set(range(30, 40)) - again


@SHARED
async def test_an_ack_is_confirmed_only_when_enough_disks_have_it(simulation: Simulation, shared: bool) -> None:
    async with (
        replicated(simulation, shared=shared) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        messages = await take(consumer, 2)
        owner = brokers.owner(0)
        others = [each for each in NAMES if each != owner]
        await consumer.ack(messages[0])
        known = [await image_on(brokers, each) for each in NAMES]
        assert sum(image is not None and 0 in image.settled for image in known) >= 2
        for other in others:
            brokers.network.cut(owner, other)
        acking = asyncio.ensure_future(consumer.ack(messages[1]))
        await asyncio.sleep(3)
        assert not acking.done()
        cursor = brokers.running[owner].segments.get(PATH, 0).cursors.offset("work")
        assert cursor == 1, "the cursor follows what is confirmed"
        for other in others:
            brokers.network.heal(other)
        await acking


async def lagging_winner(brokers: Brokers, client: Client, comes: asyncio.Event) -> tuple[str, str, str, set[int]]:
    """Let acks be confirmed by the owner and one follower. The other follower gets more of the log, and no event: it is
    to win the vote. Return the owner, the follower that lags, the one that knows, and what was acked. The rest of the
    log `comes` to the one that knows when the test says so."""
    owner = brokers.owner(0)
    lagging, knowing = [each for each in NAMES if each != owner]
    delay_calls(brokers, lagging, QUEUE_BEGIN, QUEUE_APPEND, until_open=asyncio.Event())
    acked = await ack_some(client)
    image = await image_on(brokers, lagging)
    assert image is not None
    assert (image.settled.base, len(image.settled)) == (0, 0)
    delay_calls(brokers, knowing, "copy_append", until_open=comes)
    await send(client, range(30, 35))
    return owner, lagging, knowing, acked


async def test_the_next_owner_asks_for_events_that_it_lacks(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client):
        comes = asyncio.Event()
        owner, lagging, _, acked = await lagging_winner(brokers, client, comes)
        brokers.kill(owner)
        brokers.lose_disk(owner)
        comes.set()
        await until(lambda: brokers.owner(0) not in ("", owner))
        assert brokers.owner(0) == lagging
        assert set(await remaining(client)) == set(range(35)) - acked


async def test_a_segment_waits_visibly_while_too_few_members_can_say_what_was_settled(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client):
        comes = asyncio.Event()
        owner, lagging, knowing, acked = await lagging_winner(brokers, client, comes)
        speaks = asyncio.Event()
        delay_calls(brokers, knowing, QUEUE_READ, until_open=speaks)
        brokers.kill(owner)
        await until(lambda: record_of(brokers).failures, 600)
        (failure,) = record_of(brokers).failures
        assert failure.broker == lagging
        assert "2 of its replicas a, b, c must say what was settled; 1 can" in failure.reason
        assert not brokers.owner(0)
        comes.set()
        speaks.set()
        await until(lambda: brokers.owner(0), 600)
        assert set(await remaining(client)) == set(range(35)) - acked


async def test_a_promise_refuses_the_events_of_the_deposed_owner(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicated(simulation) as (brokers, client):
        await ack_some(client)
        owner = brokers.owner(0)
        follower = next(each for each in NAMES if each != owner)
        segment = brokers.running[owner].segments.get(PATH, 0)
        copies = brokers.running[follower].segment_host.queue_copies
        about = {"segment": str(segment.name), "topic_id": segment.topic_id, "epoch": segment.epoch}
        holds, hold = asyncio.Event(), copies._hold

        async def slow(*arguments: Any) -> None:
            await holds.wait()
            await hold(*arguments)

        monkeypatch.setattr(copies, "_hold", slow)
        late = {**about, "subscription": "work", "session": copies._sessions[segment.name, "work"][1]}
        waiting = asyncio.ensure_future(copies.append(late, encode(QueueEvents(((1, 2),)))))
        await asyncio.sleep(0.1)  # It has passed the first check, and waits for its message.
        read = await copies.read({**about, "epoch": segment.epoch + 1, "subscriptions": ["work"]})
        assert QueueImage.of(decode_snapshot(read["images"]["work"])).settled.base == 1
        holds.set()
        with pytest.raises(BraidError):
            await waiting
        with pytest.raises(Fenced):
            await copies.append(late, encode(QueueEvents(((1, 2),))))
        with pytest.raises(Fenced):
            await copies.begin(late, encode(QueueSnapshot(1, 2)))
        image = await image_on(brokers, follower)
        assert image is not None
        assert 1 not in image.settled


async def test_what_an_owner_has_given_up_and_comes_late_takes_nothing_back(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client):
        owner = brokers.owner(0)
        segment = brokers.running[owner].segments.get(PATH, 0)
        follower = next(each for each in NAMES if each != owner)
        copies = brokers.running[follower].segment_host.queue_copies
        about = {"segment": str(segment.name), "topic_id": segment.topic_id, "epoch": segment.epoch}
        late = {**about, "subscription": "work", "session": copies._sessions[segment.name, "work"][1]}
        checkpoint = encode(queue_at(brokers).snapshot())
        delay_calls(brokers, follower, QUEUE_APPEND, until_open=asyncio.Event())
        acked = await ack_some(client)
        await until(lambda: knows(brokers, follower, acked))  # The owner has got no answer, and has sent a checkpoint.
        with pytest.raises(OutOfSequence):
            await copies.begin(late, checkpoint)
        with pytest.raises(OutOfSequence):
            await copies.append(late, encode(QueueEvents(((1, 2),))))
        with pytest.raises(OutOfSequence):
            await copies.keep({**late, "subscriptions": []})
        image = await image_on(brokers, follower)
        assert image is not None
        assert {each for each in range(30) if each in image.settled} == acked


async def test_a_follower_that_has_lost_its_disk_takes_no_events_before_its_copy_is_begun(
    simulation: Simulation,
) -> None:
    """Its owner may not have noticed yet, and would count it as a member."""
    async with replicated(simulation, messages=0) as (brokers, _):
        owner = brokers.owner(0)
        segment = brokers.running[owner].segments.get(PATH, 0)
        follower = next(each for each in NAMES if each != owner)
        brokers.kill(follower)
        brokers.lose_disk(follower)
        brokers.network.cut(owner, follower)
        await brokers.start(follower)
        copies = brokers.running[follower].segment_host.queue_copies
        about = {"segment": str(segment.name), "topic_id": segment.topic_id, "epoch": segment.epoch}
        checkpoint = {**about, "subscription": "work", "session": 1_000}
        with pytest.raises(OutOfSequence, match="in no session of epoch 1"):
            await copies.begin(checkpoint, encode(queue_at(brokers).snapshot()))
        brokers.network.heal(follower)
        await complete(brokers)


@SHARED
async def test_two_replicas_without_the_third_still_know_everything(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client):
        acked = await ack_some(client)
        owner = brokers.owner(0)
        brokers.kill(owner)
        await until(lambda: brokers.owner(0) not in ("", owner))
        second = brokers.owner(0)
        await complete(brokers, followers=1)
        brokers.kill(second)
        await asyncio.sleep(60)
        assert not brokers.owner(0)
        assert record_of(brokers).state is not OwnershipState.SERVING or not brokers.owner(0)
        await brokers.start(owner)
        await until(lambda: brokers.owner(0), 600)
        assert set(await remaining(client)) == set(range(30)) - acked


async def test_a_follower_holds_no_event_of_a_message_that_it_lacks(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client):
        owner = brokers.owner(0)
        slow = next(each for each in NAMES if each != owner)
        comes = asyncio.Event()
        delay_calls(brokers, slow, "copy_append", until_open=comes)
        async with client.queue_consumer("orders", "work") as consumer:
            await ack(consumer, await take(consumer, 30))
            await send(client, range(30, 40))
            await ack(consumer, await take(consumer, 10))
        await asyncio.sleep(20)
        image = await image_on(brokers, slow)
        assert image is not None
        assert image.snapshot().end == 30, "I8"
        comes.set()
        await complete(brokers)
        image = await image_on(brokers, slow)
        assert image is not None
        assert image.settled.base == 40


async def test_a_replica_set_counts_only_when_it_holds_the_confirmed_events(simulation: Simulation) -> None:
    """One follower of the new set has the log and lags in events. The owner and the follower that leaves have both."""
    async with replicated(simulation, ("a", "b", "c", "d")) as (brokers, client):
        owner = brokers.owner(0)
        replicas = record_of(brokers).replicas
        stays, leaves = [each for each in replicas if each != owner]
        (joins,) = {"a", "b", "c", "d"} - set(replicas)
        come = asyncio.Event()
        delay_calls(brokers, stays, QUEUE_BEGIN, QUEUE_APPEND, until_open=come)
        change = ReplicaChange(replicas=(owner, stays, joins), write_quorum=2)
        replication = brokers.running[owner].segments.get(PATH, 0).replication
        assert replication is not None
        await ask_for(brokers, change)
        await until(lambda: joins in replication._streams and replication._streams[joins].member)
        delay_calls(brokers, joins, QUEUE_BEGIN, QUEUE_APPEND, until_open=come)
        acked = await ack_some(client)
        await asyncio.sleep(60)
        holders = [each for each in record_of(brokers).replicas if await knows(brokers, each, acked)]
        assert len(holders) >= 2, "two of three replicas must know, or a vote of two can miss it"
        come.set()
        await until(lambda: record_of(brokers).replicas == change.replicas)
        brokers.kill(owner)
        brokers.lose_disk(owner)
        brokers.kill(leaves)
        await until(lambda: brokers.owner(0) not in ("", owner), 600)
        assert set(await remaining(client)) == set(range(30)) - acked


@SHARED
async def test_replicas_change_under_acks(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, ("a", "b", "c", "d", "e"), shared=shared, messages=60) as (brokers, client):
        acked = await ack_some(client, 60)
        owner = brokers.owner(0)
        for name in record_of(brokers).replicas:
            if name != owner:
                brokers.kill(name)
                brokers.lose_disk(name)
                await until(lambda name=name: name not in record_of(brokers).replicas, 3_600)  # type: ignore[misc]
                await complete(brokers)
                async with client.queue_consumer("orders", "work") as consumer:
                    acked |= await ack(consumer, await take(consumer, 5))
                await brokers.start(name)
        brokers.kill(owner)
        await until(lambda: brokers.owner(0) not in ("", owner), 600)
        assert set(await remaining(client)) == set(range(60)) - acked


@SHARED
async def test_a_move_of_a_replicated_segment_keeps_its_queue(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, ("a", "b", "c", "d"), shared=shared) as (brokers, client):
        acked = await ack_some(client)
        owner = brokers.owner(0)
        await brokers.move(0, next(each for each in record_of(brokers).replicas if each != owner))
        await complete(brokers)
        brokers.kill(brokers.owner(0))
        await until(lambda: brokers.owner(0), 600)
        assert set(await remaining(client)) == set(range(30)) - acked


@SHARED
async def test_an_ended_replicated_segment_takes_acks_after_its_owner_died(
    simulation: Simulation, shared: bool
) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client):
        acked = await ack_some(client)
        await client.admin.split("orders", 0)
        owner = await served(brokers)
        brokers.kill(owner)
        await until(lambda: brokers.owner(0) not in ("", owner), 600)
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 30 - len(acked))
            assert set(numbers(messages)) == set(range(30)) - acked
            acked |= await ack(consumer, messages[:10])
        brokers.kill(brokers.owner(0))
        await brokers.start(owner)
        await until(lambda: brokers.owner(0), 600)
        assert set(await remaining(client)) == set(range(30)) - acked


@pytest.mark.parametrize("lags", [0, 1])
async def test_what_the_owner_before_has_stored_is_not_all_that_is_known_of_an_ended_segment(
    simulation: Simulation, lags: int
) -> None:
    """An ended log does not tell that it has had another owner since. Its queue's state in the store is of the owner
    before, as long as the cursor has not moved."""
    async with replicated(simulation) as (brokers, client):
        await client.admin.split("orders", 0)
        source = await served(brokers)
        target = next(each for each in NAMES if each != source)
        await brokers.move(0, target)
        await complete(brokers)
        lagging, comes = sorted({*NAMES} - {target})[lags], asyncio.Event()
        delay_calls(brokers, lagging, QUEUE_BEGIN, QUEUE_APPEND, until_open=comes)
        async with client.queue_consumer("orders", "work") as consumer:
            acked = await ack(consumer, (await take(consumer, 30))[1:])
        assert not await knows(brokers, lagging, acked)
        brokers.kill(target)
        await until(lambda: brokers.owner(0) not in ("", target), 600)
        comes.set()
        assert set(await remaining(client)) == set(range(30)) - acked


async def test_a_follower_with_a_damaged_journal_gets_the_owners_checkpoint_and_counts_again(
    simulation: Simulation,
) -> None:
    async with replicated(simulation) as (brokers, client):
        acked = await ack_some(client)
        owner = brokers.owner(0)
        damaged, other = [each for each in NAMES if each != owner]
        brokers.kill(damaged)
        (path,) = [each for each in brokers.disks[damaged].paths() if each.endswith(".queue")]
        brokers.disks[damaged].corrupt(path, 25, b"\xff\xff")
        await brokers.start(damaged)
        await complete(brokers)
        assert await knows(brokers, damaged, acked)
        brokers.kill(other)
        brokers.lose_disk(other)
        async with client.queue_consumer("orders", "work") as consumer:
            acked |= await ack(consumer, await take(consumer, 5))
        assert await knows(brokers, damaged, acked)


async def test_counts_of_deliveries_survive_the_owner(simulation: Simulation) -> None:
    async with replicated(simulation, messages=3) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            for _ in range(3):
                for message in await take(consumer, 3):
                    await consumer.nack(message, reason="try again")
        owner = brokers.owner(0)
        brokers.kill(owner)
        await until(lambda: brokers.owner(0) not in ("", owner))
        async with client.queue_consumer("orders", "work") as consumer:
            found = await take_all(consumer)
        assert {(each.redelivery_count, each.failure) for each in found} == {(3, "try again")}
        assert queue_at(brokers).counts().ready == 3


@SHARED
async def test_an_elected_replica_with_a_damaged_journal_asks_the_others(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client):
        acked = await ack_some(client)
        owner = brokers.owner(0)
        damaged, whole = [each for each in NAMES if each != owner]
        for name in NAMES:
            brokers.kill(name)
        (path,) = [each for each in brokers.disks[damaged].paths() if each.endswith(".queue")]
        brokers.disks[damaged].corrupt(path, 25, b"\xff\xff")
        await brokers.start(damaged, whole)
        await until(lambda: record_of(brokers).failures, 600)
        assert "2 of its replicas" in str(record_of(brokers).failures), "one journal of three is not enough"
        await brokers.start(owner)
        await until(lambda: brokers.owner(0), 600)
        assert set(await remaining(client)) == set(range(30)) - acked


@SHARED
async def test_an_owner_with_a_damaged_journal_asks_its_followers(simulation: Simulation, shared: bool) -> None:
    async with replicated(simulation, shared=shared) as (brokers, client):
        acked = await ack_some(client)
        owner = brokers.owner(0)
        brokers.kill(owner)
        (path,) = [each for each in brokers.disks[owner].paths() if each.endswith(".queue")]
        brokers.disks[owner].corrupt(path, 25, b"\xff\xff")
        await brokers.start(owner)
        await until(lambda: brokers.owner(0), 600)
        assert set(await remaining(client)) == set(range(30)) - acked


async def test_a_consumer_waits_with_messages_that_their_new_owner_has_not_confirmed_again(
    simulation: Simulation,
) -> None:
    """An earlier owner has confirmed and delivered them. This one has them in its log, and its followers lag behind."""
    async with (
        replicated(simulation, ack_timeout_ms=600_000) as (brokers, client),
        client.queue_consumer("orders", "work", name="holder") as consumer,
    ):
        messages = await take(consumer, 30)
        owner = brokers.owner(0)
        for other in NAMES:
            if other != owner:
                brokers.network.cut(owner, other)
        sending = asyncio.ensure_future(send(client, [30]))
        log = brokers.running[owner].segments.get(PATH, 0).storage.log
        await until(lambda: log.end == 31)
        feed, earlier_lease = consumer._feeds[0], 7
        feed._held[30] = (earlier_lease, asyncio.get_running_loop().time() + 600)
        brokers.network.reset("client", owner)
        acking = asyncio.gather(*(consumer.ack(message) for message in messages))
        await asyncio.sleep(3)
        assert log.confirmed.value == 30
        assert queue_at(brokers).counts().consumers == (), "its channel is refused, and it tries again"
        assert not acking.done()
        for other in NAMES:
            if other != owner:
                brokers.network.heal(other)
        await sending
        await acking
        assert queue_at(brokers).counts().consumers == ("holder",)
        assert await consumer.receive(timeout=10) is None, "the message stays with it"
        assert queue_at(brokers).counts().leased == 1
        feed.ack(30, earlier_lease)
        await consumer.flush()
        assert queue_at(brokers).first_unsettled(1) == []


async def test_the_journals_of_a_deleted_queue_are_removed_from_all_replicas(simulation: Simulation) -> None:
    async with replicated(simulation) as (brokers, client):
        await client.admin.create_subscription("orders", "other", kind="queue")
        acked = await ack_some(client)

        def journals(subscription: str) -> list[str]:
            return [
                name for name in NAMES for path in brokers.disks[name].paths() if f"/queues/{subscription}/" in path
            ]

        await until(lambda: len(journals("other")) == len(journals("work")) == 3)
        away = next(each for each in NAMES if each != brokers.owner(0))
        brokers.kill(away)
        await client.admin.delete_subscription("orders", "other")
        await until(lambda: journals("other") == [away])
        await brokers.start(away)
        await until(lambda: not journals("other"))
        assert len(journals("work")) == 3
        assert set(await remaining(client)) == set(range(30)) - acked
