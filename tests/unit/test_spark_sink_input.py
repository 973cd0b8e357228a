"""Whether Spark has broken off a task's rows: seen on a real pipe, and nothing of it is taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from io import BufferedReader
from typing import cast

import pytest

from braid.model.errors import JobFailed
from braid.spark.sink.input import broken_off, whole

Ends = tuple[socket.socket, BufferedReader]


@pytest.fixture
def ends() -> Iterator[Ends]:
    spark, worker = socket.socketpair()
    with spark, worker, cast("BufferedReader", worker.makefile("rb", 65_536)) as pipe:
        yield spark, pipe


def test_rows_with_a_number_behind_them_are_whole_and_the_number_stays(ends: Ends) -> None:
    spark, pipe = ends
    spark.sendall(b"rows" + b"\xff\xff\xff\xfc")
    assert pipe.read(4) == b"rows"
    spark.close()
    assert not broken_off(pipe), "the number is in the reader's buffer already: nobody waits for more"
    assert pipe.read(4) == b"\xff\xff\xff\xfc"


def test_a_number_that_is_still_on_its_way_is_waited_for(ends: Ends) -> None:
    spark, pipe = ends
    spark.sendall(b"rows")
    assert pipe.read(4) == b"rows"
    spark.sendall(b"\xff\xff\xff\xfc")
    assert not broken_off(pipe)


def test_rows_behind_which_the_pipe_is_closed_were_broken_off(ends: Ends) -> None:
    spark, pipe = ends
    spark.sendall(b"rows")
    assert pipe.read(4) == b"rows"
    spark.close()
    assert broken_off(pipe)


def written_by_worker(rows: list[int], pipe: object, verify: bool) -> list[int]:
    """The rows, as a sink sees them in a function of Spark's worker that has this pipe."""
    there = {"rows": rows, "infile": pipe, "whole": whole, "verify": verify}
    program = compile("found = [*whole(rows, verify=verify)]", "/spark/python/pyspark/worker.py", "exec")
    exec(program, there)
    found: list[int] = there["found"]  # type: ignore[assignment]
    return found


def test_rows_that_were_broken_off_fail_the_task_unless_that_is_switched_off(ends: Ends) -> None:
    spark, pipe = ends
    spark.close()
    with pytest.raises(JobFailed, match="broke off the rows"):
        written_by_worker([1, 2], pipe, verify=True)
    assert written_by_worker([1, 2], pipe, verify=False) == [1, 2]


def test_a_worker_without_a_pipe_that_can_be_looked_at_gets_its_rows() -> None:
    assert written_by_worker([1, 2], None, verify=True) == [1, 2]
    assert written_by_worker([1, 2], object(), verify=True) == [1, 2]
    assert [*whole([1, 2])] == [1, 2], "no worker at all"
