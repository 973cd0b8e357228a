"""The page of the pipeline: queries that stream from Braid and how far they lag, and the last reports of Spark jobs."""

from __future__ import annotations

import re
import time
from typing import Any, Final

from nicegui import ui

from braid.console.html import Html, el, join
from braid.console.numbers import age_text, bytes_text, count_text, counted
from braid.console.pages.frame import frame, head
from braid.console.pages.parts import card, command, empty, figure, icon, number, pill, short_name, table
from braid.console.pages.subscriptions import oldest_s
from braid.console.pages.visit import Visit
from braid.console.reports import JobRun, complaints, last_reports, summary
from braid.console.rest import RestError
from braid.console.watch.view import Json
from braid.model.errors import BraidError

LISTED: Final = 50
READ_S: Final = 5.0
STILL_S: Final = 120.0
"""A query that has not moved for so long, and lags, stands still."""


class Jobs:
    """What the reports topic held when it was read last."""

    def __init__(self) -> None:
        self.runs: list[JobRun] | None = None
        self.error = ""


def show(visit: Visit) -> None:
    jobs, wanted = Jobs(), set[str]()
    topic = visit.console.config.reports_topic

    def follow() -> None:
        for each in list(visit.view.topics)[:LISTED]:
            if each not in wanted:
                wanted.add(each)
                visit.want(each)

    async def read() -> None:
        try:
            jobs.runs = await last_reports(visit.rest, visit.client, topic)
            jobs.error = ""
        except (RestError, BraidError) as error:
            jobs.error = str(error)
        visit.refresh()

    with frame(visit, "pipeline", "Pipeline"):
        with ui.element("div").classes("head"):
            ui.html(
                head("Pipeline", "Spark queries that stream from Braid, and the last reports of its jobs"),
                sanitize=False,
            )
        visit.live(lambda: queries_card(_queries(visit)))
        visit.live(lambda: reports_card(jobs, topic))
        follow()
        ui.timer(2.0, follow)
        ui.timer(0.2, read, once=True)
        ui.timer(READ_S, read)


def _queries(visit: Visit) -> list[tuple[str, str, Json, float | None]]:
    return [
        (path, name, found, oldest_s(visit.view, path, name))
        for path, detail in visit.watch.details.items()
        for name, found in detail.stats["subscriptions"].items()
        if found.get("query")
    ]


def queries_card(found: list[tuple[str, str, Json, float | None]]) -> Html:
    if not found:
        how = '.option("subscription", "my-query")'
        return card(
            "Streaming queries",
            empty(
                "account_tree",
                "No query shows its progress",
                "A Spark query appears by the name of its subscription:",
                command(f'spark.readStream.format("braid").option("topic", "orders"){how}.load()'),
            ),
        )
    rows = [_query_row(*each) for each in found]
    headings = ["Query", "Topic", "State", number("Lag"), number("Last progress")]
    return card("Streaming queries", table(headings, rows), hint="by the subscriptions that show their progress")


def _query_row(path: str, name: str, found: Json, age_s: float | None) -> Html:
    moved = time.time() - found["movedAt"] / 1e6 if found["movedAt"] else None
    stands = found["backlog"] and (moved is None or moved > STILL_S)
    state = (
        pill("stands still", "warn")
        if stands
        else pill("up to date", "good")
        if not found["backlog"]
        else pill("running", "live")
    )
    return el(
        "tr",
        el("td", name, cls="name-cell"),
        el("td", el("a", short_name(path), href=f"/topics/{path}")),
        el("td", state),
        el("td", counted(found["backlog"], "record"), _oldest(found, age_s), cls="n"),
        el("td", f"{age_text(moved)} ago" if moved is not None else "–", cls="n"),
    )


def _oldest(found: Json, age_s: float | None) -> Html | None:
    return el("span", f"the oldest {age_text(age_s)}", cls="under") if found["backlog"] and age_s is not None else None


def reports_card(jobs: Jobs, topic: str) -> Html:
    if jobs.error:
        return card("Reports", el("div", el("div", icon("error_outline"), jobs.error, cls="banner"), cls="pad"))
    if not jobs.runs:
        return card(
            "Reports",
            empty(
                "fact_check",
                "No job has reported yet",
                "Audit, lake, compact, advise and replay publish their reports:",
                command(f"braid topic create {topic}\nbraid pipeline audit orders --report-topic {topic}"),
            ),
        )
    return join([run_card(each) for each in jobs.runs])


def run_card(run: JobRun) -> Html:
    figures = [figure(_words(name), _value(name, value)) for name, value in summary(run)]
    wrong = complaints(run)
    lines = [el("div", icon("warning_amber"), el("span", each), cls="banner") for each in wrong[:5]]
    more = el("p", f"… and {len(wrong) - 5} more", cls="muted") if len(wrong) > 5 else None
    verdict = (
        pill("sound" if run.job == "audit" else "done", "good")
        if run.ok
        else pill(f"{len(wrong) or 'something'} wrong", "bad")
    )
    ago = el("span", f"{age_text(time.time() - run.at / 1e6)} ago", cls="muted")
    body = el("div", el("div", figures, cls="figures"), *lines, more, cls="pad stack")
    topics = " → ".join(short_name(each.removeprefix("topic://")) for each in run.topics)
    return card(f"{run.job} {topics}".strip(), body, tools=el("div", verdict, ago, cls="acts"))


def _words(name: str) -> str:
    """Return `chunksBefore` as `Chunks before`."""
    return re.sub(r"(?=[A-Z])", " ", name).capitalize()


def _value(name: str, value: Any) -> str:
    if name.lower().endswith("bytes"):
        return bytes_text(value)
    return f"{value:.1f} s" if name == "seconds" else count_text(value)
