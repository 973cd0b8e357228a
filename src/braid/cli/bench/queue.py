"""`braid bench queue`: what a queue subscription can do, on one broker, at `fsync`.

    held      the broker's memory for each message that a consumer has and has not settled
    rates     messages that one consumer receives and acks in a second, by its prefetch
    returned  the time from the nack of a message, with no delay, until it is delivered again, at a steady rate
    opened    the time that a killed broker needs to open a segment whose queue has settled and leased messages

Consumers are separate processes. A rate is that of one consumer, which shares the machine with the broker. An opening
is timed from the start of the broker's process until a consumer has a message. The benchmark times it with the same log
twice: when the topic has no queue, and when its queue has been used, with a message that is new. The difference is the
queue's part. From the same start it also times a message that a dead consumer had: the new owner holds those back for a
moment, because their consumers may come back.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import click
import msgspec

from braid.cli.bench.machine import cpu_s, machine_facts, machine_text, rss_bytes
from braid.cli.bench.workload import QueueConsume, QueueHold, QueueReturn
from braid.cli.target import Target, ask
from braid.cli.terminal.output import Column, json_option, print_json, print_table
from braid.cli.terminal.param_types import SIZE
from braid.cli.terminal.spinner import status_line

if TYPE_CHECKING:
    from braid.cli.bench.broker import OwnBroker
    from braid.client.client import Client

T = TypeVar("T")

TOPIC: Final = "bench"
LARGE, SMALL = 1_000, 10
"""Prefetches."""
SMALL_SHARE: Final = 4
WAITING_SHARE: Final = 10
"""With a small prefetch, and where acks wait for the disk, a fraction of the messages takes as long."""
ACK_TIMEOUT_MS: Final = 600_000
"""No lease may run out while the benchmark works."""
HELD: Final = 90_000
ALONE_SHARE: Final = 2
"""Half of the leased messages stand alone between settled ones."""
START_PATIENCE_S: Final = 120.0

BARS: Final = {"large": 100_000.0, "small": 30_000.0, "p99_ms": 20.0, "open_s": 1.0, "held_bytes": 200.0}


@click.command()
@click.option(
    "--messages",
    type=click.IntRange(min=100),
    default=400_000,
    show_default=True,
    metavar="N",
    help=f"Of a round with a prefetch of {LARGE:,}; the others take fewer.",
)
@click.option("--rounds", type=click.IntRange(min=1), default=5, show_default=True, help="How often each is measured.")
@click.option(
    "--rate",
    type=click.FloatRange(min=1),
    default=1_000,
    show_default=True,
    metavar="N",
    help="Nacks per second, while redeliveries are timed.",
)
@click.option(
    "--duration",
    "duration_s",
    type=click.FloatRange(min=0.1),
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    help="How long redeliveries are timed in each round.",
)
@click.option(
    "--settled",
    type=click.IntRange(min=100),
    default=1_000_000,
    show_default=True,
    metavar="N",
    help="Settled messages in the segment whose opening is timed.",
)
@click.option(
    "--leased",
    type=click.IntRange(min=2, max=HELD),
    default=10_000,
    show_default=True,
    metavar="N",
    help="Leased messages there.",
)
@click.option("--size", type=SIZE, default=100, show_default=True, help="Bytes of a value.")
@json_option
def queue(
    messages: int,
    rounds: int,
    rate: float,
    duration_s: float,
    settled: int,
    leased: int,
    size: int,
    as_json: bool,
) -> None:
    """Start a broker, and measure queues: rates, redelivery, opening after a crash, memory. It takes some minutes.

    \b
    braid bench queue
    braid bench queue --rounds 1 --messages 100000 --settled 100000 --leased 1000
    """
    case = QueueCase(messages, rounds, rate, duration_s, settled, leased, size)
    with status_line("queue") as show:
        result = measure_queue(case, show)
    print_result(result, as_json=as_json)


class QueueCase(msgspec.Struct, frozen=True):
    messages: int
    rounds: int
    rate: float
    duration_s: float
    settled: int
    leased: int
    size: int


class QueueRate(msgspec.Struct, frozen=True, rename="camel"):
    """One way to consume, a number for each round."""

    prefetch: int
    ack: str
    messages: int
    per_s: list[float]
    client_us: list[float]
    """Processor time for each message."""
    broker_us: list[float]


class QueueResult(msgspec.Struct, frozen=True, rename="camel"):
    message_bytes: int
    rates: list[QueueRate]
    return_rate: float
    returned_ms: dict[str, float]
    settled: int
    ranges: int
    """Of the settled messages, so many ranges are out of order."""
    leased: int
    start_s: list[float]
    """From the start of the broker's process until a consumer has a message of the log, without a queue."""
    open_s: list[float]
    """The same with a message of the queue that was written after the start."""
    held_back_s: list[float]
    """The same with a message that a dead consumer had."""
    held: int
    held_bytes: float
    """The broker's memory for each of these messages."""


class Verdict(NamedTuple):
    value: float
    bar: float
    at_least: bool
    unit: str

    @property
    def met(self) -> bool:
        return self.value >= self.bar if self.at_least else self.value <= self.bar


def measure_queue(case: QueueCase, show: Callable[[str], None]) -> QueueResult:
    from braid.cli.bench.broker import own_broker

    with own_broker() as broker:
        held = min(HELD, case.messages)
        held_bytes = _held_bytes(broker, held, case.size, show)
        rates = [_rates(broker, case, prefetch, waits, show) for waits in (False, True) for prefetch in (LARGE, SMALL)]
        show(f"{case.rate:,.0f} nacks/s")
        returned_ms = _returned_ms(broker, case)
        hold, start_s, openings = _open_times(broker, case, show)
    return QueueResult(
        message_bytes=case.size,
        rates=rates,
        return_rate=case.rate,
        returned_ms=returned_ms,
        settled=hold.messages - hold.kept,
        ranges=len(range(0, hold.messages - hold.last, hold.stride)),
        leased=hold.kept,
        start_s=start_s,
        open_s=[each.new_s for each in openings],
        held_back_s=[each.held_back_s for each in openings],
        held=held,
        held_bytes=held_bytes,
    )


# Memory.


def _held_bytes(broker: OwnBroker, count: int, size: int, show: Callable[[str], None]) -> float:
    """Hold few messages, then many: the difference is free of what the first ones cost once."""
    from braid.cli.bench.measure import worker

    target = Target(url=broker.url)
    few = max(1, count // 10)
    with _filled(target, count, size, ("few", "many")) as topic:
        show(f"holding {count:,} messages")

        def hold(subscription: str, messages: int) -> QueueHold:
            return QueueHold(target=target, topic=topic, subscription=subscription, messages=messages, stride=1, last=0)

        with worker(hold("few", few)) as first:
            first.wait_ready()
            before = rss_bytes(broker.pid)
            with worker(hold("many", count)) as second:
                second.wait_ready()
                return (rss_bytes(broker.pid) - before) / count


# Rates.


def _rates(broker: OwnBroker, case: QueueCase, prefetch: int, waits: bool, show: Callable[[str], None]) -> QueueRate:
    from braid.cli.bench.measure import run_worker

    ack = "ack" if waits else "submit_ack"
    messages = max(1, case.messages // (SMALL_SHARE if prefetch == SMALL else 1) // (WAITING_SHARE if waits else 1))
    target = Target(url=broker.url)
    found = QueueRate(prefetch, ack, messages, [], [], [])
    subscriptions = [f"round-{number}" for number in range(case.rounds)]
    with _filled(target, messages + 2 * prefetch, case.size, subscriptions) as topic:
        for number, subscription in enumerate(subscriptions, 1):
            show(f"prefetch {prefetch:,}, {ack}: round {number} of {case.rounds}")
            watch = _BrokerTime(broker)
            work = QueueConsume(
                target=target,
                topic=topic,
                subscription=subscription,
                messages=messages,
                prefetch=prefetch,
                waits=waits,
            )
            done = run_worker(work, watch)
            found.per_s.append(done.rate)
            found.client_us.append(done.cpu_s / messages * 1e6)
            found.broker_us.append(watch.used_s() / messages * 1e6)
    return found


class _BrokerTime:
    """The broker's processor time since the worker began: an `Observer`."""

    def __init__(self, broker: OwnBroker) -> None:
        self._broker = broker
        self._began_s = 0.0

    def on_ready(self) -> None:
        self._began_s = cpu_s(self._broker.pid)

    def on_progress(self, records: int) -> None:
        pass

    def used_s(self) -> float:
        return cpu_s(self._broker.pid) - self._began_s


# Redelivery.


def _returned_ms(broker: OwnBroker, case: QueueCase) -> dict[str, float]:
    from braid.cli.bench.measure import run_worker

    target = Target(url=broker.url)
    messages = int(case.rate * case.duration_s) + 2 * LARGE
    with _filled(target, messages, case.size, ("returned",)) as topic:
        work = QueueReturn(
            target=target, topic=topic, subscription="returned", rate=case.rate, duration_s=case.duration_s
        )
        return run_worker(work).latency_ms


# Opening.


class _Opening(NamedTuple):
    """Seconds from the start of the broker's process."""

    new_s: float
    """Until a consumer has a message that was written after the start."""
    held_back_s: float
    """Until it has a message that a dead consumer had."""


def _open_times(
    broker: OwnBroker, case: QueueCase, show: Callable[[str], None]
) -> tuple[QueueHold, list[float], list[_Opening]]:
    from braid.cli.bench.measure import worker

    target = Target(url=broker.url)
    messages = case.settled + case.leased
    alone = max(1, case.leased // ALONE_SHARE)
    hold = QueueHold(
        target=target,
        topic=TOPIC,
        subscription="opened",
        messages=messages,
        stride=max(2, messages // alone),
        last=case.leased - alone,
    )
    with _filled(target, messages, case.size, (), name=TOPIC):
        show(f"starting the broker with {messages:,} messages")
        ask(target, _first_record)  # So that this process has imported everything.
        start_s = [_restarted(broker, _until_first_record) for _ in range(case.rounds)]
        ask(target, lambda client: _subscribe(client, TOPIC, hold.subscription))
        show(f"settling {case.settled:,} messages")
        with worker(hold) as holder:
            holder.wait_ready()
            show("starting the broker with the queue")
            broker.kill()
        openings = [_restarted(broker, partial(_until_messages, hold)) for _ in range(case.rounds)]
        ask(target, lambda client: _check_left(client, hold))
    return hold, start_s, openings


def _restarted(broker: OwnBroker, measure: Callable[[float, Client], Coroutine[Any, Any, T]]) -> T:
    """Kill the broker, start it, and return what is measured from its start on."""
    broker.end()
    began = time.perf_counter()
    broker.start()
    return ask(Target(url=broker.url), partial(measure, began))


async def _first_record(client: Client) -> None:
    async with client.checkpoint_consumer(TOPIC, start="earliest") as consumer:
        assert await consumer.receive_batch(START_PATIENCE_S) is not None


async def _until_first_record(began: float, client: Client) -> float:
    await _first_record(client)
    return time.perf_counter() - began


async def _until_messages(hold: QueueHold, began: float, client: Client) -> _Opening:
    seen_s: dict[bool, float] = {}
    room = hold.kept + 1  # On a machine so slow that the old messages come first, there is room for all of them.
    async with client.producer(TOPIC) as producer, client.queue_consumer(TOPIC, "opened", prefetch=room) as consumer:
        await producer.send(b"new")
        while len(seen_s) < 2:
            message = await consumer.receive(START_PATIENCE_S)
            assert message is not None
            is_new = message.offset >= hold.messages
            seen_s.setdefault(is_new, time.perf_counter() - began)
            if is_new:
                consumer.submit_ack(message)
    return _Opening(new_s=seen_s[True], held_back_s=seen_s[False])


async def _check_left(client: Client, hold: QueueHold) -> None:
    """See that the queue hands out exactly what was not settled."""
    expected = {number for number in range(hold.messages) if hold.keeps(number)}
    async with client.queue_consumer(TOPIC, "opened", prefetch=LARGE) as consumer:
        found = set[int]()
        while len(found) < len(expected) and (message := await consumer.receive(START_PATIENCE_S)) is not None:
            found.add(message.offset)
            consumer.submit_ack(message)
        await consumer.flush()
    if found != expected:
        raise click.ClickException(
            f"{len(expected - found):,} messages are lost, and {len(found - expected):,} came again that were settled"
        )


# Topics.


@contextmanager
def _filled(target: Target, messages: int, size: int, subscriptions: Sequence[str], name: str = "") -> Iterator[str]:
    """Make a topic of one segment with so many messages, and queue subscriptions at its beginning."""
    from braid.cli.bench.measure import fill

    topic = name or f"{TOPIC}-{time.monotonic_ns():x}"

    async def create(client: Client) -> None:
        await client.admin.create_topic(topic, segments=1)
        for subscription in subscriptions:
            await _subscribe(client, topic, subscription)

    ask(target, create)
    fill(target, topic, messages, size)
    yield topic
    ask(target, lambda client: client.admin.delete_topic(topic, force=True))


async def _subscribe(client: Client, topic: str, subscription: str) -> None:
    await client.admin.create_subscription(
        topic, subscription, kind="queue", start="earliest", ack_timeout_ms=ACK_TIMEOUT_MS
    )


# The results.


def print_result(result: QueueResult, *, as_json: bool) -> None:
    verdicts = verdicts_of(result)
    if as_json:
        shown = {name: {**each._asdict(), "met": each.met} for name, each in verdicts.items()}
        print_json({"bench": "queue", "machine": machine_facts(), "results": [result], "verdicts": shown})
        return
    columns = [Column("consume"), Column("prefetch", right=True)]
    names = ("messages/s", "best", "client µs", "broker µs")
    columns += [Column(name, right=True) for name in names]
    print_table(columns, map(_cells, result.rates), empty="nothing was measured")
    click.echo()
    start_s, open_s = statistics.median(result.start_s), statistics.median(result.open_s)
    times = result.returned_ms
    rows = [
        (
            f"nack to redelivery, {result.return_rate:,.0f}/s",
            f"p50 {times['p50']:.1f} ms, p99 {times['p99']:.1f} ms, worst {times['worst']:.1f} ms",
        ),
        (
            f"kill -9 to a new message, {result.settled:,} settled in {result.ranges:,} ranges, "
            f"{result.leased:,} leased",
            f"{open_s:.2f} s",
        ),
        ("the same, to a message that a dead consumer had", f"{statistics.median(result.held_back_s):.2f} s"),
        ("the same log without a queue", f"{start_s:.2f} s"),
        (f"memory for each of {result.held:,} leased messages", f"{result.held_bytes:.0f} B"),
    ]
    print_table([Column("one broker, fsync"), Column("", right=True)], rows, empty="")
    for name, each in verdicts.items():
        within = "within" if each.met else "not within"
        sign = "≥" if each.at_least else "≤"
        value = f"{each.value:,.2f}" if each.value < 100 else f"{each.value:,.0f}"
        click.echo(f"{name}: {value} {each.unit} ({within} {sign} {each.bar:,g}).")
    click.echo(f"\n{machine_text('its own broker')} Medians of {len(result.start_s)}.")


def verdicts_of(result: QueueResult) -> dict[str, Verdict]:
    """Return, by name, what was measured beside what a queue has to do. Rates are those of acks that are submitted."""
    large, small = (statistics.median(each.per_s) for each in result.rates[:2])
    opening_s = max(statistics.median(result.open_s) - statistics.median(result.start_s), 0.0)
    return {
        f"consume + ack, prefetch {LARGE:,}": Verdict(large, BARS["large"], True, "messages/s"),
        f"consume + ack, prefetch {SMALL}": Verdict(small, BARS["small"], True, "messages/s"),
        "nack to redelivery, p99": Verdict(result.returned_ms["p99"], BARS["p99_ms"], False, "ms"),
        "opening, the queue's part": Verdict(opening_s, BARS["open_s"], False, "s"),
        "memory of a leased message": Verdict(result.held_bytes, BARS["held_bytes"], False, "B"),
    }


def _cells(rate: QueueRate) -> list[str]:
    return [
        f"receive, {rate.ack}",
        f"{rate.prefetch:,}",
        f"{statistics.median(rate.per_s):,.0f}",
        f"{max(rate.per_s):,.0f}",
        f"{statistics.median(rate.client_us):.1f}",
        f"{statistics.median(rate.broker_us):.1f}",
    ]
