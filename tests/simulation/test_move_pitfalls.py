"""What has gone wrong in other systems when segments change hands, each case by itself, with whole brokers in virtual
time. Beside test_move_faults.py, which has the cases that come from outside: brokers, stores and disks that fail."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from braid.client.client import Client
from braid.client.producing.producer import Producer
from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.model.errors import InvalidArgument
from braid.model.ownership import Move, Ownership, OwnershipState
from braid.model.stored_record import decode
from braid.model.subscription import Cursor
from braid.storage.history.catalog import Frontier
from braid.storage.history.manifest import segment_folder
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, SHARED, Brokers, record_of, running_brokers, segment_of, values
from tests.kits.waiting import until

DESCRIPTOR = "0000-ffff-0"


async def topic_at(brokers: Brokers, client: Client, owner: str) -> None:
    await client.admin.create_topic("orders")
    await until(lambda: brokers.owner(0))
    if brokers.owner(0) != owner:
        await brokers.move(0, owner)


async def wish(brokers: Brokers, to: str) -> None:
    """Ask for a move and do not wait for it."""
    owners = brokers.any().cluster.owners
    known = owners.known(segment_of(brokers))
    assert known is not None
    assert await owners.swap(segment_of(brokers), known.revision, known.value.moving(Move(to=to, id="test")))


async def send(producer: Producer, *numbers: int) -> None:
    for number in numbers:
        assert (await producer.send(b"%d" % number)).offset == number


async def read_all(client: Client, count: int) -> list[bytes]:
    found: list[bytes] = []
    async with client.checkpoint_consumer("orders", start="earliest") as reader:
        while len(found) < count:
            batch = await reader.receive_batch(timeout=60)
            assert batch is not None
            found += values(list(batch.messages()))
    return found


def numbers(count: int) -> list[bytes]:
    return [b"%d" % number for number in range(count)]


def on_record(brokers: Brokers, seen_by: str, then: Callable[[Ownership], None]) -> None:
    """Call `then` with each record of the segment that a broker hears of."""
    table = brokers.running[seen_by].cluster.owners.table
    name = segment_of(brokers)
    key = (name.topic.path, name.descriptor)

    def look(changed: tuple[str, str]) -> None:
        record = table.get(key)
        if changed == key and record is not None:
            then(record)

    table.on_change.append(look)


async def start_led_by_c(brokers: Brokers) -> None:
    await brokers.start("c")
    await until(lambda: brokers.running["c"].cluster.leader.leading)
    await brokers.start("a", "b")


async def chunks(brokers: Brokers, broker: str) -> set[str]:
    name = segment_of(brokers)
    stats = await brokers.running[broker].resources.storage.objects.list(
        segment_folder(name.topic.path, name.descriptor)
    )
    return {stat.name for stat in stats if stat.name.endswith(".chunk")}


@pytest.mark.parametrize("how", ["move", "drain", "stop"])
async def test_unloading_keeps_the_history_and_only_deleting_destroys_it(how: str, simulation: Simulation) -> None:
    """Two requests that have nothing in common: a broker that is emptied does not take the way of a deletion."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(10))
        match how:
            case "move":
                await brokers.call("c", "move_topic", topic="orders", to="b")
            case "drain":
                await brokers.call("c", "drain_broker", broker="a")
            case _:
                await brokers.stop("a")
        await until(lambda: brokers.owner(0) in ("b", "c"))
        assert await chunks(brokers, "c")
        assert await read_all(client, 10) == numbers(10)
        await client.admin.delete_topic("orders")
        folder = segment_folder(PATH, DESCRIPTOR)
        assert brokers.objects is not None
        while await brokers.objects.list(folder):  # noqa: ASYNC110 — virtual time
            await asyncio.sleep(0.1)


async def test_the_leader_assigns_nothing_before_the_old_owner_has_sealed(simulation: Simulation) -> None:
    """However long it takes, and although everybody knows who is to have it next."""
    async with running_brokers(simulation, names=()) as brokers:
        await start_led_by_c(brokers)
        async with brokers.client(timeout=60) as client:
            await topic_at(brokers, client, "a")
            async with client.producer("orders") as producer:
                await send(producer, *range(10))
                seen: list[tuple[OwnershipState, str]] = []
                held = False

                def look(record: Ownership) -> None:
                    nonlocal held
                    seen.append((record.state, record.owner))
                    held = held or record.state is OwnershipState.DRAINING

                on_record(brokers, "c", look)
                brokers.store_of("a").fault = lambda request: (
                    Fault.UNAVAILABLE if held and request != "renew" else Fault.NONE
                )
                await wish(brokers, "b")
                await until(lambda: held)
                await asyncio.sleep(5)
                assert record_of(brokers).state is OwnershipState.DRAINING
                assert not brokers.running["b"].segments.all()
                brokers.store_of("a").fault = lambda _: Fault.NONE
                await until(lambda: brokers.owner(0) == "b")
                assert seen == [
                    (OwnershipState.SERVING, "a"),
                    (OwnershipState.DRAINING, "a"),
                    (OwnershipState.SEALED, "a"),
                    (OwnershipState.ASSIGNED, "b"),
                    (OwnershipState.SERVING, "b"),
                ]
                await send(producer, 10)


@SHARED
@pytest.mark.parametrize("begun", [False, True], ids=["before", "after"])
async def test_the_boundary_outlives_a_new_owner_that_crashes_around_its_first_durable_byte(
    begun: bool, shared: bool, simulation: Simulation
) -> None:
    """The sealed state goes in the transaction that makes the new owner serve. One that has only claimed the segment
    leaves it as it was."""
    async with running_brokers(simulation, shared=shared) as brokers, brokers.client("a", "c", timeout=120) as client:
        await topic_at(brokers, client, "a")
        server = brokers.store._server

        def crash(_: str) -> Fault:
            """Before the first request behind its claim, or behind its begin."""
            entry = server.get(paths.current_chunk(PATH, DESCRIPTOR))
            assert entry is not None
            frontier = decode(Frontier, entry.value)
            if frontier.holder != "b" or frontier.begun is not begun:
                return Fault.NONE
            asyncio.get_running_loop().call_soon(brokers.kill, "b")
            brokers.store_of("b").fault = lambda _: Fault.UNAVAILABLE
            return Fault.UNAVAILABLE

        async with client.producer("orders") as producer:
            await send(producer, *range(10))
            brokers.store_of("b").fault = crash
            await wish(brokers, "b")
            await until(lambda: "b" not in brokers.running)
            boundary = await brokers.store.get(paths.sealed_state(PATH, DESCRIPTOR))
            assert (boundary is None) == begun
            sending = asyncio.create_task(send(producer, *range(10, 15)))
            if begun:  # It may have confirmed something that only its disk has.
                await brokers.start("b")
            await sending
            assert brokers.owner(0) == "b" if begun else brokers.owner(0) in ("a", "c")
        assert await read_all(client, 15) == numbers(15)


async def test_cursors_beyond_what_could_be_recovered_do_not_skip_what_takes_those_offsets(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        await topic_at(brokers, client, "c")
        async with (
            client.producer("orders") as producer,
            client.stream_consumer("orders", "billing", name="worker", start="earliest") as consumer,
        ):
            await send(producer, *range(10))
            for _ in range(10):
                message = await consumer.receive(timeout=60)
                assert message is not None
                await consumer.ack(message)
            await stored_at(brokers, 10)
            brokers.kill("c")
            await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
            with pytest.raises(InvalidArgument, match="chunks reach offset 0; what c confirmed from there on"):
                await brokers.call("a", "recover_topic", topic="orders")
            await brokers.call("a", "recover_topic", topic="orders", acceptLoss=True)
            await stored_at(brokers, 0)
            for number in range(3):
                assert (await producer.send(b"new %d" % number)).offset == number
            for number in range(3):
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert (message.offset, message.value) == (number, b"new %d" % number)


async def test_a_segment_whose_whole_history_was_lost_with_a_disk_begins_behind_it(simulation: Simulation) -> None:
    """Its chunks are on no disk that anybody has: nobody waits for them, and their offsets are not given again."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client("b", "c", timeout=60) as client:
        await topic_at(brokers, client, "b")
        await client.admin.create_subscription("orders", "billing", start="earliest")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            await brokers.move(0, "a")  # All five are in a chunk, and the chunk goes with them.
            await send(producer, *range(5, 8))
            brokers.kill("a")
            await until(lambda: not brokers.running["c"].cluster.members.is_live("a"))
            found = await brokers.call("c", "recover_topic", topic="orders", to="c", acceptLoss=True)
            assert found["segments"][0]["loss"] == "all of its history lies on a and is lost; it goes on at offset 5"
            assert (await producer.send(b"new")).offset == 5
        assert await read_all(client, 1) == [b"new"]
        async with client.stream_consumer("orders", "billing", name="worker") as consumer:
            message = await consumer.receive(timeout=60)
            assert message is not None
            assert (message.offset, message.value) == (5, b"new")


async def test_a_topic_that_accepts_the_loss_goes_on_without_its_owner_and_the_owner_changes_nothing_when_it_is_back(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client("a", "b", timeout=120) as client:
        await client.admin.create_topic("orders", on_owner_loss="continue", owner_loss_after_ms=20_000)
        await until(lambda: brokers.owner(0))
        if brokers.owner(0) != "c":
            await brokers.move(0, "c")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            brokers.kill("c")
            await until(lambda: not brokers.running["a"].cluster.members.is_live("c"))
            (waits,) = brokers.running["a"].cluster.leader.waiting()
            assert waits.until is not None
            await asyncio.sleep(15)
            assert record_of(brokers).owner == "c", "it is not gone for long enough"
            await until(lambda: brokers.owner(0))
            assert (await producer.send(b"new")).offset == 0, "none of the five was in a chunk yet"
            before = record_of(brokers)
            await brokers.start("c")
            await asyncio.sleep(30)
            assert record_of(brokers) == before
            assert not brokers.running["c"].segments.all()
        assert await read_all(client, 1) == [b"new"]


async def stored_at(brokers: Brokers, offset: int) -> None:
    """Return when the cursor of `billing` is stored there."""
    key = paths.cursor(PATH, DESCRIPTOR, "billing")
    async with asyncio.timeout(60):
        while True:
            entry = await brokers.store.get(key)
            assert entry is not None
            if decode(Cursor, entry.value).offset == offset:
                return
            await asyncio.sleep(0.1)


async def test_what_was_sealed_while_nobody_led_is_found_by_the_next_leader(simulation: Simulation) -> None:
    """Nobody has to be watching at the moment in which a segment is sealed."""
    async with running_brokers(simulation, names=()) as brokers:
        await start_led_by_c(brokers)
        async with brokers.client("a", "b", timeout=120) as client:
            await topic_at(brokers, client, "a")
            async with client.producer("orders") as producer:
                await send(producer, *range(10))
                brokers.kill("c")
                await wish(brokers, "b")
                await until(lambda: record_of(brokers).state is OwnershipState.SEALED)
                assert not any(broker.cluster.leader.leading for broker in brokers.running.values())
                await until(lambda: brokers.owner(0) == "b")
                await send(producer, *range(10, 12))
            assert await read_all(client, 12) == numbers(12)


@pytest.mark.parametrize("request_", ["get", "list"])
async def test_a_read_error_of_the_new_owner_is_not_taken_for_an_empty_segment(
    request_: str, simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(10))
            await client.admin.create_subscription("orders", "billing", start="earliest")
            await client.admin.seek("orders", "billing", {0: 7})
            failed = 0

            def fault(request: str) -> Fault:
                nonlocal failed
                if request != request_ or record_of(brokers).owner != "b" or failed == 5:
                    return Fault.NONE
                failed += 1
                return Fault.UNAVAILABLE

            brokers.store_of("b").fault = fault
            await brokers.move(0, "b")
            await send(producer, *range(10, 12))
            assert failed == 5
        assert await read_all(client, 12) == numbers(12)
        found = await client.admin.subscription("orders", "billing")
        assert found["segments"]["0"]["offset"] == 7


@pytest.mark.parametrize("how", ["move", "crash"])
@pytest.mark.parametrize(("start", "first"), [("earliest", 0), ("latest", 5)])
async def test_a_subscription_that_has_acked_nothing_stays_where_it_began(
    start: str, first: int, how: str, simulation: Simulation
) -> None:
    """Its cursor is stored when it is made, not with the first ack."""
    async with running_brokers(simulation) as brokers, brokers.client(timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(5))
            await client.admin.create_subscription("orders", "billing", start=start)
            if how == "crash":
                brokers.kill("a")
                await brokers.start("a")
            await send(producer, *range(5, 10))
            if how == "move":
                await brokers.move(0, "b")
            await send(producer, 10)
        async with client.stream_consumer("orders", "billing", name="worker", start="latest") as consumer:
            for number in range(first, 11):
                message = await consumer.receive(timeout=60)
                assert message is not None
                assert message.offset == number


async def test_an_ended_segment_that_storage_holds_does_not_wait_for_its_dead_owner(simulation: Simulation) -> None:
    """Nothing of it can be missing, so no operator has to accept a loss."""
    async with running_brokers(simulation) as brokers, brokers.client("b", "c", timeout=60) as client:
        await topic_at(brokers, client, "a")
        async with client.producer("orders") as producer:
            await send(producer, *range(10))
        assert not record_of(brokers).clean
        segment = brokers.running["a"].segment_host.segments.get(PATH, 0)
        await segment.storage.end_log()
        segment.storage.export_end()
        await until(lambda: record_of(brokers).clean)
        brokers.kill("a")
        await until(lambda: brokers.owner(0) in ("b", "c"))
        assert await read_all(client, 10) == numbers(10)
        successor = brokers.running[brokers.owner(0)].segment_host.segments.get(PATH, 0)
        assert (successor.sealed, successor.end) == (True, 10)
        await until(lambda: record_of(brokers).clean)
