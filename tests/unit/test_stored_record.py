"""Stored records keep what another build has written into them, and are never taken for absent."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec import UNSET, UnsetType

from braid.broker.groups.controllers import Controller
from braid.model.cluster import Registration
from braid.model.errors import RecordUnreadable
from braid.model.ids import Epoch, Offset, SegmentId
from braid.model.layout import Layout
from braid.model.load import LoadReport, SegmentLoad
from braid.model.names import SegmentName, TopicName
from braid.model.ownership import Move, Ownership
from braid.model.stored_record import StoredRecord, decode, encode
from braid.model.subscription import ConsumerSession, Cursor, Subscription
from braid.model.topic import PolicyChanges, Topic, TopicPolicies
from braid.storage.history.catalog import ChunkDescriptor, Frontier, SealedState

RECORDS = [
    Topic(id=1, layout=Layout.initial(2)),
    Ownership.first("a"),
    Subscription(id=1),
    Cursor(offset=Offset(1), epoch=Epoch(1)),
    ConsumerSession(joined_at=1),
    Registration(address="a:1", admin="a:2", labels={"?": "x"}),
    LoadReport(at=1),
    Controller(broker="a"),
    Frontier(Epoch(1), "a", False, Epoch(0), Offset(0)),
    SealedState(9, Epoch(1), "a", 0),
    ChunkDescriptor(Offset(0), Offset(9), Epoch(1), "0.chunk", 100, 80, 0, 0, 0, 0xFFFF),
]
LATER = {"tier": "gold", "limits": {"rate": [1, 2.5, None]}}
"""Fields that this build does not know."""


def plain(record: StoredRecord) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.json.decode(encode(record))
    return found


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_every_record_keeps_the_fields_that_this_build_does_not_know(record: StoredRecord) -> None:
    later = plain(record) | LATER
    found = decode(type(record), msgspec.json.encode(later))
    assert plain(found) == later
    assert msgspec.structs.replace(found, unknown=UNSET) == record


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_of_this_build_is_stored_without_anything_of_another(record: StoredRecord) -> None:
    assert encode(record) == msgspec.json.encode(record)
    assert decode(type(record), encode(record)) == record


def test_unknown_fields_stay_with_the_value_that_they_were_found_in() -> None:
    stored = plain(Topic(id=1, layout=Layout.initial(2)))
    stored["policies"] |= {"quota": 7}
    stored["layout"]["segments"]["1"] |= {"tier": "gold"}
    stored["layout"]["segments"]["1"]["hashRange"] |= {"salt": 3}
    stored["layout"]["properties"] = {"?": '{"team":1}'}  # A user's, which looks like one of ours.
    topic = Topic.from_json(msgspec.json.encode(stored))
    changed = msgspec.structs.replace(
        topic, deleting=True, policies=PolicyChanges(retention_ms=5).apply(topic.policies)
    )
    stored["policies"]["retentionMs"] = 5
    assert plain(changed) == stored | {"deleting": True}


def test_a_segment_has_the_same_name_whatever_another_build_has_added_to_its_range() -> None:
    stored = plain(Topic(id=1, layout=Layout.initial(2)))
    stored["layout"]["segments"]["1"]["hashRange"] |= {"salt": 3}
    info = Topic.from_json(msgspec.json.encode(stored)).layout.segment(1)
    orders = TopicName.parse("orders")
    assert SegmentName.of(orders, info) == SegmentName.of(orders, Layout.initial(2).segment(1))


def test_a_load_report_keeps_the_unknown_fields_of_its_segments() -> None:
    stored = plain(LoadReport(at=1, busiest=(SegmentLoad(topic_path="a/b/c", segment_id=SegmentId(1)),)))
    stored["busiest"][0] |= LATER
    assert plain(LoadReport.from_json(msgspec.json.encode(stored))) == stored


def test_a_new_value_in_place_of_another_has_none_of_its_unknown_fields() -> None:
    stored = plain(Ownership.first("a").serving().moving(Move(to="b")))
    stored["move"] |= {"deadline": 9}
    record = Ownership.from_json(msgspec.json.encode(stored | LATER))
    assert plain(record.kept("").moving(Move(to="c")))["move"] == {"to": "c", "id": ""}
    assert plain(record.draining())["move"]["deadline"] == 9
    assert plain(record.draining().sealed().assigned("b").serving())["tier"] == "gold"


@pytest.mark.parametrize(
    "change",
    [
        {"layout": {}},
        {"policies": {"durability": "quantum"}},
        {"policies": {"replicas": 99}},
        {"id": "x"},
    ],
)
def test_a_record_that_cannot_be_read_is_a_retriable_error(change: dict[str, Any]) -> None:
    stored = plain(RECORDS[0])
    with pytest.raises(RecordUnreadable, match="a topic's record cannot be read") as caught:
        Topic.from_json(msgspec.json.encode(stored | change))
    assert caught.value.retriable


@pytest.mark.parametrize("data", [b"", b"null", b"{", b'{"id":1,"x":' + b"[" * 100_000, b'{"id":"\xff"}'])
def test_bytes_that_are_no_record_are_a_retriable_error(data: bytes) -> None:
    with pytest.raises(RecordUnreadable):
        decode(Subscription, data)


def test_every_policy_can_be_changed() -> None:
    policies = {field.name: field.type for field in msgspec.structs.fields(TopicPolicies) if field.name != "unknown"}
    changes = {field.name: field.type for field in msgspec.structs.fields(PolicyChanges)}
    assert changes == {name: kind | UnsetType for name, kind in policies.items()}
    assert PolicyChanges().apply(TopicPolicies()) == TopicPolicies()
