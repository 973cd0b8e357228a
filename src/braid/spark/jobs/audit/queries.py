"""The rules of an audit that hold between batches far from each other, as Spark SQL over one row for each batch.

    segment piece position base next count flags epoch producer sequence append crc size │ rule object text

`piece` numbers the chunks and tails of the topic in the order of their offsets. A row with a `rule` is a finding of the
scan; all other rows are batches. SQL has no unsigned numbers: a producer id keeps its bits, so derived ids
(model/batch/identity.py) are negative; a sequence loses 2⁶³, so its order is kept.

Each function takes such rows and returns rows of `FINDING_FIELDS`. No query sorts all batches by offset: between pieces
one summary row for each is enough, and each producer has a window of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Window
from pyspark.sql import functions as f

from braid.spark.jobs.audit.rules import EXPIRED

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

BATCH_SCHEMA: Final = (
    "segment int, piece int, position bigint, base bigint, next bigint, count int, flags int, epoch bigint, "
    "producer bigint, sequence bigint, append bigint, crc bigint, size int, rule string, object string, text string, "
    "since bigint, until bigint"
)
FINDING_FIELDS: Final = ("rule", "segment", "piece", "base", "object", "text", "since", "until")
SEQUENCE_BIAS: Final = 1 << 63
SEAL: Final = 1


def batches_of(rows: DataFrame) -> DataFrame:
    return rows.where(f.col("rule").isNull())


def scanned(rows: DataFrame) -> DataFrame:
    """Select the findings of the scan."""
    return rows.where(f.col("rule").isNotNull()).select(*FINDING_FIELDS)


def findings(rows: DataFrame, most: int) -> DataFrame:
    """Select the findings of the scan and of the rules below: at most so many defects, and everything that has expired.
    Expired offsets explain gaps; if they counted, they could displace defects."""
    found = scanned(rows).unionAll(seams(rows)).unionAll(sequences(rows))
    expired = f.col("rule") == EXPIRED
    return found.where(~expired).limit(most).unionAll(scanned(rows).where(expired))


def totals(rows: DataFrame) -> DataFrame:
    """Sum up each segment that has a batch, in one row."""
    with_records = f.col("count") > 0
    return (
        batches_of(rows)
        .groupBy("segment")
        .agg(
            f.count_if(with_records).alias("batches"),
            f.sum(f.col("count").cast("bigint")).alias("records"),
            f.sum(f.col("size").cast("bigint")).alias("bytes"),
            f.min(f.when(with_records, f.col("append"))).alias("first_append"),
            f.max(f.when(with_records, f.col("append"))).alias("last_append"),
            f.max(f.when(f.col("flags").bitwiseAND(SEAL) != 0, f.col("base"))).alias("seal_at"),
            f.min("base").alias("first_offset"),
            f.min_by("piece", "base").alias("first_piece"),
        )
    )


def seams(rows: DataFrame) -> DataFrame:
    """Check the seams between pieces: no gap, no overlap, no falling epoch, nothing after a seal. The scan has checked
    the inside of pieces."""
    place = f.struct("base", "position")
    pieces = (
        batches_of(rows)
        .groupBy("segment", "piece")
        .agg(
            f.min("base").alias("first"),
            f.max("next").alias("end"),
            f.min_by("epoch", place).alias("first_epoch"),
            f.max("epoch").alias("last_epoch"),
            f.max(f.col("flags").bitwiseAND(SEAL)).alias("sealed"),
        )
    )
    order = Window.partitionBy("segment").orderBy("piece")
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    joints = pieces.select(
        "segment",
        "piece",
        "first",
        "first_epoch",
        f.max("end").over(before).alias("expected"),
        f.lag("last_epoch").over(order).alias("epoch_before"),
        f.max("sealed").over(before).alias("sealed_before"),
    ).where(f.col("expected").isNotNull())
    first, expected = f.col("first"), f.col("expected")
    before_it, own = f.col("epoch_before"), f.col("first_epoch")
    gap = f.format_string("offsets %d to %d are not there", expected, first - 1)
    owners = f.format_string(": epoch %d ends before them, epoch %d begins after them", before_it, own)
    overlap = f.format_string(
        "a chunk begins at offset %d, which has been given out: %d should follow", first, expected
    )
    fall = f.format_string("epoch %d comes after epoch %d", own, before_it)
    after_seal = f.lit("a chunk follows the seal of the log")
    return _findings(
        joints,
        _finding((first > expected) & (before_it == own), "offset-gap", expected, gap, since=expected, until=first),
        _finding(
            (first > expected) & (before_it != own),
            "takeover-gap",
            expected,
            f.concat(gap, owners),
            since=expected,
            until=first,
        ),
        _finding(first < expected, "offset-overlap", first, overlap),
        _finding(own < before_it, "epoch-order", first, fall),
        _finding(f.col("sealed_before") != 0, "behind-seal", first, after_seal),
    )


def sequences(rows: DataFrame) -> DataFrame:
    """Find, for each producer in each segment, sequences that were stored again and sequences that were jumped over.

    A derived producer may jump to the beginning of a later era. The same offsets in two chunks are an overlap, not a
    batch that was stored twice."""
    theirs = batches_of(rows).where((f.col("producer") != 0) & (f.col("count") > 0))
    order = Window.partitionBy("segment", "producer").orderBy("base", "piece", "position")
    before = order.rowsBetween(Window.unboundedPreceding, -1)
    sequence = f.col("sequence")
    judged = theirs.select(
        "segment",
        "piece",
        "base",
        "producer",
        "sequence",
        f.max(sequence + f.col("count")).over(before).alias("expected"),
        f.max("next").over(before).alias("since"),
    ).where(f.col("expected").isNotNull() & (f.col("base") >= f.col("since")))
    begins_era = (f.col("producer") < 0) & (sequence.bitwiseAND(0xFFFF_FFFF) == 0)
    again = f.format_string(
        "producer 0x%x stored sequence %s again: %s should follow",
        f.col("producer"),
        _plain(sequence),
        _plain("expected"),
    )
    jump = f.format_string(
        "producer 0x%x stored sequence %s where %s should follow",
        f.col("producer"),
        _plain(sequence),
        _plain("expected"),
    )
    base, expected = f.col("base"), f.col("expected")
    return _findings(
        judged,
        _finding(sequence < expected, "duplicate-batch", base, again),
        _finding((sequence > expected) & ~begins_era, "sequence-gap", base, jump, since=f.col("since"), until=base),
    )


def repeats(rows: DataFrame, related: list[int]) -> DataFrame:
    """Find batches with the same producer, sequence and body in several of the `related` segments, those with parents
    or children: (producer, sequence, places). The driver knows which of these segments are ancestors of which."""
    theirs = batches_of(rows).where((f.col("producer") != 0) & (f.col("count") > 0) & f.col("segment").isin(*related))
    return (
        theirs.groupBy("producer", "sequence", "count", "crc")
        .agg(f.collect_list(f.struct("segment", "base", "piece")).alias("places"), f.min("segment").alias("lowest"),
             f.max("segment").alias("highest"))
        .where(f.col("lowest") != f.col("highest"))
        .select("producer", _plain("sequence").alias("sequence"), "places")
    )  # fmt: skip


def _plain(sequence: Any) -> Any:
    """Return a sequence as the producer counts it, as text: it may exceed the highest signed number."""
    column = f.col(sequence) if isinstance(sequence, str) else sequence
    return (column.cast("decimal(20,0)") + f.lit(str(SEQUENCE_BIAS)).cast("decimal(20,0)")).cast("string")


def _finding(holds: Any, rule: str, offset: Any, text: Any, *, since: Any = None, until: Any = None) -> Any:
    """Make a finding where the condition holds, null elsewhere."""
    nowhere = f.lit(-1)
    return f.when(
        holds,
        f.struct(
            f.lit(rule).alias("rule"),
            offset.cast("bigint").alias("base"),
            text.alias("text"),
            (nowhere if since is None else since).cast("bigint").alias("since"),
            (nowhere if until is None else until).cast("bigint").alias("until"),
        ),
    )


def _findings(rows: DataFrame, *findings: Any) -> DataFrame:
    """Collect all findings in one pass."""
    found = f.explode(f.filter(f.array(*findings), lambda each: each.isNotNull())).alias("found")
    return rows.select("segment", "piece", found).select(
        "found.rule",
        "segment",
        "piece",
        "found.base",
        f.lit(None).cast("string").alias("object"),
        "found.text",
        "found.since",
        "found.until",
    )
