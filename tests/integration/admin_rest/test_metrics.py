"""The metrics."""

from __future__ import annotations

import contextlib
import re
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from braid import sync
from braid.wire.frame import PREFIX_BYTES
from tests.kits.admin import TOPICS, AdminBroker
from tests.kits.admin_rest import BILLING, publish
from tests.kits.raw_client import RawClient
from tests.kits.waiting import wait_until

# Metrics.


def test_metrics_count_the_traffic_of_connections_that_are_still_open(broker: AdminBroker) -> None:
    def received() -> float:
        families = text_string_to_metric_families(broker.ask("GET", "/metrics").body.decode())
        (sample,) = next(family.samples for family in families if family.name == "braid_network_receive_bytes")
        return sample.value

    with RawClient(broker.broker.address) as client:
        before = received()
        for _ in range(10):
            client.ping()
        assert received() == before + 10 * PREFIX_BYTES


def test_metrics_say_what_happened(broker: AdminBroker, orders: str) -> None:
    broker.ask("PUT", f"{BILLING}?start=earliest")
    broker.run(publish(broker.broker.address, 30))
    answer = broker.ask("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(answer.body.decode())}

    def total(name: str, **labels: str) -> float:
        samples = [sample for family in families.values() for sample in family.samples if sample.name == name]
        assert samples, name
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    assert total("braid_topic_publish_records_total", topic=orders) == 30
    assert total("braid_topic_publish_bytes_total", topic=orders) > 3_000
    assert total("braid_subscription_lag_records", topic=orders, subscription="billing") == 30
    assert total("braid_segment_end_offset", topic=orders) == 30
    assert total("braid_segment_earliest_offset", topic=orders) == 0
    assert total("braid_segment_log_bytes", topic=orders) > 3_000
    assert total("braid_segment_pending_bytes", topic=orders) == 0
    assert total("braid_segments_served") >= 2
    assert total("braid_segments_unavailable") == 0
    assert total("braid_publish_latency_seconds_count") >= 1
    assert total("braid_log_sync_seconds_count") >= 1
    assert total("braid_log_sync_seconds_sum") > 0
    assert total("braid_ready") == 1
    assert total("braid_admin_requests_total", method="PUT", status="201") >= 2
    assert total("braid_requests_total", operation="publish") >= 1
    assert total("braid_connections_accepted_total") >= 1
    assert total("braid_network_receive_bytes_total") > 3_000
    assert total("braid_cache_used_bytes") > 0
    assert total("process_resident_memory_bytes") > 0
    assert total("braid_metrics_omitted_series") == 0
    assert 0 < total("braid_subscription_lag_seconds", topic=orders, subscription="billing") < 600
    assert total("braid_disk_size_bytes") >= total("braid_disk_free_bytes") > 0
    assert total("braid_disk_used_bytes") > 0
    assert total("braid_cluster_transitions") == 0


def test_consumers_without_a_segment_are_counted(broker: AdminBroker, orders: str) -> None:
    url = f"braid://{broker.broker.address}"

    def counted(name: str) -> dict[str, float]:
        families = text_string_to_metric_families(broker.ask("GET", "/metrics").body.decode())
        samples = (sample for family in families if family.name == name for sample in family.samples)
        return {each.labels["subscription"]: each.value for each in samples if each.labels["topic"] == orders}

    with sync.connect(url) as client, contextlib.ExitStack() as stack:
        for number in range(3):
            stack.enter_context(client.stream_consumer("orders", "crowd", name=f"worker-{number}"))

        def idle() -> int:
            shown = client.admin.subscription("orders", "crowd")["consumers"]
            return sum(not each["segments"] for each in shown.values())

        wait_until(lambda: idle() == 1, "two of three have a segment")
        assert counted("braid_subscription_consumers") == {"crowd": 3}
        assert counted("braid_subscription_idle_consumers") == {"crowd": 1}


UNITS = ("_seconds", "_bytes", "_records", "_ratio", "_info", "_offset")


COUNTS = {"braid_ready", "braid_topics", "braid_segments_served", "braid_segments_unavailable", "braid_connections",
          "braid_subscription_consumers", "braid_subscription_idle_consumers", "braid_metrics_omitted_series",
          "braid_cluster_leader", "braid_cluster_segments_waiting", "braid_replicas_out_of_sync",
          "braid_segments_under_replicated", "braid_queue_consumers", "braid_cluster_transitions",
          "braid_replica_in_sync"}  # fmt: skip


@pytest.mark.parametrize("accept", ["", "application/openmetrics-text; version=1.0.0"])
def test_metrics_keep_the_rules_of_prometheus(broker: AdminBroker, orders: str, accept: str) -> None:
    text = broker.ask("GET", "/metrics", headers={"Accept": accept}).body.decode()
    kinds = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    helped = set(re.findall(r"^# HELP (\S+) \S.*$", text, re.MULTILINE))
    ours = {name: kind for name, kind in kinds.items() if name.startswith("braid_")}
    assert len(ours) > 25
    for name, kind in ours.items():
        assert name in helped, f"{name} is not explained"
        assert re.fullmatch(r"[a-z][a-z0-9_]*", name)
        assert not re.search(r"_(ms|milliseconds|kb|kilobytes|minutes|percent|count|sum|bucket)(_|$)", name), name
        if kind == "counter":
            assert name.endswith("_total") or accept, name
        else:
            assert not name.endswith("_total"), name
            assert name.endswith(UNITS) or name in COUNTS, name
    values = re.findall(r"^(braid_[^ ]*) (\S+)$", text, re.MULTILINE)
    assert len({name for name, _ in values}) == len(values), "a series is there twice"


def test_the_lag_in_seconds_is_the_age_of_the_oldest_record(broker: AdminBroker, orders: str) -> None:
    def lag() -> float:
        families = text_string_to_metric_families(broker.ask("GET", "/metrics").body.decode())
        samples = [s for f in families if f.name == "braid_subscription_lag_seconds" for s in f.samples]
        return max(each.value for each in samples if each.labels["subscription"] == "billing")

    broker.ask("PUT", f"{BILLING}?start=earliest")
    assert lag() == 0
    hour_ago_us = (time.time_ns() - 3_600 * 10**9) // 1_000
    with sync.connect(f"braid://{broker.broker.address}") as client, client.producer("orders") as producer:
        producer.send(b"old", key=b"a", timestamp=hour_ago_us)
        producer.send(b"new", key=b"a")
    assert 3_600 <= lag() < 3_660
    broker.ask("POST", f"{BILLING}/seek?to=latest")
    assert lag() == 0


def test_metrics_are_bounded(broker: AdminBroker, orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker.ask("PUT", f"{TOPICS}/zebra")
    monkeypatch.setattr("braid.admin.metrics.MAX_SERIES", 16)  # two segments and eight counts
    text = broker.ask("GET", "/metrics").body.decode()
    broker.ask("DELETE", f"{TOPICS}/zebra")
    assert re.findall(r"^braid_(?:topic|segment|subscription)_.*zebra", text, re.MULTILINE) == []
    assert len(re.findall(r"^braid_(?:topic|segment|subscription)_.*orders", text, re.MULTILINE)) == 16
    assert re.findall(r"^braid_metrics_omitted_series (\S+)$", text, re.MULTILINE) == ["12.0"]


def test_a_deleted_topic_leaves_no_series(broker: AdminBroker) -> None:
    broker.ask("PUT", f"{TOPICS}/passing")
    assert b"passing" in broker.ask("GET", "/metrics").body
    broker.ask("DELETE", f"{TOPICS}/passing")
    assert b"passing" not in broker.ask("GET", "/metrics").body


def test_every_metric_is_documented(broker: AdminBroker, orders: str) -> None:
    page = (Path(__file__).parents[3] / "docs" / "operating" / "monitoring.md").read_text()
    named = set(re.findall(r"`(braid_\w+)`", page))
    for first, rest in re.findall(r"`(braid_topic_\w+?_)records_total`, `…_batches_total`, `…_(bytes_total)`", page):
        named |= {f"{first}batches_total", f"{first}{rest}"}
    text = broker.ask("GET", "/metrics").body.decode()
    shown = set(re.findall(r"^# TYPE (braid_\S+) ", text, re.MULTILINE))
    assert named == shown
