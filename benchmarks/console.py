"""What an open console costs each broker: processor time of the brokers with and without one.

    python -m benchmarks.console [--quick]

Three brokers serve 1,000 segments of ten topics, each with a subscription. Nobody publishes, so all that brokers do
beside their own housekeeping is to answer the console. The limit is 2 % of a core for each broker. The pages differ in
what they ask: that of the cluster needs no topic's own statistics, the list of topics those of all ten, and a topic's
page those of one, with a proposal of auto-scaling.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import httpx

import braid
from benchmarks.report import Report
from braid.console.rest import Rest
from braid.console.watch.cluster_watch import ClusterWatch
from braid.testing.processes import BrokerProcess

CONFIG = "file_bytes = 1048576\nspare_files = 0\n"
LIMIT = 2.0
"""Percent of a core."""


def processor_s(broker: BrokerProcess) -> float:
    """Return the processor time that the broker's process has used."""
    fields = Path(f"/proc/{broker.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(brokers: Sequence[BrokerProcess], seconds: float) -> list[float]:
    """Return how much of a core each broker uses, in percent."""
    loop = asyncio.get_running_loop()
    before, began = [processor_s(each) for each in brokers], loop.time()
    await asyncio.sleep(seconds)
    took = loop.time() - began
    return [(processor_s(each) - used) / took * 100 for each, used in zip(brokers, before)]


async def with_page(
    brokers: Sequence[BrokerProcess], topics: Sequence[str], *, proposal: bool, settle_s: float, seconds: float
) -> list[float]:
    """Measure with an open page that shows these topics."""
    async with httpx.AsyncClient(trust_env=False) as http:
        watch = ClusterWatch(Rest(http, [each.ready["adminUrl"] for each in brokers]))
        with watch.page():
            watch.start()
            for topic in topics:
                watch.want(topic)
                if proposal:
                    watch.propose(topic)
            await asyncio.sleep(settle_s)
            used = await measure(brokers, seconds)
            await watch.close()
    return used


async def run(report: Report, *, brokers: int, topics: int, segments: int, settle_s: float, seconds: float) -> None:
    with tempfile.TemporaryDirectory(prefix="braid-console-") as folder:
        config = Path(folder) / "broker.toml"
        config.write_text(CONFIG)
        options = ("--config", str(config), "--metadata", f"sqlite:{folder}/metadata.db")
        started = [BrokerProcess(Path(folder) / f"b{n}", "--id", f"b{n}", *options) for n in range(brokers)]
        try:
            for each in started:
                each.start()
            names = [f"public/default/topic-{number}" for number in range(topics)]
            async with braid.connect(started[0].url) as client:
                for name in names:
                    await client.admin.create_topic(name, segments)
                    await client.admin.create_subscription(name, "reader")
            await asyncio.sleep(settle_s)
            shape = {"brokers": brokers, "segments": topics * segments}
            alone = await measure(started, seconds)
            report.add("no console", max(alone), "% of a core", **shape)
            for case, shown in (("cluster", []), ("topics", names), ("one topic", names[:1])):
                used = await with_page(started, shown, proposal=case == "one topic", settle_s=settle_s, seconds=seconds)
                more = [max(0.0, each - base) for each, base in zip(used, alone)]
                report.add(f"page: {case}", max(more), "% of a core", limit=LIMIT, **shape)
        finally:
            for each in started:
                each.__exit__()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    report = Report("console")
    if quick:
        asyncio.run(run(report, brokers=1, topics=2, segments=3, settle_s=0.2, seconds=0.5))
    else:
        asyncio.run(run(report, brokers=3, topics=10, segments=100, settle_s=20.0, seconds=40.0))
    report.print()
    if not quick:
        report.write_jsonl()
