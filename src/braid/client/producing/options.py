"""The options of a producer."""

from __future__ import annotations

from typing import Final

import msgspec

from braid.model.batch.header import MAX_BODY_BYTES, MAX_RECORDS, Codec
from braid.model.errors import InvalidArgument

CODECS: Final = {None: Codec.NONE, "none": Codec.NONE, "lz4": Codec.LZ4, "zstd": Codec.ZSTD}


class ProducerOptions(msgspec.Struct, frozen=True, kw_only=True):
    linger_s: float = 0.0
    """How long a batch that is not full waits for more records. With 0, a batch leaves at the end of the loop's
    iteration; a small batch waits for the reply to the batch before it."""
    max_batch_bytes: int = 1 << 20
    """A batch of this many bytes is full. A larger record gets its own batch."""
    max_batch_records: int = 65_536
    compression: str | None = None
    """`lz4` or `zstd`, for each batch that becomes smaller by it."""
    max_in_flight_bytes: int = 16 << 20
    """Above this many unconfirmed bytes, `send` waits."""
    timeout_s: float = 30.0
    """How long a record is retried after the program gave it."""

    def __post_init__(self) -> None:
        if not 0 <= self.linger_s <= 60:
            raise InvalidArgument(f"linger is {self.linger_s}; it must be 0 to 60 seconds")
        if not 1 <= self.max_batch_bytes <= MAX_BODY_BYTES // 2:
            raise InvalidArgument(f"max_batch_bytes is {self.max_batch_bytes}; it must be 1 to {MAX_BODY_BYTES // 2}")
        if not 1 <= self.max_batch_records <= MAX_RECORDS:
            raise InvalidArgument(f"max_batch_records is {self.max_batch_records}; it must be 1 to {MAX_RECORDS}")
        if self.compression not in CODECS:
            raise InvalidArgument(f"compression is {self.compression!r}; it must be None, 'lz4' or 'zstd'")
        if self.max_in_flight_bytes < 1:
            raise InvalidArgument(f"max_in_flight_bytes is {self.max_in_flight_bytes}; it must be at least 1")
        if not self.timeout_s > 0:
            raise InvalidArgument(f"timeout is {self.timeout_s}; it must be a positive number of seconds")
