"""The page of subscriptions: how far each is, who consumes, queues and their dead letters."""

from __future__ import annotations

import time
from typing import Any, Final

from msgspec import Struct
from nicegui import ui

from braid.console.drawing.svg import moment_text
from braid.console.html import Child, Html, el, join
from braid.console.numbers import age_text, bytes_text, count_text, counted, plural, short_text
from braid.console.pages import consequences
from braid.console.pages.actions import ask_back, on_acts
from braid.console.pages.frame import frame, head
from braid.console.pages.parts import act, card, command, empty, figure, icon, narrow, number, pill, short_name, table
from braid.console.pages.visit import Visit
from braid.console.records import Shown, one_line, read_moment, shown
from braid.console.rest import RestError, subscription_path
from braid.console.watch.view import ClusterView, Json
from braid.model.errors import BraidError
from braid.model.subscription import MAX_ACK_TIMEOUT_MS, MAX_MAX_DELIVERIES

OUTLINED: Final = "outlined dense"
LISTED: Final = 50
"""Topics whose subscriptions are shown without a choice."""
PEEKED: Final = 20
"""Messages of one look."""


class Peek(Struct, frozen=True):
    messages: tuple[Shown, ...] = ()
    error: str = ""
    looking: bool = False


Peeks = dict[tuple[str, str], Peek]
"""By topic and subscription: what this tab shows."""


def show(visit: Visit, path: str) -> None:
    wanted: set[str] = set()
    peeks: Peeks = {}

    def hide(given: dict[str, Any]) -> None:
        peeks.pop((str(given["topic"]), str(given["subscription"])), None)
        visit.refresh()

    def follow() -> None:
        for each in [path] if path else list(visit.view.topics)[:LISTED]:
            if each not in wanted:
                wanted.add(each)
                visit.want(each)

    with frame(visit, "subscriptions", "Subscriptions"):
        with ui.element("div").classes("head"):
            crumbs = join([el("a", "All topics", href="/subscriptions"), f" / {short_name(path)}"]) if path else None
            sub = "How far each subscription is, and who consumes"
            ui.html(head("Subscriptions", sub, crumbs=crumbs), sanitize=False)
            if not visit.read_only:
                ui.html(act("Create", "create", icon_name="add", cls="primary"), sanitize=False).classes("tools")
        visit.live(lambda: _cards(visit, path, peeks))
        follow()
        ui.timer(2.0, follow)
    on_acts(
        visit,
        {
            "create": lambda _: _create(visit, path),
            "peek": lambda given: _peek(visit, peeks, str(given["topic"]), str(given["subscription"])),
            "hide": hide,
            "seek": lambda given: _seek(visit, str(given["topic"]), str(given["subscription"])),
            "skip": lambda given: _skip(visit, str(given["topic"]), str(given["subscription"])),
            "redrive": lambda given: _redrive(visit, str(given["topic"]), str(given["subscription"])),
            "delete": lambda given: _delete(visit, str(given["topic"]), str(given["subscription"])),
        },
    )


def _found(visit: Visit, path: str, name: str) -> Json | None:
    detail = visit.watch.details.get(path)
    found: Json | None = detail.stats["subscriptions"].get(name) if detail is not None else None
    return found


# What it shows.


def _cards(visit: Visit, path: str, peeks: Peeks) -> Html:
    topics = [path] if path else list(visit.view.topics)[:LISTED]
    cards = []
    for each in topics:
        detail = visit.watch.details.get(each)
        if detail is not None:
            for name, subscription in detail.stats["subscriptions"].items():
                age_s = oldest_s(visit.view, each, name)
                found = peeks.get((each, name))
                cards.append(
                    subscription_card(each, name, subscription, age_s=age_s, read_only=visit.read_only, waiting=found)
                )
            cards += [_group_card(each, group) for group in detail.stats["groups"].values()]
    if cards:
        return join(cards)
    if any(each in visit.view.topics and each not in visit.watch.details for each in topics):
        return card("Subscriptions", empty("hourglass_empty", "Asking the brokers…"))
    name = short_name(path) if path else "orders"
    return card(
        "Subscriptions",
        empty(
            "inbox",
            "There is no subscription yet",
            "A consumer makes one when it first reads:",
            command(f"braid consume {name} -s billing --follow"),
        ),
    )


def oldest_s(view: ClusterView, path: str, name: str) -> float | None:
    """Return how old the oldest record is that a subscription has before it, if anybody knows."""
    topic = view.topics.get(path)
    return topic.ages_s.get(name) if topic is not None else None


def subscription_card(
    path: str, name: str, found: Json, *, age_s: float | None, read_only: bool, waiting: Peek | None = None
) -> Html:
    queue, consumers = found["queue"], found["consumers"]
    connected = sum(each["connected"] for each in consumers.values())
    kind = "queue" if queue else "stream"
    oldest = queue["oldestAt"] if queue else None
    figures = [
        figure("Backlog", _records(found["backlog"]), "at least" if found["unavailable"] else ""),
        figure("Consumers", f"{connected} connected", f"{len(consumers)} known"),
    ]
    if queue:
        figures += [
            figure("Ready", count_text(queue["ready"])),
            figure("Leased", count_text(queue["leased"])),
            figure("Delayed", count_text(queue["delayed"])),
            figure("Dead letters", count_text(queue["deadLettered"]), queue["policies"].get("deadLetterTopic", "")),
            figure("Oldest", age_text(time.time() - oldest / 1e6 if oldest else None), "unsettled"),
        ]
    else:
        moved = found["movedAt"]
        figures += [
            figure("Oldest", age_text(age_s if found["backlog"] else None), "not consumed"),
            figure("Last ack", age_text(time.time() - moved / 1e6 if moved else None), "ago"),
        ]
    if found["heldBytes"]:
        figures.append(figure("Held back", bytes_text(found["heldBytes"]), "from retention"))
    tools = _tools(path, name, queue, read_only=read_only, peeked=waiting is not None)
    return card(
        name,
        _warnings(found),
        el("div", el("div", figures, cls="figures"), _dead_letters(queue) if queue else None, cls="pad stack close"),
        _segments(found),
        _consumers(consumers),
        waiting_messages(waiting) if waiting is not None else None,
        hint=f"{kind} of {short_name(path)}",
        tools=tools,
    )


def _dead_letters(queue: Json) -> Html | None:
    """Say where dead letters go and since when they are counted, in the words of `braid subscription show`."""
    policies = queue["policies"]
    times = policies.get("maxDeliveries")
    if not times:
        return None
    deliveries = "1 delivery" if times == 1 else f"{count_text(times)} deliveries"
    count = f"{count_text(queue['deadLettered'])} since its brokers opened it"
    return el("p", f"Dead letters: after {deliveries} to {policies['deadLetterTopic']}; {count}.", cls="muted")


def _tools(path: str, name: str, queue: Json | None, *, read_only: bool, peeked: bool) -> Html:
    buttons: list[Html] = []
    if queue:
        buttons.append(act("Peek again" if peeked else "Peek", "peek", topic=path, subscription=name))
        buttons += [act("Hide", "hide", topic=path, subscription=name)] if peeked else []
    if not read_only:
        buttons.append(act("Seek", "seek", topic=path, subscription=name))
        buttons.append(act("Skip backlog", "skip", topic=path, subscription=name))
        if queue and queue["policies"].get("deadLetterTopic"):
            buttons.append(act("Redrive", "redrive", topic=path, subscription=name))
        buttons.append(act("Delete", "delete", cls="danger", topic=path, subscription=name))
    return el("div", buttons, cls="acts")


def _warnings(found: Json) -> Html | None:
    lines = []
    if found["unreadable"]:
        lines.append(f"Its record cannot be read: {found['unreadable']}")
    if found["undrained"] and not any(each["connected"] for each in found["consumers"].values()):
        sealed = ", ".join(map(str, found["undrained"]))
        one = len(found["undrained"]) == 1
        which = f"sealed segment {sealed}: it" if one else f"sealed segments {sealed}: they"
        lines.append(f"Nobody consumes {which} cannot be deleted.")
    if found["queue"]:
        lines += [f"Segment {segment} hands out nothing: {why}" for segment, why in found["queue"]["blocked"].items()]
    banners = [el("div", icon("warning_amber"), el("span", line), cls="banner warn") for line in lines]
    return el("div", banners, cls="pad stack") if lines else None


def _segments(found: Json) -> Html | None:
    rows = []
    for segment, each in sorted(found["segments"].items(), key=lambda item: int(item[0])):
        if each["drained"]:
            continue
        total = each["end"] - each["earliest"]
        done = 1 - each["backlog"] / total if total else 1.0
        progress = el(
            "div",
            el("div", el("span", style=f"width:{max(1, done * 100):.0f}%"), cls="bar"),
            f"{done * 100:.0f} %",
            cls="with-bar",
        )
        holders = [name for name, consumer in found["consumers"].items() if int(segment) in consumer["segments"]]
        rows.append(
            el(
                "tr",
                el(
                    "td", segment, narrow(f"{count_text(each['offset'])} of {count_text(each['end'])}"), cls="name-cell"
                ),
                el("td", ", ".join(holders) or el("span", "nobody", cls="faint")),
                el("td", count_text(each["offset"]), cls="n wide"),
                el("td", count_text(each["end"]), cls="n wide"),
                el("td", count_text(each["backlog"]), cls="n"),
                el("td", progress, cls="n"),
            )
        )
    for segment, why in found["unavailable"].items():
        rows.append(el("tr", el("td", segment, cls="name-cell"), el("td", pill(why["reason"], "bad"), colspan=5)))
    if not rows:
        return None
    headings = [
        "Segment",
        "Consumer",
        number("Next offset", wide=True),
        number("End", wide=True),
        number("Backlog"),
        number("Consumed"),
    ]
    return table(headings, rows[:200])


def _consumers(consumers: Json) -> Html | None:
    if not consumers:
        return None
    pills: list[Child] = [
        [pill(f"{name} · {_segment_count(len(each['segments']))}", "good" if each["connected"] else "warn"), " "]
        for name, each in list(consumers.items())[:40]
    ]
    return el("div", pills, cls="pad")


def _segment_count(count: int) -> str:
    return counted(count, "segment") if count else "no segment"


def _records(count: int) -> str:
    return f"{short_text(count)} {plural(count, 'record')}"


def _group_card(path: str, group: Json) -> Html:
    backlog = figure("Backlog", _records(group["backlog"]))
    body = el("div", el("div", backlog, cls="figures"), cls="pad")
    return card(group["name"], body, _consumers(group["consumers"]), hint=f"checkpoint group of {short_name(path)}")


def waiting_messages(found: Peek) -> Html:
    if found.looking:
        return el("div", el("p", "Looking…", cls="muted"), cls="pad")
    if found.error:
        return el("div", el("div", icon("error_outline"), el("span", found.error), cls="banner"), cls="pad")
    if not found.messages:
        return el("div", el("p", "No message waits: all are settled.", cls="muted"), cls="pad")
    rows = [
        el(
            "tr",
            el("td", f"{each.segment} @ {each.offset}", cls="mono nowrap"),
            el("td", moment_text(each.timestamp_us / 1e6)[:19], cls="muted nowrap wide"),
            el("td", el("span", one_line(each.key, 40), cls="mono"), cls="clip"),
            el("td", el("span", one_line(each.value, 160), cls="mono"), cls="clip most"),
            el("td", bytes_text(each.size), cls="n wide"),
            data_waiting=f"{each.segment}@{each.offset}",
        )
        for each in found.messages
    ]
    headings = ["Segment @ offset", el("th", "Published", cls="wide"), "Key", "Value", number("Size", wide=True)]
    first = f"the first {count_text(len(rows))}" if len(rows) == PEEKED else "all"
    note = el(
        "p", f"Waiting messages: {first}, also those that consumers have or that wait for their time.", cls="muted pad"
    )
    return el("div", note, table(headings, rows), cls="waiting")


# What it does.


async def _peek(visit: Visit, peeks: Peeks, path: str, name: str) -> None:
    """Look at the first messages of a queue that are not settled."""
    peeks[path, name] = Peek(looking=True)
    visit.refresh()
    try:
        found = await visit.client.admin.peek(path, name, count=PEEKED)
        peeks[path, name] = Peek(tuple(map(shown, found)))
    except (RestError, BraidError) as error:
        peeks[path, name] = Peek(error=str(error))
    visit.refresh()


def _create(visit: Visit, path: str) -> None:
    given: dict[str, Any] = {"topic": path, "name": "", "start": "latest", "kind": "stream"}
    given |= {"ack_timeout_s": None, "max_deliveries": None, "dead_letter_topic": None}

    def fields() -> None:
        names = {each: short_name(each) for each in visit.view.topics} | ({path: short_name(path)} if path else {})
        ui.select(names, label="Topic").props(OUTLINED).classes("w-full").bind_value(given, "topic")
        with ui.element("div").classes("form-row"):
            ui.input("Name").props(OUTLINED).classes("grow").bind_value(given, "name")
            ui.select(["stream", "queue"], label="Kind").props(OUTLINED).classes("w-28").bind_value(given, "kind")
            ui.select(["earliest", "latest"], label="Start").props(OUTLINED).classes("w-28").bind_value(given, "start")
        with ui.element("div").classes("stack close") as of_queue:
            _queue_fields(given, names)
        of_queue.bind_visibility_from(given, "kind", value="queue")

    async def run() -> str:
        if not given["topic"]:
            raise ValueError("choose a topic")
        at = subscription_path(given["topic"], given["name"].strip())
        policies = queue_policies(given) if given["kind"] == "queue" else {}
        await visit.change("PUT", at, query={"start": given["start"], "kind": given["kind"], **policies})
        return f"{given['name']} is there."

    what = [
        "A stream keeps each key in order; a queue hands out single messages to many workers.",
        "Retention keeps records that the subscription has not consumed.",
    ]
    ask_back(visit, "Create a subscription", what, run, button="Create", fields=fields)


def _queue_fields(given: dict[str, Any], names: dict[str, str]) -> None:
    """Write the fields of a queue's policies. An empty field is the default."""
    with ui.element("div").classes("form-row"):
        timeout = ui.number("Ack timeout, seconds", placeholder="30", min=0.001, max=MAX_ACK_TIMEOUT_MS / 1000)
        timeout.props(OUTLINED).classes("w-44").bind_value(given, "ack_timeout_s")
        deliveries = ui.number("Max deliveries", placeholder="no limit", min=0, max=MAX_MAX_DELIVERIES, precision=0)
        deliveries.props(OUTLINED).classes("grow").bind_value(given, "max_deliveries")
    dead = ui.select(names, label="Dead-letter topic", with_input=True, clearable=True)
    dead.props(OUTLINED).classes("w-full").bind_value(given, "dead_letter_topic")
    lines = [
        "A message that is not settled within the ack timeout comes again: 1 ms to 7 days; 30 s if you name none.",
        f"After the max deliveries, at most {count_text(MAX_MAX_DELIVERIES)}, a message goes to the dead-letter topic, "
        "which must be another one. The two go together; without them, a message comes until it is settled.",
    ]
    ui.html(el("ul", [el("li", line) for line in lines]), sanitize=False)


def queue_policies(given: Json) -> dict[str, str]:
    """Return the policies of a queue that a person has filled in, as REST takes them."""
    found = {}
    if given["ack_timeout_s"] is not None:
        found["ackTimeoutMs"] = str(round(float(given["ack_timeout_s"]) * 1000))
    if given["max_deliveries"] is not None:
        found["maxDeliveries"] = str(int(given["max_deliveries"]))
    if given["dead_letter_topic"]:
        found["deadLetterTopic"] = str(given["dead_letter_topic"])
    return found


def _seek(visit: Visit, path: str, name: str) -> None:
    given: dict[str, Any] = {"to": "earliest", "time": ""}

    def fields() -> None:
        with ui.element("div").classes("form-row"):
            choices = {"earliest": "the first record", "latest": "the end", "time": "a time (UTC)"}
            ui.select(choices, label="To").props(OUTLINED).classes("w-44").bind_value(given, "to")
            moment = (
                ui.input("Time", placeholder="2026-01-31 12:00")
                .props(OUTLINED)
                .classes("grow")
                .bind_value(given, "time")
            )
            moment.bind_visibility_from(given, "to", value="time")

    async def run() -> str:
        query = {"to": str(given["to"])}
        if given["to"] == "time":
            query = {"timestamp": str(round(read_moment(str(given["time"])).timestamp() * 1000))}
        await visit.change("POST", subscription_path(path, name) + "/seek", query=query)
        return f"{name} continues there."

    ask_back(visit, f"Seek {name}?", consequences.of_seek(name, "the chosen place"), run, button="Seek", fields=fields)


def _skip(visit: Visit, path: str, name: str) -> None:
    found = _found(visit, path, name) or {"backlog": 0}

    async def run() -> str:
        await visit.change("POST", subscription_path(path, name) + "/skip-all")
        return f"{name} is at the end."

    ask_back(
        visit,
        f"Skip the backlog of {name}?",
        consequences.of_skip(name, found["backlog"]),
        run,
        button="Skip",
        danger=True,
    )


def _redrive(visit: Visit, path: str, name: str) -> None:
    found = _found(visit, path, name)
    dead_letters = found["queue"]["policies"].get("deadLetterTopic", "") if found and found["queue"] else ""

    async def run() -> str:
        done = await visit.client.admin.redrive(path, name)
        count = done["redriven"]
        return f"{count_text(count)} dead {'letter was' if count == 1 else 'letters were'} published again."

    ask_back(visit, f"Redrive {name}?", consequences.of_redrive(name, dead_letters), run, button="Redrive")


def _delete(visit: Visit, path: str, name: str) -> None:
    async def run() -> str:
        await visit.change("DELETE", subscription_path(path, name))
        return f"{name} is deleted."

    what = [f"{name} forgets how far it is. Records stay; nothing is kept for it any more."]
    ask_back(visit, f"Delete {name}?", what, run, button="Delete", danger=True, type_to_confirm=name)
