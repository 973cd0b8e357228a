"""The decisions of the etcd store that need no server."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from braid.metadata.etcd.client import PAUSE_MAX_S, Login, pause_s
from braid.metadata.etcd.keyspace import Keyspace
from braid.metadata.etcd.outcome import NOT_CONNECTED, CallOutcome, outcome_of
from braid.metadata.etcd.watch import RevisionGroups
from braid.metadata.store import Changes, Delete, Event, Put
from braid.model.errors import InvalidArgument, MetadataCompacted
from braid.model.ids import Revision

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("code", "details", "outcome"),
    [
        (NOT_CONNECTED, "the connection is refused or broken", CallOutcome.NO_EFFECT),
        ("UNAVAILABLE", "etcdserver: no leader", CallOutcome.NO_EFFECT),
        ("RESOURCE_EXHAUSTED", "etcdserver: too many requests", CallOutcome.NO_EFFECT),
        ("UNAVAILABLE", "failed to connect to all addresses", CallOutcome.UNKNOWN),
        ("UNAVAILABLE", "Socket closed", CallOutcome.UNKNOWN),
        ("UNAVAILABLE", "etcdserver: request timed out", CallOutcome.UNKNOWN),
        (
            "UNAVAILABLE",
            "etcdserver: request timed out, possibly due to previous leader failure",
            CallOutcome.UNKNOWN,
        ),
        ("UNAVAILABLE", "etcdserver: leader changed", CallOutcome.UNKNOWN),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", CallOutcome.UNKNOWN),
        ("RESOURCE_EXHAUSTED", "etcdserver: mvcc: database space exceeded", CallOutcome.UNKNOWN),
        ("UNKNOWN", "raft proposal dropped", CallOutcome.UNKNOWN),
        ("INTERNAL", "something new", CallOutcome.UNKNOWN),
        ("UNAUTHENTICATED", "etcdserver: invalid auth token", CallOutcome.TOKEN_REJECTED),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old", CallOutcome.TOKEN_REJECTED),
        ("PERMISSION_DENIED", "etcdserver: permission denied", CallOutcome.FORBIDDEN),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty", CallOutcome.FORBIDDEN),
        ("NOT_FOUND", "etcdserver: requested lease not found", CallOutcome.LEASE_MISSING),
        ("OUT_OF_RANGE", "etcdserver: mvcc: required revision has been compacted", CallOutcome.COMPACTED),
        ("INVALID_ARGUMENT", "etcdserver: request is too large", CallOutcome.REFUSED),
    ],
)
def test_a_write_counts_as_without_effect_only_where_etcd_proves_it(
    code: str, details: str, outcome: CallOutcome
) -> None:
    assert outcome_of(code, details) is outcome


def event(revision: int, key: str = "k") -> Event:
    return Event(key, b"", Revision(revision))


def test_events_of_one_revision_stay_together_across_fragments() -> None:
    groups = RevisionGroups(Revision(4))
    a, b, c, d = event(5, "a"), event(5, "b"), event(6, "c"), event(6, "d")
    assert groups.take([a], unfinished=True) == []
    assert groups.take([b, c], unfinished=True) == [Changes(Revision(5), (a, b))]
    assert groups.take([], unfinished=False) == []  # an answer about progress in between
    assert groups.take([d], unfinished=False) == [Changes(Revision(6), (c, d))]


def test_a_response_of_many_revisions_becomes_as_many_changes() -> None:
    events = [event(5, "a"), event(7, "a"), event(7, "b"), event(9, "a")]
    revisions = [changes.revision for changes in RevisionGroups(Revision(0)).take(events, unfinished=False)]
    assert revisions == [5, 7, 9]


@pytest.mark.parametrize("late", [3, 4])
def test_an_event_of_a_finished_revision_sends_the_reader_to_list_again(late: int) -> None:
    groups = RevisionGroups(Revision(3))
    groups.take([event(4, "a")], unfinished=False)
    with pytest.raises(MetadataCompacted, match="cannot be trusted"):
        groups.take([event(late, "b")], unfinished=False)


def test_the_first_round_over_the_endpoints_does_not_pause_and_later_pauses_are_bounded() -> None:
    rng = random.Random(1)
    assert [pause_s(failures, 3, rng) for failures in range(3)] == [0.0, 0.0, 0.0]
    assert pause_s(1, 1, rng) > 0
    pauses = [pause_s(failures, 3, rng) for failures in range(3, 10_000)]
    assert 0 < min(pauses) < max(pauses) <= PAUSE_MAX_S


def test_a_prefix_does_not_contain_the_keys_of_a_longer_prefix() -> None:
    start, end = Keyspace("/braid").range_of("")
    assert start <= Keyspace("/braid").key("/topics") < end
    assert not start <= Keyspace("/braid2").key("/topics") < end


def test_operations_are_sent_in_order_of_keys() -> None:
    request = Keyspace("/b").txn([], [Put("z", b""), Delete("m"), Put("a", b"")])
    keys = [operation.request_put.key or operation.request_delete_range.key for operation in request.success]
    assert keys == [b"/b/a", b"/b/m", b"/b/z"]


@pytest.mark.parametrize("key_prefix", ["", "/", "//"])
def test_a_key_prefix_needs_a_name(key_prefix: str) -> None:
    with pytest.raises(InvalidArgument, match="has no name"):
        Keyspace(key_prefix)


def test_a_password_does_not_show_in_a_log() -> None:
    assert "secret" not in repr(Login("braid", "secret"))


@pytest.mark.parametrize("missing", ["grpc", "google.protobuf"])
def test_without_the_extra_only_the_etcd_module_fails_and_says_what_to_install(missing: str) -> None:
    script = f"""
import sys
sys.modules[{missing!r}] = None
import braid, braid.metadata, braid.metadata.store, braid.metadata.memory
try:
    import braid.metadata.etcd.store
except ImportError as error:
    sys.stdout.write(str(error))
"""
    answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env={"PYTHONPATH": "src"})
    assert "pip install 'braidmq[etcd]'" in answer.stdout, answer.stderr
    assert missing in answer.stdout
