"""The arguments of every administrative call: one struct for each shape, read from JSON.

What is not in a call's struct is refused, so that a misspelt option is not taken for its default; an argument that is
null counts as absent.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from braid.broker.subscriptions import LATEST
from braid.model.errors import InvalidArgument
from braid.model.ids import Offset, SegmentId
from braid.model.names import TopicName
from braid.model.subscription import SubscriptionKind
from braid.model.topic import TopicPolicies

MAX_TIMESTAMP_MS: Final = 1 << 53
"""What every JSON parser reads exactly."""
MOVE_WAIT_S: Final = 60.0
MAX_WAIT_S: Final = 3_600.0

WaitSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_WAIT_S)]
"""How long a call waits for what it began; what is not done by then goes on."""


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


class CreateTopic(OnTopic, frozen=True):
    segments: int = 1
    policies: TopicPolicies = TopicPolicies()
    properties: dict[str, str] = {}


class DeleteTopic(OnTopic, frozen=True):
    force: bool = False


class OnSubscription(OnTopic, frozen=True):
    subscription: str


class CreateSubscription(OnSubscription, frozen=True):
    start: str = LATEST
    kind: SubscriptionKind = SubscriptionKind.STREAM


class DeleteSubscription(OnSubscription, frozen=True):
    force: bool = False


class SeekSubscription(OnSubscription, frozen=True):
    to: str | None = None
    timestamp: int | None = None
    """ms since 1970."""
    offsets: dict[str | int, int] | None = None
    """The next offset by segment id."""


class SkipSubscription(OnSubscription, frozen=True):
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
    offsets: dict[SegmentId, Offset] = {}
    for segment, offset in places.items():
        text = str(segment)
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise InvalidArgument(f"{segment!r} is no segment id; offsets are given by segment id, as {{'0': 17}}")
        if SegmentId(int(text)) in offsets:
            raise InvalidArgument(f"segment {int(text)} is named twice in offsets")
        offsets[SegmentId(int(text))] = Offset(offset)
    return offsets
