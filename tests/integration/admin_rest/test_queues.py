"""Queue subscriptions on the admin port: created with policies, shown with their counts, and measured."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client.parser import text_string_to_metric_families

from braid import sync
from braid.admin.topic_metrics import TopicRow, read_segment, read_topic
from braid.broker.segments.owned_segment import OwnedSegment
from tests.kits.admin import TOPICS, AdminBroker
from tests.kits.admin_rest import BILLING, publish
from tests.kits.waiting import wait_until

QUEUE = "kind=queue&ackTimeoutMs=20000&maxDeliveries=1&deadLetterTopic=orders-dead"


def measured(broker: AdminBroker, topic: str) -> dict[str, float]:
    """Return the sums of the queue's metrics, without what their names begin with."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(broker.ask("GET", "/metrics").body.decode()):
        for sample in family.samples:
            labels = sample.labels
            is_ours = labels.get("topic") == topic and labels.get("subscription") == "billing"
            if is_ours and sample.name.startswith(("braid_queue_", "braid_subscription_")):
                name = sample.name.removeprefix("braid_")
                found[name] = found.get(name, 0) + sample.value
    return found


async def _read(broker: AdminBroker, topic: str, segments: Sequence[OwnedSegment]) -> TopicRow:
    return read_topic(broker.broker, topic, [read_segment(each, 0) for each in segments])


def test_a_queue_is_created_shown_and_measured(broker: AdminBroker, orders: str) -> None:
    broker.ask("PUT", f"{TOPICS}/orders-dead")
    created = broker.ask("PUT", f"{BILLING}?{QUEUE}")
    assert created.status == 201
    assert created.json["queue"]["policies"] == {
        "ackTimeoutMs": 20_000, "maxDeliveries": 1, "deadLetterTopic": "public/default/orders-dead",
    }  # fmt: skip
    broker.run(publish(broker.broker.address, 30))
    with sync.connect(f"braid://{broker.broker.address}") as client:
        with client.queue_consumer("orders", "billing", name="worker-1", prefetch=10) as consumer:
            first, second, third = (consumer.receive(timeout=20) for _ in range(3))
            assert first is not None
            assert second is not None
            assert third is not None
            consumer.ack(first)
            consumer.nack(second, delay=60)
            consumer.nack(third)  # After one delivery it is a dead letter.
            wait_until(lambda: broker.ask("GET", BILLING).json["queue"]["deadLettered"] == 1, "it is buried")
            shown = broker.ask("GET", BILLING).json
            assert (shown["backlog"], shown["queue"]["delayed"]) == (28, 1)
            assert shown["queue"]["ready"] + shown["queue"]["leased"] == 27
            assert list(shown["consumers"]) == ["worker-1"]
            assert (broker.ask("DELETE", BILLING).status, broker.ask("DELETE", BILLING).error) == (
                409,
                "subscription-busy",
            )
            numbers = measured(broker, orders)
            assert numbers["queue_consumers"] == 2, "one in each segment"
            assert numbers["subscription_lag_records"] == 28
            assert numbers["queue_dead_letter_records_total"] == 1
            assert numbers["queue_redeliver_records_total"] >= 1
            assert numbers["queue_deliver_records_total"] >= 4
            assert numbers["queue_delayed_records"] == 1
            assert "subscription_consumers" not in numbers
            text = broker.ask("GET", "/metrics").body.decode()
            segments = broker.broker.segments.of_topic(orders)
            row = broker.run(_read(broker, orders, segments))
            assert text.count(f'topic="{orders}"') == row.series, "all of them count for the bound"
        wait_until(lambda: not broker.ask("GET", BILLING).json["consumers"], "nobody is connected")
        assert broker.ask("POST", f"{BILLING}/skip-all").status == 204
        assert broker.ask("GET", BILLING).json["backlog"] == 0
        numbers = measured(broker, orders)
        assert (numbers["queue_ready_records"], numbers["queue_delayed_records"]) == (0, 0)
    assert broker.ask("DELETE", BILLING).status == 204
    assert measured(broker, orders) == {}
    broker.ask("DELETE", f"{TOPICS}/orders-dead")


def test_policies_of_a_queue_that_cannot_be_are_refused(broker: AdminBroker, orders: str) -> None:
    for query, said in (
        ("kind=stream&ackTimeoutMs=1000", "only a queue has"),
        ("kind=queue&query=true", "a queue cannot show how far a query is"),
        ("kind=queue&maxDeliveries=3", "name a dead-letter topic"),
        ("kind=queue&deadLetterTopic=orders-dead", "set max_deliveries, too"),
        ("kind=queue&maxDeliveries=3&deadLetterTopic=orders", "they would come back"),
    ):
        answer = broker.ask("PUT", f"{BILLING}?{query}")
        assert (answer.status, answer.error) == (400, "invalid-argument")
        assert said in answer.json["message"]
    assert broker.ask("GET", BILLING).status == 404


def test_a_topics_message_ttl_is_set_and_removed(broker: AdminBroker, orders: str) -> None:
    changed = broker.ask("PATCH", f"{TOPICS}/orders", {"messageTtlMs": 1_000})
    assert (changed.status, changed.json["policies"]["messageTtlMs"]) == (200, 1_000)
    assert broker.ask("PATCH", f"{TOPICS}/orders", {"messageTtlMs": 0}).status == 400
    changed = broker.ask("PATCH", f"{TOPICS}/orders", {"messageTtlMs": None})
    assert changed.json["policies"]["messageTtlMs"] is None
