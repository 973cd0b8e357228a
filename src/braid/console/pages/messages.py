"""The page of messages: look into a topic, follow its end, publish one."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

from nicegui import ui

from braid.console.drawing.svg import moment_text
from braid.console.html import Html, el, join
from braid.console.numbers import bytes_text, count_text
from braid.console.pages.actions import ask_back, on_acts
from braid.console.pages.frame import frame, head
from braid.console.pages.parts import act, card, command, empty, icon, pill, short_name
from braid.console.pages.visit import Visit
from braid.console.records import (
    MAX_RECORDS,
    MAX_SCANNED,
    MAX_SHOWN_BYTES,
    Place,
    Shown,
    decoded,
    ends_of,
    look,
    one_line,
    read_moment,
    shown,
)
from braid.console.rest import RestError, topic_path
from braid.model.errors import BraidError

WAYS: Final = {
    "end": "the last records",
    "begin": "the first records",
    "offset": "from an offset",
    "time": "from a time (UTC)",
    "key": "of one key",
}
FORMS: Final = ("auto", "text", "json", "hex")


class Reading:
    """What this tab shows. Its page is the only one that changes it."""

    def __init__(self) -> None:
        self.records: deque[Shown] = deque(maxlen=MAX_RECORDS)
        self.open: set[tuple[int, int]] = set()
        self.form = "auto"
        self.following = False
        self.note = ""
        self.error = ""
        self.asked = False
        self.task: asyncio.Task[None] | None = None


def show(visit: Visit, path: str) -> None:
    reading = Reading()
    given: dict[str, Any] = {
        "topic": path,
        "by": "end",
        "segment": None,
        "offset": 0,
        "time": "",
        "key": "",
        "count": 50,
    }
    visit.at_end(lambda: _stop(reading))
    with frame(visit, "messages", "Messages"):
        with ui.element("div").classes("head"):
            ui.html(head("Messages", "Look into a topic. A look acks nothing and leaves no trace."), sanitize=False)
            if not visit.read_only:
                ui.html(act("Publish", "publish", icon_name="send", cls="primary"), sanitize=False).classes("tools")
        _query(visit, reading, given)
        visit.live(lambda: records_card(reading, given["topic"]))
    on_acts(
        visit,
        {
            "record": lambda event: _toggle(visit, reading, event),
            "publish": lambda _: _publish(visit, str(given["topic"] or "")),
            "form": lambda event: _set_form(visit, reading, str(event.get("form"))),
        },
    )
    if path:
        ui.timer(0.2, lambda: _read(visit, reading, given), once=True)


def _query(visit: Visit, reading: Reading, given: dict[str, Any]) -> None:
    outlined = "outlined dense"
    names = {each: short_name(each) for each in visit.view.topics} | (
        {given["topic"]: short_name(given["topic"])} if given["topic"] else {}
    )
    with ui.element("section").classes("card"), ui.element("div").classes("pad form-row"):
        topic = (
            ui.select(names, label="Topic", with_input=True).props(outlined).classes("w-56").bind_value(given, "topic")
        )
        ui.timer(2.0, lambda: _rename(topic, visit))
        ui.select(WAYS, label="Show").props(outlined).classes("w-44").bind_value(given, "by")
        offset = ui.number("Offset", min=0, precision=0).props(outlined).classes("w-32").bind_value(given, "offset")
        offset.bind_visibility_from(given, "by", value="offset")
        moment = (
            ui.input("Time", placeholder="2026-01-31 12:00").props(outlined).classes("w-48").bind_value(given, "time")
        )
        moment.bind_visibility_from(given, "by", value="time")
        key = ui.input("Key").props(outlined).classes("w-40").bind_value(given, "key")
        key.bind_visibility_from(given, "by", value="key")
        ui.number("Segment", min=0, precision=0, placeholder="all").props(f"{outlined} clearable").classes(
            "w-28"
        ).bind_value(given, "segment")
        ui.number("Count", min=1, max=MAX_RECORDS, precision=0).props(outlined).classes("w-24").bind_value(
            given, "count"
        )
        ui.button("Look", on_click=lambda: _read(visit, reading, given)).props("unelevated no-caps color=primary").mark(
            "look"
        )
        follow = ui.switch("Follow", on_change=lambda event: _follow(visit, reading, given, on=bool(event.value)))
        follow.mark("follow")


def _rename(topic: ui.select, visit: Visit) -> None:
    names = {each: short_name(each) for each in visit.view.topics}
    if topic.value and topic.value not in names:
        names[topic.value] = short_name(topic.value)
    if names != topic.options:
        topic.set_options(names, value=topic.value)


# What it shows.


def records_card(reading: Reading, path: str) -> Html:
    forms = [
        el("button", form, cls="on" if reading.form == form else "", type="button", data_act="form", data_form=form)
        for form in FORMS
    ]
    tools = el("span", forms, cls="segmented")
    if reading.error:
        return card(
            "Records", el("div", el("div", icon("error_outline"), reading.error, cls="banner"), cls="pad"), tools=tools
        )
    if not path:
        body = empty(
            "mail_outline",
            "Choose a topic",
            "Or publish the first record from a shell:",
            command("echo hello | braid produce orders"),
        )
    elif reading.records:
        newest_first = reversed(reading.records)
        body = el("div", [_row(each, reading) for each in newest_first], cls="records")
    elif reading.following:
        body = empty("hourglass_empty", "Waiting for records", "They appear here as they are published.")
    elif reading.asked:
        body = empty("inbox", "No record is there", f"Publish one here, or look elsewhere in {short_name(path)}.")
    else:
        body = empty("mail_outline", "Press Look", "to read records of the topic.")
    live = pill("following", "live") if reading.following else None
    return card("Records", body, hint=reading.note, tools=el("div", live, tools, cls="acts"))


def _row(message: Shown, reading: Reading) -> Html:
    place = (message.segment, message.offset)
    row = el(
        "div",
        el("span", moment_text(message.timestamp_us / 1e6)[:19], cls="muted"),
        el("span", f"{message.segment} @ {message.offset}", cls="mono"),
        el("span", one_line(message.key, 60), cls="mono"),
        el("span", one_line(message.value), cls="mono"),
        cls="rec",
        data_act="record",
        data_segment=message.segment,
        data_offset=message.offset,
        tabindex=0,
    )
    return join([row, _whole(message, reading.form) if place in reading.open else None])


def _whole(message: Shown, form: str) -> Html:
    text, shown_as = decoded(message.value, form)
    facts = [
        ("segment @ offset", f"{message.segment} @ {message.offset}"),
        ("time", moment_text(message.timestamp_us / 1e6)),
        ("key", decoded(message.key)[0] if message.key is not None else "none"),
        ("size", bytes_text(message.size)),
        *((f"header {name}", decoded(bytes(value))[0]) for name, value in sorted(message.headers.items())),
    ]
    more = (
        el("p", f"… the first {bytes_text(MAX_SHOWN_BYTES)} are shown", cls="muted")
        if message.size > MAX_SHOWN_BYTES
        else None
    )
    return el(
        "div",
        el("dl", [[el("dt", name), el("dd", value)] for name, value in facts]),
        el("div", pill(shown_as, "plain"), el("button", "Copy", cls="act", type="button", data_copy=text), cls="acts"),
        el("pre", text),
        more,
        cls="whole",
    )


# What it does.


def _toggle(visit: Visit, reading: Reading, event: dict[str, Any]) -> None:
    place = (int(event["segment"]), int(event["offset"]))
    reading.open.symmetric_difference_update({place})
    visit.refresh()


def _set_form(visit: Visit, reading: Reading, form: str) -> None:
    reading.form = form if form in FORMS else "auto"
    visit.refresh()


async def _read(visit: Visit, reading: Reading, given: dict[str, Any]) -> None:
    path = str(given["topic"] or "")
    if not path or reading.following:
        return

    def went_on() -> bool:
        """Tell whether the person looks at something else meanwhile."""
        return reading.following or given["topic"] != path

    error, found = "", list[Shown]()
    try:
        place = place_of(given)
        stats = await visit.rest.get(topic_path(path) + "/stats")
        found = await look(visit.client, path, place, ends_of(stats), shown)
    except (RestError, BraidError, ValueError) as failure:
        error = str(failure)
    if went_on():
        return
    reading.error = error
    if not error:
        reading.asked = True
        reading.records.clear()
        reading.records.extend(found)
        limit = f", among the last {count_text(MAX_SCANNED)} of its segments" if given["by"] == "key" else ""
        reading.note = f"{count_text(len(found))}{limit} · newest first"
    visit.refresh()


def place_of(given: dict[str, Any]) -> Place:
    """Return where a person wants to look. Raises `ValueError` with a sentence."""
    moment = None
    if given["by"] == "time":
        moment = read_moment(str(given["time"]))
    return Place(
        by=str(given["by"]),
        segment=int(given["segment"]) if given["segment"] not in (None, "") else None,
        offset=int(given["offset"] or 0),
        time=moment,
        key=str(given["key"] or "").encode(),
        count=min(MAX_RECORDS, max(1, int(given["count"] or 50))),
    )


def _follow(visit: Visit, reading: Reading, given: dict[str, Any], *, on: bool) -> None:
    _stop(reading)
    reading.following = on and bool(given["topic"])
    if reading.following:
        reading.note, reading.error = "newest first", ""
        work = _follow_end(visit, reading, str(given["topic"]))
        reading.task = asyncio.get_running_loop().create_task(work, name="follow a topic")
    visit.refresh()


async def _follow_end(visit: Visit, reading: Reading, path: str) -> None:
    try:
        async with visit.client.checkpoint_consumer(path, start="latest") as consumer:
            while True:
                message = await consumer.receive()
                if message is not None:
                    reading.records.append(shown(message))
    except (RestError, BraidError) as error:
        reading.error, reading.following = str(error), False


def _stop(reading: Reading) -> None:
    if reading.task is not None:
        reading.task.cancel()
        reading.task = None


def _publish(visit: Visit, path: str) -> None:
    given = {"topic": path, "key": "", "value": "", "headers": ""}
    outlined = "outlined dense"

    def fields() -> None:
        names = {each: short_name(each) for each in visit.view.topics} | ({path: short_name(path)} if path else {})
        ui.select(names, label="Topic").props(outlined).classes("w-full").bind_value(given, "topic")
        ui.input("Key (optional)").props(outlined).classes("w-full").bind_value(given, "key")
        ui.textarea("Value").props(outlined).classes("w-full").bind_value(given, "value")
        ui.input("Headers (optional)", placeholder="name=value, name=value").props(outlined).classes(
            "w-full"
        ).bind_value(given, "headers")

    async def run() -> str:
        if not given["topic"]:
            raise ValueError("choose a topic")
        headers = headers_of(str(given["headers"]))
        async with visit.client.producer(str(given["topic"])) as producer:
            id_ = await producer.send(str(given["value"]), str(given["key"]) or None, headers or None)
        return f"It is stored: segment {id_.segment}, offset {id_.offset}."

    ask_back(
        visit, "Publish a record", ["Every subscription of the topic gets it."], run, button="Publish", fields=fields
    )


def headers_of(text: str) -> dict[str, bytes]:
    """Read `name=value, name=value`. Raises `ValueError` with a sentence."""
    found: dict[str, bytes] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, equals, value = part.partition("=")
        if not equals or not name.strip():
            raise ValueError(f"{part!r} is no header: write name=value, several by comma")
        found[name.strip()] = value.strip().encode()
    return found
