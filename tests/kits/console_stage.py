"""A cluster with a console in front of it, and what tests do with a page of it."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect

from tests.kits.cluster_process import ClusterProcess
from tests.kits.console_process import ConsoleProcess

LIVE_MS = 20_000
"""How long a change may take to show. It takes a second or two; the machine may be busy."""


class Stage:
    def __init__(self, cluster: ClusterProcess, console: ConsoleProcess) -> None:
        self.cluster = cluster
        self.url = console.url


def confirm(page: Page, button: str, outcome: str) -> None:
    """Press the button of the dialog, wait for the outcome, and close it."""
    page.locator(".dialog").get_by_role("button", name=button, exact=True).click()
    expect(page.locator(".outcome.good")).to_contain_text(outcome, timeout=LIVE_MS)
    page.locator(".dialog").get_by_role("button", name="Close").click()
    expect(page.locator(".dialog")).to_have_count(0)


def card(page: Page, heading: str) -> Locator:
    return page.locator("section.card", has=page.get_by_role("heading", name=heading))
