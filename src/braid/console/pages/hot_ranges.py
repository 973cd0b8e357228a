"""The card of hot ranges: the histogram of key hashes, and where a split halves the load of a segment, if any does."""

from __future__ import annotations

from itertools import groupby
from typing import Any, Final

from braid.console.drawing.hash_load import HEIGHT, Bar, HashLoad, draw_hash_load, outline, percent_of_ring
from braid.console.drawing.strands import RING
from braid.console.drawing.svg import colour
from braid.console.html import Child, Html, el, join
from braid.console.numbers import count_text, percent_text, rate_text
from braid.console.pages.parts import act, card, empty, narrow, number, owner_dot, pill, table
from braid.console.watch.history import SegmentSeen
from braid.console.watch.view import Json, TopicDetail, TopicSeen

LISTED: Final = 6
"""Of the busiest segments; the picture has all of them."""
TICKS: Final = (0, 0x4000, 0x8000, 0xC000)
NAMED: Final = RING // 16
"""Segments that are narrower have no name in the picture, only in the hint under the pointer."""


def hot_ranges_card(topic: TopicSeen, detail: TopicDetail, colours: dict[str, int], *, read_only: bool) -> Html:
    active = {each.id: each for each in topic.segments if each.active}
    owners = {id_: each.owner for id_, each in active.items()}
    measured: dict[str, Json] = detail.key_hashes["segments"] if detail.key_hashes is not None else {}
    load = draw_hash_load(measured)
    body: list[Child] = []
    if detail.key_hashes is None:
        why = "Brokers tell where the load is to tokens that may administer the topic."
        body.append(empty("bar_chart", "Key hashes are not known", why))
    elif not load.bars:
        how = "Owners count key hashes while this page is open: publish records with keys, and the bars rise."
        body.append(empty("bar_chart", "No record with a key has come lately", how))
    else:
        body.append(_picture(load, measured, active, colours))
        body.append(_busiest(measured, owners, colours, read_only=read_only))
    lines = [el("p", line, cls="muted") for line in (*_unknown(detail), *_advice(detail.proposal))]
    if lines:
        body.append(el("div", lines, cls="pad stack close"))
    return card("Hot ranges", *body, hint="records by key hash, those of the last minutes")


# The picture.


def _picture(
    load: HashLoad, measured: dict[str, Json], active: dict[int, SegmentSeen], colours: dict[str, int]
) -> Html:
    shapes: list[Html] = []
    for segment, group in groupby(load.bars, key=lambda each: each.segment):
        owner = active[segment].owner if segment in active else ""
        fill = colour(owner, colours)
        shapes.append(el("path", d=outline(list(group)), style=f"fill:{fill}"))
    if load.hottest is not None:
        shapes.append(el("path", d=outline([load.hottest]), cls="hottest"))
    shapes += [_hint(each) for each in load.bars]
    bars = el(
        "svg",
        shapes,
        viewBox=f"0 0 {RING} {HEIGHT:.0f}",
        preserveAspectRatio="none",
        role="img",
        aria_label="Records in a second by key hash",
    )
    cuts = [_cut(each) for each in _listed(measured) if _helps(each[1])]
    edges = [_edge(each, measured=str(each.id) in measured) for each in active.values()]
    ticks = [el("span", f"{tick:04x}", style=f"left:{percent_of_ring(tick)}") for tick in TICKS]
    ticks.append(el("span", "ffff", cls="last"))
    return el(
        "div",
        el("div", edges, bars, cuts, cls="plot"),
        el("div", ticks, cls="hashes"),
        el("div", _legend(load, has_cuts=bool(cuts)), cls="legend"),
        cls="hash-load",
    )


def _hint(bar: Bar) -> Html:
    tip = (
        f"hashes {bar.first_hash:04x}–{bar.last_hash:04x}|{rate_text(bar.per_s, 'records')}|"
        f"{_share_text(bar.share)} of segment {bar.segment}"
    )
    width = bar.last_hash - bar.first_hash + 1
    return el("rect", x=bar.first_hash, y="0", width=width, height=int(HEIGHT), cls="hint", data_tip=tip)


def _edge(segment: SegmentSeen, *, measured: bool) -> Html:
    width = segment.last_hash + 1 - segment.first_hash
    word = el("span", "segment ", cls="word")  # A phone has no room for it.
    text = [word, str(segment.id), None if measured else " is not measured yet"]
    style = f"left:{percent_of_ring(segment.first_hash)};width:{percent_of_ring(width)}"
    return el("div", el("span", text) if width >= NAMED else None, cls="range", style=style)


def _cut(listed: tuple[str, Json]) -> Html:
    id_, found = listed
    at = int(found["splitAt"], 16)
    tip = f"a split at {found['splitAt']} halves segment {id_}|{_halves(found)}"
    kind = "cut right" if at > RING * 0.9 else "cut"
    return el("div", el("span", found["splitAt"]), cls=kind, style=f"left:{percent_of_ring(at)}", data_tip=tip)


def _legend(load: HashLoad, *, has_cuts: bool) -> list[Child]:
    found: list[Child] = []
    if load.hottest is not None:
        bar = load.hottest
        where = f"{bar.first_hash:04x}–{bar.last_hash:04x}"
        text = f"the hottest range: {where}, {_share_text(bar.share)} of segment {bar.segment}"
        found.append(el("span", el("i", cls="key hottest"), text))
    else:
        found.append(el("span", "the load is even: no range stands out"))
    if has_cuts:
        found.append(el("span", el("i", cls="key line"), "a split here halves its segment's load"))
    return found


# What it means for each segment.


def _listed(measured: dict[str, Json]) -> list[tuple[str, Json]]:
    return sorted(measured.items(), key=lambda item: (-item[1]["recordsInPerS"], int(item[0])))[:LISTED]


def _helps(found: Json) -> bool:
    return bool(found["splitHelps"]) and found["splitAt"] is not None


def _busiest(measured: dict[str, Json], owners: dict[int, str], colours: dict[str, int], *, read_only: bool) -> Html:
    total = sum(each["recordsInPerS"] for each in measured.values()) or 1
    rows = [
        el(
            "tr",
            el(
                "td",
                el("span", owner_dot(owners.get(int(id_), ""), colours), f"segment {id_}", cls="nowrap"),
                narrow(
                    rate_text(found["recordsInPerS"], "rec"),
                    percent_text(found["recordsInPerS"] / total),
                    f"hottest {_hottest_hashes(found)}",
                ),
                cls="name-cell",
            ),
            el(
                "td",
                rate_text(found["recordsInPerS"], "rec"),
                el("span", f"{percent_text(found['recordsInPerS'] / total)} of the topic", cls="under"),
                cls="n wide",
            ),
            el("td", _hottest(found), cls="wide"),
            el("td", verdict(found)),
            el("td", el("div", _split_here(id_, found, read_only=read_only), cls="acts")),
            data_load=id_,
        )
        for id_, found in _listed(measured)
    ]
    headings = [
        "Busiest",
        number("Published", wide=True),
        el("th", "Hottest hashes", cls="wide"),
        "A split halves it",
        "",
    ]
    more = len(measured) - len(rows)
    left = el("p", f"… and {count_text(more)} less busy segments", cls="muted pad") if more > 0 else None
    return join([table(headings, rows), left])


def _split_here(id_: str, found: Json, *, read_only: bool) -> Html | None:
    if read_only or not _helps(found):
        return None
    return act(f"Split at {found['splitAt']}", "split", segment=id_, at=found["splitAt"])


def _hottest(found: Json) -> Child:
    if found["hottest"] is None:
        return "–"
    share = el("span", f"{_share_text(found['hottestShare'])} of its records", cls="under")
    return [el("code", _hottest_hashes(found)), share]


def _hottest_hashes(found: Json) -> str:
    if found["hottest"] is None:
        return "–"
    first, last = found["hottest"]["start"], found["hottest"]["end"]
    return f"{first:04x}" if first == last else f"{first:04x}–{last:04x}"


def verdict(found: Json) -> Html:
    """Say where a split halves a segment's load, or why no split helps."""
    if found["hotKey"] and not found["splitHelps"]:
        share = percent_text(found["hottestShare"])
        return join(
            [pill(f"one key is {share}", "warn"), el("span", "no split helps: a key is in one segment", cls="under")]
        )
    if found["splitHelps"] is None:
        single = found["hashRange"]["start"] == found["hashRange"]["end"]
        return el("span", "it has a single hash" if single else "too few records so far", cls="faint")
    if not found["splitHelps"]:
        return el("span", "nowhere: no split takes a tenth off it", cls="muted")
    if found["splitAt"] is None:
        return el("span", "anywhere: its records have no keys", cls="muted")
    warning = pill(f"one key is {percent_text(found['hottestShare'])}", "warn") if found["hotKey"] else None
    return join(
        [el("span", "at ", el("code", found["splitAt"]), " "), warning, el("span", _halves(found), cls="under")]
    )


def _halves(found: Json) -> str:
    keyless = 1 - found["lowerShare"] - found["upperShare"]
    rest = f", {percent_text(keyless)} without a key" if keyless >= 0.005 else ""
    return f"{percent_text(found['lowerShare'])} below, {percent_text(found['upperShare'])} above{rest}"


def _share_text(share: float) -> str:
    return f"{share * 100:.1f} %" if 0 < share < 0.1 else percent_text(share)


def _unknown(detail: TopicDetail) -> list[str]:
    return list(detail.key_hashes["unknown"]) if detail.key_hashes is not None else []


def _advice(proposal: Json | None) -> list[str]:
    if proposal is None:
        return []
    reason = proposal["reason"]
    return [f"Auto-scaling is on. {reason}" if proposal["enabled"] else f"Auto-scaling is off. If it were on: {reason}"]


def about_split(key_hashes: Any, segment: int) -> str:
    """Say before a split of a segment what is known of its load; an empty text if nothing is."""
    found = key_hashes["segments"].get(str(segment)) if key_hashes is not None else None
    if found is None or found["splitHelps"] is None:
        return ""
    if found["hotKey"] and not found["splitHelps"]:
        share = percent_text(found["hottestShare"])
        return f"One key is {share} of its load: no split helps, because a key is in one segment."
    if not found["splitHelps"]:
        return "No split takes as much as a tenth of its load away."
    if found["splitAt"] is None:
        return ""
    return f"Its load is halved at hash {found['splitAt']}: {_halves(found)}."
