"""`braid bench segments`: the cost of many segments that are almost idle.

The benchmark starts a broker and makes a topic of many segments, each with a few records. It kills the broker and
starts it again, leaves it alone for a while, and drains it to a second broker.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import click
import msgspec

from braid.cli.bench.machine import cpu_s, machine_facts, machine_text, rss_bytes
from braid.cli.target import Target, ask
from braid.cli.terminal.output import Column, bytes_text, json_option, print_json, print_table
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnBroker, OwnCluster
    from braid.client.client import Client

TOPIC: Final = "bench"
RECORDS_PER_SEGMENT: Final = 20
SETTLE_S: Final = 2.0
LOOK_S: Final = 0.05
PATIENCE_S: Final = 300.0


@click.command()
@click.option("--segments", "count", type=click.IntRange(min=1), default=1_000, show_default=True, metavar="N")
@click.option(
    "--storage",
    type=click.Choice(["shared_fs", "local"]),
    default="shared_fs",
    show_default=True,
    help="Whether the brokers share a folder for history, or copy it to each other.",
)
@click.option(
    "--idle",
    "idle_s",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="How long to watch the broker do nothing.",
)
@json_option
def segments(count: int, storage: str, idle_s: float, as_json: bool) -> None:
    """Start a broker that has many segments, leave it alone, and drain it to another.

    \b
    braid bench segments
    braid bench segments --segments 100 --storage local
    """
    with status_line(f"{count} segments") as show:
        measured = measure_segments(count, storage, idle_s, show)
    if as_json:
        print_json({"bench": "segments", "machine": machine_facts(), "results": [measured]})
        return
    rows = [
        ("create the topic", f"{measured.create_s:.2f} s"),
        (f"publish {RECORDS_PER_SEGMENT * count:,} records to all of them", f"{measured.publish_s:.2f} s"),
        ("ready again after kill -9, all segments served", f"{measured.start_s:.2f} s"),
        ("memory of the broker", f"{measured.rss_bytes / 1e6:,.0f} MB"),
        ("processor of the idle broker", f"{measured.idle_cpu:.2%} of a core"),
        ("drain to the other broker", f"{measured.drain_s:.2f} s, {count / measured.drain_s:,.0f} segments/s"),
        ("processor of the other broker, idle", f"{measured.idle_cpu_after:.2%} of a core"),
    ]
    print_table([Column(f"{count:,} segments, {storage}"), Column("", right=True)], rows, empty="")
    click.echo(f"\n{machine_text('two brokers of its own')}")


class Measured(msgspec.Struct, frozen=True, rename="camel"):
    segments: int
    storage: str
    create_s: float
    publish_s: float
    start_s: float
    """From the start of the process until every segment is served."""
    rss_bytes: int
    idle_cpu: float
    drain_s: float
    idle_cpu_after: float


def measure_segments(count: int, storage: str, idle_s: float, show: Callable[[str], None]) -> Measured:
    from braid.cli.bench.broker import own_cluster

    with own_cluster(2, shared=storage == "shared_fs", start=1) as cluster:
        first, second = cluster.brokers.values()
        show("creating the topic")
        target = Target(url=first.url)
        create_s = _timed(lambda: ask(target, lambda client: _create(client, count)))
        publish_s = _timed(lambda: ask(target, lambda client: _publish(client, count)))
        show("starting the broker again")
        first.kill()
        start_s = _timed(lambda: _start(first, target, count))
        show("watching it do nothing")
        time.sleep(SETTLE_S)
        idle_cpu, memory_bytes = _idle_cpu(first, idle_s), rss_bytes(first.pid)
        second.start()
        show("draining it")
        drain_s = _timed(lambda: ask(Target(url=cluster.url), _drain))
        show("watching the other do nothing")
        time.sleep(SETTLE_S)
        idle_cpu_after = _idle_cpu(second, idle_s)
    return Measured(
        segments=count,
        storage=storage,
        create_s=create_s,
        publish_s=publish_s,
        start_s=start_s,
        rss_bytes=memory_bytes,
        idle_cpu=idle_cpu,
        drain_s=drain_s,
        idle_cpu_after=idle_cpu_after,
    )


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _idle_cpu(broker: OwnBroker, idle_s: float) -> float:
    before, began = cpu_s(broker.pid), time.perf_counter()
    time.sleep(idle_s)
    return (cpu_s(broker.pid) - before) / (time.perf_counter() - began)


def _start(broker: OwnBroker, target: Target, count: int) -> None:
    broker.start()
    ask(target, lambda client: _served(client, count))


async def _create(client: Client, count: int) -> None:
    await client.admin.create_topic(TOPIC, segments=count)
    await _served(client, count)


async def _served(client: Client, count: int) -> None:
    """Wait until every segment is available."""
    while True:
        found = (await client.admin.topic_stats(TOPIC))["segments"]
        if len(found) == count and all(each["unavailable"] is None for each in found.values()):
            return
        await asyncio.sleep(LOOK_S)


async def _publish(client: Client, count: int) -> None:
    async with client.producer(TOPIC) as producer:
        await producer.send_many([(b"%d" % number, b"value") for number in range(RECORDS_PER_SEGMENT * count)])


async def _drain(client: Client) -> None:
    state = await client.admin.drain("broker-1")
    while state["state"] != "drained":
        await asyncio.sleep(LOOK_S)
        (state,) = [each for each in await client.admin.brokers() if each["id"] == "broker-1"]


# Replicas, a part of `braid bench replication`. Each of three brokers owns a third of the segments, and follows the
# rest. They do nothing for a while. Then one broker is killed, and the replicas of a third of the segments vote.


class ManyReplicas(msgspec.Struct, frozen=True, rename="camel"):
    segments: int
    create_s: float
    """Until all replicas of all segments hold everything."""
    idle_cpu: list[float]
    """Of a core, for each broker."""
    rss_bytes: list[int]
    detected_s: float
    """From the kill of a broker until it is not registered any more."""
    served_s: float
    """From the kill until all its segments are served again."""

    def __str__(self) -> str:
        return (
            f"{self.segments:,} segments with three replicas each: in sync after {self.create_s:.1f} s; each broker "
            f"takes {max(self.idle_cpu):.2%} of a core at most while idle, {bytes_text(max(self.rss_bytes))} at most\n"
            f"one broker killed: noticed after {self.detected_s:.2f} s, all served again after {self.served_s:.2f} s"
        )


def measure_many(
    cluster: OwnCluster, count: int, replicas: int, confirm: int, idle_s: float, show: Callable[[str], None]
) -> ManyReplicas:
    target = Target(url=cluster.url)
    show(f"{count} replicated segments: creating them")
    began = time.perf_counter()
    ask(target, lambda client: _create_replicated(client, count, replicas, confirm))
    create_s = time.perf_counter() - began
    show("watching them do nothing")
    time.sleep(SETTLE_S)
    brokers = list(cluster.brokers.values())
    before, began = [cpu_s(each.pid) for each in brokers], time.perf_counter()
    time.sleep(idle_s)
    passed_s = time.perf_counter() - began
    idle_cpu = [(cpu_s(each.pid) - cpu) / passed_s for each, cpu in zip(brokers, before)]
    memory = [rss_bytes(each.pid) for each in brokers]
    show("killing one of the brokers")
    name, lost = next(iter(cluster.brokers.items()))
    lost.kill()
    killed = time.perf_counter()
    others = Target(url=brokers[1].url)
    detected_s = ask(others, lambda client: _until_gone(client, name)) - killed
    ask(others, lambda client: _served(client, count))
    served_s = time.perf_counter() - killed
    return ManyReplicas(count, create_s, idle_cpu, memory, detected_s, served_s)


async def _create_replicated(client: Client, count: int, replicas: int, confirm: int) -> None:
    await client.admin.create_topic(TOPIC, segments=count, replicas=replicas, confirm=confirm)
    await _served(client, count)
    await _publish(client, count)
    deadline = time.perf_counter() + PATIENCE_S
    while not await _in_sync(client):
        if time.perf_counter() > deadline:
            raise click.ClickException(f"the replicas of {TOPIC} are not in sync after {PATIENCE_S:g} s")
        await asyncio.sleep(LOOK_S)


async def _in_sync(client: Client) -> bool:
    segments = (await client.admin.topic_replicas(TOPIC))["segments"].values()
    replicas = [each for segment in segments for each in segment["replicas"]]
    return all(each["state"] in ("owner", "in-sync") and not each["behind"] for each in replicas)


async def _until_gone(client: Client, broker: str) -> float:
    while any(each["id"] == broker and each["state"] != "down" for each in await client.admin.brokers()):  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    return time.perf_counter()
