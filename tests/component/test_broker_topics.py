"""This broker's view of the topics: one truth, in the store's order, whatever happens to answers and watches."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable

import msgspec
import pytest

from braid.broker.topics import Topics
from braid.metadata import paths
from braid.metadata.history import Watch
from braid.metadata.memory import Fault, MemoryStore
from braid.metadata.store import Put
from braid.metadata.view import View
from braid.model.errors import (
    MetadataUnavailable,
    MetadataUncertain,
    RecordUnreadable,
    ShuttingDown,
    TopicExists,
    TopicNotFound,
)
from braid.model.ids import MAX_RANDOM_ID, NO_REQUEST, RequestId, Revision
from braid.model.names import TopicName
from braid.model.topic import Durability, PolicyChanges, Topic, TopicPolicies
from braid.testing.sim.loop import Simulation
from tests.kits.control import ORDERS, faults, loaded_topics, make_topic
from tests.kits.waiting import until


async def test_a_created_topic_is_in_view_when_create_returns(simulation: Simulation) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    changes: list[str] = []
    topics.on_change.append(changes.append)
    policies = TopicPolicies(durability=Durability.MEMORY, retention_bytes=1_000)
    topic = await topics.create(ORDERS, segments=3, policies=policies, properties={"team": "billing"})
    assert topics.find(ORDERS.path) == topics.get(ORDERS.path) == topics.all()[ORDERS.path] == topic
    assert 1 <= topic.id <= MAX_RANDOM_ID
    assert len(topic.layout.active) == 3
    assert topic.layout.properties == {"team": "billing"}
    assert topic.policies == policies
    assert topic.created_at == simulation.clock.now_us()
    assert changes == [ORDERS.path]
    assert topics.generation >= 1
    await topics.view.stop()


async def test_a_view_that_breaks_says_so_and_keeps_nobody_waiting(simulation: Simulation) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    failures: list[BaseException] = []
    topics.view.on_failure = failures.append

    def broken(path: str) -> None:
        raise LookupError(path)

    topics.on_change.append(broken)
    await make_topic(topics)
    with pytest.raises(ShuttingDown):
        await make_topic(topics, TopicName("public", "default", "later"))
    assert [type(failure) for failure in failures] == [LookupError]
    with pytest.raises(LookupError):
        await topics.view.stop()


async def test_a_topic_that_exists_cannot_be_created_again(simulation: Simulation) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    first = await make_topic(topics)
    with pytest.raises(TopicExists):
        await make_topic(topics, segments=2)
    assert topics.get(ORDERS.path) == first
    await topics.view.stop()


async def test_of_two_brokers_that_create_a_topic_one_succeeds_and_both_show_its_topic(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    here = await loaded_topics(simulation, store)
    there = Topics(View(store.client()), simulation.clock, random.Random(99))
    await there.view.load()
    results = await asyncio.gather(make_topic(here), make_topic(there), return_exceptions=True)
    assert sorted(type(result).__name__ for result in results) == ["Topic", "TopicExists"]
    await until(lambda: here.generation == there.generation)
    assert here.get(ORDERS.path) == there.get(ORDERS.path)
    await here.view.stop()
    await there.view.stop()


async def test_a_create_that_is_repeated_through_another_broker_finds_its_own_topic_and_nobody_elses(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    here = await loaded_topics(simulation, store)
    there = Topics(View(store.client()), simulation.clock, random.Random(99))
    await there.view.load()

    def create(topics: Topics, request_id: int) -> Awaitable[Topic]:
        request = RequestId(request_id)
        return topics.create(ORDERS, segments=2, policies=TopicPolicies(), properties={}, request_id=request)

    first = await create(here, 5)
    assert await create(there, 5) == first
    assert there.get(ORDERS.path) == first
    for other in (6, NO_REQUEST):
        with pytest.raises(TopicExists):
            await create(there, other)
    await here.mark_deleting(ORDERS)
    with pytest.raises(TopicExists, match="still being deleted"):
        await create(there, 5)
    await here.remove(ORDERS)
    again = await create(there, 5)
    assert again.id != first.id, "what is left of the first one is not the second one's"
    await here.view.stop()
    await there.view.stop()


async def test_two_creates_that_are_not_to_be_repeated_are_never_taken_for_one(simulation: Simulation) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    await make_topic(topics, segments=2)
    with pytest.raises(TopicExists):
        await make_topic(topics, segments=2)
    await topics.view.stop()


async def test_a_deletion_that_comes_late_does_not_touch_the_next_topic_of_that_name(simulation: Simulation) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    old = await make_topic(topics)
    await topics.mark_deleting(ORDERS, old.id)
    await topics.mark_deleting(ORDERS, old.id)
    await topics.remove(ORDERS)
    new = await make_topic(topics)
    with pytest.raises(TopicNotFound, match="created again"):
        await topics.mark_deleting(ORDERS, old.id)
    assert topics.get(ORDERS.path) == new
    await topics.view.stop()


async def test_an_absent_topic_is_not_found(simulation: Simulation) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    assert topics.find(ORDERS.path) is None
    for ask in (topics.get, topics.unchanged):
        with pytest.raises(TopicNotFound, match="orders"):
            ask(ORDERS.path)
    with pytest.raises(TopicNotFound):
        await topics.mark_deleting(ORDERS)
    await topics.remove(ORDERS)  # the last step of a deletion, repeated
    await topics.view.stop()


async def test_a_topic_that_is_being_deleted_is_absent_for_clients_and_its_name_is_taken_until_its_record_goes(
    simulation: Simulation,
) -> None:
    topics = await loaded_topics(simulation, MemoryStore(simulation.clock))
    old = await make_topic(topics)
    marked = await topics.mark_deleting(ORDERS)
    assert marked.deleting
    assert marked.id == old.id
    assert topics.find(ORDERS.path) is None
    assert topics.all()[ORDERS.path].deleting
    assert await topics.mark_deleting(ORDERS) == marked
    with pytest.raises(TopicExists, match="being deleted"):
        await make_topic(topics)
    await topics.remove(ORDERS)
    assert topics.all() == {}
    new = await make_topic(topics)
    assert new.id != old.id
    await topics.remove(ORDERS)  # a late repetition does not take the new one
    assert topics.get(ORDERS.path) == new
    await topics.view.stop()


@pytest.mark.parametrize("applied", [True, False])
async def test_a_creation_whose_answer_was_lost_is_read_back_and_happens_once(
    applied: bool, simulation: Simulation
) -> None:
    """Applied or not, the caller gets the topic that is stored, and no second one."""
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    store.fault = faults(Fault.UNCERTAIN if applied else Fault.UNAVAILABLE)
    if applied:
        topic = await make_topic(topics)
        entry = await store.get(paths.layout(ORDERS.path))
        assert entry is not None
        assert Topic.from_json(entry.value) == topic == topics.get(ORDERS.path)
    else:
        with pytest.raises(MetadataUnavailable):
            await make_topic(topics)
        assert await store.get(paths.layout(ORDERS.path)) is None
    await topics.view.stop()


async def test_deleting_rides_out_lost_answers(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    await make_topic(topics)
    store.fault = faults(Fault.UNCERTAIN)
    assert (await topics.mark_deleting(ORDERS)).deleting
    store.fault = faults(Fault.UNCERTAIN)
    await topics.remove(ORDERS)
    assert topics.all() == {}
    assert await store.get(paths.layout(ORDERS.path)) is None
    await topics.view.stop()


async def test_a_store_that_never_says_what_happened_ends_in_an_error_that_can_be_retried(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    await make_topic(topics)
    other = store.client()
    # Each try meets a change of somebody else.
    current = await store.get(paths.layout(ORDERS.path))
    assert current is not None

    def meddle(request: str) -> Fault:
        if request == "txn":
            store._server.txn([], [Put(current.key, current.value)])
        return Fault.NONE

    store.fault = meddle
    with pytest.raises(MetadataUncertain):
        await topics.mark_deleting(ORDERS)
    store.fault = lambda _: Fault.NONE
    assert topics.find(ORDERS.path) is not None
    await other.close()
    await topics.view.stop()


async def test_the_view_follows_others_and_counts_no_other_keys(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    writer = await loaded_topics(simulation, store)
    reader = Topics(View(store.client()), simulation.clock, random.Random(5))
    await reader.view.load()
    changes: list[str] = []
    reader.on_change.append(changes.append)
    topic = await make_topic(writer)
    await store.txn([], [Put(paths.subscription(ORDERS.path, "billing"), b"{}")])
    await until(lambda: reader.generation == store.history.revision)
    assert reader.all() == {ORDERS.path: topic}
    assert changes == [ORDERS.path]
    assert reader.unchanged(ORDERS.path) == writer.unchanged(ORDERS.path)
    await writer.view.stop()
    await reader.view.stop()


async def test_a_compacted_watch_lists_again_and_tells_of_everything_that_changed_meanwhile(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    gone, kept = TopicName("t", "n", "gone"), TopicName("t", "n", "kept")
    await make_topic(topics, gone)
    await make_topic(topics, kept)
    changes: list[str] = []
    topics.on_change.append(changes.append)
    other = store.client("other")
    elsewhere = Topics(View(other), simulation.clock, random.Random(7))
    await elsewhere.view.load()
    store.disconnect()
    await elsewhere.mark_deleting(gone)
    await elsewhere.remove(gone)
    new = await make_topic(elsewhere)
    store.compact()
    assert topics.find(gone.path) is not None
    store.reconnect()
    store.fault = faults(Fault.UNAVAILABLE, of="list")  # the listing is tried again, too
    await until(lambda: topics.find(ORDERS.path) is not None)
    assert topics.get(ORDERS.path) == new
    assert set(topics.all()) == {kept.path, ORDERS.path}
    assert sorted(changes) == sorted([gone.path, ORDERS.path])
    assert topics.generation == store.history.revision
    await topics.view.stop()
    await elsewhere.view.stop()


async def test_content_never_changes_at_an_unchanged_generation(simulation: Simulation) -> None:
    """A client takes a push only if its generation is newer: two contents under one generation would be lost on it."""
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    elsewhere = Topics(View(store.client()), simulation.clock, random.Random(7))
    await elsewhere.view.load()
    seen: dict[int, dict[str, Topic]] = {}

    def note(_: str) -> None:
        assert seen.setdefault(topics.generation, topics.all()) == topics.all()

    topics.on_change.append(note)
    for number in range(20):
        await asyncio.gather(
            make_topic(topics, TopicName("t", "n", f"here-{number}")),
            make_topic(elsewhere, TopicName("t", "n", f"there-{number}")),
        )
    await until(lambda: len(topics.all()) == 40)
    assert len(seen) == 40
    await topics.view.stop()
    await elsewhere.view.stop()


async def test_a_record_that_cannot_be_read_hides_only_itself(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    bad_json, bad_layout = TopicName("t", "n", "json"), TopicName("t", "n", "layout")
    await store.txn([], [Put(paths.layout(bad_json.path), b"{"), Put(paths.layout(bad_layout.path),
        b'{"id":1,"layout":{"epoch":0,"nextSegmentId":0,"segments":{}}}')])  # fmt: skip
    topics = await loaded_topics(simulation, store)
    await make_topic(topics)
    assert set(topics.all()) == {ORDERS.path}
    await topics.view.stop()


class SilentStore(MemoryStore):
    """Its watches never deliver anything."""

    def watch(self, prefix: str, after: Revision) -> Watch:
        return super().watch("/nothing" + prefix, after)


async def test_whoever_waits_for_the_view_is_told_when_the_broker_stops(simulation: Simulation) -> None:
    store = SilentStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    creating = asyncio.ensure_future(make_topic(topics))
    await asyncio.sleep(100.0)
    assert not creating.done()
    await topics.view.stop()
    with pytest.raises(ShuttingDown):
        await creating
    with pytest.raises(ShuttingDown):
        await make_topic(topics, TopicName("t", "n", "late"))


async def _tamper(store: MemoryStore, **changes: object) -> None:
    """Store the topic as a build of another version would."""
    entry = await store.get(paths.layout(ORDERS.path))
    assert entry is not None
    await store.txn([], [Put(entry.key, msgspec.json.encode(msgspec.json.decode(entry.value) | changes))])


async def test_a_topic_with_a_field_from_the_future_is_there_after_a_restart_and_keeps_it(
    simulation: Simulation,
) -> None:
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    topic = await make_topic(topics)
    await topics.view.stop()
    await _tamper(store, tier="gold", policies={"retentionMs": 5, "quota": 7})
    topics = await loaded_topics(simulation, store)
    assert topics.get(ORDERS.path).id == topic.id
    await topics.mark_deleting(ORDERS)
    entry = await store.get(paths.layout(ORDERS.path))
    assert entry is not None
    stored = msgspec.json.decode(entry.value)
    assert (stored["tier"], stored["policies"]["quota"], stored["deleting"]) == ("gold", 7, True)
    await topics.view.stop()


async def test_a_topic_that_cannot_be_read_is_neither_absent_nor_free(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    await make_topic(topics)
    await topics.view.stop()
    await _tamper(store, policies={"durability": "quantum"})
    topics = await loaded_topics(simulation, store)
    with pytest.raises(RecordUnreadable, match="quantum"):
        topics.get(ORDERS.path)
    for call in (make_topic(topics), topics.mark_deleting(ORDERS), topics.stored(ORDERS.path)):
        with pytest.raises(RecordUnreadable, match="quantum"):
            await call
    assert list(topics.all_unreadable()) == [ORDERS.path]
    await _tamper(store, policies={"durability": "fsync"})
    await until(lambda: topics.find(ORDERS.path) is not None)
    assert topics.all_unreadable() == {}
    await topics.view.stop()


async def test_a_change_of_policies_is_made_once_whatever_becomes_of_its_answer(simulation: Simulation) -> None:
    store = MemoryStore(simulation.clock)
    topics = await loaded_topics(simulation, store)
    await make_topic(topics)
    await _tamper(store, policies={"quota": 7})
    store.fault = faults(Fault.UNCERTAIN, Fault.UNAVAILABLE)
    changed = await topics.update(ORDERS, PolicyChanges(retention_ms=5))
    assert topics.get(ORDERS.path) == changed
    assert changed.policies.retention_ms == 5
    entry = await store.get(paths.layout(ORDERS.path))
    assert entry is not None
    assert msgspec.json.decode(entry.value)["policies"]["quota"] == 7
    await topics.update(ORDERS, PolicyChanges(retention_ms=5))
    assert await store.get(paths.layout(ORDERS.path)) == entry, "nothing is written where nothing changes"
    await topics.view.stop()
