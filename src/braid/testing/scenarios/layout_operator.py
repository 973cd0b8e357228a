"""The part of a simulated operator that changes layouts: splits, merges, repartitions, terminated and deleted segments,
changes that are taken back, and policies by which the topic changes by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from braid.model.errors import SegmentNotFound, TransitionRefused, TransitionRunning
from braid.model.layout import Layout, SegmentInfo
from braid.model.names import SegmentName, TopicName
from braid.testing.checkers.history import PromiseBroken
from braid.testing.scenarios.clients import TOPIC
from braid.testing.scenarios.inspector import PATH

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster
    from braid.testing.scenarios.operator import Operator

REFUSED_LAYOUTS: Final = (TransitionRefused, TransitionRunning, SegmentNotFound)
"""Another change is under way, or has just been carried out."""
CHANGE_TIMEOUT_S: Final = 20.0
UPGRADE: Final = "upgrade it"
"""Stands in what a call is told that a broker of an earlier version holds up."""
FORGOTTEN_S: Final = 30.0
"""Brokers whose views lag, and answers that are late, tell of an earlier version for so long after its upgrade."""
MOST_SEGMENTS: Final = 5
"""That take writes."""
DELETE_S: Final = 30.0
"""Without faults, a segment that nothing needs can be deleted within this time."""
DECISION_S: Final = 5.0
"""When auto-scaling was switched off, a decision that was made before begins its change within this time."""


class LayoutOperator:
    def __init__(self, cluster: SimulatedCluster, operator: Operator) -> None:
        self._cluster = cluster
        self._operator = operator
        self._random = cluster.random

    @property
    def _admin(self) -> Any:
        return self._operator.client.admin

    # Changes.

    async def change_layout(self) -> None:
        """Split, merge, repartition and terminate, several times in a row, perhaps while another change is under way;
        and take changes back. Subscriptions may come meanwhile."""
        random, operator = self._random, self._operator
        self._begin(self._change_layout)
        if random.random() < 0.3:
            await asyncio.sleep(random.choice([0.0, 0.01, 0.05, 0.5]))
            self._begin(partial(self._admin.abort_transition, TOPIC))
        if random.random() < 0.2:
            await asyncio.sleep(random.choice([0.0, 0.01, 0.05]))
            await operator.use_brief_subscription()

    def _begin(self, work: Callable[[], Awaitable[Any]]) -> None:
        async def begin() -> None:
            try:
                await work()
            except TransitionRefused as error:
                self._check_reason(error)
                raise

        self._operator.in_background(self._operator.tolerantly(begin, REFUSED_LAYOUTS))

    def _check_reason(self, error: TransitionRefused) -> None:
        """A call is refused because of an earlier version only while there is one, or shortly after."""
        if UPGRADE not in str(error):
            return
        self._cluster.counts.layouts_refused += 1
        now, machines = self._cluster.simulation.clock.monotonic(), self._cluster.machines.values()
        if not any(now - each.upgraded_at < FORGOTTEN_S for each in machines):
            raise PromiseBroken("versions", f"every broker knows changes of a layout: {error!r}")

    async def _change_layout(self) -> None:
        random = self._random
        for _ in range(random.choice([1, 1, 2, 3])):
            change = self._chosen_change(self._cluster.inspector.topic().layout)
            result = await change(timeout=random.choice([0.5, CHANGE_TIMEOUT_S, CHANGE_TIMEOUT_S]))
            self._cluster.note(f"the layout is changed: {result}")
            await asyncio.sleep(random.choice([0.0, 0.0, 0.1, 2.0]))

    def _chosen_change(self, layout: Layout) -> Callable[..., Awaitable[Any]]:
        admin, random, active = self._admin, self._random, layout.active
        at = random.randrange(len(active))
        segment, hashes = active[at].segment_id, active[at].hash_range
        ways = [
            partial(admin.repartition, TOPIC, random.randint(1, MOST_SEGMENTS)),
            partial(
                admin.terminate_segment, TOPIC, _descriptor(random.choice([*layout.segments.values(), active[at]]))
            ),
        ]
        if at + 1 < len(active):
            ways.append(partial(admin.merge, TOPIC, segment, active[at + 1].segment_id))
        if len(active) < MOST_SEGMENTS and len(hashes) > MOST_SEGMENTS:
            split = partial(admin.split, TOPIC, segment)
            boundary = random.randint(hashes.start + 1, hashes.end)
            ways += [split, split, partial(split, into=3), partial(split, at=f"{boundary:04x}")]
        change = random.choice(ways)
        self._cluster.note(f"the layout is to change: {change.func.__name__}{change.args} {change.keywords}")
        return change

    def change_side_topic(self, name: str) -> None:
        """Change the layout of another topic while it is used and deleted."""
        change = partial(
            self._admin.repartition, name, self._random.randint(1, MOST_SEGMENTS), timeout=CHANGE_TIMEOUT_S
        )
        self._begin(change)

    # Single segments.

    async def delete_segment(self) -> None:
        """Delete a segment, often one that something still needs: then the call is refused."""
        self._begin(self._delete_segment)

    async def _delete_segment(self) -> None:
        random = self._random
        segments = self._cluster.inspector.topic().layout.segments
        oldest = [each for each in segments.values() if not each.is_active and not each.parent_ids]
        info = random.choice([*segments.values(), *oldest, *oldest, *oldest])
        if not info.is_active and random.random() < 0.7:
            await self._operator.let_raced_leave(info.segment_id)
        await self._delete(info)

    async def _delete(self, info: SegmentInfo) -> None:
        self._cluster.note(f"segment {info.segment_id} is to be deleted")
        await self._admin.delete_segment(TOPIC, _descriptor(info))
        self._cluster.counts.segments_deleted += 1
        if info.segment_id in self._cluster.inspector.segments():
            raise PromiseBroken("deleting", f"segment {info.segment_id} is deleted, and the topic has it")

    async def delete_sealed_segments(self) -> None:
        """Delete every sealed segment, the oldest first, when nothing needs it any more."""
        clock = self._cluster.simulation.clock
        deadline = clock.monotonic() + DELETE_S
        for info in sorted(self._cluster.inspector.topic().layout.segments.values(), key=lambda each: each.segment_id):
            while not info.is_active and info.segment_id in self._cluster.inspector.segments():
                try:
                    await self._operator.surely(partial(self._delete, info))
                except TransitionRefused as error:  # A broker may hear of the last acks a little later.
                    if clock.monotonic() > deadline:
                        raise PromiseBroken("deleting", f"nothing needs {info}, and it stays: {error!r}") from error
                    await asyncio.sleep(0.5)

    async def terminate_any(self) -> None:
        """Let a new segment take the place of one that takes writes."""
        info = self._random.choice(self._cluster.inspector.topic().layout.active)
        terminate = partial(self._admin.terminate_segment, TOPIC, _descriptor(info), timeout=CHANGE_TIMEOUT_S)
        await self._operator.surely(terminate)

    # Auto-scaling.

    def policy(self) -> dict[str, Any]:
        """Draw a policy by which the small load of a simulation is much."""
        random = self._random
        split, merge = random.choice([(1, 0), (2, 1), (6, 3), (40, 20)])
        return {
            "enabled": True,
            "splitMsgRateInThreshold": split,
            "mergeMsgRateInThreshold": merge,
            "splitCooldownSeconds": random.choice([0, 1, 4]),
            "mergeCooldownSeconds": random.choice([0, 1, 4]),
            "mergeWindowSeconds": random.choice([0, 0, 2]),
            "minSegments": random.choice([1, 1, 2]),
            "maxSegments": random.choice([3, MOST_SEGMENTS, 8]),
            "maxDagDepth": random.choice([2, 10]),
        }

    async def change_policy(self) -> None:
        policy = self.policy() if self._random.random() < 0.7 else {"enabled": False}
        self._begin(partial(self._admin.set_auto_scale_policy, TOPIC, policy))

    async def stop_scaling(self) -> None:
        """Let the topic stay as it is from now on."""
        await self._operator.surely(partial(self._admin.delete_auto_scale_policy, TOPIC))
        await asyncio.sleep(DECISION_S)


def _descriptor(info: SegmentInfo) -> str:
    return SegmentName.of(TopicName.parse(PATH), info).descriptor
