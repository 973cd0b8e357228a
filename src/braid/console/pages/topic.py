"""The page of one topic: its braid, and beside it rates, hot ranges, storage and replicas."""

from __future__ import annotations

import time
from typing import Any, Final

from msgspec import Struct, structs
from nicegui import ui

from braid.console.drawing.geometry import draw_braid
from braid.console.drawing.strands import Window, panned, zoomed
from braid.console.drawing.svg import write_svg
from braid.console.html import Html, el, join
from braid.console.numbers import UNKNOWN, bytes_rate_text, bytes_text, count_text, counted, percent_text, rate_text
from braid.console.pages import layout_actions
from braid.console.pages.actions import on_acts
from braid.console.pages.consequences import hashes
from braid.console.pages.frame import frame, head
from braid.console.pages.hot_ranges import hot_ranges_card
from braid.console.pages.parts import (
    act,
    card,
    command,
    empty,
    figure,
    icon,
    narrow,
    number,
    owner_dot,
    owner_name,
    pill,
    short_name,
    table,
)
from braid.console.pages.topics import ask_delete
from braid.console.pages.visit import Visit
from braid.console.watch.history import SegmentSeen, TopicHistory
from braid.console.watch.view import ClusterView, Json, TopicDetail, TopicSeen

SPANS: Final = (("1m", 60.0), ("5m", 300.0), ("15m", 900.0), ("1h", 3_600.0), ("6h", 21_600.0))
SIZE: Final = Window(start=0.0, end=1.0, width=1000.0, height=400.0)
PHONE: Final = Window(start=0.0, end=1.0, width=330.0, height=330.0)
LEGEND_MOVED: Final = Html(
    '<svg viewBox="-8 -8 16 16"><circle r="5.5"/><path d="M-2.6,0H2.2M0.4,-2L2.5,0L0.4,2"/></svg>'
)
LEGEND_FAILED: Final = Html(
    '<svg class="bad-sign" viewBox="-8 -8 16 16"><path class="sign" d="M0,-7L6.5,5H-6.5Z"/>'
    '<path d="M0,-2.4V1.4M0,3.1V3.3"/></svg>'
)


class Look(Struct):
    """Where a person looks: the last `span_s` seconds, or a window that was zoomed."""

    span_s: float = 300.0
    fixed: Window | None = None
    phone: bool = False


def show(visit: Visit, path: str) -> None:
    visit.want(path)
    visit.watch.propose(path)
    look = Look()
    with frame(visit, "topics", short_name(path)):
        with ui.element("div").classes("head"):
            crumbs = join([el("a", "Topics", href="/topics"), f" / {path.rpartition('/')[0]}"])
            ui.html(head(short_name(path), crumbs=crumbs), sanitize=False)
            ui.html(_tools(path, read_only=visit.read_only), sanitize=False).classes("tools")
        visit.live(lambda: _alarms(visit.view, path))
        visit.live(lambda: _figures(visit, path))
        picture = Picture(visit, path, look)
        visit.live(picture.card)
        with ui.element("div").classes("stack"):
            visit.live(lambda: segments_card(visit, path))
        visit.live(lambda: _beside(visit, path))
    handlers: dict[str, Any] = layout_actions.handlers(visit, path)
    handlers["span"] = lambda given: _set_span(visit, look, str(given.get("span")))
    handlers["zoom"] = lambda given: _zoom(visit, look, path, {"kind": "zoom", "factor": float(given.get("factor", 1))})
    handlers["delete"] = lambda _: ask_delete(visit, visit.view.topics.get(path) or TopicSeen(path=path))
    on_acts(visit, handlers)
    ui.on("braid", lambda event: _zoom(visit, look, path, event.args if isinstance(event.args, dict) else {}))
    ui.on("size", lambda event: _set_phone(visit, look, event.args))
    ui.timer(0.1, lambda: ui.run_javascript("emitEvent('size', {width: window.innerWidth})"), once=True)


def _tools(path: str, *, read_only: bool) -> Html:
    links = [
        el("a", icon("mail_outline"), "Messages", cls="act big", href=f"/messages/{path}"),
        el("a", icon("inbox"), "Subscriptions", cls="act big", href=f"/subscriptions/{path}"),
    ]
    if not read_only:
        links += [
            act("Policies", "policies", icon_name="tune", cls="big"),
            act("Delete", "delete", icon_name="delete_outline", cls="big danger"),
        ]
    return join(links)


def _is_missing(view: ClusterView, path: str) -> bool:
    """Tell whether the cluster was seen, and the topic not."""
    return bool(view.at) and path not in view.topics


def _figures(visit: Visit, path: str) -> Html:
    if _is_missing(visit.view, path):
        return Html("")
    return figures(visit.view.topics.get(path), visit.watch.details.get(path))


def _alarms(view: ClusterView, path: str) -> Html:
    if _is_missing(view, path):
        return el("div", icon("help_outline"), f"There is no topic {path}, or you may not know of it.", cls="banner")
    topic = view.topics.get(path)
    alarms = topic.alarms if topic is not None else ()
    return join([el("div", icon("warning_amber"), el("span", each), cls="banner warn") for each in alarms])


def figures(topic: TopicSeen | None, detail: TopicDetail | None) -> Html:
    topic = topic or TopicSeen(path="")
    segments = list(detail.stats["segments"].values()) if detail is not None else []
    chunks = sum(each.get("chunks") or 0 for each in segments)
    tail = sum(_tail(each) for each in segments)
    sealed = len(topic.segments) - topic.active
    return el(
        "div",
        figure("Published", rate_text(topic.records_in_per_s, "records"), bytes_rate_text(topic.bytes_in_per_s)),
        figure("Delivered", rate_text(topic.records_out_per_s, "records"), bytes_rate_text(topic.bytes_out_per_s)),
        figure("Segments", f"{topic.active} active", f"{sealed} sealed"),
        figure("Stored", bytes_text(topic.stored_bytes), counted(chunks, "chunk")),
        figure("Only in logs", counted(tail, "record"), "not exported yet"),
        _backlog(topic),
        cls="figures",
    )


def _backlog(topic: TopicSeen) -> Html:
    if topic.backlog is None:
        return figure("Backlog", UNKNOWN, "" if topic.subscriptions is None else "no subscription")
    return figure("Backlog", counted(topic.backlog, "record"), "slowest subscription")


def _tail(segment: Json) -> int:
    end, exported = segment.get("endOffset"), segment.get("exportedOffset")
    return max(0, end - exported) if end is not None and exported is not None else 0


# The braid.


def window_of(history: TopicHistory, look: Look, now: float) -> Window:
    """Return the part of the braid that is shown. A young topic fills the picture."""
    size = PHONE if look.phone else SIZE
    if look.fixed is not None:
        return structs.replace(look.fixed, width=size.width, height=size.height)
    start = max(now - look.span_s, min(history.first_birth, now - 20.0) - 2.0)
    return structs.replace(size, start=start, end=now)


class Picture:
    """The drawing of a braid. It moves with time, in steps: a picture of a thousand strands is large."""

    def __init__(self, visit: Visit, path: str, look: Look) -> None:
        self._visit = visit
        self._path = path
        self._look = look
        self._drawn: tuple[Any, Html] | None = None

    def card(self) -> Html:
        watch, look = self._visit.watch, self._look
        if _is_missing(self._visit.view, self._path):
            return Html("")
        history = watch.histories.get(self._path)
        if history is None:
            nothing = empty("waves", "Not seen yet", "The first look at the topic takes a moment.")
            return card("The braid", nothing, tools=_braid_tools(look))
        step = step_s(history.size)
        now = time.time() // step * step
        key = (now, look.span_s, look.fixed, look.phone, history.changes)
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = (key, _drawing(history, look, now, watch.colours))
        return self._drawn[1]


def step_s(strands: int) -> float:
    """Return how often a braid of so many strands is drawn."""
    return 1.0 if strands <= 100 else 2.0 if strands <= 300 else 5.0


def _drawing(history: TopicHistory, look: Look, now: float, colours: dict[str, int]) -> Html:
    braid = draw_braid(history.strands(), window_of(history, look, now))
    svg = write_svg(braid, colours, now=now, watched_since=history.watched_since)
    owners = sorted({each.owner for each in braid.ribbons if each.owner})
    legend = el(
        "div",
        [el("span", owner_dot(owner, colours), owner) for owner in owners[:12]],
        el("span", LEGEND_MOVED, "moved"),
        el("span", LEGEND_FAILED, "failed over"),
        el("span", "thickness is traffic", cls="faint"),
        cls="legend",
    )
    hint = "time runs to the right, the ring of key hashes is the height"
    return card("The braid", el("div", Html(svg), cls="braid-box"), legend, hint=hint, tools=_braid_tools(look))


def _braid_tools(look: Look) -> Html:
    spans = [
        el(
            "button",
            name,
            cls="on" if look.fixed is None and look.span_s == span_s else "",
            type="button",
            data_act="span",
            data_span=name,
        )
        for name, span_s in SPANS
    ]
    zoom = [
        el("button", "+", type="button", data_act="zoom", data_factor="0.6", aria_label="Zoom in"),
        el("button", "−", type="button", data_act="zoom", data_factor="1.7", aria_label="Zoom out"),
    ]
    return el("div", el("span", zoom, cls="segmented"), el("span", spans, cls="segmented"), cls="acts")


def _set_span(visit: Visit, look: Look, name: str) -> None:
    look.span_s, look.fixed = dict(SPANS).get(name, 300.0), None
    visit.refresh()


def _set_phone(visit: Visit, look: Look, args: Any) -> None:
    width = args.get("width", 1280) if isinstance(args, dict) else 1280
    if look.phone != (width < 760):
        look.phone = width < 760
        visit.refresh()


def _zoom(visit: Visit, look: Look, path: str, given: Json) -> None:
    history = visit.watch.histories.get(path)
    if history is None:
        return
    now = time.time()
    window = window_of(history, look, now)
    bounds = structs.replace(window, start=min(history.first_birth, window.start) - 5.0, end=max(now, window.end))
    if given.get("kind") == "reset":
        look.fixed = None
    elif given.get("kind") == "pan":
        look.fixed = panned(window, float(given["dx"]), float(given["dy"]), bounds=bounds)
    else:
        x, y = float(given.get("x", window.width)), float(given.get("y", window.height / 2))
        ring = bool(given.get("ring", False))
        look.fixed = zoomed(
            window, min(max(float(given.get("factor", 1.0)), 0.05), 20.0), x, y, bounds=bounds, ring=ring
        )
    visit.refresh()


# Beside it.


def segments_card(visit: Visit, path: str) -> Html:
    topic, detail = visit.view.topics.get(path), visit.watch.details.get(path)
    history = visit.watch.histories.get(path)
    if topic is None:
        return Html("")
    stats = detail.stats["segments"] if detail is not None else {}
    transition = detail.layout["transition"] if detail is not None else None
    shown = sorted((each for each in topic.segments if each.active), key=lambda each: each.first_hash)
    sealed = sorted((each for each in topic.segments if not each.active), key=lambda each: -each.id)
    rows = [
        segment_row(
            each,
            stats.get(str(each.id), {}),
            history.rate(each.id) if history else None,
            visit.watch.colours,
            read_only=visit.read_only,
        )
        for each in [*shown, *sealed][:300]
    ]
    headings = [
        "Segment",
        el("th", "Range", cls="wide"),
        "Owner",
        number("Traffic"),
        number("Records", wide=True),
        number("Stored", wide=True),
        number("Chunks", wide=True),
        number("Only in log", wide=True),
        "",
    ]
    note = _transition_note(transition) if transition else None
    tools = (
        None
        if visit.read_only
        else el(
            "div",
            act("Move all", "move", icon_name="swap_horiz"),
            act("Repartition", "repartition", icon_name="grid_view"),
            act("Recover", "recover", icon_name="healing"),
            cls="acts",
        )
    )
    return card("Segments", note, table(headings, rows), hint=f"{len(shown)} active, {len(sealed)} sealed", tools=tools)


def _transition_note(transition: Json) -> Html:
    parents = ", ".join(map(str, transition["parents"]))
    waits = "; ".join(transition["waitsFor"]) or "it goes on"
    abort = act("Take it back", "abort") if transition["step"] == "CREATING" else None
    text = el("span", f"segment {parents} is being replaced by {', '.join(transition['children'])}: {waits}")
    return el("div", el("div", pill(transition["step"].lower(), "live"), text, abort, cls="change"), cls="changes")


def segment_row(
    each: SegmentSeen, stats: Json, rate: float | None, colours: dict[str, int], *, read_only: bool
) -> Html:
    owner = each.owner or stats.get("owner") or ""
    buttons: list[Html] = []
    if each.active and not read_only:
        buttons = [
            act("Move", "move", segment=each.id),
            act("Split", "split", segment=each.id),
            act("Merge", "merge", segment=each.id),
        ]
    hot = stats.get("hotKeyShare")
    state = None if each.active else pill("sealed", "plain")
    only_in_log = count_text(_tail(stats)) if stats else "–"
    log_bytes = stats.get("logBytes")
    return el(
        "tr",
        el(
            "td",
            str(each.id),
            [" ", state] if state else None,
            [" ", pill(f"one key {percent_text(hot)}", "warn")] if hot else None,
            narrow(
                hashes(each),
                counted(stats.get("records"), "record"),
                f"{bytes_text(stats.get('bytes'))} stored",
                counted(stats.get("chunks"), "chunk"),
                f"{bytes_text(stats.get('chunkBytes'))} in chunks",
                f"{only_in_log} only in log",
                f"log {bytes_text(log_bytes)}",
            ),
            cls="name-cell",
        ),
        el("td", el("code", hashes(each)), cls="wide"),
        el("td", owner_name(each.owner, colours) if each.active else owner_name(owner, colours), cls="nowrap"),
        el("td", rate_text(rate, "rec") if each.active else "–", cls="n"),
        el("td", count_text(stats.get("records")), cls="n wide"),
        el("td", bytes_text(stats.get("bytes")), cls="n wide"),
        el(
            "td",
            count_text(stats.get("chunks")),
            el("span", bytes_text(stats.get("chunkBytes")), cls="under"),
            cls="n wide",
        ),
        el(
            "td",
            only_in_log,
            el("span", f"log {bytes_text(log_bytes)}", cls="under"),
            cls="n wide",
        ),
        el("td", el("div", buttons, cls="acts")),
        data_segment=each.id,
    )


def _beside(visit: Visit, path: str) -> Html:
    detail, topic = visit.watch.details.get(path), visit.view.topics.get(path)
    if detail is None or topic is None:
        return Html("")
    hot = hot_ranges_card(topic, detail, visit.watch.colours, read_only=visit.read_only)
    return el("div", hot, replicas_card(detail, visit.watch.colours), cls="stack")


def replicas_card(detail: TopicDetail, colours: dict[str, int]) -> Html:
    found = detail.replicas
    if found is None:
        name = short_name(detail.layout["name"].removeprefix("topic://"))
        return card(
            "Replicas",
            empty(
                "content_copy",
                "Each segment is on one broker",
                "With copies, a lost machine costs nothing:",
                command(f"braid topic update {name} --replicas 3"),
            ),
        )
    kinds = {"owner": "good", "in-sync": "good", "behind": "warn", "joining": "live", "down": "bad", "voting": "warn"}
    rows = [
        el(
            "tr",
            el("td", key, cls="name-cell"),
            el("td", owner_dot(each["broker"], colours), each["broker"], cls="nowrap"),
            el("td", pill(each["state"], kinds.get(each["state"], "")), cls="nowrap"),
            el(
                "td",
                f"{count_text(each['behind'])} behind"
                if each["behind"]
                else "0 behind"
                if each["behind"] == 0
                else "–",
                cls="n",
            ),
        )
        for key, segment in sorted(found["segments"].items(), key=lambda item: int(item[0]))
        for each in segment["replicas"]
    ]
    hint = f"{found['writeQuorum']} of {found['replicas']} confirm a record"
    return card("Replicas", table(["Segment", "Broker", "State", number("How far")], rows[:200]), hint=hint)
