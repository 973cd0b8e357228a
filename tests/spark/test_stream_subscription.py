"""The subscription in which a stream reader shows how far its query is."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import braid.sync
from tests.spark.spark_kit import StoredBroker, numbered
from tests.spark.stream_kit import EARLIEST, Query


def shown(broker: StoredBroker, topic: str, subscription: str) -> dict[str, Any]:
    with braid.sync.connect(broker.url) as client:
        found: dict[str, Any] = client.admin.subscription(topic, subscription)
        return found


def test_the_subscription_shows_how_far_the_query_is(broker: StoredBroker) -> None:
    topic = broker.create("shown", 2)
    broker.fill(topic, numbered(1_000))
    with Query(broker.url, topic, **EARLIEST, maxRecordsPerTrigger=400, subscription="spark") as query:
        query.start()
        assert shown(broker, topic, "spark")["backlog"] == 1_000
        first = query.next()
        assert first is not None
        assert query.next() is not None
        query.reader.commit(first.end)
        assert shown(broker, topic, "spark")["backlog"] == 600
        query.reader.commit(first.start)  # as after a restart
        assert shown(broker, topic, "spark")["backlog"] == 600
        assert query.next() is not None
        assert query.next() is None  # Nothing new: everything before was processed.
        assert shown(broker, topic, "spark")["backlog"] == 0
        assert shown(broker, topic, "spark")["kind"] == "stream"
        assert shown(broker, topic, "spark")["query"]


def test_a_restarted_query_does_not_set_its_subscription_back(broker: StoredBroker) -> None:
    topic = broker.create("not-back")
    broker.fill(topic, numbered(300))
    journal: list[str] = []
    options = {**EARLIEST, "maxRecordsPerTrigger": 100, "subscription": "spark"}
    with Query(broker.url, topic, journal, **options) as query:
        assert sum(len(batch.rows) for batch in query.all()) == 300
    assert shown(broker, topic, "spark")["backlog"] == 0
    with Query(broker.url, topic, journal[:1], **options) as query:
        query.reader.commit(query.start())
        assert shown(broker, topic, "spark")["backlog"] == 0
        broker.fill(topic, numbered(50))
        assert shown(broker, topic, "spark")["backlog"] == 50


def test_a_query_from_latest_begins_its_subscription_there(broker: StoredBroker) -> None:
    topic = broker.create("from-latest")
    broker.fill(topic, numbered(300))
    with Query(broker.url, topic, subscription="spark") as query:
        query.start()
        assert shown(broker, topic, "spark")["backlog"] == 0


def test_a_beginning_that_is_asked_for_again_does_not_hide_what_was_not_processed(broker: StoredBroker) -> None:
    topic = broker.create("begun-again")
    with Query(broker.url, topic, subscription="spark") as query:
        query.start()
        broker.fill(topic, numbered(40))
        journal = query.journal
        assert len(query.some().rows) == 40
    with Query(broker.url, topic, journal, subscription="spark") as query:  # It was not committed.
        assert len(query.again().rows) == 40
        assert shown(broker, topic, "spark")["backlog"] == 40


def test_a_subscription_that_cannot_be_moved_does_not_stop_the_query(
    broker: StoredBroker, caplog: pytest.LogCaptureFixture
) -> None:
    topic = broker.create("deleted-subscription")
    broker.fill(topic, numbered(300))
    with Query(broker.url, topic, **EARLIEST, maxRecordsPerTrigger=100, subscription="spark") as query:
        first = query.next()
        assert first is not None
        with braid.sync.connect(broker.url) as client:
            client.admin.delete_subscription(topic, "spark")
        with caplog.at_level(logging.WARNING):
            query.reader.commit(first.end)
        assert "subscription spark of public/default/deleted-subscription does not show" in caplog.text
        assert sum(len(batch.rows) for batch in query.all()) == 200
