"""Braid beside other brokers, in one run: `make bench-peers`, or `python -m benchmarks.peers [--quick]`

    Kafka             KAFKA_HOME names a Kafka 4 (its folder `libs`), one node in KRaft mode; package `confluent-kafka`
    NATS JetStream    `nats-server` in the path, package `nats-py`
    Redis Streams     `redis-server` in the path, package `redis`
    RabbitMQ          Debian's package `rabbitmq-server`, package `aio-pika`

`make peers` brings all of them. The benchmark skips a system that is absent, and says so. Neither Braid nor its tests
need anything here.

Each system runs as one server with one topic, once with a sync before each confirm and once without (`fsync` and `page
cache`), and is tuned as its documentation says; the table has the settings. One Python program publishes, and waits for
all confirms; then it consumes all values. Rounds take turns, and the median counts. Systems differ in what a confirmed
record survives, so compare rows of the same durability.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

from benchmarks.kafka_cluster import home_version, kafka_absent, own_kafka
from benchmarks.kafka_worker import producer_settings
from benchmarks.peer_servers import (
    START_TIMEOUT_S,
    free_port,
    needs,
    nothing_absent,
    package_version,
    rabbitmq,
    rabbitmq_needs,
    rabbitmq_version,
    redis,
    redis_version,
    server,
    timed,
    value_of,
    version_said,
)
from benchmarks.report import Fact, Report, readable
from braid.cli.bench.measure import fill, fresh_topic, measure_consume
from braid.cli.bench.workload import Form
from braid.cli.target import Target
from braid.model.topic import Durability
from braid.testing.processes import BrokerProcess

SIZES: Final = (100, 1024)
PIPELINE: Final = 500
"""Records in flight, or in one request."""
ROUNDS: Final = 3
SESSION_S: Final = 9.0
"""Kafka's own default."""
NAME: Final = "bench"


class Rates(NamedTuple):
    publish: float
    """Confirmed records per second."""
    consume: float
    """Records per second, to the values' bytes."""


class Peer(NamedTuple):
    name: str
    durability: str
    settings: str
    """What differs from the system's defaults."""
    absent: Callable[[], str]
    """Returns why the system cannot be measured; empty if it can."""
    version: Callable[[], str]
    """Of server and client."""
    measure: Callable[[str, int, int], Rates]
    """Measures this many records of this size, in a folder."""


# Braid.


def braid_rates(folder: str, records: int, size: int, durability: Durability) -> Rates:
    with BrokerProcess(Path(folder) / "data") as broker:
        target = Target(url=broker.url)
        with fresh_topic(target, durability) as topic:
            published = fill(target, topic, records, size)
            consumed = measure_consume(target, topic, records=records, form=Form.VALUES)
    return Rates(published.rate, consumed.rate)


# Kafka.


def kafka_rates(folder: str, records: int, size: int, *, fsync: bool) -> Rates:  # noqa: ARG001 (it has its own)
    kafka: Any = importlib.import_module("confluent_kafka")
    with own_kafka(Path(os.environ["KAFKA_HOME"]), 1, SESSION_S) as cluster:
        cluster.create_topic(NAME, confirm=1, fsync=fsync)
        servers, value = cluster.servers(), value_of(size)
        producer = kafka.Producer(producer_settings(servers, linger_ms=5, batch_bytes=1_000_000))

        def publish() -> None:
            for _ in range(records):
                while True:
                    try:
                        producer.produce(NAME, value)
                        break
                    except BufferError:
                        producer.poll(0.01)
            assert producer.flush(START_TIMEOUT_S) == 0

        producer.produce(NAME, value)
        assert producer.flush(START_TIMEOUT_S) == 0  # The producer is connected now.
        published = timed(publish)
        consumer = kafka.Consumer(consumer_settings(servers))
        consumer.assign([kafka.TopicPartition(NAME, 0, kafka.OFFSET_BEGINNING)])  # One node has no place for groups.
        seen = 0

        def consume(until: int) -> None:
            nonlocal seen
            while seen < until:
                messages = consumer.consume(min(10 * PIPELINE, until - seen), START_TIMEOUT_S)
                assert messages, f"Kafka delivered nothing for {START_TIMEOUT_S:g} s, after {seen} records"
                seen += len([message.value() for message in messages if message.error() is None])

        consume(1)  # Fetching has begun.
        first = seen
        consumed = timed(lambda: consume(records))
        consumer.close()
        return Rates(records / published, (records - first) / consumed)


def consumer_settings(servers: str) -> dict[str, Any]:
    """Return the settings of librdkafka that let one consumer fetch without pauses. With its defaults it waits for a
    second whenever 100,000 records are queued."""
    return {
        "bootstrap.servers": servers,
        "log_level": 0,
        "group.id": NAME,
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "fetch.queue.backoff.ms": 1,
        "queued.min.messages": 1_000_000,
    }


def no_kafka() -> str:
    return kafka_absent(os.environ)


def kafka_version() -> str:
    return f"{home_version(Path(os.environ['KAFKA_HOME']))}, confluent-kafka {package_version('confluent-kafka')}"


# NATS.


def nats_rates(folder: str, records: int, size: int, sync_interval: str) -> Rates:
    port = free_port()
    config = Path(folder) / "nats.conf"
    store = f'jetstream {{ store_dir: "{folder}/data", sync_interval: {sync_interval} }}'
    config.write_text(f"listen: 127.0.0.1:{port}\n{store}\n", encoding="utf-8")
    with server(["nats-server", "-c", str(config)], port):
        return asyncio.run(nats_clients(port, records, size))


async def nats_clients(port: int, records: int, size: int) -> Rates:
    nats: Any = importlib.import_module("nats")

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = client.jetstream(publish_async_max_pending=4 * PIPELINE)
    await stream.add_stream(name=NAME, subjects=[NAME])
    value = value_of(size)
    began = time.perf_counter()
    for _ in range(records):
        await stream.publish_async(NAME, value)
    await stream.publish_async_completed()
    published = time.perf_counter() - began
    config = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.ALL)
    subscription = await stream.pull_subscribe(NAME, durable=NAME, config=config)
    seen = 0
    began = time.perf_counter()
    while seen < records:
        messages = await subscription.fetch(PIPELINE, timeout=5)
        seen += len([message.data for message in messages])
        await messages[-1].ack()
    consumed = time.perf_counter() - began
    await client.close()
    return Rates(records / published, records / consumed)


def nats_version() -> str:
    return f"{version_said(['nats-server', '--version'])}, nats-py {package_version('nats-py')}"


# Redis.


def redis_rates(folder: str, records: int, size: int, appendfsync: str) -> Rates:
    package: Any = importlib.import_module("redis")
    with redis(folder, appendfsync) as port:
        client = package.Redis(port=port)
        value = value_of(size)

        def publish() -> None:
            for _ in range(0, records, PIPELINE):
                with client.pipeline(transaction=False) as pipeline:
                    for _ in range(PIPELINE):
                        pipeline.xadd(NAME, {"v": value})
                    pipeline.execute()

        def consume() -> None:
            last, seen = "0", 0
            while seen < records:
                for _, entries in client.xread({NAME: last}, count=10 * PIPELINE):
                    seen += len([fields[b"v"] for _, fields in entries])
                    last = entries[-1][0]

        return Rates(records / timed(publish), records / timed(consume))


def redis_versions() -> str:
    return f"{redis_version()}, redis-py {package_version('redis')}"


# RabbitMQ.


def rabbitmq_rates(folder: str, records: int, size: int, kind: str) -> Rates:
    with rabbitmq(folder) as port:
        return asyncio.run(rabbitmq_clients(port, records, size, kind))


async def rabbitmq_clients(port: int, records: int, size: int, kind: str) -> Rates:
    pika: Any = importlib.import_module("aio_pika")
    connection = await pika.connect(f"amqp://guest:guest@127.0.0.1:{port}/")
    async with connection:
        channel = await connection.channel(publisher_confirms=True)
        await channel.set_qos(prefetch_count=2 * PIPELINE)
        queue = await channel.declare_queue(NAME, durable=True, arguments={"x-queue-type": kind})
        message = pika.Message(value_of(size), delivery_mode=pika.DeliveryMode.PERSISTENT)
        began = time.perf_counter()
        for first in range(0, records, PIPELINE):
            count = min(PIPELINE, records - first)
            await asyncio.gather(*(channel.default_exchange.publish(message, NAME) for _ in range(count)))
        published = time.perf_counter() - began
        seen, done = 0, asyncio.Event()

        async def on_message(delivery: Any) -> None:
            nonlocal seen
            seen += 1 if len(delivery.body) == size else 0
            if seen % PIPELINE == 0 or seen == records:
                await delivery.ack(multiple=True)
            if seen == records:
                done.set()

        began = time.perf_counter()
        await queue.consume(on_message)
        await done.wait()
        return Rates(records / published, records / (time.perf_counter() - began))


def rabbitmq_versions() -> str:
    return f"{rabbitmq_version()}, aio-pika {package_version('aio-pika')}"


# All of them.


def braid_version() -> str:
    return package_version("braidmq")


FSYNC, PAGE_CACHE = "fsync", "page cache"
_braid = partial(Peer, "Braid", absent=nothing_absent, version=braid_version)
_kafka = partial(Peer, "Kafka", absent=no_kafka, version=kafka_version)
_nats = partial(Peer, "NATS JetStream", absent=needs("nats-server", "nats"), version=nats_version)
_redis = partial(Peer, "Redis Streams", absent=needs("redis-server", "redis"), version=redis_versions)
_rabbitmq = partial(Peer, "RabbitMQ", absent=rabbitmq_needs("aio_pika"), version=rabbitmq_versions)
_CONSUMER: Final = (
    "acks=all, idempotent, linger 5 ms, 1 MB batches; fetch.queue.backoff.ms=1, queued.min.messages=1000000"
)

PEERS: Final = (
    _braid(FSYNC, "send_many, values", measure=partial(braid_rates, durability=Durability.FSYNC)),
    _kafka(FSYNC, f"flush.messages=1; {_CONSUMER}", measure=partial(kafka_rates, fsync=True)),
    _nats(
        FSYNC,
        "sync_interval always; 2,000 pending, fetches of 500",
        measure=partial(nats_rates, sync_interval="always"),
    ),
    _redis(FSYNC, "appendfsync always; pipelines of 500", measure=partial(redis_rates, appendfsync="always")),
    _rabbitmq(FSYNC, "quorum queue; 500 unconfirmed, prefetch 1,000", measure=partial(rabbitmq_rates, kind="quorum")),
    _braid(PAGE_CACHE, "send_many, values", measure=partial(braid_rates, durability=Durability.MEMORY)),
    _kafka(PAGE_CACHE, _CONSUMER, measure=partial(kafka_rates, fsync=False)),
    _nats(
        PAGE_CACHE, "sync_interval 2m; 2,000 pending, fetches of 500", measure=partial(nats_rates, sync_interval="2m")
    ),
    _redis(PAGE_CACHE, "appendfsync everysec; pipelines of 500", measure=partial(redis_rates, appendfsync="everysec")),
    _rabbitmq(
        PAGE_CACHE,
        "durable classic queue; 500 unconfirmed, prefetch 1,000",
        measure=partial(rabbitmq_rates, kind="classic"),
    ),
)


def records_for(peer: Peer, size: int, records: int) -> int:
    """Return how many records to measure: Braid and Kafka need more to run for as long as the others do."""
    more = {"Braid": 20, "Kafka": 5}.get(peer.name, 1)
    return records * more if size == SIZES[0] else records


def measured(peers: Sequence[Peer], records: int, rounds: int) -> dict[tuple[Peer, int], Rates]:
    """Measure all peers in turns; return the medians by peer and size."""
    found: dict[tuple[Peer, int], list[Rates]] = {}
    for number in range(rounds):
        for peer in peers:
            for size in SIZES:
                print(f"round {number + 1} of {rounds}: {peer.name}, {peer.durability}, {size} B", flush=True)
                with TemporaryDirectory(prefix="braid-bench-") as folder:
                    rates = peer.measure(folder, records_for(peer, size, records), size)
                found.setdefault((peer, size), []).append(rates)
    return {case: Rates(*map(statistics.median, zip(*rates, strict=True))) for case, rates in found.items()}


def markdown(peers: Sequence[Peer], rates: dict[tuple[Peer, int], Rates]) -> str:
    """Return the table for docs/operating/performance.md."""
    head = "| system | publish 100 B | publish 1 KiB | consume 100 B | consume 1 KiB | settings |"
    lines = []
    for durability in (FSYNC, PAGE_CACHE):
        lines += [f"\nRecords per second, {durability}:\n", head, "|---|---:|---:|---:|---:|---|"]
        for peer in (each for each in peers if each.durability == durability):
            cells = [readable(rates[peer, size].publish) for size in SIZES]
            cells += [readable(rates[peer, size].consume) for size in SIZES]
            lines.append(f"| {peer.name} {peer.version()} | {' | '.join(cells)} | {peer.settings} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records, one round: shows that it runs, not how fast")
    parser.add_argument("--only", default="", metavar="NAME", help="systems whose name has this in it")
    arguments = parser.parse_args()
    peers: list[Peer] = []
    for peer in (each for each in PEERS if arguments.only.lower() in each.name.lower()):
        if reason := peer.absent():
            print(f"{peer.name} ({peer.durability}) is skipped: {reason}.", flush=True)
        else:
            peers.append(peer)
    quick: bool = arguments.quick
    found = measured(peers, 2_000 if quick else 200_000, 1 if quick else ROUNDS)
    report = Report("peers")
    for (peer, size), rates in found.items():
        facts: dict[str, Fact] = {
            "system": peer.name,
            "durability": peer.durability,
            "record": size,
            "version": peer.version(),
        }
        for case, rate in rates._asdict().items():
            report.add(case, rate, "records/s", **facts, settings=peer.settings)
    report.print()
    print(markdown(peers, found), flush=True)
    report.write_jsonl()


if __name__ == "__main__":
    main()
