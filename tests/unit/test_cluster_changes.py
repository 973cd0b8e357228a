"""What the list of changes says of a segment, by its ownership record."""

from __future__ import annotations

import pytest

from braid.broker.admin.results.changes import ClusterChange
from braid.model.ids import Epoch, SegmentId
from braid.model.ownership import Move, Ownership, OwnershipState, ReplicaChange


def record(state: OwnershipState, move: str | None = None, replicas: tuple[str, ...] | None = None) -> Ownership:
    return Ownership(
        state=state,
        owner="a",
        epoch=Epoch(3),
        move=Move(to=move) if move is not None else None,
        change=ReplicaChange(replicas=replicas, write_quorum=2) if replicas is not None else None,
    )


@pytest.mark.parametrize(
    ("given", "kind", "to"),
    [
        (record(OwnershipState.SERVING, move="b"), "move", ("b",)),
        (record(OwnershipState.DRAINING, move="b"), "move", ("b",)),
        (record(OwnershipState.SEALED, move=""), "move", ()),
        (record(OwnershipState.SEALED), "move", ()),
        (record(OwnershipState.ASSIGNED), "opening", ()),
        (record(OwnershipState.RECOVERING), "vote", ()),
        (record(OwnershipState.SERVING, replicas=("a", "b", "c")), "replicas", ("a", "b", "c")),
    ],
)
def test_each_state_but_serving_is_a_change(given: Ownership, kind: str, to: tuple[str, ...]) -> None:
    change = ClusterChange.of_segment("public/default/orders", SegmentId(4), given)
    assert change is not None
    assert (change.kind, change.to, change.segments, change.source) == (kind, to, (4,), "a")
    assert change.step == given.state.value


def test_a_segment_that_is_served_and_stays_is_no_change() -> None:
    assert ClusterChange.of_segment("public/default/orders", SegmentId(4), record(OwnershipState.SERVING)) is None
