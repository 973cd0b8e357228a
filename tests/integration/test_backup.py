"""Backups of the metadata: real brokers go on after the backup, lose the metadata, and are restored."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from braid import sync
from braid.storage.retention import RetentionPolicy
from tests.kits.admin import admin_broker
from tests.kits.cluster_process import ClusterProcess
from tests.kits.commands import run, run_to_end
from tests.kits.etcd_server import etcd_server
from tests.kits.forked_broker import ForkedBroker
from tests.kits.waiting import wait_until


def _publish(url: str, first: int, count: int, topic: str = "orders") -> None:
    with sync.connect(url) as client, client.producer(topic) as producer:
        ids = producer.send_many(
            [(str(number % 7).encode(), str(number).encode()) for number in range(first, first + count)]
        )
        assert len(ids) == count


def _values(url: str, topic: str = "orders") -> list[tuple[int, int, int]]:
    """Segment, offset and number of all records, by segment and offset."""
    done = run(url, "consume", topic, "--json")
    lines = [json.loads(line) for line in done.splitlines()]
    return sorted((each["segment"], each["offset"], int(each["value"])) for each in lines)


def _check_whole(found: list[tuple[int, int, int]], count: int) -> None:
    """Every number is there once; offsets of each segment have no gap and no repeat (I1, I2)."""
    assert sorted(number for _, _, number in found) == list(range(count))
    for segment in {segment for segment, _, _ in found}:
        offsets = [offset for each, offset, _ in found if each == segment]
        assert offsets == list(range(len(offsets)))


def _lose_metadata(path: Path) -> None:
    for name in os.listdir(path.parent):
        if name.startswith(path.name):
            target = path.parent / name
            shutil.rmtree(target) if target.is_dir() else target.unlink()


def _restore(*arguments: str) -> dict[str, Any]:
    done = run_to_end("", "restore", *arguments, "--json")
    assert done.stdout, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    assert (done.returncode == 0) is (not found["problems"])
    return found


def test_a_broker_goes_on_after_its_metadata_was_lost_and_restored(tmp_path: Path) -> None:
    data, file = tmp_path / "data", str(tmp_path / "backup")
    with ForkedBroker(data) as broker:
        run(broker.url, "topic", "create", "orders", "--segments", "2")
        run(broker.url, "subscription", "create", "orders", "billing", "--from", "earliest")
        _publish(broker.url, 0, 100)
        run("", "backup", file, "--data", str(data))
        assert Path(file).stat().st_mode & 0o777 == 0o600
        before = run_to_end("", "restore", file, "--data", str(data))
        assert before.returncode != 0, "the folder is in use"
        _publish(broker.url, 100, 100)
        broker.stop()
        broker.start()  # An owner of the next epoch, which the backup does not know.
        _publish(broker.url, 200, 50)
        broker.kill()
        _lose_metadata(data / "metadata.db")
        found = _restore(file, "--data", str(data))
        assert found["written"] is True
        assert len(found["carriedForward"]) == 2
        assert found["notInStorage"] == []
        broker.start()
        wait_until(lambda: "orders" in run(broker.url, "topic", "list"), "the topic is there")
        _publish(broker.url, 250, 50)
        _check_whole(_values(broker.url), 300)
        with sync.connect(broker.url) as client:
            shown = client.admin.subscription("orders", "billing")
        assert sum(each["backlog"] for each in shown["segments"].values()) == 300


def test_records_that_only_storage_holds_are_found_by_their_manifest(tmp_path: Path) -> None:
    """After the backup files are exported and removed from the disk, and retention deletes the oldest chunks."""
    data, file, storage = tmp_path / "data", str(tmp_path / "backup"), f"file://{tmp_path}/history"
    with admin_broker(tmp_path, storage=storage, file_bytes=1 << 20, spare_files=0) as broker:
        url = f"braid://{broker.broker.address}"
        run(url, "topic", "create", "orders")
        _publish(url, 0, 100)
        run("", "backup", file, "--data", str(data))
        with sync.connect(url) as client, client.producer("orders") as producer:
            for _ in range(30):
                producer.send_many([b"x" * 1_000 for _ in range(100)])
        (segment,) = broker.broker.segments.all()
        stored = segment.storage
        wait_until(lambda: len(stored.catalog.chunks) >= 2, "files are exported")
        oldest = RetentionPolicy(max_bytes=stored.catalog.chunks[-1].size + 1)
        broker.run(stored.apply_retention(oldest))
        earliest, end = stored.earliest, stored.log.end
        assert 0 < earliest <= stored.log.files[0].base_offset < end
    _lose_metadata(data / "metadata.db")
    found = _restore(file, "--data", str(data), "--storage", storage)
    assert len(found["carriedForward"]) == 1
    assert found["notInStorage"] == []
    with ForkedBroker(data, "--storage", storage) as again:
        _publish(again.url, 0, 10)
        lines = run(again.url, "consume", "orders", "--json").splitlines()
        assert [json.loads(line)["offset"] for line in lines] == [*range(earliest, end + 10)]


def test_a_store_that_is_in_use_is_not_overwritten(tmp_path: Path) -> None:
    data, file = tmp_path / "data", str(tmp_path / "backup")
    with ForkedBroker(data) as broker:
        run(broker.url, "topic", "create", "orders")
        run("", "backup", file, "--data", str(data))
        again = run_to_end("", "backup", file, "--data", str(data))
        assert again.returncode == 2
        assert b"overwrites nothing" in again.stderr
        running = run_to_end("", "restore", file, "--data", str(data), "--dry-run")
        assert running.returncode == 1
        assert b"is used by a broker that runs: stop all brokers first" in running.stderr
    done = run_to_end("", "restore", file, "--data", str(data))
    assert done.returncode == 2
    assert b"name an empty store" in done.stderr
    with open(file, "r+b") as stream:
        stream.seek(300)
        stream.write(b"x")
    _lose_metadata(data / "metadata.db")
    done = run_to_end("", "restore", file, "--data", str(data))
    assert done.returncode == 2
    assert b"backup" in done.stderr
    assert not (data / "metadata.db").exists()


def test_a_backup_of_a_store_that_is_not_there_makes_none(tmp_path: Path) -> None:
    for options in (("--data", str(tmp_path)), ("--metadata", f"sqlite:{tmp_path}/metadata.db")):
        done = run_to_end("", "backup", str(tmp_path / "backup"), *options)
        assert done.returncode == 2
        assert f"there is no metadata store {tmp_path}/metadata.db" in done.stderr.decode()
    assert not [*tmp_path.iterdir()]


@pytest.fixture(name="cluster")
def _cluster(tmp_path: Path) -> Iterator[ClusterProcess]:
    with ClusterProcess(tmp_path, shared=True, brokers=2) as cluster:
        yield cluster


def _owner(cluster: ClusterProcess) -> str:
    with sync.connect(cluster.url) as client:
        (segment,) = client.admin.topic_stats("orders")["segments"].values()
    owner: str = segment["owner"]
    return owner


def test_a_segment_that_moved_after_the_backup_is_found_on_its_new_disk(
    cluster: ClusterProcess, tmp_path: Path
) -> None:
    file, metadata = str(tmp_path / "backup"), tmp_path / "metadata.db"
    cluster.run("topic", "create", "orders")
    _publish(cluster.url, 0, 100)
    run("", "backup", file, "--metadata", f"sqlite:{metadata}")
    first = _owner(cluster)
    (second,) = cluster.others(first)
    cluster.run("topic", "move", "orders", "--to", second)
    _publish(cluster.url, 100, 100)  # In the log of the second broker, and not in storage.
    for broker in cluster.brokers.values():
        broker.kill()
    _lose_metadata(metadata)
    folders = [part for broker in cluster.brokers.values() for part in ("--data", str(broker.data))]
    storage = ["--metadata", f"sqlite:{metadata}", "--storage", f"file://{tmp_path}/history"]
    assert _restore(file, *storage, *folders, "--dry-run")["written"] is False
    assert not metadata.exists()
    found = _restore(file, *storage, *folders)
    assert found["written"] is True
    assert len(found["carriedForward"]) == 1
    for broker in cluster.brokers.values():
        broker.start()
    wait_until(lambda: _owner(cluster) == second, "the second broker has it")
    _publish(cluster.url, 200, 10)
    _check_whole(_values(cluster.url), 210)


def test_without_the_disks_no_other_broker_continues_the_segment(cluster: ClusterProcess, tmp_path: Path) -> None:
    """The manifests tell that another owner has begun. The one that the backup knows lacks its records, and refuses."""
    file, metadata = str(tmp_path / "backup"), tmp_path / "metadata.db"
    cluster.run("topic", "create", "orders")
    _publish(cluster.url, 0, 100)
    run("", "backup", file, "--metadata", f"sqlite:{metadata}")
    first = _owner(cluster)
    (second,) = cluster.others(first)
    cluster.run("topic", "move", "orders", "--to", second)
    _publish(cluster.url, 100, 100)
    for broker in cluster.brokers.values():
        broker.kill()
    _lose_metadata(metadata)
    storage = ["--metadata", f"sqlite:{metadata}", "--storage", f"file://{tmp_path}/history"]
    assert len(_restore(file, *storage)["carriedForward"]) == 1
    for broker in cluster.brokers.values():
        broker.start()

    def reason() -> str:
        with sync.connect(cluster.url) as client:
            (segment,) = client.admin.topic_stats("orders")["segments"].values()
        return str(segment["unavailable"])

    wait_until(lambda: "did not seal this log" in reason(), "the first broker says why it does not open the segment")
    cluster.run("topic", "recover", "orders", "--to", second, "--accept-loss")  # Its disk has everything.
    _publish(cluster.url, 200, 10)
    _check_whole(_values(cluster.url), 210)


def test_a_layout_that_is_older_than_the_history_is_refused(cluster: ClusterProcess, tmp_path: Path) -> None:
    file, metadata = str(tmp_path / "backup"), tmp_path / "metadata.db"
    for topic in ("orders", "kept"):
        cluster.run("topic", "create", topic)
    _publish(cluster.url, 0, 20)
    _publish(cluster.url, 0, 20, topic="kept")
    run("", "backup", file, "--metadata", f"sqlite:{metadata}")
    cluster.run("topic", "split", "orders", "0")
    cluster.run("topic", "create", "later")
    _publish(cluster.url, 0, 20, topic="later")
    for broker in cluster.brokers.values():
        broker.stop()
    _lose_metadata(metadata)
    storage = ["--metadata", f"sqlite:{metadata}", "--storage", f"file://{tmp_path}/history"]
    found = _restore(file, *storage)
    problems = {each["topic"]: each["text"] for each in found["problems"]}
    assert problems.keys() == {"public/default/orders", "public/default/later"}
    assert "layout of epoch 0" in problems["public/default/orders"]
    assert "does not know it" in problems["public/default/later"]
    assert not metadata.exists(), "nothing was written"
    without = ["--leave-out", "orders", "--leave-out", "later"]
    assert _restore(file, *storage, *without)["written"] is True
    for broker in cluster.brokers.values():
        broker.start()
    assert "orders" not in cluster.run("topic", "list")
    _publish(cluster.url, 20, 5, topic="kept")
    _check_whole(_values(cluster.url, "kept"), 25)


def test_the_newest_copy_of_a_replicated_segment_continues_it(tmp_path: Path) -> None:
    """After the backup the owner is lost, a vote elects another, and that one goes on."""
    file, metadata = str(tmp_path / "backup"), tmp_path / "metadata.db"
    with ClusterProcess(tmp_path, shared=True, brokers=3) as cluster:
        cluster.run("topic", "create", "orders", "--replicas", "3", "--confirm", "2")
        _publish(cluster.url, 0, 50)
        run("", "backup", file, "--metadata", f"sqlite:{metadata}")
        first = _owner(cluster)
        cluster[first].kill()
        _publish(cluster.url, 50, 50)  # Waits for the vote.
        second = _owner(cluster)
        assert second != first
        for broker in cluster.brokers.values():
            if broker.running:
                broker.kill()
        _lose_metadata(metadata)
        storage = ["--metadata", f"sqlite:{metadata}", "--storage", f"file://{tmp_path}/history"]
        refused = _restore(file, *storage)
        assert "--data" in refused["problems"][0]["text"]
        some = ["--data", str(cluster[second].data)]
        assert first in _restore(file, *storage, *some)["problems"][0]["text"]
        folders = [part for broker in cluster.brokers.values() for part in ("--data", str(broker.data))]
        assert _restore(file, *storage, *folders)["written"] is True
        for broker in cluster.brokers.values():
            broker.start()
        _publish(cluster.url, 100, 10)
        _check_whole(_values(cluster.url), 110)


def test_metadata_of_etcd_is_restored_into_another_etcd(tmp_path: Path) -> None:
    file, storage = str(tmp_path / "backup"), f"file://{tmp_path}/history"
    with etcd_server() as old, etcd_server() as new:
        options = ("--id", "one", "--storage", storage)
        with ForkedBroker(tmp_path / "one", *options, "--metadata", f"etcd://{old.address}") as broker:
            run(broker.url, "topic", "create", "orders", "--segments", "2")
            _publish(broker.url, 0, 100)
            run("", "backup", file, "--metadata", f"etcd://{old.address}")
            _publish(broker.url, 100, 100)
            broker.kill()
        found = _restore(
            *(file, "--metadata", f"etcd://{new.address}", "--storage", storage, "--data", str(tmp_path / "one"))
        )
        assert found["written"] is True
        with ForkedBroker(tmp_path / "one", *options, "--metadata", f"etcd://{new.address}") as broker:
            _publish(broker.url, 200, 10)
            _check_whole(_values(broker.url), 210)
        again = str(tmp_path / "again")
        run("", "backup", again, "--metadata", f"etcd://{new.address}")
        revisions = [json.loads(Path(each).read_bytes().splitlines()[0])["revision"] for each in (file, again)]
        assert revisions[1] > revisions[0] + 10_000, "clients and manifests see only what is newer"
