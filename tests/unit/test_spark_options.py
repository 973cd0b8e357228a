"""Options of a Spark read: names in any case, clear errors that name the option, what only one kind of read knows."""

from __future__ import annotations

import pytest

from braid.model.errors import InvalidArgument
from braid.spark.source.options import NAMES, SourceOptions


def parse(**given: str) -> SourceOptions:
    return SourceOptions.parse({"topic": "orders", **given})


def test_defaults_are_those_of_the_documentation(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BRAID_URL", "BRAID_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    options = parse()
    assert options == SourceOptions(topic="public/default/orders", url="braid://127.0.0.1:6660")
    assert options.fail_on_data_loss
    assert options.include_headers
    assert not options.prune_by_filters


def test_the_environment_names_the_cluster_where_no_option_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRAID_URL", "braid://elsewhere:7000")
    monkeypatch.setenv("BRAID_TOKEN", "secret")
    assert (parse().url, parse().token) == ("braid://elsewhere:7000", "secret")
    assert parse(url="braid://here").url == "braid://here"
    assert parse(token="mine").token == "mine"
    assert parse(manifest="file:///history").url == ""


def test_names_are_known_in_any_case_and_every_documented_name_is() -> None:
    values = {
        "url": "braid://a:1,b:2",
        "topic": "acme/shop/orders",
        "startingOffsets": "earliest",
        "endingOffsets": '{"0": 17, "3": "END"}',
        "startingTimestamp": "1000",
        "endingTimestamp": "1970-01-01T00:00:02+00:00",
        "maxRecordsPerTrigger": "10",
        "maxBytesPerTrigger": "20",
        "minPartitions": "3",
        "failOnDataLoss": "FALSE",
        "badRecords": "Skip",
        "includeHeaders": "false",
        "pruneByFilters": "true",
        "subscription": "billing",
        "token": "t",
        "tls": "true",
        "timeout": "2.5",
    }
    assert set(values) == set(NAMES) - {"manifest"}
    expected = SourceOptions(
        topic="acme/shop/orders",
        url="braid://a:1,b:2",
        starting_offsets="earliest",
        ending_offsets={0: 17, 3: "END"},
        starting_timestamp=1_000_000,
        ending_timestamp=2_000_000,
        max_records_per_trigger=10,
        max_bytes_per_trigger=20,
        min_partitions=3,
        fail_on_data_loss=False,
        bad_records="skip",
        include_headers=False,
        prune_by_filters=True,
        subscription="billing",
        token="t",
        tls=True,
        timeout_s=2.5,
    )
    assert SourceOptions.parse(values) == expected
    assert SourceOptions.parse({name.lower(): value for name, value in values.items()}) == expected


@pytest.mark.parametrize(
    ("value", "microseconds"),
    [
        ("0", 0),
        ("1763229600000", 1_763_229_600_000_000),
        ("2025-11-15T18:00:00Z", 1_763_229_600_000_000),
        ("2025-11-15T19:00:00+01:00", 1_763_229_600_000_000),
        ("2025-11-15T18:00:00.000001Z", 1_763_229_600_000_001),
    ],
)
def test_times_are_milliseconds_or_iso_8601_with_a_zone(value: str, microseconds: int) -> None:
    assert parse(startingTimestamp=value).starting_timestamp == microseconds


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"startingOffset": "earliest"}, "option startingOffset is unknown: did you mean startingOffsets?"),
        ({"servers": "x"}, "option servers is unknown: known are url, manifest, topic"),
        ({"kafka.bootstrap.servers": "x"}, "belongs to Spark's Kafka source: option url names brokers"),
        ({"path": "orders"}, "a topic has none; name it by .option('topic', …)"),
        ({"url": "http://a"}, "option url: 'http://a' is no broker URL"),
        ({"url": "braid://a", "manifest": "file:///h"}, "options url and manifest were both given"),
        ({"topic": "a/b"}, "option topic: 'a/b' is no topic name"),
        ({"startingOffsets": "first"}, "option startingOffsets is 'first': it must be earliest, latest, or JSON"),
        ({"startingOffsets": "[1]"}, "option startingOffsets"),
        ({"startingOffsets": '{"0": 1, "0": 2}'}, "option startingOffsets"),
        ({"startingOffsets": '{"a": 1}'}, "'a' is not a segment id"),
        ({"endingOffsets": '{"0": -3}'}, "-3 is not an offset"),
        ({"endingOffsets": '{"0": 1.5}'}, "1.5 is not an offset"),
        ({"endingOffsets": '{"0": true}'}, "True is not an offset"),
        ({"endingOffsets": '{"0": "end"}'}, "'end' is not an offset"),
        ({"startingTimestamp": "yesterday"}, "option startingTimestamp is 'yesterday'"),
        ({"startingTimestamp": "-5"}, "option startingTimestamp is '-5'"),
        ({"startingTimestamp": "9" * 20}, "option startingTimestamp"),
        ({"endingTimestamp": "2026-11-15T18:00:00"}, "this one has no zone"),
        ({"startingTimestamp": "2000", "endingTimestamp": "1000"}, "option endingTimestamp is 1000, which is before"),
        ({"minPartitions": "0"}, "option minPartitions is '0': it must be a whole number above 0"),
        ({"minPartitions": "many"}, "option minPartitions is 'many'"),
        ({"maxRecordsPerTrigger": "1e6"}, "option maxRecordsPerTrigger is '1e6'"),
        ({"badRecords": "drop"}, "option badRecords is 'drop': it must be fail or skip"),
        ({"failOnDataLoss": "yes"}, "option failOnDataLoss is 'yes': it must be true or false"),
        ({"subscription": "a b"}, "option subscription: 'a b' is no subscription name"),
        ({"timeout": "0"}, "option timeout is '0'"),
        ({"timeout": "nan"}, "option timeout is 'nan'"),
    ],
)
def test_a_wrong_option_is_an_error_that_names_it(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SourceOptions.parse({"topic": "orders", **given})
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_read_without_a_topic_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="option topic is missing"):
        SourceOptions.parse({"url": "braid://a"})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"maxRecordsPerTrigger": "5"}, "option maxRecordsPerTrigger was given: a batch read has no triggers"),
        ({"maxBytesPerTrigger": "5"}, "option maxBytesPerTrigger"),
        ({"subscription": "billing"}, "option subscription"),
        ({"startingOffsets": "latest"}, "option startingOffsets is latest: a batch read would be empty"),
        ({"startingOffsets": '{"1": -1}'}, "option startingOffsets has -1 (latest) for segment 1"),
        ({"endingOffsets": "earliest"}, "option endingOffsets is earliest"),
        ({"endingOffsets": '{"1": -2}'}, "option endingOffsets has -2 (earliest) for segment 1"),
    ],
)
def test_a_batch_read_says_what_only_streams_know(given: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        parse(**given).for_batch()
    assert says in str(caught.value)


@pytest.mark.parametrize("given", [{"endingOffsets": "latest"}, {"endingTimestamp": "5"}, {"pruneByFilters": "true"}])
def test_a_stream_says_what_only_batch_reads_know(given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match=f"option {next(iter(given))} was given"):
        parse(**given).for_stream()


def test_what_both_know_is_fine_for_both() -> None:
    options = parse(startingOffsets='{"0": 5}', minPartitions="4", failOnDataLoss="false")
    assert options.for_batch() is options.for_stream() is options


def test_names_of_sparks_kafka_source_that_mean_the_same_are_taken() -> None:
    options = SourceOptions.parse({"subscribe": "orders", "maxOffsetsPerTrigger": "10", "includeHeaders": "false"})
    assert (options.topic, options.max_records_per_trigger) == ("public/default/orders", 10)
    assert not options.include_headers
    assert parse(startingTimestamp="1000").starting_timestamp == 1_000_000
    assert SourceOptions.parse({"SUBSCRIBE": "orders"}).topic == "public/default/orders"
    with pytest.raises(InvalidArgument, match="options topic and subscribe were both given"):
        parse(subscribe="orders")
    with pytest.raises(InvalidArgument, match="a read has one topic; join several reads by union"):
        SourceOptions.parse({"subscribe": "orders,payments"})


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("kafka.bootstrap.servers", "option url"),
        ("subscribePattern", "option topic"),
        ("assign", "option topic"),
        ("startingOffsetsByTimestamp", "startingTimestamp"),
        ("endingOffsetsByTimestamp", "endingTimestamp"),
        ("minOffsetsPerTrigger", "maxRecordsPerTrigger"),
        ("kafka.group.id", "option subscription"),
        ("kafkaConsumer.pollTimeoutMs", "option timeout"),
        ("kafka.security.protocol", "leave it out"),
    ],
)
def test_other_options_of_sparks_kafka_source_are_named_with_what_to_use(name: str, instead: str) -> None:
    for spelled in (name, name.lower()):
        with pytest.raises(InvalidArgument, match="belongs to Spark's Kafka source") as raised:
            SourceOptions.parse({"topic": "orders", spelled: "x"})
        assert instead in str(raised.value)
