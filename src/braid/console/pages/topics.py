"""The page of all topics: search, sort, create, delete."""

from __future__ import annotations

from typing import Any, Final

from msgspec import Struct
from nicegui import ui

from braid.console.html import Html, el
from braid.console.numbers import bytes_rate_text, bytes_text, count_text, counted, rate_text, short_text
from braid.console.pages import consequences
from braid.console.pages.actions import ask_back, on_acts
from braid.console.pages.frame import frame, head
from braid.console.pages.parts import act, card, command, empty, narrow, number, owner_dot, pill, short_name, table
from braid.console.pages.visit import Visit
from braid.console.rest import topic_path
from braid.console.watch.view import ClusterView, TopicSeen

SHOWN: Final = 200
"""Rows; a search finds the others."""
DETAILED: Final = 50
"""Of how many of them the size is asked for."""
COLUMNS: Final = (
    ("name", "Topic"),
    ("segments", "Segments"),
    ("in", "Published"),
    ("bytes-in", "In"),
    ("out", "Out"),
    ("stored", "Stored"),
    ("backlog", "Backlog"),
    ("alarms", "Alarms"),
)


class Listing(Struct):
    """What a person has chosen to see."""

    search: str = ""
    sort: str = "name"
    down: bool = False


def show(visit: Visit) -> None:
    listing = Listing()
    wanted: set[str] = set()

    def follow() -> None:
        shown = {each.path for each in chosen(visit.view, listing)[:DETAILED]}
        for path in shown - wanted:
            visit.watch.want(path)
        for path in wanted - shown:
            visit.watch.unwant(path)
        wanted.clear()
        wanted.update(shown)

    def leave() -> None:
        for path in wanted:
            visit.watch.unwant(path)

    visit.at_end(leave)

    def search(event: Any) -> None:
        listing.search = str(event.value or "").strip().lower()
        visit.refresh()

    def sort(given: dict[str, Any]) -> None:
        column = str(given.get("column"))
        listing.down = not listing.down if listing.sort == column else column != "name"
        listing.sort = column
        visit.refresh()

    with frame(visit, "topics", "Topics"):
        with ui.element("div").classes("head"):
            ui.html(head("Topics", "Every topic that you may know of"), sanitize=False)
            with ui.element("div").classes("tools"):
                ui.input(placeholder="Search  /", on_change=search).props("outlined dense clearable").classes("search")
                if not visit.read_only:
                    ui.html(act("Create topic", "create", icon_name="add", cls="primary"), sanitize=False)
        visit.live(lambda: topics_card(visit.view, listing, visit.watch.colours))
        ui.timer(2.0, follow)
        follow()
    on_acts(visit, {"sort": sort, "create": lambda _: _create(visit)})


def chosen(view: ClusterView, listing: Listing) -> list[TopicSeen]:
    """Return the topics that match, in the order that was asked for."""
    found = [each for each in view.topics.values() if listing.search in each.path.lower()]
    keys = {
        "segments": lambda each: each.active,
        "in": lambda each: each.records_in_per_s or 0.0,
        "bytes-in": lambda each: each.bytes_in_per_s or 0.0,
        "out": lambda each: each.bytes_out_per_s or 0.0,
        "stored": lambda each: each.stored_bytes or 0.0,
        "backlog": lambda each: each.backlog or 0.0,
        "alarms": lambda each: len(each.alarms),
    }
    key = keys.get(listing.sort)
    by_name = sorted(found, key=lambda each: each.path, reverse=listing.down and key is None)
    return sorted(by_name, key=key, reverse=listing.down) if key is not None else by_name


def topics_card(view: ClusterView, listing: Listing, colours: dict[str, int]) -> Html:
    if not view.topics:
        return card(
            "Topics",
            empty(
                "waves",
                "There is no topic yet",
                "Create one here, or in a shell:",
                command("braid topic create orders"),
            ),
        )
    found = chosen(view, listing)
    if not found:
        return card(
            "Topics", empty("search_off", f"No topic matches “{listing.search}”", "Search for a part of its name.")
        )
    rows = [_row(each, colours) for each in found[:SHOWN]]
    left = f" · {len(found) - SHOWN} more: search for them" if len(found) > SHOWN else ""
    return card(
        "Topics", table([_heading(*each, listing) for each in COLUMNS], rows), hint=f"{count_text(len(found))}{left}"
    )


def _heading(column: str, text: str, listing: Listing) -> Html:
    on = listing.sort == column
    arrow = (" ↓" if listing.down else " ↑") if on else ""
    button = el("button", f"{text}{arrow}", cls="on" if on else "", data_act="sort", data_column=column, type="button")
    if column in ("name", "alarms"):
        return el("th", button, cls="wide" if column == "alarms" else "")
    return number(button, wide=column in ("segments", "bytes-in", "out", "stored"))


def _row(each: TopicSeen, colours: dict[str, int]) -> Html:
    owners = sorted({segment.owner for segment in each.segments if segment.active and segment.owner})
    namespace, _, _ = each.path.rpartition("/")
    sealed = len(each.segments) - each.active
    alarms = [[pill(alarm, "bad"), " "] for alarm in each.alarms]
    return el(
        "tr",
        el(
            "td",
            el("a", short_name(each.path), href=f"/topics/{each.path}"),
            el("span", [owner_dot(owner, colours) for owner in owners[:8]], namespace, cls="under"),
            narrow(
                counted(each.active, "segment"),
                f"{bytes_text(each.stored_bytes)} stored",
                f"in {bytes_rate_text(each.bytes_in_per_s)}",
                f"out {bytes_rate_text(each.bytes_out_per_s)}",
            ),
            el("span", alarms, cls="under narrow") if alarms else None,
            cls="name-cell",
        ),
        el(
            "td", count_text(each.active), el("span", f"{sealed} sealed", cls="under") if sealed else None, cls="n wide"
        ),
        el("td", rate_text(each.records_in_per_s, "rec"), cls="n"),
        el("td", bytes_rate_text(each.bytes_in_per_s), cls="n wide"),
        el("td", bytes_rate_text(each.bytes_out_per_s), cls="n wide"),
        el("td", bytes_text(each.stored_bytes), cls="n wide"),
        el("td", short_text(each.backlog), el("span", _subscriptions(each), cls="under"), cls="n"),
        el("td", alarms or el("span", "none", cls="faint"), cls="wide"),
        data_topic=each.path,
    )


def _subscriptions(topic: TopicSeen) -> str:
    if topic.subscriptions:
        return counted(topic.subscriptions, "subscription")
    # Brokers tell those of the segments that they serve.
    unserved = any(each.active and not each.owner for each in topic.segments)
    return "not known" if unserved or topic.subscriptions is None else "no subscription"


def _create(visit: Visit) -> None:
    given: dict[str, Any] = {"name": "", "segments": 1, "replicas": 1, "durability": ""}

    def fields() -> None:
        outlined = "outlined dense"
        with ui.element("div").classes("form-row"):
            ui.input("Name", placeholder="orders").props(f"{outlined} autofocus").classes("grow").bind_value(
                given, "name"
            )
        with ui.element("div").classes("form-row"):
            ui.number("Segments", min=1, max=1024, precision=0).props(outlined).classes("w-28").bind_value(
                given, "segments"
            )
            ui.number("Replicas", min=1, max=7, precision=0).props(outlined).classes("w-28").bind_value(
                given, "replicas"
            )
            choices = {"": "as replicas need", "fsync": "fsync", "memory": "memory", "replicated": "replicated"}
            ui.select(choices, label="Durability").props(outlined).classes("w-44").bind_value(given, "durability")

    async def run() -> str:
        path = topic_path(str(given["name"]).strip())
        # Replicas bring the durability that belongs to them, if none is named.
        policies: dict[str, Any] = {"durability": given["durability"]} if given["durability"] else {}
        if int(given["replicas"] or 1) > 1:
            policies["replicas"] = int(given["replicas"])
        await visit.change("PUT", path, query={"numInitialSegments": str(int(given["segments"] or 1))}, body=policies)
        return f"{given['name']} is there."

    what = [
        "The ring of key hashes is cut into segments of equal size, which brokers share.",
        "With replicas, a publish waits until a majority of them has the record on disk.",
    ]
    ask_back(visit, "Create a topic", what, run, button="Create", fields=fields)


def ask_delete(visit: Visit, topic: TopicSeen) -> None:
    async def run() -> str:
        await visit.change("DELETE", topic_path(topic.path))
        return f"{topic.path} is deleted."

    ask_back(
        visit,
        f"Delete {short_name(topic.path)}?",
        consequences.of_delete_topic(topic),
        run,
        button="Delete",
        danger=True,
        type_to_confirm=short_name(topic.path),
    )
