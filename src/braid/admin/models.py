"""The JSON and the query parameters of the REST API, as the OpenAPI document shows them.

What comes in is checked with these: unknown fields and parameters are refused, so that a misspelt option is not taken
for its default. What goes out is described by them and not checked again: it is encoded as `broker/admin/calls.py` made
it, and tests hold the two together. Fields may be added to answers.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from fastapi import Path
from pydantic import BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel

from braid.model.layout import LAST_HASH, MAX_INITIAL_SEGMENTS
from braid.model.names import MAX_NAME_CHARS
from braid.model.topic import MAX_REPLICAS

MAX_NUMBER: Final = (1 << 53) - 1
"""What every JSON parser reads exactly."""
MAX_SEGMENT_ID: Final = 10**18 - 1

NAME_PATTERN: Final = r"^[A-Za-z0-9_][A-Za-z0-9_.=-]*$"


def _name(what: str) -> Any:
    return Path(pattern=NAME_PATTERN, min_length=1, max_length=MAX_NAME_CHARS, description=f"The {what}'s name.")


Tenant = Annotated[str, _name("tenant")]
Namespace = Annotated[str, _name("namespace")]
TopicPath = Annotated[str, _name("topic")]
SubscriptionPath = Annotated[str, _name("subscription")]
BrokerPath = Annotated[str, _name("broker")]
SegmentPath = Annotated[int, Path(ge=0, le=MAX_SEGMENT_ID, description="A segment's id.")]
SegmentCount = Annotated[int, Path(ge=1, le=MAX_INITIAL_SEGMENTS, description="How many segments there are to be.")]
DescriptorPath = Annotated[
    str,
    Path(
        pattern=r"^[0-9a-f]{4}-[0-9a-f]{4}-(0|[1-9][0-9]{0,17})$",
        description="A segment: first hash, last hash, id.",
        examples=["0000-ffff-0"],
    ),
]

Number = Annotated[int, Field(ge=0, le=MAX_NUMBER)]


class _Strict(BaseModel):
    """What clients send."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=False, extra="forbid", frozen=True)


class _Answer(BaseModel):
    """What they get."""

    model_config = ConfigDict(alias_generator=to_camel)


# Queries.


class NoQuery(_Strict):
    pass


class CreateTopicQuery(_Strict):
    num_initial_segments: int = Field(1, ge=1, le=MAX_INITIAL_SEGMENTS, description="Ranges of equal size.")


class ForceQuery(_Strict):
    force: Literal["true", "false"] = Field("false", description="Also when it has consumers that are connected.")


class CreateSubscriptionQuery(_Strict):
    start: Literal["earliest", "latest"] | None = Field(None, description="Where it begins. The default is `latest`.")
    kind: Literal["stream", "queue"] | None = Field(None, description="The default is `stream`.")


class SeekQuery(_Strict):
    timestamp: Number | None = Field(None, description="Milliseconds since 1970: the first records at or after it.")
    to: Literal["earliest", "latest"] | None = None


class SkipQuery(_Strict):
    segment: int = Field(ge=0, le=MAX_SEGMENT_ID)
    count: int = Field(ge=1, le=MAX_NUMBER, description="How many records are left out.")


class SplitQuery(_Strict):
    at: str | None = Field(
        None, pattern=r"^[0-9a-fA-F]{1,4}$", description="The first hash of the second child; the midpoint if absent."
    )


class MoveQuery(_Strict):
    segment: int | None = Field(None, ge=0, le=MAX_SEGMENT_ID, description="All segments if absent.")
    to: str | None = Field(
        None, pattern=NAME_PATTERN, max_length=MAX_NAME_CHARS, description="A broker; the least loaded if absent."
    )


class RecoverQuery(MoveQuery):
    accept_loss: Literal["true", "false"] = Field(
        "false", description="Whether what only the last owner's disk had may be lost. If not, the answer says what."
    )


class BalanceQuery(_Strict):
    dry_run: Literal["true", "false"] = Field("false", description="Only say what would move.")


# Bodies.


class Policies(_Strict):
    durability: Literal["memory", "fsync", "replicated"] = Field("fsync", description="What a confirm waits for.")
    replicas: int = Field(1, ge=1, le=MAX_REPLICAS, strict=True)
    write_quorum: int = Field(1, ge=1, le=MAX_REPLICAS, strict=True, description="At most `replicas`.")
    retention_ms: int | None = Field(None, ge=1, le=MAX_NUMBER, strict=True)
    retention_bytes: int | None = Field(None, ge=1, le=MAX_NUMBER, strict=True, description="Per segment.")
    retention_ignores_subscriptions: bool = Field(
        False, strict=True, description="Whether retention also deletes what a subscription has not consumed."
    )
    on_owner_loss: Literal["wait", "continue"] = Field(
        "wait", description="What becomes of a segment whose broker is gone with records that nobody else has."
    )
    owner_loss_after_ms: int = Field(
        60_000, ge=0, le=MAX_NUMBER, strict=True, description="How long it is gone before `continue` counts."
    )


class SeekBody(_Strict):
    offsets: dict[
        Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})$")],
        Annotated[int, Field(ge=0, le=MAX_NUMBER, strict=True)],
    ] = Field(min_length=1, max_length=4096, description="The next offset by segment id; others stay where they are.")


class AutoScalePolicy(BaseModel):
    """Not in this version."""

    model_config = ConfigDict(extra="allow")


# Answers.


class ErrorAnswer(_Answer):
    code: str = Field(description="Stable; docs/errors.md lists them.")
    message: str
    retriable: bool = Field(description="Whether the same request may succeed later, unchanged.")


class HashRange(_Answer):
    start: int = Field(ge=0, le=LAST_HASH)
    end: int = Field(ge=0, le=LAST_HASH)


class Segment(_Answer):
    segment_id: int
    hash_range: HashRange
    state: Literal["ACTIVE", "SEALED"]
    parent_ids: list[int]
    child_ids: list[int]
    created_at_epoch: int
    sealed_at_epoch: int


class PoliciesAnswer(_Answer):
    durability: Literal["memory", "fsync", "replicated"]
    replicas: int
    write_quorum: int
    retention_ms: int | None
    retention_bytes: int | None
    retention_ignores_subscriptions: bool
    on_owner_loss: Literal["wait", "continue"]
    owner_loss_after_ms: int


class Topic(_Answer):
    name: str
    topic_id: int
    epoch: int = Field(description="Counts the topic's layouts.")
    next_segment_id: int
    segments: dict[str, Segment]
    properties: dict[str, str]
    policies: PoliciesAnswer
    created_at: int = Field(description="Microseconds since 1970.")


class SegmentStats(_Answer):
    segment_id: int
    hash_range: HashRange
    state: str
    owner: str | None
    epoch: int | None = Field(description="Counts the segment's owners.")
    earliest_offset: int | None
    end_offset: int | None
    records: int | None
    bytes: int | None
    unavailable: str | None = Field(description="Why nothing is known of it now; null if it is.")


class SubscriptionProgress(_Answer):
    offset: int = Field(description="Everything below is consumed.")
    earliest: int
    end: int
    backlog: int


class UnavailableSegment(_Answer):
    owner: str | None = Field(description="The broker that has it, if one does.")
    reason: str


class Consumer(_Answer):
    segments: list[int]
    connected: bool


class Subscription(_Answer):
    name: str
    kind: Literal["stream", "queue"]
    created_at: int = Field(description="Microseconds since 1970.")
    backlog: int = Field(description="Records that it has before it, in the segments whose owners answered.")
    segments: dict[str, SubscriptionProgress]
    unavailable: dict[str, UnavailableSegment] = Field(description="Segments whose owner did not answer.")
    consumers: dict[str, Consumer]


class TopicStorage(_Answer):
    storage: str
    """The URL of the topic's chunks and manifests; empty where each broker keeps its own."""


class TopicStats(_Answer):
    """Counts since the broker started."""

    name: str
    epoch: int
    segments: dict[str, SegmentStats]
    published_batches: int
    published_records: int
    published_bytes: int
    duplicate_batches: int
    delivered_batches: int
    delivered_records: int
    delivered_bytes: int
    subscriptions: dict[str, Subscription]


class BrokerLoad(_Answer):
    at: int = Field(description="Microseconds since 1970.")
    cpu: float = Field(description="Of one core.")
    bytes_in_per_s: int
    bytes_out_per_s: int
    records_in_per_s: int
    segments: int
    backlog_bytes: int | None
    adopted_generation: int | None = Field(description="The oldest routing that one of its clients works with.")


class Broker(_Answer):
    id: str
    address: str
    admin: str
    version: str
    started_at: int = Field(description="Microseconds since 1970.")
    state: Literal["active", "draining", "drained", "stopping", "down"]
    segments: int = Field(description="That it owns.")
    labels: dict[str, str]
    leader: bool = Field(description="Whether it leads the cluster.")
    load: BrokerLoad | None = Field(description="Its last report; null if there is none.")


class MovedSegment(_Answer):
    segment: int
    from_: str = Field(alias="from")
    to: str
    epoch: int = Field(description="Counts the segment's owners.")
    seconds: float
    moved: bool = Field(description="False if it was there already.")
    loss: str = Field(description="What is lost, as far as it is known.")


class Recovered(_Answer):
    topic: str
    segments: list[MovedSegment]


class PlannedMove(_Answer):
    topic: str
    segment: int
    from_: str = Field(alias="from")
    to: str
    bytes_per_s: int
    history_bytes: int
    reason: str


class PlanNote(_Answer):
    remark: str
    text: str


class PlannedLoad(_Answer):
    id: str
    bytes_per_s_before: int
    bytes_per_s_after: int
    segments_before: int
    segments_after: int


class BalancePlan(_Answer):
    dry_run: bool
    begun: int = Field(description="How many moves have begun.")
    spread_before: float = Field(description="The load of the busiest broker by the mean.")
    spread_after: float
    moves: list[PlannedMove]
    notes: list[PlanNote]
    brokers: list[PlannedLoad]


class RouteSegment(_Answer):
    segment_id: int
    hash_range: HashRange
    active: bool
    parent_ids: list[int]
    child_ids: list[int]
    owner: str = Field(description="An address; empty while nobody serves it.")
    epoch: int


class Route(_Answer):
    topic: str
    topic_id: int
    layout_epoch: int
    controller: str = Field(description="The address where consumers join; empty if any broker will do.")
    segments: list[RouteSegment]


class Topology(_Answer):
    generation: int = Field(description="The metadata revision that this reflects.")
    topics: list[Route]


class Health(_Answer):
    status: Literal["alive", "ready"]
