"""The log's simulation holds its promises, is deterministic, and has teeth: each broken promise makes it fail."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence

import msgspec
import pytest

from braid.metadata.store import Condition, Operation, Put
from braid.model.batch.header import BatchHeader, padded
from braid.model.errors import BraidError
from braid.ports.disk import Buffer, Disk, DiskFile
from braid.storage import segment_recovery
from braid.storage.history.catalog import Catalog, ChunkDescriptor, Frontier
from braid.storage.log import recovery
from braid.storage.log.log import Log
from braid.storage.log.producers import ProducerTable
from braid.storage.log.recovery import RecoveredLog, Tail
from braid.storage.log.writer import WalWriter
from braid.storage.segment import SegmentStorage
from braid.testing.scenarios.log_simulation import LogCounts, simulate_log

SEEDS = [3, 17, 41, 97, *range(1_000, 1_021)]
FIRST_SEEDS = range(60)
"""The seeds with which `simulate log` begins."""


@functools.cache
def counted(seed: int) -> LogCounts:
    return simulate_log(seed)


@pytest.mark.xdist_group("counted-seeds")
@pytest.mark.parametrize("seed", SEEDS)
def test_no_promise_breaks(seed: int) -> None:
    assert counted(seed).confirms > 0


@pytest.mark.parametrize("seed", FIRST_SEEDS)
def test_the_first_seeds_break_no_promise(seed: int) -> None:
    assert simulate_log(seed).seeds == 1


@pytest.mark.xdist_group("counted-seeds")
def test_the_seeds_together_meet_everything_that_can_happen() -> None:
    total = LogCounts()
    for seed in SEEDS:
        total.add(counted(seed))
    for field in total.__struct_fields__:
        assert getattr(total, field) > 0, f"no seed has {field}"


@pytest.mark.parametrize("seed", [7, 1_003])
def test_the_same_seed_does_the_same(seed: int) -> None:
    first = simulate_log(seed)
    gc.collect()
    assert simulate_log(seed) == first


# ── teeth ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def append_behind_torn_bytes(patch: pytest.MonkeyPatch) -> None:
    repair = recovery.repair

    async def keep_garbage(disk: Disk, folder: str, recovered: recovery.RecoveredLog) -> None:
        tail = recovered.tail
        if tail is not None and tail.garbage_end > tail.good_end:
            tail.file.batch_bytes = padded(tail.garbage_end)
            recovered.tail = None
        await repair(disk, folder, recovered)

    patch.setattr(segment_recovery, "repair", keep_garbage)


def write_without_comparing(patch: pytest.MonkeyPatch) -> None:
    async def write(
        self: Catalog, frontier: Frontier, operations: Sequence[Operation], _conditions: Sequence[Condition] = ()
    ) -> None:
        frontier = msgspec.structs.replace(frontier, writes=frontier.writes + 1)
        put = Put(self._frontier_key, msgspec.json.encode(frontier))
        result = await self._store.txn([], [put, *operations])
        self.frontier, self._frontier_revision = frontier, result.revision

    patch.setattr(Catalog, "_write", write)


def confirm_without_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Log, "_check_lease", lambda _log: None)


def store_retries_again(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerTable, "check", lambda _table, _header: None)


def drop_syncs(patch: pytest.MonkeyPatch) -> None:
    write = WalWriter.start_write

    def write_only(
        self: WalWriter,
        batches: Sequence[Buffer],
        headers: Sequence[BatchHeader],
        *,
        sync: bool,
        on_end: Callable[[BaseException | None], None],
    ) -> None:
        write(self, batches, headers, sync=False, on_end=on_end)

    patch.setattr(WalWriter, "start_write", write_only)


def count_the_page_cache_as_durable(patch: pytest.MonkeyPatch) -> None:
    async def cut_only(file: DiskFile, tail: Tail) -> None:
        if tail.garbage_end > tail.good_end:
            await file.truncate(tail.good_end)
            tail.file.size = tail.good_end
        await file.sync()

    patch.setattr(recovery, "_repair_tail", cut_only)


def forget_producers(patch: pytest.MonkeyPatch) -> None:
    init = Log.__init__

    def forgetful(self: Log, *arguments: object, **options: object) -> None:
        (recovered,) = [each for each in arguments if isinstance(each, RecoveredLog)]
        recovered.producers = ProducerTable()
        init(self, *arguments, **options)  # type: ignore[arg-type]

    patch.setattr(Log, "__init__", forgetful)


def drop_the_table_with_its_chunk(patch: pytest.MonkeyPatch) -> None:
    async def keep_nothing(_segment: SegmentStorage, _leaving: Sequence[ChunkDescriptor]) -> None:
        return None

    patch.setattr(SegmentStorage, "_kept_producers", keep_nothing)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], list[int]] = {
    append_behind_torn_bytes: [3, 5, 7],
    count_the_page_cache_as_durable: [6, 34],
    write_without_comparing: [1, 6, 9],
    confirm_without_lease: [0, 1, 2],
    store_retries_again: [0, 1, 2],
    forget_producers: [0, 1, 2],
    drop_the_table_with_its_chunk: [10],
    drop_syncs: [1, 3, 4],
}
"""What is broken, and seeds that noticed it when this was written."""
SEARCHED_SEEDS = 300
"""Any change of the code lets other seeds meet the same day, so these are tried when none of the noted ones does."""


def notices(seed: int) -> bool:
    try:
        simulate_log(seed)
    except (BraidError, AssertionError):
        return True
    return False


@pytest.mark.parametrize("break_it", MUTANTS, ids=lambda each: each.__name__)
def test_the_simulation_notices_code_that_would(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds = [*MUTANTS[break_it], *range(SEARCHED_SEEDS)]
    assert not any(notices(seed) for seed in MUTANTS[break_it]), "without the break, these seeds are fine"
    break_it(monkeypatch)
    assert any(notices(seed) for seed in seeds)
