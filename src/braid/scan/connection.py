"""A process's connection to brokers and storage, for blocking code.

Spark's workers and most notebooks are blocking code, and Braid's client and object stores belong to an event loop. So a
connection has a loop in a thread of its own. Loop and client are made when they are first needed: reads from storage
alone never connect to a broker. A connection is never pickled; each task makes its own and closes it.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import Any, Self, TypeVar

from braid.client.blocking.loop_thread import LoopThread
from braid.client.client import Client, connect
from braid.client.consuming.delivery import ReceivedBatch
from braid.client.consuming.segment_range import read_segment_range
from braid.model.errors import BraidError, ConnectFailed, InvalidArgument
from braid.ports.os_disk import OsDisk
from braid.scan.options import ScanOptions
from braid.scan.snapshot import TopicSnapshot, snapshot_from_brokers, snapshot_from_manifests
from braid.storage.history.manifest import SegmentManifest, read_segment_manifest
from braid.storage.objects.store import Objects
from braid.storage.objects.urls import open_objects

T = TypeVar("T")


class ScanConnection:
    """Use it with `with`, or call `close`."""

    def __init__(self, options: ScanOptions) -> None:
        self.options = options
        self._thread: LoopThread | None = None
        self._client: Client | None = None
        self._disk: OsDisk | None = None
        self._objects: dict[str, Objects] = {}

    @property
    def has_brokers(self) -> bool:
        return bool(self.options.url)

    @property
    def client(self) -> Client:
        """Return the connected client. Run its coroutines by `call`."""
        if self._client is None:
            self._client = self.call(self._connected())
        return self._client

    def objects(self, url: str) -> Objects:
        """Return the store at this URL. Run its coroutines by `call`."""
        if url not in self._objects:
            if self._disk is None:
                self._disk = OsDisk(threads=2, read_only=True)
            self._objects[url] = open_objects(url, disk=self._disk)
        return self._objects[url]

    def snapshot(self) -> TopicSnapshot:
        options = self.options
        if self.has_brokers:
            return self.call(snapshot_from_brokers(self.client, options.topic, self.objects))
        try:
            objects = self.objects(options.manifest)
        except InvalidArgument as error:
            raise InvalidArgument(f"{options.called('manifest')}: {error}") from None
        return self.call(snapshot_from_manifests(objects, options.manifest, options.topic))

    def segment_manifest(self, storage: str, topic: str, descriptor: str) -> SegmentManifest | None:
        """Read the newest manifest of a segment; None if there is none."""
        return self.call(read_segment_manifest(self.objects(storage), topic, descriptor))

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and wait for it."""
        return self._loop().call(work)

    def begin(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start a coroutine on the loop without waiting for it."""
        return self._loop().begin(work)

    def deliveries(self, topic: str, topic_id: int, segment: int, first: int, until: int) -> Iterator[ReceivedBatch]:
        """Yield the batches of these offsets as the segment's owner delivers them."""
        found = read_segment_range(self.client, topic, topic_id, segment, first, until)
        try:
            while (delivery := self.call(anext(found, None))) is not None:
                yield delivery
        finally:
            self.call(found.aclose())

    def close(self) -> None:
        """Close everything. Closing twice is fine."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.call(self._close())
        finally:
            thread.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _loop(self) -> LoopThread:
        if self._thread is None:
            self._thread = LoopThread()
        return self._thread

    async def _connected(self) -> Client:
        options = self.options
        client = connect(
            options.url, token=options.token, tls=options.tls, timeout=options.timeout_s, name=options.client_name
        )
        try:
            await client.open()
        except ConnectFailed as error:
            raise ConnectFailed(
                f"no broker answered at {options.url} for {options.timeout_s:g} s: {error}. Correct "
                f"{options.called('url')}, start a broker, or read without one by {options.called('manifest')}"
            ) from None
        return client

    async def _close(self) -> None:
        client, self._client = self._client, None
        stores, self._objects = self._objects, {}
        disk, self._disk = self._disk, None
        try:
            if client is not None:
                await client.close()
        except BraidError:
            pass  # It only read, so nothing is lost.
        for store in stores.values():
            await store.close()
        if disk is not None:
            await disk.close()
