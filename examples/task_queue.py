"""A task queue: handler functions, retries with back-off, dead letters, and workers that stop gracefully.

    python examples/task_queue.py [--tasks 120] [--seconds 60]
    python examples/task_queue.py --worker NAME --url braid://host:port

The first form starts a broker and two workers, each a process, and sends them tasks. Emails succeed. Images succeed at
the third attempt. Charges never succeed: after four attempts they are dead letters. Meanwhile one worker is told to
stop. In the end, every task is done exactly once, or is a dead letter. What is shown is checked.

The second form is a worker as you would write one, from `Task` to `Worker`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import braid
from braid.client.client import Client
from braid.client.consuming.queue import QueueConsumer
from braid.client.producing.producer import Producer
from braid.model.message import QueueMessage
from braid.testing.processes import BrokerProcess

TASKS, SUBSCRIPTION = "tasks", "workers"
DONE = "tasks-done"
DEAD_LETTERS = "tasks-dead"
MAX_ATTEMPTS = 4
IN_HAND = 5
"""How many tasks a worker does at the same time."""
PREFETCH = 20
"""How many messages a worker has at most: those in hand, and the next ones."""
FIRST_DELAY_S, MAX_DELAY_S = 0.1, 5.0
COLOURS = sys.stdout.isatty() and "NO_COLOR" not in os.environ


# Handlers: a function for each kind of task. A handler that raises an error is tried again later.


class Task(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]
    attempt: int
    """1: the first."""


Handler = Callable[[Task], Awaitable[None]]
HANDLERS: dict[str, Handler] = {}


def task(handler: Handler) -> Handler:
    """Register a function as the handler of the tasks that have its name."""
    HANDLERS[handler.__name__] = handler
    return handler


@task
async def send_email(task: Task) -> None:  # noqa: ARG001 (nobody gets this email)
    await asyncio.sleep(0.02)


@task
async def resize_image(task: Task) -> None:
    await asyncio.sleep(0.02)
    if task.attempt < 3:
        raise ConnectionError("the image service is busy")


@task
async def charge_card(task: Task) -> None:
    raise ValueError(f"card {task.arguments['card']} has expired")


# The worker.


class Worker:
    """Takes tasks from the queue, and calls their handlers."""

    def __init__(self, consumer: QueueConsumer, results: Producer, report: Callable[..., None]) -> None:
        self._consumer = consumer
        self._results = results
        self._report = report
        self._room = asyncio.Semaphore(IN_HAND)

    async def run(self, stopping: asyncio.Event) -> None:
        """Work until told to stop, then finish what is in hand: the task group waits for it."""
        async with asyncio.TaskGroup() as in_hand:
            while not stopping.is_set():
                await self._room.acquire()
                message = None if stopping.is_set() else await self._consumer.receive(timeout=0.2)
                if message is None:
                    self._room.release()
                else:
                    in_hand.create_task(self._handle(message))

    async def _handle(self, message: QueueMessage) -> None:
        order = json.loads(message.value)
        task = Task(order["id"], order["task"], order["arguments"], attempt=message.redelivery_count + 1)
        try:
            await HANDLERS[task.name](task)
        except Exception as error:
            delay_s = backoff_s(task.attempt)
            await self._consumer.nack(message, delay=delay_s, reason=f"{type(error).__name__}: {error}")
            self._report(task=task.id, attempt=task.attempt, error=str(error), delay_s=delay_s)
        else:
            await self._results.send(task.id)
            await self._consumer.ack(message)  # From now on, no worker gets this task again.
            self._report(task=task.id, attempt=task.attempt)
        finally:
            self._room.release()


def backoff_s(attempt: int) -> float:
    """Twice as long after each failure."""
    return min(FIRST_DELAY_S * 2.0 ** (attempt - 1), MAX_DELAY_S)


async def work(url: str, name: str) -> None:
    """Run one worker until SIGTERM."""

    def report(**fields: object) -> None:
        sys.stdout.write(json.dumps({"worker": name, **fields}) + "\n")
        sys.stdout.flush()

    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    async with (
        braid.connect(url) as client,
        client.producer(DONE) as results,
        client.queue_consumer(TASKS, SUBSCRIPTION, name=name, prefetch=PREFETCH) as consumer,
    ):
        report(ready=True)
        await Worker(consumer, results, report).run(stopping)
    # Leaving the block gave all messages back that the worker had not begun. Other workers get them immediately.


# The demonstration.


class Report(NamedTuple):
    at_s: float
    worker: str
    task: str
    attempt: int
    error: str
    delay_s: float


class Workers:
    """Worker processes, and what they report."""

    def __init__(self, url: str) -> None:
        self.reports: list[Report] = []
        self._url = url
        self._began = 0.0
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def start(self, name: str) -> None:
        command = [sys.executable, __file__, "--worker", name, "--url", self._url]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        self._processes[name] = process
        assert process.stdout is not None
        assert await process.stdout.readline(), f"worker {name} did not start"
        self._readers[name] = asyncio.create_task(self._read(process))

    async def stop(self, name: str) -> int:
        """Send SIGTERM; return the exit code."""
        process = self._processes.pop(name)
        process.terminate()
        await self._readers.pop(name)
        return await process.wait()

    async def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            await process.wait()

    async def until_handled(self, count: int) -> None:
        """Return when the workers have handled so many tasks, and each of them has done one."""
        while len(self.reports) < count or not all(map(self.done_by, self._processes)):
            for name, process in self._processes.items():
                assert process.returncode is None, f"worker {name} ended"
            await asyncio.sleep(0.01)

    def done_by(self, name: str) -> int:
        return sum(each.worker == name and not each.error for each in self.reports)

    def saw_all_attempts_of(self, name: str) -> bool:
        """A message that goes to a worker while it stops may count as an attempt, although no handler sees it."""
        attempts = [each.attempt for each in self.reports if each.task == name]
        return attempts == list(range(1, len(attempts) + 1))

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            told = json.loads(line)
            self._began = self._began or time.monotonic()
            at_s = time.monotonic() - self._began
            error, delay_s = told.get("error", ""), told.get("delay_s", 0.0)
            self.reports.append(Report(at_s, told["worker"], told["task"], told["attempt"], error, delay_s))


async def demonstrate(url: str, count: int) -> None:
    async with braid.connect(url) as client:
        title(f"A queue of tasks. A task that fails {MAX_ATTEMPTS} times is a dead letter.")
        for topic in (TASKS, DONE, DEAD_LETTERS):
            await client.admin.create_topic(topic, segments=1)
        await client.admin.create_subscription(
            TASKS, SUBSCRIPTION, kind="queue", max_deliveries=MAX_ATTEMPTS, dead_letter_topic=DEAD_LETTERS
        )
        detail("queue", f"topic {TASKS}, subscription {SUBSCRIPTION}")
        detail("dead letters", f"topic {DEAD_LETTERS}")

        workers = Workers(url)
        try:
            title(
                f"Two workers start, anna and ben. Each does {IN_HAND} tasks at a time, and has up to {PREFETCH} here."
            )
            await asyncio.gather(workers.start("anna"), workers.start("ben"))
            tasks = await send_tasks(client, count)
            for kind, number in Counter(name for name, _ in tasks.values()).items():
                detail(kind, f"{number} tasks")
            await workers.until_handled(count // 3)
            detail("done so far", f"{workers.done_by('anna')} by anna, {workers.done_by('ben')} by ben")

            title("anna gets SIGTERM: she finishes what she has in hand, and gives the rest back.")
            before = len(workers.reports)
            code = await workers.stop("anna")
            finished = [each for each in workers.reports[before:] if each.worker == "anna"]
            failed = sum(bool(each.error) for each in finished)
            detail("finished after the signal", f"{len(finished)} tasks; {failed} of them failed")
            detail("exit code", f"{code}")
            assert code == 0

            title("ben does the others, and those that are tried again.")
            done, dead = await outcome(client, tasks)
            assert await workers.stop("ben") == 0
            detail("done", f"{workers.done_by('anna')} by anna, {workers.done_by('ben')} by ben")
        finally:
            await workers.end()
    for kind in ("resize_image", "charge_card"):
        names = [each for each, (name, _) in tasks.items() if name == kind]
        name = next((each for each in names if workers.saw_all_attempts_of(each)), names[0])
        show_life(workers.reports, name, dead)
    check(tasks, done, dead)


async def send_tasks(client: Client, count: int) -> dict[str, tuple[str, dict[str, Any]]]:
    """Send tasks of all kinds. Returns them by their ids."""
    tasks: dict[str, tuple[str, dict[str, Any]]] = {}
    for number in range(count):
        if number % 10 == 3:
            tasks[f"charge-{number}"] = ("charge_card", {"card": f"…{1000 + number}"})
        elif number % 10 in (1, 6):
            tasks[f"image-{number}"] = ("resize_image", {"width": 640})
        else:
            tasks[f"email-{number}"] = ("send_email", {"to": f"customer-{number}@example.com"})
    async with client.producer(TASKS) as producer:
        orders = ({"id": each, "task": name, "arguments": given} for each, (name, given) in tasks.items())
        await producer.send_many([json.dumps(order) for order in orders])
    return tasks


async def outcome(client: Client, tasks: dict[str, Any]) -> tuple[Counter[str], dict[str, dict[str, bytes]]]:
    """Read what was done, and the dead letters with their headers, until nothing is missing."""
    done, dead = Counter[str](), dict[str, dict[str, bytes]]()
    async with (
        client.checkpoint_consumer(DONE, start="earliest") as of_done,
        client.checkpoint_consumer(DEAD_LETTERS, start="earliest") as of_dead,
    ):
        while len(done) + len(dead) < len(tasks):
            if (message := await of_done.receive(timeout=0.05)) is not None:
                done[message.value.decode()] += 1
            elif (letter := await of_dead.receive(timeout=0.05)) is not None:
                dead[json.loads(letter.value)["id"]] = dict(letter.headers)
    return done, dead


def show_life(reports: list[Report], name: str, dead: dict[str, dict[str, bytes]]) -> None:
    title(f"The life of {name}:")
    mine = [each for each in reports if each.task == name]
    for each, later in zip(mine, [*mine[1:], None], strict=True):
        if not each.error:
            said = "done"
        elif later is not None:
            said = f"{each.error}; again after {each.delay_s:g} s"
            assert later.at_s - each.at_s > each.delay_s * 0.5, "it came too early"
        else:
            said = each.error
        detail(f"{each.at_s:5.2f} s  attempt {each.attempt}, {each.worker}", said)
    if name in dead:
        headers = dead[name]
        reason = headers["braid-dead-letter-reason"].decode()
        deliveries = headers["braid-dead-letter-deliveries"].decode()
        detail("         dead letter", f"{deliveries} deliveries, reason: {reason}")


def check(tasks: dict[str, tuple[str, dict[str, Any]]], done: Counter[str], dead: dict[str, dict[str, bytes]]) -> None:
    title("In the end:")
    detail("sent", f"{len(tasks)} tasks")
    detail("done", f"{len(done)}")
    detail("dead letters", f"{len(dead)}, in topic {DEAD_LETTERS}")
    detail("done twice", f"{sum(times > 1 for times in done.values())}")
    detail("lost", f"{len(tasks.keys() - done.keys() - dead.keys())}")
    hopeless = {each for each, (name, _) in tasks.items() if name == "charge_card"}
    assert set(dead) == hopeless
    assert done == Counter(tasks.keys() - hopeless)


def title(text: str) -> None:
    say(f"\n\x1b[1m{text}\x1b[0m" if COLOURS else f"\n{text}")


def detail(what: str, value: str) -> None:
    say(f"    {what:<32} {value}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=120, help=f"how many to send, at least {2 * PREFETCH}")
    parser.add_argument("--seconds", type=float, default=60.0, help="give up after so many")
    parser.add_argument("--worker", metavar="NAME", help="be a worker of this name, until SIGTERM")
    parser.add_argument("--url", help="the worker's broker")
    options = parser.parse_args()
    if options.worker:
        asyncio.run(work(options.url or "braid://127.0.0.1:6660", options.worker))
        return
    with (
        tempfile.TemporaryDirectory(prefix="braid-task-queue-") as folder,
        BrokerProcess(Path(folder) / "broker") as broker,
    ):
        count = max(options.tasks, 2 * PREFETCH)
        try:
            asyncio.run(asyncio.wait_for(demonstrate(broker.url, count), options.seconds))
        except TimeoutError:
            sys.exit(f"the tasks were not done within {options.seconds:g} s")


if __name__ == "__main__":
    main()
