"""Moves on bad days, each by itself, with whole brokers in virtual time (random ones: test_cluster_simulation.py; a
crash after each step: test_move_crash_points.py)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import pytest

from braid.broker.segments.handover import EXPORT_PATIENCE_S
from braid.client.client import Client
from braid.client.producing.producer import Producer
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Compare, Put
from braid.model.errors import Fenced, LogClosed, MoveRefused, NotServing, ObjectStoreUnavailable, SyncFailed
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.ports.disk import Buffer
from braid.storage.history.manifest import segment_folder
from braid.testing.batches import opaque_batch
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import MemoryObjects
from tests.kits.brokers import PATH, SHARED, Brokers, read_all, record_of, running_brokers, segment_of
from tests.kits.waiting import until


async def wish(brokers: Brokers, to: str) -> None:
    """Ask for a move and do not wait for it."""
    name = segment_of(brokers)
    key = paths.ownership(name.topic.path, name.descriptor)
    entry = await brokers.store.get(key)
    assert entry is not None
    moving = Ownership.from_json(entry.value).moving(Move(to=to, id="test"))
    assert (await brokers.store.txn([Compare(key, entry.revision)], [Put(key, moving.to_json())])).succeeded


async def topic_at(brokers: Brokers, client: Client, owner: str) -> None:
    await client.admin.create_topic("orders")
    await until(lambda: brokers.owner(0))
    if brokers.owner(0) != owner:
        await brokers.move(0, owner)


async def send(producer: Producer, *numbers: int) -> None:
    for number in numbers:
        assert (await producer.send(b"%d" % number)).offset == number


@SHARED
async def test_a_move_to_a_broker_that_has_died_is_given_up_and_the_segment_is_served_on(
    shared: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            brokers.kill("c")
            await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
            await wish(brokers, "c")
            await until(lambda: record_of(brokers).refusal)
            assert "broker c is down or draining" in record_of(brokers).refusal
            assert (record_of(brokers).owner, record_of(brokers).move) == ("a", None)
            await send(producer, *range(5, 10))
            await brokers.move(0, "b")
            assert not record_of(brokers).refusal
            await send(producer, *range(10, 12))
        assert await read_all(client, 12) == [b"%d" % number for number in range(12)]


@SHARED
async def test_a_move_to_a_broker_that_dies_meanwhile_ends_where_somebody_can_serve(
    shared: bool, simulation: Simulation
) -> None:
    """The target dies at once, but its lease goes on for a while: nobody knows."""
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=120) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            brokers.kill("c")
            await wish(brokers, "c")
            await send(producer, *range(5, 10))
            await until(lambda: brokers.owner(0) and record_of(brokers).move is None)
            assert brokers.owner(0) in ("a", "b")
        assert await read_all(client, 10) == [b"%d" % number for number in range(10)]


class FailingObjects(MemoryObjects):
    """Takes no chunk of a segment that its record in the store, not anyone's view of it, shows draining. What is stored
    before that is not the last chunk: `more`, called once, brings a record that comes behind it."""

    def __init__(self, brokers: Brokers) -> None:
        super().__init__(brokers.simulation.clock)
        self._brokers = brokers
        self.works = True
        self.more: Callable[[], Awaitable[None]] | None = None

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if not name.endswith(".chunk") or self.works:
            await super().create(name, parts)
        elif await self._is_draining():
            raise ObjectStoreUnavailable(f"{name} cannot be stored today")
        else:
            await super().create(name, parts)
            more, self.more = self.more, None
            if more is not None:
                await more()

    async def _is_draining(self) -> bool:
        name = segment_of(self._brokers)
        entry = await self._brokers.store.get(paths.ownership(name.topic.path, name.descriptor))
        return entry is not None and Ownership.from_json(entry.value).state is OwnershipState.DRAINING


async def test_an_export_that_fails_during_the_seal_holds_up_publishes_for_a_while_and_then_the_segment_is_taken_back(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, names=()) as brokers:
        brokers.objects = objects = FailingObjects(brokers)
        await brokers.start("a", "b", "c")
        async with brokers.client(timeout=60) as client:
            await topic_at(brokers, client, "a")
            async with client.producer("orders") as producer:
                await send(producer, *range(5))
                sent = 5

                async def send_one() -> None:
                    nonlocal sent
                    await send(producer, sent)
                    sent += 1

                objects.more, objects.works = send_one, False
                name = segment_of(brokers)
                await wish(brokers, "b")
                await until(lambda: record_of(brokers).state is OwnershipState.DRAINING)
                began = brokers.simulation.clock.monotonic()
                await send_one()
                assert brokers.simulation.clock.monotonic() - began >= EXPORT_PATIENCE_S / 2, "it was not held up"
                assert "could not be finished" in record_of(brokers).refusal
                await until(lambda: brokers.owner(0) == "a")
                assert record_of(brokers).epoch > 1
                objects.works = True
                await send_one()
                await brokers.move(0, "b")
                await send_one()
            assert brokers.running["a"].cluster.owners.find(name) == record_of(brokers)
            assert await read_all(client, sent) == [b"%d" % number for number in range(sent)]


@pytest.mark.parametrize("victim", ["a", "b", "c"], ids=["old owner", "new owner", "leader or neither"])
async def test_a_broker_that_cannot_reach_the_metadata_store_for_a_while_delays_a_move_and_harms_nothing(
    victim: str, simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=120) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            await wish(brokers, "b")
            brokers.store_of(victim).disconnect()
            sending = asyncio.create_task(send(producer, *range(5, 10)))
            await asyncio.sleep(5)  # Shorter than a lease.
            brokers.store_of(victim).reconnect()
            await sending
            await until(lambda: brokers.owner(0) and record_of(brokers).move is None)
            if brokers.owner(0) == "a":  # It gave the move up when the store did not answer.
                assert record_of(brokers).refusal
                await brokers.move(0, "b")
            await send(producer, *range(10, 12))
        assert await read_all(client, 12) == [b"%d" % number for number in range(12)]


async def test_a_consumer_that_lags_far_behind_reads_on_through_several_moves(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", name="slow", start="earliest") as consumer,
        ):
            expected = 0
            for outcomes, owner in enumerate(("b", "c", "a", "b")):
                await send(producer, *range(20 * outcomes, 20 * (outcomes + 1)))
                await brokers.move(0, owner)
                for _ in range(3):
                    message = await consumer.receive(timeout=60)
                    assert message is not None
                    assert (message.offset, message.value) == (expected, b"%d" % expected)
                    await consumer.ack(message)
                    expected += 1
            while expected < 80:
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert message.offset == expected
                expected += 1


@SHARED
async def test_a_dead_owners_segment_waits_for_it_and_says_so(shared: bool, simulation: Simulation) -> None:
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=120) as client:
        await topic_at(brokers, client, "c")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            brokers.kill("c")
            await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
            await asyncio.sleep(60)
            refused = brokers.running["a"].segments.not_here(PATH, 0)
            assert isinstance(refused, NotServing)
            assert "waits for its owner c, which is down" in str(refused)
            (waits,) = brokers.running["a"].cluster.leader.waiting()
            assert waits.brokers == ("c",)
            sending = asyncio.create_task(send(producer, 5))
            await brokers.start("c")
            await sending
        assert await read_all(client, 6) == [b"%d" % number for number in range(6)]


@SHARED
async def test_a_zombie_that_comes_back_after_its_segment_was_recovered_elsewhere_changes_nothing(
    shared: bool, simulation: Simulation
) -> None:
    """I3. It is cut off from the store, past its lease; an operator accepts the loss of what only it has."""
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "b", timeout=120) as client:
        await topic_at(brokers, client, "c")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            brokers.store_of("c").disconnect()
            for other in ("a", "b"):
                brokers.network.cut("c", other)
            brokers.network.cut("c", "client")
            await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
            with pytest.raises(MoveRefused):
                await brokers.call("a", "move_topic", topic="orders", to="b")
            found = await brokers.call("a", "recover_topic", topic="orders", to="b", acceptLoss=True)
            assert found["segments"][0]["to"] == "b"
            epoch = record_of(brokers).epoch
            brokers.store_of("c").reconnect()
            brokers.network.heal("c")
            await until(lambda: brokers.running["a"].cluster.members.is_live("c"))
            await asyncio.sleep(30)
            assert (record_of(brokers).owner, record_of(brokers).epoch) == ("b", epoch)
            assert not brokers.running["c"].segments.all()
            assert (await producer.send(b"after")).offset == 0, "none of them was in a chunk yet"
        assert await read_all(client, 1) == [b"after"], "what only the lost disk had is gone, as was accepted"


async def test_the_old_owners_copy_goes_when_the_new_one_serves_and_not_before(simulation: Simulation) -> None:
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            name = segment_of(brokers)
            folder = segment_folder(name.topic.path, name.descriptor)

            async def chunks(broker: str) -> int:
                stats = await brokers.running[broker].resources.storage.objects.list(folder)
                return sum(stat.name.endswith(".chunk") for stat in stats)

            await brokers.move(0, "b")
            assert await chunks("b") > 0
            while await chunks("a"):  # noqa: ASYNC110 (virtual time)
                await asyncio.sleep(0.1)
            await send(producer, *range(5, 8))
            await brokers.move(0, "a")
            await send(producer, 8)
        assert await read_all(client, 9) == [b"%d" % number for number in range(9)]
        assert await chunks("a") >= 2


async def test_a_topic_that_was_deleted_and_made_again_while_a_former_owner_was_away_has_nothing_of_the_old_one(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, shared=False) as brokers, brokers.client("a", "b", timeout=120) as client:
        await topic_at(brokers, client, "c")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
        brokers.kill("c")
        await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
        await client.admin.delete_topic("orders")
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(3))
            await brokers.start("c")
            await brokers.move(0, "c")
            await send(producer, 3)
        assert await read_all(client, 4) == [b"%d" % number for number in range(4)]


async def test_a_broker_that_stops_in_order_hands_everything_over_where_storage_is_shared(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=60) as client:
        await topic_at(brokers, client, "c")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", name="worker", start="earliest") as consumer,
        ):
            await send(producer, *range(5))
            sending = asyncio.create_task(send(producer, *range(5, 30)))
            await brokers.stop("c")
            await sending
            assert brokers.owner(0) in ("a", "b")
            for number in range(30):
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert (message.offset, message.value) == (number, b"%d" % number)


async def test_acks_are_stored_when_a_segment_is_handed_over_not_some_time_later(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", name="worker", start="earliest") as consumer,
        ):
            await send(producer, *range(20))
            for _ in range(14):
                message = await consumer.receive(timeout=60)
                assert message is not None
                await consumer.ack(message)
            served = brokers.running["a"].segments.get(PATH, 0)
            await until(lambda: served.cursors.offset("billing") == 14)
            name = segment_of(brokers)
            key = paths.cursor(name.topic.path, name.descriptor, "billing")
            before = await brokers.store.get(key)
            assert before is not None
            assert decode(Cursor, before.value).offset < 14, "acks are stored by and by"
            await brokers.move(0, "b")
            after = await brokers.store.get(key)
            assert after is not None
            assert decode(Cursor, after.value).offset == 14


async def test_no_ack_is_taken_once_the_cursors_are_stored_for_a_hand_over(simulation: Simulation) -> None:
    """The owner would drop an ack that it took by then. The consumer brings it to the next owner."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", name="worker", start="earliest") as consumer,
        ):
            await send(producer, *range(20))
            messages = [message for _ in range(15) if (message := await consumer.receive(timeout=60)) is not None]
            await consumer.ack(messages[13])
            cursors = brokers.running["a"].segments.get(PATH, 0).cursors
            await until(lambda: cursors.offset("billing") == 14)
            brokers.store_of("a").delay_s = lambda: 0.2
            await wish(brokers, "b")
            await until(lambda: cursors._task is None)  # The hand-over has begun to store the cursors.
            await consumer.ack(messages[14])
            await until(lambda: brokers.owner(0) == "b")
            assert cursors.offset("billing") == 14
            after = brokers.running["b"].segments.get(PATH, 0).cursors
            await until(lambda: after.offset("billing") == 15)


@contextlib.asynccontextmanager
async def given_away(
    simulation: Simulation,
    broker: str,
    at: int,
    give: Callable[[Ownership], Ownership | None],
    during: Callable[[Ownership], bool],
) -> AsyncIterator[tuple[Brokers, Client, list[Ownership]]]:
    """A segment at broker a whose record another writer changes by `give`, before one of the requests that `broker`
    makes while `during` holds: before the request of this number. Yields the changed record, too, if there is one."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        name = segment_of(brokers)
        key = paths.ownership(name.topic.path, name.descriptor)
        server = brokers.store._server
        given: list[Ownership] = []
        requests = 0

        def interfere(request: str) -> Fault:
            nonlocal requests
            entry = server.get(key)
            record = Ownership.from_json(entry.value) if entry is not None else None
            if request == "renew" or record is None or given or not during(record):
                return Fault.NONE
            requests += 1
            if requests == at and (other := give(record)) is not None:
                given.append(other)
                server.txn([], [Put(key, other.to_json())])
            return Fault.NONE

        brokers.store_of(broker).fault = interfere
        yield brokers, client, given


@pytest.mark.parametrize("at", range(1, 9))
async def test_an_assignment_that_is_withdrawn_while_it_is_being_opened_comes_to_nothing(
    at: int, simulation: Simulation
) -> None:
    """I3: as a leader does that takes the assigned broker for dead. Before each of that broker's requests."""

    def withdraw(record: Ownership) -> Ownership | None:
        return record.assigned("c") if record.state is OwnershipState.ASSIGNED else None

    scene = given_away(simulation, "b", at, withdraw, during=lambda record: record.owner == "b")
    async with scene as (brokers, client, given), client.producer("orders") as producer:
        await send(producer, *range(5))
        await wish(brokers, "b")
        await send(producer, *range(5, 10))
        await until(lambda: brokers.owner(0) and record_of(brokers).move is None)
        if given:
            assert record_of(brokers).owner == "c"
            assert not brokers.running["b"].segments.all()
        assert record_of(brokers).owner == ("c" if given else "b")
        assert await read_all(client, 10) == [b"%d" % number for number in range(10)]


@pytest.mark.parametrize("at", range(1, 13))
async def test_a_segment_that_is_given_away_while_it_is_handed_over_is_not_sealed(
    at: int, simulation: Simulation
) -> None:
    """I3: as after a recovery while its owner drains it. Before each of the owner's requests."""

    def give_away(record: Ownership) -> Ownership:
        return record.assigned("c", accept_loss=True)

    scene = given_away(simulation, "a", at, give_away, during=lambda record: record.state is OwnershipState.DRAINING)
    async with scene as (brokers, client, given), client.producer("orders") as producer:
        await send(producer, *range(5))
        await wish(brokers, "b")
        await until(lambda: brokers.owner(0) not in ("", "a"))
        assert brokers.owner(0) == ("c" if given else "b")
        assert not brokers.running["a"].segments.all()
        await producer.send(b"after")


async def test_a_segment_whose_record_names_another_owner_is_let_go_at_once(simulation: Simulation) -> None:
    """As after a recovery while this broker still believed in its lease."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            name = segment_of(brokers)
            key = paths.ownership(name.topic.path, name.descriptor)
            forced = record_of(brokers).assigned("b", accept_loss=True)
            await brokers.store.txn([], [Put(key, forced.to_json())])
            await until(lambda: brokers.owner(0) == "b")
            assert not brokers.running["a"].segments.all()


async def test_a_move_is_given_up_when_the_target_has_something_else_under_the_name_of_a_chunk(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, shared=False) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            await brokers.move(0, "b")
            (segment,) = brokers.running["b"].segments.all()
            (chunk,) = segment.storage.catalog.chunks
            name = f"{segment_folder(PATH, segment.name.descriptor)}/{chunk.object}"
            incoming = brokers.running["c"].segment_host.incoming
            known = brokers.running["b"].cluster.owners.known(segment.name)
            assert known is not None
            await incoming.list_history(
                {"segment": str(segment.name), "topic_id": segment.topic_id, "revision": known.revision}
            )
            await brokers.running["c"].resources.storage.objects.create(name, [b"something else"])
            await wish(brokers, "c")
            await until(lambda: record_of(brokers).refusal)
            assert "does not have it as it was sent" in record_of(brokers).refusal
            await send(producer, 5)
        assert await read_all(client, 6) == [b"%d" % number for number in range(6)]


class SlowObjects(MemoryObjects):
    """Each chunk takes long."""

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        if name.endswith(".chunk"):
            await asyncio.sleep(3)
        await super().create(name, parts)


async def test_a_segment_whose_disk_fails_while_its_move_is_prepared_is_opened_again(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=()) as brokers:
        brokers.objects = SlowObjects(brokers.simulation.clock)
        await brokers.start("a", "b")
        async with brokers.client(timeout=60) as client:
            await topic_at(brokers, client, "a")
            async with client.producer("orders") as producer:
                await send(producer, *range(5))
                await wish(brokers, "b")
                await asyncio.sleep(1)
                (segment,) = brokers.running["a"].segments.all()
                segment.storage.log.on_commit_failed(SyncFailed("the disk does not answer today"))
                await send(producer, *range(5, 10))
            assert await read_all(client, 10) == [b"%d" % number for number in range(10)]


async def test_a_segment_that_is_fenced_while_its_move_is_prepared_can_be_opened_here_again(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, names=()) as brokers:
        brokers.objects = SlowObjects(brokers.simulation.clock)
        await brokers.start("a", "b")
        async with brokers.client(timeout=120) as client:
            await topic_at(brokers, client, "a")
            async with client.producer("orders") as producer:
                await send(producer, *range(5))
                await wish(brokers, "b")
                await asyncio.sleep(1)  # The first chunk is on its way.
                (segment,) = brokers.running["a"].segments.all()
                key = paths.ownership(PATH, segment.name.descriptor)
                forced = record_of(brokers).assigned("b", accept_loss=True)
                await brokers.store.txn([], [Put(key, forced.to_json())])
                assert segment.cursors._stored._on_fenced is not None
                segment.cursors._stored._on_fenced(Fenced("another owner has the segment"))
                await until(lambda: brokers.owner(0) == "b")
                await asyncio.sleep(10)
                await brokers.move(0, "a")
                assert brokers.running["a"].segments.all()


async def test_a_broker_that_is_stopped_while_it_abandons_its_segments_ends_them_all(simulation: Simulation) -> None:
    async with running_brokers(simulation, names=("a",)) as brokers, brokers.client() as client:
        await client.admin.create_topic("orders", segments=4)
        await until(lambda: len(brokers.running["a"].segments.all()) == 4)
        served = brokers.running["a"].segments.all()
        work = asyncio.Event()

        async def slow() -> None:
            try:
                await work.wait()
            finally:
                await asyncio.sleep(1)  # Work that takes a while to be cancelled.

        segments = brokers.running["a"].segments
        segments._begin((PATH, 99), slow(), "slow work")
        await asyncio.sleep(0)
        abandoning = asyncio.create_task(segments.abandon_all(NotServing("the lease is lost")))
        await asyncio.sleep(0.1)
        abandoning.cancel()
        await asyncio.wait([abandoning])
        await segments.close()
        for each in served:
            with pytest.raises(LogClosed):
                each.storage.append(opaque_batch(b"x"))
