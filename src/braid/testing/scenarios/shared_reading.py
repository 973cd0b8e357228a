"""A program of a simulated cluster whose processes share a topic: a group of checkpoint consumers.

Each process stores its results together with its checkpoint; what it had got since is lost with it, and must come
again. So the results that are stored have each key in order (I4). A record that the group leaves out (I5) stands out,
too: a reader of the whole log meets it after later records that are stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from braid.client.client import Client
from braid.model.errors import ConsumerReplaced, OffsetOutOfRange, PositionDiverged, SegmentNotFound
from braid.testing.checkers.history import PromiseBroken
from braid.testing.checkers.topic_history import KeyOrder, Log, TopicHistory

if TYPE_CHECKING:
    from braid.testing.scenarios.clients import ClientMachine

GROUP: Final = "shared"

Result = tuple[int, int, bytes]
"""Segment, offset and value."""


class SharedResults:
    """What the processes of the program have stored."""

    def __init__(self, topic: TopicHistory) -> None:
        self.stored = 0
        self._topic = topic
        self._order = KeyOrder()

    def store(self, who: str, results: list[Result]) -> None:
        self.stored += len(results)
        for segment, offset, value in results:
            if later := self._order.overtaken_by(value, self._topic.given[value]):
                what = f"{who} stores {value[:20]!r} at offset {offset} of segment {segment}"
                raise PromiseBroken("I4", f"{what} after number {later} of the same producer and key")

    def check_whole(self, log: Log) -> None:
        """Read the log from its beginning: what is stored is the beginning of each key."""
        records = [
            (segment, offset, record[0])
            for segment in sorted(log)
            for offset, record in enumerate(log[segment])
            if record is not None
        ]
        self.store("a reader of the whole log", records)


async def share_segments(machine: ClientMachine, client: Client, topic: str) -> None:
    """Be one of the processes, for a while."""
    random, cluster, results = machine.random, machine.cluster, machine.cluster.shared_results
    name = f"{machine.name}-{random.randrange(2)}"
    consumer = client.checkpoint_consumer(topic, start="earliest", group=GROUP, name=name)
    born = cluster.simulation.clock.monotonic()
    got: list[Result] = []
    try:
        async with consumer:
            for _ in range(random.choice([5, 50])):
                if machine.leaving.is_set():
                    break
                batch = await consumer.receive_batch(random.choice([0.01, 0.5, 1.0]))
                for message in batch.messages() if batch is not None else ():
                    cluster.inspector.check_seen(message.segment, message.offset)
                    cluster.history.saw(message.segment, message.offset, message.value, born)
                    got.append((message.segment, message.offset, message.value))
                if random.random() < 0.4:
                    consumer.checkpoint()
                    results.store(name, got)
                    got.clear()
    except ConsumerReplaced:
        pass
    except (OffsetOutOfRange, SegmentNotFound) as error:
        deletes = cluster.retention or cluster.history.ends_of_pruned
        if not cluster.history.lost_tails and not (deletes and not isinstance(error, PositionDiverged)):
            raise
