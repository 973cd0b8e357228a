"""Makes a data folder as the present version writes it: `python -m tests.vectors.make_data_folder NAME`.

Folders of released formats stay as they are for ever: every later version must open them
(tests/integration/test_broker_processes.py). Run this only to add one for a new format.
"""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from pathlib import Path

import braid
from braid.testing.processes import BrokerProcess

FOLDERS = Path(__file__).parent / "data_folders"


async def fill(url: str) -> None:
    """30 keyed records in two segments; subscription `billing` has consumed the first 10 of them."""
    async with braid.connect(url) as client:
        await client.admin.create_topic("orders", segments=2)
        await client.admin.create_subscription("orders", "billing", start="earliest")
        async with client.producer("orders") as producer:
            for number in range(30):
                await producer.send(b"value-%d" % number, key=b"key-%d" % number)
        async with client.stream_consumer("orders", subscription="billing") as consumer:
            left = 10
            while left:
                message = await consumer.receive(timeout=10)
                assert message is not None
                await consumer.ack(message)
                left -= 1


def main() -> None:
    target = FOLDERS / sys.argv[1]
    with tempfile.TemporaryDirectory() as folder:
        with BrokerProcess(Path(folder) / "data") as broker:
            asyncio.run(fill(broker.url))
            assert broker.stop() == 0
        shutil.copytree(broker.data, target, ignore=shutil.ignore_patterns("*.lock", "*.alive", "*.spare"))


if __name__ == "__main__":
    main()
