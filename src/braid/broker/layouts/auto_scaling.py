"""Layouts that follow the load: the cluster leader asks the owners what their segments have to do, decides
(scaling/auto_scale.py), and begins a change as an operator would (transitions.py). Off unless a policy says otherwise.

A policy is the broker's configuration, then what the topic's namespace says, then what the topic says. A combination
that cannot be is refused when it is set. If one is found all the same (another level has changed since), the topic is
left alone, and asking for its proposal says why.

The leader remembers since when each segment is cold; a new leader begins to watch anew, so a merge comes later, never
earlier. Everything else that a decision needs is measured, or stored with the topic: the times of the last split and
merge are written by the transaction that commits one, so a change that was aborted costs no cooldown. A time that is in
the future was written by a broker whose clock was ahead. It counts as the moment at which this leader first saw it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec import structs

from braid.broker.layouts.key_hashes import TopicKeyHashes, parts_of
from braid.broker.layouts.transitions import Transitions
from braid.broker.peers.calls import Arguments, PeerCalls
from braid.broker.segments.segment_access import Ask
from braid.broker.segments.segments import Segments
from braid.broker.topics import Topics
from braid.cluster.key_hash_samples import KeyHashSamples
from braid.cluster.leader import Leader
from braid.cluster.load_reports import Rates
from braid.cluster.owners import Owners
from braid.metadata import paths
from braid.metadata.view import Table
from braid.model.errors import BraidError, InvalidArgument, NotServing, TopicNotFound, TransitionRefused
from braid.model.ids import SegmentId
from braid.model.layout import Layout
from braid.model.load import KeyHashLoad
from braid.model.names import SegmentName, TopicName
from braid.model.topic import AutoScaleOverride, AutoScalePolicy, StoredOverride, Topic, auto_scale_policy
from braid.model.transition import LayoutPlan, plan_merge, plan_split
from braid.ports.clock import Clock
from braid.ports.tasks import TaskScope, all_of, cancel
from braid.ports.threads import Threads
from braid.scaling.auto_scale import (
    AutoScaleDecision,
    MeasuredSegment,
    Merge,
    SegmentRates,
    Split,
    decide,
    is_cold,
)

LOOK_S: Final = 1.0
"""At most so often the leader goes over all topics."""
INTERVAL_S: Final = 10.0
"""How often it asks for a topic's load; immediately when the layout or the number of consumers has changed. Rates are
smoothed over 30 s: asking more often shows the same."""
UNWATCHED_S: Final = 60.0
"""A segment that was not looked at for so long (another broker led) is not known to have been cold."""
ANSWER_S: Final = 2.0
MEASURE: Final = "measure_topic"
PROPOSE: Final = "propose_auto_scaling"
"""Calls between brokers: to the owners of segments, and to the leader."""

_log: Final = logging.getLogger(__name__)


class SegmentMeasurement(msgspec.Struct, frozen=True, kw_only=True):
    """What an owner says of a segment."""

    records_in_per_s: int
    bytes_in_per_s: int
    bytes_out_per_s: int
    key_hashes: KeyHashLoad | None = None


class AutoScaleProposal(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What auto-scaling does now, or would do if it were on."""

    topic: str
    enabled: bool
    policy: AutoScaleOverride | None
    """That results of all levels; null if the combination cannot be."""
    action: str | None = None
    """`split` or `merge`"""
    segments: tuple[SegmentId, ...] = ()
    at: str | None = None
    """The first hash of the upper part, in hex digits."""
    reason: str
    findings: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: TopicName, policy: AutoScalePolicy, found: AutoScaleDecision) -> AutoScaleProposal:
        proposal = cls(
            topic=str(name),
            enabled=policy.enabled,
            policy=AutoScaleOverride(**structs.asdict(policy)),
            reason=found.reason,
            findings=found.findings,
        )
        match found.action:
            case Split(segment, at):
                return structs.replace(proposal, action="split", segments=(segment,), at=f"{at:04x}")
            case Merge(lower, upper):
                return structs.replace(proposal, action="merge", segments=(lower, upper))
        return proposal


class _Cold(NamedTuple):
    since_s: float
    seen_s: float


class AutoScaling:
    def __init__(
        self,
        broker_id: str,
        config: AutoScalePolicy,
        topics: Topics,
        owners: Owners,
        leader: Leader,
        transitions: Transitions,
        segments: Segments,
        rates: Rates,
        ask: Ask,
        clock: Clock,
        threads: Threads | None,
    ) -> None:
        self.actions: Final[Counter[str]] = Counter()
        """How many changes this broker has begun, as the leader: `split` and `merge`."""
        self._id = broker_id
        self._config = config
        self._topics = topics
        self._owners = owners
        self._leader = leader
        self._transitions = transitions
        self._segments = segments
        self._rates = rates
        self._ask = ask
        self._clock = clock
        self._threads = threads
        self._sessions: Table[tuple[str, str, str], None] = topics.view.add(
            Table(paths.TOPICS_PREFIX, paths.consumer_key_of, lambda _: None, lambda key: paths.consumer(*key))
        )
        """By topic, subscription and consumer. A consumer that lost its connection counts until its grace is over."""
        self._looked_s = -LOOK_S
        self._asked: dict[str, tuple[float, object]] = {}
        """By a topic's path: when this leader last asked for its load, and what it was about then."""
        self._cold: dict[str, dict[SegmentId, _Cold]] = {}
        """By a topic's path."""
        self._ahead: dict[str, dict[int, float]] = {}
        """By a topic's path: the stored times that are in the future, and when this leader first saw each of them."""
        self._refused: dict[str, str] = {}
        """By a topic's path: why a change that was decided did not begin, or why nothing is decided."""
        self._acting = TaskScope[str]()
        """By a topic's path."""

    def answer_for(self, calls: PeerCalls) -> None:
        calls.register(MEASURE, self._on_measure)
        calls.register(PROPOSE, self._on_propose)

    async def stop(self) -> None:
        await cancel([*self._acting])

    # On any broker.

    def policy(self, path: str, topic: Topic) -> AutoScalePolicy:
        """Return the policy that all levels together make. `InvalidArgument` if they cannot be combined,
        `RecordUnreadable` if the namespace's record cannot be read."""
        return auto_scale_policy(self._config, self._topics.namespace_policies(path).auto_scale, topic.auto_scale)

    def check(self, override: StoredOverride, topic: str | None = None) -> None:
        """Raise `InvalidArgument` if the topic of this path, or else a namespace, cannot have this."""
        above = self._topics.namespace_policies(topic).auto_scale if topic is not None else None
        auto_scale_policy(self._config, above, override)

    async def proposal(self, name: TopicName) -> AutoScaleProposal:
        """Return what the leader does with a topic, or would do if auto-scaling were on for it."""
        leader = self._leader.leader
        if leader is None or leader == self._id:
            return await self._propose(name)
        answer = await self._ask(leader, PROPOSE, {"topic": name.path}, timeout_s=2 * ANSWER_S)
        return msgspec.convert(answer, AutoScaleProposal)

    async def key_hashes(self, name: TopicName) -> TopicKeyHashes:
        """Return how the load of a topic spreads over its key hashes, as the owners of segments have measured it."""
        topic = self._topics.get(name.path)
        loads, unknown = await self._loads(name, topic, parts_of(len(topic.layout.active)))
        return TopicKeyHashes.of(
            name,
            topic.layout,
            {segment: (load.records_in_per_s, load.key_hashes) for segment, load in loads.items()},
            unknown,
        )

    def measure(self, path: str, parts: int = 0) -> dict[SegmentId, SegmentMeasurement]:
        """Return what this broker knows of the load of its segments of a topic, with histograms of so many parts. Key
        hashes are counted from now on, until nobody has asked for a while."""
        found: dict[SegmentId, SegmentMeasurement] = {}
        for segment in self._segments.of_topic(path):
            rates = self._rates.of_segment(path, segment.name.id)
            if segment.sealed:
                continue
            publishes = segment.publishes
            if publishes.samples is None:
                publishes.samples = KeyHashSamples(segment.name.range, self._clock.monotonic, self._threads)
            publishes.samples.want()
            if rates.measured:
                found[segment.name.id] = SegmentMeasurement(
                    records_in_per_s=rates.records_in_per_s,
                    bytes_in_per_s=rates.bytes_in_per_s,
                    bytes_out_per_s=rates.bytes_out_per_s,
                    key_hashes=publishes.samples.summary(parts),
                )
        return found

    async def _on_measure(self, arguments: Arguments) -> dict[SegmentId, SegmentMeasurement]:
        if self._topics.get(arguments["topic"]).id != arguments["topic_id"]:
            raise TopicNotFound(f"topic {arguments['topic']} was deleted and created again")
        return self.measure(arguments["topic"], arguments.get("parts", 0))  # Earlier versions ask for none.

    # On the cluster leader.

    def look(self) -> None:
        """Act on every topic whose turn it is. Called while this broker leads, at each look."""
        now = self._clock.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        topics = self._topics.all()
        for known in (self._asked, self._cold, self._ahead, self._refused):
            for forgotten in known.keys() - topics.keys():
                del known[forgotten]
        consumers: dict[str, dict[str, int]] | None = None
        for path, topic in topics.items():
            policy = None if topic.deleting or topic.transition or path in self._acting else self._enabled(path, topic)
            if policy is None:
                continue
            consumers = self._consumers() if consumers is None else consumers
            about = (topic.id, topic.layout.epoch, policy, consumers.get(path))
            asked_s, asked_about = self._asked.get(path, (-INTERVAL_S, None))
            if now - asked_s >= INTERVAL_S or about != asked_about:
                self._asked[path] = (now, about)
                name = TopicName.parse(path)
                self._acting.start(path, self._act(name, topic, policy, consumers.get(path, {})), name=f"scale {path}")

    def _enabled(self, path: str, topic: Topic) -> AutoScalePolicy | None:
        """Return the topic's policy if it has one that is on, and that can be."""
        if not self._config.enabled and topic.auto_scale is None and not self._topics.has_namespace_policies(path):
            return None
        try:
            policy = self.policy(path, topic)
        except BraidError as error:
            self._note_refused(path, error)
            return None
        return policy if policy.enabled else None

    def _note_refused(self, path: str, error: BraidError) -> None:
        if self._refused.get(path) != str(error):
            _log.warning("the layout of topic %s does not follow its load: %s", path, error)
        self._refused[path] = str(error)

    async def _act(self, name: TopicName, topic: Topic, policy: AutoScalePolicy, consumers: Mapping[str, int]) -> None:
        try:
            found = await self._decide(name, topic, policy, consumers)
            fence = self._leader.fence
            if found.action is None or fence is None:
                return
            action = found.action

            def plan(layout: Layout) -> LayoutPlan:
                if layout.epoch != topic.layout.epoch:
                    raise TransitionRefused(f"the layout of topic {name} has changed since its load was measured")
                if isinstance(action, Split):
                    return plan_split(layout, action.segment, at=action.at)
                return plan_merge(layout, action.lower, action.upper)

            await self._transitions.begin(name, plan, conditions=[fence])
            self.actions["split" if isinstance(action, Split) else "merge"] += 1
            self._refused.pop(name.path, None)
            _log.info("topic %s: %s", name, found.reason)
        except BraidError as error:
            self._note_refused(name.path, error)

    async def _on_propose(self, arguments: Arguments) -> AutoScaleProposal:
        return await self._propose(TopicName.parse(arguments["topic"]))

    async def _propose(self, name: TopicName) -> AutoScaleProposal:
        topic = self._topics.get(name.path)
        if not self._leader.leading:
            raise NotServing(f"broker {self._id} does not lead the cluster, or not yet; try again in a moment")
        try:
            policy = self.policy(name.path, topic)
        except InvalidArgument as error:
            reason = f"Auto-scaling is off, because its policies contradict each other: {error}."
            return AutoScaleProposal(topic=str(name), enabled=False, policy=None, reason=reason, findings=(reason,))
        if topic.transition is not None:
            found = AutoScaleDecision(None, "The layout is being changed: it waits for that.")
        else:
            assumed = structs.replace(policy, enabled=True)
            found = await self._decide(name, topic, assumed, self._consumers().get(name.path, {}))
        if found.action is not None and policy.enabled and (why := self._refused.get(name.path)) is not None:
            found = found._replace(findings=(*found.findings, f"The last try failed: {why}."))
        return AutoScaleProposal.of(name, policy, found)

    async def _decide(
        self, name: TopicName, topic: Topic, policy: AutoScalePolicy, consumers: Mapping[str, int]
    ) -> AutoScaleDecision:
        loads, unknown = await self._loads(name, topic)
        now = self._clock.monotonic()
        before = self._cold.get(name.path, {})
        measured: dict[SegmentId, MeasuredSegment] = {}
        cold: dict[SegmentId, _Cold] = {}
        for segment, load in loads.items():
            rates = SegmentRates(load.records_in_per_s, load.bytes_in_per_s, load.bytes_out_per_s)
            if is_cold(policy, rates):
                known = before.get(segment)
                watched = known is not None and now - known.seen_s < UNWATCHED_S
                cold[segment] = _Cold(known.since_s if known is not None and watched else now, now)
            cold_for_s = now - cold[segment].since_s if segment in cold else 0.0
            measured[segment] = MeasuredSegment(rates, load.key_hashes, cold_for_s)
        self._cold[name.path] = cold
        split_at, merged_at = self._committed_at(name.path, topic)
        found = decide(
            policy,
            topic.layout,
            measured,
            consumers,
            split_at=split_at,
            merged_at=merged_at,
            now=self._clock.now_us(),
        )
        return found._replace(findings=(*found.findings, *unknown))

    def _committed_at(self, path: str, topic: Topic) -> tuple[int, int]:
        """Return when the last split and the last merge were committed, as far as their times can be believed."""
        now, now_us = self._clock.monotonic(), self._clock.now_us()
        times, known = (topic.split_at, topic.merged_at), self._ahead.get(path, {})
        ahead = self._ahead[path] = {at: known.get(at, now) for at in times if at > now_us}
        split_at, merged_at = (now_us - round((now - ahead[at]) * 1e6) if at in ahead else at for at in times)
        return split_at, merged_at

    async def _loads(
        self, name: TopicName, topic: Topic, parts: int = 0
    ) -> tuple[dict[SegmentId, SegmentMeasurement], list[str]]:
        """Ask the owners of the active segments. Return what they said, and why some did not."""
        records = {info.segment_id: self._owners.find(SegmentName.of(name, info)) for info in topic.layout.active}
        brokers = sorted({record.owner for record in records.values() if record is not None})
        found: dict[SegmentId, SegmentMeasurement] = {}
        unknown: list[str] = []
        for broker, answer in zip(brokers, await all_of(self._load_of(each, name, topic, parts) for each in brokers)):
            if isinstance(answer, str):
                unknown.append(f"The load of segments on broker {broker} is not known: {answer}.")
            else:
                found |= {
                    segment: load
                    for segment, load in answer.items()
                    if (record := records.get(segment)) is not None and record.owner == broker
                }
        return found, unknown

    async def _load_of(
        self, broker: str, name: TopicName, topic: Topic, parts: int
    ) -> dict[SegmentId, SegmentMeasurement] | str:
        if broker == self._id:
            return self.measure(name.path, parts)
        try:
            about = {"topic": name.path, "topic_id": topic.id, "parts": parts}
            answer = await self._ask(broker, MEASURE, about, timeout_s=ANSWER_S)
        except BraidError as error:
            return str(error)
        return msgspec.convert(answer, dict[SegmentId, SegmentMeasurement])

    def _consumers(self) -> dict[str, dict[str, int]]:
        """Return the number of consumers by topic and subscription."""
        found: dict[str, dict[str, int]] = {}
        for path, subscription, _ in self._sessions.all():
            counts = found.setdefault(path, {})
            counts[subscription] = counts.get(subscription, 0) + 1
        return found
