"""The topic's id in the names of a segment's objects.

A topic that is deleted and created again has the same folders. An upload of the old topic that was under way may arrive
when the new topic has begun, and would take the name of a chunk of the new one. So names end with the topic's id. Names
without an id are of brokers that did not write it yet.
"""

from __future__ import annotations

import re
from typing import Final

_TOPIC_ID: Final = re.compile(r"-\d{10}-([0-9a-f]{14})(?:-joined)?\.(?:chunk|producers)$")


def id_suffix(topic_id: int) -> str:
    """Return what stands after the epoch in a name; nothing if the id is not known."""
    return f"-{topic_id:014x}" if topic_id else ""


def topic_id_of(name: str) -> int:
    """Return the id of the topic that an object belongs to; 0 if its name does not say."""
    match = _TOPIC_ID.search(name)
    return int(match[1], 16) if match is not None else 0
