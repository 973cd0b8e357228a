"""The errors that clients get when a segment's log takes or gives nothing.

A log that was fenced, closed or abandoned is the broker's affair. For a client it means that this broker does not serve
the segment now, and that the client should look up the owner again.

*Not serving* also says that nothing was stored. So the publisher of a batch that has its place in the log gets another
error: only the disk knows whether the batch is stored. A client that took the batch for refused might send it under
another sequence number, and have it stored twice (I10).
"""

from __future__ import annotations

from braid.model.errors import BraidError, DiskError, Fenced, LogClosed, LogFailed, NotServing


def to_client(error: BraidError) -> BraidError:
    if isinstance(error, Fenced | LogClosed):
        return NotServing(f"the segment is not served here any more: {error}")
    return error


def to_reader(error: BraidError) -> BraidError:
    """Make a failed read retriable: it may work the next time, or at another broker. Damaged bytes stay damaged."""
    if isinstance(error, DiskError):
        return NotServing(f"the broker could not read its disk: {error}")
    return error


def to_publisher(error: BraidError) -> BraidError:
    """Return the error for the publisher of a batch that the log has taken and did not confirm."""
    if isinstance(error, Fenced | LogClosed):
        return LogFailed(f"it is not known whether the batch is stored, send it again: {error}")
    return error
