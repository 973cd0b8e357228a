"""Threads that work for a loop."""

from __future__ import annotations

import asyncio
import threading

from braid.ports.threads import Threads


def test_urgent_work_overtakes_work_that_waits() -> None:
    threads = Threads(1, "test")
    done: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def first() -> None:
        begun.set()
        go_on.wait(30)

    async def main() -> None:
        work = [threads.call(first), *(threads.call(done.append, f"usual {number}") for number in range(3))]
        begun.wait(30)
        urgent = [threads.call(done.append, f"urgent {number}", urgent=True) for number in range(2)]
        go_on.set()
        await asyncio.gather(*work, *urgent)
        assert await threads.call(lambda: "alone", urgent=True) == "alone"

    asyncio.run(main())
    threads.stop()
    assert done == ["urgent 0", "urgent 1", "usual 0", "usual 1", "usual 2"]
