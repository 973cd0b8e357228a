"""The web application of the admin port: the REST API, what monitoring asks, and pages for people."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import importlib.resources
import re
from typing import TYPE_CHECKING, Any, Final, Literal

import msgspec
from fastapi import FastAPI, Request, Response
from prometheus_client.exposition import choose_encoder
from starlette.exceptions import HTTPException
from starlette.routing import Match, Route

import braid
from braid.admin import openapi
from braid.admin.guard import UNKNOWN, Guard
from braid.admin.metrics import Exposition
from braid.admin.rest import ANSWERS, ENDPOINTS
from braid.admin.status import ErrorBody, body_of, headers_of, status_of
from braid.model.errors import BraidError, InvalidArgument, quote

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

    from braid.broker.broker import Broker

DESCRIPTION: Final = """Topics, subscriptions, segments and brokers of a Braid cluster. Any broker takes any call.

Every error is `{"code", "message", "retriable"}`."""

_DOCS_FILES: Final = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}


class Health(msgspec.Struct, frozen=True):
    status: Literal["alive", "ready"]


def build_app(broker: Broker, *, check_host: bool) -> Guard:
    app = FastAPI(
        title="Braid",
        version=braid.__version__,
        description=DESCRIPTION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry={"tracing": False, "metrics": False, "logs": False, "auto_configure": False},  # see /metrics
        generate_unique_id_function=lambda route: route.name,
    )
    guard = Guard(app, broker.front_door.access, check_host=check_host)
    for endpoint in ENDPOINTS:
        endpoint.add_to(app.router, broker)
    _add_monitoring(app, broker, guard)
    _add_pages(app, broker)
    _add_error_answers(app)
    return guard


def _answer_error(status: int, body: ErrorBody, headers: dict[str, str] | None = None) -> Response:
    return Response(body.json(), status, {**headers_of(status), **(headers or {})}, "application/json")


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(BraidError)
    async def braid_error(_: Request, error: BraidError) -> Response:
        return _answer_error(status_of(error), body_of(error))

    @app.exception_handler(Exception)
    async def broken(_: Request, __: Exception) -> Response:
        return _answer_error(500, UNKNOWN)  # It is raised again behind this, and the guard logs it.

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        path = request.url.path
        match error.status_code:
            case 404:
                return _answer_error(
                    404, ErrorBody("not-found", f"there is nothing at {quote(path)}; see /docs", False)
                )
            case 405:
                allowed = ", ".join(_methods_of(app, request))
                body = ErrorBody("method-not-allowed", f"{quote(path)} takes {allowed}, not {request.method}", False)
                return _answer_error(405, body, {"Allow": allowed})
            case status:
                code = InvalidArgument.code if status < 500 else "error"
                return _answer_error(status, ErrorBody(code, str(error.detail), False))


def _methods_of(app: FastAPI, request: Request) -> list[str]:
    found: set[str] = set()
    for route in app.router.routes:
        if isinstance(route, Route) and route.matches(request.scope)[0] is not Match.NONE:
            found |= route.methods or set()
    return sorted(found)


def _add_monitoring(app: FastAPI, broker: Broker, guard: Guard) -> None:
    exposition = Exposition(broker, guard.answered)

    @app.get("/healthz", tags=["monitoring"], responses={200: openapi.success(Health)})
    async def healthz() -> Response:
        """Whether the process answers at all. Restart it if not."""
        return Response(b'{"status":"alive"}', media_type="application/json")

    @app.get("/readyz", tags=["monitoring"], responses={200: openapi.success(Health), **openapi.errors(503)})
    async def readyz() -> Response:
        """Whether it serves clients. Not while it stops, or has lost its lease."""
        if broker.ready:
            return Response(b'{"status":"ready"}', media_type="application/json")
        return _answer_error(503, ErrorBody("not-ready", f"broker {broker.id} does not serve clients now", True))

    @app.get(
        "/metrics",
        tags=["monitoring"],
        response_class=Response,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}, **openapi.errors(401)},
    )
    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(await exposition.write(encode), headers={"content-type": content_type})


def _add_pages(app: FastAPI, broker: Broker) -> None:
    own = importlib.resources.files("braid.admin") / "static"
    document = openapi.document(app, (Health, *ANSWERS), with_tokens=broker.front_door.access.enabled)
    pages = {"/": own / "index.html", "/docs": own / "docs.html"}
    for path, file in pages.items():
        app.add_api_route(path, _page(file), include_in_schema=False)
    vendored = importlib.resources.files("fastapi_offline") / "static"
    for name, media_type in _DOCS_FILES.items():
        app.add_api_route(f"/docs/{name}", _file(vendored / name, media_type), include_in_schema=False)

    @app.get("/openapi.json", include_in_schema=False)
    async def openapi_json() -> Any:
        return document()

    app.openapi = document  # type: ignore[method-assign]


def _page(file: Traversable) -> Any:
    """A page of ours. Its own script may run and load from here; anything that got in some other way may not."""

    async def page() -> Response:
        html = file.read_text(encoding="utf-8")
        scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
        hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
        allowed = " ".join(["'self'", *(f"'sha256-{each}'" for each in hashes)])
        policy = (
            f"default-src 'self'; script-src {allowed}; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
            "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )
        return Response(html, headers={"content-security-policy": policy}, media_type="text/html")

    return page


def _file(file: Traversable, media_type: str) -> Any:
    async def served() -> Response:
        data = await asyncio.get_running_loop().run_in_executor(None, file.read_bytes)
        return Response(data, headers={"cache-control": "max-age=3600"}, media_type=media_type)

    return served
