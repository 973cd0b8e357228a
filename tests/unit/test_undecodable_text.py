"""Bytes that are no UTF-8 inside a stored text.

msgspec raises `UnicodeDecodeError` for them, which is no `DecodeError`. A handler of the one that forgets the other
lets damage through as a defect of the program.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import braid
from braid.client.consuming.checkpoint import ConsumerCheckpoint
from braid.console.reports import newest
from braid.model.errors import BraidError, InvalidArgument, InvalidLayout, RecordUnreadable
from braid.model.ids import Offset
from braid.model.layout import Layout
from braid.model.message import Message
from braid.model.ownership import Ownership
from braid.model.queue.events import QueueEvents, QueueSnapshot, Returned, decode_events, decode_snapshot, encode
from braid.model.stored_record import decode

SOURCE = Path(braid.__file__).parent
RETURNED = (Returned(Offset(5), 1, 0, reason="~~"),)


@pytest.mark.parametrize(
    ("read", "data", "error"),
    [
        (lambda data: decode(Ownership, data), b'{"state":"SERVING","owner":"~~","epoch":3}', RecordUnreadable),
        (Layout.from_json, b'{"epoch":0,"nextSegmentId":1,"segments":{"0":{"state":"~~"}}}', InvalidLayout),
        (ConsumerCheckpoint.from_bytes, b'{"version":1,"topic":"~~","positions":{}}', InvalidArgument),
        (decode_events, encode(QueueEvents(returned=RETURNED)), RecordUnreadable),
        (decode_snapshot, encode(QueueSnapshot(1, 0, (), RETURNED)), RecordUnreadable),
    ],
    ids=["record", "layout", "checkpoint", "events", "snapshot"],
)
def test_a_damaged_text_is_damage(read: Callable[[bytes], Any], data: bytes, error: type[BraidError]) -> None:
    assert b"~~" in data
    with pytest.raises(error):
        read(data.replace(b"~~", b"\xff\xfe"))


def test_a_report_that_is_no_text_is_left_out() -> None:
    values = (b'{"job":"\xff","at":1}', b'{"job":"audit","at":1}')
    assert [run.job for run in newest(Message(value=each, key=None, timestamp_us=0, offset=0) for each in values)] == [
        "audit"
    ]


def handlers() -> Iterator[tuple[str, set[str]]]:
    """Yield each place that handles msgspec's `DecodeError`, and the names of the errors that it handles."""
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                names = {each.attr if isinstance(each, ast.Attribute) else each.id for each in _named(node.type)}
                if "DecodeError" in names:
                    yield f"{path.relative_to(SOURCE)}:{node.lineno}", names


def _named(node: ast.expr) -> Iterator[ast.Attribute | ast.Name]:
    for each in node.elts if isinstance(node, ast.Tuple) else [node]:
        if isinstance(each, ast.Attribute | ast.Name):
            yield each


def test_every_handler_of_unreadable_data_knows_unreadable_text() -> None:
    found = dict(handlers())
    assert len(found) > 10
    assert [place for place, names in found.items() if not names & {"UnicodeDecodeError", "ValueError"}] == []
