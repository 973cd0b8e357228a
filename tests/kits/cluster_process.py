"""Several `braid serve` processes of one cluster, with leases as short as they can be."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self

from braid.client.client import Client
from braid.wire.address import format_url
from tests.kits.commands import run
from tests.kits.forked_broker import ForkedBroker
from tests.kits.live_load import TOPIC
from tests.kits.waiting import WAIT_S

LEASE_TTL_S = 2


class ClusterProcess:
    def __init__(
        self, folder: Path, *, shared: bool, metadata: str = "", brokers: int = 3, lease_ttl_s: float = LEASE_TTL_S
    ) -> None:
        config = folder / "broker.toml"
        config.write_text(f"lease_ttl_s = {lease_ttl_s}\nfile_bytes = {1 << 20}\nspare_files = 0\n")
        storage = f"file://{folder}/history" if shared else "local"
        options = ["--config", str(config), "--metadata", metadata or f"sqlite:{folder}/metadata.db"]
        self.brokers = {
            name: ForkedBroker(folder / name, "--id", name, "--storage", storage, *options)
            for name in (f"broker-{number}" for number in range(brokers))
        }

    @property
    def url(self) -> str:
        return format_url([broker.address for broker in self.brokers.values()])

    def __getitem__(self, name: str) -> ForkedBroker:
        return self.brokers[name]

    def others(self, *names: str) -> list[str]:
        return [name for name in self.brokers if name not in names]

    def run(self, *arguments: str) -> str:
        """A `braid` command, asked of any broker; what it prints."""
        return run(self.url, *arguments)

    def logs(self) -> str:
        return "\n".join(broker.log_path.read_text() for broker in self.brokers.values())

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor() as threads:
                list(threads.map(ForkedBroker.start, self.brokers.values()))
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)  # or those that did start would go on for ever
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for broker in self.brokers.values():
            broker.__exit__(*error)


async def owners(client: Client, topic: str = TOPIC) -> dict[int, str]:
    """Of each segment, who serves it; empty if nobody does."""
    stats = await client.admin.topic_stats(topic)
    return {
        int(number): segment["owner"] if segment["unavailable"] is None else ""
        for number, segment in stats["segments"].items()
    }


async def owned_by(client: Client, broker: str, topic: str = TOPIC) -> set[int]:
    return {segment for segment, owner in (await owners(client, topic)).items() if owner == broker}


async def served_by(client: Client, wanted: dict[int, str], topic: str = TOPIC) -> None:
    """Return when these brokers serve these segments; a moment after a record says so, its broker does."""
    async with asyncio.timeout(WAIT_S):
        while not wanted.items() <= (await owners(client, topic)).items():  # noqa: ASYNC110 (other processes act)
            await asyncio.sleep(0.01)


async def states(client: Client) -> dict[str, str]:
    return {each["id"]: each["state"] for each in await client.admin.brokers()}


async def leader(client: Client) -> str:
    (found,) = [each["id"] for each in await client.admin.brokers() if each["leader"]]
    name: str = found
    return name
