"""Kafka with three nodes beside Braid with three brokers, in one run: `make bench-kafka`, or
`python -m benchmarks.kafka_replicas [--quick]`

The benchmark needs a folder KAFKA_HOME with a Kafka 4 (its `libs`), `java`, and the Python package `confluent-kafka`.
It says so and ends if one of them is absent. Neither Braid nor its tests need anything here.

Both clusters run on this machine, and are measured in turns:

- **publish**: records per second with batches of 256 KiB, each system by its own Python client;
- **latency**: from the time at which a record was due until a consumer has it, at 1,000 records per second;
- **fail-over**: from the loss of the leader until a record is confirmed again, at 1,000 records per second.

Each system has a first, short round that does not count, because Java compiles while it runs.

The systems differ in what a confirm says. Read each row with these differences in mind:

- Braid confirms a record when two of three *disks* have it. Kafka with `acks=all` and `min.insync.replicas=2` confirms
  a record when *all replicas that are in sync* have it, which are three here and at least two.
- Kafka leaves the sync to the operating system. So a second row sets `flush.messages=1`, with which each replica syncs
  each batch, as Braid does.
- Kafka notices a lost broker by its silence: `broker.session.timeout.ms`, 9 s by default. Braid has a lease of 10 s.
  With SQLite a file lock shows immediately that a *process* has died. A lost machine, or Braid with etcd, waits for the
  end of the lease. So Kafka is measured with its 9 s and with the time of Braid's lease, and both systems are also
  measured with a leader that is *frozen* (SIGSTOP): then the lease counts against the session.
- A Kafka node here is a broker and a controller, so a killed leader may also be the active controller. Three brokers of
  Braid share one SQLite file.
- Kafka's consumer commits no offsets here. Braid's consumer acknowledges each batch.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, NoReturn, Protocol

import click

from benchmarks.kafka_cluster import KafkaCluster, home_version, kafka_absent, own_kafka
from benchmarks.report import Report
from braid.broker.config import BrokerConfig
from braid.cli.bench.broker import OwnCluster, own_cluster
from braid.cli.bench.machine import cpu_s
from braid.cli.bench.measure import WORKER, measure_latency, measure_publish
from braid.cli.bench.replication import (
    BATCH_BYTES,
    BROKERS,
    CONFIRM,
    RATE,
    REPLICATED,
    FailOver,
    braid_fail_overs,
    create_topic,
    measure_fail_overs,
)
from braid.cli.bench.worker import WARM_UP_SHARE
from braid.cli.bench.workload import Mode, SteadySend
from braid.cli.target import Target, ask

KAFKA_WORKER: Final = "benchmarks.kafka_worker"
KAFKA_SESSION_S: Final = 9.0
"""Kafka's default of `broker.session.timeout.ms`."""
LIMIT_S: Final = 600
"""How long the whole benchmark may take."""


class Load(NamedTuple):
    rounds: int
    publish_bytes: int
    size: int
    seconds: float
    kills: int


class Rates(NamedTuple):
    publish: float
    """Confirmed records per second."""
    client_us: float
    """Processor time of the producer's process for each of them."""
    brokers_us: float
    """Processor time of the three brokers for each of them."""
    p50_ms: float
    p99_ms: float


CASES: Final = (
    ("publish", "records/s"),
    ("processor of the client", "µs/record"),
    ("processor of the brokers", "µs/record"),
    ("p50 at 1,000/s", "ms"),
    ("p99 at 1,000/s", "ms"),
)
"""Name and unit of each field of `Rates`."""


class System(Protocol):
    name: str
    confirmed_by: str

    def measure(self, load: Load) -> Rates: ...


class BraidSystem:
    name = "Braid"
    confirmed_by = "2 of 3 disks"

    def __init__(self, cluster: OwnCluster) -> None:
        self._pids = [broker.pid for broker in cluster.brokers.values()]
        self._target = Target(url=cluster.url)
        ask(self._target, lambda client: create_topic(client, REPLICATED, replicated=True))

    def measure(self, load: Load) -> Rates:
        fresh = f"{REPLICATED}-latency"
        ask(self._target, lambda client: create_topic(client, fresh, replicated=True))
        try:
            return measured(self._target, REPLICATED, fresh, load, self._pids, WORKER)
        finally:
            ask(self._target, lambda client: client.admin.delete_topic(fresh, force=True))


class KafkaSystem:
    name = "Kafka"

    def __init__(self, cluster: KafkaCluster, *, fsync: bool) -> None:
        self.confirmed_by = "3 disks" if fsync else "3 page caches"
        self._fsync = fsync
        self._cluster = cluster
        self._topic = f"{REPLICATED}-{'fsync' if fsync else 'memory'}"
        cluster.create_topic(self._topic, CONFIRM, fsync=fsync)

    def measure(self, load: Load) -> Rates:
        fresh = f"{self._topic}-{os.urandom(4).hex()}"  # Kafka deletes a topic later than it says so.
        self._cluster.create_topic(fresh, CONFIRM, fsync=self._fsync)
        try:
            pids = [node.pid for node in self._cluster.nodes.values()]
            return measured(Target(url=self._cluster.servers()), self._topic, fresh, load, pids, KAFKA_WORKER)
        finally:
            self._cluster.delete_topic(fresh)


def measured(target: Target, topic: str, fresh: str, load: Load, pids: list[int], module: str) -> Rates:
    """Measure publishing to the topic, and then latency on a fresh one, where the consumer finds no older records."""
    records = max(1, load.publish_bytes // load.size)
    mode, size = Mode.SEND_TABLE, load.size
    before_s = sum(map(cpu_s, pids))
    done = measure_publish(target, topic, mode=mode, records=records, size=size, batch_bytes=BATCH_BYTES, module=module)
    brokers_s = sum(map(cpu_s, pids)) - before_s
    warmed = records + records // WARM_UP_SHARE
    latency = measure_latency(target, fresh, rate=RATE, duration_s=load.seconds, size=size, module=module).latency_ms
    return Rates(done.rate, done.cpu_s / records * 1e6, brokers_s / warmed * 1e6, latency["p50"], latency["p99"])


# The steps of the run.


def measure_rates(systems: Sequence[System], load: Load, report: Report) -> None:
    """Measure the systems in turns, and report medians and their ratio to the first system's."""
    taken: list[list[Rates]] = [[] for _ in systems]
    for system in systems:
        show(f"first round, which does not count: {system.name}, {system.confirmed_by}")
        system.measure(load._replace(publish_bytes=load.publish_bytes // 4, seconds=1.0))
    for number in range(load.rounds):
        for system, rates in zip(systems, taken):
            show(f"round {number + 1} of {load.rounds}: {system.name}, {system.confirmed_by}")
            rates.append(system.measure(load))
    medians = [median_rates(rates) for rates in taken]
    for (case, unit), values in zip(CASES, zip(*medians)):
        for system, value in zip(systems, values):
            facts = {"system": system.name, "confirmed_by": system.confirmed_by}
            report.add(case, value, unit, **facts, ratio=value / values[0])


def median_rates(rates: list[Rates]) -> Rates:
    return Rates(*(statistics.median(values) for values in zip(*rates)))


def kafka_fail_overs(cluster: KafkaCluster, load: Load, *, frozen: bool = False) -> tuple[list[FailOver], int]:
    topic = "fail-over-frozen" if frozen else "fail-over"
    cluster.create_topic(topic, CONFIRM, fsync=False)
    return measure_fail_overs(
        SteadySend(target=Target(url=cluster.servers()), topic=topic, rate=RATE, size=load.size),
        load.kills,
        lose_owner=lambda: cluster.lose_leader(topic, frozen=frozen),
        wait_until_back=lambda: cluster.wait_in_sync(topic),
        show=show,
        module=KAFKA_WORKER,
    )


def report_fail_overs(
    report: Report, system: str, lost: str, noticed_by: str, found: tuple[list[FailOver], int]
) -> None:
    fail_overs, errors = found
    facts = {"system": system, "leader": lost, "noticed_by": noticed_by}
    for case, values in (
        ("loss noticed", [each.detected_ms / 1_000 for each in fail_overs]),
        ("confirmed again", [each.confirmed_ms / 1_000 for each in fail_overs]),
    ):
        report.add(case, statistics.median(values), "s", **facts, worst=max(values), errors=errors)


def run(home: Path, load: Load, rates: Report, fail_overs: Report) -> None:
    add = partial(report_fail_overs, fail_overs)
    lease_s = BrokerConfig().lease_ttl_s
    with own_cluster(BROKERS, shared=True) as braid:
        with own_kafka(home, BROKERS, KAFKA_SESSION_S) as kafka:
            systems = (BraidSystem(braid), KafkaSystem(kafka, fsync=False), KafkaSystem(kafka, fsync=True))
            measure_rates(systems, load, rates)
            if not load.kills:
                return
            add("Braid", "killed", "file lock", braid_fail_overs(braid, load.kills, show))
            add("Kafka", "killed", f"session of {KAFKA_SESSION_S:g} s", kafka_fail_overs(kafka, load))
        with own_kafka(home, BROKERS, lease_s) as kafka:
            session = f"session of {lease_s:g} s"
            add("Kafka", "killed", session, kafka_fail_overs(kafka, load))
            frozen = braid_fail_overs(braid, load.kills, show, frozen=True)
            add("Braid", "frozen", f"lease of {lease_s:g} s", frozen)
            add("Kafka", "frozen", session, kafka_fail_overs(kafka, load, frozen=True))


def show(step: str) -> None:
    print(f"{step} (load {os.getloadavg()[0]:.1f})", flush=True)


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """End the block with an error after so many seconds, or when the process is asked to end."""

    def stop(number: int, _: object) -> NoReturn:
        reason = f"it took longer than {seconds} s" if number == signal.SIGALRM else "it was asked to"
        raise SystemExit(f"the benchmark ended early: {reason}")

    signal.signal(signal.SIGALRM, stop)
    signal.signal(signal.SIGTERM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def parse(arguments: list[str] | None) -> Load:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="of each system")
    parser.add_argument("--mib", type=int, default=100, help="that each round publishes")
    parser.add_argument("--size", type=int, default=100, help="of a record, in bytes")
    parser.add_argument("--seconds", type=float, default=5.0, help="of each latency")
    parser.add_argument("--kills", type=int, default=2, help="fail-overs of each cluster")
    parser.add_argument("--quick", action="store_true", help="few records: shows that it runs, not how fast")
    asked = parser.parse_args(arguments)
    if asked.quick:
        return Load(rounds=1, publish_bytes=5 << 20, size=asked.size, seconds=1.0, kills=1)
    return Load(asked.rounds, asked.mib << 20, asked.size, asked.seconds, asked.kills)


def main(arguments: list[str] | None = None) -> None:
    load = parse(arguments)
    if reason := kafka_absent(os.environ):
        print(f"Kafka is not measured: {reason}.")
        return
    home = Path(os.environ["KAFKA_HOME"])
    rates, fail_overs = Report("kafka-replicas"), Report("kafka-fail-overs")
    show(f"Kafka {home_version(home)} beside Braid, three brokers each, records of {load.size} B")
    try:
        with time_limit(LIMIT_S):
            run(home, load, rates, fail_overs)
    except click.ClickException as error:
        raise SystemExit(f"the benchmark ended early: {error.message}") from error
    finally:
        show("end")
        for report in (rates, fail_overs):
            if report.rows:
                report.print()
                report.write_jsonl()


if __name__ == "__main__":
    main()
