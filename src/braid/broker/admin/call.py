"""An administrative call, declared once: what it takes, who may make it, what it does, and where REST offers it.

A call is a struct. Its fields are its arguments, read from JSON; `needs` says who may make it; `run` carries it out and
its annotation says what it answers; `http` has the call's REST routes, if any. Its name on the wire is the class's name
in snake case: `CreateTopic` is `create_topic`. The modules of this folder group the calls by subject. Defining a class
that has a `run` registers it in `CALLS`.

What is not among a call's fields is refused, so that a misspelt option is not taken for its default; an argument that
is null counts as absent.
"""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from itertools import islice
from typing import Annotated, Any, ClassVar, Final, Literal, TypeVar, get_args, get_origin

import msgspec

from braid.broker.admin.route import HttpRoute
from braid.broker.admin.services import CallServices
from braid.broker.auth import ALL, Access, Action, Principal
from braid.model.errors import InvalidArgument, cut, quote
from braid.model.ids import MAX_RANDOM_ID, RequestId, SegmentId
from braid.model.names import TopicName
from braid.model.stored_record import encode

T = TypeVar("T")

MAX_SEGMENTS: Final = 4_096
"""That one call names."""
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
    http: ClassVar[HttpRoute | tuple[HttpRoute, ...]] = ()
    """Where REST offers it."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "run" in vars(cls):
            CALLS[re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()] = cls

    @classmethod
    def only_reads(cls) -> bool:
        routes = cls.http if isinstance(cls.http, tuple) else (cls.http,)
        return bool(routes) and all(route.method == "GET" for route in routes)

    @abstractmethod
    async def run(self, services: CallServices, principal: Principal) -> Any:
        """The result: one of `results/`, or anything else that JSON has a form for."""

    async def carry_out(self, services: CallServices, principal: Principal) -> Any:
        """Check the permission, then run. The result is as JSON has it: dictionaries and lists."""
        type(self).needs(services.access, principal, self)
        return msgspec.json.decode(encode(await self.run(services, principal)))


class OnTopic(AdminCall, frozen=True):
    topic: str

    @property
    def name(self) -> TopicName:
        return TopicName.parse(self.topic)


# Permissions.


def on_topic(*actions: Action) -> Callable[[Access, Principal, OnTopic], None]:
    """Allow principals that may do one of these with the topic."""
    return lambda access, principal, call: access.check_topic(principal, call.name, *actions)


def on_namespace(action: Action) -> Callable[[Access, Principal, Any], None]:
    """Allow principals that may do this with the whole namespace."""
    return lambda access, principal, call: access.check(principal, action, *call.path.split("/"))


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
    absent = {argument for argument, value in arguments.items() if value is None and argument in known}
    return read(name, kind, {argument: value for argument, value in arguments.items() if argument not in absent})


def read(what: str, kind: type[T], given: Any, *, from_text: bool = False) -> T:
    """`given` as what it is meant to be; with `from_text`, numbers are written as text."""
    if isinstance(kind, type(msgspec.Struct)) and isinstance(given, Mapping):
        known = kind.__struct_encode_fields__
        # A few of them: a caller may give half a million.
        unknown = sorted(islice((str(argument) for argument in given if argument not in known), 4))
        if unknown:
            takes = f"it takes {', '.join(known)}" if known else "it takes none"
            named = some_names([quote(each) for each in unknown])
            raise InvalidArgument(f"{what} has no argument {named}; {takes}")
    try:
        return msgspec.convert(given, kind, strict=not from_text)
    except msgspec.ValidationError as error:
        complaint = str(error)
        raise InvalidArgument(
            f"an argument of {what} is wrong: {_without_input(complaint)}{_choices(kind, complaint)}"
        ) from None


def some_names(names: Sequence[str]) -> str:
    """The first of these names, for the sentence of an error."""
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def _without_input(complaint: str) -> str:
    """msgspec's complaint, which may repeat the value that it is about; the place stands last."""
    about, at, place = complaint.rpartition(" - at ")
    return f"{cut(about)}{at}{place}" if at else cut(complaint)


def _choices(kind: type, complaint: str) -> str:
    """What msgspec does not say when a word is none of those that a field of `kind` takes."""
    place = re.fullmatch(r"Invalid enum value .* - at `\$\.(\w+)`", complaint)
    if place is None:
        return ""
    (words,) = [_words(field.type) for field in msgspec.structs.fields(kind) if field.encode_name == place[1]]
    return f"; choose {' or '.join(words)}"


def _words(kind: Any) -> list[str]:
    """Of an enum or a `Literal`, also inside of `Annotated` and of a union."""
    if isinstance(kind, type) and issubclass(kind, Enum):
        return [repr(each.value) for each in kind]
    if get_origin(kind) is Literal:
        return [repr(each) for each in get_args(kind)]
    return [word for each in get_args(kind) for word in _words(each)]


def by_segment(numbers: dict[str | int, int], what: str) -> dict[SegmentId, int]:
    if len(numbers) > MAX_SEGMENTS:  # Checked before half a million keys are parsed.
        raise InvalidArgument(f"{len(numbers)} {what} are given; {MAX_SEGMENTS} at most are taken in one call")
    found: dict[SegmentId, int] = {}
    for segment, number in numbers.items():
        text = str(segment)
        if not (text.isascii() and text.isdigit()) or len(text) > 18:
            raise InvalidArgument(f"{quote(segment)} is no segment id; {what} are given by segment id, as {{'0': 17}}")
        if SegmentId(int(text)) in found:
            raise InvalidArgument(f"segment {int(text)} is named twice in {what}")
        found[SegmentId(int(text))] = number
    return found
