"""What `braid doctor` has found out, as plain values. rules.py judges them."""

from __future__ import annotations

import msgspec


class Fact(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    pass


class MachineFacts(Fact, frozen=True, kw_only=True):
    version: str
    """Of Braid, here."""
    python: str
    open_files: int
    """The hard limit: a broker raises its own to this."""
    processes: int | None = None
    """How many processes and threads the user may have; None: as many as it wants."""
    max_connections: int
    """What the broker's configuration asks for."""
    kernel_sync: bool = True
    """Whether the package is there that syncs files by the kernel instead of by threads."""
    clock_synchronised: bool | None = None
    """Whether the kernel says that something keeps its clock right; None: it does not say."""


class FolderFacts(Fact, frozen=True, kw_only=True):
    path: str
    error: str = ""
    """Why it cannot be written; empty: it can."""
    free_bytes: int = 0
    size_bytes: int = 0
    network_filesystem: str = ""
    """Its kind, if other machines may write there; empty: it is of this machine."""
    sync_ms: tuple[float, ...] = ()
    """How long small writes with a sync took, the shortest first."""


class StoreFacts(Fact, frozen=True, kw_only=True):
    """The metadata store."""

    url: str
    error: str = ""
    read_ms: tuple[float, ...] = ()
    """The shortest first."""
    clock_ahead_s: float | None = None
    """How far its clock is before ours; None: not measured."""


class StorageFacts(Fact, frozen=True, kw_only=True):
    url: str
    steps: dict[str, str] = {}
    """By step (`create`, `read`, `list`, `refuse`, `delete`), in order: why it failed, or empty. The steps end at the
    first failure."""
    create_ms: float = 0.0


class BrokerFacts(Fact, frozen=True, kw_only=True):
    id: str
    state: str
    version: str = ""
    leader: bool = False
    segments: int = 0
    address: str = ""
    address_error: str = ""
    round_trip_ms: float = 0.0
    admin: str = ""
    admin_error: str = ""
    ready: bool | None = None
    """None: its admin port did not answer."""
    clock_ahead_s: float | None = None


class ClusterFacts(Fact, frozen=True, kw_only=True):
    url: str
    error: str = ""
    """Why the cluster could not be looked at; empty: it could."""
    answered: bool = False
    """With an error: whether something answered there, such as a broker that wants a token."""
    brokers: tuple[BrokerFacts, ...] = ()


class Facts(Fact, frozen=True, kw_only=True):
    """None: not looked at."""

    machine: MachineFacts
    folder: FolderFacts | None = None
    metadata: StoreFacts | None = None
    storage: StorageFacts | None = None
    cluster: ClusterFacts | None = None
