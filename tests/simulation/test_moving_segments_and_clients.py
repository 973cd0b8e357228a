"""Clients of whole brokers, in virtual time, while segments move and brokers stop and die: no record twice, none
skipped, none out of order, no error (I4, I5, I10)."""

from __future__ import annotations

import asyncio

import pytest

from braid.broker.broker import Broker
from braid.broker.groups.controllers import Controller
from braid.client.client import Client
from braid.client.consuming.stream import StreamConsumer
from braid.client.producing.producer import Producer
from braid.metadata.store import Compare, Put
from braid.model.errors import Moved, NotServing, PermissionDenied
from braid.model.ids import Revision
from braid.model.message import Message
from braid.model.names import TopicName
from braid.ports.network import Address
from braid.testing.sim.loop import Simulation
from braid.wire.operations import (
    RESET,
    Assignment,
    Closed,
    Delivery,
    Join,
    Joined,
    Kind,
    Need,
    Open,
    Opened,
    decode,
    encode,
)
from tests.kits.brokers import PATH, PORT, Brokers, running_brokers, with_brokers
from tests.kits.waiting import until

LEASE_S = 10.0


async def a_topic(brokers: Brokers, segments: int = 3) -> None:
    await brokers.call("a", "create_topic", topic="orders", segments=segments)
    await until(lambda: all(brokers.owner(segment) for segment in range(segments)))


def others(brokers: Brokers, but: str) -> list[str]:
    return [name for name in brokers.running if name != but]


class Traffic:
    """A producer that sends numbered records of some keys, and consumers that take and ack them, all the time."""

    def __init__(self, client: Client, *consumers: str) -> None:
        self.client = client
        self.names = consumers
        self.sent: dict[bytes, int] = {}
        self.received: dict[bytes, list[int]] = {}
        self.consumers: list[StreamConsumer] = []
        self.pause_s = 0.01
        self._stopping = False

    async def __aenter__(self) -> Traffic:
        self.producer: Producer = self.client.producer("orders")
        await self.producer.open()
        for name in self.names:
            consumer = self.client.stream_consumer("orders", "billing", name=name, start="earliest")
            await consumer.start()
            self.consumers.append(consumer)
        self._sending = asyncio.create_task(self._send())
        self._receiving = [asyncio.create_task(self._receive(consumer)) for consumer in self.consumers]
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        if kind is None:
            await self.stop_sending()
            await until(self.complete)
        for task in (self._sending, *self._receiving):
            task.cancel()
        await asyncio.gather(self._sending, *self._receiving, return_exceptions=True)
        for consumer in self.consumers:
            await consumer.close()
        await self.producer.close()

    async def stop_sending(self) -> None:
        self._stopping = True
        await self._sending

    async def _send(self) -> None:
        while not self._stopping:
            waiting = []
            for number in range(8):
                key = b"key-%d" % number
                self.sent[key] = self.sent.get(key, -1) + 1
                waiting.append(self.producer.submit(b"%d" % self.sent[key], key=key))
            for receipt in waiting:
                await receipt
            await asyncio.sleep(self.pause_s)

    async def _receive(self, consumer: StreamConsumer) -> None:
        async for message in consumer:
            self.take(message)
            await consumer.ack(message)

    def take(self, message: Message) -> None:
        assert message.key is not None
        numbers = self.received.setdefault(message.key, [])
        numbers.append(int(message.value))
        assert numbers == list(range(len(numbers))), f"{message.key!r}: {numbers[-3:]}"

    def complete(self) -> bool:
        for task in (self._sending, *self._receiving):
            if task.done() and not task.cancelled():
                task.result()
        return all(len(self.received.get(key, ())) == last + 1 for key, last in self.sent.items())

    def count(self) -> int:
        return sum(map(len, self.received.values()))


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("seed", range(4))
async def test_segments_that_move_again_and_again_cost_clients_nothing(
    seed: int, shared: bool, simulation: Simulation
) -> None:
    async with running_brokers(simulation, shared=shared) as brokers:
        await a_topic(brokers)
        async with brokers.client("a") as client, Traffic(client, "worker-1", "worker-2") as traffic:
            await until(lambda: traffic.count() > 100)
            assignment = [consumer.segments for consumer in traffic.consumers]
            for _ in range(6):
                segment = brokers.simulation.random.randrange(3)
                to = brokers.simulation.random.choice(others(brokers, brokers.owner(segment)))
                started = asyncio.get_running_loop().time()
                await brokers.move(segment, to)
                before = traffic.count()
                await until(lambda before=before: traffic.count() > before + 100)  # type: ignore[misc]
                assert asyncio.get_running_loop().time() - started < 5
            assert [consumer.segments for consumer in traffic.consumers] == assignment, "a move is not the group's"


@pytest.mark.parametrize("seed", range(4))
async def test_a_broker_that_stops_hands_its_segments_and_groups_over_and_clients_go_on(
    seed: int, simulation: Simulation
) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        async with brokers.client() as client, Traffic(client, "worker-1", "worker-2") as traffic:
            await until(lambda: traffic.count() > 100)
            assignment = [consumer.segments for consumer in traffic.consumers]
            stopping = brokers.controller()
            await brokers.stop(stopping)
            await until(lambda: all(brokers.owner(segment) for segment in range(3)) and brokers.controller())
            assert brokers.controller() != stopping
            before = traffic.count()
            await until(lambda: traffic.count() > before + 100)
            assert [consumer.segments for consumer in traffic.consumers] == assignment


async def test_when_the_controller_dies_consumers_read_on_and_get_the_same_segments_from_the_next(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        async with brokers.client("a") as client, Traffic(client, "worker-1", "worker-2") as traffic:
            await until(lambda: traffic.count() > 100)
            assert brokers.controller() == "a"
            for segment in range(3):
                if brokers.owner(segment) == "a":
                    await brokers.move(segment, "b")
            assignment = [consumer.segments for consumer in traffic.consumers]
            died_at = asyncio.get_running_loop().time()
            brokers.kill("a")
            before = traffic.count()
            await until(lambda: traffic.count() > before + 500)
            assert asyncio.get_running_loop().time() - died_at < LEASE_S / 2, "the channels were not touched"
            await until(lambda: brokers.controller() in ("b", "c"))
            broker = brokers.running[brokers.controller()]
            await until(lambda: sum(each.connected for each in broker.groups.consumers(PATH, "billing").values()) == 2)
            assert [consumer.segments for consumer in traffic.consumers] == assignment
            assert asyncio.get_running_loop().time() - died_at < 2 * LEASE_S


async def test_an_owner_that_dies_and_comes_back_is_waited_for_while_the_others_go_on(simulation: Simulation) -> None:
    async with running_brokers(simulation, shared=False) as brokers:
        await a_topic(brokers)
        async with brokers.client(timeout=120) as client, Traffic(client, "worker-1") as traffic:
            await until(lambda: traffic.count() > 100)
            victim = others(brokers, brokers.controller())[0]
            brokers.kill(victim)
            await asyncio.sleep(3)
            await brokers.start(victim)
            await until(lambda: all(brokers.owner(segment) for segment in range(3)))


def test_acks_that_meet_a_moving_segment_are_not_lost() -> None:
    async def test(brokers: Brokers) -> None:
        await a_topic(brokers, segments=1)
        async with brokers.client() as client:
            async with client.producer("orders") as producer:
                await producer.send_many([b"%d" % number for number in range(100)])
            consumer = client.stream_consumer("orders", "billing", name="worker-1", start="earliest")
            await consumer.start()
            messages = [await consumer.receive() for _ in range(60)]
            moving = asyncio.create_task(brokers.move(0, others(brokers, brokers.owner(0))[0]))
            for message in messages[:50]:
                assert message is not None
                await consumer.ack(message)
                await asyncio.sleep(0.0007)
            await consumer.close()
            await moving
            async with client.stream_consumer("orders", "billing", name="worker-2") as after:
                first = await after.receive(timeout=10)
                assert first is not None
                assert first.offset == 50

    for seed in range(8):
        with_brokers(test, ("a", "b"), seed=seed)


def test_a_segment_that_is_asked_back_while_it_moves_is_given_back_with_its_last_ack() -> None:
    async def test(brokers: Brokers) -> None:
        await a_topic(brokers, segments=2)
        async with brokers.client() as client:
            async with client.producer("orders") as producer:
                for number in range(200):
                    await producer.send(b"%d" % number, key=b"%d" % number)
            async with client.stream_consumer("orders", "billing", name="worker-1", start="earliest") as first:
                seen = [message for _ in range(200) if (message := await first.receive()) is not None]
                moving = asyncio.create_task(brokers.move(1, others(brokers, brokers.owner(1))[0]))
                for message in seen:
                    await first.ack(message)
                async with client.stream_consumer("orders", "billing", name="worker-2") as second:
                    await until(lambda: second.segments == (1,))
                    await moving
                    assert await second.receive(timeout=5) is None, "all of it was acked"

    for seed in range(4):
        with_brokers(test, ("a", "b"), seed=seed)


async def test_a_checkpoint_consumer_rides_through_moves_too(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        async with (
            brokers.client() as client,
            Traffic(client) as traffic,
            client.checkpoint_consumer("orders", start="earliest") as consumer,
        ):
            for number in range(2000):
                if number % 400 == 399:
                    segment = number % 3
                    await brokers.move(segment, others(brokers, brokers.owner(segment))[0])
                message = await consumer.receive(timeout=30)
                assert message is not None
                traffic.take(message)
            await traffic.stop_sending()
            while not traffic.complete():
                message = await consumer.receive(timeout=30)
                assert message is not None
                traffic.take(message)


# ── one step at a time ───────────────────────────────────────────────────────────────────────────────────────────────


class Told:
    """What a broker pushes on a channel."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    def on_delivery(self, delivery: Delivery, payload: memoryview) -> None: ...

    def on_need(self, need: Need) -> None: ...

    def on_closed(self, error: object) -> None:
        self.closed.append(error.code if isinstance(error, Closed) else "link")


class Member:
    def __init__(self) -> None:
        self.assignments: list[Assignment] = []
        self.lost: list[BaseException] = []

    def on_assignment(self, assignment: Assignment) -> None:
        self.assignments.append(assignment)

    def on_session_lost(self, error: BaseException) -> None:
        self.lost.append(error)


async def test_whoever_joins_at_another_broker_is_told_where_the_controller_is(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        async with brokers.client() as client:
            links = {name: await client.pool.link(Address(name, PORT)) for name in "abc"}
            join = encode(Join(PATH, "billing", "worker-1"))
            await links["b"].ask(Kind.JOIN, join, Joined, 5)
            await until(lambda: brokers.controller() == "b")
            for name in "ac":
                broker = brokers.running[name]
                await until(lambda broker=broker: broker.group_host.controllers.address(PATH))  # type: ignore[misc]
                with pytest.raises(Moved) as refused:
                    await links[name].ask(Kind.JOIN, join, Joined, 5)
                assert refused.value.owner == f"b:{PORT}"
            await client.routing.topic(PATH)
            await until(lambda: client.routing._maps[PATH].route.controller == f"b:{PORT}")


async def test_what_an_old_controller_has_given_opens_nothing_once_a_newer_one_has(simulation: Simulation) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        await a_topic(brokers, segments=1)
        async with brokers.client() as client:
            link = await client.pool.link(Address("a", PORT))
            session = Member()
            joined = decode(Joined, (await link.request(Kind.JOIN, encode(Join(PATH, "billing", "one")))).body)
            link.open_session(joined.session, session)
            await until(lambda: session.assignments)
            old = session.assignments[-1]
            owner = await client.routing.owner_link(PATH, 0)
            topic = await client.routing.topic(PATH)

            async def open_by(term: int, grant: int) -> Told:
                told = Told()
                number = owner.open_channel(told)
                body = encode(Open(number, PATH, topic.topic_id, 0, 0, 0, 0, "billing", term, grant))
                await owner.ask(Kind.OPEN, body, Opened, 5)
                return told

            told = await open_by(old.term, old.grants[0])
            signer = brokers.running["a"].group_host.grant_signer
            first_of_next = signer.signed(topic.topic_id, "billing", 0, old.term + 1, 1)
            newer = await open_by(old.term + 1, first_of_next)
            await until(lambda: told.closed == [RESET])
            for term, grant in ((old.term, old.grants[0]), (old.term, old.grants[0] + 100), (old.term + 1, 0)):
                with pytest.raises(NotServing, match="out of date"):
                    await open_by(term, grant)
            assert newer.closed == []
            again = await open_by(old.term + 1, first_of_next)
            await until(lambda: newer.closed == [RESET])
            assert again.closed == []


def make_earlier(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a broker give out read grants, and believe them, as builds did that do not sign."""
    host = broker.group_host

    async def claim(key: str, topic_unchanged: Compare) -> None:
        value = Controller(broker=broker.id).to_json()
        lease = host.controllers._lease()
        await broker.resources.store.txn([Compare(key, Revision(0)), topic_unchanged], [Put(key, value, lease)])

    def unsigned(topic_id: int, subscription: str, segment: int, term: int, number: int) -> int:
        return number

    monkeypatch.setattr(host.controllers, "_try_claim", claim)
    monkeypatch.setattr(host.grant_signer, "signed", unsigned)
    monkeypatch.setattr(host.grant_signer, "check", lambda *_: None)


async def test_consumers_read_on_while_brokers_are_upgraded_one_after_the_other(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is of an earlier build at first; owners are of both."""
    async with running_brokers(simulation, ("a", "b")) as brokers, brokers.client(timeout=60) as client:
        await a_topic(brokers, segments=2)
        for segment, owner in enumerate("ab"):
            if brokers.owner(segment) != owner:
                await brokers.move(segment, owner)
        make_earlier(brokers.running["a"], monkeypatch)
        await brokers.running["a"].group_host.groups.control(TopicName.parse(PATH))
        async with (
            client.producer(PATH) as producer,
            client.stream_consumer(PATH, "billing", start="earliest") as consumer,
        ):

            async def all_segments_are_read() -> None:
                sent = {(await producer.send(b"x", key=b"key-%d" % number)).segment for number in range(16)}
                assert sent == {0, 1}
                for _ in range(16):
                    assert await consumer.receive(timeout=30) is not None

            await all_segments_are_read()
            assert brokers.controller() == "a"
            assert all(0 < each.grant < 1 << 32 for each in consumer._read_grants.values())
            await brokers.move(0, "b")
            await brokers.move(0, "a")
            await all_segments_are_read()
            await brokers.stop("a")
            await all_segments_are_read()
            assert brokers.controller() == "b"
            await brokers.start("a")
            await brokers.move(0, "a")
            await all_segments_are_read()
            assert all(each.grant > 1 << 32 for each in consumer._read_grants.values())


HIGHEST = (1 << 63) - 1


async def test_a_read_grant_that_no_controller_gave_out_opens_nothing_and_keeps_no_consumer_out(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation, ("a", "b")) as brokers:
        await a_topic(brokers, segments=1)
        async with brokers.client() as client, client.stream_consumer(PATH, "billing", start="earliest") as consumer:
            async with client.producer(PATH) as producer:
                await producer.send(b"one")
            assert await consumer.receive(timeout=30) is not None
            (held,) = consumer._read_grants.values()
            topic = await client.routing.topic(PATH)
            other = brokers.running["a"].group_host.grant_signer.signed(topic.topic_id, "audit", 0, held.term, 1 << 20)
            owner = await client.routing.owner_link(PATH, 0)
            for term, grant in (
                (HIGHEST, HIGHEST),
                (HIGHEST, held.grant),
                (held.term + 1, 1),
                (held.term, held.grant + 1),
                (held.term, HIGHEST),
                (held.term, other),  # of another subscription
            ):
                number = owner.open_channel(Told())
                body = encode(Open(number, PATH, topic.topic_id, 0, 0, 0, 0, "billing", term, grant))
                with pytest.raises(PermissionDenied, match="no controller gave"):
                    await owner.ask(Kind.OPEN, body, Opened, 5)
            await brokers.move(0, others(brokers, brokers.owner(0))[0])  # The next owner admits the consumer, too.
            async with client.producer(PATH) as producer:
                await producer.send(b"two")
            message = await consumer.receive(timeout=30)
            assert message is not None
            assert message.value == b"two"


async def test_brokers_know_which_generation_their_clients_have_adopted(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        async with brokers.client("a") as client:
            await client.routing.topic(PATH)
            (session,) = [each for each in brokers.running["a"].front_door.server._sessions if each.questions.watched]
            await until(lambda: session.acked_generation)
            first = session.acked_generation
            await brokers.move(1, others(brokers, brokers.owner(1))[0])
            await until(lambda: client.routing._maps[PATH].by_id[1].owner == f"{brokers.owner(1)}:{PORT}")
            await until(lambda: session.acked_generation == client.routing._maps[PATH].generation)
            assert first is not None
            assert session.acked_generation is not None
            assert session.acked_generation > first


async def test_a_broker_that_is_drained_gives_its_groups_away_and_takes_no_new_ones(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        await a_topic(brokers)
        async with brokers.client() as client, Traffic(client, "worker-1", "worker-2") as traffic:
            await until(lambda: brokers.controller())
            drained = brokers.controller()
            before = traffic.count()
            await brokers.call(drained, "drain_broker", broker=drained)
            await until(lambda: brokers.controller() not in ("", drained))
            await until(lambda: traffic.count() > before + 500)
            await until(lambda: drained not in {brokers.owner(segment) for segment in range(3)})
            await brokers.call("a", "create_topic", topic="other")
            async with (
                brokers.client(drained) as elsewhere,
                elsewhere.stream_consumer("other", "billing", name="worker-1") as consumer,
            ):
                await until(lambda: consumer.segments)
                assert brokers.controller("public/default/other") not in ("", drained)
