"""One task goes round all segments of a broker; one that fails does not stop the round."""

import asyncio

from braid.model.errors import Fenced
from braid.model.ids import Offset
from braid.storage.history.housekeeper import Housekeeper
from braid.storage.retention import RetentionPolicy
from tests.kits.storage import World, fill


async def test_the_housekeeper_deletes_what_has_outlived_the_policy_and_reclaims_local_files(world: World) -> None:
    segment = await world.a.open()
    housekeeper = Housekeeper(round_s=60.0)
    needed: list[Offset | None] = [Offset(0)]
    housekeeper.add(segment, lambda: RetentionPolicy(max_age_s=30), lambda: needed[0])
    housekeeper.start()
    for _ in range(3):
        await fill(segment, 5)
        await segment.log.rotate()
    await segment.exporter.export_closed()
    await asyncio.sleep(61)
    assert len(segment.log.files) == 1, "chunks cover the others"
    assert segment.earliest == 0, "a subscription needs it"
    needed[0] = None
    await asyncio.sleep(60)
    assert segment.catalog.chunks == []
    assert housekeeper.errors == {}
    await housekeeper.stop()
    await segment.close()


async def test_a_segment_that_was_fenced_out_does_not_stop_the_round(world: World) -> None:
    old = await world.a.open()
    await fill(old, 5)
    await old.log.rotate()
    await old.exporter.export_closed()
    new = await world.b.open(accept_loss=True)
    await fill(new, 5)
    await new.log.rotate()
    await new.exporter.export_closed()
    housekeeper = Housekeeper()
    everything = RetentionPolicy(max_age_s=-1)
    housekeeper.add(old, lambda: everything)
    housekeeper.add(new, lambda: everything)
    await housekeeper.go_round()
    assert isinstance(housekeeper.errors[old], Fenced)
    assert list(housekeeper.errors) == [old]
    assert new.catalog.chunks == []
    housekeeper.remove(old)
    assert housekeeper.errors == {}
    await old.abandon()
    await new.close()


async def test_a_segment_that_is_removed_while_its_round_is_under_way_is_forgotten(world: World) -> None:
    segment = await world.a.open()
    housekeeper = Housekeeper()

    def removed() -> RetentionPolicy:
        housekeeper.remove(segment)
        raise Fenced("the segment has another owner")

    housekeeper.add(segment, removed)
    await housekeeper.go_round()
    assert housekeeper.errors == {}
    await segment.close()
