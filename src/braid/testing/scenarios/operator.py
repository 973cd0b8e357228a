"""The operator of a simulated cluster: moves, drains, seeks, subscriptions and topics that come and go, recoveries; its
changes of the layout are in `layout_operator.py`.

The operator begins each of these and does not wait for it. A call may fail where faults explain it. What a call has
answered is checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import combinations, count, permutations
from typing import TYPE_CHECKING, Any, Final

import msgspec

from braid.client.client import Client
from braid.metadata import paths
from braid.model.errors import (
    BraidError,
    BrokerNotActive,
    BrokerNotFound,
    DiskError,
    InvalidArgument,
    MoveRefused,
    NotAvailable,
    SegmentNotFound,
    SubscriptionBusy,
    SubscriptionExists,
    SubscriptionNotFound,
    TimedOut,
    TopicExists,
    TopicNotFound,
)
from braid.testing.checkers.history import PromiseBroken
from braid.testing.scenarios.clients import RACED, TOPIC
from braid.testing.scenarios.layout_operator import LayoutOperator

if TYPE_CHECKING:
    from braid.testing.scenarios.cluster import SimulatedCluster

SIDE_TOPICS: Final = ("side-0", "side-1")
MOVE_TIMEOUT_S: Final = 20.0
ALERT_TRIES: Final = 100
"""An operator that recovers waits so often, 0.1 s each time, for a segment that nobody serves."""
TRIES: Final = 20

Errors = tuple[type[BraidError], ...]

TRACES: Final[Errors] = (
    TopicExists,
    TopicNotFound,
    SubscriptionExists,
    SubscriptionNotFound,
    SubscriptionBusy,
    DiskError,
)
"""An earlier try has left its traces, or another one is under way, or the disk is bad."""
REFUSED_MOVES: Final[Errors] = (MoveRefused, BrokerNotFound, BrokerNotActive, SegmentNotFound)
PRUNED: Final[Errors] = (SegmentNotFound,)
"""The layout may drop a segment while a call that names it is under way."""


class Reposition(msgspec.Struct, frozen=True):
    """A skip by so many records, or a seek to that offset."""

    skips: bool
    number: int


def possible_ends(start: int, certain: Sequence[Reposition], doubtful: Sequence[Reposition]) -> set[int]:
    """Where a subscription may stand when these were carried out once each, the doubtful ones perhaps, in any order."""
    ends: set[int] = set()
    for happened in range(len(doubtful) + 1):
        for some in combinations(doubtful, happened):
            for order in permutations([*certain, *some]):
                offset = start
                for step in order:
                    offset = offset + step.number if step.skips else step.number
                ends.add(offset)
    return ends


class Operator:
    def __init__(self, cluster: SimulatedCluster, client: Client) -> None:
        self.client = client
        self.brief: list[str] = []
        """Subscriptions that come and go."""
        self.background: set[asyncio.Task[None]] = set()
        self.layouts = LayoutOperator(cluster, self)
        self._cluster = cluster
        self._random = cluster.random
        self._draining: set[str] = set()
        """Brokers that a call under way drains."""
        self._seeking = False
        self._racing = False
        self._numbers = count(1)

    @property
    def _admin(self) -> Any:
        return self.client.admin

    # Moving.

    async def move(self) -> None:
        """Move one segment, or several at the same time: also the same one, also to where it is, or to a broker that is
        gone."""
        random, cluster = self._random, self._cluster
        for _ in range(random.choice([1, 1, 1, 2, 3])):
            segments = cluster.inspector.segments()
            segment = random.choice([None, *segments, *segments])
            to = random.choice([None, *cluster.machines])
            self.in_background(self.tolerantly(partial(self._move, segment, to), REFUSED_MOVES))
            await asyncio.sleep(random.choice([0.0, 0.0, 0.01, 0.3]))

    async def _move(self, segment: int | None, to: str | None) -> None:
        self._cluster.note(f"segment {segment} is to move to {to}")
        result = await self._admin.move(TOPIC, segment=segment, to=to, timeout=MOVE_TIMEOUT_S)
        self._cluster.counts.moves_asked += 1
        for each in result["segments"]:
            if to is not None and each["to"] != to:
                raise PromiseBroken("moves", f"segment {each['segment']} was to move to {to}, and moved to {each}")

    async def drain(self) -> None:
        """Drain a broker, or activate one that is drained."""
        random, cluster = self._random, self._cluster
        broker = random.choice(list(cluster.machines))
        drained = [each for each in cluster.machines if cluster.store._server.get(paths.drain(each)) is not None]
        if cluster.gentle:  # A segment that no broker may have waits, and then clients meet errors.
            drained += [each for each in cluster.machines if each in self._draining and each not in drained]
        if drained and (random.random() < 0.5 or len(drained) == len(cluster.machines) - 1):
            broker = random.choice(drained)
            work = partial(self._admin.activate, broker)
        else:
            cluster.counts.drains += 1
            self._draining.add(broker)
            work = partial(self._drain, broker)
        cluster.note(f"broker {broker} is to be {'activated' if broker in drained else 'drained'}")
        self.in_background(self.tolerantly(work, REFUSED_MOVES))

    async def _drain(self, broker: str) -> None:
        try:
            await self._admin.drain(broker)
        finally:
            self._draining.discard(broker)

    async def let_go_of_parents(self) -> None:
        """Let no parent be kept for a subscription that nobody consumes."""
        await self.delete_brief_subscriptions()
        if self._cluster.transitions and not self._cluster.retention:
            await self.surely(partial(self._admin.skip, TOPIC, RACED))

    async def let_raced_leave(self, segment: int) -> None:
        """Let the subscription that nobody consumes leave a segment, unless seeks are under way that count."""
        if self._racing or self._cluster.retention:
            return
        self._racing = True
        try:
            await self._admin.skip(TOPIC, RACED, segment=segment, count=self._cluster.inspector.end(segment) + 1)
        finally:
            self._racing = False

    async def recover(self) -> None:
        """Let another broker continue what a broker that is gone, or has lost its disk, has left."""
        self.in_background(self.tolerantly(self._recover, REFUSED_MOVES))

    async def recover_all(self) -> None:
        """Until everything is served: brokers that have lost their disks do not get their records back."""
        while not self._cluster.inspector.all_served():
            if self._cluster.inspector.has_lost():
                await self.tolerantly(self._recover, REFUSED_MOVES)
            await asyncio.sleep(1.0)

    async def _recover(self) -> None:
        for _ in range(ALERT_TRIES):
            if self._cluster.inspector.has_lost():
                break
            await asyncio.sleep(0.1)
        try:
            await self._admin.recover(TOPIC, accept_loss=False, timeout=1.0)
        except InvalidArgument as error:
            self._cluster.note(f"a loss is accepted: {error}")
        result = await self._admin.recover(TOPIC, accept_loss=True, timeout=MOVE_TIMEOUT_S)
        self._cluster.note(f"recovered: {result}")
        self._cluster.counts.recoveries += 1

    # Subscriptions.

    async def seek(self) -> None:
        if self._seeking:
            return  # Which of two was last would not be known.
        admin, random = self._admin, self._random
        history = self._cluster.history.subscription("moved")
        segments = self._cluster.inspector.segments()
        ends = {segment: max([0, *history.handed[segment]]) for segment in segments}
        segment = random.choice(segments)
        now_ms = self._cluster.simulation.clock.now_us() // 1_000
        ways: list[Callable[[], Awaitable[Any]]] = [
            lambda: admin.seek(TOPIC, "moved", random.choice(["earliest", "latest"])),
            lambda: admin.seek(TOPIC, "moved", {segment: random.randint(0, ends[segment])}),
            lambda: admin.seek(TOPIC, "moved", now_ms - random.randrange(20_000)),
            lambda: admin.skip(TOPIC, "moved"),
            lambda: admin.skip(TOPIC, "moved", segment=segment, count=random.randint(1, 50)),
        ]
        way = random.choice(ways)
        if random.random() < 0.3:
            way = partial(self._unheard, way)
        self.in_background(self.tolerantly(lambda: self._set("moved", way), PRUNED))

    async def _unheard(self, way: Callable[[], Awaitable[Any]]) -> Any:
        """No client hears of it: connections are silent meanwhile, and break before they are heard again."""
        cluster = self._cluster
        pairs = [(broker, client) for broker in cluster.machines for client in cluster.clients]
        for pair in pairs:
            cluster.network.cut(*pair)
        try:
            return await way()
        finally:
            for pair in pairs:
                cluster.network.reset(*pair)
                cluster.network.heal(*pair)

    async def race(self) -> None:
        """Several seeks and skips at the same time. Whatever becomes of their answers, the subscription stands where
        they lead in some order, each of them once at most."""
        steady = self._cluster.history.survives_power_loss and not self._cluster.lossy
        if not self._racing and steady and not self._cluster.retention:
            self._racing = True
            self.in_background(self.tolerantly(self._race, PRUNED))

    async def _race(self) -> None:
        admin, random, cluster = self._admin, self._random, self._cluster
        try:
            segment = random.choice(cluster.inspector.segments())
            end = cluster.inspector.end(segment)
            if end < 20:
                return
            start = random.randint(0, end // 4)
            await admin.seek(TOPIC, RACED, {segment: start})  # What began before this must not happen after it.
            steps: list[Reposition] = []
            for _ in range(random.choice([1, 2, 2, 3])):
                number = random.randint(1, end // 4)
                steps.append(Reposition(random.random() < 0.6, number))
            calls = [
                admin.skip(TOPIC, RACED, segment=segment, count=step.number)
                if step.skips
                else admin.seek(TOPIC, RACED, {segment: step.number})
                for step in steps
            ]
            results = await asyncio.gather(*calls, return_exceptions=True)
        finally:
            self._racing = False
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, BraidError):
                raise result
        certain = [step for step, result in zip(steps, results, strict=True) if isinstance(result, dict)]
        doubtful = [step for step, result in zip(steps, results, strict=True) if not isinstance(result, dict)]
        cluster.counts.races += 1
        stands = cluster.inspector.stored_cursor(RACED, segment)
        if stands not in possible_ends(start, certain, doubtful):
            raise PromiseBroken(
                "once", f"{RACED} was set to {start} of segment {segment}, then {certain}, perhaps {doubtful}: {stands}"
            )

    async def seek_back(self, name: str) -> None:
        """Set a subscription to the earliest place, surely."""
        await self.surely(lambda: self._set(name, lambda: self._admin.seek(TOPIC, name, "earliest")))

    async def _set(self, name: str, way: Callable[[], Awaitable[Any]]) -> None:
        """Set a subscription to another place. Until it is known to which, anything may be handed out."""
        cluster = self._cluster
        history = cluster.history.subscription(name)
        began = history.sought_at = cluster.simulation.clock.monotonic()
        unknown = bool(history.unknown)
        history.unknown.update((segment, None) for segment in cluster.inspector.segments())
        cluster.note(f"subscription {name} is to be set to another place")
        self._seeking = True
        try:
            result = await way()
        except InvalidArgument:
            if not cluster.history.lost_tails and not cluster.retention:
                raise
            if not unknown:  # What was handed out there is lost, as was accepted, or expired: nothing was moved.
                history.unknown.clear()
            return
        finally:
            self._seeking = False
            # Segments that came meanwhile may have been set, too.
            history.unknown.update((segment, None) for segment in cluster.inspector.segments())
            history.sought_at = cluster.simulation.clock.monotonic()
        cluster.note(f"subscription {name} was set to {result}")
        offsets = {int(segment): offset for segment, offset in result["offsets"].items()}
        history.set_to(offsets, began)
        cluster.counts.seeks += 1
        if not unknown or history.unknown.keys() <= offsets.keys():
            history.unknown.clear()

    async def use_brief_subscription(self) -> None:
        random = self._random
        name = f"brief-{next(self._numbers)}"
        self._cluster.history.subscription(name).brief = True

        async def use() -> None:
            await self._admin.create_subscription(TOPIC, name, start=random.choice(["earliest", "latest"]))
            self.brief.append(name)
            await asyncio.sleep(random.uniform(0, 10.0))
            self.brief.remove(name)
            await self._admin.delete_subscription(TOPIC, name, force=random.random() < 0.7)
            self._cluster.counts.subscriptions_deleted += 1

        self.in_background(self.tolerantly(use))

    async def delete_brief_subscriptions(self) -> None:
        """Also those whose creation or deletion was not answered."""
        self.brief.clear()
        entries = self._cluster.store._server.list(paths.subscriptions_prefix(f"public/default/{TOPIC}")).entries
        for name in filter(None, (paths.subscription_of(entry.key) for entry in entries)):
            if name.startswith("brief-"):
                await self.surely(partial(self._delete_surely, name))

    async def _delete_surely(self, name: str) -> None:
        with contextlib.suppress(SubscriptionNotFound):
            await self._admin.delete_subscription(TOPIC, name, force=True)

    # Topics.

    async def use_side_topic(self) -> None:
        """Create a topic, publish, move it meanwhile, read it back, delete it; perhaps immediately again."""
        name = self._random.choice(SIDE_TOPICS)

        async def use() -> None:
            for _ in range(self._random.choice([1, 1, 2])):
                await self._use_topic(name)

        # Too few brokers may be there for its replicas, or one of an earlier version.
        refused = (InvalidArgument, NotAvailable) if self._cluster.replicas.there else ()
        self.in_background(self.tolerantly(use, refused))

    async def _use_topic(self, name: str) -> None:
        random, cluster = self._random, self._cluster
        await self._admin.create_topic(name, segments=random.randint(1, 3), **cluster.replicas.side_policy())
        moving: asyncio.Task[None] | None = None
        if not cluster.alone and random.random() < 0.7:
            move = self._admin.move(name, to=random.choice([None, *cluster.machines]), timeout=MOVE_TIMEOUT_S)
            moving = asyncio.ensure_future(self.tolerantly(lambda: move, REFUSED_MOVES))
        if cluster.transitions and random.random() < 0.5:
            self.layouts.change_side_topic(name)  # It may be deleted in the middle of that.
        made = next(self._numbers)
        values = [b"%d/%d" % (made, number) for number in range(random.choice([1, 50]))]
        async with self.client.producer(name) as producer:
            await producer.send_many(values)
        if random.random() < 0.5:
            got = await self._read(name, len(values))
            if sorted(got) != sorted(values):
                raise PromiseBroken("I2", f"topic {name} holds {sorted(got)}, sent were {values}")
        if moving is not None and random.random() < 0.5:
            await moving
        await self._admin.delete_topic(name)
        if moving is not None:
            await moving
        cluster.counts.side_topics += 1

    async def _read(self, name: str, number: int) -> list[bytes]:
        async with self.client.checkpoint_consumer(name, start="earliest") as consumer:
            got: list[bytes] = []
            while len(got) < number:
                batch = await consumer.receive_batch(20.0)
                if batch is None:
                    raise TimedOut("a side topic's records did not come")
                got += batch.values()
        return got

    async def create_topic(self, name: str) -> None:
        await self.surely(lambda: self._admin.create_topic(name, segments=2))

    async def delete_topic(self, name: str) -> None:
        """What a deleted topic leaves is nothing."""

        async def delete() -> None:
            with contextlib.suppress(TopicNotFound):
                await self._admin.delete_topic(name, force=True)
            if self._cluster.store._server.get(paths.layout(f"public/default/{name}")) is not None:
                raise TimedOut("a creation that nobody waits for any more came to its end after the deletion")

        await self.surely(delete)

    # How.

    async def surely(self, work: Callable[[], Awaitable[Any]]) -> None:
        """Without faults, what can be tried again succeeds in the end."""
        last: BraidError | None = None
        for _ in range(TRIES):
            try:
                await work()
                return
            except BraidError as error:
                if not error.retriable and not isinstance(error, TimedOut):
                    raise
                last = error
                await asyncio.sleep(0.2)
        raise PromiseBroken("progress", f"an operator's call did not succeed in {TRIES} tries: {last!r}")

    def in_background(self, work: Awaitable[Any]) -> None:
        task = asyncio.ensure_future(self._or_fail(work))
        self.background.add(task)
        task.add_done_callback(self.background.discard)

    async def _or_fail(self, work: Awaitable[Any]) -> None:
        try:
            await work
        except Exception as error:
            self._cluster.failed(error)

    async def tolerantly(self, work: Callable[[], Awaitable[Any]], refused: Errors = ()) -> None:
        try:
            await work()
        except TRACES + refused as error:
            self._cluster.note(f"operator: {error!r}")
        except BraidError as error:
            if not error.retriable and not isinstance(error, TimedOut):
                raise
            self._cluster.note(f"operator: {error!r}")
