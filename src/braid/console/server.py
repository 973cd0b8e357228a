"""The console's web server: pages by NiceGUI, behind the guard, on an event loop of its own process."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import importlib.resources
import logging
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Final
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from braid.console.console import Console, ConsoleConfig
from braid.console.guard import ConsoleGuard
from braid.console.sessions import COOKIE, cookie_header
from braid.model.errors import InvalidConfig

if TYPE_CHECKING:
    from nicegui import App

os.environ.setdefault("NICEGUI_STORAGE_PATH", os.devnull)  # The console keeps nothing on disk.

STATIC: Final = "/console-static"
MAX_FORM_BYTES: Final = 32 << 10
SHUTDOWN_S: Final = 2
PAGE_S: Final = 30.0
"""How long a page may take that waits for brokers which do not answer."""

_log: Final = logging.getLogger(__name__)


def build_app(config: ConsoleConfig) -> tuple[ConsoleGuard, Console]:
    """Make the application. NiceGUI has one application in a process, so this is called once."""
    from nicegui import app as pages
    from nicegui import ui

    console = Console(config)

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await console.start()
        yield
        await console.close()

    app = FastAPI(title="Braid console", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    folder = importlib.resources.files("braid.console") / "static"
    pages.add_static_files(STATIC, str(folder), max_cache_age=60)
    _add_login(app, console)
    _add_pages(console)
    _add_not_found(pages)
    ui.run_with(
        app,
        title="Braid",
        favicon=_FAVICON,
        dark=None,
        show_welcome_message=False,
        reconnect_timeout=8.0,
        binding_refresh_interval=0.3,
    )
    return ConsoleGuard(app, config.allowed_hosts), console


_FAVICON: Final = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 30 24" fill="none" stroke-width="3.4" stroke-linecap="round">'
    '<path d="M2 5C10 5 11 19 19 19S25 12 28 12" stroke="#0072b2"/><path d="M2 19C10 19 11 5 19 5S25 12 28 12" '
    'stroke="#e08e00"/><path d="M2 12H28" stroke="#009e73"/></svg>'
)


def _add_login(app: FastAPI, console: Console) -> None:
    from braid.console.plain_pages import login_page

    secure = console.config.secure_cookies

    def form(request: Request, error: str = "", status: int = 200) -> HTMLResponse:
        dark = request.cookies.get("braid-theme") == "dark"
        return HTMLResponse(login_page(f"{STATIC}/console.css", error=error, dark=dark), status)

    @app.get("/login")
    async def login(request: Request) -> Response:
        return form(request)

    @app.post("/login")
    async def log_in(request: Request) -> Response:
        if int(request.headers.get("content-length") or MAX_FORM_BYTES + 1) > MAX_FORM_BYTES:
            return form(request, "That is no token: it is too long.", 413)
        token = parse_qs((await request.body()).decode(errors="replace")).get("token", [""])[0].strip()
        refused = await console.accepts(token)
        if refused is not None or not token:
            return form(request, refused or "Give a token.", 401)
        answer = RedirectResponse("/", 303)
        answer.headers["set-cookie"] = cookie_header(console.sessions.open(token), secure=secure)
        return answer

    @app.post("/logout")
    async def log_out(request: Request) -> Response:
        console.sessions.close(request.cookies.get(COOKIE))
        answer = RedirectResponse("/login", 303)
        answer.headers["set-cookie"] = cookie_header("", secure=secure)
        return answer


TOPIC: Final = "/{tenant}/{namespace}/{name}"


def _add_pages(console: Console) -> None:
    from nicegui import ui

    from braid.console.pages import cluster, messages, pipeline, subscriptions, topic, topics
    from braid.console.pages.visit import Visit

    shown: dict[str, Callable[[Visit, str], None]] = {
        "/": lambda visit, _: cluster.show(visit),
        "/topics": lambda visit, _: topics.show(visit),
        "/topics" + TOPIC: topic.show,
        "/messages": messages.show,
        "/messages" + TOPIC: messages.show,
        "/subscriptions": subscriptions.show,
        "/subscriptions" + TOPIC: subscriptions.show,
        "/pipeline": lambda visit, _: pipeline.show(visit),
    }
    """By path. Each gets the path of the topic that the address names; an empty one if it names none."""
    head = f'<link rel="stylesheet" href="{STATIC}/console.css"><script src="{STATIC}/console.js" defer></script>'

    def page_of(show: Callable[[Visit, str], None]) -> Callable[[Request], Awaitable[Response | None]]:
        async def page(request: Request) -> Response | None:
            session = request.cookies.get(COOKIE)
            token = console.sessions.token(session)
            if token is None and await console.requires_login():
                return RedirectResponse("/login", 303)
            ui.add_head_html(head)
            visit = Visit(console, token or "", session if token is not None else None)
            await visit.watch.first_look()
            show(visit, "/".join(request.path_params.values()))
            return None

        return page

    for path, show in shown.items():
        ui.page(path, response_timeout=PAGE_S)(page_of(show))


def _add_not_found(pages: App) -> None:
    """Answer addresses that are no page, in words of the console and not of NiceGUI."""
    from braid.console.plain_pages import not_found_page

    @pages.exception_handler(404)
    async def not_found(request: Request, _: Exception) -> Response:
        dark = request.cookies.get("braid-theme") == "dark"
        return HTMLResponse(not_found_page(f"{STATIC}/console.css", request.url.path, dark=dark), 404)


def listen(config: ConsoleConfig) -> socket.socket:
    """Bind the console's port. Raises `InvalidConfig` if that cannot be."""
    try:
        return socket.create_server((config.host, config.port), family=_family(config.host))
    except OSError as error:
        taken = error.errno == errno.EADDRINUSE
        reason = "another program listens there; stop it, or choose another port" if taken else error.strerror
        raise InvalidConfig(f"the console cannot listen on {config.host}:{config.port}: {reason}") from error


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def run(config: ConsoleConfig, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGINT or SIGTERM. `on_ready` gets the console's address."""
    bound = listen(config)
    app, _ = build_app(config)
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SHUTDOWN_S,
        )
    )
    port = bound.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host

    # The socket listens already: whoever connects now is answered when the pages are there.
    on_ready(f"http://{host}:{port}")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[bound]))
