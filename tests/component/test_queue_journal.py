"""A queue's journal on the simulated disk: group commit, crashes at every write, damage, failing disks, and every kind
of end."""

from __future__ import annotations

import asyncio

import pytest

from braid.model.errors import BraidError, LogClosed, LogDamaged, LogFailed
from braid.model.ids import Offset
from braid.model.queue.events import QueueEvents, QueueImage, QueueSnapshot, Returned
from braid.storage import queue_journal
from braid.storage.queue_journal import MAGIC, STEP_BYTES, QueueJournal, read_image
from braid.testing.sim.disk import DiskFaults, SimulatedDisk
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.storage import NotingDisk
from tests.kits.waiting import until

FOLDER = "queues/work"
BEGIN = QueueSnapshot(5, 0)


def settled(*offsets: int) -> QueueEvents:
    return QueueEvents(tuple((each, each + 1) for each in offsets))


def offsets_of(image: QueueImage | None, end: int = 1_000) -> set[int]:
    assert image is not None
    return {each for each in range(end) if each in image.settled}


async def begun(disk: SimulatedDisk | NotingDisk, snapshot: QueueSnapshot = BEGIN) -> QueueJournal:
    journal = await QueueJournal.open(disk, FOLDER)
    await journal.durable.reached(journal.begin_anew(snapshot))
    return journal


def is_long(journal: QueueJournal) -> bool:
    return journal.is_long


def files(disk: SimulatedDisk) -> list[str]:
    return [path.rpartition("/")[2] for path in disk.paths()]


async def test_a_journal_that_was_never_written_holds_nothing(disk: SimulatedDisk) -> None:
    journal = await QueueJournal.open(disk, FOLDER)
    assert (journal.image, journal.last_number, journal.durable.value) == (None, 0, 0)
    await journal.close()
    assert await read_image(disk, FOLDER) is None
    assert disk.paths() == []


async def test_a_journal_gives_back_its_checkpoint_and_all_events(disk: SimulatedDisk) -> None:
    journal = await begun(disk, QueueSnapshot(5, 3, ((10, 12),), (Returned(Offset(4), 1, 9, "why"),)))
    journal.append(settled(3, 7))
    last = journal.append(QueueEvents(returned=(Returned(Offset(8), 2, 0),)))
    await journal.close()
    again = await QueueJournal.open(disk, FOLDER)
    assert again.image is not None
    assert again.image.placement == 5
    assert offsets_of(again.image) == {0, 1, 2, 3, 7, 10, 11}
    assert again.image.returned == {4: Returned(Offset(4), 1, 9, "why"), 8: Returned(Offset(8), 2, 0)}
    assert again.last_number == again.durable.value == last
    await again.close()


async def test_events_that_gather_during_a_sync_go_into_the_next_write_together(disk: SimulatedDisk) -> None:
    noting = NotingDisk(disk)
    journal = await begun(noting)
    disk.faults = DiskFaults(sync_s=(0.01, 0.01))
    noting.writes.clear()
    first = journal.append(settled(0))
    await until(lambda: len(noting.writes) == 1)
    gathered = [journal.append(settled(each)) for each in range(1, 101)]
    await journal.durable.reached(first)
    assert journal.durable.value == first
    await journal.durable.reached(gathered[-1])
    assert [write.sync for write in noting.writes] == [True, True]
    await journal.close()
    assert offsets_of(await read_image(disk, FOLDER)) == set(range(101))


async def test_an_event_is_durable_only_when_the_disk_has_it(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    disk.faults = DiskFaults(sync_s=(5.0, 5.0))
    number = journal.append(settled(0))
    await asyncio.sleep(3)
    assert journal.durable.value < number
    await journal.durable.reached(number)
    (path,) = disk.paths()
    assert not disk.unsynced(path)


@pytest.mark.parametrize("seed", range(40))
def test_a_crash_at_any_moment_loses_nothing_that_was_durable_and_invents_nothing(seed: int) -> None:
    async def main(simulation: Simulation) -> None:
        disk = SimulatedDisk(simulation.random)
        random = simulation.random
        confirmed: set[int] = set()
        taken: set[int] = set()
        for _ in range(4):
            journal = await QueueJournal.open(disk.mount(), FOLDER)
            known = journal.image or QueueImage(5, 0)
            journal.begin_anew(known.snapshot())
            waiting: list[tuple[int, set[int]]] = []
            for _ in range(random.randrange(1, 60)):
                some = {random.randrange(500) for _ in range(random.choice((1, 1, 3, 200)))}
                taken |= some
                known.apply(settled(*some))
                if random.random() < 0.1:
                    waiting.append((journal.begin_anew(known.snapshot()), some))
                else:
                    waiting.append((journal.append(settled(*some)), some))
                await asyncio.sleep(random.choice((0, 0, 1e-4, 1e-3)))
            for number, some in waiting:
                if number <= journal.durable.value:
                    confirmed |= some
            disk.crash()
            await journal.abandon()
            image = await read_image(disk, FOLDER)
            if image is None:
                assert not confirmed
                continue
            found = offsets_of(image)
            assert confirmed <= found <= taken
            confirmed |= found

    run_simulation(seed, main)


@pytest.mark.parametrize("seed", range(30))
def test_a_crash_while_a_journal_begins_anew_leaves_the_old_file_or_the_new_one(seed: int) -> None:
    async def main(simulation: Simulation) -> None:
        disk = SimulatedDisk(simulation.random)
        journal = await begun(disk.mount())
        await journal.durable.reached(journal.append(settled(0, 4)))
        journal.begin_anew(QueueSnapshot(5, 1, ((4, 5), (8, 9))))
        await asyncio.sleep(simulation.random.uniform(0, 0.008))
        was_durable = journal.durable.value == journal.last_number
        disk.crash()
        await journal.abandon()
        found = offsets_of(await read_image(disk, FOLDER))
        assert found == {0, 4, 8} if was_durable else found in ({0, 4}, {0, 4, 8})
        again = await begun(disk, QueueSnapshot(5, 1, ((4, 5),)))
        await again.close()
        assert len([each for each in files(disk) if each.endswith(".queue")]) == 1, "older files are removed"

    run_simulation(seed, main)


async def test_a_torn_frame_is_cut_and_the_journal_goes_on(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    await journal.durable.reached(journal.append(settled(0)))
    await journal.durable.reached(journal.append(settled(*range(2, 100, 2))))
    await journal.close()
    (path,) = disk.paths()
    content = disk.content(path)
    last = content.rindex(MAGIC)
    disk.corrupt(path, last + 40, bytes(50))
    again = await QueueJournal.open(disk, FOLDER)
    assert offsets_of(again.image) == {0}
    await again.durable.reached(again.append(settled(1)))
    await again.close()
    assert offsets_of(await read_image(disk, FOLDER)) == {0, 1}


@pytest.mark.parametrize("frame", [0, 1, 2])
async def test_damage_before_a_whole_frame_is_reported_and_the_journal_is_not_opened(
    disk: SimulatedDisk, frame: int
) -> None:
    journal = await begun(disk)
    for each in range(4):
        await journal.durable.reached(journal.append(settled(2 * each)))
    await journal.close()
    (path,) = disk.paths()
    content, at = disk.content(path), -1
    for _ in range(frame + 1):
        at = content.index(MAGIC, at + 1)
    disk.flip(path, at + 25, 3)
    with pytest.raises(LogDamaged, match=r"00000001\.queue is damaged at byte"):
        await QueueJournal.open(disk, FOLDER)
    with pytest.raises(LogDamaged):
        await read_image(disk, FOLDER)


async def test_a_damaged_journal_is_begun_anew_by_a_caller_that_knows_everything(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    await journal.close()
    (path,) = disk.paths()
    disk.flip(path, 25, 3)
    journal = await QueueJournal.open(disk, FOLDER, may_be_damaged=True)
    assert journal.image is None
    assert files(disk) == ["00000001.queue"], "the old file stays until the new one is whole"
    await journal.durable.reached(journal.begin_anew(QueueSnapshot(5, 9)))
    await journal.close()
    assert files(disk) == ["00000002.queue"]
    assert offsets_of(await read_image(disk, FOLDER)) == set(range(9))


@pytest.mark.parametrize("anew", [False, True], ids=["append", "begin-anew"])
async def test_a_full_disk_is_waited_for_and_confirms_nothing_meanwhile(disk: SimulatedDisk, anew: bool) -> None:
    journal = await begun(disk)
    await journal.durable.reached(journal.append(settled(0)))
    disk.faults = DiskFaults(capacity_bytes=1)
    number = journal.begin_anew(QueueSnapshot(5, 2)) if anew else journal.append(settled(*range(1, 90_000, 2)))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(60):
            await journal.durable.reached(number)
    later = journal.append(settled(2))
    disk.faults = DiskFaults()
    await journal.durable.reached(later)
    await journal.close()
    assert 2 in offsets_of(await read_image(disk, FOLDER))


async def test_a_file_grows_when_a_full_disk_has_room_again(disk: SimulatedDisk) -> None:
    """Otherwise each later write would make the file longer, and its sync would cost two writes."""
    journal = await begun(disk)
    (path,) = disk.paths()
    size = len(disk.content(path))
    disk.faults = DiskFaults(capacity_bytes=1)
    number = journal.append(settled(*range(1, 90_000, 2)))
    await asyncio.sleep(10)
    assert len(disk.content(path)) == size
    disk.faults = DiskFaults()
    await journal.durable.reached(number)
    assert len(disk.content(path)) > STEP_BYTES + size
    await journal.close()


async def test_what_comes_while_a_checkpoint_waits_for_room_is_written_after_it(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    disk.faults = DiskFaults(capacity_bytes=1)
    journal.begin_anew(QueueSnapshot(5, 1))
    await until(lambda: not journal._pending)  # It is being written.
    number = journal.append(settled(7))
    await asyncio.sleep(2)
    disk.faults = DiskFaults()
    await journal.durable.reached(number)
    await journal.close()
    assert offsets_of(await read_image(disk, FOLDER)) == {0, 7}


async def test_a_journal_on_a_full_disk_can_be_closed(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    disk.faults = DiskFaults(capacity_bytes=1)
    number = journal.append(settled(*range(1, 90_000, 2)))
    await journal.close()
    assert journal.durable.value < number


@pytest.mark.parametrize("anew", [False, True], ids=["append", "begin-anew"])
async def test_a_failing_disk_fails_the_watermark_and_all_that_comes_later(disk: SimulatedDisk, anew: bool) -> None:
    journal = await begun(disk)
    failures: list[BraidError] = []
    journal.on_failure = failures.append
    await journal.durable.reached(journal.append(settled(0)))
    disk.faults = DiskFaults(sync_failure=1.0)
    number = journal.begin_anew(QueueSnapshot(5, 2)) if anew else journal.append(settled(*range(1, 90_000, 2)))
    with pytest.raises(LogFailed):
        await journal.durable.reached(number)
    assert [type(each) for each in failures] == [LogFailed]
    assert journal.failure is failures[0]
    with pytest.raises(LogFailed):
        journal.append(settled(1))
    with pytest.raises(LogFailed):
        await journal.durable.reached(number)
    await journal.close()
    disk.faults = DiskFaults()
    assert 0 in offsets_of(await read_image(disk, FOLDER))


async def test_a_long_journal_says_so_and_a_checkpoint_makes_it_short(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_journal, "REWRITE_BYTES", 4_000)
    journal = await begun(disk)
    image = QueueImage(5, 0)
    count = 0
    while not is_long(journal):
        image.apply(settled(count))
        await journal.durable.reached(journal.append(settled(count)))
        count += 1
    assert 50 < count < 200
    number = journal.begin_anew(image.snapshot())
    assert not is_long(journal), "one checkpoint is enough, also while it waits for the disk"
    await journal.durable.reached(number)
    assert not is_long(journal)
    assert files(disk) == ["00000002.queue"]
    await journal.durable.reached(journal.append(settled(count)))
    await journal.close()
    assert offsets_of(await read_image(disk, FOLDER)) == set(range(count + 1))


async def test_a_checkpoint_takes_the_place_of_events_that_wait_before_it(disk: SimulatedDisk) -> None:
    noting = NotingDisk(disk)
    journal = await begun(noting)
    noting.writes.clear()
    journal.append(settled(1))
    journal.begin_anew(QueueSnapshot(6, 4))
    last = journal.append(settled(7))
    await journal.durable.reached(last)
    assert len(noting.writes) == 2, "one checkpoint and one frame of events"
    await journal.close()
    image = await read_image(disk, FOLDER)
    assert image is not None
    assert image.placement == 6
    assert offsets_of(image) == {0, 1, 2, 3, 7}


async def test_a_file_grows_in_steps(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    (path,) = disk.paths()
    size = len(disk.content(path))
    assert STEP_BYTES < size < STEP_BYTES + 1_000
    await journal.durable.reached(journal.append(settled(0)))
    assert len(disk.content(path)) == size
    await journal.durable.reached(journal.append(settled(*range(1, 90_000, 2))))
    assert len(disk.content(path)) > STEP_BYTES + size
    await journal.close()
    assert len(offsets_of(await read_image(disk, FOLDER), 90_000)) == 45_001


async def test_closing_writes_what_was_taken_and_closing_twice_is_fine(disk: SimulatedDisk) -> None:
    noting = NotingDisk(disk)
    journal = await begun(noting)
    failures: list[BraidError] = []
    journal.on_failure = failures.append
    number = journal.append(settled(0))
    await journal.close()
    assert journal.durable.value == number
    await journal.close()
    await journal.abandon()
    with pytest.raises(LogClosed):
        journal.append(settled(1))
    assert failures == [], "an end is no failure"
    assert noting.open_files == 0
    assert offsets_of(await read_image(disk, FOLDER)) == {0}


async def test_an_abandoned_journal_writes_nothing_more(disk: SimulatedDisk) -> None:
    journal = await begun(disk)
    number = journal.append(settled(0))
    await journal.abandon()
    with pytest.raises(LogClosed):
        await journal.durable.reached(number)
    assert offsets_of(await read_image(disk, FOLDER)) == set()


async def test_reading_an_image_leaves_no_file_open(disk: SimulatedDisk) -> None:
    noting = NotingDisk(disk)
    journal = await begun(noting)
    await journal.close()
    (path,) = disk.paths()
    await read_image(noting, FOLDER)
    disk.flip(path, 25, 3)
    with pytest.raises(LogDamaged):
        await read_image(noting, FOLDER)
    assert noting.open_files == 0


async def test_a_frame_that_no_reader_would_take_is_not_written(
    disk: SimulatedDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal fails, and what was confirmed before stays readable."""
    journal = await begun(disk)
    await journal.durable.reached(journal.append(settled(0)))
    monkeypatch.setattr(queue_journal, "MAX_FRAME_BYTES", 100)
    with pytest.raises(LogFailed, match="do not fit into a frame"):
        await journal.durable.reached(
            journal.begin_anew(QueueSnapshot(5, 0, tuple((2 * n, 2 * n + 1) for n in range(99))))
        )
    await journal.close()
    assert offsets_of(await read_image(disk, FOLDER)) == {0}
