"""Every error that Braid raises on purpose.

    BraidError
    ├── InvalidArgument                 what the caller asked can never work
    │   ├── InvalidName
    │   └── InvalidLayout               segments that do not tile the ring, or parents and children that disagree
    ├── BatchError                      bytes that are not a record batch
    │   ├── BatchTruncated
    │   ├── BatchTooLarge
    │   ├── BatchCorrupt
    │   └── BatchUnsupported            a version, codec or flag from the future
    ├── StorageError
    │   ├── DiskError
    │   │   ├── DiskFull
    │   │   ├── SyncFailed              what was written before it may be lost
    │   │   ├── FileMissing
    │   │   └── FileTaken
    │   ├── LogClosed
    │   ├── LogSealed
    │   ├── LogFailed                   stopped confirming after a failed write or sync; its owner opens it again
    │   ├── LogBusy                     too many bytes wait for the disk
    │   ├── LogDamaged                  a range of confirmed records cannot be read
    │   ├── OutOfSequence               a producer neither continues nor repeats what it stored
    │   ├── OffsetOutOfRange
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
    │   ├── MetadataCorrupt             a value that this build cannot read
    │   ├── ConditionFailed             what the caller required is not so; nothing was written
    │   └── LeaseLost
    └── BrokenInvariant                 our bug; the message names the promise

Each class has a stable `code`, which travels on the wire and stands in logs, and `retriable`: whether the same request
may succeed later, unchanged. A code that is used twice fails at import.
"""

from __future__ import annotations

from typing import ClassVar, Self


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
        """The same error, to be raised once more: raising one object many times makes its traceback grow for ever."""
        twin = type(self).__new__(type(self), *self.args)
        twin.__dict__.update(self.__dict__)
        twin.__cause__ = self.__cause__
        return twin


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


class LogClosed(StorageError, code="log-closed", retriable=True):
    pass


class LogSealed(StorageError, code="log-sealed"):
    pass


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


class ConditionFailed(MetadataError, code="condition-failed"):
    pass


class LeaseLost(MetadataError, code="lease-lost"):
    pass


class BrokenInvariant(BraidError, code="broken-invariant"):
    pass
