"""Actions on subscriptions and queues by their page. A client sees what they did."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from braid.model.errors import SubscriptionNotFound
from braid.sync import Client
from tests.kits.console_stage import LIVE_MS, Stage, card, confirm

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage, Shot

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]

TASKS = "/subscriptions/public/default/tasks"


def test_a_subscription_is_created_skipped_and_deleted(stage: Stage, client: Client, new_page: NewPage) -> None:
    client.admin.create_topic("tasks")
    with client.producer("tasks") as producer:
        producer.send_many([(f"job-{number}", b"{}") for number in range(20)])
    page = new_page()
    page.goto(stage.url + TASKS)
    expect(page.locator(".empty")).to_contain_text("braid consume tasks", timeout=LIVE_MS)
    page.get_by_role("button", name="Create").click()
    dialog = page.locator(".dialog")
    # What REST would read as another address is refused before it goes out.
    for wrong in ("", "a/b?x=1", ".."):
        dialog.get_by_label("Name").fill(wrong)
        dialog.get_by_role("button", name="Create").click()
        expect(page.locator(".outcome.bad")).to_contain_text("is no subscription name")
    assert client.admin.subscriptions("tasks") == []
    dialog.get_by_label("Name").fill("nightly")
    dialog.get_by_label("Start").click()
    page.get_by_role("option", name="earliest").click()
    confirm(page, "Create", "nightly is there")
    found = client.admin.subscription("tasks", "nightly")
    assert (found["kind"], found["backlog"]) == ("stream", 20)

    nightly = card(page, "nightly")
    expect(nightly.locator(".figure", has_text="Backlog")).to_contain_text("20", timeout=LIVE_MS)
    nightly.get_by_role("button", name="Skip backlog").click()
    expect(dialog).to_contain_text("leaves out 20 records")
    confirm(page, "Skip", "nightly is at the end")
    assert client.admin.subscription("tasks", "nightly")["backlog"] == 0

    nightly.get_by_role("button", name="Delete").click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page.locator(".outcome.bad")).to_contain_text("Type nightly first")
    dialog.get_by_label("Type nightly to confirm").fill("nightly")
    confirm(page, "Delete", "nightly is deleted")
    with pytest.raises(SubscriptionNotFound):
        client.admin.subscription("tasks", "nightly")
    expect(nightly).to_have_count(0, timeout=LIVE_MS)


def test_a_queue_is_created_with_its_policies(stage: Stage, client: Client, new_page: NewPage) -> None:
    client.admin.create_topic("mails")
    client.admin.create_topic("mails-dead")
    page = new_page()
    page.goto(stage.url + "/topics")
    expect(page.get_by_role("link", name="mails-dead")).to_be_visible(timeout=LIVE_MS)  # The console knows it now.
    page.goto(stage.url + "/subscriptions/public/default/mails")
    page.get_by_role("button", name="Create").click()
    dialog = page.locator(".dialog")
    dialog.get_by_label("Name").fill("mailer")
    expect(dialog.get_by_label("Max deliveries")).not_to_be_visible()
    dialog.get_by_label("Kind").click()
    page.get_by_role("option", name="queue").click()
    dialog.get_by_label("Max deliveries").fill("3")
    dialog.get_by_role("button", name="Create").click()
    expect(page.locator(".outcome.bad")).to_contain_text("name a dead-letter topic")
    dialog.get_by_label("Dead-letter topic").click()
    page.get_by_role("option", name="mails-dead").click()
    confirm(page, "Create", "mailer is there")
    found = client.admin.subscription("mails", "mailer")
    policies = {"ackTimeoutMs": 30_000, "maxDeliveries": 3, "deadLetterTopic": "public/default/mails-dead"}
    assert (found["kind"], found["queue"]["policies"]) == ("queue", policies)

    page.get_by_role("button", name="Create").click()
    dialog.get_by_label("Name").fill("slow")
    dialog.get_by_label("Kind").click()
    page.get_by_role("option", name="queue").click()
    dialog.get_by_label("Ack timeout, seconds").fill("90.5")
    confirm(page, "Create", "slow is there")
    policies = {"ackTimeoutMs": 90_500, "maxDeliveries": 0, "deadLetterTopic": ""}
    assert client.admin.subscription("mails", "slow")["queue"]["policies"] == policies


def test_waiting_messages_are_peeked_and_dead_letters_redriven(
    stage: Stage, client: Client, new_page: NewPage, shot: Shot
) -> None:
    client.admin.create_topic("failed-tasks")
    client.admin.create_subscription(
        "tasks", "workers", kind="queue", start="latest", max_deliveries=1, dead_letter_topic="failed-tasks"
    )
    with client.producer("tasks") as producer:
        for number in range(3):
            producer.send(b'{"resize": "photo-%d.jpg"}' % number, key=f"photo-{number}")
    with client.queue_consumer("tasks", "workers", name="worker-1") as worker:
        first = worker.receive(timeout=20)
        assert first is not None
        page = new_page()
        page.goto(stage.url + TASKS)
        workers = card(page, "workers")
        workers.get_by_role("button", name="Peek").click()
        rows = workers.locator("tr[data-waiting]")
        expect(rows).to_have_count(3, timeout=LIVE_MS)
        expect(rows.first).to_contain_text("photo-0.jpg")
        page.mouse.move(640, 760)
        shot(page, "queue")
        assert client.admin.subscription("tasks", "workers")["queue"]["leased"] >= 1, "a look takes nothing away"
        worker.nack(first)  # Its only delivery: it becomes a dead letter.
        for _ in range(2):
            message = worker.receive(timeout=20)
            assert message is not None
            worker.ack(message)
    expect(workers.locator(".figure", has_text="Dead letters").locator(".value")).to_have_text("1", timeout=LIVE_MS)
    expect(workers).to_contain_text(
        "after 1 delivery to public/default/failed-tasks; 1 since its brokers opened it", timeout=LIVE_MS
    )
    workers.get_by_role("button", name="Peek again").click()
    expect(workers).to_contain_text("No message waits", timeout=LIVE_MS)
    workers.get_by_role("button", name="Hide").click()
    expect(workers).not_to_contain_text("No message waits")
    workers.get_by_role("button", name="Redrive").click()
    expect(page.locator(".dialog")).to_contain_text("The dead letters of workers in public/default/failed-tasks")
    confirm(page, "Redrive", "1 dead letter was published again")
    (again,) = client.admin.peek("tasks", "workers")
    assert (again.value, again.key) == (first.value, first.key)
    expect(workers.locator(".figure", has_text="Ready").locator(".value")).to_have_text("1", timeout=LIVE_MS)
