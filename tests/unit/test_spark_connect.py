"""Sessions at a Spark Connect server, as far as they can be looked at without one; test_clusters.py has one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from braid.model.errors import NotAvailable
from braid.spark import connect
from braid.spark.session import build_session


@pytest.mark.parametrize(
    ("master", "remote"), [("sc://spark-1:15002", True), ("spark://spark-1:7077", False), ("local[2]", False)]
)
def test_only_an_sc_url_names_a_server(master: str, remote: bool) -> None:
    assert connect.is_remote(master) == remote


def test_without_the_packages_of_spark_connect_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = {"grpc", "pandas"}
    monkeypatch.setattr(connect, "find_spec", lambda name: name if name in there else None)
    with pytest.raises(NotAvailable, match=r"\(grpc_status, zstandard\): run `pip install 'pyspark\[connect\]'`"):
        build_session("sc://127.0.0.1:1")


def test_the_parallelism_is_that_of_the_context_if_there_is_one() -> None:
    session: Any = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=7))
    assert connect.parallelism(session) == 7
