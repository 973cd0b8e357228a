"""The arguments of every administrative call: one struct for each shape, read from JSON.

What is not in a call's struct is refused, so that a misspelt option is not taken for its default; an argument that is
null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from braid.broker.groups.subscriptions import LATEST, SeekRequest
from braid.model.errors import InvalidArgument
from braid.model.ids import MAX_RANDOM_ID, NO_REQUEST, Offset, RequestId, SegmentId
from braid.model.names import TopicName
from braid.model.subscription import SubscriptionKind
from braid.model.topic import TopicPolicies

MAX_TIMESTAMP_MS: Final = 1 << 53
"""What every JSON parser reads exactly."""
MOVE_WAIT_S: Final = 60.0
MAX_WAIT_S: Final = 3_600.0

WaitSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_WAIT_S)]
"""How long a call waits for what it began; what is not done by then goes on."""


CallId = Annotated[RequestId, msgspec.Meta(ge=0, le=MAX_RANDOM_ID)]
"""Chosen by the caller, once for all tries of a call: what the call makes is stored with it. 0: it is not repeated."""


class Arguments(msgspec.Struct, frozen=True, kw_only=True):
    pass


class NoArguments(Arguments, frozen=True):
    pass


class OnNamespace(Arguments, frozen=True):
    tenant: str
    namespace: str


class OnTopic(Arguments, frozen=True):
    topic: str

    @property
    def name(self) -> TopicName:
        return TopicName.parse(self.topic)


class CreateTopic(OnTopic, frozen=True, rename="camel"):
    segments: int = 1
    policies: TopicPolicies = TopicPolicies()
    properties: dict[str, str] = {}
    request_id: CallId = NO_REQUEST


class GetTopic(OnTopic, frozen=True):
    deleting: bool = False
    """Whether one is wanted, too, that is being deleted."""


class DeleteTopic(OnTopic, frozen=True, rename="camel"):
    force: bool = False
    topic_id: int | None = None
    """The topic that is meant: one of the same name that was created since stays."""


class OnSubscription(OnTopic, frozen=True):
    subscription: str


class CreateSubscription(OnSubscription, frozen=True, rename="camel"):
    start: str = LATEST
    kind: SubscriptionKind = SubscriptionKind.STREAM
    request_id: CallId = NO_REQUEST


class DeleteSubscription(OnSubscription, frozen=True, rename="camel"):
    force: bool = False
    subscription_id: int | None = None
    """The subscription that is meant: one of the same name that was created since stays."""


class PlaceSubscription(OnSubscription, frozen=True, rename="camel"):
    request_id: CallId = NO_REQUEST
    subscription_id: int | None = None
    """The subscription that is meant: one of the same name that was created since stays where it is."""
    since: dict[str | int, int] | None = None
    """By segment id, the placements that the caller knew (`identify_subscription`). Where the subscription was placed
    since, it stays, and the call fails."""

    @property
    def request(self) -> SeekRequest:
        since = None if self.since is None else by_segment(self.since, "since")
        return SeekRequest(self.request_id, since, self.subscription_id)


class SeekSubscription(PlaceSubscription, frozen=True):
    to: str | None = None
    timestamp: int | None = None
    """ms since 1970."""
    offsets: dict[str | int, int] | None = None
    """The next offset by segment id."""


class SkipSubscription(PlaceSubscription, frozen=True):
    segment: int | None = None
    count: int | None = None


class SplitSegment(OnTopic, frozen=True):
    segment: int
    at: str | None = None


class MergeSegments(OnTopic, frozen=True):
    segments: list[int]


class RepartitionTopic(OnTopic, frozen=True):
    segments: int


class MoveTopic(OnTopic, frozen=True):
    segment: int | None = None
    """None: all of them."""
    to: str | None = None
    """A broker's id; None: whichever has least to do."""
    timeout: WaitSeconds = MOVE_WAIT_S


class RecoverTopic(MoveTopic, frozen=True, rename="camel"):
    accept_loss: bool = False
    """Whether what only the last owner had may be lost."""


class SetAutoScalePolicy(OnTopic, frozen=True):
    policy: dict[str, Any] = {}


class OnSegment(OnTopic, frozen=True):
    descriptor: str
    subscriptions: list[str] = []


class ReplaceChunks(OnTopic, frozen=True):
    segment: int
    old: list[str]
    """The objects of neighbouring chunks, oldest first."""
    new: str
    """The object that holds the same batches."""


class OnBroker(Arguments, frozen=True):
    broker: str


class Balance(Arguments, frozen=True, rename="camel"):
    dry_run: bool = False
    """Whether to tell only what would move."""


def read_arguments(call: str, kind: type[Arguments], arguments: dict[str, Any]) -> Arguments:
    known = kind.__struct_encode_fields__
    unknown = sorted(str(name) for name in arguments if name not in known)
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InvalidArgument(f"{call} has no argument {', '.join(map(repr, unknown))}; {takes}")
    given = {name: value for name, value in arguments.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"an argument of {call} is wrong: {error}") from None


def read_offsets(places: dict[str | int, int]) -> dict[SegmentId, Offset]:
    return {segment: Offset(offset) for segment, offset in by_segment(places, "offsets").items()}


def by_segment(numbers: dict[str | int, int], what: str) -> dict[SegmentId, int]:
    found: dict[SegmentId, int] = {}
    for segment, number in numbers.items():
        text = str(segment)
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise InvalidArgument(f"{segment!r} is no segment id; {what} are given by segment id, as {{'0': 17}}")
        if SegmentId(int(text)) in found:
            raise InvalidArgument(f"segment {int(text)} is named twice in {what}")
        found[SegmentId(int(text))] = number
    return found
