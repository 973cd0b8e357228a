"""What a fork does to clients: in the child, each of them refuses to work.

A forked child has copies of its parent's clients, and none of them can work. The event loop that serves a connection,
and the thread of a blocking client, run only in the parent. Both processes would write to the same sockets. Producers
would use the same ids, so that brokers took the records of one process for repeats of the other's. So the child gets an
error with the line to write, instead of a call that never returns.
"""

from __future__ import annotations

import os
import weakref
from typing import Final, Protocol

from braid.model.errors import ClientClosed


class BelongsToProcess(Protocol):
    def on_fork(self) -> None:
        """Hear, in the child, that this process is a fork. No lock may be taken here: its holder may be in the
        parent."""


_known: Final[weakref.WeakSet[BelongsToProcess]] = weakref.WeakSet()


def tell_of_forks(subject: BelongsToProcess) -> None:
    """Call `subject.on_fork` in each forked child, as long as the subject lives."""
    _known.add(subject)


def forked_error() -> ClientClosed:
    return ClientClosed(
        "this client belongs to the process that forked this one; connect in the child, after the fork: "
        "client = braid.sync.connect(…), or braid.connect(…) with asyncio"
    )


def _on_fork() -> None:
    for subject in list(_known):
        subject.on_fork()


os.register_at_fork(after_in_child=_on_fork)
