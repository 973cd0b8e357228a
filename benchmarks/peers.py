"""Braid beside other brokers that are installed, in one run: `make bench-peers`, or `python -m benchmarks.peers
[--quick]`

    Redis Streams     `redis-server` in the path, Python package `redis`
    NATS JetStream    `nats-server` in the path, Python package `nats-py`
    Kafka             one that runs, named by KAFKA_BOOTSTRAP (host:port), Python package `confluent-kafka`

The benchmark skips a system that is absent, and says so. Each system runs as one server with one topic. Its Python
client is used in the way that its documentation calls fast (pipelines, asynchronous acknowledgements, batches), at the
durability that the row names. Systems differ in what a confirmed record survives, so compare rows of the same
durability. Neither Braid nor its tests need anything here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import os
import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.report import Report
from braid.cli.bench.measure import fill, fresh_topic, measure_consume
from braid.cli.bench.workload import Form
from braid.cli.target import Target
from braid.model.topic import Durability
from braid.testing.processes import BrokerProcess

SIZES = (100, 1024)
PIPELINE = 500
"""Records in flight, or in one request."""
START_TIMEOUT_S = 60.0


class Rates(NamedTuple):
    publish: float
    """Confirmed records per second."""
    consume: float
    """Records per second, to the values' bytes."""


class Peer(NamedTuple):
    name: str
    durability: str
    absent: Callable[[], str]
    """Returns why the system cannot be measured; empty if it can."""
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


# Redis.


def redis_rates(folder: str, records: int, size: int, appendfsync: str) -> Rates:
    redis: Any = importlib.import_module("redis")

    port = free_port()
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
    command += ["--appendonly", "yes", "--appendfsync", appendfsync, "--daemonize", "no"]
    with server(command, port):
        client = redis.Redis(port=port)
        value = value_of(size)

        def publish() -> None:
            for _ in range(0, records, PIPELINE):
                with client.pipeline(transaction=False) as pipeline:
                    for _ in range(PIPELINE):
                        pipeline.xadd("bench", {"v": value})
                    pipeline.execute()

        def consume() -> None:
            last, seen = "0", 0
            while seen < records:
                for _, entries in client.xread({"bench": last}, count=10 * PIPELINE):
                    seen += len([fields[b"v"] for _, fields in entries])
                    last = entries[-1][0]

        return Rates(records / timed(publish), records / timed(consume))


# NATS.


def nats_rates(folder: str, records: int, size: int) -> Rates:
    port = free_port()
    with server(["nats-server", "-js", "-a", "127.0.0.1", "-p", str(port), "-sd", folder], port):
        return asyncio.run(nats_clients(port, records, size))


async def nats_clients(port: int, records: int, size: int) -> Rates:
    nats: Any = importlib.import_module("nats")

    client = await nats.connect(f"nats://127.0.0.1:{port}")
    stream = client.jetstream(publish_async_max_pending=4 * PIPELINE)
    await stream.add_stream(name="bench", subjects=["bench"])
    value = value_of(size)
    began = time.perf_counter()
    for _ in range(records):
        await stream.publish_async("bench", value)
    await stream.publish_async_completed()
    published = time.perf_counter() - began
    config = nats.js.api.ConsumerConfig(ack_policy=nats.js.api.AckPolicy.ALL)
    subscription = await stream.pull_subscribe("bench", durable="bench", config=config)
    seen = 0
    began = time.perf_counter()
    while seen < records:
        messages = await subscription.fetch(PIPELINE, timeout=5)
        seen += len([message.data for message in messages])
        await messages[-1].ack()
    consumed = time.perf_counter() - began
    await client.close()
    return Rates(records / published, records / consumed)


# Kafka.


def kafka_rates(folder: str, records: int, size: int) -> Rates:  # noqa: ARG001 (it has its own)
    kafka: Any = importlib.import_module("confluent_kafka")

    server = {"bootstrap.servers": os.environ["KAFKA_BOOTSTRAP"]}
    topic = f"bench-{random.getrandbits(48):012x}"
    value = value_of(size)
    producer = kafka.Producer({**server, "acks": "all", "linger.ms": 5, "batch.num.messages": 10_000})

    def publish() -> None:
        for _ in range(records):
            while True:
                try:
                    producer.produce(topic, value)
                    break
                except BufferError:
                    producer.poll(0.01)
        producer.flush()

    published = timed(publish)
    consumer = kafka.Consumer({**server, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    seen = len(consumer.consume(1, START_TIMEOUT_S))

    def consume() -> None:
        nonlocal seen
        while seen < records:
            seen += len([message.value() for message in consumer.consume(10 * PIPELINE, 5)])

    consumed = timed(consume)
    consumer.close()
    return Rates(records / published, records / consumed)


# What is there, and how it is started.


def nothing_absent() -> str:
    return ""


def needs(command: str, package: str) -> Callable[[], str]:
    def absent() -> str:
        if shutil.which(command) is None:
            return f"there is no {command} in the path"
        return package_absent(package)

    return absent


def kafka_absent() -> str:
    if not os.environ.get("KAFKA_BOOTSTRAP"):
        return "KAFKA_BOOTSTRAP names no Kafka that runs"
    return package_absent("confluent_kafka")


def package_absent(package: str) -> str:
    if importlib.util.find_spec(package) is None:
        return f"the Python package {package} is not installed"
    return ""


PEERS = (
    Peer("Braid", "fsync", nothing_absent, partial(braid_rates, durability=Durability.FSYNC)),
    Peer("Braid", "page cache", nothing_absent, partial(braid_rates, durability=Durability.MEMORY)),
    Peer("Redis Streams", "fsync", needs("redis-server", "redis"), partial(redis_rates, appendfsync="always")),
    Peer(
        "Redis Streams",
        "fsync every second",
        needs("redis-server", "redis"),
        partial(redis_rates, appendfsync="everysec"),
    ),
    Peer("NATS JetStream", "page cache", needs("nats-server", "nats"), nats_rates),
    Peer("Kafka", "as its broker says", kafka_absent, kafka_rates),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def server(command: list[str], port: int, environment: dict[str, str] | None = None) -> Iterator[None]:
    """Run a server, and all processes that it starts, during the block. The caller owns its folder."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    )
    try:
        give_up_at = time.monotonic() + START_TIMEOUT_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise SystemExit(f"{command[0]} did not start")
            time.sleep(0.05)
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def value_of(size: int) -> bytes:
    return random.Random(7).randbytes(size)


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records: shows that it runs, not how fast")
    records = 5_000 if parser.parse_args().quick else 200_000
    report = Report("peers")
    for peer in PEERS:
        if reason := peer.absent():
            print(f"{peer.name} ({peer.durability}) is skipped: {reason}.", flush=True)
            continue
        for size in SIZES:
            # Braid needs more records to run for as long as the others do.
            count = records * 20 if peer.name == "Braid" and size == SIZES[0] else records
            with TemporaryDirectory(prefix="braid-bench-") as folder:
                rates = peer.measure(folder, count, size)
            for case, rate in rates._asdict().items():
                report.add(case, rate, "records/s", system=peer.name, durability=peer.durability, record=size)
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
