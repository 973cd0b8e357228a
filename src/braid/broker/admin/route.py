"""Where REST offers a call, and what it takes there: paths, parameters and bodies, all named by the call's own fields.

A call's class says `http = HttpRoute("POST", TOPIC + "/move", query=("segment", "to"), …)`. `admin/rest.py` makes the
interface and its OpenAPI document of that, of the fields' types and of the type that `run` returns. Nothing here knows
HTTP's machinery: a broker without an admin port needs none.

A field's type says what its argument may be (`msgspec.Meta`), on the wire and on REST. The rule for names is only
documented in it, for the calls check names themselves and answer with a code of its own.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from msgspec import Meta, Struct

from braid.model.layout import MAX_INITIAL_SEGMENTS
from braid.model.names import MAX_NAME_CHARS

MAX_NUMBER: Final = (1 << 53) - 1
"""What every JSON parser reads exactly."""
MAX_SEGMENT_ID: Final = 10**18 - 1
NO_CONTENT: Final = 204

TOPICS: Final = "/admin/v2/scalable/{tenant}/{namespace}"
TOPIC: Final = TOPICS + "/{topic}"
"""The three names together are the argument `topic`."""
NAMESPACE: Final = "/admin/v2/namespaces/{tenant}/{namespace}"
SUBSCRIPTIONS: Final = TOPIC + "/subscriptions"
SUBSCRIPTION: Final = SUBSCRIPTIONS + "/{subscription}"
SEGMENT: Final = "/admin/v2/segments/{tenant}/{namespace}/{topic}/{descriptor}"
BROKERS: Final = "/admin/v2/brokers"
BROKER: Final = BROKERS + "/{broker}"


class HttpRoute(Struct, frozen=True):
    method: str
    path: str
    """What stands in braces is an argument."""
    tag: str = ""
    """The group that the OpenAPI document shows it in; empty: that of the call's module."""
    query: tuple[str, ...] = ()
    """The arguments that are query parameters; true and false are written as words."""
    body: str | tuple[str, ...] = ()
    """The argument that is the JSON body, or those that are its fields."""
    names: dict[str, str] = {}
    """The arguments that REST calls otherwise, by the name that it has for them. Two names for one argument are the
    elements of a list."""
    required: tuple[str, ...] = ()
    """The arguments that must be given here, although the call has a default for them."""
    status: int = 200
    """Of success. With `NO_CONTENT`, REST does not show the call's result."""
    errors: tuple[int, ...] = ()
    """Beside those that every call can end with."""
    operation: str = ""
    """Its name in the OpenAPI document; empty: the call's."""


class Rest:
    """On a field: REST takes this narrower type, and refuses the rest before the call is made."""

    def __init__(self, kind: Any) -> None:
        self.kind: Final[Any] = kind


# Types of arguments.


def _name(what: str) -> Meta:
    rule = {"pattern": "^[A-Za-z0-9_][A-Za-z0-9_.=-]*$", "minLength": 1, "maxLength": MAX_NAME_CHARS}
    return Meta(description=f"The {what}'s name.", extra_json_schema=rule)


TenantName = Annotated[str, _name("tenant")]
NamespaceName = Annotated[str, _name("namespace")]
LocalTopicName = Annotated[str, _name("topic")]
"""Within its namespace."""
SubscriptionName = Annotated[str, _name("subscription")]
BrokerName = Annotated[str, _name("broker")]

SegmentNumber = Annotated[int, Meta(ge=0, le=MAX_SEGMENT_ID, description="A segment's id.")]
SegmentCount = Annotated[int, Meta(ge=1, le=MAX_INITIAL_SEGMENTS, description="How many segments there are to be.")]
Descriptor = Annotated[
    str,
    Meta(
        pattern="^[0-9a-f]{4}-[0-9a-f]{4}-(0|[1-9][0-9]{0,17})$",
        description="A segment: first hash, last hash, id.",
        examples=["0000-ffff-0"],
    ),
]
End = Literal["earliest", "latest"]
Force = Annotated[bool, Meta(description="Also when it has consumers that are connected.")]
