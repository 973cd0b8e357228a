"""What pages say: numbers, consequences, records, reports. Without a browser."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from braid.cli.console import admin_urls
from braid.console import numbers
from braid.console.drawing.svg import moment_text
from braid.console.pages import consequences
from braid.console.pages.actions import progress
from braid.console.pages.cluster import brokers_card, changes_card, figures
from braid.console.pages.consequences import change_text, changes_of
from braid.console.pages.messages import Reading, headers_of, place_of, records_card
from braid.console.pages.pipeline import Jobs, queries_card, reports_card
from braid.console.pages.subscriptions import oldest_s, subscription_card
from braid.console.pages.topic import segment_row
from braid.console.pages.topics import Listing, chosen, topics_card
from braid.console.records import (
    MAX_SHOWN_BYTES,
    Ends,
    Place,
    decoded,
    ends_of,
    first_offsets,
    hex_dump,
    one_line,
    shown,
)
from braid.console.reports import complaints, newest, summary
from braid.console.watch.history import SegmentSeen
from braid.console.watch.view import BrokerSeen, ClusterView, TopicSeen
from braid.model.errors import InvalidArgument
from braid.model.hashing import key_hash
from braid.model.message import Message

GIVEN: dict[str, Any] = {"by": "end", "segment": None, "offset": 0, "time": "", "key": "", "count": 50}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.bytes_text(512), "512 B"),
        (numbers.bytes_text(1536), "1.5 KiB"),
        (numbers.bytes_text(20 << 30), "20.0 GiB"),
        (numbers.bytes_text(None), "–"),
        (numbers.count_text(1234567), "1,234,567"),
        (numbers.counted(1, "chunk"), "1 chunk"),
        (numbers.counted(0, "chunk"), "0 chunks"),
        (numbers.counted(2, "copy"), "2 copies"),
        (numbers.counted(None, "chunk"), "– chunks"),
        (numbers.short_text(950), "950"),
        (numbers.short_text(1234), "1.2 k"),
        (numbers.short_text(35_000_000), "35.0 M"),
        (numbers.rate_text(0.25, "records"), "0.2 records/s"),
        (numbers.rate_text(0.02, "records"), "<0.1 records/s"),
        (numbers.rate_text(0.0, "records"), "0 records/s"),
        (numbers.rate_text(12_000, "records"), "12.0 k records/s"),
        (numbers.age_text(45), "45 s"),
        (numbers.age_text(600), "10 min"),
        (numbers.age_text(9 * 86_400), "9 days"),
        (numbers.percent_text(0.256), "26 %"),
    ],
)
def test_numbers_have_units(text: str, expected: str) -> None:
    assert text == expected


# Consequences.


def segment(id_: int, first: int, last: int, owner: str = "broker-0") -> SegmentSeen:
    return SegmentSeen(id=id_, first_hash=first, last_hash=last, active=True, owner=owner)


def test_an_action_says_what_will_happen() -> None:
    low, high = segment(1, 0, 0x7FFF), segment(2, 0x8000, 0xFFFF)
    assert "Segment 1 (0000–7fff) goes from broker-0 to broker-2." in consequences.of_move(low, "broker-2")
    assert "two segments at hash 1000" in consequences.of_split(low, 2, "1000")[0]
    assert "4 segments of equal size" in consequences.of_split(low, 4, "")[0]
    assert "1 (0000–7fff) and 2 (8000–ffff)" in consequences.of_merge(low, high)[0]
    assert (
        "a hands over 12 segments to the other 2 brokers"
        in consequences.of_drain(BrokerSeen(id="a", segments=12), 2)[0]
    )
    assert "nowhere to go" in consequences.of_drain(BrokerSeen(id="a", segments=12), 0)[0]
    assert "1,234 records" in consequences.of_skip("billing", 1234)[0]


def test_a_merge_takes_the_next_neighbour_or_the_one_before_the_last() -> None:
    first, second, third = segment(1, 0, 99), segment(5, 100, 199), segment(3, 200, 0xFFFF)
    topic = TopicSeen(path="t", segments=(third, first, second))
    assert consequences.neighbour(first, topic) == second
    assert consequences.neighbour(third, topic) == second
    assert consequences.neighbour(first, TopicSeen(path="t", segments=(first,))) is None


def test_a_plan_to_balance_names_its_moves() -> None:
    move = {"topic": "t", "segment": 1, "from": "a", "to": "b", "bytesPerS": 2048}
    plan: dict[str, Any] = {"moves": [move], "notes": [{"text": "why"}], "spreadBefore": 1.5, "spreadAfter": 1.1}
    assert consequences.of_balance(plan)[1:] == ["t segment 1: a → b (2.0 KiB/s)", "why"]
    idle = {**plan, "moves": [{**move, "bytesPerS": 0}], "spreadAfter": 1.5}
    assert consequences.of_balance(idle)[:2] == [
        "The load stays as it is; the numbers of segments are evened.",
        "t segment 1: a → b (idle)",
    ]
    assert consequences.of_balance({**plan, "moves": []}) == ["Nothing would move.", "why"]


# The cluster.


def test_a_broker_that_is_silent_is_shown_so() -> None:
    view = ClusterView(at=1.0, brokers=(BrokerSeen(id="a"), BrokerSeen(id="b", state="silent")))
    page = brokers_card(view, {"a": 0, "b": 1}, read_only=False)
    assert 'data-state="silent"' in page
    assert "not answering" in page
    assert page.count('data-act="drain"') == 1, "only of the one that answers"
    assert "data-act" not in brokers_card(view, {}, read_only=True)


def text_of(markup: str) -> str:
    return re.sub("<[^>]*>", " ", markup)


def test_a_phone_gets_what_its_columns_have_no_room_for() -> None:
    broker = BrokerSeen(
        id="a", version="1.2.3", lease="held", cpu=0.31, bytes_in_per_s=2048.0, bytes_out_per_s=4096.0,
        disk_size=1e9, disk_free=2e8, connections=7,
    )  # fmt: skip
    topic = TopicSeen(
        path="x/y/orders", segments=(segment(0, 0, 0xFFFF),), bytes_in_per_s=5120.0, bytes_out_per_s=6144.0,
        stored_bytes=7168.0,
    )  # fmt: skip
    view = ClusterView(at=1.0, brokers=(broker,), topics={topic.path: topic})
    stats = {"records": 8, "bytes": 9216, "chunks": 10, "chunkBytes": 11264, "endOffset": 13, "exportedOffset": 1,
             "logBytes": 13312}  # fmt: skip
    for page in (
        brokers_card(view, {}, read_only=True),
        topics_card(view, Listing(), {}),
        segment_row(segment(0, 0, 0xFFFF), stats, 1.0, {}, read_only=True),
    ):
        (row,) = re.findall(r"<tr [^>]*data-(?:broker|topic|segment).*?</tr>", page)
        (narrow,) = map(text_of, re.findall(r'<span class="under narrow">(.*?</span> )</span>', row))
        columns = [text_of(each) for each in re.findall(r'<td class="[^"]*\bwide\b[^"]*">(.*?)</td>', row)]
        assert len(columns) >= 4
        for wide in columns:
            for number in re.findall(r"[0-9a-f.–]*\d[0-9a-f.–]*", wide):
                assert number in narrow, f"{wide!r} is not on a phone: {narrow}"
    assert "lease held" in brokers_card(view, {}, read_only=True)


def test_what_nobody_can_tell_is_not_called_nothing() -> None:
    served, orphan = segment(0, 0, 0xFFFF), segment(0, 0, 0xFFFF, owner="")

    def shown(of: SegmentSeen, alarms: tuple[str, ...] = ()) -> str:
        topic = TopicSeen(path="x/y/orders", segments=(of,), subscriptions=0, alarms=alarms)
        return topics_card(ClusterView(topics={topic.path: topic}), Listing(), {})

    assert "no subscription" in shown(served)
    assert "not known" in shown(orphan)
    assert "no subscription" not in shown(orphan)
    assert text_of(shown(orphan, ("it burns",))).count("it burns") == 2, "once for phones"


def test_segments_that_nobody_serves_are_counted_by_their_topics() -> None:
    orphan = SegmentSeen(id=0, first_hash=0, last_hash=0xFFFF, active=True, owner="")
    view = ClusterView(topics={"public/default/orders": TopicSeen(path="public/default/orders", segments=(orphan,))})
    shown = text_of(figures(view))
    assert re.search(r"Not served +1 +segment +orders", shown)
    assert re.search(r"Not served +0 +segments +all is served", text_of(figures(ClusterView())))


def test_empty_pages_say_what_to_do() -> None:
    assert "braid up" in brokers_card(ClusterView(), {}, read_only=False)
    assert "braid topic create orders" in topics_card(ClusterView(), Listing(), {})
    assert "Nothing is under way" in changes_card(ClusterView())


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"kind": "layout", "children": [1, 2], "step": "SEALING"}, "orders: segment 0 → 1, 2 (sealing)"),
        ({"kind": "move", "from": "a", "to": ["b"]}, "orders: segment 0 moves from a to b"),
        ({"kind": "vote", "from": "a"}, "orders: the replicas of segment 0 vote; its owner a is gone"),
        ({"kind": "replicas", "to": ["a", "b"]}, "orders: copies of segment 0 go to a, b"),
        ({"kind": "opening", "from": "a"}, "orders: a opens segment 0"),
    ],
)
def test_a_change_is_a_sentence(change: dict[str, Any], text: str) -> None:
    assert change_text({"topic": "public/default/orders", "segments": [0], **change}) == text


def test_progress_is_how_long_an_action_runs_and_what_its_topic_does() -> None:
    change = {"kind": "move", "from": "a", "to": ["b"]}
    view = ClusterView(
        changes=tuple({"topic": topic, "segments": [n], **change} for topic in ("x/y/z", "x/y/w") for n in range(8))
    )
    changes = changes_of(view, "x/y/z")
    assert len(changes) == 8
    assert progress(0.2, []) == '<div class="outcome live">Under way…</div>'
    page = progress(12.0, changes)
    assert "Under way for 12 s" in page
    assert "x/y/z: segment 5 moves from a to b" in page
    assert "segment 6" not in page
    assert "… and 2 more" in page


def test_topics_are_searched_and_sorted() -> None:
    view = ClusterView(
        topics={
            path: TopicSeen(path=path, backlog=backlog)
            for path, backlog in (("public/default/a", 5.0), ("public/default/b", 9.0), ("x/y/orders", None))
        }
    )
    assert [each.path for each in chosen(view, Listing(sort="backlog", down=True))][:2] == [
        "public/default/b",
        "public/default/a",
    ]
    assert [each.path for each in chosen(view, Listing(search="order"))] == ["x/y/orders"]
    assert chosen(view, Listing(down=True))[0].path == "x/y/orders"
    assert "No topic matches" in topics_card(view, Listing(search="nothing"), {})


# Records.


ENDS = {0: Ends(10, 100, 0, 0x7FFF, True), 1: Ends(0, 30, 0x8000, 0xFFFF, True), 2: Ends(5, 5, 0, 0xFFFF, False)}


@pytest.mark.parametrize(
    ("place", "starts"),
    [
        (Place(by="end", count=50), {0: 50, 1: 0}),
        (Place(by="begin"), {0: 10, 1: 0}),
        (Place(by="offset", offset=40), {0: 40}),
        (Place(by="offset", offset=3, segment=0), {0: 10}),
        (Place(by="end", count=5, segment=1), {1: 25}),
    ],
)
def test_a_look_begins_where_it_was_asked_to(place: Place, starts: dict[int, int]) -> None:
    assert first_offsets(place, ENDS) == starts


def test_a_key_is_looked_for_only_in_segments_that_may_have_it() -> None:
    key = b"customer-7"
    (where,) = first_offsets(Place(by="key", key=key), ENDS)
    assert ENDS[where].first_hash <= key_hash(key) <= ENDS[where].last_hash


def test_segments_that_nobody_serves_are_left_out() -> None:
    known = {"earliestOffset": 1, "endOffset": 5, "hashRange": {"start": 0, "end": 9}, "state": "ACTIVE"}
    stats = {"segments": {"0": known, "1": {**known, "endOffset": None}}}
    assert ends_of(stats) == {0: Ends(1, 5, 0, 9, True)}


@pytest.mark.parametrize(
    ("data", "form", "text", "shown_as"),
    [
        (b'{"a":1}', "auto", '{\n  "a": 1\n}', "json"),
        (b"17", "auto", "17", "text"),
        (b"17", "json", "17", "json"),
        ("grüß".encode(), "auto", "grüß", "text"),
        (b"\x00\xff", "auto", hex_dump(b"\x00\xff"), "hex"),
        (b"ab", "hex", hex_dump(b"ab"), "hex"),
        (b"{broken", "json", "{broken", "text"),
        (b'["\\ud800"]', "auto", '["\\ud800"]', "text"),  # Half a pair: no page could be sent with it.
    ],
)
def test_bytes_are_shown_as_what_they_are(data: bytes, form: str, text: str, shown_as: str) -> None:
    assert decoded(data, form) == (text, shown_as)


def test_a_deep_value_is_not_indented_beyond_measure() -> None:
    """Such a value of 64 KiB would stop the console for seconds and make a page of 60 MB."""
    deep = b"[" * 900 + b"0," * 30_000 + b"0" + b"]" * 900
    assert decoded(deep) == (deep.decode(), "text")
    wide = json.dumps([{"order": number} for number in range(4_000)]).encode()
    assert decoded(wide)[1] == "json"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "1970-01-01 00:00:00 UTC"),
        (253_402_300_799.0, "9999-12-31 23:59:59 UTC"),
        (253_402_300_800.0, "253402300800 s"),
        (-(2.0**63) / 1e6, "-9223372036855 s"),
    ],
)
def test_every_time_that_a_producer_may_write_is_shown(seconds: float, text: str) -> None:
    assert moment_text(seconds) == text


def test_a_page_keeps_the_beginning_of_a_large_record_and_tells_its_size() -> None:
    huge = b"x" * (8 * MAX_SHOWN_BYTES)
    kept = shown(Message(value=huge, key=huge, timestamp_us=0, offset=7, headers={"h": huge}, segment=3, topic="t"))
    assert (len(kept.value), len(kept.key or b""), len(kept.headers["h"])) == (MAX_SHOWN_BYTES,) * 3
    reading = Reading()
    reading.records.append(kept)
    reading.open.add((3, 7))
    page = records_card(reading, "t")
    assert "512 KiB" in page
    assert "the first 64.0 KiB are shown" in page


def test_a_row_shows_one_line() -> None:
    assert one_line(b'{"a":\n 1}') == '{ "a": 1 }'
    assert one_line(None) == "–"
    assert one_line(b"\x00\x01") == "00 01"
    assert hex_dump(b"Braid\x00").startswith("000000  42 72 61 69 64 00 ")


def test_what_a_person_typed_is_read_or_refused_with_a_sentence() -> None:
    place = place_of({**GIVEN, "by": "time", "time": "2026-01-31 12:00", "count": 9_999, "segment": 3})
    assert place.time == datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    assert (place.count, place.segment) == (200, 3)
    with pytest.raises(ValueError, match="write the time as"):
        place_of({**GIVEN, "by": "time", "time": "noon"})
    assert headers_of("a=1, b = x=y ,") == {"a": b"1", "b": b"x=y"}
    with pytest.raises(ValueError, match="is no header"):
        headers_of("nonsense")


# The pipeline.


def message(content: object, offset: int = 0) -> Message:
    return Message(value=json.dumps(content).encode(), key=None, timestamp_us=offset, offset=offset)


def test_the_last_report_of_each_job_counts() -> None:
    first = {"job": "audit", "at": 1, "ok": False, "report": {"topic": "a", "records": 5, "defects": [{"text": "gap"}]}}
    runs = newest(
        [
            message(first),
            message({**first, "at": 3, "ok": True}),
            message({"job": "lake", "at": 2}),
            message("x"),
            message(4),
        ]
    )
    assert [(run.job, run.at, run.ok) for run in runs] == [("audit", 3, True), ("lake", 2, True)]
    assert summary(runs[0]) == [("records", 5)]
    assert complaints(runs[0]) == ["gap"]


def test_replays_of_one_topic_into_two_are_two() -> None:
    replays = [
        {"job": "replay", "at": at, "report": {"source": "public/default/orders", "target": f"public/default/{target}"}}
        for at, target in ((1, "rebuilt"), (2, "shadow"), (3, "rebuilt"))
    ]
    jobs = Jobs()
    jobs.runs = newest(map(message, replays))
    assert [(run.at, run.topics[1]) for run in jobs.runs] == [
        (3, "public/default/rebuilt"),
        (2, "public/default/shadow"),
    ]
    assert "replay orders → rebuilt" in reports_card(jobs, "braid-reports")


@pytest.mark.parametrize(
    "report",
    [
        {"defects": 5},
        {"defects": None, "failures": "x", "losses": {"a": 1}},
        {"defects": [5, None, ["x"], {"text": 7}]},
        {"records": 10**400, "seconds": True},
        {"topic": {"a": []}},
    ],
)
def test_a_report_of_any_shape_is_shown_beside_the_others(report: dict[str, Any]) -> None:
    jobs = Jobs()
    jobs.runs = newest([message({"job": "lake", "at": 2}), message({"job": "audit", "at": 1, "report": report})])
    page = reports_card(jobs, "braid-reports")
    assert "lake" in page
    assert "audit" in page


def test_a_report_of_an_impossible_time_is_left_out() -> None:
    times = (10**400, -1, 1 << 63)
    assert newest([message({"job": "audit", "at": at}) for at in times]) == []


def test_a_stream_says_how_old_its_oldest_record_is() -> None:
    path = "public/default/orders"
    view = ClusterView(topics={path: TopicSeen(path=path, ages_s={"billing": 600.0})})
    found: dict[str, Any] = {
        "kind": "stream", "backlog": 7, "consumers": {}, "queue": None, "unavailable": {}, "movedAt": None,
        "heldBytes": 0, "unreadable": None, "undrained": [], "segments": {},
    }  # fmt: skip
    page = subscription_card(path, "billing", found, age_s=oldest_s(view, path, "billing"), read_only=True)
    assert "10<small> min</small>" in page
    assert "the oldest 10 min" in queries_card([(path, "billing", found, 600.0)])
    assert oldest_s(view, path, "audit-log") is None
    drained = {**found, "backlog": 0}
    assert "min</small>" not in subscription_card(path, "billing", drained, age_s=600.0, read_only=True)
    assert "the oldest" not in queries_card([(path, "billing", drained, 600.0)])


# The command.


def test_several_admin_ports_may_be_named() -> None:
    assert admin_urls("http://a:1, https://b:2/") == ("http://a:1", "https://b:2")
    for wrong in ("a:1", "", "braid://a:1"):
        with pytest.raises(InvalidArgument, match="is no admin URL"):
            admin_urls(wrong)
