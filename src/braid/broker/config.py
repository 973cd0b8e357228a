"""The configuration of a broker. cli/ reads and validates it once."""

from __future__ import annotations

from typing import Final

import msgspec

from braid.model.errors import InvalidConfig
from braid.model.names import check_name
from braid.model.topic import AutoScalePolicy
from braid.wire.frame import MAX_FRAME_BYTES

DEFAULT_DATA: Final = "./braid-data"
LOCAL: Final = "local"
"""Storage that is the broker's own disk."""


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much one connection, and all connections together, may cost (I12)."""

    max_connections: int = 10_000
    """An idle connection costs some 30 KB."""
    max_frame_bytes: int = MAX_FRAME_BYTES
    max_requests_in_flight: int = 2_048
    """Per connection. Beyond it the broker stops reading from the connection until some requests are answered."""
    max_bytes_in_flight: int = 32 << 20
    """Per connection: batches that are not confirmed, and other requests that are not answered. Beyond it the broker
    stops reading."""
    max_unfinished_bytes: int = 64 << 20
    """For all connections: frames that have begun and are not complete. Beyond it the broker reads only from those that
    hold little, and from the one that began first."""
    max_unsent_bytes: int = 64 << 20
    """For all connections: bytes that clients have not taken yet. From the half on, connections with unsent bytes get
    nothing more, others get small pieces, and those that have stood still longest are ended."""
    max_channels: int = 4_096
    """Per connection."""
    max_consumers: int = 1_024
    """Per connection: consumers that have joined over it."""
    hello_timeout_s: float = 10.0
    """A connection that has not said hello by then is closed."""
    heartbeat_s: float = 10.0
    """A client that is silent for three of these is gone. Half a frame is no sign of life."""
    read_bytes: int = 1 << 20
    """The most that is read from storage for one delivery."""
    max_read_ahead_bytes: int = 32 << 20
    """For all connections: bytes that are read from storage while the bytes before them are still being sent."""


class CursorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    flush_s: float = 1.0
    """How long after an ack the cursor is stored: a crash of the broker sets a subscription back by at most this."""
    flush_acks: int = 10_000
    """So many acks are stored without waiting for `flush_s`."""


class GroupConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    session_grace_s: float = 10.0
    """How long a consumer that lost its connection keeps its segments."""
    release_timeout_s: float = 10.0
    """How long a consumer may take to give back a segment that goes to another consumer."""


class TlsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    certificate: str
    """Path of the certificate chain, PEM."""
    key: str
    client_ca: str = ""
    """If given, clients must show a certificate that this authority signed."""


class BrokerTlsConfig(TlsConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """TLS of the port to which clients and other brokers connect."""

    peer_ca: str = ""
    """The authority that signed the other brokers' certificates; empty: any that the system trusts."""


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    on: str
    """`tenant`, `tenant/namespace` or `tenant/namespace/topic`; `*` stands for all of a level."""
    allow: tuple[str, ...]
    """Any of `produce`, `consume`, `admin`."""


class AuthConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens (JWTs) are checked, and the grants. With this section, the broker denies all that no grant allows."""

    secret_file: str = ""
    """A shared secret, for HS256 tokens; at least 32 bytes."""
    public_key_file: str = ""
    """PEM, for RS256, ES256 or EdDSA tokens."""
    issuer: str = ""
    audience: str = ""
    superusers: tuple[str, ...] = ()
    """Roles that may do everything."""
    grants: tuple[Grant, ...] = ()


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str = "broker-1"
    data: str = DEFAULT_DATA
    listen: str = "127.0.0.1:6660"
    advertise: str = ""
    """The address that clients and other brokers connect to; empty: the address that the broker listens on."""
    admin: str = "127.0.0.1:8660"
    metadata: str = ""
    """`sqlite:PATH` or `etcd://HOST:PORT,…`; empty: a file in the data folder."""
    storage: str = LOCAL
    """`local`, `file:///PATH` (shared by all brokers) or `s3://BUCKET/PREFIX`."""
    labels: dict[str, str] = {}
    """Labels for operators; they are shown with the broker."""
    rack: str = ""
    """What fails together with this broker: a rack, a zone. Replicas of a segment go to different racks. It becomes the
    label `rack`."""
    replace_after_s: float = 600.0
    """How long a broker is gone before the leader has others copy the segments of which it held replicas; the leading
    broker's setting counts. Long enough for a restart or a new machine with the old disk."""
    balance: bool = False
    """Whether the cluster's leader moves segments to even the brokers' load; the leading broker's setting counts."""
    lease_ttl_s: float = 10.0
    """A broker that is silent for this long has lost its segments."""
    cache_bytes: int = 16 << 20
    """Memory for recent batches, for readers at the live tail; the page cache holds the rest."""
    file_bytes: int = 64 << 20
    """A log's files are closed at this size."""
    spare_files: int = 8
    """The most preallocated files, of `file_bytes` each, into which busy logs rotate. The broker keeps as many as the
    last burst would have used, but no more than this."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    limits: Limits = Limits()
    cursors: CursorConfig = CursorConfig()
    groups: GroupConfig = GroupConfig()
    auto_scale: AutoScalePolicy = AutoScalePolicy()
    """Whether topics split and merge their segments by themselves, unless their namespaces or they themselves say
    otherwise; the leading broker's setting counts."""
    tls: BrokerTlsConfig | None = None
    admin_tls: TlsConfig | None = None
    auth: AuthConfig | None = None

    def __post_init__(self) -> None:
        check_name("broker", self.id)
        if self.lease_ttl_s < 2:
            raise InvalidConfig(f"lease_ttl_s is {self.lease_ttl_s}; below 2 s a busy moment would cost the lease")
