"""Queue subscriptions in the cluster's simulation: seeds that met a defect once, and all that such seeds meet."""

from __future__ import annotations

import pytest

from braid.testing.scenarios.cluster import QueueCounts, simulate_queues

FAILED_ONCE = {
    5: "a delivery that overtook the answer to its channel's opening had no placement; an accepted loss left a journal "
    "that told of lost messages",
    7: "one stale answer to a message made the other answer to it stale",
    9: "a dead letter that was stored with another count was tried again for ever",
    10: "a consumer that was closed left the opening of a dead letter's writer behind",
    18: "a queue whose journal had failed went on",
    1009: "a consumer gave up when no broker answered its start",
    1022: "a consumer waited for answers about a segment that retention had deleted",
    1064: "an owner that was frozen past its lease handed out what the next owner had settled",
    1142: "the checker took an ack for lost that was stored before the queue got another placement",
    40_030: "the record of an ended log became clean while its queues were being opened",
    40_113: "the checker had not heard of acks that an owner confirmed while it opened its other segments",
    40_163: "a queue that was set to another place went on sending on the channels of before",
    41_003: "a broker that lost its disk after the vote stored what others knew of the queue",
}
"""Seeds, and the defect that each has found. They have taken another course since."""
MEETS = {13: "votes of replicas", 41_016: "an owner that is lost while a follower lags"}
"""Seeds, and what each meets that those do not meet any more."""
SEEDS = (*FAILED_ONCE, *MEETS)
MET = (
    "queue_messages",
    "queue_acks",
    "acks_on_disks",
    "stale_answers",
    "time_outs",
    "nacks",
    "queues_opened",
    "states_handed_over",
    "moves",
    "votes",
    "power_losses",
    "layouts",
    "dead_letters",
    "client_crashes",
    "lags",
    "owners_lost_meanwhile",
)

pytestmark = pytest.mark.xdist_group("simulated-queues")  # The last test looks at the seeds of the others.
total = QueueCounts()


@pytest.mark.parametrize("seed", SEEDS)
def test_seeds_that_failed_once_hold_their_promises(seed: int) -> None:
    counts = simulate_queues(seed)
    assert counts.confirmed > 0
    total.add(counts)


def test_seeds_meet_everything_that_happens_to_queues() -> None:
    if total.seeds < len(SEEDS):
        pytest.skip("only some of the seeds have run")
    assert not [field for field in MET if not getattr(total, field)]
