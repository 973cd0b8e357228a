"""How an owner measures the spread of its load over key hashes, without opening more than it must."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from braid.cluster.key_hash_samples import (
    CELLS,
    HALF_LIFE_S,
    MAX_UNPACKED_BYTES,
    ROWS,
    SAMPLE_S,
    WANTED_S,
    KeyHashSamples,
)
from braid.model.batch.columns import encode_batch
from braid.model.batch.header import BatchHeader, Codec, verify
from braid.model.batch.key_hashes import sampled_key_hashes
from braid.model.errors import BatchCorrupt
from braid.model.hashing import key_hash
from braid.model.layout import FULL_RANGE, HashRange
from braid.testing.batches import opaque_header


class Watch:
    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


def batch_of(keys: Sequence[bytes | None], codec: Codec = Codec.NONE) -> tuple[BatchHeader, memoryview]:
    batch = encode_batch([b"value"] * len(keys), keys=list(keys), now_us=1, codec=codec)
    return verify(batch), memoryview(batch)


def one_hash(count: int, hash_: int) -> tuple[BatchHeader, memoryview]:
    """A batch whose header says it all: nobody needs its body."""
    return opaque_header(b"", count, key_hashes=(hash_, hash_)), memoryview(b"")


def measuring(hashes: HashRange = FULL_RANGE) -> tuple[KeyHashSamples, Watch]:
    watch = Watch()
    samples = KeyHashSamples(hashes, watch)
    samples.want()
    return samples, watch


KEYS = [b"key-%d" % number for number in range(1_000)]


@pytest.mark.parametrize("codec", [Codec.NONE, Codec.LZ4, Codec.ZSTD])
def test_the_hashes_of_a_batch_are_read_from_its_column(codec: Codec) -> None:
    header, batch = batch_of(KEYS, codec)
    assert header.codec == codec
    assert sampled_key_hashes(batch, header, 1_000) == [key_hash(key) for key in KEYS]
    assert sampled_key_hashes(batch, header, 300) == [key_hash(key) for key in KEYS[::4]]


def test_records_without_keys_have_no_hash() -> None:
    header, batch = batch_of([b"a", None, b"b", None])
    assert sampled_key_hashes(batch, header, 10) == [key_hash(b"a"), None, key_hash(b"b"), None]
    header, batch = batch_of([None] * 7)
    assert sampled_key_hashes(batch, header, 4) == [None] * 4


def test_a_directory_that_lies_is_refused() -> None:
    header, batch = batch_of(KEYS)
    samples, _ = measuring()
    for slot, length in ((2, 1 << 31), (6, 2), (6, 1 << 31)):
        bad = bytearray(batch)
        bad[96 + 4 * slot : 100 + 4 * slot] = length.to_bytes(4, "little")
        with pytest.raises(BatchCorrupt, match="not where the directory says"):
            sampled_key_hashes(bytes(bad), header, 10)
        samples.take(header, memoryview(bad))
    assert samples.summary().records == 0, "a batch that cannot be read is no reason to refuse it"


def test_half_of_the_load_is_below_the_split() -> None:
    samples, watch = measuring()
    for _ in range(10):
        samples.take(*batch_of(KEYS[:ROWS]))
        watch.now += SAMPLE_S
    found = samples.summary()
    assert found.split_at is not None
    below = sum(key_hash(key) < found.split_at for key in KEYS[:ROWS]) / ROWS
    assert found.lower_share == pytest.approx(below)
    assert abs(below - 0.5) < 0.01
    assert found.lower_share + found.upper_share == pytest.approx(1)


def test_a_load_that_sits_in_a_corner_is_halved_there() -> None:
    samples, _ = measuring(HashRange(0x8000, 0xFFFF))
    for hash_ in range(0xF000, 0xF100):
        samples.take(*one_hash(1, hash_))
    found = samples.summary()
    assert found.split_at == 0xF080


def test_headers_with_one_hash_are_counted_and_no_body_is_opened() -> None:
    samples, _ = measuring()
    for hash_, count in ((0x1000, 30), (0x9000, 10)):
        samples.take(*one_hash(count, hash_))
    found = samples.summary()
    assert (found.records, found.lower_share, found.hottest_share) == (40, 0.75, 0.75)
    assert found.hottest is not None
    assert 0x1000 in found.hottest
    assert found.split_at is not None
    assert 0x1000 < found.split_at <= 0x9000


def test_one_batch_a_second_is_opened_and_stands_for_all_since_the_last() -> None:
    samples, watch = measuring()
    low = [key for key in KEYS if key_hash(key) < 0x8000][:100]
    high = [key for key in KEYS if key_hash(key) >= 0x8000][:100]
    samples.take(*batch_of(low))
    for _ in range(5):
        samples.take(*batch_of(low))  # Not opened.
    assert samples.summary().records == 100
    watch.now += SAMPLE_S
    samples.take(*batch_of(high))
    found = samples.summary()
    assert found.records == pytest.approx(700, rel=0.02)
    assert found.split_at is not None
    assert found.split_at > 0x9000, "six of seven records count as high ones"


def test_records_without_keys_have_a_share_on_neither_side() -> None:
    samples, _ = measuring()
    samples.take(opaque_header(b"", 30), memoryview(b""))
    assert samples.summary().split_at is None
    samples.take(*one_hash(10, 0x10))
    found = samples.summary()
    assert (found.records, found.lower_share + found.upper_share) == (40, 0.25)


def test_older_records_count_less() -> None:
    samples, watch = measuring()
    samples.take(*one_hash(100, 0x1000))
    watch.now += HALF_LIFE_S
    samples.take(*one_hash(50, 0x9000))
    found = samples.summary()
    assert (found.records, found.lower_share) == (100, 0.5)


def test_counts_go_on_for_months() -> None:
    samples, watch = measuring()
    for _ in range(40):
        samples.take(*one_hash(100, 0x1000))
        watch.now += 86_400.0
        samples.want()
    samples.take(*one_hash(7, 0x1000))
    assert samples.summary().records == pytest.approx(7)


def test_nothing_is_counted_when_nobody_has_asked_for_a_while() -> None:
    samples, watch = measuring()
    watch.now += WANTED_S
    samples.take(*one_hash(100, 0x1000))
    assert samples.summary().records == 0


def test_a_batch_that_is_large_when_it_is_unpacked_is_left_out() -> None:
    samples, _ = measuring()
    header, batch = batch_of(KEYS, Codec.LZ4)
    samples.take(msgspec.structs.replace(header, raw_length=MAX_UNPACKED_BYTES + 1), batch)
    assert samples.summary().records == 0
    samples.take(header, batch)
    assert samples.summary().records == pytest.approx(2_000), "it waits for the next one that is opened"
    plain, _ = measuring()
    header, batch = batch_of(KEYS)
    plain.take(msgspec.structs.replace(header, raw_length=MAX_UNPACKED_BYTES + 1), batch)
    assert plain.summary().records == pytest.approx(1_000), "nothing is unpacked"


def test_a_hash_outside_of_the_segment_is_not_counted() -> None:
    """A producer may write another column than its header says."""
    header, batch = batch_of(KEYS)
    samples, _ = measuring(HashRange(0, 0x7FFF))
    samples.take(header, batch)
    inside = sum(key_hash(key) < 0x8000 for key in KEYS[::4])
    assert samples.summary().records == pytest.approx(4 * inside)


def test_a_narrow_segment_is_measured_hash_by_hash() -> None:
    samples = KeyHashSamples(HashRange(0x100, 0x100 + CELLS - 1), Watch())
    assert {len(samples.cell(number)) for number in range(samples.cells)} == {1}
    single, _ = measuring(HashRange(5, 5))
    single.take(*one_hash(10, 5))
    found = single.summary()
    assert (found.split_at, found.hottest, found.hottest_share) == (None, HashRange(5, 5), 1.0)


def test_a_histogram_has_the_share_of_each_part() -> None:
    samples, _ = measuring(HashRange(0x8000, 0xFFFF))
    for hash_, count in ((0x8000, 10), (0x9FFF, 20), (0xA000, 30), (0xFFFF, 20)):
        samples.take(*one_hash(count, hash_))
    samples.take(opaque_header(b"", 20), memoryview(b""))
    assert samples.summary(4).shares == (0.3, 0.3, 0.0, 0.2), "a fifth has no key"
    assert samples.summary().shares == (), "only if it is asked for"
    assert len(samples.summary(CELLS * 2).shares) == CELLS


def test_a_histogram_of_few_hashes_has_as_many_parts() -> None:
    samples, _ = measuring(HashRange(5, 7))
    assert samples.summary(64).shares == (0.0, 0.0, 0.0)
    samples.take(*one_hash(10, 7))
    assert samples.summary(64).shares == (0.0, 0.0, 1.0)
