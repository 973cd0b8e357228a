"""Whether a task has seen all of its rows.

If the input of a task fails (a source, a shuffle), Spark stops in the middle of the rows and closes its end of the
pipe. To the task's Python that looks like the end of the rows: Arrow takes a stream that stops for a complete one.
Spark then fails the task. But by that time a sink has written a last block that is too short, and the next attempt,
with the whole block, differs from it. So at the end of the rows the sink checks whether Spark says that they are over:
after the last row Spark sends a number (END_OF_STREAM), and nothing if it broke off.

Spark has no public way to ask. The sink finds the pipe in the frame of Spark's worker and only peeks at it, so that the
worker finds the number where it expects it. If the pipe is not found (another version of Spark), or if option
`verifyInput` is false, the rows count as complete: at worst the next attempt is refused as different. Nothing is lost
or written twice by that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from typing import Any

from braid.model.errors import JobFailed


def whole(rows: Iterable[Any], *, verify: bool = True) -> Iterator[Any]:
    """Yield the same rows. Raises `JobFailed` at the end if Spark broke them off; without `verify`, never."""
    yield from rows
    pipe = workers_pipe() if verify else None
    if pipe is not None and broken_off(pipe):
        raise JobFailed(
            "Spark broke off the rows of this task because their input has failed: see that error. Written rows stay, "
            "and the next attempt continues"
        )


def broken_off(pipe: Any) -> bool:
    """Whether the other end was closed with nothing after the rows. Waits for the number or the close, as the worker
    itself would in a moment."""
    try:
        return not pipe.peek(1)
    except ConnectionError:
        return True


def workers_pipe() -> Any:
    """Find the pipe by which Spark's worker gets this task's rows; None if this process is no such worker."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.endswith("pyspark/worker.py") and "infile" in frame.f_locals:
            found = frame.f_locals["infile"]
            return found if hasattr(found, "peek") else None
        frame = frame.f_back
    return None
