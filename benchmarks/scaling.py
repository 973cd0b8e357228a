"""What more segments and a second broker add to the throughput of one topic.

    python -m benchmarks.scaling [--quick]

One producer process sends to a topic with 1, 2 and 4 segments, on one broker and on two that share their storage. All
processes share this machine, so two brokers can give more only where it has processors for them. `send_many` sends
batches of up to 1 MiB. `single` is 64 producers that wait for each record, which costs the broker most. The rounds of
one broker and of two alternate, and a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

from benchmarks.report import Report
from braid.cli.bench.broker import own_cluster
from braid.cli.bench.measure import measure_publish
from braid.cli.bench.workload import Mode
from braid.cli.target import Target, ask
from braid.client.client import Client

SEGMENTS = (1, 2, 4)
SIZE = 100
RECORDS = {Mode.SEND_MANY: 2_000_000, Mode.SINGLE: 30_000}
ROUNDS = 3
QUICK_SHARE = 100


async def create(client: Client, topic: str, segments: int) -> None:
    await client.admin.create_topic(topic, segments)


def measure(brokers: int, share: int) -> dict[tuple[Mode, int], float]:
    """Return the records per second, by mode and number of segments."""
    found = {}
    with own_cluster(brokers, shared=True) as cluster:
        target = Target(url=cluster.url)
        for segments in SEGMENTS:
            topic = f"bench-{segments}"
            ask(target, partial(create, topic=topic, segments=segments))
            for mode, records in RECORDS.items():
                done = measure_publish(target, topic, mode=mode, records=records // share, size=SIZE)
                found[mode, segments] = done.rate
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    count, share = (1, QUICK_SHARE) if quick else (ROUNDS, 1)
    rounds = [{brokers: measure(brokers, share) for brokers in (1, 2)} for _ in range(count)]
    report = Report("scaling")
    for mode in RECORDS:
        for segments in SEGMENTS:
            for brokers in (1, 2):
                rate = statistics.median(each[brokers][mode, segments] for each in rounds)
                ratio = statistics.median(each[brokers][mode, segments] / each[1][mode, 1] for each in rounds)
                name = f"{mode.value}, {segments} segments, {brokers} brokers"
                report.add(name, rate, "records/s", of_one_segment_on_one_broker=round(ratio, 2))
    report.print()
    report.write_jsonl()


if __name__ == "__main__":
    main()
