"""Stream offsets as they lie in users' checkpoints."""

from __future__ import annotations

import json
from typing import Any

import pytest

from braid.client.consuming.checkpoint import END
from braid.model.errors import InvalidArgument
from braid.spark.stream.offsets import StreamOffset, begins, is_other_topic

TOPIC = "public/default/orders"
STORED = (
    '{"version": 1, "topic": "public/default/orders", "topicId": 7, '
    '"positions": {"0": "END", "1": 17, "10": 3}, "partitions": 4}'
)


def offset(positions: dict[int, Any], **more: Any) -> StreamOffset:
    return StreamOffset(topic=TOPIC, topic_id=7, positions=positions, **more)


def test_the_text_of_a_checkpoint_is_read_and_written_as_it_was() -> None:
    read = StreamOffset.from_json(json.loads(STORED), TOPIC)
    assert read == offset({0: END, 1: 17, 10: 3}, partitions=4)
    assert json.dumps(read.to_json()) == STORED


def test_an_offset_keeps_the_epochs_of_its_positions() -> None:
    text = STORED.removesuffix("}") + ', "epochs": {"1": 3, "10": 12}}'
    read = StreamOffset.from_json(json.loads(text), TOPIC)
    assert read == offset({0: END, 1: 17, 10: 3}, partitions=4, epochs={10: 12, 1: 3})
    assert json.dumps(read.to_json()) == text


def test_equal_offsets_are_equal_texts() -> None:
    one, other = offset({10: 3, 1: 17, 0: END}), offset({0: END, 1: 17, 10: 3})
    assert json.dumps(one.to_json()) == json.dumps(other.to_json())


def test_the_beginning_of_the_first_micro_batch_survives_the_checkpoint() -> None:
    beginning = StreamOffset.beginning(TOPIC, 7, {0: 5})
    first = offset({0: 9}, since=beginning.positions)
    again = StreamOffset.from_json(json.loads(json.dumps(first.to_json())), TOPIC)
    later = StreamOffset.beginning(TOPIC, 7, {0: 1_000})  # `latest`, asked for again after a crash
    assert begins(later, again) == {0: 5}
    assert beginning.is_beginning
    assert not again.is_beginning


def test_a_later_micro_batch_begins_where_the_one_before_ended() -> None:
    assert begins(offset({0: 9}), offset({0: 12})) == {0: 9}
    assert not offset({0: 9}).is_beginning


def test_there_is_nothing_between_an_offset_and_itself() -> None:
    """Spark runs a stateful query once more without records when its watermark has moved."""
    first = offset({0: 9}, since={0: 5})
    assert begins(first, first) == {0: 9}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2, "new": "field"}, "version 2, and this build of Braid reads versions up to 1"),
        ({"topic": "public/default/payments"}, "is of topic public/default/payments, the query reads public/default"),
        ({"positions": {"0": -1}}, "impossible offset"),
        ({"positions": {"-1": 0}}, "impossible offset"),
        ({"from": {"0": -1}}, "impossible offset"),
        ({"partitions": 0}, "impossible offset"),
        ({"epochs": {"0": -1}}, "impossible offset"),
        ({"epochs": {"0": "END"}}, "none of Braid's"),
        ({"version": 0}, "impossible offset"),
        ({"positions": {"0": "end"}}, "none of Braid's"),
        ({"positions": {"zero": 0}}, "none of Braid's"),
        ({"positions": None}, "none of Braid's"),
        ({"logOffset": 5}, "none of Braid's"),
    ],
)
def test_an_offset_that_is_not_of_this_query_is_refused_with_a_reason(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        StreamOffset.from_json(json.loads(STORED) | change, TOPIC)


def test_the_offset_of_another_source_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="give each query a checkpointLocation of its own"):
        StreamOffset.from_json({"orders": {"0": 17}}, TOPIC)


@pytest.mark.parametrize(("then", "now", "other"), [(7, 7, False), (7, 8, True), (7, 0, False), (0, 8, False)])
def test_a_topic_that_was_created_again_is_another_one_unless_manifests_do_not_know(
    then: int, now: int, other: bool
) -> None:
    assert is_other_topic(StreamOffset(topic=TOPIC, topic_id=then, positions={}), now) is other
