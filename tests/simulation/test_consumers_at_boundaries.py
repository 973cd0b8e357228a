"""Consumers of whole brokers, in virtual time, while layouts change: parents before children for every subscription,
nothing skipped, and nothing again that was acked (I4, I5)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from braid.client.client import Client
from braid.client.consuming.channel import ClientChannel, SegmentGrant
from braid.client.consuming.checkpoint import CheckpointConsumer
from braid.client.consuming.stream import StreamConsumer
from braid.model.errors import NotServing
from braid.model.message import Message
from braid.testing.sim.loop import Simulation
from braid.wire.operations import RESET
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

KEYS = [b"key-%d" % number for number in range(8)]


class Orders:
    """A topic of whose keys each has records 0, 1, 2, …, and what consumers get of it."""

    def __init__(self, brokers: Brokers, client: Client) -> None:
        self.brokers = brokers
        self.client = client
        self.admin = client.admin
        self.sent = 0
        """Records of each key."""
        self.received: dict[bytes, list[int]] = {key: [] for key in KEYS}
        """In the order in which all consumers together got them."""
        self._before_seek = dict.fromkeys(KEYS, 0)
        """How many of them came before the subscription was set to its beginning."""

    async def send(self, records: int) -> None:
        """So many records of each key, by a client that knows the layout."""
        epoch = max(broker.topics.get(PATH).layout.epoch for broker in self.brokers.running.values())
        await until(lambda: all(each.topics.get(PATH).layout.epoch == epoch for each in self.brokers.running.values()))
        async with self.brokers.client(timeout=60) as client, client.producer("orders") as producer:
            for number in range(self.sent, self.sent + records):
                for key in KEYS:
                    await producer.send(b"%d" % number, key=key)
        self.sent += records

    def got(self, message: Message) -> None:
        """No record comes before the one before it, also after a seek."""
        assert message.key is not None
        numbers, number = self.received[message.key], int(message.value)
        assert number <= (numbers[-1] if numbers else -1) + 1, f"{message.key!r}: {number} came after {numbers[-3:]}"
        numbers.append(number)

    async def seek(self) -> None:
        """Set the subscription to its beginning."""
        self._before_seek = {key: len(numbers) for key, numbers in self.received.items()}
        await self.admin.seek("orders", "billing", "earliest")

    @property
    def complete(self) -> bool:
        return all(
            0 in numbers[self._before_seek[key] :] and numbers[-1] == self.sent - 1
            for key, numbers in self.received.items()
        )

    @property
    def once(self) -> bool:
        return all(numbers == list(range(self.sent)) for numbers in self.received.values())

    def drained(self, subscription: str = "billing") -> set[int]:
        return {*self.brokers.any().cluster.drained.of(PATH, subscription)}

    @contextlib.asynccontextmanager
    async def consumer(self, name: str, *, start: str = "earliest") -> AsyncIterator[StreamConsumer]:
        async with self.client.stream_consumer("orders", "billing", name=name, start=start) as consumer:
            yield consumer

    async def take(self, consumer: StreamConsumer | CheckpointConsumer, count: int) -> list[Message]:
        messages: list[Message] = []
        for _ in range(count):
            message = await consumer.receive(timeout=60)
            assert message is not None, f"only {len(messages)} of {count} came"
            self.got(message)
            messages.append(message)
        return messages

    async def consume(self, consumer: StreamConsumer) -> None:
        """Take and ack all that comes."""
        async for message in consumer:
            self.got(message)
            await consumer.ack(message)


@contextlib.asynccontextmanager
async def orders(simulation: Simulation, segments: int = 1, brokers: int = 3) -> AsyncIterator[Orders]:
    names = ("a", "b", "c")[:brokers]
    async with running_brokers(simulation, names) as running, running.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=segments)
        await until(lambda: all(running.owner(segment) for segment in range(segments)))
        yield Orders(running, client)


async def ack_each(consumer: StreamConsumer, messages: list[Message]) -> None:
    for message in messages:
        await consumer.ack(message)


async def test_active_children_are_blocked_until_their_parent_is_drained(simulation: Simulation) -> None:
    async with orders(simulation) as topic, topic.consumer("worker") as consumer:
        await topic.send(3)
        await topic.admin.split("orders", 0)
        await topic.send(2)
        parent = await topic.take(consumer, 3 * len(KEYS))
        await ack_each(consumer, parent[:-1])
        assert await consumer.receive(timeout=20) is None, "one record of the parent is not acked"
        assert (consumer.segments, topic.drained()) == ((0,), set())
        acked_at = simulation.clock.monotonic()
        await consumer.ack(parent[-1])
        await topic.take(consumer, 2 * len(KEYS))
        assert simulation.clock.monotonic() - acked_at < 0.2, "nothing waits for the usual second"
        assert (consumer.segments, topic.drained()) == ((1, 2), {0})
        assert topic.once


async def test_a_consumer_that_has_acked_everything_goes_on_when_its_segment_ends(simulation: Simulation) -> None:
    async with orders(simulation) as topic, topic.consumer("worker") as consumer:
        await topic.send(3)
        await ack_each(consumer, await topic.take(consumer, 3 * len(KEYS)))
        await consumer.flush_acks()
        await topic.admin.split("orders", 0)
        await until(lambda: consumer.segments == (1, 2), within_s=2)
        await topic.admin.merge("orders", 1, 2)
        await until(lambda: consumer.segments == (3,), within_s=2)
        await topic.send(1)
        await topic.take(consumer, len(KEYS))
        assert topic.once


async def split_once(topic: Orders) -> None:
    await topic.send(3)
    await topic.admin.split("orders", 0)
    await topic.send(3)


async def split_twice(topic: Orders) -> None:
    await split_once(topic)
    await topic.admin.split("orders", 1)
    await topic.send(3)


async def split_and_merge(topic: Orders) -> None:
    await split_once(topic)
    await topic.admin.merge("orders", 1, 2)
    await topic.send(3)


async def repartition(topic: Orders) -> None:
    await split_once(topic)
    await topic.admin.repartition("orders", 5)
    await topic.send(3)


CHANGES = pytest.mark.parametrize("change", [split_once, split_twice, split_and_merge, repartition])


@CHANGES
async def test_a_subscription_from_the_earliest_record_reads_the_sealed_backlog_of_all_generations(
    change: Callable[[Orders], Awaitable[None]], simulation: Simulation
) -> None:
    async with orders(simulation) as topic:
        await change(topic)
        async with topic.consumer("worker") as consumer:
            await ack_each(consumer, await topic.take(consumer, 1))
            consuming = asyncio.create_task(topic.consume(consumer))
            await until(lambda: topic.complete)
            consuming.cancel()
        assert topic.once


@CHANGES
async def test_a_subscription_from_the_latest_record_has_drained_what_is_sealed(
    change: Callable[[Orders], Awaitable[None]], simulation: Simulation
) -> None:
    async with orders(simulation) as topic:
        await change(topic)
        layout = topic.brokers.any().topics.get(PATH).layout
        await topic.admin.create_subscription("orders", "billing", start="latest")
        await until(lambda: topic.drained() == {each for each in layout.segments if not layout.segment(each).is_active})
        for numbers in topic.received.values():
            numbers.append(topic.sent - 1)
        await topic.send(1)
        async with topic.consumer("worker") as consumer:
            await topic.take(consumer, len(KEYS))
            assert await consumer.receive(timeout=5) is None


async def test_sealed_backlog_is_not_delivered_again_after_the_first_consumer_has_drained_it(
    simulation: Simulation,
) -> None:
    async with orders(simulation) as topic:
        await split_once(topic)
        async with topic.consumer("first") as consumer:
            await ack_each(consumer, await topic.take(consumer, 3 * len(KEYS)))
            await until(lambda: topic.drained() == {0})
        async with topic.consumer("second") as consumer:
            await topic.take(consumer, 3 * len(KEYS))
            assert await consumer.receive(timeout=5) is None
        assert topic.once


async def reconnect(topic: Orders) -> None:
    for name in topic.brokers.running:
        topic.brokers.network.reset("client", name)


async def move_the_parent(topic: Orders) -> None:
    target = next(name for name in topic.brokers.running if name != topic.brokers.owner(0))
    await topic.brokers.move(0, target)


async def lose_the_controller(topic: Orders) -> None:
    """Without the owner of a segment: records that only its disk has would be away, too."""
    controller = topic.brokers.controller()
    for segment in range(3):
        if topic.brokers.owner(segment) == controller:
            target = next(name for name in topic.brokers.running if name != controller)
            await topic.brokers.move(segment, target)
    topic.brokers.kill(controller)


async def wait(_: Orders) -> None:
    await asyncio.sleep(30)


@pytest.mark.parametrize("event", [reconnect, move_the_parent, lose_the_controller, wait])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_late_acks_at_a_boundary_survive(
    event: Callable[[Orders], Awaitable[None]], when: str, simulation: Simulation
) -> None:
    """The parent has ended and was handed out; something happens before, or right after, the application acks it."""
    async with orders(simulation) as topic, topic.consumer("worker") as consumer:
        await split_once(topic)
        parent = await topic.take(consumer, 3 * len(KEYS))
        if when == "before":
            await event(topic)
        await ack_each(consumer, parent)
        if when == "after":
            await event(topic)
        await topic.take(consumer, 3 * len(KEYS))
        assert topic.once
        await until(lambda: topic.drained() == {0})


async def test_a_consumer_that_is_replaced_at_a_boundary_leaves_the_rest_to_its_successor(
    simulation: Simulation,
) -> None:
    async with orders(simulation) as topic:
        await split_once(topic)
        first = topic.client.stream_consumer("orders", "billing", name="worker", start="earliest")
        parent = await topic.take(first, 3 * len(KEYS))
        await ack_each(first, parent[: 2 * len(KEYS)])
        await first.flush_acks()
        for numbers in topic.received.values():
            del numbers[2:]
        async with topic.brokers.client(timeout=60) as client:
            consumer = client.stream_consumer("orders", "billing", name="worker", start="earliest")
            await ack_each(consumer, await topic.take(consumer, len(KEYS)))
            await topic.take(consumer, 3 * len(KEYS))
            assert topic.once
            await consumer.close()


async def test_a_seek_back_on_a_parent_is_read_before_its_children_go_on(simulation: Simulation) -> None:
    async with orders(simulation, brokers=2) as topic, topic.consumer("one") as one, topic.consumer("two") as two:
        await split_once(topic)
        seen: list[Message] = []

        async def consume(consumer: StreamConsumer) -> None:
            async for message in consumer:
                seen.append(message)
                await consumer.ack(message)

        tasks = [asyncio.create_task(consume(consumer)) for consumer in (one, two)]
        await until(lambda: len(seen) == 6 * len(KEYS))
        await asyncio.gather(one.flush_acks(), two.flush_acks())
        assert sorted((*one.segments, *two.segments)) == [1, 2]
        seen.clear()
        await topic.admin.seek("orders", "billing", {0: 2 * len(KEYS)})
        await topic.send(1)
        await until(lambda: len(seen) == 2 * len(KEYS))
        assert [message.segment for message in seen[: len(KEYS)]] == [0] * len(KEYS)
        assert {message.segment for message in seen[len(KEYS) :]} == {1, 2}
        assert await topic.admin.seek("orders", "billing", "latest")
        for task in tasks:
            task.cancel()


async def test_a_seek_to_the_beginning_bears_children_without_records(simulation: Simulation) -> None:
    async with orders(simulation) as topic, topic.consumer("worker") as consumer:
        await topic.send(2)
        consuming = asyncio.create_task(topic.consume(consumer))
        await until(lambda: topic.complete)
        await topic.admin.split("orders", 0)
        await until(lambda: consumer.segments == (1, 2))
        await topic.admin.seek("orders", "billing", "earliest")
        await until(lambda: all(numbers == [0, 1, 0, 1] for numbers in topic.received.values()))
        await until(lambda: consumer.segments == (1, 2))
        consuming.cancel()


async def test_a_split_gives_work_to_a_consumer_without_a_segment(simulation: Simulation) -> None:
    async with orders(simulation) as topic, topic.consumer("one") as one, topic.consumer("two") as two:
        await until(lambda: one.segments == (0,))
        billing = await topic.admin.subscription("orders", "billing")
        assert [each["segments"] for each in billing["consumers"].values()] == [[0], []]
        await topic.admin.split("orders", 0)
        await until(lambda: (one.segments, two.segments) == ((1,), (2,)))


async def test_the_owner_of_a_child_lets_nobody_read_it_while_an_ancestor_is_not_drained(
    simulation: Simulation,
) -> None:
    """A consumer that has lost the controller does not hear that the child was taken from it."""
    async with orders(simulation, brokers=1) as topic:
        await split_once(topic)
        await topic.admin.create_subscription("orders", "billing", start="latest")
        broker = topic.brokers.any()
        topic_id, term = broker.topics.get(PATH).id, 7
        grant = broker.group_host.grant_signer.signed(topic_id, "billing", 1, term, 1)
        link = await topic.client.routing.owner_link(PATH, 1)

        async def opened() -> ClientChannel:
            channel = ClientChannel(link, PATH, 1, 1 << 20, lambda: None)
            await channel.open(topic_id, read_grant=SegmentGrant("billing", term, grant), timeout_s=5)
            return channel

        channel = await opened()
        await topic.admin.seek("orders", "billing", {0: 0})
        await until(lambda: channel.over is not None)
        assert channel.over is not None
        assert channel.over.code == RESET
        with pytest.raises(NotServing, match="consumed the ancestors of that segment: 0"):
            await opened()
        await topic.admin.skip("orders", "billing", segment=0, count=1_000)
        await until(lambda: topic.drained() == {0})
        assert (await opened()).over is None


async def test_skipping_lets_go_of_a_parent_that_no_consumer_reads(simulation: Simulation) -> None:
    async with orders(simulation, brokers=1) as topic:
        await topic.admin.create_subscription("orders", "billing", start="earliest")
        await split_once(topic)
        assert topic.drained() == set()
        billing = await topic.admin.subscription("orders", "billing")
        assert (billing["undrained"], billing["consumers"]) == ([0], {})
        assert not billing["segments"]["0"]["drained"]
        await topic.admin.skip("orders", "billing", segment=0, count=1_000)
        await until(lambda: topic.drained() == {0})
        billing = await topic.admin.subscription("orders", "billing")
        assert billing["undrained"] == []
        assert [each["drained"] for each in billing["segments"].values()] == [True, False, False]


async def test_no_mark_outlives_its_subscription_or_its_topic(simulation: Simulation) -> None:
    async with orders(simulation, brokers=2) as topic:
        await split_once(topic)
        for name in ("billing", "audit"):
            await topic.admin.create_subscription("orders", name, start="latest")
        await until(lambda: topic.drained("billing") == topic.drained("audit") == {0})
        await topic.admin.delete_subscription("orders", "billing")
        await until(lambda: topic.drained("billing") == set())
        assert topic.drained("audit") == {0}
        await topic.admin.delete_topic("orders")
        assert (await topic.brokers.store.list("/segments/")).entries == ()


@pytest.mark.parametrize("seed", range(8))
async def test_keys_stay_in_order_for_a_group_that_changes(seed: int, simulation: Simulation) -> None:
    """Consumers join and leave, segments are split, merged and moved, brokers die and come back, and the subscription
    is set to its beginning in the middle. `Orders.got` looks at each record."""
    random = simulation.random
    async with orders(simulation, segments=random.randrange(1, 3)) as topic:
        running: dict[str, tuple[StreamConsumer, asyncio.Task[None]]] = {}

        async def join(name: str) -> None:
            consumer = topic.client.stream_consumer("orders", "billing", name=name, start="earliest")
            await consumer.start()
            running[name] = consumer, asyncio.create_task(topic.consume(consumer))

        async def leave(name: str) -> None:
            consumer, task = running.pop(name)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task.exception()
            await consumer.close()

        async def change_layout() -> None:
            active = topic.brokers.any().topics.get(PATH).layout.active
            at = random.randrange(len(active))
            if len(active) > 1 and random.random() < 0.4:
                left = max(at - 1, 0)
                await topic.admin.merge("orders", active[left].segment_id, active[left + 1].segment_id)
            else:
                await topic.admin.split("orders", active[at].segment_id)

        async def move() -> None:
            segment = random.choice([*topic.brokers.any().topics.get(PATH).layout.segments])
            others = [name for name in topic.brokers.running if name != topic.brokers.owner(segment)]
            await topic.brokers.move(segment, random.choice(others))

        async def crash() -> None:
            name = random.choice([*topic.brokers.running])
            topic.brokers.kill(name)
            await asyncio.sleep(random.random() * 15)  # Perhaps longer than its lease.
            await topic.brokers.start(name)

        await topic.send(2)
        await join("a")
        for step in range(12):
            match random.randrange(7):
                case 0 | 1:
                    await change_layout()
                case 2 if len(running) < 3:
                    await join(next(name for name in "abc" if name not in running))
                case 3 if len(running) > 1:
                    await leave(random.choice(sorted(running)))
                case 4:
                    await move()
                case 5 if step % 3 == 0:
                    await crash()
                case _ if step > 6:
                    await topic.seek()
            await topic.send(random.randrange(3))
            await asyncio.sleep(random.random())
        await until(lambda: topic.complete)
        for name in [*running]:
            await leave(name)


# Checkpoint consumers.


@CHANGES
async def test_a_checkpoint_consumer_reads_the_backlog_of_all_generations_in_order(
    change: Callable[[Orders], Awaitable[None]], simulation: Simulation
) -> None:
    async with orders(simulation) as topic:
        await change(topic)
        async with topic.client.checkpoint_consumer("orders", start="earliest") as consumer:
            await topic.take(consumer, topic.sent * len(KEYS))
        assert topic.once


@CHANGES
async def test_a_checkpoint_resumes_across_a_change_of_layout(
    change: Callable[[Orders], Awaitable[None]], simulation: Simulation
) -> None:
    async with orders(simulation) as topic:
        await topic.send(2)
        async with topic.client.checkpoint_consumer("orders", start="earliest") as consumer:
            await topic.take(consumer, len(KEYS))
            saved = consumer.checkpoint()
        await change(topic)
        for _ in range(4):
            async with (
                topic.brokers.client(timeout=60) as client,
                client.checkpoint_consumer("orders", start=saved) as consumer,
            ):
                await topic.take(consumer, 11)
                saved = consumer.checkpoint()
        async with topic.client.checkpoint_consumer("orders", start=saved) as consumer:
            await topic.take(consumer, topic.sent * len(KEYS) - len(KEYS) - 44)
            assert await consumer.receive(timeout=5) is None
        assert topic.once


async def test_a_running_checkpoint_consumer_follows_changes_without_asking(simulation: Simulation) -> None:
    async with (
        orders(simulation) as topic,
        topic.client.checkpoint_consumer("orders", start="earliest") as consumer,
    ):
        await topic.send(1)
        await topic.take(consumer, len(KEYS))
        await topic.admin.split("orders", 0)
        await topic.send(1)
        await topic.take(consumer, len(KEYS))
        await topic.admin.merge("orders", 1, 2)
        await topic.send(1)
        await topic.take(consumer, len(KEYS))
        assert topic.once


async def test_the_children_of_named_segments_are_read_and_no_others(simulation: Simulation) -> None:
    async with orders(simulation, segments=2) as topic:
        await topic.send(1)
        seen: set[int] = set()

        async def read(consumer: CheckpointConsumer) -> None:
            while (message := await consumer.receive(timeout=5)) is not None:
                seen.add(message.segment)

        async with topic.client.checkpoint_consumer("orders", start={0: 0}) as consumer:
            await topic.admin.split("orders", 1)  # Into 2 and 3, which are left out.
            await topic.admin.split("orders", 0)  # Into 4 and 5.
            await topic.send(1)
            await read(consumer)
            assert seen == {0, 4, 5}
            saved = consumer.checkpoint()
        await topic.admin.split("orders", 3)
        await topic.admin.merge("orders", 5, 2)  # 8 has hashes of both.
        await topic.send(1)
        async with topic.client.checkpoint_consumer("orders", start=saved) as consumer:
            await read(consumer)
            assert seen == {0, 4, 5, 8}, "a restored consumer follows the same hashes"


async def test_a_segment_that_was_split_before_it_was_named_is_followed_too(simulation: Simulation) -> None:
    async with orders(simulation) as topic:
        await topic.send(1)
        await topic.admin.split("orders", 0)
        await topic.send(1)
        async with topic.client.checkpoint_consumer("orders", start={0: 0}) as consumer:
            await topic.take(consumer, 2 * len(KEYS))
        assert topic.once
        async with topic.client.checkpoint_consumer("orders", start={1: 0}) as consumer:
            children = [await consumer.receive(timeout=5) for _ in range(len(KEYS))]
        assert {message.segment for message in children if message is not None} == {1}, "its parent is left out"


@pytest.mark.parametrize("call", ["seek", "delete"])
async def test_a_broker_that_does_not_know_the_children_yet_reaches_their_cursors(
    call: str, simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "c", timeout=60) as client:
        await brokers.call("a", "drain_broker", broker="b")
        await client.admin.create_topic("orders")
        await client.admin.create_subscription("orders", "billing", start="earliest")
        about = {"topic": "orders", "subscription": "billing"}
        store = brokers.store_of("b")
        store.lag()
        await client.admin.split("orders", 0)
        async with client.producer("orders") as producer:
            for key in KEYS:
                await producer.send(b"0", key=key)
        await client.admin.skip("orders", "billing")
        if call == "seek":
            asking = asyncio.ensure_future(brokers.call("b", "seek_subscription", **about, to="earliest"))
        else:
            asking = asyncio.ensure_future(brokers.call("b", "delete_subscription", **about))
        await asyncio.sleep(5)
        store.catch_up()
        await asking
        cursors = [each.cursors.all() for name in "ac" for each in brokers.running[name].segments.of_topic(PATH)]
        assert cursors == ([{"billing": 0}] if call == "seek" else [{}]) * 3
