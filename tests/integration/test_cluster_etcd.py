"""Brokers as processes that share three real etcd servers: the timeline, and moves while brokers and etcd's leader are
killed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import braid
from braid.client.client import Client
from tests.integration.test_examples import ROOT, check_timeline, run
from tests.kits.cluster_process import ClusterProcess, owners, served_by
from tests.kits.etcd_server import FAST_ELECTION, EtcdServer, etcd_cluster
from tests.kits.live_load import TOPIC, Load, check, read_all
from tests.kits.waiting import WAIT_S

pytestmark = pytest.mark.processes


LEASE_TTL_S = 5
"""etcd gives every lease as much again when it elects a leader; shorter ones would end with a busy moment."""


@pytest.fixture
def servers() -> Iterator[list[EtcdServer]]:
    with etcd_cluster(*FAST_ELECTION) as servers:
        yield servers


def metadata(servers: Sequence[EtcdServer]) -> str:
    return "etcd://" + ",".join(server.address for server in servers)


def test_the_timeline_is_the_same_with_etcd(servers: list[EtcdServer], tmp_path: Path) -> None:
    check_timeline(
        run([sys.executable, str(ROOT / "examples" / "timeline.py"), "--metadata", metadata(servers)], tmp_path)
    )


async def move_all(cluster: ClusterProcess, client: Client) -> None:
    """Each segment to the next broker, all at once."""
    names = [*cluster.brokers]
    targets = {segment: names[names.index(owner) - 1] for segment, owner in (await owners(client)).items()}
    await asyncio.gather(*(client.admin.move(TOPIC, segment=each, to=to) for each, to in targets.items()))
    await served_by(client, targets)


def test_moves_go_on_when_a_broker_and_the_leader_of_etcd_are_killed(servers: list[EtcdServer], tmp_path: Path) -> None:
    async def main(cluster: ClusterProcess) -> None:
        async with braid.connect(cluster.url, timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC, segments=6)
            load = Load(client)
            load.start(producers=2, rest_s=0.03)
            await load.goes_on_in(set(range(6)), 20)
            await move_all(cluster, client)
            await load.goes_on_in(set(range(6)), 20)

            victim = (await owners(client))[0]
            cluster[victim].kill()
            await asyncio.to_thread(cluster[victim].start)
            await load.goes_on_in(set(range(6)), 20)

            leader = next(server for server in servers if server.is_leader())
            before = await owners(client)
            moving = asyncio.create_task(move_all(cluster, client))
            async with asyncio.timeout(WAIT_S):
                while await owners(client) == before:  # noqa: ASYNC110 (other processes act)
                    await asyncio.sleep(0.005)
            leader.kill()  # Some have moved, or are about to; others wait for it.
            await moving
            await load.goes_on_in(set(range(6)), 20)
            leader.start()
            await move_all(cluster, client)

            await load.stop()
            check(load, await read_all(client))

    with ClusterProcess(tmp_path, shared=True, metadata=metadata(servers), lease_ttl_s=LEASE_TTL_S) as cluster:
        asyncio.run(main(cluster))
