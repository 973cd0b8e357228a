"""An administrative call, declared once: what it takes, who may make it, and what it does.

A call is a struct. Its fields are its arguments, read from JSON; `needs` says who may make it; `run` carries it out.
Its name on the wire is the class's name in snake case: `CreateTopic` is `create_topic`. The modules of this folder
group the calls by subject. Defining a class that has a `run` registers it in `CALLS`.

What is not among a call's fields is refused, so that a misspelt option is not taken for its default; an argument that
is null counts as absent.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Final

import msgspec

from braid.broker.admin.services import CallServices
from braid.broker.auth import ALL, Access, Action, Principal
from braid.model.errors import InvalidArgument
from braid.model.ids import MAX_RANDOM_ID, RequestId, SegmentId
from braid.model.names import TopicName

MAX_WAIT_S: Final = 3_600.0

WaitSeconds = Annotated[float, msgspec.Meta(gt=0, le=MAX_WAIT_S)]
"""How long a call waits for what it began; what is not done by then goes on."""

CallId = Annotated[RequestId, msgspec.Meta(ge=0, le=MAX_RANDOM_ID)]
"""Chosen by the caller, once for all tries of a call: what the call makes is stored with it. 0: it is not repeated."""

CALLS: Final[dict[str, type[AdminCall]]] = {}
"""By name."""


class AdminCall(msgspec.Struct, frozen=True, kw_only=True):
    needs: ClassVar[Callable[[Access, Principal, Any], None]]
    """Raises `PermissionDenied` unless the principal may make this call."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls):
            CALLS[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    @abstractmethod
    async def run(self, services: CallServices, principal: Principal) -> Any:
        """The result, as JSON has it."""

    async def carry_out(self, services: CallServices, principal: Principal) -> Any:
        """Check the permission, then run."""
        type(self).needs(services.access, principal, self)
        return await self.run(services, principal)


class OnTopic(AdminCall, frozen=True):
    topic: str

    @property
    def name(self) -> TopicName:
        return TopicName.parse(self.topic)


# Permissions.


def on_topic(*actions: Action) -> Callable[[Access, Principal, OnTopic], None]:
    """Whoever may do one of these with the topic."""
    return lambda access, principal, call: access.check_topic(principal, call.name, *actions)


def who_knows_the_topic(access: Access, principal: Principal, call: OnTopic) -> None:
    access.check_may_know(principal, call.name)


def on_cluster(access: Access, principal: Principal, _: AdminCall) -> None:
    """Administrators of everything."""
    access.check(principal, Action.ADMIN, ALL)


def anybody(_: Access, __: Principal, ___: AdminCall) -> None:
    """The call itself sees to what each may know."""


# Arguments.


def read_call(name: str, kind: type[AdminCall], arguments: dict[str, Any]) -> AdminCall:
    known = kind.__struct_encode_fields__
    unknown = sorted(str(argument) for argument in arguments if argument not in known)
    if unknown:
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise InvalidArgument(f"{name} has no argument {', '.join(map(repr, unknown))}; {takes}")
    given = {argument: value for argument, value in arguments.items() if value is not None}
    try:
        return msgspec.convert(given, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"an argument of {name} is wrong: {error}") from None


def by_segment(numbers: dict[str | int, int], what: str) -> dict[SegmentId, int]:
    found: dict[SegmentId, int] = {}
    for segment, number in numbers.items():
        text = str(segment)
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise InvalidArgument(f"{segment!r} is no segment id; {what} are given by segment id, as {{'0': 17}}")
        if SegmentId(int(text)) in found:
            raise InvalidArgument(f"segment {int(text)} is named twice in {what}")
        found[SegmentId(int(text))] = number
    return found
