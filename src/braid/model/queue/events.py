"""What a queue stores: events of one segment and subscription, and the image that they add up to.

An event says that messages are settled, or that a message was returned. Neither is ever taken back: settled is settled,
and the number of a message's deliveries only rises. So events have no order that matters, and may be applied twice. The
union of several images of one queue is an image of it that knows everything that any of them knew (I9). This is why
copies of a queue need no common log: each broker keeps a journal of its own, and the next owner joins what it finds.

Only a seek takes something back. It gives the queue another *placement*. An image belongs to one placement, and images
of different placements are never joined: the later one counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from braid.model.errors import RecordUnreadable, cut
from braid.model.ids import Offset
from braid.model.queue.settled import SettledOffsets

MAX_REASON_CHARS: Final = 200
"""Of what a consumer says about a failure. Messages that wait keep it in memory."""


def shortened(reason: str) -> str:
    """Return what is kept of a reason: as UTF-8 writes it, which cannot write each text that a program may have."""
    return reason[:MAX_REASON_CHARS].encode(errors="replace").decode()


class Returned(NamedTuple):
    """An event: a message was delivered, and not settled."""

    offset: Offset
    deliveries: int
    not_before: int
    """µs since 1970."""
    reason: str = ""
    """Why its last delivery failed, if its consumer has said so."""

    @property
    def is_like_new(self) -> bool:
        """Whether no delivery counts, and no reason is known: then nothing is stored."""
        return not self.deliveries and not self.reason

    def between_clocks(self, now: int, there: int) -> Returned:
        """Return the event with its time as another clock shows it, which says `there` when this one says `now`. What
        is due now is due there, whatever that clock says."""
        return self._replace(not_before=there + self.not_before - now if self.not_before > now else 0)


class QueueEvents(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What happened to a queue, in any order."""

    settled: tuple[tuple[int, int], ...] = ()
    """Ranges of offsets."""
    returned: tuple[Returned, ...] = ()

    @property
    def end(self) -> int:
        """The offset after the last message that the events tell of: no replica may hold them without it (I8)."""
        return max([end for _, end in self.settled] + [each.offset + 1 for each in self.returned], default=0)


def all_events(groups: Iterable[QueueEvents]) -> QueueEvents:
    """Return the events of all groups as one."""
    settled, returned = list[tuple[int, int]](), dict[int, Returned]()
    for group in groups:
        settled += group.settled
        for each in group.returned:
            _keep_later(returned, each)
    return QueueEvents(_touching_joined(settled), tuple(returned.values()))


def _keep_later(returned: dict[int, Returned], event: Returned) -> None:
    known = returned.get(event.offset)
    if known is None or event > known:  # All fields count: the order of events must not (I9).
        returned[event.offset] = event


def _touching_joined(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Join ranges that touch: consumers ack one message after the other."""
    result: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return tuple(result)


class QueueSnapshot(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An image, as it is stored and sent."""

    placement: int
    base: int
    settled: tuple[tuple[int, int], ...] = ()
    """Ranges above the base."""
    returned: tuple[Returned, ...] = ()
    epoch: int = 0
    """Of the owner that has handed the segment over with this state: it holds all that was confirmed until then."""
    leased: tuple[tuple[int, int], ...] | None = None
    """Ranges of messages that consumers had when the segment was handed over; None: that is not known."""

    @property
    def end(self) -> int:
        return max(self.base, QueueEvents(self.settled, self.returned).end)

    @property
    def facts(self) -> tuple[object, ...]:
        """What a journal and its owner agree in. Of several times and reasons they may keep different ones."""
        return self.base, self.settled, {each.offset: each.deliveries for each in self.returned}


class QueueImage:
    """What is known of one queue under one placement."""

    def __init__(self, placement: int, base: int) -> None:
        self.placement: Final = placement
        self.settled: Final = SettledOffsets(base)
        self.returned: Final[dict[int, Returned]] = {}

    @classmethod
    def of(cls, snapshot: QueueSnapshot) -> QueueImage:
        image = cls(snapshot.placement, snapshot.base)
        image.apply(QueueEvents(snapshot.settled, snapshot.returned))
        return image

    def apply(self, events: QueueEvents) -> None:
        for start, end in events.settled:
            self.settled.add(start, end)
        for each in events.returned:
            _keep_later(self.returned, each)

    def join(self, other: QueueImage) -> None:
        """Take over what another image of the same placement knows."""
        assert other.placement == self.placement, "images of different placements are not joined"
        self.settled.add(0, other.settled.base)
        self.apply(QueueEvents(tuple(other.settled), tuple(other.returned.values())))

    def snapshot(self) -> QueueSnapshot:
        returned = tuple(each for each in self.returned.values() if each.offset not in self.settled)
        return QueueSnapshot(self.placement, self.settled.base, tuple(self.settled), returned)


def joined(placement: int, base: int, images: Iterable[QueueImage | None]) -> QueueImage:
    """Return what all these images know, of those that have this placement. The subscription's cursor is at `base`."""
    result = QueueImage(placement, base)
    for image in images:
        if image is not None and image.placement == placement:
            result.join(image)
    return result


_events: Final = msgspec.msgpack.Decoder(QueueEvents)
_snapshot: Final = msgspec.msgpack.Decoder(QueueSnapshot)
_encoder: Final = msgspec.msgpack.Encoder()


def encode(value: QueueEvents | QueueSnapshot) -> bytes:
    return _encoder.encode(value)


MAX_STATE_BYTES: Final = 700_000
"""Of a state in the metadata store, which takes values of a megabyte, as base64."""
COARSE_US: Final = (1_000_000, 60_000_000, 3_600_000_000, 86_400_000_000)
"""Steps to which times are rounded in a state that is large: a second, a minute, an hour, a day."""


def pack_state(snapshot: QueueSnapshot, epoch: int) -> bytes:
    """Return the state of a queue for the owner after that of `epoch`. If it is too large, it says less: nobody could
    take the segment over otherwise. What is settled is always there; a limit bounds it (`QueueLimits`)."""
    packed = b""
    for state in _shorter_and_shorter(replace(snapshot, epoch=epoch)):
        packed = zlib.compress(encode(state), 1)
        if len(packed) <= MAX_STATE_BYTES:
            break
    return packed


def _shorter_and_shorter(state: QueueSnapshot) -> Iterator[QueueSnapshot]:
    """Yield a state, then without what is leased, without reasons, with later times, and at last with fewer and fewer
    of the messages that came back: those that were delivered most often stay."""
    yield state
    state = replace(state, leased=None)
    yield state
    later = exact = [each._replace(reason="") for each in state.returned]
    yield replace(state, returned=tuple(exact))
    for step_us in COARSE_US:
        later = [each._replace(not_before=-(-each.not_before // step_us) * step_us) for each in exact]
        yield replace(state, returned=tuple(later))
    later.sort(key=lambda each: each.deliveries, reverse=True)
    while later:
        del later[len(later) // 2 :]
        yield replace(state, returned=tuple(later))


def unpack_state(data: bytes) -> QueueSnapshot:
    try:
        return decode_snapshot(zlib.decompress(data))
    except zlib.error as error:
        raise RecordUnreadable(f"the state of a queue cannot be read: {error}") from error


def decode_events(data: bytes | memoryview) -> QueueEvents:
    try:
        return _events.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordUnreadable(f"events of a queue cannot be read: {cut(str(error))}") from error


def decode_snapshot(data: bytes | memoryview) -> QueueSnapshot:
    try:
        return _snapshot.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RecordUnreadable(f"the state of a queue cannot be read: {cut(str(error))}") from error
