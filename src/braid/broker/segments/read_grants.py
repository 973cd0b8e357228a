"""Read grants: one consumer of a subscription at a time may read a segment, and the segment's owner alone decides (I4).

A controller numbers what it gives out. With each segment a consumer gets a *read grant*: the controller's term and a
grant, which rises whenever the segment is given to a consumer. Read grants are compared by term first. For each
subscription, the owner of the segment remembers the highest read grant that was shown to it:

    a lower one                nothing is opened: another consumer has the segment by now
    the same, or a higher one  the channel that is open for the subscription ends, this one begins

So two consumers never read at the same time. It does not matter which broker is the controller, whether the last
controller knows that it was replaced, or when a consumer hears that it has lost a segment. The owner remembers read
grants only while it serves the segment. The next owner knows none at first: it lets the first consumer that comes read,
until a higher read grant is shown. At no time are there two readers.
"""

from __future__ import annotations

from typing import NamedTuple

from braid.model.errors import NotServing


class ReadGrant(NamedTuple):
    term: int
    grant: int


class ReadGrants:
    """The read grants of one segment. Pure: the caller ends and begins channels."""

    def __init__(self) -> None:
        self._highest: dict[str, ReadGrant] = {}
        """By subscription."""

    def take(self, subscription: str, read_grant: ReadGrant) -> None:
        """Give the subscription's channel to this read grant. `NotServing` if a higher one has it."""
        highest = self._highest.get(subscription)
        if highest is not None and read_grant < highest:
            raise NotServing(
                f"the segment was given to another consumer of subscription {subscription} since: "
                f"term {read_grant.term}, grant {read_grant.grant} is out of date, "
                f"term {highest.term}, grant {highest.grant} reads it"
            )
        self._highest[subscription] = read_grant
