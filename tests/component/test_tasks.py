"""Work that runs at the same time and ends together."""

from __future__ import annotations

import asyncio

import pytest

from braid.ports.tasks import all_of


async def test_all_of_gives_the_results_in_order() -> None:
    assert await all_of(asyncio.sleep(delay, delay) for delay in (3, 1, 2)) == [3, 1, 2]
    assert await all_of([]) == []


async def test_all_of_raises_the_first_error_when_everything_has_ended() -> None:
    ended: list[float] = []

    async def work(delay: float, error: Exception | None = None) -> None:
        await asyncio.sleep(delay)
        ended.append(delay)
        if error is not None:
            raise error

    with pytest.raises(LookupError):
        await all_of([work(1, LookupError()), work(3), work(2, ValueError())])
    assert ended == [1, 2, 3]


async def test_all_of_leaves_nothing_running_when_it_is_cancelled() -> None:
    cancelled: list[int] = []

    async def work(number: int) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            cancelled.append(number)

    task = asyncio.ensure_future(all_of(map(work, range(2))))
    await asyncio.sleep(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == [0, 1]
