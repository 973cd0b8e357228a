"""Who may read a segment for a subscription, as a table."""

from __future__ import annotations

import pytest

from braid.broker.segments.read_grants import ReadGrant, ReadGrants
from braid.model.errors import NotServing

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
