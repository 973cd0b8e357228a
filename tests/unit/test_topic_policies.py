"""A topic's policies: which replicas, write quorum and durability belong together."""

from __future__ import annotations

import pytest

from braid.model.errors import InvalidArgument
from braid.model.topic import Durability, OwnerLoss, PolicyChanges, TopicPolicies, majority

FSYNC, MEMORY, REPLICATED = Durability.FSYNC, Durability.MEMORY, Durability.REPLICATED
PLAIN = TopicPolicies()
LOOSE = TopicPolicies(durability=MEMORY)
THREE = TopicPolicies(durability=REPLICATED, replicas=3, write_quorum=2)
ALL_OF_THREE = TopicPolicies(durability=REPLICATED, replicas=3, write_quorum=3)


@pytest.mark.parametrize(
    ("before", "changes", "after"),
    [
        (PLAIN, PolicyChanges(), (FSYNC, 1, 1)),
        (PLAIN, PolicyChanges(replicas=1), (FSYNC, 1, 1)),
        (LOOSE, PolicyChanges(replicas=1), (MEMORY, 1, 1)),
        (PLAIN, PolicyChanges(replicas=3), (REPLICATED, 3, 2)),
        (LOOSE, PolicyChanges(replicas=3), (REPLICATED, 3, 2)),
        (PLAIN, PolicyChanges(replicas=3, durability=REPLICATED), (REPLICATED, 3, 2)),
        (PLAIN, PolicyChanges(replicas=2, write_quorum=1), (REPLICATED, 2, 1)),
        (PLAIN, PolicyChanges(replicas=4), (REPLICATED, 4, 3)),
        (THREE, PolicyChanges(write_quorum=3), (REPLICATED, 3, 3)),
        (ALL_OF_THREE, PolicyChanges(replicas=5), (REPLICATED, 5, 3)),
        (THREE, PolicyChanges(replicas=1), (FSYNC, 1, 1)),
        (THREE, PolicyChanges(replicas=1, durability=MEMORY), (MEMORY, 1, 1)),
    ],
)
def test_a_number_of_replicas_brings_durability_and_quorum(
    before: TopicPolicies, changes: PolicyChanges, after: tuple[Durability, int, int]
) -> None:
    found = changes.apply(before)
    assert (found.durability, found.replicas, found.write_quorum) == after
    assert changes.apply(found) == found, "a call that is repeated changes nothing"


@pytest.mark.parametrize(
    ("before", "changes", "said"),
    [
        (PLAIN, PolicyChanges(durability=REPLICATED), "ask for replicas, for instance 3"),
        (PLAIN, PolicyChanges(durability=REPLICATED, replicas=1), "ask for replicas, for instance 3"),
        (PLAIN, PolicyChanges(durability=FSYNC, replicas=3), "leave the durability out, or ask for 1 replica"),
        (THREE, PolicyChanges(durability=MEMORY), "leave the durability out, or ask for 1 replica"),
        (PLAIN, PolicyChanges(write_quorum=2), "use 1 to 1"),
        (THREE, PolicyChanges(write_quorum=4), "use 1 to 3"),
        (ALL_OF_THREE, PolicyChanges(replicas=2, write_quorum=3), "use 1 to 2"),
        (THREE, PolicyChanges(write_quorum=0), "use 1 to 3"),
        (PLAIN, PolicyChanges(replicas=8), "1 to 7"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_write(
    before: TopicPolicies, changes: PolicyChanges, said: str
) -> None:
    with pytest.raises(InvalidArgument, match=said):
        changes.apply(before)


def test_a_majority_is_more_than_half() -> None:
    assert [majority(replicas) for replicas in range(1, 8)] == [1, 2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("replicas", "quorum", "said"),
    [
        (2, 2, "all 2 replicas must confirm"),
        (3, 3, "all 3 replicas must confirm"),
        (2, 1, "on its owner's disk alone"),
        (3, 1, "on its owner's disk alone"),
        (3, 2, ""),
        (4, 3, ""),
        (5, 3, ""),
    ],
)
def test_a_topic_that_does_not_fail_over_by_itself_has_a_warning(replicas: int, quorum: int, said: str) -> None:
    found = TopicPolicies(durability=REPLICATED, replicas=replicas, write_quorum=quorum)
    helps = "--replace-after" if said.startswith("all") else "--accept-loss"
    assert [said in each and helps in each for each in found.warnings] == [True] * bool(said)
    policy = TopicPolicies(
        durability=REPLICATED, replicas=replicas, write_quorum=quorum, on_owner_loss=OwnerLoss.CONTINUE
    )
    assert policy.warnings == ()
    assert PLAIN.warnings == ()
