"""The topics as this broker knows them. The metadata store is the truth; the view follows it (metadata/view.py).

Writes of this broker reach the view in the same way: `create` returns when the view shows the new topic.

When the answer to a write is lost, the broker reads the key back. It may repeat the write, because every write compares
the revision of the key that it changes: of several tries, late or not, at most one succeeds, and a topic's random id
tells whose it was. A client may also repeat a whole call through another broker. So a topic is stored with the id of
the request that created it, and a deletion names the id of the topic that it means.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from braid.metadata import paths
from braid.metadata.store import MAX_VALUE_BYTES, Compare, Condition, Delete, Operation, Put
from braid.metadata.view import Table, View
from braid.model.errors import (
    MetadataUncertain,
    RecordUnreadable,
    TopicExists,
    TopicNotFound,
    TransitionRefused,
    TransitionRunning,
)
from braid.model.ids import NO_REQUEST, RequestId, Revision, SegmentId, random_id
from braid.model.layout import Layout
from braid.model.names import TopicName
from braid.model.stored_record import decode, encode
from braid.model.topic import NamespacePolicies, PolicyChanges, StoredOverride, Topic, TopicPolicies
from braid.model.transition import CommittedTransition, LayoutPlan, Transition, TransitionKey, TransitionStep
from braid.ports.clock import Clock

MAX_TRIES: Final = 5
"""How often a write is tried when its answer is lost, or when another broker has changed the key."""
MAX_CHANGED_BYTES: Final = MAX_VALUE_BYTES - (64 << 10)
"""The largest record that a change of the layout may leave. The rest is room for other policies: a change whose parents
have ended must be able to end."""


class Topics:
    def __init__(self, view: View, clock: Clock, random: random.Random) -> None:
        self.view = view
        self._store = view.store
        self._table: Table[str, Topic] = view.add(
            Table(paths.TOPICS_PREFIX, paths.topic_of_layout, Topic.from_json, paths.layout)
        )
        self.committed: Final[Table[str, CommittedTransition]] = view.add(
            Table(
                paths.TOPICS_PREFIX,
                paths.topic_of_transition,
                lambda data: decode(CommittedTransition, data),
                paths.transition,
            )
        )
        """By a topic's path: the last change of its layout, until clients and subscriptions have left the parents."""
        self._namespaces: Table[str, NamespacePolicies] = view.add(
            Table(
                paths.NAMESPACES_PREFIX,
                paths.path_of_namespace,
                lambda data: decode(NamespacePolicies, data, "a namespace's record"),
                paths.namespace,
            )
        )
        """By `tenant/namespace`."""
        self._clock = clock
        self._random = random

    @property
    def generation(self) -> int:
        """The metadata revision that this view reflects."""
        return self.view.generation

    @property
    def on_change(self) -> list[Callable[[str], None]]:
        """Called with a topic's path after the view of it has changed."""
        return self._table.on_change

    def find(self, path: str) -> Topic | None:
        topic = self._table.get(path)
        return topic if topic is not None and not topic.deleting else None

    def get(self, path: str) -> Topic:
        topic = self.find(path)
        if topic is None:
            self.check_readable(path)
            raise TopicNotFound(f"there is no topic {path}; create it first")
        return topic

    def unreadable(self, path: str) -> RecordUnreadable | None:
        """Return why nothing is known of a topic that exists; None if something is, or if there is no such topic."""
        return self._table.unreadable(path) if path not in self._table else None

    def check_readable(self, path: str) -> None:
        if (error := self.unreadable(path)) is not None:
            raise error.again()

    def all(self) -> dict[str, Topic]:
        """All topics by path, also those that are being deleted; none that cannot be read."""
        return self._table.all()

    def all_unreadable(self) -> dict[str, RecordUnreadable]:
        """The topics of which nothing is known, because their records cannot be read: by path."""
        return {path: error for path, error in self._table.all_unreadable().items() if path not in self._table}

    def unchanged(self, path: str) -> Compare:
        """A condition that holds while the topic is as this view shows it. Writes below a topic carry it, so that
        nothing is left below a topic that was deleted meanwhile. `TopicNotFound`"""
        self.get(path)
        return self._table.unchanged(path)

    def mark(self, path: str) -> Compare | None:
        """A condition that holds while the deletion that this view shows is under way; None if there is none."""
        topic = self._table.get(path)
        return self._table.unchanged(path) if topic is not None and topic.deleting else None

    async def stored(self, path: str) -> Topic | None:
        """Read the topic from the store, even if it is being deleted. When this returns, the view has caught up."""
        entry = await self._store.get(paths.layout(path))
        if entry is None:
            return None
        await self.view.caught_up(entry.revision)
        return Topic.from_json(entry.value)

    async def create(
        self,
        name: TopicName,
        *,
        segments: int,
        policies: TopicPolicies,
        properties: dict[str, str],
        request_id: RequestId = NO_REQUEST,
    ) -> Topic:
        """Create a topic. `TopicExists`, unless an earlier try of this request created the topic that exists."""
        layout = msgspec.structs.replace(Layout.initial(segments), properties=properties)
        topic = Topic(
            id=random_id(self._random),
            layout=layout,
            policies=policies,
            created_at=self._clock.now_us(),
            created_by=request_id,
        )
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            revision = await self._try([Compare(key, Revision(0))], Put(key, topic.to_json()))
            if revision is None:
                entry = await self._store.get(key)
                if entry is None:
                    continue
                found = Topic.from_json(entry.value)
                ours = found.id == topic.id or found.created_by == request_id != NO_REQUEST
                await self.view.caught_up(entry.revision)
                if not ours or found.deleting:
                    raise _exists(name, found)
                return found
            await self.view.caught_up(revision)
            return topic
        raise _unknown(f"whether topic {name} was created")

    async def update(self, name: TopicName, changes: PolicyChanges, topic_id: int | None = None) -> Topic:
        """Change a topic's policies; return the topic with them. Doing it again is fine. `TopicNotFound`, also if the
        topic of this name has another id than `topic_id`. `InvalidArgument` if the new policies cannot be."""
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            topic = Topic.from_json(entry.value) if entry is not None else None
            if entry is None or topic is None or topic.deleting or topic_id not in (None, topic.id):
                raise TopicNotFound(f"topic {name} cannot be changed: it does not exist, or not any more")
            changed = topic.changed(changes)
            revision: Revision | None = entry.revision
            if changed != topic:
                revision = await self._try([Compare(key, entry.revision)], Put(key, changed.to_json()))
            if revision is not None:
                await self.view.caught_up(revision)
                return changed
        raise _unknown(f"whether topic {name} was changed")

    async def set_auto_scale(self, name: TopicName, override: StoredOverride | None) -> None:
        """Replace what a topic says of its auto-scaling. Doing it again is fine. `TopicNotFound`"""
        for _ in range(MAX_TRIES):
            topic, revision = await self._existing(name, "changed")
            changed = msgspec.structs.replace(topic, auto_scale=override)
            if changed == topic or await self._replace(name, revision, changed):
                return
        raise _unknown(f"whether the auto-scaling of topic {name} was changed")

    # Namespaces.

    def has_namespace_policies(self, path: str) -> bool:
        """Tell whether the namespace of a topic, or this namespace, has policies, readable or not."""
        namespace = namespace_of(path)
        return namespace in self._namespaces or self._namespaces.unreadable(namespace) is not None

    def namespace_policies(self, path: str) -> NamespacePolicies:
        """Return the policies of a topic's namespace, or of this namespace. `RecordUnreadable`"""
        namespace = namespace_of(path)
        if (error := self._namespaces.unreadable(namespace)) is not None:
            raise error.again()
        return self._namespaces.get(namespace) or NamespacePolicies()

    async def set_namespace_auto_scale(self, path: str, override: StoredOverride | None) -> None:
        """Replace what a namespace says of auto-scaling. Doing it again is fine."""
        key = paths.namespace(path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            policies = decode(NamespacePolicies, entry.value) if entry is not None else NamespacePolicies()
            changed = msgspec.structs.replace(policies, auto_scale=override)
            revision = entry.revision if entry is not None else Revision(0)
            if changed == policies:
                return await self.view.caught_up(revision)
            operation = Delete(key) if changed == NamespacePolicies() else Put(key, encode(changed))
            written = await self._try([Compare(key, revision)], operation)
            if written is not None:
                return await self.view.caught_up(written)
        raise _unknown(f"whether the auto-scaling of namespace {path} was changed")

    # Changes of a layout.

    async def begin_transition(
        self,
        name: TopicName,
        plan: Callable[[Layout], LayoutPlan],
        request_id: RequestId = NO_REQUEST,
        conditions: Sequence[Condition] = (),
    ) -> Transition | CommittedTransition:
        """Write the intent to change a topic's layout as `plan` says. `TransitionRunning` while another one is under
        way. If an earlier try of this request began it, that one is returned, committed or not."""
        transition_id = random_id(self._random)
        for _ in range(MAX_TRIES):
            topic, revision = await self._existing(name, "changed")
            if (running := topic.transition) is not None:
                if running.id != transition_id and not running.created_by == request_id != NO_REQUEST:
                    raise TransitionRunning(
                        f"the layout of topic {name} is being changed: segments "
                        f"{', '.join(map(str, running.parents))} are being replaced; wait for that, or abort it"
                    )
                return running
            mark = self.committed.get(name.path)
            if mark is not None and (mark.id == transition_id or mark.created_by == request_id != NO_REQUEST):
                return mark
            begun = topic.beginning(
                plan(topic.layout),
                transition_id=transition_id,
                created_at=self._clock.now_us(),
                created_by=request_id,
            )
            _check_size(name, begun)
            if await self._replace(name, revision, begun, conditions) and begun.transition is not None:
                return begun.transition
        raise _unknown(f"whether the layout of topic {name} is being changed")

    async def abort_transition(self, name: TopicName, asked: TransitionKey | None = None) -> None:
        """Take back the change of a topic's layout that is under way, or the one that is `asked` for. Doing that again
        is fine. `TransitionRefused` if the change cannot be taken back any more, or if none is under way.

        The store is read, because the view may not show yet that the change is past that point."""
        for _ in range(MAX_TRIES):
            topic, revision = await self._existing(name, "changed")
            running = topic.transition
            if asked is None:
                if running is None:
                    raise TransitionRefused(
                        f"the layout of topic {name} is not being changed: there is nothing to abort"
                    )
                asked = running.key
            if running is None or running.id != asked.id:
                if asked.is_committed(topic.layout):
                    raise TransitionRefused(f"the layout of topic {name} has been changed already: merge or split it")
                return
            if running.step is not TransitionStep.CREATING:
                raise TransitionRefused(
                    f"the transition of topic {name} cannot be aborted any more: its parents are being sealed"
                )
            if await self._replace(name, revision, topic.aborted()):
                return
        raise _unknown(f"whether the change of the layout of topic {name} was taken back")

    async def advance(
        self,
        name: TopicName,
        transition_id: int,
        change: Callable[[Topic], Topic],
        conditions: Sequence[Condition] = (),
        operations: Sequence[Operation] = (),
    ) -> bool:
        """Go on with a transition: replace the topic's record. Return False if the topic has changed meanwhile, or
        another condition does not hold: look again."""
        known = self._table.known(name.path)
        topic = self.find(name.path)
        if known is None or topic is None or topic.transition is None or topic.transition.id != transition_id:
            return False
        return await self._replace(name, known.revision, change(topic), conditions, operations)

    async def prune(self, name: TopicName, segment_id: SegmentId, conditions: Sequence[Condition]) -> bool:
        """Drop a sealed segment from the layout. Return False if it is gone, or if something was faster: look again."""
        topic, revision = await self._existing(name, "changed")
        info = topic.layout.segments.get(segment_id)
        if info is None or info.is_active or info.parent_ids:
            return False
        return await self._replace(name, revision, topic.pruned(segment_id), conditions)

    async def _existing(self, name: TopicName, to_be: str) -> tuple[Topic, Revision]:
        """Read the topic from the store. When this returns, the view has caught up."""
        entry = await self._store.get(paths.layout(name.path))
        topic = Topic.from_json(entry.value) if entry is not None else None
        if entry is None or topic is None or topic.deleting:
            raise TopicNotFound(f"topic {name} cannot be {to_be}: it does not exist, or not any more")
        await self.view.caught_up(entry.revision)
        return topic, entry.revision

    async def _replace(
        self,
        name: TopicName,
        revision: Revision,
        topic: Topic,
        conditions: Sequence[Condition] = (),
        operations: Sequence[Operation] = (),
    ) -> bool:
        """Return True when the view shows the new record. False if nothing was written, or if that is not known. The
        view then shows what was in the way."""
        key = paths.layout(name.path)
        try:
            result = await self._store.txn(
                [Compare(key, revision), *conditions], [Put(key, topic.to_json()), *operations]
            )
        except MetadataUncertain:
            return False
        await self.view.caught_up(result.revision)
        return result.succeeded

    async def mark_deleting(self, name: TopicName, topic_id: int | None = None) -> Topic:
        """Mark a topic as being deleted: for clients it no longer exists. Marking it again is fine. `TopicNotFound`,
        also if the topic of this name has another id than `topic_id`."""
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            if entry is None:
                raise TopicNotFound(f"topic {name} cannot be deleted: it does not exist")
            topic = Topic.from_json(entry.value)
            if topic_id is None:
                topic_id = topic.id
            if topic_id != topic.id:
                raise TopicNotFound(f"topic {name} cannot be deleted: it was deleted, and created again since")
            revision: Revision | None = entry.revision
            if not topic.deleting:
                topic = msgspec.structs.replace(topic, deleting=True)
                revision = await self._try([Compare(key, entry.revision)], Put(key, topic.to_json()))
            if revision is not None:
                await self.view.caught_up(revision)
                return topic
        raise _unknown(f"whether topic {name} was marked as deleted")

    async def remove(self, name: TopicName) -> None:
        """Remove the record of a topic that is being deleted. Removing it again is fine."""
        key = paths.layout(name.path)
        for _ in range(MAX_TRIES):
            entry = await self._store.get(key)
            # A record without the mark is that of a new topic of the same name: the old record is gone already.
            if entry is None or not Topic.from_json(entry.value).deleting:
                return
            revision = await self._try([Compare(key, entry.revision)], Delete(key))
            if revision is not None:
                await self.view.caught_up(revision)
                return
        raise _unknown(f"whether the record of topic {name} was removed")

    async def _try(self, conditions: list[Compare], operation: Operation) -> Revision | None:
        """Return the revision of the write; None if it failed or its answer was lost: the caller reads back."""
        try:
            result = await self._store.txn(conditions, [operation])
        except MetadataUncertain:
            return None
        return result.revision if result.succeeded else None


def namespace_of(path: str) -> str:
    """Return `tenant/namespace` of a topic's path, or of a namespace's."""
    return "/".join(path.split("/")[:2])


def _exists(name: TopicName, found: Topic) -> TopicExists:
    if found.deleting:
        return TopicExists(f"topic {name} is still being deleted; create it again when that is done")
    return TopicExists(f"topic {name} cannot be created: it exists")


def _check_size(name: TopicName, begun: Topic) -> None:
    """Refuse a change of layout that could not be written in the end."""
    size = max(len(topic.to_json()) for topic in (begun, begun.committed()))
    if size > MAX_CHANGED_BYTES:
        raise TransitionRefused(
            f"the layout of topic {name} has {len(begun.layout.segments)} segments, with those that are sealed, and no "
            f"room for more: its record would have {size} bytes, {MAX_CHANGED_BYTES} are the most; a sealed segment "
            "goes when retention has deleted its records and every subscription has consumed it"
        )


def _unknown(what: str) -> MetadataUncertain:
    return MetadataUncertain(f"it is not known {what}: the metadata store's answers were lost; look, then try again")
