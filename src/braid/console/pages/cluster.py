"""The page of the cluster: its brokers, and what is under way."""

from __future__ import annotations

import time
from typing import Any

from nicegui import ui

from braid.console.html import Html, el
from braid.console.numbers import age_text, bytes_rate_text, bytes_text, count_text, counted, percent_text, rate_text
from braid.console.pages import consequences
from braid.console.pages.actions import ask_back, on_acts
from braid.console.pages.consequences import change_text, since_text
from braid.console.pages.frame import frame, head
from braid.console.pages.parts import (
    act,
    bar,
    card,
    command,
    empty,
    figure,
    narrow,
    number,
    owner_dot,
    pill,
    short_name,
    state_pill,
    table,
)
from braid.console.pages.visit import Visit
from braid.console.rest import API, RestError
from braid.console.watch.view import BrokerSeen, ClusterView


def show(visit: Visit) -> None:
    with frame(visit, "cluster", "Cluster"):
        with ui.element("div").classes("head"):
            ui.html(head("Cluster", "Brokers, their load, and what is under way"), sanitize=False)
            if not visit.read_only:
                ui.html(act("Balance", "balance", icon_name="balance", cls="big"), sanitize=False).classes("tools")
        visit.live(lambda: figures(visit.view))
        visit.live(lambda: brokers_card(visit.view, visit.watch.colours, read_only=visit.read_only))
        visit.live(lambda: changes_card(visit.view))
    on_acts(
        visit,
        {
            "drain": lambda given: _drain(visit, str(given.get("broker"))),
            "activate": lambda given: _activate(visit, str(given.get("broker"))),
            "balance": lambda _: _balance(visit),
        },
    )


# What it shows.


def figures(view: ClusterView) -> Html:
    up = [each for each in view.brokers if each.up]
    records_in = sum(each.records_in_per_s or 0 for each in view.topics.values())
    records_out = sum(each.records_out_per_s or 0 for each in view.topics.values())
    bytes_in = sum(each.bytes_in_per_s or 0 for each in view.topics.values())
    bytes_out = sum(each.bytes_out_per_s or 0 for each in view.topics.values())
    segments = sum(each.active for each in view.topics.values())
    unserved = {
        short_name(path): count
        for path, topic in view.topics.items()
        if (count := sum(each.active and not each.owner for each in topic.segments))
    }
    leader = next((each.id for each in view.brokers if each.leader), "none now")
    return el(
        "div",
        figure("Brokers", f"{len(up)} of {len(view.brokers)} up", f"leader: {leader}"),
        figure("Topics", count_text(len(view.topics)), counted(segments, "active segment")),
        figure("Published", rate_text(records_in, "records"), bytes_rate_text(bytes_in)),
        figure("Delivered", rate_text(records_out, "records"), bytes_rate_text(bytes_out)),
        figure("Not served", counted(sum(unserved.values()), "segment"), ", ".join(unserved) or "all is served"),
        cls="figures",
    )


def brokers_card(view: ClusterView, colours: dict[str, int], *, read_only: bool) -> Html:
    if not view.brokers:
        return card(
            "Brokers",
            empty("dns", "No broker is known yet", "Start a cluster on this machine:", command("braid up")),
        )
    headings = [
        "Broker",
        "State",
        number("Segments"),
        number("CPU", wide=True),
        number("In", wide=True),
        number("Out", wide=True),
        number("Disk", wide=True),
        number("Clients", wide=True),
        el("th", "Lease", cls="wide"),
        el("th", "Version", cls="wide"),
        "",
    ]
    rows = [_broker_row(each, colours, read_only=read_only) for each in view.brokers]
    return card("Brokers", table(headings, rows), hint="live")


def _broker_row(each: BrokerSeen, colours: dict[str, int], *, read_only: bool) -> Html:
    disk = None
    if each.disk_size and each.disk_free is not None:
        used = 1 - each.disk_free / each.disk_size
        disk = el(
            "div", bar(used), el("div", bytes_text(each.disk_free), el("span", "free", cls="under")), cls="with-bar"
        )
    cpu = el("div", bar(each.cpu), el("span", percent_text(each.cpu)), cls="with-bar") if each.cpu is not None else "–"
    age = f"up {age_text(time.time() - each.started_at)} · " if each.started_at and each.up else ""
    buttons: list[Html] = []
    if not read_only and each.state == "active":
        buttons = [act("Drain", "drain", broker=each.id)]
    elif not read_only and each.state in ("draining", "drained"):
        buttons = [act("Activate", "activate", broker=each.id)]
    name = el(
        "td",
        owner_dot(each.id, colours),
        each.id,
        [" ", pill("leader", "live plain")] if each.leader else None,
        el("span", f"{age}{each.address or 'address unknown'}", cls="under"),
        [el("span", reason, cls="under") for reason in each.obstacles[:2]],
        narrow(
            f"CPU {percent_text(each.cpu)}",
            f"in {bytes_rate_text(each.bytes_in_per_s)}",
            f"out {bytes_rate_text(each.bytes_out_per_s)}",
            f"{bytes_text(each.disk_free)} free",
            counted(each.connections, "client"),
            f"lease {each.lease}",
            f"version {each.version or '–'}",
        ),
        cls="name-cell",
    )
    segments = [
        count_text(each.segments),
        el("span", f"+{counted(each.replicas, 'copy')}", cls="under") if each.replicas else None,
    ]
    return el(
        "tr",
        name,
        el(
            "td",
            state_pill(each.state),
            [" ", pill(f"{counted(each.out_of_sync, 'copy')} behind", "warn")] if each.out_of_sync else None,
        ),
        el("td", segments, cls="n"),
        el("td", cpu, cls="n wide"),
        el("td", bytes_rate_text(each.bytes_in_per_s), cls="n wide"),
        el("td", bytes_rate_text(each.bytes_out_per_s), cls="n wide"),
        el("td", disk or "–", cls="n wide"),
        el("td", count_text(each.connections), cls="n wide"),
        el("td", pill(each.lease, {"held": "good", "lost": "bad"}.get(each.lease, "")), cls="wide"),
        el("td", each.version or "–", cls="wide muted"),
        el("td", el("div", buttons, cls="acts")),
        data_broker=each.id,
        data_state=each.state,
    )


def changes_card(view: ClusterView) -> Html:
    draining = [each for each in view.brokers if each.state == "draining"]
    lines = [
        _change("drain", f"{each.id} is being drained", f"{counted(each.segments, 'segment')} left")
        for each in draining
    ]
    lines += [_change(str(each["kind"]), change_text(each), since_text(each)) for each in view.changes[:40]]
    if len(view.changes) > 40:
        lines.append(el("div", f"… and {len(view.changes) - 40} more", cls="change muted"))
    if not lines:
        calm = "Moves, drains, votes and changes of layouts appear here while they run."
        return card("Under way", empty("check_circle_outline", "Nothing is under way", el("span", calm)))
    return card("Under way", el("div", lines, cls="changes"), hint=f"{len(lines)}")


def _change(kind: str, text: str, note: str) -> Html:
    return el("div", pill(kind, "live"), el("span", text), el("span", note, cls="muted nowrap"), cls="change")


# What it does.


def _drain(visit: Visit, broker: str) -> None:
    found = visit.view.broker(broker)
    if found is None:
        return
    others = sum(each.state == "active" and each.id != broker for each in visit.view.brokers)

    async def run() -> str:
        await visit.change("POST", f"{API}/brokers/{found.id}/drain")
        return f"{broker} is being drained. The list of brokers shows how far it is."

    ask_back(visit, f"Drain {broker}?", consequences.of_drain(found, others), run, button="Drain", danger=True)


def _activate(visit: Visit, broker: str) -> None:
    found = visit.view.broker(broker)
    if found is None:
        return

    async def run() -> str:
        await visit.change("POST", f"{API}/brokers/{found.id}/activate")
        return f"{broker} is active."

    ask_back(visit, f"Activate {broker}?", consequences.of_activate(found), run, button="Activate")


async def _balance(visit: Visit) -> None:
    try:
        plan: Any = await visit.rest.call("POST", f"{API}/brokers/balance", query={"dryRun": "true"})
    except RestError as error:
        ui.notify(str(error), type="negative")
        return

    async def run() -> str:
        done = await visit.change("POST", f"{API}/brokers/balance")
        return f"{done['begun']} moves have begun. They are listed under way."

    ask_back(visit, "Balance the cluster?", consequences.of_balance(plan), run, button="Balance")
