"""Bad days of a change of layout: clients that do not answer, brokers that die after it, subscriptions without a
consumer, and a topic that is deleted meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from braid.broker.layouts.finalizing import ADOPTION_S, Finalizing
from braid.client.client import Client
from braid.metadata import paths
from braid.model.errors import TopicNotFound
from braid.model.names import SegmentName
from braid.testing.sim.loop import Simulation
from tests.kits.brokers import PATH, Brokers, running_brokers
from tests.kits.waiting import until


async def a_topic(client: Client, brokers: Brokers) -> None:
    await client.admin.create_topic("orders")
    await until(lambda: bool(brokers.owner(0)))
    async with client.producer("orders") as producer:
        await producer.send_many([b"%d" % number for number in range(10)])


async def stop_acking(client: Client) -> None:
    """Let the client take pushes of the routing, and never say so."""
    link = await client.pool.any()
    vars(link)["ack_topology"] = lambda _generation: None


def finalizing(brokers: Brokers) -> Finalizing:
    return next(each for each in brokers.running.values() if each.cluster.leader.leading).group_host.finalizing


def is_over(brokers: Brokers) -> bool:
    return PATH not in brokers.any().topics.committed


async def test_a_connected_client_that_never_acks_a_push_delays_the_end_of_a_transition_only_for_a_while(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client, brokers.client() as silent:
        await a_topic(client, brokers)
        await silent.routing.topic(PATH)
        await stop_acking(silent)
        await client.admin.split("orders", 0)
        began = simulation.clock.monotonic()
        await until(lambda: is_over(brokers))
        assert ADOPTION_S - 1 <= simulation.clock.monotonic() - began <= ADOPTION_S + 10
        assert (await silent.routing.topic(PATH)).active[0].id == 1, "it has the children all the same"


async def test_a_client_of_another_topic_holds_up_no_end(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client, brokers.client() as elsewhere:
        await a_topic(client, brokers)
        await client.admin.create_topic("other")
        await elsewhere.routing.topic("public/default/other")
        await client.admin.split("orders", 0)
        began = simulation.clock.monotonic()
        await until(lambda: is_over(brokers))
        assert simulation.clock.monotonic() - began < ADOPTION_S - 5


async def test_the_report_of_a_dead_broker_holds_up_no_end(simulation: Simulation) -> None:
    async with running_brokers(simulation) as brokers:
        dying = next(name for name, broker in brokers.running.items() if not broker.cluster.leader.leading)
        others = [name for name in brokers.running if name != dying]
        async with brokers.client(*others) as client, brokers.client(dying) as silent:
            await a_topic(client, brokers)
            await silent.routing.topic(PATH)
            await stop_acking(silent)
            reports = brokers.running[others[0]].cluster.members.loads
            await until(lambda: (report := reports.get(dying)) is not None and report.adopted_generation is not None)
            await client.admin.split("orders", 0)
            mark = brokers.running[others[0]].topics.committed.known(PATH)
            assert mark is not None
            began = simulation.clock.monotonic()
            await asyncio.sleep(5)
            assert not finalizing(brokers).is_adopted(mark), "a client of the dying broker has the old layout"
            await silent.abandon()
            brokers.kill(dying)
            await until(lambda: is_over(brokers))
            assert simulation.clock.monotonic() - began < ADOPTION_S - 5, "its report went with its lease"


async def test_skipping_frees_the_end_of_a_transition_that_a_forgotten_subscription_holds(
    simulation: Simulation,
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(client, brokers)
        await client.admin.create_subscription("orders", "forgotten", start="earliest")
        await client.admin.split("orders", 0)
        await asyncio.sleep(ADOPTION_S * 3)
        assert not is_over(brokers)
        stats = await client.admin.topic_stats("orders")
        assert stats["subscriptions"]["forgotten"]["undrained"] == [0], "visible"
        assert stats["subscriptions"]["forgotten"]["consumers"] == {}
        await client.admin.split("orders", 1)  # It holds up no write, and no other change.
        await client.admin.skip("orders", "forgotten")
        await until(lambda: is_over(brokers), within_s=ADOPTION_S + 10)
        assert (await client.admin.topic_stats("orders"))["subscriptions"]["forgotten"]["undrained"] == []


@pytest.mark.parametrize("after_ms", range(0, 60, 4))
async def test_a_topic_that_is_deleted_at_any_moment_of_a_split_leaves_nothing_and_can_be_created_again(
    simulation: Simulation, after_ms: int
) -> None:
    async with running_brokers(simulation) as brokers, brokers.client() as client:
        await a_topic(client, brokers)
        await client.admin.create_subscription("orders", "billing")
        splitting = asyncio.create_task(brokers.call("b", "split_segment", topic="orders", segment=0))
        await asyncio.sleep(after_ms / 1_000)
        await client.admin.delete_topic("orders")
        with contextlib.suppress(TopicNotFound):
            await splitting
        for prefix in (paths.topic_prefix(PATH), paths.topic_segments_prefix(PATH), paths.topic_storage_prefix(PATH)):
            assert not (await brokers.store.list(prefix)).entries
        for name, disk in brokers.disks.items():
            assert not await disk.mount().list_folders(f"/{name}/wal/{PATH}"), "a call that was under way came too late"
        await a_topic(client, brokers)


async def test_after_an_accepted_loss_the_record_of_an_ended_log_says_where_the_log_ends_now(
    simulation: Simulation,
) -> None:
    """Its records were on the disk that is gone. Whatever compares the end with a cursor must see one number."""
    async with running_brokers(simulation, shared=False) as brokers, brokers.client() as client:
        await a_topic(client, brokers)
        await client.admin.create_subscription("orders", "billing", start="earliest")
        await client.admin.split("orders", 0)
        owner = brokers.owner(0)
        brokers.kill(owner)
        await until(lambda: not brokers.any().cluster.members.is_live(owner))
        await client.admin.recover("orders", segment=0, accept_loss=True)
        await until(lambda: bool(brokers.owner(0)))
        record = brokers.any().cluster.owners.find(SegmentName.at(PATH, "0000-ffff-0"))
        storage = brokers.running[brokers.owner(0)].segments.get(PATH, 0).storage
        assert record is not None
        assert storage.catalog.frontier is not None
        assert (record.ended_at, storage.catalog.frontier.end, storage.log.end) == (0, 0, 0)
