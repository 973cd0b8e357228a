"""Actions on brokers, and on topics as a whole, by the pages. A client sees what they did."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import Page, expect

from braid.sync import Client
from tests.kits.console_stage import LIVE_MS, Stage, confirm

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage, Shot

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]

PARCELS = "/topics/public/default/parcels"


def broker(client: Client, id_: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in client.admin.brokers() if each["id"] == id_)
    return found


def press(page: Page, id_: str, button: str) -> None:
    page.locator(f'tr[data-broker="{id_}"]').get_by_role("button", name=button).click()


def state(page: Page, id_: str, wanted: str) -> None:
    expect(page.locator(f'tr[data-broker="{id_}"]')).to_have_attribute("data-state", wanted, timeout=LIVE_MS)


def test_a_drained_broker_is_activated_and_segments_are_balanced_to_it(
    bare_stage: Stage, client: Client, new_page: NewPage, shot: Shot
) -> None:
    page = new_page()
    page.goto(bare_stage.url)
    state(page, "broker-2", "drained")
    assert broker(client, "broker-2")["segments"] == 0
    press(page, "broker-2", "Activate")
    expect(page.locator(".dialog")).to_contain_text("broker-2 may own segments again")
    confirm(page, "Activate", "broker-2 is active")
    state(page, "broker-2", "active")
    assert broker(client, "broker-2")["state"] == "active"
    # The leader needs a report of each broker before it plans.
    dialog = page.locator(".dialog")

    def plan() -> bool:
        page.get_by_role("button", name="Balance").click()
        expect(dialog.locator("li").first).to_be_visible()
        if "→ broker-2" in dialog.inner_text():
            return True
        dialog.get_by_role("button", name="Close").click()
        expect(dialog).to_have_count(0)
        return False

    for _ in range(60):
        if plan():
            break
    expect(dialog.locator("li", has_text="→ broker-2").first).to_contain_text("public/default/parcels segment")
    shot(page, "balance")
    confirm(page, "Balance", "moves have begun")
    segments = page.locator('tr[data-broker="broker-2"] td.n').first
    expect(segments).not_to_have_text("0", timeout=LIVE_MS)
    assert "broker-2" in client.admin.layout("parcels")["owners"].values()


def test_a_broker_is_drained_and_gives_its_segments_away(bare_stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(bare_stage.url)
    press(page, "broker-2", "Drain")
    expect(page.locator(".dialog")).to_contain_text("to the other 2 brokers")
    confirm(page, "Drain", "broker-2 is being drained")
    state(page, "broker-2", "drained")
    assert "broker-2" not in client.admin.layout("parcels")["owners"].values()
    assert (broker(client, "broker-2")["state"], broker(client, "broker-2")["segments"]) == ("drained", 0)


def test_all_segments_of_a_topic_are_moved_to_one_broker(bare_stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(bare_stage.url + PARCELS)
    page.get_by_role("button", name="Move all").click()
    page.locator(".dialog").get_by_label("To").click()
    page.get_by_role("option", name="broker-1").click()
    confirm(page, "Move", "All segments have arrived")
    assert set(client.admin.layout("parcels")["owners"].values()) == {"broker-1"}


def test_a_topic_is_repartitioned(bare_stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(bare_stage.url + PARCELS)
    expect(page.locator("tr[data-segment]")).to_have_count(8)
    page.get_by_role("button", name="Repartition").click()
    page.locator(".dialog").get_by_label("Segments").fill("")
    page.locator(".dialog").get_by_role("button", name="Repartition").click()
    expect(page.locator(".outcome.bad")).to_have_text("fill in: Segments", timeout=LIVE_MS)
    page.locator(".dialog").get_by_label("Segments").fill("2")
    confirm(page, "Repartition", "parcels has 2 segments")
    ranges = [
        (each["hashRange"]["start"], each["hashRange"]["end"])
        for each in client.admin.layout("parcels")["segments"].values()
        if each["state"] == "ACTIVE"
    ]
    assert sorted(ranges) == [(0, 0x7FFF), (0x8000, 0xFFFF)]
    expect(page.locator("tr[data-segment]", has=page.get_by_role("button", name="Merge"))).to_have_count(
        2, timeout=LIVE_MS
    )


def test_policies_are_changed(bare_stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(bare_stage.url + PARCELS)
    page.get_by_role("button", name="Policies").click()
    page.locator(".dialog").get_by_label("Retention, hours").fill("36")
    page.locator(".dialog").get_by_label("Durability").click()
    page.get_by_role("option", name="memory").click()
    page.locator(".dialog").get_by_label("Message TTL, hours").fill("0.5")
    expect(page.locator(".dialog")).to_contain_text("braid topic update parcels")
    confirm(page, "Change", "The policies are changed")
    policies = client.admin.topic("parcels")["policies"]
    assert (policies["retentionMs"], policies["durability"]) == (36 * 3_600_000, "memory")
    assert policies["messageTtlMs"] == 1_800_000
    page.get_by_role("button", name="Policies").click()
    expect(page.locator(".dialog").get_by_label("Retention, hours")).to_have_value("36")
    page.locator(".dialog").get_by_label("Retention, hours").fill("")
    expect(page.locator(".dialog").get_by_label("Message TTL, hours")).to_have_value("0.5")
    page.locator(".dialog").get_by_label("Message TTL, hours").fill("")
    confirm(page, "Change", "The policies are changed")
    policies = client.admin.topic("parcels")["policies"]
    assert (policies.get("retentionMs"), policies.get("messageTtlMs")) == (None, None)


def test_the_replicas_that_confirm_are_changed(bare_stage: Stage, client: Client, new_page: NewPage) -> None:
    client.admin.create_topic("contracts", replicas=2)
    page = new_page()
    page.goto(bare_stage.url + "/topics/public/default/contracts")
    page.get_by_role("button", name="Policies").click()
    expect(page.locator(".dialog").get_by_label("Write quorum")).to_have_value("2")
    page.locator(".dialog").get_by_label("Write quorum").fill("1")
    confirm(page, "Change", "The policies are changed")
    policies = client.admin.topic("contracts")["policies"]
    assert (policies["replicas"], policies["writeQuorum"]) == (2, 1)
    client.admin.delete_topic("contracts")


def test_a_topic_is_deleted_when_its_name_is_typed(bare_stage: Stage, client: Client, new_page: NewPage) -> None:
    page = new_page()
    page.goto(bare_stage.url + PARCELS)
    page.get_by_role("button", name="Delete").click()
    dialog = page.locator(".dialog")
    expect(dialog).to_contain_text("Nothing brings it back")
    dialog.get_by_role("button", name="Delete").click()
    expect(page.locator(".outcome.bad")).to_contain_text("Type parcels first")
    assert client.admin.list_topics() == ["topic://public/default/parcels"]
    dialog.get_by_label("Type parcels to confirm").fill("parcels")
    confirm(page, "Delete", "is deleted")
    assert client.admin.list_topics() == []
    expect(page.locator(".banner")).to_contain_text(re.compile("There is no topic"), timeout=LIVE_MS)
