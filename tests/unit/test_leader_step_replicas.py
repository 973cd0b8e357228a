"""What the cluster leader decides about segments with replicas, as tables of states and decisions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from braid.cluster.ownership.leader_step import CHANGES_AT_ONCE, Decision, decide, is_lost, waiting
from braid.cluster.snapshot import Placed, Snapshot
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.ownership import Ownership, OwnershipState, ReplicaChange
from braid.model.topic import Durability, OwnerLoss, TopicPolicies
from tests.kits.leader import applied, record, snapshot_of, unable

NOW = 10_000.0
ABC, ABD = ("a", "b", "c"), ("a", "b", "d")
FOUR, FIVE = ("a", "b", "c", "d"), ("a", "b", "c", "d", "e")


def policies(replicas: int = 3, write_quorum: int = 2, **more: Any) -> TopicPolicies:
    durability = Durability.REPLICATED if replicas > 1 else Durability.FSYNC
    return TopicPolicies(durability=durability, replicas=replicas, write_quorum=write_quorum, **more)


THREE = policies()
CONTINUE = policies(on_owner_loss=OwnerLoss.CONTINUE, owner_loss_after_ms=30_000)


def replicated(
    state: str, owner: str = "a", replicas: tuple[str, ...] = ABC, quorum: int = 2, **more: Any
) -> Ownership:
    return record(state, owner, replicas=replicas, write_quorum=quorum, **more)


def decided(state: Ownership | None, **cluster: Any) -> Decision | None:
    """The decision about one segment."""
    decisions = decide(snapshot_of([state], **{"policies": THREE, **cluster}), NOW)
    assert len(decisions) <= 1
    return decisions[0] if decisions else None


def gone(**seconds_ago: float) -> dict[str, float]:
    return {broker: NOW - ago for broker, ago in seconds_ago.items()}


# Placing and assigning.


@pytest.mark.parametrize(
    ("state", "cluster", "owner", "replicas"),
    [
        # New.
        (None, {}, "a", ABC),
        (None, {"live": FIVE}, "a", ABC),
        (None, {"live": FIVE, "drained": ("b",)}, "a", ("a", "c", "d")),
        (None, {"live": ("a", "b")}, "a", ("a", "b")),
        (None, {"live": FIVE, "racks": {"a": "x", "b": "x", "c": "x", "d": "y"}}, "a", ("a", "d", "e")),
        (None, {"policies": TopicPolicies()}, "a", ()),
        (None, {"policies": policies(3, 1), "live": ("c",)}, "c", ("c",)),
        # Handed over: the target, then the old ones, then others.
        (replicated("SEALED", to="b"), {}, "b", ("b", "a", "c")),
        (replicated("SEALED", to="d"), {"live": FOUR}, "d", ("d", "a", "b")),
        (replicated("SEALED", to="d"), {"live": FOUR, "drained": ("a",)}, "d", ("d", "b", "c")),
        (replicated("SEALED", to="b"), {"live": FIVE, "drained": ("a", "c")}, "b", ("b", "d", "e")),
        # A broker that restarts keeps its place if no other can take it.
        (replicated("SEALED", to=""), {"stopping": ("a",)}, "b", ("b", "c", "a")),
        (replicated("SEALED", to=""), {"live": ("b", "c"), "gone_since": gone(a=599)}, "b", ("b", "c", "a")),
        (replicated("SEALED", to=""), {"live": ("b", "c"), "gone_since": gone(a=600)}, "b", ("b", "c")),
        (replicated("SEALED", to=""), {"live": FOUR, "stopping": ("a",)}, "b", ("b", "c", "d")),
        # A broker that drains stays only if the others are too few.
        (replicated("SEALED", to="b"), {"drained": ("a", "c")}, "b", ("b", "a")),
        (replicated("SEALED", to="b"), {"drained": ("a",)}, "b", ("b", "c")),
        # The topic wants another number now.
        (replicated("SEALED", to="b"), {"policies": TopicPolicies()}, "b", ()),
        (record("SEALED", "a", to="b"), {}, "b", ("b", "a", "c")),
        (replicated("SEALED", to="b"), {"live": FIVE, "policies": policies(5, 3)}, "b", ("b", "a", "c", "d", "e")),
        # Not served yet, and its owner went.
        (replicated("ASSIGNED", clean=True), {"live": ("b", "c"), "gone_since": gone(a=1)}, "b", ("b", "c", "a")),
        (replicated("ASSIGNED", clean=True, failures=unable("a")), {}, "b", ("b", "a", "c")),
        # A follower takes over before others do, also if they are idle.
        (replicated("SEALED", "c", ("c", "d"), to=""), {"live": FIVE, "policies": policies(2)}, "d", ("d", "c")),
    ],
)  # fmt: skip
def test_a_segment_is_assigned_with_the_replicas_that_it_is_to_have(
    state: Ownership | None, cluster: dict[str, Any], owner: str, replicas: tuple[str, ...]
) -> None:
    found = decided(state, **cluster)
    assert found is not None
    wanted = cluster.get("policies", THREE).write_quorum
    assert (found.record.state, found.record.owner) == (OwnershipState.ASSIGNED, owner)
    assert (found.record.replicas, found.record.write_quorum) == (replicas, wanted)


@pytest.mark.parametrize(
    "state", [None, replicated("SEALED", to="b"), replicated("ASSIGNED", "d", ("d", "e"), clean=True)]
)
def test_a_segment_waits_until_enough_brokers_can_confirm(state: Ownership | None) -> None:
    cluster: dict[str, Any] = {"live": ("b",), "policies": THREE, "gone_since": gone(a=900, c=900, d=900, e=900)}
    assert decided(state, **cluster) is None
    (found,) = waiting(snapshot_of([state], **cluster))
    assert found.reason == "2 replicas must confirm a record, and 1 brokers are active"
    assert waiting(snapshot_of([state], **{**cluster, "live": ("b", "c")})) == []


def test_the_followers_of_many_segments_are_spread() -> None:
    decisions = decide(snapshot_of([None] * 60, live=FIVE, policies=THREE), NOW)
    for broker in FIVE:
        assert sum(broker == each.record.owner for each in decisions) == 12
        assert sum(broker in each.record.replicas for each in decisions) in (35, 36, 37)


# Fail-over.


@pytest.mark.parametrize("state", ["SERVING", "DRAINING", "ASSIGNED"])
@pytest.mark.parametrize(
    ("quorum", "live", "votes"),
    [(2, "bc", True), (2, "b", False), (2, "", False), (3, "bc", False), (3, "", False), (1, "bc", False)],
)
def test_replicas_vote_when_the_owner_is_gone_and_enough_of_them_are_there(
    state: str, quorum: int, live: str, votes: bool
) -> None:
    lost = replicated(state, quorum=quorum)
    found = decided(lost, live=(*live, "d"), policies=policies(3, quorum), gone_since=gone(a=1, b=1, c=1))
    if not votes:
        assert found is None
        return
    assert found is not None
    assert (found.reason.value, found.record) == ("recovering", lost.recovering())
    assert found.gone == ("a",), "an owner that is back continues without a vote"


@pytest.mark.parametrize(
    ("failures", "live", "votes"),
    [
        ("a", "abc", True),
        ("a", "ab", True),
        ("ab", "abc", True),
        ("ab", "ab", False),
        ("a", "a", False),
        ("b", "abc", False),
    ],
)
def test_replicas_vote_when_the_owner_cannot_open_it_and_another_one_may(failures: str, live: str, votes: bool) -> None:
    found = decided(
        replicated("ASSIGNED", failures=unable(*failures)), live=tuple(live), gone_since=gone(a=1, b=1, c=1)
    )
    assert (found is not None and found.record.state is OwnershipState.RECOVERING) == votes
    if found is not None:
        assert found.gone == ()


@pytest.mark.parametrize(
    ("live", "position_epoch", "votes"),
    [("abc", 1, True), ("ab", 1, False), ("ab", 2, True)],
    ids=["the others suffice", "the vote would find it again", "a move has named it"],
)
def test_no_second_vote_is_held_that_finds_the_same_owner(live: str, position_epoch: int, votes: bool) -> None:
    position = LogPosition(epoch=Epoch(position_epoch), end=Offset(5))
    failed = replicated("ASSIGNED", failures=unable("a"), elected=position)
    cluster: dict[str, Any] = {"live": tuple(live), "gone_since": gone(c=1)}
    assert (decided(failed, **cluster) is not None) == votes
    (found,) = waiting(snapshot_of([failed], policies=THREE, **cluster))
    assert found.reason.startswith("its owner a cannot open it (")


def test_an_owner_that_was_elected_and_went_is_elected_anew() -> None:
    elected = replicated("RECOVERING").voted("b", LogPosition(epoch=Epoch(2), end=Offset(5)))
    found = decided(elected, live=("a", "c"), gone_since=gone(b=1))
    assert found is not None
    assert found.record == elected.recovering()
    assert decided(elected) is None


def test_a_segment_that_waits_for_votes_says_whose_return_would_help() -> None:
    (found,) = waiting(snapshot_of([replicated("SERVING")], live=("b",), policies=THREE, gone_since=gone(a=9, c=5)))
    assert (found.brokers, found.since, found.until) == (("a", "c"), NOW - 9, None)
    assert found.reason == "2 of its replicas a, b, c must vote, and a and c are down"
    (found,) = waiting(snapshot_of([replicated("RECOVERING")], live=ABC, policies=THREE))
    assert (found.brokers, found.reason) == ((), "its owner a is lost, and 2 of its replicas a, b, c must vote")


# Losses.

TWO_GONE: dict[str, Any] = {"live": ("b", "d"), "gone_since": gone(a=60, c=30), "policies": CONTINUE}
NOT_LONG_ENOUGH = {**TWO_GONE, "gone_since": gone(a=60, c=29)}
ALL_GONE = {**TWO_GONE, "live": ("d", "e")} | {"gone_since": gone(a=60, b=30, c=31)}


@pytest.mark.parametrize("state", ["SERVING", "DRAINING", "ASSIGNED"])
def test_a_policy_lets_fewer_vote_after_its_time(state: str) -> None:
    lost = replicated(state)
    assert decided(lost, **NOT_LONG_ENOUGH) is None
    assert decided(lost, **{**TWO_GONE, "policies": THREE}) is None, "it waits"
    found = decided(lost, **TWO_GONE)
    assert found is not None
    assert found.record == lost.recovering(accept_loss=True, given_up=("a", "c"))
    assert (found.reason.value, found.gone) == ("continued", ("a", "c"))


def test_a_vote_that_runs_goes_on_with_fewer_in_its_epoch() -> None:
    voting = replicated("RECOVERING")
    assert decided(voting, **NOT_LONG_ENOUGH) is None
    found = decided(voting, **TWO_GONE)
    assert found is not None
    assert found.record == voting.losing(("a", "c"))
    assert found.gone == ("a", "c"), "a replica that is back has a vote"
    assert decided(found.record, **TWO_GONE) is None, "deciding again does nothing"


@pytest.mark.parametrize("state", ["SERVING", "RECOVERING"])
def test_a_segment_whose_replicas_are_all_gone_goes_to_others(state: str) -> None:
    found = decided(replicated(state), **ALL_GONE)
    assert found is not None
    assert (found.record.state, found.record.owner, found.record.epoch) == (OwnershipState.ASSIGNED, "d", 4)
    assert set(found.record.replicas) >= {"d", "e"}
    assert (found.record.accept_loss, found.record.given_up, found.gone) == (True, ABC, ABC)


def test_replicas_that_were_given_up_and_are_back_vote_too() -> None:
    losing = replicated("RECOVERING").losing(("a", "c"))
    elected = losing.voted("b", LogPosition(), accept_loss=True, given_up=losing.given_up)
    for state in (losing, elected):
        assert decided(state, live=("b",), gone_since=gone(a=60, c=30)) is None
        found = decided(state, live=("b", "c", "d"), gone_since=gone(a=60))
        assert found is not None
        assert (found.reason.value, found.record, found.gone) == ("returned", state.recovering(), ())


@pytest.mark.parametrize("state", ["SERVING", "DRAINING", "RECOVERING"])
def test_replicas_that_were_all_given_up_vote_when_one_of_them_is_back(state: str) -> None:
    lost = replicated(state)
    given_up = decided(lost, **ALL_GONE)
    assert given_up is not None
    assert given_up.record.replicas == ("d", "e"), "the others keep what they have"
    reassigned = decided(given_up.record, live=("e", "f"), gone_since=gone(a=60, b=30, c=31, d=1))
    assert reassigned is not None
    assert (reassigned.record.owner, reassigned.record.replicas) == ("e", ("e", "f", "d"))
    assert decided(given_up.record, live=("d", "e", "f"), gone_since=gone(a=60, b=30, c=31)) is None
    for record_ in (given_up.record, reassigned.record, given_up.record.unopened("no room", lasting=False)):
        found = decided(record_, live=("c", "d", "e", "f"), gone_since=gone(a=60, b=30))
        assert found is not None
        assert (found.reason.value, found.gone) == ("returned", ())
        new = found.record
        assert (new.state, new.owner, new.replicas, new.write_quorum) == (OwnershipState.RECOVERING, "a", ABC, 2)
        assert (new.epoch, new.accept_loss, new.given_up) == (record_.epoch + 1, False, ())
        assert new.before is None


def test_a_loss_is_final_when_a_replica_that_was_given_up_must_get_a_new_copy() -> None:
    """A vote would take its new copy for the old one. So the new owner waits for nobody."""
    lost = replicated("ASSIGNED", failures=unable("a"))
    cluster: dict[str, Any] = {
        "live": ("a", "d"),
        "gone_since": gone(b=60, c=60),
        "unable_since": gone(a=60),
        "policies": CONTINUE,
    }
    found = decided(lost, **cluster)
    assert found is not None
    assert (found.record.owner, set(found.record.replicas)) >= ("d", {"a", "d"})
    assert (found.record.accept_loss, found.record.given_up, found.record.before) == (True, (), None)
    assert found.gone == ("b", "c"), "the write compares it"
    assert decided(found.record, **{**cluster, "live": ("a", "b", "c", "d")}) is None


def test_a_broker_gets_its_segment_back_though_others_were_to_keep_copies() -> None:
    """The topic had got replicas, and its only copy was given up before they held anything."""
    lost = record("SERVING", "a", change=ReplicaChange(replicas=ABC, write_quorum=2))
    found = decided(lost, live=("b", "c"), gone_since=gone(a=60), policies=CONTINUE)
    assert found is not None
    assert (found.record.owner, found.record.replicas, found.record.given_up) == ("b", ("b", "c"), ("a",))
    back = decided(found.record, live=ABC, policies=CONTINUE)
    assert back is not None
    assert (back.reason.value, back.record.owner, back.record.replicas) == ("returned", "a", ())
    assert decided(back.record, live=ABC, policies=CONTINUE) is None


@pytest.mark.parametrize(
    ("live", "failures", "lost"),
    [("abc", "", False), ("bc", "", False), ("b", "", True), ("abc", "a", False), ("ab", "ab", True), ("", "", True)],
)
def test_a_replicated_segment_is_lost_when_too_few_replicas_can_vote(live: str, failures: str, lost: bool) -> None:
    state = replicated("ASSIGNED", failures=unable(*failures))
    assert is_lost(snapshot_of([state], live=tuple(live)), state) == lost
    mendable = replicated("ASSIGNED", failures=unable(*failures, lasting=False))
    assert is_lost(snapshot_of([mendable], live=tuple(live)), mendable) == (len(live) < 2), "its disk has the records"


def test_a_segment_waits_for_the_brokers_that_must_confirm_its_records() -> None:
    """One vote of three would do, and the one that is elected could confirm nothing."""
    all_of_three = replicated("SERVING", quorum=3)
    cluster: dict[str, Any] = {"live": ("b", "c", "d"), "gone_since": gone(a=60)}
    assert decided(all_of_three, policies=policies(3, 3), **cluster) is None
    (found,) = waiting(snapshot_of([all_of_three], policies=policies(3, 3), **cluster))
    assert (found.brokers, found.reason) == (("a",), "3 of its replicas a, b, c must hold a record, and a is down")


LONG_GONE: dict[str, Any] = {"live": ("b", "c", "d"), "gone_since": gone(a=600), "policies": policies(3, 3)}
"""The owner, for so long that another broker takes its place."""


@pytest.mark.parametrize("state", ["SERVING", "DRAINING", "ASSIGNED"])
def test_a_segment_that_all_replicas_must_confirm_goes_on_without_one_that_stays_away(state: str) -> None:
    """Each of the others holds everything, so one vote is enough. Another broker takes the empty place."""
    lost = replicated(state, quorum=3)
    for change in ({"gone_since": gone(a=599)}, {"live": ("b", "c")}, {"policies": policies(3, 2)}):
        assert decided(lost, **{**LONG_GONE, **change}) is None
    voting = decided(lost, **LONG_GONE)
    assert voting is not None
    assert (voting.record, voting.reason.value, voting.gone) == (lost.recovering(), "recovering", ("a",))
    assert decided(voting.record, **LONG_GONE) is None, "its replicas vote"
    elected = voting.record.voted("c", LogPosition(epoch=Epoch(3), end=Offset(7)))
    assert decided(elected, **{**LONG_GONE, "gone_since": gone(a=599)}) is None, "the leader is another one"
    found = decided(elected, **LONG_GONE)
    assert found is not None
    assert (found.record.owner, found.record.replicas, found.record.write_quorum) == ("c", ("c", "b", "d"), 3)
    assert (found.record.accept_loss, found.record.elected) == (False, elected.elected)
    assert (found.reason.value, found.gone) == ("reassigned", ("a",))
    assert decided(found.record, **LONG_GONE) is None
    assert decided(elected, **{**LONG_GONE, "live": FOUR}) is None, "it is back: all of them are there"


def test_the_others_vote_again_when_the_one_that_was_elected_stays_away_too() -> None:
    elected = replicated("RECOVERING", quorum=3).voted("c", LogPosition(epoch=Epoch(3), end=Offset(7)))
    cluster = {**LONG_GONE, "live": ("b", "d", "e"), "gone_since": gone(a=900, c=600)}
    found = decided(elected, **cluster)
    assert found is not None
    assert (found.record, found.gone) == (elected.recovering(), ("a", "c"))


def test_an_owner_that_is_back_goes_on_without_a_follower_that_stays_away() -> None:
    """Each record needs both of them, so the owner cannot open the segment, and says so."""
    both = policies(2, 2)
    alone = replicated("ASSIGNED", replicas=("a", "b"), failures=unable("a", lasting=False))
    cluster: dict[str, Any] = {"live": ("a", "c"), "gone_since": gone(b=600), "policies": both}
    assert decided(replicated("ASSIGNED", replicas=("a", "b")), **cluster) is None, "it has not failed yet"
    voting = decided(alone, **cluster)
    assert voting is not None
    assert voting.record == alone.recovering()
    found = decided(voting.record.voted("a", LogPosition()), **cluster)
    assert found is not None
    assert (found.record.replicas, found.record.write_quorum) == (("a", "c"), 2)


def test_a_set_of_which_not_all_confirm_a_record_waits_for_those_that_stay_away() -> None:
    """Three of four confirm, and two are there: a vote would find everything. But the set that goes on has two blank
    disks, and if its owner is lost before it serves, the second one alone proves nothing."""
    lost = replicated("SERVING", replicas=FOUR, quorum=3)
    cluster = {**LONG_GONE, "live": ("c", "d", "e", "f"), "gone_since": gone(a=900, b=900), "policies": policies(4, 3)}
    assert decided(lost, **cluster) is None


def test_others_take_the_places_of_replicas_that_were_given_up() -> None:
    losing = replicated("RECOVERING").losing(("a", "c"))
    elected = losing.voted("b", LogPosition(epoch=Epoch(3), end=Offset(7)))
    assert (elected.accept_loss, elected.given_up) == (True, ("a", "c")), "it was accepted for the vote"
    cluster: dict[str, Any] = {"live": ("b", "d", "e"), "gone_since": gone(a=60, c=30)}
    found = decided(elected, **cluster)
    assert found is not None
    assert (found.record.state, found.record.owner) == (OwnershipState.ASSIGNED, "b")
    assert (found.record.epoch, found.record.elected) == (elected.epoch + 1, elected.elected)
    assert (found.record.replicas, found.record.given_up) == (("b", "d", "e"), ())
    assert (found.reason.value, found.gone) == ("continued", ("a", "c")), "one that is back has a vote"
    assert decided(found.record, **cluster) is None
    assert decided(elected, **{**cluster, "live": ("b",)}) is None, "nobody is there to take them"
    assert decided(elected, **{**cluster, "live": ("d", "e"), "gone_since": gone(a=60, b=1, c=30)}) is None


# Changing replicas.


def change(replicas: str, quorum: int = 2) -> ReplicaChange:
    return ReplicaChange(replicas=tuple(replicas), write_quorum=quorum)


@pytest.mark.parametrize(
    ("state", "cluster", "wanted"),
    [
        # All is well.
        (replicated("SERVING"), {}, None),
        (replicated("SERVING", "c"), {"live": FIVE}, None),
        (record("SERVING", "a"), {"policies": TopicPolicies()}, None),
        # The topic asks for another number.
        (record("SERVING", "b"), {}, change("bac")),
        (record("SERVING", "b"), {"live": ("a", "b")}, change("ba")),
        (record("SERVING", "b"), {"live": ("b",)}, None),
        (replicated("SERVING"), {"policies": TopicPolicies()}, change("", 1)),
        (replicated("SERVING"), {"policies": policies(3, 3)}, change("abc", 3)),
        (replicated("SERVING"), {"policies": policies(3, 1)}, change("abc", 1)),
        (replicated("SERVING"), {"policies": policies(2, 2)}, change("ab")),
        (replicated("SERVING", "c"), {"policies": policies(2, 1)}, change("ca", 1)),
        (replicated("SERVING"), {"live": FIVE, "policies": policies(5, 3)}, change("abcde", 3)),
        (replicated("SERVING"), {"policies": policies(5, 3)}, change("abc", 3)),
        # A quorum that the brokers that are there cannot reach would stop the segment.
        (replicated("SERVING"), {"live": ("a", "b"), "policies": policies(3, 3), "gone_since": gone(c=1)}, None),
        # Fewer, and one of them is gone: that one leaves.
        (replicated("SERVING"), {"live": ("a", "c"), "policies": policies(2), "gone_since": gone(b=1)}, change("ac")),
        # A broker was missing, and is there now.
        (replicated("SERVING", replicas=("a", "b")), {}, change("abc")),
        (replicated("SERVING", replicas=("a", "b")), {"live": ("a", "b")}, None),
        (replicated("SERVING", replicas=("a", "b")), {"drained": ("c",)}, None),
        # A follower's broker drains.
        (replicated("SERVING"), {"live": FOUR, "drained": ("c",)}, change("abd")),
        (replicated("SERVING"), {"drained": ("c",)}, change("ab")),
        (replicated("SERVING", quorum=3), {"drained": ("c",), "policies": policies(3, 3)}, None),
        (replicated("SERVING"), {"live": FOUR, "stopping": ("c",)}, None),
        # A follower's broker is gone.
        (replicated("SERVING"), {"live": ABD, "gone_since": gone(c=599)}, None),
        (replicated("SERVING"), {"live": ABD, "gone_since": gone(c=600)}, change("abd")),
        (replicated("SERVING"), {"live": ("a", "b"), "gone_since": gone(c=600)}, None),
        (replicated("SERVING"), {"live": ("a", "d", "e"), "gone_since": gone(b=600, c=900)}, change("ade")),
        (replicated("SERVING"), {"live": ("a", "d"), "gone_since": gone(b=600, c=900)}, change("adb")),
        # Racks.
        (replicated("SERVING"), {"live": FOUR, "racks": {"a": "x", "b": "x", "c": "y", "d": "z"}}, change("adc")),
        (replicated("SERVING", "b"), {"live": FOUR, "racks": {"a": "x", "b": "x", "c": "y", "d": "z"}}, change("dbc")),
        (replicated("SERVING"), {"live": FOUR, "racks": {"a": "x", "b": "x", "c": "y", "d": "y"}}, None),
        (replicated("SERVING"), {"live": FOUR, "racks": {"d": "z"}}, None),
        (replicated("SERVING"), {"live": FOUR, "racks": {"a": "x", "b": "y", "c": "z", "d": "w"}}, None),
        # Its owner has something else to do.
        (replicated("SERVING", to="b"), {"live": FOUR, "drained": ("c",)}, None),
        (replicated("SERVING", replicas=("a", "b")), {"live": ("b", "c", "d"), "policies": policies(3, 1)}, None),
        (replicated("SERVING", replicas=("a", "b")), {"stopping": ("a",)}, None),
    ],
)  # fmt: skip
def test_the_owner_is_asked_for_the_replicas_that_the_segment_is_to_have(
    state: Ownership, cluster: dict[str, Any], wanted: ReplicaChange | None
) -> None:
    found = decided(state, **cluster)
    changed = found if found is not None and found.reason.value == "replicas" else None
    assert (changed.record.change if changed is not None else None) == wanted
    if changed is not None:
        assert changed.record == state.changing(wanted)
        after = snapshot_of([changed.record], **{"policies": THREE, **cluster})
        assert decide(after, NOW) == [], "deciding again does nothing"
        assert wanted is not None
        done = snapshot_of(
            [changed.record.replicas_changed(wanted.replicas, wanted.write_quorum)], **{"policies": THREE, **cluster}
        )
        assert decide(done, NOW) == [], "and it was all that was to change"


@pytest.mark.parametrize(
    ("cluster", "expected"),
    [
        ({"live": FIVE}, change("abd")),
        ({"live": FIVE, "drained": ("b",)}, change("abd")),
        ({"live": ("a", "b", "c", "e"), "gone_since": gone(d=1)}, None),
        ({"live": FIVE, "drained": ("d",)}, None),
        ({"live": ("a", "b", "e"), "gone_since": gone(c=900, d=1)}, change("abe")),
        ({"live": FIVE, "policies": policies(3, 3)}, change("abc", 3)),
        ({"live": FIVE, "policies": TopicPolicies()}, change("", 1)),
    ],
)
def test_a_change_under_way_stays_while_it_can_be_carried_out(
    cluster: dict[str, Any], expected: ReplicaChange | None
) -> None:
    """It was to replace c by d."""
    under_way = replicated("SERVING", change=change("abd"))
    found = decided(under_way, **cluster)
    assert (found.record if found is not None else under_way).change == expected


def test_all_segments_are_looked_through_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A leader looks several times a second. Topics without replicas pay nothing for those with."""
    looks: list[Snapshot] = []
    segments = Snapshot.segments

    def counted(snapshot: Snapshot) -> Iterator[Placed]:
        looks.append(snapshot)
        return segments(snapshot)

    monkeypatch.setattr(Snapshot, "segments", counted)
    assert decide(snapshot_of([record("SERVING", "a")] * 3), NOW) == []
    assert len(looks) == 1


def test_a_few_replicas_change_at_the_same_time() -> None:
    states = [replicated("SERVING")] * (3 * CHANGES_AT_ONCE)
    snapshot = snapshot_of(states, live=FOUR, drained=("c",), policies=THREE)
    portions = []
    while decisions := decide(snapshot, NOW):
        portions.append(len(decisions))
        snapshot = applied(snapshot, decisions)
        assert decide(snapshot, NOW) == [], "no more until these are done"
        snapshot = applied(snapshot, [_done(each) for each in decisions])
    assert portions == [CHANGES_AT_ONCE] * 3
    assert {known.value.replicas for known in snapshot.records.values()} == {ABD}


def _done(decision: Decision) -> Decision:
    wanted = decision.record.change
    assert wanted is not None
    record = decision.record.replicas_changed(wanted.replicas, wanted.write_quorum)
    return Decision(decision.segment, decision.revision, record, decision.reason)


def test_no_broker_holds_two_replicas_of_a_segment() -> None:
    for live in (ABC, FOUR, FIVE):
        for owner in live:
            for drained in live:
                found = decided(replicated("SEALED", to=owner), live=live, drained=(drained,), policies=policies(3, 1))
                assert found is not None
                assert len(set(found.record.replicas)) == len(found.record.replicas)


def test_a_replicated_segment_of_a_draining_broker_moves_to_a_follower() -> None:
    busy = [record("SERVING", "b")] * 4
    states = [replicated("SERVING", replicas=("a", "b")), *busy]
    decisions = decide(snapshot_of(states, drained=("a",), policies=policies(2, 2)), NOW)
    moves = [each.record.move.to for each in decisions if each.record.move is not None]
    assert moves == ["b"], "c is idle, and would have to copy"


def test_replicas_that_cannot_open_for_a_while_still_vote_when_a_loss_is_accepted() -> None:
    """Too few are there to confirm: no replica can open it, and their disks have what was confirmed."""
    state = replicated("ASSIGNED", "b", failures=unable("b", lasting=False))
    found = decided(state, **TWO_GONE)
    assert found is not None
    assert found.record == state.recovering(accept_loss=True, given_up=("a", "c"))
