"""A consumer's session: its place among the consumers of its subscription, or of its group of checkpoint consumers, at
the topic's controller.

The consumer sends JOIN to the controller that the map names, or to any broker. That broker becomes the controller, or
names it (`Moved`). When the link is lost or the broker stops being the controller, the session is lost. Then the
consumer joins again under the same name, until that cannot work. It keeps its segments meanwhile; the next assignment
says which of them it still has.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from braid.client.consuming.consumer import may_pass
from braid.model.errors import BraidError, ClientClosed, Moved, TopicNotFound
from braid.wire.address import parse_address
from braid.wire.frame import Frame
from braid.wire.link import Link, within
from braid.wire.operations import (
    CHECKPOINT,
    Assignment,
    GroupPosition,
    Join,
    Joined,
    Kind,
    Leave,
    Progress,
    Release,
    decode,
    encode,
)

if TYPE_CHECKING:
    from braid.client.client import Client

JOIN_TIMEOUT_S: Final = 10.0
"""How long one broker may take to answer a JOIN before the client looks for the controller again."""

STEADY_S: Final = 1.0
"""A session that lived this long is joined again immediately. A session that is lost sooner may soon be lost again."""

_log: Final = logging.getLogger(__name__)


class GroupSession:
    def __init__(
        self,
        client: Client,
        topic: str,
        subscription: str,
        name: str,
        start: str,
        on_assignment: Callable[[Assignment], None],
        *,
        positions: Callable[[], tuple[GroupPosition, ...]] | None = None,
    ) -> None:
        """`positions` returns all that a checkpoint consumer knows; None for a stream consumer."""
        self.topic_id = 0
        """The id of the topic that was joined first, or that the positions are of; 0: not known yet. A new topic of the
        same name has another id."""
        self._client = client
        self._topic = topic
        self._subscription = subscription
        self._name = name
        self._start = start
        self._on_assignment = on_assignment
        self._positions = positions
        self._link: Link | None = None
        self._number = 0
        self._assignment = 0
        """The number of the last assignment."""
        self._lost: asyncio.Future[BraidError] | None = None
        self._controller = ""
        """The controller's address that a broker gave us; empty: the map names the controller."""
        self._map_is_old = False
        """Whether the broker that the map names turned out not to be the controller."""
        self._ended = False

    async def join_until(self, deadline: float) -> None:
        backoff = self._client.backoff()
        while True:
            if self._ended:
                raise ClientClosed("the consumer is closed")
            try:
                return await self._join()
            except BraidError as error:
                self._controller = error.owner if isinstance(error, Moved) else ""
                self._map_is_old = not self._controller
                delay_s = backoff.next()
                if not may_pass(error) or asyncio.get_running_loop().time() + delay_s > deadline:
                    raise
            await asyncio.sleep(delay_s)

    async def keep(self) -> None:
        """Join again whenever the session is lost. Raises the error that makes this impossible."""
        loop = asyncio.get_running_loop()
        backoff = self._client.backoff()
        while True:
            assert self._lost is not None
            joined_at = loop.time()
            error = await self._lost
            if not may_pass(error):
                raise error.again()
            if loop.time() - joined_at >= STEADY_S:
                backoff.reset()
            else:
                await asyncio.sleep(backoff.next())
            _log.warning("consumer %s of %s lost its session and joins again: %s", self._name, self._topic, error)
            await self.join_until(math.inf)

    async def release(self, segment: int) -> None:
        """Give a segment back. A controller that does not hear this takes the segment away by itself."""
        link = self._link
        with contextlib.suppress(BraidError):
            if link is not None:
                request = link.request(Kind.RELEASE, encode(Release(self._number, segment)))
                await within(request, self._client.timeout_s, "RELEASE")

    def progress(self, positions: tuple[GroupPosition, ...]) -> None:
        """Tell the controller of a group how far this consumer has come. If no controller hears this, the next JOIN has
        it."""
        if self._link is not None and self._link.alive:
            self._link.send(Kind.PROGRESS, encode(Progress(self._number, positions)))

    async def leave(self) -> None:
        """End the session. If no controller hears this, the session ends after its grace."""
        link, self._link = self._link, None
        if link is not None:
            with contextlib.suppress(BraidError):
                await within(link.request(Kind.LEAVE, encode(Leave(self._number))), self._client.timeout_s, "LEAVE")

    def end(self) -> None:
        """Stop joining again."""
        self._ended = True

    def ignore(self) -> None:
        """Ignore the controller from now on."""
        if self._link is not None:
            self._link.forget_session(self._number)

    # Called by the link.

    def on_assignment(self, assignment: Assignment) -> None:
        if assignment.number > self._assignment:
            self._assignment = assignment.number
            self._on_assignment(assignment)

    def on_session_lost(self, error: BraidError) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(error)

    # Joining.

    async def _join(self) -> None:
        again = self.topic_id != 0
        link = await self._controller_link()
        # A subscription that was deleted while we were away must not come back at another place.
        join = Join(self._topic, self._subscription, self._name, self._start, create=not again, topic_id=self.topic_id)
        if self._positions is not None:
            join = msgspec.structs.replace(join, kind=CHECKPOINT, positions=self._positions())
        request = link.request(Kind.JOIN, encode(join))
        timeout_s = min(JOIN_TIMEOUT_S, self._client.timeout_s)
        try:
            frame = await within(asyncio.shield(request), timeout_s, "JOIN was not answered")
        except BaseException:
            request.add_done_callback(lambda late: _leave_late(link, late))
            raise
        joined = decode(Joined, frame.body)
        if again and joined.topic_id != self.topic_id:
            link.send(Kind.LEAVE, encode(Leave(joined.session)))
            raise TopicNotFound(
                f"topic {self._topic} was deleted and created again; make another consumer for the new one"
            )
        if not link.alive:
            raise link.connection.end_reason().again()
        self.topic_id = joined.topic_id
        self._link, self._number, self._assignment = link, joined.session, 0
        self._lost = asyncio.get_running_loop().create_future()
        link.open_session(joined.session, self)

    async def _controller_link(self) -> Link:
        routing = self._client.routing
        if self._controller:
            return await self._client.pool.link(parse_address(self._controller))
        if self._map_is_old:
            await routing.refresh(self._topic)
        return await routing.controller_link(self._topic)


def _leave_late(link: Link, request: asyncio.Future[Frame]) -> None:
    """Leave after a JOIN for which the consumer no longer waits: its session must not keep segments."""
    if not request.cancelled() and request.exception() is None:
        link.send(Kind.LEAVE, encode(Leave(decode(Joined, request.result().body).session)))
