"""What travels in frames: one MessagePack array for each kind of request, reply and push.

A request's sender chooses the request id; the reply has the same kind and id and the flag REPLY. A reply with the flag
ERROR has an `ErrorBody` instead. Pushes have request id 0 and come from the broker only. New fields are added at the
end with a default: old peers skip them, new peers fill them in.

    client → broker                                     broker → client
    HELLO      Hello                                    HelloReply
    PING       (empty)                                  (empty)
    TOPOLOGY   TopologyRequest                          Topology;        later pushes: Topology
    TOPOLOGY_ACK  TopologyAck, no reply
    PUBLISH    Route, payload: one batch                Published
    STORED     StoredRequest                            Stored
    JOIN       Join                                     Joined;          later pushes: ASSIGN, EXPEL
    RELEASE    Release                                  (empty)
    LEAVE      Leave                                    (empty)
    PROGRESS   Progress, no reply
    OPEN       Open                                     Opened;          later pushes: DELIVER, NEED, CLOSED
    CREDIT     Credit, no reply                         DELIVER: Delivery, payload: batches · NEED: Need
    ACK        Ack                                      (empty), if a reply was asked for
    CLOSE      Close                                    (empty)          CLOSED: Closed
    POSITIONS  PositionsRequest                         Positions
    QUEUE_OPEN    QueueOpen                             QueueOpened;     later pushes: QUEUE_DELIVER, CLOSED
    QUEUE_ANSWER  QueueAnswer                           QueueAnswered    QUEUE_DELIVER: QueueDelivery, may have a batch
    ADMIN      AdminRequest                             AdminReply
    PEER       PeerRequest, may have a payload          PeerReply, may have a payload;   between brokers only
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, TypeVar

import msgspec

from braid.model.errors import BraidError, ProtocolError, cut

MAGIC: Final = "braid"
VERSION: Final = 1
"""The protocol version of this build, and the only one that it speaks."""


MAX_MESSAGE_CHARS: Final = 8_192
"""Of an error. Errors are sentences; a longer one would repeat its input, and might not fit into a frame."""


class Kind(IntEnum):
    HELLO = 1
    PING = 2
    TOPOLOGY = 3
    TOPOLOGY_ACK = 4
    PUBLISH = 16
    STORED = 17
    JOIN = 32
    ASSIGN = 33
    RELEASE = 34
    LEAVE = 35
    EXPEL = 36
    PROGRESS = 37
    OPEN = 40
    DELIVER = 41
    CREDIT = 42
    NEED = 43
    ACK = 44
    CLOSE = 45
    CLOSED = 46
    POSITIONS = 48
    QUEUE_OPEN = 56
    QUEUE_DELIVER = 57
    QUEUE_ANSWER = 58
    ADMIN = 64
    PEER = 80


class _Body(msgspec.Struct, frozen=True, array_like=True, gc=False):
    pass


class ErrorBody(_Body, frozen=True):
    code: str
    message: str
    retriable: bool
    details: dict[str, Any] = {}
    """Values of the error's own fields, by name: `earliest` and `end` of `offset-out-of-range`."""


class Hello(_Body, frozen=True):
    """The first frame of every connection."""

    magic: str
    lowest_version: int
    highest_version: int
    client: str
    """For logs: a name and a version."""
    token: str = ""
    capabilities: tuple[str, ...] = ()


class HelloReply(_Body, frozen=True):
    version: int
    broker_id: str
    max_frame_bytes: int
    heartbeat_ms: int
    """The client sends something, a PING if nothing else, at least this often; three silent periods end the
    connection. The broker answers each PING."""
    capabilities: tuple[str, ...] = ()


class TopologyRequest(_Body, frozen=True):
    """Asks for the routing of these topics, and for pushes of its changes on this connection from then on."""

    topics: tuple[str, ...]
    """Paths: tenant/namespace/name."""
    acked_generation: int = 0
    """The generation that the client's routing reflects now."""


HERE: Final = "."
"""As an owner's address: the address by which the client has reached the answering broker."""


class SegmentRoute(_Body, frozen=True):
    id: int
    first_hash: int
    last_hash: int
    active: bool
    parents: tuple[int, ...]
    children: tuple[int, ...]
    owner: str
    """`host:port`, or HERE; empty while no broker serves the segment."""
    epoch: int = 0


class TopicRoute(_Body, frozen=True):
    topic: str
    topic_id: int
    """0: the topic does not exist. A topic that is deleted and created again has another id."""
    layout_epoch: int
    segments: tuple[SegmentRoute, ...]
    controller: str = ""
    """Where consumers of ordered subscriptions join: `host:port`, or HERE; empty while it may be any broker."""
    first_segments: int = 0
    """How many segments the topic had when it was created; their ids are the lowest. 0: the broker does not say."""


class Topology(_Body, frozen=True):
    generation: int
    topics: tuple[TopicRoute, ...]


class TopologyAck(_Body, frozen=True):
    """The client's routing reflects what this broker told it up to this generation."""

    generation: int


class Route(_Body, frozen=True):
    """Where a batch belongs. The broker remembers the last few it saw on a connection by their bytes."""

    topic: str
    topic_id: int
    segment: int
    layout_epoch: int


FORGOTTEN: Final = -1
PAST_ERA: Final = -2


class Published(_Body, frozen=True):
    base_offset: int
    """FORGOTTEN: stored before, at an offset that is no longer remembered. PAST_ERA: the same, and its producer, a
    derived one, has begun a later era since."""
    duplicate: bool = False


class StoredRequest(_Body, frozen=True):
    """Asks how far the segment's log has these producers. A log knows what the producers have stored in the logs that
    it continues (after a split or a merge), so a child answers for its parents."""

    topic: str
    topic_id: int
    segment: int
    producers: tuple[int, ...]


class Stored(_Body, frozen=True):
    next_sequences: tuple[int, ...]
    """One for each producer: everything below it is stored. NOT_KNOWN and CANNOT_TELL: see model/batch/identity.py."""
    ended: bool
    """Whether the log has ended for ever: the numbers are final."""
    eras: tuple[int, ...] = ()
    """One for each producer: the era of its last batch, also if that was in another log; NOT_KNOWN if there is none.
    Drawn ids have no eras: theirs mean nothing."""


CHECKPOINT: Final = "checkpoint"
"""The kind of consumers that keep their positions themselves (`Join`)."""
ENDED: Final = -1
"""As the offset of a `GroupPosition`."""


class GroupPosition(_Body, frozen=True):
    """How far a group of checkpoint consumers has come in one segment, by the checkpoints that they took."""

    segment: int
    offset: int
    """The next offset; ENDED: the segment is sealed, and was read to its end."""
    epoch: int = 0
    """Of the record before `offset`; 0: not known."""


class Join(_Body, frozen=True):
    """Become a consumer of an ordered subscription, which is created if it does not exist, or of a group of checkpoint
    consumers, `group:NAME`."""

    topic: str
    subscription: str
    consumer: str
    """Unique in the subscription. A second consumer of the same name takes the first one's place."""
    start: str = "latest"
    """Where a new subscription begins: `earliest` or `latest`."""
    kind: str = "stream"
    """`stream`, or `checkpoint` for a group."""
    create: bool = True
    positions: tuple[GroupPosition, ...] = ()
    """Of a group: all that the consumer knows."""
    topic_id: int = 0
    """Of the topic that the consumer joined before, or that `positions` are of: a later topic of the same name is
    another one. 0: any."""


class Joined(_Body, frozen=True):
    session: int
    """Names the consumer on this connection."""
    topic_id: int
    created: bool


class Assignment(_Body, frozen=True):
    """All segments that a consumer has now. Those that are missing since the last one, it gives back by RELEASE."""

    session: int
    number: int
    """Counts up; an older one that arrives later does not count."""
    segments: tuple[int, ...]
    term: int = 0
    """Counts the controllers of the topic."""
    grants: tuple[int, ...] = ()
    """One for each of `segments`: counts how often the segment was given to a consumer in this term."""
    positions: tuple[GroupPosition, ...] = ()
    """Of a group: where to begin with those of `segments` that another consumer had before."""


class Expelled(_Body, frozen=True):
    """The broker ended the session: another consumer took its name, or its subscription was deleted."""

    session: int
    code: str
    message: str
    retriable: bool


class Release(_Body, frozen=True):
    session: int
    segment: int


class Leave(_Body, frozen=True):
    session: int


class Progress(_Body, frozen=True):
    """The positions of a checkpoint that a consumer of a group took, as far as they are new."""

    session: int
    positions: tuple[GroupPosition, ...]


class Open(_Body, frozen=True):
    """Open a channel that delivers one segment's batches: for a subscription from its cursor on, otherwise from
    `offset`. Of a subscription's channels on a segment, only the one of the latest term and grant is open."""

    channel: int
    """Chosen by the client, unique on the connection, never used again there."""
    topic: str
    topic_id: int
    segment: int
    credit: int
    """Bytes of batches that may be delivered before more credit is given."""
    session: int = 0
    """Not used: 0."""
    offset: int = 0
    """Without a subscription: where to begin. -1: the earliest offset that is kept."""
    subscription: str = ""
    term: int = 0
    """As the consumer's assignment says."""
    grant: int = 0
    """The segment's, as the consumer's assignment says."""
    after_epoch: int = 0
    """Without a subscription: the epoch of the record before `offset`, as the client has read it. The owner refuses a
    position that is not on its log (`position-diverged`). 0: not known, and not checked."""


class Opened(_Body, frozen=True):
    offset: int
    """The first offset that the consumer has not seen. The first batch may begin before it."""
    end: int
    """Where the segment ended at this moment, as consumers see it."""
    placement: int = 0
    """With a session: changes when anything but an ack set the cursor to this offset, or when records that consumers
    have seen may be lost. While it is the same, a consumer may go on after the records that it has."""


class Delivery(_Body, frozen=True):
    """The payload is one or several whole batches, one after the other."""

    channel: int
    end: int
    """Where the segment ends now, as consumers see it: the lag without asking."""


class Credit(_Body, frozen=True):
    channel: int
    bytes: int


class Need(_Body, frozen=True):
    """The next batch alone is larger than all credit that the channel has."""

    channel: int
    bytes: int


class Ack(_Body, frozen=True):
    """Everything below `offset` is consumed."""

    channel: int
    offset: int
    durable: bool = False
    """Whether the reply waits until the cursor is stored."""


class Close(_Body, frozen=True):
    channel: int


class Closed(_Body, frozen=True):
    """The broker ended a channel. `end-of-segment` is no error: the segment is sealed and all of it was delivered. A
    session's channel takes acks after that, until it is closed for another reason."""

    channel: int
    code: str
    message: str
    retriable: bool


END_OF_SEGMENT: Final = "end-of-segment"
RESET: Final = "reset"
"""A channel was closed because its subscription was set to another place: open it again."""


class PositionsRequest(_Body, frozen=True):
    topic: str
    timestamp: int | None = None
    """Also ask for the offsets at this time, µs since 1970."""


class SegmentPositions(_Body, frozen=True):
    segment: int
    earliest: int
    end: int
    """The first offset that consumers may not see yet."""
    sealed: bool
    at_time: int = -1
    epochs: tuple[tuple[int, int], ...] = ()
    """Epochs that have written here, each with its first offset, in order. The list may begin late; empty: not
    known."""


class Positions(_Body, frozen=True):
    topic_id: int
    segments: tuple[SegmentPositions, ...]


class QueueOpen(_Body, frozen=True):
    """Open a channel that hands out messages of one segment to one of the consumers of a queue subscription. CLOSE and
    CLOSED end it; a consumer that sends CLOSE gives its messages back."""

    channel: int
    """Chosen by the client, unique on the connection, never used again there."""
    topic: str
    topic_id: int
    segment: int
    subscription: str
    consumer: str
    """A name for operators."""
    prefetch: int
    """How many messages may be handed out and not answered."""
    placement: int = 0
    """That of the last channel; 0: this is the first one."""
    holds: tuple[tuple[int, int, int], ...] = ()
    """The messages that the consumer still has from earlier channels: each is the first offset, the offset after the
    last one, and the lease. They stay with it, unless others have got them since."""


class QueueOpened(_Body, frozen=True):
    placement: int
    """Changes when the subscription is set to another place: answers to messages of another placement do not count."""
    ack_timeout_ms: int
    dead_letter_topic: str = ""
    """Where messages go that were delivered too often. The consumer brings them there."""
    lost: tuple[int, ...] = ()
    """Which messages of `holds` are settled, or others have got since."""


class QueueRun(_Body, frozen=True):
    """Messages of one batch, one after the other."""

    start: int
    end: int
    lease: int
    """Answers name it."""
    deliveries: int
    """How often the messages were delivered before."""
    dead: bool = False
    """Whether they were delivered as often as is allowed: they belong into the dead-letter topic."""
    reason: str = ""
    """What the last consumer said about its failure."""


class QueueDelivery(_Body, frozen=True):
    """The payload is the batch of these messages. It is missing if the last delivery on the channel was of the same
    batch."""

    channel: int
    base_offset: int
    """Where the batch begins."""
    end: int
    """Where the segment ends now, as consumers see it."""
    runs: tuple[QueueRun, ...]


class QueueAnswer(_Body, frozen=True):
    """What a consumer says about messages that it got. The reply comes when this is stored."""

    channel: int
    acks: tuple[tuple[int, int, int], ...] = ()
    """Each is the first offset, the offset after the last one, and the lease."""
    nacks: tuple[tuple[int, int, int, bool, str], ...] = ()
    """Each is an offset, the lease, the delay in µs, whether a program has seen the message, and why it failed."""
    extensions: tuple[tuple[int, int, int], ...] = ()
    """Each is an offset, the lease, and for how many µs from now the message is leased."""
    leaving: bool = False
    """Whether the consumer is about to close the channel: it is sent no more messages."""
    prefetch: int = 0
    """How many messages may be handed out and not answered from now on; 0: as many as before."""


class QueueAnswered(_Body, frozen=True):
    stale: tuple[int, ...] = ()
    """The messages that another consumer has now, or had: what was said about these does not count."""


class AdminRequest(_Body, frozen=True):
    """One of the calls that the REST interface also offers, by its name there in snake case."""

    call: str
    arguments: dict[str, Any]


class AdminReply(_Body, frozen=True):
    result: Any


class PeerRequest(_Body, frozen=True):
    """A question of one broker to another. Brokers know each other by the cluster's secret; clients are refused."""

    call: str
    arguments: dict[str, Any]


class PeerReply(_Body, frozen=True):
    result: Any


B = TypeVar("B", bound=_Body)

_encoder: Final = msgspec.msgpack.Encoder()
_decoders: Final[dict[type[_Body], msgspec.msgpack.Decoder[Any]]] = {}

encode = _encoder.encode


def decode(kind: type[B], body: bytes | memoryview) -> B:
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        decoded: B = decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"a frame's body is no {kind.__name__}: {cut(str(error))}") from error
    return decoded


def error_body(error: BraidError) -> ErrorBody:
    """Encode an error for a peer. `details` are the error's own public fields, if they can travel."""
    return ErrorBody(error.code, cut(str(error), MAX_MESSAGE_CHARS), error.retriable, _own_fields(vars(error)))


def error_from(body: ErrorBody) -> BraidError:
    """Decode an error of a peer. A code that this build does not know becomes a plain `BraidError`."""
    kind = BraidError.by_code.get(body.code, BraidError)
    error = kind.__new__(kind, body.message)
    error.args = (body.message,)
    vars(error).update(_own_fields(body.details))
    if kind is BraidError:
        vars(error).update(code=body.code, retriable=body.retriable)
    return error


def _own_fields(fields: dict[str, Any]) -> dict[str, int | str]:
    """Return the details that are an error's own fields; a peer must not set the fields that every error has."""
    return {
        name: value
        for name, value in fields.items()
        if isinstance(value, int | str) and not name.startswith("_") and not hasattr(BraidError, name)
    }
