"""The benchmark beside other brokers: what it decides without them."""

from __future__ import annotations

import re
from pathlib import Path

from benchmarks.peers import FSYNC, PAGE_CACHE, PEERS, SIZES, Peer, Rates, consumer_settings, markdown, measured
from tests.unit.test_docs import ROOT


def peer(name: str, durability: str, rates: list[Rates]) -> Peer:
    left = iter(rates)
    return Peer(name, durability, "as it is", lambda: "", lambda: "1.0", lambda folder, records, size: next(left))


def test_every_system_is_measured_with_a_sync_and_without() -> None:
    names = {each.name for each in PEERS}
    assert names == {"Braid", "Kafka", "NATS JetStream", "Redis Streams", "RabbitMQ"}
    assert {(each.name, each.durability) for each in PEERS} == {
        (name, durability) for name in names for durability in (FSYNC, PAGE_CACHE)
    }


def test_kafkas_consumer_fetches_without_pauses() -> None:
    settings = consumer_settings("127.0.0.1:9092")
    assert (settings["fetch.queue.backoff.ms"], settings["queued.min.messages"]) == (1, 1_000_000)


def test_the_median_of_the_rounds_counts() -> None:
    rates = [Rates(publish, 10.0 * publish) for publish in (5.0, 1.0, 3.0) for _ in SIZES]
    one = peer("One", FSYNC, rates)
    assert measured([one], 1, 3) == {(one, size): Rates(3.0, 30.0) for size in SIZES}


def test_the_table_has_versions_settings_and_a_part_for_each_durability() -> None:
    both = [peer("One", durability, []) for durability in (FSYNC, PAGE_CACHE)]
    table = markdown(both, {(each, size): Rates(21_400.0, 3.0e6) for each in both for size in SIZES})
    assert table.count("| One 1.0 | 21.4 k | 21.4 k | 3 M | 3 M | as it is |") == 2
    assert table.index(f"per second, {FSYNC}:") < table.index(f"per second, {PAGE_CACHE}:")


def test_every_jar_of_kafka_has_a_checksum_and_the_server_is_a_kafka_4() -> None:
    lines = Path(ROOT / "tools" / "kafka-jars.txt").read_text(encoding="utf-8").splitlines()
    assert all(re.fullmatch(r"[0-9a-f]{64} [\w./-]+\.jar", line) for line in lines)
    assert any(re.search(r"/kafka_2\.13-4\.\d+\.\d+\.jar$", line) for line in lines)
