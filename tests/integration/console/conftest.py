"""A real Chromium, and pages that fail their test when the browser complains about anything."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

PICTURES = Path(__file__).parents[3] / "docs" / "images" / "console"
KEEP = bool(os.environ.get("BRAID_SCREENSHOTS"))
"""Whether the pictures of the documentation are made anew."""

NewPage = Callable[..., Page]
Shot = Callable[[Page, str], None]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "these tests drive Debian's package chromium; `make test` installs it"
    with sync_playwright() as playwright:
        # A container has no user namespaces for Chromium's own sandbox; the pages are ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def new_page(browser: Browser) -> Iterator[NewPage]:
    complaints: list[str] = []
    contexts = []

    def note(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    def open_page(*, width: int = 1280, height: int = 800, dark: bool = False, quiet: bool = False) -> Page:
        """`quiet`: a test that makes the browser complain on purpose."""
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        context.set_default_timeout(15_000)
        page = context.new_page()
        if not quiet:
            page.on("console", note)
            page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [], "the browser complained"


@pytest.fixture
def shot(tmp_path: Path) -> Shot:
    """Take a picture; with BRAID_SCREENSHOTS it goes to the documentation."""

    def take(page: Page, name: str) -> None:
        folder = PICTURES if KEEP else tmp_path
        page.wait_for_timeout(400)  # Fonts and curves; nothing is asserted about the picture.
        page.screenshot(path=folder / f"{name}.png")

    return take
