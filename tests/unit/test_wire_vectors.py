"""The bytes in tests/vectors/frames are what other implementations send and expect: they never change."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from braid.model.batch.header import parse_header, verify
from braid.wire import operations
from braid.wire.frame import Frame, FrameReader, encode_frame
from braid.wire.operations import Kind, decode
from tests.vectors.make_frames import FOLDER, contents

INDEX: dict[str, Any] = json.loads((FOLDER / "vectors.json").read_bytes())
FRAMES: list[dict[str, Any]] = INDEX["frames"]


def read(data: bytes) -> Frame:
    reader = FrameReader()
    frames: list[Frame] = []
    while data:
        room = reader.buffer()
        size = min(len(room), len(data))
        room[:size] = data[:size]
        frames += reader.received(size)
        data = data[size:]
    (frame,) = frames
    return frame


def message_of(described: dict[str, Any]) -> type[operations._Body]:
    found: type[operations._Body] = getattr(operations, described["message"])
    return found


def test_the_script_writes_what_is_there() -> None:
    there = {path.name: path.read_bytes() for path in Path(FOLDER).iterdir()}
    assert there == contents()


@pytest.mark.parametrize("described", FRAMES, ids=lambda each: each["file"])
def test_a_vector_is_encoded_from_its_description(described: dict[str, Any]) -> None:
    payload = base64.b64decode(described["payload"])
    body = b""
    if described["message"]:
        body = operations.encode(msgspec.convert(described["body"], message_of(described)))
    head = encode_frame(
        described["kind"],
        body,
        request=described["request"],
        flags=described["flags"],
        payload_bytes=len(payload),
    )
    assert head + payload == (FOLDER / described["file"]).read_bytes()


@pytest.mark.parametrize("described", FRAMES, ids=lambda each: each["file"])
def test_a_vector_is_decoded_to_its_description(described: dict[str, Any]) -> None:
    data = (FOLDER / described["file"]).read_bytes()
    frame = read(data)
    assert (frame.kind, frame.flags, frame.request) == (described["kind"], described["flags"], described["request"])
    assert (len(data) - 16, len(frame.body)) == (described["length"], described["body_length"])
    assert base64.b64encode(frame.payload or b"").decode() == described["payload"]
    if described["message"]:
        assert msgspec.json.encode(decode(message_of(described), frame.body)) == msgspec.json.encode(described["body"])
    else:
        assert frame.body == b""


def test_there_is_a_vector_for_every_operation_and_every_message() -> None:
    assert {each["operation"] for each in FRAMES} - {""} == {kind.name for kind in Kind}
    shown = {each["message"] for each in FRAMES} - {""}
    parts = {"SegmentRoute", "TopicRoute", "SegmentPositions", "GroupPosition", "QueueRun"}
    assert shown | parts == {body.__name__ for body in operations._Body.__subclasses__()}


def test_payloads_are_record_batches() -> None:
    for described in FRAMES:
        payload = base64.b64decode(described["payload"])
        at = 0
        while at < len(payload):
            verify(payload, at)
            at += parse_header(payload, at).size


def test_frames_of_builds_that_knew_fewer_fields_are_read() -> None:
    """What stood in the folder before a field was added."""
    opened = bytes.fromhex("0700000007000000060000002801000092cd04d2cd04d3")
    assert decode(operations.Opened, read(opened).body) == operations.Opened(1234, 1235, placement=0)
