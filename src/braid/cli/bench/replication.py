"""`braid bench replication`: what replicas cost, and how long a fail-over takes.

Three brokers run on this machine. A topic that one disk confirms (`fsync`) and a topic that two of three disks confirm
are measured in turns, so that both see the same machine. Then the owner of the replicated topic is killed, again and
again, under a steady load. At last a follower that was away catches up.

- **publish**: records per second with batches of 256 KiB;
- **latency**: from the time at which a record was due until the consumer has it, at 1,000 records per second;
- **fail-over**: from the kill of the owner until a record is confirmed again. The cluster *detects* the loss when the
  killed broker is not registered any more;
- **catch-up**: bytes per second that a follower takes, beside a copy of as many bytes with one sync at the end. These
  brokers share no storage: otherwise a follower takes only what is not in chunks;
- **many segments**: what a thousand of them cost while they are idle, and how long their fail-over takes
  (segments.py).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import click
import msgspec

from braid.cli.bench.machine import machine_facts, machine_text
from braid.cli.bench.segments import ManyReplicas, measure_many
from braid.cli.bench.workload import Mode, SteadySend
from braid.cli.target import Target, ask
from braid.cli.terminal.output import Column, bytes_text, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnBroker, OwnCluster
    from braid.client.client import Client

BROKERS: Final = 3
CONFIRM: Final = 2
PLAIN: Final = "one-disk"
REPLICATED: Final = "two-of-three-disks"
CATCH_UP: Final = "catch-up"
RECORD_BYTES: Final = 100
BATCH_BYTES: Final = 256 << 10
RATE: Final = 1_000.0
LOOK_S: Final = 0.01
SETTLE_S: Final = 1.0
IDLE_S: Final = 60.0
PATIENCE_S: Final = 120.0


class Pair(msgspec.Struct, frozen=True, rename="camel"):
    """The same measurement of both topics, round by round."""

    plain: list[float]
    replicated: list[float]

    @property
    def ratio(self) -> float:
        return statistics.median(self.replicated) / statistics.median(self.plain)


class FailOver(msgspec.Struct, frozen=True, rename="camel"):
    detected_ms: float
    """From the kill until the broker is not registered any more."""
    confirmed_ms: float
    """From the kill until the next record is confirmed."""


class CatchUp(msgspec.Struct, frozen=True, rename="camel"):
    history_bytes: int
    follower_bytes_per_s: float
    copy_bytes_per_s: float

    @property
    def ratio(self) -> float:
        return self.follower_bytes_per_s / self.copy_bytes_per_s


class ReplicationResult(msgspec.Struct, frozen=True, rename="camel"):
    publish: Pair
    """Records per second."""
    latency_p50_ms: Pair
    latency_p99_ms: Pair
    fail_overs: list[FailOver]
    errors: int
    """That producers saw during fail-overs."""
    catch_up: CatchUp | None = None
    many: ManyReplicas | None = None


class _Load(NamedTuple):
    rounds: int
    publish_bytes: int
    latency_s: float
    kills: int


@click.command()
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Of each pair.")
@click.option("--publish", "publish_bytes", type=SIZE, default="200MiB", show_default=True, help="For each round.")
@click.option("--seconds", type=click.FloatRange(min=0.5), default=5, show_default=True, help="Of each latency.")
@click.option("--kills", type=click.IntRange(min=0), default=3, show_default=True, help="Fail-overs.")
@click.option("--catch-up", "catch_up_bytes", type=SIZE, default="1GiB", show_default=True, help="Of one follower.")
@click.option(
    "--segments", type=click.IntRange(min=0), default=1_000, show_default=True, help="That are idle. 0: leave them out."
)
@json_option
def replication(
    rounds: int, publish_bytes: int, seconds: float, kills: int, catch_up_bytes: int, segments: int, as_json: bool
) -> None:
    """Start three brokers, and compare a replicated topic with one that a single disk confirms.

    \b
    braid bench replication
    braid bench replication --rounds 1 --publish 10MiB --seconds 1 --kills 1 --catch-up 10MiB --segments 0
    """
    from braid.cli.bench.broker import own_cluster

    load = _Load(rounds, publish_bytes, seconds, kills)
    with status_line("replication") as show:
        with own_cluster(BROKERS, shared=True) as cluster:
            result = _measure(cluster, load, show)
        with own_cluster(BROKERS, shared=False) as cluster:
            caught_up = _catch_up(cluster, Target(url=cluster.url), catch_up_bytes, show)
            result = msgspec.structs.replace(result, catch_up=caught_up)
        if segments:
            with own_cluster(BROKERS, shared=True) as cluster:
                many = measure_many(cluster, segments, BROKERS, CONFIRM, IDLE_S, show)
                result = msgspec.structs.replace(result, many=many)
    _print(result, as_json=as_json)


def _measure(cluster: OwnCluster, load: _Load, show: Callable[[str], None]) -> ReplicationResult:
    target = Target(url=cluster.url)
    ask(target, lambda client: create_topic(client, PLAIN, replicated=False))
    ask(target, lambda client: create_topic(client, REPLICATED, replicated=True))
    publish, p50, p99 = (Pair([], []) for _ in range(3))
    for number in range(load.rounds):
        for topic in (PLAIN, REPLICATED):
            show(f"round {number + 1} of {load.rounds}, {topic}")
            _measure_once(target, topic, load, publish, p50, p99)
    fail_overs, errors = braid_fail_overs(cluster, load.kills, show) if load.kills else ([], 0)
    return ReplicationResult(publish, p50, p99, fail_overs, errors)


def _measure_once(target: Target, topic: str, load: _Load, publish: Pair, p50: Pair, p99: Pair) -> None:
    from braid.cli.bench.measure import measure_latency, measure_publish

    records = max(1, load.publish_bytes // RECORD_BYTES)
    mode = Mode.SEND_TABLE
    done = measure_publish(target, topic, mode=mode, records=records, size=RECORD_BYTES, batch_bytes=BATCH_BYTES)
    fresh = f"{topic}-latency"  # Its consumer must not find records of the measurement before.
    ask(target, lambda client: create_topic(client, fresh, replicated=topic == REPLICATED))
    latency = measure_latency(target, fresh, rate=RATE, duration_s=load.latency_s, size=RECORD_BYTES)
    ask(target, lambda client: client.admin.delete_topic(fresh, force=True))
    for pair, value in ((publish, done.rate), (p50, latency.latency_ms["p50"]), (p99, latency.latency_ms["p99"])):
        (pair.plain if topic == PLAIN else pair.replicated).append(value)


# Fail-overs.


def braid_fail_overs(
    cluster: OwnCluster, kills: int, show: Callable[[str], None], *, frozen: bool = False
) -> tuple[list[FailOver], int]:
    """Kill or freeze the owner of the replicated topic again and again. Count the errors that the producer saw, too."""
    target = Target(url=cluster.url)
    return measure_fail_overs(
        SteadySend(target=target, topic=REPLICATED, rate=RATE, size=RECORD_BYTES),
        kills,
        lose_owner=lambda: _lose_owner(cluster, target, frozen=frozen),
        wait_until_back=lambda: ask(target, lambda client: _in_sync(client, REPLICATED, behind=int(RATE))),
        show=show,
    )


def measure_fail_overs(
    load: SteadySend,
    kills: int,
    *,
    lose_owner: Callable[[], tuple[int, int]],
    wait_until_back: Callable[[], None],
    show: Callable[[str], None],
    module: str | None = None,
) -> tuple[list[FailOver], int]:
    """Measure how long records wait under this load. `lose_owner` returns when the owner was lost, and when the
    cluster had noticed that. `module` names a worker for another broker than Braid."""
    from braid.cli.bench.measure import WORKER, worker

    times: list[tuple[int, int]] = []
    with worker(load, module=module or WORKER) as sender:
        sender.wait_ready()
        time.sleep(SETTLE_S)
        for number in range(kills):
            show(f"fail-over {number + 1} of {kills}")
            times.append(lose_owner())
            time.sleep(SETTLE_S)
            wait_until_back()
        sender.stop()
        steady = sender.wait_done().steady
    assert steady is not None
    slack_ns = int(SETTLE_S * 1e9)
    found = [
        FailOver(
            detected_ms=(gone - killed) / 1e6, confirmed_ms=steady.longest_ms(killed - slack_ns // 10, gone + slack_ns)
        )
        for killed, gone in times
    ]
    return found, steady.errors


def _lose_owner(cluster: OwnCluster, target: Target, *, frozen: bool) -> tuple[int, int]:
    """Kill or freeze the owner, and start it again. Return when it was lost, and when the cluster had noticed that."""
    owner = ask(target, lambda client: _owner_of(client, REPLICATED))
    broker = cluster.brokers[owner]
    # A frozen broker accepts connections and never answers.
    others = Target(url=cluster.url_without(owner))
    lost = time.monotonic_ns()
    if frozen:
        os.kill(broker.pid, signal.SIGSTOP)
    else:
        broker.kill()
    ask(others, lambda client: _until(lambda: _is_gone(client, owner)))
    gone = time.monotonic_ns()
    broker.end()
    broker.start()
    return lost, gone


async def _is_gone(client: Client, broker: str) -> bool:
    return all(each["id"] != broker or each["state"] == "down" for each in await client.admin.brokers())


# Catching up.


def _catch_up(cluster: OwnCluster, target: Target, size: int, show: Callable[[str], None]) -> CatchUp:
    from braid.cli.bench.measure import measure_publish

    show("catch-up: filling")
    ask(target, lambda client: create_topic(client, CATCH_UP, replicated=True))
    owner = ask(target, lambda client: _owner_of(client, CATCH_UP))
    name, away = next((name, broker) for name, broker in cluster.brokers.items() if name != owner)
    away.kill()
    records = max(1, size // 1_000)
    measure_publish(
        target, CATCH_UP, mode=Mode.SEND_TABLE, records=records, size=1_000, batch_bytes=1 << 20, warm_up=False
    )
    show("catch-up: the follower is back")
    away.start()
    taken_s = ask(target, lambda client: _time_to_catch_up(client, name))
    show("catch-up: copying files")
    return CatchUp(size, size / taken_s, _copy_rate(cluster.brokers[owner], size))


def _copy_rate(broker: OwnBroker, size: int) -> float:
    """Return how fast as many bytes are copied from file to file, with one sync at the end."""
    source, copy = f"{broker.folder}/copied", f"{broker.folder}/copy"
    piece = os.urandom(1 << 20)
    with open(source, "wb") as file:
        file.writelines(piece for _ in range(max(1, size >> 20)))
    began = time.monotonic()
    with open(source, "rb") as file, open(copy, "wb") as to:
        shutil.copyfileobj(file, to, 1 << 20)
        os.fsync(to.fileno())
    taken_s = time.monotonic() - began
    os.remove(source)
    os.remove(copy)
    return max(1, size >> 20) * (1 << 20) / taken_s


async def _owner_of(client: Client, topic: str) -> str:
    owner: str = (await client.admin.topic_replicas(topic))["segments"]["0"]["owner"]
    return owner


async def create_topic(client: Client, topic: str, *, replicated: bool) -> None:
    if replicated:
        await client.admin.create_topic(topic, replicas=BROKERS, confirm=CONFIRM)
        await _in_sync(client, topic)
    else:
        await client.admin.create_topic(topic)


async def _time_to_catch_up(client: Client, follower: str) -> float:
    """Return the seconds from the first bytes that the follower gets until it holds everything."""

    async def has_begun() -> bool:
        replicas = (await client.admin.topic_replicas(CATCH_UP))["segments"]["0"]["replicas"]
        return any(each["broker"] == follower and each["state"] in ("in-sync", "behind") for each in replicas)

    await _until(has_begun)
    began = time.monotonic()
    await _in_sync(client, CATCH_UP)
    return time.monotonic() - began


async def _in_sync(client: Client, topic: str, *, behind: int = 0) -> None:
    """Return when all replicas hold the topic, but for so many records."""

    def holds_it(replica: dict[str, Any]) -> bool:
        return replica["state"] in ("owner", "in-sync") and (replica["behind"] or 0) <= behind

    async def all_hold_it() -> bool:
        found = (await client.admin.topic_replicas(topic))["segments"]["0"]
        return len(found["replicas"]) == BROKERS and all(map(holds_it, found["replicas"]))

    await _until(all_hold_it)


async def _until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await condition():  # noqa: ASYNC110 (other processes fulfil it)
            await asyncio.sleep(LOOK_S)


# The report.


def _print(result: ReplicationResult, *, as_json: bool) -> None:
    if as_json:
        print_json({"bench": "replication", "machine": machine_facts(), "result": result, "ratios": _ratios(result)})
        return
    columns = [Column("measured"), *(Column(name, right=True) for name in ("one disk", "2 of 3 disks", "ratio"))]
    pairs = (
        ("records/s, 256 KiB batches", result.publish, ",.0f"),
        ("p50 ms at 1,000/s", result.latency_p50_ms, ".2f"),
        ("p99 ms at 1,000/s", result.latency_p99_ms, ".2f"),
    )
    rows = [
        [
            name,
            format(statistics.median(pair.plain), form),
            format(statistics.median(pair.replicated), form),
            f"{pair.ratio:.2f}",
        ]
        for name, pair, form in pairs
    ]
    print_table(columns, rows, empty="nothing was measured")
    for each in result.fail_overs:
        click.echo(
            f"fail-over: noticed after {each.detected_ms:,.0f} ms, confirmed again after {each.confirmed_ms:,.0f} ms"
        )
    if result.fail_overs:
        click.echo(f"errors that producers saw: {result.errors}")
    if (caught := result.catch_up) is not None:
        click.echo(
            f"catch-up of {bytes_text(caught.history_bytes)}: {bytes_text(int(caught.follower_bytes_per_s))}/s, "
            f"{caught.ratio:.2f} of a plain copy"
        )
    if result.many is not None:
        click.echo(result.many)
    click.echo(f"\n{machine_text('three brokers of its own')} Medians of all rounds.")


def _ratios(result: ReplicationResult) -> dict[str, float]:
    ratios = {
        "publish": result.publish.ratio,
        "latencyP50": result.latency_p50_ms.ratio,
        "latencyP99": result.latency_p99_ms.ratio,
    }
    return ratios | ({"catchUp": result.catch_up.ratio} if result.catch_up is not None else {})
