from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braid.metadata import paths
from braid.model.errors import InvalidName
from braid.model.ids import Offset

ORDERS = paths.topic_path("public", "default", "orders")
SEGMENT = "0000-ffff-0"


def test_the_keys_are_those_of_the_design() -> None:
    assert paths.broker("b-1") == "/brokers/b-1"
    assert paths.CLUSTER_LEADER == "/cluster/leader"
    assert paths.layout(ORDERS) == "/topics/public/default/orders"
    assert paths.controller(ORDERS) == "/topics/public/default/orders/controller"
    assert paths.transition(ORDERS) == "/topics/public/default/orders/transition"
    assert paths.subscription(ORDERS, "s") == "/topics/public/default/orders/subscriptions/s"
    assert paths.consumer(ORDERS, "s", "c") == "/topics/public/default/orders/subscriptions/s/consumers/c"
    assert paths.ownership(ORDERS, SEGMENT) == "/segments/public/default/orders/0000-ffff-0/ownership"
    assert paths.cursor(ORDERS, SEGMENT, "s") == "/segments/public/default/orders/0000-ffff-0/cursors/s"
    assert paths.chunk(ORDERS, SEGMENT, Offset(42)) == (
        "/storage/public/default/orders/0000-ffff-0/chunks/00000000000000000042"
    )
    assert paths.current_chunk(ORDERS, SEGMENT) == "/storage/public/default/orders/0000-ffff-0/chunks/cur"
    assert paths.sealed_state(ORDERS, SEGMENT) == "/storage/public/default/orders/0000-ffff-0/state"


def test_no_prefix_finds_a_sibling() -> None:
    sibling = paths.topic_path("public", "default", "orders2")
    pairs = [
        (paths.topic_prefix(ORDERS), paths.controller(sibling)),
        (paths.topic_prefix(ORDERS), paths.layout(sibling)),
        (paths.subscriptions_prefix(ORDERS), paths.subscription(sibling, "s")),
        (paths.consumers_prefix(ORDERS, "s"), paths.consumer(ORDERS, "s2", "c")),
        (paths.topic_segments_prefix(ORDERS), paths.ownership(sibling, SEGMENT)),
        (paths.segment_prefix(ORDERS, SEGMENT), paths.ownership(ORDERS, SEGMENT + "1")),
        (paths.cursors_prefix(ORDERS, SEGMENT), paths.cursor(ORDERS, SEGMENT + "1", "s")),
        (paths.topic_storage_prefix(ORDERS), paths.sealed_state(sibling, SEGMENT)),
        (paths.segment_storage_prefix(ORDERS, SEGMENT), paths.sealed_state(ORDERS, SEGMENT + "1")),
        (paths.chunks_prefix(ORDERS, SEGMENT), paths.chunk(ORDERS, SEGMENT + "1", Offset(0))),
    ]
    for prefix, key in pairs:
        assert not key.startswith(prefix)


def test_the_pointer_to_the_newest_chunk_is_not_a_chunk() -> None:
    keys = [paths.chunk(ORDERS, SEGMENT, Offset(base)) for base in (0, 9, 10, 2**63)]
    current = paths.current_chunk(ORDERS, SEGMENT)
    assert sorted([current, *keys]) == [*keys, current]
    assert [paths.chunk_base(key) for key in [*keys, current]] == [0, 9, 10, 2**63, None]


def test_a_layout_is_told_from_what_stands_below_it() -> None:
    assert paths.topic_of_layout(paths.layout(ORDERS)) == ORDERS
    for other in (paths.controller(ORDERS), paths.subscription(ORDERS, "s"), paths.ownership(ORDERS, SEGMENT)):
        assert paths.topic_of_layout(other) is None


def test_a_subscription_is_told_from_its_consumers_and_an_ownership_from_cursors() -> None:
    subscription, consumer = paths.subscription(ORDERS, "s"), paths.consumer(ORDERS, "s", "c")
    assert (paths.subscription_of(subscription), paths.consumer_of(subscription)) == ("s", None)
    assert (paths.subscription_of(consumer), paths.consumer_of(consumer)) == (None, ("s", "c"))
    ownership, cursor = paths.ownership(ORDERS, SEGMENT), paths.cursor(ORDERS, SEGMENT, "s")
    assert (paths.segment_of_ownership(ownership), paths.subscription_of_cursor(ownership)) == ((ORDERS, SEGMENT), None)
    assert (paths.segment_of_ownership(cursor), paths.subscription_of_cursor(cursor)) == (None, "s")


def test_an_empty_part_is_refused() -> None:
    with pytest.raises(InvalidName):
        paths.topic_path("public", "", "orders")
    with pytest.raises(InvalidName):
        paths.topic_parts("public/orders")


name = st.text(st.characters(exclude_categories=("C", "Z"), include_characters=" "), min_size=1, max_size=20)


@given(st.tuples(name, name, name), name, name)
def test_every_name_has_one_reading(topic: tuple[str, str, str], first: str, second: str) -> None:
    path = paths.topic_path(*topic)
    assert paths.topic_parts(path) == topic
    assert paths.topic_of_layout(paths.layout(path)) == path
    assert paths.subscription_of(paths.subscription(path, first)) == first
    assert paths.consumer_of(paths.consumer(path, first, second)) == (first, second)
    assert paths.broker_of(paths.broker(first)) == first
    assert paths.segment_of_ownership(paths.ownership(path, first)) == (path, first)
