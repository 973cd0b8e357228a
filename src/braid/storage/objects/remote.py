"""Objects in S3 and the other clouds that obstore speaks.

The library works in threads of its own, so nothing here blocks the loop. What it taught us:

- A put is one conditional request (`If-None-Match: *`), never a multipart upload, so nothing half-done is left.
  The library sends it again when the connection breaks. If the first one had arrived, the second is told that the
  object exists. So `ObjectExists` may be about one's own put: a caller that must know reads the object and compares.
- A put that times out is not sent again; it may still arrive. That is `ObjectStoreUnavailable`.
- A bucket that is missing answers 404 to a read, like an object that is missing. An error is not an absence, so each
  404 is followed by a listing, which fails without a bucket.
- A read that starts at or after the end is refused with 416 instead of returning nothing.
- A request that is cancelled can abort the whole process when the interpreter exits before the library noticed. So a
  request always runs to its end, which the timeouts bound, and `close` waits for all of them.
"""

from __future__ import annotations

import asyncio
import enum
import re
import secrets
from collections.abc import Awaitable, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from obstore.exceptions import AlreadyExistsError, BaseError, NotModifiedError, PreconditionError

from braid.model.errors import ObjectExists, ObjectMissing, ObjectStoreUnavailable
from braid.ports.disk import Buffer
from braid.storage.objects.names import checked_folder, checked_name, checked_range, is_name
from braid.storage.objects.store import Objects, ObjectStat

if TYPE_CHECKING:
    from obstore import ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")

_EXISTS = (AlreadyExistsError, PreconditionError, NotModifiedError)
_FAILURES = (BaseError, OSError)
"""All that the library raises for a request; `FileNotFoundError` among them is a 404."""

_1970 = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


class RemoteObjects:
    """`store` should be bound to finite timeouts and retries; `urls.py` does that."""

    def __init__(self, store: ObjectStore, prefix: str) -> None:
        self._store = store
        self._prefix = f"{checked_folder(prefix)}/" if prefix else ""
        self._running: set[asyncio.Future[Any]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"RemoteObjects({self._store!r}, {self._prefix!r})"

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        key = self._key(name)
        # The library takes unsigned bytes only, and Arrow's buffers call theirs signed.
        views = [memoryview(part).cast("B") for part in parts]
        try:
            await self._run(self._store.put_async(key, views, mode="create", use_multipart=False))
        except _EXISTS:
            raise ObjectExists(f"cannot create object {name!r}: {self!r} already holds one of that name") from None
        except _FAILURES as error:
            raise self._unavailable("create", name, error) from None

    async def read(self, name: str, start: int, length: int) -> bytes:
        key = self._key(name)
        checked_range(name, start, length)
        if length == 0:
            await self.stat(name)
            return b""
        try:
            return (await self._run(self._store.get_range_async(key, start=start, length=length))).to_bytes()
        except FileNotFoundError:
            raise await self._missing("read", name) from None
        except _FAILURES as error:
            if "416" in str(error) and (await self.stat(name)).size <= start:
                return b""
            raise self._unavailable("read", name, error) from None

    async def stat(self, name: str) -> ObjectStat:
        key = self._key(name)
        try:
            return self._stat(await self._run(self._store.head_async(key)))
        except FileNotFoundError:
            raise await self._missing("look at", name) from None
        except _FAILURES as error:
            raise self._unavailable("look at", name, error) from None

    async def list(self, prefix: str) -> list[ObjectStat]:
        checked_folder(prefix)
        folder = f"{self._prefix}{prefix}".rstrip("/")
        try:
            found = await self._run(self._store.list(folder or None).collect_async())
        except _FAILURES as error:
            raise self._unavailable("list", prefix, error) from None
        below = f"{folder}/" if folder else ""
        stats = [self._stat(meta) for meta in found if meta["path"].startswith(below)]
        # Others may keep objects in the same bucket; what could not be read by its name is not ours.
        return sorted(stat for stat in stats if is_name(stat.name))

    async def delete(self, name: str) -> None:
        key = self._key(name)
        try:
            await self._run(self._store.delete_async(key))
        except FileNotFoundError:
            if isinstance(failure := await self._missing("delete", name), ObjectStoreUnavailable):
                raise failure from None
        except _FAILURES as error:
            raise self._unavailable("delete", name, error) from None

    async def delete_below(self, prefix: str) -> None:
        for stat in await self.list(prefix):
            await self.delete(stat.name)

    async def remove_empty_folders(self, prefix: str) -> None:
        checked_folder(prefix)

    async def close(self) -> None:
        """Refuse new requests and wait for those under way, those of cancelled callers too."""
        self._closed = True
        while self._running:
            await asyncio.wait(self._running)

    async def _run(self, request: Awaitable[T]) -> T:
        running = asyncio.ensure_future(request)
        self._running.add(running)
        running.add_done_callback(self._ended)
        return await asyncio.shield(running)

    def _ended(self, request: asyncio.Future[Any]) -> None:
        self._running.discard(request)
        if not request.cancelled():
            request.exception()  # asked for, so that asyncio does not report what a cancelled caller will not fetch

    async def _missing(self, doing: str, name: str) -> ObjectMissing | ObjectStoreUnavailable:
        try:
            await self._run(self._store.list(self._key(name)).collect_async())
        except _FAILURES as failure:
            return self._unavailable(doing, name, failure)
        return ObjectMissing(f"cannot {doing} object {name!r}: {self!r} holds none of that name")

    def _key(self, name: str) -> str:
        checked_name(name)
        if self._closed:
            raise ObjectStoreUnavailable(f"cannot reach object {name!r}: {self!r} was closed; open it again")
        return f"{self._prefix}{name}"

    def _stat(self, meta: ObjectMeta) -> ObjectStat:
        modified_us = (meta["last_modified"] - _1970) // _MICROSECOND
        return ObjectStat(meta["path"].removeprefix(self._prefix), meta["size"], modified_us)

    def _unavailable(self, doing: str, name: str, error: Exception) -> ObjectStoreUnavailable:
        return ObjectStoreUnavailable(f"could not {doing} object {name!r} in {self!r}: {_told(error)}")


def _told(error: Exception) -> str:
    """What the library says, on one line and without queries: signed URLs carry their signature there.

    For the same reason our errors are raised `from None`: a traceback would print the library's own text.
    """
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    line = re.sub(r"\?\S*", "?…", text.partition("\n")[0].partition("<?xml")[0]).rstrip(" :")
    return f"{line} ({code[1]})" if code else line


class Probe(enum.Enum):
    """Whether a store lets only one creator of a name win."""

    HONOURED = "honoured"
    IGNORED = "ignored"

    @property
    def warning(self) -> str | None:
        if self is Probe.HONOURED:
            return None
        return (
            "This object store ignores the create-only condition: a second put replaced an object that was there. "
            "History stays safe, because chunks have unique names and count only once the metadata store has recorded "
            "them; but the store does not stop a writer that has lost its segment from replacing an object. "
            "Use a store that honours If-None-Match, or turn on versioning of the bucket."
        )


async def probe(objects: Objects, *, creators: int = 4) -> Probe:
    """Create one object many times at the same time, then once more. `ObjectStoreUnavailable` if there is no answer.

    IGNORED is a proof. HONOURED is evidence: a store that is atomic most of the time may pass.
    """
    name = f"probe/{secrets.token_hex(16)}"
    try:
        outcomes = await asyncio.gather(*(_wins(objects, name, n) for n in range(creators)), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        winners = outcomes.count(True) + await _wins(objects, name, creators)
    finally:
        await objects.delete(name)
    # None, if the winner's answer was lost and the library asked again: nothing was overwritten then either.
    return Probe.HONOURED if winners <= 1 else Probe.IGNORED


async def _wins(objects: Objects, name: str, creator: int) -> bool:
    try:
        await objects.create(name, [b"%d" % creator])
    except ObjectExists:
        return False
    return True
