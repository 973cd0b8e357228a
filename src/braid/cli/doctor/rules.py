"""What the facts mean, and what to change: pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Final

import msgspec

from braid.cli.doctor.facts import (
    BrokerFacts,
    ClusterFacts,
    Facts,
    FolderFacts,
    MachineFacts,
    StorageFacts,
    StoreFacts,
)
from braid.ports.open_files import connections_within

LEAST_PROCESSES: Final = 512
"""A broker has some 30 threads; the rest is room for what else the user runs."""
SLOW_SYNC_MS: Final = 25.0
"""A producer that waits for each confirm sends 40 records a second then. A disk with a battery or flash needs 1 ms."""
VERY_SLOW_SYNC_MS: Final = 250.0
LOW_FREE: Final = 0.1
LEAST_FREE_BYTES: Final = 2 << 30
"""Two closed files of a log, the preallocated files and the metadata."""
SLOW_METADATA_MS: Final = 100.0
"""A move takes some ten transactions, each with a few of these."""
CLOCK_S: Final = 2.0
"""A clock is read to a second."""
WRONG_CLOCK_S: Final = 60.0
SLOW_NETWORK_MS: Final = 100.0
SLOW_STORAGE_MS: Final = 2_000.0

_STEPS: Final = {
    "create": "objects cannot be created",
    "read": "an object that was just created cannot be read",
    "list": "an object that was just created is not listed",
    "refuse": "an object that exists can be overwritten",
    "delete": "objects cannot be deleted",
}


class Level(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    level: Level
    subject: str
    """The machine, a folder, a broker: what the finding is about."""
    text: str
    advice: str = ""
    """What to change; empty: nothing."""


def judge(facts: Facts) -> list[Finding]:
    """Return what is good and what is not, in the order in which the facts were gathered."""
    found = [*_of_machine(facts.machine)]
    if facts.folder is not None:
        found += _of_folder(facts.folder)
    if facts.metadata is not None:
        found += _of_metadata(facts.metadata)
    if facts.storage is not None:
        found += _of_storage(facts.storage)
    if facts.cluster is not None:
        found += _of_cluster(facts.cluster, facts.machine)
    return found


def is_healthy(findings: Sequence[Finding]) -> bool:
    """Tell whether nothing is a problem. Warnings are no problems."""
    return all(finding.level is not Level.PROBLEM for finding in findings)


def percentile(sorted_values: Sequence[float], part: float) -> float:
    return sorted_values[min(int(len(sorted_values) * part), len(sorted_values) - 1)] if sorted_values else 0.0


def _ok(subject: str, text: str) -> Finding:
    return Finding(level=Level.OK, subject=subject, text=text)


def _warning(subject: str, text: str, advice: str) -> Finding:
    return Finding(level=Level.WARNING, subject=subject, text=text, advice=advice)


def _problem(subject: str, text: str, advice: str) -> Finding:
    return Finding(level=Level.PROBLEM, subject=subject, text=text, advice=advice)


def _of_machine(machine: MachineFacts) -> Iterator[Finding]:
    most = connections_within(machine.open_files)
    if most < machine.max_connections:
        yield _warning(
            "machine",
            f"A process may open {machine.open_files:,} files, so a broker takes {most:,} connections instead of "
            f"{machine.max_connections:,}.",
            "Raise the hard limit: LimitNOFILE= in the systemd unit, `ulimits` of the container, or `ulimit -Hn`.",
        )
    else:
        yield _ok("machine", f"A process may open {machine.open_files:,} files.")
    if machine.processes is not None and machine.processes < LEAST_PROCESSES:
        yield _warning(
            "machine",
            f"This user may have {machine.processes:,} processes and threads.",
            f"Allow at least {LEAST_PROCESSES}: TasksMax= in the systemd unit, or `ulimit -Hu`.",
        )
    if not machine.kernel_sync:
        yield _warning(
            "machine",
            "The package caio is missing, so a broker syncs its logs by threads.",
            "Install `braidmq[server]` on Linux; small commits then take less processor time.",
        )
    if machine.clock_synchronised is False:
        yield _warning(
            "machine",
            "The kernel says that nothing keeps this machine's clock right.",
            "Run chrony or systemd-timesyncd: retention, delayed messages and tokens go by the clock.",
        )


def _of_folder(folder: FolderFacts) -> Iterator[Finding]:
    subject = "data folder"
    if folder.error:
        yield _problem(
            subject, f"{folder.path} cannot be written: {folder.error}.", "Give it to the user that runs the broker."
        )
        return
    if folder.network_filesystem:
        yield _problem(
            subject,
            f"{folder.path} is on {folder.network_filesystem}, to which other machines may write.",
            "Use a disk of this machine for --data; shared history goes to --storage.",
        )
    part = folder.free_bytes / folder.size_bytes if folder.size_bytes else 1.0
    text = f"{_gigabytes(folder.free_bytes)} of {_gigabytes(folder.size_bytes)} are free at {folder.path}."
    if folder.free_bytes < LEAST_FREE_BYTES:
        yield _problem(subject, text, "Make room: a broker on a full disk refuses publishes.")
    elif part < LOW_FREE:
        yield _warning(subject, text, "Make room before it is full, or shorten the retention of topics.")
    else:
        yield _ok(subject, text)
    slow = percentile(folder.sync_ms, 0.9)
    text = f"A small write with a sync takes {percentile(folder.sync_ms, 0.5):.1f} ms, one in ten {slow:.1f} ms."
    if slow >= VERY_SLOW_SYNC_MS:
        yield _problem(subject, text, "Use another disk: every confirmed publish waits for such a sync.")
    elif slow >= SLOW_SYNC_MS:
        yield _warning(subject, text, "Use flash, or a controller with a protected cache: publishes wait for syncs.")
    elif folder.sync_ms:
        yield _ok(subject, text)


def _of_metadata(store: StoreFacts) -> Iterator[Finding]:
    subject = "metadata store"
    if store.error:
        yield _problem(
            subject, f"{store.url} does not answer: {store.error}.", "Without it no segment moves or is opened."
        )
        return
    slow = percentile(store.read_ms, 0.9)
    text = f"{store.url} answers in {percentile(store.read_ms, 0.5):.1f} ms, one time in ten in {slow:.1f} ms."
    if slow >= SLOW_METADATA_MS:
        yield _warning(
            subject, text, "Put it nearer to the brokers, or on a faster disk: moves and leases wait for it."
        )
    else:
        yield _ok(subject, text)
    yield from _of_clock(subject, store.clock_ahead_s)


def _of_storage(storage: StorageFacts) -> Iterator[Finding]:
    subject = "storage"
    failed = next(((step, error) for step, error in storage.steps.items() if error), None)
    if failed is None:
        text = f"Objects can be created, read, listed and deleted at {storage.url}, and are never overwritten."
        if storage.create_ms >= SLOW_STORAGE_MS:
            yield _warning(
                subject,
                f"{text} Creating a small one took {storage.create_ms:,.0f} ms.",
                "Look at the network between the brokers and the storage: hand-overs wait for it.",
            )
        else:
            yield _ok(subject, text)
        return
    step, error = failed
    advice = {
        "refuse": "Do not use this storage: a broker that was replaced could overwrite the chunks of its successor.",
        "delete": "Allow deletions: retention would fill the storage for ever.",
    }.get(step, "Look at the address, the credentials in the environment, and the rights of this account.")
    yield _problem(subject, f"{_STEPS[step].capitalize()} at {storage.url}: {error}.", advice)


def _of_cluster(cluster: ClusterFacts, machine: MachineFacts) -> Iterator[Finding]:
    if cluster.answered:
        yield _problem(
            "cluster",
            f"{cluster.url} answers, but cannot be used: {cluster.error}.",
            "Mend this and look again: nothing else is known of the cluster.",
        )
        return
    if cluster.error:
        yield _problem(
            "cluster", f"No broker answers at {cluster.url}: {cluster.error}.", "Start one, or name another by --url."
        )
        return
    for broker in cluster.brokers:
        yield from _of_broker(broker)
    leaders = [broker.id for broker in cluster.brokers if broker.leader]
    if not leaders:
        yield _problem(
            "cluster", "No broker leads: nothing moves, and nothing new is served.", "Look at the metadata store."
        )
    versions = sorted({broker.version for broker in cluster.brokers if broker.version})
    if len(versions) > 1:
        yield _warning(
            "cluster",
            f"The brokers have different versions: {', '.join(versions)}.",
            "Finish the upgrade: a feature is used only when all brokers know it.",
        )
    elif versions and versions != [machine.version]:
        yield _warning(
            "cluster",
            f"The brokers are of version {versions[0]}, this command of {machine.version}.",
            "Use the command of the brokers' version.",
        )
    clocks = [broker.clock_ahead_s for broker in cluster.brokers if broker.clock_ahead_s is not None]
    if clocks and max(clocks) - min(clocks) > 2 * CLOCK_S:
        yield _warning(
            "cluster",
            f"The clocks of the brokers differ by {max(clocks) - min(clocks):.0f} s.",
            "Run chrony or systemd-timesyncd on each: a segment that moves takes another clock for its retention.",
        )


def _of_broker(broker: BrokerFacts) -> Iterator[Finding]:
    subject = f"broker {broker.id}"
    if broker.state == "down":
        yield _problem(
            subject,
            f"It is down, and {broker.segments:,} segments wait for it.",
            "Start it again; if its disk is lost, `braid topic recover` accepts the loss by name.",
        )
        return
    if broker.address_error:
        yield _problem(
            subject,
            f"Clients cannot reach it at {broker.address}: {broker.address_error}.",
            "Set --advertise to an address that clients and other brokers reach, and open the port.",
        )
    else:
        text = f"It is {broker.state} and answers at {broker.address} in {broker.round_trip_ms:.1f} ms."
        if broker.round_trip_ms >= SLOW_NETWORK_MS:
            yield _warning(subject, text, "Look at the network and at its processor: confirms take at least as long.")
        else:
            yield _ok(subject, text)
    if broker.admin_error:
        yield _warning(
            subject,
            f"Its admin port does not answer at {broker.admin}: {broker.admin_error}.",
            "Set --admin to an address that monitoring reaches, and open the port only to it.",
        )
    elif broker.ready is False:
        yield _problem(
            subject, "It is not ready: it is starting, stopping, or without a lease.", "Look at the broker's log."
        )
    yield from _of_clock(subject, broker.clock_ahead_s)


def _of_clock(subject: str, ahead_s: float | None) -> Iterator[Finding]:
    if ahead_s is None or abs(ahead_s) <= CLOCK_S:
        return
    direction = "ahead of" if ahead_s > 0 else "behind"
    text = f"Its clock is {abs(ahead_s):,.0f} s {direction} this machine's."
    advice = "Run chrony or systemd-timesyncd: retention, delayed messages and tokens go by the clock."
    yield _problem(subject, text, advice) if abs(ahead_s) > WRONG_CLOCK_S else _warning(subject, text, advice)


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"
