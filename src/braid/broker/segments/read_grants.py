"""Who may read a segment for a subscription: one consumer at a time, decided by the segment's owner alone (I4).

A controller numbers what it gives out. With each segment a consumer gets a *read grant*: the controller's term and a
grant, which rises whenever the segment is given to somebody. Grants are compared by term first. The owner of the
segment remembers the highest read grant of each subscription that was shown to it:

    a lower one                nothing is opened: somebody else has the segment since
    the same, or a higher one  the channel that is open for the subscription ends, this one begins

So it does not matter which broker the controller is, whether the last one knows that it is none any more, nor when a
consumer hears that it has lost a segment: of two consumers, never both read. What the owner remembers lives as long as
it serves the segment. The next owner knows nothing at first, and lets whoever comes first read until a higher
grant is shown; at no time are there two.
"""

from __future__ import annotations

from typing import NamedTuple

from braid.model.errors import NotServing


class ReadGrant(NamedTuple):
    term: int
    grant: int


class ReadGrants:
    """Those of one segment. Pure: the caller ends and begins channels."""

    def __init__(self) -> None:
        self._highest: dict[str, ReadGrant] = {}
        """By subscription."""

    def take(self, subscription: str, read_grant: ReadGrant) -> None:
        """From now on the subscription's channel belongs to this grant. `NotServing` if it has gone to a higher
        one."""
        highest = self._highest.get(subscription)
        if highest is not None and read_grant < highest:
            raise NotServing(
                f"the segment was given to another consumer of subscription {subscription} since: "
                f"term {read_grant.term}, grant {read_grant.grant} are out of date, "
                f"term {highest.term}, grant {highest.grant} read it"
            )
        self._highest[subscription] = read_grant
