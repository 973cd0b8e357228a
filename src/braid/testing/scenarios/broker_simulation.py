"""A real broker and real clients under every fault, in virtual time.

One machine runs the broker; others run clients with producers, stream consumers and checkpoint consumers that come and
go; an operator moves subscriptions and makes and deletes others, and topics. Meanwhile, as the seed decides: the
broker's machine loses power, its process is killed, stopped in order, or stands still past its lease; its disk fails to
sync, stalls or fills up; the metadata store does not answer, or loses the answer; connections are reset, cut, slow; the
clients' machines crash.

All along, an inspector looks into the broker; in the end the faults stop, everything has to recover by itself, every
subscription has to come to the end, everything has to close in order; and the log is compared with what everybody was
told (`topic_history.py`). What is promised: I1, I2, I3, I4 for one layout, I7, I10, I12; that no subscription is
skipped; and that what was acked for good is not delivered again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import count
from random import Random
from typing import Any, Final, TypeVar

import msgspec

from braid.broker.broker import Broker
from braid.broker.config import BrokerConfig, CursorConfig, GroupConfig, Limits
from braid.broker.segments.segments import OwnedSegment
from braid.client.client import Client, connect
from braid.metadata import paths
from braid.metadata.memory import MemoryStore
from braid.model.batch.columns import decode_messages
from braid.model.errors import (
    BraidError,
    DiskError,
    InvalidArgument,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TimedOut,
    TopicExists,
    TopicNotFound,
)
from braid.model.layout import Layout
from braid.model.names import SegmentName, TopicName
from braid.model.subscription import Cursor, decode
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.topic_history import Seek, TopicHistory
from braid.testing.scenarios.broker_clients import TOPIC, ClientMachine, Saved, on_a_bad_day
from braid.testing.scenarios.broker_machine import HOST, URL, BrokerMachine
from braid.testing.sim.loop import Process, Simulation, run_simulation
from braid.testing.sim.network import SimulatedNetwork

T = TypeVar("T")

PATH: Final = f"public/default/{TOPIC}"
SIDE_TOPICS: Final = ("side-0", "side-1")
OPERATOR: Final = "operator"
OPEN_TIMEOUT_S: Final = 30.0
CLOSE_TIMEOUT_S: Final = 60.0
"""An orderly stop waits for the disk, and a second for clients that do not read."""
SETTLE_S: Final = 180.0
"""When the faults are over: leases and graces run out, connections are noticed to be dead, everything is read."""
LOOK_S: Final = 0.05
STEP_LIMIT: Final = 3_000_000
"""A seed takes some hundred thousand; one that goes round in circles ends here, in seconds."""
KEPT_LINES: Final = 400
"""Of the brokers' and clients' logs, for whoever looks into a failure."""


class Counts(msgspec.Struct):
    """What a simulation did; adds up over seeds."""

    seeds: int = 0
    records: int = 0
    """In the logs, in the end."""
    confirmed: int = 0
    failed: int = 0
    """Sends of which the client said that they failed, or that it does not know."""
    handed_out: int = 0
    """Each record once for each subscription."""
    power_losses: int = 0
    kills: int = 0
    orderly_stops: int = 0
    freezes: int = 0
    segments_reopened: int = 0
    """By the broker itself: after a failed log, or a lost lease."""
    connections_cut: int = 0
    client_crashes: int = 0
    seeks: int = 0
    side_topics: int = 0
    subscriptions_deleted: int = 0

    def add(self, other: Counts) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class LogCapture(logging.Handler):
    """Keeps the last lines of the log. A line with a traceback is a bug that somebody caught: a failure here."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.failure: BaseException | None = None
        self._simulation = simulation

    def note(self, line: str) -> None:
        self.lines.append(f"{self._simulation.clock.monotonic():9.3f} {line}")

    def emit(self, record: logging.LogRecord) -> None:
        self.note(f"{record.levelname} {record.getMessage()}")
        if record.exc_info is not None and record.exc_info[1] is not None:
            self.failure = self.failure or record.exc_info[1]


class World:
    def __init__(self, simulation: Simulation, captured: LogCapture, steps: int) -> None:
        self.simulation = simulation
        self.random: Random = simulation.random
        self.steps = steps
        self.counts = Counts(seeds=1)
        self.captured = captured
        self.publishing = True
        self.settling = False
        self.saved: dict[str, Saved] = {}
        self.url = URL
        self.patience_s: float | None = None
        self.producers = count(1)
        random = self.random
        self.durability = random.choice(["fsync", "fsync", "memory"])
        self.segments = random.randint(1, 4)
        self.history = TopicHistory(survives_power_loss=self.durability == "fsync", note=self.captured.note)
        self.network = SimulatedNetwork(random)
        self.store = MemoryStore(simulation.clock)
        self.machine = BrokerMachine(simulation, self.network, self.store, self._config())
        self.machines: dict[str, ClientMachine] = {}
        self.subscriptions = ["calm", "moved"]
        self.brief: list[str] = []
        self._clients = count(1)
        self._briefs = count(1)
        self._failure: BaseException | None = None
        self._known: dict[OwnedSegment, Broker] = {}
        self._confirmed: dict[int, int] = {}
        """By segment, up to where consumers could see it last."""
        self._seeking = False
        self._background: set[asyncio.Task[None]] = set()

    def _config(self) -> BrokerConfig:
        random = self.random
        return BrokerConfig(
            id="broker-1",
            data="/data",
            listen=f"{HOST}:6660",
            lease_ttl_s=random.choice([2.0, 5.0]),
            cache_bytes=random.choice([0, 3_000, 1 << 20]),
            file_bytes=random.choice([4_096, 20_000, 200_000]),
            spare_files=random.choice([0, 1]),
            limits=Limits(
                max_requests_in_flight=random.choice([3, 50, 2_048]),
                max_bytes_in_flight=random.choice([2_000, 100_000, 32 << 20]),
                heartbeat_s=random.choice([0.5, 2.0]),
                hello_timeout_s=2.0,
                read_bytes=random.choice([1, 5_000, 1 << 20]),
            ),
            cursors=CursorConfig(flush_s=random.choice([0.1, 1.0, 60.0]), flush_acks=random.choice([1, 20, 10_000])),
            groups=GroupConfig(
                session_grace_s=random.choice([0.3, 3.0]), release_timeout_s=random.choice([0.5, 2.0, 10.0])
            ),
        )

    # ── the course of it ─────────────────────────────────────────────────────────────────────────────────────────────

    async def run(self) -> Counts:
        inspector = asyncio.create_task(self._inspect(), name="inspector")
        await self._start()
        async with self._operator_client() as self.operator:
            await self.operator.admin.create_topic(TOPIC, segments=self.segments, durability=self.durability)
            for name in self.subscriptions:
                await self.operator.admin.create_subscription(TOPIC, name, start="earliest")
                self.history.subscription(name)
            for _ in range(self.random.randint(1, 4)):
                self._add_machine()
            await self._inject_faults()
            await self._settle()
        await self._end()
        inspector.cancel()
        await asyncio.wait([inspector])
        self._check_alive()
        return self.counts

    async def _inject_faults(self) -> None:
        actions: list[tuple[Callable[[], Awaitable[None]], int]] = [
            (self._rest, 8),
            (self._lose_power, 3),
            (self._kill, 2),
            (self._restart, 3),
            (self._freeze, 2),
            (self._change_faults, 5),
            (self._lose_metadata, 1),
            (self._reset, 4),
            (self._cut, 4),
            (self._change_network, 2),
            (self._crash_client, 3),
            (self._let_client_leave, 2),
            (self._seek, 4),
            (self._use_brief_subscription, 2),
            (self._use_side_topic, 2),
        ]
        chosen = self.random.choices([action for action, _ in actions], [weight for _, weight in actions], k=self.steps)
        for action in chosen:
            await action()
            await asyncio.sleep(self.random.uniform(0, 1.0))
            self._check_alive()

    async def _settle(self) -> None:
        """The faults are over. Everything recovers by itself and comes to its end."""
        self.machine.thaw()
        self.machine.behave()
        self.network.heal()
        self.network.loss = 0.0
        self.network.latency_s = (100e-6, 5e-3)
        await self._ended(self._background, "operator's work")
        self.publishing = False
        self.settling = True
        for name in self.brief:
            await self._surely(partial(self._admin().delete_subscription, TOPIC, name, force=True))
        self.brief.clear()
        for name in SIDE_TOPICS:
            await self._surely(partial(self._delete_side_topic, name))
        for name in self.subscriptions:
            if self.history.subscription(name).unknown:
                seek = partial(self._admin().seek, TOPIC, name, "earliest")
                await self._surely(partial(self._set, name, seek))
            self._add_machine(f"last-{name}")
        await self._until(self._nobody_publishes, "every producer is done")
        await self._until(self._all_read, "every subscription is read to its end")
        await self._until(self._all_acked, "every ack has arrived")
        await self._restart_in_order()
        await self._until(self._all_acked, "every ack has survived an orderly stop")
        await asyncio.sleep(3.0)
        for machine in self.machines.values():
            machine.leaving.set()
        await self._ended([machine.life for machine in self.machines.values()], "clients")
        for machine in self.machines.values():
            self._check_nothing_runs(machine.process)
        if not self._all_acked():
            raise PromiseBroken("acks", "after all clients have left in order, not everything is acked")

    async def _end(self) -> None:
        await self._close_broker()
        if self.random.random() < 0.5:
            self._stop(power_loss=self.history.survives_power_loss)
        self.machine.stop(power_loss=False)
        await self._start()
        log = await self._read_log()
        self.history.check_log(log)
        self.counts.records = sum(map(len, log.values()))
        self.counts.confirmed = len(self.history.confirmed)
        self.counts.handed_out = sum(
            len(handed) for each in self.history.subscriptions.values() for handed in each.handed.values()
        )
        self.counts.failed = sum(given.failed for given in self.history.given.values())
        await self._close_broker()
        self.machine.stop(power_loss=False)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = self.simulation.clock.monotonic() + SETTLE_S
        while not condition():
            self._check_alive()
            if self.simulation.clock.monotonic() > deadline:
                raise PromiseBroken("progress", f"not after {SETTLE_S:g} s: {what}; {self._whereabouts()}")
            await asyncio.sleep(0.2)

    async def _surely(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Without faults, what can be tried again succeeds in the end."""
        for _ in range(20):
            try:
                await work()
                return
            except BraidError as error:
                if not error.retriable and not isinstance(error, TimedOut):
                    raise
        raise PromiseBroken("progress", "an operator's call did not succeed in 20 tries")

    async def _ended(self, tasks: Any, what: str) -> None:
        tasks = list(tasks)
        if not tasks:
            return
        _, pending = await asyncio.wait(tasks, timeout=SETTLE_S)
        self._check_alive()
        if pending:
            machines = [machine for machine in self.machines.values() if machine.leaving.is_set()]
            names = "; ".join(each for machine in machines for each in [machine.name, *machine.process.tasks])
            raise PromiseBroken("progress", f"{what} did not come to an end within {SETTLE_S:g} s: {names}")

    def explains(self, error: BraidError) -> bool:
        return on_a_bad_day(error)

    def failed(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error

    def _check_alive(self) -> None:
        if (failure := self._failure or self.captured.failure) is not None:
            raise failure

    # ── the broker ───────────────────────────────────────────────────────────────────────────────────────────────────

    async def _start(self) -> None:
        """Open the broker, with as many tries, and as many crashes in the middle, as it takes."""
        machine = self.machine
        for attempt in range(100):
            if attempt > 20:
                machine.behave()
            opening = machine.open()
            if self.random.random() < 0.15 and not self.settling:
                await asyncio.wait([opening], timeout=self.random.uniform(0, 0.5))
                if not opening.done():
                    self._stop()
            await asyncio.wait([opening], timeout=OPEN_TIMEOUT_S)
            try:
                if not opening.done():
                    raise TimedOut("the broker did not open")
                machine.broker = opening.result()
            except (BraidError, asyncio.CancelledError) as error:
                self.captured.note(f"opening failed: {error!r}")
                self._stop(power_loss=False)
                await asyncio.sleep(self.random.uniform(0, 0.5))
                continue
            machine.broker.segments.on_open.append(lambda _: self._look_now())
            self._look()
            return
        raise PromiseBroken("progress", "the broker could not be opened in 100 tries")

    def _stop(self, power_loss: bool | None = None) -> None:
        if self.machine.process is None:
            return
        if power_loss is None:
            power_loss = self.random.random() < 0.6
        self._look()
        if power_loss:
            self.counts.power_losses += 1
            self.history.lost_power(self._confirmed)
        else:
            self.counts.kills += 1
        self.captured.note(f"the broker's {'machine loses power' if power_loss else 'process is killed'}")
        self.history.stopped()
        self.machine.stop(power_loss=power_loss)

    async def _close_broker(self) -> None:
        """An orderly stop, which stores every ack that had arrived."""
        broker, machine = self.machine.broker, self.machine
        assert broker is not None
        assert machine.client is not None
        faultless = machine.metadata_faults == 0 and machine.disk.faults.sync_failure == 0 and self.settling
        cursors = {
            (segment.name.descriptor, name): offset
            for segment in broker.segments.of_topic(PATH)
            for name, offset in segment.cursors.all().items()
        }
        closing = machine.close()
        await asyncio.wait([closing], timeout=CLOSE_TIMEOUT_S)
        if not closing.done():
            raise PromiseBroken("progress", f"the broker did not stop in order within {CLOSE_TIMEOUT_S:g} s")
        try:
            closing.result()
        except BraidError as error:
            if faultless:
                raise PromiseBroken("progress", f"an orderly stop failed without a fault: {error!r}") from error
        self.counts.orderly_stops += 1
        if faultless:
            assert machine.process is not None
            await asyncio.sleep(0)
            self._check_nothing_runs(machine.process)
            for (descriptor, name), offset in cursors.items():
                entry = self.store._server.get(paths.cursor(PATH, descriptor, name))
                stored = decode(Cursor, entry.value).offset if entry is not None else None
                if stored is None or stored < offset:
                    raise PromiseBroken(
                        "acks", f"the cursor of {name} on {descriptor} was at {offset}, an orderly stop stored {stored}"
                    )

    async def _rest(self) -> None:
        await asyncio.sleep(self.random.uniform(0, 2.0))

    async def _lose_power(self) -> None:
        """Again soon after, now and then."""
        again = True
        while again:
            self._stop(power_loss=True)
            await self._start()
            again = self.random.random() < 0.3
            await asyncio.sleep(self.random.uniform(0, 0.1) if again else 0)

    async def _kill(self) -> None:
        self._stop(power_loss=False)
        await asyncio.sleep(self.random.choice([0.0, 0.5, 3.0]))
        await self._start()

    async def _restart(self) -> None:
        """Stop in order and start again, unless something happens in the middle."""
        if self.random.random() < 0.3:
            closing = self.machine.close()
            await asyncio.wait([closing], timeout=self.random.uniform(0, 0.5))
            self._stop()
            await asyncio.wait([closing])
        else:
            await self._restart_in_order()
            return
        await self._start()

    async def _restart_in_order(self) -> None:
        await self._close_broker()
        self.history.stopped()
        self.machine.stop(power_loss=False)
        await asyncio.sleep(self.random.choice([0.0, 1.0]))
        await self._start()

    async def _freeze(self) -> None:
        """Often for longer than the lease lives, and in the middle of a write, which then comes to its end unseen."""
        self.counts.freezes += 1
        for _ in range(self.random.choice([0, 1_000])):
            broker = self.machine.broker
            if broker is not None and any(segment.storage.log.pending_bytes for segment in broker.segments.all()):
                break
            await asyncio.sleep(0.0005)
        self._look()
        self.machine.freeze()
        await asyncio.sleep(self.random.uniform(0.5, 12.0))
        self.machine.thaw()

    async def _change_faults(self) -> None:
        # What a failed sync left in the page cache of a topic that had not synced it, a later loss of power takes away
        # from the middle of the log: recovery cannot know. See docs/simulation.md.
        self.machine.misbehave(syncs_fail=self.history.survives_power_loss)

    async def _lose_metadata(self) -> None:
        client = self.machine.client
        assert client is not None
        client.disconnect()
        await asyncio.sleep(self.random.uniform(0.5, 8.0))
        client.reconnect()

    # ── the network and the clients ──────────────────────────────────────────────────────────────────────────────────

    def _any_machine(self) -> ClientMachine | None:
        return self.random.choice(list(self.machines.values())) if self.machines else None

    def _add_machine(self, name: str = "") -> None:
        machine = ClientMachine(self, name or f"client-{next(self._clients)}")
        self.machines[machine.name] = machine
        self.machine.meet(machine.name)

    def subscription_for(self, machine: str) -> str:
        if machine.startswith("last-"):
            return machine.removeprefix("last-")
        return self.random.choice([*self.subscriptions, *self.subscriptions, *self.brief])

    async def _reset(self) -> None:
        for name in [*self.machines, OPERATOR]:
            if self.random.random() < 0.5:
                self.network.reset(HOST, name)

    async def _cut(self) -> None:
        """Some are cut off, for a while in which other things happen."""
        machine = self._any_machine()
        if machine is None:
            return
        name, seconds = machine.name, self.random.uniform(0.1, 10.0)
        self.counts.connections_cut += 1
        pair = (HOST, name) if self.random.random() < 0.5 else (name, HOST)
        self.network.cut(*pair, one_way=self.random.random() < 0.5)

        async def heal() -> None:
            await asyncio.sleep(seconds)
            self.network.heal(HOST, name)

        self._in_background(heal())

    async def _change_network(self) -> None:
        self.network.latency_s = self.random.choice([(100e-6, 5e-3), (100e-6, 5e-3), (1e-6, 1e-5), (0.01, 0.5)])
        self.network.loss = self.random.choice([0.0, 0.0, 0.02])

    async def _crash_client(self) -> None:
        machine = self._any_machine()
        if machine is not None:
            self.counts.client_crashes += 1
            del self.machines[machine.name]
            machine.crash()
            self._add_machine(machine.name if self.random.random() < 0.5 else "")

    async def _let_client_leave(self) -> None:
        machine = self._any_machine()
        if machine is None:
            return
        machine.leaving.set()

        async def replace() -> None:
            while not machine.life.done() and self.machines.get(machine.name) is machine:
                await asyncio.wait([machine.life], timeout=1.0)
            if self.machines.get(machine.name) is machine:
                del self.machines[machine.name]
                self._add_machine()

        self._in_background(replace())

    # ── the operator ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _operator_client(self) -> Client:
        self.machine.meet(OPERATOR)
        return connect(
            URL,
            timeout=5.0,
            name=OPERATOR,
            network=self.network.host(OPERATOR),
            clock=self.simulation.clock,
            random=self.random,
        )

    def _admin(self) -> Any:
        return self.operator.admin

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(self._or_fail(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _or_fail(self, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:
            self.failed(error)

    async def _seek(self) -> None:
        if self._seeking:
            return  # Which of two was last would not be known.
        admin, random = self._admin(), self.random
        history = self.history.subscription("moved")
        ends = {segment: max([0, *history.handed[segment]]) for segment in range(self.segments)}
        segment = random.randrange(self.segments)
        now_ms = self.simulation.clock.now_us() // 1_000
        ways: list[Callable[[], Awaitable[Any]]] = [
            lambda: admin.seek(TOPIC, "moved", random.choice(["earliest", "latest"])),
            lambda: admin.seek(TOPIC, "moved", {segment: random.randint(0, ends[segment])}),
            lambda: admin.seek(TOPIC, "moved", now_ms - random.randrange(20_000)),
            lambda: admin.skip(TOPIC, "moved"),
            lambda: admin.skip(TOPIC, "moved", segment=segment, count=random.randint(1, 50)),
        ]
        way = random.choice(ways)
        self._in_background(self._tolerantly(lambda: self._set("moved", way)))

    async def _set(self, name: str, way: Callable[[], Awaitable[Any]]) -> None:
        """Set a subscription to another place. Until it is known to which, anything may be handed out."""
        history = self.history.subscription(name)
        began = history.sought_at = self.simulation.clock.monotonic()
        unknown = bool(history.unknown)
        history.unknown.update((segment, None) for segment in range(self.segments))
        self.captured.note(f"subscription {name} is to be set to another place")
        self._seeking = True
        try:
            result = await way()
        except InvalidArgument:
            if not self.history.lost_tails:
                raise
            if not unknown:  # What was handed out there is lost, as `memory` allows: nothing was moved.
                history.unknown.clear()
            return
        finally:
            self._seeking = False
            history.sought_at = self.simulation.clock.monotonic()
        self.captured.note(f"subscription {name} was set to {result}")
        self.counts.seeks += 1
        for segment, offset in result["offsets"].items():
            history.seeks[int(segment)] = Seek(offset, began)
        if len(result["offsets"]) == self.segments or not unknown:
            history.unknown.clear()

    async def _use_brief_subscription(self) -> None:
        admin, random = self._admin(), self.random
        name = f"brief-{next(self._briefs)}"
        self.history.subscription(name).brief = True

        async def use() -> None:
            await admin.create_subscription(TOPIC, name, start=random.choice(["earliest", "latest"]))
            self.brief.append(name)
            await asyncio.sleep(random.uniform(0, 10.0))
            self.brief.remove(name)
            await admin.delete_subscription(TOPIC, name, force=random.random() < 0.7)
            self.counts.subscriptions_deleted += 1

        self._in_background(self._tolerantly(use))

    async def _use_side_topic(self) -> None:
        random, client = self.random, self.operator
        name = random.choice(SIDE_TOPICS)

        async def use() -> None:
            await client.admin.create_topic(name, segments=random.randint(1, 3))
            async with client.producer(name) as producer:
                values = [b"%d" % number for number in range(random.choice([1, 50]))]
                await producer.send_many(values)
            if random.random() < 0.5:
                async with client.checkpoint_consumer(name, start="earliest") as consumer:
                    got: list[bytes] = []
                    while len(got) < len(values):
                        batch = await consumer.receive_batch(20.0)
                        if batch is None:
                            raise TimedOut("a side topic's records did not come")
                        got += batch.values()
                if sorted(got) != sorted(values):
                    raise PromiseBroken("I2", f"topic {name} holds {sorted(got)}, sent were {values}")
            await client.admin.delete_topic(name)
            self.counts.side_topics += 1

        self._in_background(self._tolerantly(use))

    async def _delete_side_topic(self, name: str) -> None:
        """What a deleted topic leaves is nothing."""
        with contextlib.suppress(TopicNotFound):
            await self.operator.admin.delete_topic(name, force=True)
        path = f"/public/default/{name}/"
        files = [each for each in self.machine.disk.paths() if path in each]
        keys = [entry.key for entry in self.store._server.list("/").entries if path in f"{entry.key}/"]
        if paths.layout(f"public/default/{name}") in keys:
            raise TimedOut("a creation that nobody waits for any more came to its end behind the deletion")
        if files or keys:
            raise PromiseBroken("deleting", f"topic {name} is deleted and has left {files} and {keys}")

    async def _tolerantly(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except (TopicExists, TopicNotFound, SubscriptionExists, SubscriptionNotFound, SubscriptionBusy, DiskError):
            pass  # An earlier try has left its traces, or another one is under way, or the disk is bad.
        except BraidError as error:
            if not error.retriable and not isinstance(error, TimedOut):
                raise

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def _inspect(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            self._look_now()

    def _look_now(self) -> None:
        """Also when a segment was opened: before any client can get something of it."""
        try:
            self._look()
        except Exception as error:
            self.failed(error)

    def _look(self) -> None:
        broker = self.machine.broker
        if broker is None or self.machine.frozen:
            return
        for segment in broker.segments.of_topic(PATH):
            if segment not in self._known:
                if any(known.name == segment.name and broker is of for known, of in self._known.items()):
                    self.counts.segments_reopened += 1
                self._known[segment] = broker
                self.history.recovered(
                    segment.name.id, segment.storage.recovered.next_offset, self.simulation.clock.monotonic()
                )
                self._follow(segment)
            self._check_channels(segment)
            self._check_cursors(segment)
        for session in broker.front_door.server._sessions:
            if session._bytes > broker.front_door.limits.max_bytes_in_flight + (1 << 20):
                raise PromiseBroken("I12", f"a connection has {session._bytes} bytes in flight")

    def _follow(self, segment: OwnedSegment) -> None:
        """I3: what is confirmed is confirmed under a lease that lives."""
        confirmed = segment.storage.log.confirmed
        value = self._confirmed[segment.name.id] = confirmed.value

        def risen() -> None:
            nonlocal value
            if confirmed.value > value:
                value = self._confirmed[segment.name.id] = confirmed.value
                if self.store._server.get(paths.broker("broker-1")) is None:
                    self.failed(PromiseBroken("I3", f"{segment.name} confirmed {value} without a lease"))

        confirmed.follow(risen)

    def _check_channels(self, segment: OwnedSegment) -> None:
        """I4: at most one consumer of a subscription has a segment."""
        names = [channel.subscription for channel in segment._channels if channel.subscription is not None]
        if len(names) > len(set(names)):
            channels = [(each.subscription, each.number) for each in segment._channels]
            raise PromiseBroken("I4", f"{segment.name} is delivered twice to one subscription: {channels}")

    def _check_cursors(self, segment: OwnedSegment) -> None:
        """A stored cursor never lies beyond what a crash leaves of the log."""
        for entry in self.store._server.list(paths.cursors_prefix(PATH, segment.name.descriptor)).entries:
            offset = decode(Cursor, entry.value).offset
            if offset > segment.storage.log.synced.value:
                raise PromiseBroken(
                    "I2", f"{entry.key} is stored at {offset}, the log is synced to {segment.storage.log.synced.value}"
                )

    def least_end(self, segment: int) -> int:  # noqa: ARG002
        """A loss of power may take all that was not synced."""
        return 0

    def stored_cursor(self, subscription: str, segment: int) -> int:
        """What the metadata store has, -1 for nothing."""
        # By the layout, not by what is served: the segment may be between two openings.
        name = SegmentName.of(TopicName.parse(PATH), Layout.initial(self.segments).segment(segment))
        entry = self.store._server.get(paths.cursor(PATH, name.descriptor, subscription))
        return decode(Cursor, entry.value).offset if entry is not None else -1

    def _ends(self) -> dict[int, int] | None:
        broker = self.machine.broker
        served = broker.segments.of_topic(PATH) if broker is not None else []
        return {segment.name.id: segment.end for segment in served} if len(served) == self.segments else None

    def _nobody_publishes(self) -> bool:
        """What is still being tried again, after a disk that was full, would be stored behind the last look."""
        return not any(machine.producers for machine in self.machines.values())

    def _all_read(self) -> bool:
        ends = self._ends()
        return ends is not None and not any(self.history.missing(name, ends) for name in self.subscriptions)

    def _all_acked(self) -> bool:
        broker = self.machine.broker
        served = broker.segments.of_topic(PATH) if broker is not None else []
        return len(served) == self.segments and all(
            segment.cursors.offset(name) == segment.end for segment in served for name in self.subscriptions
        )

    def _whereabouts(self) -> str:
        ends = self._ends()
        missing = {name: self.history.missing(name, ends)[:5] for name in self.subscriptions} if ends else None
        broker = self.machine.broker
        members = {name: broker.groups.members(PATH, name) for name in self.subscriptions} if broker else None
        cursors = {s.name.id: s.cursors.all() for s in broker.segments.of_topic(PATH)} if broker else None
        absent = broker.segments.absent() if broker else None
        return f"ends {ends}, missing {missing}, members {members}, cursors {cursors}, absent {absent}"

    async def _read_log(self) -> dict[int, list[tuple[bytes, bytes | None]]]:
        broker = self.machine.broker
        assert broker is not None
        log: dict[int, list[tuple[bytes, bytes | None]]] = {}
        for segment in broker.segments.of_topic(PATH):
            records = log[segment.name.id] = []
            reader = segment.storage.reader(0)
            while batches := await reader.read_available():
                for header, data in batches:
                    for message in decode_messages(data, header):
                        if message.offset != len(records):
                            raise PromiseBroken(
                                "I1", f"{segment.name} has {message.offset} where {len(records)} is due"
                            )
                        records.append((message.value, message.key))
            if len(records) != segment.end:
                raise PromiseBroken("I1", f"{segment.name} ends at {segment.end} and holds {len(records)} records")
        return log

    def _check_nothing_runs(self, process: Process) -> None:
        """What was closed in order has left nothing behind."""
        if process.tasks:
            raise PromiseBroken("I12", f"{process.name} is closed, and tasks are left: {'; '.join(process.tasks)}")


def simulate_broker(seed: int, steps: int = 30) -> Counts:
    """Run one seed; raises with the seed, and the last lines of the log, in notes."""
    return run_with_log(seed, lambda simulation, captured: World(simulation, captured, steps).run())


def run_with_log(
    seed: int, run: Callable[[Simulation, LogCapture], Awaitable[T]], *, step_limit: int = STEP_LIMIT
) -> T:
    """Run a simulation while its log is kept; an error gets the last lines as a note."""
    log = logging.getLogger("braid")
    captured: LogCapture | None = None

    async def main(simulation: Simulation) -> T:
        nonlocal captured
        captured = LogCapture(simulation)
        log.addHandler(captured)
        return await run(simulation, captured)

    level, propagate = log.level, log.propagate
    log.setLevel(logging.INFO)
    log.propagate = False
    try:
        return run_simulation(seed, main, step_limit=step_limit)
    except BaseException as error:
        if captured is not None:
            error.add_note("\n".join(captured.lines))
        raise
    finally:
        if captured is not None:
            log.removeHandler(captured)
        log.setLevel(level)
        log.propagate = propagate
