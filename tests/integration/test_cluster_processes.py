"""Three brokers as processes, one SQLite file: owners, leaders and targets of moves that are killed, frozen and stopped
while clients go on."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import braid
from braid.client.client import Client
from braid.model.batch.encode import encode_batch
from braid.model.errors import (
    BraidError,
    BrokerNotActive,
    BrokerNotFound,
    ClientClosed,
    InvalidArgument,
    MoveRefused,
)
from braid.ports.network import SocketNetwork
from braid.wire.link import Link, connect_link
from braid.wire.operations import Kind
from tests.kits.cluster_process import ClusterProcess, leader, owned_by, owners, served_by, states
from tests.kits.live_load import BURST, TOPIC, Load, check, check_once_and_in_order, read_all
from tests.kits.waiting import WAIT_S, until

pytestmark = [pytest.mark.processes, pytest.mark.real_loop]


MODES = pytest.mark.parametrize("shared", [True, False], ids=["shared_fs", "local"])
REST_S = 0.03
"""Between the bursts of a producer: some 2,000 records a second, so that brokers and not records take the processor."""


@contextlib.asynccontextmanager
async def loaded_cluster(
    folder: Path, *, shared: bool, segments: int = 6, lease_ttl_s: float = 2
) -> AsyncIterator[tuple[ClusterProcess, Client, Load]]:
    """Under load; in the end everything that was confirmed must be there, once."""
    with ClusterProcess(folder, shared=shared, lease_ttl_s=lease_ttl_s) as cluster:
        async with braid.connect(cluster.url, timeout=WAIT_S) as client:
            await client.admin.create_topic(TOPIC, segments=segments)
            load = Load(client)
            load.start(producers=2, rest_s=REST_S)
            await load.goes_on_in(set(range(segments)), 20)
            yield cluster, client, load


async def end(client: Client, load: Load, segments: int = 6) -> None:
    """Every segment is served, everything arrives, and nothing is lost or there twice."""
    await load.goes_on_in(set(range(segments)), 40)
    await load.stop()
    check(load, await read_all(client))


@MODES
async def test_segments_of_a_killed_broker_wait_for_it_visibly_while_others_go_on(tmp_path: Path, shared: bool) -> None:
    async with loaded_cluster(tmp_path, shared=shared) as (cluster, client, load):
        victim = (await owners(client))[0]
        waiting = await owned_by(client, victim)
        cluster[victim].kill()

        async def is_down() -> bool:
            return (await states(client)).get(victim) == "down"

        await until(is_down)
        listed = await asyncio.to_thread(cluster.run, "broker", "list")
        assert re.search(rf"^{victim} +down .* {len(waiting)} ", listed, flags=re.MULTILINE), listed
        shown = await asyncio.to_thread(cluster.run, "topic", "stats", TOPIC)
        for segment in range(6):
            said = f"Segment {segment} is unavailable: its owner {victim} is down" in shown
            assert said == (segment in waiting), shown
        await others_go_on(client, load, set(range(6)) - waiting)
        await asyncio.to_thread(cluster[victim].start)
        await end(client, load)
        assert await owned_by(client, victim) == waiting


async def others_go_on(client: Client, load: Load, segments: set[int]) -> None:
    """One record for each of these segments is confirmed, and read back."""
    keys = {segment: value for (segment, _), value in load.confirmed.items() if not value.startswith(b"0-")}
    async with client.producer(TOPIC, timeout=WAIT_S) as producer:
        for number, segment in enumerate(sorted(segments)):
            value = b"9-%d" % number
            load.sent.append(value)
            message_id = await producer.send(value, key=keys[segment])
            assert message_id.segment == segment
            load.confirmed[segment, message_id.offset] = value
            await consumed(load, segment, message_id.offset)


async def consumed(load: Load, segment: int, offset: int) -> None:
    await load.until(lambda: load.consumed.get(segment, [])[-1:] >= [offset])


async def test_an_owner_that_was_frozen_while_its_segments_were_recovered_elsewhere_changes_nothing(
    tmp_path: Path,
) -> None:
    async with loaded_cluster(tmp_path, shared=True) as (cluster, client, load):
        zombie = (await owners(client))[0]
        link = await link_to(cluster, zombie)
        route = (await client.routing.topic(f"public/default/{TOPIC}")).publish_route(0)
        cluster[zombie].signal(signal.SIGSTOP)
        # It reads this as soon as it wakes up.
        late = link.request(Kind.PUBLISH, route, [encode_batch([b"late"], now_us=0)])
        async with braid.connect(cluster.url, timeout=WAIT_S) as operator:

            async def is_down() -> bool:
                return (await states(operator)).get(zombie) == "down"

            await until(is_down)
            target = cluster.others(zombie)[0]
            with pytest.raises(InvalidArgument, match="nothing was changed") as refusal:
                await operator.admin.recover(TOPIC, to=target)
            reach = re.findall(r"segment (\d+): chunks reach offset (\d+)", str(refusal.value))
            ends = {int(segment): int(offset) for segment, offset in reach}
            lost = [(segment, at) for segment, at in load.confirmed if at >= ends.get(segment, at + 1)]
            for place in lost:
                del load.confirmed[place]  # By the operator's word. Their offsets are given to others.
            load.doubtful = set()
            said = await asyncio.to_thread(cluster.run, "topic", "recover", TOPIC, "--to", target, "--accept-loss")
            assert all(f"Segment {segment}: chunks reach offset {at};" in said for segment, at in ends.items())
            await load.goes_on_in(set(ends), 40)
            doubtful, load.doubtful = load.doubtful, None  # From here on the application is told of nothing.
            epochs = await epochs_of(operator)
            cluster[zombie].signal(signal.SIGCONT)

            async def is_back() -> bool:
                return (await states(operator)).get(zombie) == "active"

            await until(is_back)
            with pytest.raises(BraidError) as refused:
                await asyncio.wait_for(late, WAIT_S)
            assert refused.value.retriable, "whoever sent it may try the new owner"
            link.close(ClientClosed("the test has its answer"))
            await load.goes_on_in(set(range(6)), 40)
            assert await epochs_of(operator) == epochs
            assert await owned_by(operator, zombie) == set()
            await load.stop()
            stored = await read_all(operator)
        assert {place: stored.get(place) for place in load.confirmed} == load.confirmed
        check_once_and_in_order(load, stored)
        assert len(doubtful) <= 2 * BURST, "more than was in flight"
        for segment, offsets in load.consumed.items():
            back = [at for at in range(1, len(offsets)) if offsets[at] != offsets[at - 1] + 1]
            assert len(back) <= (segment in ends), f"a gap or a repeat in segment {segment}"
            assert all(offsets[at] <= ends[segment] for at in back), "a new record was skipped"


async def link_to(cluster: ClusterProcess, name: str) -> Link:
    """That waits for as long as it takes, unlike a client's."""
    return await connect_link(
        SocketNetwork(),
        cluster[name].address,
        client="test",
        token="",
        timeout_s=WAIT_S,
        on_topology=lambda _: None,
    )


async def epochs_of(client: Client) -> dict[str, tuple[str, int]]:
    stats = await client.admin.topic_stats(TOPIC)
    return {number: (segment["owner"], segment["epoch"]) for number, segment in stats["segments"].items()}


async def test_an_owner_that_is_told_to_stop_hands_over_and_nobody_waits_for_its_lease(tmp_path: Path) -> None:
    async with loaded_cluster(tmp_path, shared=True, lease_ttl_s=30) as (cluster, client, load):
        leaving = (await owners(client))[0]
        began = time.monotonic()
        assert await asyncio.to_thread(cluster[leaving].stop) == 0
        await load.goes_on_in(set(range(6)), 40)
        assert time.monotonic() - began < 20, "as long as the lease would have taken"
        assert leaving not in set((await owners(client)).values())
        await end(client, load)


@MODES
async def test_moves_end_although_the_leader_is_killed_in_the_middle_of_them(tmp_path: Path, shared: bool) -> None:
    async with loaded_cluster(tmp_path, shared=shared) as (cluster, client, load):
        victim = await leader(client)
        first, second = cluster.others(victim)
        placed = await owners(client)
        targets = {segment: second if owner == first else first for segment, owner in placed.items() if owner != victim}
        async with braid.connect(cluster[first].url, timeout=WAIT_S) as operator:
            moves = [
                asyncio.create_task(operator.admin.move(TOPIC, segment=each, to=to)) for each, to in targets.items()
            ]

            async def begun() -> bool:
                return await owners(operator) != placed

            await until(begun)
            cluster[victim].kill()
            await asyncio.gather(*moves)
        await served_by(client, targets)
        await asyncio.to_thread(cluster[victim].start)
        await end(client, load)


@MODES
async def test_a_move_to_a_broker_that_dies_leaves_the_segment_served_by_another(tmp_path: Path, shared: bool) -> None:
    async with loaded_cluster(tmp_path, shared=shared) as (cluster, client, load):
        source = (await owners(client))[0]
        target = cluster.others(source)[0]
        for segment in await owned_by(client, target):  # So that nothing waits for it.
            await client.admin.move(TOPIC, segment=segment, to=source)
        async with braid.connect(cluster[source].url, timeout=WAIT_S) as operator:
            await operator.admin.brokers()  # It is connected.
            # Frozen first: as long as its lease lasts nobody knows, and it is given the segment.
            cluster[target].signal(signal.SIGSTOP)
            with pytest.raises((MoveRefused, BrokerNotFound)):  # The latter on a machine that is slower than a lease.
                await operator.admin.move(TOPIC, segment=0, to=target)
        cluster[target].kill()
        await load.goes_on_in(set(range(6)), 40)
        assert (await owners(client))[0] in cluster.others(target)
        await end(client, load)


@MODES
async def test_a_broker_is_drained_of_20_segments_and_takes_some_again(tmp_path: Path, shared: bool) -> None:
    async with loaded_cluster(tmp_path, shared=shared, segments=20) as (cluster, client, load):
        for segment in range(20):
            await client.admin.move(TOPIC, segment=segment, to="broker-1")
        await served_by(client, dict.fromkeys(range(20), "broker-1"))
        assert "Broker broker-1 is drained." in await asyncio.to_thread(cluster.run, "broker", "drain", "broker-1")
        assert await owned_by(client, "broker-1") == set()
        with pytest.raises(BrokerNotActive, match="broker-1 cannot be given segments"):
            await client.admin.move(TOPIC, segment=0, to="broker-1")
        assert "active" in await asyncio.to_thread(cluster.run, "broker", "activate", "broker-1")
        await client.admin.move(TOPIC, segment=0, to="broker-1")
        await end(client, load, segments=20)


@MODES
async def test_two_moves_at_once_of_one_segment_end_at_one_of_the_two_brokers(tmp_path: Path, shared: bool) -> None:
    async with loaded_cluster(tmp_path, shared=shared) as (cluster, client, load):
        for _ in range(5):
            source = (await owners(client))[0]
            first, second = cluster.others(source)
            outcomes = await asyncio.gather(
                client.admin.move(TOPIC, segment=0, to=first),
                client.admin.move(TOPIC, segment=0, to=second),
                return_exceptions=True,
            )
            refused = [each for each in outcomes if isinstance(each, BaseException)]
            assert all(isinstance(each, MoveRefused) for each in refused), refused
            assert len(refused) < 2
            await load.goes_on_in({0}, 40)
            assert (await owners(client))[0] in (first, second)
        await end(client, load)
