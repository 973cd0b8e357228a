"""Every error that Braid raises on purpose.

    BraidError
    ├── InvalidArgument                 what the caller asked can never work
    │   ├── InvalidName
    │   └── InvalidLayout               segments that do not tile the ring, or parents and children that disagree
    ├── BatchError                      bytes that are not a record batch
    │   ├── BatchTruncated
    │   ├── BatchTooLarge
    │   ├── BatchCorrupt
    │   ├── BatchUnsupported            a version, codec or flag from the future
    │   └── BatchUnreadable             a stored batch whose records cannot be decoded; readers stop before it
    ├── StorageError
    │   ├── DiskError
    │   │   ├── DiskFull
    │   │   ├── SyncFailed              what was written before it may be lost
    │   │   ├── FileMissing
    │   │   ├── FileTaken
    │   │   ├── OutOfFiles              this process, or the machine, may not open another file now
    │   │   └── ForeignFile             a file that is not Braid's is in the way
    │   ├── LogClosed
    │   ├── LogSealed
    │   │   └── SegmentSealed           to a publisher: the batch is not stored, and never will be in this segment
    │   ├── LogFailed                   stopped confirming after a failed write or sync; its owner opens it again
    │   ├── LogBusy                     too many bytes wait for the disk
    │   ├── LogDamaged                  a range of confirmed records cannot be read
    │   ├── OutOfSequence               a producer neither continues nor repeats what it stored
    │   ├── OffsetOutOfRange
    │   │   └── PositionDiverged        the record before the position is not the one that the reader has read
    │   ├── DataLoss                    records that a reader was to read are gone
    │   ├── RecoveryConflict            two pieces of evidence contradict each other
    │   ├── RecoveryUnsafe              the last owner's unexported tail is not here
    │   ├── Fenced                      another owner has taken the segment
    │   ├── ObjectExists
    │   ├── ObjectMissing
    │   ├── ObjectStoreUnavailable
    │   └── ChunkCorrupt
    ├── MetadataError
    │   ├── MetadataUnavailable         the store did not answer: nothing is known
    │   ├── MetadataUncertain           a write was sent and no answer came: it may have happened
    │   ├── MetadataCompacted           a watch asked for a revision that is gone
    │   ├── MetadataCorrupt             a value that no build can read
    │   │   └── RecordUnreadable        a stored record that this build cannot read; a later one may
    │   ├── ConditionFailed             what the caller required is not so; nothing was written
    │   └── LeaseLost
    ├── ServiceError                    what a broker answers to a client
    │   ├── TopicNotFound
    │   ├── TopicExists
    │   ├── SegmentNotFound
    │   ├── SubscriptionNotFound
    │   ├── BrokerNotFound
    │   ├── BrokerNotActive             it is draining or stopping, and gets no segments
    │   ├── SubscriptionExists
    │   ├── SubscriptionBusy            it has consumers
    │   ├── SubscriptionKindConflict    it exists as another kind
    │   ├── AckStale                    the message was handed out again, or the queue was set elsewhere
    │   ├── ConsumerReplaced            another consumer of the same name took its place
    │   ├── NotServing                  this broker does not serve the segment now; look up its owner again
    │   ├── NotEnoughReplicas           too few brokers hold a copy of the segment now to confirm anything
    │   ├── Moved                       another broker serves it now, or soon
    │   ├── MoveRefused                 the move cannot be: it is moving already, or the target cannot take it
    │   ├── TransitionRefused           the layout cannot be changed so: not active, no neighbours, too narrow
    │   ├── TransitionRunning           another change of the layout is under way
    │   ├── StaleRoute                  the publish was routed by a layout that is not the topic's
    │   ├── Overloaded                  a limit of the broker is reached
    │   ├── ShuttingDown
    │   ├── NotAvailable                named in the interface, but not in this version
    │   ├── Unauthenticated
    │   └── PermissionDenied
    ├── LinkError                       between a client and a broker
    │   ├── ProtocolError               the peer breaks the protocol; the connection is closed
    │   │   ├── FrameTooLarge
    │   │   ├── UnknownOperation
    │   │   └── UnsupportedVersion
    │   ├── ConnectFailed
    │   └── ConnectionLost
    ├── ClientClosed                    the client, producer or consumer was closed before this was done
    ├── ProducerFull                    more was submitted than may wait to be confirmed: await flush()
    ├── TimedOut                        the client gave up; whether it happened is not known. Also a TimeoutError
    ├── RepeatDiffers                   what is written again is not what was written the first time
    ├── RepeatTooLate                   whether this was written before cannot be known any more
    ├── InvalidConfig
    ├── JobFailed                       Spark ended a job for a reason of its own
    ├── TableMismatch                   the table is not one that the topic can land in
    ├── TableConflict                   another writer has committed to the table meanwhile
    └── BrokenInvariant                 our bug; the message names the promise

Each class has a stable `code`, which travels on the wire and stands in logs, and `retriable`: whether the same request
may succeed later, unchanged. A code that is used twice fails at import.

A message says what was asked. A caller may ask with megabytes, and its error is copied, logged and sent. So messages
repeat input by `quote` or `cut`: its beginning, and how long it is.
"""

from __future__ import annotations

import copyreg
from typing import Any, ClassVar, Final, Self

MAX_QUOTED_CHARS: Final = 200


class BraidError(Exception):
    """The root of the tree."""

    code: ClassVar[str] = "error"
    retriable: ClassVar[bool] = False

    by_code: ClassVar[dict[str, type[BraidError]]] = {}

    def __init_subclass__(cls, *, code: str, retriable: bool = False) -> None:
        if code in BraidError.by_code:
            raise TypeError(f"error code {code!r} is used by {BraidError.by_code[code].__name__} and {cls.__name__}")
        cls.code = code
        cls.retriable = retriable
        BraidError.by_code[code] = cls

    def again(self) -> Self:
        """Return a copy to raise once more: raising one object many times makes its traceback grow for ever."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        twin.__cause__ = self.__cause__
        return twin

    def __reduce__(self) -> tuple[Any, ...]:
        # Errors leave worker processes by pickle. Python would call the class with the message alone.
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class InvalidArgument(BraidError, code="invalid-argument"):
    pass


class InvalidName(InvalidArgument, code="invalid-name"):
    pass


class InvalidLayout(InvalidArgument, code="invalid-layout"):
    pass


class BatchError(BraidError, code="batch"):
    pass


class BatchTruncated(BatchError, code="batch-truncated"):
    pass


class BatchTooLarge(BatchError, code="batch-too-large"):
    pass


class BatchCorrupt(BatchError, code="batch-corrupt"):
    pass


class BatchUnsupported(BatchError, code="batch-unsupported"):
    pass


class BatchUnreadable(BatchError, code="batch-unreadable"):
    def __init__(self, message: str, segment: int, first_offset: int, next_offset: int) -> None:
        """`next_offset` is where a reader goes on that skips the batch."""
        super().__init__(message)
        self.segment = segment
        self.first_offset = first_offset
        self.next_offset = next_offset


class StorageError(BraidError, code="storage"):
    pass


class DiskError(StorageError, code="disk"):
    pass


class DiskFull(DiskError, code="disk-full", retriable=True):
    pass


class SyncFailed(DiskError, code="sync-failed"):
    pass


class FileMissing(DiskError, code="file-missing"):
    pass


class FileTaken(DiskError, code="file-taken"):
    pass


class OutOfFiles(DiskError, code="out-of-files", retriable=True):
    pass


class ForeignFile(DiskError, code="foreign-file"):
    pass


class LogClosed(StorageError, code="log-closed", retriable=True):
    pass


class LogSealed(StorageError, code="log-sealed"):
    pass


class SegmentSealed(LogSealed, code="segment-sealed", retriable=True):
    end = -1
    next_sequence = -1
    """The values where a peer tells only the code."""

    def __init__(self, message: str, end: int, next_sequence: int) -> None:
        """`end` is the offset at which the log ends; `next_sequence` says how far the log has the batch's producer
        (model/batch/identity.py)."""
        super().__init__(message)
        self.end = end
        self.next_sequence = next_sequence


class LogFailed(StorageError, code="log-failed", retriable=True):
    pass


class LogBusy(StorageError, code="log-busy", retriable=True):
    pass


class LogDamaged(StorageError, code="log-damaged"):
    def __init__(self, message: str, first_offset: int, next_offset: int) -> None:
        super().__init__(message)
        self.first_offset = first_offset
        self.next_offset = next_offset


class OutOfSequence(StorageError, code="out-of-sequence"):
    pass


class OffsetOutOfRange(StorageError, code="offset-out-of-range"):
    def __init__(self, message: str, earliest: int, end: int) -> None:
        super().__init__(message)
        self.earliest = earliest
        self.end = end


class PositionDiverged(OffsetOutOfRange, code="position-diverged"):
    def __init__(self, message: str, earliest: int, end: int, parted_at: int) -> None:
        """`parted_at` is the first offset at which the log may hold other records than the reader has read."""
        super().__init__(message, earliest, end)
        self.parted_at = parted_at


class DataLoss(StorageError, code="data-loss"):
    pass


class RecoveryConflict(StorageError, code="recovery-conflict"):
    pass


class RecoveryUnsafe(StorageError, code="recovery-unsafe"):
    pass


class Fenced(StorageError, code="fenced"):
    pass


class ObjectExists(StorageError, code="object-exists"):
    pass


class ObjectMissing(StorageError, code="object-missing"):
    pass


class ObjectStoreUnavailable(StorageError, code="object-store-unavailable", retriable=True):
    pass


class ChunkCorrupt(StorageError, code="chunk-corrupt"):
    pass


class MetadataError(BraidError, code="metadata"):
    pass


class MetadataUnavailable(MetadataError, code="metadata-unavailable", retriable=True):
    pass


class MetadataUncertain(MetadataError, code="metadata-uncertain", retriable=True):
    pass


class MetadataCompacted(MetadataError, code="metadata-compacted"):
    pass


class MetadataCorrupt(MetadataError, code="metadata-corrupt"):
    pass


class RecordUnreadable(MetadataCorrupt, code="record-unreadable", retriable=True):
    pass


class ConditionFailed(MetadataError, code="condition-failed"):
    pass


class LeaseLost(MetadataError, code="lease-lost"):
    pass


class ServiceError(BraidError, code="service"):
    pass


class TopicNotFound(ServiceError, code="topic-not-found"):
    pass


class TopicExists(ServiceError, code="topic-exists"):
    pass


class SegmentNotFound(ServiceError, code="segment-not-found"):
    pass


class SubscriptionNotFound(ServiceError, code="subscription-not-found"):
    pass


class BrokerNotFound(ServiceError, code="broker-not-found"):
    pass


class BrokerNotActive(ServiceError, code="broker-not-active"):
    pass


class SubscriptionExists(ServiceError, code="subscription-exists"):
    pass


class SubscriptionBusy(ServiceError, code="subscription-busy"):
    pass


class SubscriptionKindConflict(ServiceError, code="subscription-kind-conflict"):
    pass


class AckStale(ServiceError, code="ack-stale"):
    pass


class ConsumerReplaced(ServiceError, code="consumer-replaced"):
    pass


class NotServing(ServiceError, code="not-serving", retriable=True):
    pass


class NotEnoughReplicas(ServiceError, code="not-enough-replicas", retriable=True):
    pass


class Moved(ServiceError, code="moved", retriable=True):
    owner = ""
    epoch = 0
    """The values where a peer tells only the code."""

    def __init__(self, message: str, owner: str = "", epoch: int = 0) -> None:
        """`owner` is the address of the broker that serves the segment; empty while none does."""
        super().__init__(message)
        self.owner = owner
        self.epoch = epoch


class MoveRefused(ServiceError, code="move-refused"):
    pass


class TransitionRefused(ServiceError, code="transition-refused"):
    pass


class TransitionRunning(ServiceError, code="transition-running"):
    pass


class StaleRoute(ServiceError, code="stale-route", retriable=True):
    pass


class Overloaded(ServiceError, code="overloaded", retriable=True):
    pass


class ShuttingDown(ServiceError, code="shutting-down", retriable=True):
    pass


class NotAvailable(ServiceError, code="not-available"):
    pass


class Unauthenticated(ServiceError, code="unauthenticated"):
    pass


class PermissionDenied(ServiceError, code="permission-denied"):
    pass


class LinkError(BraidError, code="link"):
    pass


class ProtocolError(LinkError, code="protocol"):
    pass


class FrameTooLarge(ProtocolError, code="frame-too-large"):
    pass


class UnknownOperation(ProtocolError, code="unknown-operation"):
    pass


class UnsupportedVersion(ProtocolError, code="unsupported-version"):
    pass


class ConnectFailed(LinkError, code="connect-failed", retriable=True):
    pass


class ConnectionLost(LinkError, code="connection-lost", retriable=True):
    pass


class ClientClosed(BraidError, code="client-closed"):
    pass


class ProducerFull(BraidError, code="producer-full", retriable=True):
    pass


class TimedOut(BraidError, TimeoutError, code="timed-out"):
    pass


class RepeatDiffers(BraidError, code="repeat-differs"):
    pass


class RepeatTooLate(BraidError, code="repeat-too-late"):
    pass


class InvalidConfig(BraidError, code="invalid-config"):
    pass


class JobFailed(BraidError, code="job-failed"):
    pass


class TableMismatch(BraidError, code="table-mismatch"):
    pass


class TableConflict(BraidError, code="table-conflict", retriable=True):
    pass


class BrokenInvariant(BraidError, code="broken-invariant"):
    pass


def cut(text: str, most: int = MAX_QUOTED_CHARS) -> str:
    """Return the text, or its beginning and its length."""
    return text if len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


def quote(given: object) -> str:
    """Return the `repr` of what was given, cut."""
    if not isinstance(given, str | bytes):
        return cut(repr(given))
    return repr(given) if len(given) <= MAX_QUOTED_CHARS else f"{given[:MAX_QUOTED_CHARS]!r}… ({len(given)} characters)"
