"""The housekeeper: one task per broker that visits its segments and deletes what may be deleted.

Each round applies retention and deletes uploads that no catalog refers to. When a segment fails (its object store does
not answer, or it was fenced out), `errors` keeps the reason, and the round goes on with the next segment.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NamedTuple

from braid.model.errors import BraidError, BrokenInvariant
from braid.model.ids import Offset
from braid.ports.tasks import cancel
from braid.storage.retention import RetentionPolicy
from braid.storage.segment import SegmentStorage

DEFAULT_ROUND_S = 60.0

_log = logging.getLogger(__name__)


class Charge(NamedTuple):
    """What the housekeeper knows of a segment. It asks for policy and need in each round, because both change."""

    policy: Callable[[], RetentionPolicy]
    needed_from: Callable[[], Offset | None]
    keep_local_bytes: int


class Housekeeper:
    def __init__(self, round_s: float = DEFAULT_ROUND_S) -> None:
        self._round_s = round_s
        self._charges: dict[SegmentStorage, Charge] = {}
        self._task: asyncio.Task[None] | None = None
        self.errors: dict[SegmentStorage, BraidError] = {}
        """Of the segments whose last round failed."""

    def add(
        self,
        segment: SegmentStorage,
        policy: Callable[[], RetentionPolicy],
        needed_from: Callable[[], Offset | None] = lambda: None,
        keep_local_bytes: int = 0,
    ) -> None:
        self._charges[segment] = Charge(policy, needed_from, keep_local_bytes)

    def remove(self, segment: SegmentStorage) -> None:
        self._charges.pop(segment, None)
        self.errors.pop(segment, None)

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Returns when the round under way has been given up."""
        if self._task is not None:
            await cancel([self._task])
            self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._round_s)
            await self.go_round()

    async def go_round(self) -> None:
        for segment, charge in list(self._charges.items()):
            if segment not in self._charges:
                continue
            try:
                await segment.apply_retention(
                    charge.policy(), needed_from=charge.needed_from(), keep_local_bytes=charge.keep_local_bytes
                )
                await segment.sweep()
                self.errors.pop(segment, None)
            except BraidError as error:
                self._note(segment, error)
            except Exception as error:  # our bug; the other segments' retention must not end with it
                self._note(segment, BrokenInvariant(f"housekeeping broke: {error!r}"))
                _log.exception("housekeeping broke")

    def _note(self, segment: SegmentStorage, error: BraidError) -> None:
        if segment in self._charges:  # One that was removed meanwhile has failed because of that.
            self.errors[segment] = error
