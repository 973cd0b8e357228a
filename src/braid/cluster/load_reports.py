"""A broker's report of its load, for placing and balancing: measured every few seconds, stored under its lease.

A report without news is not stored, because every broker hears of each write. But a report is stored at least every
`STORE_S`: to balancing, an old report means a broker that cannot report any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final, NamedTuple

from braid.metadata import paths
from braid.metadata.store import Lease, Put, Store
from braid.model.errors import LeaseLost, MetadataError
from braid.model.ids import SegmentId
from braid.model.load import LoadReport, Meter, SegmentLoad, busiest_of
from braid.ports.clock import Clock
from braid.ports.processor import Processor
from braid.ports.tasks import end

MEASURE_S: Final = 5.0
STORE_S: Final = 30.0
CHANGED: Final = 0.1
"""A rate that changed by this part of itself is news, unless it changed by less than the next number."""
NEWS_BYTES_PER_S: Final = 256 << 10
NEWS_CPU: Final = 0.1
"""A change by this part of a core is news."""

_log: Final = logging.getLogger(__name__)

SegmentKey = tuple[str, int]


class SegmentReading(NamedTuple):
    """The counters of one segment; bytes are counted since this broker opened it."""

    topic_path: str
    segment_id: int
    bytes_in: int
    bytes_out: int
    history_bytes: int
    backlog_bytes: int = 0
    """Bytes that its subscriptions have not consumed, added up."""
    records_in: int = 0


class MeasuredRates(NamedTuple):
    """Of one segment that this broker serves."""

    bytes_in_per_s: int
    bytes_out_per_s: int
    records_in_per_s: int
    measured: bool
    """Whether the counters were read twice: before that, the rates are 0."""


class Reading(NamedTuple):
    """The counters of a broker."""

    segments: list[SegmentReading]
    """The segments that it serves now."""
    records_in: int
    adopted_generation: int | None
    """The oldest routing that one of its clients works with."""


_UNMEASURED: Final = Meter(0, 0.0)


class Rates:
    """Makes rates of successive readings."""

    def __init__(self) -> None:
        self._meters: dict[SegmentKey, tuple[Meter, Meter, Meter]] = {}
        """Of bytes in, bytes out and records in."""
        self._records = Meter(0, 0.0)
        self._cpu = Meter(0, 0.0)
        self._first = True

    def of_segment(self, topic_path: str, segment_id: int) -> MeasuredRates:
        meters = self._meters.get((topic_path, segment_id), (_UNMEASURED, _UNMEASURED, _UNMEASURED))
        bytes_in, bytes_out, records_in = (round(meter.per_s) for meter in meters)
        return MeasuredRates(bytes_in, bytes_out, records_in, meters[0].weight > 0)

    def report(self, reading: Reading, *, cpu_s: float, now_s: float, at_us: int) -> LoadReport:
        cpu_us = round(cpu_s * 1_000_000)
        if self._first:
            self._records, self._cpu, self._first = Meter(reading.records_in, now_s), Meter(cpu_us, now_s), False
        self._records = self._records.seen(reading.records_in, now_s)
        self._cpu = self._cpu.seen(cpu_us, now_s)
        meters: dict[SegmentKey, tuple[Meter, Meter, Meter]] = {}
        for each in reading.segments:
            key = (each.topic_path, each.segment_id)
            # A segment that is seen for the first time has no rate yet.
            counters = each.bytes_in, each.bytes_out, each.records_in
            bytes_in, bytes_out, records_in = self._meters.get(key) or [Meter(total, now_s) for total in counters]
            meters[key] = (
                bytes_in.seen(each.bytes_in, now_s),
                bytes_out.seen(each.bytes_out, now_s),
                records_in.seen(each.records_in, now_s),
            )
        self._meters = meters
        loads = [
            SegmentLoad(
                topic_path=each.topic_path,
                segment_id=SegmentId(each.segment_id),
                bytes_in_per_s=round(meters[each.topic_path, each.segment_id][0].per_s),
                bytes_out_per_s=round(meters[each.topic_path, each.segment_id][1].per_s),
                history_bytes=each.history_bytes,
            )
            for each in reading.segments
        ]
        return LoadReport(
            at=at_us,
            cpu=round(self._cpu.per_s / 1_000_000, 3),
            bytes_in_per_s=sum(load.bytes_in_per_s for load in loads),
            bytes_out_per_s=sum(load.bytes_out_per_s for load in loads),
            records_in_per_s=round(self._records.per_s),
            segments=len(loads),
            backlog_bytes=sum(each.backlog_bytes for each in reading.segments),
            busiest=busiest_of(loads),
            adopted_generation=reading.adopted_generation,
        )


def is_news(report: LoadReport, stored: LoadReport | None) -> bool:
    """Tell whether the report differs enough from the stored one to change a decision."""
    if stored is None or report.at - stored.at >= STORE_S * 1_000_000 or report.at < stored.at:
        return True
    if (report.segments, report.adopted_generation) != (stored.segments, stored.adopted_generation):
        return True
    if abs(report.cpu - stored.cpu) >= NEWS_CPU:
        return True
    return _changed(report.bytes_in_per_s, stored.bytes_in_per_s) or _changed(
        report.bytes_out_per_s, stored.bytes_out_per_s
    )


def _changed(now: int, before: int) -> bool:
    return abs(now - before) > max(CHANGED * before, NEWS_BYTES_PER_S)


class LoadReports:
    """`start` and `stop` may be called again and again, once for each lease."""

    def __init__(
        self, store: Store, clock: Clock, processor: Processor, broker_id: str, read: Callable[[], Reading]
    ) -> None:
        self._store = store
        self._clock = clock
        self._processor = processor
        self._key = paths.load(broker_id)
        self._read = read
        self.rates: Final = Rates()
        self._task: asyncio.Task[None] | None = None

    def start(self, lease: Lease) -> None:
        assert self._task is None or self._task.done(), "the last reports have not been stopped"
        self._task = asyncio.create_task(self._keep(lease), name="report load")

    async def stop(self) -> None:
        task, self._task = self._task, None
        await end(task)

    async def _keep(self, lease: Lease) -> None:
        """Report until the lease is lost, which also removes the report."""
        stored: LoadReport | None = None
        with contextlib.suppress(LeaseLost):
            while True:
                report = self.rates.report(
                    self._read(),
                    cpu_s=self._processor.used_s(),
                    now_s=self._clock.monotonic(),
                    at_us=self._clock.now_us(),
                )
                if is_news(report, stored):
                    try:
                        await self._store.txn([], [Put(self._key, report.to_json(), lease.id)])
                        stored = report
                    except LeaseLost:
                        raise
                    except MetadataError as error:
                        _log.info("the load report was not stored, the next one will be: %s", error)
                await asyncio.sleep(MEASURE_S)
