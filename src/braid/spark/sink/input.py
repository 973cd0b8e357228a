"""Whether a task has seen all of its rows.

When what feeds a task fails (a source, a shuffle), Spark stops in the middle of the rows and closes its end of the
pipe. To the task's Python that looks like the end of the rows: Arrow takes a stream that just stops for one that is
complete. Spark then fails the task, but by that time a sink has written a last block that is too short, and the next
attempt, which has the whole of it, is not the same any more. So at the end of the rows the sink looks whether Spark
says that they are over: behind them it sends a number (END_OF_STREAM), and nothing if it broke off.

Spark has no public way to ask. The pipe is found in the frame of Spark's worker, and only looked at, so that the worker
finds the number where it expects it. Where it is not found (another version of Spark), the rows are taken as complete:
the worst that follows is that the next attempt is refused as different. Nothing is lost or written twice by that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from braid.model.errors import JobFailed


def whole(rows: Iterable[Any]) -> Iterator[Any]:
    """The same; `JobFailed` at the end if Spark broke them off."""
    yield from rows
    pipe = _pipe()
    if pipe is not None and broken_off(pipe):
        raise JobFailed(
            "Spark broke off the rows of this task, because what they come from has failed: see that error. What was "
            "written stays, and the next attempt continues it"
        )


def broken_off(pipe: Any) -> bool:
    """Whether the other end was closed with nothing behind what was read. Waits for the one or the other, as the worker
    itself would in a moment."""
    try:
        return not pipe.peek(1)
    except ConnectionError:
        return True


def _pipe() -> Any:
    """By which Spark's worker gets this task's rows; None if this is no such worker."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("pyspark/worker.py") and "infile" in frame.f_locals:
            found = frame.f_locals["infile"]
            return found if hasattr(found, "peek") else None
        frame = frame.f_back
    return None
