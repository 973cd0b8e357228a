"""A producer with a fixed identity, against a broker that follows a script: which numbers it sends, and how it ends."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import jwt
import pyarrow as pa
import pytest

from braid.broker.config import AuthConfig, Grant
from braid.client.client import Client, connect
from braid.client.producing import segment_writer as writer
from braid.client.producing.repeatable_producer import RepeatableProducer
from braid.model.batch.columns import decode_messages
from braid.model.batch.header import BatchHeader, parse_header
from braid.model.batch.identity import DERIVED, derived_id
from braid.model.errors import (
    BatchTooLarge,
    BraidError,
    InvalidArgument,
    LogBusy,
    PermissionDenied,
    RepeatDiffers,
    TimedOut,
)
from braid.model.hashing import key_hash
from braid.storage.log.producers import ProducerTable
from braid.testing.scripted_broker import Refuse, ScriptedBroker, Step
from braid.testing.sim.loop import Simulation
from braid.testing.sim.network import SimulatedNetwork
from braid.wire.operations import Route
from tests.kits.control import Machine

PATH = "public/default/orders"
TOPIC_ID = 7
ERA = 5
FIRST = ERA << 32


class World:
    def __init__(self, simulation: Simulation) -> None:
        self.network = SimulatedNetwork(Random(simulation.seed))
        self.broker = ScriptedBroker(self.network.host("broker"))
        self.clock = simulation.clock
        self.sent: list[tuple[int, BatchHeader]] = []
        """Segment and header of each publish, also of those that were refused."""
        self.script: Callable[[BatchHeader], Step | Refuse] = lambda _header: Step.CONFIRM

    async def start(self, segments: int) -> None:
        await self.broker.start("broker", 6660)
        self.broker.add_topic(PATH, segments, TOPIC_ID)
        self.broker.script = self.note

    def note(self, route: Route, header: BatchHeader) -> Step | Refuse:
        self.sent.append((route.segment, header))
        return self.script(header)

    def client(self, timeout: float = 30.0) -> Client:
        network = self.network.host("client")
        return connect("braid://broker:6660", network=network, clock=self.clock, random=Random(1), timeout=timeout)

    def stored(self, segment: int = 0) -> list[tuple[int, int, int]]:
        """Producer, first sequence and count of each batch."""
        headers = [parse_header(batch) for batch in self.broker.logs[PATH, segment].batches]
        return [(header.producer_id, header.first_sequence, header.count) for header in headers]

    def values(self, segment: int = 0) -> list[bytes]:
        batches = self.broker.logs[PATH, segment].batches
        return [message.value for batch in batches for message in decode_messages(batch)]


@contextlib.asynccontextmanager
async def producing(
    simulation: Simulation, *, segments: int = 1, timeout: float = 30.0
) -> AsyncIterator[tuple[World, RepeatableProducer]]:
    world = World(simulation)
    await world.start(segments)
    async with (
        world.client(timeout) as client,
        client.repeatable_producer("orders", app="query", part=3, era=ERA) as producer,
    ):
        yield world, producer
    await world.broker.stop()


def rows(*values: bytes, keys: list[bytes | None] | None = None) -> Any:
    columns: dict[str, Any] = {"value": pa.array(values, pa.binary())}
    if keys is not None:
        columns["key"] = pa.array(keys, pa.binary())
    return pa.table(columns)


async def give(producer: RepeatableProducer, *blocks: Any) -> None:
    for block in blocks:
        await producer.add(block)
    await producer.finish()


async def test_records_are_numbered_from_the_beginning_of_the_era_in_every_segment(simulation: Simulation) -> None:
    async with producing(simulation, segments=2) as (world, producer):
        keys: list[bytes | None] = [b"key-%d" % number for number in range(100)]
        for number in range(3):
            await producer.add(rows(*[b"%d-%d" % (number, row) for row in range(100)], keys=keys))
        written = await producer.finish()
        assert (written.records, written.duplicates, written.past) == (300, 0, False)
        own = derived_id("query", TOPIC_ID, 3)
        for segment in (0, 1):
            mine = [row for row in range(100) if key_hash(b"key-%d" % row) >> 15 == segment]
            count = len(mine)
            assert world.stored(segment) == [(own, FIRST + number * count, count) for number in range(3)]
            assert world.values(segment) == [b"%d-%d" % (number, row) for number in range(3) for row in mine]


async def test_a_block_with_times_in_another_unit_is_refused(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        block = rows(b"paid").append_column("timestamp", pa.array([1_794_744_000_000]))
        with pytest.raises(InvalidArgument, match="it looks like milliseconds"):
            await producer.add(block)
        assert world.sent == []


async def test_blocks_without_keys_go_to_the_segments_in_turn_from_the_one_of_the_identity(
    simulation: Simulation,
) -> None:
    async with producing(simulation, segments=3) as (world, producer):
        for number in range(8):
            await producer.add(rows(b"%d" % number))
        await producer.finish()
        own = derived_id("query", TOPIC_ID, 3)
        for segment in range(3):
            turns = [number for number in range(8) if (own + number) % 3 == segment]
            assert world.values(segment) == [b"%d" % number for number in turns]
            assert [sequence for _, sequence, _ in world.stored(segment)] == [FIRST + n for n in range(len(turns))]


async def test_rows_without_a_key_beside_rows_with_one_go_where_the_blocks_turn_is(simulation: Simulation) -> None:
    async with producing(simulation, segments=2) as (world, producer):
        await producer.add(rows(b"a", b"b", b"c", keys=[None, b"key-0", None]))
        await producer.finish()
        turn, keyed = derived_id("query", TOPIC_ID, 3) % 2, key_hash(b"key-0") >> 15
        expected: dict[int, list[bytes]] = {0: [], 1: []}
        for value, segment in ((b"a", turn), (b"b", keyed), (b"c", turn)):
            expected[segment].append(value)
        assert {segment: world.values(segment) for segment in (0, 1)} == expected


async def test_what_can_be_retried_goes_again_under_its_number(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        bad: Iterator[Step | Refuse] = iter(
            [Refuse(LogBusy("busy")), Step.CUT_BEFORE, Step.CONFIRM, Step.CUT_BEFORE, Refuse(LogBusy("busy"))]
        )
        world.script = lambda _header: next(bad, Step.CONFIRM)
        for number in range(20):
            await producer.add(rows(b"%d" % number))
        assert (await producer.finish()).records == 20
        assert world.values() == [b"%d" % number for number in range(20)]
        assert {(header.producer_id, header.first_sequence >> 32) for _, header in world.sent} == {
            (derived_id("query", TOPIC_ID, 3), ERA)
        }


@pytest.mark.parametrize("refused", [0, 4])
async def test_a_refusal_for_good_fails_everything_behind_it(refused: int, simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):

        def script(header: BatchHeader) -> Step | Refuse:
            number = header.first_sequence - FIRST
            return Refuse(PermissionDenied("not today")) if number == refused else Step.CONFIRM

        world.script = script
        with pytest.raises(PermissionDenied):
            await give(producer, *[rows(b"%d" % number) for number in range(8)])
        world.script = lambda _header: Step.CONFIRM
        with pytest.raises(PermissionDenied):
            await producer.add(rows(b"later"))
        assert world.values() == [b"%d" % number for number in range(refused)]


async def test_a_writer_that_was_forgotten_does_not_go_on_under_another_id(simulation: Simulation) -> None:
    async with producing(simulation) as (world, producer):
        await producer.add(rows(b"0"))
        world.broker.logs[PATH, 0].producers = ProducerTable()
        for number in range(1, 6):
            with pytest.raises(RepeatDiffers, match="not known"):
                await give(producer, rows(b"%d" % number))
        assert world.values() == [b"0"]
        assert len({header.producer_id for _, header in world.sent}) == 1


@pytest.mark.parametrize("step", [Step.SILENCE, Step.IGNORE])
async def test_without_an_answer_it_ends_after_its_timeout(step: Step, simulation: Simulation) -> None:
    async with producing(simulation, timeout=2.0) as (world, producer):
        await producer.add(rows(b"0"))
        world.script = lambda _header: step
        for number in (1, 2, 3):
            await producer.add(rows(b"%d" % number))
        with pytest.raises(TimedOut, match="within 2 s"):
            await producer.finish()
        world.script = lambda _header: Step.CONFIRM
        for number in range(4, 10):
            with pytest.raises(TimedOut):
                await give(producer, rows(b"%d" % number))


@pytest.mark.parametrize(
    ("block", "error"),
    [
        (pa.table({"value": pa.array([b"x" * (33 << 20)])}), BatchTooLarge),
        (pa.table({"value": pa.array([b"1", None])}), InvalidArgument),
        (pa.table({"value": pa.array([1, 2])}), InvalidArgument),
    ],
    ids=["too large", "a null", "numbers"],
)
async def test_rows_that_cannot_be_sent_end_it_before_what_comes_behind_them(
    block: Any, error: type[BraidError], simulation: Simulation
) -> None:
    async with producing(simulation) as (world, producer):
        await producer.add(rows(b"0"))
        with pytest.raises(error):
            await give(producer, block)
        with pytest.raises(error):
            await producer.add(rows(b"2"))
        assert world.values() == [b"0"]


async def test_an_era_has_an_end(monkeypatch: pytest.MonkeyPatch, simulation: Simulation) -> None:
    monkeypatch.setattr(writer, "ERA_RECORDS", 5)
    async with producing(simulation) as (world, producer):
        await give(producer, rows(b"0", b"1", b"2"), rows(b"3", b"4"))
        with pytest.raises(InvalidArgument, match="5 records were written to segment 0 in era 5, and 1 more do not"):
            await give(producer, rows(b"5"))
        assert world.values() == [b"0", b"1", b"2", b"3", b"4"]


async def test_ordinary_producers_draw_ids_that_are_not_derived(simulation: Simulation) -> None:
    world = World(simulation)
    await world.start(1)
    async with world.client() as client:
        drawn = [client.producer("orders").new_id() for _ in range(200)]
    await world.broker.stop()
    assert all(0 < each < DERIVED for each in drawn)
    assert len(set(drawn)) == 200


async def test_a_writer_that_may_not_read_hears_what_its_repeat_needs(tmp_path: Path, simulation: Simulation) -> None:
    secret = tmp_path / "secret"
    secret.write_text("correct horse battery staple, and then some")
    grants = (
        Grant(role="writer", on=PATH, allow=("produce",)),
        Grant(role="owner", on="public/default", allow=("admin",)),
    )
    machine = Machine(simulation, AuthConfig(secret_file=str(secret), grants=grants))

    def client(role: str) -> Client:
        token = jwt.encode({"sub": role, "roles": [role]}, secret.read_text(), algorithm="HS256")
        return connect(
            "braid://machine:6660", token=token, network=machine.host, clock=simulation.clock, random=Random(1)
        )

    broker = await machine.start()
    async with client("owner") as owner, client("writer") as writer:
        await owner.admin.create_topic("orders")
        async with writer.repeatable_producer("orders", app="query", part=3, era=ERA) as producer:
            await give(producer, rows(b"a"))
        async with writer.repeatable_producer("orders", app="query", part=3, era=ERA) as producer:
            with pytest.raises(PermissionDenied, match=r"orders has these rows already.* must be allowed to consume"):
                await give(producer, rows(b"a"))
    await broker.close()
