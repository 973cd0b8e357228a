"""The links of one client: one for each broker that it talks to, connected when first needed.

A caller that needs any broker gets a connected link, or the first broker that answers. Candidates are the addresses in
the client's URL and the addresses that the routing has learned. The pool tries them one after the other. After half a
second without an answer it tries the next address at the same time, so an unreachable machine costs little.

A broker that has just lost ownership of a segment may be dead without a word. The pool sends it a PING and closes its
link when no reply comes soon, so that callers continue elsewhere immediately.

When no route names a broker any more, and the URL does not either, the pool closes its link after a while, unless a
request waits on it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Collection, Sequence
from typing import Final

from braid.client.retry import Backoff
from braid.client.shared import result_of
from braid.model.errors import BraidError, ClientClosed, ConnectFailed, ConnectionLost, InvalidArgument, TimedOut
from braid.ports.network import Address, Network
from braid.wire.address import format_address
from braid.wire.link import Link, connect_link, within
from braid.wire.operations import Kind, Topology

NEXT_ADDRESS_S: Final = 0.5
"""How long the pool waits for one address before it tries the next at the same time."""
SIGN_OF_LIFE_S: Final = 2.0
"""How long a broker that may be dead may take to answer a PING."""
PRUNE_AFTER_S: Final = 30.0
"""How long the link to a broker stays when no route names the broker. A segment that moves away may soon come back."""
LOOK_AGAIN_S: Final = 5.0
"""When the pool looks again at such a link that was in use."""


class Pool:
    def __init__(
        self,
        network: Network,
        addresses: Sequence[Address],
        *,
        client: str,
        token: Callable[[], str],
        connect_timeout_s: float,
        on_topology: Callable[[Topology], None],
        shuffle: random.Random,
    ) -> None:
        self.addresses = tuple(addresses)
        self._network = network
        self._client = client
        self._token = token
        self._connect_timeout_s = connect_timeout_s
        self._on_topology = on_topology
        self._shuffle = shuffle
        self._links: dict[Address, asyncio.Task[Link]] = {}
        self._named: frozenset[Address] = frozenset()
        self._pruning: dict[Address, asyncio.TimerHandle] = {}
        """Timers that close links, unless a route names the broker again."""
        self._checks: dict[Link, asyncio.Task[None]] = {}
        self.closed = False
        self._closed_error = ClientClosed("the client is closed")
        self._loop: asyncio.AbstractEventLoop | None = None
        """The loop of the first use: links work in no other."""

    async def link(self, address: Address) -> Link:
        """Return the link to this broker. Callers that ask at the same time share one attempt to connect."""
        return await result_of(self._attempt(address))

    async def any(self, but: Collection[Link] = ()) -> Link:
        """Return a connected link, or a link to the first address that works; none of the links in `but`."""
        self._check_open()
        tried = {link.address for link in but}
        if (link := next((link for link in self.links() if link.address not in tried), None)) is not None:
            return link
        known = [address for address in dict.fromkeys((*self.addresses, *sorted(self._named))) if address not in tried]
        return await self._first(self._shuffle.sample(known, len(known)))

    async def _first(self, addresses: Sequence[Address]) -> Link:
        """Return a link to the first address that works."""
        failures: list[BraidError] = []
        attempts: set[asyncio.Task[Link]] = set()
        left = list(addresses)
        while left or attempts:
            if left:
                attempts.add(self._attempt(left.pop(0)))
            done, attempts = await asyncio.wait(
                attempts, timeout=NEXT_ADDRESS_S if left else None, return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                if task.cancelled():
                    raise ClientClosed("the client was closed while it was connecting")
                error = task.exception()
                if error is None:
                    return task.result()
                if not isinstance(error, BraidError) or not error.retriable:
                    raise error
                failures.append(error)  # No broker is there, or it is full or about to stop.
        if len(failures) == 1:
            raise failures[0]
        known = ", ".join(sorted(map(format_address, addresses)))
        raise ConnectFailed(f"none of {known} answers: {'; '.join(map(str, failures))}")

    def backoff(self) -> Backoff:
        return Backoff(self._shuffle)

    def connected(self) -> Link | None:
        return next(iter(self.links()), None)

    def links(self) -> list[Link]:
        """Return the connected links."""
        done = (task for task in self._links.values() if task.done() and not task.cancelled() and not task.exception())
        return [link for task in done if (link := task.result()).alive]

    def name(self, addresses: Collection[Address]) -> None:
        """Set the brokers that routes name now."""
        self._named = frozenset(addresses)
        for address in [address for address in self._pruning if address in self._named]:
            self._pruning.pop(address).cancel()
        for link in self.links():
            self._prune_later(link.address)

    def suspect(self, address: Address) -> None:
        """Check a broker that may be dead."""
        link = next((link for link in self.links() if link.address == address), None)
        if link is not None and link not in self._checks and not self.closed:
            self._checks[link] = asyncio.get_running_loop().create_task(self._check(link), name=f"check {address}")

    async def _check(self, link: Link) -> None:
        try:
            await within(link.request(Kind.PING), SIGN_OF_LIFE_S, "PING was not answered")
        except TimedOut as error:
            link.connection.abort(
                ConnectionLost(f"broker {format_address(link.address)} gives no sign of life: {error}")
            )
        except BraidError:
            pass  # The link has ended, which also settles it.
        finally:
            del self._checks[link]

    async def close(self, reason: BraidError) -> None:
        self.closed = True
        checks = list(self._checks.values())
        for check in checks:
            check.cancel()
        await asyncio.gather(*checks, return_exceptions=True)
        for timer in self._pruning.values():
            timer.cancel()
        for task in self._links.values():
            task.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        links = self.links()
        for link in links:
            link.close(reason)
        for link in links:
            await link.lost

    def on_fork(self, error: ClientClosed) -> None:
        """Use no link any more, in a forked child: the links, and the loop that serves them, belong to the parent."""
        self.closed = True
        self._closed_error = error

    def _check_open(self) -> None:
        if self.closed:
            raise self._closed_error.again()
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        if self._loop is not loop:
            raise InvalidArgument(
                "this client was used in another event loop, and its connections work only there; make one in each "
                "asyncio.run(…): `async with braid.connect(…) as client`, or use `braid.sync.connect(…)`"
            )

    def _attempt(self, address: Address) -> asyncio.Task[Link]:
        self._check_open()
        task = self._links.get(address)
        if task is not None and task.done() and (task.cancelled() or task.exception() or not task.result().alive):
            task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(address), name=f"connect {address}")
            task.add_done_callback(_look_at)
            self._links[address] = task
        return task

    async def _connect(self, address: Address) -> Link:
        link = await connect_link(
            self._network,
            address,
            client=self._client,
            token=self._token(),
            timeout_s=self._connect_timeout_s,
            on_topology=self._on_topology,
        )
        self._prune_later(address)
        return link

    def _prune_later(self, address: Address, delay_s: float = PRUNE_AFTER_S) -> None:
        if address not in self._named and address not in self.addresses and address not in self._pruning:
            loop = asyncio.get_running_loop()
            self._pruning[address] = loop.call_later(delay_s, self._prune, address)

    def _prune(self, address: Address) -> None:
        del self._pruning[address]
        link = next((link for link in self.links() if link.address == address), None)
        if link is None:
            return  # Connecting again starts another timer.
        if link.idle:
            del self._links[address]
            link.close(ConnectionLost(f"nothing of what this client uses is on broker {format_address(address)}"))
        else:
            self._prune_later(address, LOOK_AGAIN_S)


def _look_at(task: asyncio.Task[Link]) -> None:
    if not task.cancelled():
        task.exception()
