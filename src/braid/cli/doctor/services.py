"""Gathers the facts about what brokers talk to: the metadata store, the storage, and each other."""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import http.client
import os
import secrets
import ssl
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from braid.cli.doctor.facts import BrokerFacts, ClusterFacts, StorageFacts, StoreFacts
from braid.cli.target import CONNECT_S, Target
from braid.client.client import connect
from braid.metadata import paths
from braid.model.errors import BraidError, ConnectFailed, ConnectionLost, ObjectExists, ObjectStoreUnavailable
from braid.ports.clock import SystemClock
from braid.ports.network import Address
from braid.ports.os_disk import OsDisk
from braid.wire.address import parse_address
from braid.wire.operations import Kind

READS: Final = 20
ANSWER_S: Final = 5.0
"""How long a broker, a store or a port may take to answer."""
STORAGE_S: Final = 30.0
PROBES: Final = ".braid-doctor"
"""No tenant has this name: names do not begin with a dot."""


async def look_at_metadata(url: str) -> StoreFacts:
    from braid.broker.parts.resources import open_store  # not for a client alone

    took: list[float] = []
    if url.startswith("sqlite:") and not os.path.exists(url.removeprefix("sqlite:")):
        return StoreFacts(url=url, error="there is no such file; the first broker makes it")
    try:
        async with asyncio.timeout(ANSWER_S + CONNECT_S):
            store = await open_store(url, SystemClock())
            try:
                for _ in range(READS):
                    began = time.perf_counter()
                    await store.get(paths.CLUSTER_ID)
                    took.append((time.perf_counter() - began) * 1_000)
            finally:
                await store.close()
    except (BraidError, TimeoutError) as error:
        return StoreFacts(url=url, error=_reason(error))
    ahead_s = None
    if url.startswith("etcd://"):
        addresses = url.removeprefix("etcd://").split(",")
        answers = [await asyncio.to_thread(_ask, parse_address(each), "/health", "") for each in addresses]
        ahead_s = max((each.ahead_s for each in answers if each.ahead_s is not None), key=abs, default=None)
    return StoreFacts(url=url, read_ms=tuple(sorted(took)), clock_ahead_s=ahead_s)


async def look_at_storage(url: str) -> StorageFacts:
    """Create, read, list, try to overwrite and delete one small object."""
    from braid.storage.objects.urls import open_objects  # needs obstore

    disk = OsDisk()
    folder = url.removeprefix("file://") if url.startswith("file://") else ""
    is_new = bool(folder) and not os.path.exists(folder)
    steps: dict[str, str] = {}
    create_ms = 0.0
    try:
        objects = open_objects(url, disk=disk)
        name, data = f"{PROBES}/{secrets.token_hex(8)}", os.urandom(64)

        async def refused() -> None:
            try:
                await objects.create(name, [b"another"])
            except ObjectExists:
                return
            raise ObjectStoreUnavailable("a second create of the same name succeeded")

        async def listed() -> None:
            if name not in [each.name for each in await objects.list(PROBES)]:
                raise ObjectStoreUnavailable("the listing does not show it")

        async def read() -> None:
            if await objects.read(name, 0, len(data)) != data:
                raise ObjectStoreUnavailable("its bytes are others")

        async def delete() -> None:
            await objects.delete(name)
            await objects.remove_empty_folders(PROBES)

        try:
            began = time.perf_counter()
            steps["create"] = await _failure(lambda: objects.create(name, [data]))
            create_ms = (time.perf_counter() - began) * 1_000
            if not steps["create"]:
                for step, work in {"read": read, "list": listed, "refuse": refused}.items():
                    steps[step] = await _failure(work)
                    if steps[step]:
                        await _failure(delete)
                        break
                else:
                    steps["delete"] = await _failure(delete)
        finally:
            await objects.close()
    except BraidError as error:
        steps["create"] = _reason(error)
    finally:
        await disk.close()
        if is_new:
            with contextlib.suppress(OSError):
                os.rmdir(folder)  # A broker makes it when it starts.
    return StorageFacts(url=url, steps=steps, create_ms=create_ms)


async def _failure(work: Callable[[], Awaitable[object]]) -> str:
    """Return why the work failed; empty if it did not."""
    try:
        async with asyncio.timeout(STORAGE_S):
            await work()
    except (BraidError, TimeoutError) as error:
        return _reason(error)
    return ""


async def look_at_cluster(target: Target) -> ClusterFacts:
    try:
        async with target.connected() as client:
            found = await client.admin.brokers()
    except BraidError as error:
        failed = error.__cause__ if isinstance(error.__cause__, ConnectFailed) else error  # Without a command's advice.
        if isinstance(failed, ConnectFailed) and not isinstance(failed.__cause__, ssl.SSLError | ConnectionLost):
            return ClusterFacts(url=target.url, error=_reason(failed))
        return ClusterFacts(url=target.url, error=_reason(error), answered=True)
    brokers = await asyncio.gather(*(_look_at_broker(target, each) for each in found))
    return ClusterFacts(url=target.url, brokers=tuple(brokers))


async def _look_at_broker(target: Target, described: dict[str, Any]) -> BrokerFacts:
    facts = BrokerFacts(
        id=described["id"],
        state=described["state"],
        version=described["version"] or "",
        leader=described["leader"],
        segments=described["segments"],
        address=described["address"] or "",
        admin=described["admin"] or "",
    )
    if facts.state == "down":
        return facts
    (error, round_trip_ms), port = await asyncio.gather(
        _reach(target, facts.address), asyncio.to_thread(_ask, parse_address(facts.admin), "/readyz", target.tls_ca)
    )
    return msgspec.structs.replace(
        facts,
        address_error=error,
        round_trip_ms=round_trip_ms,
        admin_error=port.error,
        ready=port.status == 200 if port.status else None,
        clock_ahead_s=port.ahead_s,
    )


async def _reach(target: Target, address: str) -> tuple[str, float]:
    """Return why a broker cannot be reached at its address, or how long it takes to answer, in ms."""
    client = connect(f"braid://{address}", token=target.token, tls=target.tls_ca or None, name="braid-doctor")
    try:
        async with asyncio.timeout(ANSWER_S):
            link = await client.pool.any()
            began = time.perf_counter()
            await link.request(Kind.PING)
            return "", (time.perf_counter() - began) * 1_000
    except (BraidError, TimeoutError) as error:
        return _reason(error), 0.0
    finally:
        await client.close()


class _Answer(msgspec.Struct, frozen=True):
    status: int = 0
    ahead_s: float | None = None
    error: str = ""


def _ask(address: Address, path: str, tls_ca: str) -> _Answer:
    """Ask an HTTP port for its status and its clock, without TLS first. Runs in a thread."""
    plain = _get(http.client.HTTPConnection(*address, timeout=ANSWER_S), path)
    if plain.status or "refused" in plain.error or "timed out" in plain.error:
        return plain
    trust = ssl.create_default_context(cafile=tls_ca or None)
    secured = _get(http.client.HTTPSConnection(*address, timeout=ANSWER_S, context=trust), path)
    return secured if secured.status else plain


def _get(connection: http.client.HTTPConnection, path: str) -> _Answer:
    try:
        before = time.time()
        connection.request("GET", path)
        answer = connection.getresponse()
        after = time.time()
        shown = answer.getheader("date")
    except (OSError, http.client.HTTPException) as error:
        return _Answer(error=(getattr(error, "strerror", None) or str(error) or type(error).__name__).lower())
    finally:
        connection.close()
    ahead_s = None
    if shown is not None:
        with contextlib.suppress(ValueError):  # Another program may listen there, and say anything.
            told = email.utils.parsedate_to_datetime(shown).timestamp()
            ahead_s = told + 0.5 - (before + after) / 2  # The header cuts off parts of a second.
    return _Answer(status=answer.status, ahead_s=ahead_s)


def _reason(error: BaseException) -> str:
    return "no answer in time" if isinstance(error, TimeoutError) else str(error).rstrip(".")
