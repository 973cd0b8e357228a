"""Queues on the command line, against a real broker process."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from braid.sync import connect
from braid.testing.processes import BrokerProcess
from tests.kits.commands import ask, lines, run, started
from tests.kits.waiting import WAIT_S, wait_until

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as broker:
        yield broker.url


@pytest.fixture
def topic(url: str, request: pytest.FixtureRequest) -> str:
    """A topic of its own for each test, with a queue, `q`, and a topic for its dead letters."""
    name = re.sub(r"\W", "-", request.node.name)[:100]
    run(url, "topic", "create", name)
    run(url, "topic", "create", f"{name}-dead")
    policies = ("--ack-timeout", "20s", "--max-deliveries", "3", "--dead-letter-topic", f"{name}-dead")
    assert run(url, "subscription", "create", name, "q", "--kind", "queue", *policies) == (
        f"Created queue subscription q on {name}, from earliest.\n"
    )
    return name


def queue(url: str, topic: str) -> dict[str, Any]:
    found: dict[str, Any] = ask(url, "subscription", "show", topic, "q")["queue"]
    return found


def fail(url: str, topic: str, count: int) -> None:
    """Let so many messages become dead letters."""
    before = queue(url, topic)["deadLettered"]
    with connect(url) as client, client.queue_consumer(topic, "q") as consumer:
        for _ in range(3 * count):
            message = consumer.receive(timeout=WAIT_S)
            assert message is not None
            consumer.nack(message, reason="no stamps")
        wait_until(
            lambda: client.admin.subscription(topic, "q")["queue"]["deadLettered"] == before + count, "all are buried"
        )


def test_a_look_at_a_queue_takes_nothing_away(url: str, topic: str) -> None:
    assert ask(url, "subscription", "peek", topic, "q") == []
    run(url, "produce", topic, "--key-separator", ":", given=b"a:1\nb:2\tx\nc:3\n")
    run(url, "consume", topic, "-s", "q", "--queue", "--count", "1")
    shown = run(url, "subscription", "peek", topic, "q").splitlines()
    assert shown[0].split() == ["SEGMENT", "OFFSET", "PUBLISHED", "KEY", "VALUE"]
    assert [line.split()[-2:] for line in shown[1:]] == [["b", "2\N{REPLACEMENT CHARACTER}x"], ["c", "3"]]
    found = ask(url, "subscription", "peek", topic, "q", "--count", "1")
    assert [(each["key"], each["value"], each["offset"]) for each in found] == [("b", "2\tx", 1)]
    assert (queue(url, topic)["ready"], queue(url, topic)["leased"]) == (2, 0)


def test_a_queue_is_shown_consumed_and_purged(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"1\n2\n3\n4\n5\n6\n")
    shown = run(url, "subscription", "show", topic, "q")
    for line in (
        r"ready +6",
        r"leased +0",
        r"ack timeout +20 s",
        r"consumers +none",
        r"oldest +20\d\d-.* \(\d+s ago\)",
    ):
        assert re.search(f"^{line}$", shown, flags=re.MULTILINE), (line, shown)
    assert re.search(r"^dead letters +after 3 deliveries to \S+-dead; 0 since", shown, flags=re.MULTILINE)
    assert re.search(r"^ +0 +0 +0 +6 +6 +0 +0 +\ds +0$", shown, flags=re.MULTILINE)
    assert re.search(r"^q +queue .* 6 +0$", run(url, "subscription", "list", topic), flags=re.MULTILINE)
    (first,) = [
        json.loads(line) for line in lines(url, "consume", topic, "-s", "q", "--queue", "--count", "1", "--json")
    ]
    assert (first["value"], first["redeliveryCount"]) == ("1", 0)
    rest = [json.loads(line) for line in lines(url, "consume", topic, "-s", "q", "--queue", "--json", "--count", "3")]
    assert [(each["value"], each["redeliveryCount"]) for each in rest] == [("2", 0), ("3", 0), ("4", 0)]
    assert lines(url, "consume", topic)[4:] == [b"5", b"6"], "a look takes nothing away"
    assert queue(url, topic)["ready"] == 2
    assert run(url, "subscription", "skip", topic, "q") == f"Subscription q of {topic} skipped everything.\n"
    assert lines(url, "consume", topic, "-s", "q", "--queue") == []
    run(url, "produce", topic, "--key-separator", ":", given=b"a:7\nb:8\n")
    assert lines(url, "consume", topic, "-s", "q", "--queue", "--key") == [b"a\t7", b"b\t8"]
    assert ask(url, "topic", "stats", topic)["subscriptions"]["q"]["backlog"] == 0


def test_a_queue_is_created_by_its_first_consumer_and_kinds_are_not_mixed(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"1\n")
    assert lines(url, "consume", topic, "-s", "new", "--queue") == [b"1"]
    assert ask(url, "subscription", "show", topic, "new")["kind"] == "queue"
    said = run(url, "consume", topic, "-s", "new", code=1)
    assert said.endswith(
        "is a queue subscription, it cannot be used as a stream one; use another name, or add --queue\n"
    )
    run(url, "subscription", "create", topic, "s")
    assert run(url, "consume", topic, "-s", "s", "--queue", code=1).endswith("or leave --queue out\n")
    said = run(url, "consume", "nothing", "-s", "s", "--queue", code=1)
    assert said == ("braid: topic public/default/nothing does not exist; create it with `braid topic create nothing`\n")
    said = run(
        url, "subscription", "create", topic, "t", "--kind", "queue", "--max-deliveries", "2", "--dead-letter-topic",
        "nowhere", code=1,
    )  # fmt: skip
    assert said == ("braid: there is no topic nowhere for dead letters; create it with `braid topic create nowhere`\n")


def test_a_queue_is_followed_until_a_signal_and_keeps_what_was_not_printed(url: str, topic: str) -> None:
    with started(url, "consume", topic, "-s", "q", "--queue", "--follow", stdout=subprocess.PIPE) as consuming:
        assert consuming.stdout is not None
        for number in range(3):
            run(url, "produce", topic, given=b"%d\n" % number)
            assert consuming.stdout.readline() == b"%d\n" % number
        assert len(ask(url, "subscription", "show", topic, "q")["consumers"]) == 1
        assert "1 connected consumers" in run(url, "subscription", "delete", topic, "q", "--yes", code=1)
        consuming.send_signal(signal.SIGINT)
        assert consuming.wait(WAIT_S) == 0
    assert ask(url, "subscription", "show", topic, "q")["backlog"] == 0
    run(url, "subscription", "delete", topic, "q", "--yes")


def test_messages_may_be_late_or_die(url: str, topic: str) -> None:
    given = [
        {"value": "late", "deliverAfterMs": 60_000},
        {"value": "gone", "ttlMs": 1},
        {"value": "now", "ttlMs": 60_000},
    ]
    run(url, "produce", topic, "--json", given="\n".join(map(json.dumps, given)).encode())
    wait_until(lambda: lines(url, "consume", topic, "-s", "q", "--queue") == [b"now"], "it is delivered")
    assert (queue(url, topic)["delayed"], queue(url, topic)["ready"]) == (1, 0)
    assert lines(url, "consume", topic) == [b"late", b"gone", b"now"], "only queues obey"
    run(url, "topic", "update", topic, "--message-ttl", "90s")
    assert "queues do not deliver what is older than 90s" in run(url, "topic", "show", topic)
    run(url, "topic", "update", topic, "--message-ttl", "off")
    assert "message TTL" not in run(url, "topic", "show", topic)


def test_dead_letters_are_redriven(url: str, topic: str) -> None:
    run(url, "produce", topic, given=b"1\n2\n3\n")
    fail(url, topic, 3)
    dead = f"public/default/{topic}-dead"
    letters = lines(url, "consume", dead)
    assert sorted(letters) == [b"1", b"2", b"3"], "a consumer publishes several at the same time, in any order"
    assert run(url, "subscription", "redrive", topic, "q", "--count", "1") == (
        f"Published 1 dead letter of subscription q to public/default/{topic}.\n"
    )
    assert lines(url, "consume", topic)[3:] == letters[:1], "the oldest dead letter is redriven first"
    assert ask(url, "subscription", "redrive", topic, "q")["redriven"] == 2
    none = f"No more dead letters of subscription q wait in {dead}.\n"
    assert run(url, "subscription", "redrive", topic, "q") == none
    assert lines(url, "consume", topic)[3:] == letters, "each once, in the order of the dead letters"
    again = [json.loads(line) for line in lines(url, "consume", topic, "-s", "q", "--queue", "--json")]
    assert [(each["value"].encode(), each["redeliveryCount"]) for each in again] == [(each, 0) for each in letters]
    assert run(url, "subscription", "redrive", topic, "q", "--to", "nowhere", code=1) == (
        "braid: dead letters cannot go to public/default/nowhere: it does not exist; name another topic\n"
    )
