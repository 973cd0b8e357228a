"""Braid's queues beside those of other brokers that are installed, in one run: `make bench-peers`, or `python -m
benchmarks.queue_peers [--quick]`

    RabbitMQ          Debian's package `rabbitmq-server` (quorum and durable queues), Python package `pika`
    Redis Streams     `redis-server` in the path (consumer groups), Python package `redis`

The benchmark skips a system that is absent, and says so. One consumer receives messages of 100 B, which were stored
before, and acks each of them. Each system runs as one server with one queue, and all rounds take turns.

The systems differ in what an ack means. Braid and Redis (`appendfsync always`) answer an ack when the disk has it, and
the clock stops when all acks are answered. RabbitMQ never answers acks: the clock stops when the server has counted
them. Redis has no prefetch: a consumer asks for as many messages, and acks them together.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from benchmarks.peer_servers import (
    needs,
    nothing_absent,
    package_version,
    rabbitmq,
    rabbitmq_needs,
    rabbitmq_version,
    redis,
    redis_version,
    value_of,
)
from benchmarks.report import Fact, Report
from braid.cli.bench.measure import fill, run_worker
from braid.cli.bench.workload import QueueConsume
from braid.cli.target import Target, ask
from braid.client.client import Client
from braid.testing.processes import BrokerProcess

SIZE = 100
PREFETCHES = (1_000, 10)
PIPELINE = 1_000
ROUNDS = 3
NAME = "bench"


class Peer(NamedTuple):
    name: str
    durability: str
    absent: Callable[[], str]
    """Returns why the system cannot be measured; empty if it can."""
    version: Callable[[], str]
    measure: Callable[[str, int, int], float]
    """Takes a folder, the number of messages and the prefetch; returns messages per second."""


# Braid.


def braid_rate(folder: str, messages: int, prefetch: int) -> float:
    async def create(client: Client) -> None:
        await client.admin.create_topic(NAME, segments=1)
        await client.admin.create_subscription(NAME, NAME, kind="queue")

    with BrokerProcess(Path(folder) / "data") as broker:
        target = Target(url=broker.url)
        ask(target, create)
        fill(target, NAME, messages + 1, SIZE)
        work = QueueConsume(
            target=target, topic=NAME, subscription=NAME, messages=messages, prefetch=prefetch, waits=False
        )
        return run_worker(work).rate


# RabbitMQ.


def rabbitmq_rate(folder: str, messages: int, prefetch: int, kind: str) -> float:
    pika: Any = importlib.import_module("pika")

    with rabbitmq(folder) as port:
        parameters = pika.ConnectionParameters("127.0.0.1", port, heartbeat=0)
        connection = pika.BlockingConnection(parameters)
        channel = connection.channel()
        channel.queue_declare(NAME, durable=True, arguments={"x-queue-type": kind})
        persistent = pika.BasicProperties(delivery_mode=2)
        value = value_of(SIZE)
        for _ in range(messages):
            channel.basic_publish("", NAME, value, persistent)
        while channel.queue_declare(NAME, passive=True).method.message_count < messages:
            time.sleep(0.1)
        done = 0

        def on_message(channel: Any, delivery: Any, properties: Any, body: bytes) -> None:  # noqa: ARG001
            nonlocal done
            channel.basic_ack(delivery.delivery_tag)
            done += 1
            if done == messages:
                channel.stop_consuming()

        channel.basic_qos(prefetch_count=prefetch)
        began = time.perf_counter()
        channel.basic_consume(NAME, on_message)
        channel.start_consuming()
        channel.queue_declare(NAME, passive=True)  # The server has taken the acks before this.
        seconds = time.perf_counter() - began
        connection.close()
        return messages / seconds


# Redis.


def redis_rate(folder: str, messages: int, prefetch: int) -> float:
    package: Any = importlib.import_module("redis")
    with redis(folder, "always") as port:
        client = package.Redis(port=port)
        value = value_of(SIZE)
        for first in range(0, messages, PIPELINE):
            with client.pipeline(transaction=False) as pipeline:
                for _ in range(first, min(first + PIPELINE, messages)):
                    pipeline.xadd(NAME, {"v": value})
                pipeline.execute()
        client.xgroup_create(NAME, NAME, "0")
        done = 0
        began = time.perf_counter()
        while done < messages:
            ((_, entries),) = client.xreadgroup(NAME, "consumer", {NAME: ">"}, count=prefetch)
            client.xack(NAME, NAME, *(entry for entry, _ in entries))
            done += len(entries)
        return messages / (time.perf_counter() - began)


def braid_version() -> str:
    return package_version("braidmq")


PEERS = (
    Peer("Braid", "fsync", nothing_absent, braid_version, braid_rate),
    Peer("RabbitMQ", "quorum", rabbitmq_needs("pika"), rabbitmq_version, partial(rabbitmq_rate, kind="quorum")),
    Peer("RabbitMQ", "durable", rabbitmq_needs("pika"), rabbitmq_version, partial(rabbitmq_rate, kind="classic")),
    Peer("Redis Streams", "fsync", needs("redis-server", "redis"), redis_version, redis_rate),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few messages: shows that it runs, not how fast")
    quick = parser.parse_args().quick
    messages, rounds = (1_000, 1) if quick else (50_000, ROUNDS)
    present = []
    for peer in PEERS:
        if reason := peer.absent():
            print(f"{peer.name} ({peer.durability}) is skipped: {reason}.", flush=True)
        else:
            present.append(peer)
    found: dict[tuple[Peer, int], list[float]] = {(peer, each): [] for each in PREFETCHES for peer in present}
    for _ in range(rounds):
        for (peer, prefetch), rates in found.items():
            with TemporaryDirectory(prefix="braid-bench-", ignore_cleanup_errors=True) as folder:
                rates.append(peer.measure(folder, messages if prefetch > 10 else messages // 5, prefetch))
    report = Report("queue_peers")
    for (peer, prefetch), rates in found.items():
        facts: dict[str, Fact] = {
            "version": peer.version(),
            "durability": peer.durability,
            "prefetch": prefetch,
            "best": max(rates),
        }
        report.add(peer.name, statistics.median(rates), "messages/s", **facts)
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
