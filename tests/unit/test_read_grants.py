"""Who may read a segment for a subscription, as a table."""

from __future__ import annotations

import pytest

from braid.broker.segments.read_grants import GrantSigner, KnownController, ReadGrant, ReadGrants
from braid.model.errors import NotServing, PermissionDenied

TABLE = [
    # shown before, shown now, may read
    ([], (1, 1), True),
    ([(1, 1)], (1, 1), True),  # the same consumer, by another channel
    ([(1, 1)], (1, 2), True),  # given to another one in the same term
    ([(1, 2)], (1, 1), False),
    ([(1, 9)], (2, 1), True),  # a new controller begins anew
    ([(2, 1)], (1, 9), False),  # what the old one has given
    ([(2, 5)], (2, 4), False),
    ([(1, 1), (3, 2)], (2, 7), False),
    ([(3, 2), (3, 2)], (3, 2), True),
]


@pytest.mark.parametrize(("before", "now", "may_read"), TABLE)
def test_only_the_highest_seat_reads(before: list[tuple[int, int]], now: tuple[int, int], may_read: bool) -> None:
    read_grants = ReadGrants()
    for term, grant in before:
        read_grants.take("billing", ReadGrant(term, grant))
    read_grants.take("audit", ReadGrant(99, 99))  # Another subscription has nothing to do with it.
    if may_read:
        read_grants.take("billing", ReadGrant(*now))
    else:
        for _ in range(2):
            with pytest.raises(NotServing, match="out of date"):
                read_grants.take("billing", ReadGrant(*now))
        read_grants.take("billing", ReadGrant(*before[-1]))


SIGNER = GrantSigner(lambda: "the secret of the cluster")
SIGNS = KnownController(7, signs=True, seen=9)
EARLIER = KnownController(7, signs=False, seen=9)
NONE = KnownController(0, signs=True, seen=9)
GIVEN = (11, "billing", 3, 7, 2)
"""Topic id, subscription, segment, term, number."""


def test_a_grant_that_was_given_out_is_believed_by_every_broker_of_the_cluster() -> None:
    topic, subscription, segment, term, _ = GIVEN
    grant = SIGNER.signed(*GIVEN)
    assert 0 < grant < 1 << 63
    GrantSigner(lambda: "the secret of the cluster").check(topic, subscription, segment, ReadGrant(term, grant), SIGNS)


def test_a_later_grant_is_higher() -> None:
    grants = [SIGNER.signed(11, "billing", 3, 7, number) for number in range(1, 200)]
    assert grants == sorted(grants)


@pytest.mark.parametrize(
    "shown",
    [
        (12, "billing", 3, 7),
        (11, "audit", 3, 7),
        (11, "billing", 4, 7),
        (11, "billing", 3, 8),
        (11, "billing", 3, (1 << 63) - 1),
        (1, "1/billing", 3, 7),
    ],
)
def test_a_grant_counts_only_for_what_it_was_given_for(shown: tuple[int, str, int, int]) -> None:
    topic, subscription, segment, term = shown
    with pytest.raises(PermissionDenied):
        SIGNER.check(topic, subscription, segment, ReadGrant(term, SIGNER.signed(*GIVEN)), SIGNS)


@pytest.mark.parametrize("grant", [0, 1, -1, -(1 << 63), 2 << 32, (1 << 63) - 1, (1 << 64) - 1])
def test_an_invented_grant_is_not_believed(grant: int) -> None:
    with pytest.raises(PermissionDenied):
        SIGNER.check(11, "billing", 3, ReadGrant(7, grant), SIGNS)


def test_a_grant_of_another_cluster_is_not_believed() -> None:
    with pytest.raises(PermissionDenied):
        GrantSigner(lambda: "another secret").check(11, "billing", 3, ReadGrant(7, SIGNER.signed(*GIVEN)), SIGNS)


@pytest.mark.parametrize("controller", [SIGNS, EARLIER, NONE, KnownController(8, signs=True, seen=9)])
def test_a_signed_grant_is_believed_whatever_the_owner_knows_of_the_controller(controller: KnownController) -> None:
    topic, subscription, segment, term, _ = GIVEN
    SIGNER.check(topic, subscription, segment, ReadGrant(term, SIGNER.signed(*GIVEN)), controller)


@pytest.mark.parametrize(
    ("controller", "refused"),
    [
        (EARLIER, None),
        (SIGNS, PermissionDenied),
        (NONE, NotServing),  # It has gone; the next one gives out another grant.
        (KnownController(8, signs=True, seen=9), NotServing),
        (KnownController(8, signs=False, seen=9), NotServing),
        (KnownController(5, signs=True, seen=6), NotServing),  # It is new, and not known here yet.
        (KnownController(5, signs=False, seen=6), NotServing),
        (KnownController(5, signs=True, seen=9), PermissionDenied),
        (KnownController(5, signs=False, seen=9), PermissionDenied),
    ],
)
def test_a_grant_without_a_signature_is_believed_if_the_controller_is_of_an_earlier_build(
    controller: KnownController, refused: type[Exception] | None
) -> None:
    """The grant has term 7 and number 2."""
    if refused is None:
        SIGNER.check(11, "billing", 3, ReadGrant(7, 2), controller)
        return
    with pytest.raises(refused):
        SIGNER.check(11, "billing", 3, ReadGrant(7, 2), controller)
