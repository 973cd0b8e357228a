"""Many tasks that wait together, and go on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

import pytest

from braid.wire import wakeup
from braid.wire.wakeup import PLAIN_VARIABLE, cancelled_itself, shows_callbacks, wait_on, wake

pytestmark = pytest.mark.real_loop


@pytest.fixture(params=["stepping", "plain"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs as asyncio allows it today, and as it would without asyncio's private parts."""
    monkeypatch.setattr(wakeup, "stepping", request.param == "stepping")


# A canary. When it fails, this Python has changed what `wake` relies on. Clients still work, by the plain way; mend
# `shows_callbacks` and `wake`, or name this Python in docs/support.md as one on which `send` is slower.


async def test_this_python_shows_the_callbacks_of_a_future() -> None:
    assert shows_callbacks(asyncio.get_running_loop().create_future())
    assert wakeup.stepping


@pytest.mark.parametrize("shown", [None, [], [print], [(print, None, 1)], 7])
async def test_callbacks_of_another_form_are_not_stepped(shown: Any) -> None:
    class Changed(asyncio.Future[None]):
        _callbacks = shown

    assert not shows_callbacks(Changed())
    assert not shows_callbacks(Closed())


def test_a_variable_switches_to_the_plain_way() -> None:
    program = "from braid.wire import wakeup; print(wakeup.stepping)"
    for value, stepping in (("1", "False"), ("", "True")):
        environment = {**os.environ, PLAIN_VARIABLE: value}
        ran = subprocess.run(
            [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stdout.strip() == stepping


class Closed(asyncio.Future[None]):
    """Shows nobody whom it would call."""

    @property
    def _callbacks(self) -> Any:
        raise AttributeError("_callbacks")


async def start(futures: list[asyncio.Future[None]], tasks_each: int) -> tuple[list[asyncio.Task[None]], list[str]]:
    went_on: list[str] = []

    async def wait(future: asyncio.Future[None], name: str) -> None:
        await wait_on(future)
        went_on.append(name)

    tasks = [
        asyncio.create_task(wait(future, f"{number}.{each}"))
        for number, future in enumerate(futures)
        for each in range(tasks_each)
    ]
    await asyncio.sleep(0)
    return tasks, went_on


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("shown", [True, False])
async def test_all_tasks_go_on_in_order_also_where_asyncio_shows_nothing(shown: bool) -> None:
    loop = asyncio.get_running_loop()
    futures: list[asyncio.Future[None]] = [loop.create_future() if shown else Closed(loop=loop) for _ in range(3)]
    tasks, went_on = await start(futures, 2)
    loop.call_soon(wake, futures)
    await asyncio.gather(*tasks)
    assert went_on == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert futures == []


async def test_they_go_on_in_the_turn_in_which_they_are_woken() -> None:
    loop = asyncio.get_running_loop()
    tasks, went_on = await start([future := loop.create_future()], 3)
    seen: list[int] = []

    def act() -> None:
        wake([future])
        seen.append(len(went_on))

    loop.call_soon(act)
    await asyncio.gather(*tasks)
    assert seen == [3]


async def test_an_error_in_the_middle_leaves_no_task_waiting() -> None:
    class StopEverythingError(BaseException):
        pass

    def explode(_: object) -> None:
        raise StopEverythingError

    loop = asyncio.get_running_loop()
    said: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: said.append(context))
    futures: list[asyncio.Future[None]] = [loop.create_future() for _ in range(3)]
    futures[1].add_done_callback(explode)
    tasks, went_on = await start(futures, 2)
    loop.call_soon(wake, futures)
    await asyncio.gather(*tasks)
    assert sorted(went_on) == ["0.0", "0.1", "1.0", "1.1", "2.0", "2.1"]
    assert [type(each["exception"]) for each in said] == [StopEverythingError]


@pytest.mark.usefixtures("either_way")
async def test_cancelling_one_is_told_from_being_woken_by_it() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    answers: dict[str, bool] = {}

    async def wait(name: str) -> None:
        try:
            await wait_on(future)
        except asyncio.CancelledError:
            answers[name] = cancelled_itself()

    tasks = {name: asyncio.create_task(wait(name)) for name in ("one", "other")}
    await asyncio.sleep(0)
    tasks["one"].cancel()
    await asyncio.gather(*tasks.values())
    assert answers == {"one": True, "other": False}
