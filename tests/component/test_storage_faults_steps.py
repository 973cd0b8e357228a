"""Every step of opening, appending, exporting and handing over fails once: by a crash, or by lost metadata answers."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest

from braid.metadata import paths
from braid.metadata.memory import Fault
from braid.metadata.store import Compare, Put
from braid.model.errors import (
    LogSealed,
    MetadataError,
    MetadataUnavailable,
    ObjectStoreUnavailable,
    RecoveryUnsafe,
    StorageError,
)
from braid.storage.context import StorageMode
from braid.storage.log.recovery import recover
from braid.storage.retention import RetentionPolicy
from braid.testing.sim.loop import Simulation
from braid.testing.sim.objects import Faults
from tests.kits.fault_scenes import (
    DESCRIPTOR,
    FOLDER,
    TOPIC,
    Broker,
    Ending,
    Moment,
    Scene,
    refusal,
    simulate,
)

pytestmark = pytest.mark.seed(0)


SMALL_FILES = 600
"""Four batches a file."""

every_moment = pytest.mark.parametrize("moment", list(Moment))
every_ending = pytest.mark.parametrize("ending", list(Ending))


def at_every_step(run: Callable[[int], bool], *, at_least: int) -> None:
    """`run(n)` breaks the n-th step and says whether there was one."""
    for step in itertools.count(1):
        if not run(step):
            break
    assert step > at_least, "the trap was not where the work is"


async def ends_at(broker: Broker, step: int, moment: Moment, ending: Ending, *, work: Callable[[], object]) -> bool:
    """Let the broker do `work` and die at the step; False if it was done before that."""
    broker.trap.arm(step, moment, ending)
    result = work()
    assert asyncio.iscoroutine(result)
    try:
        await result
    except StorageError:
        assert broker.trap.steps >= step
        return True
    finally:
        broker.trap.disarm()
    return False


async def check_epochs(scene: Scene, *brokers: Broker) -> None:
    """No disk holds a batch of an epoch that the metadata does not know."""
    frontier = (await scene.catalog()).frontier
    for broker in brokers:
        local = await recover(broker.disk, FOLDER)
        assert local.last_epoch <= (frontier.epoch if frontier else 0)


async def a_log_with_a_torn_end(scene: Scene, broker: Broker) -> None:
    """Two exported files, one closed and one open file, an unfinished write, and a machine without power."""
    segment = await broker.open()
    await scene.publish(segment, 8)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    await scene.publish(segment, 3)
    await scene.publish(segment, 3)
    scene.append_unconfirmed(segment, 3)
    await asyncio.sleep(0.0001)
    broker.power_loss()


@every_moment
@every_ending
def test_a_crash_at_any_step_of_reopening_keeps_what_was_confirmed(moment: Moment, ending: Ending) -> None:
    """Seen elsewhere: An epoch changed in memory before it is persisted."""

    def run(step: int) -> bool:
        async def main(scene: Scene) -> bool:
            a, b = scene.broker("a"), scene.broker("b")
            await a_log_with_a_torn_end(scene, a)
            died = await ends_at(a, step, moment, ending, work=a.open)
            await check_epochs(scene, a)
            assert isinstance(await refusal(b.open()), RecoveryUnsafe)  # a's tail is on a's disk only
            if not died:
                a.kill()
            segment = await a.open()
            await scene.check(segment)
            await scene.publish(segment, 5)
            await a.run(segment.hand_over())
            await scene.check(await b.open())
            return died

        return simulate(main, seed=step, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=20)


@every_moment
@every_ending
def test_a_crash_at_any_step_of_a_new_owners_opening_leaves_the_seal_or_a_beginning(
    moment: Moment, ending: Ending
) -> None:
    """Seen elsewhere: The new owner clears the sealed marker before anything of its own is durable; its crash loses the
    boundary."""

    def run(step: int) -> bool:
        async def main(scene: Scene) -> bool:
            a, b, c = scene.broker("a"), scene.broker("b"), scene.broker("c")
            await a_log_with_a_torn_end(scene, a)
            await a.run((await a.open()).hand_over())
            died = await ends_at(b, step, moment, ending, work=b.open)
            await check_epochs(scene, a, b)
            still_sealed = (await scene.catalog()).sealed is not None
            if not died:
                b.kill()
            if still_sealed:
                segment = await scene.broker("c").open()
            else:
                assert isinstance(await refusal(c.open()), RecoveryUnsafe)
                segment = await b.open()
            await scene.check(segment)
            first = await scene.publish(segment, 3)
            assert first[0] >= max(offset for offset, _ in scene.confirmed.items() if offset not in first) + 1
            await scene.check(segment)
            return died

        return simulate(main, seed=step, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=8)


@every_moment
@every_ending
def test_a_crash_at_any_step_of_handing_over_can_be_picked_up(moment: Moment, ending: Ending) -> None:
    """Seen elsewhere: A failed seal is never retried."""

    def run(step: int) -> bool:
        async def main(scene: Scene) -> bool:
            a, b = scene.broker("a"), scene.broker("b")
            await a_log_with_a_torn_end(scene, a)
            segment = await a.open()
            await scene.publish(segment, 6)
            died = await ends_at(a, step, moment, ending, work=lambda: a.run(segment.hand_over()))
            if not died:
                a.kill()
            if (await scene.catalog()).sealed is not None:
                segment = await b.open()
            else:
                assert isinstance(await refusal(b.open()), RecoveryUnsafe)
                segment = await a.open()
            await scene.check(segment)
            await scene.publish(segment, 3)
            await scene.check(segment)
            return died

        return simulate(main, seed=step, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=40)


@every_moment
@every_ending
def test_a_crash_at_any_step_of_ending_a_log_leaves_it_open_or_ended_for_ever(moment: Moment, ending: Ending) -> None:
    def run(step: int) -> bool:
        async def main(scene: Scene) -> bool:
            a, b = scene.broker("a"), scene.broker("b")
            segment = await a.open()
            await scene.publish(segment, 6)

            async def end_log() -> None:
                assert await segment.end_log() == 6
                await segment.log.rotate()

            died = await ends_at(a, step, moment, ending, work=lambda: a.run(end_log()))
            ended = (await scene.catalog()).end
            assert ended in (None, 6)
            assert died or ended == 6
            if not died:
                a.kill()
            segment = await a.open()
            assert segment.log.sealed or ended is None
            await end_log()
            await segment.exporter.export_closed()
            a.kill()
            segment = await b.open()  # without consent to a loss
            await scene.check(segment)
            with pytest.raises(LogSealed):
                scene.append_unconfirmed(segment, 1)
            return died

        return simulate(main, seed=step, file_bytes=SMALL_FILES, mode=StorageMode.SHARED_FS)

    at_every_step(run, at_least=5)


@every_moment
@every_ending
def test_a_crash_at_any_step_of_appending_and_rotating_keeps_what_was_confirmed(moment: Moment, ending: Ending) -> None:
    """Seen elsewhere: The ack means "queued in memory": a crash loses up to seconds of acked messages."""

    def run(step: int) -> bool:
        async def main(scene: Scene) -> bool:
            a = scene.broker("a")
            segment = await a.open()

            async def work() -> None:
                for count in (1, 3, 5, 2, 1):
                    await scene.publish(segment, count)
                await segment.log.rotate()

            died = await ends_at(a, step, moment, ending, work=lambda: a.run(work()))
            if not died:
                a.power_loss()
            segment = await a.open()
            assert segment.recovered.damage == []
            await scene.check(segment)
            await scene.publish(segment, 3)
            await scene.check(segment)
            return died

        return simulate(main, seed=step, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=15)


every_fault = pytest.mark.parametrize("fault", [Fault.UNAVAILABLE, Fault.UNCERTAIN])


@every_fault
@pytest.mark.parametrize("sealed", [True, False])
def test_opening_is_right_after_any_single_metadata_failure(fault: Fault, sealed: bool) -> None:
    def run(number: int) -> bool:
        async def main(scene: Scene) -> bool:
            a = scene.broker("a")
            await a_log_with_a_torn_end(scene, a)
            if sealed:
                await a.run((await a.open()).hand_over())
                a = scene.broker("b")
            reached = a.fail_metadata(number, fault)
            try:
                segment = await a.open()
            except MetadataError:
                segment = await a.open()
            await scene.check(segment)
            await scene.publish(segment, 5)
            frontier = (await scene.catalog()).frontier
            assert frontier is not None
            assert (frontier.epoch, frontier.begun) == (scene.epoch, True)
            return reached()

        return simulate(main, seed=number, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=3)


@every_fault
def test_handing_over_is_right_after_any_single_metadata_failure(fault: Fault) -> None:
    def run(number: int) -> bool:
        async def main(scene: Scene) -> bool:
            a, b = scene.broker("a"), scene.broker("b")
            await a_log_with_a_torn_end(scene, a)
            segment = await a.open()
            await scene.publish(segment, 6)
            reached = a.fail_metadata(number, fault)
            try:
                await a.run(segment.hand_over())
            except MetadataError:
                await a.run(segment.hand_over())
            died = reached()
            segment = await b.open()
            await scene.check(segment)
            assert segment.log.end == max(scene.confirmed) + 1
            return died

        return simulate(main, seed=number, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=4)


@every_fault
def test_exporting_is_right_after_any_two_metadata_failures_in_a_row(fault: Fault) -> None:
    """A lost answer whose read-back fails too: the next try must find out what happened."""

    def run(number: int) -> bool:
        async def main(scene: Scene) -> bool:
            a = scene.broker("a")
            segment = await a.open()
            await scene.publish(segment, 10)
            await segment.log.rotate()
            requests = 0

            def fail_twice(_request: str) -> Fault:
                nonlocal requests
                requests += 1
                return fault if requests in (number, number + 1) else Fault.NONE

            a.store.fault = fail_twice
            while True:
                try:
                    await a.run(segment.exporter.export_closed())
                    break
                except MetadataError:
                    continue
            reached = requests > number
            catalog = await scene.catalog()
            assert catalog.next_offset == 10
            assert catalog.chunks == segment.catalog.chunks
            await segment.apply_retention(RetentionPolicy())
            await scene.check(segment)
            return reached

        return simulate(main, seed=number, file_bytes=SMALL_FILES)

    at_every_step(run, at_least=2)


async def test_a_write_whose_outcome_is_unknown_is_never_mistaken_for_another_one(simulation: Simulation) -> None:
    """The store loses the answer to a removal and the read-back; the seal that follows must really be written."""
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a, b = scene.broker("a"), scene.broker("b")
    segment = await a.open()
    await scene.publish(segment, 10)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    a.store.fault = lambda request: Fault.UNCERTAIN if request == "txn" else Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable):
        await a.run(segment.apply_retention(RetentionPolicy(max_bytes=1_500)))
    a.store.fault = lambda _request: Fault.NONE
    await a.run(segment.hand_over())
    assert (await scene.catalog()).sealed is not None
    segment = await b.open()
    await scene.check(segment, segment.earliest)


async def test_after_a_removal_of_unknown_outcome_every_listed_chunk_still_has_its_object(
    simulation: Simulation,
) -> None:
    scene = Scene(simulation, file_bytes=SMALL_FILES)
    a = scene.broker("a")
    segment = await a.open()
    await scene.publish(segment, 20)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    size = segment.catalog.chunks[0].size
    a.store.fault = lambda request: Fault.UNCERTAIN if request == "txn" else Fault.UNAVAILABLE
    with pytest.raises(MetadataUnavailable):
        await a.run(segment.apply_retention(RetentionPolicy(max_bytes=4 * size)))
    a.store.fault = lambda _request: Fault.NONE
    await a.run(segment.apply_retention(RetentionPolicy(max_bytes=2 * size)))
    catalog = await scene.catalog()
    assert catalog.chunks == segment.catalog.chunks
    assert len(catalog.chunks) == 2
    for chunk in catalog.chunks:
        await scene.objects.stat(f"{TOPIC}/{DESCRIPTOR}/{chunk.object}")


async def test_handing_over_again_after_its_transaction_happened_is_no_fight_with_oneself(scene: Scene) -> None:
    """Seen elsewhere: A failed seal is never retried. Here the seal was written, and what follows it failed."""
    a, b = scene.broker("a"), scene.broker("b")
    record = paths.ownership(TOPIC, DESCRIPTOR)
    serving = await scene.store.txn([], [Put(record, b"SERVING")])
    segment = await a.open()
    await scene.publish(segment, 3)
    await segment.log.rotate()
    await segment.exporter.export_closed()
    a.objects.faults = Faults(fails_before=1.0)  # all that is left to store is the last manifest
    ending = ([Compare(record, serving.revision)], [Put(record, b"SEALED")])
    with pytest.raises(ObjectStoreUnavailable):
        await a.run(segment.hand_over(*ending))
    assert (await scene.catalog()).sealed is not None
    a.objects.faults = Faults()
    await a.run(segment.hand_over(*ending))
    entry = await scene.store.get(record)
    assert entry is not None
    assert entry.value == b"SEALED"
    assert [path for path in a.disk.paths() if path.startswith(FOLDER)] == []
    await scene.check(await b.open())
