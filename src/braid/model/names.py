"""Names of topics, segments, subscriptions, consumers and brokers.

Names become parts of metadata keys, of paths on disk and of object names, so one rule serves all: 1 to 128 of the
characters `A–Z a–z 0–9 _ - . =`, the first a letter, a digit or `_`. So no name is `.` or `..`, looks like an option or
a hidden file, or needs escaping anywhere. Names that differ only in case are different names.
"""

from __future__ import annotations

import re
from typing import Final

import msgspec

from braid.model.errors import InvalidLayout, InvalidName, quote
from braid.model.ids import SegmentId
from braid.model.layout import HashRange, SegmentInfo

MAX_NAME_CHARS: Final = 128
"""Three of them and a descriptor stay far below a metadata key's 1,024 bytes; one below a file name's 255."""

DEFAULT_TENANT: Final = "public"
DEFAULT_NAMESPACE: Final = "default"

_TOPIC_SCHEME: Final = "topic://"
_SEGMENT_SCHEME: Final = "segment://"
_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]*")
_DESCRIPTOR: Final = re.compile(r"([0-9a-f]{4})-([0-9a-f]{4})-(0|[1-9][0-9]{0,17})")


def check_name(what: str, name: str) -> str:
    """Return `name` if it follows the rule; `what` says in the error whose name it is ("subscription", "broker", …)."""
    if len(name) > MAX_NAME_CHARS or _NAME.fullmatch(name) is None:
        raise InvalidName(
            f"{quote(name)} is no {what} name: use 1 to {MAX_NAME_CHARS} letters, digits, '_', '-', '.' or '=', "
            "beginning with a letter, a digit or '_'"
        )
    return name


class TopicName(msgspec.Struct, frozen=True, order=True):
    """`topic://tenant/namespace/name`; `str()` writes that form, `parse` also takes `t/n/name` and plain `name`."""

    tenant: str
    namespace: str
    name: str

    def __post_init__(self) -> None:
        check_name("tenant", self.tenant)
        check_name("namespace", self.namespace)
        check_name("topic", self.name)

    @classmethod
    def parse(cls, text: str) -> TopicName:
        parts = text.removeprefix(_TOPIC_SCHEME).split("/")
        if len(parts) == 1 and not text.startswith(_TOPIC_SCHEME):
            return cls(DEFAULT_TENANT, DEFAULT_NAMESPACE, text)
        if len(parts) != 3:
            raise InvalidName(
                f"{quote(text)} is no topic name: write 'name', 'tenant/namespace/name' "
                f"or '{_TOPIC_SCHEME}tenant/namespace/name'"
            )
        return cls(*parts)

    @property
    def path(self) -> str:
        """`tenant/namespace/name`, safe as a part of keys, files and objects."""
        return f"{self.tenant}/{self.namespace}/{self.name}"

    def __str__(self) -> str:
        return _TOPIC_SCHEME + self.path


class SegmentName(msgspec.Struct, frozen=True, order=True):
    """`segment://tenant/namespace/name/{start:04x}-{end:04x}-{id}`; exactly one way to write each."""

    topic: TopicName
    range: HashRange
    id: SegmentId

    def __post_init__(self) -> None:
        if not 0 <= self.id < 10**18:
            raise InvalidName(f"{self.id} is no segment id: ids are 0 or more and have at most 18 digits")

    @classmethod
    def of(cls, topic: TopicName, segment: SegmentInfo) -> SegmentName:
        hashes = HashRange(segment.hash_range.start, segment.hash_range.end)  # Without fields of another build.
        return cls(topic, hashes, segment.segment_id)

    @classmethod
    def at(cls, topic_path: str, descriptor: str) -> SegmentName:
        """Make a name from the parts that keys, folders and objects are named by."""
        return cls.parse(f"{_SEGMENT_SCHEME}{topic_path}/{descriptor}")

    @classmethod
    def parse(cls, text: str) -> SegmentName:
        topic, _, descriptor = text.removeprefix(_SEGMENT_SCHEME).rpartition("/")
        match = _DESCRIPTOR.fullmatch(descriptor)
        if not text.startswith(_SEGMENT_SCHEME) or topic.count("/") != 2 or match is None:
            raise InvalidName(
                f"{quote(text)} is no segment name: write '{_SEGMENT_SCHEME}tenant/namespace/name/0000-ffff-0' "
                "with the range's first and last hash as four hex digits and the segment's id"
            )
        try:
            hashes = HashRange(int(match[1], 16), int(match[2], 16))
        except InvalidLayout as error:
            raise InvalidName(f"{quote(text)} is no segment name: {error}") from error
        return cls(TopicName.parse(topic), hashes, SegmentId(int(match[3])))

    @property
    def descriptor(self) -> str:
        """`{start:04x}-{end:04x}-{id}`"""
        return f"{self.range}-{self.id}"

    @property
    def path(self) -> str:
        """`tenant/namespace/name/descriptor`, safe as a part of keys, files and objects."""
        return f"{self.topic.path}/{self.descriptor}"

    def __str__(self) -> str:
        return _SEGMENT_SCHEME + self.path
