"""A watch that outlives its connections.

One task owns the stream. It puts whole revisions into a short queue, from which the reader takes them; when the queue
is full it stops reading, and gRPC's flow control stops the server. So a slow reader costs a bounded amount of memory,
and a cancelled read loses nothing.

The position is the revision of the last event, never the one that a header names: the server says "you have seen
everything up to here" in the headers of `created` and progress answers, and etcd 3.4 says it too early while events are
still on their way. So progress answers prove only that the server is alive. The watch asks every second, because a
stopped server keeps its connections open.

The price is that an idle watch stays at an old position: if etcd compacts beyond it *and* the connection breaks, the
reader is told to list again although it missed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from braid.metadata.etcd.channel import CallError, Endpoint, Stream
from braid.metadata.etcd.client import EtcdClient, refusal
from braid.metadata.etcd.keyspace import Keyspace
from braid.metadata.etcd.messages import WATCH, WatchRequest
from braid.metadata.etcd.outcome import CallOutcome
from braid.metadata.history import compacted, store_closed
from braid.metadata.store import Changes, Event
from braid.model.errors import InvalidArgument, MetadataCompacted, MetadataUnavailable
from braid.model.ids import Revision
from braid.ports.tasks import cancel

PROGRESS_INTERVAL_S: Final = 1.0
SILENT_INTERVALS: Final = 3
"""So many unanswered questions in a row, and the stream counts as dead. Counted, not timed: after a stall of our own
process the first thing to do is to read what has arrived meanwhile."""
SEND_TIMEOUT_S: Final = 3.0
QUEUE_REVISIONS: Final = 16
"""How many revisions are read ahead. A revision is at most one transaction, 1.4 MB."""


class RevisionGroups:
    """Puts the events of one revision together, wherever the server cut its responses."""

    def __init__(self, after: Revision) -> None:
        self._position = after
        self._held: list[Event] = []

    def take(self, events: Sequence[Event], *, unfinished: bool) -> list[Changes]:
        """Return the revisions that are whole now. `unfinished`: the next response may continue the last revision."""
        whole: list[Changes] = []
        for event in events:
            if self._held and self._held[0].revision != event.revision:
                whole.append(self._release())
            if event.revision <= self._position:
                # etcd promises whole revisions in order. Without that, events may be missing, and only a listing helps.
                raise MetadataCompacted(
                    f"a watch got an event of revision {event.revision} ({event.key!r}) after revision "
                    f"{self._position} was complete: the stream cannot be trusted; list again and watch from there"
                )
            self._held.append(event)
        if events and not unfinished:  # without events it is an answer about progress, which completes nothing
            whole.append(self._release())
        return whole

    def _release(self) -> Changes:
        changes = Changes(self._held[0].revision, tuple(self._held))
        self._held = []
        self._position = changes.revision
        return changes


class EtcdWatch:
    """One watch of one prefix, read by one task at a time."""

    def __init__(
        self, client: EtcdClient, keyspace: Keyspace, prefix: str, after: Revision, freed: Callable[[EtcdWatch], None]
    ) -> None:
        if after < 0:
            raise InvalidArgument(f"a watch of {prefix!r} was asked for after revision {after}; revisions start at 0")
        self._client = client
        self._keyspace = keyspace
        self._prefix = prefix
        self._start, self._end = keyspace.range_of(prefix)
        self._position = after
        self._freed = freed
        self._queue: asyncio.Queue[Changes | Exception] = asyncio.Queue(QUEUE_REVISIONS)
        self._task: asyncio.Task[None] | None = None
        self._reading = False
        self._over = False
        self._failures = 0
        self._denied_token: str | None = None
        """A fresh token that was not yet accepted: if it is denied too, the user really lacks the permission."""

    def __aiter__(self) -> EtcdWatch:
        return self

    async def __anext__(self) -> Changes:
        if self._reading:
            raise RuntimeError(f"two tasks read one watch of {self._prefix!r}; open a watch for each")
        if self._over:
            raise StopAsyncIteration
        self._client.check_open(self._asked)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=self._asked)
        self._reading = True
        try:
            item = await self._queue.get()
        finally:
            self._reading = False
        if isinstance(item, Changes):
            return item
        self._over = True
        self._freed(self)
        raise item

    async def aclose(self) -> None:
        self._over = True
        self._freed(self)
        await self._stop(StopAsyncIteration())

    async def end(self) -> None:
        """End the watch, because the store is being closed."""
        await self._stop(store_closed(self._asked))

    @property
    def _asked(self) -> str:
        return f"watch {self._prefix!r} after revision {self._position}"

    async def _stop(self, last: Exception) -> None:
        if self._task is not None:
            await cancel([self._task])
        while not self._queue.empty():
            self._queue.get_nowait()
        self._queue.put_nowait(last)  # for a reader that waits

    async def _run(self) -> None:
        try:
            await self._follow()
        except Exception as error:  # the reader must hear of every error
            await self._queue.put(error)

    async def _follow(self) -> None:
        """Follow streams from endpoint to endpoint. Ends only by an error that a new stream would not cure."""
        while True:
            endpoint, token = self._client.current, self._client.token
            stream = endpoint.stream(WATCH, WatchRequest, self._client.metadata)
            try:
                await self._read(stream)
            except CallError as failure:
                await self._recover(failure, endpoint, token)
            finally:
                await stream.close()
            self._failures += 1
            await asyncio.sleep(self._client.pause_s(self._failures))

    async def _read(self, stream: Stream) -> None:
        """Queue what one stream brings, until it fails."""
        groups = RevisionGroups(self._position)
        start = {"key": self._start, "range_end": self._end, "start_revision": self._position + 1, "fragment": True}
        await stream.send(WatchRequest(create_request=start), SEND_TIMEOUT_S)
        silent_intervals = 0
        while True:
            response = await stream.receive(PROGRESS_INTERVAL_S)
            if response is None:
                silent_intervals += 1
                if silent_intervals == SILENT_INTERVALS:
                    raise stream.failure("SILENT", f"sent nothing for {SILENT_INTERVALS * PROGRESS_INTERVAL_S:g} s")
                await stream.send(WatchRequest(progress_request={}), SEND_TIMEOUT_S)
                continue
            silent_intervals = 0
            if response.compact_revision:
                raise compacted(self._prefix, self._position, Revision(response.compact_revision - 1))
            if response.canceled:
                raise stream.failure("ENDED", response.cancel_reason or "the server ended the watch")
            if response.created:
                self._denied_token = None
                continue
            self._failures = 0
            events = [self._keyspace.event(event) for event in response.events]
            for changes in groups.take(events, unfinished=response.fragment):
                await self._queue.put(changes)
                self._position = changes.revision

    async def _recover(self, failure: CallError, endpoint: Endpoint, token: str | None) -> None:
        """Do what lets the next stream succeed, or raise what the reader must hear."""
        match failure.outcome:
            case CallOutcome.UNKNOWN | CallOutcome.NO_EFFECT:
                self._client.turn_from(endpoint)
            case CallOutcome.TOKEN_REJECTED | CallOutcome.FORBIDDEN if (
                token is not None and token != self._denied_token
            ):
                # etcd 3.4 answers a watch with an expired token by "permission denied": try a new token, once.
                with suppress(MetadataUnavailable):
                    await self._client.log_in(instead_of=token)
                    self._denied_token = self._client.token
            case _:
                raise refusal(self._asked, failure)
