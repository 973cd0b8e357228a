"""A broker is lost: the pages show it, replicas take over, and an operator accepts the loss of what had none."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import pytest
from playwright.sync_api import expect

from braid.sync import Client
from tests.kits.console_stage import LIVE_MS, Stage, card, confirm

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage, Shot

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]


def unserved(client: Client) -> list[str]:
    """Return the active segments of orders that no broker serves."""
    found = client.admin.topic_stats("orders")["segments"]
    return [id_ for id_, each in found.items() if is_active(each) and each["unavailable"] is not None]


def is_active(segment: dict[str, Any]) -> bool:
    return bool(segment["state"] == "ACTIVE")


def test_a_killed_broker_is_shown_within_five_seconds(
    stage: Stage, client: Client, new_page: NewPage, shot: Shot
) -> None:
    page = new_page()
    page.goto(stage.url)
    victim = next(each["id"] for each in client.admin.brokers() if not each["leader"])
    active = {id_: each for id_, each in client.admin.topic_stats("orders")["segments"].items() if is_active(each)}
    if victim not in [each["owner"] for each in active.values()]:
        client.admin.move("orders", segment=int(min(active)), to=victim)
    row = page.locator(f'tr[data-broker="{victim}"]')
    expect(row).to_have_attribute("data-state", "active")
    stage.cluster[victim].kill()
    began = time.monotonic()
    expect(row).to_have_attribute("data-state", re.compile("silent|down"), timeout=5_000)
    assert time.monotonic() - began < 5
    shot(page, "broker-down")
    other = new_page()
    other.goto(stage.url + "/topics/public/default/clicks")
    replicas = card(other, "Replicas")
    expect(replicas.locator("tr", has_text=victim).first).to_contain_text("down", timeout=LIVE_MS)
    # Its segments fail over to replicas, and the braid says so. (The broker stays away: the next test is the last.)
    expect(other.locator("svg.braid .mark.failed-over").first).to_be_visible(timeout=LIVE_MS)
    shot(other, "fail-over")


def test_segments_without_replicas_are_recovered_when_an_operator_accepts_the_loss(
    stage: Stage, client: Client, new_page: NewPage
) -> None:
    lost = unserved(client)
    assert lost, "the broker that was killed had none of them"
    page = new_page()
    page.goto(stage.url + "/topics/public/default/orders")
    alarm = page.locator(".banner.warn", has_text="not served")
    expect(alarm).to_be_visible(timeout=LIVE_MS)
    page.get_by_role("button", name="Recover").click()
    dialog = page.locator(".dialog")
    expect(dialog).to_contain_text("without what only its disk had")
    expect(dialog).to_contain_text(re.compile("lost|loss"))
    dialog.get_by_role("button", name="Accept the loss").click()
    expect(page.locator(".outcome.bad")).to_contain_text("Type orders first")
    assert unserved(client) == lost, "nothing is given up before the name is typed"
    dialog.get_by_label("Type orders to confirm").fill("orders")
    confirm(page, "Accept the loss", f"{len(lost)} segment")
    assert unserved(client) == []
    expect(alarm).to_have_count(0, timeout=LIVE_MS)
