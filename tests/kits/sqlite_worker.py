"""A process that works with an SQLite store, for a test to kill, stop and fork.

A file of its own, because importing pytest would take longer than everything else that it does at its start.

python sqlite_worker.py count|hold|hold-and-fork|fork PATH [NAME|TTL]
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys

from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Compare, Entry, Put
from braid.model.errors import LeaseLost, MetadataError
from braid.model.ids import Revision


async def count(path: str, name: str) -> None:
    """Count for ever, the total and my own share in one transaction, and say each count that was confirmed."""
    store = await SqliteStore.open(path)
    total_key, own_key = "/count/total", f"/count/{name}"

    def state(entry: Entry | None) -> tuple[int, Revision]:
        return (int(entry.value), entry.revision) if entry else (0, Revision(0))

    while True:
        (total, total_revision), (own, own_revision) = (
            state(await store.get(total_key)),
            state(await store.get(own_key)),
        )
        result = await store.txn(
            [Compare(total_key, total_revision), Compare(own_key, own_revision)],
            [Put(total_key, b"%d" % (total + 1)), Put(own_key, b"%d" % (own + 1))],
        )
        if result.succeeded:
            print(own + 1, flush=True)


async def hold(path: str, ttl_s: float, *, forks: bool) -> None:
    store = await SqliteStore.open(path)
    lease = await store.grant_lease(ttl_s)
    await store.txn([], [Put("/held/a", b"", lease.id), Put("/held/b", b"", lease.id)])
    if forks:
        child = os.fork()
        if child == 0:
            signal.pause()
        print(child, flush=True)
    else:
        print("ready", flush=True)
    await asyncio.to_thread(sys.stdin.readline)
    try:
        await lease.renew()
        print("renewed", flush=True)
    except LeaseLost:
        print("lost", flush=True)


async def fork(path: str) -> None:
    store = await SqliteStore.open(path)
    child = os.fork()
    if child == 0:
        with contextlib.suppress(StopIteration):
            try:
                store.get("/a").send(None)
            except MetadataError as error:
                print(error, flush=True)
        os._exit(0)
    await asyncio.to_thread(os.waitpid, child, 0)
    await store.txn([], [Put("/a", b"1")])
    if await store.get("/a") is not None:
        print("the parent goes on", flush=True)
    await store.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["count", path_argument, name_argument]:
            asyncio.run(count(path_argument, name_argument))
        case ["hold", path_argument, ttl_argument]:
            asyncio.run(hold(path_argument, float(ttl_argument), forks=False))
        case ["hold-and-fork", path_argument, ttl_argument]:
            asyncio.run(hold(path_argument, float(ttl_argument), forks=True))
        case ["fork", path_argument]:
            asyncio.run(fork(path_argument))
