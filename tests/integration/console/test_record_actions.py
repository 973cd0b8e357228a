"""The page of messages: looks by offset, time and key, rows by the keyboard, copies of values, and publishing."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

from braid.sync import Client
from tests.kits.console_stage import LIVE_MS, Stage, confirm

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]

NOTES = "/messages/public/default/notes"
TEN = datetime.datetime(2026, 1, 31, 10, tzinfo=datetime.UTC)
CHOSEN = "text that a person copies"


@pytest.fixture
def notes(client: Client) -> Iterator[Client]:
    """A topic with a record of each hour from ten to three, by two keys in turn."""
    client.admin.create_topic("notes", segments=2)
    with client.producer("notes") as producer:
        for hour in range(6):
            key = "ada" if hour % 2 else "grace"
            value = CHOSEN if hour == 5 else f"note {hour}"
            producer.send(value, key=key, timestamp=TEN + datetime.timedelta(hours=hour))
    yield client
    client.admin.delete_topic("notes")


def choose(page: Page, way: str) -> None:
    page.get_by_label("Show", exact=True).click()
    page.get_by_role("option", name=way).click()


def pasted(page: Page) -> str:
    """Return what the clipboard holds, by pasting it into a field of the page."""
    choose(page, "of one key")
    field = page.get_by_label("Key", exact=True)
    field.fill("")
    field.press("Control+V")
    return field.input_value()


def test_records_are_looked_up_by_time_and_by_key(stage: Stage, notes: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + NOTES)
    rows = page.locator(".rec")
    expect(rows).to_have_count(6, timeout=LIVE_MS)
    choose(page, "from a time")
    page.get_by_label("Time", exact=True).fill("yesterday")
    page.get_by_role("button", name="Look").click()
    expect(page.locator(".banner")).to_contain_text("write the time as 2026-01-31 12:00")
    page.get_by_label("Time", exact=True).fill("2026-01-31 12:30")
    page.get_by_role("button", name="Look").click()
    expect(rows).to_have_count(3, timeout=LIVE_MS)
    expect(rows.first).to_contain_text(CHOSEN)
    expect(rows.last).to_contain_text("note 3")
    choose(page, "of one key")
    page.get_by_label("Key", exact=True).fill("grace")
    page.get_by_role("button", name="Look").click()
    expect(rows.first).to_contain_text("note 4", timeout=LIVE_MS)
    expect(rows).to_have_count(3)
    assert [text.count("grace") for text in rows.all_inner_texts()] == [1, 1, 1]
    page.get_by_label("Key", exact=True).fill("nobody")
    page.get_by_role("button", name="Look").click()
    expect(page.locator(".empty")).to_contain_text("No record is there", timeout=LIVE_MS)


def test_records_are_looked_up_from_an_offset_and_in_a_segment(stage: Stage, notes: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + NOTES)
    rows = page.locator(".rec")
    expect(rows).to_have_count(6, timeout=LIVE_MS)
    of_one = [each for each in rows.all_inner_texts() if "grace" in each]
    (segment,) = {int(found[1]) for each in of_one if (found := re.search(r"(\d) @ \d", each))}
    choose(page, "from an offset")
    page.get_by_label("Offset", exact=True).fill("1")
    page.get_by_role("button", name="Look").click()
    expect(rows.filter(has_text=re.compile(r"\d @ 0"))).to_have_count(0, timeout=LIVE_MS)
    assert 0 < rows.count() < 6
    page.get_by_label("Segment", exact=True).fill(str(segment))
    page.get_by_role("button", name="Look").click()
    expect(rows.filter(has_text="grace")).to_have_count(2, timeout=LIVE_MS)  # The first is at 0.
    expect(rows.filter(has_not_text=re.compile(rf"{segment} @ [1-9]"))).to_have_count(0)


def test_a_record_is_published_with_its_headers(stage: Stage, notes: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + NOTES)
    page.get_by_role("button", name="Publish").click()
    dialog = page.locator(".dialog")
    dialog.get_by_label("Value").fill("with headers")
    dialog.get_by_label("Headers").fill("nonsense")
    dialog.get_by_role("button", name="Publish").click()
    expect(page.locator(".outcome.bad")).to_contain_text("write name=value")
    dialog.get_by_label("Headers").fill("source=web, kind=note")
    confirm(page, "Publish", "It is stored")
    page.get_by_role("button", name="Look").click()
    page.locator(".rec", has_text="with headers").click(timeout=LIVE_MS)
    expect(page.locator(".whole dl")).to_contain_text("header source")
    expect(page.locator(".whole dl")).to_contain_text("web")
    expect(page.locator(".whole dl")).to_contain_text("header kind")


def test_the_keyboard_opens_and_closes_a_record(stage: Stage, notes: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + NOTES)
    expect(page.locator("main")).to_have_count(1)
    row = page.locator(".rec").nth(2)
    row.focus(timeout=LIVE_MS)
    page.keyboard.press("Enter")
    expect(page.locator(".whole")).to_have_count(1)
    expect(row).to_be_focused()  # The server has written the card anew.
    page.keyboard.press(" ")
    expect(page.locator(".whole")).to_have_count(0)
    expect(row).to_be_focused()
    assert page.evaluate("window.scrollY") == 0, "the space bar has scrolled the page"


@pytest.mark.parametrize("clipboard", ["as the browser has it", "none"])
def test_a_value_is_copied(stage: Stage, notes: Client, new_page: NewPage, clipboard: str) -> None:
    page = new_page()
    if clipboard == "none":  # As on a page that comes by plain HTTP from another machine.
        page.add_init_script("Object.defineProperty(navigator, 'clipboard', {value: undefined})")
    page.goto(stage.url + NOTES)
    page.locator(".rec", has_text=CHOSEN).click(timeout=LIVE_MS)
    copy = page.locator(".whole button")
    copy.click()
    expect(copy).to_have_text("Copied")
    assert pasted(page) == CHOSEN
    if clipboard == "none":  # A browser that does not copy for pages has the text selected, and a person copies it.
        page.evaluate("document.execCommand = () => false; getSelection().removeAllRanges()")
        expect(copy).to_have_text("Copy")
        copy.click()
        expect(copy).to_have_text("Selected: press Ctrl+C")
        assert page.evaluate("getSelection().toString()") == CHOSEN
