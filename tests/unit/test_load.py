"""Load reports are small, survive JSON, and are made of rates that are true from the first look on."""

from __future__ import annotations

import random

import msgspec
import pytest

from braid.model.errors import MetadataCorrupt
from braid.model.ids import SegmentId
from braid.model.load import (
    MAX_REPORT_BYTES,
    MAX_REPORTED_SEGMENTS,
    RATE_HALF_LIFE_S,
    LoadReport,
    Meter,
    SegmentLoad,
    busiest_of,
)
from braid.model.names import MAX_NAME_CHARS

LARGEST = (1 << 63) - 1


def load(number: int, rate: int, topic: str = "public/default/orders") -> SegmentLoad:
    return SegmentLoad(topic_path=topic, segment_id=SegmentId(number), bytes_in_per_s=rate, bytes_out_per_s=0)


def test_a_report_survives_json_with_camel_case_names() -> None:
    report = LoadReport(
        at=1_700_000_000_000_000,
        cpu=0.25,
        bytes_in_per_s=10,
        bytes_out_per_s=20,
        records_in_per_s=3,
        segments=2,
        backlog_bytes=77,
        busiest=(load(1, 10),),
        adopted_generation=12,
    )
    data = report.to_json()
    assert LoadReport.from_json(data) == report
    assert msgspec.json.decode(data) == {
        "at": 1_700_000_000_000_000,
        "cpu": 0.25,
        "bytesInPerS": 10,
        "bytesOutPerS": 20,
        "recordsInPerS": 3,
        "segments": 2,
        "backlogBytes": 77,
        "busiest": [
            {
                "topicPath": "public/default/orders",
                "segmentId": 1,
                "bytesInPerS": 10,
                "bytesOutPerS": 0,
                "historyBytes": 0,
            }
        ],
        "adoptedGeneration": 12,
    }
    assert report.bytes_per_s == 30


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"at":"noon"}',
        b'{"at":1,"bytesInPerS":-1}',
        b'{"at":1,"cpu":-0.5}',
        b'{"at":1,"busiest":[{"topicPath":"a/b/c"}]}',
        b'{"at":1,"busiest":[' + b",".join([b'{"topicPath":"a/b/c","segmentId":1}'] * 257) + b"]}",
    ],
    ids=["empty", "a list", "no time", "no number", "negative", "negative cpu", "half a segment", "too many segments"],
)
def test_what_is_no_report_is_refused(data: bytes) -> None:
    with pytest.raises(MetadataCorrupt, match="load report cannot be read"):
        LoadReport.from_json(data)


def test_fields_of_a_later_version_are_passed_over() -> None:
    report = LoadReport.from_json(b'{"at":1,"temperature":40}')
    assert report == LoadReport(at=1, unknown='{"temperature":40}')


def test_the_busiest_segments_are_reported_whatever_order_they_come_in() -> None:
    loads = [load(number, rate=number % 400) for number in range(1_000)]
    kept = busiest_of(loads)
    assert len(kept) == MAX_REPORTED_SEGMENTS
    assert [each.bytes_per_s for each in kept] == sorted((each.bytes_per_s for each in loads), reverse=True)[:256]
    random.Random(1).shuffle(loads)
    assert busiest_of(loads) == kept


def test_a_report_stays_below_its_limit_with_the_longest_names_and_the_largest_numbers() -> None:
    topic = "/".join(["n" * MAX_NAME_CHARS] * 3)
    busiest = busiest_of(
        SegmentLoad(
            topic_path=topic,
            segment_id=SegmentId(10**18 - 1 - number),
            bytes_in_per_s=LARGEST,
            bytes_out_per_s=LARGEST,
            history_bytes=LARGEST,
        )
        for number in range(MAX_REPORTED_SEGMENTS)
    )
    report = LoadReport(
        at=LARGEST,
        cpu=1.0000000000000002,
        bytes_in_per_s=LARGEST,
        bytes_out_per_s=LARGEST,
        records_in_per_s=LARGEST,
        segments=LARGEST,
        backlog_bytes=LARGEST,
        busiest=busiest,
        adopted_generation=LARGEST,
    )
    assert 100 < len(busiest) < MAX_REPORTED_SEGMENTS
    assert MAX_REPORT_BYTES * 0.9 < len(report.to_json()) <= MAX_REPORT_BYTES


def test_with_usual_names_the_number_of_segments_is_the_limit_not_the_bytes() -> None:
    report = LoadReport(at=LARGEST, busiest=busiest_of(load(number, 10**9) for number in range(300)))
    assert len(report.busiest) == MAX_REPORTED_SEGMENTS
    assert len(report.to_json()) < MAX_REPORT_BYTES * 0.6


# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_meter_that_has_seen_one_number_has_no_rate_yet() -> None:
    assert Meter(1_000, 5.0).per_s == 0


def test_the_first_interval_shows_the_whole_rate() -> None:
    assert Meter(1_000, 5.0).seen(1_500, 10.0).per_s == pytest.approx(100)


def test_a_steady_counter_has_its_rate_however_often_it_is_looked_at() -> None:
    meter, at = Meter(0, 0.0), 0.0
    for step in (0.1, 3.0, 30.0, 0.5, 400.0, 7.0):
        at += step
        meter = meter.seen(round(at * 1_000), at)
        assert meter.per_s == pytest.approx(1_000)


def test_after_a_half_life_a_change_is_seen_half() -> None:
    meter = Meter(0, 0.0).seen(1_000_000, 1_000.0)
    assert meter.per_s == pytest.approx(1_000)
    halfway = meter.seen(1_000_000, 1_000.0 + RATE_HALF_LIFE_S)
    assert halfway.per_s == pytest.approx(500)
    looked_at_often = meter
    for second in range(1, 31):
        looked_at_often = looked_at_often.seen(1_000_000, 1_000.0 + second)
    assert looked_at_often.per_s == pytest.approx(halfway.per_s)


def test_a_short_first_look_does_not_weigh_for_long() -> None:
    burst = Meter(0, 0.0).seen(1_000, 0.001)
    assert burst.per_s == pytest.approx(1_000_000)
    assert burst.seen(1_000, 30.0).per_s < 50


def test_a_counter_that_begins_again_keeps_the_rate_and_counts_from_there() -> None:
    meter = Meter(0, 0.0).seen(3_000, 30.0)
    again = meter.seen(10, 60.0)
    assert again.per_s == meter.per_s
    assert again.seen(10 + 3_000, 90.0).per_s == pytest.approx(100)


@pytest.mark.parametrize("at_s", [30.0, 29.0])
def test_a_look_in_no_time_waits_for_the_next(at_s: float) -> None:
    meter = Meter(0, 0.0).seen(3_000, 30.0)
    assert meter.seen(4_000, at_s) == meter
