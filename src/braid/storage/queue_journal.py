"""One broker's own journal of one queue: a checkpoint of its state, and every event since.

    {segment folder}/queues/{subscription}/{number:08d}.queue

    frame   magic "BQJ1" · crc32c of all that follows · payload bytes · number of the frame · kind · payload
    file    one SNAPSHOT frame, then EVENTS frames, then zeros: the file is made longer in steps, so that a sync
            writes no new length

The owner of a segment and each of its followers keep one, and none of them needs to be equal to another
(model/queue/events.py). A journal that has grown is begun anew: the next file gets a checkpoint, is synced under
another name, and gets its own name when it is whole. So the newest file always has a checkpoint.

**Appending** groups itself, as a log does: while one write and sync is under way, events gather, and go together in the
next one. `durable` is a watermark over the numbers that `append` returns.

**Recovery** believes frames. Only the last write may be torn, so nothing whole may follow a frame that is not whole.
Otherwise the file is damaged, and the journal is not opened: acks would be forgotten (I9).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import struct
from collections.abc import Callable, Container
from typing import Final, NamedTuple

from crc32c import crc32c

from braid.model.errors import BraidError, DiskFull, FileMissing, LogClosed, LogDamaged, LogFailed
from braid.model.queue.events import (
    QueueEvents,
    QueueImage,
    QueueSnapshot,
    all_events,
    decode_events,
    decode_snapshot,
    encode,
)
from braid.ports.disk import Disk, DiskFile
from braid.ports.tasks import end
from braid.storage.log.watermark import Watermark

FOLDER: Final = "queues"
SUFFIX: Final = ".queue"
MAGIC: Final = b"BQJ1"
_FRAME: Final = struct.Struct("<4sIIQB3x")
"""Magic, checksum of the rest and the payload, length of the payload, number, kind."""
_CHECKED: Final = 8
"""Where the checksum begins to count."""
_SNAPSHOT: Final = 1
_EVENTS: Final = 2

STEP_BYTES: Final = 256 << 10
"""By so much a file is made longer."""
REWRITE_BYTES: Final = 4 << 20
"""A file is begun anew when it has so many bytes of events, and several times as many as its checkpoint."""
REWRITE_TIMES: Final = 4
MAX_FRAME_BYTES: Final = 64 << 20
ROOM_S: Final = 1.0
"""How long a journal waits before it tries a full disk again."""

CLOSE_S: Final = 5.0
"""How long a journal that is closed waits for its disk. What was not confirmed may be lost."""

_log: Final = logging.getLogger(__name__)


class _Pending(NamedTuple):
    number: int
    value: QueueEvents | QueueSnapshot
    """Events, or a checkpoint that holds all events before it."""


class QueueJournal:
    """Everything here runs on one event loop; one task writes."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self.folder: Final = folder
        self.durable: Final = Watermark(0)
        """The highest number of which all events are on the disk."""
        self.image: QueueImage | None = None
        """What the disk held when the journal was opened; None: there was none."""
        self._disk = disk
        self._file: DiskFile | None = None
        self._generation = 0
        """Of the newest file."""
        self._end = self._reserved = self._checkpoint_bytes = 0
        self._is_beginning = False
        """Whether a checkpoint was taken whose file is not there yet."""
        self._last_number = 0
        self._pending: list[_Pending] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._is_full = False
        self._failure: BraidError | None = None
        self.on_failure: Callable[[BraidError], None] | None = None

    @classmethod
    async def open(cls, disk: Disk, folder: str, *, may_be_damaged: bool = False) -> QueueJournal:
        """Open the journal in this folder, and read what it holds. One that `may_be_damaged` is begun anew next: its
        caller knows everything that it may hold."""
        journal = cls(disk, folder)
        names = sorted(stat.name for stat in await disk.list(folder) if stat.name.endswith(SUFFIX))
        if names:
            journal._generation = int(names[-1].removesuffix(SUFFIX))
            try:
                await journal._recover(names[-1])
            except LogDamaged:
                await journal._close_file()
                if not may_be_damaged:
                    raise
                journal.image = None
        return journal

    @property
    def last_number(self) -> int:
        return self._last_number

    @property
    def failure(self) -> BraidError | None:
        """Why it takes nothing more; None while it does."""
        return self._failure

    @property
    def is_long(self) -> bool:
        """Tell whether it is time to begin anew, with a checkpoint; not while one is under way."""
        grown = self._end - self._checkpoint_bytes
        return not self._is_beginning and grown >= REWRITE_BYTES and grown >= REWRITE_TIMES * self._checkpoint_bytes

    def append(self, events: QueueEvents) -> int:
        """Take events; return the number that `durable` reaches when the disk has them."""
        return self._take(events)

    def begin_anew(self, snapshot: QueueSnapshot) -> int:
        """Begin the next file with this checkpoint: events that were taken before it need no place any more."""
        number = self._take(snapshot)
        self._is_beginning = True
        return number

    async def close(self) -> None:
        """Write what was taken, and stop; on a disk that is full, without that. Closing twice is fine."""
        if self._failure is None and self._task is not None:
            with contextlib.suppress(BraidError, TimeoutError):
                async with asyncio.timeout(CLOSE_S):
                    await self.durable.reached(self._last_number)
        await self.abandon()

    async def abandon(self) -> None:
        """Stop without writing anything more."""
        self._fail(LogClosed(f"the journal under {self.folder} is closed"))
        task, self._task = self._task, None
        await end(task)
        await self._close_file()

    async def _close_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            await file.close()

    def _take(self, value: QueueEvents | QueueSnapshot) -> int:
        if self._failure is not None:
            raise self._failure.again()
        self._last_number += 1
        self._pending.append(_Pending(self._last_number, value))
        self._work.set()
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name=f"journal {self.folder}")
        return self._last_number

    # Writing.

    async def _run(self) -> None:
        try:
            while True:
                await self._work.wait()
                self._work.clear()
                pending, self._pending = self._pending, []
                try:
                    await self._write(pending)
                except DiskFull as error:
                    # Nothing is confirmed, and nothing is lost: it is tried again, with what came meanwhile.
                    if not self._is_full:
                        _log.warning("the journal under %s waits for room on its disk: %s", self.folder, error)
                    self._is_full = True
                    self._pending = pending + self._pending
                    self._work.set()
                    await asyncio.sleep(ROOM_S)
                else:
                    self._is_full = False
        except BraidError as error:
            self._fail(LogFailed(f"the journal under {self.folder} has stopped: {error}"))

    async def _write(self, pending: list[_Pending]) -> None:
        newest = max((at for at, each in enumerate(pending) if isinstance(each.value, QueueSnapshot)), default=-1)
        if newest >= 0:  # What was taken before a checkpoint stands in it.
            await self._begin_file(pending[newest])
        later = [each.value for each in pending[newest + 1 :] if isinstance(each.value, QueueEvents)]
        await self._write_events(pending[-1].number, later)
        self.durable.advance(pending[-1].number)

    async def _write_events(self, number: int, groups: list[QueueEvents]) -> None:
        if not groups:
            return
        assert self._file is not None, "a journal begins with a checkpoint"
        # One frame for all of them: a torn write then leaves nothing whole after what is torn.
        frame = _frame(number, _EVENTS, all_events(groups))
        if self._end + len(frame) > self._reserved:
            size = self._end + len(frame) + STEP_BYTES
            await self._file.reserve(size)
            self._reserved = size  # Not before: a full disk leaves the file as it was.
        await _write_synced(self._file, self._end, frame)
        self._end += len(frame)

    async def _begin_file(self, checkpoint: _Pending) -> None:
        frame = _frame(checkpoint.number, _SNAPSHOT, checkpoint.value)
        await self._disk.make_folder(self.folder)
        path = f"{self.folder}/{self._generation + 1:08d}{SUFFIX}"
        temporary = f"{self.folder}/checkpoint.tmp"
        with contextlib.suppress(FileMissing):
            await self._disk.remove(temporary)
        file = await self._disk.open(temporary, create=True)
        try:
            await file.reserve(len(frame) + STEP_BYTES)
            await file.write(0, [frame], sync=True)
            await self._disk.rename(temporary, path)
        except BaseException:
            await file.close()
            raise
        self._generation += 1
        old, self._file = self._file, file
        self._end = self._checkpoint_bytes = len(frame)
        self._reserved = len(frame) + STEP_BYTES
        self._is_beginning = False
        if old is not None:
            await old.close()
        for stat in await self._disk.list(self.folder):
            if stat.name.endswith(SUFFIX) and not path.endswith(stat.name):
                with contextlib.suppress(FileMissing):
                    await self._disk.remove(f"{self.folder}/{stat.name}")

    def _fail(self, error: BraidError) -> None:
        if self._failure is None:
            self._failure = error
            self.durable.fail(error)
            if self.on_failure is not None and not isinstance(error, LogClosed):
                self.on_failure(error)

    # Reading.

    async def _recover(self, name: str) -> None:
        file = await self._disk.open(f"{self.folder}/{name}")
        try:
            data = memoryview(await file.read(0, await file.size()))
        except BaseException:
            await file.close()
            raise
        self._file = file
        position = number = 0
        while (frame := _frame_at(data, position)) is not None:
            length, number, kind = frame
            payload = data[position + _FRAME.size : position + _FRAME.size + length]
            if self.image is None:
                if kind != _SNAPSHOT:
                    break
                self.image = QueueImage.of(decode_snapshot(payload))
                self._checkpoint_bytes = _FRAME.size + length
            else:
                self.image.apply(decode_events(payload))
            position += _FRAME.size + length
        if self.image is None or _is_followed(data, position, number):
            raise LogDamaged(f"{self.folder}/{name} is damaged at byte {position}", 0, 0)
        self._end = position
        self._reserved = len(data)
        self._last_number = number
        self.durable.advance(number)


async def _write_synced(file: DiskFile, position: int, frame: bytes) -> None:
    """Write and sync what acks wait for. A small frame needs no hop into a thread (os_file.py)."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_end(error: BaseException | None) -> None:
        if ended.done():  # The task that waits was cancelled.
            return
        if error is None:
            ended.set_result(None)
        else:
            ended.set_exception(error)

    file.start_write(position, [frame], sync=True, on_end=on_end)
    await ended


def folder_of(segment_folder: str, subscription: str) -> str:
    return f"{segment_folder}/{FOLDER}/{subscription}"


async def read_image(disk: Disk, folder: str) -> QueueImage | None:
    """Read what a journal holds that is not open for writing; None if there is none."""
    journal = await QueueJournal.open(disk, folder)
    await journal.abandon()
    return journal.image


async def remove_others(disk: Disk, segment_folder: str, subscriptions: Container[str]) -> None:
    """Remove the journals of all subscriptions but these: the others were deleted."""
    for subscription in await disk.list_folders(f"{segment_folder}/{FOLDER}"):
        if subscription not in subscriptions:
            folder = folder_of(segment_folder, subscription)
            # The newest file first: a crash in between leaves none that an older checkpoint could be read from.
            for stat in sorted(await disk.list(folder), key=lambda stat: stat.name, reverse=True):
                with contextlib.suppress(FileMissing):
                    await disk.remove(f"{folder}/{stat.name}")
            await disk.remove_folder(folder)


def _frame(number: int, kind: int, value: QueueEvents | QueueSnapshot) -> bytes:
    payload = encode(value)
    if len(payload) > MAX_FRAME_BYTES:  # Written, it would count as damage.
        raise LogFailed(f"{len(payload):,} bytes of a queue do not fit into a frame of {MAX_FRAME_BYTES:,}")
    head = bytearray(_FRAME.pack(MAGIC, 0, len(payload), number, kind))
    checksum = crc32c(payload, crc32c(bytes(head[_CHECKED:])))
    struct.pack_into("<I", head, 4, checksum)
    return bytes(head) + payload


def _frame_at(data: memoryview, position: int) -> tuple[int, int, int] | None:
    """Return length, number and kind of the whole frame at this position; None if there is none."""
    if position + _FRAME.size > len(data):
        return None
    magic, checksum, length, number, kind = _FRAME.unpack_from(data, position)
    stop = position + _FRAME.size + length
    if magic != MAGIC or length > MAX_FRAME_BYTES or stop > len(data):
        return None
    if crc32c(data[position + _CHECKED : stop]) != checksum:
        return None
    return length, number, kind


def _is_followed(data: memoryview, position: int, number: int) -> bool:
    """Tell whether a whole frame of a later write stands after the place where reading ended."""
    rest = bytes(data[position:])
    at = rest.find(MAGIC, 1)
    while at >= 0:
        frame = _frame_at(data, position + at)
        if frame is not None and frame[1] > number:
            return True
        at = rest.find(MAGIC, at + 1)
    return False
