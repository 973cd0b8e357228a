"""One segment's storage under every fault, against a list as the model.

Two brokers with disks of their own share an object store and a metadata store. Producers send numbered batches and
send them again until they are confirmed, and sometimes later. Meanwhile, as the seed decides: machines lose power in
the middle of a write, a recovery or a hand-over; processes are killed; syncs fail; disks fill up; the object store is
slow, fails or loses uploads; the metadata store does not answer or loses the answer; retention deletes every chunk; the
owner loses its lease, is replaced, goes on as a zombie and comes back. All along and at the end, everything is read and
compared (I1, I2, I3, I7, I10).

A forced take-over gives up what the old owner had confirmed but not exported. That is the one loss that Braid allows,
when somebody accepts it by name; the model gives up exactly that, and nothing else.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import msgspec
from crc32c import crc32c

from braid.metadata.memory import MemoryStore
from braid.model.batch.header import assemble, body_of, verify
from braid.model.errors import BraidError, OutOfSequence, RecoveryConflict, RecoveryUnsafe
from braid.model.ids import Epoch, Offset, ProducerId
from braid.model.topic import Durability
from braid.storage.context import StorageMode
from braid.storage.history.manifest import read_segment_manifest
from braid.storage.history.ranges import HistoryReader
from braid.storage.log.context import FileConfig, LogConfig
from braid.storage.reader import StoredBatch
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage
from braid.testing.batches import opaque_header
from braid.testing.checkers.history import Confirmed, LogModel, PromiseBroken, Stored
from braid.testing.scenarios.log_machine import (
    DESCRIPTOR,
    LARGEST_SKEW_S,
    OPEN_TIMEOUT_S,
    TOPIC,
    LogMachine,
    LogSetting,
)
from braid.testing.sim.loop import Process, Simulation, run_simulation
from braid.testing.sim.objects import MemoryObjects

CONFIRM_TIMEOUT_S = 2.0


class LogCounts(msgspec.Struct):
    """What a simulation did; adds up over seeds."""

    seeds: int = 0
    appends: int = 0
    confirms: int = 0
    retries_recognised: int = 0
    reads: int = 0
    crashes: int = 0
    kills: int = 0
    torn_tails: int = 0
    hand_overs: int = 0
    forced_takeovers: int = 0
    zombies_refused: int = 0
    chunks: int = 0
    expired_chunks: int = 0

    def add(self, other: LogCounts) -> None:
        for field in self.__struct_fields__:
            setattr(self, field, getattr(self, field) + getattr(other, field))


class LogProducer:
    def __init__(self, number: int) -> None:
        self.number = ProducerId(number)
        self.sequence = 0


class LogScenario:
    def __init__(self, simulation: Simulation, steps: int) -> None:
        self.simulation = simulation
        self.random: Random = simulation.random
        self.steps = steps
        self.counts = LogCounts(seeds=1)
        self.objects = MemoryObjects(simulation.clock)
        self.store = MemoryStore(simulation.clock)
        self.survives_power_loss = self.random.random() < 0.8
        self.mode = self.random.choice([StorageMode.SHARED_FS, StorageMode.SHARED_FS, StorageMode.LOCAL])
        with_preallocated = self.random.random() < 0.3
        self.config = LogConfig(
            durability=Durability.FSYNC if self.survives_power_loss else Durability.MEMORY,
            files=FileConfig(
                file_bytes=self.random.choice([4_096, 16_384, 65_536]),
                file_age_s=self.random.choice([1.0, 600.0]),
                first_reserve_bytes=1_024,
            ),
            max_group_bytes=self.random.choice([4_096, 1 << 20]),
            memory_sync_s=0.2,
        )
        setting = LogSetting(simulation, self.store, self.objects, self.mode, self.config, with_preallocated)
        self.machines = [LogMachine(setting, "a"), LogMachine(setting, "b")]
        self.owner: LogMachine | None = None
        self.zombies: list[tuple[Process, SegmentStorage]] = []
        self.epoch = 0
        self.opened_epoch = 0
        self.losses = 0
        self.next_producer = 0
        self.model = LogModel()
        self.duplicates: list[tuple[int | None, int, int, int]] = []
        self.stored: dict[tuple[int, int], Offset] = {}
        """Producer and first sequence of each batch that was confirmed, and where it ends."""
        self.expired_to = Offset(0)
        """Retention may have deleted what is below this offset."""
        self.earliest = Offset(0)
        """Retention has deleted what is below this offset."""
        self.seen: dict[int, Stored] = {}
        self.running = True

    async def run(self) -> LogCounts:
        await self.take_ownership(self.machines[0])
        producers = [asyncio.create_task(self.produce(), name=f"producer-{n}") for n in range(3)]
        actions: list[tuple[Callable[[], object], int]] = [
            (self.rest, 8),
            (self.crash, 4),
            (self.kill, 2),
            (self.restart, 2),
            (self.hand_over, 3),
            (self.force, 2),
            (self.read_everything, 4),
            (self.tidy, 4),
            (self.change_faults, 4),
            (self.bring_zombie_back, 2),
        ]
        chosen = self.random.choices([action for action, _ in actions], [weight for _, weight in actions], k=self.steps)
        for action in chosen:
            result = action()
            assert asyncio.iscoroutine(result)
            await result
            await asyncio.sleep(self.random.uniform(0, 0.3))
        self.running = False
        for machine in self.machines:
            machine.behave()
        finishing = asyncio.gather(*producers)
        while not finishing.done():
            await self.reopen_if_failed()
            await asyncio.wait([finishing], timeout=1.0)
        await finishing
        await self.check_the_end()
        return self.counts

    # ── clients ──────────────────────────────────────────────────────────────────────────────────────────────────────

    def new_producer(self) -> LogProducer:
        self.next_producer += 1
        return LogProducer(self.next_producer)

    def target(self) -> SegmentStorage | None:
        """Who a client believes to be the owner: usually right, sometimes a zombie."""
        if self.zombies and self.random.random() < 0.1:
            return self.random.choice(self.zombies)[1]
        return self.owner.segment if self.owner is not None else None

    async def produce(self) -> None:
        producer, losses = self.new_producer(), self.losses
        last: tuple[int, bytes] | None = None
        while self.running:
            if last is not None and self.random.random() < 0.2:
                await self.repeat(producer, *last)
            count = self.random.choice([1, 1, 2, 10])
            body = self.random.randbytes(self.random.choice([1, 60, 700, 700, 6_000]))
            while True:
                try:
                    await self.send(producer, count, body)
                    break
                except OutOfSequence as error:
                    if losses == self.losses:
                        raise PromiseBroken("I10", f"nothing was given up, but {error}") from error
                    # What this producer had sent was given up with its owner; it starts again.
                    producer, losses = self.new_producer(), self.losses
                    last = None
                except (BraidError, TimeoutError):
                    await asyncio.sleep(self.random.uniform(0.001, 0.2))
            producer.sequence += count
            last = count, body
            if self.random.random() < 0.7:
                # The longer it goes on, the slower: what counts is how often things break, not how much is stored.
                await asyncio.sleep(self.random.uniform(0, 0.2) * (1 + self.counts.confirms / 100))

    async def repeat(self, producer: LogProducer, count: int, body: bytes) -> None:
        """Send the last batch again, although it was confirmed: a sink does this when it starts again."""
        producer.sequence -= count
        losses = self.losses
        try:
            await self.send(producer, count, body)
        except OutOfSequence as error:
            if losses == self.losses and (producer.number, producer.sequence) in self.stored:
                raise PromiseBroken("I10", f"nothing was given up, but {error}") from error
        except (BraidError, TimeoutError):
            pass
        finally:
            producer.sequence += count

    async def send(self, producer: LogProducer, count: int, body: bytes) -> None:
        segment = self.target()
        if segment is None:
            raise TimeoutError
        now = self.simulation.clock.now_us()
        header = opaque_header(body, count, producer=producer.number, sequence=producer.sequence, times=(now, now))
        batch = assemble(header, body)
        verify(batch)
        self.counts.appends += 1
        appended = segment.append(batch, header)
        await asyncio.wait_for(segment.log.confirm(appended), CONFIRM_TIMEOUT_S)
        if segment.log.epoch < self.opened_epoch:
            raise PromiseBroken("I3", f"epoch {segment.log.epoch} confirmed after epoch {self.opened_epoch} had begun")
        self.counts.confirms += 1
        batch_id = producer.number, producer.sequence
        if producer.number and batch_id in self.stored and not appended.duplicate:
            raise PromiseBroken("I10", f"batch {batch_id} was confirmed, and is stored again at {appended}")
        self.stored[batch_id] = appended.next_offset
        if appended.duplicate:
            self.counts.retries_recognised += 1
            self.duplicates.append((appended.base_offset, producer.number, producer.sequence, crc32c(body)))
        else:
            assert appended.base_offset is not None
            self.model.confirm(
                Confirmed(
                    appended.base_offset,
                    count,
                    segment.log.epoch,
                    producer.number,
                    producer.sequence,
                    crc32c(body),
                )
            )

    # ── what happens to brokers ──────────────────────────────────────────────────────────────────────────────────────

    async def take_ownership(self, machine: LogMachine, *, accept_loss: bool = False) -> None:
        """Open the segment on `machine`, with as many tries, and as many crashes in the middle, as it takes."""
        for attempt in range(100):
            self.epoch += 1
            if attempt > 20:
                machine.behave()
            opening = asyncio.create_task(machine.open(Epoch(self.epoch), accept_loss=accept_loss), name="opening")
            if self.random.random() < 0.2:
                await asyncio.wait([opening], timeout=self.random.uniform(0, 0.02))
                if not opening.done():
                    self.crash_machine(machine)
            try:
                segment = await opening
            except (RecoveryUnsafe, RecoveryConflict) as error:
                raise PromiseBroken("I2", f"{machine.name} cannot open its own log again: {error}") from error
            except (BraidError, TimeoutError, asyncio.CancelledError):
                self.crash_machine(machine)
                await asyncio.sleep(self.random.uniform(0, 0.5))
                continue
            self.opened_epoch = self.epoch
            self.owner = machine
            self.counts.torn_tails += segment.recovered.torn_bytes > 0
            if segment.recovered.damage:
                raise PromiseBroken("I2", f"recovery reports damage where only power was lost: {segment.recovered}")
            if accept_loss:
                self.give_up(segment.catalog.next_offset)
            return
        raise PromiseBroken("I2", f"{machine.name} could not open the log in 100 tries")

    def give_up(self, offset: Offset) -> None:
        """The one allowed loss: what a replaced owner had confirmed and not exported."""
        self.losses += 1
        self.model.confirmed = [batch for batch in self.model.confirmed if batch.next_offset <= offset]
        self.duplicates = [each for each in self.duplicates if each[0] is not None and each[0] < offset]
        self.stored = {batch: end for batch, end in self.stored.items() if end <= offset}
        self.expired_to = min(self.expired_to, offset)
        self.seen = {base: batch for base, batch in self.seen.items() if batch.next_offset <= offset}

    def crash_machine(self, machine: LogMachine) -> None:
        """The machine loses power, or only the process dies, as far as the durability level covers it."""
        if self.owner is machine:
            self.owner = None
        self.zombies = [zombie for zombie in self.zombies if zombie[0] is not machine.process]
        if self.survives_power_loss and self.random.random() < 0.7:
            self.counts.crashes += 1
            machine.crash(power_loss=True)
        else:
            self.counts.kills += 1
            machine.crash(power_loss=False)

    async def rest(self) -> None:
        await asyncio.sleep(self.random.uniform(0, 0.5))

    async def crash(self) -> None:
        """Often in the middle of a burst of batches, so that there is something to tear, and again soon after."""
        again = True
        while again:
            machine = self.owner
            assert machine is not None
            size = self.random.choice([0, 0, 700])
            burst = [
                asyncio.create_task(self.send(LogProducer(0), 1, self.random.randbytes(size)), name="burst")
                for _ in range(self.random.choice([0, 10, 100]))
            ]
            await asyncio.sleep(self.random.uniform(0, 0.002))
            self.crash_machine(machine)
            await asyncio.gather(*burst, return_exceptions=True)
            await self.take_ownership(machine)
            again = self.random.random() < 0.4

    async def kill(self) -> None:
        machine = self.owner
        assert machine is not None
        self.counts.kills += 1
        machine.crash(power_loss=False)
        self.owner = None
        await self.take_ownership(machine)

    async def restart(self) -> None:
        machine = self.owner
        assert machine is not None
        assert machine.segment is not None
        assert machine.process is not None
        try:
            await asyncio.wait_for(machine.process.start(machine.segment.close()), OPEN_TIMEOUT_S)
        except (BraidError, TimeoutError):
            return await self.crash()
        machine.crash(power_loss=self.survives_power_loss)
        self.owner = None
        return await self.take_ownership(machine)

    async def hand_over(self) -> None:
        """A planned move, which may be interrupted at any point."""
        machine = self.owner
        assert machine is not None
        segment, process = machine.segment, machine.process
        assert segment is not None
        assert process is not None
        for _ in range(5):
            moving = asyncio.create_task(
                asyncio.wait_for(process.start(segment.hand_over()), OPEN_TIMEOUT_S), name="moving"
            )
            if self.random.random() < 0.3:
                await asyncio.wait([moving], timeout=self.random.uniform(0, 0.05))
                if not moving.done():
                    self.crash_machine(machine)
                    await asyncio.wait([moving])
                    moving.cancelled() or moving.exception()
                    await asyncio.sleep(0.3)
                    return await self.take_ownership(machine)
            try:
                await moving
            except (BraidError, TimeoutError):
                await asyncio.sleep(self.random.uniform(0, 0.5))
                continue
            self.counts.hand_overs += 1
            self.owner = None
            machine.crash(power_loss=self.survives_power_loss and self.random.random() < 0.5)
            target = machine if self.mode is StorageMode.LOCAL else self.random.choice(self.machines)
            self.retire_zombie(target)
            return await self.take_ownership(target)
        return await self.crash()

    async def force(self) -> None:
        """The owner is cut off, its lease runs out, and the other broker takes over, with the loss accepted."""
        machine = self.owner
        assert machine is not None
        if self.mode is StorageMode.LOCAL or machine.lease is None:
            return
        target = next(other for other in self.machines if other is not machine)
        self.retire_zombie(target)
        machine.lease.cut = True
        await asyncio.sleep(max(0.0, machine.lease.deadline - self.simulation.clock.monotonic()) + 0.01)
        if machine.process is not None and machine.segment is not None:
            self.zombies.append((machine.process, machine.segment))
        self.owner = None
        self.counts.forced_takeovers += 1
        await self.take_ownership(target, accept_loss=True)

    def retire_zombie(self, machine: LogMachine) -> None:
        if machine is not self.owner and machine.process is not None:
            self.crash_machine(machine)

    async def bring_zombie_back(self) -> None:
        """A zombie tries to write history and to hand over. It may fail in any way, but it changes nothing."""
        for process, segment in self.zombies:
            before = await self.store.list("/storage/")
            outcome = asyncio.wait(
                [process.start(segment.exporter.export_closed()), process.start(segment.hand_over())],
                timeout=OPEN_TIMEOUT_S,
            )
            done, _ = await outcome
            for task in done:
                if not task.cancelled() and task.exception() is None and task.result():
                    raise PromiseBroken("I3", f"epoch {segment.log.epoch} wrote history after it was replaced")
            self.counts.zombies_refused += 1
            after = await self.store.list("/storage/")
            held = f'"epoch":{segment.log.epoch},'.encode()
            for entry in after.entries:
                if entry not in before.entries and held in entry.value:
                    raise PromiseBroken("I3", f"epoch {segment.log.epoch} changed {entry.key} after it was replaced")
        self.zombies.clear()

    async def tidy(self) -> None:
        """Exporting, ageing and reclaiming, as a housekeeper would do now and then."""
        machine = self.owner
        assert machine is not None
        segment, process = machine.segment, machine.process
        assert segment is not None
        assert process is not None

        async def housekeeping() -> None:
            if self.random.random() < 0.5:
                await segment.log.rotate()
            if self.mode.exports_continuously:
                await segment.exporter.export_closed()
            chunks = len(segment.catalog.chunks)
            everything = self.random.random() < 0.15
            policy = RetentionPolicy(max_age_s=-LARGEST_SKEW_S) if everything else RetentionPolicy()
            try:
                if everything:
                    self.expired_to = segment.log.end
                await segment.apply_retention(policy, keep_local_bytes=self.random.choice([0, 20_000]))
            finally:
                if everything:
                    self.expired_to = segment.log.end  # The log may have grown meanwhile.
            self.counts.expired_chunks += max(0, chunks - len(segment.catalog.chunks))
            await segment.sweep()

        try:
            await asyncio.wait_for(process.start(housekeeping()), OPEN_TIMEOUT_S)
        except (BraidError, TimeoutError):
            await self.reopen_if_failed()

    async def change_faults(self) -> None:
        for machine in self.machines:
            machine.misbehave()
        await self.reopen_if_failed()

    async def reopen_if_failed(self) -> None:
        """A log that has stopped (failed sync, full disk) is opened again, as a broker would."""
        machine = self.owner
        if machine is not None and machine.segment is not None and machine.segment.log.failure is not None:
            machine.behave()
            await self.crash()

    # ── checks ───────────────────────────────────────────────────────────────────────────────────────────────────────

    async def read_everything(self) -> None:
        machine = self.owner
        assert machine is not None
        segment, process = machine.segment, machine.process
        assert segment is not None
        assert process is not None
        confirmed = list(self.model.confirmed)
        losses = self.losses
        try:
            start, stored = await asyncio.wait_for(process.start(self.read_all(segment)), 120)
        except (BraidError, TimeoutError):
            return await self.reopen_if_failed()
        self.counts.reads += len(stored)
        model = LogModel()
        model.confirmed = confirmed
        model.check(stored, start)
        self.check_start(start)
        self.check_seen(stored, start)
        if losses == self.losses:
            self.seen.update((batch.base_offset, batch) for batch in stored)
        return None

    async def read_all(self, segment: SegmentStorage) -> tuple[Offset, list[Stored]]:
        """Read all that retention has left, and say where it begins."""
        start = segment.earliest
        reader = segment.reader(start)
        stored: list[Stored] = []
        while batches := await reader.read_available(self.random.choice([1, 1_000, 1 << 20])):
            stored.extend(_stored(batch) for batch in batches)
        return start, stored

    def check_start(self, start: Offset) -> None:
        """Retention takes only what may expire (I2), and what it has taken does not come back."""
        if start > self.expired_to:
            raise PromiseBroken("I2", f"the log begins at {start}, and nothing expired above {self.expired_to}")
        if start < self.earliest:
            raise PromiseBroken("retention", f"the log begins at {start} again, after it had begun at {self.earliest}")
        self.earliest = start

    def check_seen(self, stored: list[Stored], start: Offset) -> None:
        """I7: what a reader was once shown is still there, unless retention has deleted it."""
        now = {batch.base_offset: batch for batch in stored}
        for base, batch in self.seen.items():
            if base >= start and now.get(base) != batch:
                raise PromiseBroken("I7", f"a reader was shown {batch}; now there is {now.get(base)}")

    async def check_the_end(self) -> None:
        machine = self.owner
        assert machine is not None
        self.crash_machine(machine)
        await self.take_ownership(machine)
        machine = self.owner
        assert machine is not None
        segment = machine.segment
        assert segment is not None
        start, stored = await self.read_all(segment)
        self.model.check(stored, start)
        self.check_start(start)
        self.check_seen(stored, start)
        by_sequence = {(batch.producer_id, batch.first_sequence): batch for batch in stored}
        for base, producer, sequence, digest in self.duplicates:
            found = by_sequence.get((producer, sequence))
            if found is None and (base or 0) < start:
                continue
            if found is None or found.digest != digest or base not in (None, found.base_offset):
                raise PromiseBroken("I10", f"a retry of {producer}:{sequence} was confirmed at {base}, found {found}")
        await segment.hand_over()
        await self.check_manifest(stored)

    async def check_manifest(self, stored: list[Stored]) -> None:
        """Without broker and metadata store, the objects alone tell the same history."""
        manifest = await read_segment_manifest(self.objects, TOPIC, DESCRIPTOR)
        assert manifest is not None
        self.counts.chunks += len(manifest.chunks)
        history = HistoryReader(self.objects, manifest)
        from_objects = [
            _stored(batch)
            async for batches in history.read(
                history.earliest, history.next_offset, self.random.choice([1, 1_000, 1 << 20])
            )
            for batch in batches
        ]
        if from_objects != stored:
            raise PromiseBroken("I2", "the manifest's chunks do not hold what the log holds")


def _stored(batch: StoredBatch) -> Stored:
    header = batch.header
    digest = crc32c(body_of(batch.data, header))
    return Stored(header.base_offset, header.count, header.epoch, header.producer_id, header.first_sequence, digest)


def simulate_log(seed: int, steps: int = 40) -> LogCounts:
    """Run one seed; raises `PromiseBroken` with the seed in a note."""

    async def main(simulation: Simulation) -> LogCounts:
        return await LogScenario(simulation, steps).run()

    return run_simulation(seed, main)
