"""The processes under test: brokers on free ports of this machine, each after its proxy, and their metadata store."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from braid.ports.network import Address
from braid.testing.processes import BrokerProcess
from braid.wire.address import format_url
from tests.chaos.proxy import Proxy
from tests.kits.etcd_server import FAST_ELECTION, EtcdServer, etcd_cluster, free_ports

LEASE_TTL_S: Final = 2
REPLACE_AFTER_S: Final = 8
"""Some brokers stay away for longer: others then copy what they held."""
START_TRIES: Final = 20
START_PAUSE_S: Final = 0.5
CONFIG: Final = f"""\
lease_ttl_s = {LEASE_TTL_S}
replace_after_s = {REPLACE_AFTER_S}
file_bytes = {1 << 20}
spare_files = 0
[limits]
heartbeat_s = 2
"""


class ChaosBroker:
    """One broker: its process, its folder and its proxy."""

    def __init__(self, name: str, data: Path, options: Sequence[str]) -> None:
        listen, front = free_ports(2)
        self.name = name
        self.proxy = Proxy(front, listen)
        addresses = ("--listen", f"127.0.0.1:{listen}", "--advertise", f"127.0.0.1:{front}")
        self.process = BrokerProcess(data, "--id", name, *options, *addresses)

    @property
    def data(self) -> Path:
        return self.process.data

    async def start(self) -> None:
        """Start the broker, again and again as a supervisor does: a second fault may hit it while it starts. It waits
        for the lease of its predecessor by itself."""
        for _ in range(START_TRIES):
            try:
                await asyncio.to_thread(self.process.start)
                return
            except RuntimeError:
                await asyncio.sleep(START_PAUSE_S)
        await asyncio.to_thread(self.process.start)

    async def kill(self) -> None:
        await asyncio.to_thread(self.process.kill)

    async def stop(self) -> int:
        return await asyncio.to_thread(self.process.stop)

    async def wipe(self) -> None:
        await asyncio.to_thread(shutil.rmtree, self.data)


class Cluster:
    """Make it inside of the `stack` that ends every process, also after Ctrl-C; `open` starts the brokers."""

    def __init__(self, folder: Path, stack: ExitStack, *, brokers: int, metadata: str, storage: str) -> None:
        self.folder = folder
        self.local: Final = storage == "local"
        self.etcd: list[EtcdServer] = []
        if metadata == "etcd":
            self.etcd = stack.enter_context(etcd_cluster(*FAST_ELECTION))
            metadata = "etcd://" + ",".join(server.address for server in self.etcd)
        else:
            metadata = f"sqlite:{folder}/metadata.db"
        (folder / "broker.toml").write_text(CONFIG)
        place = "local" if self.local else f"file://{folder}/history"
        options = ("--config", str(folder / "broker.toml"), "--metadata", metadata, "--storage", place)
        self.brokers = {
            name: ChaosBroker(name, folder / name, options) for name in (f"broker-{each}" for each in range(brokers))
        }
        for broker in self.brokers.values():
            stack.push(broker.process)

    @property
    def url(self) -> str:
        return format_url([Address("127.0.0.1", broker.proxy.port) for broker in self.brokers.values()])

    async def open(self) -> None:
        await asyncio.gather(*(broker.proxy.open() for broker in self.brokers.values()))
        await asyncio.gather(*(broker.start() for broker in self.brokers.values()))

    async def close(self) -> None:
        await asyncio.gather(*(broker.proxy.close() for broker in self.brokers.values()))
