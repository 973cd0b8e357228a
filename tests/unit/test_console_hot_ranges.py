"""The card of hot ranges: bars out of histograms, hashes that halve a load, and keys that no split parts."""

from __future__ import annotations

import re
from typing import Any

import pytest

from braid.console.drawing.hash_load import HEIGHT, MIN_BAR, draw_hash_load, outline
from braid.console.pages.hot_ranges import LISTED, about_split, hot_ranges_card, verdict
from braid.console.watch.history import SegmentSeen
from braid.console.watch.view import TopicDetail, TopicSeen

Json = dict[str, Any]


def measured(first: int, last: int, shares: list[float], **more: Any) -> Json:
    return {
        "hashRange": {"start": first, "end": last}, "recordsInPerS": 100, "records": 1_000.0, "shares": shares,
        "hottest": {"start": first, "end": first + 63}, "hottestShare": max(shares, default=0.0), "hotKey": False,
        "splitAt": f"{(first + last + 1) // 2:04x}", "lowerShare": 0.5, "upperShare": 0.5, "splitHelps": True, **more,
    }  # fmt: skip


EVEN = {"0": measured(0, 0x7FFF, [0.25] * 4), "1": measured(0x8000, 0xFFFF, [0.25] * 4)}
ONE_KEY: Json = {"hotKey": True, "splitHelps": False, "hottestShare": 0.96, "lowerShare": 0.97, "upperShare": 0.03}


def page(segments: dict[str, Json], *, read_only: bool = False, unknown: tuple[str, ...] = ()) -> str:
    seen = tuple(
        SegmentSeen(
            id=int(id_),
            first_hash=each["hashRange"]["start"],
            last_hash=each["hashRange"]["end"],
            active=True,
            owner="a",
        )
        for id_, each in segments.items()
    )
    detail = TopicDetail(layout={}, stats={}, key_hashes={"segments": segments, "unknown": unknown})
    return hot_ranges_card(TopicSeen(path="t", segments=seen), detail, {"a": 3}, read_only=read_only)


# Bars.


def test_bars_lie_on_the_ring_without_a_gap() -> None:
    load = draw_hash_load({"5": measured(0x8000, 0xFFFF, [0.5, 0.3, 0.2]), "1": measured(0, 0x7FFF, [1.0])})
    assert [each.segment for each in load.bars] == [1, 5, 5, 5]
    edges = [edge for each in load.bars for edge in (each.first_hash, each.last_hash + 1)]
    assert (edges[0], edges[-1]) == (0, 0x10000)
    assert edges[1:-1:2] == edges[2::2]


def test_height_is_density_on_one_scale_for_all_segments() -> None:
    wide, narrow = measured(0, 0x7FFF, [0.5, 0.5]), measured(0x8000, 0xBFFF, [0.5, 0.5])
    heights = [each.height for each in draw_hash_load({"0": wide, "1": narrow}).bars]
    assert heights == [HEIGHT / 2, HEIGHT / 2, HEIGHT, HEIGHT], "the same records on half as many hashes"
    busier = draw_hash_load({"0": {**wide, "recordsInPerS": 400}, "1": narrow})
    assert [each.height for each in busier.bars] == [HEIGHT, HEIGHT, HEIGHT / 2, HEIGHT / 2]
    assert [each.per_s for each in busier.bars] == [200, 200, 50, 50]


def test_the_hottest_range_is_named_only_if_it_stands_out() -> None:
    assert draw_hash_load(EVEN).hottest is None
    hot = draw_hash_load({"0": measured(0, 0xFFFF, [0.1, 0.1, 0.7, 0.1])}).hottest
    assert hot is not None
    assert (hot.first_hash, hot.last_hash, hot.share) == (0x8000, 0xBFFF, 0.7)
    few = measured(0, 0xFFFF, [0.1, 0.1, 0.7, 0.1], splitHelps=None, splitAt=None)
    assert draw_hash_load({"0": few}).hottest is None, "by chance"


def test_few_records_are_seen_and_none_are_not() -> None:
    load = draw_hash_load({"0": measured(0, 0xFFFF, [0.999, 0.001, 0.0, 0.0])})
    assert [each.height for each in load.bars] == [HEIGHT, MIN_BAR, 0, 0]
    assert outline(list(load.bars)) == "M0,100V0.00H16384V98.50H32768V100.00H49152V100.00H65536V100Z"


@pytest.mark.parametrize("segments", [{}, {"0": measured(0, 9, [])}, {"0": measured(0, 9, [0.0, 0.0])}])
def test_without_records_there_are_no_bars(segments: dict[str, Json]) -> None:
    assert draw_hash_load(segments).bars == ()
    assert "No record with a key has come lately" in page(segments)


# What it means.


def test_a_segment_has_the_hash_at_which_a_split_halves_its_load() -> None:
    shown = page(EVEN)
    assert 'data-segment="0" data-at="4000"' in shown
    assert "50 % below, 50 % above" in shown
    assert shown.count('class="cut') == 2, "a mark for each segment"
    assert "data-act" not in page(EVEN, read_only=True)


def test_a_segment_that_nobody_has_measured_is_told_from_one_without_load() -> None:
    seen = (
        SegmentSeen(id=0, first_hash=0, last_hash=0x7FFF, active=True),
        SegmentSeen(id=1, first_hash=0x8000, last_hash=0xFFFF, active=True),
        SegmentSeen(id=2, first_hash=0, last_hash=0xFFFF, active=False),
    )
    detail = TopicDetail(layout={}, stats={}, key_hashes={"segments": {"0": EVEN["0"]}, "unknown": ()})
    shown = hot_ranges_card(TopicSeen(path="t", segments=seen), detail, {}, read_only=False)
    assert "segment 1 is not measured yet" in re.sub("<[^>]*>", "", shown)
    assert "segment 0 is not" not in shown
    assert shown.count('class="range"') == 2, "a sealed segment has no place on the ring"


def test_one_key_that_is_the_load_is_named_and_offers_no_split() -> None:
    shown = page({"0": measured(0, 0xFFFF, [0.97, 0.03], **ONE_KEY)})
    assert "one key is 96 %" in shown
    assert "no split helps" in shown
    assert "data-act" not in shown
    assert 'class="cut' not in shown


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"splitHelps": None, "splitAt": None}, "too few records so far"),
        ({"splitHelps": False}, "no split takes a tenth off it"),
        ({"splitAt": None}, "its records have no keys"),
        ({"hotKey": True, "hottestShare": 0.6, "upperShare": 0.35}, "one key is 60 %"),
        ({"lowerShare": 0.4, "upperShare": 0.4}, "20 % without a key"),
    ],
)
def test_a_verdict_is_a_sentence(more: Json, text: str) -> None:
    assert text in verdict(measured(0, 0xFFFF, [1.0], **more))


def test_a_segment_of_one_hash_has_nothing_to_split() -> None:
    assert "a single hash" in verdict(measured(5, 5, [1.0], splitHelps=None, splitAt=None))


def test_the_busiest_segments_are_listed_and_the_others_counted() -> None:
    width = 0x10000 // 16
    many = {
        str(number): {**measured(number * width, (number + 1) * width - 1, [1.0]), "recordsInPerS": number}
        for number in range(16)
    }
    shown = page(many)
    assert re.findall(r'data-load="(\d+)"', shown) == [str(each) for each in range(15, 15 - LISTED, -1)]
    assert "and 10 less busy segments" in shown
    assert shown.count("<rect") == 16, "the picture has all of them"


def test_what_is_not_known_is_told() -> None:
    assert "broker b does not answer" in page(EVEN, unknown=("broker b does not answer",))
    nothing = TopicDetail(layout={}, stats={})
    assert "tokens that may administer" in hot_ranges_card(TopicSeen(path="t"), nothing, {}, read_only=False)


def test_a_split_says_before_what_it_would_do_for_the_load() -> None:
    known = {"segments": {"0": EVEN["0"], "1": measured(0, 9, [1.0], **ONE_KEY)}}
    assert about_split(known, 0) == "Its load is halved at hash 4000: 50 % below, 50 % above."
    assert "no split helps" in about_split(known, 1)
    assert about_split(known, 7) == about_split(None, 0) == ""
