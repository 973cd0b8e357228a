"""What happens to the cluster, drawn from a seed: one fault after the other, each with one line that says so.

At most two brokers are down or apart at a time, and most of the time one. A data folder is wiped only while every
replica of every segment is in sync and nothing else is broken: otherwise more copies would be gone than a topic can
spare. The next one is wiped only when the lost replicas are there again.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

from braid.client.client import Client
from braid.model.errors import BraidError
from braid.ports.tasks import TaskScope
from tests.chaos.cluster import LEASE_TTL_S, REPLACE_AFTER_S, ChaosBroker, Cluster

DOWN_S = (0.0, 0.5, 3.0, REPLACE_AFTER_S + 4.0)
APART_S = (0.3, LEASE_TTL_S * 0.7, LEASE_TTL_S * 2.0, REPLACE_AFTER_S + 2.0)
"""Shorter and longer than a lease."""
OPERATOR_S = 20.0
ALL = "all brokers"
MEAN_PAUSE_S = 1.5
TELL_S = 10.0
"""So often the program says what it waits for."""

Say = Callable[[str], None]


class Faults:
    def __init__(self, cluster: Cluster, client: Client, replicated: dict[str, int], random: Random, say: Say) -> None:
        """`replicated` are the topics, each with how many replicas a segment has. The operator uses `client`."""
        self.counts: Counter[str] = Counter()
        self.failures: list[BaseException] = []
        """What went wrong in the chaos itself: a broker that did not come back, for example."""
        self._cluster = cluster
        self._client = client
        self._replicated = replicated
        self._random = random
        self._say = say
        self._broken: set[str] = set()
        """Brokers that are down, frozen or cut off, and servers of etcd."""
        self._drained: set[str] = set()
        self._tasks = TaskScope[object]()

    async def run(self, seconds: float) -> None:
        kinds: list[tuple[Callable[[], Awaitable[bool]], int]] = [
            (self._kill, 4),
            (self._freeze, 3),
            (self._stop, 2),
            (self._wipe, 4),
            (self._cut, 2),
            (self._hold, 3),
            (self._kill_all, 1),
            (self._move, 3),
            (self._drain, 1),
            (self._change_layout, 2),
        ]
        if self._cluster.etcd:
            kinds.append((self._break_etcd, 3))
        faults, weights = zip(*kinds, strict=True)
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s and not self.failures:
            await asyncio.sleep(self._random.expovariate(1 / MEAN_PAUSE_S))
            fault = self._random.choices(faults, weights)[0]
            if await fault():
                self.counts[fault.__name__.strip("_").replace("_", " ")] += 1

    async def settle(self, within_s: float) -> None:
        """Return when nothing is broken any more, and every replica is in sync."""
        began = told = time.monotonic()
        while reason := "; ".join(filter(None, (self._unfinished(), await self.incomplete()))):
            if self.failures:
                raise self.failures[0]
            now = time.monotonic()
            if now - began > within_s:
                raise AssertionError(f"the cluster does not come to rest within {within_s:g} s: {reason}")
            if now - told > TELL_S:
                told = now
                self._say(f"waiting: {reason}")
            await asyncio.sleep(0.1)

    def _unfinished(self) -> str:
        """Name what is still broken, or being done."""
        return ", ".join([*sorted(self._broken | self._drained), *(task.get_name() for task in self._tasks)])

    async def end(self) -> None:
        await self._tasks.cancel()

    async def incomplete(self) -> str:
        """Say which segment lacks a replica that is in sync; empty if none does."""
        for topic, wanted in self._replicated.items():
            try:
                told = await self._client.admin.topic_replicas(topic)
            except BraidError as error:
                return f"{topic}: {error}"
            for number, segment in told["segments"].items():
                if lacking := _lacking(segment, wanted):
                    return f"segment {number} of {topic}: {lacking}"
        return ""

    # Faults of brokers.

    def _victim(self) -> ChaosBroker | None:
        if ALL in self._broken or len(self._broken) >= self._random.choice((1, 1, 1, 2)):
            return None
        well = [broker for name, broker in self._cluster.brokers.items() if name not in self._broken]
        return self._random.choice(well)

    async def _kill(self) -> bool:
        return await self._take_down("kill -9", ChaosBroker.kill)

    async def _stop(self) -> bool:
        return await self._take_down("SIGTERM", ChaosBroker.stop)

    async def _take_down(self, how: str, down: Callable[[ChaosBroker], Awaitable[object]]) -> bool:
        if (broker := self._victim()) is None:
            return False
        pause_s = self._random.choice(DOWN_S)
        self._say(f"{how} {broker.name}; it starts again after {pause_s:g} s")

        async def back() -> None:
            await down(broker)
            await asyncio.sleep(pause_s)
            await broker.start()
            self._say(f"{broker.name} is back")

        self._mend_later(broker.name, back())
        return True

    async def _wipe(self) -> bool:
        if self._broken or await self.incomplete() or (broker := self._victim()) is None:
            return False
        pause_s = self._random.choice(DOWN_S)
        self._say(f"kill -9 {broker.name} and delete its data folder; it starts again after {pause_s:g} s")

        async def back() -> None:
            await broker.kill()
            await broker.wipe()
            began = time.monotonic()
            await asyncio.sleep(pause_s)
            await broker.start()
            self._say(f"{broker.name} is back, with an empty disk")
            self._tasks.start(object(), self._watch_rebuild(broker.name, began), name=f"rebuild {broker.name}")

        self._mend_later(broker.name, back())
        return True

    async def _watch_rebuild(self, name: str, began: float) -> None:
        while await self.incomplete():  # noqa: ASYNC110 (other processes act)
            await asyncio.sleep(0.2)
        self._say(f"every replica is in sync again, {time.monotonic() - began:.1f} s after {name} lost its disk")

    async def _kill_all(self) -> bool:
        if self._broken:
            return False
        brokers = list(self._cluster.brokers.values())
        self._say("kill -9 all brokers; they start again")

        async def back() -> None:
            await asyncio.gather(*(broker.kill() for broker in brokers))
            await asyncio.gather(*(broker.start() for broker in brokers))
            self._say("all brokers are back")

        self._mend_later(ALL, back())
        return True

    async def _freeze(self) -> bool:
        if (broker := self._victim()) is None:
            return False
        pause_s = self._random.choice(APART_S)
        self._say(f"SIGSTOP {broker.name} for {pause_s:g} s")
        broker.process.signal(signal.SIGSTOP)

        async def thaw() -> None:
            await asyncio.sleep(pause_s)
            broker.process.signal(signal.SIGCONT)

        self._mend_later(broker.name, thaw())
        return True

    async def _cut(self) -> bool:
        if (broker := self._victim()) is None:
            return False
        pause_s = self._random.choice((0.0, *APART_S))
        self._say(f"reset the connections to {broker.name}, and refuse new ones for {pause_s:g} s")
        broker.proxy.cut()
        self._mend_later(broker.name, self._mend_proxy(broker, pause_s))
        return True

    async def _hold(self) -> bool:
        if (broker := self._victim()) is None:
            return False
        pause_s = self._random.choice(APART_S)
        way, to_broker, from_broker = self._random.choice(
            (("to", True, False), ("from", False, True), ("to and from", True, True))
        )
        self._say(f"hold back what connections bring {way} {broker.name} for {pause_s:g} s")
        broker.proxy.hold(to_broker=to_broker, from_broker=from_broker)
        self._mend_later(broker.name, self._mend_proxy(broker, pause_s))
        return True

    async def _mend_proxy(self, broker: ChaosBroker, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        broker.proxy.mend()

    async def _break_etcd(self) -> bool:
        """Two of three servers of etcd go on."""
        if any(server.name in self._broken for server in self._cluster.etcd):
            return False
        server = self._random.choice(self._cluster.etcd)
        pause_s, freeze = self._random.choice(APART_S), self._random.random() < 0.5
        self._say(f"{'SIGSTOP' if freeze else 'kill -9'} etcd {server.name} for {pause_s:g} s")

        async def back() -> None:
            await asyncio.to_thread(server.pause if freeze else server.kill)
            await asyncio.sleep(pause_s)
            server.resume() if freeze else server.start()

        self._mend_later(server.name, back())
        return True

    def _mend_later(self, name: str, mend: Awaitable[None]) -> None:
        self._broken.add(name)

        async def mended() -> None:
            try:
                await mend
            except Exception as error:  # Whatever it is, the program tells it.
                self.failures.append(error)
            self._broken.discard(name)

        self._tasks.start(object(), mended(), name=f"mend {name}")

    # What an operator does. It may fail, because of the faults.

    async def _move(self) -> bool:
        topic = self._random.choice(sorted(self._replicated))
        to = self._random.choice(sorted(self._cluster.brokers))
        self._operate(f"move {topic} to {to}", self._client.admin.move(topic, to=to, timeout=OPERATOR_S))
        return True

    async def _drain(self) -> bool:
        if self._drained or len(self._cluster.brokers) <= max(self._replicated.values()):
            return False
        name = self._random.choice(sorted(self._cluster.brokers))
        self._drained.add(name)
        pause_s = self._random.choice((1.0, 5.0, 10.0))

        async def drain() -> None:
            try:
                await self._client.admin.drain(name)
            finally:
                await asyncio.sleep(pause_s)
                while not await self._activated(name):  # noqa: ASYNC110 (other processes act)
                    await asyncio.sleep(0.2)
                self._drained.discard(name)

        self._operate(f"drain {name}, and activate it after {pause_s:g} s", drain())
        return True

    async def _activated(self, name: str) -> bool:
        try:
            await self._client.admin.activate(name)
        except BraidError:
            return False
        return True

    async def _change_layout(self) -> bool:
        """Split a segment, or merge all into one when there are many."""
        topic = next(iter(self._replicated))
        try:
            layout = await self._client.admin.layout(topic)
        except BraidError:
            return False
        active = [int(each) for each, segment in layout["segments"].items() if segment["state"] == "ACTIVE"]
        if len(active) >= 4:
            self._operate(f"repartition {topic} to one segment", self._client.admin.repartition(topic, 1))
        elif active:
            chosen = self._random.choice(sorted(active))
            self._operate(f"split segment {chosen} of {topic}", self._client.admin.split(topic, chosen))
        return bool(active)

    def _operate(self, what: str, work: Awaitable[object]) -> None:
        self._say(what)

        async def done() -> None:
            try:
                await work
            except BraidError as error:
                self._say(f"{what}: {error}")

        self._tasks.start(object(), done(), name=what)


def _lacking(segment: dict[str, Any], wanted: int) -> str:
    if segment["unavailable"] is not None:
        return str(segment["unavailable"])
    if segment["change"] is not None:
        return f"its replicas are being changed: {segment['change']}"
    states = {each["broker"]: each["state"] for each in segment["replicas"]}
    behind = [each["behind"] for each in segment["replicas"] if each["state"] != "owner"]
    good = sorted(states.values()) == ["in-sync"] * (wanted - 1) + ["owner"]
    return "" if good and not any(each is None for each in behind) else f"{states}, records behind: {behind}"
