"""What an owner counts: a real log, and followers that answer as the test says."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from braid.model.errors import NotEnoughReplicas
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.model.ownership import ReplicaChange
from braid.testing.sim.disk import DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.followers import NAME, PAUSE_S, Followers, scene
from tests.kits.storage import make_batch
from tests.kits.waiting import until


async def test_a_record_is_confirmed_when_enough_disks_hold_it(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x", "y")
    async with scene(simulation, followers, "xy", 3) as owner:
        await owner.append(7)
        await owner.append(3)
        followers.take("x", 10)
        assert await owner.stays(0)
        followers.take("y", 7)
        await owner.log.confirmed.reached(7)
        assert await owner.stays(7)
        followers.take("y", 10)
        await owner.log.confirmed.reached(10)


async def test_followers_get_a_batch_while_the_owners_disk_writes_it(simulation: Simulation) -> None:
    """What they hold first does not count before the owner's own disk has it."""
    followers = Followers()
    followers.begin("x", "y")
    async with scene(simulation, followers, "xy", 2) as owner:
        await until(lambda: len(followers.admitted) == 2)
        followers.takes.update(x=4, y=4)
        owner.world.a.disk.faults = DiskFaults(stall=1.0, stall_s=(PAUSE_S, PAUSE_S))
        for _ in range(4):
            owner.log.append(make_batch())
        await until(lambda: [each.position.end for each in owner.replication.followers] == [4, 4])
        assert owner.log.synced.value == 0
        assert owner.log.confirmed.value == 0
        await owner.log.confirmed.reached(4)
        assert owner.log.synced.value == 4


async def test_an_owner_does_not_begin_before_enough_disks_hold_its_first_batch(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x", epoch=0)
    followers.takes["x"] = -1
    with pytest.raises(NotEnoughReplicas, match="these lag behind or are down: x"):
        async with scene(simulation, followers, "x", 2):
            pass


async def test_a_copy_of_an_earlier_owners_records_does_not_count(simulation: Simulation) -> None:
    """A replica with a later epoch may win a vote without them. BEGIN of this epoch shows that it cannot."""
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "xy", 2) as owner:
        await owner.append(5)
        followers.begin("y", epoch=0, end=5)
        await until(lambda: any(each.position.end == 5 for each in owner.replication.followers))
        assert await owner.stays(0)
        followers.take("y", 6)
        await owner.append(1)
        await owner.log.confirmed.reached(6)


async def test_a_seal_of_an_earlier_owner_does_not_count_while_the_log_goes_on(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "xy", 2) as owner:
        await owner.append(5)
        followers.begin("y", epoch=0, end=5)
        followers.held["y"] = LogPosition(epoch=Epoch(0), end=Offset(5), sealed=True)
        await until(lambda: any(each.position.end == 5 for each in owner.replication.followers))
        assert await owner.stays(0)


async def test_what_a_follower_held_does_not_count_when_its_session_is_over(simulation: Simulation) -> None:
    """Its disk may have been replaced since."""
    followers = Followers()
    followers.begin("x", "y")
    async with scene(simulation, followers, "xy", 3) as owner:
        await owner.append(10)
        followers.take("x", 10)
        await until(lambda: owner.replication.followers[0].position.end == 10)
        followers.lose("x")
        owner.replication.on_member("x")
        await until(lambda: not owner.replication.followers[0].in_sync)
        followers.take("y", 10)
        assert await owner.stays(0)
        followers.begin("x", end=10)
        await owner.log.confirmed.reached(10)


async def test_batches_are_refused_while_too_few_followers_are_there(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        owner.log.append(make_batch())
        followers.lose("x")
        await until(lambda: not owner.replication.followers[0].in_sync)
        with pytest.raises(NotEnoughReplicas, match="2 of its 2 replicas must hold a record"):
            owner.log.append(make_batch())
        followers.begin("x")
        followers.take("x", 10)
        await owner.log.confirmed.reached(1)
        owner.log.append(make_batch())
        await owner.log.confirmed.reached(2)


async def test_a_follower_is_admitted_only_when_it_holds_all_that_is_confirmed(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "xy", 2) as owner:
        await until(lambda: followers.admitted == ["x"])
        await owner.append(4)
        await owner.append(6)
        followers.take("x", 10)
        await owner.log.confirmed.reached(10)
        followers.begin("y", end=4)
        await asyncio.sleep(30)
        assert owner.replication.followers[1].in_sync
        assert followers.admitted == ["x"]
        followers.take("y", 10)
        await until(lambda: len(followers.admitted) == 2)


async def test_a_segment_is_handed_to_a_member_only(simulation: Simulation) -> None:
    """A vote must find the next owner, if that owner dies before it serves."""
    followers = Followers()
    followers.begin("x")
    followers.takes["x"] = 100
    followers.lost_admissions = 10
    async with scene(simulation, followers, "x", 1) as owner:
        bringing = asyncio.ensure_future(owner.replication.brought_to("x", 0))
        await until(lambda: followers.lost_admissions == 0)
        assert owner.replication.followers[0].in_sync
        assert not bringing.done()
        await bringing
        assert owner.replication.followers[0].member


async def test_a_follower_is_admitted_though_an_answer_is_lost_and_nothing_is_sent(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x", "y")
    followers.lost_admissions = 3
    async with scene(simulation, followers, "xy", 2):
        await until(lambda: sorted(followers.admitted) == ["x", "y"])


class GatedFollowers(Followers):
    """Followers whose answers to some calls come when the test says so."""

    def __init__(self, *calls: str) -> None:
        super().__init__()
        self.gates = {call: asyncio.Event() for call in calls}
        self.waiting: list[str] = []

    async def call(self, broker_id: str, name: str, *arguments: Any, **more: Any) -> Any:
        if name in self.gates:
            self.waiting.append(name)
            await self.gates[name].wait()
        return await super().call(broker_id, name, *arguments, **more)


@pytest.mark.parametrize("turns", range(4))
async def test_a_follower_is_admitted_though_its_session_counts_just_when_the_last_try_ends(
    simulation: Simulation, turns: int
) -> None:
    """The next session does not count yet when the try of the last one ends. It does some turns of the loop later."""
    followers = GatedFollowers("copy_admit")
    followers.begin("x")
    async with scene(simulation, followers, "x", 1) as owner:
        await until(lambda: followers.waiting == ["copy_admit"])
        followers.begin("x", epoch=0)
        followers.gates["copy_append"] = asyncio.Event()
        owner.replication.on_member("x")
        await until(lambda: followers.waiting == ["copy_admit", "copy_append"])
        followers.gates["copy_admit"].set()
        for _ in range(turns):
            await asyncio.sleep(0)
        followers.gates["copy_append"].set()
        await until(lambda: owner.replication.followers[0].member)


async def test_a_follower_that_lost_its_disk_while_it_was_admitted_is_not_admitted(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "xy", 2) as owner:
        await until(lambda: followers.admitted == ["x"])
        await owner.append(10)
        followers.take("x", 10)
        await owner.log.confirmed.reached(10)
        followers.lost_admissions = 1
        followers.begin("y", end=10)
        await until(lambda: followers.lost_admissions == 0)
        followers.begin("y")
        owner.replication.on_member("y")
        await asyncio.sleep(PAUSE_S)
        assert owner.replication.followers[1].in_sync
        assert followers.admitted == ["x"], "a vote with y would miss what x and the owner hold"
        followers.take("y", 10)
        await until(lambda: len(followers.admitted) == 2)


async def test_only_members_confirm_a_record(simulation: Simulation) -> None:
    """A vote would not find the others."""
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "xy", 2) as owner:
        await owner.append(3)
        followers.lost_admissions = 1_000
        followers.begin("y", end=3)
        assert await owner.stays(0)
        followers.lost_admissions = 0
        await owner.log.confirmed.reached(3)


async def test_no_replica_leaves_before_the_one_that_is_added_holds_everything(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x", "y")
    async with scene(simulation, followers, "xy", 2) as owner:
        here = owner.record.owner
        await owner.append(2)
        followers.take("x", 2)
        followers.take("y", 2)
        await owner.log.confirmed.reached(2)
        await owner.write(owner.record.changing(ReplicaChange(replicas=(here, "x", "z"), write_quorum=2)))
        await asyncio.sleep(PAUSE_S)
        assert owner.record.replicas == (here, "x", "y"), "x and the owner would do for the quorum"
        followers.begin("z", end=2)
        await until(lambda: owner.record.replicas == (here, "x", "z"))


async def test_while_replicas_change_both_sets_must_hold_a_record(simulation: Simulation) -> None:
    """The record may be written at any moment: a vote of the old set and a vote of the new set find everything."""
    followers = Followers()
    followers.begin("x", "y", "z")
    async with scene(simulation, followers, "x", 2) as owner:
        here = owner.record.owner
        await until(lambda: owner.replication.followers[0].member)
        owner.store.disconnect()  # Nothing can be written now, and the owner goes on trying.
        known = owner.owners.known(NAME)
        assert known is not None
        changing = known.value.changing(ReplicaChange(replicas=(here, "y", "z"), write_quorum=3))
        owner.replication.follow(known._replace(value=changing))
        await until(lambda: len([each for each in owner.replication.followers if each.member]) == 3)
        await asyncio.sleep(PAUSE_S)
        await owner.append(3)
        await owner.append(2)
        followers.take("y", 5)
        followers.take("z", 3)
        assert await owner.stays(0), "the old set must hold it, too"
        followers.take("x", 5)
        await owner.log.confirmed.reached(3)
        assert await owner.stays(3), "the new set must hold it, too"


async def test_replicas_change_when_the_new_set_holds_everything(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        here = owner.record.owner
        await owner.append(2)
        await owner.append(3)
        followers.take("x", 5)
        await owner.log.confirmed.reached(5)
        followers.begin("y", end=2)
        await owner.write(owner.record.changing(ReplicaChange(replicas=(here, "y"), write_quorum=2)))
        await asyncio.sleep(PAUSE_S)
        assert owner.record.replicas == (here, "x")
        followers.take("y", 5)
        await until(lambda: owner.record.replicas == (here, "y"))
        assert owner.record.change is None
        await until(lambda: [each.broker for each in owner.replication.followers] == ["y"])


async def test_an_owner_that_was_replaced_leaves_the_replicas_to_the_next_one(simulation: Simulation) -> None:
    """The new set holds everything in the moment in which the view shows the vote. The broker hears of it later."""
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        here = owner.record.owner
        await owner.append(5)
        followers.take("x", 5)
        await owner.log.confirmed.reached(5)
        followers.begin("y", end=2)
        await owner.write(owner.record.changing(ReplicaChange(replicas=(here, "y"), write_quorum=2)))
        owner.owners.table.on_change.clear()
        known = owner.owners.known(NAME)
        assert known is not None
        revision = await owner.owners.swap(NAME, known.revision, known.value.recovering())
        assert revision is not None
        await owner.owners.view.caught_up(revision)
        followers.take("y", 5)
        await until(lambda: all(each.in_sync and each.member for each in owner.replication.followers))
        await asyncio.sleep(PAUSE_S)
        assert owner.record == known.value.recovering()
