"""Streams to followers on bad days: a real log, and followers that answer as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from braid.broker.replicas.stream import MAX_UNANSWERED
from braid.model.errors import DiskFull, TimedOut
from braid.model.ids import Epoch, Offset
from braid.model.log.replication import LogPosition
from braid.ports.disk import Buffer
from braid.testing.sim.disk import NO_FAULTS, DiskFaults
from braid.testing.sim.loop import Simulation
from tests.kits.followers import PAUSE_S, Followers, scene
from tests.kits.storage import make_batch
from tests.kits.waiting import until


class RecordingFollowers(Followers):
    """Followers that can also be full, answer nonsense, or be too slow to cut their copies."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: list[tuple[str, int, int]] = []
        """Broker, epoch and number of each session."""
        self.full: set[str] = set()
        self.nonsense = 0
        """So many sessions begin with an answer that cannot be read."""
        self.file_bases: dict[str, int] = {}
        """By broker: where its newest file begins, if not at 0."""
        self.repairs: list[str] = []
        """Requests to cut a copy, or to begin it anew. None of them is answered in time."""

    async def call(
        self, broker_id: str, name: str, arguments: dict[str, Any], payload: Sequence[Buffer] = (), timeout_s: float = 0
    ) -> Any:
        if name == "copy_append" and broker_id in self.full:
            raise DiskFull("no room")
        if name in ("copy_cut", "copy_reset"):
            self.repairs.append(name)
            raise TimedOut(f"broker {broker_id} did not answer")
        answer = await super().call(broker_id, name, arguments, payload, timeout_s)
        if name == "copy_begin":
            self.begun.append((broker_id, arguments["epoch"], arguments["session"]))
            answer["file_base"] = self.file_bases.get(broker_id, 0)
            if self.nonsense:
                self.nonsense -= 1
                answer["position"] = {"epoch": "?"}
        return answer


async def test_pieces_leave_in_their_order_when_a_link_is_ready_again(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        await until(lambda: followers.admitted)
        followers.takes["x"] = 100
        await owner.append(1)
        followers.link_is_ready.clear()
        for _ in range(3):
            await owner.append(1)
        assert followers.appended == 1
        followers.link_is_ready.set()
        await owner.append(1)
        await owner.log.confirmed.reached(5)
        assert followers.appended == 5  # Nothing was refused and sent again.


async def test_a_follower_that_answers_no_posted_piece_loses_its_session(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        await until(lambda: followers.admitted)
        await owner.append(1)
        await until(lambda: owner.replication.followers[0].error)
        assert "has answered nothing for 10 s" in owner.replication.followers[0].error


async def test_a_session_waits_for_the_disk_when_the_copy_is_ahead_of_it(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        followers.takes["x"] = 8
        owner.world.a.disk.faults = DiskFaults(stall=1.0, stall_s=(PAUSE_S, PAUSE_S))
        for _ in range(4):
            owner.log.append(make_batch())
        await until(lambda: followers.held["x"].end == 4)
        owner.replication.on_member("x")
        owner.world.a.disk.faults = NO_FAULTS
        await owner.log.confirmed.reached(4)
        await owner.append(4)
        await owner.log.confirmed.reached(8)
        assert followers.appended == 8  # Nothing was sent twice.


async def test_a_group_that_is_written_while_a_session_begins_is_sent(simulation: Simulation) -> None:
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "x", 2) as owner:
        await until(lambda: followers.admitted)
        followers.takes["x"] = 100
        await owner.append(4)
        await owner.log.confirmed.reached(4)
        owner.world.a.disk.faults = DiskFaults(sync_s=(0.05, 0.05), read_s=(0.01, 0.01))
        owner.log.append(make_batch())
        owner.replication.on_member("x")
        await owner.log.synced.reached(5)
        async with asyncio.timeout(PAUSE_S):
            await owner.log.confirmed.reached(5)


async def test_no_session_of_a_follower_has_the_number_of_an_earlier_one(simulation: Simulation) -> None:
    """A late request of an old session must not pass for one of the new session."""
    followers = RecordingFollowers()
    followers.begin("x", "y")
    followers.takes.update(x=100, y=100)
    async with scene(simulation, followers, "xy", 2) as owner:
        await until(lambda: len(followers.admitted) == 2)
        here = owner.record.owner
        await owner.write(owner.record.replicas_changed((here, "x"), 2))
        await until(lambda: len(owner.replication.followers) == 1)
        await owner.write(owner.record.replicas_changed((here, "x", "y"), 2))
        await until(lambda: len(followers.begun) == 3)
        assert len(set(followers.begun)) == 3


async def test_a_stream_that_broke_begins_again(simulation: Simulation) -> None:
    followers = RecordingFollowers()
    followers.begin("x")
    followers.takes["x"] = 100
    async with scene(simulation, followers, "x", 2) as owner:
        await until(lambda: followers.admitted)
        followers.nonsense = 1
        owner.replication.on_member("x")
        await until(lambda: not owner.replication.followers[0].in_sync)
        await until(lambda: owner.replication.followers[0].in_sync)


async def test_a_copy_that_is_cut_too_slowly_is_not_begun_anew(simulation: Simulation) -> None:
    """Others may not hold what it holds (I2). The next session asks again."""
    followers = RecordingFollowers()
    followers.begin("x")
    followers.takes["x"] = 100
    async with scene(simulation, followers, "x", 2) as owner:
        await until(lambda: followers.admitted)
        await owner.append(4)
        followers.held["x"] = LogPosition(epoch=Epoch(1), end=Offset(2))
        followers.file_bases["x"] = 2  # With control batches alone: they are cut away.
        owner.replication.on_member("x")
        await until(lambda: len(followers.repairs) > 2)
        assert {*followers.repairs} == {"copy_cut"}


async def test_a_follower_that_stores_nothing_is_asked_less_and_less_often(simulation: Simulation) -> None:
    followers = RecordingFollowers()
    followers.begin("x", "y")
    followers.takes.update(x=100, y=100)
    async with scene(simulation, followers, "xy", 2) as owner:
        await until(lambda: len(followers.admitted) == 2)
        followers.full.add("y")
        followers.begun.clear()
        await owner.append(1)
        await asyncio.sleep(60)
        assert len(followers.begun) < 20
        followers.full.clear()
        await until(lambda: [each.position.end for each in owner.replication.followers] == [1, 1])


async def test_only_members_end_a_log(simulation: Simulation) -> None:
    """A vote would not find the seal, nor the records before it."""
    followers = Followers()
    followers.begin("x")
    async with scene(simulation, followers, "xy", 2) as owner:
        await owner.append(3)
        followers.lost_admissions = 1_000
        followers.begin("y", end=3)
        followers.takes["y"] = 100
        sealing = asyncio.create_task(owner.log.seal())
        followers.held["y"] = LogPosition(epoch=Epoch(1), end=Offset(3), sealed=True)
        owner.replication.on_member("y")
        await asyncio.sleep(PAUSE_S)
        assert owner.log.confirmed.value == 0
        assert not sealing.done()
        followers.lost_admissions = 0
        await sealing
        assert owner.log.confirmed.value == 3


# Flow control.


async def sent_without_an_answer(simulation: Simulation, credit: int, batches: int, size: int) -> tuple[int, int]:
    """Let a follower with this credit answer nothing more; return how many pieces, and bytes, are sent to it."""
    followers = Followers()
    followers.begin("b")
    followers.credit = credit
    async with scene(simulation, followers, "b", 2) as found:
        for _ in range(batches):
            found.log.append(make_batch(body=bytes(size)))
            await found.log.flush()
        await asyncio.sleep(PAUSE_S)
        under_way = followers.pieces, followers.piece_bytes
        followers.take("b", batches)
        await found.log.confirmed.reached(batches)
        assert followers.appended == batches, "each record is sent once"
        return under_way


async def test_an_owner_sends_as_much_as_its_follower_grants_and_at_most_a_piece_more(simulation: Simulation) -> None:
    pieces, sent = await sent_without_an_answer(simulation, credit=20_000, batches=20, size=3_000)
    assert 20_000 - sent // pieces <= sent <= 20_000 + sent // pieces


async def test_an_owner_has_a_bounded_number_of_pieces_under_way(simulation: Simulation) -> None:
    pieces, _ = await sent_without_an_answer(simulation, credit=8 << 20, batches=MAX_UNANSWERED + 10, size=1)
    assert pieces == MAX_UNANSWERED


async def test_a_batch_that_is_larger_than_the_credit_goes_alone(simulation: Simulation) -> None:
    pieces, sent = await sent_without_an_answer(simulation, credit=2_000, batches=3, size=5_000)
    assert pieces == 1
    assert 5_000 < sent < 6_000
