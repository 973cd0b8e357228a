"""A log knows the eras of its producers whichever way its owner got it."""

from __future__ import annotations

import pytest

from braid.model.errors import OutOfSequence
from tests.kits.owner_changes import WAYS
from tests.kits.producer_eras import WRITER, at
from tests.kits.storage import World, make_batch


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
async def test_eras_are_known_however_the_log_got_its_owner(way: object, world: World) -> None:
    segment = await world.a.open()

    async def send(era: int, number: int, count: int = 4) -> tuple[int | None, bool]:
        appended = segment.append(make_batch(count, producer=WRITER, sequence=at(era, number)))
        await segment.log.confirm(appended)
        return appended.base_offset, appended.duplicate

    for era in (2, 5):
        for number in range(0, 24, 4):
            await send(era, number)
    segment = await way(world, segment)  # type: ignore[operator]
    assert await send(5, 20) == (44, True)
    assert await send(2, 20) == (20, True)
    assert await send(2, 0) == (None, True)
    for era, number in ((5, 28), (3, 0), (6, 4)):
        with pytest.raises(OutOfSequence):
            segment.append(make_batch(4, producer=WRITER, sequence=at(era, number)))
    base, duplicate = await send(9, 0)
    assert (base is not None and base >= 48, duplicate) == (True, False)
    assert await send(9, 0) == (base, True)
