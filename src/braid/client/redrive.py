"""Redrive: publish the dead letters of a queue again, to the topic that they came from.

    dead-letter topic ─► queue subscription of this redrive ─► publish, without the dead letter's headers ─► ack

Each source, a topic and its subscription, has a subscription of its own on the dead-letter topic (`redrive_name`). It
remembers which dead letters were published again. It also settles the dead letters of other sources, for itself alone:
they stay in the topic, and wait in the subscriptions of their own redrives.

**A crash** between publish and ack delivers the dead letter again. Its publish has an identity that is derived from the
place of the dead letter, so it is stored once, however often it is repeated, as long as the log remembers the identity.
If an operator sets the subscription back, the placement is another one, and the dead letters are published again.

**The end** of a run is the end that the dead-letter topic had at its start. Messages that fail again come back as new
dead letters, and wait for the next run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from braid.client.consuming.dead_letters import PREFIX, UNREADABLE, one_row, publish_once, without_origin
from braid.model.errors import (
    AckStale,
    InvalidArgument,
    NotServing,
    SubscriptionExists,
    SubscriptionKindConflict,
    TopicNotFound,
)
from braid.model.message import DELIVER_AT, EXPIRES_AT, QueueMessage
from braid.model.names import MAX_NAME_CHARS, TopicName

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.client.consuming.queue import QueueConsumer

PREFETCH: Final = 100
IDLE_S: Final = 0.25
"""After so long without a dead letter, the run looks whether it is at its end."""
NOT_YET_S: Final = 1.0
"""A dead letter that came after the start of the run is given back for so long."""


async def redrive(
    client: Client, topic: str, subscription: str, *, to: str | None = None, count: int | None = None
) -> dict[str, Any]:
    """Publish the dead letters of a queue again; `Admin.redrive` says how."""
    if count is not None and count < 1:
        raise InvalidArgument(f"count is {count}; redrive 1 message or more, or leave it out for all")
    source = TopicName.parse(topic)
    target = TopicName.parse(to) if to is not None else source
    found = await client.admin.subscription(source.path, subscription)
    if found.get("queue") is None:
        raise InvalidArgument(f"subscription {subscription} of {source.path} is no queue: it has no dead letters")
    dead_letters = found["queue"]["policies"]["deadLetterTopic"]
    if not dead_letters:
        raise InvalidArgument(
            f"subscription {subscription} of {source.path} has no dead-letter topic, so there is nothing to redrive"
        )
    if target.path == dead_letters:
        raise InvalidArgument(f"{dead_letters} has the dead letters already: publish them to another topic")
    try:
        await client.routing.topic(target.path)
    except TopicNotFound as error:
        raise TopicNotFound(
            f"dead letters cannot go to {target.path}: it does not exist; name another topic"
        ) from error
    name = redrive_name(source, subscription)
    await _subscribe(client, dead_letters, name)
    run = _Run(client, source, subscription, target, dead_letters, name, count)
    return await run.run()


def redrive_name(topic: TopicName, subscription: str) -> str:
    """Return the name of the subscription by which dead letters of this source are published again."""
    source = f"{crc32(f'{topic.path} {subscription}'.encode()):08x}"
    return f"redrive-{subscription[: MAX_NAME_CHARS - 20]}-{source}"


async def _subscribe(client: Client, dead_letters: str, name: str) -> None:
    try:
        await client.admin.create_subscription(dead_letters, name, kind="queue", start="earliest")
    except SubscriptionExists:
        kind = (await client.admin.subscription(dead_letters, name))["kind"]
        if kind != "queue":
            raise SubscriptionKindConflict(
                f"subscription {name} of {dead_letters}, which a redrive needs, is a {kind} subscription; delete it"
            ) from None
    except TopicNotFound as error:
        raise TopicNotFound(f"the dead-letter topic {dead_letters} does not exist, so nothing is there") from error


class _Run:
    def __init__(
        self,
        client: Client,
        source: TopicName,
        subscription: str,
        target: TopicName,
        dead_letters: str,
        name: str,
        count: int | None,
    ) -> None:
        self._client = client
        self._of = {f"{PREFIX}topic": source.path.encode(), f"{PREFIX}subscription": subscription.encode()}
        self._target = target.path
        self._dead_letters = dead_letters
        self._name = name
        self._left = count
        self._redriven = self._unreadable = 0

    async def run(self) -> dict[str, Any]:
        ends = {segment: each["end"] for segment, each in (await self._progress()).items()}
        prefetch = PREFETCH if self._left is None else min(PREFETCH, self._left)
        consumer = self._client.queue_consumer(self._dead_letters, self._name, prefetch=prefetch)
        consumer.obeys_times = False
        async with consumer:
            while self._left != 0:
                message = await consumer.receive(timeout=IDLE_S)
                if message is None or message.offset >= ends.get(message.segment, 0):
                    if message is not None:
                        await consumer.nack(message, delay=NOT_YET_S)
                    if await self._is_done(ends):
                        break
                else:
                    await self._take(consumer, message)
        return {
            "redriven": self._redriven,
            "unreadable": self._unreadable,
            "from": self._dead_letters,
            "to": self._target,
            "subscription": self._name,
        }

    async def _take(self, consumer: QueueConsumer, message: QueueMessage) -> None:
        headers = message.headers
        if all(headers.get(name) == value for name, value in self._of.items()):
            if headers.get(f"{PREFIX}reason", b"").startswith(UNREADABLE.encode()):
                self._unreadable += 1  # To publish the bytes of a batch as a value would help nobody.
            else:
                await self._publish(message)
                self._redriven += 1
                self._left = None if self._left is None else self._left - 1
        with contextlib.suppress(AckStale):  # Another run has it now, and finds it published.
            await consumer.ack(message)

    async def _publish(self, message: QueueMessage) -> None:
        app = f"redrive {self._dead_letters} {self._name} {message.segment} {message.placement} {message.offset}"
        # Due now, and without a limit of its life: an operator wants it again. Without a time, a repeat is equal.
        headers = without_origin(message.headers.items(), (DELIVER_AT, EXPIRES_AT))
        await publish_once(self._client, self._target, app, one_row(message.key, message.value, headers))

    async def _is_done(self, ends: Mapping[int, int]) -> bool:
        """Tell whether all dead letters are settled that were there at the start."""
        progress = await self._progress()
        return all(
            segment not in progress or progress[segment]["drained"] or progress[segment]["offset"] >= end
            for segment, end in ends.items()
        )

    async def _progress(self) -> dict[int, Any]:
        """Return how far the subscription is in each segment. Waits for segments that nobody serves at the moment."""
        deadline = asyncio.get_running_loop().time() + self._client.timeout_s
        backoff = self._client.backoff()
        while True:
            found = await self._client.admin.subscription(self._dead_letters, self._name)
            if not found["unavailable"]:
                return {int(segment): each for segment, each in found["segments"].items()}
            if asyncio.get_running_loop().time() > deadline:
                segment, why = next(iter(found["unavailable"].items()))
                raise NotServing(f"segment {segment} of {self._dead_letters} is unavailable: {why['reason']}")
            await asyncio.sleep(backoff.next())
