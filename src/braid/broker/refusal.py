"""What a client is told when its segment's log does not take or give it anything.

That a log was fenced, closed or abandoned is the broker's affair: to a client it means that this broker does not serve
the segment now, and that it should look again for the one who does.
"""

from __future__ import annotations

from braid.model.errors import BraidError, Fenced, LogClosed, NotServing


def told_to_clients(error: BraidError) -> BraidError:
    if isinstance(error, Fenced | LogClosed):
        return NotServing(f"the segment is not served here any more: {error}")
    return error
