"""The few messages of etcd's v3 protocol that Braid speaks.

The table below is the protocol: message, field, number, type. Numbers and types are etcd's, so the bytes are the same;
the package name is our own and the pool private, so that another etcd client in the same process does not collide with
us. Classes are built from the table at import: nothing is generated, and nothing has to be compiled for a build.

Two simplifications that do not show on the wire: an enum is an `int32`, and the members of a `oneof` are plain fields.
etcd reads an absent member as its zero value, which is what proto3 leaves out.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE: Final = "braid.etcd"

# message: one field a line as "name number type"; "*" after the type means repeated.
_TABLE: Final[dict[str, str]] = {
    "ResponseHeader": """
        cluster_id       1 uint64
        member_id        2 uint64
        revision         3 int64
        raft_term        4 uint64""",
    "KeyValue": """
        key              1 bytes
        create_revision  2 int64
        mod_revision     3 int64
        version          4 int64
        value            5 bytes
        lease            6 int64""",
    "Event": """
        type             1 int32
        kv               2 KeyValue""",
    # KV
    "RangeRequest": """
        key              1 bytes
        range_end        2 bytes
        limit            3 int64
        revision         4 int64""",
    "RangeResponse": """
        header           1 ResponseHeader
        kvs              2 KeyValue *
        more             3 bool""",
    "PutRequest": """
        key              1 bytes
        value            2 bytes
        lease            3 int64""",
    "DeleteRangeRequest": """
        key              1 bytes""",
    "RequestOp": """
        request_put           2 PutRequest
        request_delete_range  3 DeleteRangeRequest""",
    "Compare": """
        result           1 int32
        target           2 int32
        key              3 bytes
        mod_revision     6 int64
        value            7 bytes""",
    "TxnRequest": """
        compare          1 Compare *
        success          2 RequestOp *""",
    "TxnResponse": """
        header           1 ResponseHeader
        succeeded        2 bool""",
    # Watch
    "WatchCreateRequest": """
        key              1 bytes
        range_end        2 bytes
        start_revision   3 int64
        fragment         8 bool""",
    "WatchProgressRequest": "",
    "WatchRequest": """
        create_request   1 WatchCreateRequest
        progress_request 3 WatchProgressRequest""",
    "WatchResponse": """
        header           1 ResponseHeader
        watch_id         2 int64
        created          3 bool
        canceled         4 bool
        compact_revision 5 int64
        cancel_reason    6 string
        fragment         7 bool
        events          11 Event *""",
    # Lease
    "LeaseGrantRequest": """
        TTL              1 int64
        ID               2 int64""",
    "LeaseGrantResponse": """
        header           1 ResponseHeader
        ID               2 int64
        TTL              3 int64""",
    "LeaseRevokeRequest": """
        ID               1 int64""",
    "LeaseRevokeResponse": """
        header           1 ResponseHeader""",
    "LeaseKeepAliveRequest": """
        ID               1 int64""",
    "LeaseKeepAliveResponse": """
        header           1 ResponseHeader
        ID               2 int64
        TTL              3 int64""",
    # Auth, Maintenance
    "AuthenticateRequest": """
        name             1 string
        password         2 string""",
    "AuthenticateResponse": """
        header           1 ResponseHeader
        token            2 string""",
    "StatusRequest": "",
    "StatusResponse": """
        header           1 ResponseHeader
        version          2 string
        leader           4 uint64""",
}

COMPARE_EQUAL: Final = 0
TARGET_MOD_REVISION: Final = 2
TARGET_VALUE: Final = 3
EVENT_DELETE: Final = 1

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "int32": _Field.TYPE_INT32,
    "int64": _Field.TYPE_INT64,
    "string": _Field.TYPE_STRING,
    "uint64": _Field.TYPE_UINT64,
}


def _build(table: dict[str, str]) -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="braid/etcd.proto", package=_PACKAGE, syntax="proto3")
    for name, lines in table.items():
        message = file.message_type.add(name=name)
        for line in lines.strip().splitlines():
            field, number, kind, *repeated = line.split()
            added = message.field.add(name=field, number=int(number))
            added.label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            if kind in _SCALARS:
                added.type = _SCALARS[kind]
            else:
                added.type, added.type_name = _Field.TYPE_MESSAGE, f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in table}


_classes = _build(_TABLE)

RangeRequest: Any = _classes["RangeRequest"]
TxnRequest: Any = _classes["TxnRequest"]
WatchRequest: Any = _classes["WatchRequest"]
WatchResponse: Any = _classes["WatchResponse"]
LeaseGrantRequest: Any = _classes["LeaseGrantRequest"]
LeaseRevokeRequest: Any = _classes["LeaseRevokeRequest"]
LeaseKeepAliveRequest: Any = _classes["LeaseKeepAliveRequest"]
AuthenticateRequest: Any = _classes["AuthenticateRequest"]
StatusRequest: Any = _classes["StatusRequest"]


class Method(msgspec.Struct, frozen=True):
    """A remote procedure: where it lives and what its answer is."""

    path: str
    response: Any


RANGE = Method("/etcdserverpb.KV/Range", _classes["RangeResponse"])
TXN = Method("/etcdserverpb.KV/Txn", _classes["TxnResponse"])
WATCH = Method("/etcdserverpb.Watch/Watch", _classes["WatchResponse"])
LEASE_GRANT = Method("/etcdserverpb.Lease/LeaseGrant", _classes["LeaseGrantResponse"])
LEASE_REVOKE = Method("/etcdserverpb.Lease/LeaseRevoke", _classes["LeaseRevokeResponse"])
LEASE_KEEP_ALIVE = Method("/etcdserverpb.Lease/LeaseKeepAlive", _classes["LeaseKeepAliveResponse"])
AUTHENTICATE = Method("/etcdserverpb.Auth/Authenticate", _classes["AuthenticateResponse"])
STATUS = Method("/etcdserverpb.Maintenance/Status", _classes["StatusResponse"])
