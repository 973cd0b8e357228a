"""The process of a benchmark's Kafka producer or consumer: the same work as `braid.cli.bench.worker`, done by the
package `confluent-kafka`. The URL of a work's target is Kafka's `bootstrap.servers`.

The client is used in the way that is fast for it: lists of records where many are sent, no linger where each record
counts. Its producer is idempotent, because Braid's producer also stores a repeated record once.
"""

from __future__ import annotations

import importlib
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import msgspec

from braid.cli.bench.steady import RECORD, TICK_S, Waits
from braid.cli.bench.worker import DUE, LISTS, START_DELAY_NS, WARM_UP_SHARE, tell
from braid.cli.bench.workload import (
    Done,
    Failed,
    LatencyReceive,
    LatencySend,
    Publish,
    Ready,
    Steady,
    SteadySend,
    Work,
    percentiles_ms,
)

LINGER_MS: Final = 5
"""How long a batch may fill where many records are sent. This is the client's own default."""
QUEUED: Final = 200_000
"""How many records may be unconfirmed where many are sent. More than that would only wait in the client."""
POLL_S: Final = 0.001
FLUSH_S: Final = 120.0


def client_settings(servers: str) -> dict[str, Any]:
    # The client logs every connection that a killed broker refuses.
    return {"bootstrap.servers": servers, "log_level": 0, "socket.nagle.disable": True}


def producer_settings(servers: str, linger_ms: int, batch_bytes: int | None = None) -> dict[str, Any]:
    settings = client_settings(servers) | {"acks": "all", "enable.idempotence": True, "linger.ms": linger_ms}
    if batch_bytes is not None:
        settings |= {"batch.size": batch_bytes, "batch.num.messages": batch_bytes}
        settings |= {"queue.buffering.max.messages": 2 * QUEUED, "delivery.report.only.error": True}
    return settings


# Publishing.


class Failures:
    """Counts the records that Kafka did not confirm."""

    def __init__(self) -> None:
        self.count = 0

    def on_delivery(self, error: object, _: object) -> None:
        self.count += error is not None


def publish(work: Publish) -> Done:
    kafka: Any = importlib.import_module("confluent_kafka")
    producer = kafka.Producer(producer_settings(work.target.url, LINGER_MS, work.batch_bytes))
    lists = [record_list(work.batch_bytes // work.size, work.size, seed) for seed in range(LISTS)]
    if work.warm_up:
        send_all(producer, work.topic, lists, max(1, work.records // WARM_UP_SHARE))
    tell(Ready())
    began, cpu = time.perf_counter(), time.process_time()
    send_all(producer, work.topic, lists, work.records)
    taken_s = time.perf_counter() - began
    return Done(work.records, work.records * work.size, taken_s, time.process_time() - cpu)


def send_all(producer: Any, topic: str, lists: list[list[dict[str, bytes]]], records: int) -> None:
    """Send so many records, and wait until all of them are confirmed."""
    failures = Failures()
    sent = turn = 0
    while sent < records:
        while len(producer) > QUEUED:
            producer.poll(POLL_S)
        part = lists[turn % LISTS][: records - sent]
        sent += producer.produce_batch(topic, part, on_delivery=failures.on_delivery)
        turn += 1
        producer.poll(0)
    if producer.flush(FLUSH_S) or failures.count:
        raise RuntimeError(f"Kafka confirmed {records - failures.count - len(producer)} of {records} records")


def record_list(count: int, size: int, seed: int) -> list[dict[str, bytes]]:
    data = random.Random(seed).randbytes(max(1, count) * size)
    return [{"value": data[at : at + size]} for at in range(0, len(data), size)]


# Latency.


def latency_send(work: LatencySend) -> Done:
    kafka: Any = importlib.import_module("confluent_kafka")
    producer = kafka.Producer(producer_settings(work.target.url, linger_ms=0))
    producer.list_topics(work.topic, FLUSH_S)
    padding = bytes(max(0, work.size - DUE.size))
    tell(Ready())
    records = int(work.rate * work.duration_s)
    began, cpu = time.perf_counter(), time.process_time()
    for due_ns in schedule(work.rate, records):
        producer.produce(work.topic, DUE.pack(due_ns) + padding)
        producer.poll(0)
    producer.flush(FLUSH_S)
    return Done(records, records * work.size, time.perf_counter() - began, time.process_time() - cpu)


def schedule(rate: float, records: int) -> Iterator[int]:
    """Yield the due time of each record, in monotonic ns, when it has come. Late records follow immediately."""
    begin_ns = time.monotonic_ns() + START_DELAY_NS
    for number in range(records):
        due_ns = begin_ns + int(number * 1e9 / rate)
        if (wait_ns := due_ns - time.monotonic_ns()) > 0:
            time.sleep(wait_ns / 1e9)
        yield due_ns


def latency_receive(work: LatencyReceive) -> Done:
    kafka: Any = importlib.import_module("confluent_kafka")
    settings = client_settings(work.target.url) | {"group.id": work.subscription, "enable.auto.commit": False}
    consumer = kafka.Consumer(settings)
    consumer.assign([kafka.TopicPartition(work.topic, 0, kafka.OFFSET_BEGINNING)])
    consumer.poll(1.0)
    tell(Ready())
    began, cpu = time.perf_counter(), time.process_time()
    taken_ns: list[int] = []
    while len(taken_ns) < work.records:
        # `consume` would wait until it has a whole list.
        message = consumer.poll(FLUSH_S)
        if message is None or message.error() is not None:
            raise RuntimeError(f"Kafka's consumer got {len(taken_ns)} of {work.records} records")
        taken_ns.append(time.monotonic_ns() - DUE.unpack_from(message.value())[0])
    taken_s = time.perf_counter() - began
    consumer.close()
    cpu_s = time.process_time() - cpu
    return Done(work.records, 0, taken_s, cpu_s, percentiles_ms(taken_ns[work.warm_up_records :]))


# Fail-overs.


class Confirms:
    """Keeps how long records waited for their confirms, and counts errors."""

    def __init__(self) -> None:
        self.waits = Waits()
        self.errors = 0

    def on_delivery(self, due_ns: int, error: object, _: object) -> None:
        self.errors += error is not None
        self.waits.add(due_ns, time.monotonic_ns())


def steady_send(work: SteadySend) -> Done:
    kafka: Any = importlib.import_module("confluent_kafka")
    stopping: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopping.append(number))
    producer = kafka.Producer(producer_settings(work.target.url, linger_ms=0))
    producer.list_topics(work.topic, FLUSH_S)
    padding = bytes(max(0, work.size - RECORD.size))
    confirms = Confirms()
    tell(Ready())
    began, cpu = time.monotonic_ns(), time.process_time()
    number = 0
    while not stopping:
        due = int((time.monotonic_ns() - began) * work.rate / 1e9)
        for each in range(number, due):
            due_ns = began + int(each * 1e9 / work.rate)
            value = RECORD.pack(due_ns, each) + padding
            producer.produce(work.topic, value, on_delivery=partial(confirms.on_delivery, due_ns))
        number = due
        producer.poll(TICK_S)
    producer.flush(FLUSH_S)
    steady = Steady(errors=confirms.errors + len(producer), waited_ms=confirms.waits.by_slot_ms)
    seconds = (time.monotonic_ns() - began) / 1e9
    return Done(number, number * work.size, seconds, time.process_time() - cpu, steady=steady)


# The process.


def perform(work: Work) -> Done:
    match work:
        case Publish():
            return publish(work)
        case LatencySend():
            return latency_send(work)
        case LatencyReceive():
            return latency_receive(work)
        case SteadySend():
            return steady_send(work)
        case _:
            raise RuntimeError(f"no benchmark beside Kafka has {type(work).__name__}")


def main() -> int:
    kafka: Any = importlib.import_module("confluent_kafka")
    work: Work = msgspec.json.decode(sys.stdin.buffer.read(), type=Work)
    try:
        tell(perform(work))
    except (RuntimeError, kafka.KafkaException) as error:
        tell(Failed(str(error)))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
