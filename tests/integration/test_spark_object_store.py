"""A topic read by Spark's executors from a real object store: by range, ahead of time, with no broker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from braid.model.errors import DataLoss
from braid.ports.os_disk import OsDisk
from braid.scan import range_reader
from braid.spark.data_source import BatchReader, BraidDataSource
from braid.spark.source.schema import SOURCE_SCHEMA
from braid.storage.objects.urls import open_objects
from tests.conformance.objects_factories import s3_for_tests
from tests.kits.hand_made_topic import PATH, HandMadeTopic, Record

pytestmark = pytest.mark.processes


async def upload(folder: Path, url: str) -> None:
    disk = OsDisk()
    objects = open_objects(url, disk=disk)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            await objects.create(str(path.relative_to(folder)), [path.read_bytes()])
    await objects.close()
    await disk.close()


async def delete(url: str, name: str) -> None:
    disk = OsDisk()
    objects = open_objects(url, disk=disk)
    await objects.delete(name)
    await objects.close()
    await disk.close()


def values(found: BatchReader) -> list[int]:
    return [
        int(row["value"].strip())
        for partition in found.partitions()
        for batch in found.read(partition)
        for row in batch.to_pylist()
    ]


def test_chunks_in_an_object_store_are_read_by_range(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(range_reader, "DEFAULT_READ_BYTES", 300 << 10)  # so that several reads are under way at once
    topic = HandMadeTopic(tmp_path)
    for chunk in range(2):
        batches = [
            [Record(b"%d" % (chunk * 2_000 + batch * 100 + n) + b" " * 1_000) for n in range(100)]
            for batch in range(20)
        ]
        topic.add_chunk(0, *batches)
    with s3_for_tests() as server:
        url = server.url("spark-reads")
        asyncio.run(upload(tmp_path, url))
        options = {"manifest": url, "topic": "orders"}
        found = BraidDataSource(options).reader(SOURCE_SCHEMA)
        assert isinstance(found, BatchReader)
        assert values(found) == list(range(4_000))
        some = BraidDataSource({**options, "startingOffsets": '{"0": 1234}', "endingOffsets": '{"0": 3210}'})
        ranged = some.reader(SOURCE_SCHEMA)
        assert isinstance(ranged, BatchReader)
        assert values(ranged) == list(range(1_234, 3_210))
        asyncio.run(delete(url, f"{PATH}/{topic.descriptor(0)}/{topic.chunks[0][0].object}"))
        with pytest.raises(DataLoss, match="offsets 0 to 1999"):
            values(found)
