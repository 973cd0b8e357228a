"""The calls about the replicas of a topic's segments: how far each is, and how many there are to be.

Metadata says which brokers hold copies, and which change is under way. Only the owner of a segment knows how far its
followers are; an owner that does not answer is no reason to show nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from braid.broker.admin.call import OnTopic, on_topic, who_knows_the_topic
from braid.broker.admin.route import TOPIC, HttpRoute
from braid.broker.admin.services import CallServices
from braid.broker.admin.topics import UpdateTopic
from braid.broker.auth import Action, Principal
from braid.broker.segments.segment_access import GetFollowers
from braid.cluster.snapshot import coming_replicas
from braid.model.errors import BraidError
from braid.model.ids import Offset, SegmentId
from braid.model.layout import HashRange, SegmentInfo
from braid.model.log.replication import FollowerStatus
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Ownership, OwnershipState
from braid.model.topic import PolicyChanges, Replicas, Topic, WriteQuorum
from braid.ports.tasks import all_of

ANSWER_S: Final = 2.0
"""How long an owner may take to say how far its followers are."""

# Results.

ReplicaState = Literal["owner", "in-sync", "behind", "joining", "down", "voting", "unknown"]


class ReplicaDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    broker: str
    state: Annotated[
        ReplicaState,
        Meta(
            description="Only the owner and `in-sync` copies count for a confirm; `unknown`: the owner does not tell."
        ),
    ]
    behind: Annotated[int | None, Meta(description="Records that its disk does not have; null if that is not known.")]
    end: Annotated[Offset | None, Meta(description="The offset after the last record on its disk.")]
    error: Annotated[str, Meta(description="Why the owner sends nothing to it; empty: the owner does.")] = ""


class ReplicaChangeDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    """A change of the replicas that is under way."""

    replicas: tuple[str, ...]
    write_quorum: int
    waits_for: Annotated[tuple[str, ...], Meta(description="What it waits for, in sentences.")]


class SegmentReplicas(Struct, frozen=True, kw_only=True, rename="camel"):
    segment_id: SegmentId
    hash_range: HashRange
    owner: Annotated[str | None, Meta(description="The broker that has the segment; null while none does.")]
    write_quorum: Annotated[int, Meta(description="Replicas that a confirm waits for, the owner included.")]
    replicas: list[ReplicaDescription]
    change: ReplicaChangeDescription | None
    unavailable: Annotated[str | None, Meta(description="Why the segment is not served; null if it is.")]

    @classmethod
    def of(
        cls,
        info: SegmentInfo,
        record: Ownership | None,
        followers: Mapping[str, FollowerStatus] | str,
        live: Collection[str],
        unavailable: str | None,
    ) -> SegmentReplicas:
        """`followers` is what the owner says, or why it says nothing."""
        brokers = (record.replicas or (record.owner,)) if record is not None else ()
        change = record.change if record is not None else None
        joining = [each for each in change.replicas if each not in brokers] if change is not None else []
        told = followers if not isinstance(followers, str) else {}
        known = {each: status for each, status in told.items() if each in live}  # Of others, the owner knows no more.
        return cls(
            segment_id=info.segment_id,
            hash_range=info.hash_range,
            owner=record.owner if record is not None and record.is_owned else None,
            write_quorum=record.write_quorum if record is not None else 1,
            replicas=[
                ReplicaDescription(
                    broker=each,
                    state=_replica_state(each, record, known.get(each), live, joining=each in joining),
                    behind=known[each].behind if each in known else None,
                    end=known[each].position.end if each in known else None,
                    error=known[each].error if each in known else "",
                )
                for each in (*brokers, *joining)
                if record is not None
            ],
            change=None
            if change is None
            else ReplicaChangeDescription(
                replicas=change.replicas,
                write_quorum=change.write_quorum,
                waits_for=_change_waits_for(joining, followers, live),
            ),
            unavailable=unavailable,
        )


def _replica_state(
    broker: str, record: Ownership, status: FollowerStatus | None, live: Collection[str], *, joining: bool
) -> ReplicaState:
    if broker not in live:
        return "down"
    if record.state is OwnershipState.RECOVERING:
        return "voting"
    if broker == record.owner:
        return "owner"
    if joining:
        return "joining"
    if status is None:
        return "unknown"
    # Before it is a member, its copy counts for a confirm and not in a vote: it does not replace another one yet.
    return "in-sync" if status.in_sync and status.member else "behind"


def _change_waits_for(
    joining: Sequence[str], followers: Mapping[str, FollowerStatus] | str, live: Collection[str]
) -> tuple[str, ...]:
    if isinstance(followers, str):
        return (followers,)
    waits: list[str] = []
    for broker in joining:
        status = followers.get(broker)
        if broker not in live:
            waits.append(f"broker {broker} is down")
        elif status is None:
            waits.append(f"the owner has not begun to send to broker {broker}")
        elif status.error:
            waits.append(f"broker {broker} gets nothing: {status.error}")
        elif not status.in_sync:
            waits.append(f"broker {broker} lacks {status.behind:,} records")
    return tuple(waits)


class TopicReplicasDescription(Struct, frozen=True, kw_only=True, rename="camel"):
    name: str
    replicas: Annotated[int, Meta(description="That each segment is to have.")]
    write_quorum: Annotated[int, Meta(description="That are to confirm a record, the owner included.")]
    segments: dict[SegmentId, SegmentReplicas]
    warnings: Annotated[
        tuple[str, ...], Meta(description="What these numbers mean when a broker is lost, where that may surprise.")
    ] = ()


# Calls.


class TopicReplicas(OnTopic, frozen=True):
    """The replicas of each segment: how far each is, and the change that is under way."""

    needs = who_knows_the_topic
    http = HttpRoute("GET", TOPIC + "/replicas", errors=(404,))

    async def run(self, services: CallServices, principal: Principal) -> TopicReplicasDescription:  # noqa: ARG002
        return await _replicas(services, self.name, services.topics.get(self.name.path))


class SetReplicas(OnTopic, frozen=True, rename="camel"):
    """Ask for another number of replicas, or for another number of them to confirm. The cluster leader and the owners
    bring it about, while clients go on."""

    needs = on_topic(Action.ADMIN)
    http = HttpRoute("PUT", TOPIC + "/replicas", body=("replicas", "writeQuorum"), errors=(404, 501))
    replicas: Replicas | None = None
    write_quorum: WriteQuorum | None = None
    topic_id: int | None = None
    """The topic that is meant: one of the same name that was created since stays as it is."""

    async def run(self, services: CallServices, principal: Principal) -> TopicReplicasDescription:
        given: dict[str, Any] = {"replicas": self.replicas, "write_quorum": self.write_quorum}
        given = {name: value for name, value in given.items() if value is not None}
        update = UpdateTopic(topic=self.topic, policies=PolicyChanges(**given), topic_id=self.topic_id)
        await update.run(services, principal)
        return await _replicas(services, self.name, services.topics.get(self.name.path))


async def _replicas(services: CallServices, name: TopicName, topic: Topic) -> TopicReplicasDescription:
    records = {each: services.owners.find(SegmentName.of(name, info)) for each, info in topic.layout.segments.items()}
    replicated = [each for each, record in records.items() if record is not None and coming_replicas(record)]
    answers = await all_of(_followers(services, name, topic, each) for each in replicated)
    followers = dict(zip(replicated, answers, strict=True))
    snapshot = services.leader.snapshot()
    waiting = {each.segment.id: each for each in services.leader.waiting() if each.segment.topic == name}
    return TopicReplicasDescription(
        name=str(name),
        replicas=topic.policies.replicas,
        write_quorum=topic.policies.write_quorum,
        segments={
            id_: SegmentReplicas.of(
                info,
                records[id_],
                followers.get(id_, {}),
                snapshot.brokers.keys(),
                waiting[id_].reason or f"{' or '.join(waiting[id_].brokers)} is down" if id_ in waiting else None,
            )
            for id_, info in topic.layout.segments.items()
        },
        warnings=topic.policies.warnings,
    )


async def _followers(
    services: CallServices, name: TopicName, topic: Topic, segment_id: SegmentId
) -> dict[str, FollowerStatus] | str:
    """How far the followers are, or why the owner does not say."""
    try:
        segment = services.accesses.now(SegmentName.of(name, topic.layout.segments[segment_id]), topic.id, ANSWER_S)
        return {each.broker: each for each in await segment.ask(GetFollowers())}
    except BraidError as error:
        return f"the owner does not answer: {error}"
