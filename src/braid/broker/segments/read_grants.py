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

**Which read grants are believed.** An invented read grant, with the highest term that there is, would keep all
consumers out. The owner cannot ask the controller: consumers read on while there is none. So the controller *signs*
each grant, with the secret of the cluster, which every broker has and no client:

    grant on the wire = number << 32 | signature of topic, subscription, segment, term and number

The number decides the order, because it has the higher bits. To a client all of it is one number, as it always was. A
signature of 32 bits can be guessed only by asking the owner billions of times, and each wrong guess is logged.

**Earlier builds** do not sign: their grant is the number alone. A cluster is upgraded broker by broker, and consumers
read on meanwhile. So an owner believes a grant without a signature if it has the term of the topic's controller, and
the controller's key does not say that its broker signs. An owner of an earlier build takes a signed grant for a number.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import blake2b
from typing import Final, NamedTuple

from braid.model.errors import NotServing, PermissionDenied

SIGNATURE_BITS: Final = 32
_PERSON: Final = b"braid read grant"
"""Keeps these signatures apart from any other use of the secret."""


class ReadGrant(NamedTuple):
    term: int
    grant: int


class KnownController(NamedTuple):
    """What an owner knows of a topic's controller."""

    term: int
    """0: there is none."""
    signs: bool
    """False: its broker is of an earlier build."""
    seen: int
    """The metadata revision that the owner has seen: it cannot judge a later term."""


class GrantSigner:
    """Signs the grants that this broker gives out as a controller, and checks those that consumers show."""

    def __init__(self, secret: Callable[[], str]) -> None:
        """`secret` returns the secret of the cluster."""
        self._secret = secret

    def signed(self, topic_id: int, subscription: str, segment: int, term: int, number: int) -> int:
        """Return the grant of this number, for consumers."""
        about = f"{topic_id}/{segment}/{term}/{number}/{subscription}".encode()
        key = blake2b(self._secret().encode()).digest()
        digest = blake2b(about, digest_size=SIGNATURE_BITS // 8, key=key, person=_PERSON).digest()
        return number << SIGNATURE_BITS | int.from_bytes(digest, "little")

    def check(
        self, topic_id: int, subscription: str, segment: int, read_grant: ReadGrant, controller: KnownController
    ) -> None:
        """Raise `PermissionDenied` if no controller of this cluster gave out the read grant, and `NotServing` if only a
        controller of an earlier build can have, and that controller is gone or not known here yet."""
        term, grant = read_grant
        if 0 < grant < 1 << SIGNATURE_BITS:
            if term == controller.term and not controller.signs:
                return
            if not controller.term or term < controller.term or term > controller.seen:
                raise NotServing(
                    f"the controller of term {term} gave segment {segment} to the consumer, and this broker does not "
                    "know it as the topic's controller; try again in a moment"
                )
        if grant != self.signed(topic_id, subscription, segment, term, grant >> SIGNATURE_BITS):
            raise PermissionDenied(
                f"no controller gave segment {segment} to a consumer of subscription {subscription} with term {term}, "
                f"grant {grant}: join the subscription, and show the term and the grant of ASSIGN"
            )


class ReadGrants:
    """The read grants of one segment. Pure: the caller ends and begins channels."""

    def __init__(self) -> None:
        self._highest: dict[str, ReadGrant] = {}
        """By subscription."""

    def check(self, subscription: str, read_grant: ReadGrant) -> None:
        """Raise `NotServing` if a higher read grant has the subscription's channel."""
        highest = self._highest.get(subscription)
        if highest is not None and read_grant < highest:
            raise NotServing(
                f"the segment was given to another consumer of subscription {subscription} since: "
                f"term {read_grant.term}, grant {read_grant.grant} is out of date"
            )

    def take(self, subscription: str, read_grant: ReadGrant) -> None:
        """Give the subscription's channel to this read grant. `NotServing` if a higher one has it."""
        self.check(subscription, read_grant)
        self._highest[subscription] = read_grant
