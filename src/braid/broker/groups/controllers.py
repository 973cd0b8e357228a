"""The *controller* of each topic: the broker that runs its groups.

    /topics/{topic}/controller = {"broker": "b1", "signs": true}, under that broker's lease

A broker that is asked for a topic without a controller becomes the controller, by creating the key (`claim`). It stays
the controller until it gives up the key (because it stops, or is to be drained) or its lease ends, which deletes the
key. Then the next broker that is asked claims it. The key's revision is the **term**: it never returns to a former
value, and each controller's term is higher than the term of the controller before it.

A broker is the controller as long as the store has its key, whatever the broker knows of it. So everything that a
controller writes carries `fence` among its conditions, and everything that it hands to consumers carries the term. By
the term, the owners of segments tell an old controller's grants from a new one's (broker/segments/read_grants.py). A
broker that was cut off, and does not know yet that it is no longer the controller, does no harm.

The table is part of the broker's view; only the store changes it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Final
from zlib import crc32

from braid.broker.segments.read_grants import KnownController
from braid.cluster.members import Members
from braid.metadata import paths
from braid.metadata.store import Compare, Delete, Put
from braid.metadata.view import Known, Table, View
from braid.model.errors import LeaseLost, MetadataError, MetadataUncertain, Moved, NotServing
from braid.model.ids import Revision
from braid.model.stored_record import StoredRecord, decode, encode

MAX_TRIES: Final = 5
NO_LEASE: Final = 0


class Controller(StoredRecord, frozen=True, kw_only=True):
    """The value of the key."""

    broker: str
    signs: bool = False
    """Whether the broker signs the read grants that it gives out; builds that do not leave this out."""

    def to_json(self) -> bytes:
        return encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Controller:
        return decode(cls, data, "the controller's key")


class Controllers:
    def __init__(self, view: View, members: Members, broker_id: str, lease: Callable[[], int]) -> None:
        """`lease` returns the id of the lease under which this broker may act now; `NO_LEASE` if it may not act."""
        self.table: Final[Table[str, Controller]] = view.add(
            Table(paths.TOPICS_PREFIX, paths.topic_of_controller, Controller.from_json, paths.controller)
        )
        self._view = view
        self._members = members
        self._broker_id = broker_id
        self._lease = lease
        self._releasing: asyncio.Task[None] | None = None

    def address(self, path: str) -> str:
        """The address of the topic's controller; empty if there is none."""
        known = self.table.get(path)
        return self._members.address(known.broker) if known is not None else ""

    def known(self, path: str) -> KnownController:
        """Return what owners need to know of the topic's controller."""
        known, seen = self.table.known(path), self._view.generation
        if known is None:
            return KnownController(0, signs=True, seen=seen)
        return KnownController(known.revision, known.value.signs, seen)

    def is_here(self, path: str) -> bool:
        """Whether this broker is the controller, as far as it knows."""
        return self._held(path) is not None

    def term(self, path: str) -> Revision:
        """The term of this broker as the controller. `NotServing` if it is not the controller."""
        held = self._held(path)
        if held is None:
            raise NotServing(f"broker {self._broker_id} does not run the subscriptions of topic {path} any more")
        return held.revision

    def fence(self, path: str) -> Compare:
        """A condition that holds while this broker is the controller. `NotServing` if it is not."""
        return Compare(paths.controller(path), self.term(path))

    async def claim(self, path: str, topic_unchanged: Compare) -> None:
        """Return when this broker is the controller. `Moved` if another broker is. The key is created only while the
        topic is unchanged, so that no key is left below a deleted topic."""
        key = paths.controller(path)
        for _ in range(MAX_TRIES):
            if self.is_here(path):
                return
            self._check_free(path)
            try:
                await self._try_claim(key, topic_unchanged)
            except LeaseLost as error:
                raise NotServing(f"broker {self._broker_id} cannot run subscriptions now: {error}") from error
            except MetadataUncertain:
                pass  # The key is read next, and tells.
            entry = await self._view.store.get(key)
            if entry is None:
                raise NotServing(f"topic {path} has changed while broker {self._broker_id} wanted to run it; try again")
            await self._view.caught_up(entry.revision)
        raise MetadataUncertain(f"it is not known which broker runs the subscriptions of topic {path}; try again")

    def start(self) -> None:
        """Give up all topics when this broker is drained. Called when the view is loaded."""
        self._members.drains.on_change.append(self._on_drain)

    async def stop(self) -> None:
        """Give up all topics, so that other brokers can claim them immediately."""
        if self._on_drain in self._members.drains.on_change:
            self._members.drains.on_change.remove(self._on_drain)
        if self._releasing is not None:
            await asyncio.wait([self._releasing])
        await self.release_all()

    def _on_drain(self, broker_id: str) -> None:
        if broker_id == self._broker_id and self._elsewhere("") and self._releasing is None:
            self._releasing = asyncio.create_task(self.release_all(), name="release controllers")
            self._releasing.add_done_callback(self._released)

    def _released(self, _: asyncio.Task[None]) -> None:
        self._releasing = None

    async def release_all(self) -> None:
        """Delete the keys of all topics that this broker controls. A key that remains goes when the lease ends."""
        for path in [path for path in self.table.all() if self.is_here(path)]:
            with contextlib.suppress(MetadataError, NotServing):
                fence = self.fence(path)
                await self._view.store.txn([fence], [Delete(fence.key)])

    async def _try_claim(self, key: str, topic_unchanged: Compare) -> None:
        value = Controller(broker=self._broker_id, signs=True).to_json()
        await self._view.store.txn([Compare(key, Revision(0)), topic_unchanged], [Put(key, value, self._lease())])

    def _check_free(self, path: str) -> None:
        if self._lease() == NO_LEASE:
            raise NotServing(f"broker {self._broker_id} has lost its lease and is coming back; try again in a moment")
        known = self.table.known(path)
        if known is None and (other := self._elsewhere(path)):
            raise Moved(
                f"broker {self._broker_id} takes no topics now: broker {other} can run topic {path}",
                self._members.address(other),
            )
        if known is not None:
            # A key of this broker is under a lease that is over, and about to go.
            broker = known.value.broker
            owner = self._members.address(broker) if broker != self._broker_id else ""
            raise Moved(f"broker {broker} runs the subscriptions of topic {path}", owner, known.revision)

    def _elsewhere(self, path: str) -> str:
        """An active broker that should run the topic because this one is not active; empty if there is none, or if
        this broker is active."""
        others = [each for each in sorted(self._members.brokers.all()) if self._members.is_active(each)]
        if not others or self._broker_id in others:
            return ""
        return others[crc32(path.encode()) % len(others)]

    def _held(self, path: str) -> Known[Controller] | None:
        known = self.table.known(path)
        if known is None or known.value.broker != self._broker_id or known.lease != self._lease():
            return None
        return known
