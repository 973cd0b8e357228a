"""docs/protocol says what the code does: kinds, prefix, fields in their order, examples, limits, error codes."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import msgspec
import pytest

from braid.broker import config
from braid.broker.connections import questions
from braid.broker.segments import delivery
from braid.model.batch import header as batch
from braid.model.errors import BraidError
from braid.model.topic import TopicPolicies
from braid.storage.log import producers
from braid.wire import frame, operations
from braid.wire.frame import Flags
from braid.wire.operations import Kind

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "protocol"
FRAMES = ROOT / "tests" / "vectors" / "frames"
BODIES = {body.__name__: body for body in operations._Body.__subclasses__()}
CODES = {"u8": "B", "u16": "H", "u32": "I"}


def page(name: str) -> str:
    return (PAGES / name).read_text(encoding="utf-8")


# ── frames ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_prefix_table_is_the_struct() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| (\w+) \|", page("frames.md"), flags=re.MULTILINE)
    code, at = "<", 0
    for start, size, kind in rows:
        assert int(start) == at
        assert struct.calcsize("<" + CODES[kind]) == int(size)
        at += int(size)
        code += CODES[kind]
    assert code == frame.PREFIX.format
    assert at == frame.PREFIX_BYTES


def test_the_flags_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([A-Z]+) \| (\d+) \|", page("frames.md"), flags=re.MULTILINE)
    assert {name: int(value) for name, value in rows} == {str(flag.name): flag.value for flag in Flags}


# ── operations ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_kind_has_its_number_in_the_overview_and_a_section() -> None:
    kinds = {kind.name: int(kind) for kind in Kind}
    text = page("operations.md")
    overview = re.findall(r"^\| \[([A-Z_]+)\]\(#[a-z0-9_-]+\)(?:, push)? \| (\d+) \|", text, flags=re.MULTILINE)
    sections = re.findall(r"^## ([A-Z_]+) \((\d+)\)$", text, flags=re.MULTILINE)
    assert {name: int(number) for name, number in overview} == kinds
    assert {name: int(number) for name, number in sections} == kinds
    assert [int(number) for _, number in sections] == sorted(kinds.values())


def test_every_message_has_its_place_in_the_overview() -> None:
    shown: set[str] = set()
    for row in re.findall(r"^\| \[[A-Z_]+\]\(#.*$", page("operations.md"), flags=re.MULTILINE):
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        shown |= {cells[3], cells[5]}
    parts = {"ErrorBody", "TopicRoute", "SegmentRoute", "SegmentPositions", "GroupPosition", "QueueRun"}
    assert (shown & set(BODIES)) | parts == set(BODIES)
    assert shown - set(BODIES) == {"empty", "none", "empty, if asked for"}


def test_the_table_at_the_top_of_the_module_names_every_kind() -> None:
    assert operations.__doc__ is not None
    named = set(re.findall(r"\b([A-Z_]{3,})\b", operations.__doc__)) - {"REPLY", "ERROR"}
    assert named == {kind.name for kind in Kind}


def type_name(kind: Any) -> str:
    if kind is Any:
        return "any"
    if get_origin(kind) is tuple:
        return f"[{type_name(get_args(kind)[0])}]"
    if get_origin(kind) is dict:
        return "map"
    if set(get_args(kind)) == {int, type(None)}:
        return "int or nil"
    return str(kind.__name__)


def default_of(body: type[msgspec.Struct], number: int) -> str:
    required = len(body.__struct_fields__) - len(body.__struct_defaults__)
    if number < required:
        return ""
    value = body.__struct_defaults__[number - required]
    if isinstance(value, str):
        return f'`"{value}"`'
    plain = {None: "nil", True: "true", False: "false", (): "[]"}
    if isinstance(value, bool | tuple) or value is None:
        return f"`{plain[value]}`"
    return f"`{value}`" if isinstance(value, int) else "`{}`"


def field_tables() -> dict[str, list[tuple[str, str, str, str]]]:
    """By message: number, field, type and default of each row."""
    tables: dict[str, list[tuple[str, str, str, str]]] = {}
    name = ""
    for line in page("operations.md").splitlines():
        if found := re.match(r"(?:\*\*(\w+)\*\*|#+ (\w+)$)", line):
            name = found[1] or found[2]
        if row := re.match(r"\| (\d+) \| `(\w+)` \| (.*?) \| (.*?)\|", line):
            kind = re.sub(r"\[(\w+)\]\(#\w+\)", r"\1", row[3])
            tables.setdefault(name, []).append((row[1], row[2], kind, row[4].strip()))
    return tables


@pytest.mark.parametrize("name", BODIES)
def test_the_fields_of_a_message_are_documented_in_order_with_type_and_default(name: str) -> None:
    body = BODIES[name]
    hints = get_type_hints(body)
    expected = [
        (str(number), field, type_name(hints[field]), default_of(body, number))
        for number, field in enumerate(body.__struct_fields__)
    ]
    assert field_tables()[name] == expected


def test_no_message_is_documented_that_does_not_exist() -> None:
    assert set(field_tables()) == set(BODIES)


def examples() -> list[tuple[str, str, bytes]]:
    """Page, vector and bytes of each hex dump."""
    found = []
    for name in ("frames.md", "operations.md"):
        parts = re.split(r"`tests/vectors/frames/([\w-]+)\.frame`", page(name))
        for vector, text in zip(parts[1::2], parts[2::2], strict=True):
            dump = bytearray()
            for address, row in re.findall(
                r"^    ([0-9a-f]{3})  ((?:[0-9a-f]{2} {1,2}){1,16})", text.partition("\n#")[0], flags=re.MULTILINE
            ):
                assert int(address, 16) == len(dump), f"{name}: {vector} at {address}"
                dump += bytes.fromhex(row)
            found.append((name, vector, bytes(dump)))
    return found


@pytest.mark.parametrize(("name", "vector", "dump"), examples(), ids=lambda each: each if isinstance(each, str) else "")
def test_a_hex_example_is_the_vector_that_it_names(name: str, vector: str, dump: bytes) -> None:
    assert dump == (FRAMES / f"{vector}.frame").read_bytes()


def test_every_kind_has_an_example() -> None:
    assert {dump[12] for _, _, dump in examples()} >= {int(kind) for kind in Kind}


# ── the rest ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_limit_in_the_table_is_the_one_in_the_code() -> None:
    limits = config.Limits()
    rows = dict(
        re.findall(r"^\| ([a-zA-Z][^|]+) \| ([^|]+) \|", page("README.md").partition("## Limits")[2], re.MULTILINE)
    )
    expected = {
        "a frame after its prefix": limits.max_frame_bytes,
        "a frame before the reply to HELLO": frame.FIRST_FRAME_BYTES,
        "a body": frame.MAX_BODY_BYTES,
        "a record batch": batch.MAX_BATCH_BYTES,
        "a record batch after decompression": TopicPolicies().max_decoded_bytes,
        "records of a batch": TopicPolicies().max_batch_records,
        "requests without a reply": limits.max_requests_in_flight,
        "batches without a confirm, and other requests without a reply": limits.max_bytes_in_flight,
        "TOPOLOGY, STORED, POSITIONS, ADMIN, JOIN and LEAVE that are being answered": questions.MAX_QUESTIONS,
        "frames that have begun and are not complete": limits.max_unfinished_bytes,
        "consumers that have joined": limits.max_consumers,
        "channels": limits.max_channels,
        "topics asked for by TOPOLOGY": questions.MAX_WATCHED_TOPICS,
        "producers asked for by STORED": questions.MAX_STORED,
        "credit of a channel": delivery.MAX_CREDIT,
        "connections": limits.max_connections,
        "time until HELLO": limits.hello_timeout_s,
        "unconfirmed batches of one producer in one segment": producers.REMEMBERED_BATCHES,
    }
    del rows["what"]
    assert set(rows) == set(expected)
    for what, limit in expected.items():
        assert re.match(r"[\d,]+", rows[what])[0] == f"{limit:,.0f}", what  # type: ignore[index]


def test_numbers_in_the_text_are_those_in_the_code() -> None:
    groups, cursors = config.GroupConfig(), config.CursorConfig()
    delivery_page, publishing, frames = page("delivery.md"), page("publishing.md"), page("frames.md")
    assert f"keeps its segments for a while ({groups.session_grace_s:g} s unless configured)" in delivery_page
    assert f"longer than {groups.release_timeout_s:g} s" in delivery_page
    assert f"by {cursors.flush_acks:,} acks" in delivery_page
    assert f"last {producers.REMEMBERED_BATCHES} batches" in publishing
    assert f"remembers {producers.MAX_PRODUCERS:,} producers" in publishing
    assert f"{producers.MAX_DERIVED:,} with [derived]" in publishing
    assert f"{frame.MAX_BODY_BYTES:,}" in frames
    assert f"{frame.MAX_FRAME_BYTES:,}" in frames
    assert f"version {operations.VERSION}." in page("README.md")


def test_every_error_code_that_is_named_exists() -> None:
    known = {*BraidError.by_code, operations.END_OF_SEGMENT, operations.RESET}
    for name in ("README.md", "operations.md", "publishing.md", "delivery.md", "frames.md", "clients.md"):
        text = re.sub(r"^    .*$", "", page(name), flags=re.MULTILINE)
        for code in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", text):
            assert code in known, f"{name} names {code}"


def test_the_codes_with_which_a_channel_ends_are_explained() -> None:
    table = page("delivery.md").partition("| code | meaning |")[2].partition("\n\n")[0]
    assert {operations.END_OF_SEGMENT, operations.RESET, "moved"} <= set(re.findall(r"`([a-z-]+)`", table))
