"""The reports of Spark jobs, as `braid pipeline … --report-topic` publishes them: read from the end of that topic."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any, Final

import msgspec
from msgspec import Meta, Struct

from braid.console.records import Place, ends_of, look
from braid.console.rest import Rest, RestError, topic_path

if TYPE_CHECKING:
    from braid.client.client import Client
    from braid.model.message import Message

READ = 100
"""Of the last records of the topic."""
MAX_NUMBER: Final = (1 << 63) - 1
"""Larger numbers count nothing, and floating point may not have them."""


class JobRun(Struct, frozen=True):
    """One run of a job. Programs may publish such records, too."""

    job: str
    at: Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
    """µs since 1970"""
    ok: bool = True
    report: dict[str, Any] = {}

    @property
    def topics(self) -> tuple[str, ...]:
        """The topic that the report is about; of a replay, the source and the target."""
        return tuple(str(self.report[name]) for name in ("topic", "source", "target") if name in self.report)


async def last_reports(rest: Rest, client: Client, topic: str) -> list[JobRun] | None:
    """Return the last run of each job for each topic, the newest first; None if nobody has made the topic."""
    try:
        stats = await rest.get(topic_path(topic) + "/stats")
    except RestError as error:
        if error.status == 404:
            return None
        raise
    return newest(await look(client, topic, Place(by="end", count=READ), ends_of(stats), keep=lambda each: each))


def newest(messages: Iterable[Message]) -> list[JobRun]:
    """Return the last run of each job for each topic. Records that are no reports are left out."""
    found: dict[tuple[str, tuple[str, ...]], JobRun] = {}
    for message in messages:
        try:
            run = msgspec.json.decode(message.value, type=JobRun)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        known = found.get((run.job, run.topics))
        if known is None or known.at <= run.at:
            found[run.job, run.topics] = run
    return sorted(found.values(), key=lambda each: -each.at)


def summary(run: JobRun) -> list[tuple[str, Any]]:
    """Return the numbers of a report that a person looks at first: name and value. Sizes end in `bytes`."""
    wanted = {
        "audit": ("records", "batches", "chunks", "bytes", "seconds"),
        "lake": ("records", "files", "bytes", "lag", "skipped", "seconds"),
        "compact": ("chunksBefore", "chunksAfter", "joinedBytes", "seconds"),
        "replay": ("records", "bytes", "seconds"),
    }
    names = wanted.get(run.job, ("records", "bytes", "seconds"))
    found = [(name, run.report.get(name)) for name in names]
    return [(name, value) for name, value in found if isinstance(value, int | float) and abs(value) <= MAX_NUMBER]


def complaints(run: JobRun) -> list[str]:
    """Return what is wrong, in the report's own words. Any program may publish reports, of any shape."""
    lists = [run.report.get(name) for name in ("defects", "failures", "losses")]
    found = [each for listed in lists if isinstance(listed, list) for each in listed]
    return [str(each.get("text", each) if isinstance(each, dict) else each) for each in found]
