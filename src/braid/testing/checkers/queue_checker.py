"""The checker of one queue subscription: what its owners hand out, store and confirm, and what consumers are told.

It hears of each queue as its owner opens it, takes events and confirms them (`QueueWatch`), and of each message as a
consumer gets it and answers. It keeps sets of offsets of its own, by segment and placement:

- **taken**: an owner has noted that the message is settled;
- **confirmed**: enough disks have that, so a consumer may be told. From then on the message is never handed out again,
  every later owner knows it, and no disk forgets it (I9);
- **acked**: a program has said so. In the end every message was acked, or is a dead letter: nothing is lost.

A seek, or an accepted loss, gives the queue another placement. Then everything counts anew.

`JournalsOnDisk` reads the bytes that every loss of power leaves, so it needs to trust no broker: no journal tells of a
message that its replica does not hold (I8), and what is confirmed is on enough disks (I9).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from typing import Final, NamedTuple
from weakref import WeakKeyDictionary

from braid.model.queue.events import QueueEvents, QueueImage, QueueSnapshot, Returned, decode_events, decode_snapshot
from braid.model.queue.settled import SettledOffsets
from braid.model.queue.state import Handed
from braid.storage import queue_journal
from braid.testing.checkers.history import PromiseBroken
from braid.testing.sim.disk import SimulatedDisk
from braid.testing.sim.sectors import SectorFile


class Place(NamedTuple):
    """A message of a queue, as its consumer names it."""

    segment: int
    placement: int
    offset: int


class Placement:
    """What is known of one segment since its queue was set to a place."""

    def __init__(self, number: int, start: int, *, sought: bool) -> None:
        self.number: Final = number
        self.start: Final = start
        """Everything below counts as settled."""
        self.sought: Final = sought
        """Whether a call has set it, and not a loss."""
        self.kept: set[int] = set()
        """Settled above the start, before it was set there: a skip takes nothing back."""
        self.taken: set[int] = set()
        self.confirmed: set[int] = set()
        self.deliveries: dict[int, int] = {}
        """Of messages that came back: how many are confirmed."""
        self.counting: dict[int, int] = {}
        """By offset: how many deliveries may count, which are all but those that no program has seen. A message that a
        consumer keeps may count once more: an earlier owner, or its last channel, has had an answer already."""
        self.acked: dict[int, set[int]] = defaultdict(set)
        """By offset: the leases under which programs have acked it."""
        self.handed: dict[int, int] = {}
        """By offset: the highest lease that was given."""
        self.received: set[tuple[int, int]] = set()
        """Offsets and leases that programs have got."""

    def settles(self, snapshot: QueueSnapshot) -> set[int]:
        """Return the offsets from the start on that this image calls settled."""
        ranges = [(self.start, snapshot.base), *snapshot.settled]
        return {offset for first, last in ranges for offset in range(max(first, self.start), last)}


class _Pending(NamedTuple):
    number: int
    placement: Placement
    settled: frozenset[int]
    returned: tuple[Returned, ...]


class _Lease(NamedTuple):
    number: int
    consumer: int
    deadline_us: int


class QueueWatch:
    """Watches the queue of one segment on one owner."""

    def __init__(self, checker: QueueChecker, segment: int, owner: str, snapshot: QueueSnapshot, *, sought: bool):
        self.segment: Final = segment
        self.owner: Final = owner
        self._checker = checker
        self._pending: list[_Pending] = []
        self._leases: dict[int, _Lease] = {}
        self._answered: set[int] = set()
        """Messages that a consumer is returning now."""
        self._unseen: dict[int, _Lease] = {}
        """Of these, messages that no program has seen: if no delivery of one counts, no event tells of its return."""
        self.placement = checker.begin(segment, owner, snapshot, sought=sought)

    def begun(self, number: int, snapshot: QueueSnapshot) -> None:
        """Hear that the journal has begun with this image."""
        self._note(number, self.placement.settles(snapshot), snapshot.returned)

    def reset(self, snapshot: QueueSnapshot, *, sought: bool) -> None:
        """Hear that the queue was set to another place."""
        self._leases.clear()
        self.placement = self._checker.begin(self.segment, self.owner, snapshot, sought=sought)

    def on_events(self, number: int, events: QueueEvents | QueueSnapshot, now_us: int) -> None:
        if isinstance(events, QueueSnapshot):
            if events.placement == self.placement.number:
                self.begun(number, events)
            return
        settled = {offset for first, last in events.settled for offset in range(first, last)}
        for offset in settled:
            self._leases.pop(offset, None)
        for each in events.returned:
            lease = self._leases.pop(each.offset, None)
            if lease is not None and each.offset not in self._answered and now_us < lease.deadline_us:
                early_s = (lease.deadline_us - now_us) / 1e6
                raise PromiseBroken(
                    "leases", f"{self._about(each.offset)} was taken from its consumer {early_s:.3f} s early"
                )
            self._checker.time_outs += lease is not None and each.offset not in self._answered
        self._note(number, settled, events.returned)

    def _note(self, number: int, settled: Collection[int], returned: tuple[Returned, ...]) -> None:
        # An ack of a message below the start settles nothing.
        counting = frozenset(offset for offset in settled if offset >= self.placement.start)
        self.placement.taken.update(counting)
        self._pending.append(_Pending(number, self.placement, counting, returned))

    def on_confirmed(self, number: int) -> set[int]:
        """Hear that enough disks have everything up to this number. Returns the messages that are settled for good now
        and were not before."""
        news: set[int] = set()
        while self._pending and self._pending[0].number <= number:
            _, placement, settled, returned = self._pending.pop(0)
            if placement is self.placement:
                news |= settled - placement.confirmed
            placement.confirmed |= settled
            for each in returned:
                known = placement.deliveries.get(each.offset, 0)
                placement.deliveries[each.offset] = max(known, each.deliveries)
        return news

    def handed(self, runs: Iterable[Handed], consumer: int, deadline_us: int) -> None:
        """Hear that messages are being sent to a consumer."""
        placement = self.placement
        for run in runs:
            for offset in range(run.start, run.end):
                what = f"{self._about(offset)} is handed out under lease {run.lease}"
                if offset < placement.start or offset in placement.confirmed:
                    raise PromiseBroken("I9", f"{what}; its ack was confirmed")
                if offset in self._leases:
                    raise PromiseBroken("leases", f"{what}, and {self._leases[offset]} has not ended")
                if run.lease <= placement.handed.get(offset, 0):
                    higher = placement.handed[offset]
                    if higher >> 31 == run.lease >> 31:  # Otherwise a later owner has handed it out meanwhile.
                        raise PromiseBroken("leases", f"{what} after lease {higher}")
                if run.deliveries < placement.deliveries.get(offset, 0):
                    stored = placement.deliveries[offset]
                    raise PromiseBroken("counts", f"{what} as delivered {run.deliveries} times, {stored} are stored")
                if run.deliveries > (counting := placement.counting.get(offset, 0)):
                    raise PromiseBroken("counts", f"{what} as delivered {run.deliveries} times, and {counting} count")
                placement.counting[offset] = counting + 1
                placement.handed[offset] = max(run.lease, placement.handed.get(offset, 0))
                self._leases[offset] = _Lease(run.lease, consumer, deadline_us)

    def kept(self, holds: Iterable[tuple[int, int, int]], lost: Collection[int], consumer: int, until_us: int) -> None:
        """Hear that a consumer is back with messages, and that all but the `lost` ones stay with it, each under the
        highest lease that it names."""
        named = dict[int, int]()
        for start, end, number in holds:
            named.update((offset, max(number, named.get(offset, 0))) for offset in range(start, end))
        for offset in named.keys() - set(lost):
            known, number = self._leases.get(offset), named[offset]
            if known is not None and known.number > number:
                raise PromiseBroken("leases", f"{self._about(offset)} stays under lease {number}, beside {known}")
            self.placement.counting[offset] = self.placement.counting.get(offset, 0) + 1
            deadline_us = max(until_us, known.deadline_us) if known is not None else until_us
            self._leases[offset] = _Lease(number, consumer, deadline_us)

    def answering(self, nacks: Iterable[tuple[int, int, bool]], extensions: Iterable[tuple[int, int, int]]) -> None:
        """Hear what a consumer says before the queue does: offsets and leases of nacks, and whether a program has seen
        the message; offsets, leases and new deadlines of extensions. After a crash, a consumer with an older lease may
        have come back first: the later lease counts."""
        counting = [
            (offset, seen)
            for offset, lease, seen in nacks
            if offset in self._leases and self._leases[offset].number <= lease
        ]
        self._answered = {offset for offset, _ in counting}
        self._unseen = {offset: self._leases.pop(offset) for offset, seen in counting if not seen}
        for offset, lease, deadline_us in extensions:
            known = self._leases.get(offset)
            if known is not None and known.number == lease:
                self._leases[offset] = known._replace(deadline_us=deadline_us)

    def leaving(self, consumer: int) -> None:
        """Hear that a consumer leaves, before the queue does."""
        self._answered = {offset for offset, lease in self._leases.items() if lease.consumer == consumer}

    def refused(self) -> None:
        """Hear that nothing of the answer counts."""
        self._leases |= self._unseen
        self._unseen = {}

    def answered(self) -> None:
        for offset in self._unseen:
            self.placement.counting[offset] -= 1
        self._answered = set()
        self._unseen = {}

    def _about(self, offset: int) -> str:
        return f"message {offset} of segment {self.segment} (placement {self.placement.number}, owner {self.owner})"


class QueueChecker:
    def __init__(self) -> None:
        self._placements: dict[int, list[Placement]] = defaultdict(list)
        """By segment, in order."""
        self.stale = 0
        """Answers that were refused."""
        self.time_outs = 0

    def current(self, segment: int) -> Placement | None:
        known = self._placements.get(segment)
        return known[-1] if known else None

    def segments(self) -> list[int]:
        return list(self._placements)

    def find(self, place: Place) -> Placement | None:
        known = self._placements.get(place.segment, [])
        return next((each for each in reversed(known) if each.number == place.placement), None)

    # Owners.

    def begin(self, segment: int, owner: str, snapshot: QueueSnapshot, *, sought: bool) -> Placement:
        """Compare what an owner begins with, with what was confirmed (I9), and with what was ever acked."""
        last = self.current(segment)
        if last is None or snapshot.placement > last.number:
            before, last = last, Placement(snapshot.placement, snapshot.base, sought=sought or last is None)
            self._placements[segment].append(last)
            last.counting = {each.offset: each.deliveries for each in snapshot.returned}
            if before is not None:
                last.kept = {offset for first, stop in snapshot.settled for offset in range(first, stop)} & before.taken
                last.taken |= last.kept
                last.confirmed |= last.kept & before.confirmed
        what = f"{owner} begins with the queue of segment {segment} in placement {snapshot.placement}"
        if snapshot.placement < last.number:
            raise PromiseBroken("placements", f"{what}, after {last.number}")
        settled = last.settles(snapshot)
        if snapshot.base < last.start or not last.confirmed <= settled:
            raise PromiseBroken("I9", f"{what}, and has forgotten confirmed acks: {_some(last.confirmed - settled)}")
        if not settled <= last.taken:
            raise PromiseBroken("lost", f"{what}, and takes for settled what is not: {_some(settled - last.taken)}")
        counts: dict[int, int] = {each.offset: each.deliveries for each in snapshot.returned}
        for offset, stored in last.deliveries.items():
            if offset not in settled and counts.get(offset, 0) < stored:
                raise PromiseBroken("counts", f"{what}; message {offset} had {stored} deliveries: {counts.get(offset)}")
        return last

    def cursor_stored(
        self, segment: int, placement: int, offset: int, on_disk: Container[int] | SettledOffsets = ()
    ) -> None:
        """No cursor goes beyond a message that is not settled for good. What a broker confirms while it opens its
        segments is not heard of: then what is settled `on_disk` there counts, too."""
        found = self.find(Place(segment, placement, offset))
        if found is None:
            return  # It is being set to another place.
        not_heard_of = set(range(found.start, offset)) - found.confirmed
        if missing := [each for each in not_heard_of if each not in on_disk]:
            raise PromiseBroken(
                "I5", f"the cursor of segment {segment} is stored at {offset}; not settled for good: {_some(missing)}"
            )

    # Programs.

    def received(self, place: Place, lease: int, redeliveries: int, max_deliveries: int) -> None:
        """Hear that a program gets a message."""
        found = self.find(place)
        if found is None or found.handed.get(place.offset, 0) < lease:
            raise PromiseBroken("leases", f"a program got {place} under lease {lease}, which no owner has given")
        if (place.offset, lease) in found.received:
            raise PromiseBroken("leases", f"a program got {place} twice under lease {lease}")
        found.received.add((place.offset, lease))
        if 0 < max_deliveries <= redeliveries:
            raise PromiseBroken("counts", f"a program got {place} after {redeliveries} deliveries of {max_deliveries}")

    def acking(self, place: Place, lease: int) -> None:
        """Hear that a program acks a message."""
        if (found := self.find(place)) is not None:
            found.acked[place.offset].add(lease)

    def told(self, place: Place) -> None:
        """Hear that a program was told that its ack is stored."""
        found = self.find(place)
        if found is None or place.offset not in found.confirmed:
            raise PromiseBroken("I9", f"an ack of {place} was answered before enough disks had it")

    def refused(self, place: Place, lease: int, *, ack: bool, extends: bool = False) -> None:
        """Hear that a program was told that its answer is stale: another consumer must have got the message, or it is
        too late to extend the lease."""
        self.stale += 1
        found = self.find(place)
        assert found is not None
        current = self._placements[place.segment]
        if ack and found is current[-1]:  # Otherwise the ack may have counted before the queue was set elsewhere.
            found.acked[place.offset].discard(lease)
        if not extends and len(current) == 1 and found.handed[place.offset] <= lease:
            raise PromiseBroken("leases", f"an answer to {place} under lease {lease} was stale, and nobody else got it")

    # The end.

    def check_whole(self, segment: int, offsets: Iterable[int], dead: Mapping[tuple[int, int], int]) -> None:
        """Nothing is lost: programs have acked all these messages, or they are dead letters, or a call skipped them.
        `dead` has the number of dead letters, by segment and offset."""
        chain = self._placements.get(segment, [])
        lost = [offset for offset in offsets if not _is_settled(chain, offset) and not dead.get((segment, offset))]
        if lost:
            raise PromiseBroken("lost", f"messages of segment {segment} were neither acked nor buried: {_some(lost)}")

    def check_dead(self, dead: Mapping[tuple[int, int], int]) -> None:
        """Each dead letter is stored once, in each placement."""
        for (segment, offset), number in dead.items():
            if number > len(self._placements[segment]):
                raise PromiseBroken("I10", f"message {offset} of segment {segment} has {number} dead letters")


def _is_settled(chain: list[Placement], offset: int) -> bool:
    for placement in reversed(chain):
        if placement.acked.get(offset):
            return True
        if offset in placement.kept:
            continue
        if offset >= placement.start:
            return False
        if placement.sought:
            return True
    return True


class _Said(NamedTuple):
    epoch: int
    image: QueueImage | None


class EvidenceChecker:
    """Compares what a replica has told a vote with what it tells the owner that the vote deposes. When it has said for
    an epoch what it knows of a queue, it takes no event of a lower epoch any more (I3): an owner that counts such an
    event could confirm an ack of which the next owner knows nothing (I9)."""

    def __init__(self) -> None:
        self._said: dict[tuple[SimulatedDisk, str], _Said] = {}
        """By disk and segment: what the last answer to a vote was."""
        self._placements: dict[tuple[SimulatedDisk, str], int] = {}
        """That of the last checkpoint."""

    def placement(self, disk: SimulatedDisk, segment: str) -> int | None:
        """Return the placement that the queue has on this disk; None: no owner has begun it there."""
        return self._placements.get((disk, segment))

    def said(self, disk: SimulatedDisk, segment: str, epoch: int, snapshot: QueueSnapshot | None) -> None:
        """Hear what a replica knows of the queue, as it has told the owner of this epoch."""
        self._said[disk, segment] = _Said(epoch, QueueImage.of(snapshot) if snapshot is not None else None)

    def began(self, disk: SimulatedDisk, segment: str, epoch: int, snapshot: QueueSnapshot) -> None:
        """Hear that a replica has told the owner of this epoch that it holds a checkpoint."""
        self._placements[disk, segment] = snapshot.placement
        self.took(disk, segment, epoch, snapshot.placement, [(0, snapshot.base), *snapshot.settled])

    def took(
        self, disk: SimulatedDisk, segment: str, epoch: int, placement: int, settled: Iterable[tuple[int, int]]
    ) -> None:
        """Hear that a replica has told the owner of this epoch that it knows these ranges to be settled."""
        said = self._said.get((disk, segment))
        if said is None or said.epoch <= epoch or (said.image is not None and said.image.placement != placement):
            return
        offsets = {offset for start, end in settled for offset in range(start, end)}
        known = said.image.settled if said.image is not None else ()
        if unknown := [offset for offset in offsets if offset not in known]:
            raise PromiseBroken(
                "I3",
                f"a replica of {segment} has promised epoch {said.epoch}, and has taken events of epoch {epoch} after "
                f"that: {_some(unknown)}",
            )


def _some(offsets: Iterable[int]) -> list[int]:
    return sorted(offsets)[:10]


class _Walked:
    """How far a journal's file was read."""

    def __init__(self) -> None:
        self.position = 0
        self.image: QueueImage | None = None


class JournalsOnDisk:
    """Reads the journals of one subscription on simulated disks."""

    def __init__(self, folder: str, subscription: str) -> None:
        """`folder` is where brokers keep the files of their logs."""
        self._folder = folder
        self._subscription = subscription
        self._walked: WeakKeyDictionary[SectorFile, _Walked] = WeakKeyDictionary()
        self._held: dict[tuple[SimulatedDisk, str], tuple[int, set[int]]] = {}
        """By disk and segment: a placement, and the confirmed messages that the disk has had."""
        self._seen: dict[tuple[SimulatedDisk, str], tuple[SectorFile, int, int]] = {}

    def find(self, disk: SimulatedDisk, segment: str) -> QueueImage | None:
        """Return what the disk surely has; `segment` is the topic's path and the descriptor."""
        file = self._file(disk, segment)
        return self._read(file).image if file is not None else None

    def check_confirmed(
        self,
        segment: str,
        placement: Placement,
        offsets: Collection[int],
        disks: Mapping[str, SimulatedDisk],
        quorum: int,
        is_member: Callable[[str], bool],
    ) -> None:
        """I9: enough of these disks have what is settled for good now, and a vote would find them."""
        images = {broker: self.find(disk, segment) for broker, disk in disks.items()}
        for offset in offsets:
            holders = [
                broker
                for broker, image in images.items()
                if image is not None and image.placement == placement.number and offset in image.settled
            ]
            if sum(len(disks) == 1 or is_member(each) for each in holders) < quorum:
                raise PromiseBroken(
                    "I9",
                    f"the ack of message {offset} of {segment} is confirmed, and of {quorum} only {holders} have it",
                )

    def look(self, disk: SimulatedDisk, broker: str, segment: str, end: Callable[[], int], known: Placement) -> None:
        """I8: the journal tells of no message at or beyond the replica's `end`. I9: it forgets no confirmed ack."""
        file = self._file(disk, segment)
        if file is None:
            self._held.pop((disk, segment), None)
            return
        walked = self._read(file)
        seen = (file, walked.position, len(known.confirmed))
        if walked.image is None or self._seen.get((disk, segment)) == seen:
            return
        self._seen[disk, segment] = seen
        image = walked.image
        held_placement, held = self._held.get((disk, segment), (0, set()))
        now = {offset for offset in known.confirmed if offset in image.settled}
        if image.placement == known.number == held_placement and not held <= now:
            raise PromiseBroken("I9", f"the disk of {broker} has forgotten acks of {segment}: {_some(held - now)}")
        if image.placement == known.number:
            self._held[disk, segment] = (image.placement, now)
        told = image.snapshot().end
        if told > (reaches := end()):
            raise PromiseBroken(
                "I8", f"the journal of {segment} on {broker} tells of {told}; its log ends at {reaches}"
            )

    def _file(self, disk: SimulatedDisk, segment: str) -> SectorFile | None:
        prefix = queue_journal.folder_of(f"{self._folder}/{segment}", self._subscription) + "/"
        files = disk.files()
        names = [path for path in files if path.startswith(prefix) and path.endswith(queue_journal.SUFFIX)]
        return files[max(names)] if names else None

    def _read(self, file: SectorFile) -> _Walked:
        walked = self._walked.setdefault(file, _Walked())
        data = memoryview(bytes(file.durable[walked.position :]))
        read = 0
        for kind, payload, end in _frames(data):
            if walked.image is None and kind == queue_journal._SNAPSHOT:
                walked.image = QueueImage.of(decode_snapshot(payload))
            elif walked.image is not None:
                walked.image.apply(decode_events(payload))
            read = end
        walked.position += read
        return walked


def _frames(data: memoryview) -> Iterator[tuple[int, memoryview, int]]:
    """Yield the kind and payload of each whole frame, and where it ends."""
    position = 0
    while (frame := queue_journal._frame_at(data, position)) is not None:
        length, _, kind = frame
        start = position + queue_journal._FRAME.size
        position = start + length
        yield kind, data[start:position], position
