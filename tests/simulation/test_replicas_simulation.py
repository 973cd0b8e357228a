"""Topics with replicas in the cluster's simulation: seeds that met a defect once, and all that such seeds meet."""

from __future__ import annotations

import pytest

from braid.testing.scenarios.cluster import Counts, simulate_replicas

FAILED_ONCE = {
    6: "a copy that began after retention did not know the producers of the deleted records",
    11: "a stream slept over a group that was being written when it began to wait",
    82: "the rest of a copy whose removal was interrupted became a witness",
    110: "a new copy was sent control batches that it could not take",
    204: "replicas that were all given up, and are back, kept the segment from being served",
    20_028: "an owner that was replaced while it changed its replicas failed instead of leaving that to the next one",
}
"""Seeds, and the defect that each has found. They have taken another course since."""
SEEDS = [*FAILED_ONCE, 7]
"""With one more, in which answers come late."""
MET = ("replica_changes", "votes", "lost_disks", "late_answers", "pauses", "confirms_on_disks")

pytestmark = pytest.mark.xdist_group("simulated-replicas")  # The last test looks at the seeds of the others.
total = Counts()


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_that_failed_once_hold_their_promises(seed: int) -> None:
    counts = simulate_replicas(seed)
    assert counts.confirmed > 0
    total.add(counts)


def test_seeds_meet_everything_that_happens_to_replicas() -> None:
    if total.seeds < len(SEEDS):
        pytest.skip("only some of the seeds have run")
    assert not [field for field in MET if not getattr(total, field)]
