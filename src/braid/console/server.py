"""The console's web server: pages by NiceGUI, behind the guard, on an event loop of its own process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.resources
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any, Final
from urllib.parse import parse_qs

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, RedirectResponse

from braid.console.console import Console, ConsoleConfig
from braid.console.guard import ConsoleGuard
from braid.console.sessions import COOKIE, cookie_header
from braid.model.errors import InvalidConfig

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
    from braid.console.pages.login import login_page

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


def _add_pages(console: Console) -> None:
    from nicegui import ui

    from braid.console.pages import cluster, messages, pipeline, subscriptions, topic, topics
    from braid.console.pages.visit import Visit

    head = f'<link rel="stylesheet" href="{STATIC}/console.css"><script src="{STATIC}/console.js" defer></script>'

    async def opened(request: Request, show: Callable[[Visit], None]) -> Response | None:
        token = console.sessions.token(request.cookies.get(COOKIE))
        if token is None and await console.requires_login():
            return RedirectResponse("/login", 303)
        ui.add_head_html(head)
        visit = Visit(console, token or "")
        await visit.watch.first_look()
        show(visit)
        return None

    @ui.page("/", response_timeout=PAGE_S)
    async def cluster_page(request: Request) -> Any:
        return await opened(request, cluster.show)

    @ui.page("/topics", response_timeout=PAGE_S)
    async def topics_page(request: Request) -> Any:
        return await opened(request, topics.show)

    @ui.page("/topics/{tenant}/{namespace}/{name}", response_timeout=PAGE_S)
    async def topic_page(request: Request, tenant: str, namespace: str, name: str) -> Any:
        return await opened(request, lambda visit: topic.show(visit, f"{tenant}/{namespace}/{name}"))

    @ui.page("/messages", response_timeout=PAGE_S)
    async def messages_page(request: Request) -> Any:
        return await opened(request, lambda visit: messages.show(visit, ""))

    @ui.page("/messages/{tenant}/{namespace}/{name}", response_timeout=PAGE_S)
    async def messages_of_topic(request: Request, tenant: str, namespace: str, name: str) -> Any:
        return await opened(request, lambda visit: messages.show(visit, f"{tenant}/{namespace}/{name}"))

    @ui.page("/subscriptions", response_timeout=PAGE_S)
    async def subscriptions_page(request: Request) -> Any:
        return await opened(request, lambda visit: subscriptions.show(visit, ""))

    @ui.page("/subscriptions/{tenant}/{namespace}/{name}", response_timeout=PAGE_S)
    async def subscriptions_of_topic(request: Request, tenant: str, namespace: str, name: str) -> Any:
        return await opened(request, lambda visit: subscriptions.show(visit, f"{tenant}/{namespace}/{name}"))

    @ui.page("/pipeline", response_timeout=PAGE_S)
    async def pipeline_page(request: Request) -> Any:
        return await opened(request, pipeline.show)


def listen(config: ConsoleConfig) -> socket.socket:
    """Bind the console's port. Raises `InvalidConfig` if that cannot be."""
    try:
        return socket.create_server((config.host, config.port), family=_family(config.host))
    except OSError as error:
        raise InvalidConfig(f"the console cannot listen on {config.host}:{config.port}: {error.strerror}") from error


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
