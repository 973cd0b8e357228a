"""`braid.history` beside a real broker: chunks, the tail, a split, no broker; as DuckDB, Polars and pandas use it."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import duckdb
import polars
import pytest

import braid
from braid.model.errors import ConnectFailed
from braid.scan.options import ScanOptions
from braid.scan.planning import ChunkPiece, OwnerPiece, plan_batch
from braid.scan.ranges import wanted_ranges
from braid.scan.snapshot import take_snapshot
from tests.kits.forked_broker import ForkedBroker
from tests.kits.waiting import wait_until

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("history")]

RECORDS, KEYS = 3_000, 20


class Filled(NamedTuple):
    broker: ForkedBroker
    storage: str
    sent: list[bytes]
    """The values, in the order of sending."""

    def __repr__(self) -> str:
        return "filled"


def value_of(number: int) -> bytes:
    return b'{"number": %d, "padding": "%s"}' % (number, b"x" * 60)


def publish(url: str, first: int, count: int) -> list[bytes]:
    values = [value_of(number) for number in range(first, first + count)]
    with braid.sync.connect(url) as client, client.producer("orders", max_batch_records=100) as producer:
        producer.send_many([(b"key-%d" % (number % KEYS), value) for number, value in enumerate(values, first)])
    return values


def pieces(url: str) -> set[type]:
    options = ScanOptions(topic="public/default/orders", url=url)
    snapshot = take_snapshot(options)
    planned = plan_batch(snapshot, wanted_ranges(snapshot, options))
    return {type(piece) for partition in planned for piece in partition.pieces}


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Filled]:
    """A topic that was split half-way; partly in chunks, partly only with its owner."""
    folder = tmp_path_factory.mktemp("history")
    (folder / "broker.toml").write_text("file_bytes = 65536\nspare_files = 0\n")
    storage = f"file://{folder}/history"
    with ForkedBroker(folder / "data", "--config", str(folder / "broker.toml"), "--storage", storage) as broker:
        with braid.sync.connect(broker.url) as client:
            client.admin.create_topic("orders")
            sent = publish(broker.url, 0, RECORDS // 2)
            client.admin.split("orders", 0)
        sent += publish(broker.url, RECORDS // 2, RECORDS - len(sent))
        wait_until(lambda: pieces(broker.url) == {ChunkPiece, OwnerPiece}, "chunks in storage and a tail at the owner")
        yield Filled(broker, storage, sent)


def test_each_record_comes_once_from_chunks_and_the_tail_and_keys_in_order_across_a_split(filled: Filled) -> None:
    table = braid.history("orders", url=filled.broker.url).read_all()
    rows = table.select(["key", "value"]).to_pylist()
    assert sorted(row["value"] for row in rows) == sorted(filled.sent)
    for key in (b"key-%d" % number for number in range(KEYS)):
        numbers = [json.loads(row["value"])["number"] for row in rows if row["key"] == key]
        assert numbers == sorted(numbers), key
    assert {row["segment"] for row in table.select(["segment"]).to_pylist()} == {0, 1, 2}


def test_a_reader_returns_what_was_there_when_it_was_made_and_the_next_one_continues(filled: Filled) -> None:
    reader = braid.history("orders", url=filled.broker.url, columns=["value"])
    later = publish(filled.broker.url, RECORDS, 50)
    filled.sent.extend(later)
    first = reader.read_all().column("value").to_pylist()
    assert sorted(first) == sorted(filled.sent[:-50])
    start = json.loads(reader.schema.metadata[b"braid.next"])
    second = braid.history("orders", url=filled.broker.url, columns=["value"], start=start).read_all()
    assert sorted(second.column("value").to_pylist()) == sorted(later)


def test_duckdb_polars_and_pandas_take_the_reader(filled: Filled) -> None:
    def reader(*columns: str) -> Any:
        return braid.history("orders", url=filled.broker.url, columns=columns or None)

    orders = reader("segment", "value")  # noqa: F841 (DuckDB finds it by its name)
    query = "select count(*), sum((decode(value)->>'number')::int) from orders"
    assert duckdb.execute(query).fetchall() == [(len(filled.sent), sum(range(len(filled.sent))))]
    frame = polars.from_arrow(reader("segment", "offset", "key", "value", "timestamp"))
    assert isinstance(frame, polars.DataFrame)
    assert frame["key"].n_unique() == KEYS
    everything = reader().read_pandas()
    assert len(everything) == len(filled.sent)
    assert list(everything.columns) == [
        "segment", "offset", "key", "value", "timestamp", "headers", "keyHash", "epoch",
    ]  # fmt: skip


def test_an_error_of_the_reader_reaches_the_program(filled: Filled) -> None:
    with pytest.raises(braid.BraidError, match="topic public/default/absent does not exist"):
        braid.history("absent", url=filled.broker.url)


def test_without_brokers_the_history_ends_where_the_chunks_end(
    filled: Filled, caplog: pytest.LogCaptureFixture
) -> None:
    """The last test: it stops the broker, which exports nothing by that."""
    broker, storage = filled.broker, filled.storage
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)
    live = braid.history("orders", url=broker.url, storage=storage, columns=["value"], end=soon)
    assert live.schema.metadata[b"braid.live"] == b"true"
    assert len(live.read_all()) == len(filled.sent)
    broker.stop()
    with pytest.raises(ConnectFailed, match=r"Correct argument url, start a broker, or .* by argument storage"):
        braid.history("orders", url=broker.url, timeout=0.2)
    with caplog.at_level(logging.WARNING, "braid.scan.history"):
        either = braid.history("orders", url=broker.url, storage=storage, columns=["value"], timeout=0.2)
    assert "the history of topic public/default/orders ends where its chunks end" in caplog.text
    assert either.schema.metadata[b"braid.live"] == b"false"
    found = either.read_all().column("value").to_pylist()
    assert found == braid.history("orders", storage=storage, columns=["value"]).read_all().column("value").to_pylist()
    assert len(found) == len(set(found)) > 0
    assert set(found) < set(filled.sent)
