"""What a client is told when its segment's log does not take or give it anything.

That a log was fenced, closed or abandoned is the broker's affair: to a client it means that this broker does not serve
the segment now, and that it should look again for the one who does. *Not serving* also says that nothing was stored, so
whoever waits for a batch that has its place in the log is told something else: only the disk knows what became of it,
and a client that took it for refused might send it under another number, and have it twice (I10).
"""

from __future__ import annotations

from braid.model.errors import BraidError, DiskError, Fenced, LogClosed, LogFailed, NotServing


def to_client(error: BraidError) -> BraidError:
    if isinstance(error, Fenced | LogClosed):
        return NotServing(f"the segment is not served here any more: {error}")
    return error


def to_reader(error: BraidError) -> BraidError:
    """A read that failed may work the next time, or elsewhere. Bytes that were read and are wrong stay wrong."""
    if isinstance(error, DiskError):
        return NotServing(f"the broker could not read its disk: {error}")
    return error


def to_publisher(error: BraidError) -> BraidError:
    """To those whose batches the log has taken and did not confirm."""
    if isinstance(error, Fenced | LogClosed):
        return LogFailed(f"whether the batch is stored is not known, send it again: {error}")
    return error
