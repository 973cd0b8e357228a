"""Logs: one line per event on one stream, as JSON for machines or as text for people.

Anything may be given with `extra={"topic": "orders"}` and becomes a field of its own. Whatever is logged, a secret is
not: values under keys that name one (`token`, `password`, …), bearer tokens, JSON web tokens and passwords in URLs are
replaced in messages, fields and tracebacks, by the formatter, so that no logger can forget it. That is the second
fence; the first is that no code of ours puts one there.

A line costs the loop little, whatever a client sent. Each text in it is cut before it is searched, and every pattern
takes time in proportion to what it searches: no two of its repetitions can share characters, and a search that fails
at one character does not look again at what follows.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
import sys
import time
from typing import Any, Final, TextIO

REDACTED: Final = "[redacted]"
FORMATS: Final = ("text", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

MAX_TEXT_CHARS: Final = 8_192
"""Of a message or a field: what is written of it."""
MAX_TRACE_CHARS: Final = 32_768
MAX_SECRET_CHARS: Final = 16_384
"""So much more is searched than is written: a secret of this length that the cut goes through is still recognised."""

_OWN_FIELDS: Final = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName", "color_message"}
_SECRET_KEY: Final = re.compile(
    r"(token|secret|passw(or)?d|authorization|credential|cookie|api[_-]?key)s?$", re.IGNORECASE
)
_SECRETS: Final = (
    # An Authorization header, however it is written: whatever the scheme, its value goes.
    (
        re.compile(r"(authorization[\"']?\s*[:=,]\s*b?[\"']?)(?:\w+\s+)?[^\s\"',;)}\]]+", re.IGNORECASE),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"\b(bearer\s+)[^\s\"',;]+", re.IGNORECASE), rf"\1{REDACTED}"),
    # In a query, a form, a command line or an object: token=…, "password": "…", --secret ….
    (
        re.compile(
            r"((?:token|secret|password|passwd|api[_-]?key)[\"']?\s*[=:]\s*b?[\"']?)(?!\[redacted)[^\s&\"',;)}\]]+",
            re.IGNORECASE,
        ),
        rf"\1{REDACTED}",
    ),
    (re.compile(r"(--(?:token|secret|password)\s+)\S+", re.IGNORECASE), rf"\1{REDACTED}"),
    (re.compile(r"(://[^/\s:@]*:)[^@\s/]+@"), rf"\1{REDACTED}@"),
    # A JSON web token anywhere: its header is JSON, so it begins with the base64 of `{"`.
    (re.compile(r"(?<![\w-])eyJ[\w-]+\.[\w-]+\.[\w-]*"), REDACTED),
)
_LIKELY: Final = re.compile(r"auth|bearer|token|secret|passw|api[_-]?key|://[^/\s]*@|eyJ", re.IGNORECASE)

_COLOURS: Final = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}


_PLAIN: Final = re.compile(r"[^\s\"\x00-\x1f\x7f-\x9f]+")
_CONTROL: Final = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")


def _escape(found: re.Match[str]) -> str:
    return f"\\x{ord(found[0]):02x}"


def _writable(text: str) -> str:
    """Without half characters, which no stream can encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def redact(text: str, most: int = MAX_TEXT_CHARS) -> str:
    """`text` without the secrets in it, as far as they can be recognised, and cut to about `most` characters."""
    found = text[: most + MAX_SECRET_CHARS]
    cut_through = len(found) < len(text)
    if _LIKELY.search(found) is not None:
        for pattern, replacement in _SECRETS:
            found = pattern.sub(replacement, found)
    if cut_through:
        found = found[:-MAX_SECRET_CHARS]  # A secret of which only the beginning was searched may stand there.
    return found if len(text) <= most else f"{found[:most]}… ({len(text)} characters)"


def redact_field(key: str, value: Any) -> Any:
    """A value that is fit for JSON and holds no secret."""
    if _SECRET_KEY.search(key):
        return REDACTED
    match value:
        case float() if not math.isfinite(value):
            return str(value)  # JSON has no word for it
        case None | bool() | int() | float():
            return value
        case dict():
            return {str(name): redact_field(str(name), each) for name, each in value.items()}
        case list() | tuple() | set() | frozenset():
            return [redact_field("", each) for each in value]
        case _:
            return redact(str(value))


def rfc3339(seconds: float) -> str:
    """UTC, to the millisecond."""
    whole, milliseconds = divmod(round(seconds * 1000), 1000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(whole))}.{milliseconds:03d}Z"


class _Formatter(logging.Formatter):
    def _message(self, record: logging.LogRecord) -> str:
        return redact(record.getMessage())

    def _fields(self, record: logging.LogRecord) -> dict[str, Any]:
        given = record.__dict__.items()
        return {name: redact_field(name, value) for name, value in given if name not in _OWN_FIELDS}

    def _trace(self, record: logging.LogRecord) -> str:
        parts = []
        if record.exc_info:
            parts.append(self.formatException(record.exc_info))
        if record.stack_info:
            parts.append(self.formatStack(record.stack_info))
        return redact("\n".join(parts), MAX_TRACE_CHARS)


class JsonFormatter(_Formatter):
    """One object per line: time, level, logger, message, the extra fields, and `trace` where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": rfc3339(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": self._message(record),
        }
        for name, value in self._fields(record).items():
            line[f"{name}_" if name in line else name] = value
        if trace := self._trace(record):
            line["trace"] = trace
        return _writable(json.dumps(line, ensure_ascii=False, default=str))


class TextFormatter(_Formatter):
    """`time LEVEL logger: message key=value …`; a message of several lines is indented, so that lines can be told
    apart, and control characters are spelt out: what a peer sent must not move somebody's cursor."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname:<7}"
        if self._colours:
            level = f"\x1b[{_COLOURS.get(record.levelname, '0')}m{level}\x1b[0m"
        message = _CONTROL.sub(_escape, self._message(record))
        text = f"{rfc3339(record.created)} {level} {record.name}: {message}"
        for name, value in self._fields(record).items():
            plain = isinstance(value, str) and _PLAIN.fullmatch(value)
            text += f" {name}={value if plain else json.dumps(value, ensure_ascii=False, default=str)}"
        if trace := self._trace(record):
            text += "\n" + trace
        return _writable(text).replace("\n", "\n    ")


def _wants_colours(stream: TextIO) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def configure_logging(
    level: str = "info",
    format: str = "text",  # noqa: A002  # as the option is called
    stream: TextIO | None = None,
) -> None:
    """Send everything from `level` on to `stream` (stderr if None), replacing what was set up before.

    Colours only on a terminal, and not with NO_COLOR. A stream that breaks (a closed pipe) costs log lines and nothing
    else.
    """
    if level not in LEVELS:
        raise ValueError(f"{level!r} is no log level: use one of {', '.join(LEVELS)}")
    if format not in FORMATS:
        raise ValueError(f"{format!r} is no log format: use one of {', '.join(FORMATS)}")
    target = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonFormatter() if format == "json" else TextFormatter(colours=_wants_colours(target)))
    logging.raiseExceptions = False  # otherwise a broken call prints its arguments past the redaction
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.captureWarnings(True)
