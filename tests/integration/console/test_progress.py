"""A dialog shows how its action goes, while it goes."""

from __future__ import annotations

import json
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

import braid.sync
from tests.kits.console_process import ConsoleProcess
from tests.kits.forked_broker import ForkedBroker

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]

CHANGE = {
    "kind": "layout", "topic": "public/default/orders", "segments": [0], "children": [1, 2],
    "step": "CREATING", "from": "", "to": [], "since": 0,
}  # fmt: skip


class SlowAdmin:
    """The admin port of a broker whose splits wait until the test lets them go, and are listed as under way."""

    def __init__(self, admin_url: str) -> None:
        self.go_on = threading.Event()
        slow = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                if self.path.endswith("/changes") and not slow.go_on.is_set():
                    other = {**CHANGE, "topic": "public/default/others", "segments": [7]}
                    self.reply(200, json.dumps([CHANGE, other]).encode())
                else:
                    self.forward()

            def do_POST(self) -> None:
                slow.go_on.wait()
                self.forward()

            def forward(self) -> None:
                request = urllib.request.Request(admin_url + self.path, method=self.command)
                with urllib.request.urlopen(request, timeout=20) as answer:
                    # The console goes on to ask this port, not that of the broker.
                    body = answer.read().replace(admin_url.removeprefix("http://").encode(), slow.address.encode())
                    self.reply(answer.status, body)

            def reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="slow admin port")
        self._thread.start()

    def close(self) -> None:
        self.go_on.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[ForkedBroker]:
    with ForkedBroker(tmp_path / "data") as broker:
        with braid.sync.connect(broker.url) as client:
            client.admin.create_topic("orders")
        yield broker


@pytest.fixture
def admin(broker: ForkedBroker) -> Iterator[SlowAdmin]:
    admin = SlowAdmin(broker.ready["adminUrl"])
    yield admin
    admin.close()


def test_a_dialog_says_how_long_its_action_runs_and_what_it_does(
    broker: ForkedBroker, admin: SlowAdmin, new_page: NewPage
) -> None:
    with ConsoleProcess([f"http://{admin.address}"], "--url", broker.url) as console:
        page = new_page()
        page.goto(console.url + "/topics/public/default/orders")
        page.locator('tr[data-segment="0"]').get_by_role("button", name="Split").click()
        page.locator(".dialog").get_by_role("button", name="Split").click()
        live = page.locator(".outcome.live")
        expect(live).to_contain_text("Under way for 2 s")
        expect(live.locator("li")).to_have_text(["orders: segment 0 → 1, 2 (creating)"])
        admin.go_on.set()
        expect(page.locator(".outcome.good")).to_contain_text("Segment 0 is split")
        expect(live).to_have_count(0)
        console.stop()
