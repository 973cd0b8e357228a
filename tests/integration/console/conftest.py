"""A real Chromium, and pages that fail their test when the browser complains about anything.

The files of this folder share a cluster and a browser, and run in the order of their names: `test_cluster_actions` has
the cluster to itself, `test_pages` adds topics with traffic, and `test_recovery` ends with a broker that is lost.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

import braid.sync
from braid.model.errors import TopicNotFound
from braid.sync import Client
from tests.kits.cluster_process import ClusterProcess
from tests.kits.console_process import ConsoleProcess, Traffic
from tests.kits.console_stage import Stage

PICTURES = Path(__file__).parents[3] / "docs" / "images" / "console"
KEEP = bool(os.environ.get("BRAID_SCREENSHOTS"))
"""Whether the pictures of the documentation are made anew."""

NewPage = Callable[..., Page]
Shot = Callable[[Page, str], None]


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium")
    assert path is not None, "these tests drive Debian's package chromium; `make test` installs it"
    with sync_playwright() as playwright:
        # A container has no user namespaces for Chromium's own sandbox; the pages are ours.
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def bare_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """Three brokers and a console. One broker is drained, so all segments of the topic `parcels` are on the others: no
    move has made it so, and balancing need not rest."""
    with ClusterProcess(tmp_path_factory.mktemp("console"), shared=True) as cluster:
        cluster.run("broker", "drain", "broker-2")
        cluster.run("topic", "create", "parcels", "--segments", "8")
        admin_urls = [broker.ready["adminUrl"] for broker in cluster.brokers.values()]
        with ConsoleProcess(admin_urls, "--url", cluster.url) as console:
            yield Stage(cluster, console)


@pytest.fixture(scope="package")
def stage(bare_stage: Stage) -> Iterator[Stage]:
    """The same cluster with all its brokers, and with traffic."""
    cluster = bare_stage.cluster
    cluster.run("broker", "activate", "broker-2")
    with braid.sync.connect(cluster.url) as client, contextlib.suppress(TopicNotFound):
        client.admin.delete_topic("parcels")
    cluster.run("topic", "create", "orders", "--segments", "2")
    cluster.run("topic", "create", "clicks", "--segments", "3", "--replicas", "3")
    cluster.run("topic", "create", "letters")
    with Traffic(cluster.url, "orders"), Traffic(cluster.url, "clicks", 150):
        yield bare_stage


@pytest.fixture
def client(bare_stage: Stage) -> Iterator[Client]:
    """What the pages did is checked by it."""
    with braid.sync.connect(bare_stage.cluster.url) as client:
        yield client


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
            page.on("request", lambda request: None if _is_here(request.url) else complaints.append(request.url))
            page.on("console", note)
            page.on("pageerror", lambda error: complaints.append(str(error)))
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == [], "the browser complained"


def _is_here(url: str) -> bool:
    """Tell whether a page loads this from the console: pages work without the internet."""
    return url.startswith(("http://127.0.0.1:", "ws://127.0.0.1:", "data:", "blob:"))


@pytest.fixture
def shot(tmp_path: Path) -> Shot:
    """Take a picture; with BRAID_SCREENSHOTS it goes to the documentation."""

    def take(page: Page, name: str) -> None:
        folder = PICTURES if KEEP else tmp_path
        page.wait_for_timeout(400)  # Fonts and curves; nothing is asserted about the picture.
        page.screenshot(path=folder / f"{name}.png")

    return take
