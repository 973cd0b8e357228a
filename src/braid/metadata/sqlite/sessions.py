"""The processes of this machine that have a metadata file open: one session for each open store.

A session is two files in a folder beside the database:

    metadata.db.sessions/{session}.alive    locked with flock for as long as the session lives
    metadata.db.sessions/{session}.bell     a datagram socket; others send a byte to it when they have committed

The kernel drops the lock when the process dies, however it dies. So a process that can take the lock of another session
knows that the session is dead, and may end its leases now instead of waiting for their time to live. A process that
hangs keeps its lock; only the time to live ends its leases.

The socket makes watches fast, never correct: a byte that is lost costs one poll interval (`store.py`).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Iterator
from weakref import WeakSet

from braid.model.errors import MetadataUnavailable
from braid.ports.private_files import FILE_MODE, FOLDER_MODE

LOCK_PATIENCE_S = 5.0
"""How long a write waits for other writers. A write takes a millisecond, so a process that holds the lock longer hangs.
"""
FIRST_PAUSE_S = 0.00005
LONGEST_PAUSE_S = 0.001

_open_locks: WeakSet[_LockedFile] = WeakSet()


class _LockedFile:
    """A file to lock. A forked child closes its copy, or the lock would outlive the process that took it."""

    def __init__(self, path: str, flags: int) -> None:
        self.path = path
        self.fd = os.open(path, flags | os.O_RDWR | os.O_CLOEXEC, FILE_MODE)
        _open_locks.add(self)

    def try_lock(self) -> bool:
        try:
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def is_in_place(self) -> bool:
        """Tell whether the path still leads to this file."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return False
        mine = os.fstat(self.fd)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _close_in_forked_child() -> None:
    for locked in [*_open_locks]:
        locked.close()


os.register_at_fork(after_in_child=_close_in_forked_child)


def boot_id() -> str:
    """Names the time since the machine was started: a lease of another boot has no holder."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


class WriteLock:
    """The turn to write. Taken before SQLite's own lock, whose waiters sleep up to 100 ms and starve each other."""

    def __init__(self, path: str) -> None:
        self._file = _LockedFile(path, os.O_CREAT)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        self._acquire()
        try:
            yield
        finally:
            fcntl.flock(self._file.fd, fcntl.LOCK_UN)

    def close(self) -> None:
        self._file.close()

    def _acquire(self) -> None:
        # Not one blocking flock: a writer that is stopped (SIGSTOP, a debugger) would hang all others for ever.
        give_up_at, pause_s = time.monotonic() + LOCK_PATIENCE_S, FIRST_PAUSE_S
        while not self._file.try_lock():
            if time.monotonic() > give_up_at:
                raise MetadataUnavailable(
                    f"another process has held {self._file.path} for more than {LOCK_PATIENCE_S:g} s, nothing was "
                    "written; look for a stopped or hanging process that has this file open"
                )
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)


class DeadSession:
    """A session whose process is gone, claimed: until `bury`, no other process will claim it."""

    def __init__(self, folder: str, name: str, alive: _LockedFile) -> None:
        self.name = name
        self._folder = folder
        self._alive = alive

    def bury(self) -> None:
        for suffix in (".bell", ".alive"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self._folder, self.name + suffix))
        self.release()

    def release(self) -> None:
        """Let the next prober claim it: its leases could not be ended now."""
        self._alive.close()


class StoreSession:
    def __init__(self, folder: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, FOLDER_MODE)
        self._folder = folder
        self.name, self._alive = _new_session(folder)
        self._folder_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.notifications = socket.socket(
            socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        self.notifications.bind(self._socket_path(self.name))

    def notify_others(self) -> None:
        """Wake the other sessions. Never fails: the commit has happened, and a session that misses the byte polls."""
        with contextlib.suppress(OSError):
            for file in os.listdir(self._folder_fd):
                name, dot, kind = file.partition(".")
                if dot and kind == "bell" and name != self.name:
                    # A full socket has a byte already; a dead one is buried by the next probe.
                    with contextlib.suppress(OSError):
                        self.notifications.sendto(b"!", self._socket_path(name))

    def take_notifications(self) -> None:
        """Take the bytes that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.notifications.recv(1)

    def claim_dead(self) -> list[DeadSession]:
        dead: list[DeadSession] = []
        try:
            for file in os.listdir(self._folder_fd):
                name, dot, kind = file.partition(".")
                if not dot or kind != "alive" or name == self.name:
                    continue
                with contextlib.suppress(FileNotFoundError):
                    alive = _LockedFile(os.path.join(self._folder, file), 0)
                    if alive.try_lock() and alive.is_in_place():
                        dead.append(DeadSession(self._folder, name, alive))
                    else:
                        alive.close()
        except OSError:
            for each in dead:
                each.release()
            raise
        return dead

    def close(self) -> None:
        self.notifications.close()
        os.close(self._folder_fd)
        DeadSession(self._folder, self.name, self._alive).bury()

    def _socket_path(self, name: str) -> str:
        # A socket's path may have 107 bytes; through the folder's descriptor it is short wherever the database lies.
        return f"/proc/self/fd/{self._folder_fd}/{name}.bell"


def _new_session(folder: str) -> tuple[str, _LockedFile]:
    """Make a session's file and lock it. Another process may take the session for dead in between: then try again."""
    while True:
        name = secrets.token_hex(8)
        alive = _LockedFile(os.path.join(folder, name + ".alive"), os.O_CREAT | os.O_EXCL)
        if alive.try_lock() and alive.is_in_place():
            return name, alive
        alive.close()
