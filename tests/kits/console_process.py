"""A `braid console` process, and a topic with traffic for it to show."""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import threading
import time
from typing import Any, Self

import braid
from braid.client.producing.producer import Producer
from braid.model.errors import BraidError
from braid.testing.processes import BRAID
from tests.kits.commands import environment


class ConsoleProcess:
    def __init__(self, admin_urls: list[str], *options: str) -> None:
        given = ["console", "--json", "--listen", "127.0.0.1:0", "--admin-url", ",".join(admin_urls), *options]
        self._process = subprocess.Popen(
            [*BRAID, *given], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
        )
        assert self._process.stdout is not None
        self.url: str = json.loads(self._process.stdout.readline())["url"]

    def stop(self) -> bytes:
        """End the console in order; returns what it complained about."""
        self._process.terminate()
        _, errors = self._process.communicate(timeout=30)
        return errors

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.communicate()


class Traffic:
    """Publishes to a topic from a thread, a little in waves, until it is stopped."""

    def __init__(self, url: str, topic: str, per_s: int = 400) -> None:
        self._url, self._topic, self._per_s = url, topic, per_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._publish()), name="traffic")

    async def _publish(self) -> None:
        client = braid.connect(self._url)
        try:
            await self._publish_waves(client.producer(self._topic, linger=0.01))
        except BraidError:
            pass  # The broker of a segment without replicas was killed, and nobody waits for its return.
        finally:
            await client.abandon()

    async def _publish_waves(self, producer: Producer) -> None:
        await producer.open()
        number = 0
        while not self._stopped.is_set():
            wave = 1 + 0.45 * math.sin(time.monotonic() / 4)
            for _ in range(round(self._per_s * wave / 20)):
                number += 1
                customer = f"c-{number * 7919 % 997}" if number % 25 else "c-wholesale"
                order: dict[str, Any] = {"order": number, "customer": customer, "amount": 17.5}
                producer.submit(json.dumps(order), order["customer"], {"source": b"shop"})
            await asyncio.sleep(0.05)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()
