"""Takes and restores backups: the part that acts.

A restore writes in transactions of bounded size, the cluster's id last. A broker that starts on a store that was
restored in part makes another id, and a marked storage refuses it. A second restore wants an empty store again.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from braid.cli.backup import snapshot as snapshots
from braid.cli.backup.evidence import gather, locked_folders
from braid.cli.backup.rules import Plan, first_revision, plan_restore
from braid.cli.backup.snapshot import Snapshot
from braid.metadata import paths
from braid.metadata.limits import MAX_TXN_BYTES
from braid.metadata.store import MAX_TXN_OPERATIONS, Compare, Delete, Put, Store
from braid.model.errors import ConditionFailed, InvalidArgument, MetadataUncertain
from braid.model.ids import Revision
from braid.ports.clock import SystemClock
from braid.ports.os_disk import OsDisk

SKIPPED_REVISIONS: Final = 1_000_000
"""Above all that manifests show: clients may have seen later ones. Costs nothing in SQLite."""
SKIPPED_IN_ETCD: Final = 10_000
"""There each revision is a write."""
MOST_WRITES: Final = 2_000_000
"""So many empty writes take minutes and some 200 MB of etcd."""
WRITES_AT_ONCE: Final = 64
LOCAL: Final = "local"
FILLER: Final = "/cluster/restored"


@runtime_checkable
class Skipping(Protocol):
    """A store that can raise its revision without a write: SQLite."""

    async def skip_to(self, revision: Revision) -> None: ...


async def _open(url: str) -> Store:
    from braid.broker.parts.resources import open_store  # needs the extra `server`

    return await open_store(url, SystemClock())


async def take_backup(url: str, file: str) -> Snapshot:
    clock = SystemClock()
    path = url.removeprefix("sqlite:")
    if path != url and not os.path.exists(path):  # Opening would make an empty store there.
        raise InvalidArgument(f"there is no metadata store {path}: name the folder that has it by --data")
    store = await _open(url)
    try:
        snapshot = await snapshots.take(store, clock.now_us())
    finally:
        await store.close()
    await asyncio.to_thread(snapshots.write, snapshot, file)
    return snapshot


async def restore_backup(
    file: str, url: str | None, storage: str, folders: Sequence[str], left_out: Sequence[str]
) -> tuple[Snapshot, Plan]:
    """Compare a backup with the history and, if nothing contradicts it, write it into the store at `url`; None: only
    compare."""
    snapshot = snapshots.read(file)
    disk = OsDisk()
    try:
        async with locked_folders(disk, folders) as locked:
            history = await gather(disk, storage, locked)
            plan = plan_restore(snapshot, history, leave_out=left_out, local=storage == LOCAL)
            if url is not None and not plan.problems:
                store = await _open(url)
                try:
                    margin = SKIPPED_REVISIONS if isinstance(store, Skipping) else SKIPPED_IN_ETCD
                    await _fill(store, plan.values, first_revision(snapshot, history, margin))
                finally:
                    await store.close()
    finally:
        await disk.close()
    return snapshot, plan


async def _fill(store: Store, values: Mapping[str, bytes], revision: Revision) -> None:
    listing = await store.list("")
    if listing.entries:
        raise InvalidArgument(
            f"the metadata store has {len(listing.entries)} keys, the first one is {listing.entries[0].key}: stop all "
            "brokers and name an empty store"
        )
    await _raise_revision(store, listing.revision, revision)
    for group in groups(values):
        try:
            done = await store.txn([Compare(put.key, Revision(0)) for put in group], group)
        except MetadataUncertain as error:
            raise MetadataUncertain(f"{error}; empty the store and restore again") from error
        if not done.succeeded:
            raise ConditionFailed("another process writes to this store: stop all brokers, empty it, restore again")


def groups(values: Mapping[str, bytes]) -> Iterator[list[Put]]:
    """Yield transactions of bounded size, the cluster's id and secret in the last one."""
    group: list[Put] = []
    size = 0
    for key in sorted(values, key=lambda key: (key in (paths.CLUSTER_ID, paths.CLUSTER_SECRET), key)):
        cost = 2 * len(key.encode()) + len(values[key])
        if group and (len(group) == MAX_TXN_OPERATIONS or size + cost > MAX_TXN_BYTES):
            yield group
            group, size = [], 0
        group.append(Put(key, values[key]))
        size += cost
    if group:
        yield group


async def _raise_revision(store: Store, now: Revision, target: Revision) -> None:
    """Make the next revision a later one than `target`."""
    if isinstance(store, Skipping):
        return await store.skip_to(target)
    writes = target - now
    if writes > MOST_WRITES:
        raise InvalidArgument(
            f"the store is at revision {now:,} and the cluster has seen {target:,}. Only etcd itself can skip so many: "
            "restore a snapshot of etcd with `etcdutl snapshot restore --bump-revision --mark-compacted`"
        )
    left = max(writes, 0)

    async def write() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await store.txn([], [Put(FILLER, b"")])

    async with asyncio.TaskGroup() as tasks:
        for _ in range(WRITES_AT_ONCE):
            tasks.create_task(write())
    await store.txn([], [Delete(FILLER)])
    return None
