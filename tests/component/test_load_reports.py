"""A broker's load reports: what is measured, and when it is stored."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from braid.cluster.load_reports import (
    MEASURE_S,
    NEWS_BYTES_PER_S,
    STORE_S,
    LoadReports,
    Rates,
    Reading,
    SegmentReading,
    is_news,
)
from braid.metadata import paths
from braid.metadata.memory import Fault, MemoryStore
from braid.model.load import MAX_REPORT_BYTES, LoadReport
from braid.ports.processor import NoProcessor
from braid.testing.sim.loop import Simulation
from tests.kits.leader import LEASE_TTL_S


def reading(*segments: tuple[int, int, int], records: int = 0, adopted: int | None = None) -> Reading:
    """Segments of one topic: id, bytes in, bytes out."""
    found = [SegmentReading("public/default/orders", id_, in_, out, 7, 3) for id_, in_, out in segments]
    return Reading(found, records, adopted)


def test_rates_are_differences_of_counters_over_time() -> None:
    rates = Rates()
    first = rates.report(reading((0, 5_000, 0), records=9), cpu_s=3.0, now_s=10.0, at_us=1)
    assert (first.bytes_in_per_s, first.cpu, first.records_in_per_s, first.segments) == (0, 0.0, 0, 1)
    second = rates.report(reading((0, 6_000, 300), records=29, adopted=4), cpu_s=5.0, now_s=20.0, at_us=2)
    assert (second.bytes_in_per_s, second.bytes_out_per_s) == (100, 30)
    assert (second.cpu, second.records_in_per_s, second.adopted_generation) == (0.2, 2, 4)
    (segment,) = second.busiest
    assert (segment.bytes_in_per_s, segment.bytes_out_per_s, segment.history_bytes) == (100, 30, 7)
    assert second.backlog_bytes == 3


def test_a_segment_that_left_takes_its_rate_with_it_and_returns_with_none() -> None:
    rates = Rates()
    rates.report(reading((0, 0, 0), (1, 0, 0)), cpu_s=0, now_s=0.0, at_us=1)
    both = rates.report(reading((0, 1_000, 0), (1, 9_000, 0)), cpu_s=0, now_s=10.0, at_us=2)
    assert both.bytes_in_per_s == 1_000
    assert rates.report(reading((0, 2_000, 0)), cpu_s=0, now_s=20.0, at_us=3).bytes_in_per_s == 100
    assert rates.report(reading((0, 3_000, 0), (1, 50, 0)), cpu_s=0, now_s=30.0, at_us=4).bytes_in_per_s == 100


def test_a_report_is_bounded_however_many_segments_there_are() -> None:
    found = [SegmentReading("t" * 128 + "/n/" + "x" * 128, id_, 10**15, 10**15, 10**15) for id_ in range(5_000)]
    report = Rates().report(Reading(found, 10**15, 10**15), cpu_s=10.0**6, now_s=0.0, at_us=10**18)
    assert len(report.to_json()) < MAX_REPORT_BYTES
    assert report.segments == 5_000


BEFORE = LoadReport(at=0, cpu=0.5, bytes_in_per_s=10 << 20, bytes_out_per_s=10 << 20, segments=3, adopted_generation=7)


@pytest.mark.parametrize(
    ("changes", "news"),
    [
        ({"cpu": 0.55, "bytes_in_per_s": 11 << 20}, False),
        ({"segments": 4}, True),
        ({"adopted_generation": 8}, True),
        ({"cpu": 0.7}, True),
        ({"bytes_in_per_s": 12 << 20}, True),
        ({"bytes_out_per_s": 8 << 20}, True),
        ({"at": 30_000_000}, True),
        ({"at": -5}, True),
    ],
)
def test_what_is_news(changes: dict[str, Any], news: bool) -> None:
    assert is_news(msgspec.structs.replace(BEFORE, **{"at": 5_000_000, **changes}), BEFORE) is news


def test_little_changes_of_little_are_no_news() -> None:
    quiet = LoadReport(at=0, bytes_in_per_s=10)
    assert not is_news(LoadReport(at=1, bytes_in_per_s=NEWS_BYTES_PER_S), quiet)
    assert is_news(LoadReport(at=1, bytes_in_per_s=NEWS_BYTES_PER_S + 11), quiet)
    assert is_news(quiet, None)


class Reporter:
    def __init__(self, simulation: Simulation) -> None:
        self.store = MemoryStore(simulation.clock)
        self.now = reading()
        self.reports = LoadReports(self.store, simulation.clock, NoProcessor(), "a", lambda: self.now)

    async def stored(self) -> LoadReport | None:
        entry = await self.store.get(paths.load("a"))
        return LoadReport.from_json(entry.value) if entry is not None else None


async def test_a_report_is_stored_at_once_when_it_has_news_and_now_and_then_without(simulation: Simulation) -> None:
    reporter = Reporter(simulation)
    lease = await reporter.store.grant_lease(1_000)
    reporter.reports.start(lease)
    await asyncio.sleep(0.1)
    first = await reporter.stored()
    assert first is not None
    await asyncio.sleep(STORE_S - MEASURE_S)
    assert await reporter.stored() == first
    reporter.now = reading((0, 0, 0))
    await asyncio.sleep(MEASURE_S)
    second = await reporter.stored()
    assert second is not None
    assert second.segments == 1
    await asyncio.sleep(STORE_S)
    third = await reporter.stored()
    assert third is not None
    assert third.at > second.at
    await reporter.reports.stop()


async def test_a_report_goes_with_its_lease_and_comes_back_with_the_next(simulation: Simulation) -> None:
    reporter = Reporter(simulation)
    reporter.reports.start(await reporter.store.grant_lease(LEASE_TTL_S))
    await asyncio.sleep(LEASE_TTL_S + STORE_S)
    assert await reporter.stored() is None
    await reporter.reports.stop()
    reporter.reports.start(await reporter.store.grant_lease(LEASE_TTL_S))
    await asyncio.sleep(1)
    assert await reporter.stored() is not None


async def test_a_store_that_is_away_delays_the_report(simulation: Simulation) -> None:
    reporter = Reporter(simulation)
    lease = await reporter.store.grant_lease(1_000)
    reporter.store.fault = lambda request: Fault.UNAVAILABLE if request == "txn" else Fault.NONE
    reporter.reports.start(lease)
    await asyncio.sleep(1)
    assert await reporter.stored() is None
    reporter.store.fault = lambda _: Fault.NONE
    await asyncio.sleep(MEASURE_S)
    assert await reporter.stored() is not None
