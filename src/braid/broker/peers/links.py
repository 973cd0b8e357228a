"""The asking side of the calls between brokers: one link to each other broker, connected when it is first needed.

Brokers know each other by a secret in the metadata store, which nobody else can read: the first broker that starts
makes it, by compare-and-swap. The secret is the token of a broker's HELLO (`auth.py`). So it is sent only to addresses
that registrations name and, with TLS on the broker's port, only to brokers whose certificate is trusted (`tls.py`).

A link is closed when its broker is gone or has another address, and after IDLE_S without use. At most MAX_IN_FLIGHT
requests to one broker are under way at the same time (I12); the rest wait here. An error of the other broker is raised
here as it was there. When no answer comes, the call may have run or not: every call can be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Final

import braid
from braid.broker.auth import PEER_TOKEN
from braid.broker.peers.calls import Arguments
from braid.cluster.members import Members
from braid.metadata import paths
from braid.metadata.made_once import made_once
from braid.metadata.store import Store
from braid.model.errors import (
    BraidError,
    ConnectFailed,
    ConnectionLost,
    MetadataCorrupt,
    NotServing,
    ShuttingDown,
    TimedOut,
)
from braid.ports.disk import Buffer
from braid.ports.network import Network
from braid.wire.address import parse_address
from braid.wire.frame import Frame
from braid.wire.link import Link, connect_link
from braid.wire.operations import Kind, PeerReply, PeerRequest, Topology, decode, encode

SECRET_BYTES: Final = 32
CALL_TIMEOUT_S: Final = 10.0
CONNECT_TIMEOUT_S: Final = 5.0
MAX_IN_FLIGHT: Final = 64
"""Requests to one broker. Pieces of history are a megabyte each."""
IDLE_S: Final = 60.0

OnAnswer = Callable[[Any, BraidError | None], None]
"""Gets the answer, or the error."""


async def cluster_secret(store: Store) -> str:
    """Return the secret by which the brokers of this cluster know each other; make it if there is none."""
    fresh = secrets.token_urlsafe(SECRET_BYTES).encode()
    secret = await made_once(store, paths.CLUSTER_SECRET, fresh)
    if len(secret) < SECRET_BYTES or not secret.isascii():
        raise MetadataCorrupt(f"{paths.CLUSTER_SECRET} holds no secret; remove it, and brokers make a new one")
    return secret.decode()


class _PeerLink:
    """The link to one broker, while it is connected and used."""

    def __init__(self, link: asyncio.Task[Link], max_in_flight: int) -> None:
        self.link: Final = link
        self.slots: Final = asyncio.Semaphore(max_in_flight)
        self.users = 0
        self.used_at = 0.0
        """The loop's time."""

    @property
    def usable(self) -> bool:
        if not self.link.done():
            return True
        return not self.link.cancelled() and self.link.exception() is None and self.link.result().alive


class Peers:
    def __init__(
        self, broker_id: str, members: Members, network: Network, *, max_in_flight: int = MAX_IN_FLIGHT
    ) -> None:
        self.secret = ""
        """Set before the first call."""
        self._broker_id = broker_id
        self._members = members
        self._network = network
        self._max_in_flight = max_in_flight
        self._peers: dict[str, _PeerLink] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        members.brokers.on_change.append(self._on_member)

    async def call(
        self,
        broker_id: str,
        name: str,
        arguments: Arguments,
        payload: Sequence[Buffer] = (),
        timeout_s: float = CALL_TIMEOUT_S,
    ) -> Any:
        """Return the broker's answer, or raise its error. `ConnectFailed`, `ConnectionLost` and `TimedOut` say that the
        broker did not answer, `NotServing` that it is not registered."""
        body = encode(PeerRequest(name, arguments))
        try:
            async with asyncio.timeout(timeout_s), self._peer(broker_id) as peer, peer.slots:
                link = await _connected(peer, broker_id)
                await link.connection.drained()
                frame = await link.request(Kind.PEER, body, payload)
        except TimedOut:  # The broker's own answer: it gave up.
            raise
        except TimeoutError as error:
            raise TimedOut(f"broker {broker_id} did not answer {name} within {timeout_s:g} s") from error
        return decode(PeerReply, frame.body).result

    def post(
        self, broker_id: str, name: str, arguments: Arguments, payload: Sequence[Buffer], on_answer: OnAnswer
    ) -> bool:
        """Send a call immediately, without a task; False if the link is not ready for it. `on_answer` is called once,
        in the iteration of the loop in which the answer comes, or the link is lost. The caller looks at the time and
        bounds how much is under way."""
        peer = self._peers.get(broker_id)
        if peer is None or not peer.link.done() or not peer.usable:
            return False
        link = peer.link.result()
        if link.connection.congested:
            return False
        peer.users += 1

        def on_reply(frame: Frame | None, error: BraidError | None) -> None:
            peer.users -= 1
            peer.used_at = asyncio.get_running_loop().time()
            if frame is None or error is not None:
                on_answer(None, error or ConnectionLost(f"the link to broker {broker_id} ended"))
            else:
                on_answer(decode(PeerReply, frame.body).result, None)

        link.call(Kind.PEER, encode(PeerRequest(name, arguments)), payload, on_reply)
        return True

    async def ready(self, broker_id: str) -> None:
        """Return when `post` works, if it is called before anything else."""
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S), self._peer(broker_id) as peer:
                link = await _connected(peer, broker_id)
                await link.connection.drained()
        except TimeoutError as error:
            raise TimedOut(f"broker {broker_id} takes nothing for {CALL_TIMEOUT_S:g} s") from error

    async def close(self) -> None:
        """Close all links. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        self._members.brokers.on_change.remove(self._on_member)
        if self._sweeper is not None:
            self._sweeper.cancel()
        peers = list(self._peers.values())
        for broker_id in list(self._peers):
            self._drop(broker_id, ShuttingDown(f"broker {self._broker_id} is stopping"))
        for link in await asyncio.gather(*(peer.link for peer in peers), return_exceptions=True):
            if isinstance(link, Link):
                await link.lost

    @contextlib.asynccontextmanager
    async def _peer(self, broker_id: str) -> AsyncIterator[_PeerLink]:
        """The link to this broker; `_sweep` keeps it while it is used."""
        if self._closed:
            raise ShuttingDown(f"broker {self._broker_id} is stopping")
        address = self._members.address(broker_id)
        if not address:
            raise NotServing(f"broker {broker_id} is not registered now")
        peer = self._peers.get(broker_id)
        if peer is None or not peer.usable:
            connecting = asyncio.get_running_loop().create_task(
                self._connect(broker_id, address), name=f"connect to {broker_id}"
            )
            connecting.add_done_callback(_retrieve_error)
            peer = self._peers[broker_id] = _PeerLink(connecting, self._max_in_flight)
            if self._sweeper is None:
                self._sweeper = asyncio.get_running_loop().call_later(IDLE_S, self._sweep)
        peer.users += 1
        try:
            yield peer
        finally:
            peer.users -= 1
            peer.used_at = asyncio.get_running_loop().time()

    async def _connect(self, broker_id: str, address: str) -> Link:
        link = await connect_link(
            self._network,
            parse_address(address),
            client=f"braid/{braid.__version__} broker {self._broker_id}",
            token=PEER_TOKEN + self.secret,
            timeout_s=CONNECT_TIMEOUT_S,
            on_topology=_ignore_topology,
        )
        if link.broker_id != broker_id:
            link.close(ConnectionLost(f"{address} is not broker {broker_id}"))
            raise ConnectFailed(f"broker {broker_id} is registered at {address}, where {link.broker_id} answers")
        return link

    def _on_member(self, broker_id: str) -> None:
        """The broker's registration is new or gone: if a process still answers at the old address, it is not this
        broker, or will not be for long."""
        self._drop(broker_id, ConnectionLost(f"broker {broker_id} is gone, or has started again"))

    def _drop(self, broker_id: str, reason: BraidError) -> None:
        peer = self._peers.pop(broker_id, None)
        if peer is None:
            return
        if not peer.link.done():
            peer.link.cancel()
        elif peer.usable:
            peer.link.result().close(reason)

    def _sweep(self) -> None:
        loop = asyncio.get_running_loop()
        for broker_id, peer in list(self._peers.items()):
            if not peer.users and loop.time() - peer.used_at >= IDLE_S:
                self._drop(broker_id, ConnectionLost(f"nothing was asked of broker {broker_id} for {IDLE_S:g} s"))
        self._sweeper = loop.call_later(IDLE_S, self._sweep) if self._peers else None


async def _connected(peer: _PeerLink, broker_id: str) -> Link:
    try:
        return await asyncio.shield(peer.link)
    except asyncio.CancelledError:
        if peer.link.cancelled():  # `_drop` did that; the caller is not cancelled.
            raise ConnectionLost(f"broker {broker_id} went away while it was being connected") from None
        raise


def _retrieve_error(task: asyncio.Task[Link]) -> None:
    """Callers get the error; if there is none left, asyncio must not report the error as unseen."""
    if not task.cancelled():
        task.exception()


def _ignore_topology(_: Topology) -> None:
    """Brokers follow the metadata themselves, and never ask for pushes of routing."""
