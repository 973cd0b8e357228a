"""How the load of a topic spreads over its key hashes, as a call shows it: for each segment a histogram,
its hottest hashes, and the hash at which a split halves its load. The owners measure it (cluster/key_hash_samples.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Final

from msgspec import Meta, Struct

from braid.model.ids import SegmentId
from braid.model.layout import HashRange, Layout
from braid.model.load import KeyHashLoad
from braid.model.names import TopicName
from braid.scaling.auto_scale import MIN_RECORDS, has_hot_key, is_worth_a_split

PARTS: Final = 256
"""Of a topic, if it has few segments: as many bars as a screen has room for."""
MOST_PARTS: Final = 128
LEAST_PARTS: Final = 8
"""Of one segment. A topic has at most 1,024 of them, so an answer has at most 8,192 shares (I12)."""


def parts_of(segments: int) -> int:
    """Return the parts of the histogram of each segment of a topic that has so many: a power of two, so that parts of
    an equal split begin at round hashes."""
    wanted = max(LEAST_PARTS, min(MOST_PARTS, PARTS // max(1, segments)))
    return 1 << (wanted.bit_length() - 1)


class SegmentKeyHashes(Struct, frozen=True, kw_only=True, rename="camel"):
    """Shares are of all records that the segment takes, lately."""

    hash_range: HashRange
    records_in_per_s: int
    records: Annotated[float, Meta(description="That this is measured from. Older ones count less.")]
    shares: Annotated[
        tuple[float, ...],
        Meta(
            description="Of each part of the range, from its first hash on. The parts are of equal size. Records "
            "without a key are in none of them."
        ),
    ]
    hottest: Annotated[HashRange | None, Meta(description="The few hashes, often one, that have most.")]
    hottest_share: float
    hot_key: Annotated[
        bool, Meta(description="Whether one key, or a few whose hashes are next to each other, is most of the load.")
    ]
    split_at: Annotated[
        str | None,
        Meta(
            description="The first hash of the upper part of a split that halves the load as nearly as can be, in hex "
            "digits; null: it is not known."
        ),
    ]
    lower_share: Annotated[float, Meta(description="Below `splitAt`.")]
    upper_share: float
    split_helps: Annotated[
        bool | None,
        Meta(description="Whether that split takes a tenth of the load off the segment; null: it is not known."),
    ]

    @classmethod
    def of(cls, hashes: HashRange, records_in_per_s: int, found: KeyHashLoad) -> SegmentKeyHashes:
        known = found.records >= MIN_RECORDS
        return cls(
            hash_range=hashes,
            records_in_per_s=records_in_per_s,
            records=round(found.records, 1),
            shares=found.shares,
            hottest=found.hottest,
            hottest_share=round(found.hottest_share, 5),
            hot_key=has_hot_key(found, hashes),
            split_at=f"{found.split_at:04x}" if known and found.split_at is not None else None,
            lower_share=round(found.lower_share, 5),
            upper_share=round(found.upper_share, 5),
            split_helps=is_worth_a_split(found) if known and len(hashes) > 1 else None,
        )


class TopicKeyHashes(Struct, frozen=True, kw_only=True, rename="camel"):
    topic: str
    segments: Annotated[
        dict[SegmentId, SegmentKeyHashes], Meta(description="The active segments whose owners have measured.")
    ]
    unknown: Annotated[tuple[str, ...], Meta(description="Why other segments are missing.")] = ()

    @classmethod
    def of(
        cls,
        name: TopicName,
        layout: Layout,
        measured: Mapping[SegmentId, tuple[int, KeyHashLoad | None]],
        unknown: Iterable[str],
    ) -> TopicKeyHashes:
        """`measured` has the records in a second of each segment, and what its owner knows of their hashes."""
        segments = {
            info.segment_id: SegmentKeyHashes.of(info.hash_range, records_in_per_s, found)
            for info in layout.active
            for records_in_per_s, found in [measured.get(info.segment_id, (0, None))]
            if found is not None
        }
        return cls(topic=str(name), segments=segments, unknown=tuple(unknown))
