"""What clients do in a simulated cluster: machines with a real client each, on which programs publish and consume.

A program does random things that the interface allows. It tells the topic's history what it sent, how that was
answered, and what it received. It tries again after errors that faults explain; any other error ends the simulation.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from itertools import count
from random import Random
from typing import TYPE_CHECKING, Any, Final

import msgspec
import pyarrow as pa

from braid.client.client import Client, connect
from braid.client.consuming.checkpoint import END, CheckpointConsumer, ConsumerCheckpoint
from braid.client.consuming.stream import StreamConsumer
from braid.client.producing.open_batch import ProducerBatch
from braid.client.producing.producer import Producer
from braid.model.errors import (
    AckStale,
    BraidError,
    ClientClosed,
    ConsumerReplaced,
    OffsetOutOfRange,
    PositionDiverged,
    RepeatDiffers,
    RepeatTooLate,
    SegmentNotFound,
    SubscriptionNotFound,
    TimedOut,
)
from braid.model.message import Message, MessageId
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.topic_history import ConsumerHistory, Seek, TopicHistory
from braid.testing.scenarios.shared_reading import share_segments
from braid.testing.sim.loop import Process

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

TOPIC: Final = "simulated"
RACED: Final = "raced"
"""A subscription without consumers: only an operator's calls move it."""
MISCOUNTED: Final = 1_000_000
"""So many records nobody publishes while an ack travels."""
NOWHERE: Final = -1
"""The place of a record of which only that it is stored is known."""
CLOSE_TIMEOUT_S: Final = 60.0
"""Closing a client ends after its timeouts, whatever happens around it."""
ROWS: Final = (1, 5, 20)
"""Of a block of a sink."""


class Saved(msgspec.Struct):
    """A checkpoint that a program has stored beside its results."""

    checkpoint: bytes
    results: dict[int, dict[int, bytes]]
    """By segment and offset, every value that the program has read."""
    ended: dict[int, float]
    """The segments of these that it has read to their ends, and when the process began that did so."""


class Sink:
    """What a streaming query writes, and writes again.

    A sink has one micro-batch at a time. Any client may write it, several at the same time, and again after it is
    stored, as a query does that was restarted. However often that happens, each row is stored once (I10, I11).
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.era = -1
        """The number of the micro-batch."""
        self.stored = True
        """Whether an attempt has stored all of it: only then may the next one begin."""
        self.blocks: list[Any] = []
        """Arrow tables, the same in each attempt."""

    def begin(self, random: Random, producer: int, history: TopicHistory) -> None:
        """Make the next micro-batch, of values that nothing else has."""
        self.era += 1
        self.stored = False
        self.blocks = []
        number = 0
        for _ in range(random.randint(1, 3)):
            keys, values = [], []
            for _ in range(random.choice(ROWS)):
                number += 1
                keys.append(b"key-%d" % random.randrange(8) if random.random() < 0.7 else None)
                values.append(b"%d/%d/" % (producer, number))
                history.give(producer, number, keys[-1], values[-1])
            self.blocks.append(pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())}))

    def values(self) -> Iterator[bytes]:
        for block in self.blocks:
            yield from block.column("value").to_pylist()


class ClientMachine:
    def __init__(self, cluster: SimulatedCluster, name: str) -> None:
        self.name = name
        self.cluster = cluster
        self.random: Random = cluster.simulation.random
        self.history = cluster.history
        self.leaving = asyncio.Event()
        self.silent = False
        """Whether its client never acks a push."""
        self.consumers: dict[str, StreamConsumer] = {}
        self.producers: dict[Producer, None] = {}
        self.process: Process = cluster.simulation.process(name)
        cluster.network.host(name)
        self.life = self.process.start(self._live(), name=name)

    def crash(self) -> None:
        """The machine is gone in the middle of whatever it did."""
        self.cluster.network.crash(self.name)
        self.process.kill()

    def freeze(self) -> None:
        """The machine sleeps: changes pass it by."""
        self.process.freeze()
        for broker in self.cluster.machines:
            self.cluster.network.cut(self.name, broker)

    def thaw(self) -> None:
        self.process.thaw()
        for broker in self.cluster.machines:
            self.cluster.network.heal(self.name, broker)

    def _may_happen(self, error: BraidError) -> None:
        if not self.cluster.explains(error):
            raise error

    def _now(self) -> float:
        return self.cluster.simulation.clock.monotonic()

    async def _live(self) -> None:
        try:
            while not self.leaving.is_set():
                await self._use_a_client()
        except Exception as error:
            self.cluster.failed(error)

    def _connect(self, broker: str = "") -> Client:
        """Make a client that knows all brokers, or only this one."""
        return connect(
            self.cluster.url_of([broker] if broker else self.cluster.machines),
            timeout=self.cluster.patience_s or self.random.choice([2.0, 5.0, 15.0]),
            name=self.name,
            network=self.cluster.network.host(self.name),
            clock=self.cluster.simulation.clock,
            random=self.random,
        )

    async def _use_a_client(self) -> None:
        random = self.random
        client = self._connect()
        try:
            await client.open()
        except BraidError as error:
            self._may_happen(error)
            await client.close()
            return
        programs: list[Callable[[Client], Awaitable[None]]] = [self._produce, self._consume]
        others = [self._produce, self._consume, self._follow_checkpoints, self._write_micro_batches]
        if self.cluster.transitions:
            others += [self._restart_at_checkpoint] * 2
        programs += random.choices(others, k=random.randint(0, 2))
        if self.cluster.shares:
            programs.append(self._share_segments)
        if self.cluster.queues.there:
            programs += [self._take_from_queue] * random.randint(1, 2)
        self.silent = self.cluster.transitions and random.random() < 0.1
        if self.silent:
            programs.append(self._never_ack_a_push)
        tasks = [asyncio.ensure_future(self._repeat(program, client)) for program in programs]
        await self.leaving.wait()
        if random.random() < 0.5:
            await asyncio.gather(*tasks)
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await client.close()
        except (ConsumerReplaced, SubscriptionNotFound, AckStale):
            pass  # Its last acks count no more.
        except BraidError as error:
            self._may_happen(error)
        await asyncio.gather(*tasks)

    async def _repeat(self, program: Callable[[Client], Awaitable[None]], client: Client) -> None:
        while not self.leaving.is_set() and not client.closed:
            try:
                await program(client)
            except ClientClosed:
                if not client.closed:
                    raise
            except BraidError as error:
                if not self.cluster.explains(error):
                    self.cluster.failed(PromiseBroken("clients", f"{self.name} met an error for no reason: {error!r}"))
                await asyncio.sleep(self.random.uniform(0.01, 0.5))
            except Exception as error:
                self.cluster.failed(error)
                return

    # Producing.

    async def _produce(self, client: Client) -> None:
        random = self.random
        if self._done_publishing():
            await self.pause(1.0)
            return
        tight = random.random() < 0.2
        sizes = [64, 1_000, 20_000, 256 << 10]
        if self.cluster.transitions:
            sizes += [64, 64]  # Many batches wait when a segment ends.
        producer = client.producer(
            TOPIC,
            linger=random.choice([0.0, 0.0, 0.005, 0.05]),
            max_batch_bytes=random.choice(sizes),
            compression=random.choice([None, None, "lz4", "zstd"]),
            max_in_flight_bytes=random.choice([1, 5_000]) if tight else None,
            timeout=self.cluster.patience_s or random.choice([0.5, 3.0, 10.0]),
        )
        self._watch(producer)
        number = next(self.cluster.producers)
        order = count(1)
        async with producer:
            self.producers[producer] = None
            try:
                for _ in range(random.randint(1, 20)):
                    if self._done_publishing():
                        break
                    # Those that wait for room side by side have no order among each other.
                    ways = [self._send_one, self._send_many, self._submit] + ([] if tight else [self._send_together])
                    if self.cluster.transitions:
                        ways += [self._submit_steadily, self._submit_steadily]
                    await random.choice(ways)(producer, number, order)
                    # The longer it goes on, the slower: what counts is how often things break, not how much is stored.
                    await asyncio.sleep(random.choice([0.0, 0.001, 0.05, 0.3]) * (1 + len(self.history.given) / 100))
            finally:
                del self.producers[producer]

    def _watch(self, producer: Producer) -> None:
        settle = producer.on_settled

        def settled(batch: ProducerBatch) -> None:
            self.cluster.inspector.check_settled(batch)
            settle(batch)

        producer.on_settled = settled  # type: ignore[method-assign]

    def _done_publishing(self) -> bool:
        return self.leaving.is_set() or not self.cluster.publishing

    def _record(self, producer: int, order: count[int], keyed: bool | None = None) -> tuple[bytes | None, bytes]:
        """A key, or none, and a value that nobody else has."""
        random = self.random
        number = next(order)
        if keyed is None:
            keyed = random.random() < 0.5
        key = self.cluster.draw_key() if keyed else None
        size = random.choice([0, 0, 0, 20, 20, 200, 200, random.choice([20, 200, 3_000, 3_000, 20_000, 80_000])])
        value = b"%d/%d/" % (producer, number) + random.randbytes(1) * size
        self.history.give(producer, number, key, value)
        return key, value

    async def _send_one(self, producer: Producer, number: int, order: count[int]) -> None:
        key, value = self._record(number, order)
        await self._confirmed(value, producer.send(value, key=key))

    async def _send_together(self, producer: Producer, number: int, order: count[int]) -> None:
        records = [self._record(number, order) for _ in range(self.random.choice([2, 10, 30]))]
        await asyncio.gather(*(self._confirmed(value, producer.send(value, key=key)) for key, value in records))

    async def _submit(self, producer: Producer, number: int, order: count[int]) -> None:
        receipts = []
        for _ in range(self.random.choice([1, 5, 20])):
            key, value = self._record(number, order)
            try:
                receipts.append((value, producer.submit(value, key=key)))
            except BraidError as error:
                self.history.fail(value)
                self._may_happen(error)
                break
            if self.random.random() < 0.1:
                await asyncio.sleep(0)
        if self.random.random() < 0.5:
            try:
                await producer.flush()
            except BraidError as error:
                self._may_happen(error)
        await asyncio.gather(*(self._confirmed(value, receipt) for value, receipt in receipts))

    async def _submit_steadily(self, producer: Producer, number: int, order: count[int]) -> None:
        """Go on while earlier records wait for their answers: a change of the layout finds a queue."""
        receipts = []
        pause_s = self.random.choice([0.01, 0.05, 0.2])
        for _ in range(30):
            key, value = self._record(number, order, keyed=True)
            try:
                receipts.append((value, producer.submit(value, key=key)))
            except BraidError as error:
                self.history.fail(value)
                self._may_happen(error)
                break
            await asyncio.sleep(pause_s)
        await asyncio.gather(*(self._confirmed(value, receipt) for value, receipt in receipts))

    async def _send_many(self, producer: Producer, number: int, order: count[int]) -> None:
        keyed = self.random.random() < 0.5
        records = [self._record(number, order, keyed) for _ in range(self.random.choice([1, 5, 30]))]
        try:
            ids = await producer.send_many(records if keyed else [value for _, value in records])
        except BraidError as error:
            for _, value in records:
                self.history.fail(value)
            self._may_happen(error)
        else:
            for (_, value), (segment, offset) in zip(records, ids, strict=True):
                self.history.confirm(value, segment, offset)

    async def _confirmed(self, value: bytes, sending: Awaitable[MessageId]) -> None:
        try:
            segment, offset = await sending
        except BraidError as error:
            self.history.fail(value)
            self._may_happen(error)
        else:
            self.history.confirm(value, segment, offset)

    async def _write_micro_batches(self, client: Client) -> None:
        """Write the micro-batch of a sink, perhaps a second time, or go on to the next one."""
        random, cluster = self.random, self.cluster
        await self.pause(random.choice([0.05, 0.5, 2.0]))
        if self._done_publishing():
            return
        sink = random.choice(cluster.sinks)
        if not sink.stored or (sink.era >= 0 and random.random() < 0.5):
            cluster.counts.repeated_writes += sink.stored
        else:
            sink.begin(random, next(cluster.producers), self.history)
        era, blocks, values = sink.era, sink.blocks, [*sink.values()]
        timeout_s = cluster.patience_s or random.choice([0.5, 3.0, 10.0])
        writer = client.repeatable_producer(TOPIC, app=sink.name, part=0, era=era, timeout=timeout_s)
        self.producers[writer.producer] = None
        try:
            async with writer:
                for block in blocks:
                    await writer.add(block)
                await writer.finish()
        except (RepeatDiffers, RepeatTooLate) as error:
            pruned = isinstance(error, RepeatTooLate) and self.history.ends_of_pruned
            if not self.history.lost_tails and not pruned:
                raise
            return  # What an earlier attempt had stored is gone, and with it the numbers that this one counted on.
        finally:
            del self.producers[writer.producer]
        for value in values:
            self.history.confirm(value, NOWHERE, NOWHERE)
        if sink.era == era:
            sink.stored = True

    # Consuming.

    async def _consume(self, client: Client) -> None:
        random = self.random
        subscription = self.cluster.subscription_for(self.name)
        name = f"{self.name}-{random.randrange(3)}" if random.random() < 0.9 else "popular"
        consumer = client.stream_consumer(
            TOPIC, subscription, name=name, start="earliest", window_bytes=random.choice([None, 64 << 10, 100_000])
        )
        history = self.history.consumer(subscription, f"{subscription}/{name}", self._now())
        label = f"{history.name}@{history.born}"
        self.consumers[label] = consumer
        try:
            async with consumer:
                await self._receive(consumer, history)
        except (ConsumerReplaced, SubscriptionNotFound):
            pass
        finally:
            self.consumers.pop(label, None)

    async def _receive(self, consumer: StreamConsumer, history: ConsumerHistory) -> None:
        random, cluster = self.random, self.cluster
        diligence = random.choice([0.0, 0.1, 0.5, 1.0])
        slow = random.random() < 0.2
        left = random.choice([20, 200, 2_000])
        late: list[Message] = []
        last: dict[int, Message] = {}
        while not self.leaving.is_set() and (left > 0 or cluster.settling):
            if cluster.settling:
                diligence, slow = 1.0, False
                for message in last.values():
                    await consumer.ack(message)
            messages = await self._next_messages(consumer, history)
            last.update((message.segment, message) for message in messages)
            left -= len(messages) + 1
            if messages and random.random() < diligence:
                await consumer.ack(messages[-1])
            elif messages and random.random() < 0.2:
                late.append(random.choice(messages))
            if late and random.random() < 0.1:
                await consumer.ack(late.pop(random.randrange(len(late))))
            if random.random() < (0.3 if cluster.settling else 0.02):
                await self._store_acks(consumer, history)
            if random.random() < 0.01:
                await self._ack_too_far(consumer)
            if slow:
                await asyncio.sleep(random.uniform(0, 1.0))

    async def _next_messages(
        self, consumer: StreamConsumer | CheckpointConsumer, history: ConsumerHistory
    ) -> list[Message]:
        timeout = self.random.choice([0.01, 0.5, 1.0])
        messages: list[Message] = []
        if self.random.random() < 0.5:
            batch = await consumer.receive_batch(timeout)
            messages = batch.messages() if batch is not None else []
            for message in messages:
                self._note_handed(message, history)
            return messages
        for _ in range(self.random.choice([1, 5, 30])):
            received = await consumer.receive(timeout)
            if received is None:
                break
            self._note_handed(received, history)
            messages.append(received)
        return messages

    def _note_handed(self, message: Message, history: ConsumerHistory) -> None:
        self.cluster.inspector.check_seen(message.segment, message.offset)
        history.handed(message.segment, message.offset, message.value, self._now())

    async def _store_acks(self, consumer: StreamConsumer, history: ConsumerHistory) -> None:
        subscription = history.subscription
        assert subscription is not None
        # The interface does not say which segments a consumer still has, so this looks at its feeds.
        behind = {reader: reader.acked for reader in consumer._readers.values() if reader.stored < reader.acked}
        cuts = {reader: len(self.history.cuts[reader.segment]) for reader in behind}
        began = self._now()
        await consumer.flush_acks()
        segments = self.cluster.inspector.segments()
        for reader, acked in behind.items():
            if consumer._readers.get(reader.segment) is not reader or reader.segment not in segments:
                continue  # It went to another consumer, or to another place.
            if subscription.brief or subscription.unknown or subscription.sought_at >= began:
                continue  # Set to another place meanwhile: what was flushed may count no more.
            # The answer to a flush may come late, from an owner whose log was cut back since by another one.
            acked = min([acked, *(cut.offset for cut in self.history.cuts[reader.segment][cuts[reader] :])])
            if reader.segment in self.history.ends_at_loss:
                # It is being cut back, no further than this.
                acked = min(acked, self.cluster.inspector.least_end(reader.segment))
            else:
                subscription.stored[reader.segment] = Seek(acked, self._now())
            stored = self.cluster.inspector.stored_cursor(subscription.name, reader.segment)
            if stored < acked:
                raise PromiseBroken("acks", f"{history.name} flushed acks up to {acked}; the store has {stored}")

    async def _ack_too_far(self, consumer: StreamConsumer) -> None:
        """Ack records that nobody has published, as a client does that miscounts. The owner must refuse that, unless
        it has closed the channel."""
        channels = [each.channel for each in consumer._assigned.values() if each.channel is not None]
        if not channels:
            return
        channel = self.random.choice(channels)
        offset = self.cluster.inspector.end(channel.segment) + MISCOUNTED
        with contextlib.suppress(BraidError):
            await channel.ack_surely(offset, self.random.choice([0.5, 3.0]), durable=self.random.random() < 0.5)
            raise PromiseBroken("I5", f"an ack up to {offset} of segment {channel.segment} was taken")

    async def _follow_checkpoints(self, client: Client) -> None:
        """Be a program that stores its results and its checkpoint together, and goes on there after a crash."""
        random, cluster = self.random, self.cluster
        name = f"reader-{random.randrange(2)}"
        saved = cluster.saved.get(name)
        consumer = client.checkpoint_consumer(TOPIC, start=saved.checkpoint if saved is not None else "earliest")
        began = self._now()
        history = self.history.consumer(None, name, began)
        results = {segment: dict(read) for segment, read in saved.results.items()} if saved is not None else {}
        history.next = {segment: max(read) + 1 for segment, read in results.items()}
        try:
            async with consumer:
                for _ in range(random.choice([5, 50])):
                    if self.leaving.is_set():
                        break
                    for message in await self._next_messages(consumer, history):
                        results.setdefault(message.segment, {})[message.offset] = message.value
                    if random.random() < 0.3:
                        copied = {segment: dict(read) for segment, read in results.items()}
                        checkpoint = consumer.checkpoint()
                        ended = saved.ended if saved is not None else {}
                        ended = {
                            each: ended.get(each, began) for each in copied.keys() - next_offsets(checkpoint).keys()
                        }
                        cluster.saved[name] = Saved(checkpoint, copied, ended)
        except (OffsetOutOfRange, SegmentNotFound) as error:
            if not self._explains_refusal(error, saved, consumer.started):
                raise
            if saved is not None and cluster.saved.get(name) is saved:
                del cluster.saved[name]  # Its records are lost: the program begins anew.
        # Over a fast network, reading the whole log again and again would be most of what the simulation does.
        await self.pause(random.choice([0.05, 0.5, 2.0]))

    def _explains_refusal(self, error: OffsetOutOfRange | SegmentNotFound, saved: Saved | None, started: bool) -> bool:
        """Whether a program may be refused at its checkpoint, or later: what it has to read is deleted or lost."""
        pruned = self.history.ends_of_pruned
        if isinstance(error, OffsetOutOfRange):
            expired = (self.cluster.retention or pruned) and not isinstance(error, PositionDiverged)
            return bool(expired or self.history.lost_tails)
        if saved is None or started:
            return bool(pruned)
        return any(segment in pruned for segment in next_offsets(saved.checkpoint))

    async def _restart_at_checkpoint(self, client: Client) -> None:  # noqa: ARG002
        """Be a program of which another process goes on: its client knows nothing yet, and may ask any broker. The
        first one that it asks may know nothing of the segments in the checkpoint."""
        lagging = [name for name, machine in self.cluster.machines.items() if machine.lagging]
        another = self._connect(self.random.choice(lagging or ["", *self.cluster.machines]))
        try:
            await self._follow_checkpoints(another)
        except BraidError:
            await another.close()
            raise
        await another.close()

    async def _never_ack_a_push(self, client: Client) -> None:
        """Be a client that takes over the routing that it is told, and does not tell so."""
        silence(client)
        await self.pause(0.2)

    async def _take_from_queue(self, client: Client) -> None:
        await self.cluster.queues.take(self, client)
        await self.pause(self.random.choice([0.0, 0.05, 1.0]))

    async def _share_segments(self, client: Client) -> None:
        await share_segments(self, client, TOPIC)
        await self.pause(self.random.choice([0.05, 0.5, 2.0]))

    async def pause(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(seconds):
                await self.leaving.wait()
        except TimeoutError:
            pass


def next_offsets(checkpoint: bytes) -> dict[int, int]:
    """Return the positions in a checkpoint of the segments that were not read to their ends."""
    positions = ConsumerCheckpoint.from_bytes(checkpoint).positions
    return {segment: position for segment, position in positions.items() if position != END}


def silence(client: Client) -> None:
    """Let no connection of the client ack a push from now on."""
    for link in client.pool.links():
        vars(link)["ack_topology"] = lambda _generation: None


def on_a_bad_day(error: BraidError) -> bool:
    """What may be tried again, and what was not answered in time."""
    return error.retriable or isinstance(error, TimedOut | ClientClosed)
