"""The command line against real broker processes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from braid.cli import main, target
from braid.sync import connect
from braid.testing.processes import BRAID, BrokerProcess
from tests.kits.commands import ask, environment, lines, run, run_to_end, started
from tests.kits.tls_files import make_certificate
from tests.kits.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker.url


@pytest.fixture
def topic(url: str, request: pytest.FixtureRequest) -> str:
    """A topic of its own for each test."""
    name = re.sub(r"\W", "-", request.node.name)[:100]
    run(url, "topic", "create", name)
    return name


# Topics and subscriptions.


def test_statistics_show_groups_of_checkpoint_consumers(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"x\n")
    with connect(url) as client, client.checkpoint_consumer(topic, group="etl", name="one", start="earliest") as reader:
        assert reader.receive(timeout=WAIT_S) is not None
        shown = run(url, "topic", "stats", topic)
        assert re.search(r"^GROUP +SEGMENTS +BACKLOG +CONSUMERS\netl +1 +1 +1$", shown, flags=re.MULTILINE), shown
        reader.checkpoint()
        wait_until(lambda: ask(url, "topic", "stats", topic)["groups"]["etl"]["backlog"] == 0, "the checkpoint counts")
    assert "GROUP" not in run(url, "topic", "stats", topic), "it is gone with its last consumer"


def test_a_topic_from_its_creation_to_its_end(url: str) -> None:
    assert "Created topic public/default/life with 2 segments." in run(
        url, "topic", "create", "life", "--segments", "2"
    )
    assert "exists" in run(url, "topic", "create", "life", code=1)
    assert run(url, "topic", "create", "life", "--if-not-exists") == "Topic public/default/life exists.\n"
    listed = run(url, "topic", "list")
    assert re.search(r"^public/default/life +2 +0 +0 B +0 B +0 B +0 +0$", listed, flags=re.MULTILINE)
    shown = ask(url, "topic", "show", "life")
    assert sorted(shown["segments"]) == ["0", "1"]
    run(url, "produce", "topic://public/default/life", given=b"x\n")
    assert sum(each["records"] for each in ask(url, "topic", "stats", "life")["segments"].values()) == 1
    assert "SEGMENT" in run(url, "topic", "stats", "life")
    assert "durability" in run(url, "topic", "show", "life")
    assert re.search(r"^ +1  8000-ffff  ACTIVE  broker-1", run(url, "topic", "show", "life"), flags=re.MULTILINE)
    assert "Deleted topic" in run(url, "topic", "delete", "life", "--yes")
    assert "public/default/life" in run(url, "topic", "show", "life", code=1)
    assert "public/default/life" not in run(url, "topic", "list")


def test_retention_and_durability_are_policies_of_the_topic(url: str) -> None:
    options = ("--durability", "memory", "--retention", "7d", "--retention-bytes", "10GiB")
    run(url, "topic", "create", "policies", *options)
    policies = ask(url, "topic", "show", "policies")["policies"]
    assert (policies["durability"], policies["retentionMs"]) == ("memory", 7 * 86_400_000)
    assert policies["retentionBytes"] == 10 << 30
    assert "7d, 10.0 GiB per segment" in run(url, "topic", "show", "policies")
    changes = ("--durability", "fsync", "--retention", "off", "--retention-bytes", "5GiB")
    assert run(url, "topic", "update", "policies", *changes) == "Changed topic public/default/policies.\n"
    assert "5.0 GiB per segment" in run(url, "topic", "show", "policies")
    policies = ask(url, "topic", "show", "policies")["policies"]
    assert (policies["durability"], policies["retentionMs"]) == ("fsync", None)
    assert "at least one policy" in run(url, "topic", "update", "policies", code=2)
    run(url, "topic", "update", "policies", "--max-batch-records", "5000")
    assert "up to 64.0 MiB decompressed, 5,000 records" in run(url, "topic", "show", "policies")
    run(url, "produce", "policies", given=b"x\n")


def test_a_subscription_from_its_creation_to_its_end(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"1\n2\n3\n4\n")
    run(url, "subscription", "create", topic, "s", "--from", "earliest")
    assert re.search(r"^s +stream .* 4 +0$", run(url, "subscription", "list", topic), flags=re.MULTILINE)
    assert ask(url, "subscription", "show", topic, "s")["backlog"] == 4
    run(url, "subscription", "skip", topic, "s", "--segment", "0", "--count", "1")
    assert lines(url, "consume", topic, "-s", "s", "--count", "1") == [b"2"]
    run(url, "subscription", "seek", topic, "s", "--offset", "0:3")
    assert lines(url, "consume", topic, "-s", "s") == [b"4"]
    run(url, "subscription", "seek", topic, "s", "--to", "earliest")
    assert ask(url, "subscription", "show", topic, "s")["segments"]["0"]["offset"] == 0
    run(url, "subscription", "seek", topic, "s", "--timestamp", "2100-01-01T00:00:00Z")
    assert ask(url, "subscription", "show", topic, "s")["backlog"] == 0
    run(url, "subscription", "seek", topic, "s", "--timestamp", "0")
    assert "OFFSET" in run(url, "subscription", "show", topic, "s")
    run(url, "subscription", "skip", topic, "s")
    assert lines(url, "consume", topic, "-s", "s") == []
    run(url, "subscription", "delete", topic, "s", "--yes")
    assert ask(url, "subscription", "list", topic) == []
    assert "s" in run(url, "subscription", "show", topic, "s", code=1)


def test_brokers_are_listed(url: str) -> None:
    address = url.removeprefix("braid://")
    assert re.search(rf"^broker-1 +active +{address} ", run(url, "broker", "list"), flags=re.MULTILINE)
    assert [each["id"] for each in ask(url, "broker", "list")] == ["broker-1"]


def test_the_replicas_of_a_topic_are_shown_and_checked(url: str, topic: str) -> None:
    shown = run(url, "topic", "replicas", topic)
    assert re.search(r"^SEGMENT +CONFIRM +REPLICA +STATE +END +BEHIND$", shown, flags=re.MULTILINE)
    assert re.search(r"^ +0 +1 of 1 +broker-1 +owner +- +-$", shown, flags=re.MULTILINE)
    assert ask(url, "topic", "replicas", topic, "--set", "1")["writeQuorum"] == 1
    for command in (("replicas", topic, "--set", "3"), ("update", topic, "--replicas", "3", "--confirm", "2")):
        said = run(url, "topic", *command, code=2)
        assert re.search("2 replicas confirm a record, and 1 broker is active; start more", said)
        assert said.count("\n") == 1
    assert "leave the durability out" in run(
        url, "topic", "update", topic, "--replicas", "3", "--durability", "fsync", code=2
    )


def test_a_topic_is_split_merged_and_repartitioned_and_its_braid_is_drawn(url: str, topic: str) -> None:
    assert re.fullmatch(r"0 → 1, 2 in [\d.]+ s\.\n", run(url, "topic", "split", topic, "0", "--at", "2000"))
    assert re.fullmatch(r"1, 2 → 3 in [\d.]+ s\.\n", run(url, "topic", "merge", topic, "2", "1"))
    done = ask(url, "topic", "repartition", topic, "4")
    assert (done["parents"], done["children"]) == ([3], [4, 5, 6, 7])
    again = ask(url, "topic", "repartition", topic, "4")
    assert (done["doneBefore"], again["doneBefore"]) == (False, True)
    assert {**again, "seconds": 0, "doneBefore": False} == {**done, "seconds": 0}
    repeated = run(url, "topic", "split", topic, "0", "--at", "2000")
    assert repeated == "0 → 1, 2: the layout has this change already.\n"
    drawn = run(url, "topic", "layout", topic).splitlines()
    assert drawn[1].split() == ["0", "│0", "│"]
    assert [line.split()[1:3] for line in drawn if "ACTIVE" in line] == [
        ["0000-3fff", "ACTIVE"],
        ["4000-7fff", "ACTIVE"],
        ["8000-bfff", "ACTIVE"],
        ["c000-ffff", "ACTIVE"],
    ]
    assert "segment 0 is sealed" in run(url, "topic", "split", topic, "0", code=1)
    assert "no neighbours" in run(url, "topic", "merge", topic, "4", "6", code=1)
    assert "there is nothing to abort" in run(url, "topic", "abort", topic, code=1)


def test_auto_scaling_is_set_shown_tried_and_removed(url: str, topic: str) -> None:
    scale = ("topic", "autoscale")
    assert run(url, *scale, "show", topic) == f"The topic public/default/{topic} has no settings of its own.\n"
    run(url, *scale, "set", topic, "--on", "--max-segments", "16")
    said = run(
        url, *scale, "set", topic, "--merge-window", "1h", "--split-bytes-in", "1MiB", "--merge-bytes-in", "1KiB"
    )
    assert said == f"Changed the auto-scaling of topic public/default/{topic}.\n"
    wanted = {"enabled": True, "maxSegments": 16, "mergeWindowSeconds": 3_600}
    wanted |= {"splitBytesRateInThreshold": 1 << 20, "mergeBytesRateInThreshold": 1 << 10}
    assert ask(url, *scale, "show", topic) == wanted, "what was not given stays"
    assert re.search(r"^maxSegments +16$", run(url, *scale, "show", topic), re.MULTILINE)
    run(url, *scale, "set", "--namespace", "public/other", "--off")
    assert ask(url, *scale, "show", "--namespace", "public/other") == {"enabled": False}
    tried = run(url, *scale, "dry-run", topic)
    assert re.search(r"^auto-scaling +on$", tried, re.MULTILINE)
    assert re.search(r"^would run +-$", tried, re.MULTILINE)
    assert ask(url, *scale, "dry-run", topic)["policy"]["maxSegments"] == 16
    assert "min_segments is 17, above max_segments" in run(url, *scale, "set", topic, "--min-segments", "17", code=2)
    run(url, *scale, "delete", topic)
    assert ask(url, *scale, "show", topic) == {}
    assert "name a topic, or a namespace" in run(url, *scale, "show", code=2)
    assert "at least one setting" in run(url, *scale, "set", topic, code=2)


def test_a_broker_that_is_alone_has_nowhere_to_move_to(url: str, topic: str) -> None:
    said = run(url, "topic", "move", topic, "--segment", "0", "--to", "broker-2", code=1)
    assert "broker broker-2 cannot be given segments: it is not there; the active brokers are: broker-1" in said
    assert "no other broker is active" in run(url, "topic", "unload", topic, code=1)
    assert re.search(
        r"^ +0 +broker-1 +broker-1 +1 +was there$", run(url, "topic", "move", topic, "--to", "broker-1"), re.MULTILINE
    )
    assert "waits for an owner that is gone" in run(url, "topic", "recover", topic, code=1)
    assert "Nothing moves." in run(url, "broker", "balance", "--dry-run")


def test_a_broker_is_drained_and_activated(url: str, topic: str) -> None:
    assert "is draining" in run(url, "broker", "drain", "broker-1", "--no-wait")
    assert [each["state"] for each in ask(url, "broker", "list")] == ["draining"]
    assert run(url, "broker", "activate", "broker-1") == "Broker broker-1 is active.\n"
    assert "there is no broker broker-7; the brokers are broker-1" in run(url, "broker", "drain", "broker-7", code=1)


def test_without_a_broker_the_error_says_what_was_tried(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(target, "CONNECT_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert main.run(["--url", f"braid://127.0.0.1:{port}", "topic", "list"]) == 1
    said = capfd.readouterr().err
    assert f"127.0.0.1:{port} cannot be reached" in said
    assert said.endswith("; start it, or name another by --url\n")
    assert said.count("\n") == 1


def test_a_broker_without_tls_is_not_said_to_be_down(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "CONNECT_S", 0.5)
    certificate, _ = make_certificate(tmp_path)
    said = run(url, "topic", "list", "--tls-ca", str(certificate), code=1)
    assert "does the broker speak TLS on this port? If not, leave out --tls-ca" in said
    assert "start it" not in said


# Producing and consuming.


def test_lines_come_out_as_they_went_in(url: str, topic: str, tmp_path: Path) -> None:
    given = b"plain\n\ncaf\xc3\xa9\n\xff\x00\xfe\r\n" + b"x" * 100_000 + b"\nwithout a newline at the end"
    run(url, "produce", topic, given=given)
    assert run_to_end(url, "consume", topic, "-s", "s").stdout == given + b"\n"
    with open(tmp_path / "file", "wb") as file:
        subprocess.run([*BRAID, "consume", topic, "-s", "to-file"], stdout=file, env=environment(url), check=True)
    assert (tmp_path / "file").read_bytes() == given + b"\n"


def test_keys_travel_and_choose_the_segment(url: str) -> None:
    run(url, "topic", "create", "keyed", "--segments", "4")
    given = [f"key-{number % 10}\t{number}" for number in range(1_000)]
    run(url, "produce", "keyed", "--key-separator", r"\t", given="\n".join(given).encode())
    found = [line.decode() for line in lines(url, "consume", "keyed", "-s", "s", "--key-separator", r"\t")]
    assert sorted(found) == sorted(given)
    for key in range(10):
        assert [line for line in found if line.startswith(f"key-{key}\t")] == given[key::10]
    records = [json.loads(line) for line in lines(url, "consume", "keyed", "-s", "json", "--json")]
    segments = {key: {record["segment"] for record in records if record["key"] == key} for key in ("key-0", "key-1")}
    assert [len(each) for each in segments.values()] == [1, 1]
    assert {"key", "value", "timestamp", "segment", "offset", "headers"} == set(records[0])


def test_a_topic_that_was_split_and_merged_is_looked_at_and_consumed_in_order(url: str, topic: str) -> None:
    given: list[bytes] = []

    def produce() -> None:
        some = [b"key-%d:%d" % (number % 5, number) for number in range(len(given), len(given) + 50)]
        run(url, "produce", topic, "--key-separator", ":", given=b"\n".join(some))
        given.extend(some)

    def check(*command: str) -> None:
        found = lines(url, *command, "--key-separator", ":")
        for key in range(5):
            assert [line for line in found if line.startswith(b"key-%d:" % key)] == given[key::5]

    produce()
    run(url, "topic", "split", topic, "0")
    produce()
    run(url, "topic", "merge", topic, "1", "2")
    produce()
    check("consume", topic)
    check("consume", topic, "--from", "-1h")
    check("consume", topic, "-s", "s")
    assert run(url, "subscription", "show", topic, "s").count("(drained)") == 3
    for place in (("--to", "earliest"), ("--timestamp", "0")):
        run(url, "subscription", "seek", topic, "s", *place)
        assert "not consumed what is sealed: segment 0, 1, 2." in run(url, "subscription", "list", topic)
        check("consume", topic, "-s", "s")
    run(url, "subscription", "seek", topic, "s", "--offset", "0:0")
    run(url, "subscription", "skip", topic, "s")
    assert ask(url, "subscription", "show", topic, "s")["undrained"] == []


def test_a_line_without_its_separator_is_named(url: str, topic: str) -> None:
    said = run(url, "produce", topic, "--key-separator", ":", given=b"a:1\nb:2\nc\n", code=1)
    assert "line 3 has no key" in said


def test_a_look_leaves_no_subscription_and_begins_where_it_is_told(url: str) -> None:
    run(url, "topic", "create", "looked-at", "--segments", "2")
    old = b'{"value": "old", "key": "a", "timestamp": "2020-01-01T00:00:00Z"}\n'
    run(url, "produce", "looked-at", "--json", given=old)
    run(url, "produce", "looked-at", "-H", "trace=a1", "--key-separator", ":", given=b"a:1\na:2\na:3\nb:4\n")
    look = ("consume", "looked-at")
    assert sorted(lines(url, *look)) == [b"1", b"2", b"3", b"4", b"old"]
    assert sorted(lines(url, *look)) == [b"1", b"2", b"3", b"4", b"old"], "the first look changed nothing"
    assert sorted(lines(url, *look, "--from", "-1h")) == [b"1", b"2", b"3", b"4"]
    assert lines(url, *look, "--from", "latest") == []
    records = [json.loads(line) for line in lines(url, *look, "--json")]
    (segment,) = {record["segment"] for record in records if record["key"] == "a"}
    there = (*look, "--segment", str(segment))
    assert lines(url, *there, "--from", "1", "--count", "2") == [b"1", b"2"]
    assert lines(url, *there, "--from", "-1", "--headers", "--key") == [b"trace=a1\ta\t3"]
    assert ask(url, "subscription", "list", "looked-at") == []
    copied = b"".join(line + b"\n" for line in lines(url, *there, "--json"))
    run(url, "topic", "create", "copy")
    assert json.loads(run(url, "produce", "copy", "--json", given=copied))["records"] == 4
    copies = [json.loads(line) for line in lines(url, "consume", "copy", "--json")]
    assert copies == [record | {"segment": 0} for record in records if record["segment"] == segment]
    assert "looked-at has no segment 7; it has 0, 1" in run(url, *look, "--segment", "7", code=1)
    assert "`braid subscription seek`" in run(url, *look, "-s", "s", "--from", "-1h", code=2)


def test_producing_to_a_topic_that_does_not_exist_says_how_to_create_it(url: str) -> None:
    said = run(url, "produce", "nowhere", given=b"x\n", code=1)
    assert "nowhere does not exist; create it with `braid topic create nowhere`" in said
    for options in ((), ("-s", "s")):
        said = run(url, "consume", "nowhere", *options, code=1)
        assert "public/default/nowhere does not exist; create it with `braid topic create nowhere`" in said


def test_a_summary_is_said_when_asked_for(url: str, topic: str) -> None:
    quiet = run_to_end(url, "produce", topic, given=b"a\nb\n")
    assert (quiet.returncode, quiet.stdout, quiet.stderr) == (0, b"", b"")
    said = run_to_end(url, "produce", topic, "-v", given=b"a\nb\n")
    assert said.returncode == 0
    assert said.stderr.startswith(b"2 records, 2 B in ")
    assert json.loads(run(url, "produce", topic, "--json", given=b'{"value": "abc"}\n'))["records"] == 1


def test_a_line_is_published_before_the_input_ends(url: str, topic: str) -> None:
    with (
        started(url, "produce", topic, stdin=subprocess.PIPE) as producer,
        started(url, "consume", topic, "-s", "s", "--follow", stdout=subprocess.PIPE) as consumer,
    ):
        assert producer.stdin is not None
        assert consumer.stdout is not None
        for number in range(3):
            producer.stdin.write(f"line {number}\n".encode())
            producer.stdin.flush()
            assert consumer.stdout.readline() == f"line {number}\n".encode()
        producer.stdin.close()
        assert producer.wait(WAIT_S) == 0
        consumer.send_signal(signal.SIGINT)
        assert consumer.wait(WAIT_S) == 0
    assert lines(url, "consume", topic, "-s", "s") == []


def test_an_interrupted_producer_has_confirmed_what_it_sent(url: str, topic: str) -> None:
    with started(url, "produce", topic, "-v", stdin=subprocess.PIPE, stderr=subprocess.PIPE) as producer:
        assert producer.stdin is not None
        assert producer.stderr is not None
        producer.stdin.write(b"kept\n")
        producer.stdin.flush()
        wait_until(lambda: ask(url, "topic", "stats", topic)["segments"]["0"]["endOffset"] == 1, "a record is stored")
        producer.send_signal(signal.SIGINT)
        assert producer.wait(WAIT_S) == 130
        assert producer.stderr.read().startswith(b"1 record, 4 B")


def test_the_rate_is_kept(url: str, topic: str) -> None:
    began = time.monotonic()
    run(url, "produce", topic, "--rate", "200", given=b"x\n" * 150)
    assert time.monotonic() - began > 150 / 200 - 0.1
    assert ask(url, "topic", "stats", topic)["segments"]["0"]["endOffset"] == 150


def numbered(count: int) -> list[bytes]:
    return [b"%09d" % number for number in range(count)]


def test_a_count_is_exact_and_the_next_run_continues_behind_it(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"\n".join(numbered(1_000)))
    assert lines(url, "consume", topic, "-s", "s", "--count", "300") == numbered(1_000)[:300]
    assert lines(url, "consume", topic, "-s", "s", "--count", "1") == numbered(1_000)[300:301]
    assert lines(url, "consume", topic, "-s", "s") == numbered(1_000)[301:]


def test_what_the_reader_of_a_pipe_did_not_take_is_not_acked(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"\n".join(numbered(200_000)))
    with started(url, "consume", topic, "-s", "s", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as consumer:
        assert consumer.stdout is not None
        assert consumer.stderr is not None
        taken = b""
        while len(taken) < 1_005:  # a hundred lines and a half
            taken += os.read(consumer.stdout.fileno(), 1_005 - len(taken))
        consumer.stdout.close()
        assert consumer.wait(WAIT_S) == 0
        assert consumer.stderr.read() == b""
    assert ask(url, "subscription", "show", topic, "s")["segments"]["0"]["offset"] == 100
    assert lines(url, "consume", topic, "-s", "s") == numbered(200_000)[100:]


def test_head_ends_a_consumer_that_has_nothing_more_to_print(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"\n".join(numbered(5)))
    command = f"{' '.join(BRAID)} consume {topic} -s s --follow | head -3"
    done = subprocess.run(command, shell=True, capture_output=True, env=environment(url), timeout=WAIT_S)
    assert (done.stdout.splitlines(), done.stderr) == (numbered(3), b"")


@pytest.mark.parametrize(("interrupted", "code"), [(True, 130), (False, 1)])
def test_a_consumer_whose_broker_is_gone_ends_as_soon_as_nobody_wants_more(
    tmp_path: Path, interrupted: bool, code: int
) -> None:
    """By Ctrl-C, or because the reader of its pipe has gone. Its client would try for half a minute to store acks."""
    with BrokerProcess(tmp_path / "data") as broker:
        run(broker.url, "topic", "create", "orders")
        run(broker.url, "produce", "orders", given=b"a\nb\n")
        arguments = ("consume", "orders", "-s", "s", "--follow")
        with started(broker.url, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as consumer:
            assert consumer.stdout is not None
            assert consumer.stderr is not None
            assert [consumer.stdout.readline() for _ in range(2)] == [b"a\n", b"b\n"]
            broker.kill()
            assert b"joins again" in consumer.stderr.readline()
            if interrupted:
                consumer.send_signal(signal.SIGINT)
            else:
                consumer.stdout.close()
            assert consumer.wait(15) == code
            assert b"records that were printed may come again" in consumer.stderr.read()


def test_without_follow_the_end_is_where_the_topic_ended_at_the_start(url: str) -> None:
    run(url, "topic", "create", "ends", "--segments", "8")
    assert lines(url, "consume", "ends", "-s", "s") == []
    run(url, "produce", "ends", "--key-separator", ":", given=b"a:1\n")
    assert lines(url, "consume", "ends", "-s", "s") == [b"1"]
    assert lines(url, "consume", "ends", "-s", "s") == []
    assert lines(url, "consume", "ends", "-s", "new", "--from", "latest") == []
    assert lines(url, "consume", "ends", "-s", "other") == [b"1"]


def test_a_consumer_without_a_segment_is_named(url: str, topic: str) -> None:
    arguments = ("consume", topic, "-s", "s", "--follow")
    run(url, "subscription", "create", topic, "s")
    with started(url, *arguments) as first, started(url, *arguments) as second:
        idle = "Consumers without a segment: consumer-"
        wait_until(lambda: idle in run(url, "subscription", "show", topic, "s"), "one of two has the segment")
        run(url, "topic", "split", topic, "0")
        wait_until(lambda: "without a segment" not in run(url, "subscription", "show", topic, "s"), "a split helps")
        for consumer in (first, second):
            consumer.send_signal(signal.SIGINT)
            assert consumer.wait(WAIT_S) == 0


def test_following_a_segment_goes_on_with_its_children_and_no_others(url: str) -> None:
    run(url, "topic", "create", "followed", "--segments", "2")
    keys = [b"%d" % number for number in range(40)]

    def produce(word: bytes) -> None:
        run(
            url,
            "produce",
            "followed",
            "--key-separator",
            ":",
            given=b"".join(key + b":" + word + b"\n" for key in keys),
        )

    with started(url, "consume", "followed", "--segment", "0", "--follow", "--json", stdout=subprocess.PIPE) as looking:
        assert looking.stdout is not None
        produce(b"before")
        before = {
            json.loads(looking.stdout.readline())["key"] for _ in lines(url, "consume", "followed", "--segment", "0")
        }
        run(url, "topic", "split", "followed", "1")
        run(url, "topic", "split", "followed", "0")
        produce(b"after")
        after = [json.loads(looking.stdout.readline()) for _ in before]
        assert {each["key"] for each in after} == before
        assert {each["segment"] for each in after} == {4, 5}
        looking.send_signal(signal.SIGINT)
        assert looking.wait(WAIT_S) == 0
        assert looking.stdout.read() == b"", "no record of other segments"


def test_two_consumers_share_a_subscription_and_both_end(url: str, tmp_path: Path) -> None:
    run(url, "topic", "create", "shared", "--segments", "4")
    given = [b"%d:%d" % (number, number) for number in range(20_000)]
    run(url, "subscription", "create", "shared", "s", "--from", "earliest")
    run(url, "produce", "shared", "--key-separator", ":", given=b"\n".join(given))
    # Into files: in pipes each would wait until somebody reads what the other one printed.
    outputs = [tmp_path / "first", tmp_path / "second"]
    with open(outputs[0], "wb") as one, open(outputs[1], "wb") as two:
        arguments = ("consume", "shared", "-s", "s")
        with started(url, *arguments, stdout=one) as first, started(url, *arguments, stdout=two) as second:
            assert (first.wait(WAIT_S), second.wait(WAIT_S)) == (0, 0)
    found = [output.read_bytes().splitlines() for output in outputs]
    assert set(found[0]) | set(found[1]) == {line.partition(b":")[2] for line in given}
    assert ask(url, "subscription", "show", "shared", "s")["backlog"] == 0
