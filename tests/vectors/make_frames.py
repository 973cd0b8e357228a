"""Writes the test vectors of the wire protocol: `python tests/vectors/make_frames.py`

`frames/` holds one file per frame, and `vectors.json`, which says what is in each, in the order of a conversation.
They are for implementers in other languages, and they hold this implementation to bytes that other clients send and
expect: a test compares what this script would write with what is there.
"""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from braid.wire import operations as op
from braid.wire.frame import MAX_FRAME_BYTES, PREFIX, Flags, encode_frame
from braid.wire.operations import Kind

FOLDER = Path(__file__).parent / "frames"
BATCHES = Path(__file__).parent / "record_batches"

ORDERS = "public/default/orders"
TOPIC_ID = 7_340_291


class Vector(NamedTuple):
    name: str
    about: str
    sender: str
    kind: int
    body: op._Body | None
    request: int = 0
    flags: int = 0
    payload: tuple[str, ...] = ()
    """Names of record batches among the vectors of that format."""

    @property
    def payload_bytes(self) -> bytes:
        return b"".join((BATCHES / f"{batch}.batch").read_bytes() for batch in self.payload)

    @property
    def body_bytes(self) -> bytes:
        return b"" if self.body is None else op.encode(self.body)

    @property
    def frame(self) -> bytes:
        payload = self.payload_bytes
        head = encode_frame(
            self.kind, self.body_bytes, request=self.request, flags=self.flags, payload_bytes=len(payload)
        )
        return head + payload


REPLY = int(Flags.REPLY)
FAILED = int(Flags.REPLY | Flags.ERROR)


def vectors() -> list[Vector]:
    segments = (
        op.SegmentRoute(0, 0x0000, 0x7FFF, True, (), (), "127.0.0.1:6660", 3),
        op.SegmentRoute(1, 0x8000, 0xFFFF, True, (), (), "", 0),
    )
    topology = op.Topology(42, (op.TopicRoute(ORDERS, TOPIC_ID, 1, segments, "127.0.0.1:6661", 2),))
    gone = op.Topology(43, (op.TopicRoute(ORDERS, 0, 0, (), ""),))
    out_of_range = {"earliest": 1000, "end": 1235}
    positions = (
        op.SegmentPositions(0, 1000, 1235, False, 1234, ((1, 0), (3, 1100))),
        op.SegmentPositions(1, 0, 0, False, 0),
    )
    lease = (3 << 31) + 1  # The first one of epoch 3.
    result = {"name": f"topic://{ORDERS}", "segments": {"0": {"state": "ACTIVE"}}}
    client, broker = "client", "broker"
    return [
        Vector("hello", "the first frame of a connection", client, Kind.HELLO,
               op.Hello("braid", 1, 1, "example/1.0", "", ()), 1),
        Vector("hello-token", "with a token, and a capability from the future", client, Kind.HELLO,
               op.Hello("braid", 1, 3, "example/1.0", "e30.e30.c2ln", ("teleport",)), 1),
        Vector("hello-reply", "version 1 it is", broker, Kind.HELLO,
               op.HelloReply(1, "broker-1", MAX_FRAME_BYTES, 10_000, ()), 1, REPLY),
        Vector("ping", "a frame of nothing but the prefix", client, Kind.PING, None, 2),
        Vector("ping-reply", "", broker, Kind.PING, None, 2, REPLY),
        Vector("topology", "where is this topic?", client, Kind.TOPOLOGY, op.TopologyRequest((ORDERS,), 0), 3),
        Vector("topology-reply", "two segments, one of which nobody serves now", broker, Kind.TOPOLOGY,
               topology, 3, REPLY),
        Vector("topology-push", "later: the topic was deleted", broker, Kind.TOPOLOGY, gone),
        Vector("topology-ack", "the client knows", client, Kind.TOPOLOGY_ACK, op.TopologyAck(43)),
        Vector("publish", "one batch without a producer id", client, Kind.PUBLISH,
               op.Route(ORDERS, TOPIC_ID, 0, 1), 4, payload=("one",)),
        Vector("publish-reply", "stored", broker, Kind.PUBLISH, op.Published(1234, False), 4, REPLY),
        Vector("publish-duplicate", "stored before, at an offset that is no longer remembered", broker, Kind.PUBLISH,
               op.Published(-1, True), 4, REPLY),
        Vector("publish-error", "not stored; may be sent again after another TOPOLOGY", broker, Kind.PUBLISH,
               op.ErrorBody("stale-route", "the layout has epoch 2", True, {}), 4, FAILED),
        Vector("publish-sealed", "not stored, and never will be in this segment", broker, Kind.PUBLISH,
               op.ErrorBody("segment-sealed", "segment 0 has ended", True, {"end": 1235, "next_sequence": 17}), 4,
               FAILED),
        Vector("stored", "how far does segment 1 have these producers?", client, Kind.STORED,
               op.StoredRequest(ORDERS, TOPIC_ID, 1, (7_001, 7_002)), 16),
        Vector("stored-reply", "17 records of the first, nothing of the second; more may follow", broker, Kind.STORED,
               op.Stored((17, -1), False, (0, -1)), 16, REPLY),
        Vector("join", "become a consumer", client, Kind.JOIN,
               op.Join(ORDERS, "billing", "worker-1", "earliest", "stream", True), 5),
        Vector("join-reply", "", broker, Kind.JOIN, op.Joined(17, TOPIC_ID, True), 5, REPLY),
        Vector("assign", "all segments that the consumer has now", broker, Kind.ASSIGN,
               op.Assignment(17, 1, (0, 1), 41, (1, 2))),
        Vector("open", "from the subscription's cursor on, with 1 MiB of credit", client, Kind.OPEN,
               op.Open(1, ORDERS, TOPIC_ID, 0, 1 << 20, 0, 0, "billing", 41, 1), 6),
        Vector("open-earliest", "without a session, from the earliest offset on", client, Kind.OPEN,
               op.Open(2, ORDERS, TOPIC_ID, 0, 1 << 20, 0, -1), 7),
        Vector("open-after", "without a session, after a record that epoch 3 has stored", client, Kind.OPEN,
               op.Open(3, ORDERS, TOPIC_ID, 0, 1 << 20, 0, 1234, after_epoch=3), 15),
        Vector("open-reply", "", broker, Kind.OPEN, op.Opened(1234, 1235, 57), 6, REPLY),
        Vector("open-error", "an error with fields of its own", broker, Kind.OPEN,
               op.ErrorBody("offset-out-of-range", "offset 3 is gone", False, out_of_range), 7, FAILED),
        Vector("deliver", "one batch, as the owner stamped it", broker, Kind.DELIVER,
               op.Delivery(1, 1235), payload=("one-keyed",)),
        Vector("deliver-two", "two batches behind each other", broker, Kind.DELIVER,
               op.Delivery(2, 1235), payload=("one-keyed", "one-keyed")),
        Vector("credit", "", client, Kind.CREDIT, op.Credit(1, 524_288)),
        Vector("need", "the next batch has 2 MiB", broker, Kind.NEED, op.Need(1, 2 << 20)),
        Vector("ack", "no reply is wanted", client, Kind.ACK, op.Ack(1, 1235, False)),
        Vector("ack-durable", "the reply comes when the cursor is stored", client, Kind.ACK, op.Ack(1, 1235, True), 8),
        Vector("ack-reply", "", broker, Kind.ACK, None, 8, REPLY),
        Vector("closed-end", "the segment is sealed and all of it was delivered", broker, Kind.CLOSED,
               op.Closed(1, op.END_OF_SEGMENT, "the segment ends at offset 1235", False)),
        Vector("closed-reset", "the subscription was set to another place", broker, Kind.CLOSED,
               op.Closed(1, op.RESET, "subscription billing was moved", True)),
        Vector("close", "", client, Kind.CLOSE, op.Close(2), 9),
        Vector("close-reply", "", broker, Kind.CLOSE, None, 9, REPLY),
        Vector("release", "segment 1 is free for another consumer", client, Kind.RELEASE, op.Release(17, 1), 10),
        Vector("release-reply", "", broker, Kind.RELEASE, None, 10, REPLY),
        Vector("expel", "another consumer took the name", broker, Kind.EXPEL,
               op.Expelled(17, "consumer-replaced", "another worker-1 joined", False)),
        Vector("progress", "a checkpoint consumer of a group was in segment 1, and has read all of segment 0", client,
               Kind.PROGRESS, op.Progress(17, (op.GroupPosition(1, 1235, 3), op.GroupPosition(0, op.ENDED, 0)))),
        Vector("leave", "", client, Kind.LEAVE, op.Leave(17), 11),
        Vector("leave-reply", "", broker, Kind.LEAVE, None, 11, REPLY),
        Vector("positions", "where is everything, and where was it at this time?", client, Kind.POSITIONS,
               op.PositionsRequest(ORDERS, 1_700_000_000_000_000), 12),
        Vector("positions-now", "without a time", client, Kind.POSITIONS, op.PositionsRequest(ORDERS, None), 12),
        Vector("positions-reply", "", broker, Kind.POSITIONS, op.Positions(TOPIC_ID, positions), 12, REPLY),
        Vector("queue-open", "hand out messages of a queue, 100 at most that are not answered", client, Kind.QUEUE_OPEN,
               op.QueueOpen(4, ORDERS, TOPIC_ID, 0, "mailer", "worker-1", 100), 17),
        Vector("queue-open-reply", "a message is leased for 30 s", broker, Kind.QUEUE_OPEN,
               op.QueueOpened(58, 30_000, f"{ORDERS}-dead"), 17, REPLY),
        Vector("queue-deliver", "one message, with its batch", broker, Kind.QUEUE_DELIVER,
               op.QueueDelivery(4, 1234, 1235, (op.QueueRun(1234, 1235, lease, 0),)), payload=("one-keyed",)),
        Vector("queue-answer-nack", "deliver it again after a second; a program has seen it", client,
               Kind.QUEUE_ANSWER, op.QueueAnswer(4, nacks=((1234, lease, 1_000_000, True, "no such mailbox"),)), 18),
        Vector("queue-answer-reply", "stored", broker, Kind.QUEUE_ANSWER, op.QueueAnswered(), 18, REPLY),
        Vector("queue-deliver-again", "the same message a second later: the client still has its batch", broker,
               Kind.QUEUE_DELIVER,
               op.QueueDelivery(4, 1234, 1235, (op.QueueRun(1234, 1235, lease + 1, 1, False, "no such mailbox"),))),
        Vector("queue-answer-extend", "keep it for 60 s from now", client, Kind.QUEUE_ANSWER,
               op.QueueAnswer(4, extensions=((1234, lease + 1, 60_000_000),)), 19),
        Vector("queue-answer", "settle it", client, Kind.QUEUE_ANSWER,
               op.QueueAnswer(4, ((1234, 1235, lease + 1),)), 20),
        Vector("queue-answer-stale", "another consumer has it since: this does not count", broker, Kind.QUEUE_ANSWER,
               op.QueueAnswered((1234,)), 20, REPLY),
        Vector("queue-deliver-dead", "to the dead-letter topic with it", broker, Kind.QUEUE_DELIVER,
               op.QueueDelivery(4, 1234, 1235, (op.QueueRun(1234, 1235, lease + 2, 5, True, "no such mailbox"),)),
               payload=("one-keyed",)),
        Vector("queue-open-again", "the next channel: the consumer still holds two messages of an earlier one", client,
               Kind.QUEUE_OPEN,
               op.QueueOpen(5, ORDERS, TOPIC_ID, 0, "mailer", "worker-1", 100, 58, ((1232, 1234, lease),)), 21),
        Vector("queue-open-again-reply", "another consumer has got the second of them", broker, Kind.QUEUE_OPEN,
               op.QueueOpened(58, 30_000, f"{ORDERS}-dead", (1233,)), 21, REPLY),
        Vector("queue-answer-leaving", "return a message that no program has seen, and send no more", client,
               Kind.QUEUE_ANSWER, op.QueueAnswer(5, nacks=((1232, lease, 0, False, ""),), leaving=True), 22),
        Vector("admin", "a call of the REST interface", client, Kind.ADMIN,
               op.AdminRequest("get_topic", {"topic": ORDERS}), 13),
        Vector("admin-reply", "", broker, Kind.ADMIN, op.AdminReply(result), 13, REPLY),
        Vector("peer", "where does your segment end, for another broker?", client, Kind.PEER,
               op.PeerRequest("positions", {"topic": ORDERS, "topic_id": TOPIC_ID, "segment": 0, "timestamp": None}),
               14),
        Vector("peer-reply", "", broker, Kind.PEER, op.PeerReply([0, 1000, 1235, False, -1]), 14, REPLY),
        Vector("unknown-error", "the answer to an operation that the broker does not know", broker, 200,
               op.ErrorBody("unknown-operation", "operation 200 is unknown to this broker", False, {}),
               0xFFFF_FFFF, FAILED),
        Vector("refusal", "why the broker closes the connection; the last frame", broker, 0,
               op.ErrorBody("shutting-down", "broker broker-1 is stopping", True, {}), 0, FAILED),
    ]  # fmt: skip


def description(vector: Vector) -> dict[str, Any]:
    body = vector.body
    length, body_length, *_ = PREFIX.unpack_from(vector.frame)
    described: dict[str, Any] = {
        "file": f"{vector.name}.frame",
        "about": vector.about,
        "sender": vector.sender,
        "length": length,
        "body_length": body_length,
        "request": vector.request,
        "kind": vector.kind,
        "operation": Kind(vector.kind).name if vector.kind in set(Kind) else "",
        "flags": vector.flags,
        "message": type(body).__name__ if body is not None else "",
        "body": msgspec.to_builtins(body) if body is not None else None,
        "payload": base64.b64encode(vector.payload_bytes).decode(),
    }
    return described


def contents() -> dict[str, bytes]:
    """Every file, by name."""
    files = {f"{vector.name}.frame": vector.frame for vector in vectors()}
    about = "Payloads are base64; `body` is the array that is encoded as MessagePack. By tests/vectors/make_frames.py."
    index = {"about": about, "frames": [description(vector) for vector in vectors()]}
    files["vectors.json"] = (json.dumps(index, indent=1, ensure_ascii=False) + "\n").encode()
    return files


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name, data in contents().items():
        (FOLDER / name).write_bytes(data)


if __name__ == "__main__":
    main()
