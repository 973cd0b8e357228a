"""Batches with opaque bodies: storage never opens one, so tests of storage need no columns."""

from __future__ import annotations

from crc32c import crc32c

from braid.model.batch.header import NO_KEYS, BatchHeader, Codec, assemble
from braid.model.ids import ProducerId, Sequence


def opaque_header(
    body: bytes,
    count: int = 1,
    *,
    producer: int = 0,
    sequence: int = 0,
    times: tuple[int, int] = (1, 1),
    key_hashes: tuple[int, int] = NO_KEYS,
) -> BatchHeader:
    """The header of a batch as a producer sends it."""
    return BatchHeader(
        codec=Codec.NONE,
        flags=0,
        schema_id=0,
        body_length=len(body),
        raw_length=len(body),
        body_crc=crc32c(body),
        count=count,
        min_key_hash=key_hashes[0],
        max_key_hash=key_hashes[1],
        producer_id=ProducerId(producer),
        first_sequence=Sequence(sequence),
        min_timestamp=times[0],
        max_timestamp=times[1],
    )


def opaque_batch(body: bytes, count: int = 1, *, producer: int = 0, sequence: int = 0) -> bytearray:
    """A batch as a producer sends it."""
    return assemble(opaque_header(body, count, producer=producer, sequence=sequence), body)
