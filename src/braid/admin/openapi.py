"""The OpenAPI document: FastAPI's, with schemas that msgspec makes of the structs that calls take and answer.

What a request holds is described where it stands; answers are the document's components. Every field of an answer is
always there, so all are `required`, also those that have a default in the broker; more may be added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from braid.admin.guard import PUBLIC
from braid.admin.status import ErrorBody
from braid.model.stored_record import UNKNOWN

Json = dict[str, Any]

_REFERENCE: Final = "#/components/schemas/{name}"
_MEANINGS: Final = {
    400: "Malformed",
    401: "No valid token",
    403: "Not permitted",
    404: "Absent",
    409: "Exists, or is in use",
    412: "Not in a state for this",
    413: "The body is above 1 MiB",
    500: "A failure of the broker; see its log",
    501: "Not in this version",
    503: "Not now; try again",
}


def success(kind: Any) -> Json:
    """An answer of this type, in JSON."""
    (schema,), _ = msgspec.json.schema_components((kind,), ref_template=_REFERENCE)
    return {"content": {"application/json": {"schema": schema}}}


def errors(*statuses: int) -> dict[int | str, Json]:
    return {status: {"description": _MEANINGS[status], **success(ErrorBody)} for status in sorted(statuses)}


def parameters(kind: type[msgspec.Struct], where: str) -> list[Json]:
    """One for each field."""
    schema = inlined(kind)
    return [
        {
            "name": name,
            "in": where,
            "description": each.pop("description", ""),
            "required": name in schema["required"],
            "schema": each,
        }
        for name, each in schema["properties"].items()
    ]


def inlined(kind: Any) -> Json:
    """The schema of a type, with all that it refers to written out."""
    (schema,), components = msgspec.json.schema_components((kind,), ref_template="{name}")

    def write_out(each: Any) -> Any:
        if isinstance(each, list):
            return [write_out(item) for item in each]
        if not isinstance(each, dict):
            return each
        meant = components[each["$ref"]] if "$ref" in each else {}
        return {key: write_out(value) for key, value in {**meant, **each}.items() if key != "$ref"}

    found: Json = write_out(schema)
    return found


def document(app: FastAPI, answers: Iterable[Any], *, with_tokens: bool) -> Callable[[], Json]:
    """FastAPI's document with the schemas of these answers, made when it is first asked for. Tokens are in it only if
    they are wanted."""
    return cache(partial(_made, app, answers, with_tokens=with_tokens))


def _made(app: FastAPI, answers: Iterable[Any], *, with_tokens: bool) -> Json:
    made = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    _, schemas = msgspec.json.schema_components((ErrorBody, *answers), ref_template=_REFERENCE)
    for schema in schemas.values():
        if "properties" in schema:
            schema["properties"].pop(UNKNOWN, None)  # More fields may be there anyway.
            given = schema.get("required", ())  # A field that may be unset has no default, and is left out.
            schema["required"] = [
                name for name, each in schema["properties"].items() if name in given or "default" in each
            ]
            schema.pop("additionalProperties", None)
            for each in schema["properties"].values():
                each.pop("default", None)
    made["components"] = {"schemas": schemas}
    if with_tokens:
        made["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer", "bearerFormat": "JWT"}}
    for path, operations in made["paths"].items():
        for operation in operations.values():
            if not with_tokens:
                operation["responses"].pop("401", None)
            elif path not in PUBLIC:
                operation["security"] = [{"token": []}]
    complete: Json = _with_types(made)
    return complete


def _with_types(part: Any) -> Any:
    """msgspec leaves out that the words of an enum are strings."""
    if isinstance(part, list):
        return [_with_types(each) for each in part]
    if not isinstance(part, dict):
        return part
    words = {"type": "string"} if isinstance(part.get("enum"), list) else {}
    return words | {name: _with_types(each) for name, each in part.items()}
