"""Groups of checkpoint consumers on whole brokers, in virtual time: they share the segments of a topic, go on after
each other's checkpoints, and read parents before children, whichever consumer reads them (I4)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import pytest

from braid.client.client import Client, connect
from braid.client.consuming.channel import ClientChannel
from braid.client.consuming.checkpoint import END, CheckpointConsumer, ConsumerCheckpoint
from braid.client.consuming.checkpoint_group import GroupCheckpointConsumer
from braid.metadata import paths
from braid.metadata.store import Delete
from braid.model.errors import InvalidArgument, TopicNotFound
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until

KEYS = [b"key-%d" % number for number in range(8)]
GROUP = "etl"


class Shared:
    """A topic of whose keys each has records 0, 1, 2, …, and what the consumers of a group get of it."""

    def __init__(self, brokers: Brokers, client: Client) -> None:
        self.brokers = brokers
        self.client = client
        self.admin = client.admin
        self.sent = 0
        self.received: dict[bytes, list[int]] = {key: [] for key in KEYS}
        """In the order in which all consumers together got them."""

    async def send(self, records: int) -> None:
        async with self.brokers.client(timeout=60) as client, client.producer("orders") as producer:
            for number in range(self.sent, self.sent + records):
                for key in KEYS:
                    await producer.send(b"%d" % number, key=key)
        self.sent += records

    def consumer(self, name: str, start: str | bytes | list[bytes] = "earliest") -> CheckpointConsumer:
        return self.client.checkpoint_consumer("orders", start=start, group=GROUP, name=name)

    async def take(self, consumer: CheckpointConsumer, count: int) -> None:
        """Take so many records, without a checkpoint."""
        for taken in range(count):
            message = await consumer.receive(timeout=60)
            assert message is not None, f"only {taken} of {count} came"
            self._got(message.key, int(message.value))

    async def consume(self, consumer: CheckpointConsumer) -> None:
        """Take all that comes, with a checkpoint after each record."""
        async for message in consumer:
            self._got(message.key, int(message.value))
            consumer.checkpoint()

    async def lose_controller(self) -> None:
        """The controller's key goes, as with its lease: the next broker that is asked takes over from the sessions."""
        await self.brokers.store.txn([], [Delete(paths.controller(PATH))])

    def _got(self, key: bytes | None, number: int) -> None:
        """No record comes before the one before it; those after the last checkpoint may come again."""
        assert key is not None
        numbers = self.received[key]
        assert number <= (numbers[-1] if numbers else -1) + 1, f"{key!r}: {number} came after {numbers[-3:]}"
        numbers.append(number)

    @property
    def once(self) -> bool:
        return all(numbers == list(range(self.sent)) for numbers in self.received.values())

    @property
    def complete(self) -> bool:
        return all(set(numbers) == set(range(self.sent)) for numbers in self.received.values())

    @contextlib.asynccontextmanager
    async def consuming(self, *consumers: CheckpointConsumer) -> AsyncIterator[None]:
        """Let these consumers take all that comes meanwhile."""
        tasks = [asyncio.ensure_future(self.consume(consumer)) for consumer in consumers]
        try:
            yield
            for task in tasks:
                assert not task.done(), task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def shared(simulation: Simulation, segments: int = 4, brokers: int = 3) -> AsyncIterator[Shared]:
    names = ("a", "b", "c")[:brokers]
    async with running_brokers(simulation, names) as running, running.client(timeout=60) as client:
        await client.admin.create_topic("orders", segments=segments)
        await until(lambda: all(running.owner(segment) for segment in range(segments)))
        yield Shared(running, client)


async def test_the_consumers_of_a_group_share_the_segments(simulation: Simulation) -> None:
    async with shared(simulation) as topic, topic.consumer("one") as one, topic.consumer("two") as two:
        await until(lambda: (one.segments, two.segments) == ((0, 2), (1, 3)))
        async with topic.consuming(one, two):
            await topic.send(3)
            await until(lambda: topic.complete)
        assert topic.once
        async with topic.client.checkpoint_consumer("orders", group="other", name="one") as other:
            await until(lambda: other.segments == (0, 1, 2, 3))


async def test_a_group_that_grows_and_shrinks_goes_on_after_the_checkpoints(simulation: Simulation) -> None:
    async with shared(simulation) as topic, topic.consumer("one") as one:
        async with topic.consuming(one):
            await topic.send(2)
            await until(lambda: topic.complete)
            async with topic.consumer("two") as two, topic.consuming(two):
                await until(lambda: two.segments == (1, 3))
                await topic.send(2)
                await until(lambda: topic.complete)
            await until(lambda: one.segments == (0, 1, 2, 3))
            await topic.send(2)
            await until(lambda: topic.complete)
        assert topic.once


async def test_statistics_show_groups_on_every_broker(simulation: Simulation) -> None:
    async def groups(broker: str) -> dict[str, Any]:
        found: dict[str, Any] = (await topic.brokers.call(broker, "topic_stats", topic="orders"))["groups"]
        return found

    async with shared(simulation, segments=2) as topic:
        async with topic.consumer("one") as one, topic.consumer("two") as two:
            await until(lambda: (one.segments, two.segments) == ((0,), (1,)))
            await topic.send(5)
            sent = (await topic.client.admin.topic_stats("orders"))["segments"]["0"]["endOffset"]
            await topic.take(one, 3)
            one.checkpoint()
            await topic.take(one, 1)

            async def are_told() -> bool:
                return bool((await groups("a"))[GROUP]["segments"]["0"]["offset"])

            await until(are_told)
            other = 5 * len(KEYS) - sent
            for broker in topic.brokers.running:
                assert await groups(broker) == {
                    GROUP: {
                        "name": GROUP,
                        "backlog": sent - 3 + other,
                        "segments": {
                            "0": {"offset": 3, "endOffset": sent, "backlog": sent - 3, "ended": False},
                            "1": {"offset": 0, "endOffset": other, "backlog": other, "ended": False},
                        },
                        "consumers": {
                            "one": {"segments": [0], "connected": True},
                            "two": {"segments": [1], "connected": True},
                        },
                    }
                }
            await topic.take(one, sent - 4)
            one.checkpoint()
            await topic.admin.split("orders", 0)

            async def has_ended() -> bool:
                one.checkpoint()
                return bool((await groups("b"))[GROUP]["segments"]["0"]["ended"])

            async with topic.consuming(one):
                await until(has_ended)
            assert (await groups("c"))[GROUP]["segments"]["0"] == {
                "offset": sent,
                "endOffset": sent,
                "backlog": 0,
                "ended": True,
            }
        assert await groups("a") == {}, "nothing is left of a group without consumers"


async def test_records_after_the_last_checkpoint_come_again_when_their_consumer_is_gone(simulation: Simulation) -> None:
    async with (
        shared(simulation, segments=1) as topic,
        topic.consumer("two") as two,
        topic.brokers.client(timeout=60) as lost,
    ):
        first = lost.checkpoint_consumer("orders", group=GROUP, name="one")
        await first.start()
        await until(lambda: (first.segments, two.segments) == ((0,), ()))
        await topic.send(3)
        await topic.take(first, 2 * len(KEYS))
        saved = ConsumerCheckpoint.from_bytes(first.checkpoint())
        await topic.take(first, 3)
        gone_at = simulation.clock.monotonic()
        await lost.abandon()
        await topic.take(two, len(KEYS))
        assert 9 < simulation.clock.monotonic() - gone_at < 12, "its grace has passed"
        assert saved.positions == {0: 2 * len(KEYS)}
        assert topic.complete
        assert sum(len(numbers) for numbers in topic.received.values()) == 3 * len(KEYS) + 3


async def test_nothing_is_read_of_a_segment_that_is_taken_away_while_its_channel_is_opened(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_channel = ClientChannel.open
    async with shared(simulation, segments=1) as topic:
        await topic.send(3)
        one = topic.consumer("one")
        assert isinstance(one, GroupCheckpointConsumer)

        async def lose_when_open(channel: ClientChannel, *arguments: Any, **options: Any) -> None:
            await open_channel(channel, *arguments, **options)
            monkeypatch.undo()
            one._stop(one._readers[0])  # An assignment arrives in the same turn of the loop.

        monkeypatch.setattr(ClientChannel, "open", lose_when_open)
        async with one:
            assert await one.receive_batch(timeout=5) is None
            async with topic.consumer("a") as other, topic.consuming(other):
                await until(lambda: topic.complete)
        assert topic.once


async def test_a_consumer_that_takes_no_checkpoint_gives_its_segment_back_all_the_same(simulation: Simulation) -> None:
    async with shared(simulation, segments=1) as topic, topic.consumer("two") as two:
        await topic.send(1)
        await topic.take(two, len(KEYS))
        async with topic.consumer("one") as one:
            asked_at = simulation.clock.monotonic()
            await topic.take(one, len(KEYS))
            assert 4 < simulation.clock.monotonic() - asked_at < 6
            assert await two.receive(timeout=5) is None


async def test_a_group_resumes_from_its_checkpoints(simulation: Simulation) -> None:
    async with shared(simulation) as topic:
        await topic.send(4)
        saved: list[bytes] = []
        async with topic.consumer("one") as one, topic.consumer("two") as two:
            await until(lambda: (one.segments, two.segments) == ((0, 2), (1, 3)))
            for consumer in (one, two):
                await topic.take(consumer, len(KEYS))
                saved.append(consumer.checkpoint())
        async with topic.consumer("x", saved) as one, topic.consumer("y", saved) as two, topic.consuming(one, two):
            await until(lambda: topic.complete)
        assert topic.once


async def test_a_consumer_that_slept_while_its_topic_was_made_anew_does_not_let_the_group_skip(
    simulation: Simulation,
) -> None:
    async with shared(simulation, segments=1) as topic:
        network = topic.brokers.network
        sleeping = connect(
            "braid://a:6660,b:6660,c:6660",
            network=network.host("sleeper"),
            clock=simulation.clock,
            random=simulation.random,
            timeout=60,
        )
        async with sleeping:
            sleeper = sleeping.checkpoint_consumer("orders", group=GROUP, name="a-sleeper")
            await sleeper.start()
            await topic.send(2)
            await topic.take(sleeper, 2 * len(KEYS))
            sleeper.checkpoint()
            for name in topic.brokers.running:
                network.cut("sleeper", name)
            await asyncio.sleep(60)
            await topic.admin.delete_topic("orders")
            await topic.admin.create_topic("orders", segments=1)
            topic.sent, topic.received = 0, {key: [] for key in KEYS}
            await topic.send(3)
            async with topic.consumer("worker") as worker:
                await topic.take(worker, 1)
                worker.checkpoint()
                network.heal("sleeper")
                with pytest.raises(TopicNotFound):
                    await sleeper.receive(timeout=60)
                await asyncio.sleep(60)  # It joins again, and leaves: the segment goes to it and back.
                async with topic.consuming(worker):
                    await until(lambda: topic.complete)
                assert topic.once


async def test_checkpoint_consumers_without_a_group_each_see_everything(simulation: Simulation) -> None:
    async with shared(simulation, segments=2) as topic:
        await topic.send(2)
        for _ in range(2):
            async with topic.client.checkpoint_consumer("orders") as consumer:
                topic.received = {key: [] for key in KEYS}
                await topic.take(consumer, 2 * len(KEYS))
            assert topic.once


async def test_nothing_is_left_when_all_consumers_have_closed(simulation: Simulation) -> None:
    async with shared(simulation) as topic:
        prefix = paths.subscriptions_prefix(PATH)
        async with topic.consumer("one") as one, topic.consumer("two") as two:
            await topic.send(1)
            async with topic.consuming(one, two):
                await until(lambda: topic.complete)
            found = await topic.brokers.store.list(prefix)
            assert [paths.consumer_of(entry.key) for entry in found.entries] == [
                (f"group:{GROUP}", "one"),
                (f"group:{GROUP}", "two"),
            ]
            assert await topic.admin.subscriptions("orders") == []
        assert (await topic.brokers.store.list(prefix)).entries == ()
        segments = await topic.brokers.store.list(paths.SEGMENTS_PREFIX)
        assert not any("cursors" in entry.key for entry in segments.entries)


async def split(topic: Shared) -> None:
    await topic.admin.split("orders", 0)


async def merge(topic: Shared) -> None:
    await topic.admin.merge("orders", 0, 1)


async def two_splits(topic: Shared) -> None:
    await topic.admin.split("orders", 0)
    await topic.send(1)
    await topic.admin.split("orders", 2)


CHANGES = pytest.mark.parametrize("change", [split, merge, two_splits])


@CHANGES
async def test_a_group_reads_on_across_a_change_of_layout(
    change: Callable[[Shared], Awaitable[None]], simulation: Simulation
) -> None:
    async with shared(simulation, segments=2) as topic, topic.consumer("one") as one, topic.consumer("two") as two:
        await until(lambda: (one.segments, two.segments) == ((0,), (1,)))
        async with topic.consuming(one, two):
            await topic.send(2)
            await change(topic)
            await topic.send(2)
            await until(lambda: topic.complete)
        assert topic.once


@CHANGES
async def test_a_group_from_the_earliest_record_reads_the_sealed_backlog_of_all_generations(
    change: Callable[[Shared], Awaitable[None]], simulation: Simulation
) -> None:
    async with shared(simulation, segments=2) as topic:
        await topic.send(2)
        await change(topic)
        await topic.send(2)
        async with topic.consumer("one") as one, topic.consumer("two") as two, topic.consuming(one, two):
            await until(lambda: topic.complete)
        assert topic.complete


@CHANGES
async def test_a_groups_checkpoints_resume_across_a_change_of_layout(
    change: Callable[[Shared], Awaitable[None]], simulation: Simulation
) -> None:
    async with shared(simulation, segments=2) as topic:
        await topic.send(2)
        async with topic.consumer("one") as one:
            await topic.take(one, len(KEYS))
            saved = one.checkpoint()
        await change(topic)
        await topic.send(1)
        async with topic.consumer("x", saved) as one, topic.consumer("y", saved) as two, topic.consuming(one, two):
            await until(lambda: topic.complete)
        assert topic.once


async def test_children_wait_for_a_checkpoint_that_has_the_end_of_their_parent(simulation: Simulation) -> None:
    async with shared(simulation, segments=1) as topic, topic.consumer("one") as one, topic.consumer("two") as two:
        await topic.send(1)
        await topic.admin.split("orders", 0)
        await topic.send(1)
        await topic.take(one, len(KEYS))
        assert await one.receive(timeout=20) is None
        assert (one.segments, two.segments) == ((0,), ()), "the parent may have to be read again"
        assert ConsumerCheckpoint.from_bytes(one.checkpoint()).positions == {0: END}
        async with topic.consuming(one, two):
            await until(lambda: topic.complete)
        assert (one.segments, two.segments) == ((1,), (2,))
        assert topic.once
        for consumer in (one, two):
            assert ConsumerCheckpoint.from_bytes(consumer.checkpoint()).positions[0] == END


async def test_the_next_controller_learns_from_the_consumers_what_has_ended(simulation: Simulation) -> None:
    async with shared(simulation, segments=1) as topic, contextlib.AsyncExitStack() as stack:
        group = [await stack.enter_async_context(topic.consumer(name)) for name in ("one", "two", "three")]
        async with topic.consuming(*group):
            await topic.send(2)
            await topic.admin.split("orders", 0)
            await topic.send(2)
            await until(lambda: topic.complete)
            shares = [consumer.segments for consumer in group]
            await topic.lose_controller()
            await asyncio.sleep(15)
            await topic.send(2)
            await until(lambda: topic.complete)
            assert [consumer.segments for consumer in group] == shares
        assert topic.once, "no parent was read again"


@pytest.mark.parametrize("seed", range(8))
async def test_keys_stay_in_order_for_a_group_that_changes(seed: int, simulation: Simulation) -> None:
    """Consumers come and go, layouts change and controllers forget: nothing is left out, and each key is in order."""
    luck = Random(seed)
    async with shared(simulation, segments=2) as topic:
        members: dict[str, tuple[CheckpointConsumer, asyncio.Task[None]]] = {}
        saved: dict[str, bytes] = {}

        async def join(name: str) -> None:
            consumer = topic.consumer(name, [*saved.values()] or "earliest")
            await consumer.start()
            members[name] = consumer, asyncio.ensure_future(topic.consume(consumer))

        async def leave(name: str) -> None:
            consumer, task = members.pop(name)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled(), task
            saved[name] = consumer.checkpoint()
            await consumer.close()

        await join("one")
        for _ in range(12):
            await topic.send(1)
            active = [segment.segment_id for segment in topic.brokers.any().topics.get(PATH).layout.active]
            match luck.choice(["join", "leave", "split", "merge", "forget", "wait"]):
                case "join":
                    if joining := sorted({"one", "two", "three"} - members.keys()):
                        await join(luck.choice(joining))
                case "leave" if len(members) > 1:
                    await leave(luck.choice(sorted(members)))
                case "split" if len(active) < 5:
                    await topic.admin.split("orders", luck.choice(active))
                case "merge" if len(active) > 1:
                    at = luck.randrange(len(active) - 1)
                    await topic.admin.merge("orders", active[at], active[at + 1])
                case "forget":
                    await topic.lose_controller()
                case _:
                    await asyncio.sleep(luck.uniform(0, 20))
        await until(lambda: topic.complete)
        for name in sorted(members):
            await leave(name)
        async with topic.consumer("last", [*saved.values()]) as last:
            assert await last.receive(timeout=30) is None, "the checkpoints together have everything"


async def test_a_group_takes_no_offsets_of_single_segments_and_a_name_needs_a_group(simulation: Simulation) -> None:
    async with shared(simulation, segments=1) as topic:
        with pytest.raises(InvalidArgument, match="a group reads all segments"):
            topic.client.checkpoint_consumer("orders", group=GROUP, start={0: 0})
        with pytest.raises(InvalidArgument, match="only in a group"):
            topic.client.checkpoint_consumer("orders", name="one")
