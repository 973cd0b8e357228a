"""The links of one client: one for each broker that it talks to, connected when first needed."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence

from braid.client.address import format_address
from braid.client.link import Link, connect_link
from braid.model.errors import BraidError, ClientClosed, ConnectFailed
from braid.ports.network import Address, Network
from braid.wire.operations import Topology


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
        self._closed = False

    async def link(self, address: Address) -> Link:
        """The link to this broker. Callers that ask at the same time share one attempt to connect."""
        if self._closed:
            raise ClientClosed("the client is closed")
        task = self._links.get(address)
        if task is not None and task.done() and (task.cancelled() or task.exception() or not task.result().alive):
            task = None
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(address), name=f"connect {address}")
            task.add_done_callback(_look_at)
            self._links[address] = task
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # `close` did that; nobody has cancelled the caller.
                raise ClientClosed("the client was closed while it was connecting") from None
            raise

    async def any(self) -> Link:
        """A link to whichever broker answers: one that is connected, or the first of the addresses that works."""
        if (link := self.connected()) is not None:
            return link
        failures: list[BraidError] = []
        for address in self._shuffle.sample(self.addresses, len(self.addresses)):
            try:
                return await self.link(address)
            except BraidError as error:
                if not error.retriable:
                    raise
                failures.append(error)  # Nobody is there, or a broker that is full or about to stop.
        if len(failures) == 1:
            raise failures[0]
        known = ", ".join(map(format_address, self.addresses))
        raise ConnectFailed(f"none of {known} answers: {'; '.join(map(str, failures))}")

    def connected(self) -> Link | None:
        return next(iter(self.links()), None)

    def links(self) -> list[Link]:
        """Those that are connected now."""
        done = (task for task in self._links.values() if task.done() and not task.cancelled() and not task.exception())
        return [link for task in done if (link := task.result()).alive]

    async def close(self, reason: BraidError) -> None:
        self._closed = True
        for task in self._links.values():
            task.cancel()
        await asyncio.gather(*self._links.values(), return_exceptions=True)
        links = self.links()
        for link in links:
            link.close(reason)
        for link in links:
            await link.lost

    async def _connect(self, address: Address) -> Link:
        return await connect_link(
            self._network,
            address,
            client=self._client,
            token=self._token(),
            timeout_s=self._connect_timeout_s,
            on_topology=self._on_topology,
        )


def _look_at(task: asyncio.Task[Link]) -> None:
    if not task.cancelled():
        task.exception()
