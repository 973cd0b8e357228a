"""The calls that give segments to other brokers: `move_topic`, and `recover_topic` for those whose owner is gone or
cannot open them.

Any broker takes them: all that they do is to change ownership records, and to wait until the segments are served where
they were to go. Asking again for the same is fine: who asks second waits for the same move. When the time is over
before the segments have arrived, they are still on their way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from braid.broker.admin.call import OnTopic, WaitSeconds, on_topic
from braid.broker.admin.results.moves import MovedSegment, MovedTopic, RecoveredSegment, RecoveredTopic
from braid.broker.admin.route import NO_CONTENT, TOPIC, BrokerName, HttpRoute, SegmentNumber
from braid.broker.admin.services import CallServices
from braid.broker.auth import Action, Principal
from braid.broker.peers.calls import COPY_STATE
from braid.cluster.members import still_gone
from braid.cluster.ownership.leader_step import anew, given_up, giving_up, is_lost, vote_text
from braid.cluster.ownership.move_request import (
    MoveRequest,
    check_target,
    move_progress,
    move_result,
    plan_move,
    select_segments,
)
from braid.cluster.snapshot import Placed, Snapshot
from braid.metadata import paths
from braid.metadata.store import Condition
from braid.model.errors import (
    BraidError,
    InvalidArgument,
    MetadataUncertain,
    MoveRefused,
    TimedOut,
)
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.stored_record import decode
from braid.ports.tasks import all_of
from braid.storage.history.catalog import Frontier

MOVE_WAIT_S: Final = 60.0
VOTE_WAIT_S: Final = 5.0
"""A vote that can succeed takes less."""
STATE_S: Final = 3.0
"""How long a replica may take to say how far its copy reaches."""
MAX_TRIES: Final = 10
"""How often a record is looked at again that somebody else changed first."""
ASKED: Final = "asked"
"""The id of moves that somebody asked for by a call."""

_log: Final = logging.getLogger(__name__)


class _PlaceTopic(OnTopic, frozen=True):
    needs = on_topic(Action.ADMIN)
    segment: Annotated[SegmentNumber, Meta(description="All segments if absent.")] | None = None
    to: Annotated[BrokerName, Meta(description="A broker; the least loaded if absent.")] | None = None
    timeout: WaitSeconds = MOVE_WAIT_S


class MoveTopic(_PlaceTopic, frozen=True):
    http = HttpRoute(
        "POST", TOPIC + "/move", tag="layout", query=("segment", "to"), status=NO_CONTENT, errors=(404, 409, 412, 501)
    )

    async def run(self, services: CallServices, principal: Principal) -> MovedTopic:
        name = self.name
        services.topics.get(name.path)
        began = _now()
        requests = await _begin(services, name, self.segment, self.to)
        _log.info("%s moves %d segments of topic %s", principal.name, sum(each.begins for each in requests), name)
        return MovedTopic(str(name), await _wait(services, requests, began, self.timeout))


class RecoverTopic(_PlaceTopic, frozen=True, rename="camel"):
    """Segments whose broker is gone, or cannot open them, continue without what only that broker's disk had."""

    http = HttpRoute(
        "POST", TOPIC + "/recover", tag="layout", query=("segment", "to", "acceptLoss"), errors=(404, 409, 412)
    )
    accept_loss: Annotated[
        bool,
        Meta(description="Whether what only the last owner's disk had may be lost. If not, the answer says what."),
    ] = False

    async def run(self, services: CallServices, principal: Principal) -> RecoveredTopic:
        name = self.name
        services.topics.get(name.path)
        began = _now()
        await _voted(services, name)
        snapshot = services.leader.snapshot()
        lost = _lost(snapshot, name, self.segment)
        losses = {each.name: await _loss(services, snapshot, each) for each in lost}
        if not self.accept_loss:
            raise InvalidArgument(
                f"topic {name} can be recovered only if the loss is accepted (acceptLoss, --accept-loss); nothing was "
                "changed. If it were: " + "; ".join(f"segment {each.id}: {loss}" for each, loss in losses.items())
            )
        requests = await _give_away(services, snapshot, lost, self.to)
        _log.warning(
            "%s recovers topic %s and accepts: %s",
            principal.name,
            name,
            "; ".join(f"segment {each.id}: {loss}" for each, loss in losses.items()),
        )
        arrived = await _wait(services, requests, began, self.timeout)
        recovered = [
            RecoveredSegment(**msgspec.structs.asdict(found), loss=losses[each.segment])
            for each, found in zip(requests, arrived, strict=True)
        ]
        return RecoveredTopic(str(name), recovered)


async def _begin(services: CallServices, name: TopicName, segment: int | None, to: str | None) -> list[MoveRequest]:
    """Put the request into each record. Nothing is changed if one of them cannot move."""
    for _ in range(MAX_TRIES):
        snapshot = services.leader.snapshot()
        if to is not None:
            check_target(snapshot, to)
        tally = snapshot.tally()
        requests: list[MoveRequest] = []
        for each in select_segments(snapshot, name.path, segment):
            made = plan_move(snapshot, each, to, tally, services.leader.patience())
            if made.begins and made.instead is None:
                tally.remove(each.ref, made.source)
                tally.add(each.ref, made.target)
            requests.append(made)
        written = await all_of(_write(services, each) for each in requests if each.begins)
        if all(written):
            return requests
        # What was written is joined in the next try; its target must not be chosen again.
    raise MetadataUncertain(f"the owners of topic {name} change too fast to be moved; try again")


async def _write(services: CallServices, made: MoveRequest) -> bool:
    return await _swap(services, made, made.begun(ASKED))


async def _swap(services: CallServices, made: MoveRequest, record: Ownership, *conditions: Condition) -> bool:
    unchanged = services.topics.unchanged(made.segment.topic.path)
    revision = await services.owners.swap(made.segment, made.revision, record, conditions=[unchanged, *conditions])
    if revision is not None:
        await services.owners.view.caught_up(revision)
        return True
    # Somebody was faster. What he wrote is in the store, and not yet here.
    found = await services.store.get(paths.ownership(made.segment.topic.path, made.segment.descriptor))
    if found is not None:
        await services.owners.view.caught_up(found.revision)
    return False


async def _voted(services: CallServices, name: TopicName) -> None:
    """Return when no segment's replicas vote, or when that takes longer than a vote that succeeds."""

    def none_votes() -> bool:
        return all(
            record.state is not OwnershipState.RECOVERING for record in services.owners.of_topic(name.path).values()
        )

    await services.owners.view.until(none_votes, VOTE_WAIT_S)


async def _loss(services: CallServices, snapshot: Snapshot, each: Placed) -> str:
    """What is lost, as far as anybody here can know."""
    entry = await services.store.get(paths.current_chunk(each.path, each.name.descriptor))
    reaches = decode(Frontier, entry.value).next_offset if entry is not None else 0
    assert each.known is not None
    record = each.known.value
    owner, holders = record.owner, record.holders
    if record.replicas and not record.clean:
        held = await _held(services, snapshot, each, record)
        return f"{vote_text(snapshot, record)}; {_fewer_votes(snapshot, record, reaches, held)}"
    if holders:
        return f"all of its history lies on {' and '.join(holders)} and is lost; it goes on at offset {reaches}"
    return f"chunks reach offset {reaches}; what {owner} confirmed from there on is lost"


async def _held(services: CallServices, snapshot: Snapshot, each: Placed, record: Ownership) -> dict[str, int]:
    """Ask the replicas that are there how far their copies reach."""
    topic_id = services.topics.get(each.path).id
    about = {"segment": str(each.name), "topic_id": topic_id, "epoch": record.epoch}

    async def ask(broker: str) -> tuple[str, int] | None:
        try:
            return broker, (await services.ask(broker, COPY_STATE, about, timeout_s=STATE_S))["end"]
        except BraidError:
            return None

    answers = await all_of(ask(broker) for broker in record.replicas if snapshot.is_live(broker))
    return dict(answer for answer in answers if answer is not None)


def _fewer_votes(snapshot: Snapshot, record: Ownership, reaches: int, held: Mapping[str, int]) -> str:
    """What is lost if the replicas that are there vote alone. `held` is how far the copies of some of them reach."""
    there = [broker for broker in record.replicas if snapshot.is_live(broker)]
    if len(there) >= record.keepers_needed:
        return f"nothing is, if the disks of {' and '.join(there)} are as they were; chunks reach offset {reaches}"
    if not there:
        return f"chunks reach offset {reaches}; what the replicas confirmed from there on is lost"
    if len(held) == len(there):
        best = max(held, key=lambda broker: held[broker])
        end = max(held[best], reaches)
        return f"{best} holds the log up to offset {end}; what was confirmed from offset {end} on is lost"
    return (
        f"chunks reach offset {reaches}; what was confirmed from there on and {' and '.join(there)} "
        f"{'does' if len(there) == 1 else 'do'} not have is lost"
    )


async def _give_away(
    services: CallServices, snapshot: Snapshot, lost: list[Placed], to: str | None
) -> list[MoveRequest]:
    if to is not None:
        check_target(snapshot, to)
    tally, patience = snapshot.tally(), services.leader.patience()
    requests: list[MoveRequest] = []
    for each in lost:
        assert each.known is not None
        record = each.known.value
        if record.replicas and not record.clean:
            new = giving_up(snapshot, each, record, tally, patience, to=to)
        else:
            gone = given_up(snapshot, record)
            new = anew(snapshot, each, record, tally, patience, to=to, accept_loss=True, given_up=gone)
        if new is None:
            raise MoveRefused(
                f"{each.name} cannot be recovered: no broker is active, or too few; start or activate one"
            )
        by_vote = new.state is OwnershipState.RECOVERING
        if by_vote and to is not None:
            raise InvalidArgument(f"{each.name} cannot go to {to}: its replicas vote for its owner; name no broker")
        requests.append(
            MoveRequest(
                each.name,
                record.owner,
                "" if by_vote else new.owner,
                each.known.revision,
                record,
                begins=True,
                instead=new,
                by_vote=by_vote,
            )
        )
    for made in requests:
        gone = given_up(snapshot, made.record)
        # This broker's view may be behind: an owner that is back has lost nothing, and may be confirming (I3).
        if not await _swap(services, made, made.begun(ASKED), *still_gone(gone)):
            back = f", or {' or '.join(gone)} is back" if gone else ""
            raise MoveRefused(f"{made.segment} was not recovered: its record has changed just now{back}; look again")
    return requests


async def _wait(
    services: CallServices, requests: list[MoveRequest], began: float, timeout_s: float
) -> list[MovedSegment]:
    """What became of each request, in their order. Raises if one of them failed."""
    owners = services.owners
    results: dict[SegmentName, MovedSegment] = {}
    failures: dict[SegmentName, BraidError] = {}

    def all_known() -> bool:
        for each in requests:
            if each.segment in results or each.segment in failures:
                continue
            found = move_result(each, owners.find(each.segment))
            if isinstance(found, BraidError):
                failures[each.segment] = found
            elif found is not None:
                results[each.segment] = _arrived(each, found, 0.0 if each.is_there else _now() - began)
        return len(results) + len(failures) == len(requests)

    if not await owners.view.until(all_known, began + timeout_s - _now()):
        late = [_late(services, each) for each in requests if each.segment not in results]
        raise TimedOut(
            f"{len(results)} of {len(requests)} segments have arrived within {timeout_s:g} s; the others are still on "
            f"their way: {'; '.join(late[:5])}{'; …' if len(late) > 5 else ''}"
        )
    if failures:
        reasons = "; ".join(str(error) for error in list(failures.values())[:3])
        raise MoveRefused(f"{len(results)} of {len(requests)} segments have moved: {reasons}")
    return [results[each.segment] for each in requests]


def _late(services: CallServices, made: MoveRequest) -> str:
    record = services.owners.find(made.segment)
    if record is None:
        return f"segment {made.segment.id}: it was deleted"
    if record.is_owned and not services.members.is_live(record.owner):
        return f"segment {made.segment.id}: its owner {record.owner} is down"
    return f"segment {made.segment.id}: {move_progress(record)}"


def _arrived(made: MoveRequest, record: Ownership, seconds: float) -> MovedSegment:
    return MovedSegment(
        segment=made.segment.id,
        source=made.source,
        to=record.owner,
        epoch=record.epoch,
        seconds=round(seconds, 3),
        moved=not made.is_there,
    )


def _lost(snapshot: Snapshot, name: TopicName, segment: int | None) -> list[Placed]:
    """The segments whose records are only on disks of brokers that are gone or cannot open them. If replicas vote for
    longer than `VOTE_WAIT_S`, too few of them have what was confirmed, also if all are there."""
    found = select_segments(snapshot, name.path, segment)
    lost = [
        each
        for each in found
        if each.known is not None
        and (each.known.value.state is OwnershipState.RECOVERING or is_lost(snapshot, each.known.value))
    ]
    if lost:
        return lost
    owners = {each.known.value.owner for each in found if each.known is not None}
    raise MoveRefused(
        f"nothing of topic {name} is to be recovered: no segment that was asked for waits for an owner that is gone "
        f"or cannot open it (owners: {', '.join(sorted(owners)) or 'none yet'}); to give it to another broker, move it"
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
