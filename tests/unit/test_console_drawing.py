"""The geometry of the braid: where ribbons and links lie, and what they say."""

from __future__ import annotations

import re

import pytest
from msgspec import structs

from braid.console.drawing.axis import ago_text, hash_ticks, time_ticks
from braid.console.drawing.geometry import FILL, MIN_RIBBON_PX, Braid, bridge, draw_braid, smooth
from braid.console.drawing.strands import RING, Change, Strand, Tenure, Window, panned, zoomed
from braid.console.drawing.svg import write_svg

WINDOW = Window(start=0.0, end=100.0, width=1000.0, height=400.0)


def strand(
    segment: int,
    first: int,
    last: int,
    *,
    born: float = -10.0,
    sealed: float | None = None,
    rate: float = 0.0,
    owner: str = "a",
    parents: tuple[int, ...] = (),
    children: tuple[int, ...] = (),
    tenures: tuple[Tenure, ...] = (),
) -> Strand:
    times = [born + 1.0, born + 2.0]
    return Strand(
        segment=segment,
        first_hash=first,
        last_hash=last,
        born=born,
        sealed=sealed,
        parents=parents,
        children=children,
        tenures=tenures or (Tenure(owner, born),),
        times=times,
        rates=[rate, rate],
    )


SPLIT = (
    strand(0, 0, 0xFFFF, sealed=50.0, rate=100.0, children=(1, 2)),
    strand(1, 0, 0x7FFF, born=50.0, rate=75.0, parents=(0,), owner="b"),
    strand(2, 0x8000, 0xFFFF, born=50.0, rate=25.0, parents=(0,)),
)
MERGE = (
    strand(0, 0, 0x7FFF, sealed=50.0, rate=30.0, children=(2,)),
    strand(1, 0x8000, 0xFFFF, sealed=50.0, rate=10.0, children=(2,), owner="b"),
    strand(2, 0, 0xFFFF, born=50.0, rate=40.0, parents=(0, 1)),
)


def numbers(path: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"(-?[\d.]+),(-?[\d.]+)", path)]


def height_at(path: str, x: float) -> float:
    """How thick a shape is where it has points."""
    found = [y for px, y in numbers(path) if abs(px - x) < 0.11]
    return max(found) - min(found)


def ribbon(braid: Braid, segment: int) -> str:
    return next(each.path for each in braid.ribbons if each.segment == segment)


def test_a_lane_is_as_high_as_its_share_of_the_ring() -> None:
    lanes = {each.segment: each for each in draw_braid(SPLIT, WINDOW).lanes}
    assert (lanes[1].top, lanes[1].bottom, lanes[2].top, lanes[2].bottom) == (0.0, 200.0, 200.0, 400.0)
    assert (lanes[0].left, lanes[0].right) == (0.0, 500.0), "from the left edge to its end"
    assert (lanes[2].left, lanes[2].right) == (500.0, 1000.0)


def test_thickness_is_traffic_on_one_scale_and_fits_into_the_lane() -> None:
    braid = draw_braid(SPLIT, WINDOW)
    thick = {segment: height_at(ribbon(braid, segment), 1000.6) for segment in (1, 2)}
    parent = height_at(ribbon(braid, 0), -0.6)
    assert thick[1] == pytest.approx(3 * thick[2], rel=0.02)
    assert parent == pytest.approx(thick[1] + thick[2], rel=0.02), "children are together as thick as their parent"
    assert thick[1] <= FILL * 200
    assert parent <= FILL * 400


def test_a_strand_without_traffic_is_a_thin_line() -> None:
    braid = draw_braid([strand(0, 0, 0xFFFF)], WINDOW)
    assert height_at(ribbon(braid, 0), -0.6) == pytest.approx(MIN_RIBBON_PX, abs=0.11)


def test_a_split_is_a_link_from_a_part_of_the_parent_to_each_child() -> None:
    braid = draw_braid(SPLIT, WINDOW)
    links = {each.child: each for each in braid.links}
    assert set(links) == {1, 2}
    assert (links[1].source, links[1].target) == ("a", "b")
    left = [height_at(links[child].path, links[child].left) for child in (1, 2)]
    assert sum(left) == pytest.approx(height_at(ribbon(braid, 0), links[1].left + 0.6), abs=0.4)
    assert left[0] == pytest.approx(3 * left[1], rel=0.05), "by the traffic of the children"
    for child in (1, 2):
        end = height_at(links[child].path, links[child].right)
        assert end == pytest.approx(height_at(ribbon(braid, child), links[child].right - 0.6), abs=0.3)
    assert links[1].left < 500 < links[1].right, "around the change"


def test_children_that_were_not_measured_yet_share_the_traffic_of_their_parent() -> None:
    parent, *children = SPLIT
    braid = draw_braid([parent, *(structs.replace(each, times=(), rates=()) for each in children)], WINDOW)
    assert [(label.segment, label.rate) for label in braid.labels] == [(1, 50.0), (2, 50.0)]


def test_a_merged_strand_that_was_not_measured_yet_has_the_traffic_of_both_parents() -> None:
    *parents, child = MERGE
    braid = draw_braid([*parents, structs.replace(child, times=(), rates=())], WINDOW)
    assert [(label.segment, label.rate) for label in braid.labels] == [(2, 40.0)]


def test_a_merge_is_the_mirror_of_a_split() -> None:
    braid = draw_braid(MERGE, WINDOW)
    links = {each.parent: each for each in braid.links}
    assert set(links) == {0, 1}
    right = [height_at(links[parent].path, links[parent].right) for parent in (0, 1)]
    assert right[0] == pytest.approx(3 * right[1], rel=0.05)
    lower = min(y for x, y in numbers(links[1].path) if abs(x - links[1].right) < 0.11)
    upper = max(y for x, y in numbers(links[0].path) if abs(x - links[0].right) < 0.11)
    assert lower == pytest.approx(upper, abs=0.11), "the parents lie beside each other in the child"


def test_links_of_a_short_life_do_not_overlap() -> None:
    quick = (
        strand(0, 0, 0xFFFF, sealed=50.0, children=(1,)),
        strand(1, 0, 0xFFFF, born=50.0, sealed=51.0, parents=(0,), children=(2,)),
        strand(2, 0, 0xFFFF, born=51.0, parents=(1,)),
    )
    links = {each.child: each for each in draw_braid(quick, WINDOW).links}
    assert links[1].right <= links[2].left


def test_a_link_to_a_child_that_was_just_born_ends_before_now() -> None:
    young = (
        strand(0, 0, 0xFFFF, sealed=99.0, children=(1,)),
        strand(1, 0, 0xFFFF, born=99.0, parents=(0,)),
    )
    (link,) = draw_braid(young, WINDOW).links
    assert (link.left < 990.0, link.right < 1000.0) == (True, True)


def test_links_have_no_corner() -> None:
    path = bridge(0, 10, 20, 100, 50, 70)
    upper = re.match(r"M0.0,10.0C(.+?) (.+?) 100.0,50.0L", path)
    assert upper is not None
    assert (upper[1], upper[2]) == ("50.0,10.0", "50.0,50.0"), "it leaves and arrives horizontally"


def test_a_smooth_curve_stays_between_its_points() -> None:
    curve = smooth([(0, 0), (10, 5), (20, 5), (30, 1)])
    assert all(0 <= y <= 5 for _, y in numbers(curve))
    assert curve.startswith("M0.0,0.0C5.0,0.0 5.0,5.0 10.0,5.0L20.0,5.0C")


def test_a_move_ends_one_ribbon_and_begins_the_next() -> None:
    moved = strand(0, 0, 0xFFFF, tenures=(Tenure("a", -10.0), Tenure("b", 40.0, Change.MOVED)))
    braid = draw_braid([moved], WINDOW)
    assert [(each.owner, each.before, each.left, each.right) for each in braid.ribbons] == [
        ("a", None, 0.0, 400.0),
        ("b", "a", 400.0, 1000.0),
    ]
    (mark,) = braid.marks
    assert (mark.kind, mark.x, mark.y, mark.text) == ("moved", 400.0, 200.0, "segment 0 moved from a to b")


def test_a_fail_over_after_a_gap_names_the_broker_that_was_lost() -> None:
    tenures = (Tenure("a", -10.0), Tenure("", 30.0, Change.UNSERVED), Tenure("b", 40.0, Change.FAILED_OVER))
    braid = draw_braid([strand(0, 0, 0xFFFF, tenures=tenures)], WINDOW)
    assert [each.owner for each in braid.ribbons] == ["a", "", "b"]
    (mark,) = braid.marks
    assert (mark.kind, mark.text) == ("failed-over", "segment 0 failed over from a to b")


def test_only_what_the_window_shows_is_drawn() -> None:
    past = strand(0, 0, 0xFFFF, sealed=-1.0, children=(1,))
    here = strand(1, 0, 0xFFFF, born=-1.0, parents=(0,))
    assert {each.segment for each in draw_braid([past, here], WINDOW).ribbons} == {1}
    upper = Window(start=0, end=100, first_hash=0, last_hash=RING / 2)
    assert {each.segment for each in draw_braid(SPLIT, upper).lanes} == {0, 1}


def test_labels_name_strands_that_go_on_and_have_room() -> None:
    braid = draw_braid(SPLIT, WINDOW)
    assert {(each.segment, each.owner) for each in braid.labels} == {(1, "b"), (2, "a")}
    crowd = [strand(number, number * 0x100, number * 0x100 + 0xFF) for number in range(256)]
    assert draw_braid(crowd, WINDOW).labels == []


# The window.


def test_a_zoom_keeps_the_moment_under_the_pointer_and_stays_inside() -> None:
    near = zoomed(WINDOW, 0.5, 250.0, 100.0, bounds=WINDOW)
    assert near.time(250.0) == pytest.approx(25.0)
    assert (near.end - near.start, near.last_hash - near.first_hash) == (50.0, RING / 2)
    assert near.y(RING / 4) == pytest.approx(100.0), "and the hash under it"
    far = zoomed(near, 10.0, 0.0, 0.0, bounds=WINDOW)
    assert (far.start, far.end, far.first_hash, far.last_hash) == (0.0, 100.0, 0.0, RING)
    only_time = zoomed(WINDOW, 0.5, 0.0, 0.0, bounds=WINDOW, ring=False)
    assert (only_time.end, only_time.last_hash) == (50.0, RING)


def test_a_drag_moves_the_window_and_stays_inside() -> None:
    near = zoomed(WINDOW, 0.5, 0.0, 0.0, bounds=WINDOW)
    moved = panned(near, -100.0, -40.0, bounds=WINDOW)
    assert moved.start == 5.0
    assert moved.first_hash == pytest.approx(RING / 20)
    assert panned(moved, -10_000.0, -10_000.0, bounds=WINDOW).end == 100.0
    assert panned(moved, 10_000.0, 10_000.0, bounds=WINDOW).first_hash == 0.0


def test_ticks_are_round_and_not_too_many() -> None:
    ticks = time_ticks(WINDOW, now=100.0)
    assert [each.text for each in ticks] == ["−1 min 30 s", "−1 min 15 s", "−1 min", "−45 s", "−30 s", "−15 s", "now"]
    assert ticks[-1].at == 1000.0
    assert [each.text for each in hash_ticks(WINDOW)][:3] == ["0000", "2000", "4000"]
    assert hash_ticks(WINDOW)[-1].text == "ffff"


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "now"), (45, "−45 s"), (180, "−3 min"), (5_400, "−1 h 30 min"), (7_200, "−2 h")]
)
def test_times_have_units(seconds: float, text: str) -> None:
    assert ago_text(seconds) == text


# SVG.


def test_a_change_of_owner_is_a_gradient_between_their_colours() -> None:
    svg = write_svg(draw_braid(SPLIT, WINDOW), {"a": 0, "b": 1}, now=100.0)
    assert "stop-color:var(--owner-0)" in svg
    assert "stop-color:var(--owner-1)" in svg
    assert svg.count("<linearGradient") == 1, "between segments 0 and 1; segment 2 has its parent's owner"
    assert 'data-tip="segment 0 → segment 2"' in svg


def test_names_are_escaped() -> None:
    svg = write_svg(draw_braid([strand(0, 0, 0xFFFF, owner='"><script>')], WINDOW), {}, now=100.0)
    assert "<script>" not in svg


def test_time_before_the_console_watched_is_marked() -> None:
    braid = draw_braid(SPLIT, WINDOW)
    assert "order, not time" in write_svg(braid, {}, now=100.0, watched_since=60.0)
    assert "earlier" not in write_svg(braid, {}, now=100.0, watched_since=-5.0)
