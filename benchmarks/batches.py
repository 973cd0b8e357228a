"""How fast records become batches and batches become records. Run: `python -m benchmarks.batches [--quick]`

Every case is timed in rounds; the best round counts, because noise only ever adds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa

from benchmarks.report import Report
from braid.model.batch.columns import decode_arrow, decode_messages, encode_batch, encode_table
from braid.model.batch.header import Codec, verify
from braid.ports.allocator import keep_freed_memory

NOW_US = 1_790_000_000_000_000
BATCH_BYTES = (16 << 10, 256 << 10, 1 << 20)
RECORD_BYTES = (100, 1024)


def best_seconds(work: Callable[[], object], budget_s: float) -> float:
    """Seconds of one call, from the best of five rounds that together take about `budget_s`."""
    started = time.perf_counter()
    work()
    once = max(time.perf_counter() - started, 1e-7)
    calls = max(1, int(budget_s / 5 / once))
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(calls):
            work()
        best = min(best, (time.perf_counter() - started) / calls)
    return best


def json_values(count: int, size: int) -> list[bytes]:
    """Events that compress about as well as real ones."""
    chance = random.Random(7)
    values = []
    for number in range(count):
        event: dict[str, Any] = {
            "id": number,
            "user": chance.randrange(100_000),
            "kind": chance.choice(["view", "pay"]),
        }
        while len(json.dumps(event)) < size:
            event[f"field{len(event)}"] = chance.choice(["red", "green", "blue"]) + str(chance.randrange(1_000_000))
        values.append(json.dumps(event).encode()[:size])
    return values


def many(report: Report, size: int, batch_bytes: int, budget_s: float) -> None:
    count = batch_bytes // size
    values = json_values(count, size)
    keys = [b"customer-%d" % (number * 7919 % 100_000) for number in range(count)]
    times = list(range(NOW_US, NOW_US + count))
    table = pa.table({"key": pa.array(keys, pa.binary()), "value": pa.array(values, pa.binary())})
    plain = encode_batch(values, now_us=NOW_US)
    keyed = encode_batch(values, keys=keys, timestamps=times, now_us=NOW_US)
    header, keyed_header = verify(plain), verify(keyed)
    cases: Sequence[tuple[str, Callable[[], object]]] = (
        ("encode values", lambda: encode_batch(values, now_us=NOW_US)),
        ("encode keys, values", lambda: encode_batch(values, keys=keys, now_us=NOW_US)),
        ("encode keys, values, times", lambda: encode_batch(values, keys=keys, timestamps=times, now_us=NOW_US)),
        ("encode Arrow table: keys, values", lambda: encode_table(table, now_us=NOW_US)),
        ("verify", lambda: verify(plain)),
        ("decode to Arrow: values", lambda: decode_arrow(plain, header, columns=("value",))),
        ("decode to Arrow: all six columns", lambda: decode_arrow(keyed, keyed_header)),
        ("decode to a list of values", lambda: decode_arrow(plain, header, columns=("value",))[0].to_pylist()),
        ("decode to messages", lambda: decode_messages(plain, header)),
        ("decode to messages with keys", lambda: decode_messages(keyed, keyed_header)),
    )
    for case, work in cases:
        add_rate(report, case, best_seconds(work, budget_s), count, size, batch_bytes, Codec.NONE)


def compressed(report: Report, size: int, codec: Codec, budget_s: float) -> None:
    batch_bytes = 256 << 10
    values = json_values(batch_bytes // size, size)
    batch = encode_batch(values, now_us=NOW_US, codec=codec)
    ratio = round(len(encode_batch(values, now_us=NOW_US)) / len(batch), 1)
    cases: Sequence[tuple[str, Callable[[], object]]] = (
        ("encode values", lambda: encode_batch(values, now_us=NOW_US, codec=codec)),
        ("verify, decode to Arrow: values", lambda: decode_arrow(batch, columns=("value",))),
    )
    for case, work in cases:
        add_rate(report, case, best_seconds(work, budget_s), len(values), size, batch_bytes, codec, ratio)


def single(report: Report, size: int, budget_s: float) -> None:
    values = json_values(1, size)
    keys = [b"customer-7"]
    plain = encode_batch(values, now_us=NOW_US)
    keyed = encode_batch(values, keys=keys, now_us=NOW_US)
    header = verify(plain)
    cases: Sequence[tuple[str, Callable[[], object]]] = (
        ("encode", lambda: encode_batch(values, now_us=NOW_US)),
        ("encode with key", lambda: encode_batch(values, keys=keys, now_us=NOW_US)),
        ("encode with header", lambda: encode_batch(values, keys=keys, headers=[{"trace": b"a1"}], now_us=NOW_US)),
        ("verify", lambda: verify(plain)),
        ("decode to a message", lambda: decode_messages(plain, header)),
        ("verify, decode to a message with key", lambda: decode_messages(keyed)),
        ("decode to Arrow: values", lambda: decode_arrow(plain, header, columns=("value",))),
    )
    for case, work in cases:
        report.add(case, best_seconds(work, budget_s) * 1e6, "µs", record=size, batch=len(plain))


def add_rate(
    report: Report, case: str, seconds: float, count: int, size: int, batch_bytes: int, codec: Codec, ratio: float = 1.0
) -> None:
    report.add(
        case,
        count / seconds,
        "records/s",
        record=size,
        batch=batch_bytes,
        codec=codec.name.lower(),
        ratio=ratio,
        mb_s=round(count * size / seconds / 1e6),
        ns_record=round(seconds / count * 1e9, 1),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few milliseconds per case: does it still run?")
    budget_s = 0.005 if parser.parse_args().quick else 0.5
    keep_freed_memory()
    report = Report("batches")
    one = Report("batches-of-one")
    for size in RECORD_BYTES:
        for batch_bytes in BATCH_BYTES:
            many(report, size, batch_bytes, budget_s)
        for codec in (Codec.LZ4, Codec.ZSTD):
            compressed(report, size, codec, budget_s)
        single(one, size, budget_s)
    for each in (report, one):
        each.print()
        print("written to", os.path.relpath(each.write_jsonl()))


if __name__ == "__main__":
    main()
