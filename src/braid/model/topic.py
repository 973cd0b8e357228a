"""A topic, as the metadata store has it: its identity, layout and policies."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType, structs

from braid.model.batch.header import MAX_RAW_BYTES, MAX_RECORDS
from braid.model.errors import BrokenInvariant, InvalidArgument
from braid.model.ids import NO_REQUEST, RequestId, SegmentId
from braid.model.layout import MAX_SEGMENTS, Layout, SegmentInfo
from braid.model.stored_record import StoredRecord, decode, encode
from braid.model.transition import ChildSegment, LayoutPlan, Transition, TransitionStep

MAX_REPLICAS: Final = 7
MAX_RETENTION: Final = (1 << 63) - 1
MAX_OWNER_LOSS_MS: Final = (1 << 53) - 1
MAX_MESSAGE_TTL_MS: Final = 100 * 366 * 86_400_000
"""A hundred years."""
MIN_DECODED_BYTES: Final = 1 << 10
"""A topic with less could not store a record of a usual size."""


def majority(replicas: int) -> int:
    """Return how many replicas confirm a record where the topic does not say: more than half of them, so that the loss
    of fewer than half neither loses a record nor stops the topic."""
    return replicas // 2 + 1


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


# The limits in these types are documentation for interfaces. `TopicPolicies` checks them, and says more.
Confirm = Annotated[Durability, Meta(description="What a confirm waits for.")]
Replicas = Annotated[int, _between(1, MAX_REPLICAS)]
WriteQuorum = Annotated[
    int,
    _between(1, MAX_REPLICAS),
    Meta(description="Replicas that a confirm waits for, the owner included. A majority, if `replicas` changes alone."),
]
RetentionMs = Annotated[int, _between(1, MAX_RETENTION)]
RetentionBytes = Annotated[int, _between(1, MAX_RETENTION), Meta(description="Per segment.")]
IgnoresSubscriptions = Annotated[
    bool, Meta(description="Whether retention also deletes what a subscription has not consumed.")
]
WaitsMs = Annotated[
    int,
    _between(1, MAX_RETENTION),
    Meta(description="How long retention waits for a subscription that does not move; null: for ever."),
]
OnOwnerLoss = Annotated[
    OwnerLoss, Meta(description="What becomes of a segment whose broker is gone with records that nobody else has.")
]
OwnerLossMs = Annotated[
    int, _between(0, MAX_OWNER_LOSS_MS), Meta(description="How long it is gone before `continue` counts.")
]
MessageTtlMs = Annotated[
    int,
    _between(1, MAX_MESSAGE_TTL_MS),
    Meta(description="Queues settle what is older instead of delivering it; null: never."),
]
DecodedBytes = Annotated[
    int, _between(MIN_DECODED_BYTES, MAX_RAW_BYTES), Meta(description="Of one batch, after decompression.")
]
BatchRecords = Annotated[int, _between(1, MAX_RECORDS)]


class TopicPolicies(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    durability: Confirm = Durability.FSYNC
    replicas: Replicas = 1
    write_quorum: WriteQuorum = 1
    retention_ms: RetentionMs | None = None
    """Records older than this may go; None: age alone deletes nothing."""
    retention_bytes: RetentionBytes | None = None
    """The oldest records beyond it may go. None: size alone deletes nothing."""
    retention_ignores_subscriptions: IgnoresSubscriptions = False
    retention_waits_for_subscriptions_ms: WaitsMs | None = None
    """A subscription that has records before it and has not moved for this long holds no record back. None: it does."""
    on_owner_loss: OnOwnerLoss = OwnerLoss.WAIT
    owner_loss_after_ms: OwnerLossMs = 60_000
    """Long enough for a restart."""
    max_decoded_bytes: DecodedBytes = 64 << 20
    """Readers hold a whole batch in memory. Twice the largest body that can be stored without compression."""
    max_batch_records: BatchRecords = 1 << 20
    """An empty record takes no space in a compressed batch, but some hundred bytes in a reader."""
    message_ttl_ms: MessageTtlMs | None = None
    """Queues settle batches whose newest record is older, without delivering them. Streams and history do not mind."""

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= MAX_REPLICAS:
            raise InvalidArgument(f"{self.replicas} replicas were asked for; a segment has 1 to {MAX_REPLICAS}")
        if not 1 <= self.write_quorum <= self.replicas:
            raise InvalidArgument(
                f"a write quorum of {self.write_quorum} of {self.replicas} replicas cannot be: use 1 to {self.replicas}"
            )
        if self.replicas > 1 and self.durability is not Durability.REPLICATED:
            raise InvalidArgument(
                f"a topic with {self.replicas} replicas has the durability 'replicated', not "
                f"'{self.durability.value}'; leave the durability out, or ask for 1 replica"
            )
        if self.replicas == 1 and self.durability is Durability.REPLICATED:
            raise InvalidArgument(
                "the durability 'replicated' needs more than 1 replica; ask for replicas, for instance 3, or for "
                "the durability 'fsync'"
            )
        for name in ("retention_ms", "retention_bytes", "retention_waits_for_subscriptions_ms"):
            limit = getattr(self, name)
            if limit is not None and not 1 <= limit <= MAX_RETENTION:
                raise InvalidArgument(f"{name} is {limit}; it must be a positive number, or absent for no limit")
        if self.message_ttl_ms is not None and not 1 <= self.message_ttl_ms <= MAX_MESSAGE_TTL_MS:
            raise InvalidArgument(
                f"message_ttl_ms is {self.message_ttl_ms}; it must be 1 to {MAX_MESSAGE_TTL_MS}, or absent for no limit"
            )
        if not 0 <= self.owner_loss_after_ms <= MAX_OWNER_LOSS_MS:
            raise InvalidArgument(f"owner_loss_after_ms is {self.owner_loss_after_ms}; it must be 0 or more")
        for name, least, most in (
            ("max_decoded_bytes", MIN_DECODED_BYTES, MAX_RAW_BYTES),
            ("max_batch_records", 1, MAX_RECORDS),
        ):
            if not least <= getattr(self, name) <= most:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be {least} to {most}")

    @property
    def warnings(self) -> tuple[str, ...]:
        """What an operator should know before a broker is lost, in sentences; empty: replicas take over by themselves,
        or there are none, or the topic's policy goes on."""
        if self.replicas == 1 or self.on_owner_loss is OwnerLoss.CONTINUE or 1 < self.write_quorum < self.replicas:
            return ()
        if self.write_quorum == 1:
            waits = (
                "1 replica confirms a record, so a record may be on its owner's disk alone: a segment whose owner is "
                "lost waits for that broker, or for `braid topic recover --accept-loss`"
            )
        else:
            waits = (
                f"all {self.replicas} replicas must confirm a record: a segment of which one is lost waits for that "
                "broker. If it stays away, another broker takes its place (`--replace-after`)"
            )
        return (f"{waits}. With 3 replicas of which 2 confirm, the others take over",)


class PolicyChanges(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """The policies that a caller gives; the others stay as they are."""

    durability: Confirm | UnsetType = UNSET
    replicas: Replicas | UnsetType = UNSET
    write_quorum: WriteQuorum | UnsetType = UNSET
    retention_ms: RetentionMs | UnsetType | None = UNSET
    retention_bytes: RetentionBytes | UnsetType | None = UNSET
    retention_ignores_subscriptions: IgnoresSubscriptions | UnsetType = UNSET
    retention_waits_for_subscriptions_ms: WaitsMs | UnsetType | None = UNSET
    on_owner_loss: OnOwnerLoss | UnsetType = UNSET
    owner_loss_after_ms: OwnerLossMs | UnsetType = UNSET
    max_decoded_bytes: DecodedBytes | UnsetType = UNSET
    max_batch_records: BatchRecords | UnsetType = UNSET
    message_ttl_ms: MessageTtlMs | UnsetType | None = UNSET

    def apply(self, policies: TopicPolicies) -> TopicPolicies:
        """Return the changed policies. Raises `InvalidArgument` if they cannot be.

        A number of replicas brings the durability and the write quorum that belong to it, where these are not given."""
        given = {name: value for name, value in structs.asdict(self).items() if value is not UNSET}
        if isinstance(self.replicas, int):
            given.setdefault("write_quorum", majority(self.replicas))
            if self.replicas > 1:
                given.setdefault("durability", Durability.REPLICATED)
            elif policies.durability is Durability.REPLICATED:
                given.setdefault("durability", Durability.FSYNC)
        return structs.replace(policies, **given)


MAX_DAG_DEPTH: Final = 1_000
MAX_AUTO_SCALE_S: Final = 604_800
"""A week."""
MAX_RATE: Final = 1 << 50

# The names are those of Pulsar's policy. These limits are documentation, too; `AutoScalePolicy` checks them.
ScalingSegments = Annotated[int, _between(1, MAX_SEGMENTS)]
DagDepth = Annotated[int, _between(0, MAX_DAG_DEPTH), Meta(description="Merges in a segment's line of ancestors.")]
ScalingSeconds = Annotated[int, _between(0, MAX_AUTO_SCALE_S)]
SplitRate = Annotated[int, _between(1, MAX_RATE), Meta(description="Of one segment. Above it, the segment is split.")]
MergeRate = Annotated[
    int, _between(0, MAX_RATE), Meta(description="Of one segment. Below all of these it is cold; 0: never.")
]


class AutoScalePolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """When a topic's segments are split and merged by themselves. Rates are for one segment and second."""

    enabled: bool = False
    min_segments: ScalingSegments = 1
    max_segments: ScalingSegments = 64
    """That take writes. A topic that an operator has given more or fewer is left as it is."""
    max_dag_depth: DagDepth = 10
    """A segment with so many merges among its ancestors is not merged again: it bounds what a load that comes and goes
    can cost. Splits are not limited by it."""
    split_cooldown_seconds: ScalingSeconds = 60
    """After any split. Until then the children's rates show what the split has changed."""
    merge_cooldown_seconds: ScalingSeconds = 300
    """After any merge."""
    merge_window_seconds: ScalingSeconds = 300
    """For so long both segments were cold before they are merged."""
    split_msg_rate_in_threshold: SplitRate = 10_000
    """Records."""
    split_bytes_rate_in_threshold: SplitRate = 50_000_000
    split_bytes_rate_out_threshold: SplitRate = 250_000_000
    merge_msg_rate_in_threshold: MergeRate = 1_000
    merge_bytes_rate_in_threshold: MergeRate = 5_000_000
    merge_bytes_rate_out_threshold: MergeRate = 25_000_000

    def __post_init__(self) -> None:
        for name, least, most in _AUTO_SCALE_LIMITS:
            if not least <= getattr(self, name) <= most:
                raise InvalidArgument(f"{name} is {getattr(self, name)}; it must be {least:,} to {most:,}")
        if self.min_segments > self.max_segments:
            raise InvalidArgument(
                f"min_segments is {self.min_segments}, above max_segments, which is {self.max_segments}"
            )
        for rate in _AUTO_SCALE_RATES:
            merge, split = getattr(self, f"merge_{rate}_threshold"), getattr(self, f"split_{rate}_threshold")
            if 2 * merge > split:  # Two cold segments, merged, must not be hot.
                raise InvalidArgument(
                    f"merge_{rate}_threshold is {merge:,}, more than half of split_{rate}_threshold, which is "
                    f"{split:,}: merged segments would have to be split again"
                )


_AUTO_SCALE_RATES: Final = ("msg_rate_in", "bytes_rate_in", "bytes_rate_out")
_AUTO_SCALE_LIMITS: Final = (
    ("min_segments", 1, MAX_SEGMENTS),
    ("max_segments", 1, MAX_SEGMENTS),
    ("max_dag_depth", 0, MAX_DAG_DEPTH),
    ("split_cooldown_seconds", 0, MAX_AUTO_SCALE_S),
    ("merge_cooldown_seconds", 0, MAX_AUTO_SCALE_S),
    ("merge_window_seconds", 0, MAX_AUTO_SCALE_S),
    *((f"split_{rate}_threshold", 1, MAX_RATE) for rate in _AUTO_SCALE_RATES),
    *((f"merge_{rate}_threshold", 0, MAX_RATE) for rate in _AUTO_SCALE_RATES),
)


class AutoScaleOverride(Struct, frozen=True, kw_only=True, rename="camel", forbid_unknown_fields=True):
    """What a topic or a namespace says of its auto-scaling; it takes the rest from the level above it."""

    enabled: bool | UnsetType = UNSET
    min_segments: ScalingSegments | UnsetType = UNSET
    max_segments: ScalingSegments | UnsetType = UNSET
    max_dag_depth: DagDepth | UnsetType = UNSET
    split_cooldown_seconds: ScalingSeconds | UnsetType = UNSET
    merge_cooldown_seconds: ScalingSeconds | UnsetType = UNSET
    merge_window_seconds: ScalingSeconds | UnsetType = UNSET
    split_msg_rate_in_threshold: SplitRate | UnsetType = UNSET
    split_bytes_rate_in_threshold: SplitRate | UnsetType = UNSET
    split_bytes_rate_out_threshold: SplitRate | UnsetType = UNSET
    merge_msg_rate_in_threshold: MergeRate | UnsetType = UNSET
    merge_bytes_rate_in_threshold: MergeRate | UnsetType = UNSET
    merge_bytes_rate_out_threshold: MergeRate | UnsetType = UNSET


StoredOverride = dict[str, Any]
"""The JSON of an override, with whatever another build has in it."""


def auto_scale_policy(broker: AutoScalePolicy, *overrides: StoredOverride | None) -> AutoScalePolicy:
    """Return the policy that results; the last override wins: broker, namespace, topic. `InvalidArgument` if the
    combination cannot be."""
    given: dict[str, Any] = {}
    for override in overrides:
        try:
            known = {name: value for name, value in (override or {}).items() if name in _OVERRIDES}
            found = structs.asdict(msgspec.convert(known, AutoScaleOverride))
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"a policy of auto-scaling is wrong: {error}") from None
        given |= {name: value for name, value in found.items() if value is not UNSET}
    return structs.replace(broker, **given)


_OVERRIDES: Final = frozenset(AutoScaleOverride.__struct_encode_fields__)


class NamespacePolicies(StoredRecord, frozen=True, kw_only=True, rename="camel"):
    """The value of a namespace's key."""

    auto_scale: StoredOverride | None = None


class Topic(StoredRecord, frozen=True, kw_only=True, rename="camel", dict=True):
    """The value of the topic's key. The key has the topic's name, the value everything else."""

    id: int
    """Random, from 1 to 2^53: tells a topic from one of the same name that was deleted."""
    layout: Layout
    policies: TopicPolicies = TopicPolicies()
    created_at: int = 0
    """µs since 1970."""
    created_by: RequestId = NO_REQUEST
    """The call that created it: a repeat of that call recognises its own work."""
    was_memory: bool = False
    """Whether the durability was `memory` before: its logs may have confirmed what they had not synced."""
    deleting: bool = False
    """The topic no longer exists for clients; its keys and objects are being removed."""
    transition: Transition | None = None
    """The change of layout that is under way."""
    known_first_segments: int = 0
    """`first_segments`, once the layout has dropped one of them."""
    auto_scale: StoredOverride | None = None
    split_at: int = 0
    """µs since 1970: when the last change that left more segments than before was committed; 0: never."""
    merged_at: int = 0
    """µs since 1970: when the last change that left fewer segments was committed; 0: never."""

    @cached_property
    def segments(self) -> Mapping[SegmentId, SegmentInfo]:
        """All segments that this topic has, by id: those of the layout, and the children of a transition, which the
        layout does not show yet. Whatever places, opens, copies or removes segments, or gives them cursors, walks
        these; clients see the layout only."""
        if self.transition is None:
            return self.layout.segments
        return {**self.layout.segments, **self.transition.pending(self.layout)}

    def has_ended(self, segment_id: SegmentId) -> bool:
        """Tell whether the log of a segment has ended, or is being ended."""
        info, transition = self.layout.segments.get(segment_id), self.transition
        if info is not None and info.is_active and transition is not None:
            return transition.step is TransitionStep.SEALING and segment_id in transition.parents
        return info is not None and not info.is_active

    @property
    def first_segments(self) -> int:
        """How many segments the topic had when it was created. Their ids are the lowest: 0, 1, 2, … It is 0 if an
        earlier build has dropped all of them from the layout."""
        first = (info.segment_id for info in self.layout.segments.values() if not info.created_at_epoch)
        return self.known_first_segments or 1 + max(first, default=-1)

    @property
    def ever_memory(self) -> bool:
        return self.was_memory or self.policies.durability is Durability.MEMORY

    def changed(self, changes: PolicyChanges) -> Topic:
        """Return the topic with other policies."""
        return structs.replace(self, policies=changes.apply(self.policies), was_memory=self.ever_memory)

    def beginning(
        self, plan: LayoutPlan, *, transition_id: int, created_at: int, created_by: RequestId = NO_REQUEST
    ) -> Topic:
        """Return the topic with this change of its layout begun: its children have ids from now on."""
        ids = range(self.layout.next_segment_id, self.layout.next_segment_id + len(plan.ranges))
        children = tuple(ChildSegment(SegmentId(child), hashes) for child, hashes in zip(ids, plan.ranges))
        transition = Transition(
            id=transition_id, parents=plan.parents, children=children, created_at=created_at, created_by=created_by
        )
        return structs.replace(self, layout=self.layout.with_ids_taken(len(children)), transition=transition)

    def sealing(self) -> Topic:
        """Return the topic with its transition past the point where it could be aborted."""
        return structs.replace(self, transition=structs.replace(self._in_flight, step=TransitionStep.SEALING))

    def committed(self, at: int = 0) -> Topic:
        """Return the topic with the layout to which its transition leads. `at` is now, in µs since 1970."""
        parents, children = len(self._in_flight.parents), len(self._in_flight.children)
        return structs.replace(
            self,
            layout=self._in_flight.applied(self.layout),
            transition=None,
            split_at=at if children > parents else self.split_at,
            merged_at=at if children < parents else self.merged_at,
        )

    def pruned(self, segment_id: SegmentId) -> Topic:
        """Return the topic without a sealed segment, whose records are gone."""
        layout = self.layout.pruned(segment_id)
        return structs.replace(self, layout=layout, known_first_segments=self.first_segments)

    def aborted(self) -> Topic:
        if self._in_flight.step is not TransitionStep.CREATING:
            raise BrokenInvariant("I4: a transition whose parents are being sealed cannot be aborted")
        return structs.replace(self, transition=None)

    @property
    def _in_flight(self) -> Transition:
        if self.transition is None:
            raise BrokenInvariant("a topic without a transition cannot go on with one")
        return self.transition

    def to_json(self) -> bytes:
        return encode(self)

    @classmethod
    def from_json(cls, data: bytes) -> Topic:
        return decode(cls, data, "a topic's record")
