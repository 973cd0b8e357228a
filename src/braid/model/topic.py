"""A topic, as the metadata store has it: its identity, layout and policies."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from braid.model.errors import InvalidArgument, MetadataCorrupt
from braid.model.ids import NO_REQUEST, RequestId
from braid.model.layout import Layout

MAX_REPLICAS: Final = 7
MAX_RETENTION: Final = (1 << 63) - 1
MAX_OWNER_LOSS_MS: Final = (1 << 53) - 1


def _between(least: int, most: int) -> Meta:
    return Meta(extra_json_schema={"minimum": least, "maximum": most})


class Durability(Enum):
    """What a confirm waits for."""

    MEMORY = "memory"
    FSYNC = "fsync"
    REPLICATED = "replicated"


class OwnerLoss(Enum):
    """What becomes of a segment whose owner is gone and has not handed it over."""

    WAIT = "wait"
    """The segment waits for its owner, or for an operator to accept the loss."""
    CONTINUE = "continue"
    """After a while another broker continues the segment after the records that are durable elsewhere. Records that
    only the owner had are lost."""


class TopicPolicies(msgspec.Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    # The limits in the types are documentation for interfaces. `__post_init__` checks them, and says more.
    durability: Annotated[Durability, Meta(description="What a confirm waits for.")] = Durability.FSYNC
    replicas: Annotated[int, _between(1, MAX_REPLICAS)] = 1
    write_quorum: Annotated[int, _between(1, MAX_REPLICAS), Meta(description="At most `replicas`.")] = 1
    retention_ms: Annotated[int, _between(1, MAX_RETENTION)] | None = None
    """Records older than this may go; None: age alone deletes nothing."""
    retention_bytes: Annotated[int, _between(1, MAX_RETENTION), Meta(description="Per segment.")] | None = None
    """The oldest records beyond it may go. None: size alone deletes nothing."""
    retention_ignores_subscriptions: Annotated[
        bool, Meta(description="Whether retention also deletes what a subscription has not consumed.")
    ] = False
    on_owner_loss: Annotated[
        OwnerLoss,
        Meta(description="What becomes of a segment whose broker is gone with records that nobody else has."),
    ] = OwnerLoss.WAIT
    owner_loss_after_ms: Annotated[
        int, _between(0, MAX_OWNER_LOSS_MS), Meta(description="How long it is gone before `continue` counts.")
    ] = 60_000
    """Long enough for a restart."""

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise InvalidArgument(f"{self.replicas} replicas were asked for; a segment has 1 to {MAX_REPLICAS}")
        if not 1 <= self.write_quorum <= self.replicas:
            raise InvalidArgument(
                f"a write quorum of {self.write_quorum} of {self.replicas} replicas cannot be: use 1 to {self.replicas}"
            )
        for name in ("retention_ms", "retention_bytes"):
            limit = getattr(self, name)
            if limit is not None and not 1 <= limit <= MAX_RETENTION:
                raise InvalidArgument(f"{name} is {limit}; it must be a positive number, or absent for no limit")
        if not 0 <= self.owner_loss_after_ms <= MAX_OWNER_LOSS_MS:
            raise InvalidArgument(f"owner_loss_after_ms is {self.owner_loss_after_ms}; it must be 0 or more")


class Topic(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The value of the topic's key. The key has the topic's name, the value everything else."""

    id: int
    """Random, from 1 to 2^53: tells a topic from one of the same name that was deleted."""
    layout: Layout
    policies: TopicPolicies = TopicPolicies()
    created_at: int = 0
    """µs since 1970."""
    created_by: RequestId = NO_REQUEST
    """The call that created it: a repeat of that call recognises its own work."""
    deleting: bool = False
    """The topic no longer exists for clients; its keys and objects are being removed."""

    def to_json(self) -> bytes:
        return msgspec.json.encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Topic:
        try:
            return msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise MetadataCorrupt(f"a topic's record cannot be read: {error}") from error
