"""Who may use the console: tokens, read-only mode, and pages of other sites."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import jwt
import pytest
from playwright.sync_api import expect

import braid.sync
from braid.console.console import ConsoleConfig
from braid.console.server import listen
from braid.console.sessions import COOKIE
from braid.model.errors import InvalidConfig
from tests.kits.console_process import ConsoleProcess
from tests.kits.forked_broker import ForkedBroker

if TYPE_CHECKING:
    from tests.integration.console.conftest import NewPage, Shot

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("console"), pytest.mark.timeout(120)]

SECRET = "not very secret, but 32 bytes long"
CONFIG = """
[auth]
secret_file = "{folder}/secret"
superusers = ["ops"]

[[auth.grants]]
role = "shop"
on = "public/default/orders"
allow = ["produce", "consume"]
"""
SOCKET = "/_nicegui_ws/socket.io/?EIO=4&transport=polling"


def token(role: str) -> str:
    return jwt.encode({"sub": role, "exp": int(time.time() + 3_600)}, SECRET, "HS256")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedBroker]:
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "secret").write_text(SECRET)
    (folder / "broker.toml").write_text(CONFIG.format(folder=folder))
    with ForkedBroker(folder / "data", "--config", str(folder / "broker.toml")) as broker:
        with braid.sync.connect(broker.url, token=token("ops")) as client:
            client.admin.create_topic("orders")
            client.admin.create_topic("salaries")
        yield broker


@pytest.fixture(scope="module")
def console(guarded: ForkedBroker) -> Iterator[ConsoleProcess]:
    with ConsoleProcess([guarded.ready["adminUrl"]], "--url", guarded.url) as console:
        yield console


@pytest.fixture(scope="module")
def free(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleProcess]:
    """A console without tokens, which only looks."""
    with (
        ForkedBroker(tmp_path_factory.mktemp("free") / "data") as broker,
        ConsoleProcess([broker.ready["adminUrl"]], "--url", broker.url, "--read-only") as console,
    ):
        with braid.sync.connect(broker.url) as client:
            client.admin.create_topic("orders", segments=2)
        yield console


def test_without_a_token_there_is_nothing_but_the_login(console: ConsoleProcess, new_page: NewPage, shot: Shot) -> None:
    for path in ("/", "/topics", "/topics/public/default/salaries", "/messages", "/subscriptions", "/pipeline"):
        answer = httpx.get(console.url + path)
        assert (answer.status_code, answer.headers["location"]) == (303, "/login")
        assert "salaries" not in answer.text
    page = new_page(quiet=True)  # A refused token is a status of 401, which Chromium tells its console.
    page.goto(console.url)
    page.wait_for_url("**/login")
    shot(page, "login")
    page.get_by_label("Token").fill("nonsense")
    page.get_by_role("button", name="Log in").click()
    expect(page.get_by_role("alert")).to_be_visible()
    assert page.context.cookies() == []


@pytest.mark.parametrize("given", ["é", "a\nb", "\0", "x" * 20_000])
def test_what_cannot_be_a_token_is_refused_in_a_sentence(console: ConsoleProcess, given: str) -> None:
    answer = httpx.post(console.url + "/login", data={"token": given})
    assert (answer.status_code, answer.headers.get("set-cookie")) == (401, None)
    assert 'role="alert"' in answer.text


def test_a_form_that_is_too_long_is_not_read(console: ConsoleProcess) -> None:
    assert httpx.post(console.url + "/login", data={"token": "x" * 40_000}).status_code == 413
    parts = iter([b"token=", b"x" * 40_000])  # Without a length, in chunks.
    assert httpx.post(console.url + "/login", content=parts).status_code == 413


def test_a_logout_ends_the_session_for_everyone_who_has_its_cookie(console: ConsoleProcess) -> None:
    def status(cookie: str) -> int:
        return httpx.get(console.url + "/topics", headers={"cookie": cookie}, timeout=20).status_code

    login = httpx.post(console.url + "/login", data={"token": token("ops")}, headers={"cookie": f"{COOKIE}=chosen"})
    cookie = login.headers["set-cookie"].partition(";")[0]
    assert cookie != f"{COOKIE}=chosen", "nobody chooses the id of another's session"
    assert (status(f"{COOKIE}=chosen"), status(cookie)) == (303, 200)
    httpx.post(console.url + "/logout", headers={"cookie": cookie})
    assert status(cookie) == 303


def test_a_logout_ends_every_page_of_the_session(console: ConsoleProcess, new_page: NewPage) -> None:
    page = new_page(quiet=True)  # One of its pages may not go where it is sent.
    page.goto(console.url)
    page.get_by_label("Token").fill(token("ops"))
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("tr[data-broker]")).to_have_count(1)
    obedient, stubborn = page.context.new_page(), page.context.new_page()
    obedient.goto(console.url + "/topics")
    stubborn.goto(console.url + "/topics/public/default/orders")
    stubborn.route("**/login", lambda route: route.abort("aborted"))
    stubborn.locator('tr[data-segment="0"]').get_by_role("button", name="Split").click()
    expect(stubborn.locator(".dialog")).to_be_visible()
    page.get_by_role("button", name="Log out").click()
    obedient.wait_for_url("**/login")
    # A page that stays shows nothing, and neither its open dialog nor an event does anything.
    expect(stubborn.locator("tr[data-segment]")).to_have_count(0)
    if stubborn.locator(".dialog").count():
        stubborn.locator(".dialog").get_by_role("button", name="Split").click()
        expect(stubborn.locator(".outcome.bad")).to_contain_text("log in again")
    stubborn.evaluate("window.emitEvent && emitEvent('act', {act: 'delete'})")
    with pytest.raises(AssertionError):
        expect(stubborn.locator(".dialog", has_text="Nothing brings it back")).to_be_visible(timeout=1_500)


def test_an_address_that_is_no_page_is_told_in_the_console_s_own_words(console: ConsoleProcess) -> None:
    answer = httpx.get(console.url + "/no/such/<script>")
    assert answer.status_code == 404
    assert "There is no such page" in answer.text
    assert "<script>" not in answer.text
    assert 'href="/topics"' in answer.text


def test_a_token_opens_what_it_may_and_no_more(console: ConsoleProcess, new_page: NewPage) -> None:
    page = new_page()
    page.goto(console.url)
    page.get_by_label("Token").fill(token("ops"))
    page.get_by_role("button", name="Log in").click()
    expect(page.locator("tr[data-broker]")).to_have_count(1)
    page.goto(console.url + "/topics")
    expect(page.locator("tr[data-topic]")).to_have_count(2)
    (cookie,) = [each for each in page.context.cookies() if each["name"] == COOKIE]
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Strict")
    assert token("ops") not in page.content()
    page.get_by_role("button", name="Log out").click()
    page.wait_for_url("**/login")

    limited = new_page()
    limited.goto(console.url)
    limited.get_by_label("Token").fill(token("shop"))
    limited.get_by_role("button", name="Log in").click()
    expect(limited.locator(".banner.note")).to_contain_text("may not see the cluster")
    limited.goto(console.url + "/topics")
    expect(limited.locator("tr[data-topic]")).to_have_count(1)
    assert "salaries" not in limited.content()
    # What REST refuses, the console refuses: in the broker's words.
    limited.goto(console.url + "/topics/public/default/orders")
    limited.locator('tr[data-segment="0"]').get_by_role("button", name="Split").click()
    limited.locator(".dialog").get_by_role("button", name="Split").click()
    expect(limited.locator(".outcome.bad")).to_contain_text("admin")


def test_a_read_only_console_offers_no_change(free: ConsoleProcess, new_page: NewPage) -> None:
    page = new_page()
    page.goto(free.url + "/topics/public/default/orders")
    expect(page.locator("tr[data-segment]")).to_have_count(2)
    for name in ("Split", "Move", "Delete", "Policies"):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    # Also when a page says otherwise: the server decides.
    page.evaluate("emitEvent('act', {act: 'split', segment: '0'})")
    page.locator(".dialog").get_by_role("button", name="Split").click()
    expect(page.locator(".outcome.bad")).to_contain_text("--read-only")
    # Records go by the client, not by REST.
    page.goto(free.url + "/messages/public/default/orders")
    page.evaluate("emitEvent('act', {act: 'publish'})")
    page.locator(".dialog").get_by_role("button", name="Publish").click()
    expect(page.locator(".outcome.bad")).to_contain_text("--read-only")


def test_pages_of_other_sites_cannot_use_it(free: ConsoleProcess, new_page: NewPage) -> None:
    """A page of another origin, in the same browser, tries a websocket, a form and a read."""
    page = new_page(quiet=True)
    page.route("http://evil.example/**", lambda route: route.fulfill(body="<h1>evil</h1>", content_type="text/html"))
    page.goto("http://evil.example/")
    opened = page.evaluate(
        """url => new Promise(done => {
            const path = '/_nicegui_ws/socket.io/?EIO=4&transport=websocket';
            const socket = new WebSocket(url.replace('http', 'ws') + path);
            socket.onopen = () => done('opened'); socket.onerror = () => done('refused');
        })""",
        free.url,
    )
    assert opened == "refused"
    read = "url => fetch(url).then(() => 'read', () => 'refused')"
    assert page.evaluate(read, free.url + SOCKET) == "refused"
    assert page.evaluate(read, free.url + "/topics") == "refused"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "evil.example"},
        {"origin": "http://evil.example"},
        {"sec-fetch-site": "cross-site", "sec-fetch-mode": "cors"},
    ],
)
@pytest.mark.parametrize("path", ["/", "/topics", SOCKET, "/console-static/console.css"])
def test_another_name_or_origin_is_refused_everywhere(free: ConsoleProcess, path: str, headers: dict[str, str]) -> None:
    assert httpx.get(free.url + path).status_code == 200
    assert httpx.get(free.url + path, headers=headers).status_code == 403


def test_a_port_that_is_taken_is_said_in_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        expected = f"cannot listen on 127.0.0.1:{port}: another program listens there; stop it, or choose another port"
        with pytest.raises(InvalidConfig, match=f"{expected}$"):
            listen(ConsoleConfig(admin_urls=("http://127.0.0.1:9",), host="127.0.0.1", port=port))


def test_a_console_listens_on_this_machine_and_stops_in_order(tmp_path: Path) -> None:
    with ConsoleProcess(["http://127.0.0.1:9"]) as console:
        assert console.url.startswith("http://127.0.0.1:")
        page = httpx.get(console.url, timeout=20)
        assert page.status_code == 200
        assert "No broker answers" in page.text
        assert console.stop() == b""
