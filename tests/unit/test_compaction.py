"""Which chunks compaction joins, and what it calls them."""

from __future__ import annotations

import random

import msgspec
import pytest

from braid.model.errors import (
    InvalidArgument,
)
from braid.model.ids import Epoch, Offset
from braid.storage.history.catalog import MAX_REPLACED_CHUNKS, ChunkDescriptor
from braid.storage.history.compaction import (
    MIN_TARGET_BYTES,
    is_joined,
    joined_name,
    plan_compaction,
)
from braid.storage.history.exporter import chunk_name
from braid.storage.history.object_names import topic_id_of
from braid.storage.history.producer_objects import producers_name

TARGET = MIN_TARGET_BYTES


# Planning.


def chunks_of(*sizes: int, first: int = 0) -> list[ChunkDescriptor]:
    """Neighbours of so many bytes, ten offsets each."""
    return [
        ChunkDescriptor(
            Offset(first + number * 10),
            Offset(first + number * 10 + 10),
            Epoch(1),
            f"{number}.chunk",
            size + 500,
            size,
            0,
            0,
            0,
            0,
        )
        for number, size in enumerate(sizes)
    ]


def planned(chunks: list[ChunkDescriptor], target: int = TARGET) -> list[list[int]]:
    """As indexes."""
    return [[chunks.index(chunk) for chunk in run] for run in plan_compaction(chunks, target)]


K = 1_024


@pytest.mark.parametrize(
    ("sizes", "runs"),
    [
        ([], []),
        ([K], []),
        ([K, K], [[0, 1]]),
        ([K] * 5, [[0, 1, 2, 3, 4]]),
        ([32 * K, K, K], [[1, 2]]),
        ([K, 32 * K, K], []),
        ([K, K, 99 * K, K, K], [[0, 1], [3, 4]]),
        ([31 * K, 31 * K, 2 * K, K], [[0, 1, 2]]),
        ([31 * K, 31 * K, 3 * K, K], [[0, 1], [2, 3]]),
        ([20 * K] * 7, [[0, 1, 2], [3, 4, 5]]),
    ],
)
def test_neighbours_are_joined_as_long_as_they_fit_and_what_is_large_stays(
    sizes: list[int], runs: list[list[int]]
) -> None:
    assert planned(chunks_of(*sizes)) == runs


def test_what_does_not_follow_is_not_joined_over_the_gap() -> None:
    chunks = chunks_of(K, K) + chunks_of(K, K, first=50)
    assert planned(chunks) == [[0, 1], [2, 3]]


def test_one_swap_takes_no_more_chunks_than_a_transaction_and_the_next_round_joins_the_rest() -> None:
    chunks = chunks_of(*[10] * (MAX_REPLACED_CHUNKS + 2))
    assert [len(run) for run in plan_compaction(chunks, TARGET)] == [MAX_REPLACED_CHUNKS, 2]


@pytest.mark.parametrize("target", [0, MIN_TARGET_BYTES - 1, (1 << 30) + 1])
def test_a_target_that_makes_no_sense_is_refused(target: int) -> None:
    with pytest.raises(InvalidArgument, match="were asked for"):
        plan_compaction([], target)


def after(chunks: list[ChunkDescriptor]) -> list[ChunkDescriptor]:
    """What a plan makes of them."""
    left = {chunk.base_offset: chunk for chunk in chunks}
    for run in plan_compaction(chunks, TARGET):
        for chunk in run:
            del left[chunk.base_offset]
        left[run[0].base_offset] = msgspec.structs.replace(
            run[0], next_offset=run[-1].next_offset, batch_bytes=sum(chunk.batch_bytes for chunk in run)
        )
    return [left[base] for base in sorted(left)]


def test_planning_what_a_plan_has_made_plans_nothing() -> None:
    luck = random.Random(7)
    for _ in range(500):
        ceiling = luck.choice([2 * K, 20 * K, 50 * K, 100 * K])
        chunks = chunks_of(*(luck.randrange(1, ceiling) for _ in range(luck.randrange(1, MAX_REPLACED_CHUNKS))))
        done = after(chunks)
        assert plan_compaction(done, TARGET) == []
        assert sum(chunk.batch_bytes for chunk in done) == sum(chunk.batch_bytes for chunk in chunks)
        large = [chunk for chunk in chunks if 2 * chunk.batch_bytes >= TARGET]
        assert all(chunk in done for chunk in large), "large ones are not rewritten"


def test_names_of_joined_chunks_and_of_exported_ones_never_meet() -> None:
    assert is_joined(joined_name(0, 10, 3))
    assert not is_joined(chunk_name(0, 10, 3))
    assert joined_name(5, 10, 3) == f"{5:020d}-{10:020d}-0000000003-joined.chunk"
    assert joined_name(5, 10, 3, 77) == f"{5:020d}-{10:020d}-0000000003-0000000000004d-joined.chunk"
    assert is_joined(joined_name(0, 10, 3, 77))
    assert not is_joined(chunk_name(0, 10, 3, 77))


@pytest.mark.parametrize("topic_id", [1, 77, 1 << 53])
def test_a_name_says_which_topic_an_object_belongs_to(topic_id: int) -> None:
    for name in (chunk_name, joined_name):
        assert topic_id_of(name(0, 10, 3, topic_id)) == topic_id
        assert topic_id_of(name(0, 10, 3)) == 0
    assert topic_id_of(producers_name(10, 3, topic_id)) == topic_id
    assert topic_id_of(producers_name(10, 3)) == 0
