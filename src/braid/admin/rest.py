"""The REST API, made of the administrative calls: each `HttpRoute` of a call's class (`broker/admin/route.py`) becomes
a route of FastAPI, with the arguments that it names and the result that `run` is annotated with.

Nothing is decided here. An endpoint takes a request apart, makes the call, and answers with its result; the call checks
arguments and permissions, the same as when it comes over the wire. What an endpoint does not know is refused, so that a
misspelt option is not taken for its default.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Final, Union, get_args, get_origin, get_type_hints

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET, UnsetType
from msgspec.structs import FieldInfo

from braid.admin import openapi
from braid.broker.admin.call import CALLS, AdminCall, OnTopic, read
from braid.broker.admin.calls import SUBJECTS
from braid.broker.admin.route import NO_CONTENT, HttpRoute, LocalTopicName, NamespaceName, Rest, TenantName
from braid.model.errors import InvalidArgument, ShuttingDown, cut, quote

if TYPE_CHECKING:
    from braid.broker.broker import Broker

_TOPIC: Final = {"tenant": TenantName, "namespace": NamespaceName, "topic": LocalTopicName}
"""The parts of the argument `topic`, in a path."""
_EVERY_CALL: Final = (400, 401, 403, 413, 500, 503)
"""Any call may be malformed, not permitted or not possible."""
_JSON: Final = re.compile(r"application/([\w.-]+\+)?json\s*(;|$)", re.IGNORECASE)


class _Word(Enum):
    """How a query parameter says yes and no."""

    TRUE = "true"
    FALSE = "false"


class RestEndpoint:
    """One route of one call. `path`, `query` and `body` are what each part of a request may hold: structs that are made
    of the call's fields. A `body` may also be the type of one field."""

    def __init__(self, call: str, kind: type[AdminCall], route: HttpRoute) -> None:
        self.call: Final = call
        self.kind: Final = kind
        self.route: Final = route
        self.operation: Final = route.operation or call
        self.result: Final = get_type_hints(kind.run, include_extras=True)["return"]
        self._fields: Final = {field.encode_name: field for field in msgspec.structs.fields(kind)}
        self.path: Final = self._struct([(name, self._path_type(name)) for name in re.findall(r"{(\w+)}", route.path)])
        self.query: Final = self._struct([self._definition(name, in_words=True) for name in route.query])
        self.body: Final[Any] = (
            _taken(self._fields[route.body].type)
            if isinstance(route.body, str)
            else self._struct([self._definition(name) for name in route.body])
        )
        named = [route.body] if isinstance(route.body, str) else route.body
        self.needs_body: Final = any(self._is_required(name) for name in named)

    def add_to(self, router: APIRouter, broker: Broker) -> None:
        route = self.route

        async def handle(request: Request) -> Response:
            arguments = await self.arguments(request)
            if broker.closing:
                raise ShuttingDown(f"broker {broker.id} is stopping; ask another one")
            await broker.front_door.turns.take()
            result = await broker.front_door.calls.call(
                self.call, arguments, request.state.principal
            )  # set by the guard
            if route.status == NO_CONTENT:
                return Response(status_code=NO_CONTENT)
            return Response(msgspec.json.encode(result), route.status, media_type="application/json")

        responses = openapi.errors(*_EVERY_CALL, *route.errors)
        if route.status != NO_CONTENT:
            responses[route.status] = openapi.success(self.result)
        router.add_api_route(
            route.path,
            handle,
            methods=[route.method],
            name=self.operation,
            description=self.kind.__doc__,
            tags=[route.tag or self.kind.__module__.rpartition(".")[2]],
            status_code=route.status,
            response_class=Response,
            responses=responses,
            openapi_extra=self._request_schema(),
        )

    async def arguments(self, request: Request) -> dict[str, Any]:
        """Return the call's arguments. Raises `InvalidArgument`."""
        path = read(f"the path of {self.operation}", self.path, request.path_params, from_text=True)
        query = read(f"the query of {self.operation}", self.query, dict(request.query_params), from_text=True)
        found = msgspec.structs.asdict(path) | msgspec.structs.asdict(query)
        if self.route.body:
            found |= self._in_body(await _json(request))
        if issubclass(self.kind, OnTopic):
            found["topic"] = "/".join(found.pop(part) for part in _TOPIC)
        names = self.route.names
        arguments: dict[str, Any] = {}
        for name, value in found.items():
            argument = names.get(name, name)
            if [*names.values()].count(argument) > 1:
                arguments.setdefault(argument, []).append(value)
            elif value is not UNSET:
                arguments[argument] = value is _Word.TRUE if isinstance(value, _Word) else value
        return arguments

    def _in_body(self, value: Any) -> dict[str, Any]:
        if value is None and not self.needs_body:
            return {}
        read_value = read(f"the body of {self.operation}", self.body, value)
        if isinstance(self.route.body, str):
            return {self.route.body: read_value}
        return msgspec.structs.asdict(read_value)

    # What it takes.

    def _struct(self, fields: list[Any]) -> type[msgspec.Struct]:
        return msgspec.defstruct(self.operation, fields, kw_only=True, forbid_unknown_fields=True)

    def _field(self, name: str) -> FieldInfo:
        return self._fields[self.route.names.get(name, name)]

    def _is_required(self, name: str) -> bool:
        return self._field(name).required or name in self.route.required

    def _path_type(self, name: str) -> Any:
        if name in _TOPIC and issubclass(self.kind, OnTopic):
            return _TOPIC[name]
        kind = _taken(self._field(name).type)
        return get_args(kind)[0] if get_origin(kind) is list else kind

    def _definition(self, name: str, *, in_words: bool = False) -> tuple[Any, ...]:
        """Of a struct's field: name, type and, unless it must be given, default. `UNSET` leaves it to the call."""
        kind, default = _taken(self._field(name).type, in_words=in_words), self._field(name).default
        if self._is_required(name):
            return name, kind
        if default is None or default is msgspec.NODEFAULT:
            return name, kind | UnsetType, UNSET
        if in_words and isinstance(default, bool):
            return name, kind, _Word.TRUE if default else _Word.FALSE
        return name, kind, default

    def _request_schema(self) -> dict[str, Any]:
        schema: dict[str, Any] = {
            "parameters": openapi.parameters(self.path, "path") + openapi.parameters(self.query, "query")
        }
        if self.route.body:
            kind = self.body if self.needs_body else self.body | None
            content = {"application/json": {"schema": openapi.inlined(kind)}}
            schema["requestBody"] = {"content": content, "required": self.needs_body}
        return schema


def _taken(kind: Any, *, in_words: bool = False) -> Any:
    """The type that REST takes for a field's: the narrower one that is noted there; null is not among it, for what is
    absent is left out; yes and no are words in a query."""
    if get_origin(kind) is Annotated:
        inner, *notes = get_args(kind)
        narrower = [note.kind for note in notes if isinstance(note, Rest)]
        return narrower[0] if narrower else Annotated[(_taken(inner, in_words=in_words), *notes)]
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, (_taken(each, in_words=in_words) for each in get_args(kind) if each is not NoneType))
    return _Word if kind is bool and in_words else kind


async def _json(request: Request) -> Any:
    """The body; None if there is none."""
    body = await request.body()
    content_type = request.headers.get("content-type", "")
    if not body:
        return None
    if not _JSON.match(content_type):
        raise InvalidArgument(f"a body must be sent as 'Content-Type: application/json', not {quote(content_type)}")
    try:
        return msgspec.json.decode(body)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the body is not JSON that can be read: {cut(str(error))}") from None


ENDPOINTS: Final = tuple(
    RestEndpoint(call, kind, route)
    for subject in SUBJECTS
    for call, kind in CALLS.items()
    if kind.__module__ == subject.__name__
    for route in (kind.http if isinstance(kind.http, tuple) else (kind.http,))
)
ANSWERS: Final = tuple(each.result for each in ENDPOINTS if each.route.status != NO_CONTENT)
"""The types of all results that are shown."""
