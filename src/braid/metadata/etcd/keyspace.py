"""Braid's keys inside etcd's, and the contract's values as etcd's messages.

Every key is stored as `{key_prefix}/{key}`. Braid's own keys begin with a slash, so one sees `/braid//topics/…`: the
first slash belongs to the prefix and keeps `/braid` apart from `/braid2`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from braid.metadata.etcd.messages import (
    COMPARE_EQUAL,
    EVENT_DELETE,
    TARGET_MOD_REVISION,
    TARGET_VALUE,
    TxnRequest,
)
from braid.metadata.limits import check_txn, encode_key, encode_prefix, prefix_end
from braid.metadata.store import Compare, CompareValue, Condition, Delete, Entry, Event, Operation, Put
from braid.model.errors import InvalidArgument
from braid.model.ids import Revision


class Keyspace:
    def __init__(self, key_prefix: str) -> None:
        if not key_prefix.strip("/"):
            raise InvalidArgument(f"the key prefix {key_prefix!r} has no name; give one, for example '/braid'")
        self._root = encode_prefix(key_prefix.rstrip("/") + "/")

    def key(self, key: str) -> bytes:
        return self._root + encode_key(key)

    def range_of(self, prefix: str) -> tuple[bytes, bytes]:
        """Return the first key of the prefix and the first key after it."""
        start = self._root + encode_prefix(prefix)
        end = prefix_end(start)
        assert end is not None, "the root is never empty"
        return start, end

    def entry(self, kv: Any) -> Entry:
        return Entry(self._name(kv.key), kv.value, Revision(kv.mod_revision), kv.lease)

    def event(self, event: Any) -> Event:
        kv = event.kv
        if event.type == EVENT_DELETE:
            return Event(self._name(kv.key), None, Revision(kv.mod_revision))
        return Event(self._name(kv.key), kv.value, Revision(kv.mod_revision), kv.lease)

    def txn(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> Any:
        check_txn(conditions, operations)
        request = TxnRequest()
        for condition in conditions:
            key = self.key(condition.key)
            match condition:
                case Compare(_, revision):  # etcd gives an absent key the revision 0, as we do
                    request.compare.add(
                        result=COMPARE_EQUAL, target=TARGET_MOD_REVISION, key=key, mod_revision=revision
                    )
                case CompareValue(_, value):
                    request.compare.add(result=COMPARE_EQUAL, target=TARGET_VALUE, key=key, value=value)
        # In order of keys, so that a watch sees a transaction's events in the order in which every store gives them.
        for operation in sorted(operations, key=lambda operation: operation.key):
            key = self.key(operation.key)
            match operation:
                case Put(_, value, lease):
                    request.success.add(request_put={"key": key, "value": value, "lease": lease})
                case Delete():
                    request.success.add(request_delete_range={"key": key})
        return request

    def _name(self, key: bytes) -> str:
        return key.removeprefix(self._root).decode()
