"""Faults of real processes under load: `make chaos SECONDS=120`, or `python -m tests.chaos --help`.

Several `braid serve` processes of this machine have replicated topics. Producers, consumers and readers use them, while
the program kills, freezes, stops and cuts off brokers, wipes their disks, moves and drains, and changes a layout. It
prints what it does. In the end everything is mended, and the program compares what clients were told with what the
topics and the disks hold. Its exit code is 1 if a promise broke. The seed decides on faults; the course of real
processes differs from run to run nevertheless.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import braid
from braid.client.client import Client
from braid.model.errors import BraidError
from tests.chaos.cluster import Cluster
from tests.chaos.copies import batches_in, compare
from tests.chaos.faults import Faults
from tests.chaos.load import PATIENCE_S, BrokenPromise, Load, Place, read_topic

SETTLED_S = 180.0
OPERATOR_S = 15.0


class TopicShape(NamedTuple):
    segments: int
    replicas: int
    confirm: int


TOPICS = {"splits": TopicShape(1, 3, 2), "two-of-three": TopicShape(2, 3, 2), "all-of-three": TopicShape(1, 3, 3)}
"""The layout of the first one changes."""


class Options(NamedTuple):
    seconds: float
    seed: int
    brokers: int
    metadata: str
    storage: str
    folder: str


class Chaos:
    def __init__(self, options: Options, folder: Path, stack: ExitStack) -> None:
        self._options = options
        self._began = time.monotonic()
        self._random = Random(options.seed)
        self._cluster = Cluster(
            folder, stack, brokers=options.brokers, metadata=options.metadata, storage=options.storage
        )

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:8.2f} s  {text}", flush=True)

    async def run(self) -> None:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._cluster.close)
            await self._cluster.open()
            client = await stack.enter_async_context(braid.connect(self._cluster.url, timeout=PATIENCE_S))
            operator = await stack.enter_async_context(braid.connect(self._cluster.url, timeout=OPERATOR_S))
            await self._all_active(client)
            for name, shape in TOPICS.items():
                await client.admin.create_topic(
                    name, segments=shape.segments, replicas=shape.replicas, confirm=shape.confirm
                )
            loads = [Load(client, name, Random(self._random.random())) for name in TOPICS]
            replicated = {name: shape.replicas for name, shape in TOPICS.items()}
            faults = Faults(self._cluster, operator, replicated, Random(self._random.random()), self.say)
            stack.push_async_callback(faults.end)
            for load in loads:
                stack.push_async_callback(load.end)
                load.start()
            await faults.settle(SETTLED_S)
            self.say(
                f"{len(self._cluster.brokers)} brokers serve {len(loads)} topics under load, every replica is in sync"
            )
            await self._suffer(faults, loads)
            await self._finish(faults, loads)
            await self._check(client, loads)
            self._tell(faults, loads)

    async def _all_active(self, client: Client) -> None:
        async with asyncio.timeout(SETTLED_S):
            while [each["state"] for each in await client.admin.brokers()] != ["active"] * self._options.brokers:  # noqa: ASYNC110 (other processes act)
                await asyncio.sleep(0.05)

    async def _suffer(self, faults: Faults, loads: list[Load]) -> None:
        suffering = asyncio.create_task(faults.run(self._options.seconds))
        try:
            while not suffering.done():
                for load in loads:
                    load.check()
                await asyncio.wait([suffering], timeout=0.2)
            suffering.result()
        finally:
            suffering.cancel()

    async def _finish(self, faults: Faults, loads: list[Load]) -> None:
        self.say("the faults stop")
        await self._or_client_error(loads, faults.settle(SETTLED_S))
        self.say("every replica is in sync")
        await self._or_client_error(loads, asyncio.gather(*(load.stop_producers() for load in loads)))
        self.say("everything that was sent is confirmed")
        deadline = time.monotonic() + SETTLED_S
        for load in loads:
            while not load.all_seen():
                load.check()
                if time.monotonic() > deadline:
                    missing = load.sent - load.consumed.next
                    raise BrokenPromise(f"I5: the subscription of {load.topic} waits for {missing.total()} records")
                await asyncio.sleep(0.05)
        await faults.settle(SETTLED_S)
        self.say("every subscription and every reader has come to the end")

    async def _or_client_error(self, loads: list[Load], work: Any) -> None:
        working = asyncio.ensure_future(work)
        try:
            while not working.done():
                for load in loads:
                    load.check()
                await asyncio.wait([working], timeout=0.2)
            await working
        finally:
            working.cancel()

    # What is compared at the end.

    async def _check(self, client: Client, loads: list[Load]) -> None:
        for load in loads:
            stats = await client.admin.topic_stats(load.topic)
            ends = {int(number): segment["endOffset"] for number, segment in stats["segments"].items()}
            stored = await read_topic(client, load.topic, ends)
            places = {
                Place(segment, at): value for segment, values in stored.items() for at, value in enumerate(values)
            }
            for place, value in load.confirmed.items():
                if places.get(place) != value:
                    raise BrokenPromise(
                        f"I2: {load.topic} has {places.get(place)!r} at {place}; {value!r} was confirmed"
                    )
            if len(places) != len(load.confirmed):
                raise BrokenPromise(f"I10: {load.topic} holds {len(places)} records; {len(load.confirmed)} were sent")
            for segment, values in load.read.items():
                if stored[segment][: len(values)] != values:
                    raise BrokenPromise(
                        f"I7: the reader of {load.topic} saw records that segment {segment} does not hold"
                    )
            self.say(
                f"{load.topic}: {len(places):,} records in {len(ends)} segments are what was confirmed, seen and read"
            )
            await self._compare_copies(client, load.topic, ends)

    async def _compare_copies(self, client: Client, topic: str, ends: dict[int, int]) -> None:
        told = await client.admin.topic_replicas(topic)
        pairs = copies = 0
        for number, segment in told["segments"].items():
            hashes = segment["hashRange"]
            folder = f"public/default/{topic}/{hashes['start']:04x}-{hashes['end']:04x}-{number}"
            disks = {each["broker"]: self._cluster.brokers[each["broker"]].data for each in segment["replicas"]}
            wal = {name: batches_in((disk / "wal" / folder).glob("*.wal")) for name, disk in disks.items()}
            history = {f"chunks of {name}": disk / "chunks" for name, disk in disks.items()}
            if not self._cluster.local:
                history = {"shared chunks": self._cluster.folder / "history"}
            chunks = {name: batches_in((place / folder).rglob("*.chunk")) for name, place in history.items()}
            pairs += compare(f"segment {number} of {topic}", wal, chunks, ends[int(number)])
            copies += len(disks)
        self.say(f"{topic}: {copies} copies are equal: {pairs:,} pairs of batches were compared")

    def _tell(self, faults: Faults, loads: list[Load]) -> None:
        happened = ", ".join(f"{name} {count}" for name, count in sorted(faults.counts.items()))
        print(f"\nWhat happened: {happened or 'nothing'}")
        print(
            f"{'TOPIC':<14}{'SENT':>10}{'CONFIRMED':>11}{'SEEN AGAIN':>12}{'READER RESUMED':>16}{'LONGEST PAUSE':>15}"
        )
        for load in loads:
            pause = f"{load.longest_s:.1f} s"
            print(
                f"{load.topic:<14}{load.sent.total():>10,}{len(load.confirmed):>11,}{load.consumed.again:>12,}"
                f"{load.resumed:>16}{pause:>15}  at {load.longest_at - self._began:.1f} s"
            )
        print("Every confirmed record is there once, in order, and was seen; readers saw a beginning of the log;")
        print("offsets have no gap; every replica is in sync, and copies are equal.")


def main(arguments: list[str]) -> int:
    options = _options(arguments)
    folder = Path(options.folder or tempfile.mkdtemp(prefix="braid-chaos-"))
    folder.mkdir(exist_ok=True)
    shape = f"{options.brokers} brokers, metadata in {options.metadata}, storage {options.storage}"
    print(f"chaos with seed {options.seed} for {options.seconds:g} s: {shape}", flush=True)
    failed = True
    try:
        with ExitStack() as stack:  # After the loop: threads that start a broker have ended then.
            asyncio.run(_until_signal(Chaos(options, folder, stack)))
        failed = False
    except (KeyboardInterrupt, asyncio.CancelledError):
        failed = False
        print("interrupted")
        return 130
    except (AssertionError, BraidError, OSError, RuntimeError) as error:
        traceback.print_exception(error)
        print(f"FAILED, seed {options.seed}: {error}")
        return 1
    finally:
        if failed:
            print(f"seed {options.seed}; the files and logs of the brokers stay in {folder}")
        elif not options.folder:
            shutil.rmtree(folder, ignore_errors=True)
    return 0


async def _until_signal(chaos: Chaos) -> None:
    running = asyncio.current_task()
    assert running is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    await chaos.run()


def _options(arguments: list[str]) -> Options:
    parser = argparse.ArgumentParser(prog="chaos", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--seed", default="", help="decides on the faults; a random one if it is not given")
    parser.add_argument("--brokers", type=int, default=4)
    parser.add_argument("--metadata", choices=("sqlite", "etcd"), default="sqlite")
    parser.add_argument("--storage", choices=("shared", "local"), default="shared")
    parser.add_argument("--folder", default="", help="an empty folder for the brokers' files, which stay there")
    given = parser.parse_args(arguments)
    seed = int(given.seed) if given.seed else int.from_bytes(os.urandom(4))
    return Options(given.seconds, seed, given.brokers, given.metadata, given.storage, given.folder)


if __name__ == "__main__":
    logging.getLogger("braid").setLevel(logging.ERROR)  # The client warns of what it rides over: here that is wanted.
    sys.exit(main(sys.argv[1:]))
