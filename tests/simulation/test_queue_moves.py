"""Queues whose segments are killed, moved, split and merged, with whole brokers in virtual time: a confirmed ack is
never undone (I9), and every other message comes again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.metadata import paths
from braid.metadata.store import Put
from braid.model.errors import AckStale, BraidError
from braid.model.ids import Revision
from braid.model.message import QueueMessage
from braid.model.names import SegmentName
from braid.model.ownership import Ownership, OwnershipState
from braid.storage.history.exporter import Exporter
from braid.storage.queue_journal import QueueJournal
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, record_of, segment_of
from tests.kits.crash_point import CrashPoint
from tests.kits.queues import (
    kill_program,
    numbers,
    program,
    queue_at,
    queue_of,
    remaining,
    send,
    served,
    take,
    take_all,
)
from tests.kits.waiting import until

AWAY = ("a", "b", "c")


class Worker:
    """A program that acks everything, and notes which acks were confirmed. It fails on any delivery after that."""

    def __init__(self, client: Client, confirmed: set[int], *, name: str = "worker", prefetch: int = 10) -> None:
        self.confirmed = confirmed
        self.stale = 0
        self._client = client
        self._name = name
        self._prefetch = prefetch
        self._task = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        async with self._client.queue_consumer("orders", "work", name=self._name, prefetch=self._prefetch) as consumer:
            while True:
                message = await consumer.receive()
                assert message is not None
                number = int(message.value)
                assert number not in self.confirmed, f"I9: message {number} came after its ack was confirmed"
                try:
                    await consumer.ack(message)
                except AckStale:
                    self.stale += 1
                else:
                    self.confirmed.add(number)

    def check(self) -> None:
        if self._task.done():
            self._task.result()

    async def until_confirmed(self, count: int) -> None:
        def enough() -> bool:
            self.check()
            return len(self.confirmed) >= count

        await until(enough)

    async def stop(self) -> None:
        self.check()
        self._task.cancel()
        await asyncio.wait([self._task])


async def ack_some(consumer: QueueConsumer, messages: list[QueueMessage]) -> set[int]:
    """Ack every third message; return which."""
    for message in messages[::3]:
        await consumer.ack(message)
    return {int(message.value) for message in messages[::3]}


# Crashes of one broker.


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power-lost"])
async def test_a_broker_that_dies_delivers_no_message_again_whose_ack_was_confirmed(
    simulation: Simulation, power: bool
) -> None:
    async with queue_of(simulation, messages=60) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            acked = await ack_some(consumer, await take(consumer, 60))
            brokers.kill("a")
            if power:
                brokers.disks["a"].crash()
            await brokers.start("a")
        assert set(await remaining(client)) == set(range(60)) - acked


@pytest.mark.parametrize("seed", range(6))
async def test_acks_under_way_when_the_power_fails_are_confirmed_or_come_again(
    simulation: Simulation, seed: int
) -> None:
    async with queue_of(simulation, messages=300) as (brokers, client):
        confirmed: set[int] = set()
        worker = Worker(client, confirmed)
        for count in (40, 120, 200):
            await worker.until_confirmed(count)
            brokers.kill("a")
            brokers.disks["a"].crash()
            await brokers.start("a")
        await worker.until_confirmed(300)
        await worker.stop()
        assert confirmed == set(range(300))


async def test_no_ack_is_confirmed_before_the_disk_has_it(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=5) as (brokers, client):
        consumer = client.queue_consumer("orders", "work")
        messages = await take(consumer, 5)
        brokers.disks["a"].faults = DiskFaults(sync_s=(60.0, 60.0))
        acking = [asyncio.ensure_future(consumer.ack(each)) for each in messages]
        await asyncio.sleep(3)
        assert not any(each.done() for each in acking)
        assert queue_at(brokers).counts().ready == 0
        offset = brokers.running["a"].segments.get(PATH, 0).cursors.offset("work")
        assert offset == 0, "the cursor waits for the disk, too"
        brokers.disks["a"].faults = DiskFaults()
        brokers.kill("a")
        brokers.disks["a"].crash()
        await brokers.start("a")
        await asyncio.wait(acking)
        settled = {int(m.value) for m, each in zip(messages, acking, strict=True) if each.exception() is None}
        again = set(numbers(await take_all(consumer)))
        assert (settled | again, settled & again) == (set(range(5)), set())


async def test_a_full_disk_refuses_acks_and_the_queue_goes_on_when_there_is_room(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=2_000) as (brokers, client):
        async with client.queue_consumer("orders", "work", prefetch=2_000) as consumer:
            messages = await take(consumer, 2_000)
            brokers.disks["a"].faults = DiskFaults(capacity_bytes=1)
            acking = [asyncio.ensure_future(consumer.ack(each)) for each in messages[::2]]
            await asyncio.sleep(5)
            brokers.disks["a"].faults = DiskFaults()
            await asyncio.wait(acking)
            settled = {int(m.value) for m, each in zip(messages[::2], acking, strict=True) if each.exception() is None}
        assert not settled & set(await remaining(client))


async def test_an_orderly_stop_keeps_acks_delays_and_counts(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=10) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 10)
            for message in messages[:3]:
                await consumer.ack(message)
            await consumer.nack(messages[3], delay=3_600)
            await consumer.nack(messages[4], delay=1)
        await brokers.stop("a")
        await brokers.start("a")
        async with client.queue_consumer("orders", "work") as consumer:
            found = {int(each.value): each.redelivery_count for each in await take_all(consumer)}
        assert found == dict.fromkeys(range(4, 10), 1)


async def test_a_damaged_journal_is_reported_and_its_queue_delivers_nothing_again(simulation: Simulation) -> None:
    async with queue_of(simulation, messages=30) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            for message in await take(consumer, 30):
                await consumer.ack(message)
            await send(client, [30])
            await take(consumer, 1)
            brokers.kill("a")
        (path,) = [each for each in brokers.disks["a"].paths() if each.endswith(".queue")]
        second = brokers.disks["a"].content(path).index(b"BQJ1", 4)
        brokers.disks["a"].corrupt(path, second + 30, b"\xff\xff")
        await brokers.start("a")
        await until(lambda: record_of(brokers).failures)
        assert "is damaged" in str(record_of(brokers).failures)
        assert "accept the loss: its queues then go back to their cursors" in str(record_of(brokers).failures)
        assert not brokers.owner(0)
        await client.admin.recover("orders", accept_loss=True)
        assert 30 in await remaining(client)


async def test_the_journal_that_a_crash_has_left_of_a_deleted_queue_is_removed_when_its_segment_opens(
    simulation: Simulation,
) -> None:
    async with queue_of(simulation, messages=30) as (brokers, client):
        await client.admin.create_subscription("orders", "other", kind="queue")
        async with client.queue_consumer("orders", "work") as consumer:
            acked = await ack_some(consumer, await take(consumer, 30))

        def queues() -> set[str]:
            found = (path.split("/queues/") for path in brokers.disks["a"].paths())
            return {rest[0].partition("/")[0] for _, *rest in found if rest}

        assert queues() == {"work", "other"}
        brokers.disks["a"].faults = DiskFaults(sync_s=(60.0, 60.0))
        deleting = asyncio.ensure_future(client.admin.delete_subscription("orders", "other"))
        cursors = brokers.running["a"].segments.get(PATH, 0).cursors
        await until(lambda: "other" not in cursors.all())
        brokers.kill("a")
        brokers.disks["a"].crash()
        brokers.disks["a"].faults = DiskFaults()
        assert queues() == {"work", "other"}, "the crash came before the journal was gone"
        await brokers.start("a")
        await served(brokers)
        assert queues() == {"work"}
        await asyncio.wait([deleting])
        assert [each["name"] for each in await client.admin.subscriptions("orders")] == ["work"]
        assert set(await remaining(client)) == set(range(30)) - acked


# Moves.


@SHARED
async def test_a_move_takes_the_state_of_the_queue_with_it(simulation: Simulation, shared: bool) -> None:
    async with queue_of(simulation, AWAY, shared=shared, messages=30) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 30)
            acked = await ack_some(consumer, messages)
            await consumer.nack(messages[1], delay=3_600, reason="not now")
        source = await served(brokers)
        for target in [each for each in AWAY if each != source]:
            await brokers.move(0, target)
        async with client.queue_consumer("orders", "work") as consumer:
            found = await take_all(consumer, ack=True)
        assert set(numbers(found)) == set(range(30)) - acked - {1}
        assert {each.redelivery_count for each in found} == {1}
        assert queue_at(brokers).counts().delayed == 1


@SHARED
@pytest.mark.parametrize("seed", range(3))
async def test_consumers_go_on_through_moves_and_no_confirmed_ack_is_undone(
    simulation: Simulation, shared: bool, seed: int
) -> None:
    async with queue_of(simulation, AWAY, shared=shared, messages=400, segments=2) as (brokers, client):
        confirmed: set[int] = set()
        workers = [Worker(client, confirmed, name=name) for name in ("one", "two")]
        for moves in range(1, 5):
            await workers[0].until_confirmed(60 * moves)
            source = await served(brokers)
            await brokers.move(0, simulation.random.choice([each for each in AWAY if each != source]))
        await workers[1].until_confirmed(400)
        for worker in workers:
            await worker.stop()
        assert confirmed == set(range(400))


@SHARED
async def test_an_ack_after_a_move_counts_if_nobody_else_got_the_message(simulation: Simulation, shared: bool) -> None:
    async with (
        queue_of(simulation, AWAY, shared=shared, messages=3, ack_timeout_ms=600_000) as (brokers, client),
        client.queue_consumer("orders", "work", prefetch=3) as consumer,
    ):
        messages = await take(consumer, 3)
        source = await served(brokers)
        await brokers.move(0, next(each for each in AWAY if each != source))
        for message in messages:
            await consumer.ack(message)
        assert await consumer.receive(timeout=10) is None


@SHARED
async def test_an_ack_after_a_move_is_stale_when_another_consumer_got_the_message(
    simulation: Simulation, shared: bool
) -> None:
    async with (
        queue_of(simulation, AWAY, shared=shared, messages=1, ack_timeout_ms=600_000) as (brokers, client),
        program(brokers, "slow") as slow_client,
    ):
        slow = slow_client.queue_consumer("orders", "work", name="slow")
        (message,) = await take(slow, 1)
        kill_program(brokers, "slow")
        source = await served(brokers)
        await brokers.move(0, next(each for each in AWAY if each != source))
        async with client.queue_consumer("orders", "work", name="fast") as fast:
            (again,) = await take(fast, 1)
            brokers.network.heal("slow")
            with pytest.raises(AckStale):
                await slow.ack(message)
            await fast.ack(again)


async def test_a_consumer_that_is_back_drops_unseen_messages_that_others_have_got(simulation: Simulation) -> None:
    async with (
        queue_of(simulation, AWAY, messages=10, ack_timeout_ms=600_000) as (brokers, client),
        program(brokers, "slow") as slow_client,
    ):
        slow = slow_client.queue_consumer("orders", "work", name="slow")
        await take(slow, 1)
        kill_program(brokers, "slow")
        source = await served(brokers)
        await brokers.move(0, next(each for each in AWAY if each != source))
        assert await remaining(client) == list(range(10))
        brokers.network.heal("slow")
        await until(lambda: queue_at(brokers).counts().consumers == ("slow",))
        await asyncio.sleep(1)
        assert await slow.receive(timeout=5) is None


@pytest.mark.parametrize("at", range(1, 12))
async def test_a_crash_at_any_step_of_a_move_undoes_no_confirmed_ack(simulation: Simulation, at: int) -> None:
    async with queue_of(simulation, AWAY, messages=30) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            acked = await ack_some(consumer, await take(consumer, 30))
        source = await served(brokers)
        target = next(each for each in AWAY if each != source)
        point = CrashPoint(brokers, source, at)
        moving = asyncio.ensure_future(brokers.move(0, target))
        await until(lambda: point.hit or moving.done())
        point.disarm()
        if source not in brokers.running:
            await brokers.start(source)
        await asyncio.wait([moving], timeout=60)
        moving.cancel()
        await asyncio.wait([moving])
        await served(brokers)
        assert set(await remaining(client)) == set(range(30)) - acked


# Splits and merges.


@SHARED
async def test_a_split_and_a_merge_under_consumers_deliver_everything_and_nothing_settled(
    simulation: Simulation, shared: bool
) -> None:
    async with queue_of(simulation, AWAY, shared=shared, messages=100) as (_, client):
        confirmed: set[int] = set()
        workers = [Worker(client, confirmed, name=name) for name in ("one", "two")]
        await workers[0].until_confirmed(20)
        await client.admin.split("orders", 0)
        await send(client, range(100, 200))
        await client.admin.merge("orders", 1, 2)
        await send(client, range(200, 300))
        await workers[0].until_confirmed(300)
        for worker in workers:
            await worker.stop()
        assert confirmed == set(range(300))
        assert await remaining(client) == []


async def test_an_ended_segment_is_not_clean_while_it_has_messages_and_is_clean_when_all_are_settled(
    simulation: Simulation,
) -> None:
    async with queue_of(simulation, AWAY, messages=30) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            acked = await ack_some(consumer, await take(consumer, 30))
        await client.admin.split("orders", 0)
        storage = brokers.running[await served(brokers)].segments.get(PATH, 0).storage
        await until(lambda: storage.ended and storage.catalog.next_offset >= storage.log.end)
        await asyncio.sleep(30)
        assert not record_of(brokers).clean
        source = brokers.owner(0)
        brokers.kill(source)
        await asyncio.sleep(60)
        assert not brokers.owner(0), "no other broker knows what is settled"
        await brokers.start(source)
        await served(brokers)
        assert set(await remaining(client)) == set(range(30)) - acked
        await until(lambda: record_of(brokers).clean)


async def test_a_queue_that_is_created_on_an_ended_segment_takes_its_clean_record_back(simulation: Simulation) -> None:
    async with queue_of(simulation, AWAY, messages=30) as (brokers, client):
        assert await remaining(client) == list(range(30))
        await client.admin.split("orders", 0)
        await until(lambda: record_of(brokers).clean)
        await client.admin.create_subscription("orders", "late", kind="queue")
        assert not record_of(brokers).clean
        async with client.queue_consumer("orders", "late") as consumer:
            acked = await ack_some(consumer, await take(consumer, 30))
        source = brokers.owner(0)
        brokers.kill(source)
        await asyncio.sleep(60)
        assert not brokers.owner(0)
        await brokers.start(source)
        await served(brokers)
        async with client.queue_consumer("orders", "late") as consumer:
            assert set(numbers(await take_all(consumer, ack=True))) == set(range(30)) - acked
        await until(lambda: record_of(brokers).clean)


async def test_a_record_stays_unclean_while_chunks_get_the_log_before_its_queues_are_open(
    simulation: Simulation,
) -> None:
    async with queue_of(simulation, AWAY, messages=30) as (brokers, client):
        async with client.queue_consumer("orders", "work") as consumer:
            acked = await ack_some(consumer, await take(consumer, 30))
        await client.admin.split("orders", 0)
        source = await served(brokers)
        opening, may_open = asyncio.Event(), asyncio.Event()
        exporters: list[Exporter] = []
        open_journal, start = QueueJournal.open, Exporter.start

        async def slow(*arguments: Any, **options: Any) -> QueueJournal:
            if exporters:  # Before that, evidence is read.
                opening.set()
                await may_open.wait()
            return await open_journal(*arguments, **options)

        brokers.kill(source)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(QueueJournal, "open", slow)
            patch.setattr(Exporter, "start", lambda exporter: exporters.append(exporter))
            starting = asyncio.ensure_future(brokers.start(source))
            await opening.wait()
        for exporter in exporters:
            start(exporter)
        await asyncio.sleep(1)
        may_open.set()
        await starting
        await served(brokers)
        assert not record_of(brokers).clean
        brokers.kill(source)
        await asyncio.sleep(60)
        assert not brokers.owner(0), "acks are on the disk of its owner alone"
        await brokers.start(source)
        await served(brokers)
        assert set(await remaining(client)) == set(range(30)) - acked


async def test_a_record_that_becomes_clean_while_a_queue_is_created_does_not_stay_clean(simulation: Simulation) -> None:
    async with queue_of(simulation, AWAY, messages=30) as (brokers, client):
        owners = brokers.running[await served(brokers)].cluster.owners
        writing, comes = asyncio.Event(), asyncio.Event()
        swap = owners.swap

        async def late(name: SegmentName, revision: Revision, record: Ownership) -> Revision | None:
            if record.clean and record.state is OwnershipState.SERVING:
                writing.set()
                await comes.wait()
            return await swap(name, revision, record)

        await client.admin.split("orders", 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owners, "swap", late)
            assert await remaining(client) == list(range(30))
            await writing.wait()
            await client.admin.create_subscription("orders", "late", kind="queue")
            comes.set()
            await asyncio.sleep(5)
        assert not record_of(brokers).clean


async def test_an_owner_whose_view_lags_does_not_write_its_record_again_and_again(simulation: Simulation) -> None:
    async with queue_of(simulation, AWAY, messages=30) as (brokers, client):
        owner = await served(brokers)
        owners, store = brokers.running[owner].cluster.owners, brokers.store_of(owner)
        tries, swap = 0, owners.swap

        async def counted(name: SegmentName, revision: Revision, record: Ownership) -> Revision | None:
            nonlocal tries
            tries += 1
            await asyncio.sleep(1 if tries > 1 else 0)  # An owner without a pause would end this test much later.
            return await swap(name, revision, record)

        await client.admin.split("orders", 0)
        await asyncio.sleep(5)
        store.lag()
        key = paths.ownership(PATH, segment_of(brokers, 0).descriptor)
        entry = await brokers.store.get(key)
        assert entry is not None
        await brokers.store.txn([], [Put(key, entry.value)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owners, "swap", counted)
            assert await remaining(client) == list(range(30))
            await until(lambda: tries > 0)
            await asyncio.sleep(5)
            assert tries == 1
            store.catch_up()
            await until(lambda: record_of(brokers).clean)


async def test_deleting_the_last_queue_of_an_ended_segment_makes_its_record_clean(simulation: Simulation) -> None:
    async with queue_of(simulation, AWAY, messages=10) as (brokers, client):
        await client.admin.split("orders", 0)
        await asyncio.sleep(30)
        assert not record_of(brokers).clean
        await client.admin.delete_subscription("orders", "work")
        await until(lambda: record_of(brokers).clean)


@pytest.mark.parametrize("at", range(1, 8))
async def test_a_crash_after_the_last_ack_of_an_ended_segment_undoes_nothing(simulation: Simulation, at: int) -> None:
    """The record may say that any broker can go on only when the store has the cursor."""
    async with queue_of(simulation, AWAY, messages=10) as (brokers, client):
        await client.admin.split("orders", 0)
        source = await served(brokers)
        storage = brokers.running[source].segments.get(PATH, 0).storage
        await until(lambda: storage.ended and storage.catalog.next_offset >= storage.log.end)
        await asyncio.sleep(5)
        async with client.queue_consumer("orders", "work") as consumer:
            messages = await take(consumer, 10)
            for message in messages[1:]:
                await consumer.ack(message)
            point = CrashPoint(brokers, source, at)
            confirmed = {int(message.value) for message in messages[1:]}
            try:
                async with asyncio.timeout(5):
                    await consumer.ack(messages[0])
                    confirmed.add(int(messages[0].value))
            except (TimeoutError, BraidError):
                pass
            await asyncio.sleep(60)
            if not brokers.owner(0) and source not in brokers.running:
                await brokers.start(source)
            point.disarm()
            await served(brokers)
            assert not confirmed & set(numbers(await take_all(consumer)))


# Journals that fail.


async def test_a_queue_whose_journal_failed_during_a_move_goes_on_when_the_move_is_given_up(
    simulation: Simulation,
) -> None:
    async with (
        queue_of(simulation, AWAY, shared=False, messages=3) as (brokers, client),
        client.queue_consumer("orders", "work") as consumer,
    ):
        messages = await take(consumer, 3)
        source, queue = await served(brokers), queue_at(brokers)
        target = next(each for each in AWAY if each != source)
        asked = asyncio.Event()

        async def never(*_: object) -> None:
            asked.set()
            await asyncio.Event().wait()

        brokers.running[target].front_door.peer_calls._handlers["list_history"] = (never, False)
        moving = asyncio.ensure_future(brokers.move(0, target))
        await asked.wait()
        brokers.disks[source].faults = DiskFaults(sync_failure=1.0)
        acking = asyncio.ensure_future(consumer.ack(messages[0]))
        await until(lambda: queue.failure is not None)
        brokers.disks[source].faults = DiskFaults()
        brokers.kill(target)
        await until(lambda: record_of(brokers).move is None)
        await acking
        assert queue_at(brokers) is not queue, "the segment was opened again"
        moving.cancel()
        await consumer.close()
        assert await remaining(client) == [1, 2]
