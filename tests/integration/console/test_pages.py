"""Each page of the console in a real browser, against a real cluster under load."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Page, expect

import braid.sync
from braid.cli.pipeline.report import publish_report
from braid.sync import Client
from tests.kits.console_stage import LIVE_MS, Stage, card, confirm

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage, Shot

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]

ORDERS = "/topics/public/default/orders"


def strand(page: Page, segment: int) -> str:
    """One ribbon for each owner: a look at the moment of a creation finds none yet."""
    return f'svg.braid .ribbon:not(.link)[data-segment="{segment}"]'


def test_pictures_of_the_documentation_are_small_and_shown() -> None:
    docs = Path(__file__).parents[3] / "docs"
    pictures = list((docs / "images" / "console").glob("*.png"))
    assert len(pictures) >= 8
    assert [each.name for each in pictures if each.stat().st_size > 150_000] == []
    page = (docs / "operating" / "console.md").read_text()
    assert {each.name for each in pictures} == set(re.findall(r"\(\.\./images/console/([\w-]+\.png)\)", page))


def test_the_cluster_shows_its_brokers_and_keys_lead_elsewhere(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    page = new_page()
    page.goto(stage.url)
    for broker in stage.cluster.brokers:
        expect(page.locator(f'tr[data-broker="{broker}"]')).to_have_attribute("data-state", "active")
    expect(page.locator("tr .pill", has_text="leader")).to_have_count(1)
    expect(page.locator(".figure", has_text="Published").locator(".value")).not_to_have_text(
        re.compile("^0 "), timeout=LIVE_MS
    )
    expect(page.get_by_role("button", name="Drain").first).to_be_in_viewport(ratio=1)
    shot(page, "cluster")
    page.keyboard.press("?")
    expect(page.get_by_role("heading", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    page.keyboard.press("g")
    page.keyboard.press("t")
    page.wait_for_url("**/topics")


def test_topics_are_created_found_and_sorted(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    page = new_page()
    page.goto(stage.url + "/topics")
    expect(page.locator("tr[data-topic]")).to_have_count(3)
    page.get_by_role("button", name="Create topic").click()
    page.get_by_label("Name").fill("refunds")
    page.get_by_role("button", name="Create", exact=True).click()
    expect(page.locator(".outcome.good")).to_contain_text("refunds is there")
    page.get_by_role("button", name="Close").click()
    expect(page.locator('tr[data-topic="public/default/refunds"]')).to_be_visible(timeout=LIVE_MS)
    shot(page, "topics")
    page.get_by_role("button", name="Published").click()
    expect(page.locator("tr[data-topic]").first).to_have_attribute("data-topic", "public/default/orders")
    page.get_by_placeholder("Search").fill("refu")
    expect(page.locator("tr[data-topic]")).to_have_count(1)
    page.get_by_placeholder("Search").fill("nothing")
    expect(page.locator(".empty")).to_contain_text("No topic matches")


def test_a_dialog_is_filled_and_confirmed_by_the_keyboard(stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + "/topics")
    page.get_by_role("button", name="Create topic").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_label("Name")).to_be_focused()
    page.keyboard.type("by-keyboard")
    page.keyboard.press("Enter")
    expect(page.locator(".outcome.good")).to_contain_text("by-keyboard is there")
    page.keyboard.press("Escape")
    expect(page.locator(".dialog")).to_have_count(0)
    expect(page.get_by_role("button", name="Create topic")).to_be_focused()
    client.admin.delete_topic("by-keyboard")
    # A field with a list opens it, and a text of several lines gets a new one.
    page.goto(stage.url + "/messages/public/default/orders")
    page.get_by_role("button", name="Publish").click()
    page.locator(".dialog").get_by_label("Topic").press("Enter")
    expect(page.get_by_role("option", name="clicks")).to_be_visible()
    page.keyboard.press("Escape")
    value = page.locator(".dialog").get_by_label("Value")
    value.fill("one")
    value.press("End")
    value.press("Enter")
    expect(value).to_have_value("one\n")
    expect(page.locator(".outcome")).to_have_count(0)


def test_a_topic_with_replicas_is_created(stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + "/topics")
    dialog = page.locator(".dialog")
    for name, choice, durability in (("ledger", "", "replicated"), ("scratch", "memory", "memory")):
        page.get_by_role("button", name="Create topic").click()
        dialog.get_by_label("Name").fill(name)
        if choice:
            dialog.get_by_label("Durability").click()
            page.get_by_role("option", name=choice).click()
        else:
            dialog.get_by_label("Replicas").fill("3")
        confirm(page, "Create", f"{name} is there")
        policies = client.admin.topic(name)["policies"]
        assert (policies["replicas"], policies["durability"]) == (1 if choice else 3, durability)
        client.admin.delete_topic(name)


def test_a_topic_that_does_not_exist_has_a_page_that_says_so_and_nothing_else(stage: Stage, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + "/topics/public/default/no-such-topic")
    expect(page.locator(".banner")).to_contain_text("There is no topic public/default/no-such-topic")
    expect(page.locator(".figure, .card")).to_have_count(0)


def test_a_split_and_a_move_are_seen_live(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    """The page is never loaded again: the braid grows."""
    page = new_page()
    page.goto(stage.url + ORDERS)
    expect(page.locator(strand(page, 0))).not_to_have_count(0)
    # The first by a command, as another operator would; the second by the page's own dialog.
    stage.cluster.run("topic", "split", "orders", "0")
    expect(page.locator(strand(page, 2))).not_to_have_count(0, timeout=LIVE_MS)
    expect(page.locator('svg.braid .link[data-tip="segment 0 → segment 2"]')).to_have_count(1)
    expect(page.locator('svg.braid .link[data-tip="segment 0 → segment 3"]')).to_have_count(1)
    row = page.locator('tr[data-segment="1"]')
    owner = row.locator("td").nth(2).inner_text().strip()
    target = stage.cluster.others(owner)[0]
    row.get_by_role("button", name="Move").click()
    expect(page.locator(".dialog")).to_contain_text(f"goes from {owner}")
    page.locator(".dialog").get_by_label("To").click()
    page.get_by_role("option", name=target).click()
    page.locator(".dialog").get_by_role("button", name="Move").click()
    expect(page.locator(".outcome.good")).to_contain_text(f"served by {target}", timeout=LIVE_MS)
    page.get_by_role("button", name="Close").click()
    expect(page.locator("svg.braid .mark.moved")).to_have_count(1, timeout=LIVE_MS)
    expect(row.locator("td").nth(2)).to_contain_text(target)


def test_a_split_by_the_page_asks_back_and_a_merge_joins_again(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    page = new_page()
    page.goto(stage.url + ORDERS)
    page.locator('tr[data-segment="1"]').get_by_role("button", name="Split").click()
    expect(page.locator(".dialog")).to_contain_text("each key keeps its order")
    shot(page, "split")
    page.locator(".dialog").get_by_role("button", name="Split").click()
    expect(page.locator(".outcome.good")).to_contain_text("Segment 1 is split", timeout=LIVE_MS)
    page.get_by_role("button", name="Close").click()
    active = page.locator("tr[data-segment]", has=page.get_by_role("button", name="Merge"))
    expect(active).to_have_count(4, timeout=LIVE_MS)
    active.first.get_by_role("button", name="Merge").click()
    page.locator(".dialog").get_by_role("button", name="Merge").click()
    expect(page.locator(".outcome.good")).to_contain_text("are one", timeout=LIVE_MS)
    page.get_by_role("button", name="Close").click()
    expect(active).to_have_count(3, timeout=LIVE_MS)


def test_hot_ranges_show_where_the_load_is_and_where_a_split_halves_it(
    stage: Stage, client: Client, new_page: NewPage
) -> None:
    page = new_page()
    page.goto(stage.url + ORDERS)
    hot = card(page, "Hot ranges")
    expect(hot.locator("svg path").first).to_be_visible(timeout=LIVE_MS)
    busiest = hot.locator("tr[data-load]").first
    expect(busiest.get_by_role("button", name="Split at")).to_be_visible(timeout=LIVE_MS)
    hot.locator(".cut").first.hover()
    expect(page.locator("#tip")).to_contain_text("halves segment")
    segment = int(str(busiest.get_attribute("data-load")))
    button = busiest.get_by_role("button", name="Split at")
    at = str(button.get_attribute("data-at"))
    button.click()
    dialog = page.locator(".dialog")
    expect(dialog).to_contain_text(f"two segments at hash {at}")
    expect(dialog).to_contain_text("Its load is halved at hash")
    confirm(page, "Split", f"Segment {segment} is split")
    layout = client.admin.layout("orders")["segments"]
    first, second = (layout[str(each)]["hashRange"] for each in layout[str(segment)]["childIds"])
    assert (first["end"] + 1, second["start"]) == (int(at, 16), int(at, 16))


def test_one_key_that_is_the_load_is_named(stage: Stage, client: Client, new_page: NewPage) -> None:
    client.admin.create_topic("one-key")
    page = new_page()
    page.goto(stage.url + "/topics/public/default/one-key")
    hot = card(page, "Hot ranges")
    expect(hot).to_contain_text("No record with a key has come lately", timeout=LIVE_MS)
    with client.producer("one-key") as producer:
        producer.send_many([("the-one", b"value")] * 500)
    expect(hot.locator("tr[data-load]")).to_contain_text("one key is 100 %", timeout=LIVE_MS)
    expect(hot).to_contain_text("no split helps")
    expect(hot.get_by_role("button", name="Split at")).to_have_count(0)
    page.locator('tr[data-segment="0"]').get_by_role("button", name="Split").click()
    expect(page.locator(".dialog")).to_contain_text("One key is 100 % of its load")
    page.get_by_role("button", name="Close").click()
    client.admin.delete_topic("one-key")


def test_the_braid_answers_the_pointer_and_zooms(stage: Stage, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + ORDERS)
    ribbon = page.locator("svg.braid .ribbon:not(.link)").last
    ribbon.hover(force=True)
    expect(page.locator("#tip")).to_contain_text("segment")
    expect(page.locator("svg.braid.pointing")).to_have_count(1)
    last_hash = page.locator("svg.braid .tick.hash").last
    expect(last_hash).to_have_text("ffff")
    page.locator("svg.braid").dblclick(position={"x": 500, "y": 100})
    expect(last_hash).not_to_have_text("ffff")
    page.keyboard.press("0")
    expect(last_hash).to_have_text("ffff")
    page.get_by_role("button", name="1m").click()
    expect(page.get_by_role("button", name="1m")).to_have_class("on")


def test_fields_of_a_dialog_show_their_values_where_they_begin(stage: Stage, new_page: NewPage) -> None:
    page = new_page()
    page.goto(stage.url + ORDERS)
    page.get_by_role("button", name="Policies").click()
    # The dialog grows when it opens, so this waits for the last size.
    page.wait_for_function(
        """() => {
            const left = element => element.getBoundingClientRect().left;
            const fields = [...document.querySelectorAll('.dialog .q-field')];
            const chosen = fields.find(each => each.innerText.includes('Durability'));
            if (!chosen) return false;
            const value = chosen.querySelector('.q-field__native span');
            const label = chosen.querySelector('.q-field__label');
            const heights = new Set(fields.map(each => each.querySelector('.q-field__control').offsetHeight));
            return Math.abs(left(value) - left(label)) < 2 && heights.size === 1;
        }"""
    )
    # A key stands in one line, and its line says what it does.
    page.keyboard.press("Escape")
    expect(page.locator(".dialog")).to_have_count(0)
    page.keyboard.press("?")
    expect(page.get_by_role("heading", name="Keys")).to_be_visible()
    lines = page.locator(".dialog kbd").evaluate_all("all => all.map(each => each.getClientRects().length)")
    assert set(lines) == {1}


def test_records_are_looked_at_decoded_and_published(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    page = new_page()
    page.goto(stage.url + "/messages/public/default/orders")
    expect(page.locator(".rec")).to_have_count(50, timeout=LIVE_MS)
    page.locator(".rec").nth(1).click()
    expect(page.locator(".whole")).to_contain_text("header source")
    expect(page.locator(".whole pre")).to_contain_text('"customer"')
    shot(page, "messages")
    page.get_by_role("button", name="hex").click()
    expect(page.locator(".whole pre")).to_contain_text("000000  7b 22")
    page.get_by_role("button", name="auto").click()
    # A record that would like to be a program is text.
    evil = "<img src=x onerror=\"document.title='hacked'\">"
    page.goto(stage.url + "/messages/public/default/letters")
    expect(page.locator(".empty")).to_contain_text("No record is there", timeout=LIVE_MS)
    page.get_by_role("switch", name="Follow").click()
    expect(page.locator(".empty")).to_contain_text("Waiting for records")
    page.get_by_role("button", name="Publish").click()
    page.locator(".dialog").get_by_label("Value").fill(evil)
    page.locator(".dialog").get_by_label("Key (optional)").fill("k-1")
    page.locator(".dialog").get_by_role("button", name="Publish").click()
    expect(page.locator(".outcome.good")).to_contain_text("It is stored: segment 0, offset 0")
    page.get_by_role("button", name="Close").click()
    expect(page.locator(".rec")).to_have_count(1, timeout=LIVE_MS)
    expect(page.locator(".rec")).to_contain_text(evil)
    assert page.locator("img").count() == 0
    assert page.title() == "Messages · Braid"


def test_subscriptions_show_their_backlog_and_seek(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    topic = "letters"
    with braid.sync.connect(stage.cluster.url) as client:
        client.admin.create_subscription(topic, "mailer", kind="queue", start="earliest", max_deliveries=3,
                                         dead_letter_topic="refunds")  # fmt: skip
        client.admin.create_subscription("orders", "billing", start="earliest")
        client.admin.create_subscription("orders", "audit-log", start="latest")
        with client.stream_consumer("orders", "billing", name="billing-1") as consumer:
            for _ in range(200):
                message = consumer.receive(timeout=10)
                assert message is not None
                consumer.ack(message)
            page = new_page()
            page.goto(stage.url + "/subscriptions")
            billing = card(page, "billing")
            expect(billing).to_contain_text("billing-1", timeout=LIVE_MS)
            expect(billing.locator(".figure", has_text="Oldest")).to_contain_text(
                re.compile(r"\d+ (s|min)"), timeout=LIVE_MS
            )
            expect(page.locator("section.card", has_text="queue of letters")).to_contain_text("Dead letters")
            shot(page, "subscriptions")
        card(page, "audit-log").get_by_role("button", name="Seek").click()
        expect(page.locator(".dialog")).to_contain_text("may come again")
        confirm(page, "Seek", "audit-log continues there")
        found = client.admin.subscription("orders", "audit-log")
        assert {each["offset"] for each in found["segments"].values()} == {0}


def test_the_pipeline_shows_queries_and_reports(stage: Stage, client: Client, new_page: NewPage, shot: Shot) -> None:
    report = {"topic": "public/default/orders", "ok": True, "records": 120_345, "batches": 811, "chunks": 12,
              "bytes": 9_400_000, "seconds": 7.4, "defects": []}  # fmt: skip
    lake = {"topic": "public/default/orders", "ok": True, "records": 118_000, "files": 9, "bytes": 8_100_000,
            "lag": 2_345, "skipped": 0, "seconds": 11.2}  # fmt: skip

    async def publish() -> None:
        async with braid.connect(stage.cluster.url) as client:
            await publish_report(client, "braid-reports", "audit", report, ok=True)
            await publish_report(client, "braid-reports", "lake", lake, ok=True)

    client.admin.create_subscription("orders", "orders-to-lake", query=True)
    page = new_page()
    page.goto(stage.url + "/pipeline")
    expect(page.locator(".empty").last).to_contain_text("braid pipeline audit")
    stage.cluster.run("topic", "create", "braid-reports")
    with ThreadPoolExecutor(1) as threads:  # Playwright's loop runs in this one.
        threads.submit(asyncio.run, publish()).result()
    audit = page.locator("section.card", has=page.get_by_role("heading", name="audit orders"))
    expect(audit).to_contain_text("120,345", timeout=15_000)
    expect(audit).to_contain_text("sound")
    query = page.locator("tr", has_text="orders-to-lake")
    expect(query).to_contain_text("records", timeout=LIVE_MS)
    expect(page.locator("tr", has_text="billing")).to_have_count(0)  # Its consumers are away.
    shot(page, "pipeline")


def test_dark_and_phone_are_readable(stage: Stage, new_page: NewPage, shot: Shot) -> None:
    page = new_page(dark=True)
    page.goto(stage.url + ORDERS)
    expect(page.locator("svg.braid .ribbon").first).to_be_visible()
    shot(page, "topic-dark")
    page.keyboard.press("d")
    expect(page.locator("body.body--light")).to_have_count(1)
    page.mouse.move(640, 20)
    shot(page, "topic")
    expect(card(page, "Hot ranges").locator("tr[data-load]")).to_have_count(4, timeout=LIVE_MS)
    page.evaluate("document.querySelector('.hash-load').scrollIntoView({block: 'center'})")
    shot(page, "hot-ranges")
    phone = new_page(width=390, height=844)
    paths = ("/", "/topics", "/messages", "/subscriptions", "/pipeline")
    for path, name in (*((each, "") for each in paths), (ORDERS, "topic-phone")):
        phone.goto(stage.url + path)
        expect(phone.locator("main h1")).to_be_visible()
        wide = phone.evaluate("document.documentElement.scrollWidth")
        assert wide <= 390, f"{path} scrolls sideways: {wide} px"
        if name:
            phone.evaluate("document.querySelector('svg.braid').scrollIntoView({block: 'center'})")
            shot(phone, name)
    # What has no column on a phone stands below the name.
    for path, row, fact in (("/", "tr[data-broker]", "lease held"), (ORDERS, "tr[data-segment]", "only in log")):
        phone.goto(stage.url + path)
        expect(phone.locator(f"{row} .narrow", has_text=fact).first).to_be_visible()
        page.goto(stage.url + path)
        expect(page.locator(f"{row} .narrow").first).to_be_hidden()
