import json
from collections.abc import Callable
from typing import Any

import pytest

from braid.model.errors import InvalidLayout
from braid.model.layout import MAX_INITIAL_SEGMENTS, HashRange, Layout, SegmentState, tiles

# The example of PIP-468: 0 was split into 1 and 2, then 1 into 3 and 4.
EXAMPLE = """
{"epoch": 3, "nextSegmentId": 5, "segments": {
 "0": {"segmentId": 0, "hashRange": {"start": 0, "end": 65535}, "state": "SEALED", "parentIds": [],
       "childIds": [1, 2], "createdAtEpoch": 0, "sealedAtEpoch": 1},
 "1": {"segmentId": 1, "hashRange": {"start": 0, "end": 32767}, "state": "SEALED", "parentIds": [0],
       "childIds": [3, 4], "createdAtEpoch": 1, "sealedAtEpoch": 3},
 "2": {"segmentId": 2, "hashRange": {"start": 32768, "end": 65535}, "state": "ACTIVE", "parentIds": [0],
       "childIds": [], "createdAtEpoch": 1, "sealedAtEpoch": 0},
 "3": {"segmentId": 3, "hashRange": {"start": 0, "end": 16383}, "state": "ACTIVE", "parentIds": [1],
       "childIds": [], "createdAtEpoch": 3, "sealedAtEpoch": 0},
 "4": {"segmentId": 4, "hashRange": {"start": 16384, "end": 32767}, "state": "ACTIVE", "parentIds": [1],
       "childIds": [], "createdAtEpoch": 3, "sealedAtEpoch": 0}},
 "properties": {}}
"""


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 16, 1000, MAX_INITIAL_SEGMENTS])
def test_initial_ranges_tile_the_ring_and_are_of_equal_size(count: int) -> None:
    layout = Layout.initial(count)
    ranges = [segment.hash_range for segment in layout.active]
    assert len(ranges) == count
    assert tiles(ranges, HashRange(0, 0xFFFF))
    assert max(map(len, ranges)) - min(map(len, ranges)) <= 1
    assert layout.next_segment_id == count


@pytest.mark.parametrize("count", [-1, 0, MAX_INITIAL_SEGMENTS + 1])
def test_a_topic_begins_with_a_sensible_number_of_segments(count: int) -> None:
    with pytest.raises(InvalidLayout, match="a topic begins with 1 to"):
        Layout.initial(count)


def test_every_hash_finds_the_one_segment_that_holds_it() -> None:
    for layout in (Layout.initial(7), Layout.from_json(EXAMPLE)):
        for key_hash in range(0x10000):
            found = [segment for segment in layout.active if key_hash in segment.hash_range]
            assert [layout.find_active(key_hash)] == found


@pytest.mark.parametrize("key_hash", [-1, 0x10000])
def test_a_hash_outside_the_ring_is_refused(key_hash: int) -> None:
    with pytest.raises(InvalidLayout):
        Layout.initial(2).find_active(key_hash)


def test_the_seeds_json_is_read_and_written_unchanged() -> None:
    layout = Layout.from_json(EXAMPLE)
    assert [segment.segment_id for segment in layout.active] == [3, 4, 2]
    assert layout.segment(1).state is SegmentState.SEALED
    assert json.loads(layout.to_json()) == json.loads(EXAMPLE)
    assert Layout.from_json(layout.to_json()) == layout


def test_ancestors_reach_back_through_every_generation() -> None:
    layout = Layout.from_json(EXAMPLE)
    assert layout.ancestors(4) == (0, 1)
    assert layout.ancestors(2) == (0,)
    assert layout.ancestors(0) == ()


def test_a_merged_segment_has_all_its_parents_as_ancestors_once() -> None:
    data = json.loads(EXAMPLE)
    segments = data["segments"]
    data.update(epoch=4, nextSegmentId=6)
    for parent in ("4", "2"):
        segments[parent].update(state="SEALED", childIds=[5], sealedAtEpoch=4)
    segments["5"] = {**segments["3"], "segmentId": 5, "parentIds": [4, 2], "createdAtEpoch": 4}
    segments["5"]["hashRange"] = {"start": 16384, "end": 65535}
    assert Layout.from_json(json.dumps(data)).ancestors(5) == (0, 1, 2, 4)


def test_an_unknown_segment_is_said_to_be_unknown() -> None:
    with pytest.raises(InvalidLayout, match="there is no segment 9 in the layout of epoch 3: 0, 1, 2, 3, 4"):
        Layout.from_json(EXAMPLE).segment(9)


def change(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data.update(fields)


def change_segment(number: int, **fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda data: data["segments"][str(number)].update(fields)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change_segment(4, hashRange={"start": 16385, "end": 32767}), "do not tile"),  # a gap
        (change_segment(4, hashRange={"start": 16383, "end": 32767}), "do not tile"),  # an overlap
        (change_segment(4, hashRange={"start": 5, "end": 4}), "no hash range"),
        (change_segment(4, hashRange={"start": 0, "end": 65536}), "no hash range"),
        (change_segment(4, hashRange={"start": 0.5, "end": 9}), "cannot be read"),  # integers only
        (change_segment(4, segmentId=3), "must be its id"),
        (change_segment(4, parentIds=[]), "does not agree"),
        (change_segment(4, parentIds=[1, 2]), "does not agree"),
        (change_segment(4, parentIds=[17]), "does not agree"),
        (change_segment(1, childIds=[3, 4, 17]), "does not agree"),
        (change_segment(1, childIds=[3, 4, 4]), "do not tile"),
        (change_segment(1, childIds=[]), "needs children"),
        (change_segment(1, sealedAtEpoch=0), "is sealed at epoch 0"),
        (change_segment(1, sealedAtEpoch=2), "one change does both"),
        (change_segment(1, sealedAtEpoch=9), "is sealed at epoch 9"),
        (change_segment(2, createdAtEpoch=9), "created at epoch 9"),
        (change_segment(2, sealedAtEpoch=3), "is active, yet"),
        (change_segment(1, state="ACTIVE"), "is active, yet"),
        (change_segment(1, state="OPEN"), "cannot be read"),
        (change(nextSegmentId=4), "must be its id"),
        (change(epoch=-1), "epochs count from 0"),
        (change(segments={}), "I6: .* they are none"),
        (change(segments=[]), "cannot be read"),
    ],
)
def test_a_layout_that_breaks_a_rule_is_refused(damage: Callable[[dict[str, Any]], None], message: str) -> None:
    data = json.loads(EXAMPLE)
    damage(data)
    with pytest.raises(InvalidLayout, match=message):
        Layout.from_json(json.dumps(data))


def test_active_ranges_with_a_gap_are_refused_although_they_have_no_parents() -> None:
    whole = Layout.initial(3)
    with pytest.raises(InvalidLayout, match="I6"):
        Layout(whole.epoch, whole.next_segment_id, {key: info for key, info in whole.segments.items() if key != 1})


@pytest.mark.parametrize("data", [b"", b"{", b"null", b"[]", b"\xff"])
def test_what_is_not_json_of_a_layout_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidLayout, match="cannot be read"):
        Layout.from_json(data)
