"""The reports of jobs: structs whose fields, in camel case, are the JSON that `--json` prints.

Jobs count different things: an audit counts defects, a compaction joined chunks, a lake landed files. So each job has
a struct of its own, `AuditReport` or `LakeReport`, and all of them are `JobReport`s with a field `ok`. Jobs that copy
ranges of offsets, lake and replay, share `CopiedSegment`. `cli/pipeline/report.py` prints every report.
"""

from __future__ import annotations

import msgspec

from braid.client.consuming.checkpoint import END, Position


class JobReport(msgspec.Struct, frozen=True, rename="camel"):
    """The report of a job, or a part of it."""


class CopiedSegment(JobReport, frozen=True):
    """The records of one segment that a run has copied."""

    segment: int
    first: int
    """The first offset that the run read; equal to `until` if it read none."""
    until: int
    records: int
    """How many of these records the run copied: all, or those of the time that was asked for."""


def lag(end: int, position: Position) -> int:
    """Count the records between a position and the end of its segment."""
    return 0 if position == END else max(0, end - position)
