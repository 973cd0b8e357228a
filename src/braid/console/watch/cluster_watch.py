"""Watches a cluster with one token: the only place of the console that asks brokers again and again.

All pages of one token share a watch, so ten open pages cost brokers as much as one. A watch asks four kinds of
questions, each at its own pace (`pace.py`):

    probes    /readyz of each broker: which are up
    routing   brokers, topology and changes, of one broker in turn
    metrics   /metrics of each broker: counters and offsets, of which rates are made
    topics    layout, statistics and replicas of the topics that a page shows

A token that may not see the cluster gets its topics by name, and their layouts one by one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from braid.console.drawing.strands import NOBODY
from braid.console.numbers import counted
from braid.console.rest import API, Rest, RestError, topic_path
from braid.console.watch import alarms
from braid.console.watch.history import SegmentSeen, TopicHistory
from braid.console.watch.metrics_text import Series, read_metrics
from braid.console.watch.pace import Pace
from braid.console.watch.rates import Rates
from braid.console.watch.view import BrokerSeen, ClusterView, Json, TopicDetail, TopicSeen
from braid.model.names import DEFAULT_NAMESPACE, DEFAULT_TENANT, TopicName

TICK_S: Final = 0.5
MAX_TOPICS: Final = 2_000
"""Of which a history is kept."""
MAX_WANTED: Final = 60
"""Topics of which one round of statistics is asked for."""
MISSED: Final = 2
"""Probes in a row without an answer that make a broker silent."""
FORGET_S: Final = 120.0
ROUTING_S: Final = 4.0
"""Where segments are is asked at least so often: a change should be seen while somebody looks."""
FIRST_S: Final = 1.5

_COUNTERS: Final = {
    "braid_topic_publish_records_total": "records_in_per_s",
    "braid_topic_publish_bytes_total": "bytes_in_per_s",
    "braid_topic_deliver_records_total": "records_out_per_s",
    "braid_topic_deliver_bytes_total": "bytes_out_per_s",
}
_END: Final = "braid_segment_end_offset"
_LAG: Final = "braid_subscription_lag_records"
_BROKER_GAUGES: Final = {
    "braid_disk_size_bytes": "disk_size",
    "braid_disk_free_bytes": "disk_free",
    "braid_connections": "connections",
    "braid_replicas_out_of_sync": "out_of_sync",
}
_WANTED: Final = frozenset({*_COUNTERS, *_BROKER_GAUGES, _END, _LAG, *alarms.METRICS, "process_cpu_seconds_total"})
_UP: Final = frozenset({"active", "draining", "drained", "stopping"})

_log: Final = logging.getLogger(__name__)


class ClusterWatch:
    def __init__(self, rest: Rest) -> None:
        self.rest: Final = rest
        self.view = ClusterView()
        self.details: dict[str, TopicDetail] = {}
        """Of the topics that an open page shows."""
        self.histories: dict[str, TopicHistory] = {}
        self.colours: dict[str, int] = {}
        """Of brokers, in the order in which they were seen."""
        self.namespaces: list[str] = [f"{DEFAULT_TENANT}/{DEFAULT_NAMESPACE}"]
        """Of which a limited token lists topics."""
        self.last_used = time.monotonic()
        self._pages = 0
        self._wanted: dict[str, int] = {}
        self._proposals: set[str] = set()
        self._paces = {
            "probes": Pace(1.0, 5.0),
            "routing": Pace(1.0, 2.0, ROUTING_S),
            "metrics": Pace(2.0, 5.0),
            "topics": Pace(2.0, 10.0),
        }
        self._rates = Rates()
        self._missed: dict[str, int] = {}
        self._lease: dict[str, bool | None] = {}
        self._ids: dict[str, str] = {}
        """Brokers by the address that clients use; also of those that are gone."""
        self._brokers: dict[str, Json] = {}
        self._gauges: dict[str, dict[str, float]] = {}
        self._topics: dict[str, Json] = {}
        self._numbers: dict[str, dict[str, float]] = {}
        self._alarms: dict[str, list[str]] = {}
        self._ages: dict[str, dict[str, float]] = {}
        self._changes: list[Json] = []
        self._error = ""
        self._limited = False
        self._is_complete = False
        """Whether the last look has seen all topics: one that is new at the next look has been created since."""
        self._at = 0.0
        self._looked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # Pages.

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._run(), name="watch the cluster")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    @property
    def watched(self) -> bool:
        return self._pages > 0

    @contextlib.contextmanager
    def page(self) -> Iterator[None]:
        """Look more often while a page is open."""
        self._pages += 1
        self.last_used = time.monotonic()
        try:
            yield
        finally:
            self._pages -= 1
            self.last_used = time.monotonic()

    def want(self, path: str) -> None:
        """Ask for the details of a topic, too."""
        self._wanted[path] = self._wanted.get(path, 0) + 1
        self._paces["topics"].hurry()

    def unwant(self, path: str) -> None:
        left = self._wanted.get(path, 0) - 1
        if left > 0:
            self._wanted[path] = left
        else:
            self._wanted.pop(path, None)
            self._proposals.discard(path)
            self.details.pop(path, None)  # Otherwise a page that does not ask for it would show old numbers.

    def propose(self, path: str) -> None:
        """Ask where the topic's load is and what auto-scaling would do with it; its owners then measure key hashes."""
        self._proposals.add(path)

    def hurry(self) -> None:
        """Look again now: a person has changed something."""
        for pace in self._paces.values():
            pace.hurry()

    async def first_look(self) -> None:
        """Return when the cluster was seen, or soon: the first page need not be empty."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._looked.wait()

    # Looking.

    async def _run(self) -> None:
        """Look at everything once, then at each kind by itself: a broker that hangs holds up an answer for many
        seconds, and the probes must show that meanwhile."""
        await self._look_safely(tuple(self._paces))
        async with asyncio.TaskGroup() as group:
            for kind in self._paces:
                group.create_task(self._keep_looking(kind), name=f"watch the cluster's {kind}")

    async def _keep_looking(self, kind: str) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            await self._look_safely((kind,))

    async def _look_safely(self, kinds: Iterable[str]) -> None:
        try:
            await self.look(kinds)
        except Exception:
            _log.exception("a look at the cluster broke; the next one follows")

    async def look(self, kinds: Iterable[str] | None = None) -> None:
        """Ask everything whose time has come, of all kinds or of these, and make the next view."""
        questions = {
            "probes": self._look_at_brokers,
            "routing": self._look_at_routing,
            "metrics": self._look_at_metrics,
            "topics": self._look_at_topics,
        }
        now = time.monotonic()
        asked = self._paces if kinds is None else kinds
        due = [kind for kind in asked if self._paces[kind].due(now, watched=self.watched)]
        if not due:
            return
        if not self._at and "routing" in due:
            await self._timed("routing", questions["routing"])  # The others need to know the brokers.
            due.remove("routing")
        await asyncio.gather(*(self._timed(kind, questions[kind]) for kind in due))
        self._make_view()
        self._looked.set()

    async def _timed(self, kind: str, question: Any) -> None:
        began = time.monotonic()
        took = await question()
        self._paces[kind].asked(began, took if took is not None else time.monotonic() - began)

    async def _look_at_brokers(self) -> float:
        known = {id_: each["admin"] for id_, each in self._brokers.items() if each["admin"]}
        answers = await asyncio.gather(*(self.rest.probe(admin) for admin in known.values()))
        for id_, answer in zip(known, answers):
            self._lease[id_] = answer
            self._missed[id_] = 0 if answer is not None else self._missed.get(id_, 0) + 1
        self._prefer_brokers_that_answer()
        return 0.0

    async def _look_at_routing(self) -> None:
        try:
            self.rest.turn()
            brokers = await self.rest.get(f"{API}/brokers")
            topology = await self.rest.get(f"{API}/topology")
            self._changes = await self._get_or(f"{API}/changes", [])
        except RestError as error:
            self._is_complete = False
            if error.status == 403:
                await self._look_at_names()
            else:
                self._fail(error)
            return
        self._limited, self._error, self._at = False, "", time.time()
        self._note_brokers(brokers)
        self._topics = {each["topic"]: each for each in topology["topics"][:MAX_TOPICS]}
        for path, topic in self._topics.items():
            segments = [self._segment(each) for each in topic["segments"]]
            self._note_segments(path, topic["topicId"], segments)
        self._forget_topics()
        self._is_complete = len(topology["topics"]) <= MAX_TOPICS

    async def _look_at_names(self) -> None:
        """Look as far as a token reaches that may not see the cluster, and forget what more rights have shown."""
        self._limited = True
        self._forget_cluster()
        try:
            names: list[str] = []
            for namespace in self.namespaces:
                names += await self.rest.get(f"{API}/scalable/{namespace}")
            layouts = [await self._get_or(topic_path(name) + "/layout", None) for name in names[:MAX_TOPICS]]
        except RestError as error:
            self._fail(error)
            return
        self._error, self._at = "", time.time()
        found = {TopicName.parse(name).path: layout for name, layout in zip(names, layouts) if layout is not None}
        self._topics = {path: {"topic": path, "topicId": 0, "segments": []} for path in found}
        for path, layout in found.items():
            segments = [_of_layout(each, layout["owners"]) for each in layout["segments"].values()]
            self._note_segments(path, 0, segments)
        self._forget_topics()

    def _fail(self, error: RestError) -> None:
        """Note why nothing was seen. What a token has shown that brokers refuse now is forgotten."""
        self._error = str(error)
        if error.status in (401, 403):
            self._forget_cluster()
            self._topics = {}
            self._forget_topics()

    def _forget_cluster(self) -> None:
        self._brokers, self._gauges, self._changes, self._alarms = {}, {}, [], {}

    async def _get_or(self, path: str, otherwise: Any) -> Any:
        """Ask for what may not be there: brokers of an older version lack some calls, and topics come and go."""
        try:
            return await self.rest.get(path)
        except RestError as error:
            if error.status != 404:
                raise
            return otherwise

    def _note_brokers(self, brokers: list[Json]) -> None:
        present = {each["id"]: each for each in brokers}
        for id_, each in present.items():
            known = self._brokers.get(id_, {})
            if not each["admin"] and known.get("admin"):  # A broker that is down has no address any more.
                each = {**each, **{name: known[name] for name in ("address", "admin", "version", "startedAt")}}
            self._brokers[id_] = each
            if each["address"]:
                self._ids[each["address"]] = id_
        for id_ in self._brokers.keys() - present.keys():
            if self._missed.get(id_, 0) > 2 * MISSED:
                del self._brokers[id_]  # It left in order, or has nothing that anybody waits for.
            else:
                self._brokers[id_] = {**self._brokers[id_], "state": "down", "segments": 0, "replicas": 0}
        for id_ in sorted(self._brokers):
            self.colours.setdefault(id_, len(self.colours))
        self._prefer_brokers_that_answer()

    def _prefer_brokers_that_answer(self) -> None:
        self.rest.learn([each["admin"] for id_, each in self._brokers.items() if self._is_up(id_)])

    def _segment(self, routed: Json) -> SegmentSeen:
        return SegmentSeen(
            id=routed["segmentId"],
            first_hash=routed["hashRange"]["start"],
            last_hash=routed["hashRange"]["end"],
            active=routed["active"],
            parents=tuple(routed["parentIds"]),
            children=tuple(routed["childIds"]),
            owner=self._ids.get(str(routed["owner"]), str(routed["owner"])),
            epoch=routed["epoch"],
        )

    def _note_segments(self, path: str, topic_id: int, segments: list[SegmentSeen]) -> None:
        now = time.time()
        history = self.histories.get(path)
        if history is None or history.topic_id != topic_id:
            self.histories[path] = history = TopicHistory(topic_id, now, now if self._is_complete else None)
        silent = [id_ for id_ in self._brokers if not self._is_up(id_)]
        seen = [msgspec.structs.replace(each, owner=NOBODY) if each.owner in silent else each for each in segments]
        history.look(seen, now, silent)
        self._topics[path]["seen"] = seen

    def _forget_topics(self) -> None:
        for gone in self.histories.keys() - self._topics.keys():
            del self.histories[gone]
        for gone in self._numbers.keys() - self._topics.keys():
            del self._numbers[gone]
        for gone in self.details.keys() - self._topics.keys():
            del self.details[gone]

    async def _look_at_metrics(self) -> float:
        admins = {id_: each["admin"] for id_, each in self._brokers.items() if self._is_up(id_) and each["admin"]}
        took = 0.0

        async def ask(admin: str) -> tuple[str | None, float]:
            nonlocal took
            began = time.monotonic()
            text = await self.rest.metrics(admin)
            took = max(took, time.monotonic() - began)
            return text, time.time()

        answers = await asyncio.gather(*map(ask, admins.values()))
        families = {
            id_: (read_metrics(text, _WANTED), at) for id_, (text, at) in zip(admins, answers) if text is not None
        }
        self._note_metrics(families)
        self._rates.forget_before(time.time() - FORGET_S)
        return took

    def _note_metrics(self, families: dict[str, tuple[dict[str, Series], float]]) -> None:
        """Make rates of what brokers answered, and when. A slow broker must not change the rates of the others."""
        numbers: dict[str, dict[str, float]] = {}
        lags: dict[str, dict[str, float]] = {}
        ages: dict[str, dict[str, float]] = {}
        for id_, (found, now) in families.items():
            self._gauges[id_] = {field: found[name][()] for name, field in _BROKER_GAUGES.items() if () in found[name]}
            cpu = self._rates.seen(("cpu", id_), found["process_cpu_seconds_total"].get((), 0.0), now)
            if cpu is not None:
                self._gauges[id_]["cpu"] = cpu
            for name, field in _COUNTERS.items():
                for (path,), value in found[name].items():
                    rate = self._rates.seen((field, id_, path), value, now)
                    if rate is not None:
                        for of in (numbers.setdefault(path, {}), self._gauges[id_]):
                            of[field] = of.get(field, 0.0) + rate
            for (_, subscription, path), value in found[_LAG].items():
                of_path = lags.setdefault(path, {})
                of_path[subscription] = of_path.get(subscription, 0.0) + value
            for (_, subscription, path), age_s in found[alarms.LAG_SECONDS].items():
                of_path = ages.setdefault(path, {})
                of_path[subscription] = max(of_path.get(subscription, 0.0), age_s)
        for path, by_subscription in lags.items():
            numbers.setdefault(path, {}).update(
                backlog=max(by_subscription.values()), subscriptions=len(by_subscription)
            )
        self._numbers, self._ages = numbers, ages
        self._alarms = alarms.of_metrics([found for found, _ in families.values()])
        self._note_offsets(families.values())

    def _note_offsets(self, families: Iterable[tuple[dict[str, Series], float]]) -> None:
        """Make the traffic of each segment of how fast its end grows."""
        ends: dict[tuple[str, str], tuple[float, float]] = {}
        for found, now in families:
            for (segment, path), end in found[_END].items():
                ends[path, segment] = max((end, now), ends.get((path, segment), (0.0, now)))
        for (path, segment), (end, now) in ends.items():
            self._note_end(path, segment, end, now)

    def _note_end(self, path: str, segment: str, end: float, now: float) -> None:
        history = self.histories.get(path)
        if history is not None and history.is_settled(int(segment), now):
            rate = self._rates.seen(("end", path, segment), end, now)
            if rate is not None:
                history.measure(int(segment), now, rate)

    async def _look_at_topics(self) -> float:
        wanted = [path for path in self._wanted if path in self._topics][:MAX_WANTED]
        for path in wanted:
            self._wanted[path] = self._wanted.pop(path)  # The next round begins with the others.
        slowest = 0.0
        for path in wanted:
            began = time.monotonic()
            try:
                detail = await self._detail(path)
                if path in self._wanted:
                    self.details[path] = detail
            except RestError as error:
                if error.status == 404:
                    self.details.pop(path, None)
            slowest = max(slowest, time.monotonic() - began)
            await asyncio.sleep(0)
        return slowest * max(1, len(wanted))

    async def _detail(self, path: str) -> TopicDetail:
        at = topic_path(path)
        layout, stats = await self.rest.get(at + "/layout"), await self.rest.get(at + "/stats")
        replicas = None
        if any(each["replicas"] for each in stats["segments"].values()):
            replicas = await self.rest.get(at + "/replicas")
        proposal = key_hashes = None
        if path in self._proposals:
            with contextlib.suppress(RestError):
                proposal = await self.rest.get(at + "/autoScaleProposal")
                key_hashes = await self.rest.get(at + "/keyHashes")
        if self._limited:
            self._note_stats(path, stats)
        return TopicDetail(layout=layout, stats=stats, replicas=replicas, proposal=proposal, key_hashes=key_hashes)

    def _note_stats(self, path: str, stats: Json) -> None:
        """Make rates of a topic's statistics, where the token may not see the cluster's metrics."""
        now = time.time()
        for segment, each in stats["segments"].items():
            if each["endOffset"] is not None:
                self._note_end(path, segment, each["endOffset"], now)

    # The view.

    def _is_up(self, id_: str) -> bool:
        return self._brokers[id_]["state"] in _UP and self._missed.get(id_, 0) < MISSED

    def _make_view(self) -> None:
        self.view = ClusterView(
            at=self._at,
            error=self._error,
            limited=self._limited,
            brokers=tuple(self._broker(id_) for id_ in sorted(self._brokers)),
            topics={path: self._topic(path, topic) for path, topic in sorted(self._topics.items())},
            changes=tuple(self._changes),
        )

    def _broker(self, id_: str) -> BrokerSeen:
        each, gauges, load = self._brokers[id_], self._gauges.get(id_, {}), self._brokers[id_]["load"] or {}
        up, lease = self._is_up(id_), self._lease.get(id_)
        return BrokerSeen(
            id=id_,
            address=each["address"],
            admin=each["admin"],
            version=each["version"],
            started_at=each["startedAt"] / 1e6 if each["startedAt"] else None,
            state=each["state"] if up or each["state"] == "down" else "silent",
            lease="unknown" if lease is None else "held" if lease else "lost",
            leader=each["leader"] and up,
            segments=each["segments"],
            replicas=each["replicas"],
            cpu=gauges.get("cpu", load.get("cpu")) if up else None,
            bytes_in_per_s=gauges.get("bytes_in_per_s", load.get("bytesInPerS")) if up else None,
            bytes_out_per_s=gauges.get("bytes_out_per_s", load.get("bytesOutPerS")) if up else None,
            backlog_bytes=load.get("backlogBytes"),
            disk_size=gauges.get("disk_size"),
            disk_free=gauges.get("disk_free"),
            connections=int(gauges["connections"]) if up and "connections" in gauges else None,
            out_of_sync=int(gauges.get("out_of_sync", 0)) if up else 0,
            labels=each["labels"],
            obstacles=tuple(each["obstacles"]),
        )

    def _topic(self, path: str, topic: Json) -> TopicSeen:
        numbers, detail = self._numbers.get(path, {}), self.details.get(path)
        segments: list[SegmentSeen] = topic.get("seen", [])
        stored = None
        if detail is not None:
            sizes = [size for each in detail.stats["segments"].values() if (size := each["bytes"]) is not None]
            stored = sum(sizes) if sizes else None
        active = [each for each in segments if each.active]
        unserved = sum(not each.owner for each in active)
        not_served = [f"{unserved} of {counted(len(active), 'segment')} not served"] if unserved else []
        subscriptions, backlog = numbers.get("subscriptions"), numbers.get("backlog")
        if subscriptions is None and detail is not None:  # A token that sees no metrics may see this.
            backlogs = [each["backlog"] for each in detail.stats["subscriptions"].values()]
            subscriptions, backlog = len(backlogs), max(backlogs, default=None)
        elif subscriptions is None and self._gauges:
            subscriptions = 0
        return TopicSeen(
            path=path,
            topic_id=topic["topicId"],
            segments=tuple(segments),
            stored_bytes=stored,
            alarms=(
                *not_served,
                *alarms.of_changes(self._changes, path, time.time()),
                *self._alarms.get(path, ()),
            ),
            records_in_per_s=numbers.get("records_in_per_s"),
            bytes_in_per_s=numbers.get("bytes_in_per_s"),
            records_out_per_s=numbers.get("records_out_per_s"),
            bytes_out_per_s=numbers.get("bytes_out_per_s"),
            backlog=backlog,
            subscriptions=int(subscriptions) if subscriptions is not None else None,
            ages_s=self._ages.get(path, {}),
        )


def _of_layout(info: Json, owners: Json) -> SegmentSeen:
    return SegmentSeen(
        id=info["segmentId"],
        first_hash=info["hashRange"]["start"],
        last_hash=info["hashRange"]["end"],
        active=info["state"] == "ACTIVE",
        parents=tuple(info.get("parentIds", ())),
        children=tuple(info.get("childIds", ())),
        owner=owners.get(str(info["segmentId"])) or "",
    )
