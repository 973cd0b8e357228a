"""Logs: their shape, and that no secret gets into them."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from braid.admin import logs
from braid.admin.logs import REDACTED, configure_logging, redact, rfc3339

JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhbm4ifQ.c2lnbmF0dXJl-_x"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level, logging.raiseExceptions
    yield
    logging.captureWarnings(False)
    root.handlers[:], logging.raiseExceptions = before[0], before[2]
    root.setLevel(before[1])


def logged(style: str, message: str, *args: Any, stream: io.StringIO | None = None, **rest: Any) -> str:
    target = stream if stream is not None else io.StringIO()
    configure_logging("info", style, target)
    logging.getLogger("braid.test").warning(message, *args, **rest)
    return target.getvalue()


def test_a_json_line_has_time_level_logger_message_and_the_extra_fields() -> None:
    text = logged("json", "moved %d records", 3, extra={"topic": "orders", "lag": 7, "segments": (1, 2)})
    assert text.count("\n") == 1
    line = json.loads(text)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "braid.test",
        "message": "moved 3 records",
        "topic": "orders",
        "lag": 7,
        "segments": [1, 2],
    }


def test_time_is_rfc_3339_in_utc() -> None:
    assert rfc3339(1_700_000_000.9996) == "2023-11-14T22:13:21.000Z"
    assert rfc3339(0.0014) == "1970-01-01T00:00:00.001Z"


def test_a_field_that_is_called_like_a_part_of_the_line_does_not_replace_it() -> None:
    line = json.loads(logged("json", "hello", extra={"level": 9, "time": "noon"}))
    assert (line["level"], line["level_"], line["time_"]) == ("warning", 9, "noon")


def test_an_exception_is_one_line_of_json_and_readable_text() -> None:
    try:
        raise ValueError(f"bad header Authorization: Bearer {JWT}")
    except ValueError:
        line = json.loads(logged("json", "failed", exc_info=True))
        text = logged("text", "failed", exc_info=True)
    assert "Traceback" in line["trace"]
    assert JWT not in line["trace"]
    assert "Traceback" in text
    assert JWT not in text
    assert all(each.startswith("    ") for each in text.splitlines()[1:])


def test_text_is_readable_and_has_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    plain = logged("text", "hello", extra={"topic": "orders", "why": "two words", "n": 1})
    assert plain.endswith(' WARNING braid.test: hello topic=orders why="two words" n=1\n')
    assert "\x1b" not in plain
    assert "\x1b[33mWARNING\x1b[0m" in logged("text", "hello", stream=Terminal())
    assert "\x1b" not in logged("json", "hello", stream=Terminal())
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in logged("text", "hello", stream=Terminal())


def test_a_message_cannot_forge_lines_or_move_the_cursor() -> None:
    text = logged("text", "bad name %s", "x\n2026-01-01 ERROR faked\x1b[2J\rover", extra={"peer": "a\nb"})
    assert "\x1b" not in text
    assert "\r" not in text
    assert [line[:4] == "    " for line in text.splitlines()] == [False, True]
    assert logged("json", "x\ny").count("\n") == 1


def test_what_no_stream_could_write_is_written_somehow() -> None:
    for style in ("text", "json"):
        raw = io.BytesIO()
        stream = io.TextIOWrapper(raw, encoding="utf-8")
        configure_logging("info", style, stream)
        logging.getLogger("braid.test").warning("half \ud800 a character", extra={"number": float("nan")})
        stream.flush()
        assert b"half" in raw.getvalue()
        assert b"nan" in raw.getvalue()


def test_a_broken_call_shows_none_of_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    text = logged("text", "%d records", "secret-value")
    assert "secret-value" not in text + capsys.readouterr().err


SECRETS = [
    f"Authorization: Bearer {JWT}",
    f"authorization: bearer {JWT}",
    "headers {'Authorization': 'Basic aHVudGVyMg=='}",
    "(b'authorization', b'Bearer hunter2')",
    "GET /x?token=hunter2&a=1",
    "GET /x?access_token=hunter2",
    '{"password": "hunter2"}',
    "client_secret = hunter2",
    "braid --token hunter2 topic list",
    "connecting to etcd://root:hunter2@10.0.0.1:2379",
    f"the token was {JWT}",
    f"BRAID_TOKEN={JWT}",
    "api-key: hunter2",
]


@pytest.mark.parametrize("secret", SECRETS)
def test_a_secret_is_recognised_and_taken_out(secret: str) -> None:
    for style in ("text", "json"):
        text = logged(style, "got %s", secret)
        assert REDACTED in text
        for part in ("hunter2", "aHVudGVyMg", JWT, JWT.split(".")[1]):
            assert part not in text


@pytest.mark.parametrize("key", ["token", "Password", "client_secret", "Authorization", "api_key", "cookie", "tokens"])
def test_a_field_whose_name_says_secret_is_not_shown(key: str) -> None:
    for style in ("text", "json"):
        text = logged(style, "hello", extra={key: "hunter2", "nested": {key: ["hunter2"]}})
        assert "hunter2" not in text
        assert REDACTED in text


@pytest.mark.parametrize(
    "harmless",
    [
        "the token was refused: it has expired; get a new one",
        "author: ann",
        "topic://public/default/tokens has 3 segments",
        "segment://a/b/c/0000-ffff-0 opened at 127.0.0.1:6660",
        "10 records, 20 bytes",
    ],
)
def test_what_is_no_secret_stays_as_it_is(harmless: str) -> None:
    assert redact(harmless) == harmless


def test_levels_and_formats_are_checked_and_configuring_again_replaces() -> None:
    with pytest.raises(ValueError, match="no log level"):
        configure_logging("loud")
    with pytest.raises(ValueError, match="no log format"):
        configure_logging("info", "xml")
    first = io.StringIO()
    configure_logging("info", "text", first)
    second = io.StringIO()
    configure_logging("error", "text", second)
    logging.getLogger("braid.test").warning("unheard")
    logging.getLogger("braid.test").error("heard")
    assert first.getvalue() == ""
    assert "unheard" not in second.getvalue()
    assert "heard" in second.getvalue()


def test_logging_does_not_bring_the_web_framework_along() -> None:
    check = (
        "import sys, braid.admin.logs; "
        "sys.exit(any(name in sys.modules for name in ('fastapi', 'uvicorn', 'pydantic', 'prometheus_client')))"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0


HOSTILE = [
    "1",
    "a",
    "a-",
    "eyJ-",
    "eyJa.",
    "eyJ.eyJ",
    "://",
    "://a:",
    "a://b:c",
    "token ",
    "token=,",
    "authorization ",
    "authorization=a ",
    "bearer ",
    "--token ",
    "secret\t",
]


HOSTILE_BYTES = 256 << 10


@pytest.mark.parametrize("piece", HOSTILE)
def test_the_patterns_take_linear_time(piece: str) -> None:
    """A quarter of a megabyte takes milliseconds. A quadratic pattern would take minutes."""
    text = piece * (HOSTILE_BYTES // len(piece))
    started = time.perf_counter()
    for pattern, replacement in (*logs._SECRETS, (logs._LIKELY, "")):
        pattern.sub(replacement, text + "!")
        pattern.sub(replacement, piece + " " * HOSTILE_BYTES + "!")
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_megabyte_in_a_line_is_cut_and_its_length_is_told(style: str) -> None:
    text = logged(style, "refused %s", "1" * (4 << 20), extra={"peer": "2" * (4 << 20)})
    assert len(text) < 20_000
    assert "… (4194312 characters)" in text
    assert "… (4194304 characters)" in text
    try:
        raise ValueError("3" * (4 << 20))
    except ValueError:
        trace = logged(style, "failed", exc_info=True)
    assert len(trace) < 40_000


@pytest.mark.parametrize("before", range(8_000, 8_192, 16))
def test_a_secret_that_the_cut_goes_through_is_not_shown(before: int) -> None:
    for secret in (JWT, "etcd://root:hunter2@host", f"token {JWT * 20}", "password=hunter2"):
        text = redact("." * before + " " + secret + "." * 100_000)
        for part in ("hunter2", JWT.split(".")[1]):
            assert part not in text


def test_secrets_that_make_room_do_not_uncover_one_that_was_searched_in_part() -> None:
    hidden = "x" * 12_000
    text = redact(f"token={hidden} " + "." * 12_500 + " etcd://root:hunter2" + "." * 100_000 + "@host")
    assert "hunter2" not in text
