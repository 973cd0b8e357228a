"""The reference pages that are made from the code: every command with its options, every call of REST."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import click
from fastapi import FastAPI

import braid
from braid.admin import openapi
from braid.admin.rest import ANSWERS, ENDPOINTS
from braid.broker.broker import Broker
from braid.cli.main import braid as braid_command

Json = Mapping[str, Any]

_HEAD_OF_COMMANDS: Final = """# Commands

Every command with its options, as `braid COMMAND --help` prints them. This page is made from the code.
[The command line](../cli.md) explains them, with what they print.
"""
_HEAD_OF_REST: Final = """# REST

Every call of the admin port, made from the OpenAPI document that a broker serves at `/openapi.json`; `/docs` there is a
page to try the calls. Any broker takes any call. [Errors](../errors.md) explains the codes,
[security](../operating/security.md) tokens and TLS, and [monitoring](../operating/monitoring.md) `/metrics`, `/healthz`
and `/readyz`.
"""


# Commands.


def commands_page() -> str:
    context = click.Context(braid_command, info_name="braid", max_content_width=100, terminal_width=100)
    return "\n".join([_HEAD_OF_COMMANDS, *_command(context, 2)])


def _command(context: click.Context, depth: int) -> Iterator[str]:
    command = context.command
    name = context.command_path
    yield f"{'#' * min(depth, 4)} {name}\n"
    yield f"```text\n{command.get_help(context).strip()}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            if found is not None and not found.hidden:
                yield from _command(click.Context(found, context, each, max_content_width=100), depth + 1)


# REST.


def rest_document() -> Json:
    """Return the OpenAPI document of the administrative calls, without a broker: only answering needs one."""
    app = FastAPI(title="Braid", version=braid.__version__, generate_unique_id_function=lambda route: route.name)
    for endpoint in ENDPOINTS:
        endpoint.add_to(app.router, cast("Broker", None))
    return openapi.document(app, ANSWERS, with_tokens=True)()


def rest_page() -> str:
    document = rest_document()
    by_tag: dict[str, list[str]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            by_tag.setdefault(operation["tags"][0], []).extend(_operation(method, path, operation))
    lines = [_HEAD_OF_REST]
    for tag, found in by_tag.items():
        lines += [f"## {tag.replace('_', ' ').capitalize()}\n", *found]
    lines += ["## Answers\n", *_schemas(document["components"]["schemas"])]
    return "\n".join(lines)


def _operation(method: str, path: str, operation: Json) -> Iterator[str]:
    yield f"### {operation['operationId']}\n"
    yield f"```http\n{method.upper()} {path}\n```\n"
    yield f"{_one_line(operation.get('description', ''))}\n"
    rows = [
        (f"`{each['name']}`", each["in"], _type(each["schema"]), _meaning(each, each["schema"], each["required"]))
        for each in operation.get("parameters", ())
    ]
    body = operation.get("requestBody")
    if body is not None:
        rows += _body_rows(body["content"]["application/json"]["schema"])
    if rows:
        yield "| argument | in | type | |\n|---|---|---|---|"
        yield "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"
    yield " · ".join(_answer(status, each) for status, each in operation["responses"].items()) + "\n"


def _body_rows(schema: Json) -> list[tuple[str, str, str, str]]:
    for each in schema.get("anyOf", ()):
        if "properties" in each:
            schema = each
    if "properties" not in schema:
        return [("the body", "body", _type(schema), "")]
    required = schema.get("required", ())
    return [
        (f"`{name}`", "body", _type(each), _meaning(each, each, name in required))
        for name, each in schema["properties"].items()
    ]


def _meaning(described: Json, schema: Json, required: bool) -> str:
    parts = [_one_line(described.get("description", "")).rstrip(".")]
    if required:
        parts.append("*required*")
    elif schema.get("default") is not None:
        parts.append(f"default `{schema['default']}`")
    return html.escape("; ".join(part for part in parts if part), quote=False).replace("|", "\\|")


def _answer(status: str, answer: Json) -> str:
    schema = answer.get("content", {}).get("application/json", {}).get("schema", {})
    is_error = int(status) >= 400
    kind = "" if is_error or not schema else f" {_type(schema)}"
    meaning = f" {answer['description']}" if is_error else ""
    return f"**{status}**{kind}{meaning}" if not is_error else f"{status}{meaning}"


def _schemas(schemas: Json) -> Iterator[str]:
    for name, schema in sorted(schemas.items()):
        yield f"### {name}\n"
        if "description" in schema:
            yield f"{_one_line(schema['description'])}\n"
        if "enum" in schema:
            yield "One of " + ", ".join(f"`{each}`" for each in schema["enum"]) + ".\n"
        if "properties" in schema:
            yield "| field | type | |\n|---|---|---|"
            yield "\n".join(
                f"| `{field}` | {_type(each)} | {_meaning(each, each, False)} |"
                for field, each in schema["properties"].items()
            )
            yield ""


def _type(schema: Json) -> str:
    """Return a type in a few words; an answer's type links to its table."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each) for each in schema["anyOf"]))
    if "enum" in schema:
        return " or ".join(f"`{each}`" for each in schema["enum"])
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    if kind == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"object of {_type(schema['additionalProperties'])}"
    limits = [
        f"{sign} {schema[limit]:,}"
        for limit, sign in (("minimum", "≥"), ("maximum", "≤"), ("exclusiveMinimum", "&gt;"))
        if limit in schema
    ]
    return " ".join([str(kind), *limits])


def _one_line(text: str) -> str:
    return " ".join(text.split())
