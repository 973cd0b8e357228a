"""Every key of the metadata store. No other module spells one.

    /brokers/{id}                                      registration, under the broker's lease
    /loads/{id}                                        a broker's load report, under the same lease
    /cluster/leader                                    the cluster leader
    /cluster/drains/{id}                               the wish that a broker own nothing, until it is activated again
    /cluster/secret                                    by which brokers know each other
    /cluster/id                                        random; a storage prefix is marked with it
    /namespaces/{tenant}/{namespace}                   a namespace's policies
    /topics/{topic}                                    layout
    /topics/{topic}/controller                         controller leader, under a lease
    /topics/{topic}/transition                         the last transition, from its commit until it is finalized
    /topics/{topic}/newest-subscription                written with each subscription that is created
    /topics/{topic}/subscriptions/{s}                  a subscription
    /topics/{topic}/subscriptions/{s}/consumers/{c}    a consumer's session; for `group:NAME`, too
    /segments/{topic}/{descriptor}/ownership           which broker owns the segment
    /segments/{topic}/{descriptor}/cursors/{s}         what a subscription has consumed of it
    /segments/{topic}/{descriptor}/drained/{s}         its log has ended, and the subscription has consumed all of it
    /storage/{topic}/{descriptor}/chunks/{base:020d}   a chunk's descriptor
    /storage/{topic}/{descriptor}/chunks/cur           the frontier: how far chunks reach, which epoch may write
    /storage/{topic}/{descriptor}/state                sealed state

`{topic}` is `tenant/namespace/name`, made once by `topic_path`. Every part is percent-encoded, so no name can contain a
`/` and every key has one reading. A function ending in `_prefix` gives what to list or watch; it ends with `/`, so
`orders` does not find `orders2`. Where a prefix finds several kinds of keys, a function that reads keys tells them
apart and answers None for the other kinds.
"""

from __future__ import annotations

from urllib.parse import quote, unquote

from braid.model.errors import InvalidName
from braid.model.ids import Offset

CLUSTER_LEADER = "/cluster/leader"
CLUSTER_SECRET = "/cluster/secret"  # noqa: S105 (a key, not what stands there)
CLUSTER_ID = "/cluster/id"
DRAINS_PREFIX = "/cluster/drains/"
BROKERS_PREFIX = "/brokers/"
LOADS_PREFIX = "/loads/"
NAMESPACES_PREFIX = "/namespaces/"
TOPICS_PREFIX = "/topics/"
SEGMENTS_PREFIX = "/segments/"
STORAGE_PREFIX = "/storage/"

OFFSET_DIGITS = 20
"""As many as the largest 64-bit number has, so that the order of keys is the order of offsets."""


def _part(name: str) -> str:
    if not name:
        raise InvalidName("a part of a metadata key is empty; every name needs at least one character")
    return quote(name, safe="=")  # so that a valid name (model/names.py) stands here as it is


def topic_path(tenant: str, namespace: str, name: str) -> str:
    """Encode a topic for keys: `tenant/namespace/name`, each part percent-encoded."""
    return f"{_part(tenant)}/{_part(namespace)}/{_part(name)}"


def topic_parts(topic: str) -> tuple[str, str, str]:
    """Tenant, namespace and name of a topic path."""
    parts = topic.split("/")
    if len(parts) != 3 or not all(parts):
        raise InvalidName(f"{topic!r} is not a topic path; one is tenant/namespace/name, each part percent-encoded")
    return unquote(parts[0]), unquote(parts[1]), unquote(parts[2])


# Brokers.


def broker(broker_id: str) -> str:
    return BROKERS_PREFIX + _part(broker_id)


def broker_of(key: str) -> str:
    """Return the id of the broker that a key below `BROKERS_PREFIX` registers."""
    return unquote(key.removeprefix(BROKERS_PREFIX))


def load(broker_id: str) -> str:
    return LOADS_PREFIX + _part(broker_id)


def broker_of_load(key: str) -> str:
    return unquote(key.removeprefix(LOADS_PREFIX))


def drain(broker_id: str) -> str:
    return DRAINS_PREFIX + _part(broker_id)


def broker_of_drain(key: str) -> str:
    return unquote(key.removeprefix(DRAINS_PREFIX))


# Namespaces.


def namespace(path: str) -> str:
    """Return the key of a namespace's policies; its path is `tenant/namespace`, as in a topic's path."""
    return NAMESPACES_PREFIX + path


def path_of_namespace(key: str) -> str:
    return key.removeprefix(NAMESPACES_PREFIX)


# Topics.


def layout(topic: str) -> str:
    return TOPICS_PREFIX + topic


def topic_of_layout(key: str) -> str | None:
    """Return the topic path whose layout this key is; None for any other key below `TOPICS_PREFIX`."""
    topic = key.removeprefix(TOPICS_PREFIX)
    return topic if topic != key and topic.count("/") == 2 else None


def topic_of(key: str) -> str | None:
    """Return the topic path that any key below `TOPICS_PREFIX` belongs to."""
    match key.split("/"):
        case ["", "topics", tenant, namespace, name, *_]:
            return f"{tenant}/{namespace}/{name}"
    return None


def topic_prefix(topic: str) -> str:
    """Finds all that belongs to a topic, except its layout."""
    return layout(topic) + "/"


def controller(topic: str) -> str:
    return f"{layout(topic)}/controller"


def topic_of_controller(key: str) -> str | None:
    """Return the topic path whose controller this key names; None for any other key below `TOPICS_PREFIX`."""
    match key.split("/"):
        case ["", "topics", tenant, namespace, name, "controller"]:
            return f"{tenant}/{namespace}/{name}"
    return None


def transition(topic: str) -> str:
    return f"{layout(topic)}/transition"


def topic_of_transition(key: str) -> str | None:
    """Return the topic path whose committed transition this key marks; None for any other key below
    `TOPICS_PREFIX`."""
    match key.split("/"):
        case ["", "topics", tenant, namespace, name, "transition"]:
            return f"{tenant}/{namespace}/{name}"
    return None


def newest_subscription(topic: str) -> str:
    return f"{layout(topic)}/newest-subscription"


def subscriptions_prefix(topic: str) -> str:
    """Finds the subscriptions and their consumers; `subscription_of` and `consumer_of` tell them apart."""
    return f"{layout(topic)}/subscriptions/"


def subscription(topic: str, name: str) -> str:
    return subscriptions_prefix(topic) + _part(name)


def subscription_of(key: str) -> str | None:
    """Return the name of the subscription that this key describes; None for a consumer's key."""
    match key.split("/"):
        case ["", "topics", _, _, _, "subscriptions", name]:
            return unquote(name)
    return None


def consumers_prefix(topic: str, subscription_name: str) -> str:
    return f"{subscription(topic, subscription_name)}/consumers/"


def consumer(topic: str, subscription_name: str, name: str) -> str:
    return consumers_prefix(topic, subscription_name) + _part(name)


def consumer_of(key: str) -> tuple[str, str] | None:
    """Subscription and name of the consumer that this key describes; None for a subscription's key."""
    match key.split("/"):
        case ["", "topics", _, _, _, "subscriptions", subscription_name, "consumers", name]:
            return unquote(subscription_name), unquote(name)
    return None


def consumer_key_of(key: str) -> tuple[str, str, str] | None:
    """Topic path, subscription and name of the consumer that this key describes; None for any other key."""
    topic, found = topic_of(key), consumer_of(key)
    return (topic, *found) if topic is not None and found is not None else None


# Segments.


def topic_segments_prefix(topic: str) -> str:
    """Finds ownership, cursors and drained marks of all segments of a topic."""
    return f"{SEGMENTS_PREFIX}{topic}/"


def segment_prefix(topic: str, descriptor: str) -> str:
    """Finds a segment's ownership, cursors and drained marks."""
    return f"{topic_segments_prefix(topic)}{_part(descriptor)}/"


def ownership(topic: str, descriptor: str) -> str:
    return segment_prefix(topic, descriptor) + "ownership"


def segment_of_ownership(key: str) -> tuple[str, str] | None:
    """Topic path and descriptor of the segment whose ownership this key is; None for any other key of a segment."""
    match key.split("/"):
        case ["", "segments", tenant, namespace, name, descriptor, "ownership"]:
            return f"{tenant}/{namespace}/{name}", unquote(descriptor)
    return None


def cursors_prefix(topic: str, descriptor: str) -> str:
    return segment_prefix(topic, descriptor) + "cursors/"


def cursor(topic: str, descriptor: str, subscription_name: str) -> str:
    return cursors_prefix(topic, descriptor) + _part(subscription_name)


def subscription_of_cursor(key: str) -> str | None:
    match key.split("/"):
        case ["", "segments", _, _, _, _, "cursors", name]:
            return unquote(name)
    return None


def drained(topic: str, descriptor: str, subscription_name: str) -> str:
    return f"{segment_prefix(topic, descriptor)}drained/{_part(subscription_name)}"


def drained_of(key: str) -> tuple[str, str, str] | None:
    """Topic path, descriptor and subscription of the drained mark that this key is; None for any other key."""
    match key.split("/"):
        case ["", "segments", tenant, namespace, name, descriptor, "drained", subscription_name]:
            return f"{tenant}/{namespace}/{name}", unquote(descriptor), unquote(subscription_name)
    return None


# Storage.


def topic_storage_prefix(topic: str) -> str:
    return f"{STORAGE_PREFIX}{topic}/"


def segment_storage_prefix(topic: str, descriptor: str) -> str:
    return f"{topic_storage_prefix(topic)}{_part(descriptor)}/"


def chunks_prefix(topic: str, descriptor: str) -> str:
    """Finds the chunks in order of their base offsets and, last, the pointer `cur`; `chunk_base` tells them apart."""
    return segment_storage_prefix(topic, descriptor) + "chunks/"


def chunk(topic: str, descriptor: str, base: Offset) -> str:
    return f"{chunks_prefix(topic, descriptor)}{base:0{OFFSET_DIGITS}d}"


def current_chunk(topic: str, descriptor: str) -> str:
    return chunks_prefix(topic, descriptor) + "cur"


def chunk_base(key: str) -> Offset | None:
    """Return the base offset of the chunk that this key describes; None for `cur`."""
    last = key.rpartition("/")[2]
    return Offset(int(last)) if len(last) == OFFSET_DIGITS and last.isascii() and last.isdigit() else None


def sealed_state(topic: str, descriptor: str) -> str:
    return segment_storage_prefix(topic, descriptor) + "state"
