"""A segment moves from broker a to broker b while a consumer is half-way through it; then a broker is killed.

    python examples/storage.py

The timeline: a stores messages 0..21, a consumer has read up to 13, a hands over, b goes on at 22 and stores 22..27,
the consumer reads 14..27. Then the old owner tries to delete history, and the new one is killed and comes back.

Everything is real: files in a temporary folder, fsync, SQLite as the metadata store, a shared folder of chunks, a child
process and SIGKILL. What is shown is asserted. There is no network yet: "broker" means what a broker does to storage.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import tempfile
from contextlib import AsyncExitStack

from braid.metadata.paths import segment_storage_prefix
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Listing
from braid.model.batch.columns import decode_messages, encode_batch
from braid.model.batch.header import HEADER_BYTES
from braid.model.errors import Fenced
from braid.model.ids import Epoch
from braid.ports.clock import SystemClock
from braid.ports.os_disk import OsDisk
from braid.storage.cache import HotCache
from braid.storage.context import StorageContext, StorageMode
from braid.storage.handles import FooterCache, ReadHandles
from braid.storage.log.context import LogConfig
from braid.storage.log.recovery import recover
from braid.storage.objects.disk import DiskObjects
from braid.storage.objects.store import ObjectStat
from braid.storage.recovery_start import RecoverySource
from braid.storage.segment import SegmentStorage

TOPIC = "public/default/orders"
DESCRIPTOR = "0000-ffff-0"
CONFIRMS_BEFORE_THE_KILL = 100
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


async def main(folder: str) -> None:
    async with AsyncExitStack() as stack:
        store = await SqliteStore.open(f"{folder}/metadata.db")
        stack.push_async_callback(store.close)
        shelf_a, shelf_b = [await open_shelf(stack, folder, store, broker) for broker in "ab"]

        a = await open_segment(shelf_a, epoch=1)
        cursor = await store_and_read_half(a)
        await hand_over(a, shelf_a)
        b = await open_segment(shelf_b, epoch=2)
        await go_on_at_the_other_broker(b, cursor)
        await refuse_the_old_owner(a, b, shelf_a)
        await b.close()
        last_confirmed = await kill_a_broker(folder)
        await recover_and_read(shelf_b, last_confirmed)
    say("\nNo message was lost, repeated or given another offset.")


async def store_and_read_half(a: SegmentStorage) -> int:
    title("Broker a stores 22 messages. A consumer reads up to 13.")
    await publish(a, 10)
    await a.log.rotate()  # closes the file: it is a chunk now, and a background task copies it to the shared folder
    await publish(a, 12)
    detail("stored and synced", offsets(0, a.log.end))
    assert await a.exporter.export_closed() <= 1
    detail("already in chunks", offsets(0, a.catalog.next_offset))
    cursor = 13
    await read(a, 0, cursor)
    detail("consumed", offsets(0, cursor + 1))
    assert (a.log.end, a.catalog.next_offset) == (22, 10)
    return cursor


async def hand_over(a: SegmentStorage, context: StorageContext) -> None:
    title("The segment moves: a exports its tail, leaves the sealed state, and drops its files.")
    sealed = await a.hand_over()
    detail("in chunks", offsets(0, a.catalog.next_offset))
    detail("sealed state", f"last committed offset {sealed.last_committed_offset}, epoch {sealed.epoch}")
    files = await context.disk.list(a.log.folder)
    detail("files left at a", f"{len(files)}")
    assert sealed.last_committed_offset == 21
    assert not files


async def go_on_at_the_other_broker(b: SegmentStorage, cursor: int) -> None:
    title(f"Broker b goes on at {b.start.offset} and stores 6 messages. The consumer goes on at {cursor + 1}.")
    assert (b.start.offset, b.start.source) == (22, RecoverySource.SEALED)
    await publish(b, 6)
    detail("stored and synced", offsets(22, b.log.end))
    sources = await read(b, cursor + 1, 27)
    for name in dict.fromkeys(sources.values()):
        found = [offset for offset, source in sources.items() if source == name]
        detail(f"read {offsets(found[0], found[-1] + 1)}", f"from {name}")
    assert all(sources[offset].endswith(".chunk") for offset in range(14, 22))
    assert all(sources[offset].endswith(".wal") for offset in range(22, 28))


async def refuse_the_old_owner(a: SegmentStorage, b: SegmentStorage, context: StorageContext) -> None:
    title("Broker a wakes up, believes that it still owns the segment, and wants to delete old history.")
    await b.exporter.export_closed()  # b's manifest is written now: what changes from here on would be a's doing
    before = await shared_state(context)
    try:
        await a.catalog.remove(a.catalog.chunks)
    except Fenced as error:
        detail(f"refused ({error.code})", str(error).partition(" (")[0])
    else:
        raise AssertionError("an owner that has been replaced changed history")
    assert await shared_state(context) == before
    detail("changed", "nothing: no metadata key, no chunk, no manifest")


async def shared_state(context: StorageContext) -> tuple[Listing, list[ObjectStat]]:
    return await context.store.list(segment_storage_prefix(TOPIC, DESCRIPTOR)), await context.objects.list(TOPIC)


async def kill_a_broker(folder: str) -> int:
    """Let a child process own the segment, and kill it in the middle of publishing; returns what it had confirmed."""
    title("Broker b restarts, publishes as fast as it can, and is killed with SIGKILL.")
    child = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "publish-until-killed", folder, stdout=asyncio.subprocess.PIPE
    )
    assert child.stdout is not None
    lines: list[bytes] = []
    try:
        while len(lines) < CONFIRMS_BEFORE_THE_KILL:
            lines.append(await child.stdout.readline())
            assert lines[-1], "the child ended by itself; its error is above"
    finally:
        if child.returncode is None:
            child.kill()
        lines += (await child.stdout.read()).splitlines(keepends=True)
        await child.wait()
    confirmed = max(int(line) for line in lines if line.endswith(b"\n"))
    detail("confirmed", offsets(28, confirmed + 1))
    return confirmed


async def recover_and_read(context: StorageContext, last_confirmed: int) -> None:
    torn = await tear(context)
    title("Half a batch is put behind the last one, as a power cut in the middle of a write leaves it. b recovers.")
    b = await open_segment(context, epoch=4)
    detail("cut off", f"{b.recovered.torn_bytes} torn bytes")
    detail("damaged", f"{len(b.recovered.damage)} places")
    detail("goes on at", f"{b.log.end}")
    assert b.start.source is RecoverySource.LOCAL
    assert b.recovered.torn_bytes == torn
    assert not b.recovered.damage
    assert b.log.end > last_confirmed
    await read(b, 0, b.log.end - 1)
    detail("read again", f"{offsets(0, b.log.end)}: everything that was confirmed, each once")
    await b.close()


async def tear(context: StorageContext) -> int:
    """SIGKILL alone tears nothing: the kernel still writes what it was given. So do what a power cut does."""
    folder = f"{context.folder}/{TOPIC}/{DESCRIPTOR}"
    newest = (await recover(context.disk, folder)).files[-1]
    batch = encode_batch([b"never confirmed"] * 10, now_us=context.clock.now_us())
    half = bytes(batch[: HEADER_BYTES + 101]).rstrip(b"\0")
    file = await context.disk.open(f"{folder}/{newest.name}")
    await file.write(newest.batch_bytes, [half], sync=True)
    await file.close()
    return len(half)


async def open_shelf(stack: AsyncExitStack, folder: str, store: SqliteStore, broker: str) -> StorageContext:
    """A broker's own disk folder; the metadata store and the folder of chunks are shared."""
    disk = OsDisk()
    objects = DiskObjects(disk, f"{folder}/shared")
    stack.push_async_callback(disk.close)
    stack.push_async_callback(objects.close)
    return StorageContext(
        broker_id=broker,
        disk=disk,
        folder=f"{folder}/broker-{broker}",
        store=store,
        objects=objects,
        mode=StorageMode.SHARED_FS,
        clock=SystemClock(),
        cache=HotCache(0),  # nothing is cached, so that each read shows which file or chunk holds the record
        handles=ReadHandles(disk),
        footers=FooterCache(),
        preallocated=None,
        random=random.Random(),
    )


async def open_segment(context: StorageContext, epoch: int) -> SegmentStorage:
    return await SegmentStorage.open(context, TOPIC, DESCRIPTOR, Epoch(epoch), LogConfig())


async def publish(segment: SegmentStorage, count: int) -> int:
    """One batch; returns its last offset when it is synced."""
    values = [b"message %d" % (segment.log.end + number) for number in range(count)]
    appended = segment.append(encode_batch(values, now_us=SystemClock().now_us()))
    await segment.log.confirm(appended)
    return appended.next_offset - 1


async def read(segment: SegmentStorage, first: int, last: int) -> dict[int, str]:
    """Read offsets `first` to `last` and check each; returns which file or chunk each came from."""
    sources: dict[int, str] = {}
    reader = segment.reader(first)
    while len(sources) <= last - first:
        name = next(iter(segment.sources.files_with(reader.offset))).name.rpartition("/")[2]
        for header, data in await reader.read(max_bytes=1):
            for message in decode_messages(data, header):
                if first <= message.offset <= last:  # batches come whole; a cursor may stand inside one
                    assert message.offset == first + len(sources)
                    assert message.value == b"message %d" % message.offset
                    sources[message.offset] = name
    return sources


async def publish_until_killed(folder: str) -> None:
    """The child process: broker b in epoch 3. Prints each offset after it is confirmed."""
    async with AsyncExitStack() as stack:
        store = await SqliteStore.open(f"{folder}/metadata.db")
        segment = await open_segment(await open_shelf(stack, folder, store, "b"), epoch=3)
        while True:
            sys.stdout.write(f"{await publish(segment, 1)}\n")
            sys.stdout.flush()


def offsets(first: int, end: int) -> str:
    return f"{first}..{end - 1}"


def title(text: str) -> None:
    say(f"\n\x1b[1m{text}\x1b[0m" if COLOURS else f"\n{text}")


def detail(what: str, value: str) -> None:
    say(f"    {what:<22} {value}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1:2] == ["publish-until-killed"]:
        asyncio.run(publish_until_killed(sys.argv[2]))
    else:
        with tempfile.TemporaryDirectory(prefix="braid-storage-") as temporary:
            asyncio.run(main(temporary))
