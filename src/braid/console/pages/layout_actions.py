"""What a person can do with a topic's segments and policies: move, split, merge, repartition, recover, take back."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from nicegui import ui

from braid.console.pages import consequences
from braid.console.pages.actions import ask_back, whole_number
from braid.console.pages.hot_ranges import about_split
from braid.console.pages.parts import short_name
from braid.console.pages.visit import Visit
from braid.console.rest import RestError, topic_path
from braid.console.watch.history import SegmentSeen

OUTLINED = "outlined dense"


def handlers(visit: Visit, path: str) -> dict[str, Callable[[dict[str, Any]], Any]]:
    def of_segment(ask: Callable[[Visit, str, SegmentSeen], Any]) -> Callable[[dict[str, Any]], Any]:
        def handle(given: dict[str, Any]) -> Any:
            topic = visit.view.topics.get(path)
            found = [each for each in (topic.segments if topic else ()) if str(each.id) == str(given.get("segment"))]
            return ask(visit, path, found[0]) if found else None

        return handle

    move = of_segment(_move)
    return {
        "move": lambda given: move(given) if "segment" in given else _move_all(visit, path),
        "split": lambda given: of_segment(partial(_split, at=str(given.get("at", ""))))(given),
        "merge": of_segment(_merge),
        "repartition": lambda _: _repartition(visit, path),
        "recover": lambda _: _recover(visit, path),
        "abort": lambda _: _abort(visit, path),
        "policies": lambda _: _policies(visit, path),
    }


def _targets(visit: Visit, but: str) -> dict[str, str]:
    active = [each.id for each in visit.view.brokers if each.state == "active" and each.id != but]
    return {"": "the least loaded broker", **{each: each for each in active}}


def _move(visit: Visit, path: str, segment: SegmentSeen) -> None:
    given = {"to": ""}

    def fields() -> None:
        ui.select(_targets(visit, segment.owner), label="To").props(OUTLINED).classes("w-full").bind_value(given, "to")

    async def run() -> str:
        query = {"segment": str(segment.id), **({"to": given["to"]} if given["to"] else {})}
        await visit.change("POST", topic_path(path) + "/move", query=query)
        return f"Segment {segment.id} is served by {given['to'] or 'another broker'}."

    ask_back(
        visit,
        f"Move segment {segment.id}?",
        consequences.of_move(segment, ""),
        run,
        button="Move",
        fields=fields,
        topic=path,
    )


def _move_all(visit: Visit, path: str) -> None:
    given = {"to": ""}

    def fields() -> None:
        ui.select(_targets(visit, ""), label="To").props(OUTLINED).classes("w-full").bind_value(given, "to")

    async def run() -> str:
        await visit.change("POST", topic_path(path) + "/move", query={"to": given["to"]} if given["to"] else None)
        return "All segments have arrived."

    what = [
        "Every segment of the topic goes to this broker, or each to the best one.",
        *consequences.of_move(SegmentSeen(id=0, first_hash=0, last_hash=0xFFFF, active=True), "")[1:],
    ]
    ask_back(visit, f"Move all segments of {short_name(path)}?", what, run, button="Move", fields=fields, topic=path)


def _split(visit: Visit, path: str, segment: SegmentSeen, *, at: str) -> None:
    given: dict[str, Any] = {"into": 2, "at": at}
    detail = visit.watch.details.get(path)
    known = about_split(detail.key_hashes, segment.id) if detail is not None else ""

    def fields() -> None:
        with ui.element("div").classes("form-row"):
            ui.number("Into", min=2, max=64, precision=0).props(OUTLINED).classes("w-28").bind_value(given, "into")
            hint = f"{segment.first_hash + 1:04x} … {segment.last_hash:04x}"
            ui.input("or at hash", placeholder=hint).props(OUTLINED).classes("grow").bind_value(given, "at")

    async def run() -> str:
        hash_ = str(given["at"] or "").strip()
        query = {"at": hash_} if hash_ else {"into": str(whole_number(given["into"], "Into"))}
        await visit.change("POST", f"{topic_path(path)}/split/{segment.id}", query=query)
        return f"Segment {segment.id} is split. The braid shows its children."

    what = [*consequences.of_split(segment, 2, at), *([known] if known else [])]
    ask_back(visit, f"Split segment {segment.id}?", what, run, button="Split", fields=fields, topic=path)


def _merge(visit: Visit, path: str, segment: SegmentSeen) -> None:
    topic = visit.view.topics.get(path)
    other = consequences.neighbour(segment, topic) if topic is not None else None
    if other is None:
        ui.notify("A merge joins two neighbours, and this segment has none.", type="warning")
        return

    async def run() -> str:
        await visit.change("POST", f"{topic_path(path)}/merge/{segment.id}/{other.id}")
        return f"Segments {segment.id} and {other.id} are one."

    title = f"Merge segments {segment.id} and {other.id}?"
    ask_back(visit, title, consequences.of_merge(segment, other), run, button="Merge", topic=path)


def _repartition(visit: Visit, path: str) -> None:
    given: dict[str, Any] = {"segments": 4}

    def fields() -> None:
        ui.number("Segments", min=1, max=1024, precision=0).props(OUTLINED).classes("w-28").bind_value(
            given, "segments"
        )

    async def run() -> str:
        segments = whole_number(given["segments"], "Segments")
        await visit.change("POST", f"{topic_path(path)}/repartition/{segments}")
        return f"{short_name(path)} has {segments} segments."

    what = [
        "The ring is cut into so many segments of equal size. A segment that has such a range already stays.",
        "The others are sealed, and clients go on with the new ones.",
    ]
    ask_back(visit, f"Repartition {short_name(path)}?", what, run, button="Repartition", fields=fields, topic=path)


async def _recover(visit: Visit, path: str) -> None:
    """Ask the brokers first what would be lost; they tell without changing anything."""
    at = topic_path(path) + "/recover"
    try:
        visit.check_may_change()
        await visit.rest.call("POST", at, query={"acceptLoss": "false"}, timeout_s=20.0)
        loss = "Nothing is to be recovered."
    except RestError as error:
        loss = str(error)
        if error.status != 400:
            ui.notify(loss, type="warning", multi_line=True)
            return

    async def run() -> str:
        done = await visit.change("POST", at, query={"acceptLoss": "true"})
        count = len(done["segments"])
        losses = "; ".join(each["loss"] for each in done["segments"])
        return f"{count} {'segment is' if count == 1 else 'segments are'} served again. {losses}"

    what = ["Other brokers continue the segments whose broker is gone, without what only its disk had.", loss]
    ask_back(
        visit,
        f"Recover {short_name(path)}, and accept the loss?",
        what,
        run,
        button="Accept the loss",
        danger=True,
        type_to_confirm=short_name(path),
        topic=path,
    )


def _abort(visit: Visit, path: str) -> None:
    async def run() -> str:
        await visit.change("DELETE", topic_path(path) + "/transition")
        return "It is taken back: the layout stays as it was."

    what = ["The children are deleted again. The parents still take writes, so no record is touched."]
    ask_back(visit, "Take the change back?", what, run, button="Take it back", topic=path)


async def _policies(visit: Visit, path: str) -> None:
    try:
        found = await visit.rest.get(topic_path(path))
    except RestError as error:
        ui.notify(str(error), type="negative")
        return
    now = found["policies"]
    given: dict[str, Any] = {
        "durability": now.get("durability", "fsync"),
        "replicas": now.get("replicas", 1),
        "write_quorum": now.get("writeQuorum", 1),
        "retention_h": _hours(now.get("retentionMs")),
        "message_ttl_h": _hours(now.get("messageTtlMs")),
    }

    def fields() -> None:
        with ui.element("div").classes("form-row"):
            choices = ["fsync", "memory", "replicated"]
            ui.select(choices, label="Durability").props(OUTLINED).classes("w-40").bind_value(given, "durability")
            ui.number("Replicas", min=1, max=7, precision=0).props(OUTLINED).classes("w-28").bind_value(
                given, "replicas"
            )
            quorum = ui.number("Write quorum", min=1, max=7, precision=0).props(OUTLINED).classes("w-28")
            quorum.bind_value(given, "write_quorum")
        with ui.element("div").classes("form-row"):
            ui.number("Retention, hours", min=0).props(f"{OUTLINED} clearable").classes("w-40").bind_value(
                given, "retention_h"
            )
            ttl = ui.number("Message TTL, hours", min=0).props(f"{OUTLINED} clearable").classes("w-44")
            ttl.bind_value(given, "message_ttl_h")

    async def run() -> str:
        wanted: dict[str, Any] = {}
        if given["durability"] != now.get("durability", "fsync"):
            wanted["durability"] = given["durability"]
        for policy, field in (("replicas", "replicas"), ("writeQuorum", "write_quorum")):
            if given[field] and int(given[field]) != now.get(policy, 1):
                wanted[policy] = int(given[field])
        for policy, field in (("retentionMs", "retention_h"), ("messageTtlMs", "message_ttl_h")):
            if given[field] != _hours(now.get(policy)):
                wanted[policy] = round(float(given[field]) * 3.6e6) if given[field] else None
        if not wanted:
            return "Nothing was changed: these are the policies already."
        await visit.change("PATCH", topic_path(path), body=wanted)
        return "The policies are changed."

    what = [
        "Without a retention, records stay for ever. Another number of replicas is brought about while clients go on.",
        "A confirm waits for as many replicas as the write quorum says: a majority, if only the replicas change.",
        "Queues settle messages that are older than the message TTL, without delivering them.",
        f"For all other policies, run braid topic update {short_name(path)} with the options that its --help lists.",
        *found.get("warnings", ()),
    ]
    ask_back(visit, f"Policies of {short_name(path)}", what, run, button="Change", fields=fields)


def _hours(ms: int | None) -> float | None:
    return round(ms / 3.6e6, 4) if ms else None
