"""One suite, every metadata store.

A test is a coroutine that takes `backend`: one store that is empty at the start of the test, and as many independent
clients of it as the test opens. It runs once for each factory below. A new store joins with one function:

    @backend_factory("mine")
    def mine(request: pytest.FixtureRequest) -> Backend:
        return MyBackend(request.getfixturevalue("tmp_path"))

Outside this repository, name such a function instead of adding it here (`from tests.conformance.conftest import
Backend`, with the repository's root on the path):

    BRAID_STORE_BACKEND=package.module:function pytest tests/conformance -k metadata

A factory may skip the test (`pytest.skip`) when what it needs is not installed.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, cast

import pytest

from braid.metadata.etcd.store import EtcdStore
from braid.metadata.memory import MemoryStore
from braid.metadata.sqlite.store import SqliteStore
from braid.metadata.store import Changes, Condition, Lease, Operation, Store
from braid.model.ids import Revision
from braid.ports.clock import Clock, SystemClock
from braid.testing.sim.loop import Simulation, run_simulation
from tests.kits.etcd_server import EtcdServer, grpc_settled, shared_etcd_server

PATIENCE_S = 60.0
"""How long a test may take before it counts as hanging. Nothing waits this long when the store works."""


class Backend(ABC):
    """One store under test."""

    shortest_ttl_s: float = 0.3
    """The shortest lease that the store keeps well; tests that wait for an expiry wait about this long."""
    steady_ttl_s: float = 2.0
    """A lease that a busy machine has time to renew."""

    def __init__(self) -> None:
        self.clock: Clock = SystemClock()
        self._clients: list[Store] = []
        self._watches: list[AsyncIterator[Changes]] = []
        self._leases: list[Lease] = []

    @abstractmethod
    async def open(self) -> Store:
        """A further client, independent of the others: its own connection, its own caches."""

    @abstractmethod
    async def forget_history(self) -> None:
        """Compact: afterwards the store refuses to watch from any revision before the present one."""

    async def client(self) -> Store:
        client = await self.open()
        self._clients.append(client)
        return client

    async def close(self) -> None:
        """Close the watches, leases and clients that the test opened. Override to stop a server too."""
        for watch in self._watches:
            await self.end(watch)
        for lease in self._leases:
            await lease.revoke()
        for client in self._clients:
            await client.close()

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run a test on a loop of its own."""
        asyncio.run(test())

    # What tests do often.

    async def write(self, client: Store, *operations: Operation, when: Sequence[Condition] = ()) -> Revision:
        """A transaction that must succeed."""
        result = await client.txn(when, operations)
        assert result.succeeded
        return result.revision

    async def revision(self, client: Store) -> Revision:
        return (await client.list("")).revision

    async def lease(self, client: Store, ttl_s: float = 30.0) -> Lease:
        """A lease that is revoked when the test ends."""
        lease = await client.grant_lease(ttl_s)
        self._leases.append(lease)
        return lease

    def watch(self, client: Store, prefix: str, after: Revision) -> AsyncIterator[Changes]:
        """A watch that is closed when the test ends."""
        watch = client.watch(prefix, after)
        self._watches.append(watch)
        return watch

    async def take(self, watch: AsyncIterator[Changes], count: int) -> list[Changes]:
        """The next `count` transactions."""
        return [await anext(watch) for _ in range(count)]

    async def end(self, watch: AsyncIterator[Changes]) -> None:
        await cast("Any", watch).aclose()


Factory = Callable[[pytest.FixtureRequest], Backend]
FACTORIES: dict[str, Factory] = {}


def backend_factory(name: str) -> Callable[[Factory], Factory]:
    def register(factory: Factory) -> Factory:
        FACTORIES[name] = factory
        return factory

    return register


class MemoryBackend(Backend):
    """In virtual time."""

    _store: MemoryStore

    def run(self, test: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main(simulation: Simulation) -> None:
            self.clock = simulation.clock
            self._store = MemoryStore(simulation.clock)
            await test()

        run_simulation(1, main)

    async def open(self) -> Store:
        return self._store.client()

    async def forget_history(self) -> None:
        self._store.compact()


class SqliteBackend(Backend):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    async def open(self) -> Store:
        return await SqliteStore.open(self.path)

    async def forget_history(self) -> None:
        store = await SqliteStore.open(self.path)
        await store.compact()
        await store.close()


class EtcdBackend(Backend):
    """Keys of its own in a server that all tests share."""

    shortest_ttl_s = 1.0

    def __init__(self, server: EtcdServer) -> None:
        super().__init__()
        self._server = server
        self._key_prefix = f"/conformance/{uuid.uuid4().hex}"

    async def open(self) -> Store:
        return await EtcdStore.open([self._server.address], key_prefix=self._key_prefix)

    async def forget_history(self) -> None:
        self._server.compact()

    async def close(self) -> None:
        await super().close()
        await grpc_settled()


@backend_factory("memory")
def memory(request: pytest.FixtureRequest) -> Backend:
    return MemoryBackend()


@backend_factory("sqlite")
def sqlite(request: pytest.FixtureRequest) -> Backend:
    return SqliteBackend(str(request.getfixturevalue("tmp_path") / "metadata.db"))


@backend_factory("etcd")
def etcd(request: pytest.FixtureRequest) -> Backend:
    return EtcdBackend(shared_etcd_server())


def _named_by_the_user() -> dict[str, Factory]:
    name = os.environ.get("BRAID_STORE_BACKEND")
    if not name:
        return {}
    module, _, function = name.partition(":")
    return {name: getattr(importlib.import_module(module), function)}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "backend" in metafunc.fixturenames:
        factories = _named_by_the_user() or FACTORIES
        metafunc.parametrize("backend", factories.values(), ids=[*factories], indirect=True)


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Backend:
    factory: Factory = request.param
    return factory(request)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a coroutine test, with the backend opened and closed on the test's own event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments: dict[str, Any] = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }

    backend: Backend = arguments["backend"]

    async def run() -> None:
        async with asyncio.timeout(PATIENCE_S):
            try:
                await pyfuncitem.obj(**arguments)
            finally:
                await backend.close()

    backend.run(run)
    return True
