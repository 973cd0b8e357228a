"""The process of a benchmark's producer or consumer: `python -m braid.cli.bench.worker`, with its work on stdin.

A worker uses the client as an application does, through its public interface. A producer sends some records before the
clock starts, because the first records pay for connections and memory.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import struct
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from itertools import chain
from typing import TYPE_CHECKING, Final, assert_never

import msgspec

from braid.cli.bench.steady import steady_receive, steady_send
from braid.cli.bench.workload import (
    Consume,
    Done,
    Failed,
    Form,
    LatencyReceive,
    LatencySend,
    Mode,
    ProgressReport,
    Publish,
    QueueConsume,
    QueueHold,
    QueueReturn,
    Ready,
    SteadyReceive,
    SteadySend,
    Told,
    Work,
    percentiles_ms,
)
from braid.model.errors import BraidError
from braid.ports.allocator import keep_freed_memory

if TYPE_CHECKING:
    from braid.client.consuming.queue import QueueConsumer
    from braid.client.consuming.stream import StreamConsumer
    from braid.client.producing.open_batch import Receipt
    from braid.client.producing.producer import Producer
    from braid.model.message import QueueMessage

SWITCH_INTERVAL_S: Final = 0.0005
"""How long a thread may keep the interpreter. Python's default of 5 ms is too long to measure latencies of 1 ms."""
PROGRESS_S: Final = 0.2
WARM_UP_SHARE: Final = 10
LISTS: Final = 4
"""How many batches have different values, so that no small cache of the processor holds all of them."""
CALL_BATCHES: Final = 8
"""How many batches the records of one call of `send_many` or `send_table` make; the producer cuts them."""
SAMPLE: Final = 16
"""Where each record is one call, one call in this many is timed."""
SUBMIT_STRIDE: Final = 1_000
SUBMIT_AHEAD: Final = 50
"""A task that submits waits for its record of 50,000 records ago, so at most this many are unconfirmed."""
ACK_STRIDE: Final = 1_000
START_DELAY_NS: Final = 50_000_000
RETURN_PREFETCH: Final = 1_000
HOLD_AHEAD: Final = 10_000
"""Room for messages that are acked, beside those that are kept."""
DUE: Final = struct.Struct("<Q")


def tell(told: Told) -> None:
    sys.stdout.write(msgspec.json.encode(told).decode() + "\n")
    sys.stdout.flush()


class WorkMeter:
    """Counts records, and samples how long calls take."""

    def __init__(self, records: int, size: int) -> None:
        self.records = records
        self.taken_ns: list[int] = []
        self._size = size
        self._begun = 0
        self._started = time.perf_counter()
        self._cpu = time.process_time()
        self._report = asyncio.get_running_loop().call_later(PROGRESS_S, self._tell_progress)
        self.done = 0

    def take(self, count: int) -> int:
        """Take records to send: `count`, or fewer at the end. Returns how many."""
        count = min(count, self.records - self._begun)
        self._begun += count
        return count

    def finish(self) -> Done:
        self._report.cancel()
        seconds = time.perf_counter() - self._started
        cpu_s = time.process_time() - self._cpu
        return Done(self.done, self.done * self._size, seconds, cpu_s, percentiles_ms(self.taken_ns))

    def _tell_progress(self) -> None:
        tell(ProgressReport(self.done))
        self._report = asyncio.get_running_loop().call_later(PROGRESS_S, self._tell_progress)


# Publishing.


async def publish(work: Publish) -> Done:
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(work.target.connect())
        count = work.tasks if work.mode is Mode.SINGLE else 1
        made = [client.producer(work.topic, max_batch_bytes=work.batch_bytes) for _ in range(count)]
        producers = [await stack.enter_async_context(producer) for producer in made]
        turns = _TURNS[work.mode](work, producers)
        if work.warm_up:
            await _run(turns, WorkMeter(max(1, work.records // WARM_UP_SHARE), work.size))
        tell(Ready())
        return await _run(turns, WorkMeter(work.records, work.size))


Turn = Callable[[WorkMeter], Awaitable[None]]
"""Runs as one task until the meter has no records left."""


async def _run(turns: list[Turn], meter: WorkMeter) -> Done:
    await asyncio.gather(*(turn(meter) for turn in turns))
    return meter.finish()


def _send_many_turns(work: Publish, producers: list[Producer]) -> list[Turn]:
    lists = _lists(work)

    async def turn(meter: WorkMeter) -> None:
        number = 0
        while count := meter.take(len(lists[0])):
            values = lists[number % LISTS]
            number += 1
            began = time.perf_counter_ns()
            await producers[0].send_many(values if count == len(values) else values[:count])
            meter.taken_ns.append(time.perf_counter_ns() - began)
            meter.done += count

    return [turn] * work.tasks


def _send_table_turns(work: Publish, producers: list[Producer]) -> list[Turn]:
    import pyarrow as pa

    tables = [pa.table({"value": pa.array(values, pa.binary())}) for values in _lists(work)]

    async def turn(meter: WorkMeter) -> None:
        number = 0
        while count := meter.take(len(tables[0])):
            table = tables[number % LISTS]
            number += 1
            began = time.perf_counter_ns()
            await producers[0].send_table(table if count == len(table) else table.slice(0, count))
            meter.taken_ns.append(time.perf_counter_ns() - began)
            meter.done += count

    return [turn] * work.tasks


def _send_turns(work: Publish, producers: list[Producer]) -> list[Turn]:
    values = _values(SAMPLE, work.size, seed=0)

    def turn_of(producer: Producer) -> Turn:
        async def turn(meter: WorkMeter) -> None:
            while count := meter.take(SAMPLE):
                began = time.perf_counter_ns()
                await producer.send(values[0])
                meter.taken_ns.append(time.perf_counter_ns() - began)
                for number in range(1, count):
                    await producer.send(values[number])
                meter.done += count

        return turn

    return [turn_of(producers[number % len(producers)]) for number in range(work.tasks)]


def _submit_turns(work: Publish, producers: list[Producer]) -> list[Turn]:
    values = _values(SUBMIT_STRIDE, work.size, seed=0)
    producer = producers[0]

    async def turn(meter: WorkMeter) -> None:
        ahead: deque[tuple[Receipt, int]] = deque()

        async def settle(behind: int) -> None:
            while len(ahead) > behind:
                receipt, began = ahead.popleft()
                await receipt
                meter.taken_ns.append(time.perf_counter_ns() - began)

        while count := meter.take(SUBMIT_STRIDE):
            for value in values[: count - 1]:
                producer.submit(value)
            ahead.append((producer.submit(values[count - 1]), time.perf_counter_ns()))
            await settle(SUBMIT_AHEAD)
            meter.done += count
        await settle(0)

    return [turn] * work.tasks


_TURNS: Final[dict[Mode, Callable[[Publish, list[Producer]], list[Turn]]]] = {
    Mode.SEND_MANY: _send_many_turns,
    Mode.SEND_TABLE: _send_table_turns,
    Mode.SEND: _send_turns,
    Mode.SUBMIT: _submit_turns,
    Mode.SINGLE: _send_turns,
}


def _lists(work: Publish) -> list[list[bytes]]:
    """Make lists of the records of one call, from the values of `LISTS` batches: as many different values as the bare
    loop of the benchmarks has."""
    count = max(1, work.batch_bytes // work.size)
    parts = [_values(count, work.size, seed) for seed in range(LISTS)]
    turns = [parts[number % LISTS] for number in range(LISTS + CALL_BATCHES)]
    return [list(chain.from_iterable(turns[number : number + CALL_BATCHES])) for number in range(LISTS)]


def _values(count: int, size: int, seed: int) -> list[bytes]:
    data = random.Random(seed).randbytes(size * count)
    return [data[at : at + size] for at in range(0, len(data), size)]


# Consuming.


async def consume(work: Consume) -> Done:
    async with (
        work.target.connect() as client,
        client.stream_consumer(work.topic, work.subscription, name="bench", start="earliest") as consumer,
    ):
        tell(Ready())
        meter = WorkMeter(work.records, 0)
        size = await (
            _consume_each(consumer, meter) if work.form is Form.EACH else _consume_batches(consumer, meter, work)
        )
        done = meter.finish()
        return msgspec.structs.replace(done, value_bytes=done.records * size)


async def _consume_batches(consumer: StreamConsumer, meter: WorkMeter, work: Consume) -> int:
    size = 0
    while meter.done < work.records:
        batch = await consumer.receive_batch()
        assert batch is not None
        match work.form:
            case Form.ARROW:
                count = batch.table.num_rows
            case Form.VALUES:
                count = len(batch.values())
            case _:
                count = len(batch.messages())
        size = size or len(batch.values()[0])
        await consumer.ack(batch)
        meter.done += count
    return size


async def _consume_each(consumer: StreamConsumer, meter: WorkMeter) -> int:
    until_ack = ACK_STRIDE
    async for message in consumer:
        meter.done += 1
        until_ack -= 1
        if not until_ack or meter.done >= meter.records:
            until_ack = ACK_STRIDE
            await consumer.ack(message)
            if meter.done >= meter.records:
                return len(message.value)
    raise AssertionError("an open consumer has no end")


# Latency.


async def latency_send(work: LatencySend) -> Done:
    padding = bytes(max(0, work.size - DUE.size))
    async with work.target.connect() as client, client.producer(work.topic) as producer:
        tell(Ready())
        records = int(work.rate * work.duration_s)
        meter = WorkMeter(records, work.size)
        async for due_ns in schedule(work.rate, records):
            producer.submit(DUE.pack(due_ns) + padding)
            meter.done += 1
        await producer.flush()
        return meter.finish()


async def schedule(rate: float, records: int) -> AsyncIterator[int]:
    """Yield the due time of each record, in monotonic ns, when it has come. Late records follow immediately."""
    begin_ns = time.monotonic_ns() + START_DELAY_NS
    for number in range(records):
        due_ns = begin_ns + int(number * 1e9 / rate)
        if (wait_ns := due_ns - time.monotonic_ns()) > 0:
            await asyncio.sleep(wait_ns / 1e9)
        yield due_ns


async def latency_receive(work: LatencyReceive) -> Done:
    async with (
        work.target.connect() as client,
        client.stream_consumer(work.topic, work.subscription, name="bench", start="earliest") as consumer,
    ):
        tell(Ready())
        meter = WorkMeter(work.records, 0)
        while meter.done < work.records:
            batch = await consumer.receive_batch()
            assert batch is not None
            for value in batch.values():
                meter.taken_ns.append(time.monotonic_ns() - DUE.unpack_from(value)[0])
            await consumer.ack(batch)
            meter.done += len(batch)
        meter.taken_ns = meter.taken_ns[work.warm_up_records :]
        return meter.finish()


# Queues.


async def queue_consume(work: QueueConsume) -> Done:
    async with (
        work.target.connect() as client,
        client.queue_consumer(work.topic, work.subscription, prefetch=work.prefetch) as consumer,
    ):
        await consumer.ack(await _received(consumer))
        tell(Ready())
        meter = WorkMeter(work.messages, 0)
        if work.waits:

            async def turn() -> None:
                while meter.take(1):
                    await consumer.ack(await _received(consumer))
                    meter.done += 1

            await asyncio.gather(*(turn() for _ in range(work.prefetch)))
        else:
            while meter.done < work.messages:
                consumer.submit_ack(await _received(consumer))
                meter.done += 1
            await consumer.flush()
        return meter.finish()


async def queue_return(work: QueueReturn) -> Done:
    """Measure from the time at which each message was due to be returned until it is here again."""
    returned_ns: dict[int, int] = {}
    fresh: deque[QueueMessage] = deque()
    total = int(work.rate * work.duration_s)
    async with (
        work.target.connect() as client,
        client.queue_consumer(work.topic, work.subscription, prefetch=RETURN_PREFETCH) as consumer,
        asyncio.TaskGroup() as tasks,
    ):
        while len(fresh) < RETURN_PREFETCH // 2:
            fresh.append(await _received(consumer))
        tell(Ready())
        meter = WorkMeter(total, 0)

        async def receive() -> None:
            while meter.done < total:
                message = await _received(consumer)
                if message.redelivery_count:
                    meter.taken_ns.append(time.monotonic_ns() - returned_ns.pop(message.offset))
                    consumer.submit_ack(message)
                    meter.done += 1
                else:
                    fresh.append(message)

        receiving = tasks.create_task(receive())
        async for due_ns in schedule(work.rate, total):
            message = fresh.popleft()
            returned_ns[message.offset] = due_ns
            tasks.create_task(consumer.nack(message))
        await receiving
        return meter.finish()


async def queue_hold(work: QueueHold) -> Done:
    """Keep messages until the process is ended. Their broker may be killed meanwhile."""
    prefetch = work.kept + (HOLD_AHEAD if work.stride > 1 else 0)
    async with (
        work.target.connect() as client,
        client.queue_consumer(work.topic, work.subscription, prefetch=prefetch) as consumer,
    ):
        meter = WorkMeter(work.messages, 0)
        while meter.take(1):
            message = await _received(consumer)
            if not work.keeps(message.offset):
                consumer.submit_ack(message)
            meter.done += 1
        await consumer.flush()
        tell(Ready())
        await asyncio.Event().wait()
        return meter.finish()


async def _received(consumer: QueueConsumer) -> QueueMessage:
    message = await consumer.receive()
    assert message is not None
    return message


# The process.


async def perform(work: Work) -> Done:
    match work:
        case Publish():
            return await publish(work)
        case Consume():
            return await consume(work)
        case LatencySend():
            return await latency_send(work)
        case LatencyReceive():
            return await latency_receive(work)
        case SteadySend():
            return await steady_send(work, on_ready=lambda: tell(Ready()))
        case SteadyReceive():
            return await steady_receive(work, on_ready=lambda: tell(Ready()))
        case QueueConsume():
            return await queue_consume(work)
        case QueueReturn():
            return await queue_return(work)
        case QueueHold():
            return await queue_hold(work)
        case _:
            assert_never(work)


def _loop_for(work: Work) -> asyncio.SelectorEventLoop:
    # epoll waits for whole milliseconds; a sender that has to be on time needs a finer clock.
    fine = isinstance(work, LatencySend | SteadySend | QueueReturn)
    return asyncio.SelectorEventLoop(selectors.SelectSelector() if fine else selectors.DefaultSelector())


def main() -> int:
    work: Work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    keep_freed_memory()
    try:
        with asyncio.Runner(loop_factory=lambda: _loop_for(work)) as runner:
            tell(runner.run(perform(work)))
    except BraidError as error:
        tell(Failed(str(error)))
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
